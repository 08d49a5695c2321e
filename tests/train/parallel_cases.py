"""What a learner does in a run, one thing after another, so that learners in one and in several processes can be
compared after each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import SPECS, on_policy
from torch.distributed.tensor import DTensor

from groupwise.config.lora import LoraSpec
from groupwise.config.preference import PreferenceConfig
from groupwise.recorded import SamplingMask
from groupwise.train.learner import Learner
from groupwise.train.preference_step import train_on_pairs
from groupwise.types import Sample

# (prompt tokens, completion tokens): the first group has more than half of all tokens, and is cut between two ranks
UNEVEN = ((5, (20, 31, 16, 9)), (0, (5, 3)), (9, (2,)), (3, (7, 0, 3, 2)))
RATE, MICRO_TOKENS = 1e-2, 40
MakeLearner = Callable[..., Learner]


def with_strategy(strategy: Callable[..., Any]) -> MakeLearner:
    """Makes learners of several processes that all call the same verbs."""
    return lambda base, *, ranks, cpu_offload=None, **options: Learner(
        base,
        strategy=strategy(ranks) if cpu_offload is None else strategy(ranks, cpu_offload=cpu_offload),
        **options,
    )


@dataclass(frozen=True)
class Seen:
    """After one of the things: its metrics or numbers, and the parameters."""

    what: str
    numbers: dict[str, float]
    parameters: list[torch.Tensor]


def start(make: MakeLearner, base: Any, *, lora: LoraSpec | None, **options: Any) -> Learner:
    """A learner whose adapter already differs from the base."""
    learner = make(base, lora=lora, micro_tokens=MICRO_TOKENS, **options)
    if lora is not None:
        g = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in learner.parameters:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=g))
    return learner


def near_policy(base: Any, samples: Sequence[Sample], *, lora: LoraSpec | None) -> list[Sample]:
    """Every other sample was drawn from parts of the vocabulary."""
    vocabulary = base.model.get_output_embeddings().weight.shape[0]
    mixed = [replace(s, kept=a_part(s, vocabulary)) if i % 2 else s for i, s in enumerate(samples)]
    return on_policy(start(Learner, base, lora=lora), mixed)


def a_part(sample: Sample, vocabulary: int) -> SamplingMask:
    """For each token about a third of the vocabulary, and the token."""
    kept_TV = np.random.default_rng(len(sample.mask)).random((len(sample.mask), vocabulary)) < 1 / 3
    kept_TV[np.arange(len(sample.mask)), list(sample.completion_ids)] = True
    return SamplingMask.of(kept_TV)


def whole(learner: Learner) -> list[torch.Tensor]:
    """The parameters, gathered where they are cut."""
    values = (p.full_tensor() if isinstance(p, DTensor) else p for p in learner.parameters)
    return [value.detach().clone() for value in values]


def everything(learner: Learner, samples: list[Sample], *, steps_only: bool = False) -> list[Seen]:
    """All verbs, on an uneven batch, on a batch that leaves a rank idle, on one that must be refused."""
    grpo, kl = SPECS["grpo"], SPECS["grpo with k3"] if learner.lora is not None else SPECS["dapo with entropy"]
    seen: list[Seen] = []

    def note(what: str, numbers: dict[str, float]) -> None:
        seen.append(Seen(what, numbers, whole(learner)))

    note("a step", learner.step(samples, grpo, learning_rate=RATE))
    note("four steps on one batch", learner.step(samples, kl, learning_rate=RATE, minibatches=2, passes=2))
    note("an idle rank", learner.step(samples[:1], grpo, learning_rate=RATE))
    if steps_only:
        return seen
    stream = learner.begin_step()
    for part in (samples[:2], samples[2:]):
        stream.accumulate(part, grpo)
    note("a streamed step", stream.finish(learning_rate=RATE))
    note("cross-entropy", learner.forward_backward_supervised(samples))
    note("and its step", learner.optim_step(learning_rate=RATE).metrics())
    note("a loss of the caller's", learner.forward_backward_custom(samples, _sum_of_squares))
    note("and its step", learner.optim_step(learning_rate=RATE).metrics())
    if learner.lora is not None:
        pairs = [(a, b) for a, b in zip(samples[0::2], samples[1::2], strict=False) if a.prompt_ids == b.prompt_ids]
        note("pairs", train_on_pairs(learner, pairs, PreferenceConfig(), learning_rate=RATE, minibatches=2))
    infinite = [replace(samples[0], advantage=math.inf), *samples[1:]]
    refused = learner.step(infinite, grpo, learning_rate=RATE)
    note("a step that is refused", {"optim/refused": refused["optim/refused"]})
    rows = learner.forward(samples)
    note("log-probabilities", {f"{i}/{t}": x for i, row in enumerate(rows) for t, x in enumerate(row)})
    if learner.lora is not None:
        note("the estimate of the divergence", learner.measure_kl(samples))
    note("the last step", learner.step(samples, grpo, learning_rate=RATE))
    return seen


def assert_alike(ours: Sequence[Seen], theirs: Sequence[Seen], *, atol: float = 1e-6) -> None:
    """Within 1e-6 in float64, as is asked for; rounding alone makes less than 1e-9 of it."""
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.what == other.what
        assert mine.numbers == pytest.approx(other.numbers, abs=atol, nan_ok=True), mine.what
        for a, b in zip(mine.parameters, other.parameters, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=atol, msg=lambda text, what=mine.what: f"{what}: {text}")


def _sum_of_squares(logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    total = torch.stack([(row.nan_to_num() ** 2).sum() for row in logprobs]).sum()
    return total, {"rows": float(len(logprobs))}
