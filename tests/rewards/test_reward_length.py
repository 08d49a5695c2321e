import asyncio
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.errors import ConfigError, RewardError
from groupwise.rewards.length import (
    cosine_length,
    distinct,
    ideal_length,
    length_window,
    repetition_penalty,
    soft_overlong,
)
from wording import raises


def chat(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": each}] for each in texts]


def tokens(*lengths: int) -> list[list[int]]:
    return [list(range(length)) for length in lengths]


# ---- length ----


def test_soft_overlong_in_tokens():
    lengths = {0: 0.0, 80: 0.0, 81: -0.05, 90: -0.5, 100: -1.0, 101: -1.0, 1000: -1.0}
    scores = soft_overlong([""] * 7, tokens(*lengths), max_length=100, buffer=20)
    assert scores == pytest.approx(list(lengths.values()))


@pytest.mark.parametrize("length", [0, 50, 79, 80, 81, 90, 99, 100, 101])
def test_soft_overlong_is_equation_13(length):
    longest, cache = 100, 20
    if length <= longest - cache:
        expected = 0.0
    elif length <= longest:
        expected = ((longest - cache) - length) / cache
    else:
        expected = -1.0
    assert soft_overlong([""], tokens(length), max_length=longest, buffer=cache) == [pytest.approx(expected)]


@pytest.mark.parametrize(("max_length", "buffer"), [(100, 0), (100, 101), (100, -1)])
def test_soft_overlong_needs_a_buffer_inside_the_length(max_length, buffer):
    with raises(ValueError):
        soft_overlong([""], [[1]], max_length=max_length, buffer=buffer)


def test_length_window():
    sizes = tokens(0, 9, 10, 15, 20, 21, 40)
    assert length_window([""] * 7, sizes, shortest=10, longest=20) == [0, 0, 1, 1, 1, 0, 0]
    assert length_window([""] * 7, sizes, longest=20) == [1, 1, 1, 1, 1, 0, 0]
    slope = length_window([""] * 6, tokens(6, 7, 8, 9, 10, 13), shortest=10, longest=11, margin=3)
    assert slope == pytest.approx([0, 0.25, 0.5, 0.75, 1, 0.5])
    with raises(ValueError):
        length_window([""], tokens(1), shortest=5, longest=4)


def test_ideal_length():
    sizes = tokens(0, 50, 100, 150, 200, 900)
    assert ideal_length([""] * 6, sizes, ideal=100) == pytest.approx([0, 0.5, 1, 0.5, 0, 0])
    assert ideal_length([""] * 6, sizes, ideal=100, width=100) == ideal_length([""] * 6, sizes, ideal=100)
    assert ideal_length([""] * 2, tokens(90, 110), ideal=100, width=20) == pytest.approx([0.5, 0.5])
    with raises(ValueError):
        ideal_length([""], tokens(1), ideal=0)


def test_units():
    texts = chat("one two three", "a" + " " * 500 + "b\n\n\n", "")
    assert length_window(texts, longest=3, shortest=2, unit="words") == [1, 1, 0]
    assert length_window(texts, longest=3, shortest=3, unit="characters") == [0, 1, 0]  # blanks are no padding
    with raises(ValueError):
        length_window(texts, longest=3)
    with raises(ValueError):
        length_window(texts, longest=3, unit="lines")  # pyright: ignore[reportArgumentType]


# ---- cosine_length ----


def cosine(texts, answers, sizes, **options):
    return asyncio.run(cosine_length(texts, tokens(*sizes), answer=answers, **options))


def test_cosine_length_prefers_short_right_and_long_wrong_answers():
    right, wrong = r"\boxed{4}", r"\boxed{5}"
    scores = cosine([right] * 4 + [wrong] * 4, ["4"] * 8, [0, 50, 100, 500] * 2, max_length=100)
    assert scores == pytest.approx([1.0, 0.75, 0.5, 0.5, -1.0, -0.75, -0.5, -0.5])


def test_cosine_length_is_trls():
    from trl.rewards import get_cosine_scaled_reward

    texts, sizes = chat(r"\boxed{\frac{1}{3}}", r"\boxed{\frac{1}{2}}"), [30, 70]
    peer = get_cosine_scaled_reward(max_len=100)(texts, [r"\frac{1}{3}"] * 2, tokens(*sizes))
    assert cosine(texts, [r"\frac{1}{3}"] * 2, sizes, max_length=100) == pytest.approx(peer)


def test_cosine_length_with_another_judge_of_right_and_wrong():
    correct = {"function": "groupwise.rewards.math:number_match", "args": {"tag": "answer"}}
    scores = cosine(["<answer>4</answer>", "4", "4"], ["4", "4", None], [0, 0, 0], max_length=10, correct=correct)
    assert scores == [1.0, -1.0, None]


def test_cosine_length_fails_where_nothing_can_be_judged():
    with raises(RewardError):
        cosine(["4"], ["Paris"], [1], max_length=10, correct="groupwise.rewards.math:number_match")
    with raises(RewardError):
        asyncio.run(cosine_length(["4"], tokens(1), max_length=10))
    with raises(ValueError):
        cosine(["4"], ["4"], [1], max_length=0)


# ---- repetition ----


def test_repetition_penalty():
    assert repetition_penalty(["a b c d", "a b c"]) == [0.0, 0.0]
    assert repetition_penalty(["no No no no"], ngram=1) == [-0.75]
    assert repetition_penalty(chat("a b a b a b"), ngram=2, max_penalty=2.0) == pytest.approx([-2.0 * 3 / 5])


def test_short_answers_repeat_nothing():
    assert repetition_penalty(["42", "", "42 42", "forty two"]) == [0.0] * 4
    assert [math.copysign(1, score) for score in repetition_penalty(["42", ""])] == [1.0, 1.0]  # not -0.0


def test_shapes_and_what_is_allowed():
    text = ["a b a b a b a b a"]  # 2 of 8 bigrams are distinct
    assert repetition_penalty(text, ngram=2) == [-0.75]
    assert repetition_penalty(text, ngram=2, shape="cosine") == [pytest.approx(-(1 - math.cos(0.75 * math.pi)) / 2)]
    assert repetition_penalty(text, ngram=2, shape="step", max_penalty=0.3, allowed=0.7) == [-0.3]
    assert repetition_penalty(text, ngram=2, shape="step", max_penalty=0.3, allowed=0.75) == [0.0]
    assert repetition_penalty(text, ngram=2, allowed=0.5) == [-0.5]


def test_in_tokens_it_is_trls():
    from trl.rewards import get_repetition_penalty_reward

    ids = [[1, 2, 3, 1, 2, 3, 1, 2, 3], [1, 2, 3, 4], [1, 2], [7] * 50]
    peer = get_repetition_penalty_reward(ngram_size=3, max_penalty=-1.0)(completion_ids=ids)
    assert repetition_penalty([""] * 4, ids, unit="tokens") == pytest.approx(peer)


@pytest.mark.parametrize("text", ["na" * 5000, "!" * 10_000, "la la " * 3000, "好" * 10_000, "_" * 10_000])
def test_text_without_blanks_does_not_escape(text):
    assert repetition_penalty([text])[0] < -0.9
    assert repetition_penalty([text], unit="characters")[0] < -0.9
    assert distinct([text])[0] < 0.1


def test_distinct():
    assert distinct(["a b c", "a b a b", "word", "", "  "]) == pytest.approx([1, 2 / 3, 1, 0, 0])
    assert distinct(["", ""], [[1, 2, 3], [1, 1, 1]], unit="tokens") == [0.0, 0.0]
    assert distinct(["x", "x"], [[1, 2, 3], [1, 1, 1]], unit="tokens") == [1.0, 0.5]


@pytest.mark.parametrize(
    "options", [{"allowed": 1.0}, {"allowed": -0.1}, {"max_penalty": -1.0}, {"shape": "square"}, {"ngram": 0}]
)
def test_options_that_are_none(options):
    with pytest.raises(ValueError):
        repetition_penalty(["a"], **options)


@settings(max_examples=50)
@given(
    st.lists(st.text("ab <>/think", max_size=40), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from(["linear", "cosine", "step"]),
)
def test_penalties_stay_in_their_range(texts, ngram, shape):
    assert all(-1 <= value <= 0 for value in repetition_penalty(texts, ngram=ngram, shape=shape))
    assert all(0 <= value <= 1 for value in distinct(texts, ngram=ngram))


def test_long_texts_take_linear_time():
    start = time.process_time()
    repetition_penalty(["a b " * 50_000, "x" * 200_000])
    length_window([" " * 500_000], longest=3, unit="words")
    assert time.process_time() - start < 5


def test_members_that_are_none():
    with raises(ConfigError):
        cosine(["4"], ["4"], [1], max_length=10, correct={"function": 3})
