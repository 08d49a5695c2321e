"""Drafts tokens from a row's own text: finds the last occurrence of its last tokens, and what followed there.

    ids     ... a b c d e ...  ... a b c        3-gram (a, b, c) ended before d      draft: d e ...

An n-gram is noted when its next token comes, so a lookup finds an occurrence before the present one. Those of a
prompt are found once for all its completions. A token costs two dictionary entries, a lookup as much, however long
the text. Where drafts keep failing they are made more and more rarely: a check costs time whether or not it brings a
token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle, islice

SIZES = (3, 2)  # tokens that must be the same; the longer is the better guess

LONGEST_WAIT = 5  # doublings

Ngrams = dict[tuple[int, ...], int]  # -> the place behind its latest occurrence


def ngrams_of(ids: Sequence[int]) -> Ngrams:
    """Return all n-grams of a text that are followed by a token, with the position of that token."""
    found: Ngrams = {}
    for size in SIZES:
        windows = zip(*(ids[start:] for start in range(size)), strict=False)
        found.update(zip(windows, range(size, len(ids)), strict=False))
    return found


class History:
    """The token ids of a prompt and its completion so far, indexed by n-gram for drafting.

    Args:
        prompt: token ids, at least one.
        ngrams: the n-grams of the prompt.
    """

    def __init__(self, prompt: Sequence[int], ngrams: Ngrams):
        self.ids, self._opening = list(prompt), len(prompt)
        self._ngrams, self._own = ngrams, Ngrams()
        self._failed = self._next = 0  # drafts that failed one after the other; tokens said before there is another

    @property
    def said(self) -> int:
        """Return the number of the completion's tokens."""
        return len(self.ids) - self._opening

    def add(self, ids: Iterable[int]) -> None:
        """Add the next tokens of the completion."""
        for token in ids:
            for size in SIZES:
                self._own[tuple(self.ids[-size:])] = len(self.ids)
            self.ids.append(token)

    def draft(self, most: int) -> list[int]:
        """`most` tokens that followed the same n-gram before, or none; at the end of the text the draft repeats: a b a
        b is continued with a b a b."""
        for size in SIZES if most > 0 and self.said >= self._next else ():
            last = tuple(self.ids[-size:])
            place = self._own.get(last) or self._ngrams.get(last)
            if place:
                return list(islice(cycle(self.ids[place : place + most]), most))
        return []

    def judge(self, stood: int) -> None:
        """Record how many tokens of the last draft were accepted. Each failure doubles the wait before the next
        draft."""
        self._failed = 0 if stood else min(self._failed + 1, LONGEST_WAIT)
        self._next = self.said + 2**self._failed - 1
