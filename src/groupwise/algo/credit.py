"""Advantages of the rollouts of groups: one a rollout, or one a turn (credit inside an episode).

The advantage of a turn is a weighted sum of terms; each term compares some values with each other, of whole episodes,
of turns of the same number, of turns in the same state. So every way of credit is a choice of who is compared with
whom (`comparisons`), and `advantage.advantages` does the rest.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from groupwise.algo.advantage import (
    _functions,
    _with_rewards_of,
    advantages,
    differ,
    gdpo_advantages,
    is_valid,
    mean_of,
    voters,
)
from groupwise.algo.algorithm import Algorithm, group_advantages
from groupwise.config.algo import AdvantageConfig, CreditConfig
from groupwise.errors import ConfigError
from groupwise.types import Rollout, RolloutGroup, Turn


def with_advantages(
    groups: Sequence[RolloutGroup],
    spec: AdvantageConfig,
    *,
    weights: Mapping[str, float] | None = None,
    beside: Sequence[RolloutGroup] = (),
    algorithm: Algorithm | None = None,
) -> list[RolloutGroup]:
    """Return the same groups with `advantage` set on every rollout (None if it has none), and on every trained turn if
    turns have their own advantages (`has_turn_advantages`).

    `sum_then_normalize` reads `Rollout.reward`, which already is the weighted sum. `normalize_then_sum` reads
    `Rollout.rewards` and `weights`, for the rollouts whose `reward` is not None. `beside` are groups that are not
    trained, but count in the statistics of the batch. A given `algorithm` replaces the formulas.
    """
    if algorithm is None and beside:
        return with_advantages([*groups, *beside], spec, weights=weights)[: len(groups)]
    voting = [voters(group, spec) for group in groups]
    if algorithm is None and any(has_turn_advantages(group, spec) for group in groups):
        return [
            _with_rewards_of(group, each)
            for group, each in zip(groups, _with_turn_advantages(voting, spec), strict=True)
        ]
    if algorithm is not None:
        values = [group_advantages(algorithm, group) for group in voting]
    elif spec.aggregation == "normalize_then_sum":
        named = [[r.rewards if is_valid(r.reward) else {} for r in group.rollouts] for group in voting]
        values = gdpo_advantages(named, spec, weights=weights)
    else:
        values = advantages([[r.reward for r in group.rollouts] for group in voting], spec)
    return [
        replace(group, rollouts=tuple(replace(r, advantage=a) for r, a in zip(group.rollouts, row, strict=True)))
        for group, row in zip(groups, values, strict=True)
    ]


def has_signal(
    group: RolloutGroup, spec: AdvantageConfig | None = None, *, weights: Mapping[str, float] | None = None
) -> bool:
    """Return whether the group can teach anything: two or more scorable rollouts whose rewards differ.

    With `normalize_then_sum` it is enough that any one function's rewards differ, even if the sums are equal, but for
    functions whose weight is 0. Where turns have their own advantages it is enough that the returns of any turns
    that are compared differ, even if the rewards of all episodes are equal.
    """
    group = voters(group, spec)
    if has_turn_advantages(group, spec or AdvantageConfig()):
        terms = comparisons(group, spec or AdvantageConfig())
        return any(differ([part.value for part in each]) for _, compared in terms for each in compared)
    rollouts = [r for r in group.rollouts if is_valid(r.reward)]
    if spec is not None and spec.aggregation == "normalize_then_sum":
        rewards = [r.rewards for r in rollouts]
        return any(differ([r.get(name) for r in rewards]) for name in _functions(rewards, weights))
    return differ([r.reward for r in rollouts])


@dataclass(frozen=True)
class Compared:
    """Holds a value that is compared within a group, and its owner: the turns `turns` (by number) of rollout number
    `rollout`, one turn or all turns of a role."""

    rollout: int
    turns: tuple[int, ...]
    value: float


Terms = list[tuple[float, list[list[Compared]]]]

"""The terms of a group's advantages: the weight of each, and the values that are compared with each other."""


def has_turn_advantages(group: RolloutGroup, spec: AdvantageConfig) -> bool:
    """Return whether turns have their own advantages: `credit` says so, or episodes have several roles."""
    return _credit(spec).credit != "episode" or any(turn.role is not None for r in group.rollouts for turn in r.turns)


def comparisons(group: RolloutGroup, spec: AdvantageConfig) -> Terms:
    """Return the comparisons within a group; none if fewer than two of its rollouts can be scored."""
    spec = _credit(spec)
    scored = [(i, rollout) for i, rollout in enumerate(group.rollouts) if _can_be_scored(rollout)]
    tracks = [track for i, rollout in scored for track in _tracks(i, rollout)] if len(scored) > 1 else []
    if not tracks:
        return []
    episodes = _sets([(track.role, Compared(track.rollout, track.trained, track.reward)) for track in tracks])
    if spec.credit == "episode":
        return [(1.0, episodes)]
    turns = _sets([item for track in tracks for item in track.compared_turns(spec)])
    return [(1.0, turns)] if spec.credit == "turn" else [(1.0, episodes), (spec.step_advantage_weight, turns)]


def discounted_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """G_t = sum_{s >= t} discount^(s - t) r_s.

    >>> discounted_returns([0.0, 1.0, 4.0], 0.5)
    [1.5, 3.0, 4.0]
    """
    returns: list[float] = []
    for reward in reversed(rewards):
        returns.append(reward + discount * returns[-1] if returns else reward)
    return returns[::-1]


@dataclass(frozen=True, kw_only=True)
class _Track:
    """The turns of one role in an episode (all of them, where there are no roles): their numbers in it, in order, and
    the role's reward."""

    rollout: int
    role: str | None
    numbers: tuple[int, ...]
    turns: tuple[Turn, ...]
    reward: float

    @property
    def trained(self) -> tuple[int, ...]:
        return tuple(number for number, turn in zip(self.numbers, self.turns, strict=True) if turn.trained)

    def compared_turns(self, spec: CreditConfig) -> Iterator[tuple[Hashable, Compared]]:
        """Yield each trained turn with its return, under what it has in common with those that it is compared with."""
        in_time = sorted(range(len(self.turns)), key=lambda at: at if (t := self.turns[at].taken) is None else t)
        given = [self.turns[at].reward or 0.0 for at in in_time]
        if given:
            given[-1] += self.reward - math.fsum(given)
        states = _states(self.turns) if spec.credit == "gigpo" else ()
        for index, (at, value) in enumerate(zip(in_time, discounted_returns(given, spec.gamma), strict=True)):
            same = states[at] if spec.credit == "gigpo" else index if spec.turn_baseline == "index" else None
            if self.turns[at].trained:
                yield (self.role, same), Compared(self.rollout, (self.numbers[at],), value)


def _tracks(index: int, rollout: Rollout) -> list[_Track]:
    roles = dict.fromkeys((*rollout.role_rewards, *(turn.role for turn in rollout.turns)))
    assert rollout.reward is not None
    return [
        _Track(
            rollout=index,
            role=role,
            numbers=tuple(number for number, turn in enumerate(rollout.turns) if turn.role == role),
            turns=tuple(turn for turn in rollout.turns if turn.role == role),
            reward=rollout.reward if role is None else rollout.role_rewards.get(role, rollout.reward),
        )
        for role in roles
    ]


def _states(turns: Sequence[Turn]) -> list[Hashable]:
    """Return the state in which each turn was taken: its own name for it, or what its prompt adds to the turn that it
    continues from, the longest before it that its prompt begins with."""
    states: list[Hashable] = []
    seen: list[tuple[int, ...]] = [()]
    for turn in turns:
        begins = (each for each in seen if turn.prompt_ids[: len(each)] == each)
        before = seen[-1] if turn.prompt_ids[: len(seen[-1])] == seen[-1] else max(begins, key=len)
        states.append(turn.prompt_ids[len(before) :] if turn.state is None else turn.state)
        seen.append(turn.prompt_ids + turn.completion.token_ids)
    return states


def _credit(spec: AdvantageConfig) -> CreditConfig:
    """Return the options of credit; those of a job, which has none, are the defaults."""
    return spec if isinstance(spec, CreditConfig) else CreditConfig()


def _sets(items: Sequence[tuple[Hashable, Compared]]) -> list[list[Compared]]:
    """Return the values that have the same key, together; in the order of keys."""
    found: dict[Hashable, list[Compared]] = {}
    for key, compared in items:
        found.setdefault(key, []).append(compared)
    return list(found.values())


def _can_be_scored(rollout: Rollout) -> bool:
    given = [turn.reward for turn in rollout.turns if turn.reward is not None]
    return all(map(is_valid, (rollout.reward, *given, *rollout.role_rewards.values())))


def _with_turn_advantages(groups: Sequence[RolloutGroup], spec: AdvantageConfig) -> list[RolloutGroup]:
    """Return `with_advantages` for groups whose turns have their own advantages."""
    if spec.aggregation == "normalize_then_sum":
        hint = "set algo.aggregation: sum_then_normalize"
        raise ConfigError("aggregation normalize_then_sum does not go with advantages of turns or roles", hint=hint)
    terms = [comparisons(group, spec) for group in groups]
    sums: list[dict[tuple[int, int], float]] = [{} for _ in groups]
    for number in range(max(map(len, terms), default=0)):
        places = [
            (g, weight, each)
            for g, mine in enumerate(terms)
            if mine
            for weight, sets in mine[number : number + 1]
            for each in sets
        ]
        values = advantages([[part.value for part in each] for _, _, each in places], spec)
        for (g, weight, each), row in zip(places, values, strict=True):
            for part, value in zip(each, row, strict=True):
                for turn in part.turns:
                    place = (part.rollout, turn)
                    sums[g][place] = sums[g].get(place, 0.0) + weight * (value or 0.0)
    return [
        replace(group, rollouts=tuple(_weighed(i, r, mine, usable=bool(term)) for i, r in enumerate(group.rollouts)))
        for group, mine, term in zip(groups, sums, terms, strict=True)
    ]


def _weighed(index: int, rollout: Rollout, values: Mapping[tuple[int, int], float], *, usable: bool) -> Rollout:
    """Return a rollout with the advantages of its turns, and their mean as its own; with none where it cannot be
    scored."""
    turns = tuple(replace(turn, advantage=values.get((index, t))) for t, turn in enumerate(rollout.turns))
    own = [turn.advantage for turn in turns if turn.advantage is not None]
    if not usable or not _can_be_scored(rollout):
        return replace(rollout, turns=turns, advantage=None)
    return replace(rollout, turns=turns, advantage=mean_of(own) if own else 0.0)
