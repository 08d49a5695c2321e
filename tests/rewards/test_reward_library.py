"""What holds for every ready reward: repeatable, blind to order and company, no verdict without an expected answer."""

import asyncio
import copy
import inspect
import math
import random
from typing import Any

import pytest

from groupwise.config.rewards import RewardConfig
from groupwise.rewards.base import load_rewards
from groupwise.rewards.call import RewardFunction
from groupwise.rewards.catalogue import functions_in

MODULES = ("ensemble", "format", "length", "math", "text")
OPTIONS: dict[str, dict[str, Any]] = {
    "regex_match": {"pattern": "[0-9]+"},
    "soft_overlong": {"max_length": 20, "buffer": 10},
    "length_window": {"shortest": 3, "longest": 9},
    "ideal_length": {"ideal": 8},
    "cosine_length": {"max_length": 20, "correct": "groupwise.rewards.text:exact_match"},
    "ensemble": {"functions": ["groupwise.rewards.text:exact_match", "groupwise.rewards.text:contains"]},
    "gated": {"function": "groupwise.rewards.format:think_format", "condition": "groupwise.rewards.text:contains"},
}
NEEDS_ANSWER = {"test_cases", "answer"}

TEXTS = [
    "",
    " \n",
    "42",
    "41",
    "42",
    "$42",
    "42%",
    "84/2",
    "<answer>42</answer>",
    "<think>so</think><answer>42</answer>",
    "<reasoning>First we count, because it is asked of us.</reasoning>\n<answer>\n42\n</answer>",
    "</answer>42<answer>",
    "<answer></answer>",
    r"\boxed{42}",
    '{"answer": 42}',
    "```python\ndef solution(x):\n    return x\n```",
    "la " * 60,
    "４２ \u202e \U0001f600 \ud800",
    "What is 6 * 7? Think [1].",
]
COUNT = len(TEXTS)


def library() -> list[RewardFunction]:
    references = [reference for module in MODULES for reference in functions_in(f"groupwise.rewards.{module}")]
    names = [reference.partition(":")[2] for reference in references]
    specs = [
        RewardConfig(function=reference, args=OPTIONS.get(name, {}))
        for reference, name in zip(references, names, strict=True)
        if "code_" not in name  # these run programs, and have tests of their own
    ]
    return list(load_rewards(specs))


LIBRARY = library()


def columns(texts: list[str], answer: Any, *, chat: bool) -> dict[str, list[Any]]:
    question = "What is 6 * 7? Think [1]."
    return {
        "completions": [[{"role": "assistant", "content": each}] for each in texts] if chat else texts,
        "prompts": [[{"role": "user", "content": question}] if chat else question for _ in texts],
        "completion_ids": [[ord(letter) for letter in each] for each in texts],
        "answer": [answer] * len(texts),
    }


def called(reward: RewardFunction, given: dict[str, list[Any]]) -> list[float | None]:
    returned = reward.function(**reward.accepted(given), **reward.args)
    return asyncio.run(returned) if inspect.isawaitable(returned) else returned


@pytest.mark.parametrize("reward", LIBRARY, ids=lambda reward: reward.name)
def test_scores_are_repeatable_and_blind_to_order_and_company(reward):
    given = columns(TEXTS, "42", chat=True)
    before = copy.deepcopy(given)
    scores = called(reward, given)
    assert given == before
    assert len(scores) == COUNT
    assert all(score is None or (isinstance(score, float) and math.isfinite(score)) for score in scores)
    assert called(reward, given) == scores
    assert called(reward, columns(TEXTS, "42", chat=False)) == scores
    order = random.Random(0).sample(range(COUNT), COUNT)
    shuffled = called(reward, columns([TEXTS[i] for i in order], "42", chat=True))
    assert shuffled == [scores[i] for i in order]
    alone = [called(reward, columns([text], "42", chat=True))[0] for text in TEXTS]
    assert alone == scores
    assert scores[2] == scores[4]
    assert called(reward, columns([], "42", chat=True)) == []


@pytest.mark.parametrize("reward", LIBRARY, ids=lambda reward: reward.name)
@pytest.mark.parametrize("answer", [None, "", "  "])
def test_without_an_expected_answer_there_is_no_verdict(reward, answer):
    scores = called(reward, columns(TEXTS, answer, chat=True))
    needs = any(
        name in NEEDS_ANSWER and each.default is each.empty for name, each in reward.parameters().items()
    ) or reward.name in ("ensemble", "gated", "cosine_length")
    if needs:
        assert scores == [None] * COUNT
    else:
        assert None not in scores
        assert "answer" not in reward.parameters()


@pytest.mark.parametrize("reward", LIBRARY, ids=lambda reward: reward.name)
def test_saying_nothing_is_never_worth_more_than_the_right_answer_in_its_form(reward):
    right = [text for text in TEXTS if "42" in text]
    given = columns([*right, "", " \n", "<answer></answer>"], "42", chat=True)
    *said, empty, blank, tags = (score or 0.0 for score in called(reward, given))
    assert max(said) >= max(empty, blank, tags)
