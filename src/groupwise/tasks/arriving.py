"""Bodies of requests while they arrive: how long and how late one may be, and how many bytes of them there may be.

    BodyGuard     counts a body as it is received: 413 for one that is too long, 408 for one that is too slow
    ByteLimit     so many bytes of long bodies at once; further ones wait, and are then told to try again (429)

The live server and the endpoint of episodes receive every body through these.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from starlette.types import Message, Receive

from groupwise.config.serve import MIB
from groupwise.errors import BodyTooLargeError, DeadlineError, OverloadedError

SMALL = 1 << 16  # bytes of an unfinished body that may be in memory without a place


class SlowBodyError(DeadlineError):
    """The body did not arrive in time."""

    code, status = "body_timeout", 408


class Take(Protocol):
    """Take a request's place; `long`: its body is no longer small."""

    async def __call__(self, *, long: bool) -> None: ...


class ByteLimit:
    """So many bytes of long bodies at once, first come first served. What a body may have is taken at once: bodies that
    had a part each would wait for each other."""

    def __init__(self, capacity: int, *, patience_s: float):
        self._free, self._capacity, self._patience_s = capacity, capacity, patience_s
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def held(self, size: int) -> AsyncIterator[None]:
        """Take `size` bytes, or all that exist, for the block. Raises OverloadedError."""
        size = min(size, self._capacity)
        await self._take(size)
        try:
            yield
        finally:
            self._free += size
            self._serve()

    async def _take(self, size: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        self._serve()
        try:
            async with asyncio.timeout(self._patience_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # it had its turn in the last moment
                self._free += size
            turn.cancel()
            self._serve()
            if not isinstance(error, TimeoutError):
                raise
            raise OverloadedError(
                f"waited {self._patience_s:g} s: bodies of {self._capacity} bytes are being received or read already",
                hint="try again, send smaller bodies, or raise bodies_bytes",
                retry_after=5,
            ) from error

    def _serve(self) -> None:
        while self._waiting:
            size, turn = self._waiting[0]
            if not turn.done():
                if size > self._free:
                    return
                self._free -= size
                turn.set_result(None)
            self._waiting.popleft()


class BodyGuard:
    """ASGI's receive: counts what arrives, and gives it `seconds` (body_timeout_s) and a second for each MiB. Then
    `deadline`, where there is one, is `allowed_s` from now.

    The request takes its place once its body is whole, or no longer small. Before, it costs a connection and little
    memory; if it held a place, those who never finish theirs would keep out everybody else.
    """

    deadline: asyncio.Timeout | None = None

    def __init__(self, receive: Receive, limit: tuple[int, str], take: Take, *, seconds: float, allowed_s: float = 0.0):
        self._receive, (self._limit, self._limit_name), self._take = receive, limit, take
        self._seconds, self._allowed = seconds, allowed_s
        self._began, self._bytes, self._whole, self._placed = time.monotonic(), 0, False, False

    def check_length(self, declared: str | None) -> None:
        """Refuse at once what says that it is too long."""
        if declared is not None and declared.isdigit() and int(declared[:20]) > self._limit:
            raise self._too_large(f"{declared[:20]} bytes")

    async def __call__(self) -> Message:
        if self._whole:
            return await self._receive()
        until = self._began + self._seconds + self._bytes / MIB
        try:
            async with asyncio.timeout(until - time.monotonic()):
                message = await self._receive()
        except TimeoutError as error:
            raise SlowBodyError(
                f"the body did not arrive within {self._seconds:g} s (body_timeout_s) and a second for each MiB; "
                f"{self._bytes} bytes did",
                hint="send it faster, or in smaller requests",
            ) from error
        if message["type"] == "http.request":
            self._bytes += len(message.get("body", b""))
            self._whole = not message.get("more_body", False)
            if self._bytes > self._limit:
                raise self._too_large("more")
            if self._whole or self._bytes > SMALL:
                await self.take_place(long=self._bytes > SMALL)
            deadline = self.deadline
            if deadline is not None and not deadline.expired() and deadline.when() is not None:
                deadline.reschedule(asyncio.get_running_loop().time() + self._allowed)
        return message

    async def take_place(self, *, long: bool = False) -> None:
        """Take a place, once. Raises OverloadedError. Nothing is read meanwhile, so this time does not count as the
        client's."""
        if not self._placed:
            self._placed, began = True, time.monotonic()
            await self._take(long=long)
            self._began += time.monotonic() - began

    def _too_large(self, size: str) -> BodyTooLargeError:
        message = f"the body has {size}; this route takes {self._limit} bytes ({self._limit_name})"
        return BodyTooLargeError(message, hint="send several smaller requests")
