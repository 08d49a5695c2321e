"""Saves a learner's state to disk and restores it, so that another learner continues exactly where this one stood.

learner.safetensors   parameter.<i>                            what is trained, in the order of `Learner.parameters`
                      exp_avg.<i>, exp_avg_sq.<i>, step.<i>    AdamW's moments of it (bitsandbytes' in 8 bits: state1,
                                                               state2 and their scales)
                      reference.<i>                            the reference's, unless it is the base
learner.json          counters, and the state of the generator that shuffles minibatches

Where parameters are cut into parts for several processes, a directory `shards` takes the place of the first
(`save_shards`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from groupwise.train.counters import COUNTERS, SHARDS, counters_of, read_counters, restore_counters
from groupwise.train.optimizer import moments_of, set_moments

if TYPE_CHECKING:
    from groupwise.train.learner import Learner


def state_of(learner: Learner) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return everything that `restore` needs: tensors on the CPU, and values for JSON."""
    tensors = {f"parameter.{i}": p.detach().cpu().contiguous() for i, p in enumerate(learner.parameters)}
    for i, parameter in enumerate(learner.parameters):
        for key, value in moments_of(learner.optimizer, parameter).items():
            tensors[f"{key}.{i}"] = value
    return tensors | learner.reference.tensors(), counters_of(learner)


def restore(learner: Learner, tensors: Mapping[str, Tensor], counters: Mapping[str, Any]) -> None:
    """Restore a state of `state_of`, on a learner made with the same arguments; keep its reference if the state kept
    one.

    Raises:
        TrainingError: another kind of reference was saved.
    """
    learner.reference.load(tensors, counters)
    moments: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        key, _, number = name.rpartition(".")
        if key not in ("parameter", "reference"):
            moments.setdefault(number, {})[key] = tensor
    with torch.no_grad():
        for i, parameter in enumerate(learner.parameters):
            parameter.copy_(tensors[f"parameter.{i}"])
            set_moments(learner.optimizer, parameter, moments.get(str(i), {}))
    restore_counters(learner, counters)


def save_state(learner: Learner, directory: Path) -> None:
    """Write everything that `load_state` needs; the directory is made."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors, counters = state_of(learner)
    save_file(tensors, directory / "learner.safetensors")
    (directory / COUNTERS).write_text(json.dumps(counters))


def load_state(learner: Learner, directory: Path) -> None:
    """Load a state of `save_state` or `save_shards`. Raises as `restore`."""
    if is_sharded(directory):
        from groupwise.train.sharded_state import load_shards

        return load_shards(learner, directory)
    restore(learner, load_file(directory / "learner.safetensors"), read_counters(directory))


def is_sharded(directory: Path) -> bool:
    """Return whether the checkpoint in this directory was written in parts."""
    return (directory / SHARDS).is_dir()
