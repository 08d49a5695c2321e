"""Policies without a model, in place of an engine: they answer each request for a turn with a given reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from groupwise.model.chat import decode, stop_ids
from groupwise.types import Completion, FinishReason, SamplingRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# (number of the turn, what the policy was told as token ids) -> what it says
Reply = Callable[[int, Sequence[int]], str]


class Canned:
    """Says what `reply` gives, as tokens that end with the template's end of turn, cut where the request says."""

    def __init__(self, reply: Reply, tokenizer: PreTrainedTokenizerBase, *, context: int):
        self._reply, self._tokenizer, self.context_length = reply, tokenizer, context
        self._turn = 0

    async def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Completion]]:
        """See `sampler.Sampler.sample`."""
        return [self._answers(request) for request in requests]

    def submit(self, requests: Sequence[SamplingRequest]) -> list[Future[list[Completion]]]:
        """See `sampler.Submits.submit`; the futures are done."""
        futures: list[Future[list[Completion]]] = [Future() for _ in requests]
        for future, request in zip(futures, requests, strict=True):
            future.set_result(self._answers(request))
        return futures

    def _answers(self, request: SamplingRequest) -> list[Completion]:
        return [self._answer(request) for _ in range(request.n)]

    def _answer(self, request: SamplingRequest) -> Completion:
        text = self._reply(self._turn, request.prompt_ids)
        self._turn += 1
        most = min(request.params.max_tokens, self.context_length - len(request.prompt_ids))
        ids = [*self._tokenizer.encode(text, add_special_tokens=False), stop_ids(self._tokenizer)[-1]]
        said = tuple(ids[:most])
        return Completion(
            token_ids=said,
            logprobs=(0.0,) * len(said),
            text=decode(said, self._tokenizer),
            finish_reason=FinishReason.STOP if len(said) == len(ids) else FinishReason.LENGTH,
        )


class Again:
    """Says once more what was said: the completions of an episode's turns."""

    def __init__(self, completions: Sequence[Completion], *, context: int):
        self._left, self.context_length = list(completions), context

    async def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Completion]]:
        """Answer as `sampler.Sampler.sample` does. What is asked beyond the episode is answered with nothing."""
        nothing = Completion(token_ids=(), logprobs=(), text="", finish_reason=FinishReason.ABORT)
        return [[self._left.pop(0) if self._left else nothing for _ in range(each.n)] for each in requests]
