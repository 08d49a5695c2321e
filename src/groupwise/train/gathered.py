"""Gathers weights that are cut over ranks: into whole tensors, one at a time, into files, or into a fingerprint.

Every rank has a gathered tensor whole, for a moment; nothing else is ever whole. Files are written by one rank, some
layers at a time, in the layout of `save_pretrained`; of a fingerprint each rank computes the values in its own part.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from groupwise.model.checkpoint_tensors import as_saved, layers_of
from groupwise.model.load import hash_of, probe
from groupwise.train.ranks import Ranks

WRITTEN_AT_ONCE = 1 << 28  # bytes, in their own file; or a layer's, where that has more


def whole_of(tensor: Tensor) -> Tensor:
    """Return all of a tensor, at every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def cut_hash(model: PreTrainedModel, ranks: Ranks) -> str:
    """Return `weights_hash` of a cut model, at every rank."""
    tensors = model.state_dict()
    parts = ranks.gather({name: _probed(each) for name, each in tensors.items()}, phase="comparing models")

    def probed(name: str) -> bytes:
        by_place = dict(part[name] for part in parts)  # copies of one part are there once
        return b"".join(by_place[place] for place in sorted(by_place))

    return hash_of({name: tensor.shape for name, tensor in tensors.items()}, probed)


def _probed(tensor: Tensor) -> tuple[int, bytes]:
    """Return where this rank's part of a tensor begins, and its probe."""
    if not isinstance(tensor, DTensor):
        return 0, probe(tensor)
    local, row = tensor.to_local(), tensor[:1].numel() if tensor.ndim else 1
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    start = offset[0] * row if tensor.ndim else 0
    return (start, probe(local, of=tensor.numel(), start=start)) if local.numel() else (tensor.numel(), b"")


@torch.no_grad()
def write_gathered(model: PreTrainedModel, directory: Path, *, writes: bool) -> None:
    """Write a cut model into an existing directory, as `save_pretrained` does; every rank calls it, one `writes`."""
    names: list[list[str]] = []
    batch: dict[str, Tensor] = {}
    total = 0

    def write() -> None:
        own = {name: each.contiguous() for name, each in as_saved(model, batch).items()}
        save_file(own, directory / f"part-{len(names):05d}.safetensors", metadata={"format": "pt"})
        names.append(sorted(own))
        batch.clear()

    for layer in layers_of(model):
        size = sum(each.numel() * each.element_size() for each in layer.values())
        if batch and sum(each.nbytes for each in batch.values()) + size > WRITTEN_AT_ONCE:
            write()
        for name, tensor in layer.items():
            gathered = whole_of(tensor)
            if writes:
                batch[name] = gathered.detach().cpu()
            del gathered
        total += size
    if not writes:
        return
    write()
    if len(names) == 1:
        (directory / "part-00000.safetensors").rename(directory / "model.safetensors")
    else:
        called = [f"model-{i + 1:05d}-of-{len(names):05d}.safetensors" for i in range(len(names))]
        for i, name in enumerate(called):
            (directory / f"part-{i:05d}.safetensors").rename(directory / name)
        index = {each: called[i] for i, every in enumerate(names) for each in every}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2, sort_keys=True)
        (directory / "model.safetensors.index.json").write_text(text + "\n")
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.save_pretrained(directory)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
