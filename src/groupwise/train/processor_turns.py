"""Lets as many threads compute at a time as there are processors for them, in the order in which they asked.

    turns = ProcessorTurns(2)
    with turns: ...                 a decoding step, or a micro-batch: milliseconds

torch lets go of Python's lock at every operation, and each of the other threads then takes it for one of its own. Two
threads that compute by turns so lose little. Sixteen on two processors, engines and learners of eight runs, spend more
time on handing the lock around than on computing: eight runs beside each other took half as long again as one after
another. A thread that waits here costs nothing.
"""

from __future__ import annotations

import threading
from collections import deque


class ProcessorTurns:
    """Context manager that `count` threads can be in at a time; others wait, and come in in their order. A thread that
    is in it must not enter again, nor wait for one that may enter."""

    def __init__(self, count: int):
        self._free, self._lock = count, threading.Lock()
        self._waiting: deque[threading.Lock] = deque()  # held, until its thread may compute

    def __enter__(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        mine.acquire()

    def __exit__(self, *error: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._free += 1
