"""Conversations of every system come to the same messages."""

from __future__ import annotations

import base64
import json

import pytest

from groupwise.errors import DataError
from groupwise.tasks.logs.messages import answer_in, conversation, tools_in
from wording import raises

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6364f8cf500f0003018601"
    "5a34f4da0000000049454e44ae426082"
)
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
ASKED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is it warm in Paris?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "content": "21 degrees", "tool_call_id": "c1"},
]
OPENAI = [
    ASKED[0] | {"role": "developer"},
    {"role": "user", "content": [{"type": "text", "text": "Is it warm in Paris?"}]},
    ASKED[2] | {"refusal": None, "annotations": []},
    ASKED[3],
]
ANTHROPIC = [
    ASKED[0],
    ASKED[1],
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Paris"}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "21 degrees"}]},
]
RESPONSES = [
    ASKED[0],
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Is it warm in Paris?"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Paris"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "21 degrees"},
]
OTEL = [
    {"role": "system", "parts": [{"type": "text", "content": "Be brief."}]},
    {"role": "user", "parts": [{"type": "text", "content": "Is it warm in Paris?"}]},
    {
        "role": "assistant",
        "parts": [
            {"type": "text", "content": "I look."},
            {"type": "tool_call", "id": "c1", "name": "weather", "arguments": {"city": "Paris"}},
        ],
    },
    {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "21 degrees"}]},
]
LANGCHAIN = [
    {"type": "system", "content": "Be brief."},
    {"type": "human", "content": "Is it warm in Paris?"},
    {"type": "ai", "content": "I look.", "tool_calls": [{"name": "weather", "args": {"city": "Paris"}, "id": "c1"}]},
    {"type": "tool", "content": "21 degrees", "tool_call_id": "c1"},
]
SERIALISED = [
    {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", f"{name}Message"], "kwargs": each}
    for name, each in zip(("System", "Human", "AI", "Tool"), LANGCHAIN, strict=True)
]


@pytest.mark.parametrize(
    "written",
    [OPENAI, ANTHROPIC, RESPONSES, OTEL, LANGCHAIN, SERIALISED, [SERIALISED], json.dumps(OPENAI), {"messages": OPENAI}],
    ids=["openai", "anthropic", "responses", "otel", "langchain", "serialised", "batch", "json", "object"],
)
def test_a_conversation_with_a_tool_is_the_same_in_all_forms(written):
    assert list(conversation(written)) == ASKED


@pytest.mark.parametrize(
    "said",
    [
        "It is warm.",
        {"role": "assistant", "content": "It is warm."},
        {"choices": [{"message": {"role": "assistant", "content": "It is warm."}}]},
        {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "It is warm."}]},
        [{"type": "text", "text": "It is warm."}],
        {
            "object": "response",
            "output": [
                {"type": "reasoning", "summary": []},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is warm."}]},
            ],
        },
        [{"role": "assistant", "parts": [{"type": "text", "content": "It is warm."}], "finish_reason": "stop"}],
        {"generations": [[{"text": "It is warm.", "message": {"type": "ai", "content": "It is warm."}}]]},
        {"generations": [{"text": "It is warm."}]},
        {"output": "It is warm."},
        {"messages": [{"type": "human", "content": "Is it?"}, {"type": "ai", "content": "It is warm."}]},
    ],
)
def test_an_answer_is_the_assistants_message_of_any_response(said):
    answer = answer_in(said)
    assert (answer["role"], answer.get("content")) == ("assistant", "It is warm.")


def test_a_call_with_an_empty_text_is_one():
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert answer_in({"choices": [{"message": called}]})["tool_calls"] == [CALL]  # pyright: ignore
    assert conversation([ASKED[1], called, ASKED[3]])[1]["tool_calls"] == [CALL]  # pyright: ignore


def test_thoughts_stay_beside_what_was_said():
    said = [
        {"type": "thinking", "thinking": "21 is warm", "signature": "x"},
        {"type": "text", "text": "Yes."},
    ]
    assert answer_in({"role": "assistant", "content": said}) == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "21 is warm",
    }


def test_tools_of_all_forms_are_the_same_and_those_of_a_provider_are_left_out():
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": "weather", "description": "Of today.", "parameters": schema}
    ours = ({"type": "function", "function": function},)
    assert tools_in(list(ours)) == ours
    assert tools_in([{"type": "function", **function}, {"type": "web_search"}]) == ours
    assert tools_in([{"name": "weather", "description": "Of today.", "input_schema": schema}]) == ours
    assert tools_in(None) == tools_in([]) == ()


@pytest.mark.parametrize(
    "written",
    [
        [],
        7,
        [{"role": "alien", "content": "hello"}],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        [{"type": "web_search_call", "id": "w"}],
        {"question": "?"},
        [{"role": "user", "parts": [{"type": "blob", "content": "x"}]}],
        [{"type": "remove", "content": "x"}],
    ],
)
def test_what_cannot_be_read_says_why(written):
    with raises(DataError):
        conversation(written)


def test_an_image_is_refused_as_nothing_can_mask_it():
    image = "data:image/png;base64," + base64.b64encode(PIXEL).decode()
    with raises(DataError):
        conversation([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": image}}]}])


def test_an_answer_of_the_user_is_none():
    with raises(DataError):
        answer_in([{"role": "user", "content": "I ask."}])
