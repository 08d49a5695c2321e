"""Metrics of a step's rollouts, samples and times. Every metric is defined once, here.

    rollout_metrics   of the groups that a step sampled and trained on  reward/*, rollout/*, sampling/*, replay/groups,
                                                                        data/*
                      and, of episodes in an environment, besides       env/*, turn/*, gigpo/*, role/*
    sample_metrics    of what the learner was given                     train/*
    time_metrics      of how long its parts took                        time/*, perf/*

The table metrics.yaml next to this file says what each metric means, which values are good and what to do otherwise. It
also has the metrics of the optimizer, the loss and the evaluation, which other modules compute. The functions are pure
and do not depend on how the groups were sampled, so a metric means the same in every mode: one step after the other, in
windows, with sampling ahead of training.

Three rules hold for all metrics. A metric without values is left out, never 0: if no completion could be scored, there
is no mean reward. A reward that failed is only in the counts of failures. Lengths and tokens count what the policy
sampled: a tool's or a user's message is part of a prompt, in every turn. An episode of several turns counts as one
completion, with the policy's tokens of all turns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import ruamel.yaml

from groupwise.algo.advantage import differ
from groupwise.algo.credit import comparisons, has_signal, has_turn_advantages
from groupwise.config.algo import AdvantageConfig, CreditConfig
from groupwise.types import FinishReason, PolicyVersion, Rollout, RolloutGroup, Sample

Metrics = dict[str, float]
DONE, FAILED = "done", "error"  # how an episode ends; otherwise a limit ended it
STOPS = (DONE, "max_turns", "max_tokens", "max_tool_calls", "template", "context", "timeout", FAILED)

MOST_IDS = 1 << 22  # of a vocabulary whose tokens are counted in a table

TABLE = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True, kw_only=True)
class Definition:
    """A row of the table metrics.yaml. `<name>`, `<mode>` and the like in `metric` stand for any one part of a name."""

    metric: str
    section: str
    means: str
    good: str = ""  # the range or the course to expect; empty where it is a plain count
    otherwise: str = ""  # what to do where it is not; empty where the health rules say it

    def fits(self, metric: str) -> bool:
        """Return whether it defines this metric.

        >>> Definition(metric="eval/<mode>/reward", section="training", means="").fits("eval/greedy/reward")
        True
        """
        pattern = "[^/]+".join(map(re.escape, re.split(r"<\w+>", self.metric)))
        return re.fullmatch(pattern, metric) is not None


@cache
def definitions() -> tuple[Definition, ...]:
    """Return the meaning of every metric, in the order of the table, which docs/metrics.md and the web interface
    show."""
    table = ruamel.yaml.YAML(typ="safe").load(TABLE.read_text("utf-8"))
    return tuple(
        Definition(metric=metric, section=section, **words)
        for section, rows in table.items()
        for metric, words in rows.items()
    )


def rollout_metrics(
    sampled: Sequence[RolloutGroup],
    *,
    trained: Sequence[RolloutGroup],
    advantage: AdvantageConfig | None = None,
    weights: Mapping[str, float] | None = None,
    batch_groups: int | None = None,
    staleness: Sequence[int] = (),
    used: Sequence[RolloutGroup] | None = None,
    token_ages: Sequence[tuple[int, int]] = (),
    replayed: int = 0,
    rerolled: int = 0,
    too_long: int = 0,
) -> Metrics:
    """Return the metrics of a step's rollouts; metrics.yaml explains them.

    Args:
        sampled: the groups drawn for this step, also those that are not trained on; without replayed ones.
        trained: the groups of the batch, with replayed ones.
        advantage: decides whether equal sums of different rewards teach something.
        weights: the weights of the reward functions, by name; None: 1 each. Functions of weight 0 are only recorded.
        batch_groups: the number of groups in a full batch.
        staleness: for each fresh group of the batch, the steps since the version that sampled it.
        used: the groups of the batch as they are in `sampled`; None leaves out what was dropped.
        token_ages: for stretches of their tokens, the steps since the version that sampled them, and their number.
        replayed: the number of the batch's groups that were trained before.
        rerolled: the number of groups in `sampled` whose prompts were tried again.
        too_long: prompts that were passed over.
    """
    metrics = _rewards(sampled, advantage, weights) | _by_function(sampled, advantage, weights) | _lengths(sampled)
    metrics |= _episodes(sampled) | _roles(sampled) | _kept(sampled)
    metrics |= {} if advantage is None else _credit(sampled, trained, advantage)
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
        metrics["rollout/excluded_frac"] = fmean(map(_excluded, rollouts))
    if several := [group for group in sampled if len(group.rollouts) > 1]:
        metrics["rollout/frac_same"] = fmean(map(_are_same, several))
    if batch_groups:
        metrics["rollout/batch_fill"] = len(trained) / batch_groups
    if sampled or too_long:
        metrics["data/too_long_frac"] = too_long / (too_long + len(sampled))
    if staleness:
        metrics |= {"rollout/staleness_mean": fmean(staleness), "rollout/staleness_max": float(max(staleness))}
    if tokens := sum(count for _, count in token_ages):
        metrics["rollout/token_age_mean"] = sum(age * count for age, count in token_ages) / tokens
        metrics["rollout/versions_mean"] = fmean(len(_versions(each)) for each in rollouts if each.turns)
    if used is not None:
        metrics |= _selection(sampled, used, advantage, weights)
    return metrics


def _words(rollout: Rollout) -> tuple[tuple[int, ...], ...]:
    """Return what the policy said, turn by turn."""
    return tuple(turn.completion.token_ids for turn in rollout.turns)


def _are_same(group: RolloutGroup) -> bool:
    """Return whether all rollouts of a group say the same."""
    first, *others = map(_words, group.rollouts)
    return all(each == first for each in others)


def sample_metrics(samples: Sequence[Sample]) -> Metrics:
    """Return the metrics of the learner's samples: completions, and tokens that are not masked."""
    metrics = {"train/samples": float(len(samples)), "train/tokens": float(sum(sum(s.mask) for s in samples))}
    if samples:
        metrics["train/advantage_abs_mean"] = fmean(map(_advantage_size, samples))
    return metrics


def _advantage_size(sample: Sample) -> float:
    """Return |A| of a sample, or its mean over the trained tokens if they have weights."""
    if sample.weights is None:
        return abs(sample.advantage)
    trained = [abs(sample.advantage * w) for w, m in zip(sample.weights, sample.mask, strict=True) if m]
    return fmean(trained) if trained else 0.0


def time_metrics(metrics: Mapping[str, float], seconds: Mapping[str, float]) -> Metrics:
    """Return the times of a step's parts ("step", "rollout", "train", "sync") and what follows from them and its
    `metrics`.

    >>> time_metrics({"rollout/tokens": 600.0}, {"step": 3.0, "rollout": 2.0})
    {'time/step_s': 3.0, 'time/rollout_s': 2.0, 'perf/tok_s': 200.0, 'perf/sample_tok_s': 300.0}
    """
    times = {f"time/{part}_s": float(value) for part, value in seconds.items()}
    rates = {
        "perf/tok_s": ("rollout/tokens", "step"),
        "perf/sample_tok_s": ("rollout/tokens", "rollout"),
        "perf/train_tok_s": ("train/tokens", "train"),
    }
    if not metrics.get("rollout/tokens"):  # nothing was sampled, as in supervised training
        rates = {"perf/tok_s": ("train/tokens", "step"), "perf/train_tok_s": ("train/tokens", "train")}
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
    if any(rollout.rewards or rollout.reward is not None for group in groups for rollout in group.rollouts):
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
    """Return `reward/<name>/noise` of each function that scored equal completions."""
    unequal: dict[str, list[bool]] = {}
    for group in groups:
        for twins in _twins(group):
            for name in names:
                if len(values := _scored(twin.rewards.get(name) for twin in twins)) > 1:
                    unequal.setdefault(name, []).extend([differ(values)] * len(values))
    return {f"reward/{name}/noise": fmean(each) for name, each in unequal.items()}


def _twins(group: RolloutGroup) -> list[list[Rollout]]:
    """Return the rollouts of a group that are the same in what was said and heard, where there are several."""
    alike: dict[Any, list[Rollout]] = {}  # as long as each other: few are, and only their tokens are looked at
    for rollout in group.rollouts:
        alike.setdefault(tuple(len(turn.completion.token_ids) for turn in rollout.turns), []).append(rollout)
    said: dict[Any, list[Rollout]] = {}
    for rollout in chain.from_iterable(each for each in alike.values() if len(each) > 1):
        said.setdefault(_words(rollout), []).append(rollout)
    heard: dict[Any, list[Rollout]] = {}
    for rollout in chain.from_iterable(each for each in said.values() if len(each) > 1):
        heard.setdefault(tuple((t.prompt_ids, t.completion.token_ids) for t in rollout.turns), []).append(rollout)
    return [each for each in heard.values() if len(each) > 1]


def _shares(by_name: Mapping[str, Sequence[Sequence[float]]], weights: Mapping[str, float]) -> Metrics:
    """Return `reward/<name>/share` of each function whose values differ in any group."""
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
    if said := list(chain.from_iterable(map(_said, rollouts))):
        metrics["rollout/top_token_frac"] = _most_common(said) / sum(map(len, said))
    return metrics


def _most_common(said: Sequence[Sequence[int]]) -> int:
    """Return how often the most frequent token occurs in all of these sequences."""
    import numpy as np  # imported here: a program that only reads the meanings of metrics does not need it

    every = np.fromiter(chain.from_iterable(said), "int64", sum(map(len, said)))
    if every.min() >= 0 and every.max() < MOST_IDS:
        return int(np.bincount(every).max())
    return int(np.unique(every, return_counts=True)[1].max())


def _kept(groups: Sequence[RolloutGroup]) -> Metrics:
    """Return the mean probability of what tokens were drawn from; nothing where all were drawn from everything."""
    said = [turn.completion for group in groups for rollout in group.rollouts for turn in rollout.turns]
    masses = [
        math.exp(min(whole - kept, 0.0))
        for completion in said
        if completion.kept is not None
        for whole, kept in zip(completion.logprobs, completion.kept_logprobs, strict=True)
    ]
    return {"sampling/kept_mass": fmean(masses)} if masses else {}


def _versions(rollout: Rollout) -> set[PolicyVersion]:
    """Return the versions that drew its tokens."""
    return {version for turn in rollout.turns for version, _ in turn.completion.spans}


def _selection(
    sampled: Sequence[RolloutGroup],
    used: Sequence[RolloutGroup],
    advantage: AdvantageConfig | None,
    weights: Mapping[str, float] | None,
) -> Metrics:
    """Return how the completions that are trained differ from all that could have been: those, and those that were
    dropped.

    Dropped is what has no reward, and what is in a group that has a signal and is not used. Groups of equal rewards are
    neither: whatever their length, they have no gradient.
    """
    kept, trained, dropped = set(map(id, used)), list[Rollout](), list[Rollout]()
    for group in sampled:
        whole = id(group) not in kept and has_signal(group, advantage, weights=weights)
        for rollout in (each for each in group.rollouts if each.turns):
            if whole or _excluded(rollout):
                dropped.append(rollout)
            elif id(group) in kept:
                trained.append(rollout)
    if not trained:
        return {}
    every = [*trained, *dropped]
    rewards = {name: _scored(each.reward for each in part) for name, part in (("trained", trained), ("every", every))}
    metrics = {
        "rollout/trained_len_mean": fmean(map(_length, trained)),
        "rollout/dropped_frac": len(dropped) / len(every),
        "rollout/selection_len": fmean(map(_length, trained)) / max(1.0, fmean(map(_length, every))) - 1,
        "rollout/selection_reward": 0.0,
    }
    if rewards["trained"] and (spread := _spread(rewards["every"]) if len(rewards["every"]) > 1 else 0.0):
        metrics["rollout/selection_reward"] = abs(fmean(rewards["trained"]) - fmean(rewards["every"])) / spread
    if dropped:
        metrics["rollout/dropped_len_mean"] = fmean(map(_length, dropped))
    return metrics


def _excluded(rollout: Rollout) -> bool:
    """Return whether it cannot be trained: it has no reward, and was not scored by a teacher instead."""
    return _finite(rollout.reward) is None and (rollout.error is not None or not rollout.teacher)


def _said(rollout: Rollout) -> Iterator[Sequence[int]]:
    """Yield the tokens of each of a rollout's turns, without the one that ends a turn where there are others."""
    for turn in rollout.turns:
        ids = turn.completion.token_ids
        if ids:
            yield ids[:-1] if len(ids) > 1 and turn.completion.finish_reason is FinishReason.STOP else ids


def _length(rollout: Rollout) -> int:
    return sum(len(turn.completion.token_ids) for turn in rollout.turns)


def _total_length(rollout: Rollout) -> int:
    """Return tokens of a rollout's segments: what each begins with, was told and said."""
    total, seen = 0, ()
    for turn in rollout.turns:
        if turn.prompt_ids[: len(seen)] == seen:
            total -= len(seen)
        total += len(turn.prompt_ids) + len(turn.completion.token_ids)
        seen = turn.prompt_ids + turn.completion.token_ids if turn is not rollout.turns[-1] else ()
    return total


def _episodes(groups: Sequence[RolloutGroup]) -> Metrics:
    """Return the metrics of the rollouts that an environment played; nothing where there are none."""
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


def _roles(groups: Sequence[RolloutGroup]) -> Metrics:
    """Return `role/<role>/reward` and `role/<role>/std` of episodes with several players."""
    by_role: dict[str, list[list[float]]] = {}
    for group in groups:
        scored = [rollout.role_rewards for rollout in group.rollouts if _finite(rollout.reward) is not None]
        for role in sorted({role for rewards in scored for role in rewards}):
            by_role.setdefault(role, []).append([rewards[role] for rewards in scored if role in rewards])
    metrics: Metrics = {}
    for role, by_group in sorted(by_role.items()):
        metrics[f"role/{_plain(role)}/reward"] = fmean(value for values in by_group for value in values)
        if spreads := _spreads(by_group):
            metrics[f"role/{_plain(role)}/std"] = fmean(spreads)
    return metrics


def _credit(sampled: Sequence[RolloutGroup], trained: Sequence[RolloutGroup], advantage: AdvantageConfig) -> Metrics:
    """Return `turn/*` and `gigpo/*`; empty if turns have the advantage of their episode."""
    if not any(has_turn_advantages(group, advantage) for group in sampled):
        return {}
    metrics: Metrics = {}
    turns = [turn for group in trained for rollout in group.rollouts for turn in rollout.turns]
    values = [turn.advantage for turn in turns if turn.advantage is not None]
    if len(values) > 1:
        metrics["turn/advantage_std"] = _spread(values)
    if not isinstance(advantage, CreditConfig) or advantage.credit == "episode":
        return metrics
    compared = [sets for group in sampled if (terms := comparisons(group, advantage)) for sets in terms[-1][1]]
    if not (total := sum(map(len, compared))):
        return metrics
    metrics["turn/compared_share"] = sum(len(each) for each in compared if len(each) > 1) / total
    metrics["turn/signal_share"] = sum(len(s) for s in compared if differ([part.value for part in s])) / total
    if advantage.credit == "gigpo":
        metrics["gigpo/anchor_share"] = metrics.pop("turn/compared_share")
        metrics["gigpo/anchor_size"] = total / len(compared)
    return metrics


def _reported(episodes: Sequence[Rollout]) -> dict[str, list[float]]:
    """Return the numbers of the episodes' `info` by name, but for those that are metrics under another."""
    found: dict[str, list[float]] = {}
    for rollout in episodes:
        for name, value in rollout.info.items():
            if name not in ("turns", "failed") and math.isfinite(value):
                found.setdefault(_plain(name), []).append(value)
    return dict(sorted(found.items()))


def _plain(name: str) -> str:
    """Return it as a part of a metric's name."""
    return name.replace("/", "_")


def _spreads(by_group: Sequence[Sequence[float]]) -> list[float]:
    """Return the standard deviation inside each group that has one."""
    return [_spread(values) for values in by_group if len(values) > 1]


def _spread(values: Sequence[float]) -> float:
    """Return the standard deviation with n - 1 in the denominator; exactly 0 where values differ by nothing but
    rounding."""
    return stdev(values) if differ(values) else 0.0


def _scored(rewards: Iterable[float | None]) -> list[float]:
    return [value for reward in rewards if (value := _finite(reward)) is not None]


def _finite(reward: float | None) -> float | None:
    return reward if reward is not None and math.isfinite(reward) else None
