"""Prefix trees: which samples begin with the same tokens, and how many tokens remain if shared ones are computed once.

The samples of a group begin alike: with its prompt, and, where a template rewrites what was said in earlier turns, each
segment of an episode with much of the segments before. Sorted by their tokens, samples that begin alike stand side by
side, and what each adds to the one before it are the nodes of their prefix tree (radix trie):

    5 6 7 8          all four are its own
    5 6 7 8 2        one: it continues where the first ends
    5 6 9            one: it leaves the line above after two
    8 9              both                                       8 distinct tokens of 14

`SharedPrompts` shares equal prompts and nothing else, and is the faster layout for what it shares. A tree is worth it
where it saves `WORTH_TOKENS` a sample and `WORTH_SHARE` of all tokens besides: not for the few tokens with which
completions happen to begin, but for forked histories, long prompts that begin alike, and completions that are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from groupwise.types import Sample

WORTH_TOKENS = 16  # saved per sample, beyond the prompts that are equal, from which a tree is worth it
WORTH_SHARE = 1 / 8  # ... and saved of the tokens that there would be otherwise
CANDIDATES = 3 / 4  # of the shorter prompt: what samples must share to be tried as one tree
TAIL = 8  # tokens at a prompt's end that a rewritten history need not have: <think></think>, as some templates add


@dataclass(frozen=True)
class Line:
    """A sample's place in a prefix tree: its row in the batch, its tokens, and the number of leading tokens that it
    shares with the sample before it (`known`)."""

    row: int
    ids: tuple[int, ...]
    known: int

    @property
    def own(self) -> int:
        return len(self.ids) - self.known


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two sequences begin with alike. In stretches that double while they are equal, the last
    one by bisection: slices are compared much faster than tokens, and what follows the first difference is not read."""
    low, stretch, most = 0, 32, min(len(first), len(second))
    while low < most and first[low : low + stretch] == second[low : low + stretch]:
        low, stretch = low + stretch, 2 * stretch
    low, high = min(low, most), min(low + stretch, most)
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def tree_of(samples: Sequence[Sample], rows: Sequence[int]) -> list[Line]:
    """Return the prefix tree of these rows; its distinct tokens are the sum of `own`."""
    lines: list[Line] = []
    before: tuple[int, ...] = ()
    for ids, row in sorted((samples[row].prompt_ids + samples[row].completion_ids, row) for row in rows):
        lines.append(Line(row, ids, common_prefix(before, ids)))
        before = ids
    return lines


def groups_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Runs of adjacent samples that belong to one group: their prompts are equal or a history forked from the prompt.

    Where samples say which group they are of (`Sample.group`) that is it. Otherwise a forked history goes on where the
    group's prompt ends, or `TAIL` tokens before that; prompts of two groups differ before and are about as long as each
    other. What continues an episode is of its group in any case.
    """
    if all(sample.group is not None for sample in samples):
        return [list(mine) for _, mine in groupby(samples, key=lambda sample: sample.group)]
    groups: list[list[Sample]] = []
    for run in _runs(samples, range(len(samples)), _forked):
        mine = [samples[row] for row in run]
        if groups and mine[0].continues:
            groups[-1] += mine
        else:
            groups.append(mine)
    return groups


def families(samples: Sequence[Sample]) -> Iterator[tuple[list[int], list[Line] | None]]:
    """Yield all rows in runs of adjacent ones, each with its tree, or None where equal prompts are all that is worth
    sharing.

    Tried first for runs of prompts that begin alike, which may be several groups, then for each of these groups.
    """
    for rows, tree, worth in _families(samples):
        yield rows, tree if worth else None


def trees(samples: Sequence[Sample]) -> Iterator[list[Line]]:
    """Yield the tree of each of `families`, worth it or not."""
    for _, tree, _ in _families(samples):
        yield tree


def _families(samples: Sequence[Sample]) -> Iterator[tuple[list[int], list[Line], bool]]:
    for rows in _runs(samples, range(len(samples)), _alike):
        tree, worth = _tree_and_worth(samples, rows)
        if worth:
            yield rows, tree, worth
            continue
        for group in _runs(samples, rows, _forked):
            tree, worth = (tree, worth) if group == rows else _tree_and_worth(samples, group)
            yield group, tree, worth


def cut(tree: Sequence[Line], token_budget: int) -> Iterator[tuple[list[int], int]]:
    """Yield a tree's rows in parts of at most `token_budget` distinct tokens, with their number; a single row may have
    more.

    Neighbours in the tree, which share most, stay together.
    """
    rows: list[int] = []
    used = 0
    for line in tree:
        if rows and used + line.own > token_budget:
            yield rows, used
            rows, used = [], 0
        used += line.own if rows else len(line.ids)
        rows.append(line.row)
    if rows:
        yield rows, used


def _tree_and_worth(samples: Sequence[Sample], rows: Sequence[int]) -> tuple[list[Line], bool]:
    """Return the tree of these rows, and whether it saves enough compared with sharing equal prompts."""
    tree = tree_of(samples, rows)
    if len(rows) == 1:
        return tree, False
    prompts = [samples[row].prompt_ids for row in rows]
    plain = sum(len(samples[row].completion_ids) for row in rows)
    plain += sum(len(prompt) for i, prompt in enumerate(prompts) if i == 0 or prompt != prompts[i - 1])
    saved = plain - sum(line.own for line in tree)
    return tree, saved >= max(WORTH_TOKENS * len(rows), WORTH_SHARE * plain)


def _runs(samples: Sequence[Sample], rows: Sequence[int], related: Callable[[int, int, int], bool]) -> list[list[int]]:
    """Runs of rows whose prompts are equal to one of the run, or are `related(common, shortest, length)`: the tokens in
    common with all of the run, the length of its shortest prompt and their own."""
    runs: list[list[int]] = []
    seen: set[tuple[int, ...]] = set()
    head: tuple[int, ...] = ()
    shortest = 0
    for row in rows:
        prompt = samples[row].prompt_ids
        if prompt in seen:
            runs[-1].append(row)
            continue
        common = common_prefix(head, prompt)
        if runs and related(common, shortest, len(prompt)):
            runs[-1].append(row)
            head, shortest = head[:common], min(shortest, len(prompt))
            seen.add(prompt)
        else:
            runs.append([row])
            head, shortest, seen = prompt, len(prompt), {prompt}
    return runs


def _alike(common: int, shortest: int, length: int) -> bool:
    return 0 < common >= CANDIDATES * min(shortest, length)


def _forked(common: int, shortest: int, length: int) -> bool:
    whole = common >= min(shortest, length) - TAIL and abs(length - shortest) > TAIL
    return whole and _alike(common, shortest, length)
