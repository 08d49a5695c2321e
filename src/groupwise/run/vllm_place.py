"""The place of the vLLM servers that a run starts: GPUs that no learner uses, or what training leaves of the learner's
own.

vLLM takes its share of a GPU when it starts, and refuses to where less is free; the learner is there first. So on GPUs
of its own it takes nine tenths, and on the learner's what the worst batch of training leaves (`gpu_fit`). What the
configuration says goes before. Which GPUs are whose is `engine/vllm/seats.py`'s plan.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from groupwise.config.engine import OWN_SHARE, VllmConfig
from groupwise.config.run import RunConfig
from groupwise.config.world import World, world
from groupwise.engine.vllm.seats import Seats, seats_of
from groupwise.errors import ConfigError
from groupwise.model.memory import GIB
from groupwise.run.gpu_fit import Cards, fit


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Holds the section `vllm` with the share of a GPU that its servers take, and the servers' places (None: the run
    starts no servers)."""

    vllm: VllmConfig
    seats: Seats | None


def with_place(config: RunConfig, device: torch.device) -> tuple[RunConfig, Seats | None]:
    """Return the configuration with the share of a GPU that vLLM gets, and the places of its servers on all machines of
    this world; None where the run starts no servers. Raises ConfigError where training leaves too little."""
    if config.engine != "vllm" or config.vllm.urls:
        return config, None
    visible, gib = visible_gpus(device), 0.0
    if device.type == "cuda":  # gpu-only: how large it is
        gib = torch.cuda.get_device_properties(device).total_memory / GIB
    here = world()
    placed = place_of(config, visible=visible, first=first_of(device, here), gib=gib, here=here)
    return config.model_copy(update={"vllm": placed.vllm}), placed.seats


def visible_gpus(device: torch.device) -> list[str]:
    """Return the GPUs of this machine that the processes of a run on `device` see, by the names that CUDA has for them;
    none if it is not a CUDA GPU."""
    if device.type != "cuda":  # gpu-only below: which GPUs there are
        return []
    ids = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ids.split(",") if ids else [str(number) for number in range(torch.cuda.device_count())]


def first_of(device: torch.device, here: World) -> int:
    """Return the number of the first GPU that a learner of this machine uses, by the one that this process uses."""
    return (device.index or 0) - here.local_rank if here.size > 1 else device.index or 0


def place_of(config: RunConfig, *, visible: Sequence[str], first: int, gib: float, here: World | None = None) -> Placed:
    """Return the place of vLLM among the `visible` GPUs of each machine, of `gib` each; learners use those from number
    `first` on. Raises ConfigError as `with_place`."""
    vllm, here = config.vllm, here or World()
    learners = config.train.devices or here.size
    each = here.local_size or learners
    seats = None
    if vllm.mode == "server":
        nodes = max(1, learners // each)
        seats = seats_of(vllm, learners=each, visible=visible, first=first, nodes=nodes)
    share = vllm.gpu_memory_utilization
    if share is None and visible:
        apart = seats is not None and not seats.shared
        share = OWN_SHARE if apart else _left(config, learners=learners, gib=gib)
    return Placed(vllm=vllm.model_copy(update={"gpu_memory_utilization": share}), seats=seats)


def _left(config: RunConfig, *, learners: int, gib: float) -> float:
    """Return the share of a GPU that training leaves to vLLM."""
    found = fit(config, Cards(count=learners, gib=gib))
    if not found.left:
        raise ConfigError(
            f"training takes up to {found.needed.total / GIB:.1f} of the GPU's {gib:.0f} GiB, which leaves too little "
            "to a vLLM on the same GPU",
            hint="use engine: local, give vLLM a GPU of its own, or say vllm.gpu_memory_utilization yourself",
            field="vllm.gpu_memory_utilization",
        )
    return found.left
