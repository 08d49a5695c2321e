"""What is found is what begins alike, under the same weights; what is over the limit goes, oldest first."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.engine.kv_cache import Layers, Opening
from groupwise.engine.prefix_cache import BLOCK, Kept, PrefixCache

IDS = st.lists(st.integers(0, 1), min_size=0, max_size=5).map(lambda bits: tuple(b for b in bits for _ in range(7)))


NOTHING = Opening({}, 0)


def kept(ids: tuple[int, ...], owner: object = None, opening: Opening = NOTHING) -> Kept:
    return Kept(owner, ids, opening, opening.length, layers(len(ids) - opening.length))


def layers(length: int) -> Layers:
    x = torch.zeros(2, length, 4)  # 64 bytes a token for keys and values together
    return {0: (x, x)}


def shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@given(st.lists(IDS, max_size=6), IDS.filter(bool))
def test_finds_a_longest_match(sequences: list[tuple[int, ...]], ids: tuple[int, ...]):
    """Never more than is there and never the last token; as many whole blocks as anyone has."""
    cache = PrefixCache(1 << 20)
    for each in sequences:
        cache.add(kept(each))
    best = max((shared(each, ids) for each in sequences), default=0)
    found = cache.find(None, ids)
    if found is None:
        assert best < BLOCK
        return
    known = found[1]
    assert found[0].ids[:known] == ids[:known] and known <= len(ids) - 1
    assert min(len(ids) - 1, best // BLOCK * BLOCK) <= known <= best
    assert cache.find(object(), ids) is None


def test_what_goes_on_takes_the_place_of_what_it_goes_on_from():
    cache = PrefixCache(1 << 20)
    start = tuple(range(40))
    for ids in (start, (*start, 1, 2, 3), (*start, 1, 2, 3), (*start, 7, 8, 9)):
        cache.add(kept(ids))
    assert len(cache) == 2 and cache.bytes == 2 * 43 * 64
    assert cache.find(None, (*start, 7, 8, 9, 10))[1] >= 40


def test_the_oldest_makes_room():
    cache = PrefixCache(3 * 40 * 64)
    starts = [tuple(range(at, at + 40)) for at in (0, 100, 200, 300)]
    for ids in starts[:3]:
        cache.add(kept(ids))
    assert cache.find(None, (*starts[0], 1))  # used: now the second is the oldest
    cache.add(kept(starts[3]))
    assert [cache.find(None, (*ids, 1)) is not None for ids in starts] == [True, False, True, True]
    cache.add(kept(tuple(range(1000, 1200))))  # larger than everything there is room for
    assert len(cache) == 0 and cache.bytes == 0 and not cache._table


def test_weights_are_forgotten():
    cache, mine, other = PrefixCache(1 << 20), object(), object()
    ids = tuple(range(40))
    cache.add(kept(ids, mine))
    cache.add(kept(ids, other))
    cache.forget(mine)
    assert cache.find(mine, (*ids, 1)) is None and cache.find(other, (*ids, 1))[1] == 40
    cache.clear()
    assert cache.find(other, (*ids, 1)) is None and not cache._table and cache.bytes == 0


def test_an_opening_is_counted_once():
    cache, start = PrefixCache(1 << 20), tuple(range(40))
    opening = Opening(layers(40), 40)
    for said in (1, 2, 3):  # a block each
        cache.add(kept((*start, *[said] * 8), opening=opening))
    assert cache.bytes == (40 + 24) * 64
    cache.add(kept((*start, *[1] * 8, 2), opening=opening))  # in the place of the first
    assert cache.bytes == (40 + 25) * 64
    cache.forget(None)
    assert cache.bytes == 0
