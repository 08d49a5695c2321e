"""Engines as Ray actors: a `Sampler` on the learner's side, and on the other a `LocalEngine` in each actor.

    learner:  RayEngines.submit -> the engine with the fewest completions to make  -> LocalEngine.submit   :actor
              RayEngines.load   -> every engine, from the run's directory on shared storage

Requests carry their seeds, so that one sent again to another engine, because its own died, comes back with the same
completions. A replaced engine loads the versions in use before it gets requests.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch

from groupwise.config.rewards import RewardConfig
from groupwise.config.run import EnvConfig, RunConfig
from groupwise.engine.worker_group import WorkerGroup, WorkerLost
from groupwise.errors import ConfigError, EnvError, ModelError, RewardError
from groupwise.model.load import LoadedModel, load_configured
from groupwise.rewards.base import AT_START, FailureKind, GroupScores, RewardFunction, TrainerState, reward_names
from groupwise.rewards.pool import RewardPool, pickled
from groupwise.run.assemble import open_engine
from groupwise.run.ray_actors import Actor, Place, enter, seen_here, this_machine
from groupwise.tasks.env import EnvFactory, MoveResult, Observation, StepResult, load_env
from groupwise.tasks.env_pool import PATIENCE_S, EnvPool, PooledEnv
from groupwise.tasks.env_worker import EnvHost, EpisodeGone, HostedEnv
from groupwise.types import Completion, PolicyVersion, SamplingRequest

SEEN_S, LOOK_S = 10.0, 0.1  # until a network's file system shows a new directory; between two looks


class EngineActor:
    """An engine in a process of its own; `open` it first."""

    def open(self, config: RunConfig, folder: str, base_hash: str) -> None:
        """Load the model. Raises ModelError, also if it is not the learner's."""
        enter(folder)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # of this thread: the engine's own has the others
        base = load_configured(config)
        if base.hash != base_hash:
            raise ModelError(
                f"{config.model!r} on {this_machine()} has other weights than the learner's",
                hint="give every machine the same model: name a directory on shared storage",
            )
        self._engine = open_engine(config, base, threads=threads)

    async def sample(self, request: SamplingRequest) -> list[Completion]:
        """As `Sampler.sample`, for one."""
        (completions,) = await self._engine.sample([request])
        return completions

    async def load(self, version: PolicyVersion, directory: str) -> None:
        """As `Sampler.load`. Raises StorageError where the directory is not on storage that this machine shares."""
        path, patience_s = Path(directory), SEEN_S
        while not path.is_dir() and patience_s > 0:
            await asyncio.sleep(LOOK_S)
            patience_s -= LOOK_S
        seen_here(path)
        self._engine.load(version, path)

    async def unload(self, version: PolicyVersion) -> None:
        """As `Sampler.unload`."""
        self._engine.unload(version)


class RayEngines:
    """A `Sampler` over `launcher.engines` actors, in `places`."""

    def __init__(self, config: RunConfig, base: LoadedModel, *, places: Sequence[Place]):
        launcher = config.launcher
        self._context_length = base.context_length
        self._workers = WorkerGroup(
            "engine",
            lambda number: Actor(places[number].start(EngineActor)),
            size=len(places),
            setup={"open": ("open", (config, places[0].folder, base.hash))},
            restarts=launcher.restarts,
            timeout_s=launcher.start_timeout_s,
        )

    @property
    def context_length(self) -> int:
        return self._context_length

    def submit(self, requests: Sequence[SamplingRequest]) -> list[Future[list[Completion]]]:
        return [self._ask(request) for request in requests]

    async def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Completion]]:
        return list(await asyncio.gather(*(asyncio.wrap_future(future) for future in self.submit(requests))))

    def load(self, version: PolicyVersion, directory: Path) -> None:
        self._workers.broadcast(str(version), "load", version, str(directory.resolve()))

    def adopt(self, version: PolicyVersion) -> None:
        raise ConfigError(
            f"{version} has no adapter, and engines in other processes have weights of their own",
            hint="set train.lora, or train without Ray",
        )

    def unload(self, version: PolicyVersion) -> None:
        self._workers.retract(str(version), "unload", version)

    def close(self) -> None:
        self._workers.close()

    def _ask(self, request: SamplingRequest) -> Future[list[Completion]]:
        needs = None if request.version.is_base else str(request.version)
        return self._workers.ask("sample", request, weight=request.n, needs=needs)


# ----------------------------------------------------------------------------------------------------------------------
# Reward workers as Ray actors: `scoring.workers` of them, each with a `RewardPool` of one process inside.
#
# The pool in an actor keeps the deadline of a call and kills what hangs or crashes, as it does without Ray; that costs
# a group its reward. An actor that is lost, or its machine, is nobody's fault: its calls are made again elsewhere.
# ----------------------------------------------------------------------------------------------------------------------


class RewardActor:
    """A reward worker on some machine; `open` it first."""

    def open(self, specs: Sequence[RewardConfig], reward_folder: Path, timeout_s: float, folder: str) -> None:
        """Have a pool for the functions, whose modules are looked for in `reward_folder`."""
        enter(folder)
        self._pool = RewardPool(specs, folder=reward_folder, timeout_s=timeout_s)
        self._pool.warm()

    async def answer(
        self, name: str, columns: bytes, size: int, prompt_id: str, state: TrainerState, together: bool
    ) -> GroupScores:
        """As `RewardPool.answer`."""
        return await self._pool.answer(name, columns, size=size, prompt_id=prompt_id, state=state, together=together)


class RayRewards:
    """`RewardWorkers` in actors, all in one `place`, of which each takes its share."""

    def __init__(self, config: RunConfig, specs: Sequence[RewardConfig], *, place: Place):
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


# ----------------------------------------------------------------------------------------------------------------------
# Environments as Ray actors: `launcher.env_workers` of them, each with the episodes that began there.
#
#     learner:  the episode asks the policy,  RemoteEnv.reset, step, score, close  ->  the environment itself  :actor
#
# An episode stays where it began. One whose actor is lost is an episode in which the environment failed, as without Ray
# one whose database is gone: `env.on_error` says what that is worth. The actor is replaced, and plays what begins then.
# ----------------------------------------------------------------------------------------------------------------------


class EnvActor:
    """Environments on some machine, one for each episode, by its number; `open` it first. They are in processes of the
    actor's, as `env.workers` says, so that one that loops or ends its process does not take the actor with it."""

    def open(self, env: EnvConfig, env_folder: Path, folder: str) -> None:
        """Load the class, whose module is looked for in `env_folder`. Raises LoadError, ConfigError."""
        enter(folder)
        factory = load_env(env, folder=env_folder)
        self._host = EnvHost(env, factory)
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
        """The answer to what the policy said."""
        return await self._of(episode).step(*said)

    async def score(self, episode: int, said: Any) -> float | dict[str, float] | None:
        """What `score` returns; None where there is no such method."""
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

    def __init__(self, config: RunConfig, factory: EnvFactory, *, place: Place):
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
        """An environment, in the actor with the fewest episodes."""
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
