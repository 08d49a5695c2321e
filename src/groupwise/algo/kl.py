"""KL to the reference outside the loss: as a penalty in the reward, its adaptive coefficient, and how it is
measured. No torch here.

KL in the reward (`kl_in: reward`; Ziegler et al. 2019, arXiv 1909.08593, equation 2). A rollout's reward is r - beta K,

    K = sum_t  log mu(y_t | ...) - log ref(y_t | ...)         nats, over all tokens that the policy chose

with mu the policy that sampled, so that no forward but the reference's is needed. K is an unbiased estimate (k1) of the
KL of whole completions, and as a reward its gradient is, too: with advantage `leave_one_out` and reduction
`sequence_sum`, on-policy, the expected gradient of the policy loss is exactly

    - grad ( E[r] - beta KL(pi || ref) )

because the part that differentiating a reward drops, E[grad K] = E[grad log pi], is zero. That is so for k1 only: k3 in
the reward would lack E[grad k3] and is not offered. Per token the gradient is that of k1 in the loss,
sum_t d_t grad log pi_t, and in addition credit for the KL of the tokens that come later, sum_{s<t} d_t grad log pi_s,
which no term in the loss has. The loss has no KL term then. Off-policy, K is the KL of the policy that sampled.

The penalty is subtracted from the advantages, with the baseline of the reward (group mean, or mean of the others) and
without its scale:

    A_i = A(r)_i - beta (K_i - mean K)

For advantages without a scale (`mean`, `leave_one_out`) this is r - beta K before the advantages, to the letter. With a
standard deviation it keeps what r - beta K would lose: beta means the same in every group and the same as in the loss,
and where all rewards are equal the penalty is not blown up to a standard deviation of 1.

Pitfalls of KL gradients: arXiv 2506.09477, arXiv 2510.01555.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice

from groupwise.algo.prefixes import groups_of
from groupwise.algo.samples import segments_of
from groupwise.config.algo import AdvantageConfig
from groupwise.errors import ConfigError
from groupwise.types import Rollout, RolloutGroup, Sample

MEASURED_SHARE = 0.1  # of a batch's completion tokens, where its KL is only watched
MAX_ERROR = 0.2  # the relative error that one step of the controller reacts to
COEFFICIENTS = (1e-8, 1e4)  # between which it stays


def sequence_kl(sample: Sample, reference: Sequence[float]) -> float:
    """Return K of one completion in nats, from its behaviour logprobs; tokens without a finite logprob add nothing.

    Args:
        reference: log-probability of every completion token under the reference, at the sampling temperature:
            `Learner.forward(samples, temperature=..., reference=True)`.

    Raises:
        ConfigError: the sample has no behaviour logprobs.
    """
    return math.fsum(_gaps(sample, reference))


def with_kl_penalty(
    groups: Sequence[RolloutGroup], kls: Sequence[float], spec: AdvantageConfig, *, coeff: float
) -> list[RolloutGroup]:
    """Return groups with advantages -> the same groups with beta (K - baseline) subtracted from them; beta is `coeff`.

    Rollouts without an advantage are left alone and are in no baseline.

    Args:
        kls: `sequence_kl` of every segment of every rollout that has an advantage, in their order, which is that of
            `algo.samples.samples_of(groups)`. A rollout's K is the sum over its segments.
    """
    segments = {id(r): len(segments_of(r.turns)) for group in groups for r in group.rollouts if r.advantage is not None}
    if len(kls) != sum(segments.values()):
        raise ValueError(
            f"{len(kls)} KLs for {sum(segments.values())} segments of rollouts with an advantage; give one for each"
        )
    per_segment, result = iter(kls), []
    for group in groups:
        scored = [rollout for rollout in group.rollouts if rollout.advantage is not None]
        totals = [math.fsum(islice(per_segment, segments[id(rollout)])) for rollout in scored]
        penalties = iter(_centred(totals, spec, coeff=coeff))
        rollouts = tuple(r if r.advantage is None else _less(r, next(penalties)) for r in group.rollouts)
        result.append(replace(group, rollouts=rollouts))
    return result


def _less(rollout: Rollout, penalty: float) -> Rollout:
    """Return the rollout with the penalty taken off its advantage, and off those of its turns that have their own."""
    assert rollout.advantage is not None
    turns = tuple(
        turn if turn.advantage is None else replace(turn, advantage=turn.advantage - penalty) for turn in rollout.turns
    )
    return replace(rollout, advantage=rollout.advantage - penalty, turns=turns)


def logprob_drop(
    samples: Sequence[Sample], before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]
) -> float:
    """Return the nats per trained token by which the samples are less likely `after` than `before`; 0 without such
    tokens. Rows have a log-probability for each completion token; those that are not finite are left out."""
    drops = [
        then - now
        for sample, rows in zip(samples, zip(before, after, strict=True), strict=True)
        for then, now, trained in zip(*rows, sample.mask, strict=True)
        if trained and math.isfinite(then - now)
    ]
    return math.fsum(drops) / len(drops) if drops else 0.0


def kl_metrics(samples: Sequence[Sample], reference: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return how far the policy that sampled is from the reference, over the trained tokens.

    `kl/mean` and `kl/max` are k3 = e^-d + d - 1 with d = log mu - log ref, `kl/tokens` how many tokens that was over;
    nothing without any.
    """
    gaps = [d for sample, row in zip(samples, reference, strict=True) for d in _gaps(sample, row)]
    if not gaps:
        return {}
    k3 = [math.expm1(min(-d, 20.0)) + max(d, -20.0) for d in gaps]
    return {"kl/mean": math.fsum(k3) / len(k3), "kl/max": max(k3), "kl/tokens": float(len(k3))}


def measured_rows(samples: Sequence[Sample], *, turn: int, max_tokens: int | None = None) -> list[Sample]:
    """Return the indices of a few samples, all of one group, to estimate the KL from; `turn` (the step) chooses the
    group.

    As many as have `max_tokens` completion tokens together (None: a tenth of the batch's), but at least one. Rows that
    cannot be measured, for want of behaviour logprobs or of trained tokens, are passed over.
    """
    able = [sample for sample in samples if sample.behaviour_logprobs is not None and any(sample.mask)]
    groups = groups_of(able)
    if not groups:
        return []
    limit = MEASURED_SHARE * sum(len(s.mask) for s in samples) if max_tokens is None else max_tokens
    rows = groups[turn % len(groups)]
    used = list(accumulate(len(row.mask) for row in rows))
    return [row for i, (row, tokens) in enumerate(zip(rows, used, strict=True)) if i == 0 or tokens <= limit]


@dataclass(kw_only=True)
class AdaptiveKL:
    """A coefficient that keeps the KL near a target (Ziegler et al. 2019, arXiv 1909.08593, section 2.2).

        e = clip(KL / target - 1, -0.2, 0.2)        coeff <- coeff (1 + e / horizon)

    With `target` in nats per token, as the metric `kl/mean`, and `horizon` in steps: the paper's gain of 0.1 is a
    horizon of 10. Far from the target the coefficient changes by 0.2 / horizon a step: twofold in about 3.5 horizons.

    Raises:
        ConfigError: a number that is out of range.
    """

    coeff: float
    target: float
    horizon: float = 10.0

    def __post_init__(self) -> None:
        for name, least in (("coeff", 0.0), ("target", 0.0), ("horizon", 1.0)):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0 and value >= least):
                valid = f"at least {least:g}" if least else "positive"
                raise ConfigError(f"the {name} of the adaptive KL is {value}; it must be {valid}")

    def update(self, kl: float) -> float:
        """Return the coefficient of the next step, given the KL of this one; one that is not finite changes nothing."""
        if math.isfinite(kl):
            error = min(max(kl / self.target - 1, -MAX_ERROR), MAX_ERROR)
            low, high = COEFFICIENTS
            self.coeff = min(max(self.coeff * (1 + error / self.horizon), low), high)
        return self.coeff

    def state_dict(self) -> dict[str, float]:
        """Return the state for a resumed run; target and horizon come from its configuration."""
        return {"coeff": self.coeff}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the values of `state_dict`."""
        self.coeff = float(state["coeff"])


def _gaps(sample: Sample, reference: Sequence[float]) -> Iterator[float]:
    """Yield log mu - log ref of each trained token for which both are finite."""
    if sample.behaviour_logprobs is None:
        raise ConfigError(
            "the KL outside of the loss reads behaviour logprobs, and the samples have none",
            hint="give the logprobs that the completions were sampled at, or put the KL into the loss (kl_in: loss)",
        )
    for trained, policy, ref in zip(sample.mask, sample.behaviour_logprobs, reference, strict=True):
        if trained and math.isfinite(policy - ref):
            yield policy - ref


def _centred(kls: Sequence[float], spec: AdvantageConfig, *, coeff: float) -> list[float]:
    """Return the amounts that are subtracted from the advantages: beta (K - mean K), the mean of the others with
    `leave_one_out`."""
    if len(kls) < 2:
        return [0.0] * len(kls)
    mean = math.fsum(kls) / len(kls)
    factor = len(kls) / (len(kls) - 1) if spec.advantage == "leave_one_out" else 1.0
    return [coeff * factor * (kl - mean) for kl in kls]
