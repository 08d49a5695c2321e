"""Requests that are sent in one turn of the event loop, submitted together.

Single requests that were sent one by one would be admitted as they happen to arrive, and what is computed together
decides rounding. Together they are admitted together, in order: a seeded batch on an idle engine draws the same
tokens every time, and its prompts are prefilled at once.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

from groupwise.sampler import Sampler
from groupwise.types import Completion, SamplingRequest


class Outbox:
    """Collects the requests of concurrent coroutines and submits them to the engine together; one event loop at a
    time."""

    def __init__(self, sampler: Sampler):
        self._sampler = sampler
        self._waiting: list[tuple[SamplingRequest, asyncio.Future[Future[list[Completion]]]]] = []

    async def send(self, request: SamplingRequest) -> Completion:
        """Sample the single completion of a request; cancelling the coroutine cancels it. Raises what the engine
        raises."""
        loop = asyncio.get_running_loop()
        submitted: asyncio.Future[Future[list[Completion]]] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._submit)  # after all that were to run in this turn
        self._waiting.append((request, submitted))
        (completion,) = await asyncio.wrap_future(await submitted)
        return completion

    def _submit(self) -> None:
        waiting = [(request, submitted) for request, submitted in self._waiting if not submitted.done()]
        self._waiting = []
        try:
            futures = self._sampler.submit([request for request, _ in waiting])
        except Exception as error:
            if len(waiting) == 1:
                return waiting[0][1].set_exception(error)
            for each in waiting:  # one of them is refused, and none was queued
                self._waiting = [each]
                self._submit()
            return
        for (_, submitted), future in zip(waiting, futures, strict=True):
            submitted.set_result(future)
