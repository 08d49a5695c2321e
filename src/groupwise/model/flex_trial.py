"""Whether a model can be trained with FlexAttention where it is: found out by trying it, before the first step.

What the kernels support (head sizes, types, GPUs, versions of Triton) changes with each torch, so nothing of it is
written down here. On the model's first use

    the packed forward with it is compared with the model's own, as every packed forward is (`packed_check`)
    each kind of layer that this meets is compared with `SharedPrompts`, output and gradients, on random rows of two
    lengths: for the first torch compiles kernels of their own, for the second those for rows of any length

and whatever is raised, or differs by more than rounding, is the reason not to use it. With gradient checkpointing the
trial is under a checkpoint too, whose hooks torch must keep out of what it traces: uncompiled it does not, and with a
softcap gradients are wrong (seen on CPUs, torch 2.13).
"""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from groupwise.model.attention import Layout, Scoring, SharedPrompts
from groupwise.model.flex import Forest
from groupwise.model.packed_check import packed_forward_gap, packed_tolerance

PROMPTS, COMPLETIONS, OWNERS = (300, 150), (130, 0, 90, 160), (0, 0, 0, 1)  # tokens: tiles of every kind

LENGTHS = (1, 2)  # times these

TOLERANCE, TOLERANCE_16_BITS = 5e-3, 3e-2  # of the norm of what is compared


def why_not_flex(model: PreTrainedModel, *, checkpointing: bool) -> str | None:
    """Return why FlexAttention cannot be used to train this packed model on its device; None if it can.
    `checkpointing`: with gradient checkpointing."""
    if model.device.type != "cuda":  # gpu-seen below: the trial of FlexAttention with a model
        return f"it needs a CUDA GPU, and the model is on {model.device.type!r}"
    if importlib.util.find_spec("torch.nn.attention.flex_attention") is None:
        return f"torch {torch.__version__} does not have it"
    return trouble(model, checkpointing=checkpointing)


def trouble(model: PreTrainedModel, *, checkpointing: bool) -> str | None:
    """Return what goes wrong when it is tried; None if nothing does."""
    layout_of, tolerance = partial(_Compared, checkpointing=checkpointing), packed_tolerance(model)
    try:
        gap = packed_forward_gap(model, layout_of=layout_of)
    except Exception as error:  # compilers raise all kinds
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if gap <= tolerance:
        return None
    return f"its forward differs from the model's own by {gap:.3g} nats (tolerance {tolerance:g})"


class _Compared:
    """Attends by a `Forest`, having compared it for each kind of layer that it meets."""

    def __init__(self, *lengths: Any, checkpointing: bool, device: torch.device):
        self._forest, self._checkpointing = Forest.of_groups(*lengths, device=device), checkpointing
        self._seen: set[tuple[tuple[int, int, int, int], Scoring, bool]] = set()
        self.states = self._forest.states

    def attend(self, layer: int, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scoring: Scoring) -> Tensor:
        heads = (query_SHD.shape[1], key_SKD.shape[1], query_SHD.shape[-1], value_SKD.shape[-1])
        kind = (heads, scoring, scoring.sinks is None)
        if kind not in self._seen:
            self._seen.add(kind)
            _compare(heads, value_SKD, scoring, self._checkpointing)
        return self._forest.attend(layer, query_SHD, key_SKD, value_SKD, scoring)


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
