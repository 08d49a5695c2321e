"""Worker processes that run user code, and the thread that talks to each: calls, deadlines, replacement.

    process = WorkerProcess("groupwise.rewards.pool_worker", setup, memory_mb=None, decode=decode_answer)
    lane = Lane(process, waiting, capacity=1)          begins what is put into the deque `waiting`
    lane.start(); waiting.append(call); lane.wake()    ... and `call.answered` or one of the others is called

The worker is a fresh interpreter (never a fork of one with threads). It gets `setup` pickled, answers {"ready": true}
or {"failed": why}, and from then on one message for each call, by the call's number. Pickle goes one way only, from the
parent. A worker that ends, or does not answer a call by its deadline, is killed with all its descendants and replaced;
the calls that were in flight with it are told. What it prints is shown (`printed`), and the end of it is in the causes.
It ends with this process, also when that is killed with SIGKILL (`rewards.sandbox_child`).
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from groupwise.platform import ready
from groupwise.rewards.printed import show
from groupwise.rewards.sandbox import Box, SandboxError, trusted

LONGEST_MESSAGE = 1 << 30
START_S = 120.0  # for a worker to import what it is to run
WAIT_S = 2.0  # for the end of a worker that is ending, and for what it printed
KEPT_BYTES = 2000  # of what it prints
SHOWN = 300  # characters of it in a cause
_GONE = (OSError, EOFError, ValueError)  # a worker that ended, is late, or says what is no answer


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The reason why the worker of a call was lost: it ended (`cause`), or it was killed because calls were late
    (`late`: this one was, too). `alone`: no other call was in flight, so that this one is to blame. `printed` is the
    last output of the worker, as the end of a sentence."""

    cause: str
    printed: str
    killed: bool
    late: bool
    alone: bool


class LaneCall(Protocol):
    """A call that a worker executes. Of the methods other than `begins` exactly one is called, once."""

    number: int
    message: bytes
    deadline_s: float

    def begins(self) -> bool:
        """Return whether the call is still wanted; False if it has been settled otherwise."""
        ...

    def answered(self, answer: Any, printed: Callable[[], str]) -> None:
        """Take note that the worker answered; `printed()` returns its last output."""
        ...

    def unstarted(self, why: str) -> None:
        """Fail the call, because no worker could be started for it."""
        ...

    def lost(self, loss: Loss) -> None:
        """Take note that the worker died or was killed while it executed this call."""
        ...

    def closed(self) -> None:
        """Take note that the pool was closed while the worker executed this call."""
        ...


@dataclass(eq=False)
class _Begun:
    """A call that a worker has, and when it is late, on the monotonic clock."""

    call: LaneCall
    overdue: float


class Lane(threading.Thread):
    """Runs a thread that sends calls to one worker process, at most `capacity` at the same time. A call that has no
    answer `grace_s` after its deadline is late."""

    def __init__(self, worker: WorkerProcess, waiting: deque[Any], *, capacity: int, grace_s: float = 0.0):
        super().__init__(name="worker-lane", daemon=True)
        self.worker = worker
        self.waiting = waiting
        self.capacity = capacity
        self.grace_s = grace_s
        self.running: dict[int, _Begun] = {}
        self.stopping = False
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)

    def wake(self) -> None:
        with suppress(OSError):
            self._wake.send(b"w")

    def stop(self) -> None:
        """Stop at once, whatever the worker is doing; called from another thread."""
        self.stopping = True
        self.worker.abandon()
        self.wake()
        if self.ident is None:  # it was never started
            self._let_go()

    def _let_go(self) -> None:
        self._woken.close()
        self._wake.close()

    def run(self) -> None:
        while not self.stopping:
            self._begin_waiting()
            self._warm()
            self._listen()
        for begun in self.running.values():
            begun.call.closed()
        self.worker.stop()
        self._let_go()

    def _warm(self) -> None:
        """Have a worker before there is something to do."""
        if not self.running and not self.worker.sockets:
            with suppress(WorkerError):  # the first call says what is wrong
                self.worker.start()

    def _begin_waiting(self) -> None:
        while len(self.running) < self.capacity and not self.stopping:
            try:
                call: LaneCall = self.waiting.popleft()
            except IndexError:
                return
            if call.begins():
                self._begin(call)

    def _begin(self, call: LaneCall) -> None:
        try:
            if not self.running:
                self.worker.start()
        except WorkerError as error:
            return call.unstarted(str(error))
        self.running[call.number] = _Begun(call, time.monotonic() + call.deadline_s + self.grace_s)
        try:
            self.worker.send(call.message, hear=self._hear, patient_for=self._patient_for)
        except _GONE:  # it does not read, or is gone
            self._lost()

    def _patient_for(self) -> float | None:
        """Return seconds until the first of the calls in flight is overdue."""
        if not self.running:
            return None
        return max(0.001, self._next_overdue() - time.monotonic())

    def _next_overdue(self) -> float:
        return min(begun.overdue for begun in self.running.values())

    def _listen(self) -> None:
        """Wait for an event: a new call, an answer, a missed deadline, the worker's end."""
        watched = [self._woken, *self.worker.sockets]
        said, _ = ready(watched, timeout=self._patient_for())
        if self._woken in said:
            with suppress(BlockingIOError):
                self._woken.recv(4096)
        if set(said) & set(self.worker.sockets):
            try:
                self._hear()
            except _GONE:
                self._lost()
        elif self.running and self._next_overdue() <= time.monotonic():
            self._lost()

    def _hear(self) -> None:
        """Take the worker's next answer. Raises one of `_GONE` where no more will come."""
        number, answer = self.worker.receive(timeout=START_S)
        if (begun := self.running.pop(number, None)) is not None:  # else of a child that was forked, late
            begun.call.answered(answer, self.worker.printed)

    def _lost(self) -> None:
        """Replace a worker that ended, or has to: kill it, say why to whom it concerns, and have another."""
        begun, now = list(self.running.values()), time.monotonic()
        self.running.clear()
        late = [each.overdue <= now for each in begun]
        cause, printed = self.worker.stop()
        for each, overdue in zip(begun, late, strict=True):
            if self.stopping:
                each.call.closed()
                continue
            alone = len(begun) == 1
            each.call.lost(Loss(cause=cause, printed=printed, killed=any(late), late=overdue, alone=alone))


class WorkerError(Exception):
    """A worker could not be started."""


class WorkerProcess:
    """A worker process, started when it is needed; for one thread, but for `abandon`.

    Args:
        module: its `main(descriptor)` is the program, which serves the socket of that number.
        setup: the first message, pickled when a process is started.
        memory_mb: limits its address space.
        decode: what it sends -> the number of the call, and the answer.
    """

    def __init__(
        self,
        module: str,
        setup: Mapping[str, Any],
        *,
        memory_mb: int | None = None,
        decode: Callable[[bytes], tuple[int, Any]],
    ):
        self._module, self._setup, self._memory_mb, self._decode = module, setup, memory_mb, decode
        self._box: Box | None = None
        self._abandoned = False

    @property
    def sockets(self) -> list[socket.socket]:
        return [] if self._box is None or self._box.channel is None else [self._box.channel.socket]

    def start(self) -> None:
        """Start the process, unless one is ready. Raises WorkerError."""
        if self.sockets:
            if not ready(self.sockets, timeout=0)[0]:
                return
            self.stop()  # it ended while it had nothing to do
        try:
            self._box = Box(self._specification(), channel=True, longest=LONGEST_MESSAGE)
            if self._abandoned:
                self._box.end()
            channel = self._box.channel
            assert channel is not None
            channel.send(pickle.dumps(dict(self._setup)), timeout=START_S)
            said = json.loads(channel.receive(timeout=START_S))
        except TimeoutError:
            self.stop()
            raise WorkerError(f"its worker did not load the code within {START_S:g} s") from None
        except (OSError, EOFError, ValueError):
            cause, printed = self.stop()
            raise WorkerError(f"loading the code {cause}{printed}") from None
        except SandboxError as error:
            raise WorkerError(error.message) from None
        if why := said.get("failed"):
            self.stop()
            raise WorkerError(f"its worker could not load the code: {why}")

    def _specification(self) -> dict[str, Any]:
        argv = [sys.executable, "-u", "-c", boot(sys.path, self._module), "{channel}"]
        limits = None if self._memory_mb is None else {"memory_mb": self._memory_mb}
        return trusted(argv, env=os.environ, limits=limits, output_bytes=KEPT_BYTES)

    def send(self, message: bytes, *, hear: Callable[[], object], patient_for: Callable[[], float | None]) -> None:
        """Send a message, and meanwhile `hear` each answer that comes. Raises OSError, TimeoutError among them where it
        does not read for `patient_for()` seconds, and what `hear` raises."""
        if self._box is None or self._box.channel is None:
            raise BrokenPipeError
        self._box.channel.send_hearing(message, hear=hear, patient_for=patient_for)

    def receive(self, *, timeout: float) -> tuple[int, Any]:
        """Return the next answer; what was printed before it is shown. Raises OSError, EOFError or ValueError."""
        if self._box is None or self._box.channel is None:
            raise EOFError
        while show(message := self._box.channel.receive(timeout=timeout)):
            pass
        return self._decode(message)

    def printed(self) -> str:
        """Return the worker's last output, phrased to end an error message."""
        try:
            return "" if self._box is None else _quoted(self._box.output(timeout=WAIT_S))
        except SandboxError:
            return ""

    def stop(self) -> tuple[str, str]:
        """Kill it with its descendants: how it had ended by itself, and what it printed last."""
        box, self._box = self._box, None
        if box is None:
            return "ended its worker", ""
        if box.channel is not None and ready([box.channel.socket], timeout=0)[0]:
            with suppress(SandboxError):
                box.wait(timeout=WAIT_S)  # it is ending; what its status is, is still to be seen
        end = box.close()
        number, code = end.get("signal"), end.get("exit")
        printed = _quoted(end.get("stdout", "") + end.get("stderr", ""))
        if end.get("reason") is None and number is not None:
            memory = "; was memory short?" if number == signal.SIGKILL else ""
            return f"killed its worker (signal {number}, {signal.Signals(number).name}{memory})", printed
        if end.get("reason") is None and code is not None:
            return f"ended its worker (exit status {code})", printed
        return "lost its worker", printed

    def abandon(self) -> None:
        """Kill it, from another thread, and any that is started later."""
        self._abandoned = True
        if box := self._box:
            box.end()


def _quoted(printed: str) -> str:
    text = printed.strip()
    return f"; it last printed: {text[-SHOWN:]!r}" if text else ""


def boot(path: Sequence[str], module: str) -> str:
    """Return the program of a worker, for `python -c`: modules are looked for where the parent looks for them. First it
    hides the environment that it has from us."""
    hide = "from groupwise.platform import hide_memory; hide_memory()"
    return f"import sys; sys.path[:] = {list(path)!r}; {hide}; from {module} import main; main(int(sys.argv[1]))"
