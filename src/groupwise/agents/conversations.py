"""The conversations of an agent's episode: which request goes on from which answer, token in, token out.

A request that begins with a conversation as an answer left it (its messages, and the answer as it was sent) goes on
from it: the policy sees the ids of that turn, what was sampled, the template's own tokens and the new messages, and
nothing that was sampled is encoded again. Any other request begins a conversation: a sub-agent, a rewritten history.
Several may go on from one answer. So the turns form trees,

    A - B - C          asked one after another
      \\ D              goes on from A too: a second attempt, a branch
    E                  begins anew

and are trained branch by branch (A B C, D, E), where `segments` joins what extends what came before it. Offered tools
stand at the head of a prompt, so a request with others begins anew.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from groupwise.agents.protocol import key_of, tools_key
from groupwise.model.chat import THINK_END, THINK_START, opens_thought, split_thinking
from groupwise.tool_calls import format_of
from groupwise.transcript import Transcript
from groupwise.types import Completion, Message, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Key = tuple[str, tuple[Any, ...]]  # the tools, and the messages so far
Opening = tuple[tuple[Message, ...], tuple[dict[str, Any], ...], tuple[int, ...]]  # messages, tools, token ids


@dataclass(kw_only=True, eq=False)
class Answered:
    """A turn, what the conversation was after it, and what went on from it."""

    transcript: Transcript
    key: Key
    after: list[Answered] = field(default_factory=list)

    @property
    def turn(self) -> Turn:
        return self.transcript.turns[-1]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request that is to be answered: the policy sees `transcript.prompt_ids`."""

    transcript: Transcript
    key: Key
    before: Answered | None


class Conversations:
    """All that was asked and answered in an episode. Requests may be under way together."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer, self._format = tokenizer, format_of(tokenizer)
        self._begun: list[Answered] = []
        self._by_key: dict[Key, Answered] = {}
        self.answered: list[Answered] = []  # in the order in which they were
        self.calls = 0  # tool calls that the policy made

    @property
    def said(self) -> int:
        """Tokens that the policy said."""
        return sum(len(each.turn.completion.token_ids) for each in self.answered)

    @property
    def opening(self) -> Opening | None:
        """What the policy was first asked; None before the first answer."""
        if not self._begun:
            return None
        seen = self._begun[0].transcript
        return tuple(seen.messages[: seen.begun]), seen.tools, self._begun[0].turn.prompt_ids

    @property
    def latest(self) -> tuple[Message, ...]:
        """All messages after the opening ones of the conversation that was answered last."""
        if not self.answered:
            return ()
        seen = self.answered[-1].transcript
        return tuple(seen.messages[seen.begun :])

    def ask(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Asked:
        """What the policy sees for these messages. Raises ChatError where the template refuses them."""
        offered, said = tools_key(tools), key_of(messages)
        for length in range(len(messages) - 1, 0, -1):
            if (before := self._by_key.get((offered, said[:length]))) is not None:
                transcript = _copy(before.transcript)
                transcript.hear(messages[length:])
                return Asked(transcript=transcript, key=(offered, said), before=before)
        transcript = Transcript(messages, self._tokenizer, tools=tools)
        return Asked(transcript=transcript, key=(offered, said), before=None)

    def answer(self, asked: Asked, completion: Completion, *, one_call: bool = False) -> dict[str, Any]:
        """The policy answered; returns its message as the client gets it. `one_call` keeps the first call only."""
        transcript = asked.transcript
        parsed: dict[str, Any] = dict(transcript.speak(completion))
        calls = parsed.get("tool_calls") or []
        calls = [
            {**call, "id": self._format.call_id(self.calls + i)}  # of its own in the whole episode
            for i, call in enumerate(calls[:1] if one_call else calls)
        ]
        self.calls += len(calls)
        if calls:
            transcript.messages[-1] = {**transcript.messages[-1], "tool_calls": calls}
        message = self._sent(
            parsed["content"], calls, thinks=opens_thought(transcript.turns[-1].prompt_ids, self._tokenizer)
        )
        offered, said = asked.key
        node = Answered(transcript=transcript, key=(offered, said + key_of([message])))  # type: ignore[list-item]
        self.answered.append(node)
        self._by_key[node.key] = node
        (self._begun if asked.before is None else asked.before.after).append(node)
        return message

    def turns(self, *, only_first: bool = False) -> tuple[Turn, ...]:
        """The turns branch by branch; with `only_first` none is trained but the one that was answered first."""
        ordered: list[Answered] = []
        waiting = self._begun[::-1]
        while waiting:
            ordered.append(node := waiting.pop())
            waiting += node.after[::-1]
        if not only_first:
            return tuple(node.turn for node in ordered)
        return tuple(replace(node.turn, trained=node is self.answered[0]) for node in ordered)

    def _sent(self, content: str, calls: Sequence[dict[str, Any]], *, thinks: bool) -> dict[str, Any]:
        """A message in OpenAI's form: arguments as text, thoughts apart."""
        thought: str | None = None
        if THINK_END in content or content.lstrip().startswith(THINK_START):
            thought, content = split_thinking(content)
        elif thinks:
            thought, content = content.strip(), ""
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = [{**call, "function": _as_text(call["function"])} for call in calls]
        return message


def _copy(transcript: Transcript) -> Transcript:
    """One that goes on by itself. Of the turns it needs the last."""
    other = copy.copy(transcript)
    other.messages, other.turns, other.forks = list(transcript.messages), transcript.turns[-1:], 0
    return other


def _as_text(function: dict[str, Any]) -> dict[str, Any]:
    return {"name": function["name"], "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
