"""Frozen base weights in 4 or 8 bits (QLoRA, Dettmers et al. 2023, arXiv 2305.14314), quantised by bitsandbytes.

    nf4     16 levels, one scale for each 64 weights, the scales in 8 bits themselves (double quantisation): 0.52 bytes
            a weight
    int8    one scale for each output (the weights of LLM.int8(), arXiv 2208.07339): 1 byte a weight

A layer is stored so and multiplied in the type of its input: its weights are dequantised for the product and dropped
after it, in the backward pass again. LLM.int8() also rounds activations, and keeps columns with outliers of the whole
batch apart; then a token's log-probability would depend on what it is batched with, and sampler and trainer would
disagree. So nothing but weights is rounded here.

transformers decides which layers are quantised (`BitsAndBytesConfig`); `keep_layers` names those that are not: the LM
head, routers of a mixture, and what is not in the text decoder. Embeddings, norms and fused (3-D) parameters of experts
are not linear layers and stay in `dtype`, as transformers leaves them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from groupwise.errors import ModelError

PACKAGE = "bitsandbytes"


def bits_config(kind: str, dtype: torch.dtype, *, keep: list[str]) -> BitsAndBytesConfig:
    """Return transformers' configuration to load a model so.

    Args:
        kind: `nf4` or `int8`.
        dtype: the type of everything that is not quantised.
        keep: full names of the linear layers that are not quantised.

    Raises:
        ModelError: bitsandbytes is not installed.
    """
    require_bitsandbytes(kind)
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=keep)
    compute = dtype if dtype in (torch.float32, torch.bfloat16, torch.float16) else torch.float32
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
        llm_int8_skip_modules=keep,
    )


def require_bitsandbytes(what: str) -> None:
    """Raise ModelError unless bitsandbytes is installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ModelError(f"{what} needs the package {PACKAGE}", hint="pip install 'groupwise[quantized]'")


class QuantizedLinear(nn.Linear):
    """A frozen linear layer [out, in] whose `weight` is stored in few bits. All that it stores are parameters without
    gradients, so that they are moved, shared and counted as any other model's."""

    kind: str

    def __init__(self, layer: Any):
        nn.Module.__init__(self)
        self.in_features, self.out_features = int(layer.in_features), int(layer.out_features)
        self.bias = None if layer.bias is None else _frozen(layer.bias)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [out, in] that the layer multiplies with."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        x = input
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return _Product.apply(x, self)  # type: ignore[return-value]

    def extra_repr(self) -> str:
        return f"{self.kind}, in_features={self.in_features}, out_features={self.out_features}"


class FourBitLinear(QuantizedLinear):
    """NF4 (or, of a checkpoint that was quantised so, FP4), the blocks' scales quantised themselves or not."""

    def __init__(self, layer: Any):
        super().__init__(layer)
        state = layer.weight.quant_state
        self.kind, self.block = str(state.quant_type), int(state.blocksize)
        self.weight, self.code, self.absmax = _frozen(layer.weight), _frozen(state.code), _frozen(state.absmax)
        self.nested_block = 0
        if state.nested:
            self.nested_block = int(state.state2.blocksize)
            self.nested_absmax, self.nested_code = _frozen(state.state2.absmax), _frozen(state.state2.code)
            self.offset = _frozen(state.offset.reshape(1))  # what was taken off the scales: their mean

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return it as one row of values: bitsandbytes 0.50 on a CPU mixes up the blocks of a matrix whose rows are not
        whole blocks."""
        from bitsandbytes.functional import (  # pyright: ignore[reportMissingImports]
            QuantState,
            dequantize_4bit,
            dequantize_blockwise,
        )

        absmax: Tensor = self.absmax
        if self.nested_block:
            nested = QuantState(
                absmax=self.nested_absmax, code=self.nested_code, blocksize=self.nested_block, dtype=torch.float32
            )
            absmax = dequantize_blockwise(self.absmax, nested) + self.offset
        wide = dtype == torch.float64
        state = QuantState(
            absmax=absmax,
            shape=torch.Size((self.out_features * self.in_features,)),
            code=self.code,
            blocksize=self.block,
            quant_type=self.kind,
            dtype=torch.float32 if wide else dtype,
        )
        matrix = dequantize_4bit(self.weight, state).view(self.out_features, self.in_features)
        return matrix.double() if wide else matrix


class Int8Linear(QuantizedLinear):
    """Whole numbers from -127 to 127, and a scale for each output."""

    kind = "int8"

    def __init__(self, layer: Any):
        super().__init__(layer)
        self.weight = _frozen(layer.weight)
        self.scale = _frozen(layer.weight.SCB.float() / 127)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(torch.promote_types(dtype, torch.float32)).mul_(self.scale[:, None]).to(dtype)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().as_subclass(Tensor), requires_grad=False)


class _Product(torch.autograd.Function):
    """x W^T + b of a frozen W. Backward keeps the layer and not W, which would be there for all layers at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return nn.functional.linear(x, layer.dequantized(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        return grads[0] @ ctx.layer.dequantized(grads[0].dtype), None


def take_over(model: PreTrainedModel) -> None:
    """Put `QuantizedLinear` in the place of bitsandbytes' layers, over the same tensors. Afterwards the model is one
    as any other: it may be copied, moved and shared."""
    from accelerate.hooks import remove_hook_from_module
    from bitsandbytes.nn import Linear4bit, Linear8bitLt  # pyright: ignore[reportMissingImports]

    found = {name: module for name, module in model.named_modules() if isinstance(module, Linear4bit | Linear8bitLt)}
    for name, module in found.items():
        path, _, last = name.rpartition(".")
        kind = FourBitLinear if isinstance(module, Linear4bit) else Int8Linear
        setattr(model.get_submodule(path), last, kind(module).train(module.training))
    remove_hook_from_module(model, recurse=True)
    for attribute in ("hf_quantizer", "quantization_method", "is_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit"):
        vars(model).pop(attribute, None)
    for config in (model.config, model.config.get_text_config()):
        vars(config).pop("quantization_config", None)


def quantized_layers(model: nn.Module) -> Iterator[QuantizedLinear]:
    """Return those of a model."""
    return (module for module in model.modules() if isinstance(module, QuantizedLinear))


def quantization_of(model: nn.Module) -> str | None:
    """Return `nf4`, `int8` (or a checkpoint's `fp4`), or None if no layer is quantised."""
    return next((layer.kind for layer in quantized_layers(model)), None)


def parameter_count(model: nn.Module) -> int:
    """Return how many values the model's parameters have, those of quantised layers as before they were."""
    layers = list(quantized_layers(model))
    stored = {id(parameter) for layer in layers for parameter in layer.parameters()}
    plain = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in stored)
    biases = sum(layer.bias.numel() for layer in layers if layer.bias is not None)
    return plain + biases + sum(layer.in_features * layer.out_features for layer in layers)


def product_bytes(model: PreTrainedModel) -> int:
    """Return the most bytes that a quantised layer's weights take while they are multiplied with."""
    value = model.dtype.itemsize
    return max(
        (
            layer.in_features * layer.out_features * (value + (4 if layer.kind == "int8" and value < 4 else 0))
            for layer in quantized_layers(model)
        ),
        default=0,
    )


@torch.no_grad()
def dequantize(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Put ordinary linear layers in the place of quantised ones, in place: what they multiplied with, in `dtype`."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    for name, module in found.items():
        with torch.device("meta"):
            linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
        linear.weight = nn.Parameter(module.dequantized(dtype), requires_grad=False)
        if module.bias is not None:
            linear.bias = nn.Parameter(module.bias.to(dtype), requires_grad=False)
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, linear.train(module.training))
