"""What comes back: which groups and prompts, how often, when, and that a replayed group is the fresh one."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from groupwise.algo.credit import with_advantages
from groupwise.algo.samples import samples_of
from groupwise.config.algo import AdvantageConfig
from groupwise.config.lora import LoraSpec
from groupwise.config.loss import resolve_loss
from groupwise.engine.local import LocalEngine
from groupwise.errors import DataError
from groupwise.model.chat import encode_prompt
from groupwise.model.load import load_model
from groupwise.run.replay import ReplayBuffer, RerollQueue, signal
from groupwise.tasks.rollout_sources import SingleTurnRollouts, play_all
from groupwise.train.learner import Learner
from groupwise.types import (
    Completion,
    FinishReason,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Turn,
)
from wording import raises


def group(id: str, rewards: Sequence[float | None], *, version: int = 1, **by_name: float) -> RolloutGroup:
    """A group with these rewards, and advantages `mean`: r - mean, so that its signal is easy to work out."""
    rollouts = tuple(
        Rollout(
            turns=(
                Turn(
                    (5, 6),
                    Completion(
                        token_ids=(10 + i, 2),
                        logprobs=(-0.5, -0.25),
                        text=str(i),
                        finish_reason=FinishReason.STOP,
                        version=PolicyVersion("math", version),
                    ),
                ),
            ),
            rewards=by_name,
            reward=reward,
            error=None if reward is not None else "failed",
        )
        for i, reward in enumerate(rewards)
    )
    plain = RolloutGroup(prompt=Prompt(id=id, text="x", token_ids=(5, 6)), rollouts=rollouts)
    return with_advantages([plain], AdvantageConfig(advantage="mean"))[0]


def scored(id: str, size: float, **options) -> RolloutGroup:
    """A group with more signal the larger `size`."""
    return group(id, [0.0, size], **options)


def ids(groups: Sequence[RolloutGroup]) -> list[str]:
    return [each.prompt.id for each in groups]


def through_json(state):
    return json.loads(json.dumps(state, allow_nan=False))


# ---- the buffer ----


def test_the_signal_of_a_group():
    """Rewards 0, 0, 3: mean 1, advantages -1, -1, 2 (sum of sizes 4), std sqrt(3)."""
    assert signal(group("a", [0.0, 0.0, 3.0])) == pytest.approx(4 * math.sqrt(3))
    assert signal(group("a", [0.0, 0.0, 3.0, None])) == pytest.approx(4 * math.sqrt(3))
    assert signal(group("a", [1.0, 1.0, 1.0])) == 0
    assert signal(group("a", [1.0, None, None])) == 0
    assert signal(group("a", [None, None])) == 0


@pytest.mark.parametrize("size", [0, -1])
def test_size_0_is_off(size):
    buffer = ReplayBuffer(size)
    buffer.add([scored("a", 1)], 1)
    assert len(buffer) == 0 and buffer.draw(1, 2) == [] and buffer.quota(100) == 0


def test_an_empty_buffer_has_nothing_to_draw():
    assert ReplayBuffer(4).draw(3, 1) == []


def test_the_lowest_scores_are_evicted():
    buffer = ReplayBuffer(2)
    for size in (1, 2, 3):
        buffer.add([scored(str(size), size)], 1)
    assert len(buffer) == 2 and len(buffer.draw(1, 2)) == 1 and len(buffer.draw(9, 2)) == 1
    assert buffer.draw(9, 1) == []
    buffer.add([scored("0.5", 0.5)], 2)
    assert set(ids(buffer.draw(9, 3))) == {"2", "3"}
    buffer.add([scored("new", 2)], 2)  # as good as "2", which is older
    assert set(ids(buffer.draw(9, 4))) == {"new", "3"}


def test_groups_without_signal_are_not_kept():
    buffer = ReplayBuffer(4)
    buffer.add([group("flat", [1.0, 1.0]), group("failed", [None, 1.0])], 1)
    assert len(buffer) == 0


def test_age():
    """A group is drawn in the steps after its own, up to max_age of them, then forgotten; to add it again helps not."""
    buffer = ReplayBuffer(4, max_age=3)
    buffer.add([scored("a", 1)], 10)
    assert buffer.draw(1, 10) == []  # its own step's batch has it already
    assert ids(buffer.draw(1, 11)) == ids(buffer.draw(1, 13)) == ["a"]
    assert buffer.metrics(12) == {"replay/size": 1.0, "replay/age_mean": 2.0}
    buffer.add(buffer.draw(1, 13), 13)
    assert len(buffer) == 1 and buffer.draw(1, 14) == [] and len(buffer) == 0
    assert buffer.metrics(14) == {"replay/size": 0.0, "replay/age_mean": 0.0}


def test_the_same_prompt_may_be_there_from_several_versions():
    buffer = ReplayBuffer(4)
    buffer.add([scored("a", 1, version=1), scored("a", 1, version=2)], 1)
    assert ids(buffer.draw(4, 2)) == ["a", "a"]


def test_no_group_is_twice_in_a_batch():
    buffer = ReplayBuffer(8, seed=3)
    buffer.add([scored(str(n), n) for n in range(1, 9)], 1)
    for step in range(2, 17):
        drawn = ids([*buffer.draw(3, step), *buffer.draw(1, step), *buffer.draw(1, step)])
        assert len(set(drawn)) == 5
    assert len(buffer) == 8 and len(buffer.draw(9, 16)) == 3 and buffer.draw(9, 16) == []


def test_groups_are_drawn_in_proportion_to_their_score():
    buffer = ReplayBuffer(3, seed=1, max_age=5000)
    buffer.add([scored("a", 1), scored("b", 2), scored("c", 3)], 0)  # signal: the square of the size
    counts = Counter(ids([each for step in range(1, 4001) for each in buffer.draw(1, step)]))
    for id, share in (("a", 1 / 14), ("b", 4 / 14), ("c", 9 / 14)):
        assert counts[id] / 4000 == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 4000))


def test_the_quota_is_a_share_of_the_whole_batch():
    buffer = ReplayBuffer(100, share=0.25)
    for fresh in range(200):
        quota = buffer.quota(fresh)
        assert quota <= 0.25 * (fresh + quota) + 1e-9
        assert quota + 1 > 0.25 * (fresh + quota + 1) or quota == 100
    assert ReplayBuffer(100, share=0.2).quota(8) == 2
    assert ReplayBuffer(3, share=0.5).quota(50) == 3
    assert ReplayBuffer(3, share=1.0).quota(0) == 3


def test_draws_follow_the_seed_and_go_on_after_a_restart():
    def filled(seed):
        buffer = ReplayBuffer(6, seed=seed)
        for step in range(1, 9):
            buffer.add([scored(f"{step}/{n}", n) for n in (1, 2)], step)
            buffer.draw(2, step)
        return buffer

    first, second = filled(0), filled(0)
    state = through_json(second.state_dict())
    restored = ReplayBuffer(6, seed=99)
    restored.load_state_dict(state)
    draws = [first.draw(2, step) for step in range(9, 15)]
    assert [restored.draw(2, step) for step in range(9, 15)] == draws
    assert restored.state_dict() == first.state_dict()
    assert [filled(1).draw(2, step) for step in range(9, 15)] != draws
    smaller = ReplayBuffer(1)
    smaller.load_state_dict(state)
    assert ids(smaller.draw(2, 9)) == ["8/2"]


@pytest.mark.parametrize(
    "state", [{}, {"entries": [], "random": 3}, {"entries": [{"step": 1, "group": 2}], "random": []}]
)
def test_what_is_not_a_state_is_refused(state):
    with raises(DataError):
        ReplayBuffer(1).load_state_dict(state)


@pytest.fixture(scope="module")
def sampled() -> list[RolloutGroup]:
    """Two groups of the starter with advantages: their prompts, and so their completions, have different lengths."""
    base = load_model("starter", device="cpu", dtype="float32")
    asked = ["What is 4 + 5?", "What is 123 - 45? Think step by step, and say every step that you take."]
    prompts = [
        encode_prompt(Prompt(id=str(i), messages=({"role": "user", "content": text},)), base.tokenizer)
        for i, text in enumerate(asked)
    ]
    engine = LocalEngine(base)
    try:
        params = SamplingParams(max_tokens=48)
        unscored = asyncio.run(
            play_all(
                SingleTurnRollouts(engine, base.tokenizer),
                prompts,
                params=params,
                n=4,
                version=PolicyVersion.base(),
                seeds=[1, 2],
            )
        )
    finally:
        engine.close()
    groups = []
    for each in unscored:
        rewards = [float(len(r.completion.token_ids) + i) for i, r in enumerate(each.rollouts)]
        rollouts = tuple(
            Rollout(turns=r.turns, reward=reward) for r, reward in zip(each.rollouts, rewards, strict=True)
        )
        groups.append(RolloutGroup(prompt=each.prompt, rollouts=rollouts))
    return with_advantages(groups, AdvantageConfig())


def test_a_replayed_group_is_the_fresh_group(sampled):
    """Bit for bit: loss, metrics and gradients, alone and in a batch with a group of another length."""
    buffer = ReplayBuffer(2, seed=0)
    buffer.add(sampled, 1)
    restored = ReplayBuffer(2)
    restored.load_state_dict(through_json(buffer.state_dict()))
    replayed = sorted(restored.draw(2, 2), key=lambda each: each.prompt.id)
    assert replayed == sampled
    lengths = {len(each.prompt.token_ids) for each in sampled}
    assert len(lengths) == 2 and len({len(s.completion_ids) for s in samples_of(sampled)}) > 2

    learner = Learner(load_model("starter", device="cpu", dtype="float32"), lora=LoraSpec(rank=4), seed=0)
    g = torch.Generator().manual_seed(7)
    for parameter in learner.parameters:  # off the point where half of the adapter's gradient is zero
        parameter.data.add_(0.02 * torch.randn(parameter.shape, generator=g))

    def trained(groups):
        for parameter in learner.parameters:
            parameter.grad = None
        metrics = learner.forward_backward(samples_of(groups), resolve_loss("grpo"))
        return metrics, [parameter.grad for parameter in learner.parameters]

    for fresh, again in ((sampled, replayed), (sampled[:1], replayed[:1]), (sampled[1:], replayed[1:])):
        metrics, gradients = trained(fresh)
        metrics_again, gradients_again = trained(again)
        assert metrics == metrics_again
        assert any(bool(gradient.any()) for gradient in gradients)
        assert all(torch.equal(a, b) for a, b in zip(gradients, gradients_again, strict=True))


# ---- the queue ----


def queue_with_range(*arguments, **options) -> RerollQueue:
    """A queue that has seen rewards from 0 to 1."""
    queue = RerollQueue(*arguments, **options)
    queue.push([group("seen", [0.0, 1.0])])
    return queue


def test_prompts_that_failed_come_back_in_order():
    queue = queue_with_range(2)
    groups = [group("a", [0.0, 0.0]), group("b", [0.0, 1.0]), group("c", [0.0, None]), group("d", [1.0, 1.0])]
    assert queue.push([*groups, group("e", [None, None])]) == 3
    assert len(queue) == 3 and queue.metrics() == {"reroll/size": 3.0}
    assert queue.pop(0.0, most=0) == [] and queue.pop(0.0, most=1) == ["a"]
    assert queue.pop(0.0, most=9) == ["c", "e"] and queue.pop(0.0) == []


def test_max_groups_0_is_off():
    queue = RerollQueue(0)
    assert queue.push([group("a", [0.0, 0.0]), group("b", [0.0, 1.0])]) == 0
    assert queue.pop(1.0) == [] and len(queue) == 0


def test_nothing_comes_back_before_the_start():
    """The progress may come from steps or from epochs."""
    queue = queue_with_range(1, start=0.5)
    queue.push([group("a", [0.0, 0.0]), group("b", [0.0, 0.0])])
    assert queue.pop(49 / 100) == [] and queue.pop(0.5) == ["a"] and queue.pop(3.7 / 4) == ["b"]


def test_a_prompt_is_tried_again_at_most_attempts_times():
    queue = queue_with_range(4, attempts=2)
    failed = [group("a", [0.0, 0.0])]
    assert queue.push(failed) == 1 and queue.push(failed) == 0  # it waits already
    assert queue.pop(1) == ["a"]
    assert queue.push(failed) == 1 and queue.pop(1) == ["a"]
    assert queue.push(failed) == 0 and queue.pop(1) == []


def test_failure_is_relative_to_what_was_seen():
    """While all rewards are equal nothing is known to have failed; and what was lowest then may not be now."""
    queue = RerollQueue(4)
    queue.push([group("ones", [1.0, 1.0])])
    assert queue.pop(1) == []
    queue.push([group("zeros", [0.0, 0.0]), group("ones too", [1.0, 1.0])])
    assert queue.pop(1) == ["zeros"] and len(queue) == 0


def test_a_correctness_reward_decides_whatever_the_format_gives():
    def named(id, right, reward):
        return group(id, [reward, reward + 0.1], right=right, format=reward)

    queue = RerollQueue(4, outcome=lambda rollout: rollout.rewards.get("right"))
    assert queue.push([named("a", 0.0, 0.5), named("b", 1.0, 0.0), named("c", 0.0, 0.9)]) == 2
    assert queue.pop(1) == ["a", "c"]


def test_what_was_handed_out_waits_again_after_a_restart():
    queue = queue_with_range(2, attempts=1)
    queue.push([group(id, [0.0, 0.0]) for id in "abc"])
    assert queue.pop(1) == ["a", "b"]
    queue.push([group("a", [0.0, 1.0])])  # trained; b is on its way
    state = through_json(queue.state_dict())
    restored = RerollQueue(9, attempts=1)
    restored.load_state_dict(state)
    assert restored.state_dict() == state
    assert restored.pop(1) == ["b", "c"]
    assert restored.push([group(id, [0.0, 0.0]) for id in "abc"]) == 0  # each had its attempt


def test_the_state_of_an_unused_queue():
    queue = RerollQueue(3)
    state = through_json(queue.state_dict())
    assert state == {"waiting": [], "tries": {}, "range": None}
    queue.load_state_dict(state)
    assert queue.push([group("a", [0.0, 0.0]), group("b", [1.0, 0.0])]) == 1


@pytest.mark.parametrize(
    "state", [{}, {"waiting": 1, "tries": {}, "range": None}, {"waiting": [], "tries": [], "range": 1}]
)
def test_what_is_not_a_queue_is_refused(state):
    with raises(DataError):
        RerollQueue(1).load_state_dict(state)
