"""MiniMax's format: <minimax:tool_call><invoke name="f"><parameter name="x">1</parameter></invoke></minimax:tool_call>
(MiniMax M2). Several calls stand between the same tags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from groupwise.model.reply_formats.elements import call_with, end_behind
from groupwise.model.reply_formats.format import Tools
from groupwise.model.reply_formats.json_text import SPACE, end_at, text_of_value
from groupwise.model.reply_formats.lark import XmlWriter
from groupwise.model.reply_formats.marked import EnclosedFormat, Span

_INVOKE = re.compile(r'\s*<invoke name="([^"\n]+)">(.*?)</invoke>\s*(?=<invoke name="|\Z)', re.DOTALL)
_PARAMETER = re.compile(r'\s*<parameter name="([^"\n]+)">(.*?)</parameter>\s*(?=<parameter name="|\Z)', re.DOTALL)


class _Writer(XmlWriter):
    lead, sectioned, tail = "\n", True, "</invoke>\n"

    def head(self, name: str) -> str:
        return f'<invoke name="{name}">\n'

    def around(self, name: str) -> tuple[str, str]:
        return f'<parameter name="{name}">', "</parameter>\n"


class MiniMax(EnclosedFormat):
    """Calls and parameters as elements, whose types the tools' definitions say."""

    name, start, end, writes = "minimax", "<minimax:tool_call>", "</minimax:tool_call>", _Writer

    def shown_in(self, template: str) -> bool:
        return self.start in template

    def end_of(self, text: str, start: int, *, last: bool) -> int:
        """Return the place of the first </minimax:tool_call> behind an </invoke>, if there are calls of that form."""
        start += len(self.start)
        if not text.startswith("<invoke ", end_at(SPACE, text, start)):
            return text.find(self.end, start)
        return end_behind(text, start, self.end, "</invoke>", last=last)

    def found(self, text: str, start: int, close: int, tools: Tools) -> list[Span]:
        inside = text[start:close]
        found, position = list[Span](), 0
        while (invoke := _INVOKE.match(inside, position)) is not None:
            form = '<parameter name="NAME"> ... </parameter>'
            what = call_with(invoke[1].strip(), invoke[2], _PARAMETER, tools, of_form=form, at=invoke.start(2))
            found.append(Span(what, start + position, start + invoke.end()))
            position = invoke.end()
        if inside[position:].strip() or not found:
            what = f'The calls have text outside <invoke name="NAME"> ... </invoke>, from character {position} on.'
            found.append(Span(what, start + position, close))
        return found

    def opening(self, name: str | None = None) -> str:
        return f'{self.start}\n<invoke name="' + ("" if name is None else f'{name}">\n')

    def text_of(self, name: str, arguments: Mapping[str, Any]) -> str:
        given = "".join(
            f'<parameter name="{key}">{text_of_value(each)}</parameter>\n' for key, each in arguments.items()
        )
        return f"{self.opening(name)}{given}</invoke>\n{self.end}"
