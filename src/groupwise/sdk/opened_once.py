"""Keeps a registry of running objects by name: a request for an open name gets the open object."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class OpenedOnce(Generic[T]):
    """A registry of running objects by name; concurrent callers of a new name share one object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[str, T] = {}

    def attach(self, name: str, open_it: Callable[[], T]) -> tuple[T, bool]:
        """Return the object named `name`, and whether this call opened it. Raises what `open_it` raises."""
        with self._lock:
            if (found := self._by_name.get(name)) is not None:
                return found, False
            self._by_name[name] = opened = open_it()
            return opened, True

    def find(self, name: str) -> T | None:
        """Return the object named `name`, or None."""
        with self._lock:
            return self._by_name.get(name)

    def forget(self, name: str, thing: T) -> None:
        """Remove `thing` from the registry, if it is the one named `name`."""
        with self._lock:
            if self._by_name.get(name) is thing:
                del self._by_name[name]
