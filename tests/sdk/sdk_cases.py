"""Datums that a tiny model can be trained on, and what tests compare."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from groupwise.sdk.datums import Datum, build_grpo_datums, datum_of
from groupwise.sdk.trainer import AdamParams, TrainingClient

ADAM = AdamParams(learning_rate=1e-2)


def sequences(
    seed: int = 0, *, prompts: int = 2, each: int = 3, vocabulary: int = 280
) -> tuple[list[Datum], list[int]]:
    """Sequences of a few prompts, `each` of every prompt, and the lengths of their prompts."""
    rng = random.Random(seed)
    data: list[Datum] = []
    lengths: list[int] = []
    for _ in range(prompts):
        prompt = [rng.randrange(vocabulary) for _ in range(rng.randint(3, 6))]
        for _ in range(each):
            completion = [rng.randrange(vocabulary) for _ in range(rng.randint(2, 6))]
            data.append(datum_of((*prompt, *completion), prompt_len=len(prompt)))
            lengths.append(len(prompt))
    return data, lengths


def scored(policy: TrainingClient, seed: int = 0, *, drift: float = 0.1) -> list[Datum]:
    """The same with advantages and log-probabilities of a sampler that is `drift` away from the policy."""
    data, lengths = sequences(seed)
    rng = random.Random(seed + 1)
    sampler = [[value + rng.uniform(-drift, drift) for value in row] for row in policy.forward(data).result().logprobs]
    advantages = [rng.uniform(-1, 1) for _ in data]
    return build_grpo_datums(data, advantages, sampler, lengths)


def gradient(policy: TrainingClient) -> torch.Tensor:
    """What has been accumulated, as one vector."""
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in policy.learner.parameters]
    return torch.cat([grad.flatten() for grad in grads])


def weights(policies: TrainingClient | Sequence[TrainingClient]) -> bytes:
    """Every trained number."""
    several = [policies] if isinstance(policies, TrainingClient) else policies
    return b"".join(p.detach().numpy().tobytes() for each in several for p in each.learner.parameters)
