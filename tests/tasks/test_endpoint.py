"""The HTTP endpoint as OpenAI's client sees it: what it answers, what it refuses, what it ignores."""

from __future__ import annotations

import asyncio
import json
import math
import re
import socket
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from openai import AsyncOpenAI

from groupwise.algo.samples import samples_of
from groupwise.config.lora import LoraSpec
from groupwise.config.serve import ServeConfig
from groupwise.model.load import LoadedModel
from groupwise.tasks.endpoint import Endpoint
from groupwise.tasks.starter.tasks import CALCULATOR
from groupwise.train.learner import Learner
from groupwise.types import FinishReason, Grammar, Prompt, Rollout, RolloutGroup, SamplingParams
from wording import raises, warns, wording

USER = {"role": "user", "content": "What is 47 + 138?"}
CALL = {"role": "user", "content": "Use the calculator: 47 * 12"}
GREEDY = SamplingParams(max_tokens=48, temperature=0.0)


@pytest.fixture
def ask(play_group) -> Callable[..., Any]:
    """`ask(messages=..., ...)`: the answer to one request, or what the client raises."""

    def one(params: SamplingParams = GREEDY, raw: bool = False, recorded: bool = True, **body: Any) -> Any:
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

        found.append(play_group(agent, takes=("base_url", "api_key"), params=params, recorded=recorded).rollouts[0])
        return found

    return one


def schema(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, **more}}


def named(tool: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool}}


REFUSED = [
    ({"n": 2}, "n"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": named("search"), "tools": [CALCULATOR]}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools"}, "tools": [CALCULATOR]}, "tool_choice.named.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": schema({"type": "strin"})}, "response_format.json_schema.schema"),
    ({"top_p": 0}, "top_p"),
    ({"extra_body": {"top_k": -2}}, "top_k"),
    ({"messages": [USER, {"role": "assistant", "content": "It"}]}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.parts.0.image_url.image_url.url",
    ),
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
    assert [error.param for error in told] == [field for _, field in REFUSED]
    assert {error.type for error in told} == {"invalid_request_error"}


def test_what_would_explode_is_refused_and_ends_neither_the_episode_nor_the_run(play_group):
    patterns = [{"type": "string", "pattern": f".*a.{{{i}}}b"} for i in range(1, 30)]
    crossed = {"type": "object", "properties": {"x": {"allOf": patterns}}}
    bodies = (
        {"response_format": schema({"type": "integer", "multipleOf": 99_999_989})},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": crossed, "strict": True}}]},
    )
    told: list[openai.BadRequestError] = []

    async def agent(base_url, api_key):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            for body in bodies:
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.chat.completions.create(model="any", messages=[USER], **body)
                told.append(caught.value)
            await client.chat.completions.create(model="any", messages=[USER])
        return 1.0

    (rollout,) = play_group(agent, takes=("base_url", "api_key")).rollouts
    assert (rollout.error, rollout.reward) == (None, 1.0)
    assert [each.code for each in told] == ["invalid_grammar"] * 2


def test_the_run_decides_how_it_samples_and_says_so(ask):
    with warns():
        answer, rollout = ask(raw=True, temperature=0.1, top_p=1, seed=7, presence_penalty=0.5)
    assert answer.headers["x-ignored"] == "temperature, seed, presence_penalty"
    assert rollout.info["ignored_parameters"] == 1
    answer, rollout = ask(raw=True, temperature=1, top_p=1.0)
    assert "x-ignored" not in answer.headers and rollout.info["ignored_parameters"] == 0


def on_policy(starter: LoadedModel, rollout: Rollout) -> None:
    """All tokens are trained, with a ratio of 1, under what they were drawn from."""
    (sample,) = samples_of(
        [RolloutGroup(prompt=Prompt(id="p"), rollouts=(replace(rollout, reward=1.0, advantage=1.0),))]
    )
    assert sample.kept is not None and not sample.kept.is_whole and sum(sample.mask) > 1
    (ours,) = Learner(starter, lora=LoraSpec(rank=2)).forward([sample])
    for on, mine, theirs in zip(sample.mask, ours, sample.behaviour_logprobs or (), strict=True):
        assert not on or math.exp(mine - theirs) == pytest.approx(1, abs=5e-5)  # in float32


def test_what_a_client_narrows_acts_and_is_trained(ask, starter):
    """Harnesses send top_p 0.95; the record of what it leaves is what training is under."""
    how = SamplingParams(max_tokens=48)
    narrowed, rollout = ask(params=how, raw=True, top_p=0.6, extra_body={"top_k": 20, "min_p": 0.01})
    assert "x-ignored" not in narrowed.headers and rollout.info["ignored_parameters"] == 0
    on_policy(starter, rollout)
    likeliest, _ = ask(params=how, extra_body={"top_k": 1})
    greedy, _ = ask()
    assert likeliest.choices[0].message.content == greedy.choices[0].message.content
    _, rollout = ask(params=replace(how, top_p=0.5), top_p=1.0, extra_body={"top_k": -1})
    assert rollout.turns[0].completion.kept is None  # the request wins over the run


def test_without_a_record_what_narrows_changes_nothing(ask):
    how = SamplingParams(max_tokens=48)
    plain, _ = ask(params=how)
    with warns():
        narrowed, rollout = ask(
            params=how,
            recorded=False,
            top_p=0.01,
            tools=[STRICT],
            tool_choice="none",
            extra_body={"top_k": 1, "min_p": 0.9},
        )
    assert narrowed.choices[0].message.content == plain.choices[0].message.content
    assert rollout.info["ignored_parameters"] == 1 and rollout.turns[0].trained
    for forced in ({"response_format": {"type": "json_object"}}, {"tools": [CALCULATOR], "tool_choice": "required"}):
        error, _ = ask(recorded=False, **forced)
        assert error.status_code == 400 and error.param in forced
        wording(error)


STRICT = {**CALCULATOR, "function": {**CALCULATOR["function"], "strict": True}}
YEAR = {
    "type": "object",
    "properties": {"year": {"enum": [1999, 2001]}},
    "required": ["year"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_format_is_kept_to_and_trained(ask, starter, stream: bool):
    answer, rollout = ask(
        params=SamplingParams(max_tokens=200),
        response_format=schema(YEAR),
        stream=stream,
    )
    deltas = [chunk.choices[0].delta.content or "" for chunk in answer] if stream else []
    content = "".join(deltas) if stream else answer.choices[0].message.content
    assert json.loads(content)["year"] in (1999, 2001)
    on_policy(starter, rollout)


@pytest.mark.parametrize("choice", ["required", named("calculator")])
def test_a_call_that_is_asked_for_is_made_and_trained(ask, starter, choice):
    how = SamplingParams(max_tokens=200)
    answer, rollout = ask(params=how, tools=[CALCULATOR], tool_choice=choice, parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "calculator" and list(json.loads(call.function.arguments)) == ["expression"]
    assert rollout.info["tool_calls"] == 1
    on_policy(starter, rollout)


def test_what_a_request_asks_for_wins_over_what_the_run_does(ask):
    run = SamplingParams(max_tokens=200, grammar=Grammar.choice(["left", "right"]))
    own, _ = ask(params=run)
    assert own.choices[0].message.content in ("left", "right")
    asked, _ = ask(params=run, response_format=schema(YEAR))
    assert "year" in json.loads(asked.choices[0].message.content)


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
            with raises(openai.NotFoundError):
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
            with raises(openai.BadRequestError):
                await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "a" * 21}])
            await client.chat.completions.create(model="policy", messages=[USER])  # type: ignore[list-item]
        return 1.0

    assert play_group(agent, takes=("base_url", "api_key"), max_characters=20).rollouts[0].error is None


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_has_the_limits_of_the_live_server(play_group, declared: bool):
    most, told = ServeConfig().chat_body_bytes, list[tuple[int, str]]()

    async def agent(base_url, api_key):
        address = urlsplit(base_url)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {api_key}\r\n"
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        with closing(writer):
            if declared:  # refused before any of it is sent
                writer.write(f"{head}content-length: {most + 1}\r\n\r\n".encode())
            else:
                writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
                piece = b"x" * (1 << 16)
                with suppress(ConnectionError):
                    for _ in range(most // len(piece) + 1):
                        writer.write(b"10000\r\n" + piece + b"\r\n")
                        await writer.drain()
            status = int((await reader.readline()).split()[1])
            length = re.search(rb"content-length: (\d+)", await reader.readuntil(b"\r\n\r\n"))
            assert length is not None
            told.append((status, (await reader.readexactly(int(length[1]))).decode()))
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            await client.chat.completions.create(model="policy", messages=[USER])  # type: ignore[list-item]
        return 1.0

    assert play_group(agent, takes=("base_url", "api_key")).rollouts[0].error is None
    ((status, body),) = told
    assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")


def test_it_listens_on_loopback_only_and_ends_with_the_play(starter):
    endpoint = Endpoint(starter.tokenizer)
    address = urlsplit(endpoint.base_url)
    assert address.hostname == "127.0.0.1" and address.port
    socket.create_connection(("127.0.0.1", address.port), timeout=5).close()
    endpoint.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", address.port), timeout=5)
