"""Runs with in-flight weight updates: what of it stands in the rollouts, the metrics and the loss."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupwise.config.run import RunConfig, parse_config
from groupwise.errors import ConfigError
from groupwise.run.assemble import check_in_flight
from groupwise.run.loop import run_loop
from groupwise.store.tracking import read_metrics, read_rollouts
from groupwise.types import Completion
from running_jobs import config
from slow_cases import long_case
from wording import raises

LONG = {"prompts_per_step": 2, "group_size": 4, "max_tokens": 60, "batch_rows": 6, "max_staleness": 3}


def in_flight(tmp_path: Path, **rollout) -> RunConfig:
    """Rows for a group and a half, and completions of up to 60 tokens: some are under way whenever a version comes."""
    rollout = {**LONG, "in_flight_updates": True, **rollout}
    rewards = [{"function": "groupwise.rewards.length:ideal_length", "args": {"ideal": 20, "width": 60}}]
    data = {"source": "groupwise.tasks.starter.tasks:prompts", "args": {"skill": ["add"], "style": "think", "n": 64}}
    train = {"steps": 8, "learning_rate": 1e-3}
    return config(tmp_path, rollout=rollout, train=train, rewards=rewards, data=data)


def completions_of(run_dir: Path, steps: int) -> list[tuple[int, Completion]]:
    return [
        (step, turn.completion)
        for step in range(1, steps + 1)
        for group in read_rollouts(run_dir / "rollouts" / f"step_{step:06d}.jsonl")
        for rollout in group.rollouts
        for turn in rollout.turns
    ]


@pytest.mark.parametrize("cache", ["keep", long_case("recompute")])
def test_every_token_has_the_version_that_drew_it(tmp_path: Path, cache: str):
    result = run_loop(in_flight(tmp_path, in_flight_cache=cache))
    said = completions_of(result.run_dir, 8)
    mixed = [each for _, each in said if each.switches]
    assert mixed and any(0 < at < len(each.token_ids) for each in mixed for at, _ in each.switches)
    lines = [line for line in read_metrics(result.run_dir / "metrics.jsonl") if "rollout/staleness_max" in line]
    assert max(line["rollout/versions_mean"] for line in lines) > 1
    for line in lines:
        assert line["rollout/token_age_mean"] <= line["rollout/staleness_max"] <= 3
        steps = [
            (line["step"] - 1 - version.number, tokens)  # version n was published and synced after step n
            for step, each in said
            if step == line["step"]
            for version, tokens in each.spans
        ]
        assert all(0 <= age <= 3 for age, _ in steps)
        mean = sum(age * tokens for age, tokens in steps) / sum(tokens for _, tokens in steps)
        if line["rollout/groups"] == line["rollout/groups_trained"]:
            assert line["rollout/token_age_mean"] == pytest.approx(mean)


@pytest.mark.slow
def test_tokens_are_fresher_than_without(tmp_path: Path):
    """The same limit on staleness; each group's newest tokens are of a newer version."""

    def age(name: str, **rollout) -> float:
        result = run_loop(in_flight(tmp_path / name, **rollout))
        lines = read_metrics(result.run_dir / "metrics.jsonl")
        return max(line["rollout/staleness_mean"] - line["rollout/token_age_mean"] for line in lines)

    assert age("with") > 0.05 and age("without", in_flight_updates=False) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("rollout", "more", "field"),
    [
        ({"in_flight_updates": True}, {}, "rollout.in_flight_updates"),
        ({"in_flight_cache": "recompute"}, {}, "rollout.in_flight_cache"),
        ({"in_flight_updates": True, "max_staleness": 1}, {"engine": "vllm"}, "rollout.in_flight_cache"),
    ],
)
def test_what_cannot_act_is_refused(rollout: dict, more: dict, field: str):
    settings = {"name": "x", "data": {"source": "p.jsonl"}, "rewards": ["r:exact"], "rollout": rollout, **more}
    with raises(ConfigError, field=field, kind="conflict"):
        parse_config(settings)


def test_an_engine_that_cannot_is_refused(tmp_path: Path):
    with raises(ConfigError, field="rollout.in_flight_updates"):
        check_in_flight(in_flight(tmp_path), object())  # type: ignore[arg-type]
