"""Metrics of a policy loss, and how those of micro-batches combine into those of the batch. docs/metrics.md defines
every name.

A metric of a micro-batch is a detached scalar of one of four kinds, told by its name:

    .../*_max, */max    the largest of all tokens          parts combine by maximum
    .../*_min, */min    the smallest                       parts combine by minimum
    COUNTS              a number of tokens                 parts add up
    loss/policy         the loss, reduced as `spec` says   parts add up
    all others          a mean over `total_tokens`         parts add up

Means have the whole batch's tokens as denominator from the start, so that they add up; dropped tokens are in the
denominator and not in the sum. Extremes of no tokens at all are left out.

Shapes: N loss tokens of the micro-batch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from groupwise.algo.correction import Correction
from groupwise.algo.loss_inputs import MAX_LOG_RATIO, Tokens, exp_ratio
from groupwise.algo.trust_region import moved_tokens
from groupwise.config.loss import LossSpec

COUNTS = ("mismatch/dropped_tokens",)


def ratio_metrics(t: Tokens, ratio_N: Tensor, log_ratio_N: Tensor, spec: LossSpec, tokens: float) -> dict[str, Tensor]:
    """Return the policy ratio before and after its bounds, and shares of tokens at them.

    A bound is counted only where the advantage has the sign for which it cuts the gradient.
    """
    ratio_N = ratio_N.detach()
    metrics = _spread("loss/ratio", ratio_N, tokens)
    if spec.clip_low is None and spec.clip_high is None:
        return metrics
    moved_N, lower, upper = moved_tokens(t, ratio_N, log_ratio_N, spec)
    if spec.surrogate in ("dppo_tv", "dppo_kl"):
        metrics |= _spread("loss/divergence", moved_N.abs(), tokens)
    else:
        metrics |= _spread("loss/ratio_clipped", ratio_N.clamp(lower, upper), tokens)
    beyond = {
        "low": None if lower is None else (moved_N < lower) & (t.advantages_N < 0),
        "high": None if upper is None else (moved_N > upper) & (t.advantages_N > 0),
        "dual": None if spec.dual_clip is None else (ratio_N > spec.dual_clip) & (t.advantages_N < 0),
    }
    shares = {name: which.to(ratio_N.dtype).sum() / tokens for name, which in beyond.items() if which is not None}
    metrics |= {f"loss/clip_frac_{name}": share for name, share in shares.items()}
    metrics["loss/clip_frac"] = sum(shares.values(), ratio_N.new_zeros(()))  # no token is in two of them
    return metrics


def mismatch_metrics(t: Tokens, correction: Correction, spec: LossSpec, tokens: float) -> dict[str, Tensor]:
    """Return how far the trainer's snapshot is from what sampled, which should be rounding error while on-policy, and
    what the correction makes of it."""
    assert t.behaviour_N is not None
    gap_N = (t.old_N - t.behaviour_N).detach()
    metrics = {
        "mismatch/logprob_diff_mean": gap_N.abs().sum() / tokens,
        "mismatch/kl": (exp_ratio(gap_N) - gap_N - 1).sum() / tokens,  # k3 estimate of KL(behaviour || old)
        "mismatch/dropped_tokens": gap_N.new_full((), float(t.dropped)),
        **_spread("mismatch/ratio", correction.log_ratio_N.exp(), tokens),
    }
    if len(gap_N):
        metrics["mismatch/logprob_diff_max"] = gap_N.abs().max()
    if spec.correction != "none" or spec.opsm_threshold is not None:
        metrics |= _spread("mismatch/weight", correction.weight_N, tokens)
        metrics["mismatch/masked_frac"] = correction.masked_N.to(gap_N.dtype).sum() / tokens
    if spec.correction.startswith("tis"):
        metrics["mismatch/clipped_frac"] = correction.clipped_N.to(gap_N.dtype).sum() / tokens
    if spec.opsm_threshold is not None:
        metrics["mismatch/opsm_frac"] = correction.opsm_N.to(gap_N.dtype).sum() / tokens
    return metrics


def kl_metrics(t: Tokens, tokens: float) -> dict[str, Tensor]:
    """Return the distance from the reference as k3, whichever estimator the loss has."""
    assert t.reference_N is not None
    d_N = (t.logprobs_N.detach() - t.reference_N).clamp(min=-MAX_LOG_RATIO)
    k3_N = (-d_N).exp() + d_N - 1
    return {"kl/mean": k3_N.sum() / tokens} | ({"kl/max": k3_N.max()} if len(k3_N) else {})


def _spread(name: str, x_N: Tensor, tokens: float) -> dict[str, Tensor]:
    """Return the mean, the least and the largest value of a token."""
    mean = {f"{name}_mean": x_N.sum() / tokens}
    return mean | {f"{name}_min": x_N.min(), f"{name}_max": x_N.max()} if len(x_N) else mean


def as_numbers(told: Sequence[Mapping[str, Tensor]]) -> list[dict[str, float]]:
    """Return the metrics of micro-batches as numbers, for which the host waits for the device once."""
    every = [value for metrics in told for value in metrics.values()]
    values = iter(torch.stack([value.to(every[0]) for value in every]).tolist() if every else [])
    return [{name: next(values) for name in metrics} for metrics in told]


def combined(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of an optimizer step's micro-batches into those of the step."""
    return {key: _merge(key, [part[key] for part in parts if key in part]) for key in _keys(parts)}


def averaged(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of several optimizer steps into one number each: extremes of extremes, means of the
    others."""
    return {
        key: _merge(key, values) / (1 if _extreme(key) else len(values))
        for key in _keys(steps)
        for values in [[step[key] for step in steps if key in step]]
    }


def rescaled(metrics: Mapping[str, float], *, tokens: float, policy: float) -> dict[str, float]:
    """Turn metrics that are sums into means: divide by `tokens`, and `loss/policy` by its reduction's denominator."""
    divisors = {"loss/policy": policy, **dict.fromkeys(COUNTS, 1.0)}
    return {key: value if _extreme(key) else value / divisors.get(key, tokens) for key, value in metrics.items()}


def _merge(key: str, values: Sequence[float]) -> float:
    merge = {"max": max, "min": min}.get(_extreme(key) or "", math.fsum)
    return merge(values)


def _extreme(key: str) -> str | None:
    last = re.split(r"[/_]", key)[-1]
    return last if last in ("max", "min") else None


def _keys(parts: Sequence[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(key for part in parts for key in part))
