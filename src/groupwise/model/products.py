"""Products of 16-bit matrices whose sums stay in float32.

Two numbers of 16 bits have a product that float32 holds, and every processor adds such products up in float32. `@` then
rounds each sum to 16 bits, which is 0.4 % of it in bfloat16: 0.06 nats for a logit of 16, and more for the score of an
attention that is sure. What becomes an exponent, and what is added up over many tokens, is therefore multiplied here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return left [..., N, D] times right [..., D, T], of 16-bit factors in float32, else in their type."""
    return _Product.apply(left, right) if left.itemsize == 2 else left @ right  # type: ignore[return-value]


class _Product(torch.autograd.Function):
    """`product` of 16-bit factors. Its gradients are products of 16-bit factors too, as the kernels of attention have
    them: torch has none for sums in another type."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        with torch.autocast(left.device.type, enabled=False):
            if left.is_cuda and left.ndim == 2:  # gpu-seen: gradients of an adapter, and logits, of bfloat16 in float32
                return torch.mm(left, right, out_dtype=torch.float32)  # tensor cores sum in it
            if left.is_cuda:  # gpu-only: scores of merged attention and of decode steps, of bfloat16 in float32
                flat = torch.bmm(left.flatten(0, -3), right.flatten(0, -3), out_dtype=torch.float32)
                return flat.view(*left.shape[:-1], right.shape[-1])
            return left.float() @ right.float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        left, right = ctx.saved_tensors
        grad = grads[0].to(left.dtype)
        return grad @ right.transpose(-1, -2), left.transpose(-1, -2) @ grad
