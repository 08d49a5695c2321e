"""The KL outside of the loss: the penalty is r - beta K where that means something; the controller keeps its target."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
import torch

from groupwise.algo.credit import with_advantages
from groupwise.algo.kl import AdaptiveKL, kl_metrics, measured_rows, sequence_kl, with_kl_penalty
from groupwise.algo.loss import policy_loss, resolve_loss
from groupwise.algo.loss_inputs import LossInputs
from groupwise.config.algo import AdvantageConfig
from groupwise.errors import ConfigError
from groupwise.types import Completion, FinishReason, Prompt, Rollout, RolloutGroup, Sample, Turn
from wording import raises


def rollout(reward: float | None, *, turns: int = 1) -> Rollout:
    completion = Completion(token_ids=(1,), logprobs=(-1.0,), text="", finish_reason=FinishReason.STOP)
    return Rollout(turns=(Turn((1,), completion),) * turns, reward=reward)


def group(*rewards: float | None, turns: int = 1) -> RolloutGroup:
    return RolloutGroup(prompt=Prompt(id="p"), rollouts=tuple(rollout(r, turns=turns) for r in rewards))


def advantages_of(groups: list[RolloutGroup]) -> list[list[float | None]]:
    return [[r.advantage for r in group.rollouts] for group in groups]


def sample(n: int, *, prompt: int = 1, behaviour: float | None = -1.0, trained: int = 1) -> Sample:
    logprobs = None if behaviour is None else (behaviour,) * n
    return Sample(prompt_ids=(prompt,), completion_ids=(3,) * n, mask=(trained,) * n, behaviour_logprobs=logprobs)


# ---- in the reward ----


def test_sequence_kl_is_over_trained_finite_tokens():
    row = Sample(
        prompt_ids=(1,), completion_ids=(5, 6, 7, 8), mask=(1, 0, 1, 1), behaviour_logprobs=(-1.0, -9.0, math.nan, -2.0)
    )
    assert sequence_kl(row, (-1.5, -1.0, -1.0, -1.0)) == 0.5 - 1.0
    with raises(ConfigError):
        sequence_kl(replace(row, behaviour_logprobs=None), (0.0,) * 4)


@pytest.mark.parametrize("kind", ["mean", "leave_one_out"])
def test_the_penalty_is_a_part_of_the_reward(kind: str):
    """r - beta K before the advantages, to rounding, also where a rollout could not be scored."""
    draw, spec, beta = random.Random(0), AdvantageConfig(advantage=kind), 0.3
    rewards = [[draw.random() for _ in range(4)] for _ in range(3)]
    rewards[1][2] = None
    kls = [[draw.gauss(0, 2) for _ in range(4)] for _ in range(3)]
    got = with_kl_penalty(
        with_advantages([group(*row) for row in rewards], spec),
        [k for r, row in zip(rewards, kls, strict=True) for x, k in zip(r, row, strict=True) if x is not None],
        spec,
        coeff=beta,
    )
    shaped = [
        group(*(None if x is None else x - beta * k for x, k in zip(r, row, strict=True)))
        for r, row in zip(rewards, kls, strict=True)
    ]
    for mine, expected in zip(advantages_of(got), advantages_of(with_advantages(shaped, spec)), strict=True):
        assert mine == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kind", ["group_std", "batch_std"])
def test_where_rewards_are_equal_the_penalty_keeps_its_size(kind: str):
    """r - beta K before a division by the group's spread would make advantages of about 1 of it, whatever beta."""
    spec = AdvantageConfig(advantage=kind)
    groups = with_advantages([group(1.0, 1.0), group(0.0, 1.0)], spec)
    (flat, other) = advantages_of(with_kl_penalty(groups, [0.2, 0.0, 0.0, 0.0], spec, coeff=0.01))
    assert flat == pytest.approx([-0.001, 0.001])
    assert other == advantages_of(groups)[1]
    shaped = with_advantages([group(1.0 - 0.01 * 0.2, 1.0)], AdvantageConfig())
    assert abs(advantages_of(shaped)[0][0] or 0.0) > 0.5


def test_a_rollouts_kl_is_that_of_all_its_turns():
    spec = AdvantageConfig(advantage="mean")
    groups = with_advantages([group(0.0, 0.0, turns=2)], spec)
    assert advantages_of(with_kl_penalty(groups, [1.0, 2.0, 0.0, 1.0], spec, coeff=1.0)) == [[-1.0, 1.0]]


def test_groups_without_advantages_are_left_alone():
    spec = AdvantageConfig()
    groups = with_advantages([group(None, 1.0), group(1.0, 0.0)], spec)
    assert advantages_of(with_kl_penalty(groups, [1.0, 1.0], spec, coeff=1.0)) == advantages_of(groups)
    with raises(ValueError):
        with_kl_penalty(groups, [1.0, 1.0, 1.0], spec, coeff=1.0)


# ---- measured ----


def test_measured_is_what_the_loss_reports():
    """`kl/mean` and `kl/max` of the loss, where the policy is the one that sampled; k3 whichever the loss has."""
    g = torch.Generator().manual_seed(0)
    policy, reference = (-3 * torch.rand(6, generator=g, dtype=torch.float64) for _ in range(2))
    reference[5] = policy[5] + 30  # the one side where exp is not limited
    inputs = LossInputs(
        row_N=torch.zeros(6, dtype=torch.long),
        num_rows=1,
        advantages_N=torch.zeros(6),
        behaviour_N=policy,
        reference_N=reference,
        total_tokens=6.0,
        total_rows=1.0,
    )
    row = Sample(prompt_ids=(1,), completion_ids=(2,) * 6, mask=(1,) * 6, behaviour_logprobs=tuple(map(float, policy)))
    measured = kl_metrics([row], [tuple(map(float, reference))])
    assert measured["kl/tokens"] == 6
    for kl in ("k1", "k2", "k3", "k3_unbiased"):
        _, metrics = policy_loss(policy, inputs, resolve_loss("grpo", kl=kl))
        for key in ("kl/mean", "kl/max"):
            assert measured[key] == pytest.approx(float(metrics[key]), rel=1e-12)
    assert kl_metrics([sample(3, trained=0)], [(0.0,) * 3]) == {}


def test_measured_rows_take_turns_and_have_a_limit():
    samples = [*(sample(10, prompt=1) for _ in range(4)), *(sample(5, prompt=2) for _ in range(4))]
    assert measured_rows(samples, turn=0, max_tokens=25) == samples[:2]
    assert measured_rows(samples, turn=1, max_tokens=25) == samples[4:]
    assert measured_rows(samples, turn=2, max_tokens=1) == samples[:1]
    assert measured_rows(samples, turn=3) == samples[4:5]  # a tenth of 60
    unfit = [sample(5, behaviour=None), sample(5, trained=0)]
    assert measured_rows([*unfit, *samples], turn=0, max_tokens=10) == samples[:1]
    assert measured_rows(unfit, turn=0) == []


# ---- the adaptive coefficient ----


def test_the_controller_by_hand():
    """The gain of 0.1 of the paper is a horizon of 10."""
    kl = AdaptiveKL(coeff=0.1, target=0.05, horizon=10)
    assert kl.update(0.055) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert kl.update(0.05) == pytest.approx(0.101)
    assert kl.update(50.0) == pytest.approx(0.101 * 1.02)
    assert kl.update(-50.0) == pytest.approx(0.101 * 1.02 * 0.98)
    for bad in (math.nan, math.inf):
        assert kl.update(bad) == pytest.approx(0.101 * 1.02 * 0.98)


@pytest.mark.parametrize("start", [1e-3, 10.0])
def test_the_controller_finds_the_coefficient_that_has_the_target(start: float):
    """A policy whose KL is 0.02 / coeff has the target 0.1 at coeff 0.2."""
    kl = AdaptiveKL(coeff=start, target=0.1, horizon=5)
    for _ in range(400):
        kl.update(0.02 / kl.coeff)
    assert kl.coeff == pytest.approx(0.2, rel=1e-3)


def test_the_controller_stays_positive_and_finite():
    """A loss refuses a coefficient of 0."""
    for observed in (0.0, 1e9):
        kl = AdaptiveKL(coeff=0.1, target=0.1, horizon=1)
        for _ in range(5000):
            kl.update(observed)
        assert replace(resolve_loss("grpo", kl="k3"), kl_coeff=kl.coeff).kl_coeff == kl.coeff


def test_the_controller_resumes():
    first, second = (AdaptiveKL(coeff=0.1, target=0.05) for _ in range(2))
    first.update(1.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.update(0.01) == first.update(0.01)


@pytest.mark.parametrize(
    "values",
    [
        {"target": 0.0},
        {"coeff": -1.0},
        {"horizon": 0.5},
        {"coeff": math.nan},
    ],
)
def test_the_controllers_numbers_are_checked(values: dict):
    with raises(ConfigError):
        AdaptiveKL(**{"coeff": 0.1, "target": 0.1} | values)
