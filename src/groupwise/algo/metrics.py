"""Metrics of a step's rollouts, samples and times. Every metric is defined once, here.

    rollout_metrics   of the groups that a step sampled and trained on  reward/*, rollout/*, replay/groups, data/*
                      and, of episodes in an environment, besides       env/*
    sample_metrics    of what the learner was given                     train/*
    time_metrics      of how long its parts took                        time/*, perf/*

`DEFINITIONS` says what each of them means, and those of the optimizer, the evaluation and what comes back, which other
modules count; docs/metrics.md shows it as a table. What a loss reports (loss/*, kl/*, mismatch/*) is defined in
docs/losses.md. The functions are pure and know nothing of how the groups came about, so a metric means the same in
every mode: one step after the other, in windows, with sampling ahead of training.

Three rules hold for all of them. A metric of nothing is left out, never 0: where no completion could be scored there
is no mean reward. A reward that failed is in no statistic but the counts of failures. Lengths and tokens are those that
the policy chose: what a tool or a user said is part of a prompt, whichever turn it comes in. An episode of several
turns is one completion here, as long as all that the policy said in it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any

from groupwise.algo.advantage import differ, has_signal
from groupwise.config.run import AdvantageConfig
from groupwise.types import FinishReason, Rollout, RolloutGroup, Sample

Metrics = dict[str, float]
DONE, FAILED = "done", "error"  # how an episode ends; otherwise a limit ended it
STOPS = (DONE, "max_turns", "max_tokens", "max_tool_calls", "template", "context", "timeout", FAILED)

_ROLLOUTS = {
    "reward/mean": "Mean reward (the weighted sum of the functions) of the completions that could be scored.",
    "reward/std": "Mean over groups of the standard deviation inside the group (n - 1 in its denominator). 0 means "
    "that no group teaches anything, however much rewards differ between prompts.",
    "reward/min": "Smallest reward of the step.",
    "reward/max": "Largest reward of the step.",
    "reward/frac_zero_std": "Share of the groups that teach nothing: fewer than two completions could be scored, or "
    "all their rewards are equal (with `normalize_then_sum`: equal in every function that has a weight).",
    "reward/frac_best": "Share of the completions that could be scored whose reward is the largest of the step.",
    "reward/<name>/mean": "Mean value of one reward function, without its weight, where it gave one.",
    "reward/<name>/std": "Mean over groups of that value's standard deviation inside the group.",
    "reward/<name>/share": "How loud a function is where it has something to say: its share of the weighted standard "
    "deviations of all functions, mean over the groups in which its values differ. Only with several weighted "
    "functions that are summed before they are normalised.",
    "reward/<name>/part": "What a function brings to the mean reward: its mean value times its weight. Only with "
    "several weighted functions.",
    "reward/<name>/noise": "Of the completions that are the same, token by token, as others of their group: the share "
    "to which the function did not give the value that it gave to those. Only where there are such completions.",
    "reward/<name>/failed": "Completions on which this function failed.",
    "reward/<name>/failed/<kind>": "The same by what went wrong.",
    "reward/<name>/log/<metric>": "What the function reported itself, mean over the step.",
    "rollout/count": "Completions sampled.",
    "rollout/groups": "Groups sampled, trained on or not.",
    "rollout/groups_trained": "Groups in the batch, replayed ones included.",
    "rollout/batch_fill": "Groups in the batch as a share of `rollout.prompts_per_step`.",
    "rollout/tokens": "Completion tokens sampled.",
    "rollout/total_tokens": "Prompt and completion tokens of all completions; a group's prompt counts once for each. "
    "Of an episode what its segments hold: what a turn only repeats of the one before counts once.",
    "rollout/len_mean": "Mean length of the completions, in tokens; of an episode, of all of its turns together.",
    "rollout/len_min": "Shortest completion.",
    "rollout/len_max": "Longest completion.",
    "rollout/len_terminated_mean": "Mean length of those that ended by themselves.",
    "rollout/len_terminated_min": "Shortest of those.",
    "rollout/len_terminated_max": "Longest of those.",
    "rollout/truncated_frac": "Share of the completions that were cut at `rollout.max_tokens` or a full context; an "
    "episode is, if one of its turns was, or if there was no room for another.",
    "rollout/top_token_frac": "Share that one token, the commonest, has of all that was said; the token that ends a "
    "completion counts only where it is all of it.",
    "rollout/error_frac": "Share of the completions with an error: a reward function failed on them, or their "
    "environment did (`env.on_error: exclude`).",
    "rollout/excluded_frac": "Share of the completions without a reward: those that failed and those to which no "
    "function applies. They enter no statistic and no loss.",
    "rollout/staleness_mean": "Steps between the version that sampled a group and the step that trains it, mean over "
    "the fresh groups of the batch. 0 is on-policy.",
    "rollout/staleness_max": "The same of the oldest.",
    "replay/groups": "Groups of the batch that were trained before.",
    "replay/size": "Groups kept to be trained again.",
    "replay/age_mean": "Mean number of steps since those were first trained.",
    "reroll/groups": "Prompts tried again in this step, on which all completions had failed before.",
    "reroll/size": "Prompts that wait to be tried again.",
    "curriculum/seen": "Share of the prompts that were drawn at least once.",
    "curriculum/passed_over": "Prompts that the curriculum passed over, since the run began.",
    "data/too_long": "Prompts passed over: longer than `rollout.max_prompt_tokens`, or than the context.",
    "data/too_long_frac": "The same as a share of the prompts drawn.",
}
_EPISODES = {
    "rollout/turns_mean": "Mean number of turns of the policy in an episode.",
    "env/<name>": "What the environment reported under that name (`info`), added up over an episode; mean over the "
    "episodes that reported it.",
    "env/tool_calls": "Mean number of tool calls in an episode.",
    "env/tools": "Mean number of tools that an episode was offered.",
    "env/tool_error_frac": "Share of the tool calls, those that could not be read included, that were answered with an "
    "error. Only where the environment counts `tool_errors`, as a `ToolEnv` does.",
    "env/forks": "Mean number of turns in an episode that did not see all of the turn before as it was said, so that "
    "they began another trained segment.",
    "env/failed_frac": "Share of the episodes in which the environment failed: it raised, hung or broke the contract.",
    "env/limit_frac": "Share of the episodes that a limit ended, not the environment.",
    "env/stop/<reason>": "Share of the episodes that ended for this reason: `done`, `error`, or a limit.",
}
_TRAINING = {
    "train/samples": "Completions that were trained on; of an episode, its segments.",
    "train/tokens": "Tokens that carry a loss.",
    "train/advantage_abs_mean": "Mean absolute advantage of those completions.",
    "optim/grad_norm": "Norm of the gradient before clipping.",
    "optim/refused": "Share of the step's optimizer steps that were refused because the gradient was not finite.",
    "optim/lr": "Learning rate.",
    "final/logprob_drop": "Of a job of the live server, after its last step: by how many nats a token what it was "
    "trained on is less likely than under the policy that it started from. Measured on some 8,192 tokens of it.",
    "eval/<mode>/reward": "Mean reward on the held-out prompts.",
    "eval/<mode>/<value>/reward": "The same for the prompts with one value of the column `eval.by`.",
    "eval/<mode>/reward_stderr": "Standard error of `eval/<mode>/reward`, over prompts.",
    "eval/<mode>/failed": "Completions that could not be scored.",
    "eval/<mode>/avg@<k>": "With `eval.k` completions of each prompt: the mean over prompts of their mean reward.",
    "eval/<mode>/pass@<k>": "The chance that one of k completions succeeds (`eval.success`), mean over prompts.",
}
_TIMES = {
    "time/rollout_s": "Seconds until the step's groups were sampled and scored.",
    "time/train_s": "Seconds in forward, backward and the optimizer.",
    "time/sync_s": "Seconds until the new version was published, loaded and active.",
    "time/step_s": "Seconds of the whole step.",
    "perf/tok_s": "Completion tokens sampled per second of the whole step.",
    "perf/sample_tok_s": "Completion tokens sampled per second of `time/rollout_s`.",
    "perf/train_tok_s": "Trained tokens per second of `time/train_s`.",
}
DEFINITIONS: Mapping[str, str] = MappingProxyType(_ROLLOUTS | _EPISODES | _TRAINING | _TIMES)


def rollout_metrics(
    sampled: Sequence[RolloutGroup],
    *,
    trained: Sequence[RolloutGroup],
    advantage: AdvantageConfig | None = None,
    weights: Mapping[str, float] | None = None,
    batch_groups: int | None = None,
    staleness: Sequence[int] = (),
    replayed: int = 0,
    rerolled: int = 0,
    too_long: int = 0,
) -> Metrics:
    """What a step's rollouts were like; the words are in `DEFINITIONS`.

    Args:
        sampled: the groups drawn for this step, also those that are not trained on; without replayed ones.
        trained: the groups of the batch, with replayed ones.
        advantage: decides whether equal sums of different rewards teach something.
        weights: of the reward functions, by name; 1 each if it is None. Those of weight 0 are only watched.
        batch_groups: how many groups a full batch has.
        staleness: of the fresh groups of the batch: steps since the version that sampled them.
        replayed: how many groups of the batch were trained before.
        rerolled: how many of `sampled` are of prompts that were tried again.
        too_long: prompts that were passed over.
    """
    metrics = _rewards(sampled, advantage, weights) | _by_function(sampled, advantage, weights) | _lengths(sampled)
    metrics |= _episodes(sampled)
    rollouts = [rollout for group in sampled for rollout in group.rollouts]
    metrics |= {
        "rollout/count": float(len(rollouts)),
        "rollout/groups": float(len(sampled)),
        "rollout/groups_trained": float(len(trained)),
        "replay/groups": float(replayed),
        "reroll/groups": float(rerolled),
        "data/too_long": float(too_long),
    }
    if rollouts:
        metrics["rollout/error_frac"] = fmean(r.error is not None for r in rollouts)
        metrics["rollout/excluded_frac"] = fmean(_finite(r.reward) is None for r in rollouts)
    if batch_groups:
        metrics["rollout/batch_fill"] = len(trained) / batch_groups
    if sampled or too_long:
        metrics["data/too_long_frac"] = too_long / (too_long + len(sampled))
    if staleness:
        metrics |= {"rollout/staleness_mean": fmean(staleness), "rollout/staleness_max": float(max(staleness))}
    return metrics


def sample_metrics(samples: Sequence[Sample]) -> Metrics:
    """What the learner trains on: completions, and tokens that are not masked."""
    metrics = {"train/samples": float(len(samples)), "train/tokens": float(sum(sum(s.mask) for s in samples))}
    if samples:
        metrics["train/advantage_abs_mean"] = fmean(abs(sample.advantage) for sample in samples)
    return metrics


def time_metrics(metrics: Mapping[str, float], seconds: Mapping[str, float]) -> Metrics:
    """The times of a step's parts ("step", "rollout", "train", "sync") and what follows from them and its `metrics`.

    >>> time_metrics({"rollout/tokens": 600.0}, {"step": 3.0, "rollout": 2.0})
    {'time/step_s': 3.0, 'time/rollout_s': 2.0, 'perf/tok_s': 200.0, 'perf/sample_tok_s': 300.0}
    """
    times = {f"time/{part}_s": float(value) for part, value in seconds.items()}
    rates = {
        "perf/tok_s": ("rollout/tokens", "step"),
        "perf/sample_tok_s": ("rollout/tokens", "rollout"),
        "perf/train_tok_s": ("train/tokens", "train"),
    }
    return times | {
        rate: metrics[tokens] / seconds[part]
        for rate, (tokens, part) in rates.items()
        if tokens in metrics and seconds.get(part, 0.0) > 0
    }


def _rewards(
    groups: Sequence[RolloutGroup], advantage: AdvantageConfig | None, weights: Mapping[str, float] | None
) -> Metrics:
    by_group = [_scored(rollout.reward for rollout in group.rollouts) for group in groups]
    rewards = [reward for values in by_group for reward in values]
    metrics = {}
    if rewards:
        best = max(rewards)
        metrics = {"reward/mean": fmean(rewards), "reward/min": min(rewards), "reward/max": best}
        metrics["reward/frac_best"] = fmean(not differ([reward, best]) for reward in rewards)
    if spreads := _spreads(by_group):
        metrics["reward/std"] = fmean(spreads)
    if groups:
        metrics["reward/frac_zero_std"] = fmean(not has_signal(group, advantage, weights=weights) for group in groups)
    return metrics


def _by_function(
    groups: Sequence[RolloutGroup], advantage: AdvantageConfig | None, weights: Mapping[str, float] | None
) -> Metrics:
    names = sorted({name for group in groups for rollout in group.rollouts for name in rollout.rewards})
    by_name = {
        name: [_scored(rollout.rewards.get(name) for rollout in group.rollouts) for group in groups] for name in names
    }
    metrics: Metrics = {}
    for name, by_group in by_name.items():
        if values := [value for values in by_group for value in values]:
            metrics[f"reward/{name}/mean"] = fmean(values)
        if spreads := _spreads(by_group):
            metrics[f"reward/{name}/std"] = fmean(spreads)
    metrics |= _noise(groups, names)
    weighted = {name: 1.0 if weights is None else weights.get(name, 1.0) for name in names}
    weighted = {name: weight for name, weight in weighted.items() if weight}
    if len(weighted) < 2:
        return metrics
    means = {name: metrics.get(f"reward/{name}/mean") for name in weighted}
    metrics |= {f"reward/{name}/part": weighted[name] * mean for name, mean in means.items() if mean is not None}
    if advantage is not None and advantage.aggregation == "normalize_then_sum":
        return metrics
    return metrics | _shares({name: by_name[name] for name in weighted}, weighted)


def _noise(groups: Sequence[RolloutGroup], names: Sequence[str]) -> Metrics:
    """`reward/<name>/noise` of each function that scored completions that are the same."""
    unequal: dict[str, list[bool]] = {}
    for group in groups:
        for twins in _twins(group):
            for name in names:
                if len(values := _scored(twin.rewards.get(name) for twin in twins)) > 1:
                    unequal.setdefault(name, []).extend([differ(values)] * len(values))
    return {f"reward/{name}/noise": fmean(each) for name, each in unequal.items()}


def _twins(group: RolloutGroup) -> list[list[Rollout]]:
    """The rollouts of a group that are the same in what was said and heard, where there are several."""
    said: dict[Any, list[Rollout]] = {}
    for rollout in group.rollouts:
        said.setdefault(tuple(turn.completion.token_ids for turn in rollout.turns), []).append(rollout)
    heard: dict[Any, list[Rollout]] = {}
    for rollout in chain.from_iterable(each for each in said.values() if len(each) > 1):
        heard.setdefault(tuple((t.prompt_ids, t.completion.token_ids) for t in rollout.turns), []).append(rollout)
    return [each for each in heard.values() if len(each) > 1]


def _shares(by_name: Mapping[str, Sequence[Sequence[float]]], weights: Mapping[str, float]) -> Metrics:
    """`reward/<name>/share` of each function whose values differ in any group."""
    shares: dict[str, list[float]] = {}
    for columns in zip(*by_name.values(), strict=True):  # a group's values, function by function
        loud = {name: abs(weights[name]) * _spread(values) for name, values in zip(by_name, columns, strict=True)}
        total = math.fsum(loud.values())
        for name, spread in loud.items():
            if spread > 0:
                shares.setdefault(name, []).append(spread / total)
    return {f"reward/{name}/share": fmean(values) for name, values in shares.items()}


def _lengths(groups: Sequence[RolloutGroup]) -> Metrics:
    rollouts = [rollout for group in groups for rollout in group.rollouts if rollout.turns]
    reasons = [{turn.completion.finish_reason for turn in rollout.turns} for rollout in rollouts]
    lengths = [_length(rollout) for rollout in rollouts]
    ended = [length for length, why in zip(lengths, reasons, strict=True) if why == {FinishReason.STOP}]
    metrics = {
        "rollout/tokens": float(sum(lengths)),
        "rollout/total_tokens": float(sum(map(_total_length, rollouts))),
    }
    for name, values in (("len", lengths), ("len_terminated", ended)):
        if values:
            metrics[f"rollout/{name}_mean"] = fmean(values)
            metrics |= {f"rollout/{name}_min": float(min(values)), f"rollout/{name}_max": float(max(values))}
    if rollouts:
        metrics["rollout/truncated_frac"] = fmean(rollout.truncated for rollout in rollouts)
    if said := Counter(chain.from_iterable(map(_said, rollouts))):
        metrics["rollout/top_token_frac"] = said.most_common(1)[0][1] / said.total()
    return metrics


def _said(rollout: Rollout) -> Iterator[int]:
    """The tokens of a rollout's turns, without the one that ends a turn where there are others."""
    for turn in rollout.turns:
        ids = turn.completion.token_ids
        yield from ids[:-1] if len(ids) > 1 and turn.completion.finish_reason is FinishReason.STOP else ids


def _length(rollout: Rollout) -> int:
    return sum(len(turn.completion.token_ids) for turn in rollout.turns)


def _total_length(rollout: Rollout) -> int:
    """Tokens of a rollout's segments: what each begins with, was told and said."""
    total, seen = 0, ()
    for turn in rollout.turns:
        if turn.prompt_ids[: len(seen)] == seen:
            total -= len(seen)
        seen = turn.prompt_ids + turn.completion.token_ids
        total += len(seen)
    return total


def _episodes(groups: Sequence[RolloutGroup]) -> Metrics:
    """Of the rollouts that an environment played; nothing where there are none."""
    played = [(group.prompt, each) for group in groups for each in group.rollouts if each.stop is not None]
    if not played:
        return {}
    episodes = [rollout for _, rollout in played]
    metrics = {f"env/{name}": fmean(values) for name, values in _reported(episodes).items()}
    stops = [rollout.stop for rollout in episodes]
    metrics |= {f"env/stop/{_plain(stop)}": fmean(each == stop for each in stops) for stop in (*STOPS, *stops) if stop}
    metrics |= {
        "rollout/turns_mean": fmean(len(rollout.turns) for rollout in episodes),
        "env/tools": fmean(len(prompt.tools) for prompt, _ in played),
        "env/failed_frac": fmean(rollout.info.get("failed", rollout.stop == FAILED) for rollout in episodes),
        "env/limit_frac": fmean(stop not in (DONE, FAILED) for stop in stops),
    }
    counted = [rollout.info for rollout in episodes if "tool_errors" in rollout.info]
    calls = math.fsum(info.get("tool_calls", 0.0) + info.get("tool_malformed", 0.0) for info in counted)
    if calls:
        metrics["env/tool_error_frac"] = math.fsum(info["tool_errors"] for info in counted) / calls
    return metrics


def _reported(episodes: Sequence[Rollout]) -> dict[str, list[float]]:
    """The numbers of the episodes' `info` by name, but for those that are metrics under another."""
    found: dict[str, list[float]] = {}
    for rollout in episodes:
        for name, value in rollout.info.items():
            if name not in ("turns", "failed") and math.isfinite(value):
                found.setdefault(_plain(name), []).append(value)
    return dict(sorted(found.items()))


def _plain(name: str) -> str:
    """As a part of a metric's name."""
    return name.replace("/", "_")


def _spreads(by_group: Sequence[Sequence[float]]) -> list[float]:
    """The standard deviation inside each group that has one."""
    return [_spread(values) for values in by_group if len(values) > 1]


def _spread(values: Sequence[float]) -> float:
    """With n - 1 in the denominator; exactly 0 where values differ by nothing but rounding."""
    return stdev(values) if differ(values) else 0.0


def _scored(rewards: Iterable[float | None]) -> list[float]:
    return [value for reward in rewards if (value := _finite(reward)) is not None]


def _finite(reward: float | None) -> float | None:
    return reward if reward is not None and math.isfinite(reward) else None
