"""Groups -> samples with the real engine: what is left out, and token in = token out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from groupwise.algo.credit import with_advantages
from groupwise.algo.samples import samples_of
from groupwise.config.algo import AdvantageConfig
from groupwise.engine.local import LocalEngine
from groupwise.model.packing import micro_batches
from groupwise.tasks.rollout_sources import SingleTurnRollouts, play_all
from groupwise.types import FinishReason, PolicyVersion, Prompt, RolloutGroup, SamplingParams


@pytest.fixture
def engine(make_base) -> Iterator[LocalEngine]:
    engine = LocalEngine(make_base(dtype=torch.float32))
    yield engine
    engine.close()


def scored(engine: LocalEngine, params: SamplingParams, *, unscorable: int = 0) -> list[RolloutGroup]:
    """Three groups of four with alternating rewards; the last `unscorable` of the first have none."""
    from groupwise.model.chat import encode_prompt

    prompts = [encode_prompt(Prompt(id=str(i), text=f"{i}====="), engine._base.tokenizer) for i in range(3)]
    play = SingleTurnRollouts(engine, engine._base.tokenizer)
    sampled = asyncio.run(play_all(play, prompts, params=params, n=4, version=PolicyVersion.base(), seeds=[0, 1, 2]))
    groups = []
    for p, group in enumerate(sampled):
        rewards = [None if p == 0 and i >= 4 - unscorable else float(i % 2) for i in range(4)]
        groups.append(
            replace(group, rollouts=tuple(replace(r, reward=x) for r, x in zip(group.rollouts, rewards, strict=True)))
        )
    return with_advantages(groups, AdvantageConfig(advantage="mean"))


def test_unscorable_rollouts_are_left_out(engine):
    groups = scored(engine, SamplingParams(max_tokens=6), unscorable=2)
    assert len(samples_of(groups)) == 2 + 4 + 4
    assert [r.advantage is None for r in groups[0].rollouts] == [False, False, True, True]


def test_truncated_completions_can_be_masked(engine):
    groups = scored(engine, SamplingParams(max_tokens=6, stop_ids=tuple(range(40))))
    cut = [r.completion.finish_reason is FinishReason.LENGTH for group in groups for r in group.rollouts]
    assert any(cut) and not all(cut)
    assert [not any(sample.mask) for sample in samples_of(groups, mask_truncated=True)] == cut
    assert all(all(sample.mask) for sample in samples_of(groups))


def test_sampled_ids_reach_the_learner_untouched(engine, make_base):
    """A byte-level tokenizer whose random ids mostly do not survive decoding and encoding: they never go that way."""
    tokenizer = make_base().tokenizer
    groups = scored(engine, SamplingParams(max_tokens=12))
    rollouts = [r for group in groups for r in group.rollouts]
    survived = [
        tuple(tokenizer.encode(r.completion.text, add_special_tokens=False)) == r.completion.token_ids for r in rollouts
    ]
    assert sum(survived) < len(survived) / 2  # the trap is set
    samples = samples_of(groups)
    for sample, rollout in zip(samples, rollouts, strict=True):
        assert sample.completion_ids == rollout.completion.token_ids
        assert sample.behaviour_logprobs == rollout.completion.logprobs
        assert sample.mask == (1,) * len(sample.completion_ids)
    (batch,) = micro_batches(samples, token_budget=10_000)
    assert batch.target_N.tolist() == [i for row in batch.rows for i in rollouts[row].completion.token_ids]
    assert [s.advantage for s in samples] == [-0.5, 0.5] * 6


def test_behaviour_logprobs_are_the_policys(engine, make_base):
    from groupwise.train.learner import Learner

    samples = samples_of(scored(engine, SamplingParams(max_tokens=12, temperature=0.8)))
    for sample, row in zip(samples, Learner(engine._base).forward(samples, temperature=0.8), strict=True):
        assert row == pytest.approx(sample.behaviour_logprobs, abs=1e-4)
