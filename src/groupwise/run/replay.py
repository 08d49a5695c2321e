"""Brings prompts back: groups that taught much are trained again, prompts on which everything failed are sampled again.

`ReplayBuffer` keeps the groups with the strongest signal,

    score = sum_i |A_i| x std(r)        over the scored rollouts i of the group; std with n - 1 in its denominator;
                                        where turns have advantages, the mean of theirs is |A_i|, and std is of
                                        what they were given, where that is more

and lends them to later batches that have room, drawn in proportion to their score (prioritised replay, after
arXiv 1511.05952, with the advantage in place of the TD error). It keeps what the engine sampled: token ids, behaviour
logprobs, versions. No padding, no cached log-probability of the trainer, so that a replayed group is the fresh group.

`RerollQueue` keeps the ids of prompts on which no completion was better than the worst, and hands them out again.

Both are off at size 0, go through JSON (`state_dict`, `load_state_dict`), and follow from their seed and what they were
shown.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.errors import DataError
from groupwise.store.rollouts import group_from_json, group_to_json
from groupwise.types import Rollout, RolloutGroup

_SAME = 1e-9  # rewards that differ by less are equal


# ---- groups ----
@dataclass(frozen=True, kw_only=True)
class ReplayEntry:
    """A group with its advantages, and the step that trained on it first."""

    group: RolloutGroup
    step: int
    score: float

    def age(self, step: int) -> int:
        """Steps since then."""
        return step - self.step


class ReplayBuffer:
    """The `size` groups with the highest score of the last `max_age` steps; 0 keeps nothing.

    `share` bounds what `quota` allows: replayed groups are at most this share of a batch.
    """

    def __init__(self, size: int, *, share: float = 0.25, max_age: int = 16, seed: int = 0):
        self.size, self.share, self.max_age = size, share, max_age
        self._entries: dict[Hashable, ReplayEntry] = {}  # oldest first
        self._lent: tuple[int, set[Hashable]] = (0, set())  # the last step that drew, and what
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, groups: Sequence[RolloutGroup], step: int) -> None:
        """Keep what is worth it of `step`'s groups, which have advantages. One that is here already keeps its age."""
        self._forget(step)
        if self.size <= 0:
            return
        for group in groups:
            score = signal(group)
            if score > 0:
                self._entries.setdefault(_identity(group), ReplayEntry(group=group, step=step, score=score))
        self._evict()

    def quota(self, fresh: int) -> int:
        """Return how many replayed groups may join a batch of `fresh` new ones: the largest r with r <= share (fresh +
        r).

        >>> [ReplayBuffer(8, share=0.25).quota(fresh) for fresh in (2, 3, 24, 240)]
        [0, 1, 8, 8]
        """
        if self.share >= 1:
            return max(0, self.size)
        return min(max(0, self.size), math.floor(self.share * fresh / (1 - self.share) + _SAME))

    def draw(self, n: int, step: int) -> list[RolloutGroup]:
        """Return at most n groups of earlier steps, drawn in proportion to their scores. The groups stay in the buffer,
        but several calls for the same `step` draw no group twice."""
        self._forget(step)
        if self._lent[0] != step:
            self._lent = (step, set())
        lent = self._lent[1]
        drawn: list[RolloutGroup] = []
        while len(drawn) < n:
            scores = {
                key: entry.score for key, entry in self._entries.items() if entry.age(step) > 0 and key not in lent
            }
            if not scores:
                break
            [key] = self._random.choices(list(scores), weights=list(scores.values()))
            lent.add(key)
            drawn.append(self._entries[key].group)
        return drawn

    def metrics(self, step: int) -> dict[str, float]:
        """Return how many groups are kept, and how old they are on average (steps)."""
        ages = [entry.age(step) for entry in self._entries.values()]
        return {"replay/size": float(len(ages)), "replay/age_mean": sum(ages) / max(1, len(ages))}

    def state_dict(self) -> dict[str, Any]:
        """Return everything for `load_state_dict`; fit for JSON."""
        entries = [{"step": entry.step, "group": group_to_json(entry.group)} for entry in self._entries.values()]
        version, words, gauss = self._random.getstate()
        return {"entries": entries, "random": [version, list(words), gauss]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; a smaller `size` keeps the best. Raises DataError for a value that is not such a
        state."""
        try:
            loaded = [(entry["step"], group_from_json(entry["group"])) for entry in state["entries"]]
            version, words, gauss = state["random"]
            self._random.setstate((version, tuple(words), gauss))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"not the state of a replay buffer: {type(error).__name__}: {error}") from error
        entries = [ReplayEntry(group=group, step=step, score=signal(group)) for step, group in loaded]
        self._entries = {_identity(entry.group): entry for entry in entries}
        self._evict()

    def _forget(self, step: int) -> None:
        self._entries = {key: entry for key, entry in self._entries.items() if entry.age(step) <= self.max_age}

    def _evict(self) -> None:
        """Drop the lowest scores; of equal ones the oldest."""
        while len(self._entries) > max(0, self.size):
            del self._entries[min(self._entries, key=lambda key: self._entries[key].score)]


def signal(group: RolloutGroup) -> float:
    """Return sum |A| x std(r) over the rollouts with a finite reward and advantage; 0 if fewer than two have them."""
    known = [rollout for rollout in group.rollouts if rollout.advantage is not None and rollout.reward is not None]
    scored = [(_size(rollout), rollout.reward or 0.0) for rollout in known]
    if len(scored) < 2 or not all(math.isfinite(value) for pair in scored for value in pair):
        return 0.0
    spread = statistics.stdev(reward for _, reward in scored)
    turns = [turn for rollout in known for turn in rollout.turns if turn.advantage is not None]
    given = [turn.reward or 0.0 for turn in turns] + [value for r in known for value in r.role_rewards.values()]
    if turns and len(given) > 1:
        spread = max(spread, statistics.stdev(given))
    return math.fsum(size for size, _ in scored) * spread


def _size(rollout: Rollout) -> float:
    """Return how large its advantages are: its own, or the mean of its turns'."""
    own = [abs(turn.advantage) for turn in rollout.turns if turn.advantage is not None]
    return statistics.fmean(own) if own else abs(rollout.advantage or 0.0)


def _identity(group: RolloutGroup) -> Hashable:
    """Return the prompt, and what was sampled by which version."""
    turns = [turn.completion for rollout in group.rollouts for turn in rollout.turns]
    return group.prompt.id, tuple((completion.version, completion.token_ids) for completion in turns)


# ---- prompts ----
def total_reward(rollout: Rollout) -> float | None:
    """Return the weighted sum of the rewards."""
    return rollout.reward


class RerollQueue:
    """Queues prompts that failed, first in, first out, to be tried again: at most `max_groups` a step from progress
    `start` on, each at most `attempts` times; `max_groups` 0 turns it off.

    A prompt failed if every rollout of its group has the lowest `outcome` seen so far, or if `outcome` is None for all
    of them. With a correctness reward among others (format, length), let `outcome` read the correctness reward: a
    constant format reward then hides no failure. A prompt that was handed out counts as waiting until its group is
    pushed, so that a checkpoint in between loses no prompt.
    """

    def __init__(
        self,
        max_groups: int,
        *,
        start: float = 0.0,
        attempts: int = 2,
        outcome: Callable[[Rollout], float | None] = total_reward,
    ):
        self.max_groups, self.start, self.attempts = max_groups, start, attempts
        self._outcome = outcome
        self._waiting: dict[str, float | None] = {}  # prompt id -> its best outcome, None where nothing was scored
        self._out: dict[str, float | None] = {}  # the same, of prompts handed out whose group has not come yet
        self._tries: dict[str, int] = {}
        self._lowest, self._highest = math.inf, -math.inf

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, groups: Sequence[RolloutGroup]) -> int:
        """Look at scored groups, fresh or tried again, and queue the prompts that failed; how many that were."""
        if self.max_groups <= 0:
            return 0
        outcomes_PG = [self._outcomes(group) for group in groups]
        seen = [value for outcomes in outcomes_PG for value in outcomes]
        self._lowest, self._highest = min([self._lowest, *seen]), max([self._highest, *seen])
        pushed = 0
        for group, outcomes in zip(groups, outcomes_PG, strict=True):
            id, best = group.prompt.id, max(outcomes, default=None)
            self._out.pop(id, None)
            if self._failed(best) and id not in self._waiting and self._tries.get(id, 0) < self.attempts:
                self._waiting[id] = best
                pushed += 1
        return pushed

    def pop(self, progress: float, *, most: int | None = None) -> list[str]:
        """Ids of the prompts to try again now: `max_groups` of them, or `most` if that is less (a step may ask several
        times). `progress` is the share of the run that is done, by steps or epochs.

        A prompt whose outcome was the lowest when it came, but is not any more, is dropped; and while all outcomes ever
        seen are equal, nothing tells failure from success.
        """
        popped: list[str] = []
        limit = self.max_groups if most is None else min(most, self.max_groups)
        while self._waiting and len(popped) < limit and progress >= self.start:
            if self._highest - self._lowest <= _SAME:
                break
            id = next(iter(self._waiting))
            best = self._waiting.pop(id)
            if self._failed(best):
                self._tries[id] = self._tries.get(id, 0) + 1
                self._out[id] = best
                popped.append(id)
        return popped

    def tries(self, id: str) -> int:
        """Return how often a prompt was handed out, the present time included."""
        return self._tries.get(id, 0)

    def metrics(self) -> dict[str, float]:
        """Return how many prompts wait."""
        return {"reroll/size": float(len(self._waiting))}

    def state_dict(self) -> dict[str, Any]:
        """Return everything for `load_state_dict`; fit for JSON. Prompts that are handed out wait again, in front."""
        tries = self._tries | {id: self._tries[id] - 1 for id in self._out}
        return {
            "waiting": [[id, best] for id, best in (self._out | self._waiting).items()],
            "tries": {id: count for id, count in tries.items() if count},
            "range": [self._lowest, self._highest] if self._lowest <= self._highest else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. Raises DataError for a value that is not such a state."""
        try:
            waiting = {str(id): best for id, best in state["waiting"]}
            tries = {str(id): int(count) for id, count in state["tries"].items()}
            lowest, highest = (math.inf, -math.inf) if state["range"] is None else map(float, state["range"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"not the state of a re-roll queue: {type(error).__name__}: {error}") from error
        self._waiting, self._out, self._tries = waiting, {}, tries
        self._lowest, self._highest = lowest, highest

    def _outcomes(self, group: RolloutGroup) -> list[float]:
        values = [self._outcome(rollout) for rollout in group.rollouts]
        return [value for value in values if value is not None and math.isfinite(value)]

    def _failed(self, best: float | None) -> bool:
        return best is None or best <= self._lowest + _SAME
