"""The policy for blocking user code that runs in its own threads: each call waits, at most until a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future

from groupwise.sampler import Submits
from groupwise.types import Completion, SamplingRequest


class BlockingPolicy:
    """A policy that threads can ask and wait for; after `close` requests are no longer answered. `lock` guards all of
    it, and what its owner records of the answers."""

    def __init__(self, sampler: Submits):
        self._sampler, self.lock = sampler, threading.RLock()
        self.closed = False
        self._waiting: set[Future[list[Completion]]] = set()
        self._heard = time.monotonic()

    @property
    def waiting(self) -> bool:
        """Return whether an answer is waited for."""
        with self.lock:
            return bool(self._waiting)

    @property
    def idle_s(self) -> float:
        """Return the seconds since the last answer; 0 while a caller waits for one."""
        with self.lock:
            return 0.0 if self._waiting else time.monotonic() - self._heard

    def submit(self, requests: Sequence[SamplingRequest]) -> list[Future[list[Completion]]]:
        """Queue requests, all together. Raises CancelledError when it is over, and what the engine refuses."""
        with self.lock:
            if self.closed:
                raise CancelledError
            futures = self._sampler.submit(requests)
            self._waiting.update(futures)
            return futures

    def wait(self, futures: Sequence[Future[list[Completion]]]) -> list[list[Completion]]:
        """Return the answers to what was submitted. Raises CancelledError if it is over before they are there."""
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            with self.lock:
                self._waiting.difference_update(futures)
                self._heard = time.monotonic()

    def close(self) -> None:
        """Give up what is under way, and answer nothing more."""
        with self.lock:
            self.closed = True
            waiting = list(self._waiting)
        for future in waiting:
            future.cancel()
