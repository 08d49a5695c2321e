"""Padded [B, T] batches with a mask -> the flat tokens that `policy_loss` takes; shared by the loss tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.algo.loss import policy_loss
from groupwise.algo.loss_inputs import LossInputs
from groupwise.config.loss import LossSpec


@dataclass(frozen=True)
class Padded:
    """Float64 [B, T] tensors; `mask` is 0 or 1 and `advantages` is [B]."""

    logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    behaviour: Tensor | None = None
    old: Tensor | None = None
    reference: Tensor | None = None
    entropy: Tensor | None = None

    def rows(self, chosen: list[int]) -> Padded:
        return Padded(**{name: None if value is None else value[chosen] for name, value in vars(self).items()})

    def run(
        self, spec: LossSpec, *, total_tokens: float | None = None, total_rows: float | None = None
    ) -> tuple[Tensor, Tensor, dict[str, float]]:
        """-> loss, its gradient with respect to `logprobs` [B, T], metrics."""
        keep = self.mask.bool()
        leaf = self.logprobs.clone().requires_grad_()
        pick = lambda x: None if x is None else x[keep]  # noqa: E731
        inputs = LossInputs(
            row_N=keep.nonzero()[:, 0],
            num_rows=len(self.mask),
            advantages_N=self.advantages[:, None].expand(keep.shape)[keep],
            behaviour_N=pick(self.behaviour),
            old_N=pick(self.old),
            reference_N=pick(self.reference),
            total_tokens=float(keep.sum()) if total_tokens is None else total_tokens,
            total_rows=float(len(self.mask)) if total_rows is None else total_rows,
        )
        loss, metrics = policy_loss(leaf[keep], inputs, spec, entropy_N=pick(self.entropy))
        return (
            loss.detach(),
            torch.autograd.grad(loss, leaf)[0],
            {name: float(value) for name, value in metrics.items()},
        )


def random_batch(seed: int, *, rows: int = 6, length: int = 7, drift: float = 0.4) -> Padded:
    """Ragged rows (one of them empty) with masked tokens inside, all terms present."""
    g = torch.Generator().manual_seed(seed)
    noise = lambda scale: scale * torch.randn(rows, length, generator=g, dtype=torch.float64)  # noqa: E731
    old = -torch.rand(rows, length, generator=g, dtype=torch.float64) * 2 - 0.05
    lengths = torch.randint(1, length + 1, (rows, 1), generator=g)
    mask = (torch.arange(length) < lengths) & (torch.rand(rows, length, generator=g) > 0.2)
    mask[0, 0], mask[-1] = True, False
    return Padded(
        logprobs=old + noise(drift),
        advantages=torch.randn(rows, generator=g, dtype=torch.float64),
        mask=mask,
        behaviour=old + noise(0.1),
        old=old,
        reference=old + noise(0.3),
        entropy=torch.rand(rows, length, generator=g, dtype=torch.float64),
    )
