"""The base of all reply formats: how one is known, how its calls and thoughts are read, written, shown again,
constrained.

    known         `shown_in` of a chat template
    read          `pieces` of a whole text, `parser` for one that arrives in pieces
    written       `opening` and `text_of` a call
    shown again   `history`: earlier messages as the family's template takes them
    constrained   `writer`: calls of given tools as a grammar

Each format is a file next to this one, and only that file knows it; `known.FORMATS` lists them. No other code asks
which format it has.

A call ends where its JSON, or whatever else it is made of, has ended: a marker inside a string closes nothing. A call
that was begun and cannot be used ends nothing: it becomes a `MalformedCall`, with a reason and its place, which can be
sent back to the model, and its text stays in the content.
"""

from __future__ import annotations

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
    """Holds a tool call that was read from a reply: the tool's name, and its arguments as a JSON object."""

    name: str
    arguments: dict[str, Any]

    def as_openai(self, call_id: str) -> dict[str, Any]:
        """Return the call in the form of messages, with `arguments` as an object, which chat templates take."""
        return {"id": call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class MalformedCall:
    """A call that was begun and cannot be used: its `text`, and why, in one sentence. `str` tells the model both."""

    text: str
    reason: str

    def __str__(self) -> str:
        shown = self.text if len(self.text) <= LONGEST_SHOWN else f"{self.text[:LONGEST_SHOWN]}..."
        return f"{self.reason} It was: {shown.strip()}"


class ReplyFormat(ABC):
    """A format in which a family of models writes replies.

    Attributes:
        name: the format's name in pages and reports.
        start: the marker with which calls begin.
        end: the marker that closes them; empty where calls continue until the reply ends.
        thought: the markers around a thought.
        thinks_unasked: whether a reply may begin with a thought where the template has thoughts and no switch for them.
        thoughts_apart: whether the template looks for earlier thoughts in a field of the message, not in its content.
        answer_head: the text in front of an answer.
        writes: the writer of calls as a grammar.
    """

    name: ClassVar[str]
    start: ClassVar[str]
    end: ClassVar[str] = ""
    thought: ClassVar[ThoughtMarks] = THINK
    thinks_unasked: ClassVar[bool] = False
    thoughts_apart: ClassVar[bool] = False
    answer_head: ClassVar[str] = ""
    writes: ClassVar[type[CallWriter]]

    def __repr__(self) -> str:
        return self.name

    @abstractmethod
    def shown_in(self, template: str) -> bool:
        """Return whether a chat template writes calls so. Several may say yes: the first in `known.FORMATS` counts."""

    # ---- read ----
    @abstractmethod
    def pieces(self, text: str, *, tools: Tools = ()) -> Iterator[str | ParsedCall | MalformedCall]:
        """Yield a reply without thoughts, piece by piece: what is said, calls, and calls that cannot be used. Never
        raises."""

    def thought_is_over(self, prompt_end: str) -> bool:
        """Return whether the end of a prompt shows that the reply is not to begin with a thought."""
        return prompt_end.rstrip().endswith(self.thought.end)

    @abstractmethod
    def parser(self, *, thinks: bool = False, calls: bool = True, tools: Tools = ()) -> ReplyParser:
        """Return a parser that splits a reply that arrives in pieces.

        Args:
            thinks: whether the prompt ends inside a thought, so that the reply begins in it.
            calls: whether calls outside thoughts are calls; what is malformed stays content.
            tools: the definitions that were offered, for formats that need their types.
        """

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
    def writer(self, tools: Tools, tokenizer: PreTrainedTokenizerBase, *, only: str | None) -> CallWriter:
        """Return a writer of calls of `tools`, or of `only` the one of this name, as a grammar."""
        return self.writes(self, tools, tokenizer, only=only)
