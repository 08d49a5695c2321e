"""Writes a step's rollouts file: a line a group, in the place of what was there, whole or not at all.

    write_rollouts     by whoever calls it: 0.4 microseconds of processor time a token
    RolloutWriter      a step of APART tokens or more by a process of its own: 0.05 for who hands it over

The process is started when the first step is that long, and ends with the one that started it, after what it was
handed is written. It is handed one step at a time, pickled; that is not sure to be there before `settle`, which a run
calls before a checkpoint, before the next step is written, and at its end. Whatever goes wrong with it is said in the
log, and nothing is lost: the step's groups are kept until then, and this process writes them, and all later ones.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from groupwise.errors import StorageError
from groupwise.store.rollouts import group_line
from groupwise.types import RolloutGroup

log = logging.getLogger(__name__)

APART = 500_000  # completion tokens of a step from which its rollouts are handed over: a fifth of a second of JSON


@contextmanager
def recording(path: Path) -> Iterator[None]:
    """Raise what the file system says of `path` as StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError.of(error, f"{path} cannot be written: {error}") from error


def write_rollouts(path: Path, groups: Sequence[RolloutGroup]) -> None:
    """Write the file. Raises StorageError, and leaves what was there."""
    temporary = path.with_suffix(".tmp")
    with recording(path):
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(group_line(group) + "\n" for group in groups)
        os.replace(temporary, path)


class RolloutWriter:
    """Writes rollouts files; those of `apart` completion tokens or more in another process."""

    def __init__(self, *, apart: int = APART):
        self._apart: int | None = apart  # None where there is no process for it any more
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Connection | None = None
        self._handed: tuple[Path, Sequence[RolloutGroup]] | None = None

    @property
    def pid(self) -> int | None:
        """Return the number of the other process, if there is one."""
        return None if self._process is None else self._process.pid

    @property
    def waits(self) -> bool:
        """Return whether something was handed over that is not sure to be there."""
        return self._handed is not None

    def write(self, path: Path, groups: Sequence[RolloutGroup]) -> None:
        """Write the file, or have it written. Raises StorageError, also for the file before."""
        self.settle()
        if self._apart is None or _tokens(groups) < self._apart:
            return write_rollouts(path, groups)
        try:
            data = pickle.dumps((path, groups), protocol=5)
            if self._channel is None:
                self._start()
            assert self._channel is not None
            self._channel.send_bytes(data)
        except Exception as error:  # a column that cannot be pickled; no process, or none any more
            self._give_up(f"{type(error).__name__}: {error}")
            return write_rollouts(path, groups)
        self._handed = path, groups

    def settle(self) -> None:
        """Wait until the file that was handed over is there. Raises StorageError."""
        if self._handed is None:
            return
        assert self._channel is not None
        try:
            wrong = self._channel.recv_bytes().decode()
        except (OSError, EOFError):
            wrong = "it ended"
        (path, groups), self._handed = self._handed, None
        if wrong:
            self._give_up(wrong)
            write_rollouts(path, groups)

    def close(self) -> None:
        """Settle, and end the process. Safe to call twice."""
        try:
            self.settle()
        finally:
            self._end()

    def _start(self) -> None:
        ours, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C in the terminal is for the process that started this one
            )
        self._channel = ours

    def _give_up(self, why: str) -> None:
        log.warning("the process that writes rollouts failed (%s): this one writes them, and nothing is lost", why)
        self._apart = None
        self._end()

    def _end(self) -> None:
        if self._channel is not None:
            self._channel.close()  # at which it ends
        if self._process is not None:
            self._process.wait()
        self._channel = self._process = None


def _tokens(groups: Sequence[RolloutGroup]) -> int:
    return sum(len(turn.completion.token_ids) for group in groups for each in group.rollouts for turn in each.turns)


def _serve(channel: Connection) -> None:
    """Write what comes, one after another, and answer each with what went wrong, or nothing, until the other end closes
    its own."""
    while True:
        try:
            data = channel.recv_bytes()
        except (EOFError, OSError):
            return
        wrong = ""
        try:
            write_rollouts(*pickle.loads(data))
        except Exception as error:  # also a column of a class that is not known here
            wrong = f"{type(error).__name__}: {error}"
        try:
            channel.send_bytes(wrong.encode(errors="replace"))
        except OSError:  # nobody waits for it
            return


if __name__ == "__main__":
    gc.disable()  # it halves the reading of a step, which has no cycles
    _serve(Connection(int(sys.argv[1])))
