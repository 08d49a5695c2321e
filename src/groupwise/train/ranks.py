"""The processes of a run that train together (torch.distributed), and what they do with each other.

    join          meets the other processes at torchrun's address, and sets up two groups
    Ranks.sum     a tensor, added up over all ranks        on the devices: NCCL, or gloo on CPUs
    Ranks.gather  an object of every rank, at every rank   always gloo
    Ranks.send_order, next_order                           rank 0 tells the others what to do next
    Ranks.own_line                                         a separate store for other threads

No wait is endless. Every rank first passes a barrier with a deadline, so that a missing rank is reported by its number
instead of a hang inside a collective: RankLostError says which rank did not reach which phase, and how long the others
waited. Between orders rank 0 may sample for any time: the other ranks check its heartbeat.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, rendezvous  # pyright: ignore[reportPrivateImportUsage]

from groupwise.config.world import World
from groupwise.errors import RankLostError

T = TypeVar("T")
MOST_BEAT_S = 5.0
_MEETINGS = itertools.count()  # numbers the runs of this process; every other process counts alike
MIN_LOOK_S, MAX_LOOK_S = 0.0005, 0.02  # between two looks for an order
_LOST = re.compile(
    r"gloo|nccl|Connection (closed|reset|refused)|Broken pipe|[Tt]imed? ?out|monitoredBarrier|Socket", re.IGNORECASE
)


class Ranks:
    """This process among the others. Made by `join`; `close` it.

    Args:
        store: the store for orders and for rank 0's heartbeat.
        deadline_s: seconds that every rank has to come to a phase.
    """

    def __init__(self, world: World, store: Store, *, device: torch.device, deadline_s: float, meeting: int = 0):
        self.rank, self.size, self.device, self.deadline_s = world.rank, world.size, device, deadline_s
        self.local_size = world.local_size or world.size
        self._store, self._meeting = store, meeting
        self.control: Any = dist.new_group(backend="gloo", timeout=self._timeout)  # for what is not a tensor
        self._orders = self._phases = 0
        self._store.set(f"phase/{self.rank}", "0")
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        if self.leads:
            self._heart.start()

    @property
    def leads(self) -> bool:
        """Return whether this is rank 0."""
        return self.rank == 0

    def sum(self, tensor: Tensor, *, phase: str) -> None:
        """Add it up over all ranks, in place. Raises RankLostError."""
        with self.together(phase):
            dist.all_reduce(tensor)

    def gather(self, value: T, *, phase: str) -> list[T]:
        """Return the value of every rank, by rank. Raises RankLostError."""
        values: list[Any] = [None] * self.size
        with self.together(phase):
            dist.all_gather_object(values, value, group=self.control)
        return values

    def spread(self, value: T, *, phase: str) -> T:
        """Rank 0's value, at every rank. Raises RankLostError."""
        box = [value]
        with self.together(phase):
            dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def groups_of(self, size: int) -> Any:
        """Return the group of `size` ranks, one after another, that this one is in. Every rank calls this."""
        with self.together("meeting in groups"):
            firsts = range(0, self.size, size)
            made = [dist.new_group([*range(first, first + size)], timeout=self._timeout) for first in firsts]
        return made[self.rank // size]

    def send_order(self, order: bytes) -> None:
        """Send an order from rank 0 to all others, who wait in `next_order`. Raises RankLostError."""
        key = self._next_key()
        with self.named("an order"):
            self._store.set(key, "")
        self.spread(order, phase="an order")
        with self.named("an order"):
            self._store.delete_key(key)  # all have seen it: they are past the barrier

    def next_order(self) -> bytes:
        """Wait for rank 0, for as long as it lives. Raises RankLostError once its heart has stood still too long."""
        key = self._next_key()
        with self.named("an order"):
            self._await(key)
        return self.spread(b"", phase="an order")

    @contextmanager
    def together(self, phase: str) -> Iterator[None]:
        """Wait for all ranks, and name a lost rank in an error inside the block."""
        with self.named(phase):
            self._phases += 1
            self._store.set(f"phase/{self.rank}", str(self._phases))
            dist.monitored_barrier(self.control, timeout=self._timeout, wait_all_ranks=True)
            yield

    @contextmanager
    def named(self, phase: str) -> Iterator[None]:
        """Raise RankLostError in place of an error that a lost rank caused; other errors pass through."""
        started = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and not _LOST.search(str(error)):
                raise
            raise self._lost(phase, error, time.monotonic() - started) from error

    def own_line(self, name: str) -> Store:
        """Return a part of the store where the ranks met, over its own connection: a connection answers one
        question at a time, and a thread is not to wait behind a rank that waits for another. Raises RankLostError."""
        with self.named(name):
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            line = dist.TCPStore(host, port, is_master=False, timeout=self._timeout)
            return PrefixStore(f"{name}/{self._meeting}", line)

    def close(self) -> None:
        """Leave the group."""
        self._ended.set()
        if self._heart.is_alive():
            self._heart.join(timeout=MOST_BEAT_S)
        with suppress(RuntimeError):
            dist.destroy_process_group()

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self.deadline_s)

    def _next_key(self) -> str:
        self._orders += 1
        return f"order/{self._orders}"

    def _beat(self) -> None:
        while not self._ended.wait(min(MOST_BEAT_S, self.deadline_s / 4)):
            with suppress(RuntimeError):  # a rank that waits notices that the store is gone
                self._store.add("beat", 1)

    def _await(self, key: str) -> None:
        """Wait until the store has the key. Raises DistError if rank 0's heartbeat stops, or the store is gone."""
        watch = _Watch(self._store, key)
        while not watch.over.wait(self.deadline_s / 8):
            if time.monotonic() - watch.alive_at > self.deadline_s:
                raise dist.DistStoreError(f"the heart of rank 0 stands still, or the store of {key} does not answer")
        if watch.error is not None:
            raise watch.error

    def _missing(self) -> list[int]:
        """Return, on rank 0, whose store answers, the ranks that have not come to this phase."""
        with suppress(RuntimeError):
            keys = [f"phase/{rank}" for rank in range(self.size)]
            return [rank for rank, key in enumerate(keys) if int(self._store.get(key)) < self._phases]
        return []

    def _lost(self, phase: str, error: RuntimeError, seconds: float) -> RankLostError:
        named = re.search(r"Ranks? ([\d, ]+?) failed to pass", str(error))
        missing = named[1].strip() if named else ", ".join(map(str, self._missing())) if self.leads else "0 or another"
        absent = f"rank {missing}" if missing else "another rank"
        return RankLostError(
            f"rank {self.rank} of {self.size} waited for {absent} in phase {phase!r} for {seconds:.1f} s and gave up "
            f"(train.deadline_s is {self.deadline_s:g})",
            hint="look at what the lost rank said last; the run goes on from its last checkpoint with resume=auto",
        )


class _Watch:
    """Looks for a key and for heartbeats in its own thread: a store whose process stands still answers never."""

    def __init__(self, store: Store, key: str):
        self.over, self.alive_at = threading.Event(), time.monotonic()
        self.error: RuntimeError | None = None
        threading.Thread(target=self._look, args=(store, key), name="orders", daemon=True).start()

    def _look(self, store: Store, key: str) -> None:
        beat, pause_s = -1, MIN_LOOK_S
        try:
            while not store.check([key]):
                now = store.add("beat", 0)
                if now != beat:
                    beat, self.alive_at = now, time.monotonic()
                time.sleep(pause_s := min(1.5 * pause_s, MAX_LOOK_S))
        except RuntimeError as error:
            self.error = error
        self.over.set()


def join(world: World, *, device: torch.device, deadline_s: float) -> Ranks:
    """Meet the other processes at MASTER_ADDR:MASTER_PORT; again, after a run, for the next one in the same processes.

    Raises:
        RankLostError: not all came in time.
    """
    meeting = next(_MEETINGS)  # the store outlives a run, and with it where its processes listened
    started, timeout = time.monotonic(), timedelta(seconds=deadline_s)
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",  # gpu-aware
            store=PrefixStore(f"groups/{meeting}", store),
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        return Ranks(
            world, PrefixStore(f"orders/{meeting}", store), device=device, deadline_s=deadline_s, meeting=meeting
        )
    except (RuntimeError, ValueError) as error:
        raise RankLostError(
            f"rank {world.rank} of {world.size} did not meet the others in {time.monotonic() - started:.1f} s "
            f"(train.deadline_s is {deadline_s:g}): {str(error).splitlines()[0]}",
            hint="start all processes with groupwise launch; groupwise doctor looks at ports and addresses",
        ) from error
