"""Ray as Groupwise uses it: a cluster to talk to, a placement group with a bundle for each role, actors in bundles.

https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html. `ray` is imported here alone, and only when a
run asks for it. Ray restarts no actor by itself (`max_restarts` 0): the process that started an actor knows the state
to restore, and replaces it (`worker_group`, `ray_launch`).
"""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.engine.worker_group import WorkerLost
from groupwise.errors import ClusterError, ConfigError, StorageError

ANSWERS = ThreadPoolExecutor(1, "answers")  # Ray's own thread tells of them, and must not wait for Ray (ray.kill does)

INTERNAL, SHOWN = ("class_name:", "actor_id:", "namespace:"), 400  # of what Ray says of a lost actor; characters

Bundle = Mapping[str, float]  # of a placement group: {"CPU": 1.0, "GPU": 1.0}


def ray_module() -> Any:
    """Return the package. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"launcher.kind is ray, and Ray cannot be imported: {error}", hint="pip install 'groupwise[ray]'"
        ) from error


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Context manager: Ray's cluster at this address is reached; None is RAY_ADDRESS or the one that runs on this
    machine, and "local" starts one. A process that has reached one already stays with it. Raises ClusterError."""
    ray = ray_module()
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address=address or "auto", include_dashboard=False if address == "local" else None)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"Ray cannot be reached at {address or 'its usual address'}: {str(error).splitlines()[0]}",
            hint="start it with: ray start --head; or set launcher.address, `local` for a cluster of this run's own",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def placed(bundles: Sequence[Bundle], *, timeout_s: float, say: Callable[[str], None]) -> Iterator[Any]:
    """Context manager: Ray has reserved the bundles; gives the placement group. Raises ClusterError if it does not in
    time."""
    ray, groups = ray_module(), importlib.import_module("ray.util.placement_group")
    wanted, there = _total(bundles), ray.cluster_resources()
    short = [f"{kind}: {n:g} of {there.get(kind, 0.0):g}" for kind, n in wanted.items() if n > there.get(kind, 0.0)]
    if short:
        say(f"the cluster is too small ({', '.join(short)}); waiting {timeout_s:g} s for it to grow")
    group = groups.placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
    try:
        if not group.wait(timeout_s):
            raise ClusterError(
                f"Ray did not find room within {timeout_s:g} s (launcher.start_timeout_s) for {_said(wanted)} in "
                f"{len(bundles)} bundles; the cluster has {_said({kind: there.get(kind, 0.0) for kind in wanted})}",
                hint="lower launcher.engines, cpus, gpus, reward_cpus, env_cpus or the workers, or free the cluster",
            )
        yield group
    finally:
        groups.remove_placement_group(group)


def _total(bundles: Sequence[Bundle]) -> dict[str, float]:
    kinds = dict.fromkeys(kind for bundle in bundles for kind in bundle)
    return {kind: sum(bundle.get(kind, 0.0) for bundle in bundles) for kind in kinds}


def _said(resources: Bundle) -> str:
    return ", ".join(f"{n:g} {kind}" for kind, n in resources.items())


@dataclass(frozen=True, kw_only=True)
class Place:
    """Holds the place of an actor: bundle `index` of a placement group, of which it takes `share`. `folder` is the
    working directory of the launcher, at which relative paths of the configuration begin."""

    group: Any
    index: int
    share: Bundle
    folder: str

    def start(self, kind: type, **options: Any) -> Any:
        """Start an actor and return Ray's handle at once."""
        ray, strategies = ray_module(), importlib.import_module("ray.util.scheduling_strategies")
        here = strategies.PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.index)
        return (
            ray.remote(kind)
            .options(
                num_cpus=self.share.get("CPU", 0.0),
                num_gpus=self.share.get("GPU", 0.0),
                scheduling_strategy=here,
                max_restarts=0,
                max_task_retries=0,
                **options,
            )
            .remote()
        )


def enter(folder: str) -> None:
    """Change an actor's working directory to the launcher's. Raises StorageError if this machine has none of that
    name."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise StorageError.of(
            error,
            f"{this_machine()} has no directory {folder}, where the run was launched: {error.strerror}",
            hint="launch it from a directory that all machines share; a run on several machines needs one anyway",
        ) from None


def seen_here(directory: Path) -> None:
    """Raise StorageError, in an actor, where this machine does not see a directory of the run."""
    if not directory.is_dir():
        raise StorageError(
            f"{this_machine()} does not see {directory}, which the learner wrote on another machine",
            hint="set output_dir (or run_dir) to a directory on storage that all machines share",
        )


def this_machine() -> str:
    """Return how an error names where an actor is."""
    return f"the machine {platform.node()}"


class Actor:
    """An actor as a `GroupWorker`."""

    def __init__(self, handle: Any):
        self._handle = handle

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        try:
            asked = getattr(self._handle, method).remote(*arguments)
        except Exception as error:  # the answer tells of it, as of what happens later
            answer.set_exception(cause_of(error))
            return answer
        asked.future().add_done_callback(lambda done: ANSWERS.submit(_settle, answer, done))
        answer.add_done_callback(lambda answer: ray_module().cancel(asked) if answer.cancelled() else None)
        return answer

    def end(self) -> None:
        ray_module().kill(self._handle)


def _settle(answer: Future[Any], done: Future[Any]) -> None:
    error = done.exception()
    with suppress(InvalidStateError):  # it was given up
        answer.set_result(done.result()) if error is None else answer.set_exception(cause_of(error))


def cause_of(error: BaseException) -> BaseException:
    """Return the error of an actor's method, or WorkerLost if the actor is gone."""
    exceptions = importlib.import_module("ray.exceptions")
    if isinstance(error, exceptions.RayTaskError):
        return getattr(error, "cause", None) or error
    if isinstance(error, exceptions.RayError):
        lines = (line.strip() for line in str(error).splitlines())
        return WorkerLost(" ".join(line for line in lines if not line.startswith(INTERNAL))[:SHOWN])
    return error
