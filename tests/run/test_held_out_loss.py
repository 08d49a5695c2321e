"""The loss of runs of kind sft and dpo on held-out rows: what it is of, and what is chosen by it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from groupwise.config.run import RunConfig, parse_config
from groupwise.errors import ConfigError, DataError
from groupwise.run.check import check
from groupwise.run.loop import run_loop
from groupwise.store.tracking import read_metrics
from running_jobs import merged
from wording import raises, warns

WORDS = ("abc", "bad", "cab", "dab", "fed", "bee")
ROWS = [{"prompt": f"Spell {w} backwards.", "chosen": w[::-1], "rejected": w, "answer": w[::-1]} for w in WORDS]
LONG = {"prompt": "Spell it.", "chosen": "a b c " * 2000, "rejected": "b", "answer": "a b c " * 2000}
SAYS_A = ["running_jobs:says_a"]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., RunConfig]:
    """`run(kind, ...)`: all rows in each step, evaluated on the same rows; sections are merged into it."""
    for name, rows in (("rows", ROWS), ("long", [LONG]), ("some", [LONG, *ROWS]), ("asked", [{"prompt": "2+2"}])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(kind: str, **sections: Any) -> RunConfig:
        data: dict[str, Any] = {
            "kind": kind,
            "data": {"source": "rows.jsonl"},
            "eval": {"data": {"source": "rows.jsonl"}, "every": 1},
            "rollout": {"prompts_per_step": len(ROWS), "max_tokens": 8},
            "train": {"steps": 3, "learning_rate": 3e-3, "lora": {"rank": 4}},
            "scoring": {"workers": 0},
            "device": "cpu",
            "dtype": "float32",
            "folder": str(tmp_path),
            "output_dir": str(tmp_path / "runs"),
        }
        return parse_config(merged(data, sections))

    return make


def told(run_dir: Path, key: str) -> list[float]:
    return [row[key] for row in read_metrics(run_dir / "metrics.jsonl") if key in row]


@pytest.mark.parametrize(("kind", "loss"), [("sft", "loss/cross_entropy"), ("dpo", "loss/preference")])
def test_it_is_what_is_minimised(run, kind: str, loss: str):
    """On the rows that are trained on it is what the next step begins with."""
    result = run_loop(run(kind))
    held_out, trained = told(result.run_dir, "eval/loss"), told(result.run_dir, loss)
    assert held_out[:-1] == pytest.approx(trained, rel=1e-5) and held_out[-1] < held_out[0]
    assert not result.before and not result.after and not told(result.run_dir, "eval/greedy/reward")
    if kind == "dpo":
        assert held_out[0] == pytest.approx(math.log(2), rel=1e-6)
        accuracy = told(result.run_dir, "eval/accuracy")[2]  # before, the policy is the reference but for rounding
        assert accuracy == pytest.approx(told(result.run_dir, "preference/accuracy")[2])
        assert told(result.run_dir, "eval/margin")[-1] > 0


def test_the_best_version_may_be_that_of_the_least_loss(run):
    """At this rate it soon rises again; the run ends, and its policy is an earlier one."""
    train = {"steps": 12, "learning_rate": 0.1, "schedule": "constant", "warmup_steps": 0}
    result = run_loop(run("sft", eval={"best": "loss", "patience": 1}, train=train))
    losses = told(result.run_dir, "eval/loss")
    assert result.out_of_patience and result.version != result.newest
    assert losses.index(min(losses)) == len(losses) - 2


def test_beside_rewards_both_are_told(run):
    result = run_loop(run("sft", rewards=SAYS_A, eval={"every": 0}))
    assert len(told(result.run_dir, "eval/loss")) == len(told(result.run_dir, "eval/greedy/reward")) == 2
    asked = run(
        "sft", name="asked", rewards=SAYS_A, eval={"data": {"source": "asked.jsonl"}, "every": 0}, train={"steps": 1}
    )
    result = run_loop(asked)
    assert not told(result.run_dir, "eval/loss") and told(result.run_dir, "eval/greedy/reward")


def test_rows_that_are_too_long_are_passed_over(run):
    with warns():
        some = run_loop(run("sft", name="some", eval={"data": {"source": "some.jsonl"}, "every": 0}))
    whole = run_loop(run("sft", eval={"every": 0}))
    assert told(some.run_dir, "eval/loss") == told(whole.run_dir, "eval/loss")
    with raises(DataError, field="eval.data"), warns():
        run_loop(run("sft", name="long", eval={"data": {"source": "long.jsonl"}}))


def test_rows_without_answers_are_refused_where_nothing_else_is_evaluated(run):
    for sections in ({}, {"rewards": SAYS_A, "eval": {"best": "loss"}}):
        with raises(DataError):
            run_loop(run("sft", **merged({"eval": {"data": {"source": "asked.jsonl"}}}, sections)))


@pytest.mark.parametrize(
    ("kind", "sections"),
    [("sft", {"eval": {"best": "greedy"}}), ("grpo", {"rewards": SAYS_A, "eval": {"best": "loss"}})],
)
def test_what_it_cannot_be_chosen_by_is_refused(run, kind: str, sections: dict[str, Any]):
    with raises(ConfigError, field="eval.best", kind="conflict"):
        run(kind, **sections)


def test_check_says_that_rows_are_not_held_out(run):
    report = check(run("dpo"))
    assert len(report.warnings) == 1
