"""uvicorn's h11 connections with what it has no deadlines for.

    make_server         uvicorn's server as we run it
    Connection          answers what is not HTTP with our envelope, and makes room when too many are open
    close_overdue       once a second: closes connections that wait for ever

uvicorn waits without end for the rest of a request's head, for the rest of a body that is no longer read, and for a
client that takes nothing of what was written before its connection closed. A thousand such connections cost a thousand
file descriptors; each of these three waits now ends after `header_timeout_s`.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from groupwise.errors import RequestError
from groupwise.server.config import ServeConfig
from groupwise.server.envelope import envelope

KEEP_ALIVE_S = 30
CUT_S = 1  # for what is still in flight when the server closes
RESERVED_FILES = 256  # descriptors that are not connections: model, ledger, logs, the worker's pipes


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours."""
        yield


def make_server(app: ASGIApp, config: ServeConfig) -> uvicorn.Server:
    """uvicorn's server with our connections, without signals, and with nothing of its own in the log but errors."""
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    settings = uvicorn.Config(
        app,
        http=connection_class(config),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CUT_S,
    )
    return _Server(settings)


class Connection(H11Protocol):
    """One connection. `most` is how many may be open."""

    most = 4096

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.waits_for: tuple[str, int] | None = None  # what, and since which request
        self.since = self.born = time.monotonic()
        if len(self.connections) > self.most:
            others = [c for c in self.connections if isinstance(c, Connection) and c.waiting() is not None]
            min(others, key=lambda connection: connection.born, default=self).transport.abort()

    def waiting(self) -> tuple[str, int] | None:
        """Which of the three waits this is in, if any; the number tells one request from the next."""
        request = id(self.cycle)
        if self.transport.is_closing():
            return "to close", request
        theirs, ours = self.conn.their_state, self.conn.our_state
        if theirs is h11.IDLE and (self.cycle is None or self.conn.trailing_data[0]):
            return "for a head", request
        if theirs is h11.SEND_BODY and ours is not h11.SEND_BODY and self.cycle and self.cycle.response_complete:
            return "for a body", request
        return None

    def send_400_response(self, msg: str) -> None:
        """What arrived is not HTTP."""
        status, headers, body = envelope(RequestError("this is not an HTTP request", code="invalid_http"))
        lines = {**headers, "content-length": str(len(body)), "connection": "close"}
        encoded = [(name.encode(), value.encode()) for name, value in lines.items()]
        try:
            for event in (h11.Response(status_code=status, headers=encoded), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:  # an answer is under way already
            pass
        self.transport.close()


def connection_class(config: ServeConfig) -> type[Connection]:
    """The class for `uvicorn.Config(http=...)`; takes as many file descriptors as this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.max_connections + RESERVED_FILES
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    most = max(1, min(config.max_connections, soft - RESERVED_FILES))
    return type("LimitedConnection", (Connection,), {"most": most})


async def close_overdue(connections: Collection[Any], *, seconds: float, poll_s: float = 1.0) -> None:
    """Close what has been in the same wait for `seconds`; runs until it is cancelled."""
    while True:
        await asyncio.sleep(min(poll_s, seconds / 2))
        now = time.monotonic()
        for connection in [c for c in connections if isinstance(c, Connection)]:
            waits_for = connection.waiting()
            if waits_for is None or waits_for != connection.waits_for:
                connection.waits_for, connection.since = waits_for, now
            elif now - connection.since > seconds:
                connection.transport.abort()
