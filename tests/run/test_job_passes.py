"""Who computes beside whom in a worker: small passes together, whatever does not fit by itself."""

from __future__ import annotations

import threading

import pytest
import torch

from groupwise.config.lora import LoraSpec
from groupwise.run.job_passes import JobPasses
from groupwise.train.learner import Learner
from groupwise.train.together import JOIN_TOKENS, JointPasses
from groupwise.types import Sample

WAIT_S = 120


@pytest.fixture(scope="module")
def base(make_base):
    return make_base("qwen3", dtype=torch.float32, context=512)


@pytest.fixture
def place() -> JointPasses:
    return JointPasses()


def learner(base, place: JointPasses) -> Learner:
    return Learner(base, lora=LoraSpec(rank=2), threads=1, strategy=JobPasses(place))


def of_tokens(count: int) -> list[Sample]:
    return [Sample(prompt_ids=(5,) * 7, completion_ids=(9,) * (count - 7), mask=(1,) * (count - 7))]


def halts(made: Learner, samples: list[Sample]) -> bool:
    """Whether it has the processors for itself meanwhile; it computes the same as without others."""
    seen: list[bool] = []
    strategy = made.strategy
    assert isinstance(strategy, JobPasses)
    plain = Learner._logprobs

    def logprobs(self, *args, **more):
        seen.append(strategy._place._halted)
        return plain(self, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "_logprobs", logprobs)
        found = made.forward(samples)
    assert found == Learner(made.base, lora=LoraSpec(rank=2), threads=1).forward(samples)
    assert not strategy._place._halted
    return seen == [True]


def test_what_is_too_large_for_a_pass_has_the_processors_for_itself(base, place):
    made = learner(base, place)
    assert not halts(made, of_tokens(JOIN_TOKENS)) and place.counts.passes == 1
    assert halts(made, of_tokens(JOIN_TOKENS + 1)) and place.counts.passes == 1


def test_where_passes_would_differ_each_has_the_processors_for_itself(base, place):
    made = learner(base, place)
    place.why_not = "gradients"
    assert halts(made, of_tokens(20)) and not place.counts.passes


def test_a_learner_that_cannot_join_has_the_processors_for_itself(base, place, monkeypatch):
    monkeypatch.setattr("groupwise.train.together.may_join", lambda model: False)
    assert halts(learner(base, place), of_tokens(20))


def test_passes_and_large_ones_have_their_turns_as_they_come(base, place):
    """Two large ones keep coming; a small one is not kept waiting for both of them."""
    small, done, rounds = learner(base, place), threading.Event(), 0

    def large() -> None:
        nonlocal rounds
        while not done.is_set():
            with place.halted():
                rounds += 1

    threads = [threading.Thread(target=large) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            small.forward(of_tokens(20))
    finally:
        done.set()
        for thread in threads:
            thread.join(WAIT_S)
    assert place.counts.passes == 5 and rounds


def test_one_that_raises_gives_the_processors_back(base, place):
    made = learner(base, place)
    with pytest.raises(ValueError, match="of mine"), made.strategy.announced("forward", [of_tokens(400)], {}):
        raise ValueError("of mine")
    assert not place._halted and not halts(made, of_tokens(20))
