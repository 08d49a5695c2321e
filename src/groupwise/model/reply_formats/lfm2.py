"""LFM2's format, calls as Python writes them: <|tool_call_start|>[f(x=1, s='a'), g()]<|tool_call_end|> (LFM2, LFM2.5).

Strings are read in either quotes, True, true and the like too, and lists and objects as Python or JSON. Templates of
LFM2.5 write a string's quotes and line ends as they are: a quote ends a string where what must follow it does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from groupwise.model.reply_formats.format import Tools
from groupwise.model.reply_formats.json_text import SPACE, call_of, end_at, schema_types
from groupwise.model.reply_formats.lark import (
    CallWriter,
    field_of,
    parameters_of,
    quoted,
    resolved,
    texts_of,
    with_definitions,
)
from groupwise.model.reply_formats.marked import EnclosedFormat, Span

_WORD_OF = r"[^\s()\[\]{},='\"<>]+"
_NAME, _KEY = re.compile(rf"\s*({_WORD_OF})\s*\(\s*"), re.compile(rf"\s*({_WORD_OF})\s*=\s*")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_WORD = re.compile("|".join(_WORDS))
_ESCAPE = re.compile(r"\\(U00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "/": "/", "\\": "\\", "'": "'", '"': '"'}
_AFTER = rf"\s*(?:,\s*{_WORD_OF}\s*=|\)\s*(?:,\s*{_WORD_OF}\s*\(|\]))"  # an argument: another one, or a call's end
_ENDS_ARGUMENT = {quote: re.compile(f"{quote}(?={_AFTER})") for quote in "'\""}
_ENDS_ITEM = {quote: re.compile(rf"{quote}(?=\s*[,:\]}}])") for quote in "'\""}
MOST_DEPTH = 64  # lists and objects within others


class _Unreadable(Exception):
    """Says what is wrong and where; `in_string`: all that follows may be part of a string."""

    def __init__(self, why: str, at: int, *, in_string: bool = False):
        super().__init__(why)
        self.why, self.at, self.in_string = why, at, in_string


class _Writer(CallWriter):
    lead, between, trail, sectioned = "[", ", ", "]", True

    def body(self, index: int, function: Mapping[str, Any]) -> str:
        schema, properties = parameters_of(index, function)
        items = list[tuple[str, bool]]()
        for n, (name, value) in enumerate(properties.items()):
            written = self._value(f"{index}_{n}", value, schema, f"{field_of(index)}.properties.{name}")
            items.append((f"{quoted(f'{name}=')} {written}", name in schema.get("required", ())))
        return f"{quoted(function['name'] + '(')} {self.listed(str(index), items, ', ')} {quoted(')')}"

    def _value(self, key: str, schema: Any, root: Mapping[str, Any], field: str) -> str:
        """Strings, True, False and None as Python has them; numbers, lists and objects as JSON."""
        value = resolved(schema, root)
        if (texts := texts_of(value, root, field)) is not None:
            if texts.values:
                return f"({' | '.join(quoted(_quoted(each)) for each in texts.values)})"
            return f"/'([^'\\\\\\n\\r]|\\\\['\\\\nr]){{{texts.least},{texts.most}}}'/"
        types = schema_types(value, root)
        words = [word for kind, words in _PYTHON.items() if kind in types for word in words]
        if types and types <= _PYTHON.keys():
            if "const" in value or "enum" in value:
                words = [str(each) for each in ([value["const"]] if "const" in value else value["enum"])]
            return f"({' | '.join(map(quoted, words))})"
        return self.json(f"value_{key}", with_definitions(value, root), field)


class Lfm2(EnclosedFormat):
    """A Python list of calls with named arguments."""

    name, start, end, writes = "lfm2", "<|tool_call_start|>", "<|tool_call_end|>", _Writer
    thinks_unasked = True

    def shown_in(self, template: str) -> bool:
        return self.start in template or "<|tool_list_start|>" in template

    def end_of(self, text: str, start: int, *, last: bool) -> int:
        begin = start + len(self.start)
        try:
            position = _calls(text, begin)[1]
        except _Unreadable as error:
            if error.in_string:
                return text.find(self.end, begin) if last else -1
            position = error.at
        close = text.find(self.end, position)
        return text.find(self.end, begin) if close < 0 and last else close

    def found(self, text: str, start: int, close: int, tools: Tools) -> list[Span]:
        try:
            calls, stop = _calls(text[:close], start)
        except _Unreadable as error:
            return [Span(f"The calls cannot be read: {error.why} at character {error.at - start}.", start, close)]
        found = [Span(call_of({"name": name, "arguments": each}), at, end) for name, each, at, end in calls]
        if text[stop:close].strip() or not found:
            found.append(Span(f"The list of calls ends at character {stop - start}.", stop, close))
        return found

    def opening(self, name: str | None = None) -> str:
        return f"{self.start}[" if name is None else f"{self.start}[{name}("

    def text_of(self, name: str, arguments: Mapping[str, Any]) -> str:
        given = ", ".join(f"{key}={_written(each)}" for key, each in arguments.items())
        return f"{self.opening(name)}{given})]{self.end}"


# ---- read ----
def _calls(text: str, position: int) -> tuple[list[tuple[str, dict[str, Any], int, int]], int]:
    """Return the calls of the list at `position`, each with its name, its arguments, where it begins and ends; and
    where the list ends. Raises _Unreadable."""
    found = list[tuple[str, dict[str, Any], int, int]]()
    position = _expect(text, position, "[")
    while not text.startswith("]", end_at(SPACE, text, position)):
        if found:
            position = _expect(text, position, ",")
        begin = end_at(SPACE, text, position)
        if (name := _NAME.match(text, position)) is None:
            raise _Unreadable("no call of the form NAME(...) begins", begin)
        arguments, position = _arguments(text, name.end())
        found.append((name[1], arguments, begin, position))
    return found, end_at(SPACE, text, position) + 1


def _arguments(text: str, position: int) -> tuple[dict[str, Any], int]:
    """Return the arguments behind a parenthesis, and where the call ends."""
    arguments = dict[str, Any]()
    while not text.startswith(")", end_at(SPACE, text, position)):
        if arguments:
            position = _expect(text, position, ",")
        if (key := _KEY.match(text, position)) is None:
            place = end_at(SPACE, text, position)
            raise _Unreadable("no argument of the form NAME=VALUE begins", place)
        arguments[key[1]], position = _value(text, key.end(), _ENDS_ARGUMENT)
    return arguments, end_at(SPACE, text, position) + 1


def _value(text: str, position: int, ends: Mapping[str, re.Pattern[str]], depth: int = 0) -> tuple[Any, int]:
    """Return the value at `position` and where it ends; of a string in which quotes are as they are, `ends` says
    which is the last."""
    position = end_at(SPACE, text, position)
    sign = text[position : position + 1]
    if depth > MOST_DEPTH:
        raise _Unreadable("a value is nested too deeply", position)
    if sign in ("'", '"'):
        return _string(text, position, ends[sign])
    if sign in ("[", "("):
        return _list(text, position, depth)
    if sign == "{":
        return _object(text, position, depth)
    if (word := _WORD.match(text, position)) is not None:
        return _WORDS[word[0]], word.end()
    if (number := _NUMBER.match(text, position)) is not None:
        try:
            return float(number[0]) if number[1] or number[2] else int(number[0]), number.end()
        except ValueError:  # of thousands of digits
            raise _Unreadable("a number is too long", position) from None
    raise _Unreadable("no value begins", position)


def _string(text: str, position: int, end: re.Pattern[str]) -> tuple[str, int]:
    """Return the string at `position`: to the first quote that what must follow it does, or else to the last text."""
    search = position + 1
    while (close := end.search(text, search)) is not None:
        inside = text[position + 1 : close.start()]
        if (len(inside) - len(inside.rstrip("\\"))) % 2 == 0:
            said = _ESCAPE.sub(_unescaped, inside)  # whose halves of surrogate pairs, if any, are put together
            return said.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), close.end()
        search = close.end()
    raise _Unreadable("a string is not closed", position, in_string=True)


def _unescaped(found: re.Match[str]) -> str:
    sign = found[1]
    return chr(int(sign[1:], 16)) if len(sign) > 1 else _ESCAPES.get(sign, found[0])


def _list(text: str, position: int, depth: int) -> tuple[list[Any], int]:
    close = "]" if text[position] == "[" else ")"
    values, position = list[Any](), position + 1
    while not text.startswith(close, end_at(SPACE, text, position)):
        if values:
            position = _expect(text, position, ",")
        value, position = _value(text, position, _ENDS_ITEM, depth + 1)
        values.append(value)
    return values, end_at(SPACE, text, position) + 1


def _object(text: str, position: int, depth: int) -> tuple[dict[str, Any], int]:
    values, position = dict[str, Any](), position + 1
    while not text.startswith("}", end_at(SPACE, text, position)):
        if values:
            position = _expect(text, position, ",")
        key, position = _value(text, position, _ENDS_ITEM, depth + 1)
        if not isinstance(key, str):
            raise _Unreadable("a key is no string", position)
        values[key], position = _value(text, _expect(text, position, ":"), _ENDS_ITEM, depth + 1)
    return values, end_at(SPACE, text, position) + 1


def _expect(text: str, position: int, sign: str) -> int:
    position = end_at(SPACE, text, position)
    if not text.startswith(sign, position):
        raise _Unreadable(f"{sign!r} is missing", position)
    return position + 1


# ---- written ----
def _written(value: Any) -> str:
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _quoted(text: str) -> str:
    for sign, escaped in (("\\", "\\\\"), ("'", "\\'"), ("\n", "\\n"), ("\r", "\\r")):
        text = text.replace(sign, escaped)
    return f"'{text}'"


_PYTHON = {"boolean": ("True", "False"), "null": ("None",)}
