"""/v1/chat/completions over real sockets, on the starter, through the `openai` package and byte by byte."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, AsyncOpenAI, BadRequestError, InternalServerError, NotFoundError, OpenAI

from groupwise.config.serve import ServeConfig
from groupwise.errors import RequestError
from groupwise.model.chat import encode_prompt
from groupwise.server import chat
from groupwise.server import sampling as admission
from groupwise.server.schema_openai import ChatRequest
from groupwise.tasks.starter.tasks import CALCULATOR, calculate, is_correct, prompts
from groupwise.tasks.starter.tokenizer import build_tokenizer, render
from groupwise.types import Prompt, SamplingParams, SamplingRequest
from serving import Served, served, starter
from wording import raises

ADD = [{"role": "user", "content": "What is 47 + 138? Reply with just the number."}]
THINK = [{"role": "user", "content": "What is 47 + 138? Think step by step."}]
SORT = [{"role": "user", "content": "Sort these numbers: 31, 7, 54, 12, 90. Just the list."}]


@pytest.fixture(scope="module")
def api(tmp_path_factory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("state"), [chat.router]) as server:
        yield server


@pytest.fixture(scope="module")
def client(api: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: OpenAI, messages: Sequence[dict[str, Any]], **options) -> Any:
    ours = ("adapter", "adapters", "return_token_ids", "top_k", "ignore_eos", "stop_token_ids", "chat_template_kwargs")
    extra = {key: options.pop(key) for key in ours if key in options}
    return client.chat.completions.create(model="starter", messages=messages, extra_body=extra, **options)


def ids_of(messages: Sequence[dict[str, Any]], **options) -> tuple[int, ...]:
    return encode_prompt(Prompt(id="", messages=tuple(messages), **options), starter().tokenizer).token_ids


def sampled(api: Served, messages: Sequence[dict[str, Any]], *, n: int = 1, **params):
    """What the engine itself answers."""
    params = {"max_tokens": 64, "seed": 5} | params
    request = SamplingRequest(prompt_ids=ids_of(messages), n=n, params=SamplingParams(**params))
    return api.engine.generate([request])[0]


def joined(stream: Any) -> dict[int, dict[str, Any]]:
    """By choice: what a stream's deltas add up to."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in stream:
        for choice in chunk.choices:
            whole = choices.setdefault(
                choice.index, {"content": "", "reasoning": "", "calls": [], "logprobs": [], "ids": [], "finish": None}
            )
            assert whole["finish"] is None, "nothing comes after the finish reason"
            whole["content"] += choice.delta.content or ""
            whole["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            whole["calls"] += choice.delta.tool_calls or []
            whole["logprobs"] += choice.logprobs.content if choice.logprobs else []
            whole["ids"] += getattr(choice, "token_ids", None) or []
            whole["finish"] = choice.finish_reason
    return choices


# ---- whole answers ----


def test_the_answer_is_what_the_engine_samples(api: Served, client: OpenAI) -> None:
    completions = sampled(api, ADD, n=4, temperature=0.8)
    answer = ask(client, ADD, n=4, temperature=0.8, seed=5, max_tokens=64)
    assert [choice.message.content for choice in answer.choices] == [c.text for c in completions]
    assert [choice.finish_reason for choice in answer.choices] == [c.finish_reason.value for c in completions]
    assert len({c.text for c in completions}) > 1, "the choices have seeds of their own"
    assert answer.usage.prompt_tokens == len(ids_of(ADD))
    assert answer.usage.completion_tokens == sum(len(c.token_ids) for c in completions)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert (answer.model, answer.object, answer.system_fingerprint) == ("starter", "chat.completion", "base")
    assert answer.id.startswith("chatcmpl-") and abs(answer.created - time.time()) < 60
    assert answer.choices[0].message.tool_calls is None and not hasattr(answer.choices[0].message, "reasoning_content")


def test_greedy_with_several_choices_is_allowed_and_gives_equal_ones(client: OpenAI) -> None:
    answer = ask(client, ADD, n=3, temperature=0)
    assert len(answer.choices) == 3 and len({choice.message.content for choice in answer.choices}) == 1


def test_a_seed_fixes_the_answer_and_without_one_answers_differ(client: OpenAI) -> None:
    def words(**options) -> list[int]:
        options |= {"temperature": 1.5, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
        return ask(client, SORT, **options).choices[0].token_ids

    assert words(seed=7) == words(seed=7) != words(seed=8)
    assert words() != words()


def test_a_thought_is_kept_apart_and_counted(client: OpenAI) -> None:
    answer = ask(client, THINK, temperature=0, return_token_ids=True)
    message, choice = answer.choices[0].message, answer.choices[0]
    text = starter().tokenizer.decode(choice.token_ids)
    assert text == f"<think>\n{message.reasoning_content}\n</think>\n\n{message.content}<|im_end|>"
    assert message.reasoning_content.startswith("7+8=15") and message.content == "185"
    assert answer.usage.completion_tokens == len(choice.token_ids)


def test_thinking_can_be_turned_off_in_the_template(client: OpenAI) -> None:
    answer = ask(client, THINK, temperature=0, chat_template_kwargs={"enable_thinking": False}, return_token_ids=True)
    assert starter().tokenizer.decode(answer.prompt_token_ids).endswith("<think>\n\n</think>\n\n")
    assert not hasattr(answer.choices[0].message, "reasoning_content")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_opens_the_thought_is_answered_inside_it(client: OpenAI, stream: bool) -> None:
    """The client may begin the assistant's message itself, and the reply continues it."""
    messages = [*THINK, {"role": "assistant", "content": "<think>\n7+8=15\n"}]
    answer = ask(client, messages, temperature=0, stream=stream)
    if stream:
        whole = joined(answer)[0]
        reasoning, content = whole["reasoning"], whole["content"]
    else:
        reasoning, content = answer.choices[0].message.reasoning_content, answer.choices[0].message.content
    assert reasoning.startswith("4+3+1=8") and content == "185"


def test_stop_strings_end_the_answer_and_are_cut(api: Served, client: OpenAI) -> None:
    plain = ask(client, SORT, temperature=0).choices[0].message.content
    answer = ask(client, SORT, temperature=0, stop=[", 31", "zzz"])
    assert plain == "7, 12, 31, 54, 90"
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("7, 12", "stop")
    by_id = ask(client, SORT, temperature=0, stop_token_ids=starter().tokenizer.encode(","))
    assert (by_id.choices[0].message.content, by_id.choices[0].finish_reason) == ("7", "stop")
    short = ask(client, SORT, temperature=0, max_completion_tokens=3)
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 3)


# ---- streams ----


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        (THINK, {"temperature": 1.0, "n": 6, "max_tokens": 60}),
        (SORT, {"temperature": 1.0, "n": 3, "stop": ["1", "4,"]}),
        (ADD, {"temperature": 3.0, "n": 8, "max_tokens": 40, "ignore_eos": True}),
        (ADD, {"temperature": 0.0, "max_tokens": 1}),
    ],
)
def test_a_stream_adds_up_to_the_whole_answer(client: OpenAI, messages, options) -> None:
    whole = ask(client, messages, seed=11, logprobs=True, top_logprobs=2, return_token_ids=True, **options)
    stream = ask(
        client, messages, seed=11, logprobs=True, top_logprobs=2, return_token_ids=True, stream=True, **options
    )
    choices = joined(stream)
    assert sorted(choices) == list(range(options.get("n", 1)))
    for choice in whole.choices:
        mine = choices[choice.index]
        assert mine["content"] == (choice.message.content or "")
        assert mine["reasoning"] == (getattr(choice.message, "reasoning_content", None) or "")
        assert mine["finish"] == choice.finish_reason
        assert mine["ids"] == choice.token_ids
        assert [one.model_dump() for one in mine["logprobs"]] == [one.model_dump() for one in choice.logprobs.content]


def test_the_last_chunk_has_the_usage_if_asked_for(client: OpenAI) -> None:
    *chunks, last = ask(client, ADD, temperature=0, stream=True, stream_options={"include_usage": True})
    whole = ask(client, ADD, temperature=0)
    assert last.choices == [] and last.usage == whole.usage
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert {chunk.id for chunk in chunks} == {last.id}
    assert [bool(chunk.choices) for chunk in ask(client, ADD, temperature=0, stream=True)].count(False) == 0


def raw(api: Served, body: dict[str, Any]) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", api.port), timeout=120)
    data = json.dumps({"messages": ADD, **body}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n"
    connection.sendall(f"{head}content-type: application/json\r\nconnection: close\r\n\r\n".encode() + data)
    return connection


def read_all(connection: socket.socket) -> tuple[str, list[str]]:
    """The head, and the lines of the body without the chunks' sizes."""
    data = b""
    while more := connection.recv(65536):
        data += more
    head, _, body = data.decode().partition("\r\n\r\n")
    return head.lower(), [line for line in body.split("\n") if line.startswith(("data:", ":"))]


def test_the_wire_format_of_a_stream(api: Served) -> None:
    head, lines = read_all(raw(api, {"stream": True, "temperature": 0}))
    assert head.startswith("http/1.1 200")
    for header in ("content-type: text/event-stream", "cache-control: no-cache", "x-accel-buffering: no"):
        assert header in head
    assert "x-adapter-version: base" in head and "content-length" not in head
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert chunks[0]["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert chunks[-1]["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    content = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert content == sampled(api, ADD, temperature=0)[0].text != ""


def test_a_silent_stream_pings(api: Served, monkeypatch) -> None:
    """The engine is kept busy by a request that takes all rows, so that there is nothing to say."""
    monkeypatch.setattr(admission, "PING_S", 0.05)
    busy = SamplingRequest(prompt_ids=(1, 2), n=32, params=SamplingParams(max_tokens=1000, ignore_eos=True))
    (future,) = api.engine.submit([busy])
    assert api.is_busy_within(120)
    threading.Timer(0.4, future.cancel).start()
    _, lines = read_all(raw(api, {"stream": True, "temperature": 0}))
    assert lines.count(": ping") >= 2
    assert lines[-1] == "data: [DONE]" and '"finish_reason":"stop"' in lines[-2]


# ---- log-probabilities ----


def test_logprobs_are_the_engines_for_every_token(api: Served, client: OpenAI) -> None:
    (completion,) = sampled(api, ADD, temperature=0.7, top_logprobs=3)
    answer = ask(client, ADD, temperature=0.7, seed=5, max_tokens=64, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert [one.logprob for one in content] == pytest.approx(completion.logprobs, abs=1e-6)
    assert b"".join(bytes(one.bytes) for one in content).decode() == completion.text + "<|im_end|>"
    assert "".join(one.token for one in content) == completion.text + "<|im_end|>"
    for one, alternatives in zip(content, completion.top_logprobs, strict=True):
        assert [top.logprob for top in one.top_logprobs] == pytest.approx([logprob for _, logprob in alternatives])
        assert one.top_logprobs[0].logprob >= one.logprob - 1e-6
    assert ask(client, ADD, temperature=0).choices[0].logprobs is None
    assert ask(client, ADD, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_the_ids_of_prompt_and_completion_are_given_back(api: Served, client: OpenAI) -> None:
    (completion,) = sampled(api, ADD, temperature=1.0)
    answer = ask(client, ADD, seed=5, max_tokens=64, return_token_ids=True)
    assert tuple(answer.prompt_token_ids) == ids_of(ADD)
    assert tuple(answer.choices[0].token_ids) == completion.token_ids
    first, *others = ask(client, ADD, seed=5, return_token_ids=True, stream=True)
    assert tuple(first.prompt_token_ids) == ids_of(ADD)
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in others)
    assert not hasattr(ask(client, ADD).choices[0], "token_ids")


# ---- tools ----


def test_a_tool_is_called_and_its_result_answered(client: OpenAI) -> None:
    """The whole round trip, as an agent makes it, on problems that the starter has not seen."""
    right = 0
    for row in prompts("tool", "test", n=8, seed=3):
        first = ask(client, row["prompt"], tools=[CALCULATOR], temperature=0).choices[0]
        assert first.finish_reason == "tool_calls" and first.message.content is None
        (call,) = first.message.tool_calls
        assert (call.type, call.function.name) == ("function", "calculator")
        result = calculate(json.loads(call.function.arguments)["expression"])
        right += result == row["answer"]
        said = first.message.model_dump(exclude_none=True)
        messages = [*row["prompt"], said, {"role": "tool", "tool_call_id": call.id, "content": result}]
        second = ask(client, messages, tools=[CALCULATOR], temperature=0).choices[0]
        assert second.finish_reason == "stop" and result in second.message.content
    assert right >= 7


def test_a_streamed_call_comes_whole_in_one_delta(client: OpenAI) -> None:
    (row,) = prompts("tool", "test", n=1, seed=4)
    whole = ask(client, row["prompt"], tools=[CALCULATOR], temperature=0).choices[0].message.tool_calls[0]
    streamed = joined(ask(client, row["prompt"], tools=[CALCULATOR], temperature=0, stream=True))[0]
    (call,) = streamed["calls"]
    assert (call.index, call.function, streamed["finish"]) == (0, call.function, "tool_calls")
    assert (call.function.name, call.function.arguments) == (whole.function.name, whole.function.arguments)
    assert streamed["content"] == "" and call.id != whole.id


SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}


def test_a_call_that_did_not_become_one_is_content() -> None:
    """Such as the starter makes of tools that it does not know; the reply is written here."""
    text = '<tool_call>\n{"name": "search", "arguments": {"query": }}\n</tool_call>'
    reply = chat.ChoiceStream(ChatRequest(messages=ADD, tools=[SEARCH]), chat.ChatPrompt(ids=(1,)))
    deltas = [*reply.push(text), *reply.finish()]
    assert reply.message().content == text == "".join(delta.content or "" for delta in deltas)
    assert reply.message().tool_calls is None


def test_no_call_where_none_is_wanted(client: OpenAI) -> None:
    (row,) = prompts("tool", "test", n=1, seed=4)
    none = ask(client, row["prompt"], tools=[CALCULATOR], tool_choice="none", temperature=0, return_token_ids=True)
    assert "calculator" not in starter().tokenizer.decode(none.prompt_token_ids)
    assert none.choices[0].message.tool_calls is None
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call>'
    without_tools = ask(client, [*ADD, {"role": "assistant", "content": call}], temperature=0, max_tokens=4)
    assert without_tools.choices[0].message.tool_calls is None


def test_several_calls_become_one_if_asked() -> None:
    """The starter never makes two calls, so the reply is written here."""
    one = '<tool_call>{{"name": "calculator", "arguments": {{"expression": "{}"}}}}</tool_call>'
    text = f"Two. {one.format('1+1')}\n{one.format('2+2')}\n"
    for parallel, expected in ((None, ["1+1", "2+2"]), (True, ["1+1", "2+2"]), (False, ["1+1"])):
        body = ChatRequest(messages=ADD, tools=[CALCULATOR], parallel_tool_calls=parallel)
        reply = chat.ChoiceStream(body, chat.ChatPrompt(ids=(1,)))
        deltas = [*reply.push(text), *reply.finish()]
        message = reply.message()
        assert [json.loads(call.function.arguments)["expression"] for call in message.tool_calls] == expected
        assert message.content == "Two."
        assert [call.index for delta in deltas for call in delta.tool_calls or ()] == list(range(len(expected)))
        assert len({call.id for call in message.tool_calls}) == len(expected)


# ---- how it is drawn, and what it goes on from ----

OPEN = [*ADD, {"role": "assistant", "content": "It is"}]


@pytest.mark.parametrize("stream", [False, True])
def test_penalties_and_biases_act(api: Served, client: OpenAI, stream: bool) -> None:
    """As in the engine, whose log-probabilities they leave as they are."""
    options = {"temperature": 0, "max_tokens": 12, "logprobs": True}
    changes = {"presence_penalty": 2.0, "frequency_penalty": 1.5, "logit_bias": {"40": 100.0}}
    ours = {"repetition_penalty": 1.5, "min_tokens": 6}
    asked = client.chat.completions.create(
        model="starter", messages=THINK, stream=stream, **options, **changes, extra_body=ours
    )
    if stream:
        whole = joined(asked)[0]
        content, logprobs = whole["content"], whole["logprobs"]
    else:
        content, logprobs = asked.choices[0].message.content, asked.choices[0].logprobs.content
    params = {**options, **changes, **ours, "logit_bias": ((40, 100.0),)}
    del params["logprobs"]
    (expected,) = sampled(api, THINK, **params)
    assert content == expected.text and expected.token_ids != sampled(api, THINK, temperature=0)[0].token_ids
    assert [each.logprob for each in logprobs] == pytest.approx(expected.logprobs)


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_string_may_stay(client: OpenAI, stream: bool) -> None:
    def said(**extra: Any) -> str:
        options = {"temperature": 0, "stop": ["="], "stream": stream, "extra_body": extra}
        answer = client.chat.completions.create(model="starter", messages=THINK, **options)
        if stream:
            whole = joined(answer)[0]
            return whole["content"] + whole["reasoning"]
        message = answer.choices[0].message
        return (message.content or "") + (getattr(message, "reasoning_content", None) or "")

    cut = said()
    assert cut and "=" not in cut and said(include_stop_str_in_output=True) == cut + "="
    assert said(min_tokens=12).startswith(cut + "=") and len(said(min_tokens=12)) > len(cut) + 1


def test_who_speaks_last_and_what_goes_on(client: OpenAI) -> None:
    """The reply goes on with the assistant's last message unless it is told not to."""

    def prompt(**extra: Any) -> str:
        body = {"return_token_ids": True, **extra}
        answer = client.chat.completions.create(model="starter", messages=OPEN, max_tokens=1, extra_body=body)
        return starter().tokenizer.decode(answer.prompt_token_ids)

    going_on = prompt()
    assert going_on.endswith("<|im_start|>assistant\nIt is")
    assert prompt(continue_final_message=True, add_generation_prompt=False) == going_on
    assert prompt(continue_final_message=True) == prompt(add_generation_prompt=False) == going_on
    own_turn = prompt(continue_final_message=False)
    assert own_turn.endswith("It is<|im_end|>\n<|im_start|>assistant\n") and own_turn.startswith(going_on)
    assert prompt(add_generation_prompt=True) == own_turn


@pytest.mark.parametrize("stream", [False, True])
def test_what_it_goes_on_with_can_be_given_back(client: OpenAI, stream: bool) -> None:
    def said(messages: Any, **extra: Any) -> tuple[str, str]:
        options = {"temperature": 0, "max_tokens": 12, "stream": stream, "extra_body": extra}
        answer = client.chat.completions.create(model="starter", messages=messages, **options)
        if stream:
            whole = joined(answer)[0]
            return whole["content"], whole["reasoning"]
        message = answer.choices[0].message
        return message.content or "", getattr(message, "reasoning_content", None) or ""

    rest, _ = said(OPEN)
    assert said(OPEN, echo=True) == ("It is" + rest, "")
    thought = [*THINK, {"role": "assistant", "content": "<think>\n7+8=15\n"}]
    _, reasoning = said(thought)
    assert reasoning and said(thought, echo=True)[1] == "7+8=15\n" + reasoning  # of what was said before, too


def test_what_of_a_prompt_was_known_is_in_the_usage_and_in_the_metrics(api: Served, client: OpenAI) -> None:
    """The turn before was computed already, but for the token sampled last."""

    def counters() -> tuple[float, float]:
        text = api.server.recorder.exposition().decode()
        names = ("groupwise_prefix_cache_queries_total", "groupwise_prefix_cache_hits_total")
        return tuple(float(re.findall(rf"^{name}{{.*}} (\S+)$", text, re.M)[0]) for name in names)

    asked = ("Which is larger: 4 or 9?", "12 + 13?")
    first = [{"role": "user", "content": asked[0]}, {"role": "assistant", "content": "9"}]
    first.append({"role": "user", "content": asked[1]})
    options = {"model": "starter", "temperature": 0, "max_tokens": 8}
    client.chat.completions.create(messages=[{"role": "user", "content": "Never asked before: 1 + 1?"}], **options)
    queries, hits = counters()
    one = client.chat.completions.create(messages=first, **options)
    assert one.usage.prompt_tokens_details.cached_tokens < 8  # at most the template's own first words
    said = {"role": "assistant", "content": one.choices[0].message.content}
    turn = [*first, said, {"role": "user", "content": "And 2 + 2?"}]
    two = client.chat.completions.create(messages=turn, **options)
    known = two.usage.prompt_tokens_details.cached_tokens
    assert one.usage.prompt_tokens <= known < two.usage.prompt_tokens
    with client.chat.completions.create(
        messages=turn, stream=True, stream_options={"include_usage": True}, **options
    ) as stream:
        again = list(stream)[-1].usage
    assert known < again.prompt_tokens_details.cached_tokens < again.prompt_tokens
    asked = one.usage.prompt_tokens + two.usage.prompt_tokens + again.prompt_tokens
    cached = sum(each.prompt_tokens_details.cached_tokens for each in (one.usage, two.usage, again))
    assert counters() == (queries + asked, hits + cached)


def test_the_beginning_of_a_prompt_can_be_left_out(client: OpenAI) -> None:
    options = {"model": "starter", "messages": THINK, "max_tokens": 1}
    whole = client.chat.completions.create(**options, extra_body={"return_token_ids": True})
    cut = client.chat.completions.create(**options, extra_body={"return_token_ids": True, "truncate_prompt_tokens": 9})
    assert cut.prompt_token_ids == whole.prompt_token_ids[-9:] and cut.usage.prompt_tokens == 9
    long = [{"role": "user", "content": "7 " * 1200}]
    with raises(BadRequestError):
        client.chat.completions.create(model="starter", messages=long, max_tokens=20)
    fits = client.chat.completions.create(
        model="starter", messages=long, max_tokens=20, extra_body={"truncate_prompt_tokens": -1}
    )
    assert fits.usage.prompt_tokens == 1024 - 20


def test_token_ids_of_a_bias_are_the_models(client: OpenAI) -> None:
    with raises(BadRequestError) as refused:
        client.chat.completions.create(model="starter", messages=ADD, logit_bias={"99999": 1})
    assert refused.value.param == "logit_bias.99999"


def test_the_template_is_told_what_it_reads(client: OpenAI) -> None:
    tokenizer = build_tokenizer([render(list(ADD))], vocab_size=300)
    tokenizer.chat_template = "{{ date or 'no date' }}|{{ place.name }}|{{ messages[0].content }}"
    given = {"date": "<|im_end|>1 May", "place": {"name": "home"}}

    def prompted(**told: Any) -> chat.ChatPrompt:
        return chat.chat_prompt(ChatRequest(messages=ADD, chat_template_kwargs=told), tokenizer, ServeConfig())

    prompt = prompted(**given)
    assert tokenizer.decode(list(prompt.ids)) == f"<|im_end|>1 May|home|{ADD[0]['content']}"
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in prompt.ids  # what is told cannot end a turn
    tokenizer.bos_token = "<|im_start|>"
    for name in ("dates", "bos_token"):
        with raises(RequestError, field=f"chat_template_kwargs.{name}"):
            prompted(**{name: "x"})
    prompted(**given, enable_thinking=False)
    with pytest.raises(BadRequestError) as unknown:
        ask(client, ADD, chat_template_kwargs={"reasoning_effort": "high"})
    assert unknown.value.param == "chat_template_kwargs.reasoning_effort"


# ---- policies ----


def test_sixty_requests_over_twelve_adapters_are_all_answered(api: Served, make_adapter) -> None:
    """Four may be loaded at a time. The others wait their turn, streamed or not; nobody is told to come back."""
    directory = make_adapter(starter(), seed=4)
    for i in range(12):
        api.publish(directory, f"twelve-{i}")

    async def ask_one(client: AsyncOpenAI, i: int) -> str:
        options = {"model": f"twelve-{i % 12}@1", "messages": ADD, "max_tokens": 3, "temperature": 0}
        if i % 2:
            stream = await client.chat.completions.create(stream=True, **options)
            return [chunk async for chunk in stream][-1].system_fingerprint
        return (await client.chat.completions.create(**options)).system_fingerprint

    async def work() -> list[str]:
        async with AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask_one(client, i) for i in range(60)))

    assert asyncio.run(work()) == [f"twelve-{i % 12}@1" for i in range(60)]
    assert api.server.policies.waiting == 0


def test_a_request_that_waits_for_room_has_one_deadline_for_all_of_it(tmp_path, make_adapter) -> None:
    """504 when it is over, not 429 at once; what holds the places goes on."""
    with served(tmp_path, [chat.router], request_timeout_s=2.0, first_token_timeout_s=0.2) as server:
        versions = [str(server.publish(make_adapter(starter(), seed=5), f"held-{i}")) for i in range(5)]

        async def refused() -> None:
            async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
                options = {"messages": ADD, "max_tokens": 900, "extra_body": {"ignore_eos": True}}
                asked = (client.chat.completions.create(model=version, **options) for version in versions[:4])
                hold = asyncio.gather(*asked, return_exceptions=True)
                while sum(server.server.policies.in_use.values()) < 4:
                    await asyncio.sleep(0.01)
                    assert not hold.done()
                with raises(InternalServerError) as caught:
                    await client.chat.completions.create(model=versions[4], messages=ADD, stream=True, max_tokens=3)
                assert caught.value.status_code == 504
                hold.cancel()
                await asyncio.gather(hold, return_exceptions=True)

        asyncio.run(refused())


def test_model_and_adapter_choose_the_policy_and_the_answer_says_which(
    api: Served, client: OpenAI, make_adapter
) -> None:
    version = api.publish(make_adapter(starter(), seed=1), "noise")
    options = {"messages": ADD, "temperature": 0, "max_tokens": 12}
    base = client.chat.completions.create(model="base", **options)
    by_model = client.chat.completions.with_raw_response.create(model="noise@1", **options)
    by_adapter = client.chat.completions.create(model="starter", extra_body={"adapter": "noise"}, **options)
    answer = by_model.parse()
    assert by_model.headers["x-adapter-version"] == answer.system_fingerprint == str(version) == "noise@1"
    assert by_adapter.choices[0].message == answer.choices[0].message != base.choices[0].message
    assert (answer.model, base.system_fingerprint) == ("noise@1", "base")
    parts = [{"name": "noise", "scale": 0.0}]
    nothing = client.chat.completions.create(model="starter", extra_body={"adapters": parts}, **options)
    assert nothing.choices[0].message == base.choices[0].message and "noise@1" in nothing.system_fingerprint
    assert all(users == 0 for users in api.server.policies.in_use.values()), "leases end with their requests"


# ---- errors ----


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_said_before_the_first_byte(client: OpenAI, stream: bool) -> None:
    with raises(NotFoundError) as missing:
        client.chat.completions.create(model="gone", messages=ADD, stream=stream)
    assert missing.value.code == "model_not_found"
    with pytest.raises(NotFoundError) as adapter:
        ask(client, ADD, adapter="gone@3", stream=stream)
    assert adapter.value.code == "adapter_not_found"
    with raises(BadRequestError) as long:
        ask(client, ADD, max_tokens=1020, stream=stream)
    assert long.value.code == "context_length_exceeded"
    with raises(BadRequestError) as longer:
        ask(client, [{"role": "user", "content": "word " * 2000}], stream=stream)
    assert longer.value.code == "context_length_exceeded"
    with raises(BadRequestError) as template:
        ask(client, [*ADD, {"role": "system", "content": "too late"}], stream=stream)
    assert template.value.code == "invalid_messages"
    with pytest.raises(BadRequestError) as empty:
        ask(client, [], stream=stream)
    assert empty.value.param == "messages"
    with pytest.raises(BadRequestError) as several:
        ask(client, ADD, n=129, stream=stream)
    assert several.value.param == "n"


def test_without_max_tokens_the_context_is_the_limit(client: OpenAI) -> None:
    answer = ask(client, [{"role": "user", "content": "7 " * 480}], ignore_eos=True, seed=1)
    assert answer.usage.total_tokens == 1024 and answer.choices[0].finish_reason == "length"


def test_a_deadline_is_a_504_or_an_event(tmp_path: Path) -> None:
    with served(tmp_path / "short", [chat.router], request_timeout_s=0.5) as slow:
        client = OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0)
        with raises(InternalServerError) as late:
            ask(client, ADD, ignore_eos=True, n=8)
        assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")
        assert late.value.response.headers["x-should-retry"] == "false"
        assert slow.is_idle_within(120)
        assert [request["finish_reason"] for request in slow.server.recorder.recent()] == ["timeout"]
    with served(tmp_path / "long", [chat.router], request_timeout_s=3) as slow:  # it has begun by then
        client = OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0)
        other = raw(slow, {"stream": True, "ignore_eos": True, "n": 8})
        with raises(APIError) as event:
            list(ask(client, ADD, ignore_eos=True, n=8, stream=True))
        assert event.value.code == "deadline_exceeded"
        _, lines = read_all(other)
        assert '"deadline_exceeded"' in lines[-2] and lines[-1] == "data: [DONE]"
        assert slow.is_idle_within(120)
        assert [request["finish_reason"] for request in slow.server.recorder.recent()] == ["timeout"] * 2


# ---- clients that leave, and what is recorded ----


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_engine_and_the_version(api: Served, make_adapter, stream: bool) -> None:
    version = api.publish(make_adapter(starter(), seed=2), f"left-{str(stream).lower()}")
    connection = raw(api, {"stream": stream, "ignore_eos": True, "n": 16, "adapter": version.name})
    assert api.is_busy_within(120) and api.server.policies.in_use[version] == 1
    connection.close()
    assert api.is_idle_within(5)
    time.sleep(0.05)
    assert api.server.policies.in_use[version] == 0
    latest = api.server.recorder.recent()[0]
    assert (latest["finish_reason"], latest["streamed"], latest["adapter"]) == (
        "client_disconnect",
        stream,
        str(version),
    )


def test_others_are_answered_while_somebody_does_not_read(api: Served, client: OpenAI) -> None:
    body = {"stream": True, "ignore_eos": True, "n": 16, "logprobs": True, "top_logprobs": 20}
    stuck = raw(api, body)
    assert api.is_busy_within(120)
    for _ in range(3):
        assert ask(client, ADD, temperature=0).choices[0].message.content == sampled(api, ADD, temperature=0)[0].text
    stuck.close()
    assert api.is_idle_within(5)


def test_many_at_once_each_get_their_own_answer(api: Served) -> None:
    """24 streams of 12 questions through one asynchronous client."""
    rows = prompts("sort", "test", n=12, seed=2)
    expected = [sampled(api, row["prompt"], temperature=0)[0].text for row in rows]

    async def one(client: AsyncOpenAI, index: int) -> str:
        stream = await client.chat.completions.create(
            model="starter", messages=rows[index % 12]["prompt"], temperature=0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, i) for i in range(24)))

    assert asyncio.run(all_of_them()) == expected * 2


def test_requests_are_recorded(api: Served, client: OpenAI) -> None:
    whole = ask(client, ADD, temperature=0)
    list(ask(client, THINK, temperature=0, stream=True))
    streamed, plain = api.server.recorder.recent()[:2]
    preview = whole.choices[0].message.content
    assert (plain["prompt_preview"], plain["completion_preview"]) == (ADD[0]["content"], preview)
    assert (plain["prompt_tokens"], plain["completion_tokens"]) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )
    assert (plain["finish_reason"], plain["streamed"], streamed["streamed"]) == ("stop", False, True)
    assert streamed["completion_preview"].startswith("<think>")
    ask(client, prompts("tool", n=1)[0]["prompt"], tools=[CALCULATOR], temperature=0)
    assert api.server.recorder.recent()[0]["finish_reason"] == "tool_calls"
    assert api.server.recorder.decode_stats()["sample_count"] > 0


def test_the_starter_is_as_good_over_http_as_it_is(client: OpenAI) -> None:
    rows = prompts("compare", "test", n=16, seed=1)
    answers = [ask(client, row["prompt"], temperature=0).choices[0].message.content for row in rows]
    right = sum(is_correct("compare", text, row["answer"]) for text, row in zip(answers, rows, strict=True))
    assert right >= 10, "80% in the starter's report"


# ---- what the settings add ----
def test_chats_without_a_system_message_or_a_form_have_the_servers(client: OpenAI, tmp_path: Path) -> None:
    """As `groupwise serve RUN` sets them; what a request says goes before."""
    asked = {"system": "Answer yes or no.", "structured_outputs": {"choice": ["yes", "no"]}}
    with (
        served(tmp_path, [chat.router], **asked) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as its,
    ):
        first = ask(its, ADD, max_tokens=64, return_token_ids=True)
        assert first.choices[0].message.content.strip() in ("yes", "no")
        assert tuple(first.prompt_token_ids) == ids_of([{"role": "system", "content": asked["system"]}, *ADD])
        own = [{"role": "system", "content": "Be brief."}, *ADD]
        second = ask(its, own, max_tokens=8, return_token_ids=True, response_format={"type": "text"}, seed=5)
        assert tuple(second.prompt_token_ids) == ids_of(own)
        plain = ask(client, own, max_tokens=8, return_token_ids=True, seed=5)
        assert second.choices[0].token_ids == plain.choices[0].token_ids
