"""Keeps the keys and values of finished completions for later requests that continue them.

Each turn of a conversation repeats the turns before it. Without the cache the engine would prefill them again in every
turn, and an episode of T turns would cost T^2 / 2. A request with `cache` leaves its prompt's and its completion's keys
and values here, and computes only the part of its prompt that is not cached under the same weights.

Common beginnings are found as in vLLM's automatic prefix caching (Kwon et al. 2023, arXiv 2309.06180): the tokens are
cut into blocks, each block's key is a hash of the tokens up to its end, and a table lists the entries with this block.
A hash only proposes an entry: the equal tokens are then counted, so the shared part need not end with a block. The
episodes of a group begin with the same tokens; these are stored once.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from groupwise.algo.prefixes import common_prefix
from groupwise.engine.kv_cache import Layers, Opening

BLOCK = 8  # tokens: less than this is not looked for


@dataclass(eq=False)
class Kept:
    """A cached conversation: keys and values of `ids` under the weights `owner` (None: the base).

    Those of the first `shared` tokens are in `opening`, which other conversations share, the rest in `own`."""

    owner: object
    ids: tuple[int, ...]
    opening: Opening
    shared: int
    own: Layers
    blocks: list[int] = field(default_factory=list)

    def folded(self) -> Kept:
        """Return the same entry with all keys and values in its own opening, which no other entry shares."""
        layers = {
            layer: tuple(torch.cat([a[:, : self.shared], b], 1) for a, b in zip(pair, self.own[layer], strict=True))
            for layer, pair in self.opening.layers.items()
        }
        whole = Opening(layers, len(self.ids))  # type: ignore[arg-type]
        return Kept(self.owner, self.ids, whole, whole.length, {})


class PrefixCache:
    """An LRU cache of conversations (`Kept`), of at most `most_bytes`, looked up by their longest common prefix.
    Several threads may use it."""

    def __init__(self, most_bytes: int):
        self.most_bytes, self.bytes, self._lock = most_bytes, 0, threading.Lock()
        self._sharing: Counter[Opening] = Counter()  # how many have each opening
        self._kept: OrderedDict[int, Kept] = OrderedDict()  # by id, oldest first
        self._table: dict[int, Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, owner: object, ids: Sequence[int]) -> tuple[Kept, int] | None:
        """Return the cached conversation with the longest common prefix with `ids[:-1]`, and that length; None without
        one."""
        with self._lock:
            found = self._proposed(owner, _blocks(owner, ids))
            if found is None:
                return None
            self._kept.move_to_end(id(found))
        return found, common_prefix(found.ids, ids[:-1])

    def add(self, kept: Kept) -> None:
        """Add a conversation; it replaces one that is a prefix of it."""
        kept.blocks = list(_blocks(kept.owner, kept.ids))
        with self._lock:
            before = self._proposed(kept.owner, kept.blocks)
            if before is not None and before.ids == kept.ids[: len(before.ids)]:
                self._drop(before)
            self._kept[id(kept)] = kept
            self._table.update(dict.fromkeys(kept.blocks, kept))
            self.bytes += _bytes(kept.own) + (0 if kept.opening in self._sharing else _bytes(kept.opening.layers))
            self._sharing[kept.opening] += 1
            while self.bytes > self.most_bytes:
                self._drop(next(iter(self._kept.values())))

    def forget(self, owner: object) -> None:
        """Drop all conversations computed with the weights `owner`, which have changed or are gone."""
        with self._lock:
            for kept in [kept for kept in self._kept.values() if kept.owner is owner]:
                self._drop(kept)

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self._table.clear()
            self._sharing.clear()
            self.bytes = 0

    def _proposed(self, owner: object, blocks: Iterable[int]) -> Kept | None:
        """Return who has the last of the blocks that anyone has."""
        found: Kept | None = None
        for block in blocks:
            if block not in self._table:
                break
            found = self._table[block]
        return found if found is not None and found.owner is owner else None

    def _drop(self, kept: Kept) -> None:
        del self._kept[id(kept)]
        self.bytes -= _bytes(kept.own)
        self._sharing[kept.opening] -= 1
        if not self._sharing[kept.opening]:
            del self._sharing[kept.opening]
            self.bytes -= _bytes(kept.opening.layers)
        for block in kept.blocks:
            if self._table.get(block) is kept:
                del self._table[block]


def _bytes(layers: Layers) -> int:
    return sum(x.numel() * x.itemsize for pair in layers.values() for x in pair)


def _blocks(owner: object, ids: Sequence[int]) -> Iterator[int]:
    """Yield the key of each whole block: a hash of the weights and of all tokens up to its end."""
    key = id(owner)
    for end in range(BLOCK, len(ids) + 1, BLOCK):
        key = hash((key, *ids[end - BLOCK : end]))
        yield key
