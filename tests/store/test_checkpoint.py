"""A checkpoint is whole or not there, and says everything that a run needs to go on."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from groupwise.algo.loss import resolve_loss
from groupwise.errors import StorageError
from groupwise.store import checkpoint, faults, files
from groupwise.store.checkpoint import RunState
from groupwise.train.learner import Learner
from groupwise.types import PolicyVersion
from wording import raises

STANDING = RunState(
    step=3,
    version=PolicyVersion("math", 3),
    sampler=PolicyVersion("math", 2),
    synced=2,
    parts={"batches": {"done": 3}, "best": {"version": None}},
)


@pytest.fixture
def learner(make_base) -> Learner:
    return Learner(make_base(dtype=torch.float32))


def test_what_is_saved_is_what_is_read(learner: Learner, make_samples, tmp_path: Path) -> None:
    learner.step(make_samples(((4, (5, 6)),)), resolve_loss("reinforce"), learning_rate=0.1)
    checkpoint.save(tmp_path, learner, STANDING)
    found = checkpoint.newest(tmp_path)
    assert found is not None and checkpoint.read(found) == STANDING
    other = Learner(learner.base, seed=1)
    other.load(found)
    assert all(torch.equal(a, b) for a, b in zip(learner.parameters, other.parameters, strict=True))


def test_only_the_newest_is_kept(learner: Learner, tmp_path: Path) -> None:
    for step in (3, 10, 101):
        checkpoint.save(tmp_path, learner, RunState(**{**vars(STANDING), "step": step}))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000101"]
    checkpoint.save(tmp_path, learner, RunState(**{**vars(STANDING), "step": 101, "finished": True}))
    found = checkpoint.newest(tmp_path)
    assert found is not None and checkpoint.read(found).finished


def test_one_that_was_not_finished_is_not_seen(learner: Learner, tmp_path: Path, monkeypatch) -> None:
    checkpoint.save(tmp_path, learner, STANDING)

    def die(name: str) -> None:
        raise KeyboardInterrupt(name)

    monkeypatch.setattr(faults, "point", die)
    with raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, learner, RunState(**{**vars(STANDING), "step": 4}))
    monkeypatch.undo()
    found = checkpoint.newest(tmp_path)
    assert found is not None and checkpoint.read(found) == STANDING
    checkpoint.save(tmp_path, learner, RunState(**{**vars(STANDING), "step": 5}))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000005"]


@pytest.mark.parametrize("killed", ["set aside", "in place"])
def test_the_same_step_again_never_leaves_none(learner: Learner, tmp_path: Path, monkeypatch, killed: str) -> None:
    """Killed between any two renames there is the old one or the new one, and the next save cleans up."""
    checkpoint.save(tmp_path, learner, STANDING)
    finished = replace(STANDING, finished=True)
    renamed: list[Path] = []
    rename = Path.rename

    def die(self: Path, target: Path) -> Path:
        if len(renamed) == (1 if killed == "set aside" else 2):
            raise KeyboardInterrupt
        renamed.append(self)
        return rename(self, target)

    def no_cleaning(path: Path, **options: object) -> None:
        if len(renamed) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", die)
        patch.setattr("shutil.rmtree", no_cleaning)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path, learner, finished)
    found = checkpoint.newest(tmp_path)
    assert found is not None and checkpoint.read(found) == (STANDING if killed == "set aside" else finished)
    Learner(learner.base, seed=1).load(found)
    checkpoint.save(tmp_path, learner, finished)
    found = checkpoint.newest(tmp_path)
    assert found is not None and checkpoint.read(found) == finished
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]


def test_a_rename_that_fails_brings_back_the_one_before(learner: Learner, tmp_path: Path, monkeypatch) -> None:
    checkpoint.save(tmp_path, learner, STANDING)
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if self.name.startswith(".staging-"):
            raise OSError(errno.EIO, "input/output error")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fails)
        with raises(StorageError):
            checkpoint.save(tmp_path, learner, replace(STANDING, finished=True))
    assert checkpoint.newest(tmp_path) == tmp_path / "checkpoints" / "step-000003"
    assert checkpoint.read(tmp_path / "checkpoints" / "step-000003") == STANDING


def test_a_damaged_one_is_named(learner: Learner, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, learner, STANDING)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    (found / "run.json").write_text('{"step": 3')
    with raises(StorageError):
        checkpoint.read(found)


def test_the_newest_is_the_one_of_the_highest_step(tmp_path: Path) -> None:
    for step in (3, 999_999, 1_000_000):
        (tmp_path / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    found = checkpoint.newest(tmp_path)
    assert found is not None and found.name == "step-1000000"


def test_there_is_none(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None


def test_every_file_is_on_the_disk_before_the_directory_has_its_name(tmp_path: Path, monkeypatch) -> None:
    """Also those in directories of it, as the parts that several processes write."""
    forced: list[str] = []
    fsync, target = os.fsync, tmp_path / "checkpoints" / "step-1"

    def record(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        forced.append(f"{path.relative_to(tmp_path)}{'' if target.exists() else ' before'}")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    with files.new_directory(target, fault="checkpoint") as staging:
        (staging / "shards").mkdir()
        (staging / "shards" / "__0_0.distcp").write_bytes(b"part")
    root = "checkpoints/.staging-step-1"
    assert {f"{root}/shards/__0_0.distcp before", f"{root}/shards before", f"{root} before"} == set(forced[:-1])
    assert forced[-1] == "checkpoints" and (target / "shards" / "__0_0.distcp").read_bytes() == b"part"


def test_a_directory_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    target = tmp_path / "state"
    for content in ("first", "second"):
        with files.new_directory(target, fault="state") as staging:
            (staging / "a").write_text(content)
    with suppress(OSError), files.new_directory(target, fault="state") as staging:
        (staging / "a").write_text("third")
        raise OSError("full")
    assert (target / "a").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["state"]  # a disk that is full has the rest back
    with files.new_directory(target, fault="state") as staging:
        assert not list(staging.iterdir())  # nothing of the one that failed
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
