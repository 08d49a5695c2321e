"""Canned replies: calls that every format reads back, arguments that their schemas accept."""

from __future__ import annotations

import doctest
import json

import jsonschema_rs
import pytest

from groupwise.model.reply_formats.known import FORMATS
from groupwise.tasks.check import scripts
from groupwise.tasks.check.scripts import SCRIPTS, ScriptInput, example_of
from groupwise.tasks.tool_calls import parse
from groupwise.tasks.tools import CallableTool

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string"}, "count": {"type": "integer"}, "note": {"type": "string"}},
            "required": ["item", "count"],
        },
    },
}
BY_NAME = {script.name: script for script in SCRIPTS}


@pytest.mark.parametrize("form", FORMATS.values(), ids=str)
def test_a_call_is_read_back_in_every_format(form):
    reply = parse(form.text_of("look", {"item": "tea", "count": 3}), form, tools=[LOOK])
    assert [call["function"] for call in reply.calls] == [{"name": "look", "arguments": {"item": "tea", "count": 3}}]
    assert reply.malformed == [] and reply.content == ""


@pytest.mark.parametrize("form", FORMATS.values(), ids=str)
def test_the_scripts_call_tools_or_fail_to_as_their_names_say(form):
    said = {
        name: script.reply(ScriptInput(turn=0, tools=[LOOK], form=form, heard="How?"))
        for name, script in BY_NAME.items()
    }
    read = {name: parse(text, form, tools=[LOOK]) for name, text in said.items()}
    assert [name for name, reply in read.items() if reply.calls] == [
        "the same call",
        "each tool once",
        "an unknown tool",
    ]
    assert [name for name, reply in read.items() if reply.malformed] == ["an unreadable call"]
    assert said["nothing"] == "" and said["what it heard"] == "How?" and len(said["a long text"]) > 5000
    after = ScriptInput(turn=1, tools=[LOOK], form=form, heard="")
    assert not parse(BY_NAME["each tool once"].reply(after), form).calls


def test_gibberish_is_another_in_each_turn_and_the_same_next_time():
    turns = [
        BY_NAME["gibberish"].reply(ScriptInput(turn=t, tools=(), form=FORMATS["hermes"], heard="")) for t in (0, 1, 0)
    ]
    assert turns[0] == turns[2] != turns[1]


def function(item: str, kind: list[int], limit: float = 2.5, *, deep: dict[str, str] | None = None) -> str:
    """Does something."""
    return item


@pytest.mark.parametrize(
    "schema",
    [
        CallableTool.from_function(function).parameters,
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/A"}},
            "required": ["a"],
            "$defs": {"A": {"enum": [7]}},
        },
        {"type": "object", "properties": {"a": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"type": ["integer", "null"], "minimum": 5}}, "required": ["a"]},
        {
            "type": "object",
            "properties": {"a": {"type": "array", "items": {"const": 1}, "minItems": 2}},
            "required": ["a"],
        },
        {"type": "object", "properties": {"a": {"type": "string", "minLength": 4}}, "required": ["a"]},
    ],
)
def test_made_up_arguments_keep_the_schema(schema):
    assert jsonschema_rs.is_valid(json.loads(json.dumps(schema)), example_of(schema))


def test_a_schema_without_end_and_one_that_is_none_have_an_example():
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    assert isinstance(example_of(endless), dict) and example_of("nonsense") == "x"
    assert example_of({"$ref": "#/nowhere"}) == "x"


def test_the_examples_in_the_text_are_true():
    assert doctest.testmod(scripts).failed == 0
