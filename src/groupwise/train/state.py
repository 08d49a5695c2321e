"""What a learner leaves on disk, so that another one goes on exactly where it stood.

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
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, distribute_tensor

from groupwise.errors import StorageError
from groupwise.train.optimizer import moments_of, set_moments

if TYPE_CHECKING:
    from groupwise.train.learner import Learner

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
COUNTERS, SHARDS = "learner.json", "shards"


def state_of(learner: Learner) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything that `restore` needs: tensors on the CPU, and what goes through JSON."""
    tensors = {f"parameter.{i}": p.detach().cpu().contiguous() for i, p in enumerate(learner.parameters)}
    for i, parameter in enumerate(learner.parameters):
        for key, value in moments_of(learner.optimizer, parameter).items():
            tensors[f"{key}.{i}"] = value
    return tensors | learner.reference.tensors(), counters_of(learner)


def counters_of(learner: Learner) -> dict[str, Any]:
    """What of it goes through JSON."""
    counters = {"steps": learner.steps, "refused_steps": learner.refused_steps, **learner.reference.counters()}
    return {**counters, "shuffle": learner.shuffle.getstate()}


def restore(learner: Learner, tensors: Mapping[str, Tensor], counters: Mapping[str, Any]) -> None:
    """Inverse of `state_of`, on a learner made with the same arguments, its reference kept if that one's was.

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


def restore_counters(learner: Learner, counters: Mapping[str, Any]) -> None:
    """Inverse of `counters_of`, but for the reference's."""
    learner.steps, learner.refused_steps = counters["steps"], counters["refused_steps"]
    version, state, gauss = counters["shuffle"]
    learner.shuffle.setstate((version, tuple(state), gauss))


def save_state(learner: Learner, directory: Path) -> None:
    """Write everything that `load_state` needs; the directory is made."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors, counters = state_of(learner)
    save_file(tensors, directory / "learner.safetensors")
    (directory / COUNTERS).write_text(json.dumps(counters))


def load_state(learner: Learner, directory: Path) -> None:
    """Inverse of `save_state`, and of `save_shards`. Raises as `restore`."""
    if is_sharded(directory):
        from groupwise.train.state import load_shards  # torch.distributed

        return load_shards(learner, directory)
    restore(learner, load_file(directory / "learner.safetensors"), read_counters(directory))


def is_sharded(directory: Path) -> bool:
    """Whether the checkpoint in this directory was written in parts."""
    return (directory / SHARDS).is_dir()


def read_counters(directory: Path) -> dict[str, Any]:
    """What `counters_of` was when it was saved there."""
    return json.loads((directory / COUNTERS).read_text())


# ----------------------------------------------------------------------------------------------------------------------
# The state of a learner whose parameters are cut, written and read in parts (torch.distributed.checkpoint).
#
#     <checkpoint>/shards/.metadata, __<rank>_<i>.distcp    the tensors of `learner_state`, under the same names
#     <checkpoint>/learner.json                             counters, as there
#
# Each rank writes its own parts and reads those that its new parts overlap, so that a run goes on with another number
# of ranks, or with one that is not sharded at all; and from a whole checkpoint each rank takes its parts. The directory
# must be one that all ranks see (shared storage).
# ----------------------------------------------------------------------------------------------------------------------


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
