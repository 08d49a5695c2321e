"""The transcript of an episode, as messages and as token ids; sampled tokens are never decoded and encoded again.

The prompt of a turn is what was there, with what follows appended:

    prompt ids | sampled ids | the template's own tokens and the new messages, up to where the assistant speaks

so nothing that was sampled is ever encoded again. A turn that the policy did not end itself (it was cut, or a stop
string ended it) is closed with the template's end-of-turn token. Where the template would render the history
differently now that the conversation goes on (Qwen 3 drops earlier <think> blocks), the next prompt is encoded anew:
the turns then are two trained segments (`segments`), each in the context in which it was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from groupwise.errors import ChatError
from groupwise.model.chat import (
    THINK_END,
    THINK_START,
    Bridge,
    bridge_of,
    encode_rendered,
    opens_thought,
    render_prompt,
    special_ids,
    stop_ids,
)
from groupwise.tasks.tool_calls import format_of, parse
from groupwise.types import Completion, FinishReason, Message, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# C0 and C1 controls but newline and tab, and the marks that reorder what is seen, each to a visible stand-in
_VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_VISIBLE |= dict.fromkeys([0x7F, *range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)


class Transcript:
    """An episode so far. `prompt_ids` are what the policy sees next, or saw last.

    Raises ChatError where the template refuses the messages.
    """

    def __init__(
        self, messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, *, tools: Sequence[dict[str, Any]] = ()
    ):
        self._tokenizer, self.tools = tokenizer, tuple(tools)
        self._ends, self._special = stop_ids(tokenizer), special_ids(tokenizer)
        self._format = format_of(tokenizer)
        self.messages: list[Message] = list(messages)
        self.turns: list[Turn] = []
        self.begun = len(self.messages)  # of the messages: those that were there before the first turn
        self.forks = 0
        self._continued: tuple[int, ...] = ()  # of the messages: those whose beginning was put into the policy's mouth
        self._rendered = self._render(self.messages)
        self.prompt_ids = encode_rendered(self._rendered, tokenizer)

    @property
    def said(self) -> int:
        """Tokens that the policy said."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    def speak(self, completion: Completion, *, trained: bool = True, state: str | None = None) -> Message:
        """The policy said `completion` in this state; returns it as a message, its tool calls parsed."""
        self.turns.append(Turn(self.prompt_ids, completion, trained=trained, state=state))
        message = self._message(completion)
        if self.messages[-1]["role"] == "assistant":
            self._continued = (*self._continued, len(self.messages))
        # a text that the model cannot be shown again is not its message, but what was sampled stays as it is
        self.messages.append({key: value for key, value in message.items() if key != "malformed_calls"})  # type: ignore[misc]
        return message

    def reward(self, value: float | None) -> None:
        """What the environment gave for the last turn."""
        self.turns[-1] = replace(self.turns[-1], reward=value)

    def hear(self, messages: Sequence[Message]) -> None:
        """The conversation goes on: `messages` are said to the policy, and it speaks again."""
        seen = self.turns[-1].prompt_ids + self.turns[-1].completion.token_ids
        history = self._shown(self.messages)
        rendered = self._render([*self.messages, *messages])
        bridge = bridge_of(self._rendered, rendered, history, self._tokenizer, tools=self.tools)
        self.messages += messages
        self._rendered = rendered
        if bridge is None:
            self.prompt_ids = encode_rendered(rendered, self._tokenizer)
            self.forks += self.prompt_ids[: len(seen)] != seen
        else:
            self.prompt_ids = seen + self._unsaid(bridge)

    def _unsaid(self, bridge: Bridge) -> tuple[int, ...]:
        """Of the bridge what the policy has not said itself: one that was cut has not ended its turn. A special token
        that was sampled last counts as the end, since models have more of them than their tokenizers declare."""
        said = self.turns[-1].completion
        last = said.token_ids[-1] if said.token_ids else None
        if last in self._special and bridge.following[:1] == (last,):  # GLM ends a turn with what begins the next one
            return bridge.following[1:]
        ended = last in self._special and said.finish_reason is FinishReason.STOP
        return bridge.following if ended or last in self._ends else bridge.closing + bridge.following

    def _render(self, messages: Sequence[Message]) -> str:
        return render_prompt(self._shown(messages), self._tokenizer, tools=self.tools)

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        """As the template is to see them: what the policy continued is one message with its beginning."""
        shown: list[Message] = []
        for i, message in enumerate(messages):
            if i in self._continued:
                shown[-1] = {**message, "content": f"{_text(shown[-1])}{_text(message)}"}
            else:
                shown.append(message)
        return shown

    def _message(self, completion: Completion) -> Message:
        """The completion as a message; it has the <think> that the prompt ended with, as templates look for it."""
        thinking = opens_thought(self.turns[-1].prompt_ids, self._tokenizer)
        reply = parse(completion.text, self._format, tools=self.tools, thinking=thinking) if self.tools else None
        opening = f"{THINK_START}\n" if thinking and self.messages[-1]["role"] != "assistant" else ""
        message: dict[str, Any] = {"role": "assistant", "content": opening + completion.text}
        if reply is not None and reply.calls:
            message |= {"content": opening + reply.content, "tool_calls": reply.calls}
        if reply is not None and reply.malformed:
            message["malformed_calls"] = [str(each) for each in reply.malformed]
        return message  # type: ignore[return-value]


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def visible(text: str) -> str:
    """`text` with control characters replaced by something that is only seen.

    >>> visible("a\\x1b[31mb\\n")
    'a␛[31mb\\n'
    """
    return text.translate(_VISIBLE)


# ----------------------------------------------------------------------------------------------------------------------
# Whether a chat template only appends, tried out before the first episode.
#
# A conversation that only grows is trained as one sequence. Where a template renders what was said differently once the
# conversation goes on, the next turn sees that, and is trained as a sequence of its own (`segments`): as true, and
# dearer, since what both saw is computed for each. Known templates: Qwen 2.5, Llama 3, Gemma and Mistral append;
# Qwen 3 drops thoughts when a user speaks again, but not between tool calls; DeepSeek R1 drops them always.
# ----------------------------------------------------------------------------------------------------------------------

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
THOUGHT = f"{THINK_START}\nOne and one.\n{THINK_END}\n\n"


class Growth(StrEnum):
    """What a template does with a turn once the conversation goes on."""

    APPENDS = "appends"
    REWRITES = "rewrites"
    REFUSES = "refuses"  # it cannot render such messages


@dataclass(frozen=True, kw_only=True)
class TemplateCheck:
    """What was found: after a turn and a user's message, after a tool call and its result, and the same two with a
    thought in the turn."""

    turns: Growth
    tools: Growth
    thoughts: Growth
    tool_thoughts: Growth
    shows_tools: bool  # whether the policy is told of tools at all

    @property
    def appends(self) -> bool:
        """Whether nothing that the template can render is rewritten."""
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
    call = {"id": format_of(tokenizer).call_id(0), "type": "function", "function": function}
    result: Message = {"role": "tool", "content": "2", "tool_call_id": call["id"], "name": function["name"]}

    def growth(said: str, *, calls: bool) -> Growth:
        if calls:
            history = [asked, Message(role="assistant", content=said, tool_calls=[call])]
            return _growth(history, result, tokenizer, tools=[TOOL])
        return _growth([asked, Message(role="assistant", content=f"{said}2.")], heard, tokenizer, tools=())

    return TemplateCheck(
        turns=growth("", calls=False),
        tools=growth("", calls=True),
        thoughts=growth(THOUGHT, calls=False),
        tool_thoughts=growth(THOUGHT, calls=True),
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
