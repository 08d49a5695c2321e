"""Two real processes over gloo make the adapter that one makes, and notice when the other is gone."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import replace

import pytest
import torch
from learner_cases import LORA, SPECS
from parallel_cases import RATE, UNEVEN, Seen, assert_alike, everything, near_policy, start, with_strategy

from groupwise.algo.loss import resolve_loss
from groupwise.errors import ConfigError, RankLostError
from groupwise.train.data_parallel import DataParallel
from groupwise.train.learner import Learner
from rank_pairs import Pair, on_ranks
from slow_cases import slow_but

ddp_learner = with_strategy(DataParallel)
NAMES = {"lora": LORA, "all parameters": None}


@pytest.mark.parametrize("lora", NAMES.values(), ids=NAMES.keys())
def test_ranks_train_what_one_process_trains(make_base, make_samples, lora) -> None:
    samples = near_policy(make_base(), make_samples(UNEVEN), lora=lora)

    def run(make, **options):
        return everything(start(make, make_base(), lora=lora, **options), samples)

    alone = run(Learner)
    first, second = on_ranks(lambda ranks: run(ddp_learner, ranks=ranks))
    assert alone[-1].numbers["optim/grad_norm"] > 0
    assert_alike(first, alone, atol=1e-9)
    for mine, theirs in zip(first, second, strict=True):  # not nearly: what ranks decide by is one number
        assert all(torch.equal(a, b) for a, b in zip(mine.parameters, theirs.parameters, strict=True))
        assert repr(mine.numbers) == repr(theirs.numbers)


def test_advantages_of_tokens_and_a_mean_of_prompts_are_the_same_on_two_ranks(make_base, make_samples) -> None:
    """The first prompt's completions are on both ranks, and their mean is over all of its tokens."""
    samples = near_policy(make_base(), make_samples(UNEVEN), lora=LORA)
    groups = [g for g, (_, lengths) in enumerate(UNEVEN) for _ in lengths]
    samples = [
        replace(each, group=g, advantage=1.0, weights=tuple(0.5 - (t % 3) for t in range(len(each.mask))))
        for g, each in zip(groups, samples, strict=True)
    ]
    spec = resolve_loss("grpo", reduction="prompt_mean")

    def run(make, **options):
        learner = start(make, make_base(), lora=LORA, **options)
        metrics = learner.step(samples, spec, learning_rate=RATE)
        return [Seen("a step", metrics, [each.detach().clone() for each in learner.parameters])]

    alone = run(Learner)
    first, second = on_ranks(lambda ranks: run(ddp_learner, ranks=ranks))
    assert alone[0].numbers["optim/grad_norm"] > 0
    assert_alike(first, alone, atol=1e-9)
    assert_alike(second, first, atol=0)


def test_dropout_is_another_on_each_rank_and_the_same_again(make_base, make_samples) -> None:
    samples = make_samples(((4, (6,)),)) * 2  # twice the same, so that only dropout tells them apart
    lora = LORA.model_copy(update={"dropout": 0.5})

    def work(ranks):
        learner = start(ddp_learner, make_base(), lora=lora, ranks=ranks)
        learner.strategy.share = lambda samples, **_: [ranks.rank]
        out = []
        for _ in range(2):
            learner.forward_backward_supervised(samples)
            out.append([p.grad.clone() for p in learner.parameters])
            learner.zero_grad()
        return out

    (a, again), (b, _) = on_ranks(work)
    assert all(torch.equal(x, y) for x, y in zip(a, again, strict=True))
    assert not any(torch.equal(x, y) for x, y in zip(a, b, strict=True) if x.any())


def test_ranks_with_different_models_are_told_apart(make_base) -> None:
    def work(ranks):
        start(ddp_learner, make_base(seed=ranks.rank), lora=LORA, ranks=ranks).check_alike()

    for rank, error in enumerate(Pair(work).results()):
        assert isinstance(error, ConfigError)
        assert f"rank {1 - rank} has other the weights of the model than rank {rank}" in str(error)


@pytest.mark.parametrize("how", slow_but({signal.SIGKILL}, of=(signal.SIGKILL, signal.SIGSTOP)))
def test_a_lost_rank_ends_the_others_with_its_name_within_the_deadline(make_base, make_samples, how) -> None:
    samples, deadline = near_policy(make_base(), make_samples(UNEVEN), lora=LORA), 4.0

    def work(ranks):
        learner = start(ddp_learner, make_base(), lora=LORA, ranks=ranks)
        learner.step(samples, SPECS["grpo"], learning_rate=RATE)
        if ranks.rank == 1:
            time.sleep(0.5)  # the others have left the step behind
            os.kill(os.getpid(), how)
        learner.step(samples, SPECS["grpo"], learning_rate=RATE)

    pair = Pair(work, deadline_s=deadline, size=3)
    try:
        first, third = (pair.result(rank) for rank in (0, 2))
    finally:
        pair.kill()
    assert isinstance(first, RankLostError) and isinstance(third, RankLostError)
    assert re.match(r"rank 0 of 3 waited for rank 1(, 2)? in phase 'forward and backward'", first.message)
    assert "rank 2 of 3 waited for" in third.message and third.exit_code == 75
    for error in (first, third):
        waited = re.search(r"for ([\d.]+) s and gave up \(train.deadline_s is 4\)", error.message)
        assert waited is not None and float(waited[1]) < 2 * deadline
