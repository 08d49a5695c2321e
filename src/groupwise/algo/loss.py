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
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from groupwise.algo.correction import Correction, correction_of
from groupwise.algo.distillation import soft_divergence
from groupwise.algo.loss_inputs import MAX_LOG_RATIO, LossInputs, Tokens, exp_ratio, select_tokens
from groupwise.algo.loss_metrics import kl_metrics, mismatch_metrics, ratio_metrics
from groupwise.algo.trust_region import DPPO_MOST_RATIO, moved_tokens
from groupwise.config.load import load_object
from groupwise.config.loss import PRESETS, LossSpec, resolve_loss
from groupwise.errors import ConfigError

__all__ = ["PRESETS", "LossInputs", "LossSpec", "policy_loss", "resolve_loss"]

VESPO_MIN_LOG_RATIO = math.log(1e-8)

VESPO_SHAPE_POSITIVE = (2.0, 3.0)  # (k, lambda) of phi where A >= 0

VESPO_SHAPE_NEGATIVE = (3.0, 2.0)


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
    """Return the loss of one micro-batch (a scalar to call `backward` on) and its metrics, defined in docs/metrics.md.

    A metric is left out where the loss has no such term (no KL metrics without a reference).

    Args:
        logprobs_N: log pi of each loss token, with its graph.
        entropy_N: entropy (nats) of the distribution at each loss token; needed, with its graph, if
            `spec.reads_entropy`, else only reported.
        soft_NK: log pi of the K soft targets and of all other tokens as one, [N, K + 1], with its graph; needed if
            `spec.reads_soft_targets`.

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
    """Return log pi - log anchor of each token; 0, the current policy's own, for losses that read no anchor."""
    if spec.anchor == "behaviour" and spec.reads_anchor:
        assert t.behaviour_N is not None
        return t.logprobs_N - t.behaviour_N
    return t.logprobs_N - t.old_N


def _ratio(t: Tokens, log_ratio_N: Tensor, spec: LossSpec) -> Tensor:
    """Return w_t, with gradient."""
    if spec.ratio == "sequence":
        # GSPO-token (arXiv 2507.18071, section 4.3): the row's value, and the gradient of the token's own logprob.
        mean_N = t.row_mean(log_ratio_N.detach())[t.row_N]
        log_ratio_N = mean_N + t.logprobs_N - t.logprobs_N.detach()
    return exp_ratio(log_ratio_N)


def _surrogate(t: Tokens, ratio_N: Tensor, log_ratio_N: Tensor, correction: Correction, spec: LossSpec) -> Tensor:
    """Return l_t, the minimised term, without the square of `dro_beta`.

    clip         -min(w A, clip(w, 1 - low, 1 + high) A), and at most -c A where A < 0      arXiv 1707.06347, 1912.09729
    unclipped    -w A
    cispo        -sg(clip(w, 1 - low, 1 + high)) A log pi                                   arXiv 2506.13585
    dppo_tv      -sg(min(w, 20)) A log pi, and 0 beyond the trust region (see `moved_tokens`)     arXiv 2602.04879
    dppo_kl      the same with another divergence
    reinforce    -A log pi, and dro without its square
    sapo         -sigmoid(tau (w - 1)) 4 / tau A,  tau by the sign of A                     arXiv 2511.20347
    vespo        -sg(phi(W)) A log pi,  W the product of the row's ratios                   arXiv 2602.10693
    """
    advantages, ratio, logprobs = t.advantages_N, ratio_N, t.logprobs_N
    moved_N, lower, upper = moved_tokens(t, ratio_N, log_ratio_N, spec)
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
    """Return s_t, the factor of a token's loss in the sum.

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
