"""Checks whether a model may run packed, by comparing the packed forward with the model's own before its first use.

    why_not_packed(model)     None, or the reason in words
    why_twin_not_packed(..)   likewise for a twin of a base; a model is tried once a process
    why_not_cached(model)     likewise for the model's own cache, which decodes what cannot run packed
    turn_plain(model)         what cannot run packed, to the model's own attention
    ways_of(config)           all of this from a configuration, before the model is loaded

Two comparisons. The model itself, on a few short rows: its weights, its type, its device. And where its configuration
names lengths at which its attention changes (a sliding window, a chunk, a scale that grows with the position), a small
random model of the same configuration in which these lengths are a few tokens and all rows are longer. What a length
does is the same code whatever the number is, so this says at once what rows of 8,192 tokens would say in minutes.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from groupwise.errors import ModelError
from groupwise.model.adaptable import adaptable_modules
from groupwise.model.attention import Layout, SharedPrompts
from groupwise.model.backbone import Backbone, decoder_of
from groupwise.model.head import Head
from groupwise.model.image_tokens import vision_of
from groupwise.model.load import (
    LoadedModel,
    auto_class,
    empty_model,
    longest_row,
    plain_attention,
    plain_implementation,
    set_attention,
    share_weights,
)
from groupwise.model.vision import Vision, sample_picture

# The cost of the plain path compared with the packed one, by benchmarks/plain.py; it depends on the prompts' share.
PLAIN_COST = "about twice as slow as packed"

Lines = Sequence[tuple[int, int]]  # of completions: whose prompt, and how many tokens

SHORT: tuple[Sequence[int], Lines] = ((5, 3), ((0, 4), (0, 2), (0, 3), (1, 6)))  # tokens of prompts, completions
LONG: tuple[Sequence[int], Lines] = ((13, 8), ((0, 9), (0, 1), (0, 14), (1, 17)))
LENGTH = 5  # tokens that every length of the small model is: less than any row of LONG

# Settings of transformers' configurations that are lengths or positions.
_LENGTHS = re.compile(
    r"(.*_)?(window|window_size|window_len|chunk_size|chunk_length|local_attention|floor|floor_scale|extent|"
    r"max_distance|block_size|index_topk|topk_blocks|original_max_position_embeddings)"
)
_MOST_LAYERS = 8
_HEADS = 2  # key-value heads, and queries of each, at most
_WIDTH = 32  # features of an MLP
_VOCABULARY = 101
_MOST_PARAMETERS = 200_000_000  # 0.8 GB in float32
CPU = torch.device("cpu")
_WHY: dict[Any, str | None] = {}  # by model: `why_twin_not_packed`


def packed_tolerance(model: PreTrainedModel) -> float:
    """Return the largest `packed_forward_gap` that rounding explains in the model's dtype (norms are float32 in
    any)."""
    return {torch.float64: 1e-5, torch.float32: 1e-4}.get(model.dtype, 0.1)


def why_not_packed(model: PreTrainedModel) -> str | None:
    """Return why this model, made by `model.load.share_weights`, cannot run packed; None if it can."""
    why = _difference(model, SHORT)
    unsure = why is not None and _may_choose_other_experts(model)
    if why is not None and not unsure:
        return why
    if not unsure and not list(_lengths(model.config.get_text_config())):
        return None
    try:
        twin = small_twin(model)
    except Exception as error:  # an architecture that is not made of what its configuration says, as others are
        return why or f"what it does at the lengths that its configuration names cannot be tried ({_said(error)})"
    beyond = _difference(twin, LONG)
    return beyond and (why or f"{beyond}, in rows beyond the lengths that its configuration names")


def why_twin_not_packed(base: LoadedModel, twin: PreTrainedModel) -> str | None:
    """Return `why_not_packed(twin)`, for an unchanged twin that `model.load.share_weights` made of `base`. The check
    runs once per process for these weights, type and device: an engine, its learner and the next run of the model get
    the same answer."""
    computed = base.model.dtype, Head.of(twin).in_float32, base.device.type
    key = type(twin), Shape.of(base.model.config), base.hash, computed
    if key not in _WHY:
        _WHY[key] = why_not_packed(twin)
    return _WHY[key]


def _may_choose_other_experts(model: PreTrainedModel) -> bool:
    """Return whether rounding alone can make a large difference: it chooses other experts for a token whose router
    hesitates. Then the small model decides, in float32."""
    return model.dtype.itemsize == 2 and any(name.endswith(".experts") for name, _ in model.named_modules())


def _difference(model: PreTrainedModel, rows: tuple[Sequence[int], Lines]) -> str | None:
    try:
        gap, tolerance = packed_forward_gap(model, rows=rows), packed_tolerance(model)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a model's code, which knows nothing of packed rows
        return f"its packed forward fails: {_said(error)}"
    if gap <= tolerance:
        return None
    return f"its packed forward differs from its own by {gap:.3g} nats (tolerance {tolerance:g})"


def _said(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, NotImplementedError) and text else f"{type(error).__name__}: {text}"


@torch.no_grad()
def packed_forward_gap(
    model: PreTrainedModel,
    *,
    rows: tuple[Sequence[int], Lines] = SHORT,
    layout_of: Callable[..., Layout] = SharedPrompts,
) -> float:
    """Return the mean difference in log-probability between the packed forward and the model's own, on a small tree.

    Prompts with completions of uneven lengths, against each completion with its prompt alone in a row. At each position
    tokens weigh by their probability: the largest difference of a whole vocabulary is mostly 16-bit rounding of tokens
    that nothing ever samples.

    Args:
        rows: tokens of each prompt, and of each completion with the index of its prompt.
        layout_of: makes the layout that attention is computed by, called as `SharedPrompts` is.

    Raises:
        NotImplementedError: attention asks for something that no layout computes. Or what the model raises.
    """
    vocabulary = int(model.config.get_text_config().vocab_size)
    prompts, completions = rows

    def ids(count: int, offset: int) -> list[int]:
        return [(37 * (i + offset) + 11) % vocabulary for i in range(count)]

    lines = [ids(n, p) for p, n in enumerate(prompts)] + [ids(n, 50 + b) for b, (_, n) in enumerate(completions)]
    positions = [list(range(n)) for n in prompts] + [list(range(prompts[p], prompts[p] + n)) for p, n in completions]
    layout = layout_of(prompts, [n for _, n in completions], [p for p, _ in completions], device=model.device)
    flat, where = (torch.tensor(list(chain(*x)), device=model.device) for x in (lines, positions))
    packed_SV = Head.of(model).logits(Backbone(model)(flat, where, layout)).log_softmax(-1)
    gaps: list[Tensor] = []
    start = sum(prompts)
    with plain_attention(model):
        for b, (p, n) in enumerate(completions):
            row = torch.tensor([lines[p] + lines[len(prompts) + b]], device=model.device)
            plain_NV = _logprobs(model(input_ids=row, use_cache=False).logits[0, prompts[p] :])
            gaps.append(_gaps(plain_NV, packed_SV[start : start + n]))
            start += n
    return _mean(gaps)


def _logprobs(logits: Tensor) -> Tensor:
    """Return log-probabilities, in float32 at least."""
    return (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)


def _gaps(expected_NV: Tensor, found_NV: Tensor) -> Tensor:
    """Return how far log-probabilities are from those that are expected, [N]: the mean over tokens as likely as they
    are expected to be."""
    return (expected_NV.exp() * (expected_NV - found_NV).abs()).sum(-1)


def _mean(gaps: Sequence[Tensor]) -> float:
    """Return the mean of all; infinite where one is not finite."""
    gap = float(torch.cat(list(gaps)).mean())
    return gap if math.isfinite(gap) else math.inf


def look(model: PreTrainedModel, why_not_packed: str | None) -> None:
    """Find out, once, whether a model that sees can be given images: `Vision.blind`. They are computed in packed rows
    only."""
    if (vision := vision_of(model)) is not None and not vision.looked:
        vision.blind, vision.looked = why_not_packed or why_blind(model), True


def why_blind(model: PreTrainedModel) -> str | None:
    """Return why images cannot be given to this model, made by `model.load.share_weights`, which runs packed; None if
    they can, or if it reads text alone. Its packed forward of an image is compared with its own."""
    vision = vision_of(model)
    if vision is None:
        return None
    try:
        gap, tolerance = image_forward_gap(model, vision), packed_tolerance(model)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a model's code, or of its processor's
        return f"its packed forward of an image fails: {_said(error)}"
    if gap <= tolerance:
        return None
    return f"its packed forward of an image differs from its own by {gap:.3g} nats (tolerance {tolerance:g})"


@torch.no_grad()
def image_forward_gap(model: PreTrainedModel, vision: Vision) -> float:
    """Return the mean difference in log-probability between the packed forward and the model's own, for two completions
    of a prompt that begins with an image, as `packed_forward_gap` has it."""
    picture = sample_picture()
    shown = vision.expand([vision.rendered_id], [picture])
    vocabulary = int(model.config.get_text_config().vocab_size)
    words = [each for each in ((37 * i + 11) % vocabulary for i in range(16)) if each != vision.token_id]
    prompt, ends = [*shown, *words[:5]], (words[5:9], words[9:12])
    layout = SharedPrompts([len(prompt)], [len(each) for each in ends], [0, 0], device=model.device)
    where = vision.positions_of([prompt])
    after = [vision.positions_of([[*prompt, *each]])[..., len(prompt) :] for each in ends]
    flat = torch.tensor([*prompt, *ends[0], *ends[1]], device=model.device)
    positions = torch.cat([where, *after], -1).to(model.device)
    packed_SV = Head.of(model).logits(Backbone(model)(flat, positions, layout)).log_softmax(-1)
    gaps, start = list[Tensor](), len(prompt)
    for each in ends:
        plain_NV = _logprobs(vision.own_logits([*prompt, *each], picture)[len(prompt) :])
        gaps.append(_gaps(plain_NV, packed_SV[start : start + len(each)]))
        start += len(each)
    vision.forget(picture)
    return _mean(gaps)


def why_not_cached(model: PreTrainedModel) -> str | None:
    """Return why this model, made by `model.load.share_weights`, cannot decode with its own cache, two rows of one
    prompt at once; None if it can. Tried on the model and, where lengths matter, on `small_twin` beyond them."""
    try:
        gaps = [cached_forward_gap(model)]
        if list(_lengths(model.config.get_text_config())):
            gaps.append(cached_forward_gap(small_twin(model)))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a model's code, or of a cache that is not as transformers' are
        return f"its cache fails: {_said(error)}"
    gap, tolerance = max(gaps), packed_tolerance(model)
    return None if gap <= tolerance else f"its cache changes log-probabilities by {gap:.3g} nats"


@torch.no_grad()
def cached_forward_gap(model: PreTrainedModel) -> float:
    """Return the mean difference in log-probability between decoding with the model's own cache and its forward of the
    whole row: a prompt that is run once, then two rows of it, of which one is left after half of the tokens."""
    vocabulary, opening, end = int(model.config.get_text_config().vocab_size), 9, 24
    ids_2T = torch.tensor(
        [[(37 * (i + (50 * row if i >= opening else 0)) + 11) % vocabulary for i in range(end)] for row in range(2)],
        device=model.device,
    )
    own, head, gaps = decoder_of(model), Head.of(model), list[Tensor]()
    with plain_attention(model):
        hidden_2TH = own(input_ids=ids_2T, use_cache=False).last_hidden_state
        out = own(input_ids=ids_2T[:1, :opening], use_cache=True)
        cache, rows = out.past_key_values, [0, 0]
        for at in range(opening, end):
            if at in (opening, (opening + end) // 2):
                chosen, rows = (rows, [0, 1]) if at == opening else ([1], [1])
                cache.reorder_cache(torch.tensor(chosen, device=model.device))
            out = own(input_ids=ids_2T[rows, at : at + 1], past_key_values=cache, use_cache=True)
            whole_BV, step_BV = (
                head.logits(x).log_softmax(-1) for x in (hidden_2TH[rows, at], out.last_hidden_state[:, -1])
            )
            gaps.append(_gaps(whole_BV, step_BV).mean()[None])
    return _mean(gaps)


@torch.no_grad()
def cache_bytes(model: PreTrainedModel) -> tuple[int, int]:
    """Return bytes that the model's own cache takes of a row: for each of its tokens (keys and values), and whatever
    its length (recurrent and convolution states). Counted in what it keeps of two short rows; a window that ends what
    is kept is not seen, so of long rows this is a bound.

    Raises: what the model raises, or AttributeError where it has no cache.
    """
    short, long = 8, 16

    def kept(length: int) -> int:
        ids_1T = torch.arange(length, device=model.device)[None]
        with plain_attention(model):
            return _tensor_bytes(decoder_of(model)(input_ids=ids_1T, use_cache=True).past_key_values)

    of_short = kept(short)
    token = (kept(long) - of_short) // (long - short)
    return token, of_short - short * token


def _tensor_bytes(holder: Any) -> int:
    """Return the bytes of all numbers that tensors in an object, its attributes and theirs hold in memory."""
    found: dict[int, int] = {}
    waiting, seen = [holder], set[int]()
    while waiting:
        each = waiting.pop()
        if isinstance(each, Tensor) and each.is_floating_point():  # not counters
            found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        elif id(each) not in seen:
            seen.add(id(each))
            attributes = each if isinstance(each, dict) else getattr(each, "__dict__", {})
            waiting.extend(each if isinstance(each, list | tuple) else attributes.values())
    return sum(found.values())


def turn_plain(model: PreTrainedModel) -> None:
    """Have a model that cannot run packed run its own attention.

    Raises:
        ModelError: its logits are not those of its LM head on its last hidden states, which is all that is used of it;
            or what follows a token changes the token's log-probability, so that there is no one number to train.
    """
    set_attention(model, plain_implementation(model))
    if (gap := _causal_gap(model)) is not None:
        raise ModelError(
            f"{type(model).__name__} can be neither trained nor sampled: its own forward is not causal: "
            f"log-probabilities change by {gap:.3g} nats when tokens, or padding, are added behind them",
            hint="use another model, or a version of transformers whose attention of this one sees no later tokens",
        )
    if (gap := head_gap(model)) > packed_tolerance(model):
        raise ModelError(
            f"{type(model).__name__} can be neither trained nor sampled: its logits differ by {gap:.3g} nats from "
            "those of its LM head on its last hidden states",
            hint="use another model: this one does something between the two that is not known here",
        )


def _causal_gap(model: PreTrainedModel) -> float | None:
    """Return how far a model is from causal, on itself and, where lengths matter, on `small_twin` beyond them; None: it
    is."""
    if not _may_choose_other_experts(model) and (gap := plain_forward_gap(model)) > packed_tolerance(model):
        return gap
    if not list(_lengths(model.config.get_text_config())) and not _may_choose_other_experts(model):
        return None
    try:
        twin = small_twin(model)
    except Exception:  # an architecture that is not made of what its configuration says
        return None
    set_attention(twin, plain_implementation(twin))
    return gap if (gap := plain_forward_gap(twin)) > packed_tolerance(twin) else None


@torch.no_grad()
def plain_forward_gap(model: PreTrainedModel) -> float:
    """Return the mean difference in log-probability, by the model's own forward, between a row alone and the same row
    with tokens behind it, or with padding as `packing.pad` puts it there."""
    vocabulary, short, long = int(model.config.get_text_config().vocab_size), 17, 30
    ids_T = [(37 * i + 11) % vocabulary for i in range(long)]
    rows = torch.tensor([ids_T, ids_T[:short] + [0] * (long - short)], device=model.device)
    own, head = decoder_of(model), Head.of(model)
    with plain_attention(model):
        longer_2TH = own(input_ids=rows, use_cache=False).last_hidden_state[:, :short]
        alone_TH = own(input_ids=rows[:1, :short], use_cache=False).last_hidden_state[0]
    alone_TV = head.logits(alone_TH).log_softmax(-1)
    gap = max(float(_gaps(alone_TV, head.logits(longer_TH).log_softmax(-1)).mean()) for longer_TH in longer_2TH)
    return gap if math.isfinite(gap) else math.inf


@torch.no_grad()
def head_gap(model: PreTrainedModel) -> float:
    """Return the mean difference between the log-probabilities of a model and those of its `Head` on a short row,
    weighed as above."""
    ids = torch.arange(1, 9, device=model.device)[None]
    with plain_attention(model):
        hidden_TH = decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state[0]
        own_TV = model(input_ids=ids, use_cache=False).logits[0]
    logits_TV = Head.of(model).logits(hidden_TH)
    if logits_TV.shape != own_TV.shape:
        return math.inf
    own_TV = own_TV.to(logits_TV.dtype).log_softmax(-1)
    return _mean([_gaps(own_TV, logits_TV.log_softmax(-1))])


# -- from a configuration alone ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ways:
    """The ways in which a model is sampled and trained here: in packed rows, or else why not, and whether with its own
    cache.

    `adapted` are the names of the linear layers that `all-linear` adapts.
    """

    architecture: str
    why_not_packed: str | None
    why_not_cached: str | None
    adapted: tuple[str, ...]

    def __str__(self) -> str:
        if self.why_not_packed is None:
            return f"{self.architecture} decodes and trains in packed rows"
        how = f"decodes by its own forward and cache, and trains in padded rows, {PLAIN_COST}"
        if self.why_not_cached is not None:
            how = f"decodes by a forward of the whole row a token ({self.why_not_cached}), and trains in padded rows"
        return f"{self.architecture} {how}: {self.why_not_packed}"


@dataclass(frozen=True)
class Shape:
    """A configuration, the same as another if it says the same: what is found of one is kept by it."""

    text: str
    config: PreTrainedConfig = field(compare=False)

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Shape:
        return cls(f"{type(config).__name__} {config.to_json_string()}", config)


def ways_of(config: PreTrainedConfig) -> Ways:
    """Return what will be found of a model of this configuration, tried on the CPU on a small random one
    (`small_twin`), once a process.

    Raises:
        ModelError: as `turn_plain`. Or what transformers raises where it cannot make such a model.
    """
    return _ways_of(Shape.of(config))


@lru_cache(maxsize=16)
def _ways_of(shape: Shape) -> Ways:
    model = _small_model(shape.config)
    why, uncached = why_not_packed(model), None
    if why is not None:
        turn_plain(model)
        uncached = why_not_cached(model)
    names = adaptable_modules(model).all_linear
    return Ways(
        architecture=type(model).__name__,
        why_not_packed=why,
        why_not_cached=uncached,
        adapted=tuple(dict.fromkeys(name.rpartition(".")[2] for name in names)),
    )


def _small_model(config: PreTrainedConfig) -> PreTrainedModel:
    """See `small_twin`; as wide as the configuration says where its widths hang together in ways not known here."""
    for narrow in (True, False):
        small = _small_config(config, narrow=narrow)
        try:
            _check_size(small)
            model = _random_model(auto_class(small).from_config, small, CPU)
            head_gap(model)  # whether it runs
        except Exception:
            if not narrow:
                raise
        else:
            return model
    raise AssertionError("one of the two returned or raised")


def _check_size(config: PreTrainedConfig) -> None:
    """Raise ValueError where a model is too large to be made by the way."""
    if (count := sum(parameter.numel() for parameter in empty_model(config).parameters())) > _MOST_PARAMETERS:
        raise ValueError(f"{count:,} parameters are too many for a trial")


# -- the small model ---------------------------------------------------------------------------------------------------


def small_twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return a random float32 model of the class and configuration of `model`, one layer of each kind, narrow, in which
    every length is `LENGTH` tokens."""
    return _random_model(type(model), _small_config(model.config), model.device)


def _small_config(config: PreTrainedConfig, *, narrow: bool = True) -> PreTrainedConfig:
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for part in (getattr(config, name, None) for name in config.sub_configs):
        if part is not None and part is not text:
            _cut_tower(part, narrow=narrow)
    _cut_layers(text)
    if narrow:
        _narrow(text)
    _cut_vocabulary(text)
    for settings, name in list(_lengths(text)):
        settings[name] = 2 if "topk" in name else LENGTH  # of the best, which may be blocks
    return config


def _cut_tower(config: Any, *, narrow: bool) -> None:
    """Leave one layer of a tower, which has no part in what is tried."""
    for name in ("num_hidden_layers", "depth"):
        if getattr(config, name, 0):
            setattr(config, name, 1)
    if narrow and isinstance(vars(config).get("intermediate_size"), int):
        config.intermediate_size = _WIDTH


def _random_model(make: Callable[[Any], PreTrainedModel], config: PreTrainedConfig, device: torch.device) -> Any:
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:  # gpu-aware
        torch.manual_seed(0)
        twin = make(config).float().eval().requires_grad_(False)
        for parameter in twin.parameters():
            if parameter.ndim > 1:  # large enough that who attends to whom changes every logit
                parameter.normal_(0.0, 2.0 * min(parameter.shape[-2:]) ** -0.5)
    return share_weights(twin)


def _lengths(config: Any) -> Iterator[tuple[MutableMapping[str, Any], str]]:
    """Yield the lengths at which attention changes, each as (the settings that have it, its name)."""
    parts: list[MutableMapping[str, Any]] = [vars(config)]
    grows = longest_row(config) is not None
    for settings in parts:
        parts.extend(value for value in settings.values() if isinstance(value, dict))
        for name, value in settings.items():
            kept = grows and name == "original_max_position_embeddings"  # no row is longer
            if isinstance(value, int) and value > 1 and _LENGTHS.fullmatch(name) and not kept:
                yield settings, name


def _cut_layers(config: Any) -> None:
    """Leave one layer of each kind: as the lists of the configuration, an entry a layer, tell them apart, what it says
    of single ones, and whether they share keys and values of earlier ones (the last `num_kv_shared_layers`)."""
    count = int(config.num_hidden_layers)
    lists = {k: v for k, v in vars(config).items() if isinstance(v, list | tuple) and len(v) == count}
    single = getattr(getattr(config, "_heterogeneity_spec", None), "per_layer_overrides", {})
    first_sharing = count - (vars(config).get("num_kv_shared_layers") or 0)
    kinds: dict[str, int] = {}
    for layer in range(count):
        kind = [layer >= first_sharing, single.get(layer), *(values[layer] for values in lists.values())]
        kinds.setdefault(repr(kind), layer)
    kept = list(kinds.values())[:_MOST_LAYERS] if lists else list(range(min(count, _MOST_LAYERS)))
    kept = kept if len(kept) > 1 else [*kept, *range(kept[0] + 1, min(kept[0] + 2, count))]
    for name, values in lists.items():
        setattr(config, name, type(values)(values[layer] for layer in kept))
    config.num_hidden_layers = len(kept)
    if first_sharing < count:
        config.num_kv_shared_layers = sum(layer >= first_sharing for layer in kept)
    if single:
        config.per_layer_config = {at: single[layer] for at, layer in enumerate(kept) if layer in single}


def _narrow(config: Any) -> None:
    """Fewer heads of the same size, narrow MLPs."""
    given = vars(config)
    if given.get("num_attention_heads"):
        _narrow_attention(config)
    else:
        config.hidden_size = 2 * _WIDTH
    for name, value in given.items():
        if name.endswith(("intermediate_size", "ffn_dim", "n_inner")) and isinstance(value, int):
            setattr(config, name, _WIDTH)
    for heads, size, groups in (
        ("mamba_n_heads", "mamba_d_head", "mamba_n_groups"),
        ("num_heads", "head_dim", "n_groups"),
    ):
        expand = given.get("mamba_expand") or given.get("expand")
        if given.get(heads) and given.get(groups) and expand:  # a state-space layer: its heads make up its inner width
            inner = int(expand * config.hidden_size)
            setattr(config, heads, max(1, inner // given[size]))
            setattr(config, groups, 1)
            if given.get("mamba_d_ssm"):
                config.mamba_d_ssm = inner


def _narrow_attention(config: Any) -> None:
    heads, given = int(config.num_attention_heads), vars(config)
    shared = int(given.get("num_key_value_heads") or heads)
    keys = min(shared, _HEADS)
    queries = keys * min(heads // shared, _HEADS)
    config.hidden_size = queries * int(given.get("head_dim") or config.hidden_size // heads)
    config.num_attention_heads = queries
    if given.get("num_key_value_heads"):
        config.num_key_value_heads = keys


def _cut_vocabulary(config: Any) -> None:
    for name, value in vars(config).items():
        if name.startswith("vocab_size") and value:
            setattr(config, name, _VOCABULARY)
    if getattr(config, "pad_token_id", None) is not None:
        config.pad_token_id = 0
