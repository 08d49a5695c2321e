"""GLM's format, since GLM 4.5: <tool_call>f <arg_key>x</arg_key><arg_value>1</arg_value> ... </tool_call>.

The name and each element are lines of their own where the model writes them; without line ends they are read too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from groupwise.model.reply_formats.elements import call_with, end_behind
from groupwise.model.reply_formats.format import Tools
from groupwise.model.reply_formats.json_text import text_of_value
from groupwise.model.reply_formats.lark import XmlWriter
from groupwise.model.reply_formats.marked import EnclosedFormat, Span

KEY, VALUE_END = "<arg_key>", "</arg_value>"
_ARGUMENT = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|\Z)", re.DOTALL)


class _Writer(XmlWriter):
    between = "\n"

    def head(self, name: str) -> str:
        return f"{name}\n"

    def around(self, name: str) -> tuple[str, str]:
        return f"<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>\n"


class Glm(EnclosedFormat):
    """Reads and writes GLM's calls: a name, and keys and values as elements, whose types are in the tools'
    definitions."""

    name, start, end, writes = "glm", "<tool_call>", "</tool_call>", _Writer

    def shown_in(self, template: str) -> bool:
        return KEY in template

    def end_of(self, text: str, start: int, *, last: bool) -> int:
        """Return the place of the first </tool_call>, or with arguments of the first behind an </arg_value>."""
        start += len(self.start)
        close, key = text.find(self.end, start), text.find(KEY, start)
        if key < 0 or 0 <= close < key:
            return close
        return end_behind(text, start, self.end, VALUE_END, last=last)

    def found(self, text: str, start: int, close: int, tools: Tools) -> list[Span]:
        name, key, rest = text[start:close].partition(KEY)
        if re.search(r"[\s<>{}]", name.strip()):
            what = "The call does not begin with the name of a tool."
        else:
            form = "<arg_key>NAME</arg_key> <arg_value> ... </arg_value>"
            what = call_with(name.strip(), key + rest, _ARGUMENT, tools, of_form=form, at=len(name))
        return [Span(what, start, close)]

    def opening(self, name: str | None = None) -> str:
        return self.start if name is None else f"{self.start}{name}\n"

    def text_of(self, name: str, arguments: Mapping[str, Any]) -> str:
        given = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{text_of_value(each)}</arg_value>\n"
            for key, each in arguments.items()
        )
        return f"{self.opening(name)}{given}{self.end}"
