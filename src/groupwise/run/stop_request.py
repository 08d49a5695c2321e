"""Ctrl-C: while there is a step to be finished the first asks for a clean stop, the second stops at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from groupwise.run.display import STOPPING

SAME_S = 10.0


class StopRequest:
    """Context manager: SIGINT and SIGTERM set `requested`; a second one raises KeyboardInterrupt, and so does the first
    while not `graceful`, when nothing has been begun that could be finished. For the main thread only. `announce` is
    called in the signal handler when a clean stop was asked for.

    A SIGTERM that comes within SAME_S of the first signal is no second one: Slurm sends it to each process of a job,
    and torchrun, which gets it too, to its processes."""

    def __init__(self, *, graceful: bool = True, announce: Callable[[], None] | None = None) -> None:
        self.requested, self.graceful, self.announce = False, graceful, announce
        self._before: dict[int, Any] = {}
        self._requested_at = 0.0

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested and number == signal.SIGTERM and now - self._requested_at < SAME_S:
            return
        if self.requested or not self.graceful:
            raise KeyboardInterrupt
        self.requested, self._requested_at = True, now
        if self.announce is not None:
            self.announce()
        else:
            os.write(2, f"\n{STOPPING}\n".encode())  # print may not be called in a handler
