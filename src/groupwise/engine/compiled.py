"""The dense parts of a decode step, compiled by `torch.compile`, and on a CUDA GPU captured as CUDA graphs (`graphs`).

    opening               embeddings and rotary angles
    before[0]             -> q, k, v
    attend(q, k, v)       eager (`kv_cache.Extend`): its sizes change at every step
    after[0], before[1]   -> h, q, k, v; one piece, in which only the number of rows varies
    attend(q, k, v)
    ...
    after[last], norm     -> hidden states

Three functions of tensors are compiled, not a model: weights are arguments, so all layers and all versions of an
adapter use the same code, and rows that finish cause no compilation. They are the functions that `Backbone` runs, over
one policy's matrices (`multi_lora.Products`). Everything else runs uncompiled: several policies in a batch, prefills,
drafts, models that are not of the Llama family.

The first step with weights of new shapes (on a GPU also: with a new number of rows) is computed both ways and compared.
If the compiler raises an error, then or later, or the results differ by more than rounding, a warning says so; this
step and all later ones run uncompiled. No row is lost: a step writes the keys and values of its own tokens, and can
repeat this.

Compiled loops use the number of OpenMP threads for which they were compiled, even if torch's number changes later,
unless `threads_vary`: then as many as the running thread has. They use the OpenMP that torch has loaded, so there is no
second team of threads.

Shapes: B rows, R rows with padding, H query heads, D head size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from groupwise.engine.graphs import Carry, Graphs, Heads, Recorder, Step, bucket_of, cuda_recorder, mapped
from groupwise.engine.multi_lora import AdapterBank, Products, multiply
from groupwise.model.attention import Layout
from groupwise.model.backbone import After, Backbone, Before, RmsNorm, norm, scoring_of
from groupwise.model.head import Head
from groupwise.model.packed_check import packed_tolerance
from groupwise.model.quantized import quantization_of


class Weights(NamedTuple):
    """The tensors of all layers and of the last norm."""

    before: tuple[Before, ...]
    after: tuple[After, ...]
    norm: RmsNorm


def weights_of(model: Any, products: Products) -> Weights:
    """Return the weights of one policy, by layer. `model` is transformers' model without its LM head."""

    def tensors(part: Any) -> Any:
        made = {}
        for name, modules in part._asdict().items():
            if isinstance(modules, nn.Module):
                made[name] = _norm_of(modules)
            elif isinstance(modules, tuple) and isinstance(modules[0], nn.Module):
                made[name] = products.of(modules)
        return part._replace(**made)

    before, after = (tuple(tensors(kind.of(layer)) for layer in model.layers) for kind in (Before, After))
    return Weights(before, after, _norm_of(model.norm))


def _norm_of(module: Any) -> RmsNorm:
    return RmsNorm(module.weight, module.variance_epsilon)


# -- the pieces --------------------------------------------------------------------------------------------------------
def _first(before: Before, h: Tensor, cos: Tensor, sin: Tensor) -> Heads:
    return before.run(h, cos, sin, multiply)


def _between(
    after: After, before: Before, h: Tensor, cos: Tensor, sin: Tensor, mixed_RHD: Tensor
) -> tuple[Tensor, Heads]:
    h = after.run(h, mixed_RHD, multiply)
    return h, before.run(h, cos, sin, multiply)


def _last(after: After, last: RmsNorm, h: Tensor, mixed_RHD: Tensor) -> Tensor:
    return norm(last, after.run(h, mixed_RHD, multiply))


class Functions:
    """The compiled functions. While `may_compile`, rows are marked as what varies."""

    def __init__(self, threads: int, threads_vary: bool):
        options: dict[str, Any] = {"cpp.threads": threads, "cpp.dynamic_threads": threads_vary}
        made = partial(torch.compile, fullgraph=True, dynamic=False, options=options)  # dynamic where it is marked
        self._compiled = {function: made(function) for function in (_first, _between, _last)}
        self.may_compile = True

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self.may_compile:
            for x in arguments:
                if isinstance(x, Tensor):
                    torch._dynamo.mark_dynamic(x, 0)
        return self._compiled[function](*arguments)


class Pieces:
    """A `Step` of compiled functions over the weights of one policy."""

    def __init__(self, functions: Functions, opening: Callable[[Tensor, Tensor], Carry], weights: Weights):
        self._call, self._opening, self._weights = functions, opening, weights

    def open(self, ids: Tensor, positions: Tensor) -> tuple[Carry, Heads]:
        carry = self._opening(ids, positions)
        return carry, self._call(_first, self._weights.before[0], *carry)

    def between(self, layer: int, carry: Carry, mixed: Tensor) -> tuple[Carry, Heads]:
        after, before = self._weights.after[layer], self._weights.before[layer + 1]
        h, heads = self._call(_between, after, before, *carry, mixed)
        return (h, *carry[1:]), heads

    def close(self, carry: Carry, mixed: Tensor) -> Tensor:
        return self._call(_last, self._weights.after[-1], self._weights.norm, carry[0], mixed)


def why_uncompiled(backbone: Backbone) -> str | None:
    """Return why the steps of a model cannot be compiled; None where they can."""
    if quantization_of(backbone.model) is not None:
        return "the weights are quantised, and dequantised for each product"
    if not backbone.lean:
        return "only models of the Llama family (RMS norms, rotary positions, gated MLPs) can be compiled"
    return None


def compiles(asked: bool | None, device: torch.device, backbone: Backbone) -> bool:
    """Return whether an engine compiles its steps: `asked`, or, if that is None, True on a CUDA GPU for models that can
    be compiled. There decoding waits for the starts of kernels."""
    if asked is not None:
        return asked
    return device.type == "cuda" and why_uncompiled(backbone) is None  # gpu-aware


# -- a decode step -----------------------------------------------------------------------------------------------------
class Compiled:
    """Called as a `Backbone`, for decode steps. `why_not` says why they run uncompiled, where they do.

    Args:
        backbone: it runs what is not compiled.
        bank: the adapters of the selected batch.
        threads: torch's threads in a step.
        vary: whether some steps have fewer.
        record: the recorder of steps; None: CUDA graphs on a GPU, else no recorder.
    """

    def __init__(
        self,
        backbone: Backbone,
        bank: AdapterBank,
        threads: int,
        vary: bool,
        *,
        record: Recorder | None = None,
    ):
        model = backbone.model
        self._own: Any
        self._own, self._name = getattr(model, model.base_model_prefix), type(model).__name__
        self._backbone, self._bank, self._functions = backbone, bank, Functions(threads, vary)
        self._head, self._tolerance = Head.of(model), packed_tolerance(model)
        if record is None and model.device.type == "cuda":  # gpu-seen: CUDA graphs, in place of compiled code alone
            record = cuda_recorder(model.device)
        self._graphs = None if record is None else Graphs(model.parameters(), record)
        self._policy: _Policy | None = None  # of the last step
        self._seen: set[Any] = set()  # kinds of steps that were compared
        self.why_not: str | None = None
        if (why := why_uncompiled(backbone)) is not None:
            self._stop(why)
        else:
            self._attentions = [(layer.self_attn.layer_idx, scoring_of(layer)) for layer in self._own.layers]

    def __call__(self, ids_B: Tensor, positions_B: Tensor, layout: Layout) -> Tensor:
        products = self._bank.alone() if self.why_not is None else None
        if products is None:
            return self._backbone(ids_B, positions_B, layout)
        try:
            step, kind = self._step(products, len(ids_B))
            hidden_BH = self._run(step, ids_B, positions_B, layout)
        except Exception as error:  # compilers raise all kinds
            self._stop(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            return self._backbone(ids_B, positions_B, layout)
        if kind in self._seen:
            return hidden_BH
        self._seen.add(kind)
        return self._compared(hidden_BH, self._backbone(ids_B, positions_B, layout))

    def _step(self, products: Products, rows: int) -> tuple[Step, Any]:
        """Return what computes a step of this policy, and its kind: steps of one kind compile, or record, once."""
        if self._policy is None or self._policy.products is not products:
            weights = weights_of(self._own, products)
            pieces = Pieces(self._functions, self._backbone.opening, weights)
            shapes = mapped(weights, lambda x: (x.shape, x.dtype))
            self._policy = _Policy(products=products, weights=weights, shapes=shapes, pieces=pieces)
        policy, bucket = self._policy, None if self._graphs is None else bucket_of(rows)
        kind = (policy.shapes, bucket)
        self._functions.may_compile = kind not in self._seen
        if self._graphs is None or bucket is None:
            return policy.pieces, kind
        over = partial(Pieces, self._functions, self._backbone.opening)
        return self._graphs.step(over, policy.weights, policy.shapes, bucket), kind

    def _run(self, step: Step, ids_B: Tensor, positions_B: Tensor, layout: Layout) -> Tensor:
        """Return the last hidden states [B, hidden]."""
        B = len(ids_B)

        def mixed(layer: int, heads: Heads) -> Tensor:
            index, scoring = self._attentions[layer]
            query, key, value = (x[:B] for x in heads)
            return _two(layout.attend(index, query, key, value, scoring).contiguous())

        carry, heads = step.open(_two(ids_B), _two(positions_B))
        for layer in range(len(self._attentions) - 1):
            carry, heads = step.between(layer, carry, mixed(layer, heads))
        return step.close(carry, mixed(-1, heads))[:B]

    def _compared(self, hidden_BH: Tensor, uncompiled_BH: Tensor) -> Tensor:
        mine, theirs = (self._head.logits(x).log_softmax(-1) for x in (hidden_BH, uncompiled_BH))
        gap = float((theirs.exp() * (theirs - mine).abs()).sum(-1).mean())
        if not gap <= self._tolerance:
            self._stop(f"the first step differed by {gap:.3g} nats (tolerance {self._tolerance:g})")
        return uncompiled_BH

    def _stop(self, why: str) -> None:
        self.why_not, self._policy, self._graphs = why, None, None
        warnings.warn(
            f"rollout.compile cannot be used for {self._name}: {why}; decoding goes on uncompiled, which computes the "
            "same",
            stacklevel=3,
        )


@dataclass(frozen=True, kw_only=True)
class _Policy:
    """The compiled parts that were made for the policy of the last step."""

    products: Products
    weights: Weights
    shapes: Any
    pieces: Pieces


def _two(x: Tensor) -> Tensor:
    """Return a single row twice: a size of 1 would be compiled by itself."""
    return x if len(x) > 1 else torch.cat([x, x])
