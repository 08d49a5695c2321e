"""Sharing base weights between processes: memory-mapped files on a CPU, CUDA IPC handles on a GPU.

    map_weights(model, state_dir)     every parameter becomes a view of a memory-mapped file

transformers maps the model's own files where they hold the type that is run in: then nothing is left to do. Otherwise
(a bfloat16 file that is run in float32) the converted weights are written once, to `base-<hash>-<type>.safetensors`,
and mapped from there. Processes that map the same file share its memory, and the kernel may drop and re-read it.

The mapping is private: a process that wrote to a base weight would get a copy of that page. Nothing here does. On a
GPU it is `model_ipc` that shares.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from groupwise.errors import StorageError
from groupwise.model.load import LoadedModel
from groupwise.platform import mapped_files
from groupwise.store import files

log = logging.getLogger(__name__)


def map_weights(base: LoadedModel, directory: Path) -> bool:
    """Have the parameters of `base` memory-mapped, in place; before anything is made of it that copies tensors.

    Returns whether they are. They are not on a GPU, and when the file cannot be written: that is logged, and the
    process continues with its own weights.
    """
    if base.device.type != "cpu":
        return False
    if is_mapped(base.model):
        return True
    kind = str(base.model.dtype).removeprefix("torch.")
    path = directory / f"base-{base.hash[:32]}-{kind}.safetensors"
    try:
        if not _map(base.model, path):
            _write(base.model, path)
            _map(base.model, path)
    except StorageError as error:
        log.warning("the base weights are not shared between processes: %s", error.message)
    return is_mapped(base.model)


def is_mapped(model: nn.Module) -> bool:
    """Return whether every parameter is a view of a file; False where the system does not say."""
    if (lines := mapped_files()) is None:
        return False
    of_files = [line.split(maxsplit=5)[0] for line in lines if ".safetensors" in line]
    ranges = [tuple(int(address, 16) for address in each.split("-")) for each in of_files]
    return all(any(low <= p.data_ptr() < high for low, high in ranges) for p in model.parameters() if p.numel())


def _map(model: nn.Module, path: Path) -> bool:
    """Take the parameters from the file, if it is there and has all of them."""
    try:
        tensors = load_file(path)
    except (OSError, ValueError, SafetensorError):
        return False
    parameters = dict(model.named_parameters())  # tied ones once
    wanted = {name: (p.shape, p.dtype) for name, p in parameters.items()}
    if wanted != {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}:
        return False
    if not all(torch.equal(parameter, tensors[name]) for name, parameter in parameters.items()):
        return False
    for name, parameter in parameters.items():
        parameter.data = tensors[name]
    return True


def _write(model: nn.Module, path: Path) -> None:
    """Write the parameters, whole or not at all, and remove those of other models."""
    temporary = files.staging_path(path.parent)
    with files.writing(f"writing the base weights {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_file({name: p.detach().contiguous() for name, p in model.named_parameters()}, temporary)
            files.fsync(temporary)
            temporary.rename(path)
            files.fsync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
        for other in path.parent.glob("base-*.safetensors"):
            if other != path:
                other.unlink(missing_ok=True)  # who has it mapped keeps it
