"""The packed forward: the model without its LM head, on one packed row of tokens.

Most models run as transformers wrote them. The Llama family (Llama, Qwen2, Qwen3: RMS norms, rotary positions, a gated
MLP) has a second way here, over the same parameters, in about half as many operations:

    x = rms(h)   q, k, v = project(x)   q, k = rotate(norm(q, k))   h += o(attend(q, k, v))
    x = rms(h)   g, u    = project(x)                               h += down(silu(g) * u)

`q, k, v` and `g, u` come out of `project` side by side in one tensor, which is then normed, rotated and gated whole: a
small model's decode step spends more time starting operations than computing, and training spends as much on passes
over [S, intermediate] tensors as on matrix products. Backward passes are written out for the same reason; what they
need again they compute again. Which product `project` is (merged weights, base and adapter, several adapters) is the
affair of engine and learner. `packed_check` compares all this with the model's own forward before any use.

Shapes: S packed tokens, H query heads, K key-value heads, D head size, F intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from groupwise.errors import ConfigError
from groupwise.model.attention import Layout, Scoring
from groupwise.model.image_tokens import FIRST, vision_of

if TYPE_CHECKING:
    from groupwise.model.vision import See

LEAN = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

# Linear modules with the same input [S, in] -> their outputs side by side [S, sum of out]
Project = Callable[[Sequence[nn.Module], Tensor], Tensor]


def project_plainly(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Return each module as it is."""
    outputs = [module(x) for module in modules]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


def adapter_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the type in which an adapter over a base of this type is multiplied, in training and in sampling: on a GPU
    bfloat16 if the base is in bfloat16, as products in float32 would take as long as the base's; otherwise at least
    float32 (in float16 small gradients would be 0)."""
    if device.type == "cuda" and dtype == torch.bfloat16:  # gpu-aware
        return dtype
    return torch.promote_types(dtype, torch.float32)


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return the text decoder, without its LM head. Raises NotImplementedError where it cannot be told."""
    if vision_of(model) is not None:
        return model.get_decoder()
    for name in (model.base_model_prefix, "model"):  # Llama 4's prefix is that of its vision model
        if isinstance(own := getattr(model, name, None), nn.Module):
            return own
    raise NotImplementedError(f"{type(model).__name__} has no module {model.base_model_prefix!r}")


def decoder_inputs(model: PreTrainedModel, ids_BT: Tensor, see: See | None = None) -> dict[str, Any]:
    """Return token ids as the text decoder takes them: as they are, or as embeddings where images are among them, with
    the features that `see` says; None: as the model sees."""
    vision = vision_of(model)
    if vision is None or not bool((ids_BT >= FIRST).any()):
        return {"input_ids": ids_BT}
    told = vision.embed(ids_BT, model.get_input_embeddings(), see or vision.see(model))
    decoder: Any = model.get_decoder()
    if getattr(decoder, "hidden_size_per_layer_input", 0):  # Gemma 4's embeddings of ids, of images those of padding
        padding = model.config.get_text_config().pad_token_id
        told["per_layer_inputs"] = decoder.get_per_layer_inputs(ids_BT.masked_fill(ids_BT >= FIRST, padding))
    return told


def unsplit_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the decoder layers by name: modules that transformers says are not to be split, also when FSDP has changed
    their class; none where it says nothing."""
    kinds = model._no_split_modules or ()
    every = model.named_modules()
    return {name: module for name, module in every if type(module).__name__.removeprefix("FSDP") in kinds}


class Backbone:
    """`Backbone(model)(ids_S, positions_S, layout)` -> the last hidden states [S, hidden]. Positions are [3, S] where a
    model that sees has three for each token (`Vision.positions`); `see` says what it sees, where that is not what its
    own modules make of an image."""

    def __init__(self, model: PreTrainedModel, project: Project = project_plainly, see: See | None = None):
        self.model, self._see = model, see
        self._own: Any = decoder_of(model)
        self._project = project
        self.lean = is_lean(model)

    def __call__(self, ids_S: Tensor, positions_S: Tensor, layout: Layout) -> Tensor:
        own = self._own
        if not self.lean:
            where = positions_S.unsqueeze(-2)
            told = decoder_inputs(self.model, ids_S[None], self._see)
            vision = vision_of(self.model)
            if vision is not None and vision.both_ways and "inputs_embeds" in told:
                layout.see_ahead(vision.ahead(ids_S), in_windows=vision.in_windows)
            out = own(**told, position_ids=where, layout=layout, use_cache=False)
            return out.last_hidden_state[0]
        h, cos, sin = self.opening(ids_S, positions_S)
        saving = own.gradient_checkpointing and own.training and torch.is_grad_enabled()
        for layer in own.layers:
            if saving:
                h = own._gradient_checkpointing_func(self._layer, layer, h, cos, sin, layout)
            else:
                h = self._layer(layer, h, cos, sin, layout)
        return norm(own.norm, h)

    def opening(self, ids_S: Tensor, positions_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of the first layer: embeddings [S, hidden], cosines and sines [S, 1, D] as `_rotate` takes
        them."""
        h = self._own.embed_tokens(ids_S)
        cos, sin = (x[0, :, None] for x in self._own.rotary_emb(h, positions_S[None]))
        half = sin.shape[-1] // 2
        return h, cos, torch.cat([-sin[..., :half], sin[..., half:]], -1)

    def _layer(self, layer: Any, h: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        query_SHD, key_SKD, value_SKD = Before.of(layer).run(h, cos, sin, self._project)
        scoring = scoring_of(layer)
        mixed_SHD = layout.attend(layer.self_attn.layer_idx, query_SHD, key_SKD, value_SKD, scoring)
        return After.of(layer).run(h, mixed_SHD, self._project)


class Before(NamedTuple):
    """A layer up to its attention. Its parts are modules, or what stands for them: `project` takes `qkv` as it is."""

    norm: Any
    qkv: Any
    q_norm: Any  # None: the architecture has none
    k_norm: Any
    widths: tuple[int, int]  # of queries, and of keys and of values

    @classmethod
    def of(cls, layer: Any) -> Before:
        """Return the modules of one of transformers' layers."""
        attention = layer.self_attn
        return cls(
            layer.input_layernorm,
            (attention.q_proj, attention.k_proj, attention.v_proj),
            getattr(attention, "q_norm", None),
            getattr(attention, "k_norm", None),
            (attention.o_proj.in_features, attention.k_proj.out_features),
        )

    def run(self, h: Tensor, cos: Tensor, sin: Tensor, project: Callable[..., Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [S, H, D], keys and values [S, K, D]."""
        HD, KD = self.widths
        qkv = project(self.qkv, norm(self.norm, h))
        q_SHD, k_SKD, v_SKD = (x.view(len(h), -1, cos.shape[-1]) for x in qkv.split((HD, KD, KD), -1))
        if self.q_norm is not None:
            q_SHD, k_SKD = norm(self.q_norm, q_SHD), norm(self.k_norm, k_SKD)
        return _rotate(q_SHD, cos, sin), _rotate(k_SKD, cos, sin), v_SKD


class After(NamedTuple):
    """A layer from its attention on, likewise."""

    o: Any
    norm: Any
    gate_up: Any
    down: Any

    @classmethod
    def of(cls, layer: Any) -> After:
        """Return the modules of one of transformers' layers."""
        mlp = layer.mlp
        o = (layer.self_attn.o_proj,)
        return cls(o, layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj), (mlp.down_proj,))

    def run(self, h: Tensor, mixed_SHD: Tensor, project: Callable[..., Tensor]) -> Tensor:
        """Return the next layer's h [S, hidden]."""
        h = h + project(self.o, mixed_SHD.reshape(len(h), -1))
        return h + project(self.down, _gated(project(self.gate_up, norm(self.norm, h))))


def checkpoint_layers(model: PreTrainedModel, *, device: torch.device, offload: bool = False) -> None:
    """Have each layer's activations computed again in the backward pass; with `offload` its input is in the CPU's
    memory until then. Raises ConfigError if `device`, which computes, is not a GPU from which memory can be taken."""
    if offload and device.type != "cuda":  # gpu-aware
        raise ConfigError(
            f"gradient_checkpointing offload moves activations off a GPU, and the model is trained on {device.type}",
            hint="set gradient_checkpointing: true",
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if offload:  # gpu-only: layers' inputs wait in the CPU's memory (gradient_checkpointing offload)
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=offloaded_checkpoint)


def offloaded_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint`, whose inputs are kept in the CPU's memory, pinned where there is a GPU."""
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint(function, *args, use_reentrant=False, **kwargs)


def scoring_of(layer: Any) -> Scoring:
    """Return how one of transformers' layers scores."""
    return Scoring(layer.self_attn.scaling, getattr(layer.self_attn, "sliding_window", None))


def is_lean(model: PreTrainedModel) -> bool:
    """Return whether the second way is there for this model."""
    config: Any = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    whole = rope.get("partial_rotary_factor", 1.0) == 1.0
    return type(model).__name__ in LEAN and config.hidden_act == "silu" and whole


def _recorded(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


# -- RMS norm (Zhang & Sennrich 2019, arXiv 1910.07467) ----------------------------------------------------------------


def norm(module: Any, x: Tensor) -> Tensor:
    """x / rms(x) * weight over the last dimension, in float32 whatever x is in, as the family's models have it: of 16
    bits x / rms(x) is rounded before it is weighed. On a GPU it is one kernel of torch's, which rounds once."""
    if _recorded(module.weight) or module.weight.dtype != x.dtype or x.dtype == torch.float64:
        return module(x)
    if x.is_cuda:  # gpu-aware
        return nn.functional.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)
    if _recorded(x):
        return _RmsNorm.apply(x, module.weight, module.variance_epsilon)  # type: ignore[return-value]
    return (x * _inverse_rms(x, module.variance_epsilon)).to(x.dtype).mul_(module.weight)


class RmsNorm(NamedTuple):
    """The parameters of an RMS norm that `norm` reads of the family's module: for compiled code, which takes
    tensors."""

    weight: Tensor
    variance_epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        return (x * _inverse_rms(x, self.variance_epsilon)).to(x.dtype) * self.weight


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """(mean x^2 + eps)^-1/2 over the last dimension, kept, in float32 at least: one pass over x that writes nothing of
    its size."""
    exact = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=exact)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


class _RmsNorm(torch.autograd.Function):
    """y = x r w, r = (mean x^2 + eps)^-1/2;   dx = r (g w) - x r^3 mean(g w x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        r = _inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, r)
        return (x * r).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        x, weight, r = ctx.saved_tensors
        gw = grads[0].to(r.dtype) * weight
        along = (gw * x).mean(-1, keepdim=True) * r.pow(3)
        return gw.mul_(r).addcmul_(x, along, value=-1).to(x.dtype), None, None


# -- rotary positions (Su et al. 2021, arXiv 2104.09864) ---------------------------------------------------------------


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x cos + (x with its halves swapped) sin; sin carries the minus of the first half."""
    if _recorded(x):
        return _Rotate.apply(x, cos, sin)  # type: ignore[return-value]
    return (x * cos).addcmul_(_swapped(x), sin)


def _swapped(x: Tensor) -> Tensor:
    """Return the halves of the last dimension, each in the other's place."""
    half = x.shape[-1] // 2
    if torch.compiler.is_compiling():  # to which `roll` is a gather, element by element
        return torch.cat((x[..., half:], x[..., :half]), -1)
    return x.roll(half, -1)


class _Rotate(torch.autograd.Function):
    """A rotation; its transpose is the rotation back: the swap is its own inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return (x * cos).addcmul_(_swapped(x), sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        cos, sin = ctx.saved_tensors
        return (grads[0] * cos).add_(_swapped(grads[0] * sin)), None, None


# -- the gated MLP (Shazeer 2020, arXiv 2002.05202) --------------------------------------------------------------------


def _gated(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up [S, F] of [S, 2F]."""
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
