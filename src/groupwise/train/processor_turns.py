"""Lets as many threads compute at a time as there are processors for them, in the order in which they asked.

    turns = ProcessorTurns(2)
    with turns: ...                 a decoding step, or a micro-batch: milliseconds

torch releases Python's global lock at every operation, and another thread then takes it. Threads that are more than
the processors so spend their time on passing the lock around: the engines and learners of eight concurrent runs on two
processors took half as long again as the eight runs one after another. A thread that waits for its turn costs nothing.
"""

from __future__ import annotations

import threading
from collections import deque


class ProcessorTurns:
    """Context manager that `count` threads can be in at a time; the others wait and enter in the order in which they
    came. A thread inside must not enter again, nor wait for a thread that has yet to enter."""

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
