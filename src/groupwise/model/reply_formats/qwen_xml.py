"""Qwen's XML: <tool_call><function=f><parameter=x>1</parameter></function></tool_call> (Qwen3-Coder, Qwen 3.5,
Nemotron 3)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from groupwise.model.reply_formats.elements import call_with, end_behind
from groupwise.model.reply_formats.format import ParsedCall, Tools
from groupwise.model.reply_formats.json_text import SPACE, end_at, text_of_value
from groupwise.model.reply_formats.lark import XmlWriter
from groupwise.model.reply_formats.marked import EnclosedFormat, Span

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)


class _Writer(XmlWriter):
    between, tail = "\n", "</function>\n"

    def head(self, name: str) -> str:
        return f"\n<function={name}>\n"

    def around(self, name: str) -> tuple[str, str]:
        return f"<parameter={name}>\n", "\n</parameter>\n"


class QwenXml(EnclosedFormat):
    """Parameters as elements, whose types the tools' definitions say; without one, what reads as JSON is JSON."""

    name, start, end, writes = "qwen_xml", "<tool_call>", "</tool_call>", _Writer

    def shown_in(self, template: str) -> bool:
        return "<function=" in template

    def end_of(self, text: str, start: int, *, last: bool) -> int:
        """Return the place of the first </tool_call> behind a </function>, if it is a call of that form."""
        start += len(self.start)
        if not text.startswith("<function=", end_at(SPACE, text, start)):
            return text.find(self.end, start)
        return end_behind(text, start, self.end, "</function>", last=last)

    def found(self, text: str, start: int, close: int, tools: Tools) -> list[Span]:
        return [Span(_call(text[start:close], tools), start, close)]

    def opening(self, name: str | None = None) -> str:
        return f"{self.start}\n<function=" + ("" if name is None else f"{name}>\n")

    def text_of(self, name: str, arguments: Mapping[str, Any]) -> str:
        given = "".join(f"<parameter={key}>\n{text_of_value(each)}\n</parameter>\n" for key, each in arguments.items())
        return f"{self.opening(name)}{given}</function>\n{self.end}"


def _call(inside: str, tools: Tools) -> ParsedCall | str:
    function = _FUNCTION.fullmatch(inside)
    if function is None:
        return "The call is not of the form <function=NAME> ... </function>."
    of_form = "<parameter=NAME> ... </parameter>"
    return call_with(function[1].strip(), function[2], _PARAMETER, tools, of_form=of_form, at=function.start(2))
