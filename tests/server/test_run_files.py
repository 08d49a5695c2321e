"""The directory of a run while it is written: whole lines only, each once, and anew when the run was wound back."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest

from groupwise.errors import ConfigError, RequestError
from groupwise.server.run_files import FRESH_S, MetricsFile, RunFiles, open_runs, with_stages
from groupwise.store.tracking import METRICS
from run_place import make_run, write_line
from wording import raises


def age(directory: Path) -> None:
    """As if it had been written to long ago."""
    then = time.time() - 2 * FRESH_S
    for path in directory.glob("*"):
        os.utime(path, (then, then))


# ---- metrics ----
def test_what_comes_is_told_once_and_a_torn_line_when_it_is_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", steps=2)
    file = MetricsFile(run / METRICS)
    first = file.since()
    assert [record["step"] for record in first.records] == [1, 2] and first.anew
    assert file.since(first.next).records == () and not file.since(first.next).anew
    with (run / METRICS).open("a", encoding="utf-8") as torn:
        torn.write('{"step": 3, "time": "2026", "reward/mean": 0.')
    assert file.since(first.next).records == ()
    with (run / METRICS).open("a", encoding="utf-8") as torn:
        torn.write('5}\n{"step": 4, "ti')
    (third,) = file.since(first.next).records
    assert third == {"step": 3, "time": "2026", "reward/mean": 0.5} and file.standing().damaged == 0


def test_a_run_that_was_wound_back_is_told_anew(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", steps=3)
    file = MetricsFile(run / METRICS)
    before = file.since()
    lines = (run / METRICS).read_text().splitlines(keepends=True)
    (run / "new").write_text(lines[0])
    os.replace(run / "new", run / METRICS)
    write_line(run, 2, {"loss": 7.0})
    after = file.since(before.next)
    assert after.anew and [record["step"] for record in after.records] == [1, 2] and file.standing().step == 2
    assert after.records[1]["loss"] == 7.0
    assert not file.since(after.next).anew


def test_a_file_that_is_cut_in_its_place_is_told_anew(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", steps=3)
    file = MetricsFile(run / METRICS)
    before = file.since()
    os.truncate(run / METRICS, 0)
    write_line(run, 1, {"loss": 7.0})
    assert [record["step"] for record in file.since(before.next).records] == [1]
    assert file.since(before.next).anew


def test_what_is_no_line_of_metrics_is_counted_and_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", steps=1)
    with (run / METRICS).open("ab") as file:
        file.write(b'nonsense\n[1]\n{"step": "x", "time": ""}\n{"step": 2}\n\xff\xfe\n')
        file.write(b'{"step": 2, "time": "", "a": "text"}\n{"step": 2, "time": "", "loss": NaN, "b": null}\n')
    metrics = MetricsFile(run / METRICS)
    last = metrics.since().records[-1]
    assert metrics.standing().damaged == 6 and last == {"step": 2, "time": "", "loss": None, "b": None}
    assert RunFiles(run, id="r").detail().notes == ["lines of metrics.jsonl that are no metrics, and are left out: 6"]


@pytest.mark.parametrize("after", ["", "1", "x-1", "-1-1", "1-1-1", "٣-٣"])
def test_what_is_no_cursor_is_refused(tmp_path: Path, after: str) -> None:
    with raises(RequestError, field="after"):
        MetricsFile(make_run(tmp_path / "r") / METRICS).since(after)


def test_training_and_evaluation_of_a_step_are_one_record(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", steps=2, metrics={"loss": 1.0})
    write_line(run, 2, {"held": 0.5})
    assert [set(record) for record in MetricsFile(run / METRICS).by_step()] == [
        {"step", "time", "loss"},
        {"step", "time", "loss", "held"},
    ]


# ---- state ----
def test_the_states_of_a_run(tmp_path: Path) -> None:
    done, half = make_run(tmp_path / "done"), make_run(tmp_path / "half", steps=1)
    begun, empty = make_run(tmp_path / "begun", steps=0), make_run(tmp_path / "empty", steps=0)
    for directory in (done, half, empty):
        age(directory)
    states = {path.name: RunFiles(path, id="r").summary().state for path in (done, half, begun, empty)}
    assert states == {"done": "finished", "half": "stopped", "begun": "running", "empty": "empty"}
    write_line(half, 2)
    assert RunFiles(half, id="r").summary().state == "running"


def test_a_directory_that_is_locked_runs_and_looking_does_not_lock(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", steps=1)
    descriptor = os.open(run / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        age(run)
        files = RunFiles(run, id="r")
        assert files.summary().state == "stopped"
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # what looked has not kept it
        if f":{os.fstat(descriptor).st_ino} " not in Path("/proc/locks").read_text():
            pytest.skip("this kernel does not list its locks")
        assert files.summary().state == "running"
    finally:
        os.close(descriptor)


def test_a_configuration_that_cannot_be_read_costs_only_itself(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r")
    (run / "config.yaml").write_text("a: [1\n")
    detail = RunFiles(run, id="r").detail()
    assert detail.config == {} and detail.steps is None and detail.reward == 0.3
    assert detail.notes and detail.notes[0].startswith("config.yaml cannot be read")
    assert RunFiles(run, id="r").health().last_step == 3


# ---- which runs ----
def test_ids_tell_runs_apart(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / where) for where in ("a/x", "b/x", "b/y")]
    assert list(open_runs(paths)) == ["a~x", "b~x", "b~y"]
    assert list(open_runs(paths[1:])) == ["x", "y"]


def test_the_stages_of_a_run_are_runs_behind_it(tmp_path: Path) -> None:
    run, other = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    first = make_run(run / "stages" / "zero", steps=1)
    make_run(run / "stages" / "examples", steps=2)
    (run / "stages" / "not-begun").mkdir()
    found = with_stages(open_runs([run, other]))
    assert found.keys() == {"a", "a~stages~examples", "a~stages~zero", "b"}
    assert next(iter(found)) == "a" and list(found)[-1] == "b"
    assert all(run.id == id for id, run in found.items())
    assert found["a~stages~examples"].summary().step == 2
    assert found["a~stages~zero"].directory == first
    assert len(with_stages(open_runs([run, first]))) == 3  # one that is named is not there twice


def test_what_is_no_run_is_refused_with_those_that_are_meant(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "one")
    make_run(tmp_path / "runs" / "two", steps=0)
    with raises(ConfigError) as error:
        open_runs([tmp_path / "runs"])
    assert error.value.hint == f"it holds the runs one, two: name them, or all as {tmp_path / 'runs'}/*"
    with raises(ConfigError):
        open_runs([tmp_path / "runs" / "one", tmp_path / "runs" / ".." / "runs" / "one"])
    with raises(ConfigError):
        open_runs([tmp_path / "nothing"])
