"""Hermes' format: <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call> (Hermes, Qwen 2.5 and 3, the starter)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from groupwise.model.reply_formats.format import Tools
from groupwise.model.reply_formats.json_text import call_of, json_at, json_then
from groupwise.model.reply_formats.lark import CallWriter, quoted
from groupwise.model.reply_formats.marked import EnclosedFormat, Span


class _Writer(CallWriter):
    between = "\n"

    def body(self, index: int, function: Mapping[str, Any]) -> str:
        head = f'\n{{"name": {json.dumps(function["name"])}, "arguments": '
        return f"{quoted(head)} {self.arguments(index, function)} {quoted('}' + chr(10))}"


class Hermes(EnclosedFormat):
    """The format of Hermes and Qwen: calls as JSON between tags."""

    name, start, end, writes = "hermes", "<tool_call>", "</tool_call>", _Writer

    def shown_in(self, template: str) -> bool:
        return self.start in template

    def end_of(self, text: str, start: int, *, last: bool) -> int:
        return json_then(text, start + len(self.start), self.end, last=last)

    def found(self, text: str, start: int, close: int, tools: Tools) -> list[Span]:
        inside = text[start:close]
        value, stop = json_at(inside)
        if isinstance(value, ValueError):
            what = f"The call is not JSON: {value}."
        elif inside[stop:].strip():
            what = f"The call's JSON ends at character {stop} and more text follows."
        else:
            what = call_of(value)
        return [Span(what, start, close)]

    def opening(self, name: str | None = None) -> str:
        return self.start if name is None else f'{self.start}\n{{"name": {json.dumps(name)}, "arguments":'

    def text_of(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{self.opening(name)} {json.dumps(arguments, ensure_ascii=False)}}}\n{self.end}"
