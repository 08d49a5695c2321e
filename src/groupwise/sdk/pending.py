"""The future that a verb returns: `.result()` waits for its answer, `await` does too."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from groupwise.errors import TrainingError

T = TypeVar("T")


class Pending(Generic[T]):
    """The future result of a verb, which runs in the thread `thread`. Verbs run in the order of the calls, so several
    may be pending:

    backward = policy.forward_backward(data, loss)
    stepped = policy.optim_step(adam)              # after it, without waiting for its answer
    backward.result(), stepped.result()

    A verb that was called runs, also if nobody waits for it any more.
    """

    def __init__(self, future: Future[T], *, thread: int):
        self._future, self._thread = future, thread

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result. Raises what the verb raised, TimeoutError after `timeout` seconds, and TrainingError in
        the thread of the verbs, which would wait for itself."""
        if self._thread == threading.get_ident() and not self._future.done():
            raise TrainingError(
                "a verb waits for the result of another, which would begin only after it",
                hint="get what a loss function reads, such as the reference's log-probabilities, before "
                "forward_backward_custom",
            )
        return self._future.result(timeout)

    def done(self) -> bool:
        """Return whether the result is there."""
        return self._future.done()

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.shield(asyncio.wrap_future(self._future)).__await__()
