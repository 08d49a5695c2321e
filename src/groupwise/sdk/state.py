"""Saves a trainer's state to disk and loads it, so that another trainer continues with the same bytes.

    <directory>/learner.safetensors, learner.json    the policy, the optimizer's moments, counters (`Learner.save`)
    <directory>/state.json                           the policy's shape, and what the loop wants back: its step, its
                                                     cursor

A state is written under another name, forced to the disk and renamed, so that one that can be seen is whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from groupwise.errors import ConfigError, StorageError
from groupwise.store import files
from groupwise.train.learner import Learner

FACTS = "state.json"

_DAMAGED = (OSError, RuntimeError, ValueError, KeyError, TypeError, SafetensorError)  # what reading rubbish raises


def save(learner: Learner, directory: Path, *, extra: Mapping[str, Any]) -> None:
    """Write a state, in place of one of the same name; `extra` is as `copied` has it. Raises StorageError; what was
    there before is then untouched."""
    facts = json.dumps({"extra": dict(extra), "shape": _shape(learner)}, allow_nan=False)
    with (
        files.writing(f"writing the state {directory}"),
        files.new_directory(directory, fault="state") as staging,
    ):
        learner.save(staging)
        (staging / FACTS).write_text(facts, encoding="utf-8")


def copied(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what a loop wants back as it will get it back, whatever becomes of the original. Raises ConfigError for
    what JSON cannot say."""
    try:
        return json.loads(json.dumps(dict(extra or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"extra cannot be kept as JSON: {error}", hint="give plain numbers, strings and lists"
        ) from None


def load(learner: Learner, directory: Path) -> dict[str, Any]:
    """Return the inverse of `save`, on a learner made with the same arguments -> `extra`.

    Raises:
        StorageError: there is no such state, or it is damaged.
        ConfigError: it is of another adapter or model.
    """
    directory = files.whole_directory(directory)
    shape, extra = _read(directory)
    if shape != _shape(learner):
        raise ConfigError(
            f"the state {directory} is of another policy: {shape}, and this one is {_shape(learner)}",
            hint="set up the trainer with the base model, the rank and the alpha that it had",
        )
    try:
        learner.load(directory)
    except _DAMAGED as error:
        raise StorageError.of(
            error, f"the state {directory} is damaged: {error}", hint="take the one before it"
        ) from error
    return extra


def extra_of(directory: Path) -> dict[str, Any]:
    """Return the `extra` of a state without loading it. Raises StorageError: it is damaged."""
    return _read(files.whole_directory(directory))[1]


def remove(directory: Path) -> None:
    """Remove a state. Raises StorageError."""
    with files.writing(f"removing the state {directory}"):
        shutil.rmtree(files.whole_directory(directory))


def _read(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the shape and the extra of a state. Raises StorageError."""
    try:
        facts = json.loads((directory / FACTS).read_text(encoding="utf-8"))
        return dict(facts["shape"]), dict(facts["extra"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError.of(
            error, f"the state {directory} cannot be read: {error}", hint="name one that was saved"
        ) from error


def _shape(learner: Learner) -> dict[str, Any]:
    """Return what two policies must have in common."""
    lora = learner.lora
    return {
        "base": learner.base.hash,
        "rank": 0 if lora is None else lora.r,
        "alpha": 0 if lora is None else lora.lora_alpha,
        "parameters": sum(parameter.numel() for parameter in learner.parameters),
    }
