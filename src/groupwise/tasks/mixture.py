"""Decides which of several weighted sources each prompt is drawn from.

Draws come in blocks of a fixed number of them. A source of share w (its weight over the sum) has in block b, of n draws

    floor((b + 1) n w + 1/2) - floor(b n w + 1/2)

so that after any number of blocks it is within one draw of its share, and one whose share of a block is less than a
draw has one now and then. A block's draws of a source are spread over it: the i-th of m is at a random place between
i / m and (i + 1) / m. So each step of a run has nearly the mixture that is asked for, and not only the run as a whole,
and no source comes at a fixed beat. Everything follows from (seed, block), so that a run continues after a stop as if
there had been none.

    Mixture       (source, number of the draw of that source) of each draw of a block
    MixedOrder    the same as an order of the rows of sources that are held; each goes through epochs of its own
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction


class Mixture:
    """Draws of several sources in proportion to weights. Without `jitter` they are spread evenly."""

    def __init__(self, weights: Sequence[float], *, block: int, seed: int, jitter: bool = True):
        exact = [Fraction(weight) for weight in weights]
        self.block_size, self._seed, self._jitter = block, seed, jitter
        self._quotas = [weight * block / sum(exact) for weight in exact]  # draws of a block

    def before(self, block: int, source: int) -> int:
        """Return how often the source was drawn before this block."""
        return int(self._quotas[source] * block + Fraction(1, 2))

    def draws(self, block: int) -> list[tuple[int, int]]:
        """Return of each draw of a block, in order, the source and the number of the draw among those of the source."""
        generator = random.Random(f"{self._seed}/mixture/{block}")
        placed: list[tuple[float, int, int]] = []
        for source in range(len(self._quotas)):
            first, end = self.before(block, source), self.before(block + 1, source)
            for number in range(first, end):
                within = generator.random() if self._jitter else 0.5
                placed.append(((number - first + within) / (end - first), source, number))
        return [(source, number) for _, source, number in sorted(placed)]


class MixedOrder:
    """Orders an epoch over the rows of several sources, which are numbered one source after another: as many draws as
    there are rows, plus or minus one for each source. A source that is exhausted starts over, in a new order if
    `shuffle`."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], *, seed: int, shuffle: bool):
        self._sizes, self._seed, self._shuffle = sizes, seed, shuffle
        self._mixture = Mixture(weights, block=sum(sizes), seed=seed, jitter=shuffle)

    def __call__(self, epoch: int) -> list[int]:
        """Return the rows' indices in the order of the epoch with that number."""
        starts = [sum(self._sizes[:source]) for source in range(len(self._sizes))]
        passes: dict[tuple[int, int], list[int]] = {}
        order: list[int] = []
        for source, number in self._mixture.draws(epoch):
            turn, position = divmod(number, self._sizes[source])
            if (source, turn) not in passes:
                passes[source, turn] = self._pass(source, turn)
            order.append(starts[source] + passes[source, turn][position])
        return order

    def _pass(self, source: int, turn: int) -> list[int]:
        rows = list(range(self._sizes[source]))
        if self._shuffle:
            random.Random(f"{self._seed}/{source}/{turn}").shuffle(rows)
        return rows
