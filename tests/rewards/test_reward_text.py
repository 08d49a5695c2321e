import doctest
import time
from difflib import SequenceMatcher

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.rewards import text
from groupwise.rewards.text import contains, exact_match, lcs_ratio, rouge_l, words_of


def chat(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": each}] for each in texts]


# ---- exact_match ----


def test_exact_match_on_chat_and_plain_text():
    assert exact_match(chat(" 42\n", "42.", "x"), ["42", "42", None]) == [1.0, 0.0, None]
    assert exact_match(["42", "Paris"], [42, "paris"]) == [1.0, 0.0]
    assert exact_match(["Paris"], ["paris"], ignore_case=True) == [1.0]


def test_nothing_is_not_the_answer_to_nothing():
    assert exact_match(["", "", "None"], ["", " ", None]) == [None, None, None]
    assert exact_match(["<answer></answer>", ""], ["", ""], tag="answer") == [None, None]
    assert exact_match(["<answer> </answer>", ""], ["42", "42"], tag="answer") == [0.0, 0.0]


def test_exact_match_inside_a_tag():
    texts = ["<answer> 7 </answer>", "7", "<answer>6</answer> no <answer>7</answer>", "<answer>7", "</answer>7<answer>"]
    assert exact_match(texts, ["7"] * 5, tag="answer") == [1.0, 0.0, 1.0, 0.0, 0.0]


def test_several_guesses_are_the_last_one():
    texts = ["<answer>7</answer><answer>8</answer>", "<answer>7 or 8</answer>", "<answer>7</answer></answer>"]
    assert exact_match(texts, ["7"] * 3, tag="answer") == [0.0, 0.0, 1.0]


def test_exact_match_after_a_marker_compares_only_what_follows_its_last_occurrence():
    completions = ["<think>7+8=15</think>\n\n15", "15", "<think>15</think>\n\n16", "</think> 3 </think> 15"]
    assert exact_match(completions, ["15"] * 4, after="</think>") == [1.0, 1.0, 0.0, 1.0]
    tagged_answer = ["<answer>1</answer></think><answer>2</answer>"]
    assert exact_match(tagged_answer, ["2"], after="</think>", tag="answer") == [1.0]
    assert exact_match(["<answer>2</answer></think>2"], ["2"], after="</think>", tag="answer") == [0.0]


def test_the_two_encodings_of_an_accent_are_equal_and_lookalikes_are_not():
    assert exact_match(["cafe\u0301", "４２", "4\u200b2", "Рaris"], ["caf\u00e9", "42", "42", "Paris"]) == [1, 0, 0, 0]


# ---- contains ----


def test_contains_looks_for_whole_words():
    assert contains(chat("It is Paris.", "Parisian", "paris"), ["Paris"] * 3) == [1.0, 0.0, 1.0]
    assert contains(["42", "142", "a.b"], ["42", 42, "a?b"]) == [1.0, 0.0, 0.0]
    assert contains(["paris", "x", ""], ["Paris", None, ""], ignore_case=False) == [0.0, None, None]


def test_contains_can_refuse_a_list_of_every_candidate():
    every = " ".join(map(str, range(1000)))
    assert contains([every, "It is 42."], ["42", "42"], max_words=20) == [0.0, 1.0]
    assert contains(["<think>42?</think> 41"], ["42"], after="</think>") == [0.0]


# ---- rouge_l ----


def naive_lcs(one: list[str], other: list[str]) -> int:
    row = [0] * (len(other) + 1)
    for x in one:
        above, row = row, [0]
        for j, y in enumerate(other):
            row.append(above[j] + 1 if x == y else max(above[j + 1], row[j]))
    return row[-1]


@settings(max_examples=150)
@given(st.lists(st.sampled_from("abcd"), min_size=1), st.lists(st.sampled_from("abcde"), min_size=1))
def test_rouge_l_is_twice_the_common_words_over_all_words(said, gold):
    expected = 2 * naive_lcs(said, gold) / (len(said) + len(gold))
    assert rouge_l([" ".join(said)], [" ".join(gold)]) == [pytest.approx(expected)]


def test_rouge_l_is_the_ratio_that_users_know_where_blocks_do_not_cross():
    said, gold = "the cat sat on the red mat", "the cat sat on a mat"
    ratio = SequenceMatcher(None, said.split(), gold.split(), autojunk=False).ratio()
    assert rouge_l([said], [gold]) == [pytest.approx(ratio)]


def test_rouge_l_ignores_case_and_punctuation_only():
    assert rouge_l(["The CAT, sat!", "", "dog", "x"], ["the cat sat"] * 3 + [None]) == [1.0, 0.0, 0.0, None]


def test_copying_the_prompt_gains_nothing():
    prompt = "Summarise: the cat sat on the mat and the dog lay in the sun"
    gold = "the cat sat and the dog lay"
    chat_prompt = [{"role": "user", "content": prompt}]
    copied, right, other = rouge_l([prompt, gold, "a cat sat"], [gold] * 3, [prompt] * 3)
    assert (copied, right) == (0.0, 1.0) and 0 <= other < 1
    assert rouge_l([prompt, gold], [gold] * 2, [chat_prompt] * 2) == [0.0, 1.0]
    assert rouge_l([prompt], [gold], [prompt], beyond_prompt=False)[0] > 0.5
    assert rouge_l([gold], [gold], [gold]) == [0.0]  # nothing to gain where the prompt is the answer


def test_repeating_the_answer_or_padding_it_gains_nothing():
    gold = "paris is the capital of france"
    assert rouge_l([f"{gold} " * 2, f"{gold} " + "word " * 100, "france of capital the is paris"], [gold] * 3) == [
        pytest.approx(12 / 18),
        pytest.approx(12 / 112),
        pytest.approx(2 / 12),
    ]
    assert rouge_l([f"{gold} " * 500], [gold]) == [0.0]


def test_long_texts_take_linear_time():
    start = time.process_time()
    flood = "a b " * 100_000
    rouge_l([flood], ["a b " * 500], max_words=10**6)
    exact_match(["<answer>" * 50_000], ["7"], tag="answer")
    contains(["42" * 100_000], ["42"])
    assert time.process_time() - start < 5


def test_words():
    assert words_of("Don't PANIC: it’s 42!") == ["don't", "panic", "it’s", "42"]


@settings(max_examples=50)
@given(st.lists(st.text("ab <>/think", max_size=40), min_size=1, max_size=4))
def test_scores_stay_in_their_ranges(texts):
    assert set(contains(texts, texts)) <= {1.0, 0.0, None}
    assert all(score is None or 0 <= score <= 1 for score in rouge_l(texts, texts, texts[::-1]))


def test_the_examples_in_the_docstrings():
    assert doctest.testmod(text).failed == 0 < doctest.testmod(text).attempted


# ---- lcs_ratio ----


def test_lcs_ratio_is_of_characters_as_they_are():
    assert lcs_ratio(["abc", " abc\n", "ABC", "axbxc", "", "abc"], ["abc"] * 5 + [None]) == [
        1.0,
        1.0,
        0.0,
        0.75,
        0.0,
        None,
    ]
    assert lcs_ratio(["<r>ab</r>", "ab"], ["ab"] * 2, tag="r") == [1.0, 0.0]


def test_lcs_ratio_gains_nothing_by_repeating():
    once, often = lcs_ratio(["cba", "cba" * 50], ["abc"] * 2)
    assert often < once < 0.5 and lcs_ratio(["a" * 11], ["a"], max_characters=10) == [0.0]


@pytest.mark.parametrize(
    ("last", "score"),
    [
        ([{"role": "tool", "content": "185"}], 0.0),
        ([{"role": "user", "content": "185"}], 0.0),
        ([{"role": "user", "content": [{"type": "text", "text": "185"}]}], 0.0),
        (
            [
                {"role": "tool", "content": "no"},
                {"role": "assistant", "content": "185"},
                {"role": "user", "content": "."},
            ],
            1.0,
        ),
        ([{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}], 0.0),
    ],
)
def test_of_an_episode_only_what_the_policy_said_counts(last, score: float):
    """Not the tool's result, nor the solution that the environment tells at the end."""
    episode = [{"role": "assistant", "content": "I shall add them."}, *last]
    assert exact_match([episode], ["185"]) == [score]
