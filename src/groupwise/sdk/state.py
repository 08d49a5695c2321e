"""What a trainer leaves on disk, so that another one goes on with the same bytes: torch.distributed.checkpoint.

    <directory>/.metadata, __0_0.distcp    the policy and the optimizer's moments, by `learner_state`'s names
    <directory>/state.json                 counters, and what the loop wants back: its step, its cursor

A state is written under another name, forced to the disk and renamed, so that one that can be seen is whole. Load
only states that you made: torch's metadata is a pickle.
"""

from __future__ import annotations

import json
import shutil
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import save as write

from groupwise.errors import ConfigError, StorageError
from groupwise.store import files
from groupwise.train.learner import Learner
from groupwise.train.state import restore, state_of

FACTS = "state.json"

_QUIET = threading.Lock()  # warnings' filters are the process's


def save(learner: Learner, directory: Path, *, extra: Mapping[str, Any]) -> None:
    """Write a state, in place of one of the same name. Raises StorageError; what was there before is then untouched."""
    tensors, counters = state_of(learner)
    try:
        facts = json.dumps({"learner": counters, "extra": dict(extra), "shape": _shape(learner)}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"extra cannot be kept as JSON: {error}", hint="give plain numbers, strings and lists"
        ) from None
    with (
        files.writing(f"writing the state {directory}"),
        files.new_directory(directory, fault="state") as staging,
    ):
        with _single_process():
            write(dict(tensors), checkpoint_id=staging, no_dist=True)
        (staging / FACTS).write_text(facts, encoding="utf-8")


def load(learner: Learner, directory: Path) -> dict[str, Any]:
    """Return the inverse of `save`, on a learner made with the same arguments -> `extra`.

    Raises:
        StorageError: there is no such state, or it is damaged.
        ConfigError: it is of another adapter or model.
    """
    directory = files.whole_directory(directory)
    try:
        facts = json.loads((directory / FACTS).read_text(encoding="utf-8"))
        saved = FileSystemReader(directory).read_metadata().state_dict_metadata
    except (OSError, ValueError, RuntimeError, CheckpointException) as error:
        raise StorageError.of(
            error, f"the state {directory} cannot be read: {error}", hint="name one that was saved"
        ) from error
    if facts["shape"] != _shape(learner):
        raise ConfigError(
            f"the state {directory} is of another policy: {facts['shape']}, and this one is {_shape(learner)}",
            hint="set up the trainer with the base model, the rank and the alpha that it had",
        )
    tensors = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in saved.items()
        if isinstance(each, TensorStorageMetadata)
    }
    try:
        with _single_process():
            read(tensors, checkpoint_id=directory, no_dist=True)
    except (OSError, RuntimeError, CheckpointException) as error:
        raise StorageError.of(
            error, f"the state {directory} is damaged: {error}", hint="take the one before it"
        ) from error
    restore(learner, tensors, facts["learner"])
    return facts["extra"]


def remove(directory: Path) -> None:
    """Remove a state. Raises StorageError."""
    with files.writing(f"removing the state {directory}"):
        shutil.rmtree(files.whole_directory(directory))


def _shape(learner: Learner) -> dict[str, Any]:
    """Return what two policies must have in common."""
    lora = learner.lora
    return {
        "base": learner.base.hash,
        "rank": 0 if lora is None else lora.r,
        "alpha": 0 if lora is None else lora.lora_alpha,
        "parameters": sum(parameter.numel() for parameter in learner.parameters),
    }


@contextmanager
def _single_process() -> Iterator[None]:
    """Context manager: torch does not warn that there is no process group."""
    with _QUIET, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
