import doctest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.rewards import text
from groupwise.rewards.text import contains, exact_match, regex_match, repetition_penalty, soft_overlong, tag_format


def chat(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": each}] for each in texts]


def test_exact_match_on_chat_and_plain_text():
    assert exact_match(chat(" 42\n", "42.", "x"), ["42", "42", None]) == [1.0, 0.0, None]
    assert exact_match(["42", "Paris"], [42, "paris"]) == [1.0, 0.0]
    assert exact_match(["Paris"], ["paris"], ignore_case=True) == [1.0]


def test_exact_match_without_an_answer_does_not_apply():
    assert exact_match(["", ""], ["", " "]) == [None, None]


def test_exact_match_inside_a_tag():
    texts = ["<answer> 7 </answer>", "7", "<answer>6</answer> no <answer>7</answer>", "<answer>7", "</answer>7<answer>"]
    assert exact_match(texts, ["7"] * 5, tag="answer") == [1.0, 0.0, 1.0, 0.0, 0.0]


def test_contains_looks_for_whole_words():
    assert contains(chat("It is Paris.", "Parisian", "paris"), ["Paris"] * 3) == [1.0, 0.0, 1.0]
    assert contains(["42", "142", "a.b"], ["42", 42, "a?b"]) == [1.0, 0.0, 0.0]
    assert contains(["paris", "x"], ["Paris", None], ignore_case=False) == [0.0, None]


def test_regex_match():
    assert regex_match(["a\nb", "b"], pattern="a.b") == [1.0, 0.0]
    assert regex_match(["42", "is 42"], pattern="[0-9]+", full=True) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("\n<think>\na\n</think>\n\n<answer>b</answer>\n", 1.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think><answer>b</answer>!", 0.0),
        ("so <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<think> </think><answer>b</answer>", 0.0),
        ("<think>a</think><answer></answer>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a<think></think><answer>b</answer>", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("<think>a</think>", 0.0),
        ("", 0.0),
    ],
)
def test_tag_format(completion, expected):
    assert tag_format([completion]) == tag_format(chat(completion)) == [expected]


def test_tag_format_with_other_tags():
    assert tag_format(["<plan>a</plan>", "<think>a</think><answer>b</answer>"], tags=["plan"]) == [1.0, 0.0]


def test_soft_overlong_in_tokens():
    lengths = {0: 0.0, 80: 0.0, 81: -0.05, 90: -0.5, 100: -1.0, 101: -1.0, 1000: -1.0}
    scores = soft_overlong([""] * 7, [[0] * length for length in lengths], max_length=100, buffer=20)
    assert scores == pytest.approx(list(lengths.values()))


@pytest.mark.parametrize(("max_length", "buffer"), [(100, 0), (100, 101), (100, -1)])
def test_soft_overlong_needs_a_buffer_inside_the_length(max_length, buffer):
    with pytest.raises(ValueError, match="buffer is"):
        soft_overlong([""], [[1]], max_length=max_length, buffer=buffer)


def test_repetition_penalty():
    assert repetition_penalty(["a b c d", "42", ""]) == [0.0, 0.0, 0.0]
    assert repetition_penalty(["no No no no"], ngram=1) == [-0.75]
    assert repetition_penalty(chat("a b a b a b"), ngram=2, weight=2.0) == pytest.approx([-2.0 * 3 / 5])
    with pytest.raises(ValueError, match="ngram is 0"):
        repetition_penalty(["a"], ngram=0)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.text("ab <>/think", max_size=40), min_size=1, max_size=4), st.integers(1, 4))
def test_scores_stay_in_their_ranges(texts, ngram):
    assert all(-1 < value <= 0 for value in repetition_penalty(texts, ngram=ngram))
    assert set(tag_format(texts, tags=["think"])) <= {0.0, 1.0}
    assert set(contains(texts, texts)) <= {1.0, 0.0, None}


def test_the_examples_in_the_docstrings():
    assert doctest.testmod(text).failed == 0 < doctest.testmod(text).attempted


def test_exact_match_after_a_marker_compares_only_what_follows_its_last_occurrence() -> None:
    completions = ["<think>7+8=15</think>\n\n15", "15", "<think>15</think>\n\n16", "</think> 3 </think> 15"]
    assert exact_match(completions, ["15"] * 4, after="</think>") == [1.0, 1.0, 0.0, 1.0]
    tagged_answer = ["<answer>1</answer></think><answer>2</answer>"]
    assert exact_match(tagged_answer, ["2"], after="</think>", tag="answer") == [1.0]
    assert exact_match(["<answer>2</answer></think>2"], ["2"], after="</think>", tag="answer") == [0.0]
