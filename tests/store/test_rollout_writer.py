"""A long step's rollouts are written by another process: the same bytes, and nothing is lost with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from groupwise.errors import StorageError
from groupwise.store.rollout_writer import RolloutWriter, write_rollouts
from groupwise.types import RolloutGroup
from run_place import group, scored


@pytest.fixture
def writer() -> Iterator[RolloutWriter]:
    writer = RolloutWriter(apart=4)
    yield writer
    writer.close()


def long_step(*, of: str = "4", odd: Any = None) -> list[RolloutGroup]:
    groups = [group(scored(of, 1.0), scored("é 5", None), id=f"p:{number}") for number in range(4)]
    return [replace(each, prompt=replace(each.prompt, columns={"odd": odd})) for each in groups]


def plainly(path: Path, groups: list[RolloutGroup]) -> bytes:
    write_rollouts(path.with_name("plain.jsonl"), groups)
    return path.with_name("plain.jsonl").read_bytes()


def test_a_process_writes_the_same_bytes_one_step_after_another(writer: RolloutWriter, tmp_path: Path):
    paths = [tmp_path / f"step_{number}.jsonl" for number in range(3)]
    for number, path in enumerate(paths):
        writer.write(path, long_step(of=str(number)))
        assert writer.pid not in (None, os.getpid())
        assert all(before.exists() for before in paths[:number])  # the one before is there
    writer.settle()
    for number, path in enumerate(paths):
        assert path.read_bytes() == plainly(path, long_step(of=str(number)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain.jsonl", *(path.name for path in paths)]


def test_a_short_step_needs_no_process(tmp_path: Path):
    writer, path = RolloutWriter(), tmp_path / "step.jsonl"
    writer.write(path, long_step())
    assert writer.pid is None and path.read_bytes() == plainly(path, long_step())
    writer.close()


@pytest.mark.parametrize("when", ["before", "stopped in the midst"])
def test_a_process_that_dies_loses_nothing_and_is_said(writer: RolloutWriter, tmp_path: Path, caplog: Any, when: str):
    writer.write(tmp_path / "first.jsonl", long_step())
    writer.settle()
    pid = writer.pid
    assert pid is not None
    if when == "before":
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        writer.write(tmp_path / "second.jsonl", long_step(of="2"))
    else:
        os.kill(pid, signal.SIGSTOP)
        writer.write(tmp_path / "second.jsonl", long_step(of="2"))
        os.kill(pid, signal.SIGKILL)
    writer.settle()
    writer.write(tmp_path / "third.jsonl", long_step(of="3"))
    for name, of in (("first", "4"), ("second", "2"), ("third", "3")):
        path = tmp_path / f"{name}.jsonl"
        assert path.read_bytes() == plainly(path, long_step(of=of))
    assert writer.pid is None and len(caplog.records) == 1 and caplog.records[0].levelname == "WARNING"


def test_what_cannot_be_written_is_an_error_at_the_latest_when_it_is_waited_for(
    writer: RolloutWriter, tmp_path: Path, caplog: Any
):
    (tmp_path / "step.jsonl").mkdir()
    writer.write(tmp_path / "step.jsonl", long_step())
    with pytest.raises(StorageError):
        writer.settle()
    writer.settle()  # it was said


class Unknown:
    """A column of a class that the other process cannot find, or that cannot be pickled."""

    def __init__(self, *, pickled: bool):
        self.pickled = pickled

    def __reduce__(self) -> Any:
        if not self.pickled:
            raise TypeError("cannot be pickled")
        return Unknown, ()

    def __str__(self) -> str:
        return "unknown"


@pytest.mark.parametrize("pickled", [True, False])
def test_columns_that_cannot_be_sent_are_written_here(writer: RolloutWriter, tmp_path: Path, pickled: bool):
    path, groups = tmp_path / "step.jsonl", long_step(odd=Unknown(pickled=pickled))
    writer.write(path, groups)
    writer.settle()
    assert path.read_bytes() == plainly(path, groups) and b'"odd": "unknown"' in path.read_bytes()


def test_what_was_handed_over_is_written_though_the_run_is_killed(tmp_path: Path):
    """The one who handed it over is killed at once; the file appears, and the process ends."""
    code = (
        "import os, sys; from pathlib import Path; from groupwise.store.rollout_writer import RolloutWriter;"
        "from test_rollout_writer import long_step; writer = RolloutWriter(apart=1);"
        "writer.write(Path(sys.argv[1]), long_step()); print(writer.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    path = tmp_path / "step.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout is not None
        process.stdout.read()  # until the last process that has it ends
    assert path.read_bytes() == plainly(path, long_step())
