"""Distillation: what a teacher's log-probabilities of sampled tokens add to what is learned.

The policy pi samples a completion y; the teacher q reads the same tokens and gives each its log-probability, after the
same prompt or after one with more in it (privileged context). What is minimised is the divergence of the two next-token
distributions at the places that the policy itself came to (on-policy distillation: GKD, arXiv 2306.13649; MiniLLM,
arXiv 2306.08543). Two forms of it:

**At the sampled token** (`with_teacher_advantages`). Each token has its own advantage, added to the one that it
has from rewards:

    A_t = w A_i + lambda (log q(y_t | y_<t) - log mu(y_t | y_<t))

with mu the policy that sampled; no gradient flows through it. The expectation of the policy gradient with it is the
gradient of -lambda KL(pi || q) at that place, the *reverse* KL, without credit for the places that follow (discount 0;
Thinking Machines, "On-Policy Distillation", 2025; the sampled-token form of SDPO, arXiv 2601.20802). It needs one
number a token of the teacher. The ratio, the clipping and the reduction of the policy loss apply to it as to any
advantage.

**Over the teacher's K likeliest tokens** (`soft_divergence`), a term of the loss with its own gradient:

    lambda D(pi(. | y_<t), q(. | y_<t)),    over K + 1 outcomes: the K tokens, and all others as one

    reverse   KL(pi || q) = sum_k p_k log (p_k / q_k)       what the sampled form estimates, without its variance
    forward   KL(q || pi) = sum_k q_k log (q_k / p_k)       cross-entropy with the teacher's probabilities as targets
    jsd       (KL(pi || m) + KL(q || m)) / 2,  m = (p + q) / 2      GKD's with beta = 1/2, SDPO's with alpha = 1/2

The outcome "all others" is what makes it a divergence: it is 0 only where p_k = q_k for each k, while the sum over the
K tokens alone is least where the policy has left all others. It is at most the divergence over the whole vocabulary,
and that itself with K the vocabulary. The papers have all three; `reverse` keeps to what the teacher likes best,
`forward` covers all that it would say.

Besides these two there is **the teacher's own text** (`demonstrations`): the teacher samples completions, and what is
minimised is

    lambda / T  sum_t -log pi(y_t | y_<t)        y ~ q, T tokens of all of a step's completions of the teacher

whose expectation is the forward KL(q || pi) of whole sequences, at the places that the teacher came to, but for the
teacher's entropy, which does not depend on pi: sequence-level distillation (Kim and Rush 2016, arXiv 1606.07947). With
a least reward it is rejection sampling (RFT, arXiv 2308.01825).

Shapes: N loss tokens of the micro-batch, K soft targets each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from groupwise.algo.samples import segments_of
from groupwise.config.teacher import TeacherConfig
from groupwise.types import Rollout, RolloutGroup, Sample, SequenceScores

MAX_GAP = 20.0  # nats, of either sign, that a token's advantage is taken from


def with_reward_weight(groups: Sequence[RolloutGroup], weight: float) -> list[RolloutGroup]:
    """Return groups with the advantages that rewards gave -> the same times `weight`; 0 for rollouts that a teacher
    scored and that have no reward (a failed reward function excludes a rollout here, too)."""
    return [replace(group, rollouts=tuple(_weighed(each, weight) for each in group.rollouts)) for group in groups]


def _weighed(rollout: Rollout, weight: float) -> Rollout:
    if rollout.advantage is None:
        return replace(rollout, advantage=0.0) if rollout.teacher and rollout.error is None else rollout
    turns = tuple(
        turn if turn.advantage is None else replace(turn, advantage=weight * turn.advantage) for turn in rollout.turns
    )
    return replace(rollout, advantage=weight * rollout.advantage, turns=turns)


def demonstrations(groups: Sequence[RolloutGroup], *, first: int = 0) -> list[Sample]:
    """Return what is learned without being sampled: all tokens of the groups' demonstrations, which a teacher sampled
    or a dataset has, after the policy's prompt. `first` is that of `algo.samples.samples_of`."""
    return [
        Sample(
            prompt_ids=segment.prompt_ids,
            completion_ids=segment.completion_ids,
            mask=segment.mask,
            continues=number > 0,
            group=index,
        )
        for index, group in enumerate(groups, first)
        for rollout in group.demonstrations
        for number, segment in enumerate(segments_of(rollout.turns))
        if segment.completion_ids
    ]


def demonstration_metrics(shown: Sequence[Sample]) -> dict[str, float]:
    """Return `teacher/demonstrations` and `teacher/demonstrated_tokens`, those that are learned: what tools answered
    between a dataset's turns is not."""
    tokens = sum(sum(sample.mask) for sample in shown)
    return {"teacher/demonstrations": float(len(shown)), "teacher/demonstrated_tokens": float(tokens)}


def teacher_scores(groups: Sequence[RolloutGroup]) -> list[SequenceScores | None]:
    """Return the teacher's scores of each sample of `algo.samples.samples_of(groups)`; None for a sample without."""
    found: list[SequenceScores | None] = []
    for rollout in (each for group in groups for each in group.rollouts if each.advantage is not None):
        found += rollout.teacher or (None,) * len(segments_of(rollout.turns))
    return found


def with_teacher(
    samples: Sequence[Sample], groups: Sequence[RolloutGroup], teacher: TeacherConfig | None
) -> list[Sample]:
    """Return the samples of groups with what their teacher said of them: as advantages of tokens, or as soft
    targets."""
    if teacher is None or teacher.loss == "sft":
        return list(samples)
    scores = teacher_scores(groups)
    if teacher.top_k:
        return with_soft_targets(samples, scores)
    return with_teacher_advantages(samples, scores, coefficient=teacher.coefficient)


def with_teacher_advantages(
    samples: Sequence[Sample], scores: Sequence[SequenceScores | None], *, coefficient: float
) -> list[Sample]:
    """Return samples with the advantage of each token plus coefficient (log q - log mu); those without scores
    unchanged."""
    return [
        sample if said is None else _with_gaps(sample, said.logprobs, coefficient)
        for sample, said in zip(samples, scores, strict=True)
    ]


def _with_gaps(sample: Sample, teacher: Sequence[float], coefficient: float) -> Sample:
    own = (1.0,) * len(sample.mask) if sample.weights is None else sample.weights
    sampled = sample.behaviour_logprobs or ()
    values = (
        sample.advantage * w + coefficient * score_gap(q, p) for w, q, p in zip(own, teacher, sampled, strict=True)
    )
    return replace(sample, advantage=1.0, weights=tuple(values))


def score_gap(teacher: float, sampled: float) -> float:
    """Return log q - log mu; 0 if the sampler's is not known (the token is dropped), bounded if the teacher's is
    not."""
    gap = teacher - sampled
    return 0.0 if math.isnan(gap) else min(max(gap, -MAX_GAP), MAX_GAP)


def with_soft_targets(samples: Sequence[Sample], scores: Sequence[SequenceScores | None]) -> list[Sample]:
    """Return samples with the teacher's likeliest tokens as `soft_targets`."""
    return [
        sample if said is None else replace(sample, soft_targets=said.top)
        for sample, said in zip(samples, scores, strict=True)
    ]


def soft_divergence(policy_NR: Tensor, target_NK: Tensor, kind: str) -> Tensor:
    """Return the divergence [N] of two distributions over K tokens and the rest as one outcome, in nats; `kind` is
    reverse, forward or jsd, as above.

    Args:
        policy_NR: log pi of the K tokens and of all others, [N, K + 1], with its graph. Where the others have none
            (-inf: K is the vocabulary) they are not an outcome.
        target_NK: log q of the K tokens; -inf where there are fewer than K. A row of nothing else has divergence 0. The
            teacher's rest is the difference of their sum from 1, at least the smallest that the type can tell.
    """
    if not target_NK.shape[1]:
        return target_NK.new_zeros(len(target_NK))
    known_NK = target_NK.isfinite()
    left_N = (1 - target_NK.masked_fill(~known_NK, -math.inf).exp().sum(1)).clamp(min=torch.finfo(target_NK.dtype).eps)
    there_N = known_NK.any(1) & policy_NR[:, -1].isfinite()
    here = torch.cat([known_NK, there_N[:, None]], dim=1)
    q = torch.cat([target_NK, left_N.log()[:, None]], dim=1).masked_fill(~here, 0.0)
    p = policy_NR.masked_fill(~here, 0.0)
    if kind == "reverse":
        terms = p.exp() * (p - q)
    elif kind == "forward":
        terms = q.exp() * (q - p)
    else:
        m = torch.logaddexp(p, q) - math.log(2)
        terms = (p.exp() * (p - m) + q.exp() * (q - m)) / 2
    return terms.masked_fill(~here, 0.0).sum(1)
