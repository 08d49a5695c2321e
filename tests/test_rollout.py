"""Prompts -> scored groups -> samples with the real engine: refilling, failures, and token in = token out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from groupwise.algo.advantage import AdvantageSpec, has_signal, with_advantages
from groupwise.algo.batch import micro_batches
from groupwise.data import PromptSource
from groupwise.engine.local import LocalEngine
from groupwise.errors import DataError, RewardError
from groupwise.rewards.base import RewardFunction
from groupwise.rollout import Collector, rollout_metrics, samples_of
from groupwise.types import PolicyVersion, Prompt, SamplingParams

BASE = PolicyVersion.base()


@pytest.fixture
def engine(make_base) -> Iterator[LocalEngine]:
    engine = LocalEngine(make_base(dtype=torch.float32))
    yield engine
    engine.close()


def reward(function: Callable, **options) -> RewardFunction:
    return RewardFunction(name=function.__name__, function=function, args={}, **options)


def by_kind(completions, kind):
    """A flat group scores all the same, a mixed one by place; a failed one raises; half a group may not be scorable."""
    if kind[0] == "failed":
        raise ArithmeticError("no score")
    if kind[0] == "half":
        return [float(i) if i < 2 else float("nan") for i in range(len(completions))]
    return [1.0 if kind[0] == "flat" else float(i % 2) for i in range(len(completions))]


def prompts(kinds: Sequence[str], *, length: int = 5) -> list[Prompt]:
    return [
        Prompt(id=f"p{i}", text=f"{i:02}" + "=" * length, columns={"kind": kind, "number": i})
        for i, kind in enumerate(kinds)
    ]


def collector(engine: LocalEngine, kinds: Sequence[str] | Sequence[Prompt], **options) -> Collector:
    given = [p for p in kinds if isinstance(p, Prompt)] or prompts([str(k) for k in kinds])
    settings = {
        "source": PromptSource(given, shuffle=False),
        "sampler": engine,
        "rewards": [reward(by_kind)],
        "base": engine._base,
        "params": SamplingParams(max_tokens=6),
        "prompts_per_step": 3,
        "group_size": 4,
        "refill": 2.0,
        "seed": 0,
    }
    return Collector(**{**settings, **options})


def collect(chosen: Collector, step: int = 1):
    return asyncio.run(chosen.collect(step=step, version=BASE))


def numbers(groups) -> list[int]:
    return [group.prompt.columns["number"] for group in groups]


# ---- filling a batch ----


def test_flat_groups_are_replaced(engine):
    collected = collect(collector(engine, ["flat", "mixed", "flat", "mixed", "mixed", "mixed"]))
    assert numbers(collected.groups) == [1, 3, 4]
    assert numbers(collected.sampled) == [0, 1, 2, 3, 4]
    assert all(has_signal(group) for group in collected.groups)


@pytest.mark.parametrize(("refill", "sampled"), [(1.0, 3), (2.0, 6), (2.5, 7)])
def test_refilling_is_bounded(engine, refill: float, sampled: int):
    collected = collect(collector(engine, ["flat"] * 4, refill=refill))
    assert collected.groups == () and len(collected.sampled) == sampled


def test_the_budget_makes_a_smaller_batch(engine):
    collected = collect(collector(engine, ["flat", "flat", "mixed", "flat", "mixed", "flat", "mixed"]))
    assert numbers(collected.groups) == [2, 4] and len(collected.sampled) == 6


def test_keep_flat(engine):
    collected = collect(collector(engine, ["flat", "mixed", "flat", "mixed"], keep_flat=True))
    assert numbers(collected.groups) == numbers(collected.sampled) == [0, 1, 2]
    samples = samples_of(with_advantages(collected.groups, AdvantageSpec()))
    assert len(samples) == 12 and [s.advantage for s in samples[:4]] == [0.0] * 4


def test_groups_are_whole_and_of_the_version(engine):
    for group in collect(collector(engine, ["mixed"] * 3)).groups:
        assert len(group.rollouts) == 4
        assert [r.reward for r in group.rollouts] == [0.0, 1.0, 0.0, 1.0]
        for rollout in group.rollouts:
            (turn,) = rollout.turns
            assert turn.prompt_ids == group.prompt.token_ids and turn.completion.version == BASE


def test_seeds(engine):
    """A step repeats exactly; steps, prompts and completions all differ."""

    def texts(step: int, seed: int = 0) -> list[tuple[int, ...]]:
        collected = collect(collector(engine, ["mixed"] * 3, seed=seed), step=step)
        return [r.completion.token_ids for r in collected.completions]

    assert texts(1) == texts(1)
    assert len(set(texts(1) + texts(2) + texts(1, seed=1))) == 36


# ---- prompts that do not fit ----


def test_prompts_without_room_are_passed_over(engine):
    """And counted; it does not matter where in an epoch the stream stands."""
    long = Prompt(id="long", text="=" * 400, columns={"kind": "mixed", "number": 99})
    short = prompts(["mixed"])[0]
    for seed in range(4):
        source = PromptSource([short, long], seed=seed)
        chosen = collector(engine, [short, long], source=source, prompts_per_step=1)
        assert [numbers(collect(chosen, step=step).groups) for step in range(4)] == [[0]] * 4
    collected = collect(collector(engine, [long, short, long], prompts_per_step=2))
    assert numbers(collected.groups) == [0, 0] and collected.too_long >= 3


def test_no_prompt_fits(engine):
    long = [Prompt(id=str(i), text="=" * 400, columns={"kind": "mixed"}) for i in range(3)]
    with pytest.raises(DataError, match="all 3 prompts fill the model's context of 64 tokens"):
        collect(collector(engine, long))


# ---- failures ----


def test_unscorable_rollouts_are_left_out(engine):
    collected = collect(collector(engine, ["half", "mixed", "mixed"]))
    groups = with_advantages(collected.groups, AdvantageSpec())
    samples = samples_of(groups)
    assert len(samples) == 2 + 4 + 4
    assert [r.advantage is None for r in groups[0].rollouts] == [False, False, True, True]
    assert rollout_metrics(collected)["rollout/error_frac"] == pytest.approx(2 / 12)


def test_a_batch_that_fails_whole_stops_the_run(engine):
    with pytest.raises(RewardError, match="no score"):
        collect(collector(engine, ["failed"] * 3))


def test_replacements_that_fail_do_not(engine):
    collected = collect(collector(engine, ["mixed", "flat", "flat", "failed", "failed", "failed"]))
    assert numbers(collected.groups) == [0] and len(collected.sampled) == 6
    errors = [r.error for r in collected.sampled[3].rollouts]
    assert all("no score" in (error or "") for error in errors)
    assert rollout_metrics(collected)["rollout/error_frac"] == 0.5


# ---- token in, token out ----


def test_sampled_ids_reach_the_learner_untouched(engine, make_base):
    """A byte-level tokenizer whose random ids mostly do not survive decoding and encoding: they never go that way."""
    tokenizer = make_base().tokenizer
    collected = collect(collector(engine, ["mixed"] * 3, params=SamplingParams(max_tokens=12)))
    rollouts = [r for group in collected.groups for r in group.rollouts]
    survived = [
        tuple(tokenizer.encode(r.completion.text, add_special_tokens=False)) == r.completion.token_ids for r in rollouts
    ]
    assert sum(survived) < len(survived) / 2  # the trap is set
    samples = samples_of(with_advantages(collected.groups, AdvantageSpec(kind="mean")))
    for sample, rollout in zip(samples, rollouts, strict=True):
        assert sample.completion_ids == rollout.completion.token_ids
        assert sample.behaviour_logprobs == rollout.completion.logprobs
        assert sample.mask == (1,) * len(sample.completion_ids)
    (batch,) = micro_batches(samples, token_budget=10_000)
    assert batch.target_N.tolist() == [i for row in batch.rows for i in rollouts[row].completion.token_ids]
    assert [s.advantage for s in samples] == [-0.5, 0.5] * 6


def test_behaviour_logprobs_are_the_policys(engine, make_base):
    from groupwise.train.learner import Learner

    collected = collect(collector(engine, ["mixed"] * 3, params=SamplingParams(max_tokens=12, temperature=0.8)))
    samples = samples_of(with_advantages(collected.groups, AdvantageSpec()))
    for sample, row in zip(samples, Learner(engine._base).forward(samples, temperature=0.8), strict=True):
        assert row == pytest.approx(sample.behaviour_logprobs, abs=1e-4)


# ---- metrics ----


def test_metrics(engine):
    phases: list[str] = []
    collected = collect(
        collector(engine, ["flat", "mixed", "mixed", "mixed"], refill=2, on_phase=phases.append, group_size=2)
    )
    assert phases == ["sampling", "scoring"] * 2
    metrics = rollout_metrics(collected)
    assert (
        metrics["reward/mean"] == metrics["reward/by_kind/mean"] == pytest.approx((1 + 1 + 0 + 1 + 0 + 1 + 0 + 1) / 8)
    )
    assert metrics["reward/frac_zero_std"] == 0.25
    assert (metrics["rollout/count"], metrics["rollout/groups_trained"]) == (8.0, 3.0)
    lengths = [len(r.completion.token_ids) for r in collected.completions]
    assert metrics["rollout/tokens"] == sum(lengths) and metrics["rollout/len_max"] == max(lengths)
    cut = sum(r.completion.finish_reason == "length" for r in collected.completions)
    assert metrics["rollout/truncated_frac"] == cut / 8
