"""Loads a causal language model, and finds out what trainer and engine need: context, end tokens, type, fingerprint.

`model: starter` is the embedded model; anything else is a local directory or a Hugging Face name and goes through
transformers' auto classes, with remote code off. The trainer and the engine each get their own module tree
(`share_weights`) over the SAME weight tensors, so that adapters inside one never show in the other and the base is in
memory once.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.pytorch_utils import Conv1D

from groupwise.config.chat import ChatConfig
from groupwise.config.hub import model_path, reading
from groupwise.errors import ModelError
from groupwise.model.adaptable import adaptable_modules, is_routing
from groupwise.model.attention import ATTENTION
from groupwise.model.chat import configure_chat, remember_ends, stop_ids
from groupwise.model.head import CAST_HEAD
from groupwise.model.mixture import routing_shape
from groupwise.model.quantized import (
    PACKAGE,
    bits_config,
    quantization_of,
    require_bitsandbytes,
    take_over,
)
from groupwise.model.recurrent_layers import pack_recurrent_layers
from groupwise.model.targets import AdaptableModules
from groupwise.model.vision import attention_of_eyes, open_eyes, set_attention_of_eyes
from groupwise.platform import no_such_gpu
from groupwise.recorded import RoutingShape

READ_AS_TEXT = ("llama4", "mllama")  # what is seen would be attended to in chunks, or as its own rows
UNREADABLE = (OSError, ValueError, KeyError, SafetensorError)


@dataclass(frozen=True)
class LoadedModel:
    """A base model ready to sample from and to train: dropout off, gradients off, weights on `device`."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    hash: str

    def __post_init__(self) -> None:
        generation: Any = self.model.generation_config
        remember_ends(self.tokenizer, getattr(generation, "eos_token_id", None))

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def context_length(self) -> int:
        """Return the most tokens that a prompt and its completion may have together."""
        return context_length(self.model.config)

    @property
    def vocabulary(self) -> int:
        """Return how many token ids there are; they go from 0."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def quantization(self) -> str | None:
        """Return how weights are quantised, `nf4` or `int8`; None: not at all."""
        return quantization_of(self.model)

    @property
    def adaptable(self) -> AdaptableModules:
        """Return the modules that adapters of this model can change."""
        return adaptable_modules(self.model)

    @property
    def routing(self) -> RoutingShape | None:
        """Return how the model's routers choose experts; None for a model that is not a mixture."""
        return routing_shape(self.model)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Return the ids that end a completion: the generation config's, the tokenizer's and the chat template's."""
        return stop_ids(self.tokenizer)


def context_length(config: PreTrainedConfig) -> int:
    """Return tokens of the longest row: those that the model has positions for, of these as many as `longest_row`
    admits."""
    text: Any = config.get_text_config()
    positions = int(getattr(text, "max_position_embeddings", 1 << 20))
    return min(positions, longest_row(text) or positions)


def longest_row(config: PreTrainedConfig) -> int | None:
    """Return tokens up to which the rotary positions of a text configuration are the same in every row; None: of any
    length.

    Long rope (Phi-3, arXiv 2402.13753) has other frequencies for all tokens of a row that is longer, dynamic rope other
    ones for each length. There a token has no one log-probability: what was sampled in a row that was still short
    would be trained as another token, and rows computed together would change each other.
    """
    settings: Any = config
    ropes: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    longest = []
    for rope in (ropes, *(part for part in ropes.values() if isinstance(part, dict))):
        kind, trained = str(rope.get("rope_type")), rope.get("original_max_position_embeddings")
        if kind == "longrope":
            trained = getattr(config, "original_max_position_embeddings", None) or trained  # Phi-3 has it outside
            longest.append(int(trained or settings.max_position_embeddings))
        elif "dynamic" in kind:
            longest.append(int(settings.max_position_embeddings))
    return min(longest, default=None)


def resolve_device(device: str = "auto") -> torch.device:
    """`auto` is the first CUDA GPU where there is one, else Apple's (`mps`), else the CPU. Raises ModelError when the
    device asked for is not there."""
    there = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available, "cpu": lambda: True}
    if device == "auto":
        return torch.device(next(kind for kind, is_there in there.items() if is_there()))
    chosen = torch.device(device)
    if not there[chosen.type]():
        raise no_such_gpu(device)
    return chosen


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a CUDA GPU and float32 elsewhere. Raises ModelError for float64 where there is none."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32  # gpu-aware
    if dtype == "float64" and widest_float(device) != torch.float64:
        raise ModelError(f"dtype is float64, which the device {device} does not have", hint="set dtype: float32")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[dtype]


def widest_float(device: torch.device) -> torch.dtype:
    """Return the type of sums and log-probabilities: float64, and float32 on Apple's GPUs, which have nothing wider."""
    return torch.float32 if device.type == "mps" else torch.float64  # gpu-aware


class ModelSettings(Protocol):
    """The settings in a run's or a server's configuration by which its model is loaded."""

    @property
    def model(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def quantization(self) -> str | None: ...
    @property
    def cast_lm_head(self) -> str: ...
    @property
    def chat(self) -> ChatConfig: ...
    @property
    def folder(self) -> Path: ...


def load_configured(config: ModelSettings, *, device: str | None = None, dtype: str | None = None) -> LoadedModel:
    """Return the model of a configuration, as `load_model`; `device` and `dtype` in the place of the
    configuration's. Raises ConfigError for a chat template that is not there."""
    base = load_model(
        config.model,
        device=device or config.device,
        dtype=dtype or config.dtype,
        quantization=config.quantization,
        cast_lm_head=config.cast_lm_head,
    )
    configure_chat(base.tokenizer, config.chat, folder=config.folder)
    return base


def load_model(
    name: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    quantization: str | None = None,
    cast_lm_head: str = "auto",
) -> LoadedModel:
    """Load `name` (one of the package, such as "starter", a directory, or a Hugging Face name).

    `quantization` is `nf4`, `int8` or None (`model.quantized`); a checkpoint that bitsandbytes quantised is loaded as
    it is. `cast_lm_head` is `float32`, `none` or `auto`, which is float32 for bfloat16 on a CUDA GPU (`Head`).

    Raises:
        ModelError: the model or its tokenizer is not there or cannot be read, which says where it was looked for; or
            it cannot be quantised so.
    """
    path = model_path(name)
    where = resolve_device(device)
    kind = resolve_dtype(dtype, where)
    try:
        with reading(path):
            config = AutoConfig.from_pretrained(path)
            options = _quantization_options(config, name, quantization, where, kind)
            tokenizer = AutoTokenizer.from_pretrained(path)
            model = auto_class(config).from_pretrained(path, config=config, dtype=kind, **options)
            open_eyes(model, tokenizer, path)
    except ImportError as error:  # as of Gemma 3n's tower, which is timm's
        said = " ".join(str(error).split())
        raise ModelError(f"model {name!r} needs a package that is not here: {said}", hint="install it") from error
    except UNREADABLE as error:
        raise not_loaded("model", name, error) from error
    if options:
        take_over(model)
        if quantization_of(model) is None:
            kind_of = type(model).__name__
            raise ModelError(
                f"{name!r} cannot be quantised: {kind_of} has no linear layer to quantise", hint="leave it out"
            )
    model.to(where)  # pyright: ignore[reportArgumentType]
    setattr(model, CAST_HEAD, cast_lm_head)
    return wrap_model(model, tokenizer, name=name)


def _quantization_options(
    config: PreTrainedConfig, name: str, kind: str | None, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for a model in 4 or 8 bits; empty for any other. Raises ModelError."""
    saved: Any = getattr(config, "quantization_config", None)
    if saved is not None:
        saved = saved if isinstance(saved, dict) else saved.to_dict()
        have = str(saved.get("quant_method", "")).rpartition(".")[2]
        if PACKAGE not in have.lower().replace("bits_and_bytes", PACKAGE):
            raise ModelError(
                f"{name!r} was quantised by {have!r}; only weights that {PACKAGE} quantised can be trained on",
                hint="name the model that it was made from, and set quantization: nf4 or int8",
            )
        have = "int8" if saved.get("load_in_8bit") else str(saved.get("bnb_4bit_quant_type", "fp4"))
        if kind not in (None, have):
            raise ModelError(
                f"quantization is {kind!r}, and {name!r} was saved quantised as {have!r}", hint="leave it out"
            )
        require_bitsandbytes(f"{name!r}, which was saved as {have},")
        return {"device_map": {"": str(device)}}
    if kind is None:
        return {}
    if device.type == "mps":  # gpu-only: quantised weights on an Apple GPU are refused
        raise ModelError(f"quantization {kind} does not run on Apple's GPUs", hint="set device: cpu, or leave it out")
    options = bits_config(kind, dtype, keep=not_quantised(config))
    return {"quantization_config": options, "device_map": {"": str(device)}}


def empty_model(config: PreTrainedConfig, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Return a model of this configuration without weights (on torch's meta device): its modules, and their shapes."""
    with torch.device("meta"):
        return auto_class(config).from_config(copy.deepcopy(config), **({} if dtype is None else {"dtype": dtype}))


def auto_class(config: PreTrainedConfig) -> Any:
    """Return transformers' class by which a model of this configuration is made: that of models of images and text
    if it has vision (Qwen3.5, whose text decoder also has its own class), or is not a causal language model
    by itself."""
    sees = getattr(config, "vision_config", None) is not None and config.model_type not in READ_AS_TEXT
    seeing = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    seeing = seeing and (sees or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING)
    return AutoModelForImageTextToText if seeing else AutoModelForCausalLM


def not_quantised(config: PreTrainedConfig) -> list[str]:
    """Return the full names of the linear layers that quantisation leaves as they are: the LM head, routers, and what
    takes no adapter because it is not a part of the text decoder or is multiplied without being called."""
    model = empty_model(config)
    modules, refused = dict(model.named_modules()), adaptable_modules(model).refused
    return [
        name for name, module in modules.items()
        if isinstance(module, nn.Linear | Conv1D)
        and (isinstance(module, Conv1D) or refused.get(name, "is none of the decoder") or is_routing(name, modules))
    ]  # fmt: skip


def load_config(name: str) -> PreTrainedConfig:
    """Return the configuration of a model, without its weights. Raises ModelError as `load_model`."""
    try:
        with reading(path := model_path(name)):
            return AutoConfig.from_pretrained(path)
    except UNREADABLE as error:
        raise not_loaded("the configuration of model", name, error) from error


def load_tokenizer(
    name: str, *, revision: str | None = None, chat: ChatConfig | None = None, folder: Path = Path()
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model (of a Hugging Face name at `revision`), without its weights, which renders chats
    as `chat` says. Raises ModelError as `load_model`, ConfigError as `configure_chat`."""
    try:
        with reading(path := model_path(name)):
            tokenizer = AutoTokenizer.from_pretrained(path, revision=revision or "main")
    except UNREADABLE as error:
        raise not_loaded("the tokenizer of model", name, error) from error
    configure_chat(tokenizer, chat or ChatConfig(), folder=folder)
    return tokenizer


def not_loaded(what: str, name: str, error: Exception) -> ModelError:
    """Return the error of a model, or a part of one, that cannot be read."""
    path = model_path(name)
    kind = "directory" if Path(path).exists() else "Hugging Face name (and there is no such directory)"
    return ModelError(
        f"{what} {name!r} cannot be loaded as a {kind}: {error}",
        hint=f"give 'starter', a directory with config.json and safetensors, or a model name; looked in {path}",
    )


def wrap_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, name: str, hash: str | None = None
) -> LoadedModel:
    """Return a model that is already in memory as a `LoadedModel`; turns dropout and gradients off in place. `hash` is
    its fingerprint (None: `weights_hash`)."""
    model.eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for attribute, value in list(vars(module).items()):  # probabilities that are given to a function
            if "dropout" in attribute and isinstance(value, float):
                setattr(module, attribute, 0.0)
    model.config.use_cache = False
    if model.dtype == torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # torch has no grouped product in float64
    return LoadedModel(name=name, model=model, tokenizer=tokenizer, hash=weights_hash(model) if hash is None else hash)


def share_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a second module tree over the same parameters and buffers: a few kilobytes, whatever the model's size."""
    tensors = [*model.parameters(), *model.buffers()]
    twin: PreTrainedModel = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    set_attention(twin, ATTENTION)
    set_attention_of_eyes(twin, attention_of_eyes(model))
    pack_recurrent_layers(twin)
    return twin


def weights_hash(model: nn.Module) -> str:
    """Return a fingerprint of the base model: every tensor's name, shape, type and about a thousand of its values."""
    tensors = model.state_dict()
    return hash_of({name: tensor.shape for name, tensor in tensors.items()}, lambda name: probe(tensors[name]))


def probe(tensor: Tensor, *, of: int | None = None, start: int = 0) -> bytes:
    """Return values of a tensor for a fingerprint, every n-th; of a tensor with `of` values it is those from `start`
    on."""
    step = max(1, (tensor.numel() if of is None else of) // 1024)
    return tensor.detach().reshape(-1)[-start % step :: step].cpu().to(torch.float64).numpy().tobytes()


def hash_of(shapes: Mapping[str, Sequence[int]], probed: Callable[[str], bytes]) -> str:
    """Return the fingerprint of tensors of these names and shapes, whose probes `probed` has."""
    digest = hashlib.sha256()
    for name in sorted(shapes):
        digest.update(f"{name} {tuple(shapes[name])}".encode() + probed(name))
    return digest.hexdigest()


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Have a model run with this attention; but what hears, which does not run here, and may not have it."""
    parts = (part for part in model.config.sub_configs if part != "audio_config")
    model.set_attn_implementation({"": name, **dict.fromkeys(parts, name)})


def plain_implementation(model: PreTrainedModel) -> str:
    """Return the name of the attention that the model brings itself."""
    return "sdpa" if model._supports_sdpa else "eager"


@contextmanager
def plain_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let the model run its own attention on ordinary padded rows inside the block."""
    before, eyes = str(model.config._attn_implementation), attention_of_eyes(model)
    set_attention(model, plain_implementation(model))
    try:
        yield
    finally:
        set_attention(model, before)
        set_attention_of_eyes(model, eyes)
