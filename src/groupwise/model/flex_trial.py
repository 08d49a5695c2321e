"""Tries whether a model can be trained with FlexAttention on its device, before the first step.

What the kernels support (head sizes, types, GPUs, versions of Triton) changes with each torch, so nothing of it is
written down here. On the model's first use

    each kind of layer that it has is compared with `SharedPrompts`, output and gradients, on random rows of two
    lengths: for the first torch compiles kernels of their own, for the second those for rows of any length
    the packed forward with it is compared with the model's own, as every packed forward is (`packed_check`)

and whatever is raised, or differs by more than rounding, is the reason not to use it. With gradient checkpointing the
trial is under a checkpoint too, whose hooks torch must keep out of what it traces: uncompiled it does not, and with a
softcap gradients are wrong (seen on CPUs, torch 2.13).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from groupwise.model.attention import Layout, Scoring, SharedPrompts
from groupwise.model.flex import Forest
from groupwise.model.layouts import BOTH_WAYS, merged_for
from groupwise.model.packed_check import packed_forward_gap, packed_tolerance

PROMPTS, COMPLETIONS, OWNERS = (300, 150), (130, 0, 90, 160), (0, 0, 0, 1)  # tokens: tiles of every kind

LENGTHS = (1, 2)  # times these

TOLERANCE, TOLERANCE_16_BITS = 5e-3, 3e-2  # of the norm of what is compared


def why_not_flex(
    model: PreTrainedModel, *, checkpointing: bool, agreed: Callable[[str | None], str | None] = lambda why: why
) -> str | None:
    """Return why FlexAttention cannot be used to train this packed model on its device; None if it can.

    Args:
        checkpointing: whether training uses gradient checkpointing.
        agreed: of processes that run one model together, what any of them found so far.
    """
    if merged_for(model) is BOTH_WAYS:
        return "tokens of an image see each other in it"
    if model.device.type != "cuda":  # gpu-seen below: the trial of FlexAttention with a model
        return f"it needs a CUDA GPU, and the model is on {model.device.type!r}"
    if importlib.util.find_spec("torch.nn.attention.flex_attention") is None:
        return f"torch {torch.__version__} does not have it"
    return trouble(model, checkpointing=checkpointing, agreed=agreed)


def trouble(
    model: PreTrainedModel, *, checkpointing: bool, agreed: Callable[[str | None], str | None] = lambda why: why
) -> str | None:
    """Return what goes wrong when it is tried; None if nothing does. Kernels are tried between two forward passes, so
    that where several processes run the model together none is amid one when another's kernels fail."""
    kinds: dict[Any, _Kind] = {}
    packed_forward_gap(model, layout_of=partial(_Noting, kinds))
    why = None
    try:
        for kind in kinds.values():
            _compare(kind.heads, kind.like, kind.scoring, checkpointing)
    except Exception as error:  # compilers raise all kinds
        why = _said(error)
    if (why := agreed(why)) is not None:
        return why
    tolerance = packed_tolerance(model)
    try:
        gap = packed_forward_gap(model, layout_of=Forest.of_groups)
    except Exception as error:
        return _said(error)
    if gap <= tolerance:
        return None
    return f"its forward differs from the model's own by {gap:.3g} nats (tolerance {tolerance:g})"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


class _Kind(NamedTuple):
    """Layers of one kind: their heads and head sizes, how they score, and a tensor of their type and device."""

    heads: tuple[int, int, int, int]
    scoring: Scoring
    like: Tensor


class _Noting(SharedPrompts):
    """Attends by `SharedPrompts`, and notes each kind of layer that it meets."""

    def __init__(self, kinds: dict[Any, _Kind], *lengths: Any, device: torch.device):
        super().__init__(*lengths, device=device)
        self._kinds = kinds

    def attend(self, layer: int, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scoring: Scoring) -> Tensor:
        heads = (query_SHD.shape[1], key_SKD.shape[1], query_SHD.shape[-1], value_SKD.shape[-1])
        kind = (heads, scoring, scoring.sinks is None)
        if kind not in self._kinds:  # copies: where weights are gathered for a layer, they are gone after it
            sinks = None if scoring.sinks is None else scoring.sinks.detach().clone()
            self._kinds[kind] = _Kind(heads, replace(scoring, sinks=sinks), value_SKD[:1].detach().clone())
        return super().attend(layer, query_SHD, key_SKD, value_SKD, scoring)


def _compare(heads: tuple[int, int, int, int], like: Tensor, scoring: Scoring, checkpointing: bool) -> None:
    """Raise ArithmeticError where outputs or gradients are not those of `SharedPrompts`."""
    limit = TOLERANCE_16_BITS if like.itemsize == 2 else TOLERANCE
    for times in LENGTHS:
        prompts, completions = ([n * times for n in part] for part in (PROMPTS, COMPLETIONS))
        forest = Forest.of_groups(prompts, completions, OWNERS, device=like.device)
        merged = SharedPrompts(prompts, completions, OWNERS, device=like.device)
        want, got = (_tried(layout, forest.S, heads, like, scoring, checkpointing) for layout in (merged, forest))
        for what, x, y in zip(("output", "gradient of q", "gradient of k", "gradient of v"), want, got, strict=True):
            gap, size = float((x - y).norm()), float(x.norm())
            if not gap <= limit * size:
                raise ArithmeticError(
                    f"its {what} differs from merged's by {gap:.2g}, of {size:.2g} (tolerance {limit:g})"
                )


def _tried(
    layout: Layout, S: int, heads: tuple[int, int, int, int], like: Tensor, scoring: Scoring, checkpointing: bool
) -> list[Tensor]:
    """Return the output for random queries, keys and values, and their gradients, in float32."""
    H, K, D, V = heads
    g = torch.Generator().manual_seed(0)
    shapes = ((H, D), (K, D), (K, V), (H, V))
    query, key, value, slope = (torch.randn(S, *shape, generator=g).to(like) for shape in shapes)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    with torch.enable_grad():
        if checkpointing:
            out: Any = checkpoint(layout.attend, 0, query, key, value, scoring, use_reentrant=False)
        else:
            out = layout.attend(0, query, key, value, scoring)
        return [x.detach().float() for x in (out, *torch.autograd.grad(out, inputs, slope))]
