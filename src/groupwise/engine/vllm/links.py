"""Links from the learner's rank 0 to one vLLM server, over which weights are sent: over NCCL, in a GPU's memory that
both see, over gloo.

    nccl            a group of rank 0 and the server's workers, on other GPUs, of this or other machines
    ipc             a server on the learner's own GPU reads the bytes where they are
    groupwise_gloo  a server on CPUs, which has our plugin (`vllm_plugin/groupwise_gloo.py`)

Each server has its own group, so that one that dies holds up no other. What blocks runs in a daemon thread
(`in_thread`): a group whose other side is gone may never return, and a process must be able to end all the same.
`NcclLink` and `IpcLink` are written after vLLM 0.32's and torch 2.13's sources; no GPU has run them yet.
"""

from __future__ import annotations

import base64
import ctypes
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, ClassVar, Protocol, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import nccl

from groupwise.engine.vllm_plugin import groupwise_gloo
from groupwise.errors import EngineError

PACKED_BYTES = 1 << 28  # of tensors that are sent together, at least, where there are more

T = TypeVar("T")


@dataclass(frozen=True)
class Chunk:
    """Tensors of a checkpoint that are sent together: their bytes, one after another, and what they are."""

    packed: Tensor
    names: Sequence[str]
    dtypes: Sequence[torch.dtype]
    shapes: Sequence[torch.Size]
    sizes: Sequence[int]

    @property
    def described(self) -> dict[str, Any]:
        """Return the description of these tensors for vLLM."""
        return {
            "names": list(self.names),
            "dtype_names": [str(dtype).removeprefix("torch.") for dtype in self.dtypes],
            "shapes": [list(shape) for shape in self.shapes],
        }


class Link(Protocol):
    """The way to one server, from its first transfer on until it ends."""

    def meeting(self) -> dict[str, Any]:
        """Return what the server is told, which then waits in `join`."""
        ...

    def join(self) -> None:
        """Meet the server's workers. Blocks. Raises RuntimeError."""
        ...

    def described(self, chunk: Chunk) -> dict[str, Any]:
        """Return the description of the next chunk for the server."""
        ...

    def send(self, chunk: Chunk) -> None:
        """Send it. Blocks. Raises RuntimeError."""
        ...

    def rest(self) -> None:
        """Let go what was for one version alone, which is there now."""
        ...

    def abort(self) -> None:
        """Give the way up, whatever is on it."""
        ...


class GlooLink:
    """The way to a server on CPUs, which meets this process in its own store."""

    name: ClassVar[str] = groupwise_gloo.BACKEND
    said: ClassVar[str] = "gloo (on CPUs)"

    def __init__(self, url: str, workers: int, *, device: torch.device, timeout_s: float):
        host = groupwise_gloo.address_towards(urlsplit(url).hostname or "127.0.0.1")
        timeout = timedelta(seconds=timeout_s)
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self._meeting = groupwise_gloo.Meeting(host=host, port=self._store.port, size=workers + 1, timeout_s=timeout_s)
        self._group: Any = None

    def meeting(self) -> dict[str, Any]:
        return {**asdict(self._meeting), "rank_offset": 1}

    def join(self) -> None:
        self._group = groupwise_gloo.join(self._meeting, 0, self._store)

    def described(self, chunk: Chunk) -> dict[str, Any]:
        return chunk.described

    def send(self, chunk: Chunk) -> None:
        groupwise_gloo.broadcast(self._group, chunk.packed.cpu())

    def rest(self) -> None: ...

    def abort(self) -> None:
        self._group = None  # its connections are closed, which ends a server's wait, once nothing is sent any more


class NcclLink:  # gpu-only: weights to vLLM servers over NCCL
    """Sends weights to a server on other GPUs than this process's. vLLM's workers join a group by an id that they get,
    and begin with the sum of one number."""

    name: ClassVar[str] = "nccl"
    said: ClassVar[str] = "NCCL (on other GPUs than rank 0's)"

    def __init__(self, url: str, workers: int, *, device: torch.device, timeout_s: float):
        self._device, self._size = device, workers + 1
        self._id: bytes = nccl.unique_id()
        self._comm: Any = None
        self._stream: Any = None

    def meeting(self) -> dict[str, Any]:
        return {
            "nccl_unique_id_b64": base64.b64encode(self._id).decode(),
            "rank_offset": 1,
            "world_size": self._size,
            "packed": True,
            "packed_buffer_size_bytes": PACKED_BYTES,
            "packed_num_buffers": 2,
        }

    def join(self) -> None:
        with torch.cuda.device(self._device):
            self._comm = nccl.init_rank(self._size, self._id, 0)
            self._stream = torch.cuda.Stream(self._device)
            one = torch.zeros(1, device=self._device)
            self._stream.wait_stream(torch.cuda.current_stream())
            nccl.all_reduce([one], streams=[self._stream], comms=[self._comm])
            self._stream.synchronize()

    def described(self, chunk: Chunk) -> dict[str, Any]:
        return chunk.described

    def send(self, chunk: Chunk) -> None:
        with torch.cuda.device(self._device):
            nccl.broadcast([chunk.packed], streams=[self._stream], comms=[self._comm])
            self._stream.synchronize()

    def rest(self) -> None: ...

    def abort(self) -> None:
        """End kernels that wait for a server that is gone, or the GPU would wait with them. torch has no call for it,
        so NCCL's own is called."""
        if self._comm is None:
            return
        of_capsule = ctypes.pythonapi.PyCapsule_GetPointer
        of_capsule.restype, of_capsule.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        with suppress(OSError, AttributeError, ValueError):  # torch was built with an NCCL that cannot be found
            ended = ctypes.CDLL("libnccl.so.2").ncclCommAbort
            ended.argtypes = [ctypes.c_void_p]
            ended(of_capsule(self._comm, b"torch.cuda.nccl.Communicator"))
        self._comm = None


class IpcLink:  # gpu-only: weights to a vLLM server on the same GPU
    """Sends weights to a server on this process's GPU: the server gets the addresses of the bytes, and copies them
    before it answers."""

    name: ClassVar[str] = "ipc"
    said: ClassVar[str] = "IPC (on the GPU of rank 0)"

    def __init__(self, url: str, workers: int, *, device: torch.device, timeout_s: float):
        if workers != 1:
            raise EngineError(f"{url} has {workers} workers, and only one of them can be on the learner's GPU")
        self._gpu = str(torch.cuda.get_device_properties(device).uuid)
        self._buffer: Tensor | None = None
        self._shown: Any = None  # what another process needs to find the buffer

    def meeting(self) -> dict[str, Any]:
        return {"packed": True}

    def join(self) -> None: ...

    def described(self, chunk: Chunk) -> dict[str, Any]:
        from torch.multiprocessing.reductions import reduce_tensor

        size = chunk.packed.numel()
        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = torch.empty(max(size, PACKED_BYTES), dtype=torch.uint8, device=chunk.packed.device)
            self._shown = reduce_tensor(self._buffer)[1]
        self._buffer[:size].copy_(chunk.packed)
        torch.cuda.current_stream(chunk.packed.device).synchronize()
        shown = base64.b64encode(pickle.dumps({self._gpu: self._shown})).decode()
        return {**chunk.described, "tensor_sizes": list(chunk.sizes), "ipc_handles_pickled": shown}

    def send(self, chunk: Chunk) -> None: ...

    def rest(self) -> None:
        self._buffer = self._shown = None
        torch.cuda.ipc_collect()

    def abort(self) -> None:
        self._buffer = self._shown = None


KINDS: Mapping[str, type[GlooLink | NcclLink | IpcLink]] = {each.name: each for each in (NcclLink, IpcLink, GlooLink)}
"""By the backend that a server was started with."""


def in_thread(do: Callable[[], T]) -> Future[T]:
    """Do what may never return, in a thread that no end of the process waits for."""
    future: Future[T] = Future()

    def run() -> None:
        with suppress(InvalidStateError):  # no caller waits any more
            try:
                future.set_result(do())
            except Exception as error:  # the caller that waits must get the error
                future.set_exception(error)

    threading.Thread(target=run, name="groupwise-weights", daemon=True).start()
    return future
