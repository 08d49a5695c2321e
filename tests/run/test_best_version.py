"""`eval.best`: what is reported of the version that its evaluation chose."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from groupwise.run.display import LineDisplay
from groupwise.run.evaluate import load_evaluations
from groupwise.run.loop import RunResult, run_loop
from running_jobs import config

HELD_OUT = {
    "source": "groupwise.tasks.starter.tasks:prompts",
    "args": {"skill": ["add"], "style": "bare", "n": 12, "split": "test"},
}
SAMPLED: dict[str, Any] = {"data": HELD_OUT, "every": 1, "modes": ["sampled"], "best": "sampled"}


def run(tmp_path: Path, notes: io.StringIO, steps: int = 3, **evaluation: Any) -> RunResult:
    train = {"steps": steps, "learning_rate": 1e-3}
    settings = config(tmp_path, eval={**SAMPLED, **evaluation}, train=train)
    return run_loop(settings, display=LineDisplay(steps, stream=notes))


def said(result: RunResult, step: int, *, again: bool = False) -> list[str]:
    (evaluation,) = load_evaluations(result.run_dir, step, again=again).values()
    return [rollout.completion.text for group in evaluation.groups for rollout in group.rollouts]


def test_the_chosen_version_is_evaluated_again_by_other_seeds_and_that_is_reported(tmp_path: Path) -> None:
    notes = io.StringIO()
    result = run(tmp_path, notes)
    step = 0 if result.version.is_base else result.version.number
    again = said(result, step, again=True)
    reported = [r.completion.text for group in result.after["sampled"].groups for r in group.rollouts]
    assert reported == again != said(result, step), "the same version, other draws"
    assert result.after["sampled"].version == result.version
    assert f"{result.version} was the best of 4; evaluated again, by other seeds: sampled" in notes.getvalue()


def test_what_was_not_chosen_among_several_is_evaluated_once(tmp_path: Path) -> None:
    for name, evaluation in (("last", {"best": None}), ("ends", {"best": None, "every": 0})):
        notes = io.StringIO()
        result = run(tmp_path / name, notes, steps=1, **evaluation)
        assert "evaluated again" not in notes.getvalue()
        assert not load_evaluations(result.run_dir, result.steps, again=True)


def test_where_all_parameters_are_trained_the_last_is_kept_and_reported(tmp_path: Path) -> None:
    """There are no other weights: what the result says is of the model that was saved."""
    notes = io.StringIO()
    train = {"steps": 2, "learning_rate": 0.1, "warmup_steps": 0, "lora": None}
    settings = config(tmp_path, eval=SAMPLED, train=train, dtype="float32")
    result = run_loop(settings, display=LineDisplay(2, stream=notes))
    before, after = (evaluations["sampled"] for evaluations in (result.before, result.after))
    assert before.mean() > after.mean(), "a rate that spoils the policy: the best is the one before"
    assert result.version == result.newest == after.version and not result.version.is_base
    assert "base was the best, and" in notes.getvalue() and "evaluated again" not in notes.getvalue()
