"""Starts the vLLM servers of a run: from this process, from the first process of each other machine, or with Ray.

    rank 0 ── Fleet ──┬── here          ServerProcess, below this process
                      ├── machine 1     RemoteServer ── the store ── MachineServers, a thread of the first rank there
                      └── Ray           RayServer (`ray_servers`)

Rank 0 alone decides: it starts, watches and replaces every server (`engine/vllm/fleet.py`). The other machines of
torchrun do as they are told, through the store where the ranks met, and say there where a server listens and why it
ended. Their servers are below the ranks there, and end with them.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from groupwise.config.engine import VllmConfig
from groupwise.config.run import RunConfig
from groupwise.config.world import World
from groupwise.engine.vllm.open import Starters, starts_here
from groupwise.engine.vllm.seats import Seat, Seats, seated, seats_of
from groupwise.engine.vllm.server import ServerProcess, Shape, StartServer, launch_of
from groupwise.errors import GroupwiseError
from groupwise.run.vllm_place import first_of, visible_gpus, with_place

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

    from groupwise.run.assemble import RemoteBackends
    from groupwise.train.ranks import Ranks

LOOK_S = 0.3  # between two looks for orders
STOP_S = 30.0  # for a server on another machine to end

MAIL = "vllm"  # what the machines' part of the store is called


def open_servers(
    config: RunConfig, device: torch.device, ranks: Ranks | None, remote: RemoteBackends | None
) -> tuple[RunConfig, Starters | None]:
    """Return the configuration with the share of a GPU that vLLM gets and a directory that all machines see, and who
    starts its servers; None where the run starts none. Raises ConfigError."""
    if remote is not None and remote.servers is not None:
        config = seen_everywhere(config)
        return config, remote.servers(config)
    config, seats = with_place(config, device)
    if seats is None:
        return config, None
    if ranks is None or all(seat.node == 0 for seat in seats.servers):
        return config, partial(starts_here, config.vllm, seats=seats)
    config = seen_everywhere(config)
    return config, partial(_starts_on_machines, config.vllm, seats, ranks)


def give_unused_back(config: RunConfig, device: torch.device) -> None:
    """Give the memory back that torch keeps for later, where servers on the learners' GPUs are to take it."""
    if config.engine == "vllm" and config.vllm.sleep and device.type == "cuda":  # gpu-only: its allocator's cache
        torch.cuda.empty_cache()


def seen_everywhere(config: RunConfig) -> RunConfig:
    """Return the configuration with its versions laid where all machines of a run see them: in its directory, where
    `vllm.adapter_dir` names no other."""
    place = config.vllm.adapter_dir or str(Path(config.run_dir or config.output_dir).absolute())
    return config.model_copy(update={"vllm": config.vllm.model_copy(update={"adapter_dir": place})})


def _starts_on_machines(vllm: VllmConfig, seats: Seats, ranks: Ranks, shape: Shape) -> list[StartServer]:
    mail, here = ranks.own_line(MAIL), starts_here(vllm, shape, Seats(servers=seats.on(0)))
    elsewhere = {
        seat.number: partial(RemoteServer, mail, vllm, shape, seat) for seat in seats.servers if seat.node != 0
    }
    local = dict(zip((seat.number for seat in seats.on(0)), here, strict=True))
    starts: dict[int, StartServer] = {**local, **elsewhere}
    return [starts[seat.number] for seat in seats.servers]


class RemoteServer:
    """A server on another machine of torchrun, started at once: a `RunningServer`."""

    def __init__(self, mail: Store, vllm: VllmConfig, shape: Shape, seat: Seat):
        self._mail, self._seat = mail, seat
        self._life = mail.add(f"{seat.number}/lives", 1)
        self._tell({"vllm": vllm.model_dump(mode="json"), "shape": asdict(shape)})

    @property
    def url(self) -> str | None:
        return self._said("url")

    @property
    def ended(self) -> str | None:
        return self._said("ended")

    def stop(self) -> None:
        self._tell({})
        until = time.monotonic() + STOP_S
        while self.ended is None and time.monotonic() < until:
            time.sleep(LOOK_S)

    def _tell(self, order: dict[str, object]) -> None:
        with suppress(RuntimeError):  # the store is gone, and so is the run
            self._mail.set(f"{self._seat.number}/order", json.dumps({"life": self._life, **order}))

    def _said(self, what: str) -> str | None:
        key = f"{self._seat.number}/{self._life}/{what}"
        with suppress(RuntimeError):
            return self._mail.get(key).decode() if self._mail.check([key]) else None
        return None


class MachineServers:
    """Starts and ends the servers of this machine as rank 0 says (`RemoteServer`), in a thread; until `close`."""

    def __init__(self, mail: Store, seats: Sequence[Seat], *, alone: bool, address: str):
        self._mail, self._seats, self._alone, self._address = mail, seats, alone, address
        self._running: dict[int, tuple[int, ServerProcess]] = {}  # by the number of the seat: which life, and it
        self._done: dict[int, str] = {}  # the last order that was done, by seat
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="vllm-servers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all."""
        self._over.set()
        self._thread.join(STOP_S)

    def _serve(self) -> None:
        try:
            while not self._over.wait(LOOK_S):
                for seat in self._seats:
                    self._look(seat)
        except RuntimeError:  # the store is gone, and so is rank 0
            pass
        finally:
            for _, server in self._running.values():
                server.stop()

    def _look(self, seat: Seat) -> None:
        """Do what is ordered, and say what became of it."""
        if seat.number in self._running:
            life, server = self._running[seat.number]
            if server.ended is not None:
                self._end(seat, life, server)
        key = f"{seat.number}/order"
        if not self._mail.check([key]) or (said := self._mail.get(key).decode()) == self._done.get(seat.number):
            return
        self._done[seat.number], order = said, json.loads(said)
        if seat.number in self._running:
            life, server = self._running[seat.number]
            server.stop()
            self._end(seat, life, server)
        if "vllm" in order:
            self._begin(seat, order["life"], VllmConfig(**order["vllm"]), Shape(**order["shape"]))

    def _begin(self, seat: Seat, life: int, vllm: VllmConfig, shape: Shape) -> None:
        try:
            launch = launch_of(reachable(seated(vllm, seat, alone=self._alone), self._address), shape)
        except GroupwiseError as error:  # of this machine: there is no such interpreter here
            return self._mail.set(f"{seat.number}/{life}/ended", f"{socket.gethostname()}: {error.message}")
        self._running[seat.number] = (life, ServerProcess(launch))
        self._mail.set(f"{seat.number}/{life}/url", launch.url)

    def _end(self, seat: Seat, life: int, server: ServerProcess) -> None:
        del self._running[seat.number]
        self._mail.set(f"{seat.number}/{life}/ended", f"{socket.gethostname()}: {server.ended}")


def machine_servers(config: RunConfig, here: World, device: torch.device, ranks: Ranks) -> MachineServers | None:
    """Return the servers of this process's machine, if it is the first process there, others lead, and there are to be
    any."""
    each = here.local_size or here.size
    node = here.rank // each
    if config.engine != "vllm" or not config.vllm.starts_servers or node == 0 or here.local_rank != 0:
        return None
    seats = seats_of(
        config.vllm,
        learners=each,
        visible=visible_gpus(device),
        first=first_of(device, here),
        nodes=here.size // each,
    )
    if not seats.on(node):
        return None
    address = own_address(os.environ["MASTER_ADDR"])
    return MachineServers(ranks.own_line(MAIL), seats.on(node), alone=len(seats.servers) == 1, address=address)


def reachable(vllm: VllmConfig, address: str) -> VllmConfig:
    """Return the configuration of a server that other machines ask: where `vllm.host` is this machine's own loop, or
    every address, it listens at its `address` on their network, which they are told."""
    try:
        host = ipaddress.ip_address(vllm.host)
        elsewhere = not (host.is_loopback or host.is_unspecified)
    except ValueError:  # a name
        elsewhere = vllm.host != "localhost"
    return vllm if elsewhere else vllm.model_copy(update={"host": address})


def own_address(other: str) -> str:
    """Return the address of this machine on the network of another."""
    family, *_, where = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # nothing is sent
        return probe.getsockname()[0]
