"""Rank 0 leads: what it does with its learner, the others do with theirs; and how it ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from learner_cases import LORA, SPECS
from parallel_cases import MICRO_TOKENS, RATE, UNEVEN, assert_alike, everything, near_policy, start, whole

from groupwise.config.lora import LoraSpec
from groupwise.errors import ConfigError, RankLostError, RewardError, TrainingError
from groupwise.train.learner import Learner
from groupwise.train.orders import end, follow, strategy_of
from rank_pairs import Pair, on_ranks
from slow_cases import slow_but
from wording import raises, wording


def opened(base, *, ranks, sharded=False, **options):
    learner = Learner(base, strategy=strategy_of(ranks, sharded=sharded), **options)
    if ranks.leads:
        learner.check_alike()
    return learner


@pytest.mark.parametrize(
    "sharded", [pytest.param(False, id="ddp", marks=pytest.mark.slow), pytest.param(True, id="fsdp")]
)
def test_only_rank_0_is_told_what_to_do(make_base, make_samples, tmp_path: Path, sharded) -> None:
    """The learner of above, led; then saved, and read by a learner alone and by a pair."""
    samples = near_policy(make_base(), make_samples(UNEVEN), lora=LORA)

    def lead(learner) -> list:
        learner.set_micro_tokens(MICRO_TOKENS)
        return everything(learner, samples, steps_only=sharded)

    def work(ranks):
        learner = start(opened, make_base(), lora=LORA, ranks=ranks, sharded=sharded)
        if not ranks.leads:
            return follow(learner), whole(learner)
        seen = lead(learner)
        learner.save(tmp_path)
        end(ranks, "the result")
        return seen, whole(learner)

    alone = lead(start(Learner, make_base(), lora=LORA))
    (seen, mine), (result, theirs) = on_ranks(work)
    assert_alike(seen, alone)
    assert result == "the result"
    assert all(map(torch.equal, mine, theirs))

    def go_on(ranks):
        learner = opened(make_base(), lora=LORA, ranks=ranks, sharded=sharded)
        if not ranks.leads:
            follow(learner)
        else:
            learner.load(tmp_path)
            learner.step(samples, SPECS["grpo"], learning_rate=RATE)
            end(ranks)
        return whole(learner), learner.steps, learner.shuffle.getstate()

    one = Learner(make_base(), lora=LORA)
    one.load(tmp_path)
    one.step(samples, SPECS["grpo"], learning_rate=RATE)
    for weights, *counters in on_ranks(go_on):
        assert counters == [one.steps, one.shuffle.getstate()]
        for a, b in zip(weights, whole(one), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_ranks_that_follow_help_to_send_a_cut_model(make_base, make_samples) -> None:
    """One tensor after another is whole at rank 0, in the checkpoint's names, as one process has them."""
    samples = near_policy(make_base(), make_samples(UNEVEN), lora=None)

    def work(ranks):
        learner = opened(make_base(), lora=None, ranks=ranks, sharded=True)
        if not ranks.leads:
            return follow(learner)
        learner.step(samples, SPECS["grpo"], learning_rate=RATE)
        sent = list[tuple[str, torch.Tensor]]()
        learner.stream_weights(lambda name, tensor: sent.append((name, tensor.clone())))
        end(ranks)
        return sent

    alone = Learner(make_base(), lora=None)
    alone.step(samples, SPECS["grpo"], learning_rate=RATE)
    expected = list[tuple[str, torch.Tensor]]()
    alone.stream_weights(lambda name, tensor: expected.append((name, tensor)))
    sent, _ = on_ranks(work)
    assert [name for name, _ in sent] == [name for name, _ in expected]
    for (_, a), (_, b) in zip(sent, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_a_thread_beside_a_rank_asks_the_store_while_that_waits_for_an_order(make_base) -> None:
    """By a line of its own, and what follows each order is done after it."""

    def work(ranks):
        line, heard = ranks.own_line("beside"), threading.Event()
        learner = opened(make_base(), ranks=ranks, lora=LORA)
        if ranks.leads:
            line.set("asked", "?")
            assert line.get("answered") == b"!"  # by the other rank, which has got no order since
            learner.set_micro_tokens(MICRO_TOKENS)
            return end(ranks)

        def answer() -> None:
            assert line.get("asked") == b"?"
            line.set("answered", "!")
            heard.set()

        threading.Thread(target=answer).start()
        done: list[int] = []
        follow(learner, after=lambda: done.append(learner.micro_tokens))
        return heard.is_set(), done

    (_, (heard, done)) = on_ranks(work)
    assert heard and done[-1:] == [MICRO_TOKENS]


def test_an_adapter_that_rank_0_starts_from_is_everybodys(make_base, make_adapter) -> None:
    directory = make_adapter(make_base(), rank=3)

    def work(ranks):
        learner = opened(make_base(), ranks=ranks, lora=LoraSpec(rank=3, alpha=6.0))
        if ranks.leads:
            learner.load_adapter(directory)
            end(ranks)
        else:
            follow(learner)
        return whole(learner)

    first, second = on_ranks(work)
    assert all(map(torch.equal, first, second)) and all(bool(p.any()) for p in second)


def test_an_error_of_rank_0_ends_the_others(make_base) -> None:
    def work(ranks):
        learner = opened(make_base(), lora=LORA, ranks=ranks)
        if not ranks.leads:
            return follow(learner)
        with raises(ConfigError):
            learner.forward_backward_custom([], lambda logprobs: (0, {}))
        return end(ranks, error=RewardError("no completion could be scored"))

    error = Pair(work).results()[1]
    assert isinstance(error, TrainingError)
    wording(error)


@pytest.mark.parametrize("how", slow_but({signal.SIGKILL}, of=(signal.SIGKILL, signal.SIGSTOP)))
def test_rank_0_may_take_its_time_and_not_die(make_base, how) -> None:
    """It samples for longer than the deadline; then it is killed, or stands still."""

    def work(ranks):
        learner = opened(make_base(), lora=LORA, ranks=ranks)
        if not ranks.leads:
            return follow(learner)
        time.sleep(2.5)
        learner.zero_grad()
        return os.kill(os.getpid(), how)

    pair, started = Pair(work, deadline_s=1.0), time.monotonic()
    error = pair.result(1)
    pair.kill()
    assert isinstance(error, RankLostError)
    wording(error)
    assert time.monotonic() - started > 2.5
