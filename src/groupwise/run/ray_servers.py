"""vLLM's servers on a Ray cluster: each below an actor, on the GPUs that Ray gave that.

    rank 0:  Fleet -> RayServer  --ask-->  ServerActor -> ServerProcess   :its machine
             VllmEngine -> HTTP            ------------> vLLM

Rank 0 starts, watches and replaces them as it does those of its own machine (`engine/vllm/fleet.py`). An actor that
dies, with its machine or alone, is a server that ended: another takes its place in the bundle, wherever Ray has that by
then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path

from groupwise.config.engine import VllmConfig
from groupwise.config.run import RunConfig
from groupwise.engine.vllm.seats import Seat, seated
from groupwise.engine.vllm.server import ServerProcess, Shape, StartServer, launch_of
from groupwise.engine.worker_group import WorkerLost
from groupwise.errors import GroupwiseError
from groupwise.run.ray_actors import Actor, Place, enter, ray_module, seen_here, this_machine
from groupwise.run.vllm_servers import STOP_S, reachable


class ServerActor:
    """A vLLM server below a process that Ray started; `start` it first."""

    def __init__(self) -> None:
        self._server: ServerProcess | None = None

    def start(self, vllm: VllmConfig, shape: Shape, folder: str, address: str) -> str:
        """Start the server, and return where it listens: at this machine's address, unless it is that of rank 0.

        Raises StorageError where this machine does not see the run's folders, ConfigError where it has no such Python.
        """
        enter(folder)
        if vllm.adapter_dir is not None:
            seen_here(Path(vllm.adapter_dir))
        own = ray_module().util.get_node_ip_address()
        launch = launch_of(vllm if own == address else reachable(vllm, own), shape)
        self._server = ServerProcess(launch)
        return launch.url

    def ended(self) -> str:
        """Return why the server ended, once it has."""
        assert self._server is not None
        self._server.wait()
        return f"{this_machine()}: {self._server.ended}"

    def stop(self) -> None:
        """End the server with all its descendants."""
        if self._server is not None:
            self._server.stop()


class RayServer:
    """A server in a place of the cluster, started at once: a `RunningServer`."""

    def __init__(self, place: Place, vllm: VllmConfig, shape: Shape):
        self._actor = Actor(place.start(ServerActor, max_concurrency=3))
        address = ray_module().util.get_node_ip_address()
        self._url = self._actor.ask("start", vllm, shape, place.folder, address)
        self._ended: Future[str] | None = None

    @property
    def url(self) -> str | None:
        return self._url.result() if self._url.done() and self._url.exception() is None else None

    @property
    def ended(self) -> str | None:
        """Raises GroupwiseError where the server cannot be started there at all."""
        if not self._url.done():
            return None
        if (error := self._url.exception()) is not None:
            return _lost(error)
        if self._ended is None:
            self._ended = self._actor.ask("ended")
        if not self._ended.done():
            return None
        return self._ended.result() if (error := self._ended.exception()) is None else _lost(error)

    def stop(self) -> None:
        with suppress(WorkerLost, TimeoutError, GroupwiseError):
            self._actor.ask("stop").result(STOP_S)
        self._actor.end()


def _lost(error: BaseException) -> str:
    """Return why a server has ended whose actor is gone. Raises whatever else its actor raised."""
    if isinstance(error, WorkerLost):
        return str(error)
    raise error


def ray_servers(places: Sequence[Place], config: RunConfig) -> Callable[[Shape], list[StartServer]]:
    """Return who starts the servers of a run in these places."""
    alone = len(places) == 1

    def starters(shape: Shape) -> list[StartServer]:
        vllms = [seated(config.vllm, Seat(number=number), alone=alone) for number in range(len(places))]
        return [partial(RayServer, place, vllm, shape) for place, vllm in zip(places, vllms, strict=True)]

    return starters
