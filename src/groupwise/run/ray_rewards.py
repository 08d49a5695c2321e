"""Reward workers as Ray actors: `scoring.workers` of them, each with a `RewardPool` of one process inside.

The pool in an actor enforces the deadline of a call and kills functions that hang, as it does without Ray; the group of
such a call gets no reward. If an actor or its machine is lost, its calls are made again in another actor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.config.run import RunConfig
from groupwise.engine.worker_group import WorkerGroup
from groupwise.errors import RewardError
from groupwise.rewards.base import reward_names
from groupwise.rewards.call import AT_START, FailureKind, GroupScores, RewardFunction, RewardSpec, TrainerState
from groupwise.rewards.pool import RewardPool, pickled
from groupwise.run.ray_actors import Actor, Place, enter


class RewardActor:
    """A reward worker on some machine; `open` it first."""

    def open(self, specs: Sequence[RewardSpec], reward_folder: Path, timeout_s: float, folder: str) -> None:
        """Have a pool for the functions, whose modules are looked for in `reward_folder`."""
        enter(folder)
        self._pool = RewardPool(specs, folder=reward_folder, timeout_s=timeout_s)
        self._pool.warm()

    async def answer(
        self, name: str, columns: bytes, size: int, prompt_id: str, state: TrainerState, together: bool
    ) -> GroupScores:
        """See `RewardPool.answer`."""
        return await self._pool.answer(name, columns, size=size, prompt_id=prompt_id, state=state, together=together)


class RayRewards:
    """`RewardWorkers` in actors, all in one `place`, of which each takes its share."""

    def __init__(self, config: RunConfig, specs: Sequence[RewardSpec], *, place: Place):
        scoring, launcher = config.scoring, config.launcher
        self._specs = dict(zip(reward_names(specs), specs, strict=True))
        self._workers = WorkerGroup(
            "reward worker",
            lambda number: Actor(place.start(RewardActor)),
            size=scoring.workers,
            setup={"open": ("open", (list(specs), config.folder, scoring.timeout_s, place.folder))},
            restarts=launcher.restarts,
            timeout_s=launcher.start_timeout_s,
        )

    def runs(self, function: RewardFunction) -> bool:
        return function.spec is not None and self._specs.get(function.name) == function.spec

    async def call(
        self,
        function: RewardFunction,
        columns: Mapping[str, list[Any]],
        *,
        size: int,
        prompt_id: str,
        state: TrainerState = AT_START,
    ) -> GroupScores:
        try:
            data = pickled(function, columns)
        except RewardError as error:
            return GroupScores.failed(error.message, FailureKind.EXCEPTION, size)
        asked = self._workers.ask("answer", function.name, data, size, prompt_id, state, function.is_async, weight=size)
        return await asyncio.wrap_future(asked)

    def close(self) -> None:
        self._workers.close()
