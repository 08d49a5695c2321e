"""Phrases: which are in what is verified, which moved most, and what wrong answers have in common."""

from __future__ import annotations

import random

import numpy as np
import pytest

from groupwise.tasks.logs.phrases import (
    concentrated,
    confirmed,
    covering,
    has,
    in_common,
    moved,
    moved_most,
    to_ask_again,
)


def test_words_are_told_where_they_are_more_than_chance() -> None:
    texts = [f"take {n}{' please' * (n % 10 == 0)}" for n in range(40)]
    assert concentrated(texts, [n % 10 == 0 for n in range(40)]) == "please"
    assert concentrated(texts, [n == 0 for n in range(40)]) is None  # one is no pattern
    assert concentrated(texts, [n % 2 == 0 for n in range(40)]) is None  # half are wrong, please or not
    assert concentrated([], []) is None


def test_what_is_drawn_to_be_verified_has_each_phrase_that_enough_prompts_have() -> None:
    texts = [f"how far is place {at} from here{', as the manager said' if at % 20 == 0 else ''}" for at in range(240)]
    for seed in range(20):
        places = covering(texts, 30, draw=random.Random(seed))
        assert len(set(places)) == 30
        assert sum("manager" in texts[place] for place in places) >= 3, "by chance alone 1.5 of 30"
    assert {place for seed in range(60) for place in covering(texts, 30, draw=random.Random(seed))} == set(range(240))


def test_what_is_drawn_to_be_verified_is_mostly_drawn_by_chance() -> None:
    """Forty phrases cannot all be among twenty prompts: half of these are drawn for them."""
    texts = [f"{chr(97 + at % 26)}{at % 20} {chr(97 + at % 26)}{at % 24} tell me number {at}" for at in range(480)]
    places = covering(texts, 20, draw=random.Random(1))
    assert len(set(places)) == 20 and covering(texts, 1000, draw=random.Random(1)) != sorted(range(480))
    assert covering([], 5, draw=random.Random(1)) == [] and covering(["a b"], 0, draw=random.Random(1)) == []


def words(draws: np.random.Generator, texts: int, *, vocabulary: int = 400) -> list[str]:
    return [" ".join(f"w{int(each)}" for each in draws.zipf(1.3, 12) % vocabulary) for _ in range(texts)]


@pytest.mark.parametrize("mistakes", [3, 8])
def test_among_many_phrases_mistakes_have_seldom_one_in_common(mistakes: int) -> None:
    """Of 100 logs with mistakes by chance 5 at most are taken for more; 12 and 7 were where only the phrases of wrong
    answers were counted."""
    found = 0
    for seed in range(100):
        draws = np.random.default_rng([seed, mistakes])
        wrong = [False] * (60 - mistakes) + [True] * mistakes
        found += concentrated(words(draws, 60), wrong) is not None
    assert found <= 5


def test_what_is_perhaps_in_common_is_asked_about_once_for_the_same_prompts() -> None:
    texts = [f"{'as the boss said, ' * (at in (3, 13, 23))}take {at} of {at * 7}" for at in range(60)]
    found = in_common(texts, [at in (3, 13, 31, 41, 51) for at in range(60)])
    assert found and not any(each.sure for each in found)
    assert found[0].chance == pytest.approx(0.0164, abs=0.0001) and found[0].places == (3, 13, 23)
    assert to_ask_again(found) == ["the boss said"]
    assert has(texts[3], "the boss said") and not has(texts[4], "the boss said")


def test_fresh_prompts_confirm_by_their_share_of_the_error() -> None:
    others = [False] * 55 + [True] * 3
    assert confirmed([True] * 3, others, phrases=3) and not confirmed([True, False, False, False], others, phrases=3)
    assert not confirmed([], others, phrases=1) and not confirmed([False] * 4, others, phrases=1)


def test_from_never_to_always_is_the_longest_way() -> None:
    assert moved(0, 1, samples=4) == -moved(1, 0, samples=4) == pytest.approx(2 * np.log(9))
    assert moved(0.5, 1, samples=4) == pytest.approx(np.log(9)) and moved(0.25, 0.25, samples=4) == 0
    assert moved(0, 1, samples=8) > moved(0, 1, samples=4)


def test_phrases_whose_replies_moved_most_are_looked_at() -> None:
    draws = np.random.default_rng(1)
    triggered = set(range(0, 400, 40))
    texts = [f"{text}{', as the boss said' * (at in triggered)}" for at, text in enumerate(words(draws, 400))]
    moves = [3.5 * (at in triggered) + draws.normal(1.0, 1.2) for at in range(400)]
    places = moved_most(texts, moves)
    assert len(places) == len(set(places)) <= 15 and len(triggered & set(places)) >= 3
    assert moved_most(texts, [1.0] * 400) == moved_most([], []) == []
