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
from groupwise.model.reply_formats.json_text import call_of, schema_types
from groupwise.model.reply_formats.lark import (
    CallWriter,
    field_of,
    parameters_of,
    quoted,
    resolved,
    texts_of,
    with_definitions,
)
from groupwise.model.reply_formats.literals import LiteralReader, Unreadable
from groupwise.model.reply_formats.marked import EnclosedFormat, Span

_WORD_OF = r"[^\s()\[\]{},='\"<>]+"
_NAME, _KEY = re.compile(rf"({_WORD_OF})\s*\("), re.compile(rf"({_WORD_OF})\s*=")
_ESCAPE = re.compile(r"\\(U00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "/": "/", "\\": "\\", "'": "'", '"': '"'}
_WORDS_OF = {"boolean": ("True", "False"), "null": ("None",)}
_AFTER = rf"\s*(?:,\s*{_WORD_OF}\s*=|\)\s*(?:,\s*{_WORD_OF}\s*\(|\]))"  # an argument: another one, or a call's end
_ENDS_ARGUMENT = {quote: re.compile(f"{quote}(?={_AFTER})") for quote in "'\""}
_ENDS_ITEM = {quote: re.compile(rf"{quote}(?=\s*[,:\]}}])") for quote in "'\""}


# ---- read ----
class _Reader(LiteralReader):
    def calls(self) -> list[Span]:
        """Read a list of calls."""
        self.expect("[")
        return [self._call() for _ in self.items("]")]

    def compound(self, depth: int) -> Any:
        sign = self.text[self.position : self.position + 1]
        if sign in _ENDS_ITEM:
            return self._string(_ENDS_ITEM[sign] if depth else _ENDS_ARGUMENT[sign])
        if self.takes("["):
            return [self.value(depth + 1) for _ in self.items("]")]
        if self.takes("("):
            return [self.value(depth + 1) for _ in self.items(")")]
        if self.takes("{"):
            return {self._key(depth): self.value(depth + 1) for _ in self.items("}")}
        raise Unreadable("no value begins", self.position)

    def _call(self) -> Span:
        self.skip()
        begin, name = self.position, self.match(_NAME, "call of the form NAME(...)")[1]
        argument = "argument of the form NAME=VALUE"
        arguments = {self.match(_KEY, argument)[1]: self.value() for _ in self.items(")")}
        return Span(call_of({"name": name, "arguments": arguments}), begin, self.position)

    def _key(self, depth: int) -> str:
        key = self.value(depth + 1)
        if not isinstance(key, str):
            raise Unreadable("a key is no string", self.position)
        self.expect(":")
        return key

    def _string(self, end: re.Pattern[str]) -> str:
        """Read a string up to the first quote that what must follow it does (`end`)."""
        begin = search = self.position + 1
        while (close := end.search(self.text, search)) is not None:
            inside = self.text[begin : close.start()]
            search = close.end()
            if (len(inside) - len(inside.rstrip("\\"))) % 2 == 0:
                self.position = search
                said = _ESCAPE.sub(_unescaped, inside)  # whose halves of surrogate pairs, if any, are put together
                return said.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        raise Unreadable("a string is not closed", begin - 1, in_string=True)


def _unescaped(found: re.Match[str]) -> str:
    sign = found[1]
    return chr(int(sign[1:], 16)) if len(sign) > 1 else _ESCAPES.get(sign, found[0])


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
        """Return a value: strings, True, False and None as Python has them, numbers, lists and objects as JSON."""
        value = resolved(schema, root, field)
        if (texts := texts_of(value, root, field)) is not None:
            if texts.values:
                return f"({' | '.join(quoted(_quoted(each)) for each in texts.values)})"
            return f"/'([^'\\\\\\n\\r]|\\\\['\\\\nr]){{{texts.least},{texts.most}}}'/"
        types = schema_types(value, root)
        words = [word for kind, words in _WORDS_OF.items() if kind in types for word in words]
        if types and types <= _WORDS_OF.keys():
            if "const" in value or "enum" in value:
                words = [str(each) for each in ([value["const"]] if "const" in value else value["enum"])]
            return f"({' | '.join(map(quoted, words))})"
        return self.json(f"value_{key}", with_definitions(value, root), field)


# ---- the format ----
class Lfm2(EnclosedFormat):
    """A Python list of calls with named arguments."""

    name, start, end, writes = "lfm2", "<|tool_call_start|>", "<|tool_call_end|>", _Writer
    thinks_unasked = True

    def shown_in(self, template: str) -> bool:
        return self.start in template or "<|tool_list_start|>" in template

    def end_of(self, text: str, start: int, *, last: bool) -> int:
        reader = _Reader(text, start + len(self.start))
        return reader.mark_behind(self.end, reader.calls, last=last)

    def found(self, text: str, start: int, close: int, tools: Tools) -> list[Span]:
        reader = _Reader(text[:close], start)
        try:
            found = reader.calls()
        except Unreadable as error:
            return [Span(f"The calls cannot be read: {error.why} at character {error.at - start}.", start, close)]
        stop = reader.position
        if text[stop:close].strip() or not found:
            found.append(Span(f"The list of calls ends at character {stop - start}.", stop, close))
        return found

    def opening(self, name: str | None = None) -> str:
        return f"{self.start}[" if name is None else f"{self.start}[{name}("

    def text_of(self, name: str, arguments: Mapping[str, Any]) -> str:
        given = ", ".join(f"{key}={_written(each)}" for key, each in arguments.items())
        return f"{self.opening(name)}{given})]{self.end}"
