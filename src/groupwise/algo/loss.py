"""Every policy loss, as one product of factors over the loss tokens of a batch.

    L = sum_t  s_t ( c_t l_t + beta kl_t + lambda d_t )  -  eta sum_t H_t / total_tokens

    w_t   ratio        exp(log pi - log anchor) of the token, or of its row's mean (GSPO)
    l_t   surrogate    what is minimised for advantage A_t: PPO's clip, CISPO, plain REINFORCE, ...    `_surrogate`
    c_t   correction   for the gap between the sampler and the trainer; no gradient                    `correction_of`
    kl_t  kl           divergence from the reference; with a gradient                                  `_kl`
    d_t   soft KL      divergence from soft targets, a teacher's; with a gradient          `algo.distillation`
    s_t   reduction    how tokens become one number: 1 / total_tokens, 1 / (row's tokens * rows), ...  `_scale`

Which factors make which published loss: `config.loss`. Explained for newcomers: docs/losses.md.

Two properties hold by construction. *Masked tokens change nothing*: they are not in the inputs. *Split invariance*:
every global denominator comes with the inputs, so the losses (and metrics) of any split of the rows into micro-batches
add up to those of the whole batch; a row must stay in one micro-batch.

Log-probabilities are in nats and at least float32 here; log-ratios are clamped to +-20 before `exp`. Shapes: N loss
tokens of the micro-batch, flat; B its rows (completions).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from groupwise.algo.distillation import soft_divergence
from groupwise.config.load import load_object
from groupwise.config.loss import PRESETS, LossSpec, resolve_loss
from groupwise.errors import ConfigError

# ----------------------------------------------------------------------------------------------------------------------
# What a policy loss is computed from: the loss tokens of one micro-batch and the counts of the batch it belongs to.
#
# A batch is cut into micro-batches, and its loss must not depend on the cut. So the totals that a loss divides by are
# those of the whole batch: they come with the inputs and are never counted from the tokens at hand. A row is a
# completion or a segment of an episode; a sequence is a completion or a whole episode, whose rows may be in several
# micro-batches.
#
# Log-probabilities are in nats. Shapes: N loss tokens of the micro-batch, flat; B its rows (completions).
# ----------------------------------------------------------------------------------------------------------------------

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
    """`LossInputs` without the dropped tokens. Without `old_is_anchor` the current policy, detached, is the old
    policy."""
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
    """How many tokens each row has; `bincount` would wait for the device to say which row is the last."""
    return row_N.new_zeros(rows).index_add_(0, row_N, torch.ones_like(row_N))


def exp_ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), clamped to +-20 first, so that the ratio is finite and not 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


# ----------------------------------------------------------------------------------------------------------------------
# The correction c_t for the gap between the sampler and the trainer, g = log old - log behaviour; no gradient.
#
# With cap C and floor f, which bound the ratio and not its logarithm:
#
#     tis_token        clip(exp g_t, f, C)                    truncated importance sampling; biased towards 0
#     tis_sequence     clip(exp sum_row g, f, C)              unbiased when nothing is clipped; variance grows with
#     length
#     mask_token       exp g_t         if in [f, C] else 0    IcePop, arXiv 2510.18855
#     mask_sequence    exp sum_row g   if in [f, C] else 0
#     mask_geometric   1 if exp mean_row g in [f, C] else 0   does not depend on length
#
# and OPSM (DeepSeek-V3.2, arXiv 2512.02556): tokens with A < 0 of rows with mean_row(log behaviour - log pi) above
# `opsm_threshold` are masked. What is masked is exactly 0, whatever the floor.
#
# Shapes: N loss tokens of the micro-batch, B its rows.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Correction:
    """`weight_N` is c_t; `log_ratio_N` the logarithm of what it was before bounds and masks, g of the token or row.

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
        """1 where the token counts, else 0."""
        return (~self.masked_N).to(self.weight_N.dtype)


def correction_of(t: Tokens, spec: LossSpec) -> Correction:
    """The correction weight c_t of every token; 1 where there are no behaviour logprobs."""
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


# ----------------------------------------------------------------------------------------------------------------------
# What a policy loss reports, and how reports of parts become those of the whole. docs/losses.md defines every name.
#
# A metric of a micro-batch is a detached scalar of one of four kinds, told by its name:
#
#     .../*_max, */max    the largest of all tokens          parts combine by maximum
#     .../*_min, */min    the smallest                       parts combine by minimum
#     COUNTS              a number of tokens                 parts add up
#     loss/policy         the loss, reduced as `spec` says   parts add up
#     all others          a mean over `total_tokens`         parts add up
#
# Means have the whole batch's tokens as denominator from the start, so that they add up; dropped tokens are in the
# denominator and not in the sum. Extremes of no tokens at all are left out.
#
# Shapes: N loss tokens of the micro-batch.
# ----------------------------------------------------------------------------------------------------------------------

COUNTS = ("mismatch/dropped_tokens",)


def ratio_metrics(t: Tokens, ratio_N: Tensor, log_ratio_N: Tensor, spec: LossSpec, tokens: float) -> dict[str, Tensor]:
    """The policy ratio before and after its bounds, and shares of tokens at them.

    A bound is counted only where the advantage has the sign for which it cuts the gradient.
    """
    ratio_N = ratio_N.detach()
    metrics = _spread("loss/ratio", ratio_N, tokens)
    if spec.clip_low is None and spec.clip_high is None:
        return metrics
    moved_N, lower, upper = _moved(t, ratio_N, log_ratio_N, spec)
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
    """How far the trainer's snapshot is from what sampled, which should be rounding error while on-policy, and what the
    correction makes of it."""
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
    """The distance from the reference as k3, whichever estimator the loss has."""
    assert t.reference_N is not None
    d_N = (t.logprobs_N.detach() - t.reference_N).clamp(min=-MAX_LOG_RATIO)
    k3_N = (-d_N).exp() + d_N - 1
    return {"kl/mean": k3_N.sum() / tokens} | ({"kl/max": k3_N.max()} if len(k3_N) else {})


def _spread(name: str, x_N: Tensor, tokens: float) -> dict[str, Tensor]:
    """Mean, least and largest of a token's value."""
    mean = {f"{name}_mean": x_N.sum() / tokens}
    return mean | {f"{name}_min": x_N.min(), f"{name}_max": x_N.max()} if len(x_N) else mean


def as_numbers(told: Sequence[Mapping[str, Tensor]]) -> list[dict[str, float]]:
    """The metrics of micro-batches as numbers, for which the host waits for the device once."""
    every = [value for metrics in told for value in metrics.values()]
    values = iter(torch.stack([value.to(every[0]) for value in every]).tolist() if every else [])
    return [{name: next(values) for name in metrics} for metrics in told]


def combined(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of the micro-batches of one optimizer step -> those of the step."""
    return {key: _merge(key, [part[key] for part in parts if key in part]) for key in _keys(parts)}


def averaged(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of several optimizer steps -> one number each: extremes of all, means of the others."""
    return {
        key: _merge(key, values) / (1 if _extreme(key) else len(values))
        for key in _keys(steps)
        for values in [[step[key] for step in steps if key in step]]
    }


def rescaled(metrics: Mapping[str, float], *, tokens: float, policy: float) -> dict[str, float]:
    """Metrics of sums -> of means: divided by `tokens`, and `loss/policy` by what its reduction divides by."""
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


__all__ = ["PRESETS", "LossInputs", "LossSpec", "policy_loss", "resolve_loss"]

VESPO_MIN_LOG_RATIO = math.log(1e-8)
VESPO_SHAPE_POSITIVE = (2.0, 3.0)  # (k, lambda) of phi where A >= 0
VESPO_SHAPE_NEGATIVE = (3.0, 2.0)
DPPO_MOST_RATIO = 20.0
TINY = 1e-7  # probabilities that are this near to 0 or 1 count as this far from it


class CustomSurrogate(Protocol):
    """l_t of your own, for `policy_loss: my_losses:topr`: one number a loss token, [N], to be minimised.

    Correction, KL, entropy, reduction and metrics are as with the others. `tokens` has what there is of each token;
    `ratio_N` is w_t with its gradient; a row is a completion. Truncated REINFORCE of bad answers (arXiv 2503.14286):

        def topr(tokens, ratio_N):
            weight_N = torch.where(tokens.advantages_N < 0, ratio_N.detach().clamp(max=1.0), 1.0)
            return -weight_N * tokens.advantages_N * tokens.logprobs_N
    """

    def __call__(self, tokens: Tokens, ratio_N: Tensor, /) -> Tensor: ...


def policy_loss(
    logprobs_N: Tensor,
    inputs: LossInputs,
    spec: LossSpec,
    *,
    entropy_N: Tensor | None = None,
    soft_NK: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one micro-batch (a scalar to call `backward` on) and its metrics, defined in docs/losses.md.

    A metric is left out where the loss has no such term (no KL metrics without a reference).

    Args:
        logprobs_N: log pi of each loss token, with its graph.
        entropy_N: entropy (nats) of the distribution at each loss token; needed, with its graph, if
            `spec.reads_entropy`, else only reported.
        soft_NK: log pi of the soft targets, with its graph; needed if `spec.reads_soft_targets`.

    Raises:
        ConfigError: the loss reads something that the inputs do not have.
    """
    _require(inputs, spec, entropy_N, soft_NK)
    t = select_tokens(logprobs_N, inputs, entropy_N, old_is_anchor=spec.anchor == "old")
    log_ratio_N = _policy_log_ratio(t, spec)
    ratio_N = _ratio(t, log_ratio_N, spec)
    correction = correction_of(t, spec)
    weight_N = correction.kept_N if spec.surrogate == "vespo" else correction.weight_N
    policy_N = weight_N * _surrogate(t, ratio_N, log_ratio_N, correction, spec)
    if spec.dro_beta is not None:
        policy_N = policy_N + 0.5 * spec.dro_beta * log_ratio_N.square()
    scale_N, tokens = _scale(t, inputs, spec), max(inputs.total_tokens, 1.0)
    loss = policy = (scale_N * policy_N).sum()
    metrics = {"loss/policy": policy}
    if spec.surrogate != "reinforce":
        metrics |= ratio_metrics(t, ratio_N, log_ratio_N, spec, tokens)
    if t.behaviour_N is not None:
        metrics |= mismatch_metrics(t, correction, spec, tokens)
    if t.reference_N is not None:
        metrics |= kl_metrics(t, tokens)
    if spec.kl != "none":
        assert spec.kl_coeff is not None
        kl_N = _kl(t, log_ratio_N, spec)
        loss = loss + spec.kl_coeff * (scale_N * kl_N).sum()
        metrics["loss/kl"] = kl_N.sum() / tokens
    if spec.reads_soft_targets:
        assert soft_NK is not None and inputs.soft_NK is not None and spec.soft_kl_coeff is not None
        policy_NK, target_NK = (x_NK[t.kept_N] if t.dropped else x_NK for x_NK in (soft_NK, inputs.soft_NK))
        soft_N = soft_divergence(policy_NK.to(scale_N), target_NK.to(scale_N), spec.soft_kl)
        loss = loss + spec.soft_kl_coeff * (scale_N * soft_N).sum()
        metrics["loss/soft_kl"] = soft_N.sum() / tokens
    if t.entropy_N is not None:
        entropy = t.entropy_N.sum() / tokens
        metrics["loss/entropy"] = entropy
        if spec.reads_entropy:
            loss = loss - spec.entropy_coeff * entropy
    return loss, {name: value.detach() for name, value in metrics.items()}


def _policy_log_ratio(t: Tokens, spec: LossSpec) -> Tensor:
    """log pi - log anchor of each token; what reads no anchor gets the current policy's own, 0."""
    if spec.anchor == "behaviour" and spec.reads_anchor:
        assert t.behaviour_N is not None
        return t.logprobs_N - t.behaviour_N
    return t.logprobs_N - t.old_N


def _ratio(t: Tokens, log_ratio_N: Tensor, spec: LossSpec) -> Tensor:
    """w_t, with gradient."""
    if spec.ratio == "sequence":
        # GSPO-token (arXiv 2507.18071, section 4.3): the row's value, and the gradient of the token's own logprob.
        mean_N = t.row_mean(log_ratio_N.detach())[t.row_N]
        log_ratio_N = mean_N + t.logprobs_N - t.logprobs_N.detach()
    return exp_ratio(log_ratio_N)


def _surrogate(t: Tokens, ratio_N: Tensor, log_ratio_N: Tensor, correction: Correction, spec: LossSpec) -> Tensor:
    """l_t, what is minimised, without the square of `dro_beta`.

    clip         -min(w A, clip(w, 1 - low, 1 + high) A), and at most -c A where A < 0      arXiv 1707.06347, 1912.09729
    unclipped    -w A
    cispo        -sg(clip(w, 1 - low, 1 + high)) A log pi                                   arXiv 2506.13585
    dppo_tv      -sg(min(w, 20)) A log pi, and 0 beyond the trust region (see `_moved`)     arXiv 2602.04879
    dppo_kl      the same with another divergence
    reinforce    -A log pi, and dro without its square
    sapo         -sigmoid(tau (w - 1)) 4 / tau A,  tau by the sign of A                     arXiv 2511.20347
    vespo        -sg(phi(W)) A log pi,  W the product of the row's ratios                   arXiv 2602.10693
    """
    advantages, ratio, logprobs = t.advantages_N, ratio_N, t.logprobs_N
    moved_N, lower, upper = _moved(t, ratio_N, log_ratio_N, spec)
    if spec.surrogate == "clip":
        objective = torch.minimum(ratio * advantages, ratio.clamp(lower, upper) * advantages)
        if spec.dual_clip is None:
            return -objective
        bounded = torch.maximum(objective, spec.dual_clip * advantages)
        return -torch.where(advantages < 0, bounded, objective)
    if spec.surrogate == "unclipped":
        return -ratio * advantages
    if spec.surrogate == "cispo":
        return -ratio.clamp(lower, upper).detach() * advantages * logprobs
    if spec.surrogate in ("dppo_tv", "dppo_kl"):
        outside_N = (advantages > 0) & (moved_N > upper) if upper is not None else torch.zeros_like(t.row_N).bool()
        if lower is not None:
            outside_N = outside_N | ((advantages < 0) & (moved_N < lower))
        weight = ratio.detach().clamp(max=DPPO_MOST_RATIO).masked_fill(outside_N, 0.0)
        return -weight * advantages * logprobs
    if spec.surrogate == "sapo":
        assert spec.sapo_tau_positive is not None and spec.sapo_tau_negative is not None
        positive, negative = spec.sapo_tau_positive, spec.sapo_tau_negative
        tau = torch.full_like(ratio, negative).masked_fill(advantages > 0, positive)
        return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages
    if spec.surrogate == "custom":
        return _custom(t, ratio_N, spec)
    if spec.surrogate == "vespo":
        return -_vespo_weight(t, log_ratio_N, correction) * advantages * logprobs
    return -advantages * logprobs


def _custom(t: Tokens, ratio_N: Tensor, spec: LossSpec) -> Tensor:
    assert spec.function is not None
    loss_N = _function(spec.function)(t, ratio_N)
    if not isinstance(loss_N, Tensor) or loss_N.shape != ratio_N.shape:
        got = f"a tensor of shape {list(loss_N.shape)}" if isinstance(loss_N, Tensor) else type(loss_N).__name__
        raise ConfigError(
            f"policy_loss {spec.function} returned {got}; it must return one loss a token, a tensor [{len(ratio_N)}]",
            hint="leave sums and means to `algo.reduction`",
        )
    return loss_N


@lru_cache
def _function(reference: str) -> CustomSurrogate:
    return load_object(reference)


def _moved(
    t: Tokens, ratio_N: Tensor, log_ratio_N: Tensor, spec: LossSpec
) -> tuple[Tensor, float | None, float | None]:
    """How far the policy has moved at each token, and the least and most that the loss lets it.

    The ratio w, within 1 - clip_low and 1 + clip_high; with DPPO the divergence of the token's probability p from the
    anchor's q, as if there were only this token and all others (no gradient), with the sign of p - q and within
    -clip_low and clip_high:

        dppo_tv     p - q
        dppo_kl     q log (q / p) + (1 - q) log ((1 - q) / (1 - p))

    A ratio is soon out of bounds where q is small, and hardly ever where it is near 1, whatever that changes; a
    divergence is not (arXiv 2602.04879, section 4).
    """
    low, high = spec.clip_low, spec.clip_high
    if not spec.surrogate.startswith("dppo"):
        return ratio_N, None if low is None else 1 - low, None if high is None else 1 + high
    log_p_N = t.logprobs_N.detach()
    log_q_N = (log_p_N - log_ratio_N.detach()).clamp(max=0.0)
    moved_N = log_p_N.exp() - log_q_N.exp()
    if spec.surrogate == "dppo_kl":
        p_N, q_N = (x_N.exp().clamp(TINY, 1 - TINY) for x_N in (log_p_N, log_q_N))
        kl_N = q_N * (q_N.log() - p_N.log()) + (1 - q_N) * ((1 - q_N).log() - (1 - p_N).log())
        moved_N = moved_N.sign() * kl_N
    return moved_N, None if low is None else -low, high


def _vespo_weight(t: Tokens, log_ratio_N: Tensor, correction: Correction) -> Tensor:
    """phi(W) = exp(lambda + k log W - lambda W), so phi(1) = 1; the correction's weights are factors of W."""
    log_ratio_B = t.row_sum(log_ratio_N.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) + correction.log_weight_B
    log_w_N = log_ratio_B.clamp(VESPO_MIN_LOG_RATIO, MAX_LOG_RATIO)[t.row_N]
    positive_N = t.advantages_N >= 0
    k, lam = (
        torch.full_like(log_w_N, negative).masked_fill(positive_N, positive)
        for positive, negative in zip(VESPO_SHAPE_POSITIVE, VESPO_SHAPE_NEGATIVE, strict=True)
    )
    return torch.exp(lam + k * log_w_N - lam * log_w_N.exp())


def _kl(t: Tokens, log_ratio_N: Tensor, spec: LossSpec) -> Tensor:
    """Estimates of KL(pi || reference) at each sampled token, d = log pi - log reference (Schulman 2020).

    k1            d                 unbiased value. Its own gradient, grad log pi, is zero on average and would teach
                                    nothing, so the gradient is that of k1 as a penalty in the reward: d grad log pi
    k2            d^2 / 2           biased value, and the same gradient as k1 above: unbiased on-policy
    k3            e^-d + d - 1      unbiased value, never negative; gradient biased (that of KL(reference || pi))
    k3_unbiased   w (e^-d + d - 1)  value and gradient unbiased, also off-policy; w the token's ratio, with its
                                    gradient (DeepSeek-V3.2, arXiv 2512.02556)
    """
    assert t.reference_N is not None
    d_N = t.logprobs_N - t.reference_N
    if spec.kl == "k1":
        return d_N.detach() * (1 + t.logprobs_N - t.logprobs_N.detach())
    if spec.kl == "k2":
        return 0.5 * d_N.square()
    # Only one side can overflow. Clamping the other would take the gradient from the tokens that drifted most.
    d_N = d_N.clamp(min=-MAX_LOG_RATIO)
    k3_N = torch.exp(-d_N) + d_N - 1
    return k3_N * exp_ratio(log_ratio_N) if spec.kl == "k3_unbiased" else k3_N


def _scale(t: Tokens, inputs: LossInputs, spec: LossSpec) -> Tensor:
    """s_t: what a token's loss is multiplied by before everything is summed.

    token_mean      1 / total_tokens                                      DAPO
    sequence_mean   1 / (tokens of its sequence * total_rows)             GRPO
    prompt_mean     1 / (tokens of its prompt * total_rows)               ScaleRL, arXiv 2510.13786
    constant        1 / (total_rows * reduction_length)                   Dr. GRPO
    sequence_sum    1 / total_rows                                        LUSPO
    sum             1
    """
    ones_N, tokens, rows = torch.ones_like(t.old_N), max(inputs.total_tokens, 1.0), max(inputs.total_rows, 1.0)
    match spec.reduction:
        case "token_mean":
            return ones_N / tokens
        case "sequence_mean" | "prompt_mean":  # the lengths are of sequences, or of prompts
            return ones_N / (t.length_N * rows)
        case "constant":
            assert spec.reduction_length is not None
            return ones_N / (rows * spec.reduction_length)
        case "sequence_sum":
            return ones_N / rows
        case "sum":
            return ones_N


def _require(inputs: LossInputs, spec: LossSpec, entropy_N: Tensor | None, soft_NK: Tensor | None) -> None:
    if spec.reads_behaviour and inputs.behaviour_N is None:
        raise ConfigError(
            "this loss reads behaviour logprobs, and the samples have none (completions given as text have none)",
            hint="set anchor: old and no correction, or use samples with the logprobs they were drawn at",
        )
    if spec.reads_reference and inputs.reference_N is None:
        raise ConfigError(f"kl {spec.kl!r} reads the reference's logprobs, and there are none", hint="give reference_N")
    if spec.reads_soft_targets and (inputs.soft_NK is None or soft_NK is None):
        raise ConfigError(
            f"soft_kl {spec.soft_kl!r} reads soft targets, and none of the samples has any",
            hint="give samples soft_targets, or leave soft_kl out",
        )
    if spec.reads_entropy and entropy_N is None:
        raise ConfigError(f"entropy_coeff {spec.entropy_coeff} needs the entropy of each token", hint="give entropy_N")
    if spec.reduction == "constant" and spec.reduction_length is None:
        raise ConfigError(
            "reduction 'constant' (dr_grpo) divides by a constant length, and reduction_length is not set",
            hint="set reduction_length to the largest completion length in tokens",
        )
