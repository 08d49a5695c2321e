"""Context parallel: several ranks compute one packed row together (Ulysses, arXiv 2309.14509).

The tokens of a row are distributed to the C ranks of a group like cards: rank r has tokens r, r + C, r + 2C, ... Layers
compute tokens apart, all but attention. There the ranks exchange tokens for heads, so that each has all tokens of some
heads, computes the row's attention for these (any layout's: groups with a shared prompt, prefix trees, windows), and
exchanges back:

    [S/C tokens, H heads]  ->  [S tokens, H/C heads]  attend  ->  [S/C tokens, H heads]

The LM head runs on a rank's own tokens. Their log-probabilities are then added up, so that every rank has those of the
whole row, computes the same loss, and sends its gradient back into its own tokens alone:

    d loss / d theta = sum over ranks of what flows through the rank's tokens

which is what ranks with other rows add up as well (`data_parallel`). A rank keeps the activations of S/C tokens.

Shapes: S packed tokens, C ranks of a group, N loss tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from groupwise.model.attention import Layout, Scoring
from groupwise.model.image_tokens import vision_of
from groupwise.model.layer_settings import of_layers
from groupwise.model.recurrence import States
from groupwise.model.recurrent_layers import is_recurrent


@dataclass(frozen=True, kw_only=True)
class ContextGroup:
    """The ranks that compute a row together: `size` of them, of which this is number `rank` in `group`."""

    rank: int
    size: int
    group: Any

    def tokens(self, x: Tensor) -> Tensor:
        """Return what stands for this rank's tokens [..., S/C] in what stands for all of a row [..., S], which is
        filled up with zeros to a multiple of C."""
        return torch.nn.functional.pad(x, (0, -x.shape[-1] % self.size))[..., self.rank :: self.size]

    def mine(self, places_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of some places in a row are this rank's (indices into them), and where they stand among its
        tokens."""
        own = (places_N % self.size == self.rank).nonzero()[:, 0]
        return own, places_N[own] // self.size

    def whole(self, own: Tensor, values: Tensor, total: int) -> Tensor:
        """Return the values [N, ...] of all ranks, at every rank, of `values` for those indices that are its `own`. The
        gradient is taken for every rank's own: all of them compute the same from the result."""
        every = values.new_zeros((total, *values.shape[1:])).index_copy(0, own, values)
        return _Summed.apply(every, self.group)  # type: ignore[return-value]


class Ulysses:
    """The layout of a row whose tokens are distributed to a group of ranks: attention by heads.

    Args:
        row: the layout of the whole row, of `length` tokens.
    """

    def __init__(self, row: Layout, length: int, context: ContextGroup):
        self._row, self._length, self._context = row, length, context

    @property
    def states(self) -> States:
        """Never: a state passes through all tokens, and no rank has them."""
        raise NotImplementedError("recurrent layers need all tokens of a row, and each rank has a part of them")

    def see_ahead(self, ahead_S: Tensor, *, in_windows: bool = False) -> None:
        """Raise NotImplementedError: models that see are refused (`why_not_cut`)."""
        raise NotImplementedError("an image's tokens are computed together")

    def attend(self, layer: int, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scoring: Scoring) -> Tensor:
        """Return this rank's tokens of the attention output [S/C, H, D]."""
        C, rank, s = self._context.size, self._context.rank, len(query_SHD)
        again = max(1, C // key_SKD.shape[1])  # ranks that have the same key-value head
        key_SKD, value_SKD = (x if again == 1 else x.repeat_interleave(again, 1) for x in (key_SKD, value_SKD))
        every = [x.to(value_SKD.dtype).reshape(s, C, -1) for x in (query_SHD, key_SKD, value_SKD)]
        widths = [x.shape[-1] for x in every]
        mixed = self._exchanged(torch.cat(every, -1).transpose(0, 1))  # [C, s, widths], of all tokens
        row = mixed.transpose(0, 1).reshape(s * C, -1)[: self._length].split(widths, -1)
        sizes = [x.shape[-1] for x in (query_SHD, key_SKD, value_SKD)]
        query, key, value = (x.view(self._length, -1, size) for x, size in zip(row, sizes, strict=True))
        if scoring.sinks is not None:
            scoring = replace(scoring, sinks=scoring.sinks.chunk(C)[rank])
        out = self._row.attend(layer, query, key, value, scoring)  # [S, H/C, D]
        filled = torch.nn.functional.pad(out.flatten(1), (0, 0, 0, s * C - self._length))
        back = self._exchanged(filled.view(s, C, -1).transpose(0, 1))  # [C, s, H/C * D], of all heads
        return back.transpose(0, 1).reshape(s, -1, out.shape[-1])

    def _exchanged(self, x: Tensor) -> Tensor:
        return _Exchanged.apply(x, self._context.group)  # type: ignore[return-value]


class _Exchanged(torch.autograd.Function):
    """Part c of [C, ...] goes to rank c, whose part for this rank takes its place. The gradient goes the way back,
    which is the same exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        return _all_to_all(grads[0], ctx.group), None


def _all_to_all(x: Tensor, group: Any) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


class _Summed(torch.autograd.Function):
    """Sums a tensor over a group's ranks, from which all of them compute the same; the sum's gradient is the gradient
    of each summand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        return grads[0], None


def why_not_cut(model: PreTrainedModel, size: int, *, packed: bool) -> str | None:
    """Return why a row of this model cannot be computed by `size` ranks together; None where it can."""
    name, text = type(model).__name__, model.config.get_text_config()
    if not packed:
        return f"{name} runs in padded rows here, by its own attention"
    if is_recurrent(model):
        return f"{name} has recurrent layers, whose state passes through all tokens of a row"
    if vision_of(model) is not None:
        return f"{name} sees, and an image's tokens are computed together"
    H = int(text.num_attention_heads)
    counts = [int(each or H) for each in of_layers(text, "num_key_value_heads")]
    fit = [each for each in range(2, H + 1) if not H % each and not any(K % each and each % K for K in counts)]
    if size not in fit:
        could = f"; {' or '.join(map(str, fit))} could" if fit else ""
        heads = f"{H} query heads and {' and '.join(map(str, counts))} key-value heads"
        return f"{name} has {heads}, which {size} processes cannot share evenly{could}"
    return None
