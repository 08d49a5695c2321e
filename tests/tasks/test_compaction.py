"""Episodes whose harness compacts its history: every sampled token is trained once, summaries too, as it was seen."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI

from groupwise.algo.loss import resolve_loss
from groupwise.algo.prefixes import tree_of
from groupwise.algo.samples import samples_of
from groupwise.model.load import load_model
from groupwise.train.learner import Learner
from groupwise.types import RolloutGroup, Sample, SamplingParams

SYSTEM = {"role": "system", "content": "You add numbers. Reply with just the number."}
TURNS, AT, KEPT = 20, (4, 9, 14), 2  # compacted after these turns; what remains is a summary and the last two


def question(turn: int) -> dict[str, Any]:
    return {"role": "user", "content": f"What is {turn} + {turn % 7}?"}


async def compacting(case: Any, base_url: str, api_key: str, model: str) -> float:
    """Twenty turns; three times the policy sums up what was said, which then stands in the place of it."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

        async def answered(messages: list[Any]) -> dict[str, Any]:
            answer = await client.chat.completions.create(model=model, messages=messages)
            return {"role": "assistant", "content": answer.choices[0].message.content or ""}

        messages: list[Any] = [SYSTEM]
        for turn in range(TURNS):
            messages.append(question(turn))
            messages.append(await answered(messages))
            if turn in AT:
                summary = await answered([*messages, {"role": "user", "content": "Sum up what was said."}])
                said = {"role": "user", "content": f"Until now: {summary['content']}"}
                messages = [SYSTEM, said, *messages[-2 * KEPT :]]
        return 1.0


@pytest.fixture
def group(play_group) -> RolloutGroup:
    takes = ("case", "base_url", "api_key", "model")
    return play_group(compacting, n=2, takes=takes, max_turns=TURNS + len(AT), params=SamplingParams(max_tokens=10))


def trained(samples: list[Sample]) -> Counter[tuple[tuple[int, ...], int]]:
    """Each trained token with all that stands before it."""
    return Counter(
        ((*each.prompt_ids, *each.completion_ids[:t]), each.completion_ids[t])
        for each in samples
        for t, on in enumerate(each.mask)
        if on
    )


def test_each_token_that_was_sampled_is_trained_once_where_it_was_sampled(group, recorder):
    assert [(each.error, each.stop, len(each.turns)) for each in group.rollouts] == [(None, "done", 23)] * 2
    rollouts = [replace(each, advantage=1.0) for each in group.rollouts]
    samples = samples_of([replace(group, rollouts=tuple(rollouts))])
    assert len(samples) == 2 * (1 + len(AT)) and [each.info["forks"] for each in rollouts] == [3.0] * 2
    sampled = Counter(
        ((*request.prompt_ids, *said.token_ids[:t]), token)
        for request, said in recorder.turns
        for t, token in enumerate(said.token_ids)
    )
    assert trained(samples) == sampled and sum(sampled.values()) == sum(sum(each.mask) for each in samples)
    said = {
        logprob for each in samples for logprob, on in zip(each.behaviour_logprobs or (), each.mask, strict=True) if on
    }
    assert said == {logprob for _, completion in recorder.turns for logprob in completion.logprobs}


@pytest.mark.long
def test_what_is_shown_again_is_context_and_the_summary_is_trained(group, starter):
    (rollout, _) = group.rollouts
    samples = samples_of([RolloutGroup(prompt=group.prompt, rollouts=(replace(rollout, advantage=1.0),))])
    for number, each in enumerate(samples):
        shown = starter.tokenizer.decode(list(each.prompt_ids))
        assert ("Until now" in shown) is (number > 0) and each.continues is (number > 0)
        assert shown.count("<|im_start|>assistant") == 1 + (KEPT if number else 0)  # answers again, not trained
        asks = "Sum up what was said." in starter.tokenizer.decode(list(each.completion_ids))
        assert asks is (number < len(AT)) and each.mask[-1] == 1  # the last turn of a segment is its summary
    once = sum(line.own for line in tree_of(samples, range(len(samples))))
    assert once < sum(len(turn.prompt_ids) + len(turn.completion.token_ids) for turn in rollout.turns) / 3


@pytest.mark.slow
def test_the_gradient_is_that_of_a_trainer_with_one_sequence_for_each_request(group):
    """By the model's own forward; advantages differ between the episodes. In float64, but for norms and rotations of
    positions, which the model's own code computes in float32 whatever its weights are."""
    base = load_model("starter", device="cpu", dtype="float64")
    learner = Learner(base, lora=None, micro_tokens=512)
    rollouts = [replace(each, advantage=value) for each, value in zip(group.rollouts, (1.0, -0.5), strict=True)]
    samples = samples_of([replace(group, rollouts=tuple(rollouts))])
    learner.forward_backward(samples, resolve_loss("reinforce"))
    ours = [parameter.grad.clone() for parameter in learner.parameters if parameter.grad is not None]
    learner.zero_grad()
    tokens = sum(len(turn.completion.token_ids) for each in rollouts for turn in each.turns)
    for rollout in rollouts:
        assert rollout.advantage is not None
        for turn in rollout.turns:
            said = torch.tensor(turn.completion.token_ids)
            ids = torch.tensor([[*turn.prompt_ids, *turn.completion.token_ids]])
            logprobs = base.model(ids).logits[0, len(turn.prompt_ids) - 1 : -1].log_softmax(-1)
            (-rollout.advantage * logprobs.gather(-1, said[:, None]).sum() / tokens).backward()
    naive = [parameter.grad for parameter in learner.parameters if parameter.grad is not None]
    assert len(ours) == len(naive) > 10
    for mine, theirs in zip(ours, naive, strict=True):
        assert (mine - theirs).norm() <= 1e-6 * theirs.norm()
