"""All prompts that are alike are found and no others, whatever the order; what hangs together is told apart."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.tasks.logs.near import alike_ones, shingles, texts_of
from groupwise.tasks.logs.split import Together, by_lot, held_out
from groupwise.types import Message


def asks(*texts: str) -> list[Message]:
    """A conversation: the user and the assistant by turns."""
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def similarity(one: str, other: str) -> float:
    a, b = shingles(one), shingles(other)
    return len(a & b) / len(a | b)


@given(
    st.lists(st.lists(st.sampled_from("abcde"), min_size=1, max_size=12), max_size=14),
    st.sampled_from((0.3, 0.5, 0.8, 1.0)),
)
def test_those_that_hang_together_are_those_that_comparing_all_finds(texts, alike):
    prompts = [asks(" ".join(words)) for words in texts]
    expected = Together(len(prompts))
    for one, other in itertools.combinations(range(len(prompts)), 2):
        if similarity(" ".join(texts[one]), " ".join(texts[other])) >= alike - 1e-9:
            expected.join(one, other)
    kept_for, together = alike_ones(prompts, alike=alike)
    assert sorted(together.groups()) == sorted(expected.groups())
    for number, kept in kept_for.items():
        assert kept < number and kept not in kept_for
        assert similarity(" ".join(texts[number]), " ".join(texts[kept])) >= alike - 1e-9


LONG = "my parcel with the two blue lamps has not arrived in Lyon and the shop does not answer my calls since Monday"


def test_a_word_more_is_nearly_the_same_and_another_number_is_not():
    kept_for, _ = alike_ones([asks(LONG), asks(LONG + " please"), asks("2 + 2?"), asks("2 + 3?")], alike=0.8)
    assert kept_for == {1: 0}


def test_the_next_turn_of_a_conversation_is_another_prompt():
    one = asks(LONG, "I am sorry.", "When does it come?")
    later = [*one, *asks("x", "On Friday.", "Good, thanks.")[1:]]
    other = asks(LONG + " now", "I am sorry.", "When does it come?")
    kept_for, _ = alike_ones([one, later, other], alike=0.8)
    assert kept_for == {2: 0}
    assert texts_of(later)[0].strip() == "Good, thanks."


def test_the_same_question_after_another_conversation_is_another_prompt():
    kept_for, together = alike_ones(
        [asks(LONG, "Sorry.", "And now?"), asks("How do I bake bread without yeast?", "So.", "And now?")], alike=0.8
    )
    assert not kept_for and len(together.groups()) == 2


def test_a_template_around_questions_does_not_make_them_alike():
    words = random.Random(0)
    template = "You are given a question of a customer of our shop. Answer it in a polite and brief manner. Question: "
    questions = [" ".join(words.choices("abcdefghijklmnop", k=4)) for _ in range(60)]
    assert similarity(template + questions[0], template + questions[1]) > 0.5
    prompts = [asks(template + each) for each in [*questions, questions[0] + " !"]]
    kept_for, _ = alike_ones(prompts, alike=0.5)
    assert kept_for.get(60) == 0 and len(kept_for) < 5


def test_a_language_without_blanks_is_compared_by_its_signs():
    asked = "我的包裹还没有到达里昂，商店也不接我的电话，请问什么时候可以收到"
    kept_for, _ = alike_ones([asks(asked), asks(asked + "吗"), asks("请问如何不用酵母烤面包")], alike=0.8)
    assert kept_for == {1: 0}


def test_nothing_is_like_nothing():
    kept_for, together = alike_ones([], alike=0.8)
    assert not kept_for and not together.groups()


# ---- the split ----
def test_what_has_a_key_in_common_hangs_together():
    together = Together(5)
    together.join_all([(0, "ann"), (2, "bob"), (3, "ann"), (1, "bob")])
    assert together.groups() == [[0, 3], [1, 2], [4]]
    assert together.same(0, 3) and not together.same(0, 1)


@pytest.mark.parametrize(
    ("share", "chosen"), [(0.0, set()), (0.23, {3}), (0.6, {3, 1}), (0.5, {3, 4}), (0.99, {3, 1, 4})]
)
def test_the_groups_that_began_last_are_held_out(share, chosen):
    groups = [[0, 1, 9], [2, 3, 4], [], [5, 6], [7]]
    times = [1.0, 90.0, 50.0, 60.0, 61.0, 80.0, 81.0, 40.0, None, 2.0]
    assert held_out(groups, times, share=share) - {2} == chosen


def test_without_times_the_last_in_order_are_held_out():
    assert held_out([[0], [1], [2], [3]], [None] * 4, share=0.5) == {2, 3}


def test_the_lot_depends_on_the_prompts_alone_and_has_the_share():
    draws = random.Random(0)
    keys = [f"{draws.getrandbits(128):032x}" for _ in range(4000)]
    assert sum(by_lot([key], share=0.2) for key in keys) == pytest.approx(800, abs=100)
    assert by_lot(keys[:3], share=0.2) == by_lot(keys[2::-1], share=0.2)
