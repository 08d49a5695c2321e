"""What runs in this process, by name: who asks for a name that runs gets what runs under it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Running(Generic[T]):
    """Things by name. Two who ask for a new name at once get one thing: the first opens it, the other waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[str, T] = {}

    def attach(self, name: str, open_it: Callable[[], T]) -> tuple[T, bool]:
        """What runs under `name`, and whether it was opened just now. Raises what `open_it` raises."""
        with self._lock:
            if (found := self._by_name.get(name)) is not None:
                return found, False
            self._by_name[name] = opened = open_it()
            return opened, True

    def find(self, name: str) -> T | None:
        """What runs under `name`, if anything does."""
        with self._lock:
            return self._by_name.get(name)

    def forget(self, name: str, thing: T) -> None:
        """Let go of `thing`, if it is what runs under `name`."""
        with self._lock:
            if self._by_name.get(name) is thing:
                del self._by_name[name]
