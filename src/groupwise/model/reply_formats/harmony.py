"""Harmony, gpt-oss' format: a reply is messages, each of a channel, and one to a tool is a call.

    <|channel|>analysis<|message|>Let me see.<|end|>                                             a thought
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>      a call
    <|start|>assistant<|channel|>final<|message|>It is 7.<|return|>                              what is said

The prompt ends with <|start|>assistant, so that the first message lacks it; to= may also stand in front of the channel.
A message on the channel commentary without a to= is text, too. A call ends the turn, so that there is one in a reply.
The template looks for earlier thoughts in a field of the message, and shows one call of each. Known from
github.com/openai/harmony, docs/format.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from groupwise.model.reply_formats.format import MalformedCall, ParsedCall, ReplyFormat, ThoughtMarks, Tools
from groupwise.model.reply_formats.json_text import json_end, named_call
from groupwise.model.reply_formats.lark import TEXT, CallWriter
from groupwise.model.reply_formats.parser import OpenCall, ReplyParser, ReplyPart, beginning_length

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
THOUGHT = f"{CHANNEL}analysis{MESSAGE}"
FUNCTIONS = "functions."
_BEGINNINGS = (START, CHANNEL, "to=")  # of a header
_TO = re.compile(r"\bto=([^\s<]+)")
_NEXT = re.compile("|".join(map(re.escape, (*ENDS, START))))  # ends the text of a message
_LONGEST = max(map(len, (*ENDS, START)))


class _Writer(CallWriter):
    """Writes the grammar of one call after a thought that has ended; an answer is a message of the channel `final`."""

    def body(self, index: int, function: Mapping[str, Any]) -> str:
        head = f"{FUNCTIONS}{function['name']} {CONSTRAIN}json{MESSAGE}"
        return f"{self.text(head)} {self.arguments(index, function)}"

    def calls(self, *, several: bool) -> str:
        return f"{self.text(self.opening)} call {self.text(self.closing)}?"

    def amid_text(self, *, several: bool) -> str:
        said = f"{self.text(CHANNEL)} /analysis|commentary|final/ {self.text(MESSAGE)} FREE"
        then = f"{self.text('<|end|>')} {self.text(f'{START}assistant')}"
        return f"start: ({said} {then})* ({said} | {self.calls(several=several)})\nFREE: {TEXT}"


class Harmony(ReplyFormat):
    """gpt-oss's format: messages with headers."""

    name, start, end = "harmony", f"{CHANNEL}commentary to=", "<|call|>"
    thought = ThoughtMarks(THOUGHT, f"<|end|>{START}assistant")
    thinks_unasked = thoughts_apart = True
    answer_head, writes = f"{CHANNEL}final{MESSAGE}", _Writer

    def shown_in(self, template: str) -> bool:
        return CHANNEL in template and MESSAGE in template

    def thought_is_over(self, prompt_end: str) -> bool:
        """Return False: every prompt ends as a thought does, with the head of the next message."""
        return False

    def parser(self, *, thinks: bool = False, calls: bool = True, tools: Tools = ()) -> ReplyParser:
        return _Parser(thinks=thinks, calls=calls)

    def pieces(self, text: str, *, tools: Tools = ()) -> Iterator[str | ParsedCall | MalformedCall]:
        for part in self.parser().whole(text):
            yield part.call or part.malformed or part.text

    def opening(self, name: str | None = None) -> str:
        to = f"{self.start}{FUNCTIONS}"
        return to if name is None else f"{to}{name} {CONSTRAIN}json{MESSAGE}"

    def text_of(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{self.opening(name)}{json.dumps(arguments, ensure_ascii=False)}{self.end}"

    def history(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Put thoughts where the template looks for them, and each call into its own message, its result behind
        it."""
        shown, position = list[dict[str, Any]](), 0
        while position < len(messages):
            message = _thinking(messages[position])
            position += 1
            calls = message.get("tool_calls") or []
            if len(calls) < 2:
                shown.append(message)
                continue
            results = list[dict[str, Any]]()
            while position < len(messages) and messages[position]["role"] == "tool":
                results.append(messages[position])
                position += 1
            for i, call in enumerate(calls):
                own = [r for r in results if r.get("tool_call_id") == call.get("id")] or results[i : i + 1]
                first = message if i == 0 else {"role": "assistant", "content": ""}
                shown += [{**first, "tool_calls": [call]}, *own]
        return shown


def _thinking(message: dict[str, Any]) -> dict[str, Any]:
    """Return an assistant's message with its thought as `thinking`. In front of a call the template shows a thought or
    what is said, as a thought, and not both."""
    message = dict(message)
    thought = message.pop("reasoning_content", None)
    if message.get("role") != "assistant" or not thought:
        return message
    said = message.get("content")
    if message.get("tool_calls") and said:
        return {**message, "content": "", "thinking": f"{thought}\n\n{said}"}
    return {**message, "thinking": thought}


class _Parser(ReplyParser):
    """Splits a reply by the headers of its messages."""

    def __init__(self, *, thinks: bool, calls: bool):
        self._calls = calls
        self._header: str | None = None  # of the message whose text comes; None between two
        self._to: str | None = None  # the tool that it is addressed to, if any
        if thinks:
            self._head(THOUGHT)

    def _take(self, *, last: bool) -> list[ReplyPart]:
        parts = list[ReplyPart]()
        while self._text:
            before = self._text, self._header
            parts += self._begin(last=last) if self._header is None else self._go_on(last=last)
            if (self._text, self._header) == before:
                break
        if last and self._header is not None and not self._text:  # a message was begun of which nothing came
            parts += self._go_on(last=True)
        return [part for part in parts if part.text or part.kind == "tool_call"]

    def _begin(self, *, last: bool) -> list[ReplyPart]:
        """Read a header; what has none is said."""
        text = self._text.lstrip()
        if text.startswith(_BEGINNINGS):
            header, found, rest = text.partition(MESSAGE)
            if found:
                self._head(header + found)
                self._text = rest
            elif last:
                return self._say(len(self._text))
        elif last or not any(each.startswith(text) for each in _BEGINNINGS):
            self._head("")
        return []

    def _head(self, header: str) -> None:
        """Begin a message."""
        to = _TO.search(header)
        self._header, self._to = header, to and to[1]
        self._open = OpenCall(_NEXT, _LONGEST)

    def _go_on(self, *, last: bool) -> list[ReplyPart]:
        """Take of a message what is certain."""
        header = self._header or ""
        if self._to is not None and self._calls:
            return self._call(header, self._to, last=last)
        end = _NEXT.search(self._text)
        length = end.start() if end else len(self._text)
        if not end and not last:
            length -= beginning_length(self._text, (*ENDS, START))
        said, self._text = self._text[:length], self._text[length:]
        if end:
            self._header = None
            self._text = self._text.removeprefix(end[0]) if end[0] in ENDS else self._text
        return [ReplyPart("reasoning" if "analysis" in header and self._to is None else "content", said)]

    def _call(self, header: str, to: str, *, last: bool) -> list[ReplyPart]:
        """Take a call once it is whole."""
        if not last and not self._open.may_end(self._text):
            return []
        position, is_json = json_end(self._text, 0)
        end = _NEXT.search(self._text, position)
        if end is None and not last:
            return []
        end = end if end or is_json else _NEXT.search(self._text)
        body = self._text[: end.start()] if end else self._text
        closed = end[0] if end and end[0] in ENDS else ""
        self._text, self._header = self._text[len(body) + len(closed) :], None
        what, stop = named_call(to.removeprefix(FUNCTIONS), body)
        if not to.startswith(FUNCTIONS):
            what = f"The call is to {to}, which is none of the functions."
        elif not isinstance(what, str) and body[stop:].strip():
            what = f"The call's arguments end at its character {stop} and more text follows."
        if isinstance(what, ParsedCall):
            return [ReplyPart.of_call(what)]
        text = header + body + closed
        return [ReplyPart("content", text, malformed=MalformedCall(text, what))]

    def _say(self, length: int) -> list[ReplyPart]:
        said, self._text = self._text[:length], self._text[length:]
        return [ReplyPart("content", said)]
