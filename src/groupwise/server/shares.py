"""Bounds the part of a job that one rater, or one phrase, may have (`learn.max_share`).

    within_shares   the groups that could be trained on -> those that one job may take

A person who rates much, or who rates one thing under many names, could decide what a job teaches. So in the groups of a
job

    one rater       has a share of at most `max_share`. The ratings of one key without a `user` count as one rater's;
                    with `learn.proven`, so do those of all raters who have not agreed with enough known prompts
    one phrase      (one to three consecutive tokens of the prompt) exceeds its share of the recent prompts by at most
                    `max_share`: phrases that every prompt has, such as a template's words, are not bounded

so that a phrase that is rated far more often than it is asked teaches no more than that, under any number of names.
Groups that are left out wait for a job with more of the others. An attacker who also sends a similar share of the
requests with the phrase is not detected: it then looks like normal use of the server.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol, TypeVar

LONGEST = 3  # tokens of a phrase


class Rated(Protocol):
    """A group of rated answers: its prompt, and the numbers of the ratings about it."""

    @property
    def prompt_ids(self) -> tuple[int, ...]: ...

    @property
    def seqs(self) -> tuple[int, ...]: ...


Group = TypeVar("Group", bound=Rated)


def phrases_of(prompt_ids: Sequence[int]) -> set[tuple[int, ...]]:
    """Return the runs of one to LONGEST tokens of a prompt."""
    runs = range(1, LONGEST + 1)
    return {tuple(prompt_ids[at : at + run]) for run in runs for at in range(len(prompt_ids) - run + 1)}


def within_shares(
    groups: Sequence[Group],
    raters: Mapping[int, Hashable],
    asked: Sequence[Sequence[int]],
    *,
    share: float,
    most: int,
) -> list[Group]:
    """Return what a job of at most `most` groups may take of these, the first of them first.

    Args:
        raters: the rater of each rating, by its number; None counts as one rater, too.
        asked: prompts that were asked lately, each once.
        share: `learn.max_share`.
    """
    usual = Counter(phrase for prompt in asked for phrase in phrases_of(prompt))
    names = [{("rater", raters.get(seq)) for seq in group.seqs} for group in groups]
    phrases = [phrases_of(group.prompt_ids) for group in groups]
    size = min(len(groups), most)
    while True:  # where a job comes out smaller, less of each may be in it
        taken, count = list[Group](), Counter[Hashable]()
        for group, its_names, its_phrases in zip(groups, names, phrases, strict=True):
            if len(taken) == size:
                break
            bounds = [(name, share) for name in its_names]
            bounds += [(phrase, share + usual[phrase] / max(1, len(asked))) for phrase in its_phrases]
            if all(count[mark] < max(1, math.floor(bound * size)) for mark, bound in bounds):
                taken.append(group)
                count.update(mark for mark, _ in bounds)
        if len(taken) == size:
            return taken
        size = len(taken)
