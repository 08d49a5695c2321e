"""What the lint finds in rewards with the usual holes, and that it leaves sound ones alone."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections.abc import Callable
from difflib import SequenceMatcher

import pytest

from groupwise.config.rewards import RewardConfig
from groupwise.errors import LoadError
from groupwise.rewards import probes
from groupwise.rewards.base import load_rewards
from groupwise.rewards.call import RewardFunction
from groupwise.rewards.catalogue import built_in, first_sentence, functions_in
from groupwise.rewards.check import RewardCheckReport, lint, needed_options
from groupwise.rewards.pool import RewardPool
from groupwise.rewards.probes import ROWS, ProbePrompt
from wording import raises


def report_on(function: Callable, *, rows=ROWS, pool=None, **args) -> RewardCheckReport:
    return asyncio.run(lint(RewardFunction(name=function.__name__, function=function, args=args), rows=rows, pool=pool))


def found(report: RewardCheckReport) -> set[tuple[str, str]]:
    return {(each.severity, each.check) for each in report.findings}


def shown_by(report: RewardCheckReport, check: str) -> set[str]:
    return {each.probe for each in report.findings if each.check == check}


def said(completion) -> str:
    return completion[0]["content"]


def in_tag(text: str, tag: str = "answer") -> str:
    inside, closed, _ = text.rpartition(f"<{tag}>")[2].partition(f"</{tag}>")
    return inside.strip() if closed else ""


# ---- rewards with holes ----


def sound(completions, answer):
    return [
        None if gold is None else float(bool(gold) and in_tag(said(c)) == gold)
        for c, gold in zip(completions, answer, strict=True)
    ]


def nothing_is_nothing(completions, answer):
    return [2.0 if in_tag(said(c)) == gold else 0.0 for c, gold in zip(completions, answer, strict=True)]


def needs_an_answer(completions, answer):
    return [float(gold.strip() == in_tag(said(c)) != "") for c, gold in zip(completions, answer, strict=True)]


def occurs(completions, solution):
    return [None if gold is None else float(gold in said(c)) for c, gold in zip(completions, solution, strict=True)]


def likeness(completions, answer):
    return [
        None if g is None else SequenceMatcher(None, said(c)[:200], g).ratio()
        for c, g in zip(completions, answer, strict=True)
    ]


def loose_tags(completions):
    return [
        0.5 * bool(re.search("<reasoning>.*?</reasoning>.*?<answer>.*?</answer>", said(c), re.DOTALL))
        for c in completions
    ]


def any_order(completions):
    return [
        sum(0.125 for tag in ("<think>", "</think>", "<answer>", "</answer>") if tag in said(c)) for c in completions
    ]


def sounds_like_reasoning(completions):
    words = ("therefore", "because", "however", "thus", "since", "first", "finally", "moreover", "consequently")
    return [0.05 * sum(word in in_tag(said(c), "reasoning").lower() for word in words) for c in completions]


def at_least_50_words(completions):
    return [0.2 if len(said(c).split()) >= 50 else -0.2 for c in completions]


def not_too_long(completions):
    return [-0.3 * (len(said(c).split()) > 500) for c in completions]


def silence_over_error(completions, answer):
    return [
        0.5 if not said(c).strip() else float(g is not None and g in said(c))
        for c, g in zip(completions, answer, strict=True)
    ]


@pytest.mark.parametrize(
    ("function", "check", "probe"),
    [
        (nothing_is_nothing, "empty_answer", "empty"),
        (nothing_is_nothing, "no_answer", "right, bare"),
        (needs_an_answer, "no_answer", "right, bare"),
        (occurs, "junk", "every candidate"),
        (occurs, "junk", "prompt copied"),
        (likeness, "junk", "prompt copied"),
        (silence_over_error, "junk", "empty"),
        (not_too_long, "junk", "empty"),
        (loose_tags, "tags", "<reasoning> and nothing inside"),
        (loose_tags, "tags", "<reasoning> twice"),
        (any_order, "tags", "<think> second"),
        (sounds_like_reasoning, "connectors", "<reasoning> of connectors"),
        (at_least_50_words, "length", "100 words"),
    ],
)
def test_a_hole_is_found(function, check, probe):
    report = report_on(function)
    assert report.verdict == "warning"
    assert probe in shown_by(report, check)


def test_a_sound_reward_passes():
    report = report_on(sound)
    assert report.findings == () and report.verdict == "ok" and report.hack == 0.0
    assert len(report.tried) == 3 * (2 * len(probes.answers("x")) + len(probes.junk(ROWS[0])))
    values = {each.probe: each.value for each in report.tried if each.row == 1}
    assert values["right, <answer>"] == values["right, <think><answer>"] == 1.0
    assert values["wrong, <answer>"] == values["right, bare"] == values["empty"] == 0.0


def test_the_hack_score_is_how_far_junk_gets():
    def half(completions, answer):
        return [
            1.0 if g in said(c) and "," not in said(c) else 0.4 if "again" in said(c) else 0.2
            for c, g in zip(completions, answer, strict=True)
        ]

    assert report_on(half, rows=ROWS[:1]).hack == pytest.approx((0.4 - 0.2) / (1.0 - 0.2))
    assert report_on(occurs).hack == 1.0
    assert report_on(loose_tags).hack is None  # right and wrong are the same to it


# ---- the contract ----


def raises_on_nothing(completions):
    return [1 / len(said(c).split()) for c in completions]


def gives_nan(completions):
    return [float("nan") if len(said(c)) > 4000 else len(said(c)) / 4000 for c in completions]


def gives_one(completions):
    return [1.0]


def gives_words(completions):
    return [said(c)[:1] for c in completions]


def always_raises(completions, answer):
    raise KeyError("test_cases")


@pytest.mark.parametrize(
    ("function", "finding", "cause"),
    [
        (raises_on_nothing, ("error", "exception"), "ZeroDivisionError"),
        (gives_nan, ("error", "wrong_type"), "returned nan"),
        (gives_words, ("error", "wrong_type"), "returned '5' (str)"),
        (gives_one, ("error", "group"), "returned 1 values for"),
        (always_raises, ("error", "exception"), "KeyError: 'test_cases'"),
    ],
)
def test_failures_are_errors(function, finding, cause):
    report = report_on(function)
    assert finding in found(report) and report.verdict == "error"
    assert any(cause in each.message for each in report.findings if each.check == finding[1])


def test_an_answer_that_a_reward_is_not_made_for_is_a_note():
    def number(completions, answer):
        return [
            None if g is None else float(in_tag(said(c)) == str(int(g)) if g else 0)
            for c, g in zip(completions, answer, strict=True)
        ]

    report = report_on(number)
    assert found(report) == {("note", "row")} and report.verdict == "ok"
    [note] = report.findings
    assert "'the cat sat on" in note.message and "invalid literal for int" in note.message


def test_everything_the_same_is_an_error():
    assert found(report_on(lambda completions: [0.5] * len(completions))) == {("error", "constant")}
    assert found(report_on(lambda completions: [None] * len(completions))) == {("error", "constant")}
    report = report_on(lambda completions, answer: [float("<answer>" in said(c)) for c in completions])
    assert ("warning", "gold") in found(report)


def test_the_order_of_a_group_matters():
    def by_place(completions):
        return [len(said(c)) + 0.5 * i for i, c in enumerate(completions)]

    def first_of_its_kind(completions):
        texts = [said(c) for c in completions]
        return [float(text not in texts[:i]) * len(text) for i, text in enumerate(texts)]

    assert ("error", "order") in found(report_on(by_place))
    assert ("error", "order") in found(report_on(first_of_its_kind))


def test_a_value_that_depends_on_the_group_is_a_note():
    def above_mean(completions):
        lengths = [len(said(c).split()) for c in completions]
        return [length - sum(lengths) / len(lengths) + length / 1000 for length in lengths]

    report = report_on(above_mean)
    assert ("note", "relative") in found(report) and ("error", "order") not in found(report)


def test_randomness_and_memory():
    def noisy(completions):
        return [len(said(c)) + random.random() for c in completions]

    seen: set[str] = set()

    def only_new(completions):
        values = [float(said(c) not in seen) for c in completions]
        seen.update(map(said, completions))
        return values

    calls = itertools.count()

    def every_50_calls(completions):
        level = next(calls) // 50
        return [len(said(c)) + level for c in completions]

    assert ("error", "repeat") in found(report_on(noisy))
    assert ("error", "repeat") in found(report_on(only_new))
    report = report_on(every_50_calls)
    assert ("error", "state") in found(report) and ("error", "repeat") not in found(report)


def test_arguments_are_left_alone():
    def clears(completions, answer):
        values = [float(g is not None and in_tag(said(c)) == g != "") for c, g in zip(completions, answer, strict=True)]
        answer.clear()
        return values

    report = report_on(clears)
    assert ("error", "arguments") in found(report)
    assert any("'answer'" in each.message for each in report.findings)


def test_slowness():
    def slow(completions):
        if said(completions[0]).startswith("so"):
            time.sleep(0.02)
        return [float(len(said(c))) for c in completions]

    report = report_on(slow)
    assert 0 < report.p95_ms < 1000 and ("warning", "slow") not in found(report)


def test_plain_text_rewards():
    def text_only(completions):
        return [float(len(c.split()) % 5) for c in completions]

    def strings(completions):
        return [float(c.count("e") % 5) for c in completions]

    assert ("warning", "style") in found(report_on(text_only))
    assert ("error", "exception") not in found(report_on(text_only))
    assert strings([""]) == [0.0]


def test_columns_of_a_dataset():
    """The expected answer may have a name of its own, with rows that have it; without, it is a guess."""

    def in_list(completions, allowed, other):
        return [
            None if not a else float(in_tag(said(c)) in a.split("|")) for c, a in zip(completions, allowed, strict=True)
        ]

    row = ProbePrompt(
        prompt="A colour?", gold="red", wrong="fast", columns={"allowed": "red", "other": 1}, gold_columns=("allowed",)
    )
    assert report_on(in_list, rows=[row]).findings == ()
    assert ("error", "exception") not in found(report_on(in_list))

    def tests_pass(completions, test_cases):
        return [float(eval(said(c)) == case["expected"]) for c, case in zip(completions, test_cases, strict=True)]

    report = report_on(tests_pass)
    assert found(report) == {("warning", "column")} and "'test_cases' was made up" in report.findings[0].message


def test_options():
    def with_option(completions, answer, *, tag):
        return [
            None if g is None else float(in_tag(said(c), tag) == g != "")
            for c, g in zip(completions, answer, strict=True)
        ]

    function = RewardFunction(name="x", function=with_option, args={})
    assert needed_options(function) == ["tag"]
    assert needed_options(RewardFunction(name="x", function=with_option, args={"tag": "answer"})) == []
    assert needed_options(RewardFunction(name="x", function=sound, args={})) == []
    assert report_on(with_option, tag="answer").verdict == "ok"


def test_async_rewards():
    async def later(completions, answer):
        await asyncio.sleep(0)
        return sound(completions, answer)

    assert report_on(later).findings == ()


# ---- in a pool ----

LOST = """
import os, time

def hangs(completions):
    time.sleep(60)

def dies(completions):
    if "9999" in completions[0][0]["content"]:
        os._exit(3)
    return [float(len(c[0]["content"])) for c in completions]
"""


@pytest.mark.slow
def test_what_hangs_or_dies_is_killed(tmp_path):
    (tmp_path / "lost.py").write_text(LOST)
    specs = [RewardConfig(function=f"lost:{name}") for name in ("hangs", "dies")]
    functions = load_rewards(specs, folder=tmp_path)
    with RewardPool(specs, folder=tmp_path, timeout_s=0.2) as pool:
        hangs, dies = [asyncio.run(lint(each, rows=ROWS[:1], pool=pool)) for each in functions]
    assert found(hangs) == {("error", "timeout"), ("note", "stopped")} and hangs.hack is None
    assert ("error", "crash") in found(dies) and shown_by(dies, "crash") == {"5000 digits"}
    assert dies.name == "lost:dies" and len(dies.tried) > len(hangs.tried)


# ---- what there is ----


def test_functions_of_a_module(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from groupwise.rewards.text import exact_match, text_of\n"
        "LIMIT = 3\n"
        "def second(completions, answer): 'Twice. As good.'\n"
        "async def first(completions): pass\n"
        "def _hidden(completions): pass\n"
        "def other(texts): pass\n"
        "class Thing: pass\n"
    )
    functions = functions_in("mine", folder=tmp_path)
    assert list(functions) == ["mine:second", "mine:first"]
    assert first_sentence(functions["mine:second"]) == "Twice." and first_sentence(functions["mine:first"]) == ""
    with raises(LoadError):
        functions_in("nothing_here", folder=tmp_path)


def test_the_rewards_of_the_package_are_all_there_and_say_what_they_give():
    listed = dict(built_in())
    assert {"groupwise.rewards.text:exact_match", "groupwise.rewards.math:number_match"} <= set(listed)
    assert all(len(gives) > 10 for gives in listed.values())
    assert len(load_rewards([RewardConfig(function=each) for each in listed])) == len(listed)


CONSTANT = {"groupwise.rewards.length:length_window"}  # until it is given a length


@pytest.mark.parametrize("reference", [reference for reference, _ in built_in() if reference not in CONSTANT])
def test_no_reward_of_the_package_breaks_the_contract(reference):
    [function] = load_rewards([RewardConfig(function=reference)])
    if needed_options(function):
        return  # a model, a judge, a pattern: its own tests call it
    report = asyncio.run(lint(function))
    assert report.verdict != "error", report.findings


# ---- the probes ----


def test_right_and_wrong_answers_differ_in_the_answer_only():
    for row in ROWS:
        right, wrong = probes.answers(row.gold), probes.answers(row.wrong)
        assert all(right[form].replace(row.gold, row.wrong) == wrong[form] for form in right)
        assert [len(word) for word in row.gold.split()] == [len(word) for word in row.wrong.split()]


def test_no_junk_holds_the_answer_but_what_says_so():
    for row in ROWS:
        holding = {name for name, text in probes.junk(row).items() if row.gold in text}
        assert holding <= {"every candidate", "prompt copied"}
    assert any(row.gold in probes.junk(row)["prompt copied"] for row in ROWS)


def test_filler_is_words_about_nothing():
    assert [len(probes.filler(count).split()) for count in (0, 1, 10, 1000)] == [0, 1, 10, 1000]
