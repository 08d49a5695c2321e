"""A group of workers in other processes: the least busy gets the next call; one that dies is replaced, and what it had
not answered is asked again, if it may be.

    away  ->  started  ->  has done every call of `setup`  ->  up  ->  lost  ->  away

A call that is asked again is the same call: what it answers must follow from its arguments alone. Nothing here knows
what the workers are; `ray_actors` makes them of Ray's actors.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from groupwise.errors import ClusterError, GroupwiseError

SENDS = 4  # of one call that workers are lost with

MethodCall = tuple[str, tuple[Any, ...]]  # a method and its arguments

log = logging.getLogger(__name__)


class WorkerLost(Exception):
    """A worker died or cannot be reached; what it was asked may be asked of another."""


class GroupWorker(Protocol):
    """A worker in another process, such as a Ray actor, that answers method calls."""

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method without waiting; the future has its result, its exception, or WorkerLost. Cancelling it is
        allowed."""
        ...

    def end(self) -> None:
        """Kill the worker without waiting; its pending calls are lost."""
        ...


class WorkerCall:
    """A call for the least busy worker; `weight` is its share of load."""

    def __init__(self, method_call: MethodCall, weight: float):
        self.method_call, self.weight, self.sends = method_call, weight, 0
        self.future: Future[Any] = Future()
        self.asked: Future[Any] | None = None

    def settle(self, result: Any) -> None:
        with suppress(InvalidStateError):  # the waiting caller has gone
            if isinstance(result, BaseException):
                self.future.set_exception(result)
            else:
                self.future.set_result(result)


class Slot:
    """A position that one worker after another fills; `losses` counts workers lost in a row without an answer."""

    def __init__(self, number: int):
        self.number, self.load, self.losses = number, 0.0, 0
        self.worker: GroupWorker | None = None  # None: it is away
        self.coming: GroupWorker | None = None  # it has been started, and is not up yet


class WorkerGroup:
    """A group of `size` workers made by `start`, all started in the background when the group is made.

    Args:
        what: the name of a worker in messages: "engine".
        first: the number of the first slot.
        again: whether a call that its worker did not live to answer is made again; else it raises WorkerLost.
        setup: the calls that each must answer before it gets others, by a key, in order.
        restarts: how often in a row a slot's worker may be lost without having answered once.
        timeout_s: seconds for a call of `setup`, the first of which waits for the worker's start.
    """

    def __init__(
        self,
        what: str,
        start: Callable[[int], GroupWorker],
        *,
        size: int,
        first: int = 0,
        again: bool = True,
        setup: Mapping[str, MethodCall],
        restarts: int,
        timeout_s: float,
    ):
        self._what, self._start, self._restarts, self._timeout_s = what, start, restarts, timeout_s
        self._again, self._setup = again, dict(setup)
        self._needed: Counter[str] = Counter()  # calls that need a broadcast, by its key
        self._retracting: dict[str, MethodCall] = {}  # the calls that undo a broadcast, once no call needs it
        self._slots = [Slot(number) for number in range(first, first + size)]
        self._waiting: deque[WorkerCall] = deque()  # for any worker at all
        self._end: GroupwiseError | None = None  # why there will be no more answers
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(size, thread_name_prefix=what)
        for slot in self._slots:
            self._threads.submit(self._fill, slot)

    def ask(self, method: str, *arguments: Any, weight: float = 1.0, needs: str | None = None) -> Future[Any]:
        """Call a method on the least busy worker. The future raises what the method raised, ClusterError if workers
        were lost too often or do not start, and WorkerLost if calls are not repeated.

        What was broadcast with the key `needs` is not retracted before the call is answered: it may be repeated.
        """
        call = WorkerCall((method, arguments), weight)
        if needs is not None:
            with self._lock:
                self._needed[needs] += 1
            call.future.add_done_callback(lambda future: self._undo(needs, done=1))
        call.future.add_done_callback(lambda future: _cancel(call) if future.cancelled() else None)
        self._send(call)
        return call.future

    def broadcast(self, key: str, method: str, *arguments: Any) -> None:
        """Call a method on every worker, also on those that start later. Returns when all running ones have done it.

        Raises what they raise; it is then not a part of `setup`.
        """
        with self._lock:
            if self._end is not None:
                raise self._end
            self._setup[key] = (method, arguments)
            asked = [(slot, slot.worker, slot.worker.ask(method, *arguments)) for slot in self._slots if slot.worker]
        for slot, worker, answer in asked:
            try:
                answer.result(self._timeout_s)
            except WorkerLost as error:
                self._lose(slot, worker, str(error))
            except TimeoutError:
                self._lose(slot, worker, f"it did not {method} within {self._timeout_s:g} s")
            except BaseException:
                with self._lock:
                    self._setup.pop(key, None)
                raise

    def retract(self, key: str, method: str, *arguments: Any) -> None:
        """Undo a broadcast by another call once no call needs it; later workers get neither. Does not wait."""
        with self._lock:
            self._retracting[key] = (method, arguments)
        self._undo(key)

    def close(self) -> None:
        """End all workers; calls in flight fail."""
        self._give_up(GroupwiseError(f"the {self._what}s are closed"))
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _undo(self, key: str, *, done: int = 0) -> None:
        """Count `done` calls that needed the broadcast `key`, and undo the broadcast if it is retracted and none is
        left."""
        with self._lock:
            self._needed[key] -= done
            if self._needed[key] or key not in self._retracting:
                return
            method, arguments = self._retracting.pop(key)
            self._setup.pop(key, None)
            for slot in self._slots:
                if slot.worker is not None:
                    slot.worker.ask(method, *arguments)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _send(self, call: WorkerCall) -> None:
        with self._lock:
            chosen = None if self._end is not None or call.future.cancelled() else self._choose(call)
        if self._end is not None:
            return call.settle(self._end)
        if chosen is not None:
            slot, worker, call.asked = chosen
            call.asked.add_done_callback(partial(self._answered, call, slot, worker))

    def _choose(self, call: WorkerCall) -> tuple[Slot, GroupWorker, Future[Any]] | None:
        """Ask the worker with the least to do; where none is up the call waits. The lock is held."""
        up = [(slot.load, slot.number, slot, slot.worker) for slot in self._slots if slot.worker is not None]
        if not up:
            self._waiting.append(call)
            return None
        _, _, slot, worker = min(up)
        method, arguments = call.method_call
        slot.load += call.weight
        call.sends += 1
        return slot, worker, worker.ask(method, *arguments)

    def _answered(self, call: WorkerCall, slot: Slot, worker: GroupWorker, answer: Future[Any]) -> None:
        error = None if answer.cancelled() else answer.exception()
        with self._lock:
            if slot.worker is worker:
                slot.load -= call.weight
                slot.losses = slot.losses if isinstance(error, WorkerLost) else 0
        if not isinstance(error, WorkerLost):
            return None if answer.cancelled() else call.settle(error or answer.result())
        self._lose(slot, worker, str(error))
        if not self._again:
            return call.settle(error)
        if call.sends == SENDS:
            message = f"a call ({call.method_call[0]}) was lost with {SENDS} {self._what}s, the last one so: {error}"
            return call.settle(ClusterError(message))
        self._send(call)

    # -- workers -------------------------------------------------------------------------------------------------------

    def _fill(self, slot: Slot) -> None:
        """Put a worker there that has answered every call of `setup`."""
        try:
            while self._end is None:
                slot.coming = worker = self._start(slot.number)
                try:
                    return self._initialise(slot, worker)
                except (WorkerLost, TimeoutError) as error:
                    worker.end()
                    self._count(slot, str(error) or f"it was not ready within {self._timeout_s:g} s")
        except Exception as error:  # the boundary of the thread: the callers that wait must get the error
            known = isinstance(error, GroupwiseError)
            self._give_up(error if known else ClusterError(f"{self._what} {slot.number} cannot be started: {error!r}"))

    def _initialise(self, slot: Slot, worker: GroupWorker) -> None:
        told: dict[str, MethodCall] = {}
        while True:
            with self._lock:
                new = {key: call for key, call in self._setup.items() if key not in told}
                if self._end is not None:
                    return worker.end()
                if not new:
                    slot.worker, slot.coming, slot.load = worker, None, 0.0
                    waiting, self._waiting = self._waiting, deque()
                    break
            for key, (method, arguments) in new.items():
                try:
                    worker.ask(method, *arguments).result(self._timeout_s)
                except GroupwiseError:
                    with self._lock:
                        if key in self._setup:  # else it was retracted meanwhile, and cannot be done any more
                            raise
            told |= new
        for call in waiting:
            self._send(call)

    def _lose(self, slot: Slot, worker: GroupWorker, why: str) -> None:
        with self._lock:
            if slot.worker is not worker:
                return  # that is known
            slot.worker = None
        worker.end()
        try:
            self._count(slot, why)
        except ClusterError as error:
            return self._give_up(error)
        with suppress(RuntimeError):  # it was closed
            self._threads.submit(self._fill, slot)

    def _count(self, slot: Slot, why: str) -> None:
        """Count a lost worker of this slot. Raises ClusterError if too many were lost."""
        if self._end is not None:
            return
        slot.losses += 1
        who = f"{self._what} {slot.number}"
        if slot.losses > self._restarts:
            raise ClusterError(
                f"{who} was lost {times(slot.losses)} without having done anything, the last time so: {why}",
                hint="look at what it said last; launcher.restarts is how often it is replaced",
            )
        log.warning("%s is lost and replaced: %s", who, why)

    def _give_up(self, why: GroupwiseError) -> None:
        with self._lock:
            self._end = self._end or why
            waiting, self._waiting = self._waiting, deque()
            workers = [worker for slot in self._slots for worker in (slot.worker, slot.coming) if worker is not None]
        for worker in workers:
            worker.end()
        for call in waiting:
            call.settle(self._end)


def _cancel(call: WorkerCall) -> None:
    if call.asked is not None:
        call.asked.cancel()


def times(count: int) -> str:
    """Return the count in words: "once", "3 times"."""
    return "once" if count == 1 else f"{count} times"
