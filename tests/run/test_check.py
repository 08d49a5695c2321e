"""How long a run takes, by the step that `groupwise check` tries."""

from __future__ import annotations

import doctest

import pytest

from groupwise.cli import output as shown
from groupwise.config.run import parse_config
from groupwise.model.memory import step_size
from groupwise.run.check import StepPace


def pace(**rollout) -> tuple[StepPace, tuple[float, float]]:
    config = parse_config(
        {
            "data": {"source": "rows.jsonl"},
            "rewards": ["groupwise.rewards.text:exact_match"],
            "rollout": {"prompts_per_step": 32, "group_size": 8, **rollout},
            "train": {"steps": 100, "passes": 2},
        }
    )
    step = step_size(config, prompt_tokens=10, completion_tokens=20, rows=1000)
    found = StepPace.of(config, step, sampled_s=0.5, trained_s=0.1, tokens=4 * 10 + 16 * 20)
    return found, found.of_run(config)


def test_sampling_takes_as_long_as_the_trial_or_in_proportion_to_the_rows():
    found, run = pace()
    assert found.sampling == (0.5, 8.0)  # 256 completions in one wave; the trial has 16
    assert found.training == pytest.approx(0.1 * 2 * (32 * 10 + 256 * 20) / 360)
    assert run == pytest.approx((100 * (0.5 + found.training), 100 * (8.0 + found.training)))


def test_waves_are_one_behind_another_and_a_small_step_takes_less():
    assert pace(batch_rows=64)[0].sampling == (2.0, 8.0)
    assert pace(prompts_per_step=2, group_size=4)[0].sampling == (0.25, 0.25)


def test_durations_are_as_people_say_them():
    assert doctest.testmod(shown).failed == 0
