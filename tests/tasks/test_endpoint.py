"""The HTTP endpoint as OpenAI's client sees it: what it answers, what it refuses, what it ignores."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from openai import AsyncOpenAI

from groupwise.tasks.endpoint import Endpoint
from groupwise.tasks.starter.tasks import CALCULATOR
from groupwise.types import FinishReason, SamplingParams

USER = {"role": "user", "content": "What is 47 + 138?"}
CALL = {"role": "user", "content": "Use the calculator: 47 * 12"}
GREEDY = SamplingParams(max_tokens=48, temperature=0.0)


@pytest.fixture
def ask(play_group) -> Callable[..., Any]:
    """`ask(messages=..., ...)`: the answer to one request, or what the client raises."""

    def one(params: SamplingParams = GREEDY, raw: bool = False, **body: Any) -> Any:
        found: list[Any] = []

        async def agent(base_url, api_key):
            async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
                try:
                    create = client.chat.completions.with_raw_response.create if raw else client.chat.completions.create
                    answer = await create(**{"model": "any", "messages": [USER], **body})
                    found.append([chunk async for chunk in answer] if body.get("stream") else answer)
                except openai.APIStatusError as error:
                    found.append(error)
            return 0.0

        found.append(play_group(agent, takes=("base_url", "api_key"), params=params).rollouts[0])
        return found

    return one


REFUSED = [
    ({"n": 2}, "n is 2"),
    ({"tool_choice": "required", "tools": [CALCULATOR]}, "the policy decides what it calls"),
    ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
    ({"messages": [USER, {"role": "assistant", "content": "It"}]}, "the last message is the assistant's"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0 of role 'user' has no content"),
    ({"tools": [{"type": "retrieval"}]}, "tools.0"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "content"),
    ({"max_tokens": 0}, "max_tokens"),
]


def test_what_is_refused_is_a_400(play_group):
    told: list[openai.BadRequestError] = []

    async def agent(base_url, api_key):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            for body, _ in REFUSED:
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.chat.completions.create(**{"model": "any", "messages": [USER], **body})
                told.append(caught.value)
        return 1.0

    (rollout,) = play_group(agent, takes=("base_url", "api_key")).rollouts
    assert "never asked" in str(rollout.error)
    for error, (_, message) in zip(told, REFUSED, strict=True):
        assert message in error.message and error.type == "invalid_request_error"


def test_the_run_decides_how_it_samples_and_says_so(ask):
    with pytest.warns(UserWarning, match="agent asks with presence_penalty, seed, temperature, which change nothing"):
        answer, rollout = ask(raw=True, temperature=0.1, top_p=1, seed=7, presence_penalty=0.5)
    assert answer.headers["x-ignored"] == "temperature, seed, presence_penalty"
    assert rollout.info["ignored_parameters"] == 1
    answer, rollout = ask(raw=True, temperature=1, top_p=1.0)
    assert "x-ignored" not in answer.headers and rollout.info["ignored_parameters"] == 0


def test_a_client_that_narrows_its_draws_is_answered_from_what_is_trained(ask):
    """Harnesses send top_p 0.95 and cannot be told otherwise. The same tokens as without, and it is said."""
    how = SamplingParams(max_tokens=48)
    plain, _ = ask(params=how)
    with pytest.warns(UserWarning, match="agent asks with min_p, top_k, top_p, which change nothing"):
        narrowed, rollout = ask(params=how, top_p=0.01, extra_body={"top_k": 1, "min_p": 0.9})
    assert narrowed.choices[0].message.content == plain.choices[0].message.content
    assert rollout.info["ignored_parameters"] == 1 and rollout.turns[0].trained


def test_lengths_and_stop_strings(ask):
    whole, _ = ask()
    text = whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop" and len(text) > 1
    cut, rollout = ask(max_tokens=1)
    assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 1
    assert rollout.turns[0].completion.finish_reason is FinishReason.LENGTH
    newer, _ = ask(max_completion_tokens=1, max_tokens=5)
    assert newer.usage.completion_tokens == 1
    run, _ = ask(params=SamplingParams(max_tokens=2, temperature=0.0), max_tokens=40)
    assert run.usage.completion_tokens == 2
    stopped, rollout = ask(stop=[text[1]])
    assert stopped.choices[0].message.content == text[0] == rollout.turns[0].completion.text


def test_logprobs_are_those_that_are_trained(ask, starter):
    answer, rollout = ask(logprobs=True, top_logprobs=2)
    said = rollout.turns[0].completion
    told = answer.choices[0].logprobs.content
    assert [each.logprob for each in told] == pytest.approx(said.logprobs)
    assert "".join(each.token for each in told).startswith(said.text)
    assert all(len(each.top_logprobs) == 2 for each in told)
    assert all(bytes(each.bytes).decode() == each.token for each in told)
    plain, rollout = ask()
    assert plain.choices[0].logprobs is None
    # recorded all the same; its prompt is in the cache now, so rounding may differ
    assert rollout.turns[0].completion.logprobs == pytest.approx(said.logprobs, abs=1e-5)


def test_tool_calls_are_openais_streamed_or_not(ask):
    whole, rollout = ask(messages=[CALL], tools=[CALCULATOR])
    (call,) = whole.choices[0].message.tool_calls
    assert whole.choices[0].finish_reason == "tool_calls"
    assert json.loads(call.function.arguments) == {"expression": "47*12"} and call.id
    chunks, _ = ask(messages=[CALL], tools=[CALCULATOR], stream=True, stream_options={"include_usage": True})
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    (streamed,) = [call for delta in deltas for call in delta.tool_calls or ()]
    assert streamed.id == call.id and streamed.function.arguments == call.function.arguments
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
    assert chunks[-1].usage == whole.usage
    none, rollout = ask(messages=[CALL], tools=[CALCULATOR], tool_choice="none")
    assert none.choices[0].message.tool_calls is None
    assert rollout.info["tool_calls"] == 0


def test_models_and_routes_that_are_not_there(play_group):
    seen: dict[str, Any] = {}

    async def agent(base_url, api_key):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            seen["models"] = [model.id async for model in client.models.list()]
            seen["one"] = (await client.models.retrieve("policy")).id
            with pytest.raises(openai.NotFoundError, match="there is no POST /v1/embeddings"):
                await client.embeddings.create(model="policy", input="1 + 1")
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="wrong").chat.completions.create(model="policy", messages=[USER])  # type: ignore[list-item]
            with pytest.raises(openai.APIStatusError):
                await client.post("/chat/completions", body={"messages": 3}, cast_to=dict)
            await client.chat.completions.create(model="policy", messages=[USER])  # type: ignore[list-item]
        return 1.0

    (rollout,) = play_group(agent, takes=("base_url", "api_key")).rollouts
    assert rollout.error is None and seen == {"models": ["policy"], "one": "policy"}


def test_too_many_characters_are_refused(play_group):
    async def agent(base_url, api_key):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            with pytest.raises(openai.BadRequestError, match=r"env\.max_characters is 20"):
                await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "a" * 21}])
            await client.chat.completions.create(model="policy", messages=[USER])  # type: ignore[list-item]
        return 1.0

    assert play_group(agent, takes=("base_url", "api_key"), max_characters=20).rollouts[0].error is None


def test_it_listens_on_loopback_only_and_ends_with_the_play(starter):
    endpoint = Endpoint(starter.tokenizer)
    address = urlsplit(endpoint.base_url)
    assert address.hostname == "127.0.0.1" and address.port
    socket.create_connection(("127.0.0.1", address.port), timeout=5).close()
    endpoint.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", address.port), timeout=5)
