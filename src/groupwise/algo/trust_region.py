"""Finds the tokens that a policy loss still moves: those inside the bounds of its ratio."""

from __future__ import annotations

from torch import Tensor

from groupwise.algo.loss_inputs import Tokens
from groupwise.config.loss import LossSpec

DPPO_MOST_RATIO = 20.0

TINY = 1e-7  # probabilities that are this near to 0 or 1 count as this far from it


def moved_tokens(
    t: Tokens, ratio_N: Tensor, log_ratio_N: Tensor, spec: LossSpec
) -> tuple[Tensor, float | None, float | None]:
    """Return how far the policy has moved at each token, and the least and most that the loss lets it.

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
