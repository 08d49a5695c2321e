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
from collections.abc import Sequence

import torch

from groupwise.algo.distillation import demonstrations
from groupwise.algo.metrics import Metrics
from groupwise.algo.preference import pairs_of, preference_loss
from groupwise.config.preference import PreferenceConfig
from groupwise.errors import ContextLengthError, DataError
from groupwise.tasks.rollout_sources import RolloutSource
from groupwise.train.learner import Learner
from groupwise.types import PolicyVersion, Prompt, RolloutGroup, SamplingParams


async def held_out_groups(prompts: Sequence[Prompt], answers: RolloutSource, *, label: str) -> list[RolloutGroup]:
    """Return the held-out rows as groups whose demonstrations are the answer, or the two of a pair; those that are
    longer than the context are passed over. Raises DataError if all are, ChatError for one that cannot be rendered."""
    kept = list[Prompt]()
    for prompt in prompts:
        try:
            kept.append(answers.prepare(prompt))
        except ContextLengthError:
            continue
    if not kept:
        raise DataError(f"every row of {label} is longer than the model's context", field="eval.data")
    begun = answers.begin(kept, seeds=[0] * len(kept), n=1, params=SamplingParams(), version=PolicyVersion.base())
    return list(await asyncio.gather(*begun))  # nothing is sampled


def held_out_loss(learner: Learner, groups: Sequence[RolloutGroup], preferences: PreferenceConfig | None) -> Metrics:
    """Return the loss of the groups' demonstrations: as answers, or with `preferences` as pairs. To be called where the
    learner is used."""
    if preferences is not None:
        return _of_pairs(learner, groups, preferences)
    samples = demonstrations(groups)
    rows = learner.forward(samples)
    of_rows = (itertools.compress(row, sample.mask) for sample, row in zip(samples, rows, strict=True))
    learned = list(itertools.chain.from_iterable(of_rows))
    return {"eval/loss": -math.fsum(learned) / max(len(learned), 1)}


def _of_pairs(learner: Learner, groups: Sequence[RolloutGroup], preferences: PreferenceConfig) -> Metrics:
    pairs = pairs_of(demonstrations(groups))
    samples = [sample for pair in pairs for sample in pair]
    of_policy, of_reference = (learner.forward(samples, reference=reference) for reference in (False, True))
    masks = [sample.mask for sample in samples]
    policy_B, reference_B = (
        torch.tensor([math.fsum(itertools.compress(row, mask)) for row, mask in zip(rows, masks, strict=True)])
        for rows in (of_policy, of_reference)
    )
    tokens_B = torch.tensor([float(sum(mask)) for mask in masks])
    loss, told = preference_loss(policy_B, reference_B, tokens_B, preferences, pairs=len(pairs))
    named = {"eval/accuracy": "preference/accuracy", "eval/margin": "preference/margin"}
    return {"eval/loss": float(loss)} | {name: float(told[metric]) for name, metric in named.items()}
