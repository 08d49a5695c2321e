"""DeepSeek's two formats: that of V3 and R1, and since V3.1.

    deepseek_v3   <｜tool▁call▁begin｜>function<｜tool▁sep｜>f, a block ```json {"x": 1} ```, <｜tool▁call▁end｜>
    deepseek_v31  <｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>

all between <｜tool▁calls▁begin｜> and <｜tool▁calls▁end｜>. The templates join arguments with other texts, so that
earlier calls are shown to them as JSON text (`model.chat`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from groupwise.model.reply_formats.format import Tools
from groupwise.model.reply_formats.lark import CallWriter
from groupwise.model.reply_formats.sections import SectionFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SEPARATOR = "<｜tool▁sep｜>"


class _Writer(CallWriter):
    sectioned = True

    def __init__(self, form: DeepSeekV3, tools: Tools, tokenizer: PreTrainedTokenizerBase, *, only: str | None):
        self._form, self.between = form, form.between
        super().__init__(form, tools, tokenizer, only=only)

    def body(self, index: int, function: Mapping[str, Any]) -> str:
        head, behind = self._form.head_of(function["name"]), f"{self._form.tail}{self._form.call_end}"
        return f"{self.text(head)} {self.arguments(index, function)} {self.text(behind)}"


class DeepSeekV3(SectionFormat):
    """DeepSeek V3's calls: the kind of the tool, a separator, its name, and the arguments as a block of JSON."""

    name, tail, between, writes = "deepseek_v3", "\n```", "\n", _Writer
    start, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    call_start, call_end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    head = re.compile(rf"\s*{call_start}\s*([^\s<]+)\s*{SEPARATOR}(?:([^\n{{<`]+)\n```(?:json)?\n)?")

    def shown_in(self, template: str) -> bool:
        return self.start in template and "```json" in template

    def named(self, head: re.Match[str]) -> str:
        return (head[2] or head[1]).strip()

    def head_of(self, name: str) -> str:
        return f"{self.call_start}function{SEPARATOR}{name}\n```json\n"


class DeepSeekV31(DeepSeekV3):
    """A name, a separator and the arguments."""

    name, tail, between = "deepseek_v31", "", ""

    def shown_in(self, template: str) -> bool:
        return self.start in template

    def head_of(self, name: str) -> str:
        return f"{self.call_start}{name}{SEPARATOR}"

    def history(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Leave out the thoughts in front of calls: the template writes the end of a thought there itself."""
        return [
            {**message, "content": str(message["content"]).rpartition(self.thought.end)[2].lstrip()}
            if message.get("tool_calls")
            else message
            for message in messages
        ]
