"""How long does a whole model take to another process: sent over gloo in chunks, or written into a file and read?

    python benchmarks/weight_transfer.py [--hidden 768 --layers 12] [--versions 3] [--directory DIR]

A process beside this one takes a random model (150M parameters in float32 unless told otherwise) as a vLLM server on
CPUs does, by the code that sends and receives it there (`engine/vllm/transfer.py`, `engine/vllm_plugin`), without what
vLLM makes of it. The file is what `vllm.transfer: file` writes, in DIR (a temporary one), which the process reads.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config

from groupwise.engine.vllm.client import TakesWeights
from groupwise.engine.vllm.transfer import Transfers
from groupwise.engine.vllm_plugin import groupwise_gloo
from groupwise.model.checkpoint_tensors import checkpoint_tensors

TIMEOUT_S = 120.0


def receive(line: Any) -> None:
    """Play the server: do what it is told, answer with the bytes that it has."""
    torch.set_num_threads(1)
    group = None
    line.send(0)  # it is there
    while (asked := line.recv()) is not None:
        what, told = asked
        if what == "meet":
            rank = told.pop("rank_offset")
            group = groupwise_gloo.join(groupwise_gloo.Meeting(**told), rank)
            line.send(0)
        elif what == "update":
            packed, *_ = groupwise_gloo.receive(group, told["dtype_names"], told["shapes"])
            line.send(packed.numel())
        else:
            line.send(sum(each.clone().nbytes for each in load_file(told).values()))


class Server:
    """The process as `Transfers` asks a server."""

    url, updating, weights = "http://127.0.0.1:1", False, None

    def __init__(self, line: Any):
        self._line, self.bytes = line, line.recv()

    async def taking(self) -> TakesWeights:
        return TakesWeights(backend=groupwise_gloo.BACKEND, dtype="float32")

    async def workers(self) -> int:
        return 1

    def ask(self, what: str, told: Any) -> int:
        self._line.send((what, told))
        return self._line.recv()

    async def meet(self, told: Mapping[str, Any], *, timeout: float) -> None:
        await asyncio.to_thread(self.ask, "meet", dict(told))

    async def start_update(self, *, timeout: float) -> None:
        self.bytes = 0

    async def update(self, told: Mapping[str, Any], *, timeout: float) -> None:
        self.bytes += await asyncio.to_thread(self.ask, "update", dict(told))

    async def finish_update(self, label: str, *, timeout: float) -> None:
        self.weights = label


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--versions", type=int, default=3, help="of which the quickest counts")
    parser.add_argument("--directory", type=Path, default=None, help="where files are written")
    given = parser.parse_args()
    shape = {"hidden_size": given.hidden, "intermediate_size": 4 * given.hidden, "num_hidden_layers": given.layers}
    config = Qwen3Config(**shape, num_attention_heads=given.hidden // 64, vocab_size=given.vocabulary, head_dim=64)
    model = AutoModelForCausalLM.from_config(config)
    size = sum(tensor.nbytes for _, tensor in checkpoint_tensors(model))

    mine, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(theirs,), daemon=True)
    process.start()
    server: Any = Server(mine)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop)

    def lost(_: Any, why: str) -> None:
        raise SystemExit(why)

    transfers = Transfers("auto", device=torch.device("cpu"), timeout_s=TIMEOUT_S, run=run, give_up=lost)
    run(transfers.begin(server)).result()
    sent, written, read = list[float](), list[float](), list[float]()
    with TemporaryDirectory(dir=given.directory) as directory:
        for number in range(given.versions + 1):  # the first meets
            began = time.monotonic()

            def stream(take: Any) -> None:
                for name, tensor in checkpoint_tensors(model):
                    take(name, tensor)

            transfers.send([server], str(number), stream)
            sent.append(time.monotonic() - began)
            if server.weights != str(number) or server.bytes != size:
                raise SystemExit(f"{server.bytes} of {size} bytes have come")
            began = time.monotonic()
            model.save_pretrained(directory)
            written.append(time.monotonic() - began)
            began = time.monotonic()
            if server.ask("read", str(Path(directory) / "model.safetensors")) != size:
                raise SystemExit("the file has other tensors")
            read.append(time.monotonic() - began)
    mine.send(None)
    process.join()
    print(f"{size / 1e6:.0f} MB: first sent in {sent[0]:.2f} s, later in {min(sent[1:]):.2f} s")
    print(f"written in {min(written[1:]):.2f} s and read in {min(read[1:]):.2f} s")


if __name__ == "__main__":
    main()
