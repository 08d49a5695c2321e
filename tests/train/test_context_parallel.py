"""Ranks that compute each row together train what one process trains: any layout, shared prompts, FSDP beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from learner_cases import LORA, SPECS
from parallel_cases import RATE, UNEVEN, Seen, assert_alike, everything, near_policy, start, whole, with_strategy

from groupwise.algo.loss import resolve_loss
from groupwise.errors import ConfigError
from groupwise.train.data_parallel import DataParallel
from groupwise.train.fully_sharded import FullySharded
from groupwise.train.learner import Learner
from groupwise.types import Sample
from rank_pairs import on_ranks
from slow_cases import long_case

EVERY_LINEAR = LORA.model_copy(update={"targets": ["all-linear"]})


def making(strategy: type[DataParallel], size: int, **options: Any):
    return with_strategy(partial(strategy, context_size=size, **options))


@pytest.mark.parametrize(("ranks", "size"), [(2, 2), long_case(4, 4), long_case(4, 2)])
def test_ranks_train_what_one_process_trains(make_base, make_samples, ranks: int, size: int) -> None:
    """All verbs of two pairs, each with a share of the batch; steps of one pair, and of four ranks that share two
    key-value heads."""
    samples = near_policy(make_base(), make_samples(UNEVEN), lora=LORA)

    def run(make, **options) -> list[Seen]:
        return everything(start(make, make_base(), lora=LORA, **options), samples, steps_only=ranks == size)

    alone = run(Learner)
    found = on_ranks(lambda ranks: run(making(DataParallel, size), ranks=ranks), size=ranks)
    for theirs in found:
        assert_alike(theirs, alone, atol=1e-9)
    for mine, theirs in zip(found[0], found[-1], strict=True):  # what ranks decide by is one number
        assert repr(mine.numbers) == repr(theirs.numbers)


@pytest.mark.parametrize(
    ("strategy", "lora", "ranks"),
    [
        pytest.param(DataParallel, None, 2, id="all parameters"),
        pytest.param(FullySharded, LORA, 2, id="fsdp with an adapter"),
        long_case(FullySharded, None, 2, id="fsdp"),
        pytest.param(partial(FullySharded, shard_size=2), None, 4, id="hsdp, two pairs", marks=pytest.mark.slow),
    ],
)
def test_whatever_is_trained_and_wherever_weights_are(make_base, make_samples, strategy, lora, ranks: int) -> None:
    samples = near_policy(make_base(), make_samples(UNEVEN), lora=lora)

    def run(make, **options) -> list[Seen]:
        learner = start(make, make_base(), lora=lora, gradient_checkpointing=True, **options)
        return everything(learner, samples, steps_only=True)

    alone = run(Learner)
    for theirs in on_ranks(lambda ranks: run(making(strategy, 2), ranks=ranks), size=ranks):
        assert_alike(theirs, alone, atol=1e-9)


FORKED = (
    Sample(prompt_ids=(5, 6, 7), completion_ids=(8, 9, 10), mask=(1, 1, 1), advantage=1.0),
    Sample(prompt_ids=(5, 6, 7, 8, 9, 10, 11), completion_ids=(12, 13), mask=(1, 0), advantage=-0.5),
    Sample(prompt_ids=(5, 6, 7, 8, 9, 10, 11), completion_ids=(12, 14, 15, 16), mask=(1, 1, 0, 1), advantage=2.0),
    Sample(prompt_ids=(5, 6, 20), completion_ids=(21,), mask=(1,), advantage=0.3),
)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "gpt_oss", "deepseek_v3", "gpt2", "qwen3_moe"])
def test_trees_and_soft_targets_of_every_kind_of_attention(make_base, architecture: str) -> None:
    """Softcaps and windows, sinks, values of another size than keys, experts; histories that fork."""
    lora = LORA.model_copy(update={"targets": ["c_attn"]}) if architecture == "gpt2" else EVERY_LINEAR
    samples = near_policy(make_base(architecture), [*FORKED], lora=lora)
    targets = (((3, -0.5), (4, -2.0)), ((5, -0.1),), ())
    samples[0] = replace(samples[0], soft_targets=targets)
    spec = resolve_loss("grpo", entropy_coeff=0.05)

    def run(make, **options) -> list[Seen]:
        learner = start(make, make_base(architecture), lora=lora, **options)
        told = learner.forward_backward_supervised(samples)
        return [Seen("a step", told | learner.step(samples, spec, learning_rate=RATE), whole(learner))]

    alone = run(Learner)
    for theirs in on_ranks(lambda ranks: run(making(DataParallel, 2), ranks=ranks)):
        assert_alike(theirs, alone, atol=1e-8)


def test_a_rank_keeps_its_part_of_what_a_backward_pass_needs(make_base, make_samples) -> None:
    samples = make_samples(((40, (200, 180, 190)),))

    def run(make, **options) -> int:
        learner = make(make_base(), lora=LORA, micro_tokens=10_000, **options)
        storages: dict[int, int] = {}

        def keep(x: torch.Tensor) -> torch.Tensor:
            if (not isinstance(x, torch.nn.Parameter) and x.grad_fn is not None) or x.is_floating_point():
                storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        kept = {parameter.untyped_storage().data_ptr() for parameter in learner.model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            learner.forward_backward(samples, SPECS["grpo"])
        return sum(size for place, size in storages.items() if place not in kept)

    alone = run(Learner)
    for theirs in on_ranks(lambda ranks: run(making(DataParallel, 2), ranks=ranks)):
        assert 0.4 < theirs / alone < 0.6


def refused(make: Callable[[], object]) -> str | None:
    """The field that a ConfigError names."""
    with pytest.raises(ConfigError) as caught:
        make()
    return caught.value.field


ROUTERS = LORA.model_copy(update={"targets": ["q_proj", "gate"]})


@pytest.mark.filterwarnings("ignore:.*cannot be trained in packed rows:UserWarning")
@pytest.mark.parametrize(
    ("architecture", "size", "lora"),
    [("lfm2", 2, LORA), ("llama4_text", 2, LORA), ("qwen3", 3, LORA), ("qwen3_moe", 2, ROUTERS)],
    ids=["recurrent layers", "padded rows", "heads", "routers that are trained"],
)
def test_what_cannot_be_cut_is_refused(make_base, architecture: str, size: int, lora) -> None:
    lora = EVERY_LINEAR if architecture == "lfm2" else lora
    learner = partial(making(DataParallel, size), lora=lora)
    found = on_ranks(lambda ranks: refused(lambda: learner(make_base(architecture), ranks=ranks)), size=size)
    assert found == ["train.context_parallel_size"] * size


def test_ranks_that_make_no_groups_are_refused() -> None:
    found = on_ranks(lambda ranks: refused(lambda: DataParallel(ranks, context_size=3)))
    assert found == ["train.context_parallel_size"] * 2
