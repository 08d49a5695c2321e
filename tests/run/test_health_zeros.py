"""Zeros are explained once, in one sentence, and by what caused them."""

from __future__ import annotations

import pytest

from groupwise.run.health import HealthMonitor
from groupwise.run.health_zeros import explain_zeros

TRAINED = {
    "rollout/groups": 4.0,
    "rollout/groups_trained": 4.0,
    "rollout/excluded_frac": 0.0,
    "reward/frac_zero_std": 0.25,
    "reward/min": 0.0,
    "reward/max": 1.0,
    "loss/policy": 0.1,
    "optim/grad_norm": 0.3,
}


@pytest.mark.parametrize(
    ("changed", "kind", "says"),
    [
        ({"loss/policy": -3e-9}, "loss is zero", "that is no problem"),
        ({"loss/policy": 0.0, "optim/grad_norm": 0.0}, "gradient is zero", "which is a problem"),
        (
            {"rollout/groups_trained": 0.0, "reward/frac_zero_std": 1.0, "reward/min": 0.5, "reward/max": 0.5},
            "nothing trained",
            "every completion has the reward 0.5",
        ),
        (
            {"rollout/groups_trained": 0.0, "reward/frac_zero_std": 1.0},
            "nothing trained",
            "in each of its groups all rewards are equal",
        ),
        (
            {"rollout/groups_trained": 0.0, "rollout/excluded_frac": 1.0},
            "nothing trained",
            "no completion could be scored",
        ),
        ({"rollout/groups_trained": 0.0, "rollout/groups": 0.0}, "nothing trained", "no group was sampled"),
        ({"reward/frac_zero_std": 1.0}, "rewards equal", "only the other terms of the loss"),
        ({"reward/frac_zero_std": 1.0, "loss/policy": 0.0}, "rewards equal", "reward/std is 0 because"),
    ],
)
def test_each_zero(changed, kind, says):
    metrics = TRAINED | changed
    if metrics["rollout/groups_trained"] == 0:  # a step that trains nothing has no loss
        metrics = {key: value for key, value in metrics.items() if not key.startswith(("loss/", "optim/"))}
    explained = explain_zeros(metrics)
    assert list(explained) == [kind] and says in explained[kind]
    assert explained[kind].count(". ") == 0  # one sentence


@pytest.mark.parametrize(
    "metrics",
    [
        TRAINED,
        TRAINED | {"loss/policy": None},  # NaN, in metrics.jsonl
        {"eval/greedy/reward": 0.0},
        {"loss/cross_entropy": 0.0, "optim/grad_norm": 0.0},  # supervised training
        {},
    ],
)
def test_nothing_to_explain(metrics):
    assert explain_zeros(metrics) == {}


def test_each_is_said_once_where_it_first_happens():
    health = HealthMonitor()
    steps = [
        TRAINED,
        TRAINED | {"loss/policy": 0.0},
        TRAINED | {"loss/policy": 0.0},
        TRAINED | {"optim/grad_norm": 0.0},
    ]
    events = [event for step, metrics in enumerate(steps) for event in health.step(step, metrics)]
    assert [(event.kind, event.step) for event in events] == [("note", 1)]
