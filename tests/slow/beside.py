"""What a server does for others beside a load (`load.py`): the time of a chat, the wait between two events of a stream,
and its memory with that of the processes that read for it."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crash.place import Place

from .place import CHAT, MIB, forget_highest, highest_resident, resident

QUESTION = "What is 472 + 389? Think step by step."  # which the starter answers in some fifty tokens
STREAM = {"messages": [{"role": "user", "content": QUESTION}], "stream": True, "temperature": 0}
IDLE_S = 4.0


@dataclass
class Times:
    """Seconds, of many requests."""

    every: list[float] = field(default_factory=list)

    def at(self, share: float) -> float:
        return sorted(self.every)[min(len(self.every) - 1, int(share * len(self.every)))]

    def __str__(self) -> str:
        if not self.every:
            return "none"
        shown = ", ".join(
            f"{name} {1e3 * self.at(share):.0f}" for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
        )
        return f"{shown}, max {1e3 * max(self.every):.0f} ms ({len(self.every)})"


class Asking(threading.Thread):
    """One chat after another, or one stream after another, on one connection, until it is told to stop."""

    def __init__(self, place: Place, *, streams: bool):
        super().__init__(daemon=True)
        self._place, self._streams, self.times, self.stopped, self.failed = place, streams, Times(), False, ""

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._place.port, timeout=300)
        body = json.dumps(STREAM if self._streams else CHAT)
        while not self.stopped:
            began = time.perf_counter()
            connection.request("POST", "/v1/chat/completions", body=body, headers={"content-type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                self.failed = f"{answer.status}: {answer.read()[:200]!r}"
                return
            while answer.readline() if self._streams else answer.read():
                now = time.perf_counter()
                self.times.every.append(now - began)
                began = now
            if not self._streams:
                time.sleep(0.02)


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Idle, and beside the load."""

    name: str
    idle: Times
    chats: Times
    idle_stream: Times
    stream: Times
    told: dict[str, Any]
    seconds: float
    grown: int  # bytes, at most, of the server
    readers: int  # bytes, at most, of all processes that read at a time

    def __str__(self) -> str:
        told = {key: sorted(set(value)) if isinstance(value, list) else value for key, value in self.told.items()}
        return (
            f"{self.name}: {self.seconds:.1f} s, {told}\n  chats   {self.idle}\n  beside  {self.chats}\n"
            f"  events  {self.idle_stream}\n  beside  {self.stream}\n"
            f"  server +{self.grown / MIB:.0f} MiB, readers {self.readers / MIB:.0f} MiB"
        )


def beside(place: Place, name: str) -> Beside:
    """Sends the load twice, beside chats and beside streams."""
    forget_highest(place)
    before, readers = resident(place), Readers(place)
    idle, idle_stream = (_asked(place, lambda: time.sleep(IDLE_S), streams=streams) for streams in (False, True))
    began, told = time.monotonic(), list[dict[str, Any]]()
    readers.start()
    chats, stream = (
        _asked(place, lambda: told.append(_send(place, name)), streams=streams) for streams in (False, True)
    )
    readers.stopped = True
    readers.join()
    merged = {key: [*told[0][key], *told[1][key]] for key in ("seconds", "statuses", "codes")}
    return Beside(
        name=name,
        idle=idle,
        chats=chats,
        idle_stream=idle_stream,
        stream=stream,
        told=merged,
        seconds=time.monotonic() - began,
        grown=highest_resident(place) - before,
        readers=readers.highest,
    )


def _asked(place: Place, work: Callable[[], Any], *, streams: bool) -> Times:
    asking = Asking(place, streams=streams)
    asking.start()
    work()
    asking.stopped = True
    asking.join()
    assert not asking.failed, asking.failed
    return asking.times


def _send(place: Place, name: str) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).parent / "load.py"), str(place.port), name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


class Readers(threading.Thread):
    """Looks at what the processes have that were forked to read: memory of their own, not shared with others."""

    def __init__(self, place: Place):
        super().__init__(daemon=True)
        self._place, self.highest, self.stopped = place, 0, False

    def run(self) -> None:
        while not self.stopped:
            self.highest = max(self.highest, sum(map(_own, _descendants(self._place.pid))))
            time.sleep(0.05)


def _descendants(server: int) -> Sequence[int]:
    """The forked readers: children of the server's child that runs `reader_process`."""
    found = []
    for fork_server in _children(server):
        with suppress(OSError):
            if b"reader_process" in Path(f"/proc/{fork_server}/cmdline").read_bytes():
                found += _children(fork_server)
    return found


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        tasks = os.listdir(f"/proc/{pid}/task")
        return [int(each) for task in tasks for each in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    return []


def _own(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Private_Dirty:"):
                return int(line.split()[1]) * 1024
    return 0
