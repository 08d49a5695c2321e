"""Mistral's two formats, before its tokenizer v11 and since.

    mistral       [TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]
    mistral_args  [TOOL_CALLS]f[ARGS]{"x": 1}, a marker for each call, perhaps with [CALL_ID]

The markers are special tokens, which `chat.decode` keeps.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

from groupwise.model.reply_formats.format import ParsedCall, Tools
from groupwise.model.reply_formats.json_text import SPACE, call_of, end_at, json_at
from groupwise.model.reply_formats.lark import CallWriter, quoted
from groupwise.model.reply_formats.marked import MarkedFormat, Span

TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"([^\[\]{}]*)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*")


class _ListWriter(CallWriter):
    lead, between, trail, sectioned = " [", ", ", "]", True

    def body(self, index: int, function: Mapping[str, Any]) -> str:
        head = f'{{"name": {json.dumps(function["name"])}, "arguments": '
        return f"{quoted(head)} {self.arguments(index, function)} {quoted('}')}"


class _ArgsWriter(CallWriter):
    def body(self, index: int, function: Mapping[str, Any]) -> str:
        return f"{quoted(function['name'])} {self.text(ARGS)} {self.arguments(index, function)}"


class Mistral(MarkedFormat):
    """Mistral's format: all calls in one list behind the marker."""

    name, start, writes = "mistral", TOOL_CALLS, _ListWriter

    def shown_in(self, template: str) -> bool:
        return TOOL_CALLS in template

    def read(self, text: str, begin: re.Match[str], tools: Tools) -> tuple[list[Span], int]:
        """Read either of the two formats."""
        start = end_at(SPACE, text, begin.end())
        name = None
        if text[start : start + 1] not in ("[", "{") or text.startswith((ARGS, CALL_ID), start):
            named = _NAME.match(text, start)
            name, start = (named[1].strip(), named.end()) if named else ("", start)
        value, end = json_at(text, start)
        if isinstance(value, ValueError):
            following = text.find(TOOL_CALLS, begin.end())
            end = len(text) if following < 0 else following
            return [Span(f"The call is not JSON: {value}.", begin.start(), end)], end
        if name is not None:
            found = [Span(call_of({"name": name, "arguments": value}), start, end)]
        elif isinstance(value, list):
            found = _listed(text, start) or [Span("The list of calls is empty.", start, end)]
        else:
            found = [Span(call_of(value), start, end)]
        after = end_at(SPACE, text, end)
        called = any(isinstance(span.what, ParsedCall) for span in found)
        return found, after if called and text.startswith(TOOL_CALLS, after) else end

    def opening(self, name: str | None = None) -> str:
        return f'{TOOL_CALLS} [{{"name": ' + ('"' if name is None else f'{json.dumps(name)}, "arguments":')

    def text_of(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{self.opening(name)} {json.dumps(arguments, ensure_ascii=False)}}}]"

    def call_id(self, index: int) -> str:
        """Return nine letters and digits: Mistral's templates take nothing else.

        >>> Mistral().call_id(1)
        'call00001'
        """
        return f"call{index:05d}"

    def random_id(self) -> str:
        return secrets.token_hex(5)[:9]


class MistralArgs(Mistral):
    """A marker, a name, a marker and the arguments, for each call."""

    name, writes = "mistral_args", _ArgsWriter

    def shown_in(self, template: str) -> bool:
        return ARGS in template

    def opening(self, name: str | None = None) -> str:
        return TOOL_CALLS if name is None else f"{TOOL_CALLS}{name}{ARGS}"

    def text_of(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{self.opening(name)}{json.dumps(arguments, ensure_ascii=False)}"


def _listed(text: str, start: int) -> list[Span]:
    """Return the entries of a JSON array that has been read once."""
    found, position = list[Span](), end_at(SPACE, text, start)
    while text[position] != "]":
        position = end_at(SPACE, text, position + 1)  # behind "[" or ","
        if text[position] != "]":
            value, end = json_at(text, position)
            found.append(Span(call_of(value), position, end))
            position = end_at(SPACE, text, end)
    return found
