"""Metrics: how far the policy that sampled is from its teacher, over the trained tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from groupwise.algo.distillation import score_gap
from groupwise.types import Sample, SequenceScores


def teacher_metrics(samples: Sequence[Sample], scores: Sequence[SequenceScores | None]) -> dict[str, float]:
    """`teacher/*`, of samples as `samples_of` makes them; nothing but `scored_frac` where no token has scores."""
    if not samples:
        return {}
    pairs = [(sample, said) for sample, said in zip(samples, scores, strict=True) if said is not None]
    metrics = {"teacher/scored_frac": len(pairs) / len(samples)}
    gaps = [gap for sample, said in pairs for gap in _gaps(sample, said)]
    if not gaps:
        return metrics
    metrics |= {"teacher/kl": -math.fsum(gaps) / len(gaps), "teacher/gap_max": max(map(abs, gaps))}
    metrics["teacher/tokens"] = float(len(gaps))
    tops = [(id, top) for sample, said in pairs for id, top in _likeliest(sample, said)]
    if tops:
        metrics["teacher/agreement"] = sum(id == top[0][0] for id, top in tops) / len(tops)
        mass = math.fsum(math.exp(logprob) for _, top in tops for _, logprob in top)
        metrics["teacher/mass"] = mass / len(tops)
    return metrics


def _gaps(sample: Sample, said: SequenceScores) -> Iterator[float]:
    """Yield log q - log mu of each trained token for which both are known."""
    rows = zip(sample.mask, said.logprobs, sample.behaviour_logprobs or (), strict=True)
    for trained, teacher, sampled in rows:
        if trained and not math.isnan(teacher - sampled):
            yield score_gap(teacher, sampled)


def _likeliest(sample: Sample, said: SequenceScores) -> Iterator[tuple[int, tuple[tuple[int, float], ...]]]:
    """Yield each trained token with the teacher's likeliest, where these are told."""
    for trained, id, top in zip(sample.mask, sample.completion_ids, said.top, strict=False):
        if trained and top:
            yield id, top
