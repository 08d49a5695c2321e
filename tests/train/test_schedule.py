"""Learning rates: transformers' where the two have the same schedule, and what is ours alone by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from groupwise.errors import ConfigError
from groupwise.train.schedule import learning_rate_at
from wording import raises

STEPS, WARMUP, PEAK = 40, 8, 2e-4


def theirs(make, *arguments, **options) -> list[float]:
    """The rates of steps 0 to STEPS of one of transformers' schedules."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler, rates = make(optimizer, *arguments, **options), []
    for _ in range(STEPS + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        ({"schedule": "constant"}, lambda: theirs(get_constant_schedule_with_warmup, WARMUP)),
        ({"schedule": "linear"}, lambda: theirs(get_linear_schedule_with_warmup, WARMUP, STEPS)),
        ({"schedule": "cosine"}, lambda: theirs(get_cosine_schedule_with_warmup, WARMUP, STEPS)),
        (
            {"schedule": "cosine", "final_rate": 0.1},
            lambda: theirs(get_cosine_with_min_lr_schedule_with_warmup, WARMUP, STEPS, min_lr_rate=0.1),
        ),
        (
            {"schedule": "wsd", "decay_steps": 12},
            lambda: theirs(get_wsd_schedule, WARMUP, 12, STEPS, decay_type="linear"),
        ),
        (
            {"schedule": "wsd", "decay_steps": 12, "final_rate": 0.25},
            lambda: theirs(get_wsd_schedule, WARMUP, 12, STEPS, decay_type="linear", min_lr_ratio=0.25),
        ),
    ],
)
def test_the_rates_of_transformers(ours: dict, expected):
    """From the first step, at rate 0, to just after the last."""
    rates = [learning_rate_at(step, peak=PEAK, steps=STEPS, warmup_steps=WARMUP, **ours) for step in range(STEPS + 1)]
    assert rates == pytest.approx(expected(), rel=1e-12, abs=1e-18)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedule": "constant"}, [0, 0.5, 1, 1, 1, 1]),
        ({"schedule": "linear"}, [0, 0.5, 1, 0.75, 0.5, 0.25]),
        ({"schedule": "linear", "final_rate": 0.5}, [0, 0.5, 1, 0.875, 0.75, 0.625]),
        ({"schedule": "cosine"}, [0, 0.5, 1, None, 0.5, None]),
        ({"schedule": "wsd", "decay_steps": 2}, [0, 0.5, 1, 1, 1, 0.5]),
        ({"schedule": "wsd"}, [0, 0.5, 1, 1, 1, 1]),  # a fifth of 6 steps is one: it falls after the last
        ({"schedule": "wsd", "decay_steps": 6}, [0, 0.5, 1, 0.75, 0.5, 0.25]),  # never before the warm-up is over
    ],
)
def test_by_hand(options: dict, expected: list[float | None]):
    rates = [learning_rate_at(step, peak=1.0, warmup_steps=2, steps=6, **options) for step in range(6)]
    assert all(want is None or rate == pytest.approx(want) for rate, want in zip(rates, expected, strict=True))
    assert all(later <= earlier for earlier, later in pairwise(rates[2:]))


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_edges(schedule: str):
    """One step; steps beyond the last; a warm-up as long as the run; a peak of 0."""
    assert learning_rate_at(0, peak=1.0, steps=1, schedule=schedule) == 1.0
    last = 1.0 if schedule == "constant" else 0.5
    assert learning_rate_at(50, peak=1.0, steps=10, schedule=schedule, final_rate=0.5) == last
    assert learning_rate_at(9, peak=1.0, steps=10, schedule=schedule, warmup_steps=10) == 0.9
    assert learning_rate_at(3, peak=0.0, steps=10, schedule=schedule) == 0.0


def test_an_unknown_schedule():
    with raises(ConfigError):
        learning_rate_at(0, peak=1.0, steps=1, schedule="exponential")
