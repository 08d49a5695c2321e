"""Limits how many requests are under way: the window grows while the engine keeps up and halves when it does not.

Additive increase, multiplicative decrease (AIMD; Chiu and Jain 1989). Measured is the backlog: completions that wait
for a row of the engine, for each one that has a row. After every `every` completions, with an exponential mean of it,

    backlog > target     window <- window / 2
    else                 window <- window + min(target / backlog, 4),  if all of the window was in use
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from groupwise.errors import ConfigError

SMOOTHING = 0.3  # weight of the newest measurement

FASTEST = 4.0  # growth of the window at most


class AdaptiveConcurrency:
    """A limit on concurrent requests that adapts to the engine's backlog; one event loop at a time.

    Raises:
        ConfigError: not 1 <= minimum <= initial <= maximum, or a target that is not positive.
    """

    def __init__(
        self, *, initial: int = 64, minimum: int = 1, maximum: int = 256, target: float = 0.5, every: int = 32
    ):
        if not 1 <= minimum <= initial <= maximum:
            raise ConfigError(
                f"the window is {minimum} <= {initial} <= {maximum}; it must be 1 <= minimum <= initial <= maximum"
            )
        if target <= 0 or every < 1:
            raise ConfigError(f"target is {target} and every {every}; they must be positive")
        self.minimum, self.maximum, self.target, self.every = minimum, maximum, target, every
        self.window, self.backlog = float(initial), 0.0
        self.in_flight = 0
        self._fullest = self._since = 0  # most in flight, and completions, since the window was last changed
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Context manager around one request; waits while the limit is reached."""
        while self.in_flight >= int(self.window):
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                self._wake()  # the next one takes this one's turn
                raise
        self.in_flight += 1
        self._fullest = max(self._fullest, self.in_flight)
        try:
            yield
        finally:
            self.in_flight -= 1
            self._wake()

    def observe(self, backlog: float) -> None:
        """Report a finished completion and the backlog at that time: completions waiting for each one running."""
        self.backlog += SMOOTHING * (backlog - self.backlog)
        self._since += 1
        if self._since < self.every:
            return
        if self.backlog > self.target:
            self.window = max(float(self.minimum), self.window / 2)
        elif self._fullest >= int(self.window):
            self.window = min(float(self.maximum), self.window + min(self.target / max(self.backlog, 1e-9), FASTEST))
        self._fullest = self._since = 0
        self._wake()

    def _wake(self) -> None:
        """Wake as many as have room."""
        room = int(self.window) - self.in_flight
        while self._waiting and room > 0:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                room -= 1
