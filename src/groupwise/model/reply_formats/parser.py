"""Splits a reply that arrives in pieces of any size into reasoning, content and whole tool calls.

    parser = format_of(tokenizer).parser(thinks=opens_thought(ids, tokenizer), tools=tools)
    parts = [*parser.push("Let me "), *parser.push("see."), *parser.finish()]

The parts are the same however the text was cut. So what is not decided is held back: an end that may grow into a
marker, space that may turn out to surround a thought or a call, and a tool call until it is whole.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from groupwise.model.reply_formats.format import MalformedCall, ParsedCall, ReplyFormat, Tools

READ_AGAIN = 4096  # characters up to which an open call is read for each marker that may end it


@dataclass(frozen=True)
class ReplyPart:
    """A piece of a reply: text of a kind, or one whole tool call (`arguments` is JSON text, as OpenAI sends it). What a
    parser finds has no `id` yet. `malformed`: the text is a call that cannot be used, and why."""

    kind: Literal["reasoning", "content", "tool_call"]
    text: str = ""
    name: str = ""
    arguments: str = ""
    id: str = ""
    malformed: MalformedCall | None = None

    @classmethod
    def of_call(cls, call: ParsedCall) -> ReplyPart:
        """Return a call as a part."""
        return cls("tool_call", name=call.name, arguments=json.dumps(call.arguments, ensure_ascii=False))

    @property
    def call(self) -> ParsedCall | None:
        """The call that it is."""
        return ParsedCall(self.name, json.loads(self.arguments)) if self.kind == "tool_call" else None


class ReplyParser(ABC):
    """What splits one reply."""

    @abstractmethod
    def push(self, text: str) -> list[ReplyPart]:
        """Return the parts that are certain now."""

    @abstractmethod
    def finish(self) -> list[ReplyPart]:
        """End the reply and return the rest of it."""


def beginning_length(text: str, wanted: Sequence[str]) -> int:
    """Return how many characters at the end of `text` begin one of `wanted` without completing it.

    >>> beginning_length("to be", ["be or not", "eel"]), beginning_length("to be", ["or"])
    (2, 0)
    """
    longest = min(len(text), max(map(len, wanted), default=1) - 1)
    for length in range(longest, 0, -1):
        tail = text[-length:]
        if any(len(one) > length and one.startswith(tail) for one in wanted):
            return length
    return 0


class OpenCall:
    """Says when a call that arrives in pieces is to be read again from its beginning, to see if it has ended: when a
    marker that may end it has come, and if it is longer than `READ_AGAIN` characters, has grown by an eighth of what is
    more since it was read last. So the time it takes is in proportion to its length, whatever it is made of.

    Args:
        ends: matches the markers; longest: characters of the longest of them.
    """

    def __init__(self, ends: re.Pattern[str], longest: int):
        self._ends, self._longest = ends, longest
        self._looked = self._next = 0  # characters in which a marker was looked for; that it has when it is read next

    def may_end(self, text: str, start: int = 0) -> bool:
        """Return whether the call, text[start:] so far, is to be read."""
        size = len(text) - start
        if size < self._next:
            return False
        looked, self._looked = self._looked, size
        if self._ends.search(text, start + max(0, looked - self._longest + 1)) is None:
            return False
        self._next = size + max(0, size - READ_AGAIN) // 8
        return True


class MarkedParser(ReplyParser):
    """Splits a reply of which thoughts and calls stand between a format's markers.

    A reply may begin with a thought, or with the inside of one when the prompt ends in it (`thinks`). With `calls`,
    calls outside thoughts are calls; one that is malformed stays content. Space around a thought and around calls is
    dropped; a reply with neither is left as it is. Where a format does not close its calls, they are known when the
    reply is over.
    """

    def __init__(self, form: ReplyFormat, *, thinks: bool, calls: bool, tools: Tools):
        self._form, self._calls, self._tools = form, calls, tools
        self._state: Literal["start", "reasoning", "content"] = "reasoning" if thinks else "start"
        self._text = ""  # not decided yet
        self._trim = thinks  # whether space that comes next is dropped
        self._said = self._called = False  # any content, any call so far
        self._open = self._new_open()

    def push(self, text: str) -> list[ReplyPart]:
        self._text += text
        return self._take(last=False)

    def finish(self) -> list[ReplyPart]:
        return self._take(last=True)

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
        """Thought or content? Space in front of a thought goes with it."""
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
            if not isinstance(piece, ParsedCall):
                said += piece.text if isinstance(piece, MalformedCall) else piece
                malformed = piece if isinstance(piece, MalformedCall) else malformed
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
