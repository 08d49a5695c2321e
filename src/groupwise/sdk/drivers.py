"""Carries out the client's flows: one driver blocks, one awaits. Nothing else of the client knows the difference.

`ClientMethod` and `Stream` make a method of a flow: on a blocking client it returns what the flow results in, or an
iterator of what it emits; on an asyncio client an awaitable of the one, or an asynchronous iterator of the other.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import AsyncExitStack, ExitStack, aclosing, closing
from typing import Any, Concatenate, Generic, ParamSpec, TypeAlias, overload

import httpx2

from groupwise.config.addresses import has_certificate, is_local, is_server_url
from groupwise.errors import ConfigError
from groupwise.sdk.transport import Emit, Emits, Flow, HttpAnswer, Open, Send, Sleep, Step, T

DEFAULT_URL = "http://127.0.0.1:8420"

URL_VARIABLE, KEY_VARIABLE = "GROUPWISE_URL", "GROUPWISE_API_KEY"

KEEP_ALIVE_S = 2.0  # less than the 5 s of uvicorn, so that a connection is not used just when it is closed

P = ParamSpec("P")

Note: TypeAlias = Callable[[str], object]


class _Walk(Generic[T]):
    """A flow, step by step; `result` is what it returned."""

    result: T

    def __init__(self, flow: Flow[T]):
        self._flow = flow
        self.outcome: Any = None  # of the step before
        self.failure: Exception | None = None

    def step(self) -> Step[Any] | None:
        """Return the next action; None at the end."""
        outcome, failure = self.outcome, self.failure
        self.outcome = self.failure = None
        try:
            return self._flow.send(outcome) if failure is None else self._flow.throw(failure)
        except StopIteration as end:
            self.result = end.value
            return None

    def close(self) -> None:
        self._flow.close()


class Blocking:
    """Carries flows out in the calling thread."""

    def __init__(self, http: httpx2.Client, *, note: Note | None = None):
        self._http, self._note = http, note

    def close(self) -> None:
        self._http.close()

    def run(self, flow: Flow[T]) -> T:
        """Return the flow's result."""
        walk = _Walk(flow)
        with closing(self._walk(walk)) as items:
            deque(items, maxlen=0)
        return walk.result

    def iterate(self, flow: Flow[Any]) -> Generator[Any, None, None]:
        """Return what the flow emits. Dropping the iterator closes what is open."""
        return self._walk(_Walk(flow))

    def _walk(self, walk: _Walk[Any]) -> Generator[Any, None, None]:
        with closing(walk), ExitStack() as opened:
            pieces: Iterator[bytes] = iter(())
            while (step := walk.step()) is not None:
                if isinstance(step, Emit):
                    if step.to is None:
                        yield step.item
                    else:
                        step.to(step.item)
                    continue
                try:
                    if isinstance(step, Sleep):
                        _say(self._note, step)
                        time.sleep(step.seconds)
                    elif isinstance(step, Send):
                        opened.close()
                        walk.outcome, pieces = self._send(step, opened)
                    else:
                        walk.outcome = next(pieces, None)
                except httpx2.RequestError as broken:
                    walk.failure = broken

    def _send(self, step: Send, opened: ExitStack) -> tuple[HttpAnswer, Iterator[bytes]]:
        deadline = time.monotonic() + step.timeout
        response = self._http.send(self._http.build_request(**step.arguments()), stream=True)
        opened.callback(response.close)
        if isinstance(step, Open) and response.status_code < 300:
            return _answer(response, b""), response.iter_bytes()
        body = bytearray()
        for piece in response.iter_bytes():
            body += piece
            if time.monotonic() > deadline:
                raise httpx2.ReadTimeout("the answer came too slowly")
        return _answer(response, bytes(body)), iter(())


class Awaiting:
    """Carries flows out in an asyncio event loop."""

    def __init__(self, http: httpx2.AsyncClient, *, note: Note | None = None):
        self._http, self._note = http, note

    async def close(self) -> None:
        await self._http.aclose()

    async def run(self, flow: Flow[T]) -> T:
        """Return the flow's result. A function that it emits to may be a coroutine function."""
        walk = _Walk(flow)
        async with aclosing(self._walk(walk)) as items:
            async for _ in items:
                pass
        return walk.result

    def iterate(self, flow: Flow[Any]) -> AsyncGenerator[Any, None]:
        """Return what the flow emits. `aclose()` closes what is open."""
        return self._walk(_Walk(flow))

    async def _walk(self, walk: _Walk[Any]) -> AsyncGenerator[Any, None]:
        with closing(walk):
            async with AsyncExitStack() as opened:
                pieces = _nothing()
                while (step := walk.step()) is not None:
                    if isinstance(step, Emit):
                        if step.to is None:
                            yield step.item
                        elif inspect.isawaitable(done := step.to(step.item)):
                            await done
                        continue
                    try:
                        if isinstance(step, Sleep):
                            _say(self._note, step)
                            await asyncio.sleep(step.seconds)
                        elif isinstance(step, Send):
                            await opened.aclose()
                            walk.outcome, pieces = await self._send(step, opened)
                        else:
                            walk.outcome = await anext(pieces, None)
                    except httpx2.RequestError as broken:
                        walk.failure = broken

    async def _send(self, step: Send, opened: AsyncExitStack) -> tuple[HttpAnswer, AsyncIterator[bytes]]:
        deadline = time.monotonic() + step.timeout
        response = await self._http.send(self._http.build_request(**step.arguments()), stream=True)
        opened.push_async_callback(response.aclose)
        if isinstance(step, Open) and response.status_code < 300:
            return _answer(response, b""), response.aiter_bytes()
        body = bytearray()
        async for piece in response.aiter_bytes():
            body += piece
            if time.monotonic() > deadline:
                raise httpx2.ReadTimeout("the answer came too slowly")
        return _answer(response, bytes(body)), _nothing()


def _say(note: Note | None, step: Sleep) -> None:
    if note is not None and step.why:
        note(step.why)


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""


def _answer(response: httpx2.Response, body: bytes) -> HttpAnswer:
    return HttpAnswer(status=response.status_code, headers=response.headers, body=body, url=str(response.url))


# ---- methods of flows ----
class Blocks:
    """Has a blocking driver."""

    _drive: Blocking


class Awaits:
    """Has an asyncio driver."""

    _drive: Awaiting


class ClientMethod(Generic[P, T]):
    """A method that returns a flow, as one that carries it out."""

    def __init__(self, describe: Callable[Concatenate[Any, P], Flow[T]]):
        self._describe = describe
        self.__doc__ = describe.__doc__

    @overload
    def __get__(self, instance: Blocks, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, instance: Awaits, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, instance: None, owner: type) -> Callable[..., Flow[T]]: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self._describe

        @functools.wraps(self._describe)
        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            return instance._drive.run(self._describe(instance, *args, **kwargs))

        return call


class Stream(Generic[P, T]):
    """A method that returns a flow, as one that gives what it emits."""

    def __init__(self, describe: Callable[Concatenate[Any, P], Emits[T]]):
        self._describe = describe
        self.__doc__ = describe.__doc__

    @overload
    def __get__(self, instance: Blocks, owner: type) -> Callable[P, Generator[T, None, None]]: ...
    @overload
    def __get__(self, instance: Awaits, owner: type) -> Callable[P, AsyncGenerator[T, None]]: ...
    @overload
    def __get__(self, instance: None, owner: type) -> Callable[..., Emits[T]]: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self._describe

        @functools.wraps(self._describe)
        def stream(*args: P.args, **kwargs: P.kwargs) -> Any:
            return instance._drive.iterate(self._describe(instance, *args, **kwargs))

        return stream


# ---- the connection ----
def server_url(url: str | None) -> str:
    """Return `url`, or GROUPWISE_URL, or the default, without a last slash or /v1. Raises ConfigError."""
    given = url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
    whole = (given if "://" in given else f"http://{given}").rstrip("/").removesuffix("/v1")
    if not is_server_url(whole):
        raise ConfigError(f"{given!r} is not a server's URL", hint=f"write it as in {DEFAULT_URL}")
    return whole


def connection(url: str, api_key: str | None) -> dict[str, Any]:
    """Return the arguments of both kinds of httpx2 client."""
    from groupwise import __version__

    key = (os.environ.get(KEY_VARIABLE, "") if api_key is None else api_key).strip()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(
            "the API key has characters that cannot be sent (it is not shown here)",
            hint=f"give {KEY_VARIABLE} printable ASCII characters without spaces",
        )
    headers = {"user-agent": f"groupwise/{__version__}"} | ({"authorization": f"Bearer {key}"} if key else {})
    return {
        "base_url": url,
        "headers": headers,
        "verify": has_certificate(url),
        "trust_env": not is_local(url),
        "limits": httpx2.Limits(max_connections=None, keepalive_expiry=KEEP_ALIVE_S),
    }
