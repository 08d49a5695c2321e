"""Fully sharded training in two processes on one card: does it take the step that one process takes?

Each process keeps a half of the weights on the card. NCCL takes two ranks on one GPU from 2.30 on only, if it is told
to, so gloo carries what they exchange, by way of the host: this shows that the numbers are right and the memory is cut,
not a speed. In one process and in two the same batch is trained on twice; loss and gradient norm of both steps must be
alike (`ALIKE`), or the case has failed.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from subjects import Shape, load, samples_of
from torch.distributed import PrefixStore, rendezvous  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.tensor import DTensor

from gpu.cases import Cases, Result, Setting
from groupwise.algo.loss import resolve_loss
from groupwise.config.lora import LoraSpec
from groupwise.config.world import World
from groupwise.train.fully_sharded import FullySharded
from groupwise.train.learner import Learner
from groupwise.train.ranks import Ranks

SIZE = 2
ALIKE = {"bfloat16": 2e-2, "float32": 1e-4}  # relative; in 16 bits a GPU adds up in the order of its batches
DEADLINE_S = 120.0
NUMBERS = ("loss/policy", "optim/grad_norm")
GIB = 1 << 30


def cases(setting: Setting) -> Cases:
    model = setting.of("0.6B", "tiny")
    ways = {"an adapter": LoraSpec(), "all parameters": None}
    return {f"{model}, {name}": partial(beside_one, model, lora, setting) for name, lora in ways.items()}


def beside_one(model: str, lora: LoraSpec | None, setting: Setting) -> Result:
    """Two steps in this process and in two others; raises ValueError if they differ."""
    alone = trained(model, lora, setting, None)
    if setting.device != "cpu":
        torch.cuda.empty_cache()
    together = in_processes(model, lora, setting)
    off = max(
        abs(theirs[key] - own[key]) / max(abs(own[key]), 1e-3)
        for found in together
        for theirs, own in zip(found["steps"], alone["steps"], strict=True)
        for key in NUMBERS
    )
    row: dict[str, Any] = {"off by": off, "held": max(found["held"] for found in together)}
    if setting.device != "cpu":
        row |= {"peak GiB": alone["peak"] / GIB, "of each": max(found["peak"] for found in together) / GIB}
    if not off <= ALIKE[setting.dtype]:
        raise ValueError(f"two processes are off by {off:.3g} from one: {alone['steps']}, {together}")
    return {"row": row, "alone": alone, "together": together}


def trained(model: str, lora: LoraSpec | None, setting: Setting, ranks: Ranks | None) -> dict[str, Any]:
    """Metrics of two steps, the share of the weights that is held here, and the peak of the card's memory."""
    base = load(model, device=setting.device if ranks is None else "cpu", dtype=setting.dtype)
    shape = setting.of(Shape(256, 256, 8, 4), Shape(6, 5, 3, 2))
    learner = Learner(
        base,
        lora=lora,
        micro_tokens=shape.packed // 2,
        attention="merged",
        strategy=None if ranks is None else FullySharded(ranks),
    )
    spec, samples = resolve_loss("grpo"), samples_of(shape)
    steps = [learner.step(samples, spec, learning_rate=1e-5) for _ in range(2)]
    cut = [parameter for parameter in learner.model.parameters() if isinstance(parameter, DTensor)]
    held = sum(parameter.to_local().numel() for parameter in cut) / max(1, sum(parameter.numel() for parameter in cut))
    return {
        "steps": [{key: step[key] for key in NUMBERS} for step in steps],
        "held": held if cut else 1.0,
        "peak": torch.cuda.max_memory_allocated() if setting.device != "cpu" else 0,
    }


def in_processes(model: str, lora: LoraSpec | None, setting: Setting) -> list[dict[str, Any]]:
    """What each of `SIZE` new processes found; raises RuntimeError with what one of them raised."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with context.Pool(SIZE) as pool:
        asked = [pool.apply_async(one_of, (rank, port, model, lora, setting)) for rank in range(SIZE)]
        return [each.get() for each in asked]


def one_of(rank: int, port: int, model: str, lora: LoraSpec | None, setting: Setting) -> dict[str, Any]:
    """In one of them: meet the other, over gloo whatever the device, and train."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(SIZE)}
    store, _, _ = next(iter(rendezvous("env://")))
    dist.init_process_group("gloo", store=PrefixStore("groups", store), rank=rank, world_size=SIZE)
    device = torch.device(setting.device, 0) if setting.device != "cpu" else torch.device("cpu")
    world = World(rank=rank, size=SIZE, local_rank=0)
    ranks = Ranks(world, PrefixStore("orders", store), device=device, deadline_s=DEADLINE_S)
    try:
        return trained(model, lora, setting, ranks)
    finally:
        ranks.close()
