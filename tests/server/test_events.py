"""Streams and disconnects on a real engine over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractContextManager, AsyncExitStack

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from groupwise.engine.local import LocalEngine
from groupwise.errors import DeadlineError
from groupwise.server.event_stream import PING, ClientGone, EventStream, sse, while_connected
from groupwise.server.generate import Generation
from groupwise.types import SamplingParams, SamplingRequest
from serving import comes_within, running, starter

PROMPT = tuple(range(20, 40))


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    engine = LocalEngine(starter(), max_rows=16)
    yield engine
    engine.close()


def request(*, n: int = 1, max_tokens: int = 12) -> SamplingRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=3, ignore_eos=True)
    return SamplingRequest(prompt_ids=PROMPT, n=n, params=params)


def endless(n: int) -> SamplingRequest:
    """To the end of the model's context, which takes seconds."""
    return request(n=n, max_tokens=1000)


def idle_within(engine: LocalEngine, seconds: float) -> bool:
    return comes_within(lambda: not (engine.stats()["running"] or engine.stats()["waiting"]), seconds)


def busy_within(engine: LocalEngine, seconds: float) -> bool:
    return comes_within(lambda: engine.stats()["running"] > 0, seconds)


def serving_routes(*routes: Route) -> AbstractContextManager[int]:
    return running(Starlette(routes=list(routes)))


def post(port: int, path: str, *, read: int = 0) -> socket.socket:
    """Send a request and read at least `read` bytes of the answer."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=120)
    connection.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n".encode())
    received = 0
    while received < read:
        received += len(connection.recv(65536))
    return connection


def body_of(connection: socket.socket) -> str:
    """What comes until the answer is over, without the chunks' sizes."""
    data = b""
    while not data.endswith(b"\r\n0\r\n\r\n") and (more := connection.recv(65536)):
        data += more
    head, _, chunked = data.partition(b"\r\n\r\n")
    if b"chunked" not in head.lower():
        return chunked.decode()
    body = b""
    while chunked:
        size, _, chunked = chunked.partition(b"\r\n")
        body, chunked = body + chunked[: int(size, 16)], chunked[int(size, 16) + 2 :]
    return body.decode()


def routes(engine: LocalEngine, asked: SamplingRequest, *, stall_s: float = 60) -> tuple[Route, Route]:
    async def whole(http: Request) -> Response:
        await http.body()
        try:
            completions = await while_connected(http, Generation(engine, [asked], timeout_s=60).completions())
        except ClientGone:
            return Response(status_code=499)
        return JSONResponse([list(completion.token_ids) for completion in completions[0]])

    async def stream(http: Request) -> Response:
        await http.body()
        async with AsyncExitStack() as resources:
            generation = Generation(engine, [asked], timeout_s=60, stream=True)
            resources.callback(generation.cancel)
            events = tokens_as_events(generation)
            first = await while_connected(http, anext(events))
            return EventStream(first, events, resources=resources.pop_all(), stall_s=stall_s)

    async def tokens_as_events(generation: Generation) -> AsyncGenerator[bytes, None]:
        while (tokens := await generation.next(15)) is not None:
            for token in tokens:
                yield sse(json.dumps({"token": token.id, "padding": "." * 4000}))

    return Route("/whole", whole, methods=["POST"]), Route("/stream", stream, methods=["POST"])


@pytest.mark.parametrize(("path", "read"), [("/whole", 0), ("/stream", 0), ("/stream", 2000)])
def test_a_client_that_leaves_stops_the_engine_within_a_second(engine: LocalEngine, path: str, read: int) -> None:
    with serving_routes(*routes(engine, endless(16))) as port:
        connection = post(port, path, read=read)
        assert busy_within(engine, 5)
        connection.close()
        assert idle_within(engine, 1)


def test_a_client_that_stays_gets_the_whole_answer(engine: LocalEngine) -> None:
    with serving_routes(*routes(engine, request())) as port:
        lines = body_of(post(port, "/stream")).split("\n\n")
    tokens = [json.loads(line.removeprefix("data: "))["token"] for line in lines[:-2]]
    assert tuple(tokens) == engine.generate([request()])[0][0].token_ids
    assert lines[-2:] == ["data: [DONE]", ""]


def test_a_reader_that_reads_nothing_is_given_up_and_others_are_not(engine: LocalEngine) -> None:
    """What a socket's buffers do not hold must not be waited for: the request ends seconds before its last token."""
    with (
        serving_routes(*routes(engine, endless(15), stall_s=0.2)) as port,
        serving_routes(*routes(engine, request())) as other,
    ):
        stuck = post(port, "/stream")
        assert busy_within(engine, 5)
        assert body_of(post(other, "/stream")).count("data: {") == 12
        assert engine.stats()["running"] >= 15
        assert idle_within(engine, 4)
        stuck.close()


def test_a_failure_after_the_first_event_is_an_event_and_the_stream_still_ends() -> None:
    told: list[type[BaseException] | None] = []

    async def failing(http: Request) -> Response:
        await http.body()

        async def events() -> AsyncGenerator[bytes, None]:
            yield sse('{"ok":1}')
            yield PING
            known = DeadlineError("too late", hint="see /srv/state/log")
            raise known if http.url.path == "/known" else KeyError("secret")

        failing = events()
        resources = AsyncExitStack()
        resources.push(lambda kind, *_: told.append(kind))
        return EventStream(await anext(failing), failing, resources=resources, without={"/srv/state": "<state_dir>"})

    with serving_routes(*(Route(path, failing, methods=["POST"]) for path in ("/known", "/bug"))) as port:
        known, bug = (body_of(post(port, path)).split("\n\n") for path in ("/known", "/bug"))
    assert known[:2] == bug[:2] == ['data: {"ok":1}', ": ping"]
    assert known[3:] == bug[3:] == ["data: [DONE]", ""]
    error = json.loads(known[2].removeprefix("data: "))["error"]
    assert (error["message"], error["code"], error["hint"]) == ("too late", "deadline_exceeded", "see <state_dir>/log")
    assert json.loads(bug[2].removeprefix("data: "))["error"]["code"] == "internal_error"
    assert "secret" not in bug[2]
    assert told == [DeadlineError, KeyError]


def test_a_stream_that_the_server_cuts_says_so() -> None:
    """At the end of a shutdown the server cancels what is still in flight."""
    sent: list[dict] = []
    told: list[type[BaseException] | None] = []

    async def events() -> AsyncGenerator[bytes, None]:
        yield sse("1")
        yield sse("2")
        await asyncio.sleep(60)

    async def receive() -> dict:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message) -> None:
        sent.append(message)

    async def cut() -> None:
        numbers, resources = events(), AsyncExitStack()
        resources.push(lambda kind, *_: told.append(kind))
        stream = EventStream(await anext(numbers), numbers, resources=resources)
        task = asyncio.ensure_future(stream({"type": "http"}, receive, send))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cut())
    bodies = [message["body"].decode() for message in sent[1:]]
    assert bodies[:2] == ["data: 1\n\n", "data: 2\n\n"]
    assert '"shutting_down"' in bodies[2] and bodies[2].endswith("data: [DONE]\n\n")
    assert not sent[-1]["more_body"] and told == [asyncio.CancelledError]
