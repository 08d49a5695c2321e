"""Micro-batches side by side: the same gradients, in the same order whichever ends first."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch
from learner_cases import GROUPS, LORA, SPECS, assert_same, gradients, on_policy, parameters

from groupwise.model import packing as cutting
from groupwise.model.packing import side_by_side
from groupwise.train.lanes import ThreadedMicroBatches
from groupwise.train.learner import Learner
from groupwise.types import Sample
from wording import raises


def test_results_are_in_order_and_few_are_begun():
    lanes, running, most = ThreadedMicroBatches(3), set[int](), []
    lock = threading.Lock()

    def work(item: int) -> tuple[int, int]:
        with lock:
            running.add(item)
            most.append(len(running))
        time.sleep(0.02 * (3 - item % 3))
        with lock:
            running.remove(item)
        return item, torch.get_num_threads()

    assert [item for item, _ in lanes.map(work, range(9), lanes=3)] == list(range(9))
    assert max(most) == 3
    assert {threads for _, threads in lanes.map(work, range(3), lanes=2)} == {1}
    here = threading.get_ident()
    assert list(lanes.map(lambda _: threading.get_ident(), range(2), lanes=1)) == [here, here]


def test_one_at_a_time_has_one_of_torchs_threads_where_there_could_be_more_at_a_time():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for most, expected in ((2, 1), (1, 3)):
            batches = ThreadedMicroBatches(most)
            assert list(batches.map(lambda _: torch.get_num_threads(), range(2), lanes=1)) == [expected] * 2
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_when_an_error_is_raised_nothing_computes_any_more():
    """The reference puts the policy's weights back then, which what still computed would read."""
    begun, computing = threading.Barrier(2), threading.Event()

    def work(item: int) -> None:
        begun.wait()
        if item == 0:
            raise ValueError("the first")
        computing.set()
        time.sleep(0.1)
        computing.clear()

    with pytest.raises(ValueError):
        list(ThreadedMicroBatches(2).map(work, range(2), lanes=2))
    assert not computing.is_set()


def test_an_error_is_raised_and_nothing_more_is_begun():
    begun = []

    def work(item: int) -> int:
        begun.append(item)
        if item == 1:
            raise ValueError("the second")
        return item

    with raises(ValueError):
        list(ThreadedMicroBatches(2).map(work, range(20), lanes=2))
    assert len(begun) <= 4


@pytest.mark.parametrize("lanes", [2, 3, 4])
def test_what_is_run_at_once_stays_within_the_budget(make_samples, monkeypatch, lanes: int):
    monkeypatch.setattr(cutting, "LANE_TOKENS", 1)
    samples = [replace(s, prompt_ids=(*s.prompt_ids, 3 + i)) for i in range(4) for s in make_samples(GROUPS)]
    used, batches = side_by_side(samples, token_budget=120, lanes=lanes)
    sizes = [len(batch.input_ids_S) for batch in batches]
    assert used == lanes and len(sizes) >= lanes and lanes * max(sizes) <= 120
    together, batches = side_by_side(samples, token_budget=10_000, lanes=lanes)
    sizes = [len(batch.input_ids_S) for batch in batches]
    assert together == lanes == len(sizes) and max(sizes) - min(sizes) <= 2 * 16 * lanes


@pytest.mark.parametrize("groups", [2, 3, 5, 8])
def test_lanes_have_as_many_groups_each(make_samples, groups: int):
    samples = make_samples([(500, (3, 3, 3, 3))] * groups)
    lanes, batches = side_by_side(samples, token_budget=100_000, lanes=2)
    assert (lanes, sorted(batch.layout.P for batch in batches)) == (2, [groups // 2, -(-groups // 2)])


def test_groups_stay_whole(make_samples, monkeypatch):
    monkeypatch.setattr(cutting, "LANE_TOKENS", 1)
    samples = make_samples(GROUPS)
    lanes, batches = side_by_side(samples, token_budget=20, lanes=2)  # of which the first group needs 16
    assert lanes == 1 and max(len(batch.input_ids_S) for batch in batches) > 10
    assert side_by_side(samples[:3], token_budget=1000, lanes=2)[0] == 1  # a single group
    assert side_by_side([], token_budget=1000, lanes=2)[0] == 1


def test_little_is_not_shared_out(make_samples):
    assert side_by_side(make_samples(GROUPS), token_budget=1000, lanes=2)[0] == 1


@pytest.fixture
def several(make_learner, monkeypatch):
    """Learners that run three micro-batches at once."""
    monkeypatch.setattr(cutting, "LANE_TOKENS", 1)

    def make(**options) -> Learner:
        learner = make_learner(**options)
        learner._lanes = ThreadedMicroBatches(3)
        return learner

    return make


def many(make_samples) -> list[Sample]:
    return [replace(s, prompt_ids=(*s.prompt_ids, 3 + i)) for i in range(3) for s in make_samples(GROUPS)]


@pytest.mark.parametrize("name", SPECS)
def test_gradients_are_those_of_one_lane(make_learner, several, make_samples, name: str):
    one, learner = make_learner(), several()
    samples = on_policy(one, many(make_samples))
    metrics = one.forward_backward(samples, SPECS[name], temperature=0.8)
    seen = []
    other = learner.forward_backward(
        samples, SPECS[name], temperature=0.8, on_logprobs=lambda batch, logprobs_N: seen.append((batch, logprobs_N))
    )
    assert len(seen) == 3 and sorted(row for batch, _ in seen for row in batch.rows) == list(range(len(samples)))
    assert all(len(values) == len(batch.target_N) and not values.requires_grad for batch, values in seen)
    assert_same(gradients(learner), gradients(one))
    assert other == pytest.approx(metrics, rel=1e-6, abs=1e-8)


def test_logprobs_of_policy_and_reference(make_learner, several, make_samples):
    one, learner, samples = make_learner(), several(), many(make_samples)
    for reference in (False, True, False):
        rows = learner.forward(samples, reference=reference)
        for row, expected in zip(rows, one.forward(samples, reference=reference), strict=True):
            assert row == pytest.approx(expected, abs=1e-12, nan_ok=True)


@pytest.mark.slow
def test_bit_for_bit_again(several, make_samples):
    """Float32, several steps, threads that end in any order."""
    samples, ends = many(make_samples), []
    for _ in range(3):
        learner = several(dtype=torch.float32, micro_tokens=60)
        for _ in range(4):
            learner.step(samples, SPECS["grpo with k3"], learning_rate=0.05)
        ends.append(parameters(learner))
    for other in ends[1:]:
        assert all(a.equal(b) for a, b in zip(ends[0], other, strict=True))


def test_who_has_lanes(make_learner):
    assert make_learner()._lanes.most == torch.get_num_threads()
    alone = make_learner(threads=3)
    assert (alone._lanes.most, alone.threads) == (3, 1)
    for other in (
        make_learner(threads=3, lora=LORA.model_copy(update={"dropout": 0.1})),  # its random numbers are of the process
        make_learner(threads=3, lora=None),  # gradients as large as the model
    ):
        assert (other._lanes.most, other.threads) == (1, 3)
