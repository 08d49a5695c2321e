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

from groupwise.config.run import EnvConfig, RunConfig
from groupwise.engine.worker_group import WorkerGroup, WorkerLost
from groupwise.errors import EnvError
from groupwise.run.ray_actors import Actor, Place, enter
from groupwise.tasks.env import MoveResult, Observation, StepResult
from groupwise.tasks.env_kind import EnvKind
from groupwise.tasks.env_loading import load_factory
from groupwise.tasks.env_pool import PATIENCE_S, EnvPool, PooledEnv
from groupwise.tasks.env_worker import EnvHost, EpisodeGone, HostedEnv, HostRequest


class EnvActor:
    """Environments on some machine, one for each episode, by its number; `open` it first. They are in processes of the
    actor's, as `env.workers` says, so that one that loops or ends its process does not take the actor with it."""

    def open(self, env: EnvConfig, env_folder: Path, folder: str) -> None:
        """Load the class, whose module is looked for in `env_folder`. Raises LoadError, ConfigError."""
        enter(folder)
        factory = load_factory(env, folder=env_folder)
        self._host = EnvHost(HostRequest.of(env), factory)
        self._pool = (
            EnvPool(env, name=factory.name, folder=env_folder, players=factory.players) if env.workers else None
        )
        self._played: dict[int, PooledEnv | HostedEnv] = {}

    async def reset(self, episode: int, case: Mapping[str, Any], seed: int) -> Observation | dict[str, Observation]:
        """Make the environment of a new episode, and begin it. Raises EnvError, as the others do."""
        made = HostedEnv(self._host, episode) if self._pool is None else await self._pool.make()
        self._played[episode] = made
        return await made.reset(case, seed)

    async def step(self, episode: int, *said: Any) -> StepResult | MoveResult:
        """Return the answer to what the policy said."""
        return await self._of(episode).step(*said)

    async def score(self, episode: int, said: Any) -> float | dict[str, float] | None:
        """Return the result of `score`; None without such a method."""
        return await self._of(episode).score(said)

    async def close(self, episode: int) -> None:
        """Let go of an episode, if it is here."""
        if (played := self._played.pop(episode, None)) is not None:
            await played.close()

    def _of(self, episode: int) -> PooledEnv | HostedEnv:
        if (played := self._played.get(episode)) is None:
            raise EpisodeGone("the environment worker that had this episode was lost")
        return played


class RayEnvs:
    """`Environments` in actors, all in one `place`, of which each takes its share."""

    def __init__(self, config: RunConfig, factory: EnvKind, *, place: Place):
        launcher, env = config.launcher, config.env
        assert env is not None
        options = {"max_concurrency": 2 * env.concurrency}  # a call of each episode, and its end while that hangs
        self.name, self.patience_s = factory.name, launcher.start_timeout_s + (PATIENCE_S if env.workers else 0.0)
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._workers_of = {
            number: WorkerGroup(
                "environment worker",
                lambda number: Actor(place.start(EnvActor, **options)),
                size=1,
                first=number,
                again=False,
                setup={"open": ("open", (env, config.folder, place.folder))},
                restarts=launcher.restarts,
                timeout_s=launcher.start_timeout_s,
            )
            for number in range(launcher.env_workers)
        }
        self._held = dict.fromkeys(self._workers_of, 0)  # episodes

    def make(self) -> RemoteEnv:
        """Return an environment, in the actor with the fewest episodes."""
        with self._lock:
            number = min(self._held, key=self._held.__getitem__)
            self._held[number] += 1
        return RemoteEnv(self._workers_of[number], next(self._numbers), closed=partial(self._closed, number))

    def close(self) -> None:
        """End the actors."""
        for workers in self._workers_of.values():
            workers.close()

    def _closed(self, number: int) -> None:
        with self._lock:
            self._held[number] -= 1


class RemoteEnv:
    """An environment in an actor, as the episode that plays it sees it. Raises EnvError, ClusterError."""

    def __init__(self, workers: WorkerGroup, episode: int, *, closed: Callable[[], None]):
        self._workers, self._episode, self._closed = workers, episode, closed

    async def reset(self, case: Mapping[str, Any], seed: int) -> Observation | dict[str, Observation]:
        return await self._ask("reset", case, seed)

    async def step(self, *said: Any) -> StepResult | MoveResult:
        return await self._ask("step", *said)

    async def score(self, said: Any) -> float | dict[str, float] | None:
        return await self._ask("score", said)

    async def close(self) -> None:
        self._closed()
        await self._ask("close")

    async def _ask(self, method: str, *args: Any) -> Any:
        try:
            return await asyncio.wrap_future(self._workers.ask(method, self._episode, *args))
        except WorkerLost as error:
            raise EnvError(f"the environment worker that had this episode was lost: {error}") from error
