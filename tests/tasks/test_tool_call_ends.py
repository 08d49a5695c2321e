"""Where a tool call ends, whole and as a stream; and what type a parameter in XML has."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.model.chat import encode_prompt
from groupwise.model.reply_formats.format import ReplyFormat
from groupwise.model.reply_formats.known import FORMATS
from groupwise.tasks.tool_calls import parse
from groupwise.types import Message, Prompt
from serving import starter

HERMES, XML = FORMATS["hermes"], FORMATS["qwen_xml"]
MARKS = ["</tool_call>", "<tool_call>", "</parameter>", "</function>", "{", "}", '"', "\\", "\n", "a", " "]
texts = st.lists(st.sampled_from(MARKS), max_size=6).map("".join)


def tool(**properties: Any) -> dict[str, Any]:
    defined = {"Id": {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "$defs": defined}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def streamed(text: str, form: ReplyFormat, tools: tuple[dict[str, Any], ...] = (), size: int = 1) -> list[dict]:
    parser = form.parser(tools=tools)
    parts = [part for at in range(0, len(text), size) for part in parser.push(text[at : at + size])] + parser.finish()
    return [json.loads(part.arguments) for part in parts if part.kind == "tool_call"]


@given(texts, st.integers(1, 9))
def test_no_mark_in_a_json_string_ends_a_call(value: str, size: int) -> None:
    call = {"name": "f", "arguments": {"x": value}}
    text = f"Well. <tool_call>{json.dumps(call)}</tool_call> <tool_call>{json.dumps(call)}</tool_call> Done."
    found = parse(text, HERMES)
    assert [each["function"]["arguments"] for each in found.calls] == [{"x": value}] * 2 and not found.malformed
    assert streamed(text, HERMES, size=size) == [{"x": value}] * 2


@pytest.mark.parametrize("value", ["a </parameter> b", "say </tool_call> twice </tool_call>", '{"k": "</parameter>"}'])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_no_mark_in_a_parameter_ends_a_call(value: str, size: int) -> None:
    tools = (tool(x={"type": "string"}, n={"type": "integer"}),)
    body = f"<function=f>\n<parameter=x>\n{value}\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>"
    text = f"<tool_call>\n{body}\n</tool_call>"
    assert [each["function"]["arguments"] for each in parse(text, XML, tools=tools).calls] == [{"x": value, "n": 3}]
    assert streamed(text, XML, tools, size) == [{"x": value, "n": 3}]


@pytest.mark.parametrize("form", [HERMES, XML])
@pytest.mark.parametrize(
    "text", ["<tool_call>junk</tool_call> more", '<tool_call>{"a": "</tool_call> more', "<tool_call>"]
)
def test_what_cannot_be_read_ends_at_its_first_mark_and_stays(form: ReplyFormat, text: str) -> None:
    found = parse(text, form)
    assert not found.calls and len(found.malformed) == 1 and found.content == text
    parser = form.parser()
    parts = [part for letter in text for part in parser.push(letter)] + parser.finish()
    assert "".join(part.text for part in parts) == text and {part.kind for part in parts} == {"content"}


@pytest.mark.parametrize(
    ("schema", "written", "read"),
    [
        ({"allOf": [{"type": "string"}]}, "123", "123"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"$ref": "#/$defs/Id"}, "7", "7"),
        ({"anyOf": [{"$ref": "#/$defs/Id"}, {"type": "null"}]}, "7", "7"),
        ({"const": "5"}, "5", "5"),
        ({"enum": [1, 2]}, "1", 1),
        ({"type": "integer"}, "12", 12),
        ({"type": "string"}, "", ""),
        ({"type": 5}, "1", 1),  # what is no schema says nothing
        ({"enum": 3, "allOf": 7}, "1", 1),
        ({"type": [{"a": 1}, "string"]}, "1", "1"),
    ],
)
def test_a_parameter_has_the_type_that_its_schema_says(schema: dict[str, Any], written: str, read: Any) -> None:
    text = f"<tool_call><function=f><parameter=x>\n{written}\n</parameter></function></tool_call>"
    (call,) = parse(text, XML, tools=[tool(x=schema)]).calls
    assert call["function"]["arguments"] == {"x": read}


@pytest.mark.parametrize("parameters", [None, {}, {"properties": ["x"]}, ["x"]])
def test_a_tool_whose_parameters_are_no_schema_is_called_all_the_same(parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    text = "<tool_call><function=f><parameter=x>\n1\n</parameter></function></tool_call>"
    (call,) = parse(text, XML, tools=tools).calls
    assert call["function"]["arguments"] == {"x": 1}


@pytest.mark.parametrize("schema", [{"type": "integer"}, {"type": ["number", "null"]}, {"enum": [1, 2]}])
def test_nothing_is_no_number(schema: dict[str, Any]) -> None:
    text = "<tool_call><function=f><parameter=x>\n\n</parameter></function></tool_call>"
    (call,) = parse(text, XML, tools=[tool(x=schema)]).calls
    assert call["function"]["arguments"] == {}


@pytest.mark.parametrize("arguments", ["5", '"x"', '{"n": 1e400}', "[1]", "not JSON"])
def test_arguments_of_the_past_reach_the_template_as_they_are(arguments: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = (
        Message(role="user", content="Go."),
        Message(role="assistant", content="", tool_calls=[call]),
        Message(role="tool", content="ok", tool_call_id="c1"),
    )
    tokenizer = starter().tokenizer
    prompt = encode_prompt(Prompt(id="p", messages=messages), tokenizer)
    text = tokenizer.decode(list(prompt.token_ids))
    assert f'"arguments": {arguments}' in text and "Infinity" not in text
