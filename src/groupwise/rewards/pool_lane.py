"""One worker process of a RewardPool and the thread that speaks with it: begin calls, see their deadlines, replace what
is lost. `pool` says what all of this is for; `pool_worker` is the process from the inside."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from groupwise.rewards.call import Answer, Failure, FailureKind
from groupwise.rewards.pool_worker import LONGEST_MESSAGE, Request, boot, decode_answer
from groupwise.sandbox import Box, SandboxError, trusted

START_S = 120.0  # for a worker to import the functions
GRACE_S = 2.0  # beyond its deadline, for an async function to be cancelled by its worker
KEPT_BYTES = 2000  # of what reward code prints
SHOWN = 300  # characters of it in a cause
PATIENCE = 3  # calls of a function that did not answer in time, one after another


@dataclass(eq=False)
class PooledCall:
    request: Request
    future: Future[Answer]
    overdue: float = 0.0  # on the monotonic clock, once it has begun

    def resolve(self, answer: Answer) -> None:
        with suppress(InvalidStateError):  # whoever waited has gone
            self.future.set_result(answer)

    def fail(self, cause: str, kind: FailureKind) -> None:
        self.resolve(Answer.failed(f"reward {self.request.name!r} {cause}", kind, self.request.size))


class Lane(threading.Thread):
    """One worker and the thread that speaks with it, with at most `capacity` calls in flight. `again` gets the calls
    that were in flight with another when the worker was lost."""

    def __init__(
        self,
        worker: WorkerProcess,
        waiting: deque[PooledCall],
        *,
        capacity: int,
        patience: Patience,
        again: Callable[[PooledCall], None] | None,
    ):
        super().__init__(name="rewards", daemon=True)
        self.worker = worker
        self.waiting = waiting
        self.capacity = capacity
        self.patience = patience
        self.again = again
        self.running: dict[int, PooledCall] = {}
        self.stopping = False
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)

    def wake(self) -> None:
        with suppress(OSError):
            self._wake.send(b"w")

    def stop(self) -> None:
        """From another thread: end, whatever the worker is doing."""
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
        for call in self.running.values():
            call.fail("was not answered: the pool was closed", FailureKind.CRASH)
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
                call = self.waiting.popleft()
            except IndexError:
                return
            if not call.future.cancelled():
                self._begin(call)

    def _begin(self, call: PooledCall) -> None:
        request = call.request
        if cause := self.patience.refusal(request.name, request.deadline_s):
            return call.fail(cause, FailureKind.TIMEOUT)
        try:
            if not self.running:
                self.worker.start()
        except WorkerError as error:
            return call.fail(f"could not be called: {error}", FailureKind.CRASH)
        call.overdue = time.monotonic() + request.deadline_s + (GRACE_S if self.again else 0.0)
        self.running[request.number] = call
        try:
            self.worker.send(request, timeout=self._patient_for())
        except OSError:  # it does not read, or is gone
            self._lost()

    def _patient_for(self) -> float | None:
        """Seconds until the first of the calls in flight is overdue."""
        if not self.running:
            return None
        return max(0.001, min(call.overdue for call in self.running.values()) - time.monotonic())

    def _listen(self) -> None:
        """Until something happens: a new call, an answer, a missed deadline, the worker's end."""
        watched = [self._woken, *self.worker.sockets]
        ready = select.select(watched, [], [], self._patient_for())[0]
        if self._woken in ready:
            with suppress(BlockingIOError):
                self._woken.recv(4096)
        if set(ready) & set(self.worker.sockets):
            try:
                self._answered(*self.worker.receive(timeout=START_S))
            except (OSError, EOFError, ValueError):
                self._lost()
        elif self.running and min(call.overdue for call in self.running.values()) <= time.monotonic():
            self._lost()

    def _answered(self, number: int, answer: Answer) -> None:
        call = self.running.pop(number, None)
        if call is None:
            return  # the late answer of a child that a function forked
        first = answer.values[0] if answer.values else None
        if isinstance(first, Failure) and first.kind is FailureKind.TIMEOUT:
            return self._timed_out(call)
        self.patience.answered(call.request.name)
        if isinstance(first, Failure) and (printed := self.worker.printed()):
            values = [
                replace(each, cause=each.cause + printed) if isinstance(each, Failure) else each
                for each in answer.values
            ]
            answer = replace(answer, values=values)
        call.resolve(answer)

    def _lost(self) -> None:
        """The worker ended, or has to be: kill it, say why to whom it concerns, and have another."""
        calls = list(self.running.values())
        self.running.clear()
        late = any(call.overdue <= time.monotonic() for call in calls)
        cause, printed = self.worker.stop()
        for call in calls:
            if self.stopping:
                call.fail("was not answered: the pool was closed", FailureKind.CRASH)
            elif len(calls) > 1 and self.again is not None:
                self.again(call)
            elif late:
                self._timed_out(call, printed)
            else:
                self.patience.answered(call.request.name)
                call.fail(f"{cause} on prompt {call.request.prompt_id!r}{printed}", FailureKind.CRASH)

    def _timed_out(self, call: PooledCall, printed: str = "") -> None:
        request = call.request
        each = f"{request.deadline_s / request.size:g} s for each of {request.size} completions"
        cause = f"did not answer within {request.deadline_s:g} s on prompt {request.prompt_id!r} ({each}){printed}"
        self.patience.timed_out(request.name, cause)
        call.fail(cause, FailureKind.TIMEOUT)


class WorkerError(Exception):
    """A worker could not be started."""


class WorkerProcess:
    """A worker process, started when it is needed; for one thread, but for `abandon`."""

    def __init__(self, setup: Mapping[str, Any], *, memory_mb: int | None):
        self._setup = setup
        self._memory_mb = memory_mb
        self._box: Box | None = None
        self._abandoned = False

    @property
    def sockets(self) -> list[socket.socket]:
        return [] if self._box is None or self._box.channel is None else [self._box.channel.socket]

    def start(self) -> None:
        """Have a process that has loaded the functions. Raises WorkerError."""
        if self.sockets:
            if not select.select(self.sockets, [], [], 0)[0]:
                return
            self.stop()  # it ended while it had nothing to do
        try:
            self._box = Box(self._specification(), channel=True, longest=LONGEST_MESSAGE)
            if self._abandoned:
                self._box.end()
            channel = self._box.channel
            assert channel is not None
            channel.send(pickle.dumps(self._setup), timeout=START_S)
            said = json.loads(channel.receive(timeout=START_S))
        except TimeoutError:
            self.stop()
            raise WorkerError(f"its worker did not load the functions within {START_S:g} s") from None
        except (OSError, EOFError, ValueError):
            cause, printed = self.stop()
            raise WorkerError(f"loading the functions {cause}{printed}") from None
        except SandboxError as error:
            raise WorkerError(error.message) from None
        if why := said.get("failed"):
            self.stop()
            raise WorkerError(f"its worker could not load the functions: {why}")

    def _specification(self) -> dict[str, Any]:
        argv = [sys.executable, "-u", "-c", boot(sys.path), "{channel}"]
        limits = None if self._memory_mb is None else {"memory_mb": self._memory_mb}
        return trusted(argv, env=os.environ, limits=limits, output_bytes=KEPT_BYTES)

    def send(self, request: Request, *, timeout: float | None) -> None:
        """Raises OSError, TimeoutError among them."""
        if self._box is None or self._box.channel is None:
            raise BrokenPipeError
        self._box.channel.send(pickle.dumps(request), timeout=timeout)

    def receive(self, *, timeout: float) -> tuple[int, Answer]:
        """Raises OSError, EOFError or ValueError."""
        if self._box is None or self._box.channel is None:
            raise EOFError
        return decode_answer(self._box.channel.receive(timeout=timeout))

    def printed(self) -> str:
        """What it printed last, as the end of a sentence."""
        try:
            return "" if self._box is None else _quoted(self._box.output(timeout=GRACE_S))
        except SandboxError:
            return ""

    def stop(self) -> tuple[str, str]:
        """Kill it with its descendants: how it had ended by itself, and what it printed last."""
        box, self._box = self._box, None
        if box is None:
            return "ended its worker", ""
        if box.channel is not None and select.select([box.channel.socket], [], [], 0)[0]:
            with suppress(SandboxError):
                box.wait(timeout=GRACE_S)  # it is ending; what its status is, is still to be seen
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
        """From another thread: kill it, and any that is started later."""
        self._abandoned = True
        if box := self._box:
            box.end()


def _quoted(printed: str) -> str:
    text = printed.strip()
    return f"; it last printed: {text[-SHOWN:]!r}" if text else ""


class Patience:
    """Whether a function that did not answer in time is called once more; shared by the lanes."""

    def __init__(self, pause_s: float):
        self.pause_s = pause_s
        self._lock = threading.Lock()
        self._missed: dict[str, int] = {}
        self._cause: dict[str, str] = {}
        self._until: dict[str, float] = {}

    def refusal(self, name: str, deadline_s: float) -> str | None:
        """Why it is not called now; None if it is."""
        with self._lock:
            missed, now = self._missed.get(name, 0), time.monotonic()
            if missed < PATIENCE:
                return None
            if now < self._until[name]:
                return f"was not called: {missed} times running it {self._cause[name]}"
            self._until[name] = now + deadline_s  # this one tries; the others wait for what comes of it
            return None

    def timed_out(self, name: str, cause: str) -> None:
        with self._lock:
            self._missed[name] = self._missed.get(name, 0) + 1
            self._cause[name] = cause
            self._until[name] = time.monotonic() + self.pause_s

    def answered(self, name: str) -> None:
        with self._lock:
            self._missed[name] = 0
