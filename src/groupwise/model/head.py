"""The LM head, and what an architecture does between it and the softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from groupwise.model.products import product

CAST_HEAD = "_groupwise_cast_lm_head"  # an attribute of a model: `cast_lm_head`


@dataclass(frozen=True)
class Head:
    """The LM head and what the architecture does between it and the softmax: logits = softcap(scale * (W h + b)).

    In a 16-bit model W h is rounded to 16 bits, which is up to 0.06 nats for a logit of 16 in bfloat16: more than most
    policies move in a step. `in_float32` (`cast_lm_head`) keeps the sums of its products, which are exact, in float32,
    in the engine and the trainer alike (MiniMax-M1, arXiv 2506.13585; ScaleRL, arXiv 2510.13786).
    """

    weight_VH: Tensor
    bias_V: Tensor | None
    scale: float
    softcap: float | None
    in_float32: bool = False

    @classmethod
    def of(cls, model: PreTrainedModel) -> Head:
        linear: Any = model.get_output_embeddings()
        config = model.config.get_text_config()
        scale = _number(config, "logit_scale") * _number(config, "lm_head_multiplier")
        scale /= _number(config, "logits_scaling") * _number(config, "logits_mup_width_multiplier")
        caps = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
        softcap = next((cap for name in caps if (cap := getattr(config, name, None))), None)
        weight_VH, cast = linear.weight, getattr(model, CAST_HEAD, "auto")
        in_float32 = head_in_float32(cast, weight_VH.dtype, on_gpu=weight_VH.is_cuda)  # gpu-aware
        return cls(weight_VH, getattr(linear, "bias", None), scale, softcap, in_float32)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Return [N, V] in float32 (float64 for a float64 model)."""
        logits = self._product(hidden_NH)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def _product(self, hidden_NH: Tensor) -> Tensor:
        """Return W h + b, [N, V]."""
        if not self.in_float32 or hidden_NH.dtype == torch.float64:
            return nn.functional.linear(hidden_NH, self.weight_VH, self.bias_V)
        bias_V = None if self.bias_V is None else self.bias_V.float()
        with torch.autocast(hidden_NH.device.type, enabled=False):
            if hidden_NH.dtype == self.weight_VH.dtype == torch.bfloat16:
                logits_NV = product(hidden_NH, self.weight_VH.T)
                return logits_NV if bias_V is None else logits_NV.add_(bias_V)
            return nn.functional.linear(hidden_NH.float(), self.weight_VH.float(), bias_V)


def head_in_float32(cast: str, dtype: torch.dtype, *, on_gpu: bool) -> bool:
    """Return whether the products of an LM head in `dtype` are summed up in float32, as `cast_lm_head` says: `auto` is
    for bfloat16 on a GPU, where it costs nothing."""
    return cast == "float32" or (cast == "auto" and on_gpu and dtype == torch.bfloat16)


def _number(config: Any, name: str) -> float:
    """Return a factor; 1 where the configuration has none."""
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) and value else 1.0
