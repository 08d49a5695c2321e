"""A batch of samples shared out over ranks: disjoint, balanced by tokens, groups whole where that is possible.

A group (adjacent samples that `model.packing` packs together) costs the tokens of its pack: what its samples share
counts once. Groups go to the rank that has least so far, the largest first (Graham 1969: at most 4/3 of the best
possible longest share). A group larger than an even share is cut first, since all other ranks would wait for its one;
each piece has the tokens that it shared with the others once more.
"""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.algo.prefixes import cut, families, tree_of
from groupwise.types import Sample


def shares(samples: Sequence[Sample], ranks: int) -> list[list[int]]:
    """Return the rows of each rank, ascending; every row is in exactly one. A rank may have none."""
    trees = [tree_of(samples, rows) for rows, _ in families(samples)]
    even = -(-sum(line.own for tree in trees for line in tree) // ranks)
    pieces = [piece for tree in trees for piece in cut(tree, even + max(line.known for line in tree))]
    load, taken = [0] * ranks, [[] for _ in range(ranks)]
    for rows, tokens in sorted(pieces, key=lambda piece: -piece[1]):
        least = load.index(min(load))
        load[least] += tokens
        taken[least] += rows
    return [sorted(rows) for rows in taken]
