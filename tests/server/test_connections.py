"""Connections that wait for ever are closed; too many of them leave the server answering."""

import resource
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from groupwise.server.config import ServeConfig
from groupwise.server.connections import RESERVED_FILES, connection_class
from raw_http import connect, head, is_closed, listening, read

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
            assert read(connection, seconds=5).body == b"hello"
        assert all(is_closed(each, seconds=5) for each in half_sent)
    finally:
        for each in half_sent:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("sent", [b"", b"G", b"GET / HTTP/1.1\r\n", b"\r\n\r\n"])
def test_no_whole_head_no_connection(port: int, sent: bytes) -> None:
    with connect(port, sent) as connection:
        assert is_closed(connection, seconds=5)


def test_a_head_that_drips_is_not_waited_for(port: int) -> None:
    with connect(port, b"GET / HTTP/1.1\r\nHost: x\r\n") as connection:
        began = time.monotonic()
        with pytest.raises(OSError):  # noqa: PT012
            while time.monotonic() - began < 5:
                connection.sendall(b"X-A: b\r\n")
                time.sleep(0.05)
        assert time.monotonic() - began < 3


def test_the_second_head_is_not_waited_for_either(port: int) -> None:
    with connect(port, head("GET", "/")) as connection:
        assert read(connection).status == 200
        connection.sendall(b"GET /again HTTP/1.1\r\n")
        assert is_closed(connection, seconds=5)


def test_a_body_that_nobody_reads_is_not_waited_for(port: int) -> None:
    """The answer is given before the body is there; the client sends it for ever."""
    with connect(port, head("POST", "/", "transfer-encoding: chunked")) as connection:
        assert read(connection).status == 200
        began = time.monotonic()
        with pytest.raises(OSError):  # noqa: PT012
            while time.monotonic() - began < 5:
                connection.sendall(b"1\r\nx\r\n")
                time.sleep(0.02)
        assert time.monotonic() - began < 3


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
        assert is_closed(old, seconds=5) and not is_closed(young, seconds=0.1)
        at_rest.sendall(head("GET", "/"))
        assert read(at_rest).status == 200
        for each in (at_rest, old, young, new):
            each.close()


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
        assert is_closed(connection, seconds=5)


def test_there_are_never_more_connections_than_descriptors() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        limited = connection_class(ServeConfig(max_connections=10**6))
        assert limited.most <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED_FILES
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
