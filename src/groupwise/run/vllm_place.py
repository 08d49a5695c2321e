"""The place of a vLLM that a run starts: GPUs that no learner uses, or what training leaves of the learner's own.

vLLM takes its share of a GPU when it starts, and refuses to where less is free; the learner is there first. So on a GPU
of its own it takes nine tenths, and on the learner's what the worst batch of training leaves (`gpu_fit`). What the
configuration says goes before.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from groupwise.config.engine import OWN_SHARE, VllmConfig
from groupwise.config.run import RunConfig
from groupwise.config.world import world
from groupwise.errors import ConfigError
from groupwise.model.memory import GIB
from groupwise.run.gpu_fit import Cards, fit


def with_place(config: RunConfig, device: torch.device) -> RunConfig:
    """Return the configuration with the GPUs and the share that vLLM gets on this machine; as it is where no vLLM is
    started, or on no GPU. Raises ConfigError where training leaves too little."""
    starts = config.engine == "vllm" and not config.vllm.urls
    if not starts or device.type != "cuda":  # gpu-only below: which GPUs vLLM gets
        return config
    ids = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = ids.split(",") if ids else [str(number) for number in range(torch.cuda.device_count())]
    gib = torch.cuda.get_device_properties(device).total_memory / GIB
    return config.model_copy(update={"vllm": place_of(config, visible=visible, first=device.index or 0, gib=gib)})


def place_of(config: RunConfig, *, visible: Sequence[str], first: int, gib: float) -> VllmConfig:
    """Return `config.vllm` with its place among the `visible` GPUs, of `gib` each; learners use those from number
    `first` on. Raises ConfigError as `with_place`."""
    vllm, learners = config.vllm, config.train.devices or world().size
    free = [gpu for number, gpu in enumerate(visible) if not first <= number < first + learners]
    apart = vllm.mode == "server" and (vllm.gpus is not None or len(free) >= vllm.tensor_parallel_size)
    gpus = vllm.gpus
    if vllm.mode == "server" and gpus is None:
        gpus = ",".join(free[: vllm.tensor_parallel_size]) if apart else visible[first]
    share = vllm.gpu_memory_utilization
    if share is None:
        share = OWN_SHARE if apart else _left(config, learners=learners, gib=gib)
    return vllm.model_copy(update={"gpus": gpus, "gpu_memory_utilization": share})


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
