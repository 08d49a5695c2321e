"""One forward and one backward over a base model for micro-batches of several learners, each with its own adapter.

The rows of all micro-batches are one packed row. Operations on single tokens (norms, rotary positions, gates, sums) run
on all tokens at once, which saves time: for a small micro-batch, starting operations costs as much as computing them.
Sums over tokens or dimensions are computed for each learner separately, in the shapes that it has alone:

    products      of its rows with the base's weights and its own A and B, of whatever rank, scale and targets
    attention     of its prompts and completions (`model.joint_layout`)
    LM head       at its loss tokens, at its temperature, over what its sampler kept
    loss          its own

So a learner's sums do not depend on the other learners, and its log-probabilities, its loss and its gradient have the
same bytes as alone. Values that are not finite stay in their own rows; a loss that raises is left out, and so is its
gradient.

Shapes: S packed tokens of all, N loss tokens of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from groupwise.model.attention import Layout
from groupwise.model.backbone import Backbone, decoder_of
from groupwise.model.joint_layout import JointLayout
from groupwise.model.packing import MicroBatch, Padded
from groupwise.train.forward import logprobs_of_hidden, of_tokens_alone, read_positions
from groupwise.train.lora import Term, differentiate_terms, multiply_terms, term_of, widths_of
from groupwise.train.strategy import Passed, TokenLoss

ALIGNMENT = 64  # bytes: of a tensor's first value, as torch allocates it


@dataclass(frozen=True, eq=False)
class Seat:
    """Holds a learner's micro-batch in a joint pass: its module tree over the base, and, unless only log-probabilities
    are needed, its loss and the parameters whose gradients it gets."""

    model: PreTrainedModel
    batch: MicroBatch
    temperature: float
    token_loss: TokenLoss | None = None
    parameters: Sequence[nn.Parameter] = ()

    @property
    def tokens(self) -> int:
        return len(self.batch.input_ids_S)


def joint_logprobs(seats: Sequence[Seat]) -> list[tuple[Tensor, Tensor]]:
    """Return `packed_logprobs`' result for each seat."""
    sizes = [seat.tokens for seat in seats]
    layouts: list[Layout] = []
    for seat in seats:
        assert not isinstance(seat.batch.layout, Padded)
        layouts.append(seat.batch.layout)
    ids_S = torch.cat([seat.batch.input_ids_S for seat in seats])
    positions_S = torch.cat([read_positions(seat.model, seat.batch) for seat in seats])
    lead = next((seat.model for seat in seats if decoder_of(seat.model).gradient_checkpointing), seats[0].model)
    project = _JointProject(lead, [seat.model for seat in seats], sizes)
    hidden_SH = Backbone(lead, project)(ids_S, positions_S, JointLayout(layouts, sizes, device=ids_S.device))
    return [
        logprobs_of_hidden(hidden, seat.model, seat.batch, temperature=seat.temperature)
        for seat, hidden in zip(seats, hidden_SH.split(sizes), strict=True)
    ]


def joint_gradients(seats: Sequence[Seat]) -> list[Passed | None]:
    """Return the log-probabilities, metrics and gradients of each seat; None where its loss raises."""
    losses: list[tuple[Tensor, dict[str, Tensor]] | None] = []
    logprobs = joint_logprobs(seats)
    for seat, (logprobs_N, entropy_N) in zip(seats, logprobs, strict=True):
        assert seat.token_loss is not None
        try:
            loss, metrics = seat.token_loss(logprobs_N, entropy_N)
            losses.append((loss, metrics) if loss.requires_grad and loss.numel() == 1 else None)
        except Exception:  # raised again where the learner computes it by itself
            losses.append(None)
    known = [each[0] for each in losses if each is not None]
    wanted = [p for seat, each in zip(seats, losses, strict=True) if each is not None for p in seat.parameters]
    found = iter(torch.autograd.grad(known, wanted, allow_unused=True) if known else ())
    return [
        None
        if each is None
        else (of_tokens_alone(logprobs_N.detach()), each[1], [next(found) for _ in seat.parameters])
        for seat, each, (logprobs_N, _) in zip(seats, losses, logprobs, strict=True)
    ]


_trees: WeakKeyDictionary[PreTrainedModel, tuple[dict[int, str], dict[str, nn.Module]]] = WeakKeyDictionary()


def _tree(model: PreTrainedModel) -> tuple[dict[int, str], dict[str, nn.Module]]:
    """Return the names of a model's modules, and the modules by name."""
    if (known := _trees.get(model)) is None:
        modules: dict[str, nn.Module] = dict(model.named_modules())
        known = _trees[model] = {id(module): name for name, module in modules.items()}, modules
    return known


class _JointProject:
    """`backbone.Project` over the tree of one of the learners: the rows of each go through its own modules of the same
    names."""

    def __init__(self, lead: PreTrainedModel, models: Sequence[PreTrainedModel], sizes: Sequence[int]):
        self._names, self._modules, self._sizes = _tree(lead)[0], [_tree(model)[1] for model in models], list(sizes)

    def __call__(self, modules: Sequence[nn.Module], x: Tensor) -> Tensor:
        names = [self._names[id(module)] for module in modules]
        every = [[_term(mine[name], x) for name in names] for mine in self._modules]
        flat = [tensor for terms in every for term in terms for tensor in (term.a, term.b)]
        return _JointProjection.apply(x, self._sizes, every, *flat)  # type: ignore[return-value]


def _term(module: nn.Module, x: Tensor) -> Term:
    term = term_of(module, x)
    assert term is not None, "a learner that joins has plain LoRA over plain linear layers"
    return term


class _JointProjection(torch.autograd.Function):
    """`lora.multiply_terms` of the rows of each learner, in the shapes that it has alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], every: list[list[Term]], *flat: Tensor | None) -> Tensor:
        y = x.new_empty(x.shape[0], widths_of(every[0]))
        kept: list[Tensor] = []
        for mine, terms, out in zip(x.split(sizes), every, y.split(sizes), strict=True):
            written = _aligned(out, copied=False)
            kept += multiply_terms(_aligned(mine), terms, written)
            if written is not out:
                out.copy_(written)
        ctx.save_for_backward(x, *kept, *flat)
        ctx.sizes, ctx.every = sizes, [[term._replace(a=None, b=None) for term in terms] for terms in every]
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        x, *saved = ctx.saved_tensors
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        kept, flat = saved[: 2 * len(ctx.sizes)], iter(saved[2 * len(ctx.sizes) :])
        gradients: list[Tensor | None] = []
        of_rows = [None] * len(ctx.sizes) if grad_x is None else grad_x.split(ctx.sizes)
        lines = zip(grads[0].split(ctx.sizes), x.split(ctx.sizes), ctx.every, of_rows, strict=True)
        for number, (grad, mine, bare, out) in enumerate(lines):
            terms = [term._replace(a=next(flat), b=next(flat)) for term in bare]
            z, A = kept[2 * number : 2 * number + 2]
            written = None if out is None else _aligned(out, copied=False)
            pairs = differentiate_terms(_aligned(grad), _aligned(mine), z, A, terms, written)
            gradients += [each for pair in pairs for each in pair]
            if out is not None and written is not None and written is not out:
                out.copy_(written)
        return grad_x, None, None, *gradients


def _aligned(rows: Tensor, *, copied: bool = True) -> Tensor:
    """Return rows that begin where their own tensor begins, at a multiple of 64 bytes, as products may depend on
    that: themselves, or others with their values (`copied`) or none yet."""
    if rows.data_ptr() % ALIGNMENT == 0:
        return rows
    return rows.clone() if copied else torch.empty_like(rows)
