"""A host of images for tests, over HTTP or TLS by a certificate of its own: good ones, and the ways to be a bad one."""

from __future__ import annotations

import gzip
import io
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from seeing_models import drawn


def png(seed: int = 0, width: int = 84, height: int = 56) -> bytes:
    written = io.BytesIO()
    drawn(width, height, seed=seed).save(written, format="PNG")
    return written.getvalue()


def reply(body: bytes, *, status: str = "200 OK", **headers: str) -> bytes:
    told = {"Content-Length": str(len(body)), **{name.replace("_", "-"): value for name, value in headers.items()}}
    head = "".join(f"{name}: {value}\r\n" for name, value in told.items())
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


@dataclass
class ImageHost:
    """Answers each path with the bytes of `pages`; those of `slowly` a byte at a time, without end."""

    port: int
    pages: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)  # heads of requests
    stopped: threading.Event = field(default_factory=threading.Event)

    def serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            head = b""
            while b"\r\n\r\n" not in head and (piece := connection.recv(65536)):
                head += piece
            self.asked.append(head.decode("latin-1"))
            path = head.split(b" ")[1].decode() if head.count(b" ") > 1 else ""
            connection.sendall(self.pages.get(path, b""))
            if path == "/endless":
                while not self.stopped.is_set():
                    connection.sendall(bytes(65536))
            elif path == "/drips":
                self._drip(connection, b"HTTP/1.1 200 OK\r\nX: ")
            elif path == "/drips-body":
                self._drip(connection, b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n")
            elif path == "/silent":
                self.stopped.wait(30)
            elif path not in self.pages:
                connection.sendall(reply(b"no", status="404 Not Found"))

    def _drip(self, connection: socket.socket, head: bytes) -> None:
        connection.sendall(head)
        while not self.stopped.is_set():
            connection.sendall(b"a")
            time.sleep(0.02)


@contextmanager
def image_host(*, certificate: Path | None = None) -> Iterator[ImageHost]:
    """A host on this machine, until the end."""
    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
    with socket.create_server(("127.0.0.1", 0)) as server:
        host = ImageHost(server.getsockname()[1])

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    threading.Thread(target=answer, args=(connection,), daemon=True).start()

        def answer(connection: socket.socket) -> None:
            with suppress(OSError):
                host.serve(connection if context is None else context.wrap_socket(connection, server_side=True))

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield host
        finally:
            host.stopped.set()


def certificate_of(folder: Path, *names: str) -> Path:
    """A key and a certificate that signed itself, for these names, in one file."""
    path = folder / "certificate.pem"
    named = ",".join(f"DNS:{name}" for name in names)
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=tests"]
    options = ["-addext", f"subjectAltName={named}", "-keyout", str(path), "-out", str(folder / "public.pem")]
    subprocess.run([*command, *options], check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + (folder / "public.pem").read_bytes())
    return path


def bomb() -> bytes:
    """64 MiB of nothing in 64 KiB."""
    return gzip.compress(bytes(1 << 26))
