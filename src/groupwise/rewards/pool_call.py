"""A call of a reward pool, and whether a function that did not answer in time is called once more.

`workers` makes the calls; what becomes of one is said here, in the words of rewards.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, replace

from groupwise.rewards.call import Failure, FailureKind, GroupScores
from groupwise.rewards.pool_worker import ScoreRequest
from groupwise.rewards.workers import Loss

PATIENCE = 3  # calls of a function that did not answer in time, one after another


@dataclass(eq=False)
class PooledCall:
    """Makes a call of one function on one group. `again` queues the call again if its worker was lost together with
    other calls."""

    request: ScoreRequest
    future: Future[GroupScores]
    patience: Patience
    again: Callable[[PooledCall], None] | None

    @property
    def number(self) -> int:
        return self.request.number

    @property
    def message(self) -> bytes:
        return pickle.dumps(self.request)

    @property
    def deadline_s(self) -> float:
        return self.request.deadline_s

    def begins(self) -> bool:
        if self.future.cancelled():
            return False
        if cause := self.patience.refusal(self.request.name, self.request.deadline_s):
            self.fail(cause, FailureKind.TIMEOUT)
            return False
        return True

    def answered(self, answer: GroupScores, printed: Callable[[], str]) -> None:
        first = answer.values[0] if answer.values else None
        if isinstance(first, Failure) and first.kind is FailureKind.TIMEOUT:
            return self._timed_out("")
        self.patience.answered(self.request.name)
        if isinstance(first, Failure) and (said := printed()):
            values = [
                replace(each, cause=each.cause + said) if isinstance(each, Failure) else each for each in answer.values
            ]
            answer = replace(answer, values=values)
        self._resolve(answer)

    def unstarted(self, why: str) -> None:
        self.fail(f"could not be called: {why}", FailureKind.CRASH)

    def lost(self, loss: Loss) -> None:
        if not loss.alone and self.again is not None:
            self.again(self)
        elif loss.killed:
            self._timed_out(loss.printed)
        else:
            self.patience.answered(self.request.name)
            self.fail(f"{loss.cause} on prompt {self.request.prompt_id!r}{loss.printed}", FailureKind.CRASH)

    def closed(self) -> None:
        self.fail("was not answered: the pool was closed", FailureKind.CRASH)

    def fail(self, cause: str, kind: FailureKind) -> None:
        self._resolve(GroupScores.failed(f"reward {self.request.name!r} {cause}", kind, self.request.size))

    def _resolve(self, answer: GroupScores) -> None:
        with suppress(InvalidStateError):  # the waiting caller has gone
            self.future.set_result(answer)

    def _timed_out(self, printed: str) -> None:
        request = self.request
        each = f"{request.deadline_s / request.size:g} s for each of {request.size} completions"
        cause = f"did not answer within {request.deadline_s:g} s on prompt {request.prompt_id!r} ({each}){printed}"
        self.patience.timed_out(request.name, cause)
        self.fail(cause, FailureKind.TIMEOUT)


class Patience:
    """Decides whether a function that timed out is called again; shared by all worker threads."""

    def __init__(self, pause_s: float):
        self.pause_s = pause_s
        self._lock = threading.Lock()
        self._missed: dict[str, int] = {}
        self._cause: dict[str, str] = {}
        self._until: dict[str, float] = {}

    def refusal(self, name: str, deadline_s: float) -> str | None:
        """Return why the function is not called any more; None if it is."""
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
