"""Calling user code that may be slow: async functions are awaited, others run in a thread of their episode's own.

A method that hangs costs its episode and nothing else: what waits for it gives up after its time, the thread is left
behind, and as a daemon it does not keep the process from ending. All calls of one episode are made in the same
thread, for user code that minds (a SQLite connection does).
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from groupwise.errors import EnvError

Job = tuple[Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class OwnThread:
    """A thread that makes one call after another, until it is closed or one hangs."""

    def __init__(self, name: str = "episode"):
        self._name = name
        self._jobs: queue.SimpleQueue[Job | Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._busy = False

    async def call(self, function: Callable[..., Any], *args: Any, timeout_s: float | None, what: str) -> Any:
        """Return the result of `function(*args)`, awaited if it is awaitable. Raises what it raises.

        Raises:
            EnvError: it took longer than `timeout_s` seconds. `what` names it in the message.
        """
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                if inspect.iscoroutinefunction(function):
                    return await function(*args)
                result = await self._submit(lambda: function(*args))
                return await result if inspect.isawaitable(result) else result
        except TimeoutError as error:
            if not limit.expired():  # the function's own
                raise
            raise EnvError(f"{what} took longer than {timeout_s:g} s", field=what, kind="timeout") from error

    async def make(self, make: Callable[[], Any], *, timeout_s: float | None, what: str) -> Any:
        """Return the object that `make` makes, as `call` does. If the wait ends without it, this thread closes the
        object as soon as it is made. Call `close` only after that."""
        if inspect.iscoroutinefunction(make):
            return await self.call(make, timeout_s=timeout_s, what=what)
        made = []

        def make_one() -> Any:
            made.append(make())
            return made[0]

        try:
            return await self.call(make_one, timeout_s=timeout_s, what=what)
        except BaseException:
            self._jobs.put(lambda: [_close(one) for one in made])  # behind `make_one`
            raise

    @property
    def busy(self) -> bool:
        """Return whether a call is being made, waited for or not."""
        return self._busy

    def close(self) -> None:
        """End the thread once it is idle."""
        self._jobs.put(None)

    async def _submit(self, call: Callable[[], Any]) -> Any:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._jobs.put((call, loop, future))
        return await future

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if callable(job):
                job()
                continue
            call, loop, future = job
            self._busy = True
            try:
                result, error = call(), None
            except BaseException as raised:  # SystemExit in user code must not end the thread in silence
                result, error = None, raised
            self._busy = False
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, future, result, error)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():  # given up
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        future.set_exception(error)
    else:
        future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))


def _close(made: Any) -> None:
    """Close an object that was made too late; an error of its `close` is dropped, as no caller waits for it."""
    if inspect.isawaitable(made) or not callable(close := getattr(made, "close", None)):
        return
    with suppress(BaseException):
        closing = close()
        if inspect.isawaitable(closing):
            asyncio.run(_awaited(closing))


async def _awaited(closing: Awaitable[Any]) -> None:
    await closing
