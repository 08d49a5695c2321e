"""The state of a learner whose parameters are cut, written and read in parts (torch.distributed.checkpoint).

    <checkpoint>/shards/.metadata, __<rank>_<i>.distcp    the tensors of `state_of`, under the same names
    <checkpoint>/learner.json                             counters, as there

Each rank writes its own parts and reads those that its new parts overlap, so that a run continues with another number
of ranks, or with one that is not sharded at all; and from a whole checkpoint each rank takes its parts. The directory
must be one that all ranks see (shared storage).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, distribute_tensor

from groupwise.errors import StorageError
from groupwise.train.counters import COUNTERS, SHARDS, counters_of, read_counters, restore_counters

if TYPE_CHECKING:
    from groupwise.train.learner import Learner

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def save_shards(learner: Learner, directory: Path, *, group: Any) -> None:
    """Write this rank's parts; `group` is the process group to agree in. The directory must exist.

    Raises:
        StorageError: a rank could not write.
    """
    tensors = {f"parameter.{i}": parameter.detach() for i, parameter in enumerate(learner.parameters)}
    for i, parameter in enumerate(learner.parameters):
        tensors |= {f"{key}.{i}": value for key, value in learner.optimizer.state.get(parameter, {}).items()}
    with _as_storage_error(f"the checkpoint {directory} cannot be written"):
        save(tensors, checkpoint_id=directory / SHARDS, process_group=group)
        if torch.distributed.get_rank() == 0:
            (directory / COUNTERS).write_text(json.dumps(counters_of(learner)))


def load_shards(learner: Learner, directory: Path, *, group: Any = None) -> None:
    """Read what this learner has of the parameters: its parts in `group`, or, without one, the whole.

    Raises:
        StorageError: the checkpoint is damaged, of another model, or not to be seen from here.
    """
    with _as_storage_error(f"the checkpoint {directory} cannot be read"):
        known = FileSystemReader(directory / SHARDS).read_metadata().state_dict_metadata
        tensors: dict[str, Tensor] = {}
        for i, parameter in enumerate(learner.parameters):
            tensors[f"parameter.{i}"] = parameter.detach()
            for key in MOMENTS:
                if f"{key}.{i}" in known:
                    tensors[f"{key}.{i}"] = torch.zeros(()) if key == "step" else torch.zeros_like(parameter)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # without a group it is meant
            load(tensors, checkpoint_id=directory / SHARDS, process_group=group, no_dist=group is None)
        for i, parameter in enumerate(learner.parameters):
            keys = [key for key in MOMENTS if f"{key}.{i}" in tensors]
            learner.optimizer.state[parameter] = {key: tensors[f"{key}.{i}"].detach() for key in keys}
        restore_counters(learner, read_counters(directory))


@torch.no_grad()
def load_whole(learner: Learner, directory: Path) -> None:
    """Read this rank's parts out of a checkpoint that was written whole. Raises StorageError as `load_shards`."""
    with (
        _as_storage_error(f"the checkpoint {directory} cannot be read"),
        safe_open(directory / "learner.safetensors", framework="pt") as file,
    ):
        known = set(file.keys())
        for i, parameter in enumerate(learner.parameters):
            parameter.copy_(_cut_like(parameter, file.get_tensor(f"parameter.{i}")))
            learner.optimizer.state[parameter] = {
                key: tensor if key == "step" else _cut_like(parameter, tensor)
                for key in MOMENTS
                if f"{key}.{i}" in known
                for tensor in [file.get_tensor(f"{key}.{i}")]
            }
        restore_counters(learner, read_counters(directory))


def _cut_like(parameter: Tensor, whole: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return whole.to(parameter.device)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


@contextmanager
def _as_storage_error(what: str) -> Iterator[None]:
    try:
        yield
    except (CheckpointException, OSError, KeyError, ValueError, SafetensorError) as error:
        raise StorageError.of(
            error,
            f"{what}: {type(error).__name__}: {error}",
            hint="a checkpoint of full-parameter training with FSDP needs a directory that all ranks share",
        ) from error
