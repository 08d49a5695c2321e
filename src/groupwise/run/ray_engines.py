"""Engines as Ray actors: a `Sampler` on the learner's side, and on the other a `LocalEngine` in each actor.

    learner:  RayEngines.submit -> the engine with the fewest completions to make  -> LocalEngine.submit   :actor
              RayEngines.load   -> every engine, from the run's directory on shared storage

Requests carry their seeds, so that one sent again to another engine, because its own died, comes back with the same
completions. A replaced engine loads the versions in use before it gets requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import torch

from groupwise.config.run import RunConfig
from groupwise.engine.worker_group import WorkerGroup
from groupwise.errors import ConfigError, ModelError
from groupwise.model.load import LoadedModel, load_configured
from groupwise.run.assemble import open_engine
from groupwise.run.ray_actors import Actor, Place, enter, seen_here, this_machine
from groupwise.types import Completion, PolicyVersion, SamplingRequest

SEEN_S, LOOK_S = 10.0, 0.1  # until a network's file system shows a new directory; between two looks


class EngineActor:
    """An engine in its own process; `open` it first."""

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
        """See `Sampler.sample`, for one."""
        (completions,) = await self._engine.sample([request])
        return completions

    async def load(self, version: PolicyVersion, directory: str) -> None:
        """See `Sampler.load`. Raises StorageError where the directory is not on storage that this machine shares."""
        path, patience_s = Path(directory), SEEN_S
        while not path.is_dir() and patience_s > 0:
            await asyncio.sleep(LOOK_S)
            patience_s -= LOOK_S
        seen_here(path)
        self._engine.load(version, path)

    async def unload(self, version: PolicyVersion) -> None:
        """See `Sampler.unload`."""
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
