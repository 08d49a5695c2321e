"""The correction c_t for the gap between the sampler and the trainer, g = log old - log behaviour; no gradient.

With cap C and floor f, which bound the ratio and not its logarithm:

    tis_token        clip(exp g_t, f, C)                    truncated importance sampling; biased towards 0
    tis_sequence     clip(exp sum_row g, f, C)              unbiased when nothing is clipped; variance grows with
    length
    mask_token       exp g_t         if in [f, C] else 0    IcePop, arXiv 2510.18855
    mask_sequence    exp sum_row g   if in [f, C] else 0
    mask_geometric   1 if exp mean_row g in [f, C] else 0   does not depend on length

and OPSM (DeepSeek-V3.2, arXiv 2512.02556): tokens with A < 0 of rows with mean_row(log behaviour - log pi) above
`opsm_threshold` are masked. What is masked is exactly 0, whatever the floor.

Shapes: N loss tokens of the micro-batch, B its rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.algo.loss_inputs import MAX_LOG_RATIO, Tokens
from groupwise.config.loss import LossSpec


@dataclass(frozen=True)
class Correction:
    """The correction of a loss for the gap between sampler and trainer: `weight_N` is c_t; `log_ratio_N` the logarithm
    of the ratio before bounds and masks, g of the token or row.

    A loss that weighs whole rows itself (VESPO) takes `log_weight_B`, what c adds to a row's log-ratio, and `kept_N`.
    """

    weight_N: Tensor
    log_ratio_N: Tensor
    log_weight_B: Tensor
    clipped_N: Tensor  # bool: brought to a bound
    masked_N: Tensor  # bool: by the bounds or by OPSM
    opsm_N: Tensor  # bool: by OPSM

    @property
    def kept_N(self) -> Tensor:
        """Return 1 for a token that counts, else 0."""
        return (~self.masked_N).to(self.weight_N.dtype)


def correction_of(t: Tokens, spec: LossSpec) -> Correction:
    """Return the correction weight c_t of every token; 1 where there are no behaviour logprobs."""
    log_ratio_N = _correction_log_ratio(t, spec)
    log_weight_N = torch.zeros_like(t.old_N)
    clipped_N, masked_N = log_weight_N.bool(), log_weight_N.bool()
    if spec.correction != "none":
        low = math.log(spec.correction_floor) if spec.correction_floor else -math.inf
        high = math.log(spec.correction_cap) if spec.correction_cap else math.inf
        outside_N = (log_ratio_N < low) | (log_ratio_N > high)
        if spec.correction.startswith("tis"):
            clipped_N, log_weight_N = outside_N, log_ratio_N.clamp(low, high)
        else:
            masked_N = outside_N
            log_weight_N = log_weight_N if spec.correction == "mask_geometric" else log_ratio_N
    opsm_N = _opsm(t, spec)
    masked_N = masked_N | opsm_N
    per_row = t.row_mean if spec.correction.endswith("sequence") else t.row_sum
    return Correction(
        weight_N=log_weight_N.exp().masked_fill(masked_N, 0.0),
        log_ratio_N=log_ratio_N,
        log_weight_B=per_row(log_weight_N),
        clipped_N=clipped_N,
        masked_N=masked_N,
        opsm_N=opsm_N,
    )


def _correction_log_ratio(t: Tokens, spec: LossSpec) -> Tensor:
    """g of the token, of its row, or the row's mean, as the correction reads it; the token's where there is none."""
    if t.behaviour_N is None:
        return torch.zeros_like(t.old_N)
    gap_N = t.old_N - t.behaviour_N
    if spec.correction.endswith("sequence"):
        gap_N = t.row_sum(gap_N)[t.row_N]
    elif spec.correction == "mask_geometric":
        gap_N = t.row_mean(gap_N)[t.row_N]
    return gap_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _opsm(t: Tokens, spec: LossSpec) -> Tensor:
    if spec.opsm_threshold is None:
        return torch.zeros_like(t.old_N).bool()
    assert t.behaviour_N is not None
    drift_N = t.row_mean(t.behaviour_N - t.logprobs_N.detach())[t.row_N]
    return (t.advantages_N < 0) & (drift_N > spec.opsm_threshold)
