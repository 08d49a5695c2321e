"""The index of n-grams against a search of the whole text; continuations, and the wait after failures."""

from __future__ import annotations

import random

import pytest

from groupwise.engine.ngrams import LONGEST_WAIT, SIZES, History, ngrams_of


def followed(ids: list[int], most: int) -> list[int]:
    """By search: what came after the latest earlier occurrence of the last tokens, repeated to its length."""
    for size in SIZES:
        for place in range(len(ids) - 1, size - 1, -1):
            if ids[place - size : place] == ids[-size:]:
                drafted = ids[place:]
                while len(drafted) < most:
                    drafted = drafted + ids[place:]
                return drafted[:most]
    return []


@pytest.mark.parametrize("letters", [2, 4, 9])
def test_a_draft_is_what_came_after_the_latest_occurrence(letters: int):
    rng, found = random.Random(letters), 0
    for _ in range(60):
        ids = [rng.randrange(letters) for _ in range(rng.randint(3, 40))]
        opening = rng.randint(1, len(ids))
        history = History(ids[:opening], ngrams_of(ids[:opening]))
        for place in range(opening, len(ids) + 1):
            most = rng.randint(1, 12)
            assert history.draft(most) == followed(ids[:place], most)
            found += bool(history.draft(most))
            history.add(ids[place : place + 1])
        assert history.ids == ids and history.said == len(ids) - opening
    assert found > 100


def test_a_short_text_and_no_room():
    history = History((7,), ngrams_of((7,)))
    assert history.draft(4) == []
    history.add((7, 7))
    assert history.draft(3) == [7, 7, 7] and history.draft(0) == history.draft(-1) == []


def test_the_wait_doubles_until_a_draft_stands():
    history, waits = History((1,) * 4, ngrams_of((1,) * 4)), []
    for _ in range(LONGEST_WAIT + 2):
        history.judge(0)
        start = history.said
        while not history.draft(1):
            history.add((1,))
        waits.append(history.said - start)
    assert waits == [1, 3, 7, 15, 31, 31, 31]
    history.judge(2)
    assert history.draft(1) == [1]
    history.judge(0)
    history.add((1,))
    assert history.draft(1) == [1]
