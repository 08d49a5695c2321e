"""A whole reply, split into what was said and the tools that were called.

The model's format (`model.reply_formats`) is read off its chat template. Calls that were begun and cannot be used are
told apart, with reasons that can be sent back to the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from groupwise.model.reply_formats.format import MalformedCall, ParsedCall, ReplyFormat, Tools
from groupwise.model.reply_formats.known import HERMES
from groupwise.model.reply_formats.parser import joined


@dataclass(frozen=True)
class ParsedReply:
    """A reply, parsed: `content` is the reply without its calls (malformed calls stay), `calls` are in OpenAI's
    form. Thoughts stay in the content too, but for formats whose templates look for them elsewhere: there they are
    `thought`."""

    content: str
    calls: list[dict[str, Any]] = field(default_factory=list)
    malformed: list[MalformedCall] = field(default_factory=list)
    thought: str | None = None


def parse(
    text: str, form: ReplyFormat = HERMES, *, tools: Tools = (), thinking: bool = False, calls: bool = True
) -> ParsedReply:
    """Split a whole reply. Never raises.

    Args:
        tools: the definitions that were offered. Some formats write strings and numbers alike; their schemas say which
            is which, and without one what reads as JSON is JSON.
        thinking: whether the prompt ends inside a thought, so that the reply begins in it. Calls in thoughts are
            thoughts.
        calls: whether calls are read at all.

    >>> parse('Wait. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ParsedReply(content='Wait.', calls=[{'id': 'call_0', 'type': 'function', 'function': {'name': 'add', \
'arguments': {'a': 1}}}], malformed=[], thought=None)
    >>> str(parse('<tool_call>{"name": "add"').malformed[0])
    'The call is not closed: </tool_call> is missing. It was: <tool_call>{"name": "add"'
    """
    if form.thoughts_apart:
        return _apart(text, form, tools=tools, thinking=thinking, calls=calls)
    content, reply = "", text
    if thinking or text.lstrip().startswith(form.thought.start):
        thought, closed, reply = text.partition(form.thought.end)
        content = thought + closed
    found: list[dict[str, Any]] = []
    malformed: list[MalformedCall] = []
    for piece in form.pieces(reply, tools=tools) if calls else [reply]:
        if isinstance(piece, ParsedCall):
            content = content.rstrip()
            found.append(piece.as_openai(form.call_id(len(found))))
            continue
        if isinstance(piece, MalformedCall):
            malformed.append(piece)
        content += piece if isinstance(piece, str) else piece.text
    return ParsedReply(content.strip(), found, malformed)


def _apart(text: str, form: ReplyFormat, *, tools: Tools, thinking: bool, calls: bool) -> ParsedReply:
    parts = form.parser(thinks=thinking, calls=calls, tools=tools).whole(text)
    called = [call for part in parts if (call := part.call) is not None]
    return ParsedReply(
        content=joined(parts, "content").strip(),
        calls=[call.as_openai(form.call_id(i)) for i, call in enumerate(called)],
        malformed=[part.malformed for part in parts if part.malformed is not None],
        thought=joined(parts, "reasoning") or None,
    )
