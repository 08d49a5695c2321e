"""Runs a training run on Ray, on a laptop or a cluster: starts and replaces the actors, and reserves their resources.

    launcher (this process)  --  starts  -->  learners, `train.devices` actors; rank 0 runs the unchanged loop, with
                                              agents in its process
    rank 0                   --  starts  -->  `launcher.engines` engines, or with engine vllm `vllm.servers` servers;
                                              `scoring.workers` reward workers and `launcher.env_workers` environment
                                              workers

All are in one placement group: a bundle for each learner, each engine or server, one for the reward workers together
and one for the environment workers together. Rank 0 replaces all but the learners (`worker_group`; for servers the
fleet of `engine/vllm`). When a learner dies, the other learners and everything that rank 0 started end, too, and the
launcher starts learners again, which continue from the last checkpoint, at most `launcher.restarts` times.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from groupwise.config.run import RunConfig
from groupwise.engine.worker_group import WorkerLost, times
from groupwise.errors import ClusterError, ConfigError, RankLostError, TrainingError
from groupwise.run.assemble import RemoteBackends
from groupwise.run.ray_actors import Actor, Bundle, Place, connected, enter, placed, ray_module
from groupwise.run.ray_engines import RayEngines
from groupwise.run.ray_envs import RayEnvs
from groupwise.run.ray_rewards import RayRewards
from groupwise.run.ray_servers import ray_servers
from groupwise.run.stop_request import StopRequest
from groupwise.store.rundir import reserve_run_dir
from groupwise.tasks.load_env_kind import load_env_kind

INTERRUPT_CHECK_S = 0.5  # between two looks whether Ctrl-C was pressed
LEADS_S = 10.0  # for rank 0 to fail, after another that did because of it

R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")


class Run(Protocol[R_co]):
    """The type of `loop.run_loop`, which is above this file and therefore handed over."""

    def __call__(self, config: RunConfig, *, remote: RemoteBackends, stop: StopRequest) -> R_co: ...


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The number of actors of each kind, and the resources that Ray reserves for one. With engine vllm `engines` are
    its servers."""

    learners: int
    learner: Bundle
    engines: int
    engine: Bundle
    reward_workers: int
    reward_worker: Bundle
    env_workers: int
    env_worker: Bundle

    @property
    def bundles(self) -> list[Bundle]:
        """Return those of the placement group: learners, engines, the reward workers together, the environment workers
        together."""
        together = [each for each in (self._rewards, self._envs) if each]  # Ray has no empty bundles
        return [*[self.learner] * self.learners, *[self.engine] * self.engines, *together]

    def places(self, group: Any, folder: str) -> Places:
        """Return where they go in the group."""
        place, alone = partial(Place, group=group, folder=folder), self.learners + self.engines
        first = [
            place(index=index, share=self.learner if index < self.learners else self.engine) for index in range(alone)
        ]
        last_engine = alone - 1
        with_rewards = alone if self._rewards else last_engine
        with_envs = len(self.bundles) - 1 if self._envs else last_engine
        return Places(
            learners=tuple(first[: self.learners]),
            engines=tuple(first[self.learners :]),
            rewards=place(index=with_rewards, share=self.reward_worker),
            envs=place(index=with_envs, share=self.env_worker) if self.env_workers else None,
        )

    @property
    def _rewards(self) -> Bundle:
        return _together(self.reward_worker, self.reward_workers)

    @property
    def _envs(self) -> Bundle:
        return _together(self.env_worker, self.env_workers)


def _together(worker: Bundle, count: int) -> Bundle:
    """Return what so many workers need; empty if that is nothing."""
    return {kind: n * count for kind, n in worker.items() if n * count}


@dataclass(frozen=True, kw_only=True)
class Places:
    """The place of each actor; workers without a CPU of their own are with the last engine. `envs` is None where
    environments run in the learner."""

    learners: tuple[Place, ...]
    engines: tuple[Place, ...]
    rewards: Place
    envs: Place | None


def roles_of(config: RunConfig, *, gpus_there: float = 0.0) -> Roles:
    """Return the actors of a run, on a cluster with so many GPUs.

    Raises ConfigError for what does not go with Ray, LoadError for an environment that cannot be imported here.
    """
    launcher, device = config.launcher, config.device
    vllm = config.vllm if config.engine == "vllm" else None
    if vllm is not None and (vllm.mode == "colocate" or vllm.gpus or vllm.sleep or launcher.engines != 1):
        raise ConfigError(
            "engine vllm on Ray: its servers are started on the cluster, on GPUs of their own that Ray chooses",
            hint="set vllm.servers, and leave launcher.engines, vllm.gpus, vllm.sleep and vllm.mode out",
            field="vllm.servers",
        )
    if vllm is None and config.train.lora is None:
        raise ConfigError(
            "train.lora null does not go with launcher.kind ray: engines in other processes get adapters only",
            hint="set train.lora, or train without Ray",
        )
    if device not in ("auto", "cpu", "cuda"):  # gpu-aware
        raise ConfigError(f"device {device!r}: Ray chooses the GPUs of its actors", hint="set device: cuda")
    gpus = launcher.gpus
    if gpus is None:
        gpus = 1.0 if device == "cuda" or (device == "auto" and gpus_there) else 0.0  # gpu-aware
    if bool(gpus) != (device == "cuda") and device != "auto":  # gpu-aware
        raise ConfigError(
            f"launcher.gpus = {gpus:g} does not go with device {device!r}", hint="leave launcher.gpus out"
        )
    learner: Bundle = {"CPU": launcher.cpus, **({"GPU": gpus} if gpus else {})}
    learners = config.train.devices or 1
    engines, engine = launcher.engines, learner
    if vllm is not None:
        each, left = vllm.tensor_parallel_size, max(0, int(gpus_there - gpus * learners)) if gpus else 0
        engines = vllm.servers or max(1, left // each) if vllm.starts_servers else 0
        engine = {"CPU": launcher.cpus, **({"GPU": float(each)} if gpus else {})}
    return Roles(
        learners=learners,
        learner=learner,
        engines=engines,
        engine=engine,
        reward_workers=config.scoring.workers,
        reward_worker={"CPU": launcher.reward_cpus},
        env_workers=launcher.env_workers if _has_environments(config) else 0,
        env_worker={"CPU": launcher.env_cpus},
    )


def _has_environments(config: RunConfig) -> bool:
    """Return whether there is something for environment workers to do: agents and `score_episode` ask the policy
    themselves, and are where that is. Raises LoadError, ConfigError."""
    if config.env is None or config.env.environment is None or not config.launcher.env_workers:
        return False
    return load_env_kind(config.env, folder=Path(config.folder), model=config.model, scored=False).in_workers


def supervise(config: RunConfig, run: Run[R], *, say: Callable[[str], None] = lambda text: None) -> R:
    """Return what `run` returns, on Ray. Ctrl-C is a clean stop, as it is of a run without.

    Raises:
        ConfigError: Ray is not installed, or the configuration does not go with it.
        ClusterError: Ray cannot be reached or has no room; learners were lost too often.
        GroupwiseError: as `run` does.
    """
    roles_of(config, gpus_there=1.0)  # what is wrong in any case is said before Ray is reached
    with StopRequest() as stop, connected(config.launcher.address):
        roles = roles_of(config, gpus_there=ray_module().cluster_resources().get("GPU", 0.0))
        with placed(roles.bundles, timeout_s=config.launcher.start_timeout_s, say=say) as group:
            places, lost = roles.places(group, os.getcwd()), 0
            config = config.model_copy(
                update={"run_dir": str(reserve_run_dir(config, note=say))}
            )  # learners that come later find it
            while True:
                try:
                    return _attempt(config, run, places, stop)
                except WorkerLost as error:
                    lost += 1
                    if lost > config.launcher.restarts or stop.requested:
                        raise ClusterError(
                            f"learners were lost {times(lost)}, the last time so: {error}",
                            hint="look at what they said last; launched again with resume=auto the run goes on",
                        ) from error
                    say(f"a learner was lost and the run goes on from its last checkpoint: {error}")
                    config = config.model_copy(update={"resume": "auto"})


def _attempt(config: RunConfig, run: Run[R], places: Places, stop: StopRequest) -> R:
    """Run with new learners. Raises WorkerLost if one dies."""
    learners = [Actor(place.start(LearnerActor, max_concurrency=2)) for place in places.learners]
    try:
        worlds = _worlds(learners, config.launcher.start_timeout_s)
        running = [
            learner.ask("run", config, run, places, world) for learner, world in zip(learners, worlds, strict=True)
        ]
        return _outcome(running, partial(learners[0].ask, "stop"), stop)
    except RankLostError as error:
        raise WorkerLost(error.message) from error
    finally:
        for learner in learners:
            learner.end()


def _worlds(learners: Sequence[Actor], timeout_s: float) -> list[dict[str, str]]:
    """Return the environment of each rank, as torchrun would make it; nothing for a single one."""
    if len(learners) == 1:
        return [{}]
    try:
        meeting = learners[0].ask("meeting").result(timeout_s)
    except TimeoutError:
        raise WorkerLost(f"learner 0 did not start within {timeout_s:g} s (launcher.start_timeout_s)") from None
    # Ray shows an actor its own GPUs only: each is the first on its machine
    world = {**meeting, "WORLD_SIZE": str(len(learners)), "LOCAL_RANK": "0"}
    return [{**world, "RANK": str(rank)} for rank in range(len(learners))]


def _outcome(running: Sequence[Future[Any]], ask_to_stop: Callable[[], object], stop: StopRequest) -> Any:
    """Return what rank 0 returned, once all have; what the first of them raised."""
    told, left = False, set(running)
    while left:
        done, left = wait(left, timeout=INTERRUPT_CHECK_S, return_when=FIRST_COMPLETED)
        if any(isinstance(each.exception(), TrainingError) for each in done):
            wait(running[:1], timeout=LEADS_S)  # another rank says only that rank 0 ended; that one says why
        for each in running:
            if each.done():
                each.result()
        if stop.requested and not told:
            told, _ = True, ask_to_stop()
    return running[0].result()


class LearnerActor:
    """A rank of the run in its own process."""

    def __init__(self) -> None:
        self._stop = StopRequest()

    def meeting(self) -> dict[str, str]:
        """Return where the ranks can meet: on this machine, of rank 0."""
        with socket.socket() as free:
            free.bind(("", 0))
            port = str(free.getsockname()[1])
        return {"MASTER_ADDR": ray_module().util.get_node_ip_address(), "MASTER_PORT": port}

    def run(self, config: RunConfig, run: Run[Any], places: Places, environment: dict[str, str]) -> Any:
        """Run as rank 0 or as another."""
        enter(places.learners[0].folder)
        os.environ.update(environment)
        vllm = config.engine == "vllm"
        remote = RemoteBackends(
            engine=None if vllm else partial(RayEngines, places=places.engines),
            servers=partial(ray_servers, places.engines) if vllm and places.engines else None,
            rewards=partial(RayRewards, place=places.rewards),
            envs=None if places.envs is None else partial(RayEnvs, place=places.envs),
        )
        return run(config, remote=remote, stop=self._stop)

    def stop(self) -> None:
        """Ask for a clean stop."""
        self._stop.requested = True
