"""The model without its LM head, run on one packed row of tokens.

Most models run as transformers wrote them. The Llama family (Llama, Qwen2, Qwen3: RMS norms, rotary positions, a gated
MLP) has a second way here, over the same parameters, in about half as many operations:

    x = rms(h)   q, k, v = project(x)   q, k = rotate(norm(q, k))   h += o(attend(q, k, v))
    x = rms(h)   g, u    = project(x)                               h += down(silu(g) * u)

`q, k, v` and `g, u` come out of `project` side by side in one tensor, which is then normed, rotated and gated whole: a
small model's decode step spends more time starting operations than computing, and training spends as much on passes
over [S, intermediate] tensors as on matrix products. Backward passes are written out for the same reason; what they
need again they compute again. Which product `project` is (merged weights, base and adapter, several adapters) is the
affair of engine and learner. `model.packed_forward_gap` compares all this with the model's own forward before any use.

Shapes: S packed tokens, H query heads, K key-value heads, D head size, F intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from groupwise.algo.attention import Layout, Scoring

LEAN = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

# Linear modules with the same input [S, in] -> their outputs side by side [S, sum of out]
Project = Callable[[Sequence[nn.Module], Tensor], Tensor]


def project_plainly(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Each module as it is."""
    outputs = [module(x) for module in modules]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


class Backbone:
    """`Backbone(model)(ids_S, positions_S, layout)` -> the last hidden states [S, hidden]."""

    def __init__(self, model: PreTrainedModel, project: Project = project_plainly):
        self._own: Any = getattr(model, model.base_model_prefix)
        self._project = project
        self.lean = is_lean(model)

    def __call__(self, ids_S: Tensor, positions_S: Tensor, layout: Layout) -> Tensor:
        own = self._own
        if not self.lean:
            out = own(input_ids=ids_S[None], position_ids=positions_S[None], layout=layout, use_cache=False)
            return out.last_hidden_state[0]
        h = own.embed_tokens(ids_S)
        cos, sin = (x[0, :, None] for x in own.rotary_emb(h, positions_S[None]))  # [S, 1, D]
        half = sin.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        saving = own.gradient_checkpointing and own.training and torch.is_grad_enabled()
        for layer in own.layers:
            if saving:
                h = checkpoint(self._layer, layer, h, cos, sin, layout, use_reentrant=False)
            else:
                h = self._layer(layer, h, cos, sin, layout)
        return _norm(own.norm, h)

    def _layer(self, layer: Any, h: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        attention, mlp = layer.self_attn, layer.mlp
        S, D = h.shape[0], attention.head_dim
        HD, KD = attention.o_proj.in_features, attention.k_proj.out_features
        qkv = self._project((attention.q_proj, attention.k_proj, attention.v_proj), _norm(layer.input_layernorm, h))
        q_SHD, k_SKD, v_SKD = (x.view(S, -1, D) for x in qkv.split((HD, KD, KD), -1))
        if hasattr(attention, "q_norm"):
            q_SHD, k_SKD = _norm(attention.q_norm, q_SHD), _norm(attention.k_norm, k_SKD)
        q_SHD, k_SKD = _rotate(q_SHD, cos, sin), _rotate(k_SKD, cos, sin)
        scoring = Scoring(attention.scaling, getattr(attention, "sliding_window", None))
        mixed_SHD = layout.attend(attention.layer_idx, q_SHD, k_SKD, v_SKD, scoring)
        h = h + self._project((attention.o_proj,), mixed_SHD.reshape(S, HD))
        gate_up = self._project((mlp.gate_proj, mlp.up_proj), _norm(layer.post_attention_layernorm, h))
        return h + self._project((mlp.down_proj,), _gated(gate_up))


def is_lean(model: PreTrainedModel) -> bool:
    """Whether the second way is there for this model."""
    config: Any = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    whole = rope.get("partial_rotary_factor", 1.0) == 1.0
    return type(model).__name__ in LEAN and config.hidden_act == "silu" and whole


def _recorded(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


# -- RMS norm (Zhang & Sennrich 2019, arXiv 1910.07467) ----------------------------------------------------------------


def _norm(module: Any, x: Tensor) -> Tensor:
    """x / rms(x) * weight over the last dimension, in float32 whatever x is in, as the family's models have it."""
    if _recorded(module.weight) or x.dtype != torch.float32:
        return module(x)
    if _recorded(x):
        return _RmsNorm.apply(x, module.weight, module.variance_epsilon)  # type: ignore[return-value]
    return (x * _inverse_rms(x, module.variance_epsilon)).mul_(module.weight)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """(mean x^2 + eps)^-1/2 over the last dimension, kept: one pass over x that writes nothing of its size."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


class _RmsNorm(torch.autograd.Function):
    """y = x r w, r = (mean x^2 + eps)^-1/2;   dx = r (g w) - x r^3 mean(g w x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        r = _inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, r)
        return (x * r).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        x, weight, r = ctx.saved_tensors
        gw = grads[0] * weight
        along = (gw * x).mean(-1, keepdim=True) * r.pow(3)
        return gw.mul_(r).addcmul_(x, along, value=-1), None, None


# -- rotary positions (Su et al. 2021, arXiv 2104.09864) ---------------------------------------------------------------


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x cos + (x with its halves swapped) sin; sin carries the minus of the first half."""
    if _recorded(x):
        return _Rotate.apply(x, cos, sin)  # type: ignore[return-value]
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


class _Rotate(torch.autograd.Function):
    """A rotation; its transpose is the rotation back: the swap is its own inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        cos, sin = ctx.saved_tensors
        half = grads[0].shape[-1] // 2
        return (grads[0] * cos).add_((grads[0] * sin).roll(half, -1)), None, None


# -- the gated MLP (Shazeer 2020, arXiv 2002.05202) --------------------------------------------------------------------


def _gated(gate_up: Tensor) -> Tensor:
    """[S, 2F] -> silu(gate) * up [S, F]."""
    if _recorded(gate_up):
        return _Gated.apply(gate_up)  # type: ignore[return-value]
    gate, up = gate_up.chunk(2, -1)
    return nn.functional.silu(gate).mul_(up)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        grad = torch.empty_like(gate_up)
        torch.ops.aten.silu_backward(grads[0] * up, gate, grad_input=grad[:, : gate.shape[-1]])
        torch.mul(grads[0], nn.functional.silu(gate), out=grad[:, gate.shape[-1] :])
        return grad
