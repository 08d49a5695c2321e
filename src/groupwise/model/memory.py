"""Estimates the size of a step and the memory of a run from the configuration, before anything is trained.

    step_size       prompts, completions, tokens, decoding waves, forward passes and optimizer steps of a rollout batch
    memory          bytes of the process, the weights, what is trained, the engine's keys and values, one micro-batch;
                    of vLLM nothing where it has its own process, and its share where it is in this one
    fitting_tokens  the largest micro-batch for which that stays within `train.memory_gb`, or what a GPU has free
    longest_sample  the most tokens that a prompt and its completion may have together then

Memory is that of the worst batch the configuration admits: the longest prompt everywhere, completions of
`rollout.max_tokens`, and attention's grids either full, or with as much padding as `model.packing` allows.
`activation_bytes` counts the bytes of one micro-batch; on a CPU, what its allocator holds back is added to them. Of
several processes it is rank 0's, which has the engine besides: with `train.parallel: fsdp` its share of the weights,
and the weights gathered at once (embeddings and LM head, and these or a decoder layer a second time), and the whole
base only if something other than the learner computes with it (`RunConfig.keeps_base`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from groupwise.config.run import RunConfig
from groupwise.config.world import world
from groupwise.errors import ConfigError
from groupwise.model.activations import ModelSize, PackedShape, Training, activation_bytes

MOMENTS = {"adamw": 8, "adamw_8bit": 2, "paged_adamw_8bit": 2}  # bytes of both moments of a float32 parameter

ENGINE_VERSIONS = 2  # of an adapter: the one that samples and the one it is given

CACHE_SHARE = 0.5  # of a GPU's memory that is free once a model is there: the engine's keys and values

MERGED_BYTES = 1 << 30  # of merged weights, `engine.multi_lora`

STORE_GROWTH = 5 / 4  # of the engine's keys and values beyond what is needed, `engine.kv_cache`

PADDING = 4  # cells of attention's grids a token of the budget, `model.packing.MAX_PADDING`

HELD_BACK = 9 / 8  # in use and held back by a CPU's allocator, of what is in use: benchmarks/memory.py

HELD_BACK_CHECKPOINTED = 3 / 2  # ... where one layer after another is computed again

PROCESS_BYTES = 512 << 20  # Python and the libraries, on a CPU, about

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """The size of one rollout batch: its prompts, completions, tokens and forward passes."""

    prompts: int
    completions: int
    tokens: int
    """About so many, from mean lengths; prompts count once per group where groups are packed."""
    max_tokens: int
    """Completion tokens at most."""
    decode_waves: int
    forwards: int
    """Forward and backward passes."""
    optimizer_steps: int
    epochs: float | None
    """Passes over the dataset in the whole run; None if the number of rows is not known."""


def step_size(
    config: RunConfig,
    *,
    prompt_tokens: float,
    completion_tokens: float,
    rows: int | None,
    micro_tokens: int | None = None,
    packed: bool = True,
) -> StepSize:
    """`prompt_tokens` and `completion_tokens` are means; `rows` is the size of the dataset, None where it is not known;
    `micro_tokens` are those of the configuration where None; without `packed` every completion has its prompt in its
    row."""
    prompts, minibatches, passes = config.rollout.prompts_per_step, config.train.minibatches, config.train.passes
    completions = prompts * config.group_size
    tokens = round((prompts if packed else completions) * prompt_tokens + completions * completion_tokens)
    return StepSize(
        prompts=prompts,
        completions=completions,
        tokens=tokens,
        max_tokens=completions * config.rollout.max_tokens,
        decode_waves=math.ceil(completions / config.rollout.batch_rows),
        forwards=passes * minibatches * math.ceil(tokens / minibatches / (micro_tokens or config.train.micro_tokens)),
        optimizer_steps=passes * minibatches,
        epochs=None if rows is None else config.train.steps * prompts / rows,
    )


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory that a run needs, in bytes by part."""

    process: int
    weights: int
    shards: int
    merged: int
    reference: int
    teacher: int
    trained: int
    kv_cache: int
    vllm: int
    activations: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, kw_only=True)
class Load:
    """The facts about a run that memory depends on and the configuration does not have: its model, how many parameters
    are trained, its longest prompt.

    `keeps_reference`: full-parameter training with a term that reads the reference holds a frozen copy.
    `colocated`: bytes that a vLLM in this process takes. `flex`: FlexAttention is used. `packed`: whether the model
    runs packed; else in padded rows, with scores kept whole where it has no fused attention (`eager`).
    `teacher`: bytes of a teacher's weights, where these are in this process besides the model's.
    `own_cache`: of a model that is sampled by its own forward, bytes that its cache takes for each token of a row and
    whatever the row's length (`packed_check.cache_bytes`); both 0 where it is decoded without a cache.
    `cache`: bytes that the local engine's keys and values may take; None: as much as its rows need.
    `whole`: this process has the whole base, besides its share where weights are cut.
    `free`: bytes of a GPU that the run may take where `train.memory_gb` is not set; None: any.
    """

    model: ModelSize
    trained: int
    longest_prompt: int
    keeps_reference: bool = False
    teacher: int = 0
    gpu: bool = False
    colocated: int = 0
    flex: bool = False
    packed: bool = True
    eager: bool = False
    own_cache: tuple[int, int] | None = None
    cache: int | None = None
    whole: bool = True
    free: int | None = None


def memory(config: RunConfig, load: Load, *, micro_tokens: int | None = None) -> Memory:
    """Return the memory of a run at its peak, with micro-batches of `micro_tokens` (None: the configuration's)."""
    model, lora = load.model, config.train.lora
    weights = model.weights
    if lora is None:
        moments = 2 * model.value_bytes if config.train.optimizer == "adamw" else MOMENTS[config.train.optimizer]
        trained = load.trained * (model.value_bytes + moments)  # gradient and moments
        trained = trained // _shared_by(config) if _is_sharded(config) else trained
        trained = 0 if _is_offloaded(config, load) else trained
    else:  # float32 parameters, gradients and moments
        trained = load.trained * (4 * (2 + ENGINE_VERSIONS) + MOMENTS[config.train.optimizer])
    return Memory(
        process=0 if load.gpu else PROCESS_BYTES,
        weights=weights if load.whole or not _is_sharded(config) else 0,
        shards=_shards(config, load),
        merged=_merged(config, model),
        reference=weights if load.keeps_reference else 0,
        teacher=load.teacher,
        trained=trained,
        kv_cache=_keys_and_values(config, load),
        vllm=load.colocated,
        activations=_activations(config, load, micro_tokens or config.train.micro_tokens),
    )


def fitting_tokens(config: RunConfig, load: Load) -> int:
    """Return the most of `train.micro_tokens` for which the memory suffices that the run may take.

    Raises:
        ConfigError: `train.memory_gb` does not suffice for a single sample or pair; says what would. (What a GPU has
            free is tried all the same: this is an estimate of the worst batch.)
    """
    least = _least(config, load)
    if _allowed(config, load) == math.inf:
        return config.train.micro_tokens
    if config.train.micro_tokens < least or not _fits(config, load, least):
        needed = memory(config, load, micro_tokens=least)
        if config.train.memory_gb is not None and needed.total > config.train.memory_gb * GIB:
            raise _too_little(config, load, needed)
        return min(config.train.micro_tokens, least)  # a longer sample is a micro-batch all the same
    low, high = least, config.train.micro_tokens
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _fits(config, load, middle) else (low, middle - 1)
    return low


def longest_sample(config: RunConfig, load: Load) -> int:
    """Return tokens of the longest sample that `train.memory_gb` suffices for, its prompt as long as the run's longest
    is; 0 where it does not suffice for a completion of one token. At most what the configuration admits."""
    low, high = 0, config.rollout.max_tokens
    while low < high:
        middle = (low + high + 1) // 2
        changed = _with(config, rollout={"max_tokens": middle})
        low, high = (middle, high) if _fits(changed, load, _least(changed, load)) else (low, middle - 1)
    return load.longest_prompt + low if low else 0


def _fits(config: RunConfig, load: Load, micro_tokens: int) -> bool:
    return memory(config, load, micro_tokens=micro_tokens).total <= _allowed(config, load)


def _allowed(config: RunConfig, load: Load) -> float:
    """Return bytes that the run may take."""
    if config.train.memory_gb is not None:
        return config.train.memory_gb * GIB
    return math.inf if load.free is None else load.free


def _too_little(config: RunConfig, load: Load, needed: Memory) -> ConfigError:
    """Return the arithmetic, and the smallest changes that would make it fit."""
    parts = {field.name: getattr(needed, field.name) for field in fields(needed)}
    listed = ", ".join(f"{name.replace('_', ' ')} {_gib(part)}" for name, part in parts.items() if part)
    ways = {
        "train.gradient_checkpointing: true": _with(config, train={"gradient_checkpointing": True}),
        **{
            f"{section}.{key}: {value}": _with(config, **{section: {key: value}})
            for section, key, first in (
                ("rollout", "batch_rows", config.rollout.batch_rows if config.engine == "local" else 0),
                ("rollout", "max_tokens", config.rollout.max_tokens),
            )
            if (value := _halved(config, load, section, key, first))
        },
    }
    longest = longest_sample(config, load)
    would = [way for way, changed in ways.items() if _fits(changed, load, _least(changed, load))]
    enough = f"train.memory_gb: {math.ceil(needed.total / GIB * 100) / 100:g}"
    least, prompt, completion = _least(config, load), load.longest_prompt, config.rollout.max_tokens
    if config.kind == "dpo":
        sample = f"one pair of {least} tokens (prompt {prompt}, each completion {completion})"
        shorter = f"completions of {longest - prompt} tokens"
    else:
        sample = f"one sample of {least} tokens (prompt {prompt}, completion {completion})"
        shorter = f"one of {longest} tokens"
    return ConfigError(
        f"train.memory_gb {config.train.memory_gb:g} does not suffice for {sample}: "
        f"{_gib(needed.total)} = {listed}" + (f"; {shorter} would fit" if longest else ""),
        hint=f"set one of: {'; '.join([*would, enough])}"
        + ("; or lower vllm.gpu_memory_utilization" if load.colocated else ""),
    )


def _halved(config: RunConfig, load: Load, section: str, key: str, value: int) -> int | None:
    """Return the first of value / 2, value / 4, ... that fits."""
    while value := value // 2:
        changed = _with(config, **{section: {key: value}})
        if _fits(changed, load, _least(changed, load)):
            return value
    return None


def _with(config: RunConfig, **sections: dict[str, int | bool]) -> RunConfig:
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=changed)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


# -- the parts ---------------------------------------------------------------------------------------------------------
def _longest(config: RunConfig, load: Load) -> int:
    """Return tokens of the longest sample."""
    return load.longest_prompt + config.rollout.max_tokens


def _least(config: RunConfig, load: Load) -> int:
    """Return tokens of the least micro-batch that holds the longest sample: a pair is never cut, and has its prompt
    twice in padded rows."""
    if config.kind != "dpo":
        return _longest(config, load)
    return _longest(config, load) + (config.rollout.max_tokens if load.packed else _longest(config, load))


def _longest_sampled(config: RunConfig, load: Load) -> int:
    """Return tokens of the longest that is sampled: evaluations may continue for longer than what is trained on."""
    evaluated = 0 if config.eval is None else config.eval.max_tokens or 0
    return load.longest_prompt + max(config.rollout.max_tokens, evaluated)


def _ranks(config: RunConfig) -> int:
    return config.train.devices or world().size


def _shared_by(config: RunConfig) -> int:
    """Return how many processes share one copy of cut weights, as `FullySharded` has it."""
    ranks, local = _ranks(config), world().local_size
    return config.train.shard_size or (local if local and ranks % local == 0 else ranks)


def _is_sharded(config: RunConfig) -> bool:
    return config.train.parallel == "fsdp" and _ranks(config) > 1


def _is_offloaded(config: RunConfig, load: Load) -> bool:
    """Return whether a rank's parts are elsewhere than the memory that is counted."""
    return _is_sharded(config) and config.train.cpu_offload and load.gpu


def _shards(config: RunConfig, load: Load) -> int:
    """Return a rank's part of the weights, and what it has gathered of them at once: FSDP2 copies what comes into the
    weights, which are there twice for a moment."""
    model = load.model
    if not _is_sharded(config):
        return 0
    layer = model.layer or _linear(model)
    rest = max(0, model.parameters - model.layers * layer)
    part = 0 if _is_offloaded(config, load) else math.ceil(model.parameters / _shared_by(config))
    return (part + rest + max(rest, 2 * layer)) * model.value_bytes


def _linear(model: ModelSize) -> int:
    """Return the number of values in a decoder layer's matrices."""
    return model.hidden * (2 * (model.query + model.key_value) + 3 * model.intermediate)


def _merged(config: RunConfig, model: ModelSize) -> int:
    """Return the bytes of merged weights, for as many policies as the engine keeps."""
    linear = model.layers * _linear(model)
    if not model.lean or model.value_bytes < 4 or model.product:
        return 0
    policies = 1 if config.train.lora is None else ENGINE_VERSIONS
    return min(policies, MERGED_BYTES // (linear * model.value_bytes)) * linear * model.value_bytes


def cache_token_bytes(model: ModelSize) -> int:
    """Return bytes of the keys and values of one token, in all layers that have some."""
    layers = model.layers if model.cached is None else model.cached
    return 2 * layers * model.key_value * model.value_bytes


def _keys_and_values(config: RunConfig, load: Load) -> int:
    """Return the bytes of every row that decodes at once and its prompt; evaluation and sampling ahead fill all rows,
    as far as the engine has room for them (`load.cache`), and for one at least.

    With vLLM the local engine only scores, and keeps none; one that never samples (`RunConfig.never_samples`), too."""
    rollout, model = config.rollout, load.model
    if config.engine != "local" or config.never_samples:
        return 0
    rows = rollout.batch_rows
    if config.eval is None and rollout.on_policy:
        rows = min(rows, math.ceil(rollout.prompts_per_step * rollout.refill) * rollout.group_size)
    if load.own_cache is not None:
        token, row = load.own_cache
        return rows * (_longest_sampled(config, load) * token + row)
    longest, token = math.ceil(_longest_sampled(config, load) * STORE_GROWTH), cache_token_bytes(model)
    cells = max(longest, min(rows * longest, math.inf if load.cache is None else load.cache // token))
    kept = 0 if config.env is None else rollout.prefix_cache_mb << 20
    return int(cells) * token + kept


def _activations(config: RunConfig, load: Load, micro_tokens: int) -> int:
    lora = config.train.lora
    training = Training(
        rank=None if lora is None else lora.rank,
        dropout=lora is not None and lora.dropout > 0,
        checkpointing=bool(config.train.gradient_checkpointing),
        offload=config.train.gradient_checkpointing == "offload",
        gpu=load.gpu,
    )
    model = replace(load.model, lean=load.model.lean and not _is_sharded(config))
    shapes = (replace(shape, flex=load.flex) for shape in _worst(config, load, micro_tokens))
    most = max(activation_bytes(model, shape, training) for shape in shapes)
    most = math.ceil(most / config.train.context_parallel_size) + model.product
    held_back = HELD_BACK_CHECKPOINTED if training.checkpointing else HELD_BACK
    return most if load.gpu else math.ceil(most * held_back)


def _worst(config: RunConfig, load: Load, micro_tokens: int) -> tuple[PackedShape, ...]:
    """Return the largest micro-batches: all completions as long as they may be, and lengths so uneven that grids are
    full of holes. Padded rows: every completion with its prompt, which may be of one token."""
    prompt, completion, size = load.longest_prompt, config.rollout.max_tokens, config.group_size
    group = prompt + size * completion
    groups = math.ceil(config.rollout.prompts_per_step / config.train.minibatches)
    if not load.packed:
        cells = min(max(micro_tokens, _least(config, load)), groups * size * _longest(config, load))
        padded = PackedShape(
            tokens=cells,
            loss_tokens=cells,
            longest_completion=_longest(config, load),
            completion_cells=cells,
            padded=True,
            eager=load.eager,
        )
        return (padded,)
    tokens = min(max(micro_tokens, _least(config, load)), groups * group)
    prompts = math.ceil(tokens / group)
    prompt_tokens = max(prompt, tokens * prompt // group)
    full = PackedShape(
        tokens=tokens,
        loss_tokens=tokens - prompt_tokens,
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        longest_prompt=prompt,
        prompt_cells=prompt_tokens,
        longest_completion=completion,
        completion_cells=tokens - prompt_tokens,
    )
    cells = min(max(PADDING * tokens, group), groups * group)
    holes = PackedShape(
        tokens=tokens,
        loss_tokens=tokens,
        prompts=groups,
        longest_prompt=prompt,
        prompt_cells=max(prompt, cells * prompt // group),
        longest_completion=completion,
        completion_cells=max(cells - cells * prompt // group, tokens) + 1,
    )
    return full, holes
