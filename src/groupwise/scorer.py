"""The reward functions of a run: where they run, what they log, how they fail. One for training and evaluation."""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.rewards.base import RewardFunction, RewardLog, RewardWorkers, score_group
from groupwise.rewards.call import TrainerState
from groupwise.types import RolloutGroup


class Scorer:
    """Scores groups, in `pool`'s processes if there is one. `log` is what came of it since `begin_step`."""

    def __init__(self, functions: Sequence[RewardFunction], *, pool: RewardWorkers | None = None, max_steps: int = 0):
        self.functions, self._pool = tuple(functions), pool
        self.log, self._state = RewardLog(), TrainerState(max_steps=max_steps)

    async def __call__(self, group: RolloutGroup) -> RolloutGroup:
        """The group with its rewards; what fails is in its rollouts as their error."""
        return await score_group(group, self.functions, pool=self._pool, log=self.log, state=self._state)

    def begin_step(self, step: int) -> None:
        """What is logged from now on is this step's."""
        self.log = RewardLog()
        self._state = TrainerState(global_step=step, max_steps=self._state.max_steps)

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.close()
