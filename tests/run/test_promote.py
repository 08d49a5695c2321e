"""`promote`: which versions of a run become its active one, what becomes of the others, and what a kill changes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from groupwise.config.run import parse_config
from groupwise.errors import AdapterNotFoundError, ConfigError
from groupwise.run.display import LineDisplay
from groupwise.run.loop import RunResult, run_loop
from groupwise.run.stop_request import StopRequest
from groupwise.run.training_run import Evaluations, TrainingRun
from groupwise.store.adapters import AdapterStore
from groupwise.store.locate import find_adapter
from groupwise.types import PolicyVersion
from running_jobs import Dies, Interrupts, config
from wording import raises, wording

HELD_OUT = {
    "source": "groupwise.tasks.starter.tasks:prompts",
    "args": {"skill": ["add"], "style": "bare", "n": 16, "split": "test"},
}
EVAL: dict[str, Any] = {"data": HELD_OUT, "every": 1, "modes": ["greedy", "sampled"]}
STILL = {"steps": 2, "learning_rate": 0.0}  # the policy stays what it was
RUINED = {"steps": 2, "learning_rate": 0.3, "schedule": "constant", "warmup_steps": 0}


def run(tmp_path: Path, *, promote: dict[str, Any], **sections: Any) -> RunResult:
    return run_loop(config(tmp_path, eval=EVAL, promote=promote, **sections))


def store_of(result: RunResult) -> AdapterStore:
    return AdapterStore(result.run_dir / "adapters")


def told(result: RunResult) -> list[str]:
    lines = map(json.loads, (result.run_dir / "health.jsonl").read_text().splitlines())
    return [line["text"] for line in lines if "promoted" in line["text"]]


def test_what_is_as_good_becomes_active_and_what_is_ruined_does_not(tmp_path: Path) -> None:
    good = run(tmp_path / "good", promote={"margin": 0.25, "max_kl": 0.5}, train=STILL)
    assert good.promoted == good.version == store_of(good).active == PolicyVersion("run", 2)
    assert [text.partition(":")[0] for text in told(good)] == ["run@1 is promoted", "run@2 is promoted"]
    against = str(good.run_dir)
    ruined = run(tmp_path / "ruined", promote={"against": against, "max_length_ratio": None}, train=RUINED)
    store = store_of(ruined)
    assert ruined.promoted is None and store.active.is_base and not ruined.version.is_base
    assert f"that of {against}" in str(store.refused(ruined.version))
    assert "promote.margin is 0.02" in told(ruined)[-1] and store.path(ruined.version).is_dir(), "it stays"
    with pytest.raises(AdapterNotFoundError):
        find_adapter(str(ruined.run_dir))
    assert find_adapter(f"{ruined.run_dir}@{ruined.version.number}").version == ruined.version, (
        "by its number it can be had"
    )


@pytest.mark.long
def test_kl_is_measured_against_what_is_active_and_the_start_is_active_first(tmp_path: Path) -> None:
    first = run(tmp_path / "first", promote={"margin": 1.0}, train={"steps": 1, "learning_rate": 1e-2})
    assert first.promoted == PolicyVersion("run", 1)
    options = {"against": "active", "margin": 1.0, "max_length_ratio": None, "mode": "greedy"}
    start = {"adapters": {"start": str(first.run_dir)}, "seed": 3, "train": {"steps": 1, "learning_rate": 1e-2}}
    bounded = run(tmp_path / "bounded", promote={**options, "max_kl": 1e-9}, **start)
    store = store_of(bounded)
    assert bounded.promoted is None and store.active == PolicyVersion("run", 1), "what it started from"
    assert "its KL from run@1 is" in str(store.refused(PolicyVersion("run", 2)))
    assert run(tmp_path / "free", promote=options, **start).promoted == PolicyVersion("run", 2)


@pytest.mark.long
def test_a_run_that_was_killed_promotes_what_the_whole_one_does(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"promote": {"against": "active", "margin": 0.3}, "train": {"steps": 3}, "eval": EVAL}
    whole = run_loop(config(tmp_path / "whole", **sections))
    with pytest.raises(Dies.Now):
        run_loop(config(tmp_path, resume="auto", **sections), display=Dies(3, total=3, stream=io.StringIO()))
    again = run_loop(config(tmp_path, resume="auto", **sections))
    assert again.promoted == whole.promoted and store_of(again).active == store_of(whole).active
    versions = store_of(whole).versions("run")
    assert [store_of(again).refused(v) for v in versions] == [store_of(whole).refused(v) for v in versions]
    assert told(again)[-1] == told(whole)[-1]


def test_all_versions_of_a_run_share_its_error_and_few_prompts_are_told_of_at_once(tmp_path: Path) -> None:
    notes = io.StringIO()
    few = run_loop(
        config(tmp_path / "few", eval=EVAL, promote={"margin": 0.1}, train=STILL),
        display=LineDisplay(2, stream=notes),
    )
    assert few.promoted is None and "warning: promote: with 16 held-out prompts" in notes.getvalue()
    looks = [refused for version in (1, 2) if (refused := store_of(few).refused(PolicyVersion("run", version)))]
    assert len(looks) == 2 and all("confidence 0.975" in each for each in looks), "half of 5 % each"
    assert "look 2 at these prompts" in looks[1]
    assert "or promote.margin 0.206" in looks[0], "1 - 0.025^(1/16)"


@pytest.mark.long
def test_a_version_that_was_promoted_is_measured_by_other_draws_than_chose_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws, evaluation = list[tuple[str, int]](), TrainingRun._evaluation

    async def counted(self: TrainingRun, version: PolicyVersion, *, draw: int = 0) -> Evaluations:
        draws.append((str(version), draw))
        return await evaluation(self, version, draw=draw)

    monkeypatch.setattr(TrainingRun, "_evaluation", counted)
    train = {"steps": 3, "learning_rate": 1e-4}
    found = run(tmp_path / "sampled", promote={"margin": 0.9}, train=train)
    assert found.promoted == PolicyVersion("run", 3)
    first, again = [("base", 0), ("run@1", 0), ("run@2", 0)], [("run@2", 2), ("run@1", 2)]
    assert draws[:5] == [*first, *again] and [draw for _, draw in draws[5:]] == [0, 3, 3]
    draws.clear()
    run(tmp_path / "greedy", promote={"margin": 0.9, "mode": "greedy"}, train=train)
    assert {draw for _, draw in draws} == {0}, "nothing is drawn"


@pytest.mark.long
def test_an_interrupt_leaves_the_last_version_its_part_of_the_error_and_more_steps_have_none(tmp_path: Path) -> None:
    """Only the last version was to be judged; Ctrl-C adds one, and 5 % are halved."""
    stop, notes = StopRequest(), io.StringIO()
    last: dict[str, Any] = {"eval": {**EVAL, "every": 0}, "promote": {"margin": 0.1}, "resume": "auto"}
    first = run_loop(config(tmp_path, train=STILL, **last), display=Interrupts(stop, step=1, total=2), stop=stop)
    assert first.interrupted and first.steps == 1
    again = run_loop(config(tmp_path, train=STILL, **last))
    assert again.run_dir == first.run_dir and again.steps == 2
    refused = [str(store_of(again).refused(PolicyVersion("run", number))) for number in (1, 2)]
    assert all("confidence 0.975)" in each for each in refused) and "look 2 at these prompts" in refused[1]
    more = {**last, "train": {**STILL, "steps": 4}}
    assert run_loop(config(tmp_path, **more), display=LineDisplay(4, stream=notes)).run_dir == again.run_dir
    (warning,) = [line for line in notes.getvalue().splitlines() if "warning: promote" in line]
    wording(warning)


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"eval": None}, "promote"),
        ({"eval": {**EVAL, "modes": ["greedy"]}}, "promote.mode"),
        ({"train": {"lora": None}}, "promote"),
        ({"engine": "vllm", "promote": {"max_kl": 0.1}}, "promote.max_kl"),
    ],
)
def test_what_cannot_be_judged_is_refused(sections: dict[str, Any], field: str) -> None:
    given = {"data": {"source": "p.jsonl"}, "rewards": ["m:f"], "eval": EVAL, "promote": {}, **sections}
    with raises(ConfigError, field=field, kind="conflict"):
        parse_config(given)
