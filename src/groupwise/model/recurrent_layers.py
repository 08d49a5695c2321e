"""transformers' functions, which run by `States` where there is a layout."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from groupwise.model.recurrence import NO_STEP, States


class LayerStates(NamedTuple):
    """The `layout` of one recurrent layer: the states of the packed row, and the layer's number."""

    states: States
    layer: int


def pack_recurrent_layers(model: nn.Module) -> None:
    """Have the recurrent layers of a model run by the `States` of the layout that its forward is given, if any."""
    for module in list(model.modules()):
        names = vars(sys.modules[type(module).__module__])
        found = [name for name in FUNCTIONS if name in names]
        if found and any(isinstance(child, nn.Conv1d) for child in module.children()):
            module.register_forward_pre_hook(_tell_layer, with_kwargs=True)
            for name in found:
                if not hasattr(names[name], "takes_layout"):
                    names[name] = FUNCTIONS[name](names[name], names)
                    names[name].takes_layout = True


def is_recurrent(model: nn.Module) -> bool:
    """Return whether some of a model's layers run by `States`."""
    return any(_tell_layer in module._forward_pre_hooks.values() for module in model.modules())


def _tell_layer(module: Any, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    layout = options.get("layout")
    if layout is not None and not isinstance(layout, LayerStates):
        options = options | {"layout": LayerStates(layout.states, module.layer_idx)}
    return args, options


def _convolution(own: Callable[..., Any], names: dict[str, Any]) -> Callable[..., Any]:
    """Return the convolution of x [1, C, S], likewise."""

    @functools.wraps(own)
    def run(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        layout: LayerStates | None = None,
        **options: Any,
    ) -> Tensor:
        if layout is None:
            return own(x, weight, bias, activation, **options)
        out_SC = layout.states.convolve(layout.layer, x[0].T.to(weight.dtype), weight)
        out_SC = out_SC if bias is None else out_SC + bias
        out_SC = out_SC if activation is None else ACT2FN[activation](out_SC)
        return out_SC.T[None].to(x.dtype)

    return run


def _gated_delta_rule(own: Callable[..., Any], names: dict[str, Any]) -> Callable[..., Any]:
    """Compute the rule of queries, keys and values [1, S, heads, D], log decays and learning rates [1, S, heads] ->
    outputs, None (Yang et al. 2024, arXiv 2412.06464). The state is [B, heads, D of keys, D of values]."""
    stepwise = names["torch_recurrent_gated_delta_rule"]

    @functools.wraps(own)
    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        layout: LayerStates | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if layout is None:
            return own(query, key, value, g=g, beta=beta, **options)
        options |= {"output_final_state": True}

        def rule(rows: Sequence[Tensor], before: Tensor | None) -> tuple[Tensor, Tensor]:
            q, k, v, decay, rate = rows
            function = stepwise if q.shape[1] == 1 else own
            return function(q, k, v, g=decay, beta=rate, **options | {"initial_state": before})

        inputs = [x[0] for x in (query, key, value, g, beta)]
        return layout.states.recur(layout.layer, rule, inputs, (0.0,) * 5)[None], None  # without decay and rate: idle

    return run


def _state_space(own: Callable[..., Any], names: dict[str, Any]) -> Callable[..., Any]:
    """Compute the state space of inputs [1, S, heads, P], step sizes [1, S, heads], A [heads], B and C [1, S, groups,
    N] -> outputs like the inputs (Mamba 2: Dao & Gu 2024, arXiv 2405.21060). The state is [B, heads, P, N]."""
    stepwise = names["mamba2_selective_state_update"]

    @functools.wraps(own)
    def run(
        x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, layout: LayerStates | None = None, **options: Any
    ) -> Any:
        if layout is None:
            return own(x, dt, A, B, C, **options)
        if options["dt_limit"][0] > 0 or not options["dt_softplus"]:
            raise NotImplementedError("a state-space layer in which no step is of size 0 is not supported")

        def rule(rows: Sequence[Tensor], before: Tensor | None) -> tuple[Tensor, Tensor]:
            x, dt, B, C = rows
            T, P = x.shape[1], x.shape[3]
            if T == 1 and before is not None and not torch.is_grad_enabled():
                after = before.clone()  # is written to
                per_P = [y[:, None].expand(-1, P) for y in (options["D"], options["dt_bias"])]
                step = (dt[:, 0, :, None].expand(-1, -1, P), A[:, None, None].expand(-1, P, B.shape[-1]))
                D, bias = per_P
                out = stepwise(after, x[:, 0], *step, B[:, 0], C[:, 0], D, dt_bias=bias, dt_softplus=True)
                return out[:, None], after
            size = min(options["chunk_size"], max(16, 1 << (T - 1).bit_length()))
            given = {"chunk_size": size, "initial_states": before, "return_final_states": True}
            return own(x, dt, A, B, C, **options | given)

        inputs = [y[0] for y in (x, dt, B, C)]
        return layout.states.recur(layout.layer, rule, inputs, (0.0, NO_STEP, 0.0, 0.0))[None]

    return run


def _fused(own: Callable[..., Any], names: dict[str, Any]) -> Callable[..., Any]:
    """Return a kernel for a whole layer in training, where there is one; None has the layer call the functions
    above."""

    @functools.wraps(own)
    def run(*inputs: Any, layout: LayerStates | None = None, **options: Any) -> Any:
        return own(*inputs, **options) if layout is None else None

    return run


# By their names in transformers' modules.
FUNCTIONS: dict[str, Callable[[Callable[..., Any], dict[str, Any]], Callable[..., Any]]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba2_split_conv1d_scan_combined": _fused,
}
