"""The inputs of a policy loss: the loss tokens of one micro-batch and the counts of the batch that it belongs to.

A batch is cut into micro-batches, and its loss must not depend on the cut. So the totals that a loss divides by are
those of the whole batch: they come with the inputs and are never counted from the tokens at hand. A row is a
completion or a segment of an episode; a sequence is a completion or a whole episode, whose rows may be in several
micro-batches.

Log-probabilities are in nats. Shapes: N loss tokens of the micro-batch, flat; B its rows (completions).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """All loss tokens of one micro-batch, and the counts of the global batch it belongs to.

    A token whose behaviour logprob is not finite is dropped: it enters no sum and no statistic, and is counted in the
    metric `mismatch/dropped_tokens`. The denominators still contain it.
    """

    row_N: Tensor  # int64, ascending: which row each token belongs to
    num_rows: int  # B; rows without tokens are allowed
    advantages_N: Tensor  # the row's advantage repeated, or one per token
    behaviour_N: Tensor | None = None  # logprobs under the policy that sampled, from the engine
    old_N: Tensor | None = None  # logprobs under the trainer's snapshot; None: the current policy is the snapshot
    reference_N: Tensor | None = None  # logprobs under the reference
    length_N: Tensor | None = None  # loss tokens of the token's sequence (prompt_mean: prompt); None: of its row
    behaviour_is_finite: bool = False  # every behaviour logprob is, as the host knows; else the device is asked
    soft_NK: Tensor | None = None  # logprobs of the soft targets, under what they are of; -inf where there are fewer
    total_tokens: float  # loss tokens of the whole global batch: all micro-batches, all ranks
    total_rows: float  # sequences (prompt_mean: prompts) with loss tokens of the whole global batch

    def __post_init__(self) -> None:
        for name in ("advantages_N", "behaviour_N", "old_N", "reference_N", "length_N"):
            value = getattr(self, name)
            if value is not None and value.shape != self.row_N.shape:
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}, row_N {tuple(self.row_N.shape)}; both are [N]"
                )
        if self.soft_NK is not None and len(self.soft_NK) != len(self.row_N):
            raise ValueError(f"soft_NK has {len(self.soft_NK)} rows and row_N {len(self.row_N)} entries; give as many")


@dataclass(frozen=True)
class Tokens:
    """The loss tokens whose behaviour logprob is finite, in one dtype, and what all terms of the loss are computed
    from."""

    row_N: Tensor
    num_rows: int
    length_N: Tensor  # loss tokens of the token's sequence, dropped ones included
    kept_B: Tensor  # loss tokens of each row, dropped ones not included
    dropped: int
    advantages_N: Tensor
    logprobs_N: Tensor
    behaviour_N: Tensor | None
    old_N: Tensor  # the snapshot, or the current policy without its graph
    reference_N: Tensor | None
    entropy_N: Tensor | None
    kept_N: Tensor  # bool, of all loss tokens: those that are not dropped

    def row_sum(self, x_N: Tensor) -> Tensor:
        """[N] -> [B]"""
        return x_N.new_zeros(self.num_rows).index_add(0, self.row_N, x_N)

    def row_mean(self, x_N: Tensor) -> Tensor:
        """[N] -> [B], over the tokens that are left; 0 for rows without any."""
        return self.row_sum(x_N) / self.kept_B.clamp(min=1)


def select_tokens(logprobs_N: Tensor, inputs: LossInputs, entropy_N: Tensor | None, *, old_is_anchor: bool) -> Tokens:
    """Return the `LossInputs` without the dropped tokens. Without `old_is_anchor` the current policy, detached, is the
    old policy."""
    dtype = torch.promote_types(logprobs_N.dtype, torch.float32)
    known = inputs.behaviour_N is None or inputs.behaviour_is_finite
    finite_N = None if known else inputs.behaviour_N.isfinite()  # type: ignore[union-attr]
    if finite_N is not None and bool(finite_N.all()):
        finite_N = None

    def kept(x_N: Tensor) -> Tensor:
        # Selected before any arithmetic: multiplying by a zero mask afterwards would leave NaN in the gradient.
        return x_N if finite_N is None else x_N[finite_N]

    def kept_or_none(x_N: Tensor | None) -> Tensor | None:
        return None if x_N is None else kept(x_N).to(dtype)

    row_N, logprobs = kept(inputs.row_N), kept(logprobs_N).to(dtype)
    length = kept_or_none(inputs.length_N)
    if length is None:
        length = _counted(inputs.row_N, inputs.num_rows)[row_N].to(dtype)
    old = kept_or_none(inputs.old_N) if old_is_anchor else None
    return Tokens(
        row_N=row_N,
        num_rows=inputs.num_rows,
        length_N=length,
        kept_B=_counted(row_N, inputs.num_rows).to(dtype),
        dropped=len(inputs.row_N) - len(row_N),
        advantages_N=kept(inputs.advantages_N).to(dtype),
        logprobs_N=logprobs,
        behaviour_N=kept_or_none(inputs.behaviour_N),
        old_N=logprobs.detach() if old is None else old,
        reference_N=kept_or_none(inputs.reference_N),
        entropy_N=kept_or_none(entropy_N),
        kept_N=torch.ones_like(inputs.row_N).bool() if finite_N is None else finite_N,
    )


def _counted(row_N: Tensor, rows: int) -> Tensor:
    """Return how many tokens each row has; `bincount` would wait for the device to say which row is the last."""
    return row_N.new_zeros(rows).index_add_(0, row_N, torch.ones_like(row_N))


def exp_ratio(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), clamped to +-20 first, so that the ratio is finite and not 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
