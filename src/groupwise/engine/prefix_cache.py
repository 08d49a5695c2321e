"""Keys and values of finished completions, for the requests that go on where they ended.

Each turn of a conversation repeats the turns before it. Without this the engine would prefill them anew every turn, and
an episode of T turns would cost T^2 / 2. A request that says `cache` leaves its prompt's and its completion's keys and
values here, and computes only what of its prompt is not here already, under the same weights.

What begins alike is found as in vLLM's automatic prefix caching (Kwon et al. 2023, arXiv 2309.06180): the tokens are
cut into blocks, each block's key is a hash of the tokens up to its end, and a table says who has that block. A hash
only proposes: how many tokens are really the same is then counted, so what is shared need not end with a block.

Shapes: K key-value heads, n tokens kept, D head size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from groupwise.algo.prefixes import common_prefix

BLOCK = 16  # tokens: less than this is not looked for


@dataclass(eq=False)
class Kept:
    """The keys and values [K, n, D] of `ids`, by layer, under the weights `owner` (None: the base)."""

    owner: object
    ids: tuple[int, ...]
    layers: dict[int, tuple[Tensor, Tensor]]
    blocks: list[int] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(x.numel() * x.itemsize for pair in self.layers.values() for x in pair)


class PrefixCache:
    """At most `most_bytes` of them; those that were not used for longest make room."""

    def __init__(self, most_bytes: int):
        self.most_bytes, self.bytes = most_bytes, 0
        self._kept: OrderedDict[int, Kept] = OrderedDict()  # by id, oldest first
        self._table: dict[int, Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, owner: object, ids: Sequence[int]) -> tuple[Kept, int] | None:
        """Who has the most of the first of `ids`, but for the last, and how many tokens that is."""
        found: Kept | None = None
        for block in _blocks(owner, ids):
            if block not in self._table:
                break
            found = self._table[block]
        if found is None or found.owner is not owner:
            return None
        self._kept.move_to_end(id(found))
        return found, common_prefix(found.ids, ids[:-1])

    def add(self, kept: Kept) -> None:
        """Keep it, instead of one that it goes on from."""
        kept.blocks = list(_blocks(kept.owner, kept.ids))
        before = self.find(kept.owner, (*kept.ids, -1))
        if before is not None and before[1] == len(before[0].ids):
            self._drop(before[0])
        self._kept[id(kept)] = kept
        self._table.update(dict.fromkeys(kept.blocks, kept))
        self.bytes += kept.bytes
        while self.bytes > self.most_bytes:
            self._drop(next(iter(self._kept.values())))

    def forget(self, owner: object) -> None:
        """Drop what was sampled under weights that have changed, or are not used any more."""
        for kept in [kept for kept in self._kept.values() if kept.owner is owner]:
            self._drop(kept)

    def clear(self) -> None:
        self._kept.clear()
        self._table.clear()
        self.bytes = 0

    def _drop(self, kept: Kept) -> None:
        del self._kept[id(kept)]
        self.bytes -= kept.bytes
        for block in kept.blocks:
            if self._table.get(block) is kept:
                del self._table[block]


def _blocks(owner: object, ids: Sequence[int]) -> Iterator[int]:
    """The key of each whole block: a hash of the weights and of all tokens up to its end."""
    key = id(owner)
    for end in range(BLOCK, len(ids) + 1, BLOCK):
        key = hash((key, *ids[end - BLOCK : end]))
        yield key
