"""Scripted replies with which `groupwise env check` plays an environment without a model: those that policies come up
with early on.

Each script is a policy: it answers whatever it hears in its own way, turn after turn. No script does a task, so that
the rewards which an environment gives them are those that a policy can have without doing its task. Scripts write tool
calls in the format of the model's chat template, with arguments made up from the tool's schema.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from groupwise.model.reply_formats.format import ReplyFormat, Tools

_WORDS = "some water runs under a small bridge while birds sleep in tall trees and a cold wind moves every leaf"


@dataclass(frozen=True, kw_only=True)
class ScriptInput:
    """The input of a script: the number of the turn (from 0), the tools on offer and the format of a call, and what the
    policy was told as text."""

    turn: int
    tools: Tools
    form: ReplyFormat
    heard: str
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Script:
    """A policy of canned replies; `calls`: it makes sense only where tools are offered."""

    name: str
    reply: Callable[[ScriptInput], str]
    calls: bool = False


def example_of(schema: Any, *, whole: Mapping[str, Any] | None = None, depth: int = 0) -> Any:
    """Return a small value of a JSON schema, whatever the schema; `whole` is the one that its references are looked up
    in.

    >>> example_of({"type": "object", "properties": {"n": {"minimum": 3, "type": "integer"}}, "required": ["n"]})
    {'n': 3}
    """
    if not isinstance(schema, Mapping) or depth > 8:
        return "x"
    whole = schema if whole is None else whole
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("enum", "examples"):
        if isinstance(schema.get(key), list) and schema[key]:
            return schema[key][0]
    if isinstance(reference := schema.get("$ref"), str):
        return example_of(_definition(reference, whole), whole=whole, depth=depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            return example_of(schema[key][0], whole=whole, depth=depth + 1)
    kind = schema.get("type")
    match kind[0] if isinstance(kind, list) and kind else kind:
        case "object":
            properties = schema.get("properties") or {}
            names = [name for name in schema.get("required") or () if name in properties]
            return {name: example_of(properties[name], whole=whole, depth=depth + 1) for name in names}
        case "array":
            return [example_of(schema.get("items"), whole=whole, depth=depth + 1)] * (schema.get("minItems") or 0)
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return True
        case "null":
            return None
        case _:
            return "x" * max(1, schema.get("minLength") or 1)


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a tool's definition that has its name and parameters."""
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else {}


def _definition(reference: str, whole: Mapping[str, Any]) -> Any:
    value: Any = whole
    for part in reference.removeprefix("#").strip("/").split("/"):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _call(asked: ScriptInput, number: int) -> str:
    function = function_of(asked.tools[number % len(asked.tools)])
    arguments = example_of(function.get("parameters") or {"type": "object"})
    given = arguments if isinstance(arguments, Mapping) else {}
    return asked.form.text_of(str(function.get("name", "")), given)


def _same_call(asked: ScriptInput) -> str:
    return _call(asked, 0)


def _each_tool(asked: ScriptInput) -> str:
    """Return each tool once, and then words."""
    return _call(asked, asked.turn) if asked.turn < len(asked.tools) else "I have called every tool."


def _gibberish(asked: ScriptInput) -> str:
    draw = random.Random(f"{asked.seed} {asked.turn}")
    return " ".join("".join(draw.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=5)) for _ in range(8))


def _unreadable(asked: ScriptInput) -> str:
    name = str(function_of(asked.tools[0]).get("name", "")) if asked.tools else "tool"
    return asked.form.opening(name) + " {{not JSON"


SCRIPTS = (
    Script(name="nothing", reply=lambda asked: ""),
    Script(name="the same words", reply=lambda asked: "Yes."),
    Script(name="what it heard", reply=lambda asked: asked.heard[-400:]),
    Script(name="gibberish", reply=_gibberish),
    Script(name="a long text", reply=lambda asked: " ".join([_WORDS] * 100)),
    Script(name="an unreadable call", reply=_unreadable),
    Script(name="the same call", reply=_same_call, calls=True),
    Script(name="each tool once", reply=_each_tool, calls=True),
    Script(name="an unknown tool", reply=lambda asked: asked.form.text_of("no_such_tool", {}), calls=True),
)
