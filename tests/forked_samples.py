"""Samples that fork off one another, how many tokens they have, and the lines of their tree, from the definition."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from groupwise.algo.prefixes import tree_of
from groupwise.types import Sample


@st.composite
def forked_samples(draw, *, most: int = 7, longest: int = 12, vocab: int = 4) -> list[Sample]:
    """Each begins as one before it does, for any number of tokens (none: another tree), and goes on in its own way;
    where its prompt ends is drawn, so a token in common may be prompt to one, trained in another, masked in a third."""
    samples: list[Sample] = []
    for _ in range(draw(st.integers(1, most))):
        ids: list[int] = []
        if samples:
            before = draw(st.sampled_from(samples))
            whole = before.prompt_ids + before.completion_ids
            ids = list(whole[: draw(st.integers(0, len(whole)))])
        ids += draw(st.lists(st.integers(0, vocab - 1), max_size=longest))
        start = draw(st.integers(0, len(ids)))
        mask = [draw(st.integers(0, 1)) for _ in ids[start:]]
        if mask and not start:
            mask[0] = 0
        advantage = draw(st.sampled_from([-1.0, 0.3, 2.0]))
        samples.append(
            Sample(
                prompt_ids=tuple(ids[:start]), completion_ids=tuple(ids[start:]), mask=tuple(mask), advantage=advantage
            )
        )
    return samples


def lines(samples: Sequence[Sample]) -> tuple[list[list[int]], list[int]]:
    """Paths and own tokens, a line at a time."""
    paths, own, path, start = [], [], [], 0
    for line in tree_of(samples, range(len(samples))):
        path = path[: line.known] + list(range(start, start + line.own))
        start += line.own
        paths.append(path)
        own.append(line.own)
    return paths, own


def distinct_tokens(samples: Sequence[Sample]) -> int:
    """The nodes of the trie: prefixes that are not empty."""
    rows = [s.prompt_ids + s.completion_ids for s in samples]
    return len({row[:n] for row in rows for n in range(1, len(row) + 1)})
