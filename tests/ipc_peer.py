"""The other process of the tests of shared weights: `python ipc_peer.py MODEL OFFER PARENT [cuda]`.

Attaches to what PARENT offers in OFFER, trains an adapter for a step, and says what it sees: after that and, when there
is a file `again` in its folder, once more. The transport is shared memory of the CPU, or CUDA IPC.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.config.lora import LoraSpec
from groupwise.errors import ModelError
from groupwise.model.load import load_model, weights_hash
from groupwise.store.cuda_ipc import CudaIpc, attach_weights
from groupwise.train.learner import Learner
from groupwise.types import Sample


class SharedMemory:
    """What CUDA IPC does, in the CPU's memory: the storage moves into /dev/shm, and others map it."""

    def export(self, tensor: Tensor) -> dict[str, Any]:
        manager, name, size = tensor.untyped_storage()._share_filename_cpu_()
        place = {"offset": tensor.storage_offset(), "shape": tensor.shape, "stride": tensor.stride()}
        dtype = str(tensor.dtype).removeprefix("torch.")
        return {"manager": manager.decode(), "name": name.decode(), "bytes": size, "dtype": dtype, **place}

    def attach(self, handle: dict[str, Any]) -> Tensor:
        names = (handle["manager"].encode(), handle["name"].encode())
        storage = torch.UntypedStorage._new_shared_filename_cpu(*names, handle["bytes"])
        tensor = torch.empty(0, dtype=getattr(torch, handle["dtype"]))
        return tensor.set_(storage, handle["offset"], tuple(handle["shape"]), tuple(handle["stride"]))


def main(model: str, offer: str, parent: str, device: str = "cpu") -> None:
    base = load_model(model, device="cpu", dtype="float32")
    try:
        attach_weights(
            base, Path(offer), parent=int(parent), transport=CudaIpc() if device == "cuda" else SharedMemory()
        )
    except ModelError as error:
        return print(json.dumps({"refused": error.message}), flush=True)
    learner = Learner(base, lora=LoraSpec(rank=2, alpha=4.0, targets=["k_proj"]))
    sample = Sample(prompt_ids=(3, 1, 4), completion_ids=(1, 5), mask=(1, 1))
    before = learner.forward([sample])
    learner.forward_backward_supervised([sample])
    learner.optim_step(learning_rate=0.1)
    trained = learner.forward([sample]) != before
    for more in (True, False):
        embedding = base.model.get_input_embeddings().weight
        seen = {"hash": weights_hash(base.model), "first": float(embedding.flatten()[0]), "trained": trained}
        tied = base.model.get_output_embeddings().weight.data_ptr() == embedding.data_ptr()
        print(json.dumps(seen | {"tied": tied, "logprobs": before[0]}), flush=True)
        while more and not Path("again").exists():
            time.sleep(0.01)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
