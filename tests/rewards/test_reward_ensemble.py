import asyncio
import inspect
import math
import statistics
from pathlib import Path

import pytest

from groupwise.config.rewards import RewardConfig
from groupwise.errors import ConfigError, LoadError, RewardError
from groupwise.rewards.base import load_rewards
from groupwise.rewards.ensemble import ensemble, gated
from wording import raises

MODULE = """
import asyncio, math

def length(completions, *, scale=1.0, log_metric=None):
    if log_metric is not None:
        log_metric("mean", sum(map(len, completions)) / len(completions))
    return [scale * len(each) for each in completions]

async def later(completions):
    await asyncio.sleep(0)
    return [2.0] * len(completions)

def level(completions, level):
    return [float(each) for each in level]

def partly(completions):
    return [None if "none" in each else math.nan if "nan" in each else 4.0 for each in completions]

def broken(completions):
    raise KeyError("no such thing")

def short(completions):
    return [1.0]

def step(completions, trainer_state):
    return [float(trainer_state.global_step)] * len(completions)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, in which `members` is."""
    (tmp_path / "members.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Log(dict[str, float]):
    """What was logged."""

    def __call__(self, name: str, value: float) -> None:
        self[name] = value


def values(texts, *functions, **options):
    return asyncio.run(ensemble(list(texts), functions=list(functions), **options))


def through_gate(texts, function, condition, **options):
    return asyncio.run(gated(list(texts), function=function, condition=condition, **options))


# ---- aggregation ----


def test_the_mean_is_weighted(here):
    two, one = {"function": "members:later", "weight": 3.0}, "members:length"
    assert values(["abcdef", "ab"], two, one) == [(3 * 2 + 6) / 4, 2.0]


@pytest.mark.parametrize(("aggregate", "expected"), [("mean", (1 + 2 + 9) / 3), ("min", 1.0), ("median", 2.0)])
def test_aggregates(here, aggregate, expected):
    functions = ["members:length", "members:later", {"function": "members:length", "args": {"scale": 9.0}}]
    assert values(["a"], *functions, aggregate=aggregate) == [pytest.approx(expected)]


def test_members_get_columns_options_and_the_trainers_state(here):
    from groupwise.rewards.call import TrainerState

    assert values(["a", "b"], "members:level", level=["3", "4"]) == [3.0, 4.0]
    state = TrainerState(global_step=7, max_steps=9)
    assert values(["a"], "members:step", trainer_state=state) == [7.0]
    assert values(["<answer>4</answer>"], "groupwise.rewards.math:number_match", answer=["4"]) == [1.0]


def test_an_empty_group(here):
    assert values([], "members:length", log_metric=Log()) == []


# ---- members that do not apply, and members that fail ----


def test_a_member_that_fails_on_a_completion_is_left_out_there(here):
    members = ["members:length", "members:later", "members:partly"]
    assert values(["xxxxxx", "nan", "none"], *members) == [4.0, 2.5, 3.0]


def test_a_member_that_raises_is_left_out(here):
    assert values(["a", "aaa"], "members:length", "members:later", "members:broken") == [1.5, 2.5]
    assert values(["aa", "aaaa"], "members:length", "members:later", "members:short") == [2.0, 3.0]


def test_too_few_members_are_a_failure_and_not_a_zero(here):
    scores = values(["nan", "aaa"], "members:length", "members:partly")
    assert math.isnan(scores[0]) and scores[1] == 3.5
    assert values(["nan"], "members:length", "members:partly", quorum=1) == [3.0]


def test_too_few_members_that_apply_are_none(here):
    assert values(["none", "aaa"], "members:length", "members:partly") == [None, 3.5]
    assert values(["x"], "groupwise.rewards.text:exact_match", "groupwise.rewards.text:contains", answer=[None]) == [
        None
    ]


def test_where_all_fail_it_says_why(here):
    with raises(RewardError):
        values(["a", "b"], "members:length", "members:broken", quorum=2)
    with raises(RewardError):
        values(["a"], "members:level")


def test_disagreement_and_failures_are_logged(here):
    log = Log()
    functions = ["members:length", "members:later", "members:partly"]
    values(["aaaaaa", "nan", "none"], *functions, log_metric=log)
    spreads = [statistics.pstdev([6, 2, 4]), statistics.pstdev([3, 2]), statistics.pstdev([4, 2])]
    assert log == {
        "disagreement": pytest.approx(statistics.fmean(spreads)),
        "failed": pytest.approx(1 / 9),
        "length/mean": pytest.approx(13 / 3),
    }


def test_order_does_not_matter(here):
    texts = ["xxxxxx", "none", "aa", "a"]
    functions = ["members:length", "members:later", "members:partly"]
    forwards, backwards = values(texts, *functions), values(texts[::-1], *functions[::-1])
    assert forwards == backwards[::-1]


# ---- options ----


@pytest.mark.parametrize(
    "options",
    [
        {"functions": []},
        {"functions": "members:length"},
        {"functions": ["members:length"], "aggregate": "max"},
        {"functions": ["members:length"], "quorum": 2},
        {"functions": [{"function": "members:length", "weight": -1}]},
        {"functions": [{"function": "members:length", "weigth": 1}]},
        {"functions": [{"args": {}}]},
        {"functions": [{"function": "members:length", "args": {"scal": 1}}]},
        {"functions": [{"function": "members:length", "args": {"scale": object()}}]},
        {"functions": ["members:later", {"function": "members:length", "weight": 2}], "aggregate": "min"},
    ],
)
def test_options_that_are_refused(here, options):
    with raises(ConfigError):
        asyncio.run(ensemble(["a"], **options))


def test_a_member_that_is_not_there(here):
    with raises(LoadError):
        values(["a"], "members:lenght")


def test_members_stand_beside_the_configuration_or_are_named_by_a_folder(here, tmp_path_factory, monkeypatch):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "other_members.py").write_text("def f(completions): return [7.0] * len(completions)\n")
    assert values(["a"], "other_members:f", folder=str(elsewhere)) == [7.0]
    with pytest.raises(LoadError):
        values(["a"], "yet_other_members:f")


def test_it_is_a_reward_of_the_contract(here):
    args = {"functions": ["groupwise.rewards.math:number_match", "groupwise.rewards.text:contains"]}
    (reward,) = load_rewards([RewardConfig(function="groupwise.rewards.ensemble:ensemble", args=args)])
    assert reward.missing(["answer"]) == [] and inspect.iscoroutinefunction(reward.function)
    columns = reward.accepted({"completions": ["4", "5"], "answer": ["4", "4"], "level": [1, 1]})
    assert asyncio.run(reward.function(**columns, **reward.args)) == [1.0, 0.0]


# ---- gated ----

RIGHT = {"function": "groupwise.rewards.math:number_match", "args": {"tag": "answer"}}
BRIEF = {"function": "groupwise.rewards.length:ideal_length", "args": {"ideal": 2, "unit": "words"}, "weight": 0.3}


def test_only_what_passes_the_gate_is_rewarded():
    texts = ["so <answer>4</answer>", "so <answer>5</answer>", "so so so so <answer>4</answer>", "so"]
    log = Log()
    scores = through_gate(texts, BRIEF, RIGHT, answer=["4"] * 4, log_metric=log)
    assert scores == [pytest.approx(0.3), 0.0, 0.0, 0.0]
    assert log == {"open": 0.5}
    assert through_gate(texts[:2], BRIEF, RIGHT, answer=["4"] * 2, closed=-1.0) == [pytest.approx(0.3), -1.0]


def test_padding_a_wrong_answer_gains_nothing():
    padded = "word " * 50
    window = {
        "function": "groupwise.rewards.length:length_window",
        "args": {"shortest": 40, "longest": 60, "unit": "words"},
    }
    texts = [padded, f"{padded}<answer>4</answer>", "<answer>4</answer>"]
    assert through_gate(texts, window, RIGHT, answer=["4"] * 3) == [0.0, 1.0, 0.0]


def test_the_threshold_is_compared_with_the_weighted_condition(here):
    length = {"function": "members:length", "weight": 0.5}
    assert through_gate(["aa", "aaaa"], "members:later", length, threshold=2.0) == [0.0, 2.0]


def test_a_gate_that_does_not_apply_or_fails(here):
    scores = through_gate(["none", "nan", "ok"], "members:length", "members:partly")
    assert scores[0] is None and math.isnan(scores[1]) and scores[2] == 2.0
    scores = through_gate(["none", "nan", "ok"], "members:partly", "members:length")
    assert scores[0] is None and math.isnan(scores[1]) and scores[2] == 4.0
    with raises(RewardError):
        through_gate(["a"], "members:length", "members:broken")
