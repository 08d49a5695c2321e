"""The starter's tasks: answers are right, splits are disjoint, seeds decide everything."""

import json
import random
import re
from itertools import pairwise

import pytest

from groupwise.errors import DataError
from groupwise.tasks.starter import tasks
from groupwise.tasks.starter.tasks import (
    ASKED_STYLES,
    ASKS,
    CALCULATOR,
    SKILL_WEIGHTS,
    SKILLS,
    Mix,
    calculate,
    is_correct,
    prompts,
    supervised_conversations,
)
from groupwise.tasks.starter.tokenizer import build_tokenizer, render
from groupwise.tasks.tool_calls import parse
from wording import raises

STYLES = ("bare", "sentence", "think", "tags")
CONVERSATIONS = supervised_conversations(0, 3000)


def cases(skill: str, n: int = 400) -> list[tasks.Case]:
    rng = random.Random(f"test/{skill}")
    return [SKILLS[skill].draw(rng) for _ in range(n)]


def problems(rows) -> set[tuple[str, str]]:
    """(skill, question without the words that ask for a style): finer than the problem itself."""
    asks = sorted({ask.format(noun=skill.noun) for skill in SKILLS.values() for form in ASKS.values() for ask in form})
    found = set()
    for row in rows:
        question = row["prompt"][0]["content"]
        for ask in filter(None, asks):
            question = question.removesuffix(ask)
        found.add((row["skill"], question.strip()))
    return found


# ---- answers ----
def test_arithmetic_is_right():
    for skill, result in {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b}.items():
        for case in cases(skill):
            assert case.answer == str(result(*case.operands))
            assert int(case.answer) >= 0
            assert all(str(operand) in case.question for operand in case.operands)
            for line in case.working.splitlines():
                left, right = line.split("=")
                assert eval(left) == int(right)  # our own digits and signs


def test_the_working_of_a_sum_reads_off_its_columns():
    assert tasks._columns(47, 138, sign=1) == "7+8=15\n4+3+1=8\n0+1=1"
    for sign, skill in ((1, "add"), (-1, "sub")):
        for case in cases(skill):
            a, b = map(int, case.operands)
            columns = [int(line.split("=")[1]) % 10 for line in tasks._columns(a, b, sign=sign).splitlines()]
            digits = "".join(map(str, reversed(columns)))
            assert int(digits) == int(case.answer) % 10 ** len(columns)


def test_the_other_answers_are_right():
    for case in cases("copy"):
        assert case.answer in case.question
    for case in cases("count"):
        item, text = map(str, case.operands)
        assert case.answer == str(text.split().count(item)) and text in case.question
    for case in cases("sort"):
        numbers = [int(number) for number in case.answer.split(", ")]
        assert tuple(numbers) == case.operands and numbers == sorted(numbers)
    for case in cases("compare"):
        kind, *numbers = case.operands
        assert case.answer == str((max if kind == "max" else min)(map(int, numbers)))
    for case in cases("json"):
        assert json.loads(case.answer) == dict(zip(("name", "age"), case.operands, strict=True))
    for case in cases("tool"):
        a, op, b = case.operands
        assert case.answer == calculate(f"{a}{op}{b}") and int(case.answer) >= 0


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("47*12", "564"),
        (" 7 + 8 ", "15"),
        ("5-9", "-4"),
        ("2**9", "error"),
        ("__import__('os')", "error"),
        ("", "error"),
    ],
)
def test_the_calculator(expression, result):
    assert calculate(expression) == result


# ---- judging ----
@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("185", {"bare", "plain"}),
        (" 185\n", {"bare", "plain"}),
        ("The answer is 185.", {"sentence", "plain"}),
        ("<answer>185</answer>", {"tags", "plain"}),
        ("<answer> 185 </answer>", {"tags", "plain"}),
        ("<think>\n7+8=15\n</think>\n\n185", {"think", "plain"}),
        ("<think>\n185", set()),
        ("185</think>185", set()),
        ("1850", set()),
        ("185 185", set()),
        ("It is 185, I think.", set()),
        ("", set()),
    ],
)
def test_a_reply_is_right_only_in_the_style_asked_for(reply, right):
    assert {style for style in (*STYLES, "plain") if is_correct("add", reply, "185", style)} == right


def test_a_tool_call_is_judged_by_what_it_evaluates_to():
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "%s"}}\n</tool_call>'
    assert is_correct("tool", call % "47*12", "564") and is_correct("tool", call % "500 + 64", "564")
    assert is_correct("tool", "564", "564")
    for wrong in (call % "47*13", call % "564", call.replace("calculator", "python") % "47*12", "<tool_call>564"):
        assert not is_correct("tool", wrong, "564")


# ---- supervised data ----
def test_supervised_data_has_every_skill_and_right_answers():
    operations = {"add": "+", "sub": "-", "mul": "*"}
    for conversation in CONVERSATIONS:
        skill, messages = conversation["skill"], conversation["messages"]
        assert conversation["tools"] == ([CALCULATOR] if skill == "tool" else None)
        for question, reply in pairwise(messages):
            if skill in operations and question["role"] == "user":
                low, high = sorted(int(number) for number in re.findall(r"[0-9]+", question["content"]))
                assert is_correct(skill, reply["content"], calculate(f"{high}{operations[skill]}{low}"), "plain")
            if "tool_calls" in question:
                arguments = question["tool_calls"][0]["function"]["arguments"]
                assert reply["content"] == calculate(arguments["expression"])
    assert {conversation["skill"] for conversation in CONVERSATIONS} == set(SKILLS) == set(SKILL_WEIGHTS)


def test_style_noise_is_the_share_of_answers_in_another_style():
    def share_bare(noise: float) -> float:
        asked = [ask.format(noun="number") for ask in ASKS["bare"]]
        replies = [
            reply["content"]
            for conversation in supervised_conversations(1, 3000, mix=Mix(noise=dict.fromkeys(ASKED_STYLES, noise)))
            if conversation["skill"] in ("add", "sub", "mul")
            for question, reply in pairwise(conversation["messages"])
            if question["role"] == "user" and question["content"].endswith(tuple(asked))
        ]
        return sum(reply.isdigit() for reply in replies) / len(replies)

    assert share_bare(0.0) == 1.0
    assert share_bare(1.0) == 0.0
    assert 0.6 < share_bare(0.3) < 0.8


def test_the_seed_decides():
    assert supervised_conversations(0, 3000) == CONVERSATIONS
    assert supervised_conversations(1, 100) != CONVERSATIONS[:100]
    assert prompts("add", n=50, seed=3) == prompts("add", n=50, seed=3) != prompts("add", n=50, seed=4)


def test_what_is_held_out_never_changes():
    pairs = [(a, b) for a in range(10, 60) for b in range(a, 60)]
    held_out = [pair for pair in pairs if tasks.Case("add", pair, "", "", "").held_out]
    assert held_out[:4] == [(10, 12), (10, 14), (10, 16), (10, 17)]
    assert 0.15 < len(held_out) / len(pairs) < 0.25


# ---- prompts ----
@pytest.mark.parametrize("skill", SKILLS)
def test_prompts_are_distinct_problems_with_their_answer(skill):
    n = 100 if skill == "mul" else 300
    rows = prompts(skill, "test", n=n)
    assert len(rows) == n
    for row in rows:
        assert row["skill"] == skill and row["style"] == "bare"
        assert is_correct(skill, row["answer"], row["answer"])
        assert [message["role"] for message in row["prompt"]] == ["user"]
        assert ("tools" in row) == (skill == "tool")


@pytest.mark.parametrize("skill", SKILLS)
def test_train_and_test_share_no_problem(skill, monkeypatch):
    drawn = {"train": set(), "test": set()}
    draw = tasks._draw

    def recorded(chosen, rng, *, split):
        case = draw(chosen, rng, split=split)
        drawn[split].add((case.skill, case.operands))
        return case

    monkeypatch.setattr(tasks, "_draw", recorded)
    prompts(skill, "train", n=400)
    prompts(skill, "test", n=150, seed=1)
    supervised_conversations(5, 2000)
    assert len(drawn["test"]) >= 150 and not drawn["train"] & drawn["test"]


def test_the_demo_mix_has_enough_held_out_problems_and_mixes_evenly():
    rows = prompts(["add", "sub"], "test", n=2000)
    assert [row["skill"] for row in rows[:4]] == ["add", "sub", "add", "sub"]
    assert len(problems(rows)) == 2000
    assert not problems(rows) & problems(prompts(["add", "sub"], "train", n=2000))


@pytest.mark.parametrize("style", [*STYLES, "plain"])
def test_a_prompt_asks_for_its_style(style):
    asks = tuple(ask.format(noun="number") for ask in ASKS[style])
    rows = prompts("add", n=50, style=style)
    assert all(row["prompt"][0]["content"].endswith(asks) for row in rows)
    assert len({row["prompt"][0]["content"] for row in rows}) == 50


@pytest.mark.parametrize(
    "arguments",
    [
        {"skill": "poetry"},
        {"skill": []},
        {"split": "dev"},
        {"style": "loud"},
        {"skill": "json", "style": "think"},
        {"skill": "mul", "split": "test", "n": 5000},
    ],
)
def test_prompts_that_cannot_be_are_refused(arguments):
    with raises(DataError):
        prompts(**arguments)


def test_an_addition_prompt_is_at_most_30_tokens_and_calls_parse_back():
    tokenizer = build_tokenizer((render(c["messages"], tools=c["tools"]) for c in CONVERSATIONS), vocab_size=1024)
    for row in prompts("add", "test", n=200):
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]
        assert len(ids) <= 30
    for conversation in CONVERSATIONS:
        for message in conversation["messages"]:
            if "tool_calls" in message:
                reply = render([message]).removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")
                parsed = parse(reply)
                assert parsed.content == "" and [call["function"] for call in parsed.calls] == [
                    call["function"] for call in message["tool_calls"]
                ]
