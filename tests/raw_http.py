"""HTTP byte by byte, against uvicorn as we run it: for requests that no client library would send."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

from groupwise.config.serve import ServeConfig
from groupwise.server.connections import close_overdue, make_server
from groupwise.server.listen import bind


@dataclass(frozen=True)
class Answered:
    """What came back on a connection before it was closed or fell silent. `status` 0: nothing did."""

    status: int
    headers: dict[str, str]
    body: bytes
    closed: bool

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]


@contextmanager
def listening(app: ASGIApp, config: ServeConfig) -> Iterator[int]:
    """The port of an application behind our connections, in a thread."""
    listener = bind("127.0.0.1", 0)
    server = make_server(app, config)

    async def main() -> None:
        overdue = close_overdue(server.server_state.connections, seconds=config.header_timeout_s, poll_s=0.05)
        sweeping = asyncio.create_task(overdue)
        await server.serve(sockets=[listener])
        sweeping.cancel()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(timeout=120)
        assert not thread.is_alive()


def connect(port: int, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=120)
    connection.sendall(data)
    return connection


def head(method: str, path: str, *lines: str, host: str = "127.0.0.1") -> bytes:
    """The head of an HTTP/1.1 request, with the empty line."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", f"Host: {host}", *lines, "", ""]).encode("latin-1")


def read(connection: socket.socket, *, seconds: float = 120) -> Answered:
    """One answer with a content-length, or what came in `seconds`."""
    connection.settimeout(seconds)
    data, closed = b"", False
    while not _is_whole(data):
        try:
            part = connection.recv(65536)
        except TimeoutError:
            break
        except ConnectionResetError:
            part = b""
        if not part:
            closed = True
            break
        data += part
    return _parsed(data, closed=closed)


def is_closed(connection: socket.socket, *, seconds: float = 120) -> bool:
    """Whether the server closes the connection within `seconds`."""
    connection.settimeout(seconds)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return True


def _is_whole(data: bytes) -> bool:
    top, end, body = data.partition(b"\r\n\r\n")
    if not end or top.startswith(b"HTTP/1.1 100"):
        return False
    length = _parsed(data, closed=False).headers.get("content-length")
    return length is not None and len(body) >= int(length)


def _parsed(data: bytes, *, closed: bool) -> Answered:
    while data.startswith(b"HTTP/1.1 100"):
        data = data.partition(b"\r\n\r\n")[2]
    top, _, body = data.partition(b"\r\n\r\n")
    first, *lines = top.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Answered(int(first.split()[1]) if first else 0, headers, body, closed)
