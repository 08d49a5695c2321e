"""A run's memory, estimated from its parts, and the micro-batch that `train.memory_gb`, or a GPU, leaves room for."""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Iterable, Mapping

import torch
from transformers import PreTrainedModel

from groupwise.config.engine import OWN_SHARE
from groupwise.config.run import RunConfig
from groupwise.engine.local import LocalEngine
from groupwise.model.activations import ModelSize
from groupwise.model.backbone import is_lean, unsplit_layers
from groupwise.model.layouts import FLEX
from groupwise.model.load import LoadedModel, plain_implementation
from groupwise.model.memory import GIB, Load
from groupwise.model.packed_check import cache_bytes, why_not_cached
from groupwise.model.quantized import parameter_count, product_bytes
from groupwise.platform import memory_bytes
from groupwise.run.teacher import Teacher
from groupwise.sampler import Sampler
from groupwise.tasks.rollout_sources import RolloutSource
from groupwise.train.learner import Learner
from groupwise.types import Prompt

FRAGMENTED = 1.06  # memory that an allocator takes of a GPU, of what is in use in it

ASLEEP = 3 * GIB  # of a GPU that a sleeping vLLM keeps: CUDA's libraries and graphs, by what others report of it

TOKENISED = 64  # prompts with the most characters, of which one has the most tokens


def load_of(
    config: RunConfig,
    base: LoadedModel,
    learner: Learner,
    *,
    longest_prompt: int,
    reads_reference: bool,
    teacher: Teacher | None = None,
    engine: Sampler | None = None,
) -> Load:
    """Return the load of a run for `model.memory`, given the tokens of its longest prompt."""
    model, weights = base.model, list(base.model.parameters())
    size = ModelSize.of(
        model.config.get_text_config(),
        parameters=parameter_count(model),
        value_bytes=model.dtype.itemsize,
        stored=sum(parameter.numel() * parameter.element_size() for parameter in weights),
        product=product_bytes(model),
        lean=is_lean(model) and learner.packed,
        layer=largest_layer(model),
    )
    return Load(
        model=size,
        trained=sum(parameter.numel() for parameter in learner.parameters),
        longest_prompt=longest_prompt,
        keeps_reference=config.train.lora is None and reads_reference,
        teacher=0 if teacher is None else teacher.weights,
        gpu=learner.device.type == "cuda",  # gpu-aware
        colocated=_colocated(config, learner.device, weights=size.weights),
        flex=learner.layouts is FLEX,
        packed=learner.packed,
        eager=plain_implementation(model) == "eager",
        own_cache=None if learner.packed or config.engine != "local" else _own_cache(model),
        cache=engine.cache_bytes if isinstance(engine, LocalEngine) else None,
        whole=base.device.type != "meta",
        free=free_memory(learner.device),
    )


def largest_layer(model: PreTrainedModel) -> int | None:
    """Return the parameters of the largest decoder layer, which FSDP gathers as one; None where none is named."""
    layers = unsplit_layers(model).values()
    return max((sum(p.numel() for p in layer.parameters()) for layer in layers), default=None)


def _own_cache(model: PreTrainedModel) -> tuple[int, int]:
    """Return what a plain decoder's cache takes of a row (`cache_bytes`)."""
    return (0, 0) if why_not_cached(model) is not None else cache_bytes(model)


def device_memory(device: torch.device) -> int:
    """Return bytes of a device's whole memory."""
    if device.type == "cuda":  # gpu-only: its memory
        return torch.cuda.mem_get_info(device)[1]
    return memory_bytes()


def free_memory(device: torch.device) -> int | None:
    """Return bytes of a GPU that this process has or may still take, less what is lost between its tensors; None: it is
    no CUDA GPU."""
    if device.type != "cuda":  # gpu-seen below: its memory
        return None
    free, total = torch.cuda.mem_get_info(device)
    return int(min(free + torch.cuda.memory_reserved(device), total) / FRAGMENTED)  # a sleeping vLLM counts in both


def sleeps_while_training(config: RunConfig) -> bool:
    """Return whether the vLLM on the learners' GPUs has given its memory back whenever a micro-batch is computed."""
    return config.vllm.sleep and config.rollout.on_policy


def _colocated(config: RunConfig, device: torch.device, *, weights: int) -> int:
    """Return bytes of the learner's device that vLLM takes while that trains: what it keeps asleep; or in this process
    its share of the device, or on a CPU its weights and the cache that it is told to have."""
    if config.engine != "vllm" or (config.vllm.mode != "colocate" and not config.vllm.sleep):
        return 0
    if device.type == "cuda" and sleeps_while_training(config):  # gpu-only: no CPU's vLLM sleeps
        return ASLEEP
    cache_gib = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    if device.type == "cpu" and cache_gib:
        return weights + int(cache_gib) * GIB
    return int((config.vllm.gpu_memory_utilization or OWN_SHARE) * device_memory(device))


def within_context(config: RunConfig, *, context: int) -> RunConfig:
    """Return the configuration with `max_tokens`, of the run and of its evaluations, no more than the model's context
    leaves after a prompt of one token: completions end there whatever was asked for."""
    changed: dict[str, object] = {}
    if config.rollout.max_tokens >= context:
        changed["rollout"] = config.rollout.model_copy(update={"max_tokens": context - 1})
    if config.eval is not None and (config.eval.max_tokens or 0) >= context:
        changed["eval"] = config.eval.model_copy(update={"max_tokens": context - 1})
    return config.model_copy(update=changed) if changed else config


def longest_allowed(config: RunConfig, *, context: int) -> int:
    """Return tokens of the longest prompt that is not passed over: a completion needs room for one at least."""
    return min(context - 1, config.rollout.max_prompt_tokens or context)


def longest_prompt(config: RunConfig, prompts: Iterable[Prompt], play: RolloutSource, *, context: int) -> int:
    """Return the tokens of the longest prompt that a run trains on. If the prompts are not known in advance (an
    environment, problems of rising difficulty, a stream), return the longest that fits."""
    allowed = longest_allowed(config, context=context)
    if config.env is not None or (config.data is not None and (config.data.difficulty or config.data.streaming)):
        return max(1, min(allowed, context - config.rollout.max_tokens))
    lengths = [len(play.prepare(prompt).token_ids) for prompt in heapq.nlargest(TOKENISED, prompts, key=_characters)]
    return max((length for length in lengths if length <= allowed), default=allowed)


def _characters(prompt: Prompt) -> int:
    if prompt.token_ids:
        return len(prompt.token_ids)
    asked: str | Mapping[str, object] | tuple[object, ...] = prompt.text or prompt.messages or ()
    return len(asked if isinstance(asked, str) else json.dumps(asked, default=str))
