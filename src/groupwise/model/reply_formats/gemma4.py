"""Gemma 4's format: <|tool_call>call:f{x:1,s:<|"|>a<|"|>}<tool_call|>, thoughts <|channel>thought ... <channel|>.

Arguments are like JSON, with keys as they are, strings between marks of their own, and nothing escaped. The template
looks for earlier thoughts in a field of the message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from groupwise.model.reply_formats.format import ThoughtMarks, Tools
from groupwise.model.reply_formats.json_text import SPACE, call_of, end_at, schema_types
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
from groupwise.model.reply_formats.marked import EnclosedFormat, Span

MARK = '<|"|>'  # on either side of a string
MOST_DEPTH = 64  # lists and objects within others
_HEAD = re.compile(r"\s*call:\s*([^\s{}<]+)\s*(?=\{)")
_KEY = re.compile(  # without what ends a call, so that more text cannot change where one ends
    r"""\s*(?:<\|"\|>((?:(?!<\|"\|>|<tool_call\|>).)*)<\|"\|>|"((?:(?!<tool_call\|>)[^"])*)"|([^\s{}\[\],:<>"]+))\s*:""",
    re.DOTALL,
)
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_WORD = re.compile("|".join(_WORDS))
_KINDS = {"boolean": ("true", "false"), "null": ("null",)}
_OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "title", "description", "default", "$defs"}
_OF_LISTS = {"type", "items", "minItems", "maxItems", "title", "description", "default"}


class _Unreadable(Exception):
    """Says what is wrong and where; `in_string`: all that follows may be part of a string."""

    def __init__(self, why: str, at: int, *, in_string: bool = False):
        super().__init__(why)
        self.why, self.at, self.in_string = why, at, in_string


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
        value = resolved(schema, root)
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


class Gemma4(EnclosedFormat):
    """A name and arguments in an own way of writing JSON."""

    name, start, end, writes = "gemma4", "<|tool_call>", "<tool_call|>", _Writer
    thought = ThoughtMarks("<|channel>thought", "<channel|>")
    thoughts_apart = True

    def shown_in(self, template: str) -> bool:
        return self.start in template

    def end_of(self, text: str, start: int, *, last: bool) -> int:
        begin = start + len(self.start)
        position = begin
        if (head := _HEAD.match(text, begin)) is not None:
            try:
                position = _value(text, head.end())[1]
            except _Unreadable as error:
                if error.in_string:
                    return text.find(self.end, begin) if last else -1
                position = error.at
        close = text.find(self.end, position)
        return text.find(self.end, begin) if close < 0 and last else close

    def found(self, text: str, start: int, close: int, tools: Tools) -> list[Span]:
        return [Span(_call(text[start:close]), start, close)]

    def opening(self, name: str | None = None) -> str:
        return f"{self.start}call:" if name is None else f"{self.start}call:{name}{{"

    def text_of(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{self.start}call:{name}{_written(dict(arguments))}{self.end}"


# ---- read ----
def _call(inside: str) -> Any:
    head = _HEAD.match(inside)
    if head is None:
        return "The call is not of the form call:NAME{...}."
    try:
        arguments, stop = _value(inside, head.end())
    except _Unreadable as error:
        return f"The call's arguments cannot be read: {error.why} at its character {error.at}."
    if inside[stop:].strip():
        return f"The call's arguments end at its character {stop} and more text follows."
    return call_of({"name": head[1], "arguments": arguments})


def _value(text: str, position: int, depth: int = 0) -> tuple[Any, int]:
    """Return the value at `position` and where it ends. Raises _Unreadable."""
    position = end_at(SPACE, text, position)
    if depth > MOST_DEPTH:
        raise _Unreadable("a value is nested too deeply", position)
    if text.startswith(MARK, position):
        close = text.find(MARK, begin := position + len(MARK))
        if close < 0:
            raise _Unreadable("a string is not closed", position, in_string=True)
        return text[begin:close], close + len(MARK)
    if text.startswith("{", position):
        return _object(text, position, depth)
    if text.startswith("[", position):
        return _list(text, position, depth)
    if (word := _WORD.match(text, position)) is not None:
        return _WORDS[word[0]], word.end()
    if (number := _NUMBER.match(text, position)) is not None:
        try:
            return float(number[0]) if number[1] or number[2] else int(number[0]), number.end()
        except ValueError:  # of thousands of digits
            raise _Unreadable("a number is too long", position) from None
    raise _Unreadable("no value begins", position)


def _object(text: str, position: int, depth: int) -> tuple[dict[str, Any], int]:
    values, position = dict[str, Any](), position + 1
    while not text.startswith("}", end_at(SPACE, text, position)):
        position = _behind_comma(text, position) if values else position
        key = _KEY.match(text, position)
        if key is None:
            raise _Unreadable("no KEY: begins", end_at(SPACE, text, position))
        name = next(group for group in key.groups() if group is not None)
        values[name], position = _value(text, key.end(), depth + 1)
    return values, end_at(SPACE, text, position) + 1


def _list(text: str, position: int, depth: int) -> tuple[list[Any], int]:
    values, position = list[Any](), position + 1
    while not text.startswith("]", end_at(SPACE, text, position)):
        position = _behind_comma(text, position) if values else position
        value, position = _value(text, position, depth + 1)
        values.append(value)
    return values, end_at(SPACE, text, position) + 1


def _behind_comma(text: str, position: int) -> int:
    position = end_at(SPACE, text, position)
    if not text.startswith(",", position):
        raise _Unreadable("',' is missing", position)
    return position + 1


# ---- written ----
def _written(value: Any) -> str:
    """Return a value as the model writes it, keys in the template's order."""
    if isinstance(value, str):
        return f"{MARK}{value}{MARK}"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_written(value[key])}' for key in _sorted(value))}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else "null" if value is None else str(value)


def _sorted(names: Any) -> list[str]:
    return sorted(names, key=lambda name: (name.lower(), name))


def _check(schema: Mapping[str, Any], known: set[str], field: str) -> None:
    """Raise GrammarError where a schema says what is not kept to."""
    unknown = sorted(key for key in set(schema) - known if schema[key] not in (None, False))
    if schema.get("additionalProperties"):
        unknown.append("additionalProperties")
    if unknown:
        raise refused(field, unknown[0], "leave it out")
