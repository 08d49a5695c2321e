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

from groupwise.model.chat import THINK_START, decode, encode_completion, opens_thought
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
    """A `RolloutSource` of the dataset's answers or pairs; `policy` is the one that prepares prompts and evaluates."""

    def __init__(self, policy: RolloutSource, tokenizer: PreTrainedTokenizerBase, *, context: int):
        self._policy, self._tokenizer, self._context = policy, tokenizer, context

    def prepare(self, prompt: Prompt) -> Prompt:
        """Prepare as the policy's source does."""
        return self._policy.prepare(prompt)

    def begin(
        self, prompts: Sequence[Prompt], *, seeds: Sequence[int], n: int, params: SamplingParams, version: PolicyVersion
    ) -> list[Awaitable[RolloutGroup]]:
        """See `RolloutSource.begin`; each group has one demonstration, or a pair's two, whatever `n` is, and none where
        prompt and answer are longer than the context."""
        return [self._group(prompt) for prompt in prompts]

    async def _group(self, prompt: Prompt) -> RolloutGroup:
        answers = [prompt.answer, prompt.rejected] if prompt.rejected else [prompt.answer]
        said = [answer_turns(replace(prompt, answer=answer), self._tokenizer) for answer in answers]
        longest = max(len(turn.prompt_ids) + len(turn.completion.token_ids) for turns in said for turn in turns)
        if longest > self._context:
            warnings.warn(
                f"{prompt.id} is passed over: prompt and answer have {longest} tokens, and the context {self._context}",
                stacklevel=2,
            )
            return RolloutGroup(prompt=prompt, rollouts=())
        return RolloutGroup(prompt=prompt, rollouts=(), demonstrations=tuple(Rollout(turns=turns) for turns in said))

    def close(self) -> None:
        """Does nothing: the policy's source is closed by whoever opened it."""


def answer_turns(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> tuple[Turn, ...]:
    """Return the assistant's turns in the answer of an encoded prompt, each after all that comes before it. Raises
    ChatError where the template refuses its messages, or rewrites what was said before."""
    text = _only_text(prompt)
    if text is not None:
        if opens_thought(prompt.token_ids, tokenizer):  # the prompt has it already
            text = text.removeprefix(THINK_START).removeprefix("\n")
        return (Turn(prompt.token_ids, _answered(encode_completion(prompt, text, tokenizer), tokenizer)),)
    whole = encode_supervised([*(prompt.messages or ()), *prompt.answer], tokenizer, tools=prompt.tools or None)
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
