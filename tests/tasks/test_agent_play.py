"""Agents that use the `openai` package and nothing of ours: exactly what was sampled for them is trained."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import threading
import time
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from episodes import sampled, trained
from groupwise.algo.credit import with_advantages
from groupwise.algo.samples import Segment, samples_of, segments_of
from groupwise.config.algo import CreditConfig
from groupwise.config.run import EnvConfig
from groupwise.errors import EnvError, GroupwiseError
from groupwise.rewards.base import score
from groupwise.rewards.call import RewardFunction
from groupwise.run.config_file import load_config
from groupwise.run.loop import run_loop
from groupwise.store.rollouts import group_from_json, group_to_json
from groupwise.store.tracking import read_metrics
from groupwise.tasks.agent_session import AgentSession, LimitError
from groupwise.tasks.openai import AgentChatRequest, AgentReply
from groupwise.tasks.starter.tasks import CALCULATOR, calculate
from groupwise.types import Completion, FinishReason, PolicyVersion, Rollout, SamplingParams
from peers import peer
from starter_run import starter_run
from wording import raises

anthropic = peer("anthropic")

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
ASKED = {"role": "user", "content": "Use the calculator: 47 * 12"}


def segments(rollout: Rollout) -> list[Segment]:
    return segments_of(rollout.turns)


async def use_calculator(case: dict[str, Any], base_url: str, api_key: str, model: str) -> float:
    """The usual loop of a tool agent."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list[Any] = [ASKED]
        while True:
            answer = await client.chat.completions.create(
                model=model,
                messages=messages,
                tools=[CALCULATOR],  # type: ignore[list-item]
            )
            message = answer.choices[0].message
            messages.append(message)  # as the package's own examples do
            if not message.tool_calls:
                return float("564" in (message.content or ""))
            for call in message.tool_calls:
                result = calculate(json.loads(call.function.arguments)["expression"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


FOUR = ("case", "base_url", "api_key", "model")


# ---- what is trained ----
def test_a_tool_agent_is_one_segment_of_what_was_sampled(play_group, recorder, starter):
    group = play_group(use_calculator, takes=FOUR, params=GREEDY)
    (rollout,) = group.rollouts
    assert (rollout.reward, rollout.error, rollout.stop) == (1.0, None, "done")
    (first, second), (only,) = rollout.turns, segments(rollout)
    between = second.prompt_ids[len(first.prompt_ids) + len(first.completion.token_ids) :]
    assert only.prompt_ids == first.prompt_ids
    assert only.completion_ids == first.completion.token_ids + between + second.completion.token_ids
    lengths = (len(first.completion.token_ids), len(between), len(second.completion.token_ids))
    assert only.mask == (1,) * lengths[0] + (0,) * lengths[1] + (1,) * lengths[2]
    assert trained(rollout) == sampled(recorder)
    (conversation,) = {request.conversation for request, _ in recorder.turns}  # one server of several has both turns
    assert conversation.endswith("/0")
    assert "564" in starter.tokenizer.decode(list(between))
    assert rollout.info["tool_calls"] == 1 and rollout.info["forks"] == 0
    assert [message["role"] for message in rollout.messages] == ["assistant", "tool", "assistant"]
    assert group.prompt.messages == (ASKED,) and group.prompt.token_ids == first.prompt_ids
    assert group.prompt.tools == (CALCULATOR,)


def test_the_policy_is_not_shown_strict_to_which_its_calls_are_kept(play_group, recorder):
    """Libraries send `strict` with every tool; a prompt says nothing of it."""
    strict = {**CALCULATOR, "function": {**CALCULATOR["function"], "strict": True}}

    async def agent(case, base_url, api_key, model):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            for tools in ([strict], [CALCULATOR]):
                await client.chat.completions.create(model=model, messages=[ASKED], tools=tools)
        return 1.0

    group = play_group(agent, takes=FOUR)
    (first, _), (second, _) = recorder.turns
    assert first.prompt_ids == second.prompt_ids and group.rollouts[0].info["ignored_parameters"] == 0
    assert first.params.grammar is not None and second.params.grammar is None


def test_parallel_episodes_do_not_mix(play_group, recorder):
    async def agent(case, base_url, api_key, model, seed):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            said = []
            for turn in range(3):
                messages: list[Any] = [{"role": "user", "content": f"What is {turn} + {len(said)}?"}]
                answer = await client.chat.completions.create(model=model, messages=messages)
                said.append(answer.choices[0].message.content)
        return {"reward": 0.5, "metrics": {"seed": seed, "words": "left out"}}

    group = play_group(agent, n=8, max_turns=3)
    assert [rollout.reward for rollout in group.rollouts] == [0.5] * 8
    assert all(len(rollout.turns) == 3 and rollout.info["seed"] == 5 for rollout in group.rollouts)
    assert sorted(chain.from_iterable(map(trained, group.rollouts))) == sampled(recorder)
    texts = {tuple(turn.completion.token_ids for turn in rollout.turns) for rollout in group.rollouts}
    assert len(texts) > 1  # each episode has draws of its own


def test_the_same_seed_says_the_same(play_group):
    def ids() -> list[tuple[int, ...]]:
        group = play_group(use_calculator, n=2, takes=FOUR)
        return [turn.completion.token_ids for rollout in group.rollouts for turn in rollout.turns]

    assert ids() == ids()


def test_agents_that_are_not_async_have_threads_and_stream(play_group, recorder):
    threads = set()

    def agent(case, base_url, api_key, model):
        threads.add(threading.get_ident())
        client = OpenAI(base_url=base_url, api_key=api_key)
        messages: list[Any] = [{"role": "user", "content": case["question"]}]
        for _ in range(2):
            content, usage = "", None
            stream = client.chat.completions.create(
                model=model, messages=messages, stream=True, stream_options={"include_usage": True}
            )
            for chunk in stream:
                content += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                usage = chunk.usage or usage
            assert usage is not None and usage.completion_tokens > 0
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "Again."}]
        client.close()
        return 1

    group = play_group(agent, n=4, takes=FOUR)
    assert [rollout.error for rollout in group.rollouts] == [None] * 4
    assert len(threads) == 4 and threading.get_ident() not in threads
    assert all(len(segments(rollout)) == 1 for rollout in group.rollouts)  # what was streamed was recognised
    assert sorted(chain.from_iterable(map(trained, group.rollouts))) == sampled(recorder)


def test_episodes_are_under_way_together(play_group):
    """None goes on before all of them have spoken: what one waits for holds up no other."""
    together = threading.Barrier(4, timeout=120)

    def agent(base_url, api_key):
        with OpenAI(base_url=base_url, api_key=api_key) as client:
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "1 + 1"}])
            together.wait()
        return 1.0

    group = play_group(agent, n=4, takes=("base_url", "api_key"))
    assert [rollout.error for rollout in group.rollouts] == [None] * 4


def test_rewritten_history_is_another_segment(play_group, recorder):
    async def agent(case, base_url, api_key, model):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            ask = client.chat.completions.create
            messages: list[Any] = [{"role": "user", "content": "What is 3 + 4?"}]
            messages.append((await ask(model=model, messages=messages)).choices[0].message)
            messages.append({"role": "user", "content": "And 5 + 6?"})
            messages.append((await ask(model=model, messages=messages)).choices[0].message)
            short: list[Any] = [{"role": "user", "content": "It was 7, then 11."}, messages[-1]]
            await ask(model=model, messages=[*short, {"role": "user", "content": "And 1 + 1?"}])
        return 1.0

    (rollout,) = play_group(agent, takes=FOUR).rollouts
    assert len(segments(rollout)) == 2 and rollout.info["forks"] == 1
    assert trained(rollout) == sampled(recorder)
    assert rollout.messages[-1]["content"] == rollout.turns[-1].completion.text


def test_attempts_in_parallel_and_a_sub_agent(play_group, recorder):
    """Three attempts go on from one answer while a sub-agent talks elsewhere in two turns."""

    async def agent(case, base_url, api_key, model):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            ask = client.chat.completions.create
            messages: list[Any] = [{"role": "user", "content": "What is 30 + 4?"}]
            messages.append((await ask(model=model, messages=messages)).choices[0].message)
            messages.append({"role": "user", "content": "And what is 12 + 13?"})

            async def sub_agent() -> None:
                own: list[Any] = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Name?"}]
                own.append((await ask(model=model, messages=own)).choices[0].message)
                await ask(model=model, messages=[*own, {"role": "user", "content": "Sure?"}])

            await asyncio.gather(*(ask(model=model, messages=messages) for _ in range(3)), sub_agent())
        return 1.0

    (rollout,) = play_group(agent, takes=FOUR).rollouts
    assert len(rollout.turns) == 6
    first, *attempts = (turn for turn in rollout.turns if turn.prompt_ids[:6] == rollout.turns[0].prompt_ids[:6])
    joined = first.prompt_ids + first.completion.token_ids
    assert sum(turn.prompt_ids[: len(joined)] == joined for turn in attempts) == 3  # none was encoded again
    assert len(segments(rollout)) == 4  # the first with an attempt, two attempts, the sub-agent
    assert trained(rollout) == sampled(recorder)  # and so every token once


def test_only_the_first_turn_is_trained_where_the_configuration_says_so(play_group, recorder):
    (rollout,) = play_group(use_calculator, takes=FOUR, params=GREEDY, train_turns="first").rollouts
    assert [turn.trained for turn in rollout.turns] == [True, False]
    (only,) = segments(rollout)
    assert only.completion_ids == recorder.turns[0][1].token_ids and set(only.mask) == {1}


def test_reward_functions_score_what_the_agent_leaves_to_them(play_group):
    async def agent(case, base_url, api_key, model):
        await use_calculator(case, base_url, api_key, model)

    def last(completions, question, **columns):
        return [float("564" in completion[-1]["content"]) for completion in completions]

    group = play_group(agent, takes=FOUR, params=GREEDY, scored=True)
    assert group.rollouts[0].reward is None and group.rollouts[0].error is None
    (scored,) = asyncio.run(score([group], [RewardFunction(name="last", function=last, weight=2.0, args={})]))
    assert scored.rollouts[0].reward == 2.0
    (alone,) = play_group(agent, takes=FOUR, params=GREEDY).rollouts
    assert alone.reward is None and "returned no reward" in str(alone.error)


def test_what_is_trained_has_the_advantage_of_its_episode(play_group, recorder):
    group = play_group(use_calculator, n=2, takes=FOUR)
    rollouts = tuple(replace(rollout, advantage=float(i)) for i, rollout in enumerate(group.rollouts))
    samples = samples_of([replace(group, rollouts=rollouts)])
    tokens = sum(len(said.token_ids) for _, said in recorder.turns)
    assert sum(sum(sample.mask) for sample in samples) == tokens
    assert {sample.advantage for sample in samples} == {0.0, 1.0}


# ---- rewards of turns ----
async def asked_twice(client: AsyncOpenAI, model: str, between: Any = lambda answer: None) -> list[Any]:
    """Two turns of one conversation; `between` is told of each answer before the next request."""
    messages: list[Any] = [{"role": "user", "content": "What is 30 + 4?"}]
    answers = []
    for _ in range(2):
        answers.append(await client.chat.completions.create(model=model, messages=messages))
        messages += [answers[-1].choices[0].message, {"role": "user", "content": "Sure?"}]
        between(answers[-1])
    return answers


def test_an_agent_gives_turns_rewards_at_the_point_reached(play_group):
    """To what was answered last, to an answer by its id, several to one turn; what is returned is added."""

    async def agent(client, model, episode):
        values = iter([0.25, 0.5])
        first, _ = await asked_twice(client, model, lambda _: episode.reward(next(values)))
        episode.reward(1, first.id)
        return 4.0

    takes = ("client", "model", "episode")
    (rollout,) = play_group(agent, takes=takes).rollouts
    assert [turn.reward for turn in rollout.turns] == [1.25, 0.5] and rollout.reward == 5.75

    async def nothing_returned(client, model, episode):
        await asked_twice(client, model, lambda _: episode.reward(0.5))

    (rollout,) = play_group(nothing_returned, takes=takes).rollouts
    assert (rollout.reward, rollout.error, rollout.rewards) == (1.0, None, {"env": 1.0})


def test_an_agent_returns_the_rewards_of_its_turns(play_group):
    async def agent(client, model):
        await asked_twice(client, model)
        return {"reward": 1.0, "turn_rewards": [0.5, None], "metrics": {"hits": 2}}

    (rollout,) = play_group(agent, takes=("client", "model")).rollouts
    assert [turn.reward for turn in rollout.turns] == [0.5, None]
    assert (rollout.reward, rollout.info["hits"]) == (1.5, 2.0)


def test_rewards_and_states_reach_an_answer_in_every_dialect(play_group):
    """Anthropic's and the Responses' ids name turns too, streamed or not; a state is that of the next answer only."""

    def agent(base_url, api_key, model, episode):
        told = {"model": model, "max_tokens": 8}
        with anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key) as client:
            episode.state("first page")
            message = client.messages.create(messages=[ASKED], **told)
            with client.messages.stream(messages=[ASKED], **told) as stream:
                streamed = stream.get_final_message()
        with OpenAI(base_url=base_url, api_key=api_key) as client:
            episode.state("last page")
            response = client.responses.create(model=model, input="What is 30 + 4?", max_output_tokens=8)
        for value, answer in enumerate((message, streamed, response), start=1):
            episode.reward(value, answer.id)
        return 0.0

    (rollout,) = play_group(agent, takes=("base_url", "api_key", "model", "episode")).rollouts
    assert rollout.error is None and rollout.reward == 6.0
    assert [turn.reward for turn in rollout.turns] == [1.0, 2.0, 3.0]
    assert [turn.state for turn in rollout.turns] == ["first page", None, "last page"]


def test_turns_of_several_conversations_are_credited_in_the_order_of_time(play_group):
    """A sub-agent speaks between two turns; what the last turn was given is no later turn's of the sub-agent."""

    async def agent(client, model, episode):
        ask = client.chat.completions.create
        messages: list[Any] = [{"role": "user", "content": "What is 30 + 4?"}]
        messages.append((await ask(model=model, messages=messages)).choices[0].message)
        await ask(model=model, messages=[{"role": "user", "content": "Name?"}])  # the sub-agent
        await ask(model=model, messages=[*messages, {"role": "user", "content": "Sure?"}])
        episode.reward(worth.pop())

    worth = [0.0, 4.0]
    group = play_group(agent, takes=("client", "model", "episode"), n=2, concurrency=1)
    for rollout in group.rollouts:
        assert [turn.taken for turn in rollout.turns] == [0, 2, 1]  # by conversation: first, last, sub-agent
        assert rollout.turns[1].reward is not None
    spec = CreditConfig(credit="turn", advantage="mean", turn_discount=0.5)
    (weighed,) = with_advantages([group], spec)
    signs = [1.0 if rollout.reward else -1.0 for rollout in group.rollouts]
    for sign, rollout in zip(signs, weighed.rollouts, strict=True):
        assert [turn.advantage for turn in rollout.turns] == [sign * 0.5, sign * 2.0, sign * 1.0]
    kept = group_from_json(group_to_json(weighed))
    assert [rollout.turns for rollout in kept.rollouts] == [rollout.turns for rollout in weighed.rollouts]


@pytest.mark.parametrize("credit", ["turn", "gigpo"])
def test_the_credit_of_an_agents_turns_is_that_of_the_formulas(play_group, credit):
    """Against numpy, written down from the equations: returns of turns of one number, or of turns that heard the
    same."""
    given = iter([(0.0, 1.0), (0.5, 0.0), (2.0, -1.0)])

    async def agent(client, model, episode):
        mine = iter(next(given))
        await asked_twice(client, model, lambda _: episode.reward(next(mine)))
        return 1.0

    group = play_group(agent, takes=("client", "model", "episode"), n=3)
    spec = CreditConfig(credit=credit, advantage="mean", turn_discount=0.5)
    (weighed,) = with_advantages([group], spec)
    rewards = np.array([[turn.reward for turn in rollout.turns] for rollout in group.rollouts], dtype=float)
    rewards[:, 1] += 1.0  # what was returned is a part of the last turn's
    returns = np.stack([rewards[:, 0] + 0.5 * rewards[:, 1], rewards[:, 1]], axis=1)
    expected = returns - returns.mean(axis=0)  # turns of one number, which here heard the same too
    if credit == "gigpo":
        totals = rewards.sum(axis=1)
        expected = expected + (totals - totals.mean())[:, None]
    found = [[turn.advantage for turn in rollout.turns] for rollout in weighed.rollouts]
    assert found == pytest.approx(expected)


def test_what_is_no_reward_of_a_turn_fails_the_episode_clearly(play_group):
    takes = ("client", "model", "episode")

    async def early(client, model, episode):
        episode.reward(1.0)

    async def unknown(client, model, episode):
        await asked_twice(client, model)
        episode.reward(1.0, "chatcmpl-9")

    async def odd(client, model, episode):
        await asked_twice(client, model)
        episode.reward(float("nan"))

    async def nameless(client, model, episode):
        episode.state(3)

    async def too_few(client, model, episode):
        await asked_twice(client, model)
        return {"reward": 1.0, "turn_rewards": [1.0]}

    for agent, said in (
        (early, "there is no turn to be rewarded; answers: none so far"),
        (unknown, "there is no answer 'chatcmpl-9' in this episode; answers: 'chatcmpl-0-1', 'chatcmpl-0-2'"),
        (odd, "agent gave a turn nan; a reward is a finite number"),
        (nameless, "agent named a state 3; it is a text"),
        (too_few, "agent returned 1 turn_rewards, and the policy answered 2 times"),
    ):
        (rollout,) = play_group(agent, takes=takes).rollouts
        assert rollout.reward is None and said in str(rollout.error)


def test_an_agent_that_is_at_a_limit_keeps_what_its_turns_were_given(play_group):
    async def agent(client, model, episode):
        await asked_twice(client, model, lambda _: episode.reward(0.25))

    (rollout,) = play_group(agent, takes=("client", "model", "episode"), max_turns=1).rollouts
    assert (rollout.stop, rollout.reward, rollout.error) == ("max_turns", 0.25, None)


# ---- limits ----
def test_max_turns_is_a_403_and_the_stop(play_group, recorder):
    seen: list[openai.APIStatusError] = []

    async def agent(case, base_url, api_key, model):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            for turn in range(9):
                try:
                    await client.chat.completions.create(model=model, messages=[{"role": "user", "content": str(turn)}])
                except openai.APIStatusError as error:
                    seen.append(error)
                    if case["raises"]:
                        raise
                    return 0.25
        return 1.0

    (caught,) = play_group(agent, takes=FOUR, max_turns=3, case={"raises": False}).rollouts
    (raised,) = play_group(agent, takes=FOUR, max_turns=3, case={"raises": True}).rollouts
    assert [(r.stop, r.reward, r.error, len(r.turns)) for r in (caught, raised)] == [
        ("max_turns", 0.25, None, 3),
        ("max_turns", 0.0, None, 3),
    ]
    assert isinstance(seen[0], openai.PermissionDeniedError) and seen[0].code == "max_turns"
    assert len(recorder.turns) == 6 and len(seen) == 2  # refused at once, and not repeated by the client


@pytest.mark.parametrize(
    ("options", "stop"),
    [({"max_tokens": 5}, "max_tokens"), ({"max_tool_calls": 1, "max_turns": 50}, "max_tool_calls"), ({}, "context")],
)
def test_the_other_limits(play_group, starter, options, stop):
    async def agent(case, base_url, api_key, model):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            while True:
                messages: list[Any] = [ASKED]
                await client.chat.completions.create(model=model, messages=messages, tools=[CALCULATOR])  # type: ignore[list-item]
                if case["long"]:
                    messages = [{"role": "user", "content": "9 " * starter.context_length}]
                    await client.chat.completions.create(model=model, messages=messages)

    (rollout,) = play_group(agent, takes=FOUR, params=GREEDY, case={"long": stop == "context"}, **options).rollouts
    assert (rollout.stop, rollout.reward, rollout.error) == (stop, 0.0, None)
    if stop == "max_tokens":
        assert sum(len(turn.completion.token_ids) for turn in rollout.turns) == 5


def test_a_conversation_that_was_too_long_may_be_shortened(play_group, starter):
    async def agent(case, base_url, api_key, model):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            messages: list[Any] = [{"role": "user", "content": "9 " * starter.context_length}]
            with raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model=model, messages=messages)
            assert caught.value.code == "context_length_exceeded"
            await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "9"}])
        return 1.0

    (rollout,) = play_group(agent, takes=FOUR).rollouts
    assert (rollout.stop, rollout.reward, rollout.error, len(rollout.turns)) == ("done", 1.0, None, 1)


def test_a_template_that_takes_one_call_a_message_ends_an_episode_with_two(play_group, starter):
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call>'
    tokenizer = copy.deepcopy(starter.tokenizer)
    refuse = "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
    refuse += "{{ raise_exception('one call a message') }}{% endif %}{% endfor %}"
    tokenizer.chat_template = refuse + str(tokenizer.chat_template)

    class Scripted:
        """Always the same two calls."""

        context_length = starter.context_length

        async def sample(self, requests):
            ids = (*tokenizer.encode(call + call, add_special_tokens=False), tokenizer.eos_token_id)
            logprobs = (-1.0,) * len(ids)
            return [[Completion(token_ids=ids, logprobs=logprobs, text=call + call, finish_reason=FinishReason.STOP)]]

    options = {"takes": FOUR, "sampler": Scripted(), "tokenizer": tokenizer}
    (rollout,) = play_group(use_calculator, **options).rollouts
    assert (rollout.stop, rollout.reward, rollout.error, len(rollout.turns)) == ("template", 0.0, None, 1)


def test_a_policy_that_speaks_too_long_has_failed_and_an_agent_that_hangs_is_excluded(play_group, starter_engine):
    class Slow:
        context_length = starter_engine.context_length

        async def sample(self, requests):
            if len(requests[0].prompt_ids) > 30:
                await asyncio.sleep(60)
            return await starter_engine.sample(requests)

    async def agent(case, base_url, api_key, model):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "1 + 1"}])
            if case["hangs"]:
                await asyncio.sleep(60)
            await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "1 + 1" * 40}])

    options = {"takes": FOUR, "sampler": Slow(), "timeout_s": 2.0}
    (spoke,) = play_group(agent, case={"hangs": False}, **options).rollouts
    (hung,) = play_group(agent, case={"hangs": True}, **options).rollouts
    assert (spoke.stop, spoke.reward, spoke.error, len(spoke.turns)) == ("timeout", 0.0, None, 1)
    assert hung.reward is None and "had not returned after 2 s" in str(hung.error) and len(hung.turns) == 1
    assert (spoke.error_kind, hung.error_kind) == (None, "timeout")


# ---- agents that fail ----
def test_agents_that_fail_are_excluded_with_their_reason(play_group):
    def ask(base_url: str, api_key: str) -> None:
        with OpenAI(base_url=base_url, api_key=api_key) as client:
            client.chat.completions.create(model="any", messages=[{"role": "user", "content": "1 + 1"}])

    def raises(base_url, api_key):
        ask(base_url, api_key)
        raise ValueError("no luck")

    async def exits(base_url, api_key):
        raise SystemExit(3)

    async def cancels(base_url, api_key):
        raise asyncio.CancelledError

    def silent(base_url, api_key):
        return 1.0

    def hangs(base_url, api_key):
        time.sleep(3)

    def nan(base_url, api_key):
        ask(base_url, api_key)
        return float("nan")

    def words(base_url, api_key):
        ask(base_url, api_key)
        return "good"

    def other(base_url, api_key):
        ask(base_url, api_key)
        return {"score": 1.0}

    for agent, reason, turns in (
        (raises, "agent raised ValueError: no luck", 1),
        (exits, "agent raised SystemExit: 3", 0),
        (cancels, "agent cancelled itself", 0),
        (silent, "agent never asked the policy", 0),
        (hangs, "agent had not returned after 0.4 s", 0),
        (nan, "agent returned nan", 1),
        (words, "agent returned 'good'", 1),
        (other, "no reward", 1),
    ):
        timeout_s = 0.4 if agent is hangs else 20.0
        (rollout,) = play_group(agent, takes=("base_url", "api_key"), timeout_s=timeout_s).rollouts
        assert rollout.reward is None and reason in str(rollout.error), agent
        assert (rollout.stop, len(rollout.turns), rollout.info["failed"]) == ("error", turns, 1.0)


def test_what_a_failed_episode_is_worth_is_configured(play_group):
    async def agent(case, base_url, api_key, model):
        await use_calculator(case, base_url, api_key, model)
        raise RuntimeError("late")

    (zero,) = play_group(agent, takes=FOUR, on_error="zero").rollouts
    assert (zero.reward, zero.error) == (0.0, None)
    with raises(EnvError, kind="exception"):
        play_group(agent, takes=FOUR, on_error="stop")


def test_one_bad_episode_leaves_the_others(play_group):
    count = iter(range(100))

    async def agent(case, base_url, api_key, model):
        if next(count) == 1:
            raise RuntimeError("only this one")
        return await use_calculator(case, base_url, api_key, model)

    group = play_group(agent, n=4, takes=FOUR, params=GREEDY)
    assert [rollout.error for rollout in group.rollouts] == [
        None,
        "agent raised RuntimeError: only this one",
        None,
        None,
    ]
    assert [rollout.reward for rollout in group.rollouts] == [1.0, None, 1.0, 1.0]


def test_an_engine_that_fails_ends_the_run(play_group, starter_engine):
    class Broken:
        context_length = starter_engine.context_length

        async def sample(self, requests):
            raise GroupwiseError("out of memory")

    async def agent(case, base_url, api_key, model):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            try:
                await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "1"}])
            except openai.APIError:
                return 1.0

    with raises(GroupwiseError):
        play_group(agent, takes=FOUR, sampler=Broken())


class Held:
    """The engine, whose first answer waits until it is let go of."""

    def __init__(self, engine):
        self.engine, self.context_length, self.asked, self.given_up = engine, engine.context_length, 0, 0
        self.begun, self.released = threading.Event(), threading.Event()

    async def sample(self, requests):
        self.asked += 1
        if self.asked == 1:
            self.begun.set()
            try:
                while not self.released.is_set():
                    await asyncio.sleep(0)
            except asyncio.CancelledError:
                self.given_up += 1
                raise
        return await self.engine.sample(requests)


def test_a_request_that_the_agent_gave_up_is_no_turn(play_group, starter_engine):
    held = Held(starter_engine)

    async def agent(case, base_url, api_key, model):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            first, second = (partial(client.chat.completions.create, model=model, messages=[ASKED]) for _ in range(2))
            given_up = asyncio.ensure_future(first())
            await asyncio.to_thread(held.begun.wait)
            given_up.cancel()
            await second()
        return 1.0

    (rollout,) = play_group(agent, takes=FOUR, sampler=held, max_turns=1).rollouts
    assert (rollout.reward, len(rollout.turns), held.given_up) == (1.0, 1, 1)


@pytest.mark.parametrize("ending", ["given up", "answered", "over"])
def test_a_request_waits_for_a_last_turn_that_may_still_be_given_up(starter, starter_engine, ending):
    """A client that goes away is seen to be gone only after what it asks next has arrived, perhaps."""
    held, asked = Held(starter_engine), AgentChatRequest.model_validate({"messages": [ASKED]})
    session = AgentSession(
        sampler=held,
        tokenizer=starter.tokenizer,
        config=EnvConfig(agent="tests:agent", max_turns=1),
        params=GREEDY,
        version=PolicyVersion.base(),
        seed=5,
        number=0,
    )

    async def ask_twice():
        first, second = asyncio.ensure_future(session.answer(asked)), asyncio.ensure_future(session.answer(asked))
        while not held.begun.is_set():
            await asyncio.sleep(0)
        assert not second.done() and held.asked == 1
        if ending == "answered":
            held.released.set()
        elif ending == "given up":
            first.cancel()
        else:
            await session.end()
        return await asyncio.gather(first, second, return_exceptions=True)

    first, second = asyncio.run(ask_twice())
    if ending == "given up":
        assert isinstance(first, asyncio.CancelledError) and isinstance(second, AgentReply) and session.stop is None
    elif ending == "answered":
        assert isinstance(first, AgentReply) and isinstance(second, LimitError)
        assert second.code == session.stop == "max_turns"
    else:
        assert [error.code for error in (first, second)] == ["episode_over"] * 2 and session.stop is None
    assert held.asked == 1 + (ending == "given up")


def test_the_key_ends_with_the_episode(play_group):
    kept: dict[str, Any] = {}

    async def agent(case, base_url, api_key, model):
        kept.update(base_url=base_url, api_key=api_key)
        reward = await use_calculator(case, base_url, api_key, model)
        return reward

    play_group(agent, takes=FOUR)
    with OpenAI(**kept) as late, raises(openai.AuthenticationError):
        late.models.list()


def test_versions_are_those_of_the_run(play_group, recorder):
    play_group(use_calculator, takes=FOUR)
    assert {request.version for request, _ in recorder.turns} == {PolicyVersion.base()}


# ---- a run ----
AGENT = """
import json
from openai import OpenAI
from groupwise.tasks.agent_session import AgentSession, LimitError
from groupwise.tasks.openai import AgentChatRequest, AgentReply
from groupwise.tasks.starter.tasks import CALCULATOR, calculate


class Calculating:
    def __init__(self, n):
        self.n = n

    def cases(self):
        return [{"a": 10 + i, "b": 3 * i + 2} for i in range(self.n)]

    def __call__(self, case, base_url, api_key, model):
        with OpenAI(base_url=base_url, api_key=api_key) as client:
            messages = [{"role": "user", "content": f"Use the calculator: {case['a']} * {case['b']}"}]
            while True:
                answer = client.chat.completions.create(model=model, messages=messages, tools=[CALCULATOR])
                messages.append(answer.choices[0].message)
                if not messages[-1].tool_calls:
                    return float(str(case["a"] * case["b"]) in (messages[-1].content or ""))
                for call in messages[-1].tool_calls:
                    result = calculate(json.loads(call.function.arguments).get("expression", ""))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
"""


def test_a_run_trains_an_agent(tmp_path):
    (tmp_path / "calculating.py").write_text(AGENT, encoding="utf-8")
    result = starter_run(
        tmp_path,
        name="agent",
        env={"agent": "calculating:Calculating", "args": {"n": 8}, "max_turns": 3},
        rollout={"prompts_per_step": 2, "group_size": 4, "max_tokens": 40},
        train={"steps": 1},
    )
    (row,) = read_metrics(result.run_dir / "metrics.jsonl")
    assert row["env/forks"] == 0 and row["env/failed_frac"] == 0 and row["rollout/turns_mean"] > 1.0
    assert 0 < row["reward/mean"] <= 1 and row["env/stop/done"] > 0.5


CREDITED = """
async def agent(case, client, model, episode):
    messages = [{"role": "user", "content": f"What is {case['a']} + {case['b']}?"}]
    for _ in range(2):
        answer = await client.chat.completions.create(model=model, messages=messages)
        text = answer.choices[0].message.content or ""
        episode.reward(len(text) / 100)
        messages += [answer.choices[0].message, {"role": "user", "content": "Sure?"}]
"""


def test_a_run_trains_the_turns_of_an_agent_by_their_own_rewards(tmp_path):
    (tmp_path / "credited.py").write_text(CREDITED, encoding="utf-8")
    rows = [{"a": a, "b": 30 + a} for a in range(4)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    result = starter_run(
        tmp_path,
        name="credited",
        data={"source": str(tmp_path / "sums.jsonl")},
        env={"agent": "credited:agent"},
        algo={"credit": "turn"},
        rollout={"prompts_per_step": 2, "group_size": 4, "max_tokens": 12},
        train={"steps": 1},
    )
    (row,) = read_metrics(result.run_dir / "metrics.jsonl")
    assert row["turn/compared_share"] == 1.0 and row["turn/signal_share"] > 0 and row["turn/advantage_std"] > 0


# ---- the client that an agent is given ----


def clients_made(monkeypatch) -> list[bool]:
    """Whether each TLS context that is made reads certificates, which takes the time."""
    import ssl

    made: list[bool] = []
    load = ssl.SSLContext.load_verify_locations

    def counted(self, *arguments, **options):
        made.append(True)
        return load(self, *arguments, **options)

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", counted)
    return made


def test_episodes_share_the_connections_of_the_client_that_they_are_given(play_group, recorder, monkeypatch):
    made = clients_made(monkeypatch)

    async def asks(client: AsyncOpenAI, model: str) -> float:
        async with client:  # may be closed: others go on
            answer = await client.chat.completions.create(model=model, messages=[ASKED])  # type: ignore[list-item]
        return float(bool(answer.choices))

    group = play_group(asks, takes=("client", "model"), n=4, params=GREEDY)
    assert [rollout.error for rollout in group.rollouts] == [None] * 4 and not made
    assert sorted(chain.from_iterable(trained(rollout) for rollout in group.rollouts)) == sampled(recorder)


def test_an_agent_that_is_not_async_is_given_the_other_client(play_group, monkeypatch):
    made = clients_made(monkeypatch)

    def asks(client: OpenAI, model: str) -> float:
        with client:
            answer = client.chat.completions.create(model=model, messages=[ASKED])  # type: ignore[list-item]
        return float(bool(answer.choices))

    group = play_group(asks, takes=("client", "model"), n=3, params=GREEDY)
    assert [rollout.error for rollout in group.rollouts] == [None] * 3 and not made


def test_the_documented_agent_runs_on_its_own_columns(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text("utf-8")
    code, settings = re.search(r"```python\n# my_agent.py\n(.*?)```\n\n```yaml\n(.*?)```", page, re.DOTALL).groups()  # type: ignore[union-attr]
    (tmp_path / "my_agent.py").write_text(code, encoding="utf-8")
    rows = [{"question": f"{i}+2?", "answer": str(i + 2)} for i in range(4)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    rest = "model: starter\nrollout: {prompts_per_step: 2, group_size: 2, max_tokens: 8}\ntrain: {steps: 1}\n"
    (tmp_path / "run.yaml").write_text(settings + rest, encoding="utf-8")
    result = run_loop(load_config(tmp_path / "run.yaml", [f"output_dir={tmp_path / 'runs'}"]))
    (row,) = [row for row in read_metrics(result.run_dir / "metrics.jsonl") if "reward/mean" in row]
    assert row["env/failed_frac"] == 0
