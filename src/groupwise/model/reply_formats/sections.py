"""Calls in their own section, each a head with the tool's name, its arguments as JSON, and a marker behind it."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from groupwise.model.reply_formats.format import Tools
from groupwise.model.reply_formats.json_text import json_then, named_call
from groupwise.model.reply_formats.marked import MarkedFormat, Span


class SectionFormat(MarkedFormat):
    """A format with a section of calls, between `start` and `end`.

    Attributes:
        call_start: the marker with which one begins.
        call_end: the marker behind one.
        head: matches what stands in front of the arguments, with space before it.
    """

    call_start: ClassVar[str]
    call_end: ClassVar[str]
    head: ClassVar[re.Pattern[str]]

    @abstractmethod
    def named(self, head: re.Match[str]) -> str:
        """Return the name of the tool that a head has."""

    @abstractmethod
    def head_of(self, name: str) -> str:
        """Return a head as the model writes it."""

    tail: ClassVar[str] = ""  # between the arguments and the marker behind them

    def end_of(self, text: str, start: int, *, last: bool) -> int:
        position = begin = start + len(self.start)
        while (head := self.head.match(text, position)) is not None:
            behind = json_then(text, head.end(), self.call_end, last=False)
            if behind < 0:
                return text.find(self.end, begin) if last else -1
            position = behind + len(self.call_end)
        return text.find(self.end, position)

    def read(self, text: str, begin: re.Match[str], tools: Tools) -> tuple[list[Span], int]:
        """Read calls that are whole, also where the section is not closed."""
        close = self.end_of(text, begin.start(), last=True)
        inside = len(text) if close < 0 else close
        end = inside if close < 0 else close + len(self.end)
        found, position, text = list[Span](), begin.end(), text[:inside]
        while (head := self.head.match(text, position)) is not None:
            what, stop = named_call(self.named(head), text, head.end())
            behind = json_then(text, head.end(), self.call_end, last=True)
            position = inside if behind < 0 else behind + len(self.call_end)
            left = text[stop : inside if behind < 0 else behind].strip()
            if not isinstance(what, str) and left not in ("", self.tail.strip()):
                what = f"The call's arguments end at its character {stop - head.start()} and more text follows."
            if not isinstance(what, str) and behind < 0:
                what = f"The call is not closed: {self.call_end} is missing."
            found.append(Span(what, head.start(), position))
        if text[position:].strip() or not found:
            place = position - begin.start()
            found.append(Span(f"No call begins at character {place} of the calls.", position, inside))
        return found, end

    def opening(self, name: str | None = None) -> str:
        return f"{self.start}{self.call_start}" if name is None else f"{self.start}{self.head_of(name)}"

    def text_of(self, name: str, arguments: Mapping[str, Any]) -> str:
        said = json.dumps(arguments, ensure_ascii=False)
        return f"{self.opening(name)}{said}{self.tail}{self.call_end}{self.end}"
