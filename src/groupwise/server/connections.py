"""uvicorn's h11 protocol with deadlines for slow clients, which it lacks.

    make_server         uvicorn's server as we run it
    Connection          answers what is not HTTP with our envelope, and makes room when too many are open
    close_overdue       once a second: closes connections that wait for ever

uvicorn waits without end for the rest of a request's head, for the rest of a body that is no longer read, and for a
client that takes nothing of what was written before its connection closed. A thousand such connections cost a thousand
file descriptors; each of these three waits now ends after `header_timeout_s`.

What a client can send or open at once is worked off in pieces, and other connections have their turn between them:
a few accepted at a time, a chunked body by the kilobyte, and no search among all that are open for the one to close.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from groupwise.config.serve import ServeConfig
from groupwise.errors import RequestError
from groupwise.platform import raise_open_files
from groupwise.server.errors import envelope
from groupwise.server.listen import BACKLOG, StartError

KEEP_ALIVE_S = 30
CUT_S = 1  # for what is still in flight when the server closes
RESERVED_FILES = 256  # descriptors that are not connections: model, ledger, logs, the worker's pipes
LEAST_CONNECTIONS = 64  # with fewer a few browsers and trainers would lock each other out
ACCEPTED = 4  # connections taken from the kernel's queue in one turn of the loop
LEAST_SLICE, MOST_SLICE = 1 << 10, 1 << 18  # bytes of a chunked body that are parsed in one turn
SLICE_S, REST = 1e-3, 4  # what that may cost; where it costs more, others have so many times as long before the next
LOOKED_AT = 256  # connections that `close_overdue` looks at in one turn

log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """asyncio accepts as many connections in one turn as its backlog says, and tells the kernel the same number."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: the application handles signals."""
        yield


def make_server(app: ASGIApp, config: ServeConfig) -> uvicorn.Server:
    """Make uvicorn's server with our connections, without signals, and with only errors in its log."""
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    settings = uvicorn.Config(
        app,
        http=connection_class(config),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        backlog=ACCEPTED,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CUT_S,
    )
    return _Server(settings)


class _Flow(FlowControl):
    """uvicorn's, which reads nothing more while what has been read waits to be parsed."""

    held = False

    def hold(self) -> None:
        self.pause_reading()
        self.held = True

    def let_go(self, *, full: bool) -> None:
        """`full`: the application has enough to read; it resumes by itself."""
        self.held = False
        if not full:
            self.resume_reading()

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class Connection(H11Protocol):
    """Serves an HTTP connection. At most `most` connections may be open; if one more comes, the server closes one that
    waits (`in_wait`, see `waiting`) or that is between two requests (`at_rest`). Both are ordered by time of entry."""

    most: ClassVar[int] = 4096
    in_wait: ClassVar[dict[Connection, None]] = {}
    at_rest: ClassVar[dict[Connection, None]] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = self._held = _Flow(transport)
        self.waits_for: tuple[str, int] | None = None  # what, and since which request
        self.since = time.monotonic()
        self._unparsed, self._slice = b"", LEAST_SLICE
        if len(self.connections) > self.most:
            self._make_room()
        self._note()

    def _make_room(self) -> None:
        """Close the connection that has waited longest, else the one that has been at rest longest, else this one."""
        for idle in (self.in_wait, self.at_rest):
            while idle:
                oldest = next(iter(idle))
                del idle[oldest]
                if oldest.is_idle():
                    oldest.transport.abort()
                    return
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.in_wait.pop(self, None)
        self.at_rest.pop(self, None)
        self._unparsed = b""
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._unparsed:
            self._unparsed += data
        elif len(data) > LEAST_SLICE:
            self._unparsed = data
            self._held.hold()
            self._parse_slice()
        else:
            super().data_received(data)
            self._note()

    def _parse_slice(self) -> None:
        """Parse a little of what has arrived, or all that is of one body without chunks; and later what follows.

        How much is little depends on what it costs: chunks of one byte take a thousand times as long as large ones.
        """
        began, size = time.thread_time(), len(self._unparsed) if self._has_length() else self._slice
        data, self._unparsed = self._unparsed[:size], self._unparsed[size:]
        super().data_received(data)
        self._note()
        spent = time.thread_time() - began
        if spent > SLICE_S:
            self._slice = max(LEAST_SLICE, self._slice // 2)
        elif spent < SLICE_S / 4:
            self._slice = min(MOST_SLICE, self._slice * 2)
        if self._unparsed and not self.transport.is_closing():
            self.loop.call_later(REST * spent if spent > SLICE_S else 0, self._parse_slice)
        else:
            self._held.let_go(full=self.cycle is not None and len(self.cycle.body) > HIGH_WATER_LIMIT)

    def _has_length(self) -> bool:
        """Return whether a body is arriving whose length was said."""
        if self.conn.their_state is not h11.SEND_BODY:
            return False
        names = {name for name, _ in self.headers}
        return b"content-length" in names and b"transfer-encoding" not in names  # with both the chunks count

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def _note(self) -> None:
        """Keep in mind whether this connection could make room for another."""
        waits = self.waiting() is not None
        for idle, belongs in ((self.in_wait, waits), (self.at_rest, not waits and self.is_idle())):
            if not belongs:
                idle.pop(self, None)
            elif self not in idle:
                idle[self] = None

    def is_idle(self) -> bool:
        """Return whether no request is being received or answered."""
        return self.waiting() is not None or (self.conn.their_state is h11.IDLE and self.conn.our_state is h11.IDLE)

    def waiting(self) -> tuple[str, int] | None:
        """Return which of the three waits this is in, if any; the number tells one request from the next."""
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
        """Answer what is not HTTP."""
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
    """Return the class for `uvicorn.Config(http=...)`; takes as many file descriptors as this process may have.

    Raises StartError where that leaves room for hardly any connection.
    """
    wanted = config.max_connections + RESERVED_FILES
    soft = raise_open_files(wanted)
    most = min(config.max_connections, soft - RESERVED_FILES)
    if most < min(LEAST_CONNECTIONS, config.max_connections):
        raise StartError(
            f"this process may have {soft} files open (ulimit -n), and {RESERVED_FILES} are not for connections",
            hint=f"allow it {RESERVED_FILES + LEAST_CONNECTIONS} or more; max_connections needs {wanted}",
        )
    if most < config.max_connections:
        log.warning(
            "max_connections is %d, but with %d open files (ulimit -n) there can be %d connections at once",
            config.max_connections,
            soft,
            most,
        )
    return type("LimitedConnection", (Connection,), {"most": most, "in_wait": {}, "at_rest": {}})


async def close_overdue(connections: Collection[Any], *, seconds: float, poll_s: float = 1.0) -> None:
    """Close what has been in the same wait for `seconds`; runs until it is cancelled."""
    while True:
        await asyncio.sleep(min(poll_s, seconds / 2))
        now = time.monotonic()
        for number, connection in enumerate([c for c in connections if isinstance(c, Connection)]):
            if number % LOOKED_AT == LOOKED_AT - 1:
                await asyncio.sleep(0)
            waits_for = connection.waiting()
            if waits_for is None or waits_for != connection.waits_for:
                connection.waits_for, connection.since = waits_for, now
            elif now - connection.since > seconds:
                connection.transport.abort()
