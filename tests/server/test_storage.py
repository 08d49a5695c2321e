"""Whether the server can still write what it must."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from groupwise.errors import StorageFullError
from groupwise.server import storage
from groupwise.server.storage import StorageProbe, check_room, room_problem
from wording import raises


@pytest.fixture
def state(tmp_path: Path) -> Path:
    for name in ("spool", "adapters"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_a_disk_that_takes_everything_is_no_problem_and_keeps_nothing(state: Path) -> None:
    assert StorageProbe(state).problem() is None
    assert sorted(path.name for path in state.rglob("*")) == ["adapters", "spool"]


@pytest.mark.parametrize("name", ["spool", "adapters"])
def test_a_directory_that_is_gone_is_named(state: Path, name: str) -> None:
    (state / name).rmdir()
    assert str(state / name) in str(StorageProbe(state).problem())


def test_the_disk_is_asked_again_only_after_a_while(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe, calls = StorageProbe(state), 0

    def fail(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    for _ in range(5):
        assert "Input/output error" in str(probe.problem()) and "storage_failed" in str(probe.problem())
    assert calls == 1
    monkeypatch.undo()
    monkeypatch.setattr(storage, "PROBE_S", 0.0)
    assert probe.problem() is None


def test_too_little_room_is_refused_with_the_numbers(state: Path) -> None:
    free = shutil.disk_usage(state).free
    assert room_problem(state, 0) is None
    assert "min_free_bytes" in str(room_problem(state, 2 * free + 1))
    assert "cannot be read" in str(room_problem(state / "nowhere", 0))
    with raises(StorageFullError):
        check_room(state, 2 * free + 1, what="jobs")
