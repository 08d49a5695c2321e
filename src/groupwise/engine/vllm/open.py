"""Opens vLLM as a run's engine, from its configuration: tells vLLM what it must know of the run, and the run whom to
ask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from groupwise.config.engine import VllmConfig
from groupwise.config.hub import model_path, reading
from groupwise.config.run import RunConfig
from groupwise.engine.vllm.engine import VllmEngine
from groupwise.engine.vllm.handshake import linear_names
from groupwise.engine.vllm.publish import TrainerScores
from groupwise.engine.vllm.seats import Seats, seated, seats_of
from groupwise.engine.vllm.server import ServerLaunch, ServerProcess, Shape, StartServer, launch_of
from groupwise.engine.vllm.transfer import TakeTensor
from groupwise.errors import ConfigError, ModelError
from groupwise.model.head import head_in_float32
from groupwise.model.load import (
    LoadedModel,
    context_length,
    empty_model,
    load_configured,
    resolve_device,
    resolve_dtype,
)
from groupwise.store.export import AdapterMerge

Starters = Callable[[Shape], Sequence[StartServer]]
"""Returns who starts the servers of a run that is like the shape, one for each."""


def open_vllm(
    config: RunConfig,
    base: LoadedModel,
    reference: TrainerScores,
    *,
    starters: Starters | None = None,
    write: Callable[[Path], None] | None = None,
    stream: Callable[[TakeTensor], None] | None = None,
    device: torch.device | None = None,
    before_waking: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda text: None,
) -> VllmEngine:
    """Return the engine that a run's configuration describes.

    Args:
        starters: returns who starts its servers; None: this process, without looking for GPUs.
        write, stream, device: write the weights that are trained, give their tensors, and say where they are, where
            `base` has none.
        before_waking: see `VllmEngine`.
        say: is told what is waited for.

    Raises EngineError, ConfigError.
    """
    shape = _shape(config, base.model)
    merge = None
    if config.vllm.push == "merged":
        merge = AdapterMerge(load_configured(config, device="cpu", dtype=shape.dtype))
    colocated, starts = None, []
    if config.vllm.mode == "colocate":
        from groupwise.engine.vllm.colocate import InProcess

        _spare(base.model)
        colocated = InProcess(config.vllm, shape)
    elif not config.vllm.urls:
        starts = starts_here(config.vllm, shape, None) if starters is None else starters(shape)
    return VllmEngine(
        config.vllm,
        base,
        reference,
        targets=shape.targets,
        starts=starts,
        colocated=colocated,
        reloads=config.train.lora is None,
        merge=merge,
        write=write,
        stream=stream,
        device=device,
        rows=shape.rows,
        in_flight_updates=config.rollout.in_flight_updates,
        before_waking=before_waking,
        say=say,
    )


def starts_here(vllm: VllmConfig, shape: Shape, seats: Seats | None) -> list[StartServer]:
    """Return who starts servers on this machine; `seats` None are those that `vllm` alone says. Raises ConfigError."""
    seats = seats_of(vllm, learners=0, visible=()) if seats is None else seats
    alone = len(seats.servers) == 1 and not seats.servers[0].number
    launches = [
        launch_of(seated(vllm, seat, alone=alone), shape, beside_rank_0=seat.beside_rank_0) for seat in seats.servers
    ]
    return [partial(ServerProcess, launch) for launch in launches]


def _spare(model: PreTrainedModel) -> None:
    """Mark the trainer's model and its copies as not to be compiled. A colocated vLLM changes the classes of models
    that it runs by transformers' own code: every instance without this mark is then compiled."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            kind: Any = type(module)
            kind.do_not_compile = True


def _shape(config: RunConfig, model: PreTrainedModel) -> Shape:
    """Return what vLLM must know of a run, whose model is like `model`."""
    lora = config.train.lora
    targets = () if lora is None or config.vllm.push == "merged" else lora.targets
    shape = shape_of(
        config.model,
        model,
        rank=config.vllm.max_lora_rank or (1 if lora is None else lora.rank),
        targets=targets,
        rows=config.rollout.batch_rows,
        device=config.device,
        cast_lm_head=config.cast_lm_head,
    )
    if lora is None and shape.cpu and _is_tied(model):
        raise ConfigError(
            f"train.lora is null; {config.model} has tied embeddings: on a CPU vLLM 0.32 keeps their old output layer",
            hint="set train.lora, use engine: local, or sample on a GPU",
        )
    return replace(shape, reloads=not targets)


def _is_tied(model: PreTrainedModel) -> bool:
    """Return whether the output layer is the embeddings, which of a model that sees its own configuration says."""
    configs = (model.config, model.config.get_text_config())
    return any(getattr(config, "tie_word_embeddings", False) for config in configs)


def shape_of(
    name: str,
    model: PreTrainedModel,
    *,
    rank: int,
    targets: str | Sequence[str],
    rows: int,
    device: str,
    cast_lm_head: str,
) -> Shape:
    """Return the facts that vLLM needs about the model `name`, which is like `model`, and about its adapters."""
    dtype, cpu = model.dtype, resolve_device(device).type != "cuda"  # gpu-aware
    return Shape(
        model=model_path(name),
        dtype=str(dtype).removeprefix("torch."),
        context_length=context_length(model.config),
        rank=rank,
        targets=linear_names(model, targets) if targets else (),
        rows=rows,
        cpu=cpu,
        sees=getattr(model.config, "vision_config", None) is not None,
        float32_head=dtype == torch.float32 or head_in_float32(cast_lm_head, dtype, on_gpu=not cpu),
    )


def read_launch(config: RunConfig, *, port: int) -> ServerLaunch:
    """Return the server of a run, without loading weights. Raises ConfigError, ModelError."""
    path = model_path(config.model)
    try:
        with reading(path):
            shape = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"model {config.model!r} cannot be read: {error}") from error
    model = empty_model(shape, dtype=resolve_dtype(config.dtype, resolve_device(config.device)))
    return launch_of(config.vllm, _shape(config, model), port=port)
