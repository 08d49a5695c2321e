"""Decides which exchanges are held out: the newest, and none that is connected to one that is trained on.

    Together    groups of connected exchanges, by their numbers
    held_out    the groups that began last
    by_lot      whether prompts that both sides asked, or nearly, are held out, and left out of training

Exchanges are connected by their user, conversation or trace. A connected group is on one side as a whole; a group that
is larger than the wanted share is trained on. A prompt that many users ask ("hello") does not connect these users, or
everything would soon be one group: lots are drawn for such a prompt, its answers to the users of the side that is drawn
stay, and the others are left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence


class Together:
    """The numbers from 0, in groups that grow as numbers are joined (union-find)."""

    def __init__(self, size: int):
        self._above = list(range(size))

    def _root(self, number: int) -> int:
        while self._above[number] != number:
            self._above[number] = number = self._above[self._above[number]]
        return number

    def join(self, one: int, other: int) -> None:
        self._above[self._root(one)] = self._root(other)

    def same(self, one: int, other: int) -> bool:
        return self._root(one) == self._root(other)

    def join_all(self, keys: Iterable[tuple[int, Hashable]]) -> None:
        """Join the numbers that have a key in common."""
        seen: dict[Hashable, int] = {}
        for number, key in keys:
            self.join(number, seen.setdefault(key, number))

    def groups(self) -> list[list[int]]:
        """Return the groups, in the order of the first number of each."""
        found: dict[int, list[int]] = defaultdict(list)
        for number in range(len(self._above)):
            found[self._root(number)].append(number)
        return list(found.values())


def held_out(groups: Sequence[Sequence[int]], times: Sequence[float | None], *, share: float) -> set[int]:
    """Return the numbers of the groups to hold out: those that began last, `share` of all members together at most.
    Groups without a time count as the oldest, in their order."""

    def began(number: int) -> tuple[float, int]:
        known = [at for each in groups[number] if (at := times[each]) is not None]
        return min(known, default=-math.inf), number

    room = int(share * sum(map(len, groups)))
    chosen: set[int] = set()
    for number in sorted(range(len(groups)), key=began, reverse=True):
        if len(groups[number]) <= room:
            chosen.add(number)
            room -= len(groups[number])
    return chosen


def by_lot(keys: Iterable[str], *, share: float) -> bool:
    """Return whether prompts that are alike, known by these digests, are held out: the same for the same prompts,
    whatever else is in the log."""
    return int(min(keys)[:8], 16) / 2**32 < share
