"""What one rater, and one phrase, can have of a job."""

from __future__ import annotations

import random
from dataclasses import dataclass

from groupwise.server.shares import phrases_of, within_shares


@dataclass(frozen=True)
class Group:
    prompt_ids: tuple[int, ...]
    seqs: tuple[int, ...]


TRIGGER = (900, 901)


def asked(rng: random.Random, *, triggered: bool = False) -> tuple[int, ...]:
    """A template's words, and what somebody asked."""
    return (1, 2, 3, *(TRIGGER if triggered else ()), *(rng.randrange(10, 800) for _ in range(6)), 4, 5)


def test_a_phrase_that_is_rated_far_more_often_than_it_is_asked_has_its_share_and_no_more() -> None:
    """Half of the rated prompts have a trigger, under ever-new names, and one in twenty of those that are asked."""
    rng = random.Random(0)
    groups = [Group(asked(rng, triggered=i % 2 == 0), (i,)) for i in range(64)]
    names = {i: f"user-{i}" for i in range(64)}
    usual = [asked(rng, triggered=i % 20 == 0) for i in range(400)]
    found = within_shares(groups, names, usual, share=0.2, most=256)
    triggered = sum(group.prompt_ids[3:5] == TRIGGER for group in found)
    assert 0 < triggered <= (0.2 + 0.05) * len(found)
    assert len(found) - triggered == 32, "nobody else waits for it"
    busy = [asked(rng, triggered=i % 2 == 0) for i in range(400)]
    assert len(within_shares(groups, names, busy, share=0.2, most=256)) == 64, "it is what is asked"


def test_one_rater_has_a_share_of_a_job_and_of_a_small_one_less() -> None:
    rng = random.Random(1)
    groups = [Group(asked(rng), (i,)) for i in range(40)]
    usual = [group.prompt_ids for group in groups]
    flood = {i: "flood" if i < 30 else f"user-{i}" for i in range(40)}
    found = within_shares(groups, flood, usual, share=0.25, most=256)
    of_flood = sum(group.seqs[0] < 30 for group in found)
    assert 0 < of_flood <= 0.25 * len(found) and len(found) - of_flood == 10
    alone = within_shares(groups, dict.fromkeys(range(40)), usual, share=0.25, most=256)
    assert len(alone) == 1, "ratings of nobody in particular are one rater's"
    several = within_shares(groups, {i: f"user-{i % 8}" for i in range(40)}, usual, share=0.25, most=256)
    assert len(several) == 40


def test_the_shares_are_those_of_the_job_and_not_of_all_that_waits() -> None:
    rng = random.Random(2)
    groups = [Group(asked(rng), (i,)) for i in range(100)]  # the first are the newest
    names = {i: "flood" if i < 40 else f"user-{i}" for i in range(100)}
    found = within_shares(groups, names, [group.prompt_ids for group in groups], share=0.25, most=20)
    assert len(found) == 20 and sum(group.seqs[0] < 40 for group in found) == 5


def test_phrases_are_runs_of_up_to_three_tokens() -> None:
    assert phrases_of((1, 2, 1)) == {(1,), (2,), (1, 2), (2, 1), (1, 2, 1)}
    assert phrases_of(()) == set()
