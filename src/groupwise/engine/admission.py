"""Requests that are being given rows, and what of their prompts need not be computed: it was kept of earlier turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from groupwise.engine.prefix_cache import Kept, PrefixCache
from groupwise.engine.rows import Job

EXTEND_TOKENS = 512  # of a conversation that goes on, in one forward; of several 4 times as many, padding included
MOST_HELD = 512  # tokens that a row holds of a conversation; or as many as its opening has, where that is more


@dataclass(frozen=True)
class Admitted:
    """A job that is given `n` rows, to compute all of its prompt."""

    job: Job
    n: int


@dataclass(frozen=True)
class GoingOn(Admitted):
    """A job that is given a row; `past` has the first `known` tokens of its prompt."""

    past: Kept
    known: int

    @property
    def shared(self) -> int:
        """Tokens of it that it shares with all who opened alike."""
        return min(self.known, self.past.shared)

    @property
    def new(self) -> int:
        """Tokens to compute."""
        return len(self.job.request.prompt_ids) - self.known

    def piece(self, start: int, size: int) -> range:
        """The positions of up to `size` new tokens from the `start`-th on."""
        end = len(self.job.request.prompt_ids)
        return range(min(self.known + start, end), min(self.known + start + size, end))


def admitted(job: Job, n: int, past: tuple[Kept, int] | None) -> Admitted:
    """The job with what `known_of` found; folded where a row would hold too much of it."""
    if past is None:
        return Admitted(job, n)
    kept, known = past
    if kept.own and len(job.request.prompt_ids) - kept.shared > max(MOST_HELD, kept.shared):
        kept = kept.folded()
    return GoingOn(job, n, kept, known)


def known_of(job: Job, cache: PrefixCache) -> tuple[Kept, int] | None:
    """What was kept that the prompt begins with, and how many of its tokens that is."""
    request = job.request
    return cache.find(job.weights, request.prompt_ids) if request.cache and request.n == 1 else None


def together(going: Sequence[GoingOn]) -> Iterator[list[GoingOn]]:
    """Those that are run in one forward: by length, so that they need little padding."""
    batch: list[GoingOn] = []
    for each in sorted(going, key=lambda each: each.new):
        if batch and (len(batch) + 1) * min(each.new, EXTEND_TOKENS) > 4 * EXTEND_TOKENS:
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


def pieces_of(going: Sequence[GoingOn]) -> Iterator[list[range]]:
    """The positions that one forward after the other computes of each: at most EXTEND_TOKENS."""
    for start in range(0, max(each.new for each in going), EXTEND_TOKENS):
        yield [each.piece(start, EXTEND_TOKENS) for each in going]
