"""Requests that are being given rows, and what of their prompts need not be computed: it was kept of earlier turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from groupwise.engine.prefix_cache import Kept, PrefixCache
from groupwise.engine.rows import PendingRequest

EXTEND_TOKENS = 512  # of a conversation that continues, in one forward; of several 4 times as many, padding included

MOST_HELD = 512  # tokens that a row holds of a conversation; or as many as its opening has, where that is more


@dataclass(frozen=True)
class Admitted:
    """A request that gets `n` rows, with nothing of its prompt cached. `before` of its completions had rows already."""

    job: PendingRequest
    n: int
    before: int

    @property
    def missing(self) -> int:
        """Return how many of the `n` it has not been given yet."""
        return self.n - (self.job.started - self.before)


@dataclass(frozen=True)
class GoingOn(Admitted):
    """A request that gets a row and whose first `known` prompt tokens are cached in `past`."""

    past: Kept
    known: int

    @property
    def shared(self) -> int:
        """Return how many of the known tokens are in the opening shared with other conversations."""
        return min(self.known, self.past.shared)

    @property
    def new(self) -> int:
        """Return the number of prompt tokens that are still to be computed."""
        return len(self.job.request.prompt_ids) - self.known

    def piece(self, start: int, size: int) -> range:
        """Return the positions of up to `size` new tokens from the `start`-th on."""
        end = len(self.job.request.prompt_ids)
        return range(min(self.known + start, end), min(self.known + start + size, end))


def admitted(job: PendingRequest, n: int, past: tuple[Kept, int] | None) -> Admitted:
    """Combine a request with what `known_of` found in the cache; too long a private part becomes an opening of its
    own."""
    if past is None:
        return Admitted(job, n, job.started)
    kept, known = past
    if kept.own and len(job.request.prompt_ids) - kept.shared > max(MOST_HELD, kept.shared):
        kept = kept.folded()
    return GoingOn(job, n, job.started, kept, known)


def known_of(job: PendingRequest, cache: PrefixCache) -> tuple[Kept, int] | None:
    """Return the cached conversation that the prompt continues, and how many tokens are known; None without one."""
    request = job.request
    return cache.find(job.owner, request.prompt_ids) if request.cache and request.n == 1 else None


def together(going: Sequence[GoingOn]) -> Iterator[list[GoingOn]]:
    """Yield batches of requests, each for one forward, sorted by new tokens so that there is little padding."""
    batch: list[GoingOn] = []
    for each in sorted(going, key=lambda each: each.new):
        if batch and (len(batch) + 1) * min(each.new, EXTEND_TOKENS) > 4 * EXTEND_TOKENS:
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


def consecutive(numbers: Sequence[int]) -> list[range]:
    """Return ascending numbers as ranges.

    >>> consecutive([1, 2, 3, 7, 8])
    [range(1, 4), range(7, 9)]
    """
    found: list[range] = []
    for number in numbers:
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def pieces_of(going: Sequence[GoingOn]) -> Iterator[list[range]]:
    """Yield for each forward of a batch the positions of each request that it computes: EXTEND_TOKENS at most."""
    for start in range(0, max(each.new for each in going), EXTEND_TOKENS):
        yield [each.piece(start, EXTEND_TOKENS) for each in going]
