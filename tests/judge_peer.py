"""A judge on a socket, which answers as a test says, for the tests of rewards that ask one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Said:
    """What the server answers: a chat completion with this text, or anything else."""

    text: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    wait_s: float = 0.0

    def body(self) -> bytes:
        if self.raw is not None:
            return self.raw
        return json.dumps({"choices": [{"message": {"role": "assistant", "content": self.text}}]}).encode()


@dataclass
class Judge:
    """A judge on a socket. `answer` makes of a request's body and of how often that came before what is said."""

    answer: Callable[[dict[str, Any], int], Said]
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0
    running: int = 0
    lock: Any = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)

    def take(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        with self.lock:
            before = self.bodies.count(body)
            self.bodies.append(body)
            self.headers.append({name.lower(): value for name, value in handler.headers.items()})
            self.running += 1
            self.most_at_once = max(self.most_at_once, self.running)
        said = self.answer(body, before)
        self.over.wait(said.wait_s)
        with self.lock:
            self.running -= 1
        content = said.body()
        handler.send_response(said.status)
        for name, value in {"content-length": str(len(content)), **said.headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(content)


@contextmanager
def judges() -> Iterator[Callable[[Callable[[dict[str, Any], int], Said]], Judge]]:
    """`start(answer)`: a running judge."""
    servers: list[tuple[ThreadingHTTPServer, Judge]] = []

    def run(answer: Callable[[dict[str, Any], int], Said]) -> Judge:
        at = Judge(answer)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                try:
                    at.take(self)
                except OSError:
                    self.close_connection = True  # the client has given up

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append((server, at))
        at.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        return at

    yield run
    for server, at in servers:
        at.over.set()
        server.shutdown()
        server.server_close()
