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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from groupwise.model.reply_formats.format import MalformedCall, ParsedCall

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
        """Return the call that it is; None for text."""
        return ParsedCall(self.name, json.loads(self.arguments)) if self.kind == "tool_call" else None


class ReplyParser(ABC):
    """Splits one reply into parts (text, thoughts, calls) while it arrives."""

    _text = ""  # not decided yet

    def push(self, text: str) -> list[ReplyPart]:
        """Return the parts that are certain now."""
        self._text += text
        return self._take(last=False)

    def finish(self) -> list[ReplyPart]:
        """End the reply and return the rest of it."""
        return self._take(last=True)

    def whole(self, text: str) -> list[ReplyPart]:
        """Return the parts of a reply of which `text` is all."""
        return [*self.push(text), *self.finish()]

    @abstractmethod
    def _take(self, *, last: bool) -> list[ReplyPart]:
        """Take of the text what is certain, and return it; all of it if no more comes (`last`)."""


def joined(parts: Iterable[ReplyPart], kind: Literal["reasoning", "content"]) -> str:
    """Return the text of this kind in a reply's parts."""
    return "".join(part.text for part in parts if part.kind == kind)


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
