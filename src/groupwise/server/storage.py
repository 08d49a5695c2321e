"""Watches whether the server can still write job payloads, adapter versions and its ledger (disk full, read-only).

StorageProbe    asks the disk, at most every few seconds, and says what is wrong
check_room      raises StorageFullError where too little is free to take more
"""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

from groupwise.errors import StorageError, StorageFullError
from groupwise.store import files
from groupwise.store.ledger_schema import SPOOL

PROBE_S = 2.0  # an answer is this old at most: health is asked for often
FAILED_S = 10.0  # after a request that could not be kept, nothing is called well for so long
ADAPTERS = "adapters"


class StorageProbe:
    """Writes a small file into each directory in which the server and its worker write, forces it to the disk and
    removes it: what a full or failing disk, a read-only mount or wrong permissions do not let pass."""

    def __init__(self, state_dir: Path):
        self._directories = (state_dir, state_dir / SPOOL, state_dir / ADAPTERS)
        self._lock = threading.Lock()
        self._asked_at, self._problem = -PROBE_S, None
        self._failed_at, self._failure = -FAILED_S, ""

    def problem(self) -> str | None:
        """Return why something could not be written just now; None where all could. For threads: a disk takes its
        time."""
        with self._lock:
            if time.monotonic() - self._asked_at >= PROBE_S:
                self._problem = self._ask()
                self._asked_at = time.monotonic()
            failed_now = time.monotonic() - self._failed_at < FAILED_S
            return self._problem or (self._failure if failed_now else None)

    def failed(self, error: StorageError) -> None:
        """Take note that a request could not be kept, perhaps because it needed more room than the probe does."""
        with self._lock:
            self._failed_at, self._failure = time.monotonic(), f"{error.message} ({error.code})"

    def _ask(self) -> str | None:
        try:
            for directory in self._directories:
                with files.writing(f"writing to {directory}"):
                    files.check_writable(directory)
        except StorageError as error:
            return f"{error.message} ({error.code})"
        return None


def room_problem(directory: Path, least: int) -> str | None:
    """Return a description of the problem if fewer than `least` bytes are free or the number cannot be read; else
    None."""
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        return f"{directory} cannot be read: {error.strerror}"
    return None if free >= least else f"{free} bytes are free; it should be {least} (min_free_bytes)"


def check_room(directory: Path, least: int, *, what: str) -> None:
    """Raise StorageFullError unless there is room for `what`, such as "jobs"."""
    if problem := room_problem(directory, least):
        hint = "free some disk space, delete adapters that are not needed, or lower min_free_bytes"
        raise StorageFullError(f"{what} are not taken now: {problem}", hint=hint)
