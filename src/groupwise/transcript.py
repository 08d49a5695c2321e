"""What was said in an episode, as messages and as tokens, token in, token out.

The prompt of a turn is what was there, with what follows appended:

    prompt ids | sampled ids | the template's own tokens and the new messages, up to where the assistant speaks

so nothing that was sampled is ever encoded again. Where the template would render the history differently now that the
conversation goes on (Qwen 3 drops earlier <think> blocks), the next prompt is encoded anew: the turns then are two
trained segments (`segments`), each in the context in which it was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from groupwise.chat import encode_bridge, encode_prompt, opens_thought, stop_ids
from groupwise.tool_calls import ParsedReply, format_of, parse
from groupwise.types import Completion, Message, Prompt, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Transcript:
    """An episode so far. `prompt_ids` are what the policy sees next; empty once it is known that it speaks no more.

    Raises ChatError where the template refuses the messages.
    """

    def __init__(
        self, messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, *, tools: Sequence[dict[str, Any]] = ()
    ):
        self._tokenizer, self.tools = tokenizer, tuple(tools)
        self._ends = stop_ids(tokenizer)
        self._format = format_of(tokenizer)
        self.messages: list[Message] = list(messages)
        self.turns: list[Turn] = []
        self.begun = len(self.messages)  # of the messages: those that were there before the first turn
        self.forks = 0
        self.prompt_ids = self._encoded()

    @property
    def said(self) -> int:
        """Tokens that the policy said."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    def speak(self, completion: Completion, *, trained: bool = True) -> Message:
        """The policy said `completion`; returns it as a message, its tool calls parsed."""
        self.turns.append(Turn(self.prompt_ids, completion, trained=trained))
        message = self._message(completion)
        # a text that the model cannot be shown again is not its message, but what was sampled stays as it is
        self.messages.append({key: value for key, value in message.items() if key != "malformed_calls"})  # type: ignore[misc]
        return message

    def reward(self, value: float | None) -> None:
        """What the environment gave for the last turn."""
        self.turns[-1] = replace(self.turns[-1], reward=value)

    def hear(self, messages: Sequence[Message]) -> None:
        """The conversation goes on: `messages` are said to the policy, and it speaks again."""
        last = self.turns[-1]
        bridge = encode_bridge(self.messages, messages, self._tokenizer, tools=self.tools) if self._ended else None
        self.messages += messages
        if bridge is None:
            self.prompt_ids = self._encoded()
            extends = last.prompt_ids + last.completion.token_ids
            self.forks += self.prompt_ids[: len(extends)] != extends
        else:
            self.prompt_ids = last.prompt_ids + last.completion.token_ids + bridge

    @property
    def _ended(self) -> bool:
        """Whether the policy ended its turn itself; one that was cut has no end-of-turn token to go on from."""
        ids = self.turns[-1].completion.token_ids
        return bool(ids) and ids[-1] in self._ends

    def _encoded(self) -> tuple[int, ...]:
        prompt = Prompt(id="episode", messages=tuple(self.messages), tools=self.tools)
        return encode_prompt(prompt, self._tokenizer).token_ids

    def _parsed(self, completion: Completion) -> ParsedReply:
        thinking = opens_thought(self.turns[-1].prompt_ids, self._tokenizer)
        return parse(completion.text, self._format, tools=self.tools, thinking=thinking)

    def _message(self, completion: Completion) -> Message:
        reply = self._parsed(completion) if self.tools else None
        message: dict[str, Any] = {"role": "assistant", "content": completion.text}
        if reply is not None and reply.calls:
            message |= {"content": reply.content, "tool_calls": reply.calls}
        if reply is not None and reply.malformed:
            message["malformed_calls"] = [str(each) for each in reply.malformed]
        return message  # type: ignore[return-value]
