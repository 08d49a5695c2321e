"""OpenAI's chat form: the live server and the endpoint of episodes read the same messages, tools and formats."""

from __future__ import annotations

import json
from typing import Any

import pytest

from groupwise.errors import RequestError
from groupwise.sdk.client import ChatOptions
from groupwise.server.bodies import parse_body
from groupwise.server.schema_openai import ChatRequest
from groupwise.tasks.dialects.anthropic import MessagesRequest
from groupwise.tasks.dialects.chat_form import as_messages
from groupwise.tasks.dialects.responses import ResponsesRequest, ResponseStore
from groupwise.tasks.openai import AgentChatRequest, read_other, read_request
from wording import raises

HI = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": True}}
CALL = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": "{}"}}
ODD = {**CALL, "function": {"name": "add two, please!" * 40, "arguments": {"a": 1}}}


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
    name, arguments = ODD["function"].values()
    used = {"type": "tool_use", "id": "call_0", "name": name, "input": arguments}
    messages = [HI, {"role": "assistant", "content": [used]}, HI]
    body = json.dumps({"messages": messages, "max_tokens": 1}).encode()
    assert called_in(read_other(body, MessagesRequest)[0]) == (name, arguments)
    item = {"type": "function_call", "call_id": "call_0", "name": name, "arguments": json.dumps(arguments)}
    request, asked = read_other(json.dumps({"input": [HI, item, HI]}).encode(), ResponsesRequest)
    assert called_in(request) == (name, arguments)
    store = ResponseStore()
    store.keep(asked, {"id": "resp_1", "output": [item]}, ())  # pyright: ignore[reportArgumentType]
    assert store.history("resp_1")[-1]["tool_calls"][0]["function"]["name"] == name


def called_in(request: AgentChatRequest) -> tuple[str, Any]:
    (call,) = request.conversation[1].get("tool_calls", [])
    return call["function"]["name"], json.loads(call["function"]["arguments"])


@pytest.mark.parametrize("length", [64, 128])
def test_a_tool_may_be_named_as_long_as_the_dialects_have_it(length: int) -> None:
    """Names of MCP servers and their tools together are longer than 64 characters; Anthropic takes 128."""
    tools = [{"name": "t" * length, "input_schema": {"type": "object"}}]
    body = json.dumps({"messages": [HI], "max_tokens": 1, "tools": tools}).encode()
    assert read_other(body, MessagesRequest)[0].offered_tools[0]["function"]["name"] == "t" * length


@pytest.mark.parametrize(
    ("model", "options", "hint"),
    [
        (ResponsesRequest, {"max_tokens": 5}, "max_output_tokens"),
        (ResponsesRequest, {"response_format": {"type": "json_object"}}, "text.format"),
        (ResponsesRequest, {"chat_template_kwargs": {"enable_thinking": False}}, "reasoning"),
        (ResponsesRequest, {"stop": ["x"]}, "stop strings"),
        (ResponsesRequest, {"n": 2}, "several requests"),
        (MessagesRequest, {"stop": ["x"]}, "stop_sequences"),
        (MessagesRequest, {"response_format": {"type": "json_object"}}, "output_config.format"),
        (MessagesRequest, {"n": 2}, "several requests"),
    ],
)
def test_a_field_of_the_chat_form_is_not_ignored_in_a_dialect(model: Any, options: dict[str, Any], hint: str) -> None:
    asked = {"input": "hi"} if model is ResponsesRequest else {"messages": [HI], "max_tokens": 1}
    read_other(json.dumps(asked | dict.fromkeys(options)).encode(), model)  # null is left out
    with raises(RequestError, field=next(iter(options))) as refused:
        read_other(json.dumps(asked | options).encode(), model)
    assert hint in str(refused.value.hint)


def test_what_narrows_the_choice_of_tokens_acts_in_each_dialect() -> None:
    wanted = {"top_k": 5, "min_p": 0.1, "top_p": 0.5}
    for asked, model in (({"input": "hi"}, ResponsesRequest), ({"messages": [HI], "max_tokens": 1}, MessagesRequest)):
        assert read_other(json.dumps(asked | wanted).encode(), model)[0].narrowing == wanted


def test_instructions_and_a_developers_messages_are_one_system_message_at_the_head() -> None:
    """As Codex sends them; chat templates have one. A later one, which is the user's, joins its neighbour."""
    says = [{"role": "developer", "content": "Be exact."}, {"role": "system", "content": "Be kind."}]
    items = [*says, HI, {"role": "assistant", "content": "Yes?"}, says[0], HI]
    request, _ = read_other(json.dumps({"instructions": "Be brief.", "input": items}).encode(), ResponsesRequest)
    assert [(each["role"], each["content"]) for each in request.conversation] == [  # pyright: ignore
        ("system", "Be brief.\nBe exact.\nBe kind."),
        ("user", "hi"),
        ("assistant", "Yes?"),
        ("user", "Be exact.\nhi"),
    ]


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
