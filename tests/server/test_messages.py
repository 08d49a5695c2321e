"""/v1/messages over real sockets, on the starter, through Anthropic's own package, whose types read what is sent."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from groupwise.server import chat
from groupwise.server import messages as dialect
from groupwise.tasks.starter.tasks import CALCULATOR
from peers import peer
from serving import Served, served
from wording import raises, wording

anthropic = peer("anthropic")

ADD = [{"role": "user", "content": "What is 47 + 138? Reply with just the number."}]
THINK = [{"role": "user", "content": "What is 47 + 138? Think step by step."}]
CALL = [{"role": "user", "content": "Use the calculator: 47 * 12"}]
FUNCTION = CALCULATOR["function"]
TOOL = {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
CASES = {"text": (ADD, []), "thought": (THINK, []), "call": (CALL, [TOOL])}


@pytest.fixture(scope="module")
def api(tmp_path_factory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("state"), [dialect.router, chat.router]) as server:
        yield server


@pytest.fixture(scope="module")
def client(api: Served) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=api.url, api_key="none", max_retries=0) as client:
        yield client


def options(**more: Any) -> dict[str, Any]:
    """A greedy request. The package has no parameter `temperature` any more; the body has."""
    body = {"temperature": 0, **more.pop("extra_body", {})}
    return {"model": "starter", "max_tokens": 64, "messages": ADD, "extra_body": body, **more}


def content(message: Any) -> list[dict[str, Any]]:
    """Its blocks, but for the ids of calls, which are new each time."""
    return [block.model_dump(exclude={"id"}, exclude_none=True) for block in message.content]


def raw(api: Served, body: dict[str, Any]) -> socket.socket:
    data = json.dumps({"model": "starter", "max_tokens": 64, "messages": ADD, "temperature": 0, **body}).encode()
    connection = socket.create_connection(("127.0.0.1", api.port), timeout=120)
    head = f"POST /v1/messages?beta=true HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n"
    connection.sendall(f"{head}content-type: application/json\r\nconnection: close\r\n\r\n".encode() + data)
    return connection


# ---- answers ----
def test_a_thought_and_a_text_are_blocks(api: Served, client: Any) -> None:
    message = client.messages.create(**options(messages=THINK))
    anthropic.types.Message.model_validate_json(message.model_dump_json(), strict=True)
    thought, text = message.content
    assert (thought.type, text.type, text.text) == ("thinking", "text", "185") and thought.signature
    assert (message.stop_reason, message.stop_sequence, message.role) == ("end_turn", None, "assistant")
    said = OpenAI(base_url=f"{api.url}/v1", api_key="none").chat.completions.create(
        model="starter", messages=THINK, temperature=0, max_tokens=64
    )
    assert thought.thinking == said.choices[0].message.reasoning_content
    used = message.usage
    assert used.input_tokens + used.cache_read_input_tokens == said.usage.prompt_tokens
    assert used.output_tokens == said.usage.completion_tokens
    assert 0 < used.output_tokens_details.thinking_tokens < used.output_tokens


@pytest.mark.parametrize("case", CASES)
def test_the_events_add_up_to_the_whole_answer(client: Any, case: str) -> None:
    said, tools = CASES[case]
    whole = client.messages.create(**options(messages=said, tools=tools))
    with client.messages.stream(**options(messages=said, tools=tools)) as stream:
        events, streamed = [event.type for event in stream], stream.get_final_message()
    assert content(streamed) == content(whole)
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert events[0] == "message_start" and events[-2:] == ["message_delta", "message_stop"]
    assert events.count("content_block_start") == events.count("content_block_stop") == len(whole.content)
    if case == "thought":  # a call is one delta, sent when it is whole; three tokens of a sum can be one
        assert events.count("content_block_delta") > len(whole.content), "it comes as it is sampled"


def test_every_event_is_one_of_the_clients(api: Served) -> None:
    from pydantic import TypeAdapter

    known = TypeAdapter(anthropic.types.RawMessageStreamEvent)
    with raw(api, {"messages": THINK, "stream": True}) as connection:
        told = b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()
    lines = [line for line in told.partition("\r\n\r\n")[2].splitlines() if line.startswith(("event:", "data:"))]
    assert "[DONE]" not in told
    for name, data in zip(lines[::2], lines[1::2], strict=True):
        event = known.validate_json(data.removeprefix("data: "), strict=True)
        assert name == f"event: {event.type}"


def test_a_call_comes_back_with_its_result(client: Any) -> None:
    first = client.messages.create(**options(messages=CALL, tools=[TOOL]))
    (use,) = first.content
    assert (use.type, use.name, use.input) == ("tool_use", "calculator", {"expression": "47*12"})
    assert first.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "564"}]}
    said = [*CALL, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(**options(messages=said, tools=[TOOL]))
    assert second.content[0].text == "564" and second.stop_reason == "end_turn"
    none = client.messages.create(**options(messages=CALL, tools=[TOOL], tool_choice={"type": "none"}))
    assert none.stop_reason != "tool_use"


def test_what_ended_it(client: Any) -> None:
    cut = client.messages.create(**options(max_tokens=1))
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 1)
    for stream in (False, True):
        asked = options(messages=THINK, stop_sequences=["never", "=15"])
        if stream:
            with client.messages.stream(**asked) as events:
                stopped = events.get_final_message()
        else:
            stopped = client.messages.create(**asked)
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "=15")
        assert stopped.content[0].thinking.endswith("7+8")
    ended = client.messages.create(**options(stop_sequences=["never"]))
    assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)


def test_the_reply_goes_on_with_a_last_message_of_the_assistants(api: Served, client: Any) -> None:
    said = [*ADD, {"role": "assistant", "content": "The answer is"}]
    message = client.messages.create(**options(messages=said))
    with OpenAI(base_url=f"{api.url}/v1", api_key="none") as other:
        answer = other.chat.completions.create(model="starter", messages=said, temperature=0, max_tokens=64)
    assert message.content[0].text == answer.choices[0].message.content
    assert "answer" not in message.content[0].text


@pytest.mark.slow
def test_a_reply_may_be_asked_to_be_longer_than_the_context(api: Served, client: Any) -> None:
    """As harnesses do, which know other models: it ends where the context does, and says so."""
    context = api.engine.context_length
    with client.messages.stream(**options(max_tokens=32_000, extra_body={"ignore_eos": True})) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "model_context_window_exceeded"
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens + message.usage.output_tokens == context


def test_tokens_are_counted_as_they_are_sampled(client: Any) -> None:
    said = [*CALL, {"role": "assistant", "content": "No."}, *ADD]
    system = [{"type": "text", "text": "Be exact.", "cache_control": {"type": "ephemeral"}}]
    counted = client.messages.count_tokens(model="starter", messages=said, system=system, tools=[TOOL])
    used = client.messages.create(**options(messages=said, system=system, tools=[TOOL])).usage
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens
    fewer = client.messages.count_tokens(model="starter", messages=said)
    assert fewer.input_tokens < counted.input_tokens


def test_a_system_message_in_the_conversation_is_told_as_the_users(client: Any) -> None:
    """As Claude Code sends them; chat templates have one, at the head. Those that stand there join `system`."""
    note = {"role": "system", "content": "Be exact."}
    late = [*ADD, note, {"role": "assistant", "content": "No."}, note]
    same = [{**ADD[0], "content": f"{ADD[0]['content']}\nBe exact."}, late[2], {**note, "role": "user"}]
    used = [client.messages.create(**options(messages=messages)) for messages in (late, same)]
    assert content(used[0]) == content(used[1])
    early, plain = [note, *ADD], {"system": "Be short.\nBe exact."}
    counts = [
        client.messages.count_tokens(model="starter", messages=messages, **given).input_tokens
        for messages, given in ((late, {}), (same, {}), (early, {"system": "Be short."}), (ADD, plain))
    ]
    assert counts[0] == counts[1] and counts[2] == counts[3]


def test_what_changes_nothing_is_accepted(client: Any) -> None:
    plain = client.messages.create(**options())
    more = {
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "mcp_servers": [],
    }
    other = client.beta.messages.create(
        **options(
            metadata={"user_id": "me"},
            service_tier="auto",
            thinking={"type": "enabled", "budget_tokens": 1024},
            cache_control={"type": "ephemeral"},
            betas=["any-2026-01-01"],
            extra_body=more,
        )
    )
    assert content(other) == content(plain)


# ---- what is refused ----
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}
REFUSED = {
    "image": ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].source"),
    "document": ({"system": [{"type": "document"}]}, "system[0]"),
    "their tool": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    "edits": (
        {"extra_body": {"context_management": {"edits": [{"type": "compact_20260112"}]}}},
        "context_management.edits[0]",
    ),
    "mcp": ({"extra_body": {"mcp_servers": [{"type": "url"}]}}, "mcp_servers"),
    "slip": ({"extra_body": {"stop_sequence": ["x"]}}, "stop_sequence"),
    "another name": ({"extra_body": {"stop": ["x"]}}, "stop"),
    "no messages": ({"messages": []}, "messages"),
    "stop": ({"stop_sequences": ["x"] * 99}, "stop_sequences"),
    "a call of the user's": (
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
        "messages[0].content[0]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_says_where_and_why(client: Any, case: str) -> None:
    body, where = REFUSED[case]
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**options(**body))
    error = anthropic.types.ErrorResponse.model_validate(caught.value.body).error
    assert (caught.value.body["type"], error.type) == ("error", "invalid_request_error")
    assert caught.value.body["error"]["param"] == where
    wording(caught.value.body["error"])
    assert caught.value.request_id is None or caught.value.request_id == caught.value.body["request_id"]


SHAPE = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def test_a_named_tool_is_called_and_a_format_is_kept_to(client: Any) -> None:
    """By a model that would say something else."""
    named = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": TOOL["name"]}}
    called = client.messages.create(**options(messages=ADD, **named))
    (call,) = [block for block in called.content if block.type == "tool_use"]
    assert called.stop_reason == "tool_use" and set(call.input) == set(TOOL["input_schema"]["required"])
    said = client.messages.create(
        **options(messages=ADD, output_config={"format": {"type": "json_schema", "schema": SHAPE}})
    )
    assert isinstance(json.loads(said.content[-1].text)["n"], int)


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (
            {"tools": [{**TOOL, "input_schema": {"type": "object", "properties": {"x": {"not": {}}}}, "strict": True}]},
            "tools[0].input_schema.properties.x",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"properties": {"x": {"type": "int"}}}}}},
            "output_config.format.schema.properties.x",
        ),
    ],
)
def test_a_schema_that_cannot_be_kept_to_has_its_path(client: Any, body: dict[str, Any], where: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**options(**body))
    error = caught.value.body["error"]
    assert error["code"] == "invalid_grammar"
    assert error["param"].startswith(where) and error["message"].startswith(where)


def test_errors_have_the_clients_classes(api: Served, client: Any) -> None:
    long = [{"role": "user", "content": "seven " * 3000}]
    other = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}
    for error, body, facts in (
        (anthropic.NotFoundError, {"model": "claude"}, ("model_not_found", None)),
        (anthropic.BadRequestError, {"messages": long}, ("context_length_exceeded", None)),
        (anthropic.BadRequestError, other, ("invalid_value", "tool_choice")),
    ):
        with raises(error) as caught:
            client.messages.create(**options(**body))
        said = caught.value.body["error"]
        assert (said["code"], said["param"]) == facts


def test_the_key_is_anthropics_header_or_a_bearer(tmp_path) -> None:
    with served(tmp_path / "locked", [dialect.router], api_key="right") as locked:
        for given in ({"api_key": "right"}, {"auth_token": "right"}):
            client = anthropic.Anthropic(base_url=locked.url, max_retries=0, **given)
            assert client.messages.create(**options(max_tokens=2)).content
        with pytest.raises(anthropic.AuthenticationError) as caught:
            anthropic.Anthropic(base_url=locked.url, api_key="wrong", max_retries=0).messages.create(**options())
        assert caught.value.body["error"]["type"] == "authentication_error"


# ---- streams that end early ----
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_engine(api: Served, stream: bool) -> None:
    connection = raw(api, {"stream": stream, "ignore_eos": True, "max_tokens": 900})
    assert api.is_busy_within(120)
    connection.close()
    assert api.is_idle_within(30)


@pytest.mark.long
def test_a_deadline_in_a_stream_is_an_error_event(tmp_path) -> None:
    with served(tmp_path / "short", [dialect.router], request_timeout_s=1.5) as slow:
        client = anthropic.Anthropic(base_url=slow.url, api_key="none", max_retries=0)
        bodies = [raw(slow, {"stream": True, "ignore_eos": True, "max_tokens": 900}) for _ in range(24)]
        with (
            raises(anthropic.APIStatusError) as caught,
            client.messages.stream(**options(extra_body={"ignore_eos": True}, max_tokens=900)) as stream,
        ):
            list(stream)
        assert caught.value.body["error"]["type"] == "timeout_error"
        for connection in bodies:
            connection.close()
        assert slow.is_idle_within(120)
