"""The rules by which a run is judged, as data; `rule` says what a rule is, docs/metrics.md lists them all.

Thresholds are rules of thumb for language models that are trained with rewards, in nats, shares and steps. What is a
matter of scale, such as a reward or a length, is judged by how it changed.
"""

from __future__ import annotations

from groupwise.health.rule import Condition, Remedy, Rule, Times

_SLOWER = Remedy(text="learn more slowly", overrides={"train.learning_rate": Times(0.3)})
_MORE_COMPLETIONS = Remedy(
    text="sample more completions of a prompt", overrides={"rollout.group_size": Times(2, most=64)}
)
_HOLD = Remedy(
    text="hold the policy near the reference",
    overrides={"algo.kl": "k3", "algo.kl_coeff": 0.01},
    only_if={"algo.kl": None},
)
_SYNC = Remedy(text="sync more often", overrides={"rollout.weight_sync_interval": Times(0.5, least=1)})
_NEARER = Remedy(text="sample less far ahead", overrides={"rollout.max_staleness": Times(0.5)})
_WEIGH = Remedy(
    text="weigh samples by it", overrides={"algo.correction": "tis_token"}, only_if={"algo.correction": None}
)
_FLOAT32 = Remedy(text="compute in float32, if it does not", overrides={"dtype": "float32"})
_REFILL = Remedy(text="look longer for groups that differ", overrides={"rollout.refill": Times(2, most=16)})
_CURRICULUM = Remedy(
    text="draw prompts that are solved sometimes",
    overrides={"data.curriculum.weight": True},
    only_if={"data.curriculum": None},
)
_CHECK = Remedy(text="score a few completions and read them: groupwise check")
_READ = Remedy(text="read what is sampled, in the run's rollouts/")

_EPISODES = (
    Rule(
        id="env.failed",
        metric="env/failed_frac",
        least=3,
        op=">",
        warn=0.05,
        error=0.5,
        says="the environment failed in {value:.0%} of the episodes",
        cause="it raises, takes too long, or breaks the contract; `error` in the run's rollouts/ says which",
        remedies=(
            Remedy(text="play some episodes without a run: groupwise env check"),
            Remedy(text="give its methods more time, if that is why", overrides={"env.step_timeout_s": Times(2)}),
        ),
    ),
    Rule(
        id="env.tool_errors",
        metric="env/tool_error_frac",
        least=5,
        op=">",
        warn=0.5,
        says="{value:.0%} of the tool calls were answered with an error",
        cause="tools fail, or the policy does not know their names, their arguments or how to write a call",
        remedies=(
            Remedy(text="read env/tool_* in metrics.jsonl: which kind of error, and the tools' answers in rollouts/"),
            Remedy(text="describe the tools and their arguments better, or show a call in the first message"),
        ),
    ),
    Rule(
        id="env.no_calls",
        metric="env/tool_calls",
        of="max",
        least=10,
        op="<=",
        warn=0.0,
        also=(Condition(metric="env/tools", of="min", op=">", threshold=0.0),),
        unless=("env.failed", "env.tool_errors"),
        says="tools are offered, and in {window} steps none was called",
        cause="the policy does not know how to write a call in this template, is cut before it, or need not call any",
        remedies=(
            Remedy(text="read one whole episode: groupwise env check"),
            Remedy(text="let turns be longer", overrides={"rollout.max_tokens": Times(2)}),
            Remedy(text="use a model that was trained to call tools, or pay a little for a call that works"),
        ),
    ),
)
_REWARDS = (
    Rule(
        id="reward.stuck_zero",
        metric="reward/mean",
        of="max",
        window=20,
        op="<=",
        warn=0.15,
        error=0.0,
        also=(
            Condition(metric="reward/mean", of="min", window=20, op=">=", threshold=0.0),
            Condition(metric="reward/mean", of="gain", window=20, op="<=", threshold=0.02),
        ),
        says="the mean reward has not been above {value:.3g} for {window} steps and does not rise",
        cause="right answers are not recognised, a column is missing, answers are cut, or the task is too hard",
        remedies=(
            _CHECK,
            Remedy(text="let answers be longer", overrides={"rollout.max_tokens": Times(2)}),
            Remedy(text="mix in easier prompts, or give part of the reward for part of the answer"),
        ),
    ),
    Rule(
        id="reward.silent",
        metric="reward/*/mean",
        of="max",
        window=20,
        op="<=",
        warn=0.0,
        also=(Condition(metric="reward/*/mean", of="min", window=20, op=">=", threshold=0.0),),
        unless=("reward.stuck_zero",),
        says="the reward {name} has been 0 for every completion of {window} steps",
        cause="it never finds what it looks for",
        remedies=(_CHECK, Remedy(text="leave it out if it has nothing to say")),
    ),
    Rule(
        id="reward.error_rate",
        metric="rollout/error_frac",
        least=3,
        op=">",
        warn=0.05,
        error=0.5,
        unless=("env.failed",),
        says="{value:.0%} of the completions could not be scored and were left out",
        cause="a reward function raises, takes too long, or returns something that is no number",
        remedies=(
            Remedy(text="read `error` in the run's rollouts/"),
            Remedy(text="give it more time, if that is why", overrides={"scoring.timeout_s": Times(2)}),
        ),
    ),
    Rule(
        id="reward.not_applicable",
        metric="rollout/excluded_frac",
        least=3,
        op=">",
        warn=0.3,
        unless=("env.failed", "reward.error_rate"),
        says="{value:.0%} of the completions have no reward and were left out",
        cause="no reward function applies to them: all return None",
        remedies=(_CHECK, Remedy(text="let one function apply to every prompt, or leave those prompts out")),
    ),
    Rule(
        id="reward.hack_suspect",
        metric="rollout/len_mean",
        of="growth",
        window=20,
        op=">",
        warn=1.3,
        also=(Condition(metric="eval/*/reward", of="gain", window=3, op="<=", threshold=0.01),),
        says="completions are {value:.2g} times as long as {window} steps ago, and held-out reward does not rise",
        cause="length pays without being right: the reward can be had by writing more",
        remedies=(_READ, Remedy(text="reward brevity, of right answers only; give no reward for form alone")),
    ),
    Rule(
        id="reward.dominated",
        metric="reward/*/share",
        least=5,
        op="<",
        warn=0.1,
        says="where it differs, the reward {name} makes {value:.0%} of the difference: others drown it",
        cause="the rewards are summed as they are, and their scales or weights are far apart",
        remedies=(
            Remedy(text="normalise each before they are added", overrides={"algo.aggregation": "normalize_then_sum"}),
            Remedy(text="raise its weight"),
        ),
    ),
    Rule(
        id="reward.falling",
        metric="reward/mean",
        of="growth",
        window=30,
        op="<",
        warn=0.6,
        also=(Condition(metric="reward/mean", of="min", window=30, op=">=", threshold=0.0),),
        unless=("reward.stuck_zero",),
        says="the mean reward is {value:.0%} of what it was {window} steps ago",
        cause="steps are too large, or what is rewarded is noise to this policy",
        remedies=(_SLOWER, _HOLD, _MORE_COMPLETIONS),
    ),
)
_GROUPS = (
    Rule(
        id="group.solved",
        metric="reward/frac_zero_std",
        op=">=",
        warn=0.8,
        also=(Condition(metric="reward/mean", of="gain", window=1000, least=10, op=">", threshold=0.1),),
        says="{value:.0%} of the groups have equal rewards, after the reward rose: these prompts are mostly learned",
        cause="there is little left to learn from them",
        remedies=(
            Remedy(text="stop here, or go on with harder prompts"),
            _CURRICULUM,
        ),
    ),
    Rule(
        id="group.zero_std",
        metric="reward/frac_zero_std",
        op=">=",
        warn=0.8,
        error=1.0,
        unless=("group.solved",),
        says="{value:.0%} of the groups have equal rewards and teach nothing",
        cause="the task is too easy or too hard for this policy, or the reward cannot tell completions apart",
        remedies=(
            _MORE_COMPLETIONS,
            _REFILL,
            _CURRICULUM,
            Remedy(text="use a finer reward, or other prompts"),
        ),
    ),
    Rule(
        id="adv.skip_ratio",
        metric="rollout/groups_trained",
        of="zeros",
        op=">",
        warn=0.3,
        unless=("group.solved", "group.zero_std"),
        says="{value:.0%} of the last {window} steps had no group to train on",
        cause="a step draws so few groups that often all of them have equal rewards",
        remedies=(
            Remedy(text="draw more prompts a step", overrides={"rollout.prompts_per_step": Times(2)}),
            _REFILL,
            _MORE_COMPLETIONS,
        ),
    ),
    Rule(
        id="data.too_long",
        metric="data/too_long_frac",
        least=3,
        op=">",
        warn=0.1,
        says="{value:.0%} of the prompts are too long and are passed over",
        cause="they exceed rollout.max_prompt_tokens or the model's context",
        remedies=(
            Remedy(text="let prompts be longer", overrides={"rollout.max_prompt_tokens": Times(2)}),
            Remedy(text="shorten them, or use a model with a longer context"),
        ),
    ),
)
_LENGTHS = (
    Rule(
        id="eos.missing",
        metric="rollout/truncated_frac",
        of="min",
        window=5,
        op=">=",
        error=1.0,
        settle=10,  # one that ends by chance changes little
        says="no completion has ended by itself for {window} steps",
        cause="max_tokens is far too small, or the model does not know how to end its turn in this chat template",
        remedies=(
            Remedy(text="let completions be longer", overrides={"rollout.max_tokens": Times(4)}),
            Remedy(text="use an instruction-tuned model with its own template, or name an end in rollout.stop"),
        ),
    ),
    Rule(
        id="len.clipped",
        metric="rollout/truncated_frac",
        least=5,
        op=">",
        warn=0.3,
        error=0.8,
        unless=("eos.missing",),
        says="{value:.0%} of the completions were cut at their longest",
        cause="answers need more tokens than rollout.max_tokens, and what is cut is scored as it is",
        remedies=(
            Remedy(text="let completions be longer", overrides={"rollout.max_tokens": Times(2)}),
            Remedy(text="leave those that are cut out of the loss", overrides={"algo.mask_truncated": True}),
            Remedy(text="reward brevity"),
        ),
    ),
    Rule(
        id="env.limits",
        metric="env/limit_frac",
        least=5,
        op=">=",
        warn=0.9,
        unless=("eos.missing", "len.clipped"),
        says="{value:.0%} of the episodes were ended by a limit, not by the environment",
        cause="they need more turns, tokens or seconds than they may have, or the environment is never done",
        remedies=(
            Remedy(text="read env/stop/* in metrics.jsonl: which limit"),
            Remedy(text="allow more turns", overrides={"env.max_turns": Times(2)}),
            Remedy(text="allow more tokens", overrides={"env.max_tokens": Times(2)}),
            Remedy(text="allow more time", overrides={"env.timeout_s": Times(2)}),
        ),
    ),
    Rule(
        id="len.monotone_max",
        metric="rollout/len_mean",
        of="trend",
        window=20,
        op=">",
        warn=0.6,
        also=(
            Condition(metric="rollout/len_mean", of="growth", window=20, op=">", threshold=1.2),
            Condition(metric="rollout/truncated_frac", of="mean", window=5, op=">", threshold=0.1),
        ),
        says="completions grow from step to step (trend {value:.2f}) towards rollout.max_tokens",
        cause="the reward pays for length, or the loss favours it: a row's mean makes long wrong answers cheap",
        remedies=(
            _READ,
            Remedy(
                text="divide by a constant length instead of each completion's own",
                overrides={"algo.reduction": "constant"},
                only_if={"algo.reduction": None},
            ),
            Remedy(text="let completions be longer, if they need it", overrides={"rollout.max_tokens": Times(2)}),
        ),
    ),
    Rule(
        id="len.collapse",
        metric="rollout/len_mean",
        of="growth",
        window=20,
        op="<",
        warn=0.5,
        also=(Condition(metric="reward/mean", of="gain", window=20, op="<=", threshold=0.02),),
        says="completions are {value:.2g} times as long as {window} steps ago, and the reward does not rise",
        cause="the policy falls silent: ending early is not worse than trying",
        remedies=(_READ, _SLOWER, _HOLD),
    ),
)
_OPTIMIZER = (
    Rule(
        id="grad.nan",
        metric="optim/refused",
        of="sum",
        least=1,
        op=">",
        warn=0.0,
        error=2.0,
        says="{value:.2g} of the last {window} steps had a gradient that is not finite and were refused",
        cause="log-probabilities or rewards overflow, or half precision does",
        remedies=(
            _SLOWER,
            _FLOAT32,
            Remedy(text="look for huge rewards"),
        ),
    ),
    Rule(
        id="loss.nan",
        metric="loss/policy",
        of="not_finite",
        least=1,
        op=">",
        error=0.0,
        says="the loss was not finite {value:.0f} times in {window} steps",
        cause="log-probabilities or rewards overflow, or half precision does",
        remedies=(_SLOWER, _FLOAT32),
    ),
    Rule(
        id="grad.explode",
        metric="optim/grad_norm",
        window=5,
        op=">",
        warn=10.0,
        error=100.0,
        says="the norm of the gradient is {value:.3g} before clipping",
        cause="steps are too large, or a few rewards are huge",
        remedies=(
            _SLOWER,
            Remedy(text="warm up for longer", overrides={"train.warmup_steps": Times(2)}),
            Remedy(text="bound the rewards"),
        ),
    ),
    Rule(
        id="grad.zero_streak",
        metric="optim/grad_norm",
        of="max",
        window=5,
        op="<=",
        error=0.0,
        says="the gradient has been 0 for {window} steps: nothing is learned",
        cause="every token is masked or clipped, or every advantage is 0",
        remedies=(
            Remedy(text="train on completions that were cut, too", overrides={"algo.mask_truncated": False}),
            Remedy(text="look at clip_frac, masked_frac and reward/std in metrics.jsonl"),
        ),
    ),
    Rule(
        id="lr.zero",
        metric="optim/lr",
        of="max",
        window=5,
        op="<=",
        warn=0.0,
        says="the learning rate has been 0 for {window} steps: nothing is learned",
        cause="train.learning_rate is 0, as in a control, or the schedule has ended",
        remedies=(Remedy(text="learn", overrides={"train.learning_rate": 1e-5}),),
    ),
)
_POLICY = (
    Rule(
        id="entropy.collapse",
        metric="loss/entropy",
        op="<",
        warn=0.01,
        error=0.001,
        says="the policy's entropy is {value:.2g} nats a token: it gives one answer a prompt",
        cause="it has become certain, right or wrong, and samples nothing else that it could learn from",
        remedies=(
            _SLOWER,
            _HOLD,
            Remedy(
                text="reward entropy", overrides={"algo.entropy_coeff": 0.001}, only_if={"algo.entropy_coeff": None}
            ),
            Remedy(
                text="cut improbable good tokens less",
                overrides={"algo.clip_high": 0.28},
                only_if={"algo.policy_loss": "grpo", "algo.clip_high": None},
            ),
        ),
    ),
    Rule(
        id="entropy.high",
        metric="loss/entropy",
        window=20,
        op=">",
        warn=1.0,
        also=(Condition(metric="loss/entropy", of="growth", window=20, op=">=", threshold=1.0),),
        says="the policy's entropy is {value:.2g} nats a token and does not fall: it does not settle",
        cause="the temperature or the entropy bonus is too high, or the reward is noise to this policy",
        remedies=(
            Remedy(text="sample nearer to what is likely", overrides={"rollout.temperature": Times(0.8, least=0.6)}),
            Remedy(text="reward entropy less", overrides={"algo.entropy_coeff": Times(0.3)}),
            _SLOWER,
        ),
    ),
    Rule(
        id="kl.high",
        metric="kl/mean",
        of="median",  # one improbable token makes the estimate of a step large
        op=">",
        warn=0.5,
        error=2.0,
        says="the policy is {value:.3g} nats a token away from the reference",
        cause="it moves fast, or the divergence weighs too little",
        remedies=(
            Remedy(text="weigh it more", overrides={"algo.kl_coeff": Times(3)}),
            _SLOWER,
            Remedy(
                text="let the weight follow a target",
                overrides={"algo.kl_target": 0.1},
                only_if={"algo.kl_target": None},
            ),
        ),
    ),
    Rule(
        id="clip.high",
        metric="loss/clip_frac",
        op=">",
        warn=0.3,
        says="the gradient of {value:.0%} of the tokens is clipped away",
        cause="the policy moves far within one batch, the samples are of a much older policy, or the bounds are "
        "narrower than sampler and trainer round",
        remedies=(
            Remedy(
                text="take the ratio against the trainer's own log-probabilities",
                overrides={"algo.anchor": "old"},
                only_if={"algo.anchor": "behaviour"},
            ),
            Remedy(text="go over a batch less often", overrides={"train.passes": Times(0.5, least=1)}),
            Remedy(text="cut a batch into fewer steps", overrides={"train.minibatches": Times(0.5, least=1)}),
            _SYNC,
            _SLOWER,
        ),
    ),
    Rule(
        id="eval.regress",
        metric="eval/*/reward",
        of="drop",
        window=1000,
        least=2,
        op=">",
        warn=0.1,
        error=0.3,
        settle=1,
        says="held-out reward ({name}) has fallen by {value:.0%} from its best",
        cause="the policy learned something that does not carry over, or it fell apart",
        remedies=(
            Remedy(text="keep the best version", overrides={"eval.best": "{name}"}),
            _SLOWER,
            _HOLD,
        ),
    ),
)
_SAMPLER = (
    Rule(
        id="mismatch.logp",
        metric="mismatch/logprob_diff_mean",
        window=5,
        op=">",
        warn=0.1,
        error=1.0,
        says="sampler and trainer disagree by {value:.3g} nats a token",
        cause="the samples are of an older policy, steps within a batch are large, or weights or precision differ",
        remedies=(
            _SYNC,
            _NEARER,
            _WEIGH,
            _FLOAT32,
        ),
    ),
    Rule(
        id="mismatch.on_policy",
        metric="mismatch/logprob_diff_mean",
        op=">",
        warn=0.02,
        also=(Condition(metric="rollout/staleness_max", of="max", op="<=", threshold=0.0),),
        unless=("mismatch.logp",),
        says="sampler and trainer disagree by {value:.3g} nats a token though their policy is the same",
        cause="another precision, other weights than were meant, or large steps within a batch",
        remedies=(
            _FLOAT32,
            _WEIGH,
        ),
    ),
    Rule(
        id="mismatch.dropped",
        metric="mismatch/dropped_tokens",
        of="sum",
        least=1,
        op=">",
        warn=0.0,
        says="{value:.0f} tokens were left out in {window} steps: the sampler's log-probability of them is not finite",
        cause="the sampler overflowed, or it did not report them",
        remedies=(_FLOAT32, _SLOWER),
    ),
    Rule(
        id="is.min",
        metric="mismatch/ratio_min",
        op="<",
        warn=0.1,
        says="some tokens are {value:.2g} times as likely as when they were sampled",
        cause="the samples are of an older policy, which has moved away from them",
        remedies=(
            _SYNC,
            _NEARER,
            _SLOWER,
        ),
    ),
    Rule(
        id="is.clipped_frac",
        metric="mismatch/*_frac",
        op=">",
        warn=0.2,
        says="{value:.0%} of the tokens are {name} by the correction for the sampler's policy",
        cause="the samples are too old, or the bounds too tight",
        remedies=(
            _SYNC,
            _NEARER,
            Remedy(text="widen algo.correction_cap and correction_floor", overrides={"algo.correction_cap": Times(2)}),
        ),
    ),
    Rule(
        id="staleness.max",
        metric="rollout/staleness_max",
        op=">",
        warn=8.0,
        says="groups are trained {value:.3g} steps after the version that sampled them",
        cause="training is much faster than sampling, or syncs are rare",
        remedies=(
            _SYNC,
            _NEARER,
        ),
    ),
    Rule(
        id="sync.slow",
        metric="time/sync_s",
        window=5,
        op=">",
        warn=5.0,
        says="it takes {value:.3g} s until the sampler has a new version",
        cause="publishing writes and verifies an adapter each time; the disk may be slow",
        remedies=(
            Remedy(text="sync less often", overrides={"rollout.weight_sync_interval": Times(2)}),
            Remedy(text="put the run on a local disk: output_dir"),
        ),
    ),
)
RULES: tuple[Rule, ...] = (*_EPISODES, *_REWARDS, *_GROUPS, *_LENGTHS, *_OPTIMIZER, *_POLICY, *_SAMPLER)
