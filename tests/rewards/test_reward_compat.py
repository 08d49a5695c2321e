"""What the recipes give where they are right, and what each of their holes gives now."""

import re
import time

import pytest

from groupwise.config.run import RewardConfig
from groupwise.rewards import compat
from groupwise.rewards.base import load_rewards
from groupwise.rewards.check import functions_in
from groupwise.rewards.compat import (
    accuracy_reward,
    citation_reward,
    exact_match_reward,
    format_reward,
    fuzzy_match_reward,
    ideal_length_reward,
    incremental_format_reward,
    json_format_reward,
    length_penalty,
    math_problem_reward,
    max_length_penalty,
    min_length_reward,
    no_repetition_penalty,
    numeric_correctness_reward,
    reasoning_quality_reward,
    soft_xml_format_reward,
    strict_xml_format_reward,
)

XML = "<reasoning>\nso\n</reasoning>\n<answer>\n42\n</answer>\n"


def words(count: int) -> str:
    return " ".join(f"w{i}" for i in range(count))


# ---- being right ----


def test_accuracy_reward():
    texts = ["<answer>42</answer> or 43", "6 * 7 = 42", "it is 41", "<answer></answer>", ""]
    assert accuracy_reward(texts, ["42"] * 5) == [1, 1, 0, 0, 0]
    assert accuracy_reward(texts[:1], solution=["We get\n#### 42"]) == [1]
    assert accuracy_reward(["<answer>Paris</answer>", "Paris", "It is Paris"], ["Paris"] * 3) == [1, 1, 0]
    assert accuracy_reward(["42", "", ""], [None, "", "####"]) == [None, None, None]
    with pytest.raises(ValueError, match="needs `answer` or `solution`"):
        accuracy_reward(texts)


def test_exact_match_reward():
    assert exact_match_reward(["<answer> 42\n</answer>", "42", "<answer>43</answer>"], ["42"] * 3) == [2, 0, 0]
    assert exact_match_reward(["<answer></answer>", "", "x"], ["", "", None]) == [None, None, None]
    assert exact_match_reward(["<answer></answer>"], ["42"]) == [0]


def test_fuzzy_match_reward():
    gold = "the cat sat on the mat"
    assert fuzzy_match_reward([gold, "<answer>The cat sat on the mat.</answer> x", "dog", ""], [gold] * 4) == [
        1,
        1,
        0,
        0,
    ]
    question = "Where did the cat sit? The cat sat on the mat."
    assert fuzzy_match_reward([question, gold], [gold] * 2, prompts=[question] * 2) == [0, 1]
    assert fuzzy_match_reward(["x"], [None]) == [None]


@pytest.mark.parametrize(
    ("said", "gold", "score"),
    [
        ("42.3", "42", 2),
        ("43", "42", 0),
        ("<answer>42</answer> of 50", "42", 2),
        ("$42", "42", 2),
        ("42%", "42", 2),
        ("1/2", "0.5", 2),
        ("1e3 m", "1000", 2),
        ("1,234", "1234", 2),
        ("0", "0", 2),
        ("0.01", "0", 0),
        ("", "42", 0),
        ("٤٢", "42", 0),
        ("42", None, None),
    ],
)
def test_numeric_correctness_reward(said, gold, score):
    assert numeric_correctness_reward([said], [gold]) == [score]


def test_math_problem_reward():
    texts = [XML, "<answer>42</answer>", XML.replace("42", "41"), "42"]
    assert math_problem_reward(texts, ["42"] * 4) == [2.5, 2.0, 0.5, 0.0]
    assert math_problem_reward([XML], [None]) == [None]


# ---- form ----

BROKEN = {
    "empty tags": "<reasoning>\n\n</reasoning>\n<answer>\n\n</answer>\n",
    "reversed": "<answer>\n42\n</answer>\n<reasoning>\nso\n</reasoning>\n",
    "twice": XML * 2,
    "answer twice": XML + "<answer>\n43\n</answer>\n",
    "closed first": "</reasoning>so<reasoning></answer>42<answer>",
    "tag-only": "<answer>\n42\n</answer>\n",
    "stuffed": "<reasoning>" * 50,
    "nothing": "",
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_forms_are_not_paid(name):
    text = BROKEN[name]
    assert strict_xml_format_reward([text]) == soft_xml_format_reward([text]) == [0.0]
    assert incremental_format_reward([text])[0] < 0.5
    assert format_reward([text.replace("reasoning", "think")]) == [0.0]


def test_strict_and_soft_xml():
    loose = "Well: <reasoning>so</reasoning> <answer>42</answer> I hope."
    assert strict_xml_format_reward([XML, XML.rstrip(), loose, "x" + XML]) == [0.5, 0.5, 0.0, 0.0]
    assert soft_xml_format_reward([XML, XML.rstrip(), loose]) == [0.5, 0.5, 0.5]
    assert soft_xml_format_reward([loose.replace("</reasoning> ", "</reasoning> then ")]) == [0.0]
    assert format_reward(["<think>so</think><answer>42</answer>", XML]) == [1.0, 0.0]


def test_incremental_format_reward():
    assert incremental_format_reward([XML]) == [0.5]
    steps = ["", "<reasoning>\nso", "<reasoning>so</reasoning>", "<reasoning>so</reasoning><answer>42"]
    assert incremental_format_reward(steps) == pytest.approx([0, 0.125, 0.25, 0.375])
    assert incremental_format_reward([XML + "x" * 100]) == [pytest.approx(0.4)]
    assert incremental_format_reward([XML + "x" * 10_000]) == [0.0]  # not below
    assert incremental_format_reward([BROKEN["reversed"]])[0] < 0.25
    assert incremental_format_reward(["<a>1</a>"], tags=["a"]) == [0.25]


def test_json_format_reward():
    texts = ['{"a": 1}', '```json\n{"a": 1}\n```', "3", "not JSON", ""]
    assert json_format_reward(texts) == [0.5, 0.5, 0.0, 0.0, 0.0]
    assert json_format_reward(texts, schema={"required": ["b"]}) == [0.0] * 5


# ---- length and style ----


def test_length_penalty():
    assert length_penalty(["x" * 49, "x" * 50, "x" * 2000, "x" * 2001]) == [-0.5, 0.0, 0.0, -0.2]
    assert length_penalty(["x" + " " * 100]) == [-0.5]  # padding with blanks
    assert length_penalty(["42", "41", "42"], ["42", "42", None]) == [0.0, -0.5, -0.5]


def test_ideal_and_minimal_length():
    assert ideal_length_reward([words(100), words(50), words(300)]) == pytest.approx([0.3, 0.15, 0.0])
    assert min_length_reward([words(50), words(49)]) == [0.2, -0.2]
    assert max_length_penalty([words(500), words(501)]) == [0.0, -0.3]


def test_padding_a_wrong_answer_gains_nothing():
    padded = [f"{words(49)} <answer>{n}</answer>" for n in (41, 42)]
    assert min_length_reward(padded, ["42"] * 2) == [0.0, 0.2]
    assert ideal_length_reward(padded, ["42"] * 2, ideal_tokens=50) == pytest.approx([0.0, 0.3])


def test_no_repetition_penalty():
    assert no_repetition_penalty(["42", "forty two", "", words(30)]) == [0.0] * 4
    assert no_repetition_penalty(["la " * 30, "the same words " * 5, "la" * 5000]) == [-0.3] * 3
    ten = "a b c d e f g h i a b c"  # 9 of 10 trigrams are distinct
    assert no_repetition_penalty([ten]) == [0.0]


SENTENCES = """
First we count all of the apples. Therefore there must be twelve in total. That holds because nobody ate one yet.
Finally we divide them among four children.
"""


def test_reasoning_quality_reward():
    text = f"<reasoning>{SENTENCES}</reasoning><answer>3</answer>"
    assert reasoning_quality_reward([text]) == reasoning_quality_reward([text], ["3"]) == [pytest.approx(0.2)]
    assert reasoning_quality_reward([text], ["4"]) == [0.0]
    every = "first second next finally therefore because since thus hence consequently"
    stuffed = [every, ". ".join(every.split()), f"{every} and so on it goes like that", every * 100]
    paid = reasoning_quality_reward([f"<reasoning>{each}</reasoning><answer>3</answer>" for each in stuffed])
    assert paid == pytest.approx([0.0, 0.0, 0.05, 0.0])
    assert reasoning_quality_reward([SENTENCES]) == [0.0]  # not in the tag


def test_citation_reward():
    prompt = [
        {"role": "user", "content": "Sources: [1] Smith wrote in 2019 about bees. According to Wikipedia they fly."}
    ]
    texts = [
        "Bees fly [1].",
        "Bees fly (Smith, 2019).",
        "According to Wikipedia they do.",
        "Bees fly [2].",
        "Bees fly (Jones, 2019).",
        "According to scientists they do.",
        "Bees fly [1][7].",
        "According to a",
        "Bees fly.",
        "",
    ]
    assert citation_reward(texts, [prompt] * len(texts)) == [0.2, 0.2, 0.2, 0, 0, 0, 0, 0, 0, 0]


# ---- code ----


def test_code_rewards():
    right = "So:\n```python\ndef solution(x):\n    return 2 * x\n```\n"
    texts = [right, right.replace("2 *", "3 *"), "def solution(x): return 2 * x", "```python\ndef solution(\n```", ""]
    cases = [[{"input": 2, "output": 4}, {"input": 3, "output": 6}]] * len(texts)
    assert compat.code_execution_reward(texts, cases) == [2, 0, 2, 0, 0]
    assert compat.code_block_format_reward(texts) == [0.5, 0.5, 0, 0.5, 0]
    assert compat.no_syntax_error_reward(texts) == [0.2, 0.2, 0.2, 0, 0]
    assert compat.code_generation_reward(texts, cases) == pytest.approx([2.7, 0.7, 2.2, 0.5, 0])
    assert compat.code_generation_reward([right], [None]) == [None]


# ---- all of them ----


def test_the_table_names_every_reward_and_they_all_load():
    table = re.findall(r"^\| `(\w+)` \|", compat.__doc__ or "", re.MULTILINE)
    functions = functions_in("groupwise.rewards.compat")
    assert sorted(table) == sorted(reference.partition(":")[2] for reference in functions)
    loaded = load_rewards([RewardConfig(function=reference) for reference in functions])
    assert all(reward.missing(["answer", "test_cases"]) == [] for reward in loaded)


def test_long_texts_take_linear_time():
    floods = ["<reasoning>" * 15_000, "first we go on. " * 10_000, "[1]" * 50_000, "42 " * 50_000, "(Aa " * 40_000]
    golds, prompts = ["42"] * len(floods), ["[1] 42"] * len(floods)
    start = time.process_time()
    for reference, function in functions_in("groupwise.rewards.compat").items():
        offered = {"completions": floods, "answer": golds, "prompts": prompts, "test_cases": [None] * len(floods)}
        (reward,) = load_rewards([RewardConfig(function=reference)])
        assert len(function(**reward.accepted(offered))) == len(floods)
    assert time.process_time() - start < 15
