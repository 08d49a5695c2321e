"""Every policy loss, as one product of factors over the loss tokens of a batch.

    L = sum_t  s_t ( c_t l_t + beta kl_t )  -  eta sum_t H_t / total_tokens

    w_t   ratio        exp(log pi - log anchor) of the token, or of its row's mean (GSPO)
    l_t   surrogate    what is minimised for advantage A_t: PPO's clip, CISPO, plain REINFORCE, ...    `_surrogate`
    c_t   correction   for the gap between the sampler and the trainer; no gradient                    `_correction`
    kl_t  kl           divergence from the reference; with a gradient                                  `_kl`
    s_t   reduction    how tokens become one number: 1 / total_tokens, 1 / (row's tokens * rows), ...  `_scale`

Which factors make which published loss: `loss_spec.py`. Explained for newcomers: docs/losses.md.

Two properties hold by construction. *Masked tokens change nothing*: they are not in the inputs. *Split invariance*:
every global denominator comes with the inputs, so the losses (and metrics) of any split of the rows into micro-batches
add up to those of the whole batch; a row must stay in one micro-batch.

Log-probabilities are in nats and at least float32 here; log-ratios are clamped to +-20 before `exp`. Shapes: N loss
tokens of the micro-batch, flat; B its rows (completions).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.algo.loss_spec import PRESETS, LossSpec, resolve_loss
from groupwise.errors import ConfigError

__all__ = ["PRESETS", "LossInputs", "LossSpec", "policy_loss", "resolve_loss"]

MAX_LOG_RATIO = 20.0
VESPO_MIN_LOG_RATIO = math.log(1e-8)
VESPO_SHAPE_POSITIVE = (2.0, 3.0)  # (k, lambda) of phi where A >= 0
VESPO_SHAPE_NEGATIVE = (3.0, 2.0)


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
    reference_N: Tensor | None = None  # logprobs under the base model
    total_tokens: float  # loss tokens of the whole global batch: all micro-batches, all ranks
    total_rows: float  # rows of the whole global batch

    def __post_init__(self) -> None:
        for name in ("advantages_N", "behaviour_N", "old_N", "reference_N"):
            value = getattr(self, name)
            if value is not None and value.shape != self.row_N.shape:
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}, row_N {tuple(self.row_N.shape)}; both are [N]"
                )


def policy_loss(
    logprobs_N: Tensor, inputs: LossInputs, spec: LossSpec, *, entropy_N: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one micro-batch (a scalar to call `backward` on) and its metrics.

    Metrics are detached scalars that *add up* over micro-batches and ranks: means are over `total_tokens`, except
    `loss/policy`, which is reduced like the loss, and the count `mismatch/dropped_tokens`. Keys ending in `_max`
    combine by maximum. A metric is there only if what it measures is.

    Args:
        logprobs_N: log pi of each loss token, with its graph.
        entropy_N: entropy (nats) of the distribution at each loss token; needed, with its graph, if
            `spec.reads_entropy`, else only reported.

    Raises:
        ConfigError: the loss reads something that the inputs do not have.
    """
    _require(inputs, spec, entropy_N)
    t = _tokens(logprobs_N, inputs, spec, entropy_N)
    log_ratio_N = _log_ratio(t, spec)
    ratio_N = _ratio(t, log_ratio_N, spec)
    correction = _correction(t, spec)
    policy_N = correction.weight_N * _surrogate(t, ratio_N, log_ratio_N, correction, spec)
    if spec.surrogate == "dro":
        assert spec.dro_beta is not None
        policy_N = policy_N + 0.5 * spec.dro_beta * log_ratio_N.square()
    scale_N, tokens = _scale(t, inputs, spec), max(inputs.total_tokens, 1.0)
    loss = policy = (scale_N * policy_N).sum()
    metrics = {"loss/policy": policy}
    if spec.ratio != "none":
        metrics |= _ratio_metrics(t, ratio_N, spec, tokens)
    if t.behaviour_N is not None:
        metrics |= _mismatch_metrics(t, correction, spec, tokens)
    if spec.kl != "none":
        assert spec.kl_coeff is not None
        kl_N = _kl(t, log_ratio_N, spec)
        loss = loss + spec.kl_coeff * (scale_N * kl_N).sum()
        metrics["loss/kl"] = kl_N.sum() / tokens
    if t.entropy_N is not None:
        entropy = t.entropy_N.sum() / tokens
        metrics["loss/entropy"] = entropy
        if spec.reads_entropy:
            loss = loss - spec.entropy_coeff * entropy
    return loss, {name: value.detach() for name, value in metrics.items()}


@dataclass(frozen=True)
class _Tokens:
    """The tokens that are left after dropping, in one dtype, and what all terms are made of."""

    row_N: Tensor
    num_rows: int
    length_N: Tensor  # loss tokens of the token's row, dropped ones included
    kept_B: Tensor  # loss tokens of each row, dropped ones not included
    dropped: int
    advantages_N: Tensor
    logprobs_N: Tensor
    behaviour_N: Tensor | None
    old_N: Tensor  # the snapshot, or the current policy without its graph
    reference_N: Tensor | None
    entropy_N: Tensor | None

    def row_sum(self, x_N: Tensor) -> Tensor:
        """[N] -> [B]"""
        return x_N.new_zeros(self.num_rows).index_add(0, self.row_N, x_N)

    def row_mean(self, x_N: Tensor) -> Tensor:
        """[N] -> [B], over the tokens that are left; 0 for rows without any."""
        return self.row_sum(x_N) / self.kept_B.clamp(min=1)


def _tokens(logprobs_N: Tensor, inputs: LossInputs, spec: LossSpec, entropy_N: Tensor | None) -> _Tokens:
    dtype = torch.promote_types(logprobs_N.dtype, torch.float32)
    finite_N = None if inputs.behaviour_N is None else inputs.behaviour_N.isfinite()
    if finite_N is not None and bool(finite_N.all()):
        finite_N = None

    def kept(x_N: Tensor) -> Tensor:
        # Selected before any arithmetic: multiplying by a zero mask afterwards would leave NaN in the gradient.
        return x_N if finite_N is None else x_N[finite_N]

    def kept_or_none(x_N: Tensor | None) -> Tensor | None:
        return None if x_N is None else kept(x_N).to(dtype)

    row_N, logprobs = kept(inputs.row_N), kept(logprobs_N).to(dtype)
    old = kept_or_none(inputs.old_N) if spec.anchor == "old" else None
    return _Tokens(
        row_N=row_N,
        num_rows=inputs.num_rows,
        length_N=torch.bincount(inputs.row_N, minlength=inputs.num_rows)[row_N].to(dtype),
        kept_B=torch.bincount(row_N, minlength=inputs.num_rows).to(dtype),
        dropped=len(inputs.row_N) - len(row_N),
        advantages_N=kept(inputs.advantages_N).to(dtype),
        logprobs_N=logprobs,
        behaviour_N=kept_or_none(inputs.behaviour_N),
        old_N=logprobs.detach() if old is None else old,
        reference_N=kept_or_none(inputs.reference_N),
        entropy_N=kept_or_none(entropy_N),
    )


def _log_ratio(t: _Tokens, spec: LossSpec) -> Tensor:
    """log pi - log anchor of each token; what reads no anchor gets the current policy's own, 0."""
    if spec.anchor == "behaviour" and spec.reads_anchor:
        assert t.behaviour_N is not None
        return t.logprobs_N - t.behaviour_N
    return t.logprobs_N - t.old_N


def _ratio(t: _Tokens, log_ratio_N: Tensor, spec: LossSpec) -> Tensor:
    """w_t, with gradient."""
    if spec.ratio == "sequence":
        # GSPO-token (arXiv 2507.18071, section 4.3): the row's value, and the gradient of the token's own logprob.
        mean_N = t.row_mean(log_ratio_N.detach())[t.row_N]
        log_ratio_N = mean_N + t.logprobs_N - t.logprobs_N.detach()
    return _exp(log_ratio_N)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _surrogate(t: _Tokens, ratio_N: Tensor, log_ratio_N: Tensor, correction: _Correction, spec: LossSpec) -> Tensor:
    """l_t, what is minimised, without DRO's square.

    clip         -min(w A, clip(w, 1 - low, 1 + high) A), and at most -c A where A < 0      arXiv 1707.06347, 1912.09729
    unclipped    -w A
    cispo        -sg(clip(w, 1 - low, 1 + high)) A log pi                                   arXiv 2506.13585
    reinforce    -A log pi, and dro without its square
    sapo         -sigmoid(tau (w - 1)) 4 / tau A,  tau by the sign of A                     arXiv 2511.20347
    vespo        -sg(phi(W)) A log pi,  W the product of the row's ratios                   arXiv 2602.10693
    """
    advantages, ratio, logprobs = t.advantages_N, ratio_N, t.logprobs_N
    lower = None if spec.clip_low is None else 1 - spec.clip_low
    upper = None if spec.clip_high is None else 1 + spec.clip_high
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
    if spec.surrogate == "sapo":
        assert spec.sapo_tau_positive is not None and spec.sapo_tau_negative is not None
        positive, negative = spec.sapo_tau_positive, spec.sapo_tau_negative
        tau = torch.full_like(ratio, negative).masked_fill(advantages > 0, positive)
        return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages
    if spec.surrogate == "vespo":
        return -_vespo_weight(t, log_ratio_N, correction) * advantages * logprobs
    return -advantages * logprobs


def _vespo_weight(t: _Tokens, log_ratio_N: Tensor, correction: _Correction) -> Tensor:
    """phi(W) = exp(lambda + k log W - lambda W), so phi(1) = 1; the correction's weights are factors of W."""
    log_ratio_B = t.row_sum(log_ratio_N.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) + correction.log_weight_B
    log_w_N = log_ratio_B.clamp(VESPO_MIN_LOG_RATIO, MAX_LOG_RATIO)[t.row_N]
    positive_N = t.advantages_N >= 0
    k, lam = (
        torch.full_like(log_w_N, negative).masked_fill(positive_N, positive)
        for positive, negative in zip(VESPO_SHAPE_POSITIVE, VESPO_SHAPE_NEGATIVE, strict=True)
    )
    return torch.exp(lam + k * log_w_N - lam * log_w_N.exp())


@dataclass(frozen=True)
class _Correction:
    """weight_N is c_t; log_weight_B what it adds to a row's log-ratio (for VESPO, whose weight_N is then 0 or 1)."""

    weight_N: Tensor
    log_weight_B: Tensor
    masked_N: Tensor


def _correction(t: _Tokens, spec: LossSpec) -> _Correction:
    """c_t from the gap g = log old - log behaviour, with cap C and floor f; no gradient.

    tis_token        clip(exp g_t, f, C)                    truncated importance sampling; biased towards 0
    tis_sequence     clip(exp sum_row g, f, C)              unbiased when nothing is clipped; variance grows with length
    mask_token       exp g_t         if in [f, C] else 0    IcePop, arXiv 2510.18855
    mask_sequence    exp sum_row g   if in [f, C] else 0
    mask_geometric   1 if exp mean_row g in [f, C] else 0   does not depend on length

    and OPSM (DeepSeek-V3.2, arXiv 2512.02556): tokens with A < 0 of rows with mean_row(log behaviour - log pi) above
    `opsm_threshold` are masked.
    """
    zero_N = torch.zeros_like(t.old_N)
    log_weight_N, log_weight_B, masked_N = zero_N, zero_N.new_zeros(t.num_rows), zero_N.bool()
    if spec.correction != "none":
        assert t.behaviour_N is not None
        gap_N = t.old_N - t.behaviour_N
        if spec.correction.endswith("sequence"):
            gap_N = t.row_sum(gap_N)[t.row_N]
        elif spec.correction == "mask_geometric":
            gap_N = t.row_mean(gap_N)[t.row_N]
        gap_N = gap_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        low = math.log(spec.correction_floor) if spec.correction_floor else -math.inf
        high = math.log(spec.correction_cap) if spec.correction_cap else math.inf
        if spec.correction.startswith("mask"):
            masked_N = (gap_N < low) | (gap_N > high)
        if spec.correction != "mask_geometric":
            log_weight_N = gap_N.clamp(low, high) if spec.correction.startswith("tis") else gap_N
        per_row = t.row_mean if spec.correction.endswith("sequence") else t.row_sum
        log_weight_B = per_row(log_weight_N)
    if spec.opsm_threshold is not None:
        assert t.behaviour_N is not None
        drift_N = t.row_mean(t.behaviour_N - t.logprobs_N.detach())[t.row_N]
        masked_N = masked_N | ((t.advantages_N < 0) & (drift_N > spec.opsm_threshold))
    weight_N = torch.ones_like(zero_N) if spec.surrogate == "vespo" else log_weight_N.exp()
    return _Correction(weight_N.masked_fill(masked_N, 0.0), log_weight_B, masked_N)


def _kl(t: _Tokens, log_ratio_N: Tensor, spec: LossSpec) -> Tensor:
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
    return k3_N * _exp(log_ratio_N) if spec.kl == "k3_unbiased" else k3_N


def _scale(t: _Tokens, inputs: LossInputs, spec: LossSpec) -> Tensor:
    """s_t: what a token's loss is multiplied by before everything is summed.

    token_mean      1 / total_tokens                                      DAPO
    sequence_mean   1 / (tokens of its row * total_rows)                  GRPO
    constant        1 / (total_rows * reduction_length)                   Dr. GRPO
    sequence_sum    1 / total_rows                                        LUSPO
    sum             1
    """
    ones_N, tokens, rows = torch.ones_like(t.old_N), max(inputs.total_tokens, 1.0), max(inputs.total_rows, 1.0)
    match spec.reduction:
        case "token_mean":
            return ones_N / tokens
        case "sequence_mean":
            return ones_N / (t.length_N * rows)
        case "constant":
            assert spec.reduction_length is not None
            return ones_N / (rows * spec.reduction_length)
        case "sequence_sum":
            return ones_N / rows
        case "sum":
            return ones_N


def _ratio_metrics(t: _Tokens, ratio_N: Tensor, spec: LossSpec, tokens: float) -> dict[str, Tensor]:
    """Shares of tokens whose ratio was clipped *and* whose advantage has the sign for which that cuts the gradient."""
    metrics = {"loss/ratio_mean": ratio_N.sum() / tokens}
    if spec.clip_low is not None:
        low_N = (ratio_N < 1 - spec.clip_low) & (t.advantages_N < 0)
        metrics["loss/clip_frac_low"] = low_N.to(ratio_N.dtype).sum() / tokens
    if spec.clip_high is not None:
        high_N = (ratio_N > 1 + spec.clip_high) & (t.advantages_N > 0)
        metrics["loss/clip_frac_high"] = high_N.to(ratio_N.dtype).sum() / tokens
    return metrics


def _mismatch_metrics(t: _Tokens, correction: _Correction, spec: LossSpec, tokens: float) -> dict[str, Tensor]:
    """How far the trainer's snapshot is from what sampled: it should be rounding error while on-policy."""
    assert t.behaviour_N is not None
    gap_N = t.old_N - t.behaviour_N
    metrics = {
        "mismatch/logprob_diff_mean": gap_N.abs().sum() / tokens,
        "mismatch/logprob_diff_max": gap_N.abs().max() if len(gap_N) else gap_N.new_zeros(()),
        "mismatch/kl": (_exp(gap_N) - gap_N - 1).sum() / tokens,  # k3 estimate of KL(behaviour || old)
        "mismatch/dropped_tokens": gap_N.new_tensor(float(t.dropped)),
    }
    if spec.correction != "none" or spec.opsm_threshold is not None:
        metrics["mismatch/masked_frac"] = correction.masked_N.to(gap_N.dtype).sum() / tokens
        metrics["mismatch/weight_mean"] = correction.weight_N.sum() / tokens
    return metrics


def _require(inputs: LossInputs, spec: LossSpec, entropy_N: Tensor | None) -> None:
    if spec.reads_behaviour and inputs.behaviour_N is None:
        raise ConfigError(
            "this loss reads behaviour logprobs, and the samples have none (completions given as text have none)",
            hint="set anchor: old and no correction, or use samples with the logprobs they were drawn at",
        )
    if spec.reads_reference and inputs.reference_N is None:
        raise ConfigError(f"kl {spec.kl!r} reads the reference's logprobs, and there are none", hint="give reference_N")
    if spec.reads_entropy and entropy_N is None:
        raise ConfigError(f"entropy_coeff {spec.entropy_coeff} needs the entropy of each token", hint="give entropy_N")
    if spec.reduction == "constant" and spec.reduction_length is None:
        raise ConfigError(
            "reduction 'constant' (dr_grpo) divides by a constant length, and reduction_length is not set",
            hint="set reduction_length to the largest completion length in tokens",
        )
