"""Llama's format: <|python_tag|>{"name": "f", "parameters": {"x": 1}}, or only the JSON (Llama 3.1 to 3.3).

Several calls stand one behind the other with ";". The tag is a special token, which `chat.decode` keeps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from groupwise.model.reply_formats.format import ParsedCall, Tools
from groupwise.model.reply_formats.json_text import call_of, end_at, json_at
from groupwise.model.reply_formats.lark import CallWriter, quoted
from groupwise.model.reply_formats.marked import MarkedFormat, Span

_BARE_CALL = r'\A\s*(?=\{\s*"(?:name"\s*:|type"\s*:\s*"function"))'
_BARE_BEGUN = re.compile(r'\{\s*(?:"\w*(?:"\s*(?::\s*(?:"\w*)?)?)?)?')  # what may grow into one
_BETWEEN = re.compile(r"(?:[\s;]|<\|eom_id\|>)*")


class _Writer(CallWriter):
    """JSON alone, as the whole reply; text that does not begin like it is free."""

    def body(self, index: int, function: Mapping[str, Any]) -> str:
        head = f'{{"name": {json.dumps(function["name"])}, "parameters": '
        return f"{quoted(head)} {self.arguments(index, function)} {quoted('}')}"

    def calls(self, *, several: bool) -> str:
        return 'call ("; " call)*' if several else "call"

    def amid_text(self, *, several: bool) -> str:
        calls = f"calls: {self.calls(several=several)}"
        return f"start: {self.text(self.opening)}? calls | FREE\n{calls}\nFREE: /[^{{](.|\\n)*/"


class Llama(MarkedFormat):
    """JSON behind a tag, or JSON as the whole reply."""

    name, start, writes = "llama", "<|python_tag|>", _Writer
    _beginning = re.compile(f"{re.escape(start)}|{_BARE_CALL}")

    def shown_in(self, template: str) -> bool:
        return self.start in template or '"parameters": ' in template

    def begins(self, text: str, position: int = 0, *, first: bool = True) -> re.Match[str] | None:
        return (self._beginning if first else self._start).search(text, position)

    def may_begin(self, text: str, *, first: bool) -> bool:
        return first and _BARE_BEGUN.fullmatch(text.lstrip()) is not None

    def read(self, text: str, begin: re.Match[str], tools: Tools) -> tuple[list[Span], int]:
        found, end, bare = list[Span](), begin.end(), not begin[0].endswith(self.start)
        while True:
            start = end_at(_BETWEEN, text, end)
            if not text.startswith("{", start) and found:
                return found, start if isinstance(found[-1].what, ParsedCall) else end
            value, end = json_at(text, start)
            if isinstance(value, ValueError):
                return [*found, Span(f"The call is not JSON: {value}.", start, len(text))], len(text)
            if bare and not (isinstance(value, dict) and value.keys() & {"parameters", "arguments"}):
                return [*found, Span(None, start, end)], end  # an answer that is JSON
            found.append(Span(call_of(value), start, end))

    def opening(self, name: str | None = None) -> str:
        """Return it without the tag, as models write it.

        >>> Llama().opening("add")
        '{"name": "add", "parameters":'
        """
        return '{"name": "' if name is None else f'{{"name": {json.dumps(name)}, "parameters":'

    def text_of(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{self.opening(name)} {json.dumps(arguments, ensure_ascii=False)}}}"
