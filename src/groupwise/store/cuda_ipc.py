"""The base weights of server and worker in one place on a GPU: CUDA IPC.

    offer_weights(base, path)     the server: a handle for each parameter, in a file that only its user can read
    attach_weights(base, path)    the worker: `base`, loaded into ordinary memory, over the server's parameters

A handle is what torch.multiprocessing sends for a CUDA tensor (cudaIpcGetMemHandle of the allocation, the place in
it, an event to wait for), written as JSON: nothing is unpickled. The worker checks names, shapes and types, and then,
with the parameters in place, that their fingerprint is that of the model it loaded. What goes wrong is a ModelError;
the worker then says so and takes its own copy.

The memory is the server's, and nothing says what reading it means once that process is gone. A worker that has
attached must therefore die with its parent at once. It must not write a base weight either; training an adapter does
not.

**CUDA IPC has never been executed here**: these lines were written against torch's source, on machines without a GPU.
All but `CudaIpc` itself is tested between processes, with shared memory of the CPU in its place.
"""

from __future__ import annotations

import base64
import inspect
import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from groupwise.errors import ModelError, StorageError
from groupwise.model.load import LoadedModel, weights_hash
from groupwise.store import files

log = logging.getLogger(__name__)

FORMAT = 1

FILE = "weights.json"  # in the state directory

Handle = dict[str, Any]  # JSON


class Transport(Protocol):
    """Shares device memory with another process: `export` here, `attach` there."""

    def export(self, tensor: Tensor) -> Handle:
        """Return a handle by which another process can map this memory. Raises RuntimeError."""
        ...

    def attach(self, handle: Handle) -> Tensor:
        """Return the tensor of a handle that another process exported. Raises RuntimeError, or TypeError for another
        one's."""
        ...


class CudaIpc:  # gpu-only: CUDA IPC, the server's weights in the worker's process
    """`reduce_tensor` and `rebuild_cuda_tensor` of torch, whose arguments travel under their names."""

    def export(self, tensor: Tensor) -> Handle:
        rebuild, arguments = reduce_tensor(tensor)
        if rebuild is not rebuild_cuda_tensor:
            raise RuntimeError(f"torch does not send this tensor by CUDA IPC but by {rebuild.__name__}")
        named = zip(inspect.signature(rebuild_cuda_tensor).parameters, arguments, strict=True)
        return {name: _plain(value) for name, value in named if not isinstance(value, type)}

    def attach(self, handle: Handle) -> Tensor:
        types = {"tensor_cls": Tensor, "storage_cls": torch.storage.TypedStorage}
        return rebuild_cuda_tensor(**types, **{name: _unplain(value) for name, value in handle.items()})


def offer_weights(base: LoadedModel, path: Path, *, transport: Transport | None = None) -> bool:
    """Write handles of the parameters of `base` to `path`; without a `transport`, only if they are on a GPU.

    Returns whether the handles were written. If the parameters cannot be exported, that is logged, and each process has
    its own copy. The parameters must stay at their addresses for as long as a process may attach.
    """
    if transport is None and base.device.type != "cuda":  # gpu-aware
        return False
    transport = transport or CudaIpc()
    try:
        tensors = {name: transport.export(p.detach()) for name, p in base.model.named_parameters()}  # tied ones once
        offer = {"format": FORMAT, "pid": os.getpid(), "base_hash": base.hash, "tensors": tensors}
        with files.writing(f"offering the base weights in {path}"):
            _write_offer(path, json.dumps(offer))
    except (RuntimeError, StorageError) as error:
        log.warning("the base weights are not shared, so that the worker will have a copy of its own: %s", error)
        with suppress(OSError):  # what a server before this one offered, which is not believed anyway
            path.unlink()
        return False
    return True


def attach_weights(base: LoadedModel, path: Path, *, parent: int, transport: Transport | None = None) -> None:
    """Have `base` use the parameters that process `parent` offered; the rest of it moves to their device, too.

    Raises:
        ModelError: they are not offered, or not those of this model. `base` must then not be used. Its `kind` says why:
            the offer is "unreadable"; its "format", "pid" or "base_hash" is another; its "parameters" have other names;
            one's "handle" cannot be attached or its "shape" or type differs; or the "values" in that memory do.
    """
    transport = transport or CudaIpc()
    tensors = _read(path, parent=parent, base=base)
    parameters = dict(base.model.named_parameters())
    if tensors.keys() != parameters.keys():
        raise _not_shared(
            f"other parameters are offered: {sorted(tensors.keys() ^ parameters.keys())[:3]}", kind="parameters"
        )
    for name, parameter in parameters.items():
        try:
            shared = transport.attach(tensors[name])
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            raise _not_shared(f"{name} cannot be attached: {error}", kind="handle") from error
        if (shared.shape, shared.dtype) != (parameter.shape, parameter.dtype):
            what = f"{tuple(shared.shape)} of {shared.dtype}, not {tuple(parameter.shape)} of {parameter.dtype}"
            raise _not_shared(f"{name} is offered as {what}", kind="shape")
        parameter.data = shared
    base.model.to(base.device)  # pyright: ignore[reportArgumentType]
    if weights_hash(base.model) != base.hash:
        raise _not_shared("what is in that memory is not this model", kind="values")


def _read(path: Path, *, parent: int, base: LoadedModel) -> Mapping[str, Handle]:
    try:
        offer = json.loads(path.read_bytes())
        known = {key: offer[key] for key in ("format", "pid", "base_hash")}
        tensors: Mapping[str, Handle] = dict(offer["tensors"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _not_shared(f"{path} cannot be read: {error!r}", kind="unreadable") from error
    for key, wanted in {"format": FORMAT, "pid": parent, "base_hash": base.hash}.items():
        if known[key] != wanted:
            raise _not_shared(f"{path} has {key} {known[key]!r}, not {wanted!r}", kind=key)
    return tensors


def _not_shared(why: str, *, kind: str) -> ModelError:
    return ModelError(f"the server's base weights cannot be used: {why}", kind=kind)


def _write_offer(path: Path, text: str) -> None:
    """Put `text` at `path` in one step, for its owner's eyes: who can read it can reach the memory."""
    temporary = files.staging_path(path.parent)
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(text)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


# ---- what JSON has no words for ----
def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    return list(value) if isinstance(value, tuple) else value


def _unplain(value: Any) -> Any:
    match value:
        case {"bytes": text}:
            return base64.b64decode(text)
        case {"dtype": name}:
            return getattr(torch, name)
        case {"device": name}:
            return torch.device(name)
        case list():
            return tuple(value)
    return value
