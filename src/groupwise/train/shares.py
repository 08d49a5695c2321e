"""A batch of samples shared out over ranks: disjoint, balanced by tokens, groups whole where that is possible.

A group (adjacent samples that `model.packing` packs together) costs the tokens of its pack: what its samples share
counts once. Groups go to the rank that has least so far, the largest first (Graham 1969: at most 4/3 of the best
possible longest share). A group larger than an even share is cut first, since all other ranks would wait for its one;
each piece has the tokens that it shared with the others once more. Preference pairs are what is shared out where
samples are pairs, and none is cut.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from groupwise.algo.prefixes import cut, tree_of, trees
from groupwise.types import Sample


def shares(samples: Sequence[Sample], ranks: int, *, pairs: bool = False) -> list[list[int]]:
    """Return the rows of each rank, ascending; every row is in exactly one. A rank may have none. With `pairs`, samples
    stand in twos, and a rank has both of a pair."""
    twos = (tree_of(samples, [row, row + 1]) for row in range(0, len(samples), 2))
    every = list(twos if pairs else trees(samples))
    even = -(-sum(line.own for tree in every for line in tree) // ranks)
    most = sys.maxsize if pairs else even
    pieces = [piece for tree in every for piece in cut(tree, most + max(line.known for line in tree))]
    load, taken = [0] * ranks, [[] for _ in range(ranks)]
    for rows, tokens in sorted(pieces, key=lambda piece: -piece[1]):
        least = load.index(min(load))
        load[least] += tokens
        taken[least] += rows
    return [sorted(rows) for rows in taken]
