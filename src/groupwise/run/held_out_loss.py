"""The loss of a run of kind sft or dpo on held-out rows, which it computes whenever it evaluates.

    sft    the cross-entropy of their answers, nats a token      eval/loss
    dpo    the preference loss of their pairs                     eval/loss, and eval/accuracy, eval/margin

It is what is minimised, with the policy as it is and without dropout, on rows that are not trained on: where it rises
while the loss of training falls, the run has begun to learn its rows by heart.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterator, Sequence

import torch

from groupwise.algo.distillation import demonstrations
from groupwise.algo.metrics import Metrics
from groupwise.algo.preference import preference_loss
from groupwise.config.preference import PreferenceConfig
from groupwise.errors import ContextLengthError, DataError
from groupwise.tasks.rollout_sources import RolloutSource
from groupwise.train.learner import Learner
from groupwise.types import PolicyVersion, Prompt, Sample, SamplingParams


async def held_out_samples(prompts: Sequence[Prompt], answers: RolloutSource) -> list[Sample]:
    """Return the held-out rows as samples: of each its answer, or the two of its pair; rows that are longer than the
    context are passed over. Raises DataError if all are, ChatError for one that cannot be rendered."""
    kept = list[Prompt]()
    for prompt in prompts:
        try:
            kept.append(answers.prepare(prompt))
        except ContextLengthError:
            continue
    if not kept:
        raise DataError("every held-out row is longer than the model's context", field="eval.data")
    begun = answers.begin(kept, seeds=[0] * len(kept), n=1, params=SamplingParams(), version=PolicyVersion.base())
    return demonstrations(await asyncio.gather(*begun))  # nothing is sampled


def held_out_loss(learner: Learner, samples: Sequence[Sample], preferences: PreferenceConfig | None) -> Metrics:
    """Return the loss of the samples: as answers, or with `preferences` as pairs, chosen and rejected in turns. To be
    called where the learner is used."""
    if preferences is not None:
        return _of_pairs(learner, samples, preferences)
    learned = [*itertools.chain.from_iterable(_learned(samples, learner.forward(samples)))]
    return {"eval/loss": -math.fsum(learned) / max(len(learned), 1)}


def _of_pairs(learner: Learner, samples: Sequence[Sample], preferences: PreferenceConfig) -> Metrics:
    policy_B, reference_B = (
        torch.tensor([math.fsum(row) for row in _learned(samples, learner.forward(samples, reference=reference))])
        for reference in (False, True)
    )
    tokens_B = torch.tensor([float(sum(sample.mask)) for sample in samples])
    loss, told = preference_loss(policy_B, reference_B, tokens_B, preferences, pairs=len(samples) // 2)
    named = {"eval/accuracy": "preference/accuracy", "eval/margin": "preference/margin"}
    return {"eval/loss": float(loss)} | {name: float(told[metric]) for name, metric in named.items()}


def _learned(samples: Sequence[Sample], rows: Sequence[Sequence[float]]) -> Iterator[Iterator[float]]:
    """Yield of each sample the log-probabilities of the tokens that are learned."""
    for sample, row in zip(samples, rows, strict=True):
        yield itertools.compress(row, sample.mask)
