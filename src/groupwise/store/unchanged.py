"""Remembers what was read of a file or directory until it is another one: thousands are looked at, and few change.

Whether one changed is told by its inode, size and time of change. Clocks of file systems tick every few milliseconds:
what changed within SETTLED_S before it was read is read again the next time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Generic, TypeVar

SETTLED_S = 2.0

T = TypeVar("T")


class Unchanged(Generic[T]):
    """Caches what was read from files, by path, until a file changes. Threads may share it."""

    def __init__(self):
        self._known: dict[str, tuple[tuple[int, int, int], T]] = {}

    def get(self, path: str, read: Callable[[], T]) -> T:
        """Return `read`'s last result, or a new one if the file has changed since. Raises OSError without a file, and
        `read`'s errors."""
        try:
            about = os.stat(path)
        except OSError:
            self._known.pop(path, None)
            raise
        stamp = about.st_ino, about.st_mtime_ns, about.st_size
        known = self._known.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        now, found = time.time(), read()
        if now - about.st_mtime >= SETTLED_S:
            self._known[path] = stamp, found
        else:
            self._known.pop(path, None)
        return found

    def forget(self, path: str) -> None:
        """Forget the contents of a file that is gone and will not be asked for again."""
        self._known.pop(path, None)
