"""Follows the conversations of an agent's episode: which request continues which answer, token in, token out.

A request that begins with a conversation that ended in an answer (the same messages, and the answer as it was sent)
continues this conversation: its prompt is the earlier turn's ids, the sampled ids, the template's own tokens and the
    new messages, and no sampled token is encoded again. Any other request begins a conversation: a sub-agent, a
    rewritten history. Several requests may continue one answer. So the turns form trees,

    A - B - C          one request after another
      \\ D              also continues A: a second attempt, a branch
    E                  a new conversation

and are trained branch by branch (A B C, D, E); `algo.samples.segments_of` joins turns that extend the turn before.
Offered tools are at the head of a prompt, so a request with other tools begins a new conversation.

A harness that compacts its history (drops its middle, or has the policy summarise it) begins a new conversation, too:
earlier answers that it shows again are context of the new segment, and are trained only where they were sampled.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from groupwise.model.chat import opens_thought
from groupwise.model.reply_formats.known import format_of
from groupwise.tasks.openai import key_of, tools_key
from groupwise.tasks.reply import Reply
from groupwise.tasks.transcript import Transcript
from groupwise.types import Completion, Message, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Key = tuple[str, tuple[Any, ...]]  # the tools, and the messages so far
FirstRequest = tuple[tuple[Message, ...], tuple[dict[str, Any], ...], tuple[int, ...]]  # messages, tools, token ids


@dataclass(kw_only=True, eq=False)
class Answered:
    """A recorded turn: the conversation after it, the id of the answer, and the turns that continued from it."""

    transcript: Transcript
    key: Key
    id: str = ""
    after: list[Answered] = field(default_factory=list)

    @property
    def turn(self) -> Turn:
        return self.transcript.turns[-1]


@dataclass(frozen=True, kw_only=True)
class AgentRequest:
    """A chat request of the agent, rendered: the policy sees the token ids `prompt_ids` of its transcript."""

    transcript: Transcript
    key: Key
    before: Answered | None


class Conversations:
    """The requests and answers of one episode, as a tree of conversations; requests may be concurrent."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer, self._format = tokenizer, format_of(tokenizer)
        self._begun: list[Answered] = []
        self._by_key: dict[Key, Answered] = {}
        self.answered: list[Answered] = []  # in the order in which they were
        self.calls = 0  # tool calls that the policy made
        self._ids = 0  # of tool calls that were given out

    @property
    def said(self) -> int:
        """Return how many tokens the policy has sampled in the episode."""
        return sum(len(each.turn.completion.token_ids) for each in self.answered)

    @property
    def first_request(self) -> FirstRequest | None:
        """Return the policy's first request; None before the first answer."""
        if not self._begun:
            return None
        seen = self._begun[0].transcript
        return tuple(seen.messages[: seen.begun]), seen.tools, self._begun[0].turn.prompt_ids

    @property
    def latest(self) -> tuple[Message, ...]:
        """Return all messages after the opening ones, of the conversation that was answered last."""
        if not self.answered:
            return ()
        seen = self.answered[-1].transcript
        return tuple(seen.messages[seen.begun :])

    def ask(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> AgentRequest:
        """Render a request to the token ids that the policy sees. Raises ChatError if the template refuses it."""
        offered, said = tools_key(tools), key_of(messages)
        for length in range(len(messages) - 1, 0, -1):
            if (before := self._by_key.get((offered, said[:length]))) is not None:
                transcript = _copy(before.transcript)
                transcript.hear(messages[length:])
                return AgentRequest(transcript=transcript, key=(offered, said), before=before)
        transcript = Transcript(messages, self._tokenizer, tools=tools)
        return AgentRequest(transcript=transcript, key=(offered, said), before=None)

    def reply(self, asked: AgentRequest, *, one_call: bool = False) -> Reply:
        """Return the reply to a request, to be told its text. `one_call` keeps the first call only."""
        seen = asked.transcript
        thinks = opens_thought(seen.prompt_ids, self._tokenizer)
        parser = self._format.parser(thinks=thinks, calls=bool(seen.tools), tools=seen.tools)
        return Reply(parser, new_id=self._new_id, one_call=one_call)

    def _new_id(self) -> str:
        """Return for a call its own id in the whole episode."""
        self._ids += 1
        return self._format.call_id(self._ids - 1)

    def answer(
        self,
        asked: AgentRequest,
        completion: Completion,
        *,
        reply: Reply | None = None,
        id: str = "",
        state: str | None = None,
    ) -> dict[str, Any]:
        """Record that the policy answered, under this id and in this state; return its message as the client gets it.
        `reply` has been told all of its text."""
        if reply is None:
            reply = self.reply(asked)
            reply.push(completion.text)
            reply.finish()
        transcript, message = asked.transcript, reply.message()
        transcript.speak(completion, state=state)
        calls = [{**call, "function": _as_object(call["function"])} for call in message.get("tool_calls", ())]
        self.calls += len(calls)
        if calls:
            transcript.messages[-1] = {**transcript.messages[-1], "tool_calls": calls}
        offered, said = asked.key
        node = Answered(transcript=transcript, key=(offered, said + key_of([message])), id=id)  # type: ignore[list-item]
        self.answered.append(node)
        self._by_key[node.key] = node
        (self._begun if asked.before is None else asked.before.after).append(node)
        return message

    def reward(self, node: Answered, value: float) -> None:
        """Add to what a turn was given."""
        node.transcript.reward((node.turn.reward or 0.0) + value)

    def turns(self, *, only_first: bool = False) -> tuple[Turn, ...]:
        """Return the turns branch by branch, with their numbers in time where that is another order; with `only_first`
        none is trained but the one that was answered first."""
        ordered: list[Answered] = []
        waiting = self._begun[::-1]
        while waiting:
            ordered.append(node := waiting.pop())
            waiting += node.after[::-1]
        turns = [node.turn for node in ordered]
        if ordered != self.answered:
            taken = {node: number for number, node in enumerate(self.answered)}
            turns = [replace(node.turn, taken=taken[node]) for node in ordered]
        if only_first:
            turns = [replace(turn, trained=node is self.answered[0]) for turn, node in zip(turns, ordered, strict=True)]
        return tuple(turns)


def _copy(transcript: Transcript) -> Transcript:
    """Return one that continues by itself. Of the turns it needs the last."""
    other = copy.copy(transcript)
    other.messages, other.turns, other.forks = list(transcript.messages), transcript.turns[-1:], 0
    return other


def _as_object(function: dict[str, Any]) -> dict[str, Any]:
    return {"name": function["name"], "arguments": json.loads(function["arguments"])}
