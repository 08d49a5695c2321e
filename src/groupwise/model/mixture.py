"""Mixtures of experts (Shazeer et al. 2017, arXiv 1701.06538): a router chooses K of E experts for each token.

    l = W_router x      w_e, chosen = the router's scores of the K experts it chooses      y = sum_{e chosen} w_e f_e(x)

transformers has the weights of all experts of a layer as 3-D parameters, `experts.gate_up_proj` and
`experts.down_proj`, and a router as a module that returns (logits [S, E], weights [S, K], chosen [S, K]). Here is what
trainer and engine both change of that:

    experts_forward     the experts' forward, with a term added to the product with each parameter (an adapter's)
    router_forward      the router's own forward, with a term added to its logits
    Routers             what all routers of a model computed in a forward, and what they are to choose in one
    load_balancing      the auxiliary loss that keeps experts equally busy, where a router trains

Shapes: S tokens, K experts of a token, E experts, N = S K pairs of a token and an expert of its.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from groupwise.config.lora import EXPERT_PARAMETERS
from groupwise.errors import ModelError
from groupwise.recorded import RoutingShape


def fused_parameters(module: nn.Module) -> list[str]:
    """Return the names of the 3-D parameters of experts whose forward `experts_forward` is; [] for any other module."""
    if not hasattr(type(module), "_apply_gate") or not hasattr(module, "is_transposed"):
        return []
    own = [name for name, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3]
    return own if own == [name for name in EXPERT_PARAMETERS if name in own] else []


def is_router(module: nn.Module) -> bool:
    """Return whether a module is a router of transformers 5 whose logits are x W^T of its own `weight` [E, hidden]."""
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
    """N pairs of a token and an expert of its, sorted by expert, of which there are `experts`."""

    token_N: Tensor
    expert_N: Tensor
    experts: int

    @cached_property
    def counts_E(self) -> Tensor:
        """Return how many pairs each expert has; `bincount` would wait for the device."""
        return self.expert_N.new_zeros(self.experts).index_add_(0, self.expert_N, torch.ones_like(self.expert_N))

    @cached_property
    def counts(self) -> list[int]:
        """Return the same on the host, which waits for them once."""
        return self.counts_E.tolist()


# name of a parameter, what it is multiplied with [N, in], the pairs -> what is added to the product [N, out], or None
ExpertDelta = Callable[[str, Tensor, Routed], Tensor | None]


def experts_forward(experts: Any, x_SH: Tensor, chosen_SK: Tensor, weight_SK: Tensor, delta: ExpertDelta) -> Tensor:
    """Return the forward of one of transformers' modules of fused experts, -> [S, H], with `delta` in its two
    products."""
    expert_N, order_N = chosen_SK.flatten().sort(stable=True)
    routed = Routed(order_N // chosen_SK.shape[-1], expert_N, experts.num_experts)
    h_N = _product(experts, "gate_up_proj" if experts.has_gate else "up_proj", x_SH[routed.token_N], routed, delta)
    h_N = experts._apply_gate(h_N) if experts.has_gate else experts.act_fn(h_N)
    y_N = _product(experts, "down_proj", h_N, routed, delta)
    if getattr(experts, "has_post_expert_norm", False):  # since transformers 5.20
        y_N = experts.post_expert_norm(y_N)
    y_N = y_N * weight_SK.flatten()[order_N, None]
    y_N = y_N[order_N.argsort()]  # each token's K side by side, and summed in that order
    return y_N.view(*chosen_SK.shape, -1).sum(1).to(x_SH.dtype)


def _product(experts: Any, name: str, x_N: Tensor, routed: Routed, delta: ExpertDelta) -> Tensor:
    weight = getattr(experts, name)
    x_N = x_N.to(weight.dtype)
    y_N = by_expert(x_N, weight if experts.is_transposed else weight.mT, routed)
    if experts.has_bias:
        y_N = y_N + getattr(experts, f"{name}_bias")[routed.expert_N]
    added = delta(name, x_N, routed)
    return y_N if added is None else (y_N + added).to(y_N.dtype)


def by_expert(x_N: Tensor, matrix_EIO: Tensor, routed: Routed) -> Tensor:
    """Multiply [N, in] with E matrices [in, out] to [N, out], each pair with its expert's matrix."""
    if (
        x_N.is_cuda and x_N.dtype == torch.bfloat16 and matrix_EIO.dtype == torch.bfloat16
    ):  # gpu-only: one product of all experts
        return nn.functional.grouped_mm(x_N, matrix_EIO, offs=routed.counts_E.cumsum(0, dtype=torch.int32))
    parts = zip(x_N.split(routed.counts), matrix_EIO.unbind(), strict=True)
    products = [part @ matrix for part, matrix in parts if len(part)]
    return torch.cat(products) if products else x_N.new_zeros(0, matrix_EIO.shape[-1])


def low_rank(x_N: Tensor, a_EIR: Tensor, b_ERO: Tensor, counts: list[int]) -> Tensor:
    """Return (x A_e) B_e for the expert e of each pair, [N, out], in the adapter's type."""
    parts = zip(x_N.to(a_EIR.dtype).split(counts), a_EIR.unbind(), b_ERO.unbind(), strict=True)
    products = [(part @ a) @ b for part, a, b in parts if len(part)]
    return torch.cat(products) if products else a_EIR.new_zeros(0, b_ERO.shape[-1])


# -- routers -----------------------------------------------------------------------------------------------------------


def routing_shape(model: nn.Module) -> RoutingShape | None:
    """Return how a model's routers choose; None of one that has none, or whose layers choose so many experts each that
    nothing is recorded of them."""
    routers: list[Any] = [module for module in model.modules() if is_router(module)]
    if len(chosen := {int(router.top_k) for router in routers}) != 1:
        return None
    return RoutingShape(len(routers), chosen.pop(), max(router.num_experts for router in routers))


RouterDelta = Callable[[Tensor], Tensor | None]  # x [S, hidden] -> what is added to the logits [S, E]


def router_forward(
    router: Any,
    own: Callable[..., Any],
    *args: Any,
    delta: RouterDelta | None = None,
    chosen_SK: Tensor | None = None,
    apply: bool = True,
    on_choice: Callable[[Tensor], None] | None = None,
) -> Any:
    """`own(*args)`, the forward of one of transformers' routers, with `delta` added to its logits, and (where `apply`)
    with the experts `chosen_SK` in place of its own choice, which stands where they are -1. `on_choice` is told what
    the router would choose. All else that it does (softmax or sigmoid, normalisation, scale) is the model's."""
    with _Routing(router, delta, chosen_SK if apply else None) as routing:
        result = own(*args)
    if on_choice is not None:
        on_choice(result[2] if routing.own_SK is None else routing.own_SK)
    if routing.chosen_SK is not None and routing.choices != 1:
        kind = type(router).__name__
        raise ModelError(
            f"the router {kind} chooses in another way than by topk", hint="set train.router_replay: false"
        )
    if delta is not None and routing.products != 1:
        kind = type(router).__name__
        raise ModelError(f"the router {kind} computes its logits in another way than x W^T, so it takes no adapter")
    return result


class _Routing(TorchFunctionMode):
    """Intercepts a router's forward: adds the adapter's term to the product with the router's weight, and replaces the
    experts that `topk` chose."""

    def __init__(self, router: Any, delta: RouterDelta | None, chosen_SK: Tensor | None):
        super().__init__()
        self._shape, self._delta, self.products = router.weight.shape, delta, 0
        self.chosen_SK, self.own_SK, self.choices = chosen_SK, None, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is nn.functional.linear and len(args) > 1 and args[1].shape == self._shape:
            self.products += 1
            added = None if self._delta is None else self._delta(args[0])
            return result if added is None else (result + added).to(result.dtype)
        if func in (torch.topk, Tensor.topk) and self.chosen_SK is not None:
            scores, own_SK = args[0], result.indices
            if scores.shape[-1] == self._shape[0] and own_SK.shape == self.chosen_SK.shape:
                self.choices, self.own_SK = self.choices + 1, own_SK
                replaced_SK = torch.where(self.chosen_SK < 0, own_SK, self.chosen_SK)
                return torch.return_types.topk((scores.gather(-1, replaced_SK), replaced_SK))
        return result


class RouterOutput(NamedTuple):
    """The output of one router in a forward: logits [S, E], and the experts that it chose [S, K]."""

    logits_SE: Tensor
    chosen_SK: Tensor


@dataclass
class _Forward(threading.local):
    seen: list[RouterOutput] | None = field(default=None)


class Routers:
    """All routers of a model, in the order of its layers. Only what a forward within `watched` computes is kept.

    Routing replay (R3, arXiv 2510.11370): within `replaying` they choose what the sampler's chose for the same tokens,
    with their own weights, so that rounding cannot send a token to other experts than those that it was sampled
    with. That is of all threads, as the backward pass runs a checkpointed forward again in another one.
    """

    def __init__(self, model: nn.Module):
        self.modules: list[Any] = [module for module in model.modules() if is_router(module)]
        self._now = _Forward()
        self._chosen: tuple[Tensor, bool] | None = None  # [layers, S, K], and whether to choose so
        self._differ: list[Tensor] = []
        for layer, router in enumerate(self.modules):
            router.forward = partial(self._forward, layer, router, router.forward)
            router.register_forward_hook(self._hear)

    @contextmanager
    def replaying(self, chosen_LSK: Tensor | None, *, apply: bool) -> Iterator[None]:
        """Compare the routers' choices in the block with the sampler's, `chosen_LSK` for the S tokens of each forward
        and backward pass: -1 for an unknown choice, None if all are unknown. With `apply` the routers also make the
        sampler's choices."""
        self._chosen, self._differ = None if chosen_LSK is None else (chosen_LSK, apply), []
        try:
            yield
        finally:
            self._chosen = None

    def replayed(self, counted_S: Tensor) -> dict[str, Tensor]:
        """After a forward within `replaying`: for which share of the tokens `counted_S` the sampler's choice is known,
        and for which share of the known pairs of a layer and a token the router would choose other experts."""
        assert self._chosen is not None
        recorded_LS = self._chosen[0][..., 0] >= 0
        differ = torch.stack(self._differ[: len(self.modules)]).sum()
        known = (recorded_LS[0] & counted_S).sum() / counted_S.sum().clamp(min=1)
        return {"recorded_frac": known, "mismatch_frac": differ / recorded_LS.sum().clamp(min=1)}

    def _forward(self, layer: int, router: Any, own: Callable[..., Any], *args: Any) -> Any:
        if self._chosen is None:
            return own(*args)
        chosen_SK, apply = self._chosen[0][layer], self._chosen[1]

        def compare(own_SK: Tensor) -> None:
            other_S = (own_SK.sort(-1).values != chosen_SK.sort(-1).values).any(-1)
            self._differ.append((other_S & (chosen_SK[:, 0] >= 0)).sum().float())

        return router_forward(router, own, *args, chosen_SK=chosen_SK, apply=apply, on_choice=compare)

    def __deepcopy__(self, memo: Any) -> Routers:
        return self  # a copy of the model, as a reference is, is heard too; its forwards are not watched

    @contextmanager
    def watched(self) -> Iterator[list[RouterOutput]]:
        """Yield a list to which each router appends its output in the block, in this thread. Checkpointing runs no
        forward again before the backward pass, so after one forward the list has one entry for each router."""
        seen = self._now.seen = []
        try:
            yield seen
        finally:
            self._now.seen = None

    def _hear(self, router: nn.Module, args: Any, output: Any) -> None:
        if self._now.seen is not None:
            logits, _, chosen = output
            self._now.seen.append(RouterOutput(logits, chosen))


def load_balancing(outputs: Sequence[RouterOutput], weight_S: Tensor) -> Tensor:
    """Return the auxiliary loss of Switch Transformer (arXiv 2101.03961, equations 4 to 6), for K experts a token, as
    transformers computes it over all layers together:

        loss = E sum_e f_e P_e      f_e: share of the tokens that expert e is chosen for, summing to K
                                    P_e: mean of softmax(l)_e

    1 times K where all experts are equally busy, K E / K = E at most. `weight_S` says how often a token counts, which
    is 0 for padding and the number of its completions for a prompt that is packed once.
    """
    tokens = weight_S.sum() * len(outputs)
    experts = outputs[0].logits_SE.shape[-1]
    share_E = weight_S.new_zeros(experts)
    mean_E = weight_S.new_zeros(experts)
    for logits_SE, chosen_SK in outputs:
        share_E = share_E.index_add(0, chosen_SK.flatten(), weight_S.repeat_interleave(chosen_SK.shape[-1]))
        mean_E = mean_E + (logits_SE.softmax(-1).to(weight_S.dtype) * weight_S[:, None]).sum(0)
    return experts * (share_E / tokens * (mean_E / tokens)).sum()


def balancing_coefficient(model: Any) -> float:
    """Return the weight of the auxiliary loss in the model's own loss; 0 where its family has none (DeepSeek-V3)."""
    return float(getattr(model.config.get_text_config(), "router_aux_loss_coef", None) or 0.0)
