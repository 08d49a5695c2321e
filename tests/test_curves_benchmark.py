"""benchmarks/curves.py: what is held out is held out, the control keeps the rewards, a killed series goes on."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from groupwise.rewards.call import RewardFunction
from groupwise.types import Completion, FinishReason, Prompt, Rollout, RolloutGroup, Turn
from peers import peer
from test_benchmarks import FOLDER
from wording import raises

peer("reasoning_gym")
peer("textarena")


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The benchmark, imported as a script beside it would."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield import_module("curves")
    for name in ("curves", "ablation"):
        sys.modules.pop(name, None)


def test_held_out_problems_are_neither_trained_on_nor_shown(curves: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(curves, "HELD_OUT_PROBLEMS", 20)
    monkeypatch.setattr(curves, "EXAMPLES", 200)
    few = {"max_numbers": 2, "max_value": 9}  # so few problems that seeds share them
    shown_lcm = curves.LESSONS["taught"].generators
    monkeypatch.setitem(shown_lcm, "lcm", few)
    task = curves.Task(name="lcm", parameters=few)
    shown, trained, others = (
        {row["prompt"] for row in curves.problems("lcm", task.parameters, seed=seed, size=200)}
        for seed in (curves.SHOWN, curves.TRAINING, curves.EVALUATION)
    )
    assert others & trained and others & shown
    with raises(ValueError):
        curves.write_held_out(task, tmp_path)
    task = replace(task, parameters={"max_numbers": 2, "max_value": 40})
    monkeypatch.setitem(shown_lcm, "lcm", task.parameters)
    curves.write_held_out(task, tmp_path)
    rows = [json.loads(line) for line in curves.held_out_file(task, tmp_path).read_text().splitlines()]
    asked = {row["prompt"] for row in rows}
    assert len(asked) == len(rows) == 20
    for seed, size in ((curves.TRAINING, None), (curves.SHOWN, 200)):
        assert asked.isdisjoint(row["prompt"] for row in curves.problems("lcm", task.parameters, seed=seed, size=size))
    assert 1 / 20 <= curves.baseline(task, tmp_path) < 0.5


def test_the_opponent_and_the_shown_games_move_legally(curves: Any) -> None:
    told = "[Player 1] [0 1]\nCurrent Pile:\n  pile 0: 2\nPlayer 1 removes ...\nCurrent Pile:\n  pile 0: 1\n  pile 2: 2"
    assert curves.nim_moves(told) == ["[0 1]", "[2 1]", "[2 2]"]
    results = [
        curves.played(name, parameters, seed, random.Random(seed))
        for lesson in curves.LESSONS.values()
        for name, parameters in lesson.games.items()
        for seed in range(12)
    ]
    nim = [reward for messages, reward in results if "Nim" in messages[0]["content"]]
    assert set(nim) == {-1.0, 1.0}  # none was lost by an invalid move alone
    assert all("nvalid" not in str(messages) for messages, _ in results)


def length(completions: list[Any]) -> list[float]:
    return [float(len(completion)) for completion in completions]


def test_the_control_deals_the_rewards_of_a_group(curves: Any) -> None:
    texts = [letter * size for size, letter in enumerate("abcdef", start=1)]
    said = [Completion(token_ids=(1,), logprobs=(-1.0,), text=t, finish_reason=FinishReason.STOP) for t in texts]
    rollouts = tuple(Rollout(turns=(Turn((1,), each),)) for each in said)
    group = RolloutGroup(prompt=Prompt(id="0", text="?", columns={}), rollouts=rollouts)
    function = RewardFunction(name="length", function=length, args={})
    scored, dealt = (asyncio.run(scorer([function])(group)) for scorer in (curves.Scorer, curves.Dealt))
    honest, random_ = ([each.reward for each in result.rollouts] for result in (scored, dealt))
    assert honest == [1, 2, 3, 4, 5, 6] == sorted(random_) and random_ != honest
    assert [each.completion.text for each in dealt.rollouts] == texts


def options(tmp_path: Path, *, overrides: Sequence[str] = (), only: str = "chain_sum") -> Namespace:
    out, work = tmp_path / "out" / "curves", tmp_path / "work"
    out.parent.mkdir()
    return Namespace(out=out, work=work, only=only, seeds=[0, 1], jobs=1, overrides=list(overrides))


def measured(accuracy: float, error: float = 0.02) -> dict[str, Any]:
    return {"sampled": {"accuracy": accuracy, "accuracy_stderr": error}, "greedy": {"accuracy": accuracy}}


def run(before: float, after: float) -> dict[str, Any]:
    curves = {name: [[0, before], [80, after]] for name in ("accuracy", "reward")}
    return {"of": "x", "cpu_s": 40.0, "before": measured(before), "after": measured(after), **curves}


def test_the_table_the_plot_and_the_verdict_tell_the_file(curves: Any, tmp_path: Path) -> None:
    given = options(tmp_path)
    given.work.mkdir()
    curves.record(given, {"runs": {"chain_sum, seed 0": run(0.1, 0.4)}, "baselines": {"chain_sum": 0.05}})
    curves.record(given, {"runs": {"chain_sum, seed 1": run(0.2, 0.5), "chain_sum, shuffled": run(0.1, 0.0)}})
    results = curves.load(given.out.with_suffix(".json"))
    assert list(results["runs"]) == ["chain_sum, seed 0", "chain_sum, seed 1", "chain_sum, shuffled"]
    (line,) = curves.table(results)[2:]
    assert line.startswith("| chain_sum | taught | 5.0% | 15.0% (10.0% to 20.0%) | 45.0% (40.0% to 50.0%) |")
    assert "10.0% -> 0.0%" in line
    assert curves.verdict(results) == []
    curves.plot(results, given.out.with_suffix(".png"))
    assert given.out.with_suffix(".png").stat().st_size > 10_000
    results["runs"] |= {"chain_sum, seed 1": run(0.4, 0.15), "chain_sum, shuffled": run(0.1, 0.4)}
    mean, error = curves.gain(curves.seeds_of(results, "chain_sum"))
    assert (mean, error) == (pytest.approx(0.025), pytest.approx(0.02))  # four errors of 0.02, over two runs
    wrong = [text.partition(":")[0] for text in curves.verdict(results)]
    assert wrong == ["chain_sum, seeds", "chain_sum, shuffled"]


def test_a_run_is_known_by_its_settings_wherever_it_is_kept(curves: Any) -> None:
    task = curves.TASKS["chain_sum"]
    here, there = (curves.fingerprint(curves.settings(task, seed=0, work=Path(work))) for work in ("/a/b", "/c"))
    assert here == there != curves.fingerprint(curves.settings(task, seed=1, work=Path("/c")))
    assert here != curves.fingerprint(curves.settings(replace(task, learning_rate=1e-3), seed=0, work=Path("/c")))


@pytest.mark.slow
def test_a_series_of_runs_goes_on_where_it_was_killed(curves: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(curves, "HELD_OUT_PROBLEMS", 4)
    small = ["train.steps=1", "rollout.prompts_per_step=2", "rollout.group_size=2"]
    given = options(tmp_path, overrides=small, only="basic_arithmetic")  # of the starter: no lesson
    file = given.out.with_suffix(".json")
    first = Namespace(**{**vars(given), "seeds": [1]})
    curves.run_missing(first)
    before = json.loads(file.read_text())["runs"]
    assert list(before) == ["basic_arithmetic, seed 1"] and before["basic_arithmetic, seed 1"]["cpu_s"] > 0
    curves.run_missing(given)
    after = json.loads(file.read_text())["runs"]
    assert sorted(after) == ["basic_arithmetic, seed 0", "basic_arithmetic, seed 1", "basic_arithmetic, shuffled"]
    assert after["basic_arithmetic, seed 1"] == before["basic_arithmetic, seed 1"]  # not made again
    other = Namespace(**{**vars(given), "seeds": [1], "overrides": [*small, "train.learning_rate=0.001"]})
    curves.run_missing(other)
    assert (
        json.loads(file.read_text())["runs"]["basic_arithmetic, seed 1"]["of"]
        != before["basic_arithmetic, seed 1"]["of"]
    )
