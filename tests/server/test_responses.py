"""/v1/responses over real sockets, on the starter, through OpenAI's own package, whose types read what is sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from groupwise.server import chat
from groupwise.server import responses as dialect
from groupwise.tasks.dialects.responses import ResponseNotFoundError, ResponsesRequest, ResponseStore
from groupwise.tasks.starter.tasks import CALCULATOR
from serving import Served, served
from wording import raises

ADD = "What is 47 + 138? Reply with just the number."
THINK = "What is 47 + 138? Think step by step."
CALL = "Use the calculator: 47 * 12"
TOOL = {"type": "function", "strict": False, **CALCULATOR["function"]}
CASES = {"text": (ADD, []), "thought": (THINK, []), "call": (CALL, [TOOL])}
GREEDY = {"model": "starter", "temperature": 0}


@pytest.fixture(scope="module")
def api(tmp_path_factory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("state"), [dialect.router, chat.router]) as server:
        yield server


@pytest.fixture(scope="module")
def client(api: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def output(response: Any) -> list[dict[str, Any]]:
    """Its items, but for ids, which are new each time."""
    keep = {"exclude": {"id", "call_id", "parsed_arguments"}, "exclude_none": True}
    items = [json.loads(item.model_dump_json(**keep)) for item in response.output]
    for item in items:
        for part in item.get("content", ()):
            part.pop("parsed", None)
    return items


# ---- answers ----
def test_a_strict_tool_a_named_one_and_a_format_are_kept_to(client: OpenAI) -> None:
    """By a model that would say something else."""
    strict = {"tools": [{**TOOL, "strict": True}], "tool_choice": {"type": "function", "name": TOOL["name"]}}
    (call,) = client.responses.create(input=ADD, **GREEDY, **strict).output
    assert call.type == "function_call" and set(json.loads(call.arguments)) == set(TOOL["parameters"]["required"])
    shape = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    kept = {"format": {"type": "json_schema", "name": "n", "schema": {**shape, "additionalProperties": False}}}
    said = client.responses.create(input=ADD, text=kept, **GREEDY)
    assert isinstance(json.loads(said.output_text)["n"], int)


def test_a_thought_and_a_text_are_items(client: OpenAI) -> None:
    response = client.responses.create(input=THINK, **GREEDY)
    Response.model_validate(json.loads(response.model_dump_json()))
    thought, message = response.output
    assert (thought.type, message.type, response.output_text) == ("reasoning", "message", "185")
    said = client.chat.completions.create(messages=[{"role": "user", "content": THINK}], max_tokens=64, **GREEDY)
    assert thought.content[0].text == said.choices[0].message.reasoning_content
    used = response.usage
    assert (used.input_tokens, used.output_tokens) == (said.usage.prompt_tokens, said.usage.completion_tokens)
    assert 0 < used.output_tokens_details.reasoning_tokens < used.output_tokens
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)


@pytest.mark.parametrize("case", CASES)
def test_the_events_add_up_to_the_whole_answer(client: OpenAI, case: str) -> None:
    said, tools = CASES[case]
    whole = client.responses.create(input=said, tools=tools, **GREEDY)
    with client.responses.stream(input=said, tools=tools, **GREEDY) as stream:
        events, streamed = [event.type for event in stream], stream.get_final_response()
    assert output(streamed) == output(whole) and streamed.usage.output_tokens == whole.usage.output_tokens
    assert events[:2] == ["response.created", "response.in_progress"] and events[-1] == "response.completed"
    assert events.count("response.output_item.added") == events.count("response.output_item.done") == len(whole.output)
    if case != "call":
        assert sum(event.endswith(".delta") for event in events) > len(whole.output), "it comes as it is sampled"


def test_every_event_is_one_of_the_clients_and_numbered(api: Served, client: OpenAI) -> None:
    known: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    body = {"input": CALL, "tools": [TOOL], "stream": True, **GREEDY}
    raw = client._client.post(f"{api.url}/v1/responses", json=body).text
    lines = [line for line in raw.splitlines() if line.startswith(("event:", "data:"))]
    assert "[DONE]" not in raw
    for number, (name, data) in enumerate(zip(lines[::2], lines[1::2], strict=True)):
        event = known.validate_json(data.removeprefix("data: "))
        assert name == f"event: {event.type}" and event.sequence_number == number
        fields = json.loads(data.removeprefix("data: ")).keys()
        assert fields == type(event).model_fields.keys() & fields, "none that the client does not know"


def test_a_conversation_goes_on_from_items_or_from_what_was_stored(client: OpenAI) -> None:
    first = client.responses.create(input=CALL, tools=[TOOL], instructions="Be exact.", **GREEDY)
    (called,) = first.output
    assert json.loads(called.arguments) == {"expression": "47*12"}
    result = {"type": "function_call_output", "call_id": called.call_id, "output": "564"}
    shared = {"tools": [TOOL], "instructions": "Be exact.", **GREEDY}
    whole = client.responses.create(
        input=[{"role": "user", "content": CALL}, *[item.model_dump() for item in first.output], result], **shared
    )
    stored = client.responses.create(input=[result], previous_response_id=first.id, **shared)
    assert whole.output_text == stored.output_text == "564"
    assert whole.usage.input_tokens == stored.usage.input_tokens
    without = client.responses.create(input=[result], previous_response_id=first.id, tools=[TOOL], **GREEDY)
    assert without.usage.input_tokens < stored.usage.input_tokens, "instructions are not taken over"


def test_a_developers_message_joins_the_instructions(client: OpenAI) -> None:
    """The starter's chat template, like many, has one system message."""
    asked = [{"role": "developer", "content": "Be exact."}, {"role": "user", "content": ADD}]
    both = client.responses.create(instructions="Be brief.", input=asked, **GREEDY)
    one = client.responses.create(instructions="Be brief.\nBe exact.", input=ADD, **GREEDY)
    assert output(both) == output(one) and both.usage.input_tokens == one.usage.input_tokens


def test_what_is_stored_can_be_read_and_deleted(client: OpenAI) -> None:
    kept = client.responses.create(input=ADD, metadata={"who": "me"}, **GREEDY)
    assert client.responses.retrieve(kept.id).model_dump() == kept.model_dump() and kept.metadata == {"who": "me"}
    with client.responses.stream(input=ADD, **GREEDY) as stream:
        streamed = stream.until_done().get_final_response()
    assert client.responses.retrieve(streamed.id).output_text == kept.output_text
    client.responses.delete(kept.id)
    private = client.responses.create(input=ADD, store=False, **GREEDY)
    for gone in (kept.id, private.id, "resp_none"):
        with pytest.raises(openai.NotFoundError) as missing:
            client.responses.retrieve(gone)
        assert missing.value.code == "response_not_found"
        with raises(openai.BadRequestError) as refused:
            client.responses.create(input=ADD, previous_response_id=gone, **GREEDY)
        assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(kept.id)


def test_what_cuts_it(client: OpenAI) -> None:
    for stream in (False, True):
        asked = {"input": THINK, "max_output_tokens": 6, **GREEDY}
        if stream:
            *_, last = client.responses.create(stream=True, **asked)
            assert last.type == "response.incomplete"
            response = last.response
        else:
            response = client.responses.create(**asked)
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (response.output[-1].status, response.usage.output_tokens) == ("incomplete", 6)


def test_what_changes_nothing_is_accepted(client: OpenAI) -> None:
    plain = client.responses.create(input=ADD, **GREEDY)
    other = client.responses.create(
        input=[{"type": "message", "role": "user", "content": [{"type": "input_text", "text": ADD}]}],
        include=["reasoning.encrypted_content"],
        text={"format": {"type": "text"}, "verbosity": "medium"},
        reasoning={"effort": "high", "summary": "auto"},
        truncation="disabled",
        service_tier="auto",
        user="me",
        tool_choice="auto",
        **GREEDY,
    )
    assert output(other) == output(plain)


IMAGE = {"type": "input_image", "image_url": "http://x"}
REFUSED = {
    "image": ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].image_url"),
    "their tool": ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    "their item": ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    "truncation": ({"truncation": "auto"}, "truncation"),
    "background": ({"background": True}, "background"),
    "conversation": ({"conversation": "conv_1"}, "conversation"),
    "verbosity": ({"text": {"verbosity": "low"}}, "text.verbosity"),
    "nothing": ({"input": []}, "input"),
    "slip": ({"extra_body": {"instruction": "x"}}, "instruction"),
    "another name": ({"extra_body": {"max_tokens": 5}}, "max_tokens"),
    "stop": ({"extra_body": {"stop": ["x"]}}, "stop"),
    "schema": (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"properties": {"x": {"type": "int"}}}}}},
        "text.format.schema.properties.x",
    ),
    "choice": ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
    "bound": ({"max_output_tokens": 0}, "max_output_tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_says_where_and_why(client: OpenAI, case: str) -> None:
    body, where = REFUSED[case]
    with raises(openai.BadRequestError, param=where):
        client.responses.create(**{"input": ADD, **GREEDY, **body})


def test_the_store_is_bounded() -> None:
    request = ResponsesRequest(input="x")
    answer = {"output": [{"type": "message", "role": "assistant", "content": "y" * 400}]}
    store = ResponseStore(most=3, most_bytes=1 << 20)
    for number in range(5):
        store.keep(request, {"id": str(number), **answer}, ())
    assert [store.find(str(number)).answer["id"] for number in (2, 3, 4)] == ["2", "3", "4"]
    with raises(ResponseNotFoundError):
        store.find("1")
    small = ResponseStore(most=99, most_bytes=2500)
    for number in range(5):
        small.keep(request, {"id": str(number), **answer}, ())
    assert small.find("4").messages == [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y" * 400}]
    with pytest.raises(ResponseNotFoundError):
        small.find("1")
    small.delete("4")
    for number in range(9):
        small.keep(ResponsesRequest(input="x", store=False), {"id": f"no {number}", **answer}, ())
    assert small.find("3")


@pytest.mark.long
def test_a_deadline_in_a_stream_is_a_response_that_failed(tmp_path) -> None:
    with served(tmp_path / "short", [dialect.router], request_timeout_s=1.5) as slow:
        client = OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0)
        body = {"extra_body": {"ignore_eos": True}, "max_output_tokens": 900, "stream": True}
        streams = [client.responses.create(input=ADD, **body, **GREEDY) for _ in range(24)]
        *_, last = streams[-1]
        for stream in streams:
            stream.close()
        assert last.type == "response.failed" and "not whole" in last.response.error.message
        assert last.response.status == "failed" and last.response.error.code == "server_error"
        assert slow.is_idle_within(120)
