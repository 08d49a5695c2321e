"""Mixtures of experts (Shazeer et al. 2017, arXiv 1701.06538): a router chooses K of E experts for each token.

    l = W_router x      w_e, chosen = the router's scores of the K experts it chooses      y = sum_{e chosen} w_e f_e(x)

transformers has the weights of all experts of a layer as 3-D parameters, `experts.gate_up_proj` and
`experts.down_proj`, and a router as a module that returns (logits [S, E], weights [S, K], chosen [S, K]). Here is what
trainer and engine both change of that:

    experts_forward     the experts' forward, with a term added to the product with each parameter (an adapter's)
    router_forward      the router's own forward, with a term added to its logits

Shapes: S tokens, K experts of a token, E experts, N = S K pairs of a token and an expert of its.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from groupwise.config.lora import EXPERT_PARAMETERS
from groupwise.errors import ModelError


def fused_parameters(module: nn.Module) -> list[str]:
    """The names of the 3-D parameters of experts whose forward `experts_forward` is; [] for any other module."""
    if not hasattr(type(module), "_apply_gate") or not hasattr(module, "is_transposed"):
        return []
    own = [name for name, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3]
    return own if own == [name for name in EXPERT_PARAMETERS if name in own] else []


def is_router(module: nn.Module) -> bool:
    """Whether a module is a router of transformers 5 whose logits are x W^T of its own `weight` [E, hidden]."""
    weight = getattr(module, "weight", None)
    return (
        "Router" in type(module).__name__
        and not isinstance(module, nn.Linear)
        and isinstance(weight, nn.Parameter)
        and weight.ndim == 2
        and weight.shape[0] == getattr(module, "num_experts", None)
    )


# -- experts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Routed:
    """N pairs of a token and an expert of its, sorted by expert."""

    token_N: Tensor
    expert_N: Tensor
    counts: list[int]  # of the pairs of each expert

    @classmethod
    def of(cls, token_N: Tensor, expert_N: Tensor, experts: int) -> Routed:
        """From pairs that are sorted by expert."""
        return cls(token_N, expert_N, expert_N.bincount(minlength=experts).tolist())


# name of a parameter, what it is multiplied with [N, in], the pairs -> what is added to the product [N, out], or None
ExpertDelta = Callable[[str, Tensor, Routed], Tensor | None]


def experts_forward(experts: Any, x_SH: Tensor, chosen_SK: Tensor, weight_SK: Tensor, delta: ExpertDelta) -> Tensor:
    """The forward of one of transformers' modules of fused experts, -> [S, H], with `delta` in its two products."""
    expert_N, order_N = chosen_SK.flatten().sort(stable=True)
    routed = Routed.of(order_N // chosen_SK.shape[-1], expert_N, experts.num_experts)
    h_N = _product(experts, "gate_up_proj" if experts.has_gate else "up_proj", x_SH[routed.token_N], routed, delta)
    h_N = experts._apply_gate(h_N) if experts.has_gate else experts.act_fn(h_N)
    y_N = _product(experts, "down_proj", h_N, routed, delta)
    if experts.has_post_expert_norm:
        y_N = experts.post_expert_norm(y_N)
    y_N = y_N * weight_SK.flatten()[order_N, None]
    y_N = y_N[order_N.argsort()]  # each token's K side by side, and summed in that order
    return y_N.view(*chosen_SK.shape, -1).sum(1).to(x_SH.dtype)


def _product(experts: Any, name: str, x_N: Tensor, routed: Routed, delta: ExpertDelta) -> Tensor:
    weight = getattr(experts, name)
    x_N = x_N.to(weight.dtype)
    y_N = by_expert(x_N, weight if experts.is_transposed else weight.mT, routed.counts)
    if experts.has_bias:
        y_N = y_N + getattr(experts, f"{name}_bias")[routed.expert_N]
    added = delta(name, x_N, routed)
    return y_N if added is None else (y_N + added).to(y_N.dtype)


def by_expert(x_N: Tensor, matrix_EIO: Tensor, counts: list[int]) -> Tensor:
    """[N, in] by E matrices [in, out] -> [N, out]; the first counts[0] rows by the first matrix, and so on."""
    if x_N.is_cuda and x_N.dtype == torch.bfloat16 and matrix_EIO.dtype == torch.bfloat16:
        ends = torch.tensor(counts, device=x_N.device).cumsum(0).to(torch.int32)
        return nn.functional.grouped_mm(x_N, matrix_EIO, offs=ends)
    parts = zip(x_N.split(counts), matrix_EIO.unbind(), strict=True)
    products = [part @ matrix for part, matrix in parts if len(part)]
    return torch.cat(products) if products else x_N.new_zeros(0, matrix_EIO.shape[-1])


def low_rank(x_N: Tensor, a_EIR: Tensor, b_ERO: Tensor, counts: list[int]) -> Tensor:
    """(x A_e) B_e for the expert e of each pair, [N, out], in the adapter's type."""
    parts = zip(x_N.to(a_EIR.dtype).split(counts), a_EIR.unbind(), b_ERO.unbind(), strict=True)
    products = [(part @ a) @ b for part, a, b in parts if len(part)]
    return torch.cat(products) if products else a_EIR.new_zeros(0, b_ERO.shape[-1])


# -- routers -----------------------------------------------------------------------------------------------------------

RouterDelta = Callable[[Tensor], Tensor | None]  # x [S, hidden] -> what is added to the logits [S, E]


def router_forward(router: Any, own: Callable[..., Any], *args: Any, delta: RouterDelta | None = None) -> Any:
    """`own(*args)`, the forward of one of transformers' routers, with `delta` added to its logits. All else that it
    does (softmax or sigmoid, choice, normalisation, scale) is the model's."""
    with _Routing(router, delta) as routing:
        result = own(*args)
    if delta is not None and routing.products != 1:
        kind = type(router).__name__
        raise ModelError(f"the router {kind} computes its logits in another way than x W^T, so it takes no adapter")
    return result


class _Routing(TorchFunctionMode):
    """Within a router's forward: adds to the product with its weight."""

    def __init__(self, router: Any, delta: RouterDelta | None):
        super().__init__()
        self._shape, self._delta, self.products = router.weight.shape, delta, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is nn.functional.linear and len(args) > 1 and args[1].shape == self._shape:
            self.products += 1
            added = None if self._delta is None else self._delta(args[0])
            return result if added is None else (result + added).to(result.dtype)
        return result
