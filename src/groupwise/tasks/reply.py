"""Turns sampled tokens into text as they come, and a reply's text into the message that it adds up to.

    TextStream    token ids one by one -> text that nothing sampled later can take back
    Reply         text in pieces of any size -> reasoning, content and whole tool calls with ids, and the message
    token_text    one token as the log-probability lists show it: its text and its bytes

What is streamed is what the whole reply would have been: the pieces of a `TextStream` join to the engine's text. So it
holds back what is not decided: the bytes of an unfinished character, and an end that may grow into a stop string.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from groupwise.model.chat import closing_ids, decode
from groupwise.model.image_tokens import vision_of
from groupwise.model.reply_formats.parser import ReplyParser, ReplyPart, beginning_length, joined
from groupwise.types import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # what decoding puts for bytes that are no character, or not one yet
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how sentencepiece vocabularies spell a single byte
WINDOW = 16  # ids decoded again for each new one, before the oldest are let go


# ---- tokens to text ----
class Detokenizer:
    """Ids one by one -> the text that no later id can change; together, the text of `chat.decode`.

    `ends` are the ids that close a reply: they show only where the reply continues behind them.
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
        self._tokenizer, self._stop = tokenizer, params.stop
        self._early, self._first = params.min_tokens, list[int]()  # tokens in which nothing stops it; those so far
        self._begins = 0  # characters in them, within which no stop string counts
        self._held = ""
        self._given = 0
        self._stopped = False

    def push(self, token_id: int) -> str:
        """Return the text that is certain now."""
        self._held += self._detokenizer.push(token_id)
        early = len(self._first) < self._early
        if early:
            self._first.append(token_id)
            if self._stop and len(self._first) == self._early:
                self._begins = len(decode(self._first, self._tokenizer, ends=()))
        if self._stopped or not self._held:
            return ""
        found = [] if early else [at for stop in self._stop if (at := self._place(stop)) >= 0]
        self._stopped = bool(found)
        return self._give(min(found) if found else len(self._held) - beginning_length(self._held, self._stop))

    def _place(self, stop: str) -> int:
        """Return where a stop string begins in what is held; -1 where it is not there, as `chat.stopped_text`."""
        return self._held.find(stop, max(0, self._begins - self._given - len(stop) + 1))

    def finish(self, text: str) -> str:
        """Return the rest of the completion's whole `text`, as the engine gives it."""
        return text[self._given :]

    def _give(self, length: int) -> str:
        given, self._held = self._held[:length], self._held[length:]
        self._given += length
        return given


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
    if (vision := vision_of(tokenizer)) is not None:
        ids = vision.in_short(ids)
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text if isinstance(text, str) else "".join(text)


def _is_byte(token_id: int, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a token is a bare byte: a run of them is read as characters, or as none, only when it is over."""
    return BYTE_TOKEN.fullmatch(str(tokenizer.convert_ids_to_tokens(token_id))) is not None


def _bytes_of(token: str, text: str) -> bytes:
    """Return the bytes of a vocabulary entry that is not whole text: byte-level letters, or <0xE2>."""
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


# ---- a reply as it is said ----
class Reply:
    """Splits a reply into parts (thought, text, calls) while it is sampled.

    Args:
        parser: splits the reply's text.
        new_id: returns an id for the next call.
        one_call: keep only the first call.
    """

    def __init__(self, parser: ReplyParser, *, new_id: Callable[[], str], one_call: bool = False):
        self._parser, self._new_id, self._one_call = parser, new_id, one_call
        self.parts: list[ReplyPart] = []

    @property
    def calls(self) -> list[ReplyPart]:
        return [part for part in self.parts if part.kind == "tool_call"]

    def push(self, text: str) -> list[ReplyPart]:
        """Return the parts that `text` completes for certain."""
        return self._kept(self._parser.push(text))

    def finish(self) -> list[ReplyPart]:
        """End the reply and return the rest of it."""
        return self._kept(self._parser.finish())

    def message(self) -> dict[str, Any]:
        """Return all of it as a message in OpenAI's form: arguments as text, thoughts apart."""
        content, reasoning = (joined(self.parts, kind) for kind in ("content", "reasoning"))
        calls = [
            {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.arguments}}
            for part in self.calls
        ]
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
        if reasoning:
            message["reasoning_content"] = reasoning
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
