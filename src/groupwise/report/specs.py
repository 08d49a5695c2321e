"""The report's own charts: which metrics stand together, under which words. `groupwise.algo.metrics` defines the metrics."""

from __future__ import annotations

from dataclasses import dataclass

OTHER = "Other metrics"  # the section of those that are named nowhere here


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What to draw: metrics, or patterns of them, each with its label; in a pattern's label `*` is what it matched.

    `spread` is the metric of a standard deviation, drawn around the first curve.
    """

    key: str
    title: str
    note: str
    section: str
    series: tuple[tuple[str, str], ...]
    spread: str | None = None
    log: bool = False
    wide: bool = False
    noise: float = 0.0  # values that differ by no more than this are equal but for rounding
    marked: tuple[str, ...] = ()  # the series that are measured now and then


SPECS = (
    Spec(
        key="reward",
        title="Reward",
        note="lines: mean over a step's completions, ± the standard deviation inside a group; dots: held-out prompts",
        section="Learning",
        series=(("reward/mean", "training"), ("eval/*/reward", "held-out, *")),
        spread="reward/std",
        wide=True,
        marked=("eval/*/reward",),
    ),
    Spec(
        key="held_out",
        title="Held-out reward by column",
        note="",
        section="Learning",
        series=(("eval/*/*/reward", "*"),),
        marked=("eval/*/*/reward",),
    ),
    Spec(
        key="passed",
        title="Solved in k tries",
        note="held-out prompts",
        section="Learning",
        series=(("eval/*/pass@*", "*"),),
        marked=("eval/*/pass@*",),
    ),
    Spec(
        key="rewards",
        title="Each reward",
        note="mean over a step's completions",
        section="Learning",
        series=(("reward/*/mean", "*"),),
    ),
    Spec(
        key="loudness",
        title="How loud each reward is",
        note="share of the spread inside a group",
        section="Learning",
        series=(("reward/*/share", "*"),),
    ),
    Spec(
        key="zero_variance",
        title="Groups without signal",
        note="share of groups whose rewards are all equal",
        section="Learning",
        series=(("reward/frac_zero_std", "share"),),
    ),
    Spec(
        key="kl",
        title="KL from the reference",
        note="nats per token",
        section="Policy",
        series=(("kl/mean", "measured"), ("loss/kl", "in the loss")),
    ),
    Spec(
        key="entropy",
        title="Entropy",
        note="nats per token",
        section="Policy",
        series=(("loss/entropy", "entropy"),),
    ),
    Spec(
        key="clip",
        title="Clipped tokens",
        note="share whose gradient the clip cuts",
        section="Policy",
        series=(("loss/clip_frac_low", "below"), ("loss/clip_frac_high", "above"), ("loss/clip_frac_dual", "dual")),
    ),
    Spec(
        key="ratio",
        title="Importance ratio",
        note="over the tokens of a step",
        section="Policy",
        series=(("loss/ratio_mean", "mean"), ("loss/ratio_min", "least"), ("loss/ratio_max", "largest")),
        noise=1e-3,
    ),
    Spec(
        key="loss",
        title="Policy loss",
        note="its gradient teaches; its value says little",
        section="Policy",
        series=(("loss/policy", "loss"),),
        noise=1e-5,
    ),
    Spec(
        key="length",
        title="Completion length",
        note="tokens",
        section="Completions",
        series=(
            ("rollout/len_mean", "mean"),
            ("rollout/len_max", "longest"),
            ("rollout/len_terminated_mean", "mean of those not cut"),
        ),
    ),
    Spec(
        key="cut",
        title="Cut or without a reward",
        note="share of completions",
        section="Completions",
        series=(
            ("rollout/truncated_frac", "cut at the longest"),
            ("rollout/excluded_frac", "no reward"),
            ("rollout/error_frac", "a reward failed"),
        ),
    ),
    Spec(
        key="turns",
        title="Turns and tool calls",
        note="mean of an episode",
        section="Episodes",
        series=(("rollout/turns_mean", "turns"), ("env/tool_calls", "tool calls")),
    ),
    Spec(
        key="stops",
        title="How episodes end",
        note="share of episodes",
        section="Episodes",
        series=(("env/stop/*", "*"),),
    ),
    Spec(
        key="trouble",
        title="What goes wrong in episodes",
        note="share of episodes, and of tool calls",
        section="Episodes",
        series=(
            ("env/failed_frac", "the environment failed"),
            ("env/limit_frac", "ended by a limit"),
            ("env/tool_error_frac", "calls answered with an error"),
        ),
    ),
    Spec(
        key="batch",
        title="Groups in the batch",
        note="",
        section="Completions",
        series=(
            ("rollout/groups_trained", "all"),
            ("replay/groups", "replayed"),
            ("reroll/groups", "tried again"),
        ),
    ),
    Spec(
        key="gap",
        title="Sampler and trainer apart",
        note="difference of their log-probabilities, nats",
        section="Sampler and trainer",
        series=(("mismatch/logprob_diff_mean", "mean"), ("mismatch/logprob_diff_max", "largest")),
        log=True,
    ),
    Spec(
        key="staleness",
        title="Staleness",
        note="steps from sampling to training a group",
        section="Sampler and trainer",
        series=(("rollout/staleness_mean", "mean"), ("rollout/staleness_max", "oldest")),
    ),
    Spec(
        key="weight",
        title="Correction of the gap",
        note="weight of a token",
        section="Sampler and trainer",
        series=(("mismatch/weight_mean", "mean"), ("mismatch/weight_min", "least"), ("mismatch/weight_max", "largest")),
    ),
    Spec(
        key="corrected",
        title="Corrected tokens",
        note="share of tokens",
        section="Sampler and trainer",
        series=(
            ("mismatch/masked_frac", "left out"),
            ("mismatch/clipped_frac", "weight clipped"),
            ("mismatch/opsm_frac", "too far off-policy"),
        ),
    ),
    Spec(
        key="gradient",
        title="Gradient norm",
        note="before clipping",
        section="Optimizer and speed",
        series=(("optim/grad_norm", "norm"),),
    ),
    Spec(
        key="rate",
        title="Learning rate",
        note="",
        section="Optimizer and speed",
        series=(("optim/lr", "rate"),),
    ),
    Spec(
        key="throughput",
        title="Throughput",
        note="completion tokens per second, the whole step",
        section="Optimizer and speed",
        series=(("perf/tok_s", "tokens per second"),),
    ),
    Spec(
        key="time",
        title="Time of a step",
        note="seconds",
        section="Optimizer and speed",
        series=(
            ("time/step_s", "step"),
            ("time/rollout_s", "sampling and scoring"),
            ("time/train_s", "training"),
            ("time/sync_s", "sync"),
        ),
    ),
)
