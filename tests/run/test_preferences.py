"""Runs on preference pairs (`kind: dpo`), by themselves and as a stage."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from groupwise.config.run import RunConfig, parse_config
from groupwise.config.stages import stage_config
from groupwise.errors import ConfigError, DataError
from groupwise.run.check import check
from groupwise.run.evaluate import load_evaluations
from groupwise.run.loop import run_loop
from groupwise.store.tracking import read_metrics, read_rollouts
from running_jobs import Dies, DiesAfter, adapter_bytes, from_file, metrics_of
from wording import raises, wording

PAIRS = [
    {"prompt": f"Spell {word} backwards.", "chosen": word[::-1], "rejected": word}
    for word in ("abc", "bad", "cab", "dab", "fed", "bee")
]


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., RunConfig]:
    """`file(...)`: a run in `tmp_path` with its pairs; sections are merged into it."""
    rollout = {"prompts_per_step": 4, "max_tokens": 8}
    return from_file(tmp_path, PAIRS, kind="dpo", rollout=rollout, train={"minibatches": 2})


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run_dir / "metrics.jsonl") if "loss/preference" in row]


def test_what_is_chosen_gains_on_what_is_rejected(file):
    """Nothing is sampled but what evaluates."""
    rewards = ["groupwise.rewards.text:exact_match"]
    evaluated = {"data": {"source": "rows.jsonl", "columns": {"answer": "chosen"}}, "every": 0}
    result = run_loop(file(eval=evaluated, rewards=rewards, train={"steps": 10}))
    rows = steps_of(result.run_dir)
    assert len(rows) == 10 and rows[0]["preference/margin"] < 0.01 < rows[-1]["preference/margin"]
    assert rows[-1]["preference/accuracy"] == 1 and rows[-1]["loss/preference"] < rows[0]["loss/preference"]
    assert all(row["rollout/count"] == 0 and row["train/samples"] == 8 and row["perf/tok_s"] > 0 for row in rows)
    assert result.trained and set(load_evaluations(result.run_dir, 10)) == {"greedy", "sampled"}
    first = read_rollouts(result.run_dir / "rollouts" / "step_000001.jsonl")[0]
    kept = [rollout.completion.text for rollout in first.demonstrations]
    asked = [message.get("content") for message in first.prompt.messages or ()]
    assert {"prompt": asked[-1], "chosen": kept[0], "rejected": kept[1]} in PAIRS


@pytest.mark.long
def test_one_that_dies_goes_on_to_the_same_bytes(file, tmp_path: Path):
    whole = run_loop(file(output_dir=str(tmp_path / "whole")))
    config = file(resume="auto")
    with pytest.raises(Dies.Now):
        run_loop(config, display=Dies(2, total=4, stream=io.StringIO()))
    again = run_loop(config)
    assert adapter_bytes(again.run_dir) == adapter_bytes(whole.run_dir)
    assert metrics_of(again.run_dir) == metrics_of(whole.run_dir)


EXAMPLES = {
    "name": "examples",
    "kind": "sft",
    "data": {"source": "rows.jsonl", "answer_key": "chosen"},
    "train": {"steps": 3, "minibatches": 1},
}
PREFERENCES = {"name": "preferences", "kind": "dpo", "train": {"steps": 3}, "dpo": {"beta": 0.2}}
PROMPTS = {"source": "rows.jsonl", "columns": {"answer": "chosen"}}
REWARDED = {
    "kind": "grpo",
    "data": PROMPTS,
    "rewards": ["running_jobs:says_a"],
    "rollout": {"refill": 1.0},
    "train": {"steps": 2},
}


@pytest.mark.long
def test_as_a_stage_it_is_relative_to_where_it_starts(file, tmp_path: Path):
    """After examples the reference is what they made, which at first tells no pair apart from the policy; a run that
    was killed in the stage has that reference again."""
    stages = [EXAMPLES, {**PREFERENCES, "data": {"source": "rows.jsonl"}}]
    whole = run_loop(file(**REWARDED, stages=stages, output_dir=str(tmp_path / "whole")))
    assert stage_config(file(**REWARDED, stages=stages), 1).dpo.beta == 0.2
    rows = steps_of(whole.run_dir / "stages" / "preferences")
    assert rows[0]["preference/chosen_reward"] == pytest.approx(0, abs=1e-4) and rows[-1]["preference/margin"] > 0
    config = file(**REWARDED, stages=stages, resume="auto")
    for after in (2, 1 + 2):  # in the second step of the first stage, then of the second
        with pytest.raises(Dies.Now):
            run_loop(config, display=DiesAfter(after))
    again = run_loop(config)
    assert adapter_bytes(again.run_dir) == adapter_bytes(whole.run_dir)
    for stage in ("examples", "preferences"):
        assert metrics_of(again.run_dir / "stages" / stage) == metrics_of(whole.run_dir / "stages" / stage)


def test_a_stage_leaves_out_what_follows_what_is_sampled(file):
    ran = {**REWARDED, "data": {**PROMPTS, "curriculum": {"weight": True}}}
    config = file(**ran, stages=[PREFERENCES])
    stage = stage_config(config, 0)
    assert config.data is not None and config.data.curriculum is not None
    assert stage.data is not None and (stage.data.source, stage.data.curriculum) == ("rows.jsonl", None)


def test_the_reference_is_where_it_starts_unless_one_is_named(file):
    assert file().reference == "base"  # the same thing, without a copy
    assert file(adapters={"start": "math"}).reference == "start"
    assert file(adapters={"start": "math"}, algo={"reference": "base"}).reference == "base"
    assert file(algo={"reference": "ema"}).reference == "ema"
    assert parse_config({"data": PROMPTS, "rewards": ["m:f"], "adapters": {"start": "math"}}).reference == "base"


def test_a_pair_that_is_too_long_is_passed_over(file, tmp_path: Path):
    """Another pair takes its place."""
    long = {"prompt": "Spell it.", "chosen": "a", "rejected": "b" * 4096}
    rows = [*PAIRS[:3], long]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.warns(UserWarning, match=r"long\.jsonl:4"):
        result = run_loop(file(data={"source": "long.jsonl"}, rollout={"refill": 1.0}, train={"steps": 1}))
    (row,) = steps_of(result.run_dir)
    assert (row["train/samples"], row["data/too_long"]) == (8, 1)


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"env": {"environment": "m:E"}}, "env"),
        ({"algo": {"kl": "k3", "kl_coeff": 0.1}}, "algo.kl"),
        ({"rollout": {"stream_groups": 1}}, "rollout.stream_groups"),
        ({"rollout": {"reroll": {"max_groups": 1}}}, "rollout.reroll.max_groups"),
        ({"data": {"curriculum": {"weight": True}}}, "data.curriculum"),
        ({"kind": "sft", "data": {"curriculum": {"weight": True}}}, "data.curriculum"),
        ({"data": None}, "data"),
        ({"data": {"answer_key": "chosen"}}, "data.answer_key"),
        ({"dpo": {"beta": 0.0}}, "dpo.beta"),
        ({"dpo": {"loss": "hinge"}}, "dpo.loss"),
        ({"kind": "grpo", "rewards": ["m:f"], "dpo": {"beta": 0.2}}, "dpo"),
        ({"kind": "sft", "dpo": {"beta": 0.2}}, "dpo"),
        ({"eval": {"data": {"source": "rows.jsonl"}, "best": "greedy"}}, "eval.best"),
    ],
)
def test_what_cannot_be_is_refused(file, sections, field):
    with raises(ConfigError, field=field):
        file(**sections)


def test_rows_without_a_pair_are_told_before_anything_is_loaded(file, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1", "answer": "2"}))
    with pytest.raises(DataError, match=r"rows\.jsonl:1.*'chosen'"):
        run_loop(file())
    assert not (tmp_path / "runs").exists()


def test_check_tries_a_step(file):
    report = check(file())
    assert report.trained_step.grad_norm is not None and report.trained_step.grad_norm > 0
    assert report.trained_step.seconds > 0 and report.step.completions == 8 and not report.warnings


def test_pairs_that_prefer_nothing_are_counted_and_teach_nothing(file, tmp_path: Path):
    """People's sets have some; their gradient is 0."""
    same = [{"prompt": f"Spell {word} backwards.", "chosen": word, "rejected": word} for word in ("abc", "bad")]
    (tmp_path / "same.jsonl").write_text("".join(json.dumps(row) + "\n" for row in same))
    config = file(data={"source": "same.jsonl"}, rollout={"prompts_per_step": 2}, train={"steps": 1})
    report = check(config)
    assert report.trained_step.grad_norm is not None and report.trained_step.grad_norm < 1e-6
    (said,) = (each for each in report.warnings if "2 of 2" in each)
    wording(said)


def test_check_says_nothing_of_completions_that_nobody_samples(file):
    """The starter's context is of 512 tokens."""
    assert not check(file(rollout={"max_tokens": 500})).warnings
