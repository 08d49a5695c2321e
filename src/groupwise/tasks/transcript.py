"""The transcript of an episode, as messages and as token ids; sampled tokens are never decoded and encoded again.

The prompt of a turn is what was there, with what follows appended:

    prompt ids | sampled ids | the template's own tokens and the new messages, up to where the assistant speaks

so nothing that was sampled is ever encoded again. A turn that the policy did not end itself (it was cut, or a stop
string ended it) is closed with the template's end-of-turn token. Where the template would render the history
differently now that the conversation continues (Qwen 3 drops earlier <think> blocks), the whole next prompt is encoded:
the turns then are two trained segments (`segments`), each in the context in which it was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from groupwise.model.chat import (
    Bridge,
    bridge_of,
    encode_rendered,
    opens_thought,
    place_images,
    render_prompt,
    stop_ids,
)
from groupwise.model.image_tokens import vision_of
from groupwise.model.reply_formats.known import format_of
from groupwise.model.special_text import special_ids
from groupwise.pictures import pictures_in, text_of
from groupwise.tasks.tool_calls import parse
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
        self.prompt_ids = encode_rendered(self._rendered, self.messages, tokenizer)

    @property
    def said(self) -> int:
        """Return the number of tokens that the policy sampled."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    def speak(self, completion: Completion, *, trained: bool = True, state: str | None = None) -> Message:
        """Record that the policy said `completion` in this state; return it as a message, its tool calls parsed."""
        self.turns.append(Turn(self.prompt_ids, completion, trained=trained, state=state))
        message = self._message(completion)
        if self.messages[-1]["role"] == "assistant":
            self._continued = (*self._continued, len(self.messages))
        # a text that the model cannot be shown again is not its message, but what was sampled stays as it is
        self.messages.append({key: value for key, value in message.items() if key != "malformed_calls"})  # type: ignore[misc]
        return message

    def reward(self, value: float | None) -> None:
        """Record what the environment gave for the last turn."""
        self.turns[-1] = replace(self.turns[-1], reward=value)

    def hear(self, messages: Sequence[Message]) -> None:
        """Go on with the conversation: `messages` are said to the policy, and it speaks again. A tool's images are
        [image] to a model that reads text alone."""
        if vision_of(self._tokenizer) is None:
            messages = [_as_text(message) if message["role"] == "tool" else message for message in messages]
        seen = self.turns[-1].prompt_ids + self.turns[-1].completion.token_ids
        history = self._shown(self.messages)
        rendered = self._render([*self.messages, *messages])
        bridge = bridge_of(self._rendered, rendered, history, self._tokenizer, tools=self.tools)
        shown = len(pictures_in(self.messages))
        self.messages += messages
        self._rendered = rendered
        if bridge is None:
            self.prompt_ids = encode_rendered(rendered, self.messages, self._tokenizer)
            self.forks += self.prompt_ids[: len(seen)] != seen
        else:
            self.prompt_ids = (*seen, *place_images(self._unsaid(bridge), messages, self._tokenizer, before=shown))

    def _unsaid(self, bridge: Bridge) -> tuple[int, ...]:
        """Return of the bridge what the policy has not said itself: one that was cut has not ended its turn. A special
        token that was sampled last counts as the end, since models have more of them than their tokenizers declare."""
        said = self.turns[-1].completion
        last = said.token_ids[-1] if said.token_ids else None
        if last in self._special and bridge.following[:1] == (last,):  # GLM ends a turn with what begins the next one
            return bridge.following[1:]
        ended = last in self._special and said.finish_reason is FinishReason.STOP
        return bridge.following if ended or last in self._ends else bridge.closing + bridge.following

    def _render(self, messages: Sequence[Message]) -> str:
        return render_prompt(self._shown(messages), self._tokenizer, tools=self.tools)

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        """Return them as the template is to see them: what the policy continued is one message with its beginning."""
        shown: list[Message] = []
        for i, message in enumerate(messages):
            if i in self._continued:
                shown[-1] = {**message, "content": f"{_text(shown[-1])}{_text(message)}"}
            else:
                shown.append(message)
        return shown

    def _message(self, completion: Completion) -> Message:
        """Return the completion as a message; it has the <think> that the prompt ended with, as templates look for
        it, or the thought in its own field where they do so."""
        thinking = opens_thought(self.turns[-1].prompt_ids, self._tokenizer)
        form, text = self._format, completion.text
        reply = parse(text, form, tools=self.tools, thinking=thinking, calls=bool(self.tools))
        opening, said = "", reply.content if reply.calls or form.thoughts_apart else text
        if thinking and self.messages[-1]["role"] != "assistant" and not form.thoughts_apart:
            opening = f"{form.thought.start}\n"
        message: dict[str, Any] = {"role": "assistant", "content": opening + said}
        if reply.thought is not None:
            message["reasoning_content"] = reply.thought
        if reply.calls:
            message["tool_calls"] = reply.calls
        if reply.malformed:
            message["malformed_calls"] = [str(each) for each in reply.malformed]
        return message  # type: ignore[return-value]


def _as_text(message: Message) -> Message:
    return {**message, "content": text_of(message.get("content"))} if pictures_in([message]) else message


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def visible(text: str) -> str:
    """Return `text` with control characters replaced by visible ones.

    >>> visible("a\\x1b[31mb\\n")
    'a␛[31mb\\n'
    """
    return text.translate(_VISIBLE)
