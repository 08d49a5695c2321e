"""What a format of replies is: how it is known, how its calls and thoughts are read, written, shown again, constrained.

    known         `shown_in` of a chat template
    read          `pieces` of a whole text, `parser` for one that arrives in pieces; both by `begins`, `end_of`, `read`
    written       `opening` and `text_of` a call
    shown again   `history`: earlier messages as the family's template takes them
    constrained   `writer`: calls of given tools as a grammar

Each file beside this one is a format, and all that knows it; `known.FORMATS` lists them. Nothing else asks which it is.
Harmony, whose replies are messages with headers, has a parser of its own.

A call ends where its JSON, or whatever else it is made of, has ended: a marker inside a string closes nothing. A call
that was begun and cannot be used is no error: it is a `MalformedCall`, with a reason and its place, which can be sent
back to the model, and its text stays in the content.
"""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from groupwise.model.reply_formats.lark import CallWriter
    from groupwise.model.reply_formats.parser import ReplyParser

Tool = Mapping[str, Any]  # OpenAI's definition
Tools = Sequence[Tool]

LONGEST_SHOWN = 300  # characters of a malformed call that its report repeats


@dataclass(frozen=True)
class ThoughtMarks:
    """The texts that begin and end a thought."""

    start: str
    end: str


THINK = ThoughtMarks("<think>", "</think>")


@dataclass(frozen=True)
class ParsedCall:
    """One call: a tool's name, and its arguments as a JSON object."""

    name: str
    arguments: dict[str, Any]

    def as_openai(self, call_id: str) -> dict[str, Any]:
        """Return it as messages carry it, `arguments` as the object that chat templates want."""
        return {"id": call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class MalformedCall:
    """A call that was begun and cannot be used: its `text`, and why, in one sentence. `str` tells the model both."""

    text: str
    reason: str

    def __str__(self) -> str:
        shown = self.text if len(self.text) <= LONGEST_SHOWN else f"{self.text[:LONGEST_SHOWN]}..."
        return f"{self.reason} It was: {shown.strip()}"


@dataclass(frozen=True)
class Span:
    """What was read from text[start:end]: a call, the reason why it is none (a str), or None for text that began like
    one."""

    what: ParsedCall | str | None
    start: int
    end: int

    def piece(self, text: str, start: int, end: int) -> str | ParsedCall | MalformedCall:
        """Return it as what it is, with the text between `start` and `end` where it is no call."""
        if isinstance(self.what, ParsedCall):
            return self.what
        return text[start:end] if self.what is None else MalformedCall(text[start:end], self.what)


class ReplyFormat(ABC):
    """How a family of models writes replies.

    Attributes:
        name: what it is called, in pages and reports.
        start: the marker with which calls begin.
        end: the marker that closes them; empty where calls go on until the reply ends.
        thought: what stands around a thought.
        thinks_unasked: whether a reply may begin with a thought where the template has thoughts and no switch for them.
        thoughts_apart: whether the template looks for earlier thoughts in a field of the message, not in its content.
    """

    name: ClassVar[str]
    start: ClassVar[str]
    end: ClassVar[str] = ""
    thought: ClassVar[ThoughtMarks] = THINK
    thinks_unasked: ClassVar[bool] = False
    thoughts_apart: ClassVar[bool] = False

    def __repr__(self) -> str:
        return self.name

    @abstractmethod
    def shown_in(self, template: str) -> bool:
        """Return whether a chat template writes calls so. Several may say yes: the first in `known.FORMATS` counts."""

    # ---- read ----
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
        """Return what is found where calls begin, and where all of it ends. Never raises."""

    def pieces(self, text: str, *, tools: Tools = ()) -> Iterator[str | ParsedCall | MalformedCall]:
        """Yield a reply without thoughts, piece by piece: what is said, calls, and calls that cannot be used. Where
        there is no `ParsedCall`, the pieces' texts are the reply; markers and separators are left out only beside a
        call that they belong to."""
        position = 0
        while (begin := self.begins(text, position)) is not None:
            yield text[position : begin.start()]
            found, position = self.read(text, begin, tools)
            yield from _in_full(text, begin.start(), found, position)
        yield text[position:]

    def thought_is_over(self, prompt_end: str) -> bool:
        """Return whether the end of a prompt shows that the reply is not to begin with a thought."""
        return prompt_end.rstrip().endswith(self.thought.end)

    def parser(self, *, thinks: bool = False, calls: bool = True, tools: Tools = ()) -> ReplyParser:
        """Return what splits a reply that arrives in pieces.

        Args:
            thinks: whether the prompt ends inside a thought, so that the reply begins in it.
            calls: whether calls outside thoughts are calls; what is malformed stays content.
            tools: the definitions that were offered, for formats that need their types.
        """
        from groupwise.model.reply_formats.parser import MarkedParser

        return MarkedParser(self, thinks=thinks, calls=calls, tools=tools)

    # ---- written ----
    @abstractmethod
    def opening(self, name: str | None = None) -> str:
        """Return the beginning of a call, of the tool `name` if given; the model completes it."""

    @abstractmethod
    def text_of(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return a call as a model writes it."""

    def call_id(self, index: int) -> str:
        """Return the id of a reply's call number `index`."""
        return f"call_{index}"

    def random_id(self) -> str:
        """Return an id that no other call has, whatever the conversation."""
        return f"call_{secrets.token_hex(12)}"

    # ---- shown again ----
    def history(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages in OpenAI's form as the family's template takes them."""
        return messages

    # ---- constrained ----
    @abstractmethod
    def writer(self, tools: Tools, tokenizer: PreTrainedTokenizerBase, *, only: str | None) -> CallWriter:
        """Return what writes calls of `tools`, or `only` of the one of this name, as a grammar."""

    @property
    def _start(self) -> re.Pattern[str]:
        return re.compile(re.escape(self.start))


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
