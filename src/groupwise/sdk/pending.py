"""The future that a verb returns: `.result()` waits for its answer, `await` does too."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Pending(Generic[T]):
    """The future result of a verb. Verbs run in the order of the calls, so several may be pending:

    backward = policy.forward_backward(data, loss)
    stepped = policy.optim_step(adam)              # after it, without waiting for its answer
    backward.result(), stepped.result()
    """

    def __init__(self, future: Future[T]):
        self._future = future

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result. Raises what the verb raised, or TimeoutError after `timeout` seconds."""
        return self._future.result(timeout)

    def done(self) -> bool:
        """Return whether the result is there."""
        return self._future.done()

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self._future).__await__()
