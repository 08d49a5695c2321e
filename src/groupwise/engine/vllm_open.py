"""From a configuration to vLLM as the engine: what vLLM must know of a run, and whom the run asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from groupwise.config.hub import reading
from groupwise.config.run import STARTER, STARTER_DIR, RunConfig
from groupwise.engine.vllm import VllmEngine
from groupwise.engine.vllm_handshake import linear_names
from groupwise.engine.vllm_server import Launch, Shape, launch_of
from groupwise.engine.vllm_sync import Reference
from groupwise.errors import ConfigError, ModelError
from groupwise.model.load import LoadedModel, context_length, resolve_device, resolve_dtype


def open_vllm(
    config: RunConfig, base: LoadedModel, reference: Reference, *, say: Callable[[str], None] = lambda text: None
) -> VllmEngine:
    """The engine that a run's configuration describes; `say` is told what is waited for. Raises EngineError,
    ConfigError."""
    shape = _shape(config, base.model)
    colocated, launches = None, []
    if config.vllm.mode == "colocate":
        from groupwise.engine.vllm_colocate import InProcess

        colocated = InProcess(config.vllm, shape)
    elif not config.vllm.urls:
        launches = [launch_of(config.vllm, shape)]
    return VllmEngine(
        config.vllm,
        base,
        reference,
        targets=shape.targets,
        launches=launches,
        colocated=colocated,
        reloads=shape.reloads,
        say=say,
    )


def _shape(config: RunConfig, model: PreTrainedModel) -> Shape:
    """What vLLM must know of a run, whose model is like `model`."""
    lora = config.train.lora
    shape = shape_of(
        config.model,
        model,
        rank=config.vllm.max_lora_rank or (1 if lora is None else lora.rank),
        targets="all-linear" if lora is None else lora.targets,
        rows=config.rollout.batch_rows,
        device=config.device,
    )
    if lora is None and shape.cpu and model.config.get_text_config().tie_word_embeddings:
        raise ConfigError(
            f"train.lora is null; {config.model} has tied embeddings: on a CPU vLLM 0.32 keeps their old output layer",
            hint="set train.lora, use engine: local, or sample on a GPU",
        )
    return replace(shape, reloads=lora is None)


def shape_of(
    name: str, model: PreTrainedModel, *, rank: int, targets: str | Sequence[str], rows: int, device: str
) -> Shape:
    """What vLLM must know of the model `name`, which is like `model`, and of its adapters."""
    return Shape(
        model=str(STARTER_DIR) if name == STARTER else name,
        dtype=str(model.dtype).removeprefix("torch."),
        context_length=context_length(model.config),
        rank=rank,
        targets=linear_names(model, targets),
        rows=rows,
        cpu=resolve_device(device).type == "cpu",
    )


def read_launch(config: RunConfig, *, port: int) -> Launch:
    """The server of a run, without loading weights. Raises ConfigError, ModelError."""
    path = str(STARTER_DIR) if config.model == STARTER else config.model
    try:
        with reading(path):
            shape = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"model {config.model!r} cannot be read: {error}") from error
    with torch.device("meta"):
        dtype = resolve_dtype(config.dtype, resolve_device(config.device))
        model = AutoModelForCausalLM.from_config(shape, dtype=dtype)
    return launch_of(config.vllm, _shape(config, model), port=port)
