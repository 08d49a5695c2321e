"""OpenAI's chat form: the live server and the endpoint of episodes read the same messages, tools and formats."""

from __future__ import annotations

import json
from typing import Any

import pytest

from groupwise.errors import RequestError
from groupwise.sdk.client import ChatOptions
from groupwise.server.bodies import parse_body
from groupwise.server.schema_openai import ChatRequest
from groupwise.tasks.dialects.chat_form import as_messages
from groupwise.tasks.openai import read_request

HI = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": True}}
CALL = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": "{}"}}
ODD = {**CALL, "function": {"name": "add two, please!", "arguments": {"a": 1}}}


def body_of(*messages: Any, **options: Any) -> bytes:
    return json.dumps({"messages": messages, **options}).encode()


@pytest.mark.parametrize(
    "said",
    [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache": 1}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "annotations": []},
        {"role": "assistant", "content": "x", "tool_calls": []},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": None, "tool_calls": [ODD]},
    ],
)
def test_a_message_is_read_alike(said: dict[str, Any]) -> None:
    body = body_of(HI, said, HI)
    served, episode = parse_body(body, ChatRequest), read_request(body)
    assert as_messages(served.messages) == episode.conversation


def test_the_policys_own_call_may_be_sent_back_whatever_it_is_named() -> None:
    (_, said, _) = read_request(body_of(HI, {"role": "assistant", "tool_calls": [ODD]}, HI)).conversation
    assert said.get("tool_calls") == [ODD]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tools": [{"type": "function", "function": {"name": "add two"}}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"stream_options": {"include_usage": "yes"}, "stream": True}, "stream_options"),
    ],
)
def test_both_refuse_the_same(options: dict[str, Any], field: str) -> None:
    for read in (read_request, lambda body: parse_body(body, ChatRequest)):
        with pytest.raises(RequestError) as refused:
            read(body_of(HI, **options))
        assert refused.value.field is not None and refused.value.field.startswith(field)


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "tool", "tool_call_id": "1"}, {"role": "assistant"}])
def test_a_message_says_something(message: dict[str, Any]) -> None:
    for read in (read_request, lambda body: parse_body(body, ChatRequest)):
        with pytest.raises(RequestError) as refused:
            read(body_of(HI, message, HI))
        assert refused.value.code == "invalid_messages"


@pytest.mark.parametrize(
    "options", [{"max_tokens": "5"}, {"temprature": 0.5}, {"enable_thinking": True}, {"stop": ["x"] * 1000}]
)
def test_only_the_endpoint_is_lenient_about(options: dict[str, Any]) -> None:
    read_request(body_of(HI, **options))
    with pytest.raises(RequestError):
        parse_body(body_of(HI, **options), ChatRequest)


def test_the_tools_are_told_of_alike() -> None:
    body = body_of(HI, tools=[TOOL])
    assert tuple(parse_body(body, ChatRequest).offered) == read_request(body).offered_tools
    assert "strict" not in json.dumps(read_request(body).offered_tools)


def test_what_the_client_offers_is_in_the_body() -> None:
    assert ChatOptions.__annotations__.keys() <= ChatRequest.model_fields.keys()
