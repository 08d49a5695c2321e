"""How large one step is and how much memory it takes: arithmetic on the configuration, before anything is trained.

    step_size   prompts, completions, tokens, decoding waves, forward passes and optimizer steps of one rollout batch
    memory      bytes of the weights, of what is trained, of the engine's keys and values, of one micro-batch

The largest micro-batch is taken to be full (`train.micro_tokens`, or the whole batch where that is smaller) and every
completion to be as long as `rollout.max_tokens`. Values that the backward pass keeps per token and layer of a decoder
with hidden size H, MLP size I, Q query and V key-value features:

    5 H (two norms, their outputs, the residual)  +  6 Q + 6 V (projections, norms, rotations, the output)  +  4 I (MLP)
    + heads x (longest prompt + longest completion) scores for a completion's token

counted on Llama's and Qwen's layers; other decoders differ by some tens of per cent. Memory that the allocator holds
back, and the second copy of a cache while it grows, come on top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from groupwise.config import RunConfig

OPTIMIZER_STATES = 2  # AdamW's moments
HEAD_TILE_VALUES = 1 << 22  # logits that exist at once, see train.logprobs
HEAD_TILE_COPIES = 4  # logits, log-probabilities, probabilities, their gradient; float32


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """One rollout batch. Token counts are expectations from measured means, but for `max_tokens`."""

    prompts: int
    completions: int
    tokens: int  # prompts once, and their completions
    max_tokens: int  # of the completions, if all were as long as they may be
    decode_waves: int  # times that the engine fills its rows
    forwards: int  # forward and backward passes
    optimizer_steps: int  # minibatches x passes
    epochs: float  # of the dataset in the whole run, without what is sampled in place of groups that teach nothing


def step_size(config: RunConfig, *, prompt_tokens: float, completion_tokens: float, rows: int) -> StepSize:
    """`prompt_tokens` and `completion_tokens` are means; `rows` is the size of the dataset."""
    prompts, minibatches, passes = config.rollout.prompts_per_step, config.train.minibatches, config.train.passes
    completions = prompts * config.rollout.group_size
    tokens = round(prompts * prompt_tokens + completions * completion_tokens)
    return StepSize(
        prompts=prompts,
        completions=completions,
        tokens=tokens,
        max_tokens=completions * config.rollout.max_tokens,
        decode_waves=math.ceil(completions / config.rollout.batch_rows),
        forwards=passes * minibatches * math.ceil(tokens / minibatches / config.train.micro_tokens),
        optimizer_steps=passes * minibatches,
        epochs=config.train.steps * prompts / rows,
    )


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """What of a decoder decides its memory. `value_bytes` is the size of one weight."""

    parameters: int
    value_bytes: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @classmethod
    def of(cls, config: Any, *, parameters: int, value_bytes: int) -> ModelSize:
        """From a transformers text config; what an older architecture does not name has its usual value."""
        hidden, heads = config.hidden_size, config.num_attention_heads
        return cls(
            parameters=parameters,
            value_bytes=value_bytes,
            layers=config.num_hidden_layers,
            hidden=hidden,
            intermediate=getattr(config, "intermediate_size", None) or 4 * hidden,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or hidden // heads,
            vocabulary=config.vocab_size,
        )


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes, by part."""

    weights: int
    reference: int
    trained: int
    kv_cache: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.reference + self.trained + self.kv_cache + self.activations


def memory(
    config: RunConfig, model: ModelSize, *, trained: int, longest_prompt: int, keeps_reference: bool = False
) -> Memory:
    """The memory of a run in which `trained` parameters are trained and the longest prompt has so many tokens.

    `keeps_reference`: full-parameter training with a term that reads the reference holds a frozen copy.
    """
    weights = model.parameters * model.value_bytes
    if config.train.lora is None:
        trained_bytes = trained * model.value_bytes * (1 + OPTIMIZER_STATES)  # gradient and moments
    else:  # float32 parameters, gradients and moments; the engine holds the version it uses and the one it is given
        trained_bytes = trained * 4 * (2 + OPTIMIZER_STATES + 2)
    length = math.ceil((longest_prompt + config.rollout.max_tokens) / 64) * 64
    kv_values = 2 * model.layers * model.kv_heads * model.head_dim * length * config.rollout.batch_rows
    return Memory(
        weights=weights,
        reference=weights if keeps_reference else 0,
        trained=trained_bytes,
        kv_cache=kv_values * model.value_bytes + (0 if config.env is None else config.rollout.prefix_cache_mb << 20),
        activations=_activations(config, model, longest_prompt=longest_prompt),
    )


def _activations(config: RunConfig, model: ModelSize, *, longest_prompt: int) -> int:
    """Bytes that one micro-batch's backward pass needs."""
    rollout = config.rollout
    group = longest_prompt + rollout.group_size * rollout.max_tokens
    tokens = min(config.train.micro_tokens, rollout.prompts_per_step // config.train.minibatches * group)
    layer = tokens * activation_values(model, keys=longest_prompt + rollout.max_tokens) * model.value_bytes
    if config.train.lora is not None and model.value_bytes < 4:  # PEFT casts each adapted module's input to float32
        layer += tokens * (5 * model.hidden + model.heads * model.head_dim + model.intermediate) * 4
    if config.train.gradient_checkpointing:  # one layer at a time, and the input of every layer
        layers = layer + model.layers * tokens * model.hidden * model.value_bytes
    else:
        layers = layer * model.layers
    head = min(tokens * model.vocabulary, max(HEAD_TILE_VALUES, model.vocabulary)) * 4 * HEAD_TILE_COPIES
    return layers + head


def activation_values(model: ModelSize, *, keys: int) -> int:
    """Values kept for the backward pass per token and layer, where a token attends to `keys` others."""
    query, key_value = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return 5 * model.hidden + 6 * (query + key_value) + 4 * model.intermediate + model.heads * keys
