"""Tell whether a run fits the GPUs that one has, from the configuration and the model's config.json alone.

    groupwise check FILE --gpus 1x80      one GPU of 80 GiB;  2x24: two of 24 GiB;  8x80 --nodes 8: 64 in 8 machines

What a run chooses on such a GPU (attention, micro-batch, rows that decode at once, what is left to vLLM) is worked out
by the code that chooses it there, over a model without weights. Memory is that of the worst batch (`model.memory`).
Times are ranges, from what was measured on one H100 (docs/performance.md): training in proportion to the parameters
that a token meets, a decode step in proportion to the layers, and what it takes to read the weights.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn
from transformers import PreTrainedModel

from groupwise.config.lora import LoraSpec
from groupwise.config.run import RunConfig
from groupwise.engine.vllm.seats import seats_of
from groupwise.errors import ConfigError
from groupwise.model.activations import ModelSize
from groupwise.model.backbone import is_lean
from groupwise.model.load import context_length, empty_model, load_config, not_quantised
from groupwise.model.memory import (
    CACHE_SHARE,
    GIB,
    STORE_GROWTH,
    Load,
    Memory,
    cache_token_bytes,
    fitting_tokens,
    memory,
)
from groupwise.model.mixture import routing_shape
from groupwise.model.packed_check import Shape, ways_of
from groupwise.run.controller_cost import controller_seconds
from groupwise.run.memory_budget import ASLEEP, FRAGMENTED, largest_layer, sleeps_while_training
from groupwise.train.lanes import is_light
from groupwise.train.lora import add_lora

CONTEXT_BYTES = 600 << 20  # of CUDA and its libraries, in each process
PROMPT_TOKENS = 512  # where the configuration does not bound a prompt
BETWEEN_TURNS = 128  # tokens that an environment says between two turns
QUANTIZED_BYTES = {"nf4": 0.57, "int8": 1.02}  # of a value, with its scales
WORTH_NF4 = 0.9  # of the weights' bytes: what nf4 leaves of them where it is worth naming
VLLM_SPARE = 0.02  # the share of a GPU's memory that is left free
LEAST_VLLM = 1.2  # of the model's weights: what a vLLM needs at least

# parameters x tokens a second of training: 0.6B at 24,741 tokens/s, 4B at 8,701, both with checkpointing on an H100
TRAINED = (1.5e13, 3.5e13)
DECODE_LAYER_S = 256 / 7095 / 28  # of a decode step of 256 rows, each of 0.6B's 28 layers: no CUDA graphs, on an H100
READ_BYTES_S = 2e12  # of weights, which every decode step reads


@dataclass(frozen=True, kw_only=True)
class Cards:
    """Names machines, `nodes` of them: each so many GPUs of this many GiB each."""

    count: int
    gib: float
    nodes: int = 1

    @property
    def total(self) -> int:
        """Return how many GPUs there are."""
        return self.count * self.nodes

    @classmethod
    def parse(cls, text: str, *, nodes: int = 1) -> Cards:
        """Read "2x24". Raises ConfigError.

        >>> Cards.parse("8x80", nodes=2)
        Cards(count=8, gib=80.0, nodes=2)
        """
        match = re.fullmatch(r"(\d{1,5})\s*[xX]\s*(\d{1,4}(?:\.\d+)?)(?:\s*(?:GB|GiB|G))?", text.strip())
        if match is None or not int(match[1]) or not float(match[2]):
            raise ConfigError(
                f"--gpus is {text!r}; it must be a number of GPUs and the GiB of each", hint="--gpus 1x80, or 2x24"
            )
        return cls(count=int(match[1]), gib=float(match[2]), nodes=nodes)


@dataclass(frozen=True, kw_only=True)
class GpuFit:
    """Holds the settings that a run would choose on these GPUs, and the memory that it would take.

    Attributes:
        learners: the number of GPUs that train.
        samplers: the number of GPUs that only vLLM uses.
        needed: bytes by part on the leading learner's GPU.
        available: bytes of this GPU that a process can use.
        rows: completions of the greatest length that decode at once; 0 if vLLM samples, or the run does not sample.
        left: the share of a learner's GPU that is left to vLLM; 0 if it does not suffice for vLLM's weights.
        active: parameters used for a token: of a mixture's experts only the chosen ones.
        decode_s: seconds of a decode step on an H100.
        weights_nf4: bytes of the weights with `quantization: nf4`; None if it cannot be set or saves next to nothing
            (experts of a mixture stay unquantised).
        prompt: tokens of the longest prompt; `assumed` says that the configuration does not bound it.
    """

    config: RunConfig
    cards: Cards
    parameters: int
    trained: int
    learners: int
    samplers: int
    attention: str
    micro_tokens: int
    rows: int
    left: float
    needed: Memory
    available: int
    active: int
    decode_s: float
    prompt: int
    assumed: bool
    weights_nf4: int | None

    @property
    def vllm_share(self) -> float | None:
        """Return `left` where vLLM shares a GPU with a learner, None where it shares none."""
        return self.left if self.config.engine == "vllm" and not self.config.vllm.urls and not self.samplers else None

    @property
    def vllm_sleeps(self) -> bool:
        """Return whether the vLLM that shares a GPU with a learner sleeps while that trains."""
        return self.vllm_share is not None and sleeps_while_training(self.config)

    @property
    def fits(self) -> bool:
        """Return whether the worst batch has room, and so has a vLLM on the same GPU."""
        return self.needed.total <= self.available and (self.vllm_share is None or self.vllm_share > 0)

    @property
    def step_seconds(self) -> tuple[float, float]:
        """Return from and to how many seconds a step takes on H100s, sampling and training."""
        rollout, train, most = self.config.rollout, self.config.train, self.most_tokens
        sampled = 0 if self.config.supervised else most
        trained = train.passes * (most + rollout.prompts_per_step * self.prompt)
        slow, fast = (self.learners * each / self.active for each in TRAINED)
        rate = (self.rows or rollout.batch_rows) / self.decode_s
        return 0.25 * (sampled / rate + trained / fast), sampled / rate + trained / slow

    @property
    def most_tokens(self) -> int:
        """Return the completion tokens of a step whose completions are all as long as they may be."""
        rollout = self.config.rollout
        return rollout.prompts_per_step * self.config.group_size * rollout.max_tokens

    @property
    def controller(self) -> dict[str, float]:
        """Return the processor seconds of rank 0 by part for such a step; nothing where nothing is sampled."""
        if self.config.supervised:
            return {}
        how = {"servers": self.config.engine == "vllm", "streamed": self.config.rollout.in_flight_updates}
        return controller_seconds(self.most_tokens, ranks=self.learners, **how)

    @property
    def hours(self) -> tuple[float, float]:
        """Return from and to how many hours the run takes, without evaluations; the lower end is for completions that
        end after a quarter of `rollout.max_tokens`."""
        low, high = self.step_seconds
        return low * self.config.train.steps / 3600, high * self.config.train.steps / 3600


def fit(config: RunConfig, cards: Cards) -> GpuFit:
    """Return the settings that a run would choose on these GPUs.

    Raises:
        ConfigError: vLLM and the learner need more GPUs than there are.
        ModelError: the model's configuration cannot be read, or the model can be neither trained nor sampled.
    """
    shape = load_config(config.model)
    packed = ways_of(shape).why_not_packed is None
    lora = config.train.lora
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    adapter = None if lora is None else lora.model_dump_json()
    counts = _counts(Shape.of(shape), dtype, config.quantization, adapter, packed)
    size, trained = counts.size, counts.trained
    learners, samplers = _shared_out(config, cards)
    prompt, assumed = _longest_prompt(config, context=context_length(shape))
    total = int(cards.gib * GIB)
    available = int((total - CONTEXT_BYTES) / FRAGMENTED)
    cache = config.rollout.cache_gb
    attention = config.train.attention
    if attention == "auto":
        attention = "flex" if packed and not is_light(size.weights) else "merged"
    load = Load(
        model=size,
        trained=trained,
        longest_prompt=prompt,
        keeps_reference=lora is None and config.reads_reference,
        gpu=True,
        flex=attention == "flex",
        packed=packed,
        colocated=ASLEEP if config.engine == "vllm" and sleeps_while_training(config) else 0,
        cache=int(cache * GIB) if cache is not None else int(CACHE_SHARE * max(0, available - size.weights)),
        whole=config.keeps_base,
        free=available,
    )
    config = config.model_copy(update={"train": config.train.model_copy(update=_placed(config, cards, learners))})
    tokens = fitting_tokens(config, load)
    needed = memory(config, load, micro_tokens=tokens)
    row = math.ceil((prompt + config.rollout.max_tokens) * STORE_GROWTH) * cache_token_bytes(size)
    return GpuFit(
        config=config,
        cards=cards,
        parameters=size.parameters,
        trained=trained,
        learners=learners,
        samplers=samplers,
        attention=attention if packed else "padded rows",
        micro_tokens=tokens,
        rows=0 if config.engine == "vllm" else min(config.rollout.batch_rows, needed.kv_cache // max(1, row)),
        left=_left(needed.total - (needed.activations + needed.vllm if needed.vllm else 0), total, size.weights),
        needed=needed,
        available=available,
        active=counts.active,
        decode_s=DECODE_LAYER_S * size.layers + size.weights / READ_BYTES_S,
        prompt=prompt,
        assumed=assumed,
        weights_nf4=_weights_nf4(config, counts.nf4, size.weights),
    )


@dataclass(frozen=True)
class _Counts:
    """Parameters of a model, those of them that a token meets, those that are trained, and the bytes of all with
    weights of 4 bits."""

    size: ModelSize
    active: int
    trained: int
    nf4: int


@lru_cache(maxsize=16)
def _counts(shape: Shape, dtype: torch.dtype, quantization: str | None, adapter: str | None, packed: bool) -> _Counts:
    """Count once a process what no GPU changes: a model of 36 layers and its adapter, without weights, take a second to
    make. `adapter` is a LoraSpec in JSON; without one all parameters are trained."""
    model = empty_model(shape.config, dtype=dtype)
    size, active = _size(model, quantization, packed=packed), _active(model)
    nf4 = _size(model, "nf4", packed=False).weights
    if adapter is not None:
        with torch.device("meta"):
            add_lora(model, LoraSpec.model_validate_json(adapter), seed=0)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return _Counts(size, active, trained, nf4)


def _size(model: PreTrainedModel, quantization: str | None, *, packed: bool) -> ModelSize:
    """Return the size of a model, with the layers in few bits that bitsandbytes would quantise."""
    value, stored, product = model.dtype.itemsize, None, 0
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if quantization is not None:
        kept = set(not_quantised(model.config))
        linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name not in kept}
        sizes = [module.weight.numel() for module in linear.values()]
        stored = int(sum(sizes) * QUANTIZED_BYTES[quantization] + (parameters - sum(sizes)) * value)
        product = max(sizes, default=0) * value  # one layer at a time is multiplied with in the weights' own type
    return ModelSize.of(
        model.config.get_text_config(),
        parameters=parameters,
        value_bytes=value,
        lean=is_lean(model) and packed,
        layer=largest_layer(model),
        stored=stored,
        product=product,
    )


def _weights_nf4(config: RunConfig, small: int, weights: int) -> int | None:
    """Return `GpuFit.weights_nf4`, of these bytes of weights in 4 bits and as they are."""
    train = config.train
    if config.quantization or config.engine == "vllm" or train.lora is None or train.parallel == "fsdp":
        return None
    return small if small < WORTH_NF4 * weights else None


def _active(model: PreTrainedModel) -> int:
    """Return the parameters that a token meets: of routed experts those that are chosen for it."""
    every = sum(parameter.numel() for parameter in model.parameters())
    routed = sum(parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name)
    shape = routing_shape(model)
    return every if shape is None else every - round(routed * (1 - shape.chosen / shape.experts))


def _placed(config: RunConfig, cards: Cards, learners: int) -> dict[str, int | None]:
    """Return the settings of `train` that say who trains: of several machines each has a copy of cut weights."""
    shared = config.train.shard_size
    if cards.nodes > 1 and config.train.parallel == "fsdp" and learners % cards.nodes == 0:
        shared = shared or learners // cards.nodes
    return {"devices": learners, "shard_size": shared}


def _shared_out(config: RunConfig, cards: Cards) -> tuple[int, int]:
    """Return how many GPUs train, and how many vLLM has to itself: none where it shares the learner's one. Without
    `train.devices` all train that servers leave, of which there is then one a machine unless `vllm.servers` says."""
    vllm, learners = config.vllm, config.train.devices
    starts = config.engine == "vllm" and vllm.starts_servers
    if learners is None:
        servers = -(-(vllm.servers or cards.nodes) // cards.nodes) if starts and not vllm.sleep else 0
        learners = cards.nodes * max(1, cards.count - servers * vllm.tensor_parallel_size)
    if learners > cards.total:
        raise ConfigError(
            f"{learners} GPUs to train are more than the {cards.total} that there are", hint="lower train.devices"
        )
    if not starts:
        return learners, 0
    each, names = -(-learners // cards.nodes), [str(number) for number in range(cards.count)]
    return learners, seats_of(vllm, learners=each, visible=names, nodes=cards.nodes).gpus


def _left(needed: int, total: int, weights: int) -> float:
    """Return the share of a GPU that is left to vLLM next to `needed`, the learner's bytes there while vLLM is awake; 0
    if it does not suffice for vLLM's weights."""
    share = math.floor(100 * ((total - CONTEXT_BYTES - needed) / total - VLLM_SPARE)) / 100
    return share if share * total >= LEAST_VLLM * weights else 0.0


def _longest_prompt(config: RunConfig, *, context: int) -> tuple[int, bool]:
    """Return tokens of the longest prompt, of an episode all before its last reply, and whether that is assumed."""
    room = max(1, context - config.rollout.max_tokens)
    first = config.rollout.max_prompt_tokens or PROMPT_TOKENS
    if config.env is not None:
        first += (config.env.max_turns - 1) * (config.rollout.max_tokens + BETWEEN_TURNS)
    return min(first, room), config.rollout.max_prompt_tokens is None
