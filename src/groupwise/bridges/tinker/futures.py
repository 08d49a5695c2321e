"""The Tinker API's futures: a request returns an id at once, and its result can be fetched repeatedly later.

    begin(id)      a new future, or the future that this request already has: a retry is not a second request
    wait(id)       the future's answer, or None while there is none
    Turns          runs the requests of one model strictly by their numbers, in whatever order they arrive

An answer is kept for a while after the first fetch; an answer that is not fetched is kept longer. Both times are
limited, and so are the number and the bytes of all answers, so that a client that never fetches hurts only itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from groupwise.errors import GroupwiseError, OverloadedError, RequestError, TrainingError

KEEP_S = 300.0  # an answer, after it was fetched
UNFETCHED_S = 3600.0  # ... and one that was not
SWEEP_S = 5.0  # between looks for those that are over
MOST_KEPT, MOST_KEPT_BYTES = 1 << 16, 1 << 29  # answers; a quarter goes when there are more
MOST_WAITING_BYTES = 1 << 29  # of requests
AHEAD = 4096  # numbers that a request may be ahead of the one that is due

JSON, PROTOBUF = "application/json", "application/x-protobuf"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FutureResult:
    """The result of a future. `as_json` turns its protobuf into JSON, for a client that does not accept protobuf."""

    body: bytes
    media: str = PROTOBUF
    as_json: Callable[[bytes], dict[str, Any]] | None = None

    def plain(self) -> FutureResult:
        """Return the same in JSON."""
        return self if self.as_json is None else answer(**self.as_json(self.body))


def answer(**fields: Any) -> FutureResult:
    """Return an answer in JSON."""
    return FutureResult(json.dumps(fields).encode(), JSON)


def failure(error: Exception, *, without: str = "") -> FutureResult:
    """Return an error as the package reads it: category `user` for what another request would cure, `server` for the
    rest."""
    if not isinstance(error, GroupwiseError):
        return answer(error="internal error: see the server's log", category="server")
    text = error.message + (f" ({error.hint})" if error.hint else "")
    users = error.status < 500 or error.exit_code == 2 or isinstance(error, TrainingError)
    return answer(
        error=text.replace(without, "<state_dir>") if without else text,
        code=error.code,
        category="user" if users else "server",
    )


@dataclass
class _Load:
    """Counts the load of all futures: the unfinished ones, the bytes of their requests, and the bytes of kept
    answers."""

    unfinished: int = 0
    waiting: int = 0
    kept: int = 0


@dataclass(eq=False)
class Future:
    """Holds a request's answer until the client fetches it. `size` is the memory of the unanswered request, in
    bytes."""

    id: str
    size: int
    load: _Load = field(repr=False)
    answer: FutureResult | None = None
    again: bool = False  # failed without having been tried: the same request may come again
    until: float = 0.0  # when it is forgotten, monotonic
    fetched: bool = False
    paused: str | None = None  # why it has not begun
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def finish(self, answer: FutureResult) -> None:
        """Set the answer. The first call counts; later answers are ignored."""
        if self.answer is None:
            self.answer, self.until = answer, time.monotonic() + UNFETCHED_S
            self.load.unfinished -= 1
            self.load.waiting -= self.size
            self.load.kept += len(answer.body)
            self.done.set()


class Futures:
    """All futures of a server, by id. At most `most` are unfinished."""

    def __init__(self, *, most: int, without: str = ""):
        self._most, self._without = most, without
        self._by_id: dict[str, Future] = {}
        self._load, self._swept = _Load(), time.monotonic()

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, id: str) -> Future | None:
        """Return the future of this id, if it is known."""
        return self._by_id.get(id)

    def begin(self, id: str, *, size: int = 0, due: bool = False) -> tuple[Future, bool]:
        """Return the future of a request, and whether it is new. What is `due` is what others wait for: it always has
        room.

        Raises OverloadedError where as many are unfinished as may be.
        """
        if (known := self._by_id.get(id)) is not None:
            if not known.again:
                return known, False
            self._forget(known)
        self._sweep()
        load = self._load
        if not due and (load.unfinished >= self._most or load.waiting + size > MOST_WAITING_BYTES):
            busy = f"{load.unfinished} requests of {load.waiting} bytes wait for their answers (tinker_pending)"
            raise OverloadedError(busy, hint="fetch some, then try again", retry_after=1)
        load.unfinished += 1
        load.waiting += size
        self._by_id[id] = future = Future(id, size, load)
        return future, True

    async def wait(self, id: str, *, seconds: float) -> FutureResult | None:
        """Return the answer, as soon as there is one; None after `seconds`. Raises LookupError for an id that is not
        known."""
        future = self._by_id[id]
        try:
            async with asyncio.timeout(seconds):
                await future.done.wait()
        except TimeoutError:
            return None
        if not future.fetched:
            future.fetched, future.until = True, time.monotonic() + KEEP_S
        return future.answer

    async def settle(self, future: Future, work: Callable[[], Awaitable[FutureResult]]) -> None:
        """Finish `future` with what `work` gives or raises."""
        try:
            future.finish(await work())
        except asyncio.CancelledError:
            future.finish(failure(RequestError("the request was cancelled")))
            raise
        except Exception as error:
            if not isinstance(error, GroupwiseError):
                log.exception("tinker request %s", future.id)
            future.finish(failure(error, without=self._without))

    def forget(self, prefix: str) -> None:
        """Forget the finished futures whose ids begin so."""
        for future in [each for id, each in self._by_id.items() if id.startswith(prefix) and each.answer]:
            self._forget(future)

    def _forget(self, future: Future) -> None:
        if future.answer is not None:
            self._load.kept -= len(future.answer.body)
            del self._by_id[future.id]

    def _sweep(self) -> None:
        """Forget what is past its time; of what is too much, first what was fetched, then what is oldest."""
        now = time.monotonic()
        too_much = self._load.kept > MOST_KEPT_BYTES or len(self._by_id) > MOST_KEPT
        if not too_much and now < self._swept + SWEEP_S:
            return
        self._swept = now
        for future in sorted(
            (each for each in self._by_id.values() if each.answer), key=lambda f: (not f.fetched, f.until)
        ):
            too_much = self._load.kept > MOST_KEPT_BYTES * 3 // 4 or len(self._by_id) > MOST_KEPT * 3 // 4
            if future.until < now or too_much:
                self._forget(future)


class Turns:
    """Requests of one model, run one after the other by their numbers. `due` is the next one.

    If it does not come within `gap_s`, while later ones wait and nothing runs, it is passed over: the later ones run,
    and it is refused should it come after all. What was passed over may have been part of a batch: `gap` says which
    numbers it was, until `forgive`.
    """

    def __init__(self, futures: Futures, *, gap_s: float):
        self.due = 0
        self.gap: str | None = None
        self._futures, self._gap_s = futures, gap_s
        self._waiting: dict[int, tuple[Future, Callable[[], Awaitable[FutureResult]]]] = {}
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def add(self, number: int, future: Future, work: Callable[[], Awaitable[FutureResult]]) -> None:
        """Run `work` when its turn comes, and finish `future` with its answer."""
        if number < self.due:
            late = f"seq_id {number} comes too late: the next is {self.due}"
            hint = "it was answered, and its answer forgotten, or did not come in time (tinker_gap_s)"
            future.finish(failure(RequestError(late, hint=hint)))
        elif number > self.due + AHEAD:
            future.again = True
            ahead = f"seq_id is {number} and the next is {self.due}: more than {AHEAD} ahead"
            future.finish(failure(RequestError(ahead, hint="number requests from 1, without gaps")))
        else:
            self._waiting[number] = future, work
            self._start()

    def forgive(self) -> str | None:
        """Return `gap`, once: the next call returns None."""
        gap, self.gap = self.gap, None
        return gap

    def close(self) -> None:
        """Run nothing more; what waits fails."""
        self._disarm()
        self._fail("the session has ended")

    def _start(self) -> None:
        if self._task is None:
            self._disarm()
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            while (entry := self._waiting.pop(self.due, None)) is not None:
                self.due += 1
                await self._futures.settle(*entry)
        finally:
            self._task = None
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(self._gap_s, self._pass_over)

    def _pass_over(self) -> None:
        """Continue with the first request that has arrived."""
        first = min(self._waiting)
        numbers = f"seq_id {self.due}" + (f" to {first - 1}" if first > self.due + 1 else "")
        self.gap = f"{numbers} did not come within {self._gap_s:g} s"
        log.warning("tinker request %s runs without what is before it: %s", self._waiting[first][0].id, self.gap)
        self.due = first
        self._start()

    def _fail(self, why: str) -> None:
        for future, _ in self._waiting.values():
            future.finish(failure(RequestError(why)))
        self._waiting.clear()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
