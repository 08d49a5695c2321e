"""Runs micro-batches in parallel, each in its own thread with one of torch's threads, and returns their results in
order.

An operation on a micro-batch of a small model takes a millisecond or less. If it is spread over threads, each of the
thousands in a pass ends in a barrier, at which OpenMP's helping threads soon fall asleep if the process has more of
them than cores, as with an engine next to the trainer. Micro-batches that run in parallel need no barriers
(docs/performance.md has the gain). torch releases Python's lock while it computes, so the lock does not serialise them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

import torch

LANE_BYTES = 1 << 28  # of weights, up to which a model is small, and a CPU runs its micro-batches side by side

Item = TypeVar("Item")

Result = TypeVar("Result")


def is_light(weights: int) -> bool:
    """Return whether a model of this many bytes of weights is small: a GPU's compiled kernels do not pay for it."""
    return weights <= LANE_BYTES


class ThreadedMicroBatches:
    """Computes micro-batches in up to `most` threads, which are made when they are first needed and end with this
    object."""

    def __init__(self, most: int):
        self.most = most
        self._pool: ThreadPoolExecutor | None = None

    def map(self, function: Callable[[Item], Result], items: Iterable[Item], *, lanes: int) -> Iterator[Result]:
        """`function` of each item, in order, `lanes` at a time; with one, in the calling thread, and where there could
        be more with one of torch's threads as well. Where one fails nothing computes any more when its error is raised:
        the caller may change the weights."""
        if lanes < 2:
            with torch_threads(1 if self.most > 1 else torch.get_num_threads()):
                yield from map(function, items)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.most, "lane", initializer=torch.set_num_threads, initargs=(1,))
        begun: deque[Future[Result]] = deque()
        try:
            for item in items:
                if len(begun) == lanes:
                    yield begun.popleft().result()
                begun.append(self._pool.submit(function, item))
            while begun:
                yield begun.popleft().result()
        finally:
            for future in begun:
                future.cancel()
            wait(begun)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Give the calling thread so many of torch's threads during the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
