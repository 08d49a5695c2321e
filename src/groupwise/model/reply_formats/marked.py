"""Formats whose calls begin with a marker: how a reply in one is read, whole and in pieces.

Both go by the same three, which a format says: `begins`, `end_of`, `read`.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from groupwise.model.reply_formats.format import MalformedCall, ParsedCall, ReplyFormat, Tools
from groupwise.model.reply_formats.parser import OpenCall, ReplyParser, ReplyPart, beginning_length


@dataclass(frozen=True)
class Span:
    """A stretch text[start:end] that was read: a call, the reason why it is none (a str), or None for text that only
    began like one."""

    what: ParsedCall | str | None
    start: int
    end: int

    def piece(self, text: str, start: int, end: int) -> str | ParsedCall | MalformedCall:
        """Return a call or a malformed call; a malformed one has the text between `start` and `end`."""
        if isinstance(self.what, ParsedCall):
            return self.what
        return text[start:end] if self.what is None else MalformedCall(text[start:end], self.what)


class MarkedFormat(ReplyFormat):
    """A format whose calls begin with the marker `start`."""

    def begins(self, text: str, position: int = 0, *, first: bool = True) -> re.Match[str] | None:
        """Return where a call begins at `position` or later. `first`: nothing was said in front of the text."""
        return self._start.search(text, position)

    def may_begin(self, text: str, *, first: bool) -> bool:
        """Return whether a call without a marker may have begun with the text, of which more comes."""
        return False

    def end_of(self, text: str, start: int, *, last: bool) -> int:
        """Return where the marker begins that closes the calls whose own marker begins at `start`; -1 where it is not
        there, or more text may show that what is there is part of a string. `last`: no more text comes."""
        return -1

    @abstractmethod
    def read(self, text: str, begin: re.Match[str], tools: Tools) -> tuple[list[Span], int]:
        """Return the calls that begin here, and where they end. Never raises."""

    def pieces(self, text: str, *, tools: Tools = ()) -> Iterator[str | ParsedCall | MalformedCall]:
        """Yield a reply without thoughts, piece by piece: text, calls, and calls that cannot be used. Without a
        `ParsedCall` the pieces' texts are the whole reply; markers and separators are left out only with the call that
        they belong to."""
        position = 0
        while (begin := self.begins(text, position)) is not None:
            yield text[position : begin.start()]
            found, position = self.read(text, begin, tools)
            yield from _in_full(text, begin.start(), found, position)
        yield text[position:]

    def parser(self, *, thinks: bool = False, calls: bool = True, tools: Tools = ()) -> ReplyParser:
        return MarkedParser(self, thinks=thinks, calls=calls, tools=tools)

    @property
    def _start(self) -> re.Pattern[str]:
        return re.compile(re.escape(self.start))


class EnclosedFormat(MarkedFormat):
    """A format whose calls are known when the marker `end` has closed them."""

    @abstractmethod
    def found(self, text: str, start: int, close: int, tools: Tools) -> list[Span]:
        """Return the calls between two markers, in text[start:close]: at least one, perhaps malformed. Never raises."""

    def read(self, text: str, begin: re.Match[str], tools: Tools) -> tuple[list[Span], int]:
        close = self.end_of(text, begin.start(), last=True)
        if close < 0:
            return [Span(f"The call is not closed: {self.end} is missing.", begin.start(), len(text))], len(text)
        return self.found(text, begin.end(), close, tools), close + len(self.end)


def _in_full(text: str, start: int, spans: list[Span], end: int) -> Iterator[str | ParsedCall | MalformedCall]:
    """Yield the spans of text[start:end] as pieces. What lies around them is a call's own syntax and goes with it; with
    no call there, it stays: at either end as part of the malformed call, in between as text."""
    called = any(isinstance(span.what, ParsedCall) for span in spans)
    for i, span in enumerate(spans):
        before = spans[i - 1] if i else None
        if before is not None and not isinstance(before.what, ParsedCall) and not isinstance(span.what, ParsedCall):
            yield text[before.end : span.start]
        first, last = before is None and not called, i == len(spans) - 1 and not called
        yield span.piece(text, start if first else span.start, end if last else span.end)


class MarkedParser(ReplyParser):
    """Splits a reply of which thoughts and calls stand between a format's markers.

    A reply may begin with a thought, or with the inside of one when the prompt ends in it (`thinks`). With `calls`,
    calls outside thoughts are calls; one that is malformed stays content. Space around a thought and around calls is
    dropped; a reply with neither is left as it is. Where a format does not close its calls, they are known when the
    reply is over.
    """

    def __init__(self, form: MarkedFormat, *, thinks: bool, calls: bool, tools: Tools):
        self._form, self._calls, self._tools = form, calls, tools
        self._state: Literal["start", "reasoning", "content"] = "reasoning" if thinks else "start"
        self._trim = thinks  # whether space that comes next is dropped
        self._said = self._called = False  # any content, any call so far
        self._open = self._new_open()

    def _new_open(self) -> OpenCall:
        return OpenCall(re.compile(re.escape(self._form.end)), len(self._form.end))

    def _take(self, *, last: bool) -> list[ReplyPart]:
        parts: list[ReplyPart] = []
        if self._state == "start":
            self._begin(last=last)
        if self._state == "reasoning":
            parts += self._reason(last=last)
        if self._state == "content":
            parts += self._content(last=last)
        return parts

    def _begin(self, *, last: bool) -> None:
        """Decide between a thought and content. Space in front of a thought goes with it."""
        text, mark = self._text.lstrip(), self._form.thought.start
        if text.startswith(mark):
            self._state, self._text, self._trim = "reasoning", text[len(mark) :], True
        elif last or not mark.startswith(text):
            self._state = "content"

    def _reason(self, *, last: bool) -> list[ReplyPart]:
        text, mark = self._text.lstrip() if self._trim else self._text, self._form.thought.end
        thought, closed, rest = text.partition(mark)
        if not closed and not last:
            thought = text[: len(text) - beginning_length(text, [mark])]
        thought = thought.rstrip()
        if closed:
            self._state, self._text, self._trim = "content", rest, True
        else:
            self._text, self._trim = text[len(thought) :], self._trim and not thought
        return [ReplyPart("reasoning", thought)] if thought else []

    def _content(self, *, last: bool) -> list[ReplyPart]:
        parts: list[ReplyPart] = []
        while self._text:
            self._text = self._text.lstrip() if self._trim else self._text
            begin = self._form.begins(self._text, first=not self._said) if self._calls else None
            if begin is None:
                held = not last and self._calls and self._form.may_begin(self._text, first=not self._said)
                return parts if held else parts + self._say(self._certain(last=last))
            ended = last or self._open.may_end(self._text, begin.start())
            close = self._form.end_of(self._text, begin.start(), last=last) if ended else -1
            if close < 0 and not last:
                return parts + self._say(len(self._text[: begin.start()].rstrip()))
            end = len(self._text) if close < 0 else close + len(self._form.end)
            parts += self._take_calls(begin.start(), end, last=last and close < 0)
        return parts

    def _take_calls(self, start: int, end: int, *, last: bool) -> list[ReplyPart]:
        parts, said, malformed = list[ReplyPart](), self._text[:start], None
        self._open = self._new_open()
        region, self._text = self._text[start:end], self._text[end:]
        for piece in self._form.pieces(region, tools=self._tools):
            if isinstance(piece, str):
                said += piece
                continue
            if isinstance(piece, MalformedCall):
                if malformed is not None:  # which is its own part
                    parts += self._give(said, malformed)
                    said = ""
                said, malformed = said + piece.text, piece
                continue
            parts += self._give(said.rstrip(), malformed)
            parts.append(ReplyPart.of_call(piece))
            said, malformed, self._called, self._trim = "", None, True, not self._said
        return parts + self._give(said.rstrip() if last and self._called else said, malformed)

    def _certain(self, *, last: bool) -> int:
        """Return how much of the text, in which no call begins, is content whatever comes."""
        if last:
            return len(self._text.rstrip() if self._called else self._text)
        if not self._calls:
            return len(self._text)
        return len(self._text[: len(self._text) - beginning_length(self._text, [self._form.start])].rstrip())

    def _say(self, length: int) -> list[ReplyPart]:
        text, self._text = self._text[:length], self._text[length:]
        return self._give(text)

    def _give(self, text: str, malformed: MalformedCall | None = None) -> list[ReplyPart]:
        text = text.lstrip() if self._trim else text
        if not text:
            return []
        self._said, self._trim = True, False
        return [ReplyPart("content", text, malformed=malformed)]
