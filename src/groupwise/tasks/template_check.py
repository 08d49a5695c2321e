"""Tries whether a chat template only appends, before the first episode.

A conversation that only grows is trained as one sequence. Where a template renders an earlier turn differently once the
conversation continues, the next turn sees that rendering, and is trained as its own sequence (`segments`): as
correct, and more expensive, since what both saw is computed for each. Known templates: Qwen 2.5, Llama 3, Gemma and
Mistral append; Qwen 3 drops thoughts when a user speaks again, but not between tool calls; DeepSeek R1 drops them
always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from groupwise.errors import ChatError
from groupwise.model.chat import bridge_of, render_prompt
from groupwise.model.reply_formats.known import format_of
from groupwise.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add_two_numbers",
        "description": "Add them.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}

THOUGHT = "One and one."


class Growth(StrEnum):
    """The change that a template makes to a turn once the conversation continues."""

    APPENDS = "appends"
    REWRITES = "rewrites"
    REFUSES = "refuses"  # it cannot render such messages


@dataclass(frozen=True, kw_only=True)
class TemplateCheck:
    """Results of the check of a chat template, for four cases: a turn before a user's message, a tool call before its
    result, and both with a thought in the turn."""

    turns: Growth
    tools: Growth
    thoughts: Growth
    tool_thoughts: Growth
    shows_tools: bool  # whether the policy is told of tools at all

    @property
    def appends(self) -> bool:
        """Return whether nothing that the template can render is rewritten."""
        return Growth.REWRITES not in (self.turns, self.tools, self.thoughts, self.tool_thoughts)

    def __str__(self) -> str:
        kinds = {
            "turns": self.turns,
            "tool calls": self.tools,
            "thoughts": self.thoughts,
            "thoughts before tool calls": self.tool_thoughts,
        }
        named = {growth: [kind for kind, found in kinds.items() if found is growth] for growth in Growth}
        besides = f"; it cannot render {_listed(named[Growth.REFUSES])}" if named[Growth.REFUSES] else ""
        besides += "" if self.shows_tools else "; it does not show tools to the policy"
        if self.appends:
            return f"the chat template only appends: an episode is trained as one sequence{besides}"
        return (
            f"the chat template rewrites {_listed(named[Growth.REWRITES])} once the conversation goes on: what follows "
            f"is trained as a sequence of its own (env/forks counts them){besides}"
        )


def template_check(tokenizer: PreTrainedTokenizerBase) -> TemplateCheck:
    """Try out the tokenizer's chat template with a small conversation of each kind."""
    asked: Message = {"role": "user", "content": "What is 1 + 1?"}
    heard: Message = {"role": "user", "content": "And 2 + 2?"}
    function = {"name": TOOL["function"]["name"], "arguments": {"a": 1, "b": 1}}
    form = format_of(tokenizer)
    call = {"id": form.call_id(0), "type": "function", "function": function}
    result: Message = {"role": "tool", "content": "2", "tool_call_id": call["id"], "name": function["name"]}

    def growth(*, thinks: bool, calls: bool) -> Growth:
        said = Message(role="assistant", content="" if calls else "2.")
        if thinks and form.thoughts_apart:
            said["reasoning_content"] = THOUGHT
        elif thinks:
            said["content"] = f"{form.thought.start}\n{THOUGHT}\n{form.thought.end}\n\n{said.get('content')}"
        if calls:
            said["tool_calls"] = [call]
        return _growth([asked, said], result if calls else heard, tokenizer, tools=[TOOL] if calls else ())

    return TemplateCheck(
        turns=growth(thinks=False, calls=False),
        tools=growth(thinks=False, calls=True),
        thoughts=growth(thinks=True, calls=False),
        tool_thoughts=growth(thinks=True, calls=True),
        shows_tools=_shows_tools(asked, tokenizer),
    )


def _growth(
    history: Sequence[Message],
    reply: Message,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Sequence[dict[str, Any]],
) -> Growth:
    try:
        before = render_prompt(history[:-1], tokenizer, tools=tools)
        after = render_prompt([*history, reply], tokenizer, tools=tools)
        bridge = bridge_of(before, after, history, tokenizer, tools=tools)
    except ChatError:
        return Growth.REFUSES
    return Growth.REWRITES if bridge is None else Growth.APPENDS


def _shows_tools(asked: Message, tokenizer: PreTrainedTokenizerBase) -> bool:
    try:
        return TOOL["function"]["name"] in render_prompt([asked], tokenizer, tools=[TOOL])
    except ChatError:
        return False


def _listed(kinds: Sequence[str]) -> str:
    return kinds[0] if len(kinds) == 1 else f"{', '.join(kinds[:-1])} and {kinds[-1]}"
