"""Turns sampled tokens into text as they come, and text into reasoning, content and tool calls.

    TextStream    token ids one by one -> text that nothing sampled later can take back
    ReplyParser   text in pieces of any size -> reasoning, content and whole tool calls
    Reply         the same with ids for the calls, and what it adds up to as a message
    token_text    one token as the log-probability lists show it: its text and its bytes

What is streamed is what the whole reply would have been: the pieces of a `TextStream` join to the engine's text, and a
`ReplyParser` gives the same parts however its text was cut. So both hold back what is not decided: the bytes of an
unfinished character, an end that may grow into a stop string, space that may turn out to surround a thought or a call,
and a tool call until it is whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from groupwise.model.chat import THINK_END, THINK_START, closing_ids
from groupwise.tasks.tool_calls import MalformedCall, ParsedCall, ToolCallFormat, pieces
from groupwise.types import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # what decoding puts for bytes that are no character, or not one yet
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how sentencepiece vocabularies spell a single byte
WINDOW = 16  # ids decoded again for each new one, before the oldest are let go


# ---- tokens to text ----
class Detokenizer:
    """Ids one by one -> the text that no later id can change; together, the text of `chat.decode`.

    `ends` are the ids that close a reply: they show only where the reply goes on behind them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, ends: Collection[int] = ()):
        self._tokenizer = tokenizer
        self._ends = (*ends, *closing_ids(tokenizer))
        self._trailing: list[int] = []  # ends seen last
        self._window: list[int] = []  # the latest ids; the first `_settled` of them are `_given` characters, given out
        self._settled = self._given = 0

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` settles; often none."""
        if token_id in self._ends:
            self._trailing.append(token_id)
            return ""
        self._window += [*self._trailing, token_id]
        self._trailing.clear()
        text = plain_text(self._window, self._tokenizer)
        if text.endswith(REPLACEMENT) or _is_byte(token_id, self._tokenizer):
            return ""
        new = text[self._given :]
        if len(self._window) > WINDOW:  # begin again at an edge between characters, with a little of what was given
            self._window = self._window[self._settled :]
            text = plain_text(self._window, self._tokenizer)
        self._settled, self._given = len(self._window), len(text)
        return new


class TextStream:
    """The text of one completion while it is sampled; what `push` and `finish` return joins to the engine's text.
    `params` are those that the engine samples with: they say what stops it, and whether that stays in the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, params: SamplingParams):
        self._detokenizer = Detokenizer(tokenizer, ends=params.stop_ids)
        self._stop = params.stop
        self._early = params.min_tokens  # tokens in which nothing stops it
        self._held = ""
        self._given = 0
        self._stopped = False

    def push(self, token_id: int) -> str:
        """Return the text that is certain now."""
        self._held += self._detokenizer.push(token_id)
        self._early -= 1
        if self._stopped or not self._held:
            return ""
        found = [at for stop in self._stop if (at := self._held.find(stop)) >= 0] if self._early < 0 else []
        self._stopped = bool(found)
        return self._give(min(found) if found else len(self._held) - beginning_length(self._held, self._stop))

    def finish(self, text: str) -> str:
        """Return what is missing of the completion's whole `text`, as the engine gives it."""
        return text[self._given :]

    def _give(self, length: int) -> str:
        given, self._held = self._held[:length], self._held[length:]
        self._given += length
        return given


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


@lru_cache(maxsize=1 << 16)
def token_text(token_id: int, tokenizer: PreTrainedTokenizerBase) -> tuple[str, bytes]:
    """Return a token's text as it stands inside a longer one, and its bytes, which may be only part of a character."""
    alone = plain_text([token_id], tokenizer)
    if REPLACEMENT in alone:
        return alone, _bytes_of(str(tokenizer.convert_ids_to_tokens(token_id)), alone)
    twice = plain_text([token_id, token_id], tokenizer)  # at the very start some decoders take a space away
    text = twice[len(alone) :]
    return text, text.encode()


def plain_text(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text if isinstance(text, str) else "".join(text)


def _is_byte(token_id: int, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a token is a bare byte: a run of them is read as characters, or as none, only when it is over."""
    return BYTE_TOKEN.fullmatch(str(tokenizer.convert_ids_to_tokens(token_id))) is not None


def _bytes_of(token: str, text: str) -> bytes:
    """Return the bytes of a vocabulary entry that is no whole text: byte-level letters, or <0xE2>."""
    if match := BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    letters = _byte_letters()
    return bytes(letters[letter] for letter in token) if all(x in letters for x in token) else text.encode()


@lru_cache(maxsize=1)
def _byte_letters() -> dict[str, int]:
    """Return the letters in which byte-level vocabularies write bytes: themselves where printable, else from U+0100
    on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


# ---- text to reasoning, content and tool calls ----
@dataclass(frozen=True)
class ReplyPart:
    """A piece of a reply: text of a kind, or one whole tool call (`arguments` is JSON text, as OpenAI sends it). What a
    parser finds has no `id` yet."""

    kind: Literal["reasoning", "content", "tool_call"]
    text: str = ""
    name: str = ""
    arguments: str = ""
    id: str = ""


class ReplyParser:
    """Splits a reply that arrives in pieces.

    A reply may begin with <think>...</think>, or with the inside of one when the prompt `thinks` (it ends with
    <think>). With `calls`, the model's format, calls outside thoughts are calls; one that is malformed stays content.
    Space around a thought and around calls is dropped; a reply with neither is left as it is. Where a format does not
    close its calls, they are known when the reply is over, and so is a reply that begins with JSON in Llama's.

    Args:
        tools: the definitions that were offered, for formats that need their types.
    """

    def __init__(
        self,
        *,
        thinks: bool = False,
        calls: ToolCallFormat | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ):
        self._calls, self._tools = calls, tools
        self._state: Literal["start", "reasoning", "content"] = "reasoning" if thinks else "start"
        self._text = ""  # not decided yet
        self._trim = thinks  # whether space that comes next is dropped
        self._said = self._called = False  # any content, any call so far

    def push(self, text: str) -> list[ReplyPart]:
        """Return the parts that are certain now."""
        self._text += text
        return self._take(last=False)

    def finish(self) -> list[ReplyPart]:
        """End the reply and return the rest of it."""
        return self._take(last=True)

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
        """Thought or content? Space in front of <think> goes with it."""
        text = self._text.lstrip()
        if text.startswith(THINK_START):
            self._state, self._text, self._trim = "reasoning", text[len(THINK_START) :], True
        elif last or not THINK_START.startswith(text):
            self._state = "content"

    def _reason(self, *, last: bool) -> list[ReplyPart]:
        text = self._text.lstrip() if self._trim else self._text
        thought, closed, rest = text.partition(THINK_END)
        if not closed and not last:
            thought = text[: len(text) - beginning_length(text, [THINK_END])]
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
            start = self._call_start()
            if self._calls is None or start < 0:
                return parts + self._say(self._certain(last=last))
            close = self._calls.end_of(self._text, start, last=last)
            if close < 0 and not last:
                return parts + self._say(len(self._text[:start].rstrip()))
            end = len(self._text) if close < 0 else close + len(self._calls.end or "")
            parts += self._take_calls(start, end, self._calls, last=last and close < 0)
        return parts

    def _call_start(self) -> int:
        """Return where a call begins, or may; -1 for nowhere."""
        if self._calls is None:
            return -1
        if self._calls is ToolCallFormat.LLAMA and not self._said and self._text.lstrip().startswith("{"):
            return 0
        return self._text.find(self._calls.start)

    def _take_calls(self, start: int, end: int, form: ToolCallFormat, *, last: bool) -> list[ReplyPart]:
        parts, said = [], self._text[:start]
        region, self._text = self._text[start:end], self._text[end:]
        for piece in pieces(region, form, tools=self._tools):
            if not isinstance(piece, ParsedCall):
                said += piece.text if isinstance(piece, MalformedCall) else piece
                continue
            parts += self._give(said.rstrip())
            arguments = json.dumps(piece.arguments, ensure_ascii=False)
            parts.append(ReplyPart("tool_call", name=piece.name, arguments=arguments))
            said, self._called, self._trim = "", True, not self._said
        return parts + self._give(said.rstrip() if last and self._called else said)

    def _certain(self, *, last: bool) -> int:
        """Return how much of the text, in which no call begins, is content whatever comes."""
        if last:
            return len(self._text.rstrip() if self._called else self._text)
        if self._calls is None:
            return len(self._text)
        return len(self._text[: len(self._text) - beginning_length(self._text, [self._calls.start])].rstrip())

    def _say(self, length: int) -> list[ReplyPart]:
        text, self._text = self._text[:length], self._text[length:]
        return self._give(text)

    def _give(self, text: str) -> list[ReplyPart]:
        text = text.lstrip() if self._trim else text
        if not text:
            return []
        self._said, self._trim = True, False
        return [ReplyPart("content", text)]


class Reply:
    """One reply while it is said.

    Args:
        parser: splits its text.
        new_id: an id for the next call.
        one_call: calls after the first are left out.
    """

    def __init__(self, parser: ReplyParser, *, new_id: Callable[[], str], one_call: bool = False):
        self._parser, self._new_id, self._one_call = parser, new_id, one_call
        self.parts: list[ReplyPart] = []

    @property
    def calls(self) -> list[ReplyPart]:
        return [part for part in self.parts if part.kind == "tool_call"]

    def push(self, text: str) -> list[ReplyPart]:
        """Return what `text` adds for certain."""
        return self._kept(self._parser.push(text))

    def finish(self) -> list[ReplyPart]:
        """End the reply and return the rest of it."""
        return self._kept(self._parser.finish())

    def message(self) -> dict[str, Any]:
        """Return all of it as a message in OpenAI's form: arguments as text, thoughts apart."""
        kinds = ("content", "reasoning")
        said = {kind: "".join(part.text for part in self.parts if part.kind == kind) for kind in kinds}
        calls = [
            {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.arguments}}
            for part in self.calls
        ]
        message: dict[str, Any] = {"role": "assistant", "content": said["content"] or (None if calls else "")}
        if said["reasoning"]:
            message["reasoning_content"] = said["reasoning"]
        if calls:
            message["tool_calls"] = calls
        return message

    def _kept(self, parts: Sequence[ReplyPart]) -> list[ReplyPart]:
        kept = []
        for part in parts:
            if part.kind != "tool_call":
                kept.append(part)
            elif not (self._one_call and (self.calls or any(each.kind == "tool_call" for each in kept))):
                kept.append(replace(part, id=self._new_id()))
        self.parts += kept
        return kept
