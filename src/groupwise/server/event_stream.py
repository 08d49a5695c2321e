"""Answers as server-sent events, and clients that leave.

    while_connected   work that is cancelled when the client goes away
    EventStream       a response of events: pings, failures as events, and [DONE] at the end
    following         a response that stays open for as long as there is something to look at, with pings

A stream begins only when its first event is there, so what can be wrong by then still has a status code of its own;
what fails later is an error event. Every stream ends with [DONE]: clients take one that just ends for a success.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from groupwise.errors import GroupwiseError
from groupwise.server.errors import INTERNAL, Paths, ShuttingDownError, envelope, without_paths

PING_S = 15.0  # the longest silence of a stream; proxies cut connections that say nothing for a minute or less

HEARTBEAT_S = 3.0  # the same of a stream that is followed: longer silence means that the server stands still

STALL_S = 60.0  # how long one write may wait for a client that reads nothing at all

CUT_S = 1.0  # the same when the server ends

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

PING, DONE = b": ping\n\n", b"data: [DONE]\n\n"

T = TypeVar("T")

log = logging.getLogger(__name__)


class ClientGone(GroupwiseError):
    """The client closed the connection, so no answer is sent."""

    code, status = "client_disconnect", 499


# ---- the client may leave ----
async def until_gone(receive: Receive) -> None:
    """Returns when the client has closed the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(http: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`. `work` is cancelled if the client goes away or if the caller is cancelled.

    Raises:
        ClientGone: the client closed the connection first.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(http.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone("the client closed the connection")
        return task.result()
    finally:
        await _end(task, gone)


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# ---- server-sent events ----
def sse(data: str, *, id: str | int | None = None, event: str | None = None) -> bytes:
    """Return one event. `data` is JSON on one line; `id` is what a client that comes back sends as Last-Event-ID."""
    named = (("id", id), ("event", event))
    head = "".join(f"{name}: {value}\n" for name, value in named if value is not None)
    return f"{head}data: {data}\n\n".encode()


def failure(error: GroupwiseError) -> bytes:
    """Return the event that says what went wrong."""
    _, _, body = envelope(error)
    return sse(body.decode())


def following(events: AsyncGenerator[bytes, None]) -> Response:
    """Return the answer as server-sent events without a last one. An empty event is a look that found nothing: where
    HEARTBEAT_S passed without another, it becomes a ping."""
    return StreamingResponse(_with_pings(events), media_type="text/event-stream", headers=HEADERS)


async def _with_pings(events: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    quiet_since = time.monotonic()
    async with aclosing(events):
        async for event in events:
            if event or time.monotonic() - quiet_since >= HEARTBEAT_S:
                quiet_since = time.monotonic()
                yield event or PING


class EventStream(Response):
    """Sends an answer as server-sent events: `first`, then the rest of `events`, then [DONE].

    `fail` turns a failure into an event, in which the paths `without` are hidden; `done` ends the stream in its
    dialect. In every case `events` is closed, and then `resources`, which get the failure. A client that reads nothing
    for `stall_s` seconds is disconnected.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        *,
        resources: AsyncExitStack,
        headers: Mapping[str, str] | None = None,
        without: Paths | None = None,
        stall_s: float = STALL_S,
        fail: Callable[[GroupwiseError], bytes] | None = None,
        done: bytes = DONE,
    ):
        super().__init__(headers={**HEADERS, **(headers or {})})
        del self.headers["content-length"]
        self._first, self._events, self._resources, self._stall_s = first, events, resources, stall_s
        self._without, self._request_id = without or {}, "-"
        self._fail, self._done = fail or failure, done
        self._failed: BaseException | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._request_id = scope.get("state", {}).get("request_id", "-")
        writer = asyncio.ensure_future(self._write(send))
        gone = asyncio.ensure_future(until_gone(receive))
        try:
            await asyncio.wait({writer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
            else:
                self._failed = ClientGone("the client closed the connection")
        except asyncio.CancelledError as error:
            self._failed = error
            await _end(writer)
            await self._cut(send)
            raise
        finally:
            await _end(writer, gone)
            await self._events.aclose()
            failed = self._failed
            await self._resources.__aexit__(failed and type(failed), failed, None)

    async def _write(self, send: Send) -> None:
        async def patient(message: Message) -> None:
            async with asyncio.timeout(self._stall_s):
                await send(message)

        async def body(part: bytes, *, more: bool = True) -> None:
            await patient({"type": "http.response.body", "body": part, "more_body": more})

        try:
            await patient({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await body(self._first)
            async for event in self._told():
                await body(event)
            await body(self._done, more=False)
        except (TimeoutError, OSError) as error:  # it reads nothing, or it has gone
            self._failed = ClientGone(f"the client stopped reading: {error!r}")

    async def _cut(self, send: Send) -> None:
        """Cut the stream: the server ends before the stream does."""
        error = ShuttingDownError("the server is shutting down, and this answer is not whole", hint="send it again")
        with suppress(TimeoutError, OSError, RuntimeError):
            async with asyncio.timeout(CUT_S):
                await send({"type": "http.response.body", "body": self._fail(error) + self._done, "more_body": False})

    async def _told(self) -> AsyncIterator[bytes]:
        """Yield the events, and one that says how they failed."""
        try:
            async for event in self._events:
                yield event
        except GroupwiseError as error:
            self._failed = error
            yield self._fail(without_paths(error, self._without))
        except Exception as error:
            self._failed = error
            log.exception("request %s: a stream failed", self._request_id)
            yield self._fail(INTERNAL)
