"""Difficulty that follows the pass rate. `data.difficulty` names a parameter of a task and its values, easy to hard:

    mean reward of the last `groups` groups at this level  > high    the next level
                                                           < low     the level before

and the count begins again. Groups that were sampled at another level say nothing about this one.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.bridges.reasoning_gym.problems import Problems, problem_id
from groupwise.config.data import DataConfig
from groupwise.errors import DataError
from groupwise.tasks.prompt_stream import Issued, PromptSource, Ticket, WrappedStream
from groupwise.types import Prompt, RolloutGroup


class AdaptiveDifficulty(WrappedStream):
    """A PromptSource of generated problems, of which each is drawn at its task's present level.

    Args:
        config: the source's, with `difficulty`.
        reward: the name of the reward that tells success; None takes the weighted sum.
    """

    def __init__(self, source: PromptSource, config: DataConfig, *, reward: str | None = None):
        super().__init__(source)
        self._problems, self._rules, self._reward = Problems(config), config.difficulty, reward
        self._level = dict.fromkeys(self._rules, 0)
        self._seen: dict[str, list[float]] = defaultdict(list)  # mean rewards of groups at the present level
        self._rate: dict[str, float] = {}  # the mean that decided last
        self._issued: dict[Ticket, int] = {}  # the level of what is on its way

    def issue(self, n: int) -> list[Issued]:
        """Return the next n problems; what was on its way when a run stopped has the level that it had."""
        return [self._at_level(each) for each in self._source.issue(n)]

    def resolve(self, ticket: Ticket) -> None:
        """See `PromptSource.resolve`."""
        super().resolve(ticket)
        self._issued.pop(ticket, None)

    def prompt(self, id: str) -> Prompt:
        """Return the problem of that id, at the level that is part of it. Raises DataError if there is none."""
        easiest = self._source.prompt(_easiest(id))
        return self._made(easiest, int(id.split("/")[1]))

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """Learn from scored groups, each once and when it is fresh; a group without rewards is ignored."""
        for group in groups:
            task, level, _ = group.prompt.id.split("/")
            values = [r.reward if self._reward is None else r.rewards.get(self._reward) for r in group.rollouts]
            rewards = [value for value in values if value is not None and math.isfinite(value)]
            if task in self._rules and rewards and int(level) == self._level[task]:
                self._seen[task].append(math.fsum(rewards) / len(rewards))
                self._decide(task)

    def metrics(self) -> dict[str, float]:
        """Return each task's level (0 is the easiest) and the mean reward of its last decision."""
        levels = {f"difficulty/{task}/level": float(level) for task, level in self._level.items()}
        return levels | {f"difficulty/{task}/rate": rate for task, rate in self._rate.items()}

    @property
    def cursor(self) -> dict[str, Any]:
        """Return where the stream and the levels stand, for `restore`; goes through JSON."""
        state = {
            "level": self._level,
            "seen": {task: list(seen) for task, seen in self._seen.items()},
            "rate": self._rate,
            "issued": [[*ticket, level] for ticket, level in self._issued.items()],
        }
        return self._source.cursor | {"difficulty": state}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Continue where `cursor` was taken. Raises DataError for a value that is not a cursor of these tasks and
        levels."""
        try:
            state = cursor["difficulty"]
            level = {str(task): int(each) for task, each in state["level"].items()}
            seen = {str(task): [float(each) for each in means] for task, means in state["seen"].items()}
            rate = {str(task): float(each) for task, each in state["rate"].items()}
            issued = {Ticket(int(epoch), int(position)): int(at) for epoch, position, at in state["issued"]}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"not the cursor of a difficulty: {type(error).__name__}: {error}") from error
        if level.keys() != self._rules.keys() or any(each >= len(self._rules[t].levels) for t, each in level.items()):
            raise DataError(f"the cursor's levels {level} are not those of data.difficulty; resume with the same ones")
        self._source.restore(cursor)
        self._level, self._rate, self._issued = level, rate, issued
        self._seen = defaultdict(list, seen)

    def _decide(self, task: str) -> None:
        rule, seen = self._rules[task], self._seen[task]
        if len(seen) < rule.groups:
            return
        rate = self._rate[task] = math.fsum(seen) / len(seen)
        step = (rate > rule.band[1]) - (rate < rule.band[0])
        self._level[task] = min(max(self._level[task] + step, 0), len(rule.levels) - 1)
        seen.clear()

    def _at_level(self, issued: Issued) -> Issued:
        task = issued.prompt.columns["task"]
        present = self._level.get(task, 0)
        level = self._issued.get(issued.ticket, present) if issued.again else present
        self._issued[issued.ticket] = level
        return dataclasses.replace(issued, prompt=self._made(issued.prompt, level))

    def _made(self, easiest: Prompt, level: int) -> Prompt:
        task, _, index = easiest.id.split("/")
        return easiest if level == 0 else self._problems.prompt(task, level, int(index))


def _easiest(id: str) -> str:
    """Return the id of the same problem at the easiest level; one that is none of ours as it is."""
    parts = id.split("/")
    return (
        problem_id(parts[0], 0, int(parts[2])) if len(parts) == 3 and parts[1].isdigit() and parts[2].isdigit() else id
    )
