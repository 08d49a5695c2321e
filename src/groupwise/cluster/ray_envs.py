"""Environments as Ray actors: `launcher.env_workers` of them, each with the episodes that began there.

    learner:  the episode asks the policy,  RemoteEnv.reset, step, score, close  ->  the environment itself  :actor

An episode stays where it began. One whose actor is lost is an episode in which the environment failed, as without Ray
one whose database is gone: `env.on_error` says what that is worth. The actor is replaced, and plays what begins then.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from groupwise.cluster.crew import Crew, WorkerLost
from groupwise.cluster.ray_actors import Actor, Place, enter
from groupwise.config import RunConfig
from groupwise.config_env import EnvConfig
from groupwise.envs.base import Episode, Observation, StepResult
from groupwise.envs.load import EnvFactory, load_env
from groupwise.envs.pool_worker import EnvHost
from groupwise.errors import EnvError
from groupwise.types import Message


class EnvActor(EnvHost):
    """Environments on some machine, one for each episode, by its number; `open` it first."""

    def __init__(self) -> None:
        """Nothing yet."""

    def open(self, env: EnvConfig, env_folder: Path, folder: str) -> None:
        """Load the class, whose module is looked for in `env_folder`. Raises LoadError, ConfigError."""
        enter(folder)
        EnvHost.__init__(self, env, load_env(env, folder=env_folder))


class RayEnvs:
    """`Environments` in actors, all in one `place`, of which each takes its share."""

    def __init__(self, config: RunConfig, factory: EnvFactory, *, place: Place):
        launcher, env = config.launcher, config.env
        assert env is not None
        options = {"max_concurrency": 2 * env.concurrency}  # a call of each episode, and its end while that hangs
        self.name, self.patience_s = factory.name, launcher.start_timeout_s
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._crews = {
            number: Crew(
                "environment worker",
                lambda number: Actor(place.start(EnvActor, **options)),
                size=1,
                first=number,
                again=False,
                orders={"open": ("open", (env, config.folder, place.folder))},
                restarts=launcher.restarts,
                timeout_s=launcher.start_timeout_s,
            )
            for number in range(launcher.env_workers)
        }
        self._held = dict.fromkeys(self._crews, 0)  # episodes

    def make(self) -> RemoteEnv:
        """An environment, in the actor with the fewest episodes."""
        with self._lock:
            number = min(self._held, key=self._held.__getitem__)
            self._held[number] += 1
        return RemoteEnv(self._crews[number], next(self._numbers), closed=partial(self._closed, number))

    def close(self) -> None:
        """End the actors."""
        for crew in self._crews.values():
            crew.close()

    def _closed(self, number: int) -> None:
        with self._lock:
            self._held[number] -= 1


class RemoteEnv:
    """An environment in an actor, as the episode that plays it sees it. Raises EnvError, ClusterError."""

    def __init__(self, crew: Crew, episode: int, *, closed: Callable[[], None]):
        self._crew, self._episode, self._closed = crew, episode, closed

    async def reset(self, case: Mapping[str, Any], seed: int) -> Observation:
        return await self._ask("reset", case, seed)

    async def step(self, message: Message) -> StepResult:
        return await self._ask("step", message)

    async def score(self, said: Episode) -> float | None:
        return await self._ask("score", said)

    async def close(self) -> None:
        self._closed()
        await self._ask("close")

    async def _ask(self, method: str, *args: Any) -> Any:
        try:
            return await asyncio.wrap_future(self._crew.ask(method, self._episode, *args))
        except WorkerLost as error:
            raise EnvError(f"the environment worker that had this episode was lost: {error}") from error
