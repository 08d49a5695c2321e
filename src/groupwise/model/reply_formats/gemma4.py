"""Gemma 4's format: <|tool_call>call:f{x:1,s:<|"|>a<|"|>}<tool_call|>, thoughts <|channel>thought ... <channel|>.

Arguments are like JSON, with keys as they are, strings between marks of their own, and nothing escaped. The template
looks for earlier thoughts in a field of the message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from groupwise.model.reply_formats.format import ParsedCall, ThoughtMarks, Tools
from groupwise.model.reply_formats.json_text import call_of, schema_types
from groupwise.model.reply_formats.lark import (
    CallWriter,
    Texts,
    field_of,
    object_schema,
    quoted,
    reference,
    refused,
    resolved,
    texts_of,
    with_definitions,
)
from groupwise.model.reply_formats.literals import MOST_DEPTH, LiteralReader, Unreadable
from groupwise.model.reply_formats.marked import EnclosedFormat, Span

MARK = '<|"|>'  # on either side of a string
_HEAD = re.compile(r"call:\s*([^\s{}<]+)\s*(?=\{)")
_KEY = re.compile(  # without what ends a call, so that more text cannot change where one ends
    r"""(?:<\|"\|>((?:(?!<\|"\|>|<tool_call\|>).)*)<\|"\|>|"((?:(?!<tool_call\|>)[^"])*)"|([^\s{}\[\],:<>"]+))\s*:""",
    re.DOTALL,
)
_KINDS = {"boolean": ("true", "false"), "null": ("null",)}
_OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "title", "description", "default", "$defs"}
_OF_LISTS = {"type", "items", "minItems", "maxItems", "title", "description", "default"}


# ---- read ----
class _Reader(LiteralReader):
    def call(self) -> tuple[str, dict[str, Any]]:
        """Read a call, and return its name and its arguments."""
        name = self.match(_HEAD, "call of the form call:NAME{...}")[1]
        return name, self.value()

    def compound(self, depth: int) -> Any:
        if self.takes(MARK):
            return self._string()
        if self.takes("{"):
            return {self._key(): self.value(depth + 1) for _ in self.items("}")}
        if self.takes("["):
            return [self.value(depth + 1) for _ in self.items("]")]
        raise Unreadable("no value begins", self.position)

    def _string(self) -> str:
        begin, close = self.position, self.text.find(MARK, self.position)
        if close < 0:
            raise Unreadable("a string is not closed", begin - len(MARK), in_string=True)
        self.position = close + len(MARK)
        return self.text[begin:close]

    def _key(self) -> str:
        return next(group for group in self.match(_KEY, "KEY:").groups() if group is not None)


def _call(inside: str) -> ParsedCall | str:
    reader = _Reader(inside)
    try:
        name, arguments = reader.call()
    except Unreadable as error:
        return f"The call cannot be read: {error.why} at its character {error.at}."
    if inside[reader.position :].strip():
        return f"The call's arguments end at its character {reader.position} and more text follows."
    return call_of({"name": name, "arguments": arguments})


# ---- written ----
def _written(value: Any) -> str:
    """Return a value as the model writes it, keys in the template's order."""
    if isinstance(value, str):
        return f"{MARK}{value}{MARK}"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_written(value[key])}' for key in _sorted(value))}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    return json.dumps(value)


def _sorted(names: Any) -> list[str]:
    return sorted(names, key=lambda name: (name.lower(), name))


class _Writer(CallWriter):
    lead = "call:"

    def body(self, index: int, function: Mapping[str, Any]) -> str:
        """Return a call; each `$ref` of its schema is a rule, written once, which may refer to itself."""
        field = field_of(index)
        schema = object_schema(function.get("parameters"), field)
        self._tool, self._rules, self._waiting = index, dict[str, str](), list[tuple[str, dict[str, Any], str]]()
        call = f"{quoted(function['name'])} {self._object(str(index), schema, schema, field)}"
        while self._waiting:
            key, value, of_field = self._waiting.pop()
            self.rules.append(f"ref{key}: {self._value(key, value, schema, of_field)}")
        return call

    def _rule_of(self, pointer: str, value: dict[str, Any], field: str) -> str:
        """Return the rule of what a `$ref` points to, to be written when the call is."""
        if pointer not in self._rules:
            key = f"_{self._tool}_{len(self._rules)}"
            self._rules[pointer] = f"ref{key}"
            self._waiting.append((key, value, field))
        return self._rules[pointer]

    def _object(self, key: str, schema: Mapping[str, Any], root: Mapping[str, Any], field: str) -> str:
        _check(schema, _OF_OBJECTS, field)
        properties = schema.get("properties") or {}
        items = list[tuple[str, bool]]()
        for name in _sorted(properties):
            written = self._value(f"{key}_{len(items)}", properties[name], root, f"{field}.properties.{name}")
            items.append((f"{quoted(f'{name}:')} {written}", name in schema.get("required", ())))
        return f'"{{" {self.listed(key, items, ",")} "}}"'

    def _value(self, key: str, schema: Any, root: Mapping[str, Any], field: str) -> str:
        value = resolved(schema, root, field)
        if (pointer := reference(schema)) is not None and reference(value) is None:
            return self._rule_of(pointer, value, field)
        if key.count("_") > MOST_DEPTH:
            raise refused(field, f"more than {MOST_DEPTH} values within one another", "name what is inner by `$ref`")
        if (texts := texts_of(value, root, field)) is not None:
            return self._text(key, texts)
        types = schema_types(value, root)
        if types == {"object"} and "properties" in value:
            return self._object(key, value, root, field)
        if types == {"array"}:
            return self._list(key, value, root, field)
        if types & {"object", "array"} or not types:
            raise refused(field, "values of no type that is known", "give it one `type`")
        if types <= _KINDS.keys() and not value.keys() & {"const", "enum"}:
            return f"({' | '.join(quoted(word) for kind in sorted(types) for word in _KINDS[kind])})"
        return self.json(f"value_{key}", with_definitions(value, root), field)

    def _text(self, key: str, texts: Texts) -> str:
        if texts.values:
            either = " | ".join(f"{self.text(MARK)} {quoted(each)} {self.text(MARK)}" for each in texts.values)
            return f"({either})"
        return f"{self.text(MARK)} {self.until(key, MARK, least=texts.least, most=texts.most)}"

    def _list(self, key: str, schema: Mapping[str, Any], root: Mapping[str, Any], field: str) -> str:
        _check(schema, _OF_LISTS, field)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        item = self._value(f"{key}_0", schema.get("items"), root, f"{field}.items")
        self.rules.append(f"item_{key}: {item}")
        more = f'("," item_{key}){{{max(0, least - 1)},{"" if most is None else max(0, most - 1)}}}'
        items = "" if most == 0 else f"item_{key} {more}" if least else f"(item_{key} {more})?"
        return f'"[" {items} "]"'


def _check(schema: Mapping[str, Any], known: set[str], field: str) -> None:
    """Raise GrammarError where a schema says what is not kept to."""
    unknown = sorted(key for key in set(schema) - known if schema[key] not in (None, False))
    if schema.get("additionalProperties"):
        unknown.append("additionalProperties")
    if unknown:
        raise refused(field, unknown[0], "leave it out")


# ---- the format ----
class Gemma4(EnclosedFormat):
    """A name and arguments in an own way of writing JSON."""

    name, start, end, writes = "gemma4", "<|tool_call>", "<tool_call|>", _Writer
    thought = ThoughtMarks("<|channel>thought", "<channel|>")
    thoughts_apart = True

    def shown_in(self, template: str) -> bool:
        return self.start in template

    def end_of(self, text: str, start: int, *, last: bool) -> int:
        reader = _Reader(text, start + len(self.start))
        return reader.mark_behind(self.end, reader.call, last=last)

    def found(self, text: str, start: int, close: int, tools: Tools) -> list[Span]:
        return [Span(_call(text[start:close]), start, close)]

    def opening(self, name: str | None = None) -> str:
        return f"{self.start}call:" if name is None else f"{self.start}call:{name}{{"

    def text_of(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{self.start}call:{name}{_written(dict(arguments))}{self.end}"
