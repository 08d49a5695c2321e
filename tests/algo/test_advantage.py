"""Advantages: the four baselines, GDPO, failed rewards, and groups that teach nothing."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from groupwise.algo.advantage import advantages, differ, gdpo_advantages, weighted_rewards
from groupwise.algo.credit import has_signal, with_advantages
from groupwise.config.algo import AdvantageConfig, RunAlgoConfig
from groupwise.errors import ConfigError
from groupwise.types import Completion, FinishReason, Prompt, Rollout, RolloutGroup, Turn
from wording import raises

KINDS = ("group_std", "mean", "batch_std", "leave_one_out")
GDPO = AdvantageConfig(aggregation="normalize_then_sum")
few = settings(max_examples=50)
rewards = st.lists(st.one_of(st.none(), st.floats(-10, 10)), min_size=1, max_size=8)


def group(*rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup(prompt=Prompt(id="p"), rollouts=rollouts)


def rollout(reward: float | None = None, **named: float | None) -> Rollout:
    completion = Completion(token_ids=(1,), logprobs=(-0.1,), text="x", finish_reason=FinishReason.STOP)
    return Rollout(turns=(Turn((0,), completion),), reward=reward, rewards=named)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("group_std", [0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001]),
        ("mean", [0.75, -0.25, -0.25, -0.25]),
        ("leave_one_out", [1.0, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_one_success_in_four(kind: str, expected: list[float]):
    assert advantages([[1.0, 0.0, 0.0, 0.0]], AdvantageConfig(advantage=kind))[0] == pytest.approx(expected)


def test_the_deviation_is_the_samples_or_with_ddof_0_the_populations():
    """Rewards 1, 0, 0, 0: squares 3/4 in all, so the deviation is sqrt(3/4 / 3) = 1/2, or sqrt(3/4 / 4) = sqrt(3)/4."""
    for ddof, deviation in ((1, 0.5), (0, math.sqrt(3) / 4)):
        got = advantages([[1.0, 0.0, 0.0, 0.0]], AdvantageConfig(advantage_ddof=ddof))[0]
        assert got == pytest.approx([0.75 / (deviation + 1e-4), *[-0.25 / (deviation + 1e-4)] * 3])
    assert advantages([[1.0, 0.0, 0.0, 0.0]], AdvantageConfig()) == advantages(
        [[1, 0, 0, 0]], AdvantageConfig(advantage_ddof=1)
    )


def test_ddof_is_of_the_batch_and_of_every_deviation_of_gdpo():
    rewards = [1.0, 0.0, 10.0, 6.0]
    got = advantages([rewards[:2], rewards[2:]], AdvantageConfig(advantage="batch_std", advantage_ddof=0))
    assert got[1][0] == pytest.approx(2 / (statistics.pstdev(rewards) + 1e-4))
    named = [[{"a": value} for value in rewards[:2]], [{"a": value} for value in rewards[2:]]]
    z = [0.5 / (0.5 + 1e-4), -0.5 / (0.5 + 1e-4), 2 / (2 + 1e-4), -2 / (2 + 1e-4)]  # pstdev of 1, 0 and of 10, 6
    found = gdpo_advantages(named, AdvantageConfig(aggregation="normalize_then_sum", advantage_ddof=0))
    assert [*found[0], *found[1]] == pytest.approx([value / (statistics.pstdev(z) + 1e-4) for value in z])


def test_batch_std_shares_one_scale_over_all_groups():
    groups = [[1.0, 0.0], [10.0, 6.0]]
    scale = statistics.stdev([1.0, 0.0, 10.0, 6.0]) + 1e-4
    got = advantages(groups, AdvantageConfig(advantage="batch_std"))
    assert got[0] == pytest.approx([0.5 / scale, -0.5 / scale])
    assert got[1] == pytest.approx([2 / scale, -2 / scale])


@pytest.mark.parametrize(
    ("spec", "alone"),
    [
        (AdvantageConfig(advantage="batch_std"), False),
        (GDPO, False),
        (AdvantageConfig(), True),
        (AdvantageConfig(advantage="mean"), True),
    ],
    ids=["batch_std", "gdpo", "group_std", "mean"],
)
def test_groups_that_are_left_out_count_in_the_statistics_of_the_batch(spec: AdvantageConfig, alone: bool):
    """Solved and hopeless prompts have equal rewards and are not trained; the batch they are in is the same."""

    def of(values: list[float]) -> RolloutGroup:
        return group(*(rollout(value, exact=value) for value in values))

    trained = [of([1.0, 0.0, 0.0, 3.0]), of([2.0, 5.0])]
    flat = [of([4.0, 4.0, 4.0]), of([0.0, 0.0])]
    whole = with_advantages([*trained, *flat], spec)
    assert with_advantages(trained, spec, beside=flat) == whole[:2]
    assert (with_advantages(trained, spec) == whole[:2]) == alone
    if spec.advantage == "batch_std":
        std = statistics.stdev([1, 0, 0, 3, 2, 5, 4, 4, 4, 0, 0])
        assert whole[1].rollouts[0].advantage == pytest.approx(-1.5 / (std + 1e-4))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("huge", [1e200, -1e101, 1e308])
def test_a_reward_that_no_statistic_can_hold_counts_as_failed(kind: str, huge: float):
    spec = AdvantageConfig(advantage=kind)
    with_huge = advantages([[1.0, huge, 0.0], [2.0, 4.0]], spec)
    assert [a for a in with_huge[0] if a is not None] == advantages([[1.0, 0.0], [2.0, 4.0]], spec)[0]
    assert with_huge[0][1] is None
    assert all(math.isfinite(a) for a in advantages([[1e100, -1e100]], spec)[0] if a is not None)
    assert weighted_rewards([{"a": 1e99, "b": 1.0}, {"a": 1.0, "b": 1.0}], {"a": 1e10}) == [None, 1e10 + 1.0]


@pytest.mark.parametrize("kind", KINDS)
@few
@given(groups=st.lists(rewards, min_size=1, max_size=4))
def test_properties_of_every_kind(kind: str, groups: list[list[float | None]]):
    """Advantages of a group sum to 0, keep the order of the rewards, and exist exactly where a comparison does."""
    for values, result in zip(groups, advantages(groups, AdvantageConfig(advantage=kind)), strict=True):
        scored = [(r, a) for r, a in zip(values, result, strict=True) if r is not None]
        if len(scored) < 2:
            assert result == [None] * len(values)
            continue
        assert [a is None for a in result] == [r is None for r in values]
        assert math.fsum(a for _, a in scored) == pytest.approx(0.0, abs=1e-6)
        assert any(a for _, a in scored) == differ(values)
        for (r1, a1), (r2, a2) in pairwise(scored):
            assert (a1 - a2) * (r1 - r2) >= 0


@pytest.mark.parametrize("kind", KINDS)
@few
@given(values=st.lists(st.integers(-10, 10), min_size=2, max_size=8), shift=st.floats(-100, 100))
def test_a_constant_bonus_changes_nothing(kind: str, values: list[int], shift: float):
    spec = AdvantageConfig(advantage=kind)
    shifted = advantages([[value + shift for value in values]], spec)[0]
    assert shifted == pytest.approx(advantages([values], spec)[0], abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("failed", [None, float("nan"), float("inf")])
def test_a_failed_reward_enters_no_statistic(kind: str, failed: float | None):
    """With and without the failed rollouts the others have the same advantages, in this group and in the batch."""
    spec = AdvantageConfig(advantage=kind)
    with_failed = advantages([[1.0, failed, 0.0, 0.5], [failed, 3.0], [2.0, 4.0]], spec)
    without = advantages([[1.0, 0.0, 0.5], [2.0, 4.0]], spec)
    assert with_failed[0][1] is None
    assert [a for a in with_failed[0] if a is not None] == without[0]
    assert with_failed[1] == [None, None]
    assert with_failed[2] == without[1]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_rewards_give_exact_zeros(kind: str):
    """Also when they are equal only to rounding: 5e-17 divided by 1e-4 must not become a gradient."""
    assert advantages([[0.1 + 0.2, 0.3, 0.3], [1.0, 0.0]], AdvantageConfig(advantage=kind))[0] == [0.0, 0.0, 0.0]


def test_differ():
    assert not differ([0.1 + 0.2, 0.3])
    assert not differ([1e6, 1e6 + 1e-5])
    assert not differ([1.0, None])
    assert not differ([])
    assert differ([0.0, 1e-6])
    assert differ([None, 0.3, 0.31])


@pytest.mark.parametrize("size", [1e-3, 0.7, 2.5, -300.0, 1e5])
@pytest.mark.parametrize("advantage", KINDS)
def test_a_reward_models_rounding_is_no_signal(size: float, advantage: str):
    """Seven rewards that are float32 steps apart, with the default epsilon and with one that hides nothing."""
    steps = [float(np.float32(size)), *(float(np.nextafter(np.float32(size), np.float32(k))) for k in (9e9, -9e9) * 3)]
    assert len(set(steps)) > 1 and not differ(steps)
    for eps in (1e-4, 1e-12):
        acts = {"advantage_eps": eps} if advantage in ("group_std", "batch_std") else {}
        assert advantages([steps], AdvantageConfig(advantage=advantage, **acts)) == [[0.0] * len(steps)]
    assert not has_signal(group(*map(rollout, steps)))
    assert differ([size, size * 1.00001])


def test_what_was_cut_may_have_no_vote():
    """Among answers that are all cut at 0, finished ones gain by being finished, whether right or wrong."""
    cut = Completion(token_ids=(1,), logprobs=(-0.1,), text="x", finish_reason=FinishReason.LENGTH)
    truncated = Rollout(turns=(Turn((0,), cut),), reward=0.0)
    mixed = group(rollout(1.0), rollout(0.5), truncated, truncated)
    trl = RunAlgoConfig(mask_truncated=True, advantage="mean")
    (voted,) = with_advantages([mixed], trl)
    assert [r.advantage for r in voted.rollouts] == [0.625, 0.125, -0.375, -0.375]
    apart = RunAlgoConfig(mask_truncated=True, truncated_votes=False, advantage="mean")
    (silent,) = with_advantages([mixed], apart)
    assert [r.advantage for r in silent.rollouts] == [0.25, -0.25, None, None]
    assert [r.reward for r in silent.rollouts] == [1.0, 0.5, 0.0, 0.0]
    one = group(rollout(1.0), truncated)
    assert has_signal(one, trl) and not has_signal(one, apart)
    turns = RunAlgoConfig(mask_truncated=True, truncated_votes=False, advantage="mean", credit="turn")
    (by_turn,) = with_advantages([mixed], turns)
    assert [r.advantage for r in by_turn.rollouts] == [0.25, -0.25, None, None]
    assert [r.reward for r in by_turn.rollouts] == [1.0, 0.5, 0.0, 0.0]
    with raises(ValidationError):
        RunAlgoConfig(truncated_votes=False)


def test_weighted_sum_over_the_functions_that_apply():
    """`code` is None for the whole group: it does not apply to this prompt."""
    group = [{"math": 1.0, "format": 0.5, "code": None}, {"math": 0.0, "format": 1.0, "code": None}]
    assert weighted_rewards(group) == [1.5, 1.0]
    assert weighted_rewards(group, {"math": 2.0, "format": 0.1}) == pytest.approx([2.05, 0.1])


def test_a_function_that_failed_for_some_makes_those_unscorable():
    """Summing the rest would rank a timeout of `math` like a wrong answer: a failed reward is not a zero."""
    group = [{"math": None, "format": 1.0}, {"math": 1.0, "format": float("nan")}, {"math": 0.0, "format": 1.0}]
    assert weighted_rewards(group) == [None, None, 1.0]
    assert weighted_rewards(group, {"format": 0.0}) == [None, 1.0, 0.0]  # weight 0 is only watched
    assert weighted_rewards([{"math": None}, {"math": None}]) == [None, None]


def test_a_weight_for_no_function_is_refused():
    with raises(ConfigError):
        weighted_rewards([{"math": 1.0}], {"maths": 1.0})


def test_gdpo_by_hand():
    """Two groups, two functions of very different scale: each counts the same until its weight says otherwise."""
    groups = [
        [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 300.0}, {"a": 0.0, "b": 0.0}],
        [{"a": 1.0, "b": 5.0}, {"a": 0.0, "b": 5.0}],
    ]
    std = lambda *x: statistics.stdev(x) + 1e-4  # noqa: E731
    za, zb = [2 / 3 / std(1, 0, 0), -1 / 3 / std(1, 0, 0)], [-100 / std(0, 300, 0), 200 / std(0, 300, 0)]
    half = 0.5 / std(1, 0)
    sums = [za[0] + 2 * zb[0], za[1] + 2 * zb[1], za[1] + 2 * zb[0], half, -half]
    expected = [(s - statistics.mean(sums)) / (statistics.stdev(sums) + 1e-4) for s in sums]
    got = gdpo_advantages(groups, GDPO, weights={"b": 2.0})
    assert [a for group in got for a in group] == pytest.approx(expected)


def test_gdpo_excludes_failed_rollouts():
    groups = [[{"a": 1.0, "b": None}, {"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 1.0}], [{"a": None}]]
    got = gdpo_advantages(groups, GDPO)
    assert got == [[None, *gdpo_advantages([groups[0][1:]], GDPO)[0]], [None]]


def test_with_advantages_keeps_everything_else():
    groups = [group(rollout(1.0), rollout(None), rollout(0.0)), group(rollout(1.0))]
    result = with_advantages(groups, AdvantageConfig(advantage="mean"))
    assert [[r.advantage for r in g.rollouts] for g in result] == [[0.5, None, -0.5], [None]]
    assert [r.reward for r in result[0].rollouts] == [1.0, None, 0.0]
    assert groups[0].rollouts[0].advantage is None
    assert result[0].prompt is groups[0].prompt


def test_with_advantages_reads_named_rewards_for_gdpo():
    rollouts = rollout(1.0, a=1.0, b=0.0), rollout(1.0, a=0.0, b=1.0), rollout(None, a=5.0, b=5.0)
    result = with_advantages([group(*rollouts)], GDPO, weights={"a": 3.0})
    first, second, third = (r.advantage for r in result[0].rollouts)
    assert first is not None and second is not None and third is None
    assert first > 0 and second == pytest.approx(-first)


def test_has_signal():
    assert has_signal(group(rollout(1.0), rollout(0.0)))
    assert not has_signal(group(rollout(1.0), rollout(1.0)))
    assert not has_signal(group(rollout(1.0), rollout(None)))
    # the sums are equal, but the functions disagree: only GDPO can tell the two apart
    mixed = group(rollout(1.0, a=1.0, b=0.0), rollout(1.0, a=0.0, b=1.0))
    assert not has_signal(mixed)
    assert has_signal(mixed, GDPO)
    watched = group(rollout(1.0, a=1.0, b=0.0), rollout(1.0, a=1.0, b=1.0))
    assert has_signal(watched, GDPO) and not has_signal(watched, GDPO, weights={"b": 0.0})
    assert not any(r.advantage for r in with_advantages([watched], GDPO, weights={"b": 0.0})[0].rollouts)


@pytest.mark.parametrize(
    "options",
    [
        {"advantage": "rloo"},
        {"aggregation": "sum"},
        {"advantage_eps": 0.0},
        {"advantage": "mean", "advantage_eps": 1e-6},
        {"advantage_ddof": 2},
        {"advantage_ddof": True},
        {"advantage": "leave_one_out", "advantage_ddof": 0},
        {"advantage": "mean", "aggregation": "normalize_then_sum"},
    ],
)
def test_options_that_cannot_act_are_refused(options: dict):
    with raises(ValidationError):
        AdvantageConfig(**options)
