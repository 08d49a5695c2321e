"""Takes the port and locks the state directory before anything slow begins. Standard library only.

    bind     a listening socket, or StartError naming the port and who has it
    own      the state directory, locked while the process lives, or StartError naming the process that has it
    incoming where large bodies wait, inside it

The kernel gives both back when the process ends, however it ends.
"""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from groupwise.errors import GroupwiseError
from groupwise.platform import listener_of, try_lock

BACKLOG = 2048
LOCK = "server.lock"  # in the state directory
INCOMING = "incoming"  # in the state directory: files without names


class StartError(GroupwiseError):
    """The server cannot start here."""

    code, status, exit_code = "cannot_start", 503, 3


def bind(host: str, port: int) -> socket.socket:
    """Listen on `host`:`port` (0: a free port). Connections wait in the kernel until the server accepts them."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise StartError(f"the host {host!r} is not an address of this machine: {error}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        pid = listener_of(port)
        owner = f" by process {pid}" if pid else ""
        reason = f"it is in use{owner}" if error.errno == errno.EADDRINUSE else error.strerror
        hint = "stop what uses it, or choose another --port"
        if error.errno in (errno.EACCES, errno.EPERM):
            hint = "low ports are the system administrator's: choose a --port from 1024 on, with a proxy before it"
        elif error.errno == errno.EADDRNOTAVAIL:
            hint = "--host is an address of this machine, such as 127.0.0.1"
        raise StartError(f"cannot listen on {host} port {port}: {reason}", hint=hint) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the base URL of a listening socket."""
    host, port = str(listener.getsockname()[0]), int(listener.getsockname()[1])
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def own(state_dir: Path) -> Iterator[None]:
    """Make this process the only server on `state_dir` during the block. A second one would train the same jobs."""
    path = state_dir / LOCK
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartError(
            f"the state directory {state_dir} cannot be used by user {os.getuid()}: {error.strerror}",
            hint="it must be a directory that the server may write to; choose another with --state-dir",
        ) from None
    try:
        if not try_lock(descriptor):
            owner = os.pread(descriptor, 256, 0).decode(errors="replace").strip() or "another process"
            raise StartError(
                f"the state directory {state_dir} is in use by {owner}",
                hint="stop that server, or give this one its own --state-dir",
            )
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"pid {os.getpid()} since {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}\n".encode(), 0)
        except OSError as error:
            raise StartError(
                f"the state directory {state_dir} cannot be written to: {error.strerror}",
                hint="free some disk space, or choose another with --state-dir",
            ) from None
        yield
    finally:
        os.close(descriptor)  # and with it the lock


@contextmanager
def incoming(state_dir: Path) -> Iterator[None]:
    """Context manager: uploads too large for memory are buffered on the state directory's disk, whose free space is
    watched, and not in the system's temporary directory (on some machines that is memory)."""
    directory, before = state_dir.absolute() / INCOMING, tempfile.tempdir
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StartError(
            f"the state directory {state_dir} cannot be written to: {error.strerror}",
            hint="free some disk space, or choose another with --state-dir",
        ) from None
    tempfile.tempdir = str(directory)
    try:
        yield
    finally:
        tempfile.tempdir = before
