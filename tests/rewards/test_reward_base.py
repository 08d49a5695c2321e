import asyncio
import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.config.rewards import RewardConfig
from groupwise.errors import ConfigError, LoadError, RewardError
from groupwise.rewards.base import (
    RewardLog,
    check_columns,
    load_rewards,
    refuse_failed,
    score,
    score_group,
    summarize,
    text_of,
)
from groupwise.rewards.call import FailureKind, RewardFunction, TrainerState
from groupwise.types import Completion, FinishReason, Prompt, Rollout, RolloutGroup, Turn
from wording import raises


def group(*texts: str, id: str = "p/1", chat: bool = True, **columns) -> RolloutGroup:
    messages = ({"role": "user", "content": "2+2?"},)
    prompt = Prompt(id=id, messages=messages if chat else None, text=None if chat else "2+2?", columns=columns)
    rollouts = []
    for text in texts:
        ids = tuple(ord(character) for character in text)
        completion = Completion(token_ids=ids, logprobs=(-1.0,) * len(ids), text=text, finish_reason=FinishReason.STOP)
        rollouts.append(Rollout(turns=(Turn((1,), completion),)))
    return RolloutGroup(prompt=prompt, rollouts=tuple(rollouts))


def reward(function, name: str = "f", weight: float = 1.0, **args) -> RewardFunction:
    return RewardFunction(name=name, function=function, weight=weight, args=args)


def scored(groups, *functions) -> list[RolloutGroup]:
    return asyncio.run(score(groups if isinstance(groups, list) else [groups], functions))


def totals(groups, *functions) -> list[float | None]:
    return [rollout.reward for each in scored(groups, *functions) for rollout in each.rollouts]


def constant(values):
    """A reward that returns `values` for the prompt "bad" and ones for any other."""

    def f(completions, kind):
        return values if kind[0] == "bad" else [1.0] * len(completions)

    return f


# ---- the contract ----


def test_chat_completions_and_columns():
    seen = {}

    def f(completions, **columns):
        seen.update(columns, completions=completions)
        return [len(completion[0]["content"]) for completion in completions]

    assert totals(group("a", "bcd", answer="4", level=None), reward(f)) == [1.0, 3.0]
    assert seen == {
        "completions": [[{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "bcd"}]],
        "prompts": [[{"role": "user", "content": "2+2?"}]] * 2,
        "completion_ids": [[97], [98, 99, 100]],
        "answer": ["4", "4"],
        "level": [None, None],
    }


def test_plain_text_completions_are_strings():
    def f(prompts, completions):
        return [float(prompt == "2+2?") + len(text) for prompt, text in zip(prompts, completions, strict=True)]

    assert totals(group("a", "bc", chat=False), reward(f)) == [2.0, 3.0]


def test_only_what_the_signature_names_is_passed():
    def f(completions, answer, missing="default", *, scale=1.0):
        return [
            scale * float(text_of(c) == a) for c, a in zip(completions, answer, strict=True) if missing == "default"
        ]

    assert totals(group("4", "5", answer="4", other=1), reward(f, scale=3.0)) == [3.0, 0.0]


def test_options_win_over_columns():
    assert totals(group("x", answer="column"), reward(lambda completions, answer: [len(answer)], answer="op")) == [2.0]


def test_async_functions_run_concurrently():
    running, most = 0, 0

    async def f(completions):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return [0.5] * len(completions)

    assert totals([group("a"), group("b"), group("c")], reward(f)) == [0.5, 0.5, 0.5]
    assert most == 3


def test_callable_objects():
    class Scorer:
        def __call__(self, completions):
            return (2,) * len(completions)

    assert totals(group("a"), reward(Scorer())) == [2.0]


def test_the_reward_is_the_weighted_sum():
    length = reward(lambda completions: [len(text_of(c)) for c in completions], "length", 0.5)
    one = reward(lambda completions: [1.0 for _ in completions], "one", -2.0)
    watched = reward(lambda completions: [100.0 for _ in completions], "watched", 0.0)
    (result,) = scored(group("aa", "aaaa"), length, one, watched)
    assert [rollout.reward for rollout in result.rollouts] == [-1.0, 0.0]
    assert result.rollouts[1].rewards == {"length": 4.0, "one": 1.0, "watched": 100.0}
    assert summarize([result]).means == {"length": 3.0, "one": 1.0, "watched": 100.0}


def test_none_does_not_apply():
    first = reward(lambda completions: [1.0, None, None], "first")
    second = reward(lambda completions: [1.0, 1.0, None], "second")
    (result,) = scored(group("a", "b", "c"), first, second)
    assert [rollout.reward for rollout in result.rollouts] == [2.0, 1.0, None]
    assert [rollout.error for rollout in result.rollouts] == [None, None, None]
    assert (summarize([result]).failed, summarize([result]).excluded) == (0, 1)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([True, False], [1.0, 0.0]),
        ([1, 0.5], [1.0, 0.5]),
        ([np.float32(0.5), np.int64(2)], [0.5, 2.0]),
        (np.array([0.25, 1.0]), [0.25, 1.0]),
        ([np.bool_(True), np.array(3)], [1.0, 3.0]),
        ([torch.tensor(0.5), torch.tensor([2])], [0.5, 2.0]),
        (torch.tensor([0.5, 1.5]), [0.5, 1.5]),
    ],
)
def test_numbers_of_other_kinds_are_converted(values, expected):
    (result,) = scored(group("a", "b"), reward(lambda completions: values))
    assert [rollout.reward for rollout in result.rollouts] == expected
    assert all(type(rollout.reward) is float for rollout in result.rollouts)


# ---- failures ----


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (math.nan, "nan (float)"),
        (math.inf, "inf (float)"),
        (np.float64("nan"), "nan"),
        ("1.0", "'1.0' (str)"),
        ([1.0], "[1.0] (list)"),
        (np.array([1.0, 2.0]), "(ndarray)"),
        (torch.tensor([1.0, 2.0]), "(Tensor)"),
        (torch.tensor(math.nan), "(Tensor)"),
        (1e200, "1e+200 (float)"),
        (10**400, "(int)"),
        (1j, "(complex)"),
    ],
)
def test_a_value_that_is_no_number_fails_that_completion_only(value, shown):
    (result,) = scored(group("a", "b", kind="bad"), reward(constant([value, 0.5])))
    failed, fine = result.rollouts
    assert (failed.reward, failed.rewards) == (None, {"f": None})
    assert shown in failed.error and "reward 'f'" in failed.error and "'p/1'" in failed.error
    assert (fine.reward, fine.error) == (0.5, None)


def test_a_weighted_sum_that_nothing_can_be_compared_with_excludes_its_completion():
    (result,) = scored(group("a", "b", kind="bad"), reward(constant([1e90, 1.0]), weight=1e15))
    huge, fine = result.rollouts
    assert huge.reward is None and "weighted sum of the rewards is 1e+105" in huge.error
    assert (fine.reward, fine.error) == (1e15, None)


@pytest.mark.parametrize(
    ("values", "got"),
    [
        ([1.0], "1 values"),
        ([1.0, 1.0, 1.0], "3 values"),
        ([], "0 values"),
        (1.0, "a float"),
        ("ab", "a str"),
        (None, "a NoneType"),
        ({1: 1.0, 2: 2.0}, "a dict"),
        (np.float64(1.0), "a float64"),
        (torch.ones(1), "1 values"),
    ],
)
def test_the_length_must_match_exactly(values, got):
    bad, good = scored([group("a", "b", id="gsm8k/412", kind="bad"), group("c", kind="good")], reward(constant(values)))
    expected = (
        f"reward 'f' returned {got} for 2 completions (prompt 'gsm8k/412'). Return one float per completion, in order."
    )
    assert [(rollout.reward, rollout.error) for rollout in bad.rollouts] == [(None, expected)] * 2
    assert good.rollouts[0].reward == 1.0


def failing(completions, kind):
    if kind[0] == "exit":
        sys.exit("bye")
    if kind[0] == "bad":
        raise KeyError("no such thing")
    return [1.0] * len(completions)


async def failing_later(completions, kind):
    await asyncio.sleep(0)
    return failing(completions, kind)


@pytest.mark.parametrize("function", [failing, failing_later])
def test_an_exception_is_contained_in_its_group(function):
    groups = [group("a", "b", kind="bad"), group("c", kind="good"), group("d", kind="exit")]
    result = scored(groups, reward(function))
    assert [rollout.reward for each in result for rollout in each.rollouts] == [None, None, 1.0, None]
    assert result[0].rollouts[0].error == "reward 'f' failed on prompt 'p/1': KeyError: 'no such thing'"
    assert result[2].rollouts[0].error == "reward 'f' failed on prompt 'p/1': SystemExit: bye"
    report = summarize(result)
    assert (report.completions, report.failed, report.excluded) == (4, 3, 3)
    assert report.first_cause == result[0].rollouts[0].error


@pytest.mark.parametrize(
    ("chat", "function"),
    [
        (True, lambda completions: [float(c.strip() == "4") for c in completions]),
        (True, lambda completions: [float(c["content"] == "4") for c in completions]),
        (False, lambda completions: [float(c[0]["content"] == "4") for c in completions]),
    ],
)
def test_a_function_that_took_completions_for_something_else_is_told_what_they_are(chat, function):
    with raises(RewardError):
        scored(group("4", chat=chat), reward(function))


def test_a_failure_is_not_a_zero_in_the_sum():
    fine = reward(lambda completions: [1.0] * len(completions), "fine")
    groups = [group("a", kind="bad"), group("b", kind="good")]
    assert totals(groups, fine, reward(failing, "broken")) == [None, 2.0]
    assert totals(groups, fine, reward(failing, "watched", 0.0)) == [1.0, 1.0]


def test_a_batch_without_any_reward_stops_with_the_cause():
    with raises(RewardError):
        scored([group("a", "b", kind="bad"), group("c", kind="bad")], reward(failing))


def test_a_batch_to_which_nothing_applies_is_not_a_failure():
    assert totals(group("a"), reward(lambda completions: [None])) == [None]
    assert scored([], reward(failing)) == []


def test_a_rollout_that_failed_before_is_left_out():
    calls = []

    def f(completions):
        calls.append(len(completions))
        return list(range(len(completions)))

    before = group("a", "b", "c")
    broken = Rollout(turns=before.rollouts[1].turns, error="the tool timed out")
    mixed = RolloutGroup(prompt=before.prompt, rollouts=(before.rollouts[0], broken, before.rollouts[2]))
    (result,) = scored(mixed, reward(f))
    assert [rollout.reward for rollout in result.rollouts] == [0.0, None, 1.0]
    assert result.rollouts[1].error == "the tool timed out"
    assert calls == [2]


def test_a_column_that_is_missing():
    function = reward(lambda completions, answer: [1.0] * len(completions), "exact")
    prompts = [group("a", solution=1).prompt]
    with raises(ConfigError):
        check_columns([function], prompts)
    with raises(RewardError):
        scored(group("a", solution=1), function)
    check_columns([function], [group("a", answer=1).prompt])


@settings(max_examples=60)
@given(
    table=st.lists(
        st.tuples(
            st.floats(-4, 4),
            st.lists(st.sampled_from([0.0, 1.0, -2.5, None, math.nan]), min_size=3, max_size=3),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_sums_agree_with_a_naive_reference(table):
    functions = [
        reward(lambda completions, kind, v=tuple(values): constant(list(v))(completions, kind), f"f{i}", weight)
        for i, (weight, values) in enumerate(table)
    ]
    groups = [group("a", "b", "c", kind="bad"), group("d", kind="good")]
    expected = []
    for j in range(3):
        column = [(weight, values[j]) for weight, values in table if weight != 0]
        known = [weight * value for weight, value in column if value is not None]
        expected.append(None if not known or any(math.isnan(value) for value in known) else sum(known))
    if all(weight == 0 for weight, _ in table):
        return
    result = totals(groups, *functions)[:3]
    assert [value is None for value in result] == [value is None for value in expected]
    assert [v for v in result if v is not None] == pytest.approx([v for v in expected if v is not None])


# ---- loading ----


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "reward_module.py").write_text(
        "def good(completions, *, scale=1.0): return [scale] * len(completions)\n"
        "def wild(completions, **kwargs): return [kwargs['scale']] * len(completions)\n"
        "def strange(texts): return texts\n"
    )
    return tmp_path


def test_loading_with_weights_names_and_options(folder):
    specs = [
        RewardConfig(function="reward_module:good", weight=0.5, args={"scale": 3.0}),
        RewardConfig(function="reward_module.good"),
        RewardConfig(function="reward_module:wild", name="good_2", args={"scale": 4}),
        RewardConfig(function="groupwise.rewards.text:exact_match", args={"tag": "answer"}),
    ]
    functions = load_rewards(specs, folder=folder)
    assert [each.name for each in functions] == ["good", "good_3", "good_2", "exact_match"]
    assert totals(group("<answer>4</answer>", answer="4"), *functions) == [1.5 + 1.0 + 4.0 + 1.0]


@pytest.mark.parametrize(
    "specs",
    [
        [RewardConfig(function="reward_module:strange")],
        [RewardConfig(function="reward_module:good", args={"scal": 1})],
        [RewardConfig(function="math:sqrt")],
        [
            RewardConfig(function="reward_module:good", name="a"),
            RewardConfig(function="reward_module:wild", name="a"),
        ],
    ],
)
def test_functions_that_are_refused(folder, specs):
    with raises(ConfigError):
        load_rewards(specs, folder=folder)


def test_a_function_that_is_not_there(folder):
    with raises(LoadError):
        load_rewards([RewardConfig(function="reward_module:god")], folder=folder)


# ---- what a caller gets besides ----


def test_each_function_gets_lists_of_its_own():
    def spoils(completions, answer):
        completions.clear()
        answer.clear()
        return [1.0, 1.0]

    def looks(completions, answer):
        return [float(len(completions) + len(answer))] * 2

    assert totals(group("a", "b", answer=4), reward(spoils, "spoils"), reward(looks, "looks")) == [5.0, 5.0]


def logs(completions, log_metric, trainer_state):
    for completion in completions:
        log_metric("characters", len(text_of(completion)))
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)


def test_what_is_logged_is_averaged_over_each_group_and_then_over_groups():
    log, state = RewardLog(), TrainerState(global_step=1, max_steps=4)
    groups = [group("aaaa", "bb"), group("c")]
    result = asyncio.run(score(groups, [reward(logs)], log=log, state=state))
    assert [rollout.rewards for each in result for rollout in each.rollouts] == [{"f": 0.25}] * 3
    assert log.logged == {("f", "characters"): [3.0, 1.0]}
    assert log.metrics() == {"reward/f/failed": 0.0, "reward/f/log/characters": 2.0}
    check_columns([reward(logs)], [groups[0].prompt])  # what is no column is not missed


def test_extras_are_not_among_columns():
    seen = {}
    totals(group("a"), reward(lambda completions, **columns: seen.update(columns) or [1.0]))
    assert set(seen) == {"prompts", "completion_ids"}


@pytest.mark.parametrize(("name", "value"), [("x", math.nan), ("x", "many"), (3, 1.0)])
def test_what_cannot_be_logged_is_the_functions_failure(name, value):
    def f(completions, log_metric):
        log_metric(name, value)
        return [1.0]

    log = RewardLog()
    failed = asyncio.run(score_group(group("a"), [reward(f)], log=log))
    assert failed.rollouts[0].reward is None
    assert log.failures == {"f": {FailureKind.EXCEPTION: 1}}


def test_failures_are_counted_by_kind():
    log = RewardLog()
    groups = [group("a", "b", kind="bad"), group("c", kind="good"), group("d", kind="exit")]
    functions = [
        reward(failing, "raises"),
        reward(constant([math.nan, "x"]), "wrong"),
        reward(constant([]), "fine", 0.0),
    ]
    asyncio.run(score(groups, functions, log=log))
    assert log.failures == {
        "raises": {FailureKind.EXCEPTION: 3},
        "wrong": {FailureKind.WRONG_TYPE: 2},
        "fine": {FailureKind.WRONG_TYPE: 2},
    }
    assert log.metrics()["reward/raises/failed/exception"] == 3.0


def test_one_group_is_scored_without_raising():
    result = asyncio.run(score_group(group("a", kind="bad"), [reward(failing)]))
    assert "KeyError" in (result.rollouts[0].error or "")
    with raises(RewardError):
        refuse_failed([result])


def test_ctrl_c_is_not_a_failure():
    def f(completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scored(group("a"), reward(f))


def test_being_cancelled_is_not_a_failure_and_cancelling_oneself_is():
    async def waits(completions):
        await asyncio.sleep(60)

    async def gives_up(completions):
        raise asyncio.CancelledError("enough")

    async def cancel_while_it_waits() -> bool:
        task = asyncio.create_task(score_group(group("a"), [reward(waits)]))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(cancel_while_it_waits())
    result = asyncio.run(score_group(group("a"), [reward(gives_up)]))
    assert "CancelledError: enough" in (result.rollouts[0].error or "")


def test_a_message_without_end_is_cut():
    def f(completions):
        raise ValueError("x" * 10**6)

    result = asyncio.run(score_group(group("a"), [reward(f)]))
    assert len(result.rollouts[0].error or "") < 2000


def test_a_reward_that_loads_others_looks_beside_the_configuration_too(tmp_path) -> None:
    (tmp_path / "beside_it.py").write_text("def long(completions):\n    return [float(len(c)) for c in completions]\n")
    spec = RewardConfig(function="groupwise.rewards.ensemble:ensemble", args={"functions": ["beside_it:long"]})
    (function,) = load_rewards([spec], folder=tmp_path)
    assert function.args["folder"] == str(tmp_path)
    (given,) = load_rewards([RewardConfig(function=spec.function, args={**spec.args, "folder": "/x"})], folder=tmp_path)
    assert given.args["folder"] == "/x"
