"""Places for requests: so many at once, so many waiting, and none of it for one sender alone.

    places = Places(256, 1024, patience_s=120.0)
    async with places.held(sender): ...

A sender is an address. Of every eight places one is kept for others than the sender that has most, so that a client
that opens a thousand connections keeps nobody out. Who waits is served in turns: the sender with the fewest places
first, and of one sender who came first.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from groupwise.errors import OverloadedError

KEPT = 8  # one place in so many is never the same sender's as the others


class Places:
    """Admits `capacity` requests at once, and lets `waiting` more wait, for `patience_s` seconds at most. `share` is
    how many of the places one sender may have, where that is less than all but the eighth."""

    def __init__(self, capacity: int, waiting: int, *, patience_s: float, share: int | None = None):
        self._capacity, self._most_waiting, self._patience_s = capacity, waiting, patience_s
        self._share = _share(capacity) if share is None else min(share, _share(capacity))
        self._held: Counter[str] = Counter()
        self._waiting: dict[asyncio.Future[None], str] = {}  # in the order in which they came

    @asynccontextmanager
    async def held(self, sender: str) -> AsyncIterator[None]:
        """Context manager: one place is taken. Raises OverloadedError."""
        await self._take(sender)
        try:
            yield
        finally:
            give_back(self._held, sender)
            self._serve()

    async def _take(self, sender: str) -> None:
        if not self._waiting and self._may_have(sender):
            self._held[sender] += 1
            return
        whose = sum(each == sender for each in self._waiting.values())
        busy = f"{self._held.total()} requests are being answered and {len(self._waiting)} wait"
        if len(self._waiting) >= self._most_waiting or whose >= _share(self._most_waiting):
            yours = f", of which {self._held[sender]} and {whose} are yours" if len(self._held) > 1 else ""
            hint = "try again, or raise max_concurrent and max_waiting"
            raise OverloadedError(f"{busy}{yours}", hint=hint, retry_after=1)
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = sender
        self._serve()
        try:
            async with asyncio.timeout(self._patience_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # it had its turn in the last moment
                give_back(self._held, sender)
            self._waiting.pop(turn, None)
            turn.cancel()
            self._serve()
            if not isinstance(error, TimeoutError):
                raise
            raise OverloadedError(f"waited {self._patience_s:g} s: {busy}", hint="try again", retry_after=5) from error

    def _may_have(self, sender: str) -> bool:
        return self._held.total() < self._capacity and self._held[sender] < self._share

    def _serve(self) -> None:
        """Give free places to those who wait, by turns of their senders."""
        while self._held.total() < self._capacity:
            open_ = [turn for turn, sender in self._waiting.items() if not turn.done() and self._may_have(sender)]
            if not open_:
                return
            turn = min(open_, key=lambda each: self._held[self._waiting[each]])  # of equal ones the first
            self._held[self._waiting.pop(turn)] += 1
            turn.set_result(None)


def give_back(held: Counter[str], sender: str) -> None:
    """Count one less for the sender, and forget one that has nothing."""
    held[sender] -= 1
    if not held[sender]:
        del held[sender]


def _share(places: int) -> int:
    """Return how many of so many places one sender may have."""
    return places - places // KEPT
