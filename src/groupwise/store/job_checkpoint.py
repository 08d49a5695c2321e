"""Keeps the files that a job leaves on disk in addition to its version: checkpoints to resume from. The next job of the
adapter begins with the moments of the last one.

    <state>/checkpoints/<job>/step-000020/    where the job stands; the newest only

A checkpoint is a directory that is written under another name, forced to the disk and renamed, so that one that can
be seen is whole. At the end of a job it is renamed once more: the next job of the same name continues with AdamW's
moments, which are kept with the version (`AdapterStore.keep_moments`).

    learner.safetensors, learner.json    `Learner.save`: parameters, moments, counters
    start.safetensors                    log-probabilities under the policy that the job started from, if it reads
    them
    run.json                             `JobProgress`
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from groupwise.config.lora import LoraSpec
from groupwise.store import faults, files
from groupwise.store.adapters import AdapterStore
from groupwise.store.checkpoint import STEP, remove_torn
from groupwise.types import PolicyVersion

if TYPE_CHECKING:
    from groupwise.train.learner import Learner

_START, _JOB_STATE = "start.safetensors", "run.json"


@dataclass(frozen=True, kw_only=True)
class JobProgress:
    """The progress of a job: `applied` of its `step` steps changed the weights. `parent` is the version that it started
    from."""

    parent: PolicyVersion
    lora: LoraSpec
    step: int = 0
    applied: int = 0

    def dump(self) -> str:
        lora = self.lora.model_dump(mode="json")
        return json.dumps({"parent": str(self.parent), "lora": lora, "step": self.step, "applied": self.applied})

    @classmethod
    def parse(cls, text: str) -> JobProgress:
        raw = json.loads(text)
        return cls(
            parent=PolicyVersion.parse(raw["parent"]),
            lora=LoraSpec(**raw["lora"]),
            step=raw["step"],
            applied=raw["applied"],
        )


class Checkpoints:
    """The checkpoints of one job. Only who holds its lease writes here."""

    def __init__(self, state_dir: Path, job: str):
        self._directory = state_dir / "checkpoints" / job

    @property
    def newest(self) -> Path | None:
        """Return the checkpoint with the highest step."""
        return max(self._directory.glob(f"{STEP}*"), default=None)

    def save(self, learner: Learner, standing: JobProgress, start: Sequence[tuple[float, ...]] | None) -> None:
        """Write a checkpoint and remove the ones before. Raises StorageError; the one before is then still there."""
        target = self._directory / f"{STEP}{standing.step:09d}"
        with files.writing(f"writing the checkpoint {target}"):
            remove_torn(self._directory)
            with files.new_directory(target, fault="checkpoint") as staging:
                learner.save(staging)
                if start is not None:
                    import torch
                    from safetensors.torch import save_file

                    flat = torch.tensor([value for row in start for value in row], dtype=torch.float64)
                    save_file({"start": flat}, staging / _START)
                (staging / _JOB_STATE).write_text(standing.dump(), encoding="utf-8")
            for other in self._directory.glob(f"{STEP}*"):
                if other != target:
                    shutil.rmtree(other)
        faults.point("checkpoint:after-cleaning")

    def become_moments(self, version: PolicyVersion, store: AdapterStore) -> None:
        """Make the last checkpoint the moments of `version`, which the job has published. Again is harmless."""
        if (newest := self.newest) is not None:
            with files.writing(f"keeping the moments of {version}"):
                (newest / _START).unlink(missing_ok=True)
            store.keep_moments(version, newest)
        faults.point("publish:after-moments")

    def discard(self) -> None:
        """Discard it: the job is over."""
        shutil.rmtree(self._directory, ignore_errors=True)


def read_standing(checkpoint: Path) -> JobProgress:
    """Raise OSError, ValueError, KeyError or TypeError if the checkpoint is damaged."""
    return JobProgress.parse((checkpoint / _JOB_STATE).read_text(encoding="utf-8"))


def read_start(checkpoint: Path, *, lengths: Sequence[int]) -> list[tuple[float, ...]] | None:
    """Return the log-probabilities that were saved, as rows of these lengths; None if none were."""
    path = checkpoint / _START
    if not path.exists():
        return None
    from safetensors.torch import load_file

    rows = load_file(path)["start"].split(list(lengths))
    return [tuple(row.tolist()) for row in rows]


def trained_in(home: Path) -> AdapterStore:
    """Return the store of the adapters that jobs of the owner, or of a tenant, train. Moments in their earlier place
    (optimizer/name@N next to adapters/) are moved to their versions."""
    store, before = AdapterStore(home / "adapters"), home / "optimizer"
    if before.is_dir():
        for path in before.iterdir():
            with suppress(ValueError):  # not ours
                store.keep_moments(PolicyVersion.parse(path.name), path)
        shutil.rmtree(before, ignore_errors=True)
    return store
