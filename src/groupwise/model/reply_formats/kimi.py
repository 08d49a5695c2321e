"""Kimi's format (Kimi K2), in which a call's id has the tool's name:

    <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>
    <|tool_calls_section_end|>

without line ends. The template shows only the ids of earlier calls, not their tools' names. So calls get the ids that
the model would write: numbered from 0 on, through the whole conversation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from groupwise.model.reply_formats.lark import CallWriter
from groupwise.model.reply_formats.sections import SectionFormat

CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class _Writer(CallWriter):
    sectioned = True

    def body(self, index: int, function: Mapping[str, Any]) -> str:
        head = f"{CALL}functions.{function['name']}:"
        number = f"/[0-9]{{1,3}}/ {self.text(ARGUMENTS)}"
        return f"{self.text(head)} {number} {self.arguments(index, function)} {self.text(CALL_END)}"


class Kimi(SectionFormat):
    """An id that has the name, a marker, and the arguments."""

    name, writes = "kimi", _Writer
    start, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    call_start, call_end = CALL, CALL_END
    thinks_unasked = True
    head = re.compile(rf"\s*{re.escape(CALL)}\s*(?:functions\.)?([^\s<]+?)(?::\d+)?\s*{re.escape(ARGUMENTS)}")

    def shown_in(self, template: str) -> bool:
        return ARGUMENTS in template

    def named(self, head: re.Match[str]) -> str:
        return head[1]

    def head_of(self, name: str) -> str:
        return f"{self.call_start}functions.{name}:0{ARGUMENTS}"

    def history(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Number the calls, and put thoughts into the field that the template reads."""
        shown, ids, count = list[dict[str, Any]](), dict[str, str](), 0
        for message in messages:
            message = _thought_apart(message)
            calls = list[dict[str, Any]]()
            for call in message.get("tool_calls") or ():
                new = f"functions.{call.get('function', {}).get('name', '')}:{count}"
                ids[str(call.get("id"))] = new
                calls.append({**call, "id": new})
                count += 1
            if calls:
                message = {**message, "tool_calls": calls}
            if (answered := message.get("tool_call_id")) is not None:
                message = {**message, "tool_call_id": ids.get(str(answered), answered)}
            shown.append(message)
        return shown


def _thought_apart(message: dict[str, Any]) -> dict[str, Any]:
    thought, closed, rest = str(message.get("content") or "").partition(Kimi.thought.end)
    if message.get("role") != "assistant" or not closed or "reasoning_content" in message:
        return message
    thought = thought.strip().removeprefix(Kimi.thought.start).strip()
    return {**message, "content": rest.lstrip(), "reasoning_content": thought}
