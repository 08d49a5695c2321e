"""Places for requests: a bound on requests at a time and on waiting ones, and on one sender's part of both.

    places = Places(256, 1024, patience_s=120.0)
    async with places.held(sender): ...

A sender is an address, a key or a tenant. One sender gets at most seven of every eight places, so that a client that
opens a thousand connections cannot keep the others out. Waiting requests are served in turns: the sender with the
fewest places first, and the oldest request of one sender first. A key may have its own limit (`groupwise keys add
--concurrent-requests`): its requests beyond the limit wait, and requests of others pass them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from groupwise.errors import OverloadedError
from groupwise.store.keys import Key

KEPT = 8  # one place in so many is never the same sender's as the others


@dataclass(frozen=True)
class _Request:
    """A request for a place: its sender, its key, and how many places that key may have at once (None: as many as the
    sender)."""

    sender: str
    key: str
    most: int | None

    @classmethod
    def of(cls, sender: str, key: Key | None) -> _Request:
        return cls(sender, "", None) if key is None else cls(sender, key.label, key.concurrent_requests)


class Places:
    """Admits `capacity` requests at once, and lets `waiting` more wait, for `patience_s` seconds at most. `share` is
    how many of the places one sender may have, where that is less than all but the eighth."""

    def __init__(self, capacity: int, waiting: int, *, patience_s: float, share: int | None = None):
        self._capacity, self._most_waiting, self._patience_s = capacity, waiting, patience_s
        self._share = _share(capacity) if share is None else min(share, _share(capacity))
        self._held: Counter[str] = Counter()
        self._of_keys: Counter[str] = Counter()  # those of keys with a bound
        self._waiting: dict[asyncio.Future[None], _Request] = {}  # in the order in which they came

    @asynccontextmanager
    async def held(self, sender: str, key: Key | None = None) -> AsyncIterator[None]:
        """Take a place for the block, also one of the key's if the key has a bound. Raises OverloadedError."""
        request = _Request.of(sender, key)
        await self._take(request)
        try:
            yield
        finally:
            self._give_back(request)
            self._serve()

    async def _take(self, request: _Request) -> None:
        if self._may_have(request):  # then no waiting request may: it would have been served
            self._give(request)
            return
        sender = request.sender
        whose = sum(each.sender == sender for each in self._waiting.values())
        busy = f"{self._held.total()} requests are being answered and {len(self._waiting)} wait"
        if len(self._waiting) >= self._most_waiting or whose >= _share(self._most_waiting):
            yours = f", of which {self._held[sender]} and {whose} are yours" if len(self._held) > 1 else ""
            hint = "try again, or raise max_concurrent and max_waiting"
            raise OverloadedError(f"{busy}{yours}", hint=hint, retry_after=1)
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = request
        try:
            async with asyncio.timeout(self._patience_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # it had its turn in the last moment
                self._give_back(request)
            self._waiting.pop(turn, None)
            turn.cancel()
            self._serve()
            if not isinstance(error, TimeoutError):
                raise
            raise OverloadedError(self._why(request, busy), hint="try again", retry_after=5) from error

    def _why(self, request: _Request, busy: str) -> str:
        """Return what a request waited for in vain."""
        if request.most is None or self._of_keys[request.key] < request.most:
            return f"waited {self._patience_s:g} s: {busy}"
        at_once = f"{request.most} of this key's requests are being answered, as many as may be at once"
        return f"waited {self._patience_s:g} s: {at_once}"

    def _may_have(self, request: _Request) -> bool:
        if self._held.total() >= self._capacity or self._held[request.sender] >= self._share:
            return False
        return request.most is None or self._of_keys[request.key] < request.most

    def _give(self, request: _Request) -> None:
        self._held[request.sender] += 1
        if request.most is not None:
            self._of_keys[request.key] += 1

    def _give_back(self, request: _Request) -> None:
        give_back(self._held, request.sender)
        if request.most is not None:
            give_back(self._of_keys, request.key)

    def _serve(self) -> None:
        """Give free places to those who wait, by turns of their senders."""
        while self._held.total() < self._capacity:
            open_ = [turn for turn, request in self._waiting.items() if not turn.done() and self._may_have(request)]
            if not open_:
                return
            turn = min(open_, key=lambda each: self._held[self._waiting[each].sender])  # of equal ones the first
            self._give(self._waiting.pop(turn))
            turn.set_result(None)


def give_back(held: Counter[str], sender: str) -> None:
    """Count one less for the sender, and forget one that has nothing."""
    held[sender] -= 1
    if not held[sender]:
        del held[sender]


def _share(places: int) -> int:
    """Return how many of this many places one sender may have."""
    return places - places // KEPT
