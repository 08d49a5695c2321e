"""Connections that wait for ever are closed; too many of them leave the server answering."""

import resource
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from groupwise import platform
from groupwise.config.serve import ServeConfig
from groupwise.server import connections
from groupwise.server.connections import (
    ACCEPTED,
    LEAST_CONNECTIONS,
    RESERVED_FILES,
    Connection,
    connection_class,
)
from groupwise.server.listen import StartError
from raw_http import connect, head, is_closed, listening, read
from wording import raises

OVERDUE_S = 0.4
MANY = 1000


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("hello")(scope, receive, send)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    config = ServeConfig(header_timeout_s=OVERDUE_S, max_connections=MANY + 200)
    with listening(hello, config) as port:
        yield port


def half_a_head(port: int) -> socket.socket:
    return connect(port, b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-")


def test_a_thousand_half_sent_requests_leave_the_server_answering(port: int) -> None:
    """They are ours as well as the server's: two descriptors each in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * MANY + RESERVED_FILES:
        pytest.skip(f"this user may have {hard} files open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * MANY + RESERVED_FILES), hard))
    half_sent = []
    try:
        half_sent = [half_a_head(port) for _ in range(MANY)]
        with connect(port, head("GET", "/")) as connection:
            assert read(connection).body == b"hello"
        assert all(is_closed(each) for each in half_sent)
    finally:
        for each in half_sent:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("sent", [b"", b"G", b"GET / HTTP/1.1\r\n", b"\r\n\r\n"])
def test_no_whole_head_no_connection(port: int, sent: bytes) -> None:
    with connect(port, sent) as connection:
        assert is_closed(connection)


def test_a_head_that_drips_is_not_waited_for(port: int) -> None:
    with connect(port, b"GET / HTTP/1.1\r\nHost: x\r\n") as connection:
        began = time.monotonic()
        with pytest.raises(OSError):  # noqa: PT012
            while time.monotonic() - began < 120:
                connection.sendall(b"X-A: b\r\n")
                time.sleep(0.05)


def test_the_second_head_is_not_waited_for_either(port: int) -> None:
    with connect(port, head("GET", "/")) as connection:
        assert read(connection).status == 200
        connection.sendall(b"GET /again HTTP/1.1\r\n")
        assert is_closed(connection)


def test_a_body_that_nobody_reads_is_not_waited_for(port: int) -> None:
    """The answer is given before the body is there; the client sends it for ever."""
    with connect(port, head("POST", "/", "transfer-encoding: chunked")) as connection:
        assert read(connection).status == 200
        began = time.monotonic()
        with pytest.raises(OSError):  # noqa: PT012
            while time.monotonic() - began < 120:
                connection.sendall(b"1\r\nx\r\n")
                time.sleep(0.02)


def test_a_connection_at_rest_may_stay(port: int) -> None:
    with connect(port, head("GET", "/")) as connection:
        assert read(connection).status == 200
        time.sleep(2.5 * OVERDUE_S)
        connection.sendall(head("GET", "/"))
        assert read(connection).status == 200


def test_a_request_that_takes_long_may_stay() -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        import asyncio

        await asyncio.sleep(3 * OVERDUE_S)
        await hello(scope, receive, send)

    with listening(slow, ServeConfig(header_timeout_s=OVERDUE_S)) as port, connect(port, head("GET", "/")) as waiting:
        assert read(waiting).status == 200


def test_where_too_many_are_open_the_oldest_that_waits_makes_room() -> None:
    with listening(hello, ServeConfig(header_timeout_s=60, max_connections=3)) as port:
        at_rest = connect(port, head("GET", "/"))
        assert read(at_rest).status == 200
        old, young = half_a_head(port), half_a_head(port)
        new = connect(port, head("GET", "/"))
        assert read(new).status == 200
        assert is_closed(old) and not is_closed(young, seconds=0.1)
        at_rest.sendall(head("GET", "/"))
        assert read(at_rest).status == 200
        for each in (at_rest, old, young, new):
            each.close()


def test_where_none_waits_the_one_longest_at_rest_makes_room() -> None:
    with listening(hello, ServeConfig(header_timeout_s=60, max_connections=2)) as port:
        old, young = (connect(port, head("GET", "/")) for _ in range(2))
        assert [read(each).status for each in (old, young)] == [200, 200]
        with connect(port, head("GET", "/")) as new:
            assert read(new).status == 200
        assert is_closed(old)
        young.sendall(head("GET", "/"))
        assert read(young).status == 200
        old.close()
        young.close()


def test_a_connection_that_is_answered_never_makes_room() -> None:
    import asyncio

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.5)
        await hello(scope, receive, send)

    one = ServeConfig(header_timeout_s=60, max_connections=1)
    with listening(slow, one) as port, connect(port, head("GET", "/")) as asked:
        time.sleep(0.1)
        with connect(port) as late:
            assert is_closed(late)
        assert read(asked).status == 200


def test_who_makes_room_is_not_searched_for_among_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these is one too many; once a thousand were looked at for each."""
    looked, waiting = [0], Connection.waiting

    def counted(self: Connection) -> tuple[str, int] | None:
        looked[0] += 1
        return waiting(self)

    monkeypatch.setattr(Connection, "waiting", counted)
    with listening(hello, ServeConfig(header_timeout_s=60, max_connections=100)) as port:
        silent = [connect(port) for _ in range(400)]
        with connect(port, head("GET", "/")) as connection:
            assert read(connection).body == b"hello"
        for each in silent:
            each.close()
    assert looked[0] < 10 * 400


def test_few_connections_are_accepted_in_one_turn_and_many_may_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    turns: list[int] = []
    made = Connection.connection_made

    def counted(self: Connection, transport: asyncio.Transport) -> None:
        turns.append(self.loop.turn)  # pyright: ignore[reportAttributeAccessIssue]
        made(self, transport)

    async def blocks(scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()

        def tick() -> None:
            loop.turn = getattr(loop, "turn", 0) + 1  # pyright: ignore[reportAttributeAccessIssue]
            loop.call_soon(tick)

        tick()
        monkeypatch.setattr(Connection, "connection_made", counted)
        await hello(scope, receive, send)
        time.sleep(0.5)  # the loop stands still, and the kernel takes connections

    with listening(blocks, ServeConfig()) as port:
        with connect(port, head("GET", "/")) as connection:
            assert read(connection).status == 200
        queued = [socket.create_connection(("127.0.0.1", port), timeout=120) for _ in range(300)]
        deadline = time.monotonic() + 120
        while len(turns) < 300 and time.monotonic() < deadline:
            time.sleep(0.01)
        for each in queued:
            each.close()
    assert len(turns) == 300
    assert max(turns.count(turn) for turn in set(turns)) <= 2 * ACCEPTED


def test_a_body_of_countless_chunks_is_parsed_a_little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    handle = Connection.handle_events

    def counted(self: Connection) -> None:
        before = len(self.cycle.body) if self.cycle else 0
        handle(self)
        parsed.append(len(self.cycle.body) - before)

    async def count(scope: Scope, receive: Receive, send: Send) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            size, more = size + len(message["body"]), message["more_body"]
        await PlainTextResponse(str(size))(scope, receive, send)

    monkeypatch.setattr(Connection, "handle_events", counted)
    chunked = head("POST", "/", "transfer-encoding: chunked") + b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n"
    with listening(count, ServeConfig()) as port, connect(port) as connection:
        connection.sendall(chunked)
        assert read(connection).body == b"100000"
        assert sorted(parsed)[len(parsed) // 2] <= connections.LEAST_SLICE // 6 + 1
        assert max(parsed) <= 8 * connections.LEAST_SLICE // 6  # it is not known at first
        connection.sendall(head("POST", "/", "content-length: 200000") + b"x" * 200_000)
        assert read(connection).body == b"200000"


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00" * 9 + b"\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nX" + b"x" * 200_000]
)
def test_what_is_not_http_gets_the_envelope(port: int, garbage: bytes) -> None:
    with connect(port) as connection:
        with suppress(OSError):  # refused before it was all sent
            connection.sendall(garbage)
        answer = read(connection)
        if answer.status:  # the kernel may drop it with what was not read
            assert answer.status == 400 and answer.error["code"] == "invalid_http"
        assert is_closed(connection)


@pytest.mark.parametrize("files", [256, RESERVED_FILES + LEAST_CONNECTIONS - 1])
def test_too_few_descriptors_for_a_server_are_said(files: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform.resource, "getrlimit", lambda which: (files, files))
    monkeypatch.setattr(platform.resource, "setrlimit", lambda which, limits: None)
    with raises(StartError) as error:
        connection_class(ServeConfig())
    assert error.value.exit_code == 3


def test_fewer_connections_than_were_asked_for_are_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(platform.resource, "getrlimit", lambda which: (1024, 1024))
    monkeypatch.setattr(platform.resource, "setrlimit", lambda which, limits: None)
    assert connection_class(ServeConfig()).most == 1024 - RESERVED_FILES
    assert "max_connections is 4096, but with 1024 open files" in caplog.text
    caplog.clear()
    assert connection_class(ServeConfig(max_connections=500)).most == 500 and not caplog.text


def test_there_are_never_more_connections_than_descriptors() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        limited = connection_class(ServeConfig(max_connections=10**6))
        assert limited.most <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED_FILES
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
