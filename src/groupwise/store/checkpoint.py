"""Checkpoints of a run, from which `resume: auto` continues after a kill.

    <run>/checkpoints/step-000020/learner.safetensors, learner.json    the policy, the optimizer (`Learner.save`)
    <run>/checkpoints/step-000020/run.json                             `RunState`: everything else

A checkpoint is a directory that is written under another name, forced to the disk and renamed, so that one that can be
seen is whole; the ones before are removed after that.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.errors import StorageError
from groupwise.store import files
from groupwise.types import PolicyVersion

if TYPE_CHECKING:
    from groupwise.train.learner import Learner

CHECKPOINTS = "checkpoints"

STEP, _STANDING = "step-", "run.json"


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run after `step`: the newest version, the version that samples and its step (`synced`), and by
    name the state of each part of the run. `finished`: it makes no more steps. `concluded`, of one that is finished:
    what comes after its last step is done, too, so that its policy is the active version, or the saved model."""

    step: int
    version: PolicyVersion
    sampler: PolicyVersion
    synced: int
    finished: bool = False
    concluded: bool = True  # as one is that was written before there was this field
    parts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Return whether nothing of the run is left to do."""
        return self.finished and self.concluded

    def dump(self) -> str:
        versions = {"version": str(self.version), "sampler": str(self.sampler)}
        return json.dumps({**vars(self), **versions, "parts": dict(self.parts)}, allow_nan=False)

    @classmethod
    def parse(cls, text: str) -> RunState:
        raw = json.loads(text)
        versions = {key: PolicyVersion.parse(raw[key]) for key in ("version", "sampler")}
        steps = {key: files.whole_number(raw[key]) for key in ("step", "synced")}
        return cls(**{**raw, **versions, **steps})


def save(run_dir: Path, learner: Learner, standing: RunState) -> None:
    """Write a checkpoint and remove the ones before. Raises StorageError; the one before is then still there."""
    root = run_dir / CHECKPOINTS
    target = root / f"{STEP}{standing.step:06d}"
    with files.writing(f"writing the checkpoint {target}"):
        remove_torn(root)
        with files.new_directory(target, fault="checkpoint") as staging:  # the same step again, once it is finished
            learner.save(staging)
            (staging / _STANDING).write_text(standing.dump(), encoding="utf-8")
        for other in _saved(root):
            if other != target:
                shutil.rmtree(files.whole_directory(other))


def remove_torn(root: Path) -> None:
    """Remove what crashes left half written."""
    for leftover in root.glob(f"{files.STAGING}*"):
        shutil.rmtree(leftover)


def newest(run_dir: Path) -> Path | None:
    """Return the checkpoint with the highest step, if there is one."""
    found = max(_saved(run_dir / CHECKPOINTS), key=_step_of, default=None)
    return None if found is None else files.whole_directory(found)


def standing(run_dir: Path) -> RunState | None:
    """Return the state of the newest checkpoint, if there is one. Raises StorageError if it is damaged."""
    found = newest(run_dir)
    return None if found is None else read(found)


def is_over(run_dir: Path) -> bool:
    """Return whether the run made all its steps and was concluded. Raises StorageError if its newest checkpoint is
    damaged."""
    found = standing(run_dir)
    return found is not None and found.is_over


def reopen(run_dir: Path) -> RunState:
    """Mark the run as not finished: it continues from its newest checkpoint, whose state is returned. Raises
    StorageError."""
    return _marked(run_dir, finished=False)


def conclude(run_dir: Path) -> None:
    """Mark the run, which made all its steps, as concluded. Raises StorageError."""
    _marked(run_dir, finished=True, concluded=True)


def _marked(run_dir: Path, **how: bool) -> RunState:
    before = standing(run_dir)
    assert before is not None, run_dir
    state = replace(before, **how)
    if state != before:
        restate(run_dir, state)
    return state


def restate(run_dir: Path, state: RunState) -> None:
    """Write another state into the newest checkpoint, in one step; the learner's stays. Raises StorageError."""
    found = newest(run_dir)
    assert found is not None, run_dir
    with files.writing(f"writing the checkpoint {found}"):
        files.replace(found / _STANDING, state.dump())


def _saved(root: Path) -> set[Path]:
    """Return every checkpoint that is whole, by its name."""
    return {*root.glob(f"{STEP}*"), *files.set_aside(root, f"{STEP}*")}


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix(STEP))


def read(checkpoint: Path) -> RunState:
    """Raise StorageError if it is damaged."""
    try:
        return RunState.parse((checkpoint / _STANDING).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StorageError.of(
            error,
            f"the checkpoint {checkpoint} cannot be read: {type(error).__name__}: {error}",
            hint="start the run anew, in another directory",
        ) from error
