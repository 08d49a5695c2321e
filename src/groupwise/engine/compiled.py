"""The dense parts of a decode step, compiled by `torch.compile`, and on a CUDA GPU captured as CUDA graphs (`graphs`).

    opening                 embeddings and rotary angles
    before[0]               -> q, k, v               \\  between two attentions all is one piece, as in vLLM's piecewise
    attend(q, k, v)         eager, `cache.Extend`     > graphs: the only size that changes from step to step is the
    after[0], before[1]     -> h, q, k, v            /  number of rows, and attention's many sizes stay out of it
    ...
    after[last], norm       -> hidden states

Three functions of tensors are compiled, not a model: weights are arguments, so all layers and all versions of an adapter
use the same code, and rows that finish compile nothing anew. They are the functions that `Backbone` runs, over what one
policy's modules multiply with (`lora.Products`). What is not of this kind runs as without: several policies in a batch,
prefills, drafts, models that are not of the Llama family.

The first step with weights of new shapes is computed both ways and compared. Whatever the compiler raises then or later,
or a difference beyond rounding, is said in a warning; the step and all that follow run uncompiled, and no row is lost:
a step writes only the keys and values of its own tokens, so computing it again is harmless.

On a CPU the compiled loops use as many OpenMP threads as torch did when they were compiled, whatever it is told later,
unless `threads_vary`. They are libgomp's that torch loads, so the process has no second team.

Shapes: B rows, R rows with padding (2 at least: a size of 1 would be compiled by itself), H query heads, D head size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from groupwise.algo.attention import Layout
from groupwise.backbone import After, Backbone, Before, RmsNorm, norm, scoring_of
from groupwise.engine.graphs import Graphs
from groupwise.engine.lora import AdapterBank, Products, multiply

FEWEST_ROWS = 2


class Weights(NamedTuple):
    """The tensors of all layers and of the last norm."""

    before: tuple[Before, ...]
    after: tuple[After, ...]
    norm: RmsNorm


def weights_of(model: Any, products: Products) -> Weights:
    """What one policy's layers compute with, as tensors. `model` is without its LM head."""

    def tensors(part: Any) -> Any:
        names = {"qkv", "o", "gate_up", "down"} & set(part._fields)
        norms = {name: getattr(part, name) for name in part._fields if "norm" in name}
        alone = {name: None if module is None else _tensors(module) for name, module in norms.items()}
        return part._replace(**alone, **{name: products.of(getattr(part, name)) for name in names})

    before, after = (tuple(tensors(kind.of(layer)) for layer in model.layers) for kind in (Before, After))
    return Weights(before, after, _tensors(model.norm))


def _tensors(module: Any) -> RmsNorm:
    return RmsNorm(module.weight, module.variance_epsilon)


# -- the pieces --------------------------------------------------------------------------------------------------------


def _first(before: Before, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return before.run(h, cos, sin, multiply)


def _between(
    after: After, before: Before, h: Tensor, mixed_RHD: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    h = after.run(h, mixed_RHD, multiply)
    return h, *before.run(h, cos, sin, multiply)


def _last(after: After, last: RmsNorm, h: Tensor, mixed_RHD: Tensor) -> Tensor:
    return norm(last, after.run(h, mixed_RHD, multiply))


class Pieces:
    """The compiled functions. `dynamic` marks rows as what varies: it is for calls that may compile."""

    def __init__(self, threads: int, *, threads_vary: bool):
        options: dict[str, Any] = {"cpp.threads": threads, "cpp.dynamic_threads": threads_vary}
        self._compiled = [torch.compile(f, fullgraph=True, options=options) for f in (_first, _between, _last)]
        self.dynamic = True

    def first(self, before: Before, *rows: Tensor) -> Any:
        return self._call(0, (before,), rows)

    def between(self, after: After, before: Before, *rows: Tensor) -> Any:
        return self._call(1, (after, before), rows)

    def last(self, after: After, last: RmsNorm, *rows: Tensor) -> Any:
        return self._call(2, (after, last), rows)

    def _call(self, which: int, weights: tuple[Any, ...], rows: tuple[Tensor, ...]) -> Any:
        if self.dynamic:
            for x in rows:
                torch._dynamo.mark_dynamic(x, 0)
        return self._compiled[which](*weights, *rows)


# -- a decode step -----------------------------------------------------------------------------------------------------


class CompiledBackbone:
    """Called as a `Backbone`, for decode steps. `why_not` says why it runs uncompiled, where it does.

    Args:
        bank: whose batch is selected.
        logits: of hidden states; what both ways are compared by.
        tolerance: most nats by which log-probabilities may differ (`model.packed_tolerance`).
        threads: of torch, in a step.
        threads_vary: whether some steps run on fewer.
    """

    def __init__(
        self,
        model: Any,
        backbone: Backbone,
        bank: AdapterBank,
        *,
        logits: Callable[[Tensor], Tensor],
        tolerance: float,
        threads: int,
        threads_vary: bool,
    ):
        self._own, self._name = getattr(model, model.base_model_prefix), type(model).__name__
        self._backbone, self._bank, self._logits, self._tolerance = backbone, bank, logits, tolerance
        self._pieces = Pieces(threads, threads_vary=threads_vary)
        self._scorings = [(layer.self_attn.layer_idx, scoring_of(layer)) for layer in self._own.layers]
        self._weights: tuple[Products, Weights, Any] | None = None  # the last policy's, and their shapes
        self._seen: set[Any] = set()  # shapes that were compared
        parameters = {parameter.data_ptr() for parameter in model.parameters()}
        self._graphs = Graphs(self._opening, self._pieces, parameters) if model.device.type == "cuda" else None
        self.why_not: str | None = None
        if not backbone.lean:
            self._stop("only models of the Llama family (RMS norms, rotary positions, a gated MLP) can be")

    def __call__(self, ids_B: Tensor, positions_B: Tensor, layout: Layout) -> Tensor:
        products = self._bank.alone() if self.why_not is None else None
        if products is None:
            return self._backbone(ids_B, positions_B, layout)
        try:
            weights, shapes = self._of(products)
            new = shapes not in self._seen
            self._pieces.dynamic = new
            hidden = self._run(weights, shapes, ids_B, positions_B, layout)
            if not new:
                return hidden
        except Exception as error:  # compilers raise all kinds
            self._stop(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            return self._backbone(ids_B, positions_B, layout)
        self._seen.add(shapes)
        return self._compared(hidden, self._backbone(ids_B, positions_B, layout))
