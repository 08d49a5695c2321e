"""The dataset's own answers and preference pairs as what is learned: `kind: sft` and `kind: dpo` sample nothing.

    prompt, answer             ->   a group without rollouts, whose one demonstration is the answer
    prompt, chosen, rejected   ->   ... whose two are the completions of the pair, the chosen one first

so that the loop, evaluation, checkpoints and health of a run are those of any other. An answer that is a text follows
the prompt as a completion of the policy would, its end-of-turn token included. One of several messages (calls of tools,
their results, further turns) is rendered with the prompt, and only what the assistant says is learned.
"""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from groupwise.errors import ChatError, ContextLengthError
from groupwise.model.chat import decode, encode_completion, opens_thought
from groupwise.model.reply_formats.known import format_of
from groupwise.model.supervised import encode_supervised
from groupwise.tasks.rollout_sources import RolloutSource
from groupwise.types import (
    Completion,
    FinishReason,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Turn,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class AnswerRollouts:
    """A `RolloutSource` of the dataset's answers or pairs; `policy` is the one that prepares prompts and evaluates.
    What is longer than `context` tokens, prompt and answer together, is refused when it is prepared; of that it warns
    once."""

    def __init__(self, policy: RolloutSource, tokenizer: PreTrainedTokenizerBase, *, context: int):
        self._policy, self._tokenizer, self._context = policy, tokenizer, context
        self._ready: list[tuple[Prompt, list[tuple[Turn, ...]]]] = []  # prepared since the last were begun
        self._warned = False

    def prepare(self, prompt: Prompt) -> Prompt:
        """Prepare as the policy's source does, and the answer. Raises ChatError, and ContextLengthError where the two
        are longer than the context."""
        prepared = self._policy.prepare(prompt)
        said = self._said(prepared)
        longest = max(len(turn.prompt_ids) + len(turn.completion.token_ids) for turns in said for turn in turns)
        if longest > self._context:
            message = f"{prompt.id}: prompt and answer have {longest} tokens, and the context {self._context}"
            if not self._warned:
                warnings.warn(
                    f"{message}; it is passed over, and so are others (data/too_long counts them)", stacklevel=2
                )
            self._warned = True
            raise ContextLengthError(message, hint="shorten it, or use a model with a longer context")
        self._ready.append((prepared, said))
        return prepared

    def begin(
        self, prompts: Sequence[Prompt], *, seeds: Sequence[int], n: int, params: SamplingParams, version: PolicyVersion
    ) -> list[Awaitable[RolloutGroup]]:
        """See `RolloutSource.begin`; each group has one demonstration, or a pair's two, whatever `n` is."""
        ready = {id(prompt): said for prompt, said in self._ready}  # they live as long as the list, so ids differ
        groups = [
            RolloutGroup(
                prompt=prompt,
                rollouts=(),
                demonstrations=tuple(Rollout(turns=turns) for turns in ready.get(id(prompt)) or self._said(prompt)),
            )
            for prompt in prompts
        ]
        self._ready.clear()
        return [_given(group) for group in groups]

    def _said(self, prompt: Prompt) -> list[tuple[Turn, ...]]:
        """Return the turns of the answer, or of the chosen and the rejected one."""
        answers = [prompt.answer, prompt.rejected] if prompt.rejected else [prompt.answer]
        return [answer_turns(replace(prompt, answer=answer), self._tokenizer) for answer in answers]

    def close(self) -> None:
        """Do nothing: the opener of the policy's source closes it."""


async def _given(group: RolloutGroup) -> RolloutGroup:
    return group


def answer_turns(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> tuple[Turn, ...]:
    """Return the assistant's turns in the answer of an encoded prompt, each after all that comes before it. Raises
    ChatError where the template refuses its messages or rewrites what was said before, and for an answer of several
    messages to a prompt of text or token ids, which it would be learned without."""
    text = _only_text(prompt)
    if text is not None:
        if opens_thought(prompt.token_ids, tokenizer):  # the prompt has it already
            text = text.removeprefix(format_of(tokenizer).thought.start).removeprefix("\n")
        return (Turn(prompt.token_ids, _answered(encode_completion(prompt, text, tokenizer), tokenizer)),)
    if prompt.messages is None:
        message = f"{prompt.id}: the answer has several messages, or calls of tools, and the prompt has no messages"
        raise ChatError(message, hint="give the prompt as messages, or an answer that is one text")
    whole = encode_supervised([*prompt.messages, *prompt.answer], tokenizer, tools=prompt.tools or None)
    before, turns = whole.prompt_ids, list[Turn]()
    for trained, run in groupby(zip(whole.completion_ids, whole.mask, strict=True), key=lambda pair: pair[1]):
        ids = tuple(id for id, _ in run)
        if trained:
            turns.append(Turn(before, _answered(ids, tokenizer)))
        before += ids
    given = sum(message["role"] == "assistant" for message in prompt.answer)
    return tuple(turns[-given:])  # what the assistant says in the prompt is not learned


def _only_text(prompt: Prompt) -> str | None:
    """Return an answer that is one message of text alone."""
    if len(prompt.answer) != 1:
        return None
    (message,) = prompt.answer
    content = message.get("content")
    return content if message.keys() <= {"role", "content"} and isinstance(content, str) else None


def _answered(ids: tuple[int, ...], tokenizer: PreTrainedTokenizerBase) -> Completion:
    return Completion(
        token_ids=ids,
        logprobs=(0.0,) * len(ids),
        text=decode(ids, tokenizer),
        finish_reason=FinishReason.STOP,
    )
