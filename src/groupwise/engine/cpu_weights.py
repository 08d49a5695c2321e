"""Copies of a model's linear layers that a CPU multiplies with in less time: rounded (`rollout.dtype`), or laid out.

    bfloat16   weights and inputs rounded to bfloat16, summed in float32, the output rounded to bfloat16
    int8       weights rounded to whole numbers from -127 to 127 with a scale for each output, inputs likewise with a
               scale for each token (dynamic quantisation); the products are summed exactly, in 32 bits

Only sampling multiplies with them. The trainer keeps its float32 weights, so sampler and trainer are two policies close
to each other: the sampler reports the log-probabilities of its own, and the loss corrects for the gap
(`algo.correction`). Adapters are not rounded: y = round(W) x + B A x, so no update is too small to be sampled from, and
one copy serves all versions. Embeddings, norms, attention and the LM head stay in float32.

A scale for each token, and not one for the whole batch as `torch.ao.nn.quantized.dynamic` has it: what a completion is
does not depend on what it is batched with.

oneDNN does the products, on weights that it has laid out beforehand. In float32 nothing is rounded by that, and it pays
on CPUs for which MKL, whose products torch has, is slow (`lays_out`): merged weights are laid out there.

Shapes: S tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from groupwise.engine.multi_lora import Product
from groupwise.errors import ConfigError
from groupwise.model.backbone import is_lean
from groupwise.model.quantized import quantization_of

USUAL_ROWS = 64  # of a product, for which oneDNN chooses the layout; any other number is computed with the same layout
TINY = 1e-12  # the least scale: a token whose inputs are all 0
ZERO_POINT = 128  # of inputs, which are unsigned to the processor's instructions


class Bfloat16Matrix:
    """W [in, out] in bfloat16, laid out by oneDNN."""

    def __init__(self, matrix: Tensor):
        outputs_first = matrix.T.to(torch.bfloat16).contiguous()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(outputs_first, USUAL_ROWS)

    def times(self, x: Tensor) -> Tensor:
        """x W [S, out], in the type of x [S, in]."""
        rounded = x.to(torch.bfloat16)
        return torch.ops.mkldnn._linear_pointwise(rounded, self._packed, None, "none", [], None).to(x.dtype)


class Int8Matrix:
    """W [in, out] in whole numbers of 8 bits with a scale for each output, laid out by oneDNN."""

    def __init__(self, matrix: Tensor):
        self._scales = (matrix.abs().amax(0) / 127).clamp(min=TINY).float()
        whole = (matrix / self._scales).round().to(torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(whole.T.contiguous(), None)
        self._zeros = torch.zeros(len(self._scales), dtype=torch.long)

    def times(self, x: Tensor) -> Tensor:
        """x W [S, out], in the type of x [S, in]."""
        steps = 127 / x.abs().amax(-1, keepdim=True).clamp_(min=TINY)
        whole = (x * steps).add_(ZERO_POINT + 0.5).to(torch.uint8)  # cut off, and so rounded
        product = torch.ops.onednn.qlinear_pointwise(
            whole, 1.0, ZERO_POINT, self._packed, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return product.div_(steps).to(x.dtype)


class Float32Matrix:
    """W [in, out] in float32, laid out by oneDNN. With two tokens or more, what one gives does not depend on the
    others, nor on how many there are."""

    def __init__(self, matrix: Tensor):
        self._packed = torch.ops.mkldnn._reorder_linear_weight(matrix.T.contiguous(), USUAL_ROWS)

    def times(self, x: Tensor) -> Tensor:
        """x W [S, out] of x [S, in]."""
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], None)


KINDS = {"bfloat16": Bfloat16Matrix, "int8": Int8Matrix}


class RoundedLayers:
    """The rounded copies, by the linear modules that share an input; each is made on first use."""

    def __init__(self, kind: str):
        self._kind = KINDS[kind]
        self._made: dict[int, Product] = {}  # by the first module's id
        self._lock = threading.Lock()  # lanes need them at the same time

    @torch.no_grad()
    def of(self, modules: Sequence[Any]) -> Product:
        """Return one product for all of `modules`, with their outputs side by side."""
        with self._lock:
            if id(modules[0]) not in self._made:
                matrix = torch.cat([module.weight.T for module in modules], 1)
                self._made[id(modules[0])] = Product(self._kind(matrix), joined_bias(modules))
            return self._made[id(modules[0])]


def joined_bias(modules: Sequence[Any]) -> Tensor | None:
    """Return the biases of modules side by side, zeros for those without; None if all are."""
    if all(module.bias is None for module in modules):
        return None
    return torch.cat([m.weight.new_zeros(len(m.weight)) if m.bias is None else m.bias for m in modules])


def lays_out(model: PreTrainedModel) -> bool:
    """Return whether float32 products of large matrices are faster with `Float32Matrix` here: on AMD's CPUs with
    AVX-512, for which MKL has no kernels of its own. A rule and not a measurement, so that a seeded run is the same on
    a busy machine."""
    cpu = torch.cpu.get_capabilities()
    there = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return (
        there
        and model.device.type == "cpu"
        and model.dtype == torch.float32
        and bool(cpu.get("avx512_f"))
        and "AMD" in str(cpu.get("cpu_name", ""))
    )


def check_rounded(kind: str, model: PreTrainedModel) -> None:
    """Raise ConfigError where a model cannot be sampled with rounded weights, or this CPU has no use for them."""

    def refused(why: str, hint: str = "leave it out") -> ConfigError:
        return ConfigError(f"rollout.dtype={kind} cannot be had: {why}", hint=hint, field="rollout.dtype")

    if kind not in KINDS:
        raise refused("there is no such type", f"valid: {', '.join(KINDS)}")
    if model.device.type != "cpu":
        raise refused(f"it is for models on a CPU, and this one is on {model.device.type}")
    if not is_lean(model):
        raise refused(f"it is for the Llama family (Llama, Qwen2, Qwen3), and this is {type(model).__name__}")
    if quantization_of(model) is not None or model.dtype != torch.float32:
        stored = quantization_of(model) or str(model.dtype).removeprefix("torch.")
        raise refused(f"the weights are {stored} already", "leave it out, or load the model with dtype: float32")
    if why := unavailable(kind):
        raise refused(why)


def unavailable(kind: str) -> str:
    """Return why this machine cannot multiply with weights of a kind; nothing where it can. oneDNN is asked for a
    product too: told to use older instructions (ONEDNN_MAX_CPU_ISA) it refuses bfloat16, and sums int8 in 16 bits,
    which the largest products do not fit into."""
    flag = {"bfloat16": "avx512_bf16", "int8": "avx512_vnni"}[kind]
    if not torch.backends.mkldnn.is_available() or not torch.cpu.get_capabilities().get(flag):
        return f"this CPU has no instructions for it ({flag}), or this torch no oneDNN"
    ones = torch.ones(64, 16)
    try:
        product = KINDS[kind](ones).times(ones.T)
    except RuntimeError as error:
        return f"oneDNN refuses it ({error})"
    if not torch.allclose(product, torch.tensor(64.0), rtol=1e-2):
        return f"oneDNN multiplies it wrongly here (ones in 64 places give {product[0, 0]:.1f})"
    return ""
