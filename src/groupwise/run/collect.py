"""Episodes -> groups -> samples: one group's way to the learner. `batches` says which groups, and when."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from groupwise.types import Rollout, RolloutGroup


@dataclass(frozen=True, kw_only=True)
class Collected:
    """Holds a step's groups: the step trains on `groups`; `sampled` has every group sampled for the step, for the
    statistics."""

    groups: tuple[RolloutGroup, ...]
    sampled: tuple[RolloutGroup, ...]
    too_long: int = 0  # prompts passed over because of their length
    ages: tuple[int, ...] = ()  # of the fresh groups: steps since the policy that sampled them
    token_ages: tuple[tuple[int, int], ...] = ()  # of their tokens: steps since the version that drew them; how many
    replayed: int = 0  # of `groups`: those trained again
    rerolled: int = 0  # prompts tried again

    @property
    def completions(self) -> list[Rollout]:
        return [rollout for group in self.sampled for rollout in group.rollouts]


# Scores a group. What fails is in its rollouts as their error; nothing is raised for it.
Score = Callable[[RolloutGroup], Awaitable[RolloutGroup]]
