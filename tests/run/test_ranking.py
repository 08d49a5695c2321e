"""Which of several runs is best on its held-out prompts, and where that cannot be said."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from groupwise.config.run import parse_config
from groupwise.run.evaluate import Evaluation, paired
from groupwise.run.loop import RunResult
from groupwise.run.ranking import rank
from groupwise.run.sweep import Outcome, SweptRun
from groupwise.types import PolicyVersion, Prompt, Rollout, RolloutGroup
from run_place import group, scored

REWARDS: Any = ["my_rewards:exact"]


def evaluation(values: Sequence[float], *, ids: str = "p", mode: str = "greedy") -> Evaluation:
    groups = [group(scored("4", value), id=f"{ids}:{i}") for i, value in enumerate(values)]
    return Evaluation(mode=mode, version=PolicyVersion("toy", 1), groups=tuple(groups))


def outcome(
    label: str,
    *after: Evaluation,
    rewards: Any = REWARDS,
    counted: Any = (),
    error: Exception | None = None,
    **more: Any,
) -> Outcome:
    """What a run left that evaluates by the rewards `counted`, or else by its own; its plan is looked at for the
    configuration alone."""
    held_out = {"data": {"source": "h.jsonl"}, "rewards": counted, **more}
    given = {"data": {"source": "p.jsonl"}, "eval": held_out, "rewards": rewards}
    config = parse_config(given)
    plan: Any = type("Plan", (), {"config": config})()
    version = PolicyVersion("toy", 1)
    result = RunResult(
        run_dir=Path(label),
        version=version,
        steps=1,
        interrupted=False,
        before={},
        after={each.mode: each for each in after},
        newest=version,
        trained=True,
        loaded_by="AutoModelForCausalLM",
    )
    return Outcome(run=SweptRun(label=label, plan=plan), result=None if error else result, error=error)


def test_the_best_is_tested_against_each_other():
    values = {"a": [0.0, 1.0, 0.0, 1.0], "b": [1.0, 1.0, 1.0, 0.0], "c": [0.0, 0.0, 0.0, 0.0]}
    failed = outcome("d", error=ValueError("it failed"))
    ranking = rank([*(outcome(label, evaluation(each)) for label, each in values.items()), failed])
    assert ranking.best is not None and ranking.best.run.label == "b" and ranking.measure == "greedy/reward"
    assert ranking.against == {label: paired(values["b"], values[label]) for label in ("a", "c")}


def test_the_mode_is_the_one_that_chooses_versions():
    a = outcome("a", evaluation([1.0]), evaluation([0.0], mode="sampled"), best="sampled")
    b = outcome("b", evaluation([0.0]), evaluation([1.0], mode="sampled"), best="sampled")
    ranking = rank([a, b])
    assert ranking.best is b and ranking.measure == "sampled/reward"


def test_what_could_not_be_scored_is_not_the_best():
    nothing = Evaluation(mode="greedy", version=PolicyVersion("toy", 1), groups=(unscored(),))
    ranking = rank([outcome("a", nothing), outcome("b", evaluation([0.0], ids="p"))])
    assert ranking.best is not None and ranking.best.run.label == "b" and ranking.against == {}


def unscored() -> RolloutGroup:
    rollouts: tuple[Rollout, ...] = (scored("4", None),)
    return RolloutGroup(prompt=Prompt(id="p:0", text="2+2?", token_ids=(1,)), rollouts=rollouts)


@pytest.mark.parametrize(
    "second",
    [
        outcome("b"),
        outcome("b", evaluation([1.0, 0.0]), rewards=["my_rewards:other"]),
        outcome("b", evaluation([1.0, 0.0], ids="q")),
        outcome("b", evaluation([1.0, 0.0]), k=2),
    ],
    ids=["not evaluated", "other rewards", "other prompts", "more completions"],
)
def test_runs_that_answer_for_different_things_are_not_ranked(second: Outcome):
    ranking = rank([outcome("a", evaluation([0.0, 1.0])), second])
    assert ranking.best is None and ranking.measure is None and ranking.against == {} and ranking.why


def test_rewards_of_training_may_differ_where_evaluations_count_by_the_same():
    first = outcome("a", evaluation([0.0, 0.0]), rewards=["my_rewards:one"], counted=REWARDS)
    second = outcome("b", evaluation([1.0, 0.0]), rewards=["my_rewards:other"], counted=REWARDS)
    ranking = rank([first, second])
    assert ranking.best is second and ranking.against["a"].difference == 0.5
