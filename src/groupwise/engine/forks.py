"""Processes that are forked for one piece of work each, and killed where it takes too much.

    ForkServer      starts `python -m MODULE DESCRIPTOR`, which imports what is needed and then forks; for threads
    serve_forks     what that module runs: one process for each GO, killed when it has too much memory
    end_with        in such a process: it ends when the other end of its conversation closes

The two speak over a socket. First comes a pickled setup, answered with READY when everything is imported. Then each GO
brings descriptors, and a process is forked that gets them. A fork costs milliseconds, shares what was imported, and
gives all its memory back when it ends.

The process that forks has one thread, so that a fork of it is safe; while forked ones live it looks at their memory and
kills the one that has too much. (Under a limit of the kernel's an allocation fails, and what happens then inside
compiled code is anything: some of it hangs.) It ends with the process that started it, whose end of the socket closes.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from groupwise import platform
from groupwise.errors import NotReadyError

START_S = 120.0  # for the process that forks to import everything
FORK_S = 1.0  # for it to take the descriptors
LOOK_S = 0.02  # between two looks at the memory of forked processes
OOM_SCORE = 1000  # the first to go when memory runs out
PIECE = 1 << 20  # bytes that are received at once
READY, GO = b"ready", b"g"


def frame(data: bytes) -> bytes:
    """Return a message on a stream: its length in 8 bytes, then itself."""
    return len(data).to_bytes(8, "big") + data


def receive_frame(stream: socket.socket) -> bytes:
    """Raise EOFError when the other end has closed."""
    return _receive(stream, int.from_bytes(_receive(stream, 8), "big"))


def _receive(stream: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        piece = stream.recv(min(size - len(received), PIECE))
        if not piece:
            raise EOFError
        received += piece
    return bytes(received)


class ForkServer:
    """The process that others are forked from, started when it is needed and again when it is gone. For threads.

    Args:
        module: the module that the process runs.
        setup: the first message to the process.
        without: what cannot be done if the process does not start, for errors.
    """

    def __init__(self, module: str, setup: Any, *, without: str):
        self._module, self._setup, self._without = module, setup, without
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._lock = threading.Lock()
        self._closed = False

    @property
    def running(self) -> bool:
        """Return whether there is a process to fork from, which looks at those that it forked."""
        return (process := self._process) is not None and process.poll() is None

    def start(self) -> None:
        """Raise NotReadyError if it does not start."""
        with self._lock:
            if self._closed or self.running:
                return
            self._end()
            ours, theirs = socket.socketpair()
            ours.settimeout(START_S)
            with theirs:
                self._channel, self._process = ours, self._begin(theirs.fileno())
            if self._closed:
                self._end()
                return
            try:
                ours.sendall(frame(pickle.dumps(self._setup)))
                _receive(ours, len(READY))
                ours.settimeout(FORK_S)
            except (OSError, EOFError) as error:
                self._end()
                raise NotReadyError(
                    f"{self._without} now: their process did not start ({type(error).__name__})",
                    hint="try again; the log may say why",
                    retry_after=5,
                ) from error

    def _begin(self, descriptor: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", self._module, str(descriptor)],
            stdin=subprocess.DEVNULL,
            pass_fds=[descriptor],
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
            process_group=0,  # Ctrl-C in the terminal is for the process that started this one
        )

    def fork(self, *descriptors: int) -> None:
        """Have a process that gets these descriptors. Raises NotReadyError once this is closed."""
        with self._lock:
            if self._channel is None:
                raise NotReadyError("the server is shutting down", retry_after=5)
            with suppress(OSError):  # it is gone, and the conversation ends
                socket.send_fds(self._channel, [GO], descriptors)

    def close(self) -> None:
        """Close for good. One that is being started is not waited for."""
        self._closed = True
        if process := self._process:
            process.kill()
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._channel = self._process = None


# ---- in the process that forks ----
def receive_setup(descriptor: str) -> tuple[socket.socket, Any]:
    """Return the socket to the process that started this one, and what it says first. Ends this process, without an
    error, where that one is gone."""
    channel = socket.socket(fileno=int(descriptor))
    platform.set_oom_score(OOM_SCORE)
    try:
        return channel, pickle.loads(receive_frame(channel))
    except (EOFError, OSError):
        sys.exit(0)


def serve_forks(
    channel: socket.socket,
    count: int,
    *,
    most_bytes: Callable[[Sequence[int]], int],
    work: Callable[[Sequence[int], int], None],
) -> int:
    """Say READY, and fork a process for each `count` descriptors that come, until the other end closes. Returns 0.

    Args:
        most_bytes: the memory that the process for these descriptors may have, in addition to shared memory.
        work: what it does with them and that number. It never returns.
    """
    with suppress(OSError):  # the other end was killed
        channel.sendall(READY)
    running: dict[int, int] = {}  # and the memory that each may have, shared with this process or not
    while True:
        if not platform.ready([channel], timeout=LOOK_S if running else None)[0]:
            _look_at(running)
            continue
        try:
            told, descriptors, _, _ = socket.recv_fds(channel, len(GO), count)
        except OSError:
            return 0
        if not told:
            return 0
        most = most_bytes(descriptors)
        with suppress(OSError):  # no more processes, or no memory for one: the conversation ends
            if (process := os.fork()) == 0:
                try:
                    channel.close()
                    work(descriptors, most)
                finally:
                    os._exit(1)
            running[process] = platform.resident_bytes(os.getpid()) + most
        for descriptor in descriptors:
            os.close(descriptor)


def _look_at(running: dict[int, int]) -> None:
    """Forget those that have ended, and kill those that have too much memory."""
    for process, most in list(running.items()):
        if os.waitpid(process, os.WNOHANG)[0] == process:
            del running[process]
        elif platform.resident_bytes(process) > most:
            os.kill(process, signal.SIGKILL)


def end_with(stream: socket.socket) -> None:
    """Wait until the other end closes, then end this process, whose result has no reader any more. The other end sends
    nothing."""
    with suppress(OSError):
        stream.recv(1)
    os._exit(1)
