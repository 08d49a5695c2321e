"""The reward functions of a run: where they run, what they log, how they fail. One for training and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from groupwise.rewards.base import RewardLog, RewardWorkers, score_group
from groupwise.rewards.call import RewardFunction, TrainerState
from groupwise.types import Rollout, RolloutGroup


class Scorer:
    """Scores groups, in `pool`'s processes if there is one. `log` is what came of it since `begin_step`; `on_scored` is
    told of each rollout when the functions are done with it."""

    def __init__(self, functions: Sequence[RewardFunction], *, pool: RewardWorkers | None = None, max_steps: int = 0):
        self.functions, self._pool = tuple(functions), pool
        self.on_scored: Callable[[Rollout], None] = lambda rollout: None
        self.log, self._state = RewardLog(), TrainerState(max_steps=max_steps)

    async def __call__(self, group: RolloutGroup) -> RolloutGroup:
        """Return the group with its rewards; what fails is in its rollouts as their error."""
        try:
            return await score_group(group, self.functions, pool=self._pool, log=self.log, state=self._state)
        finally:
            for rollout in group.rollouts:
                self.on_scored(rollout)

    def beside(self, functions: Sequence[RewardFunction]) -> Scorer | None:
        """Return a scorer by other functions, in the same processes, which are this one's to close; None without
        any."""
        other = Scorer(functions, pool=self._pool)
        other._state = self._state
        return other if functions else None

    def begin_step(self, step: int) -> None:
        """Start collecting for a new step."""
        self.log = RewardLog()
        self._state = TrainerState(global_step=step, max_steps=self._state.max_steps)

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.close()
