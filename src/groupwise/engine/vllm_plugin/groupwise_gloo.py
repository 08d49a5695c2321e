"""Takes weights over the network in a vLLM server without GPUs: gloo in place of NCCL, by vLLM's own routes.

vLLM 0.32 transfers weights between GPUs only. A server on CPUs is started with this directory on its PYTHONPATH,
`--worker-extension-cls groupwise_gloo.Extension`, which has every worker import this module, and
`--weight-transfer-config '{"backend": "groupwise_gloo"}'`. What it is sent is laid out as for vLLM's NCCL: tensors one
after another, as bytes.
"""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "groupwise_gloo"  # also this module's name there


class Extension:
    """A base class that vLLM gives its workers; it is named only for this module to be imported."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The address at which the sender, rank 0, and a server's workers meet, and after how many seconds without a byte
    they part."""

    host: str
    port: int
    size: int
    timeout_s: float


def join(meeting: Meeting, rank: int, store: Any = None) -> Any:
    """Return the group, once all are there. Raises RuntimeError. The sender brings the `store`."""
    timeout = timedelta(seconds=meeting.timeout_s)
    if store is None:
        store = dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address_towards(meeting.host))]
    options._timeout = timeout
    return gloo(dist.PrefixStore("weights", store), rank, meeting.size, options)


def broadcast(group: Any, tensor: Tensor) -> None:
    """Send, as rank 0, or receive a tensor. Raises RuntimeError where the others are gone or silent."""
    options: Any = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([tensor], options).wait()


def receive(group: Any, dtype_names: list[str], shapes: list[list[int]]) -> tuple[Tensor, list[int], list[torch.dtype]]:
    """Return the bytes of these tensors as they come, how many each has, and its type. Raises RuntimeError."""
    dtypes = [getattr(torch, name) for name in dtype_names]
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    packed = torch.empty(sum(sizes), dtype=torch.uint8)
    broadcast(group, packed)
    return packed, sizes, dtypes


def address_towards(host: str) -> str:
    """Return the address of this machine on the network of another."""
    family, *_, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # nothing is sent
        return probe.getsockname()[0]


def _register() -> None:
    """Make the backend known to vLLM, in whose process this is."""
    from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
        WeightTransferEngineFactory,
    )
    from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor  # pyright: ignore[reportMissingImports]

    @dataclass
    class InitInfo(WeightTransferInitInfo):
        """The `Meeting` to join, and the rank of the server's first worker."""

        host: str
        port: int
        size: int
        timeout_s: float
        rank_offset: int

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):
        """Says what the next bytes are."""

        names: list[str]
        dtype_names: list[str]
        shapes: list[list[int]]

    class GlooWeightTransferEngine(WeightTransferEngine):
        """Loads what comes as vLLM's NCCL engine does: a layer when all of it is there."""

        init_info_cls, update_info_cls = InitInfo, UpdateInfo

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            parallel = self.parallel_config
            rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
            of = {name: getattr(init_info, name) for name in ("host", "port", "size", "timeout_s")}
            self.group = join(Meeting(**of), rank)

        def start_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
                initialize_layerwise_reload,
            )

            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))  # without waiting for a GPU, as the base does

        def receive_weights(self, update_info: UpdateInfo) -> None:
            packed, sizes, dtypes = receive(self.group, update_info.dtype_names, update_info.shapes)
            self.model.load_weights(unpack_tensor(packed, update_info.names, update_info.shapes, dtypes, sizes))

        def finish_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
                finalize_layerwise_reload,
            )

            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            self.group = None

    WeightTransferEngineFactory.register_engine(BACKEND, GlooWeightTransferEngine)


if __name__ == BACKEND:  # and not where the sender imports it
    _register()
