"""Norms of models in float64 that are of float64, as transformers' are not."""

from __future__ import annotations

import copy

import torch


def with_exact_norms(model):
    """transformers' RMS norms round to float32 in any type; here float64 is to mean float64."""

    def forward(module, x):
        if x.dtype != torch.float64:
            return super(type(module), module).forward(x)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", 0.0))
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (module.offset + getattr(module, "weight", 0.0))

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            kind = type(module)
            module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "offset": _offset(module)})
    return model


@torch.no_grad()
def _offset(norm) -> float:
    """What an RMS norm adds to its weight before it multiplies: 1 of Gemma 2's and Qwen3-Next's, and where there is no
    weight."""
    norm = copy.deepcopy(norm).to_empty(device="cpu")  # of a model that is on the meta device, too
    for parameter in norm.parameters():
        parameter.fill_(1.0)
    weight = getattr(norm, "weight", torch.zeros(8))
    return float((norm(torch.ones_like(weight)) - weight).mean().round())
