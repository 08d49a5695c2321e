"""One episode as the endpoint sees it: what the agent may still ask, what the policy answered.

The limits of the configuration end an episode by refusing the next request: status 403, and the limit as the error's
code, which is also the episode's `stop`. What the agent does then is its own affair: it may return a reward for what it
has, or raise, which is worth 0.

    max_turns, max_tool_calls, max_tokens, template     as in `episode`

A conversation that fills the context is a 400 `context_length_exceeded`, which agents know from elsewhere: they may
shorten it and go on. An episode that ends there has the stop "context".

All methods are for the endpoint's event loop. A request whose client went away is no turn.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from groupwise.agents.conversations import Asked, Conversations
from groupwise.agents.protocol import ChatRequest, Reply
from groupwise.config.run import EnvConfig
from groupwise.errors import ChatError, ContextLengthError, EnvError, GroupwiseError, RequestError
from groupwise.types import (
    Completion,
    FinishReason,
    Message,
    PolicyVersion,
    Sampler,
    SamplingParams,
    SamplingRequest,
    seed_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LimitError(GroupwiseError):
    """The episode may not go on; `code` says which limit it is at."""

    status, exit_code = 403, 1

    def __init__(self, limit: str, message: str, *, hint: str | None = None):
        super().__init__(message, hint=hint)
        self.code = limit


class PolicyFailedError(GroupwiseError):
    """The policy could not be asked. The run ends of it; the agent is only told."""


@dataclass(kw_only=True, eq=False)
class Session:
    """An episode in progress.

    Args:
        number: of the episode in its group; with `seed`, the group's, it seeds what the policy says.
        stop: the limit that ended the episode, if one did.
        failed: has the exception when the policy could not be asked.
        under_way: requests that the policy is answering.
    """

    sampler: Sampler
    tokenizer: PreTrainedTokenizerBase
    config: EnvConfig
    params: SamplingParams
    version: PolicyVersion
    seed: int
    number: int
    stop: str | None = None
    ignored: int = 0  # requests with parameters that change nothing here
    ignored_names: set[str] = field(default_factory=set)  # of those parameters
    failed: Future[None] = field(default_factory=Future)
    under_way: int = 0
    over: bool = False
    _asked: int = 0
    _conversations: Conversations = field(init=False)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._conversations = Conversations(self.tokenizer)

    async def answer(self, request: ChatRequest) -> Reply:
        """The policy's next turn in the conversation that `request` shows.

        Raises:
            LimitError, ContextLengthError: the episode is at a limit.
            RequestError, ChatError: the messages cannot be shown to the policy.
            PolicyFailedError: the engine failed.
        """
        self._check_open()
        messages = request.conversation
        self._check_limits(messages)
        asked = self._ask(messages, request)
        params = self._params(asked, request)
        self.ignored += bool(request.ignored)
        self.ignored_names.update(request.ignored)
        completion = await self._sample(asked, params)
        if self.over:
            raise _over()
        if completion.finish_reason is FinishReason.ABORT:
            raise self._fail(EnvError("a completion was aborted"))
        if self.stop == "context":  # it was shortened
            self.stop = None
        message = self._conversations.answer(asked, completion, one_call=request.parallel_tool_calls is False)
        return Reply(
            id=f"chatcmpl-{self.number}-{len(self._conversations.answered)}",
            created=int(time.time()),
            message=message,
            completion=completion,
            prompt_tokens=len(asked.transcript.turns[-1].prompt_ids),
        )

    async def end(self) -> Conversations:
        """The agent is done: what is still being sampled is given up, and nothing more is answered."""
        self.over = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return self._conversations

    # ---- limits ----
    def _check_open(self) -> None:
        if self.over:
            raise _over()

    def _check_limits(self, messages: tuple[Message, ...]) -> None:
        config, so_far = self.config, self._conversations
        turns = len(so_far.answered) + self.under_way
        if turns >= config.max_turns:
            raise self._at("max_turns", f"the policy had its {turns} turns (env.max_turns)")
        if config.max_tool_calls is not None and so_far.calls > config.max_tool_calls:
            raise self._at("max_tool_calls", f"{so_far.calls} tool calls are more than {config.max_tool_calls}")
        size = sum(len(str(message.get("content") or "")) for message in messages)
        if size > config.max_characters:
            raise RequestError(
                f"the messages have {size:,} characters; env.max_characters is {config.max_characters:,}",
                hint="shorten them, or raise that",
                param="messages",
            )

    def _ask(self, messages: tuple[Message, ...], request: ChatRequest) -> Asked:
        """What the policy sees."""
        try:
            return self._conversations.ask(messages, request.offered_tools)
        except ChatError as error:
            said = next((message for message in reversed(messages) if message["role"] == "assistant"), None)
            if said is None or len(said.get("tool_calls") or ()) < 2:
                raise
            raise self._at(
                "template", f"a message with several calls cannot be shown again: {error.message}"
            ) from error

    def _params(self, asked: Asked, request: ChatRequest) -> SamplingParams:
        """How the answer is drawn: as the run says, no longer than everything allows."""
        room = self.sampler.context_length - len(asked.transcript.prompt_ids)
        if room <= 0:
            self.stop = self.stop or "context"
            context, held = self.sampler.context_length, len(asked.transcript.prompt_ids)
            raise ContextLengthError(
                f"This model's maximum context length is {context} tokens. However, the messages have {held} tokens",
                hint="shorten the conversation; the episode goes on",
            )
        most = min(room, self.params.max_tokens, request.most_tokens or room)
        if self.config.max_tokens is not None:
            left = self.config.max_tokens - self._conversations.said
            if left <= 0:
                raise self._at("max_tokens", f"the policy said {self.config.max_tokens} tokens (env.max_tokens)")
            most = min(most, left)
        return replace(
            self.params,
            max_tokens=most,
            stop=(*self.params.stop, *request.stop_strings),
            top_logprobs=request.top_logprobs or self.params.top_logprobs,
            seed=seed_of(self.seed, self.number, self._asked),
        )

    def _at(self, limit: str, message: str) -> LimitError:
        self.stop = self.stop or limit
        return LimitError(limit, f"the episode is over: {message}")

    # ---- the policy ----
    async def _sample(self, asked: Asked, params: SamplingParams) -> Completion:
        prompt_ids = asked.transcript.prompt_ids
        request = SamplingRequest(prompt_ids=prompt_ids, params=params, version=self.version, cache=True)
        self._asked += 1
        self.under_way += 1
        task = asyncio.ensure_future(self.sampler.sample([request]))
        self._tasks.add(task)
        try:
            ((completion,),) = await task
            return completion
        except asyncio.CancelledError:
            task.cancel()
            if self.over:
                raise _over() from None
            raise
        except Exception as error:
            raise self._fail(error) from error
        finally:
            self.under_way -= 1
            self._tasks.discard(task)

    def _fail(self, error: Exception) -> PolicyFailedError:
        with suppress(InvalidStateError):
            self.failed.set_exception(error)
        return PolicyFailedError(f"the policy could not be asked: {error}", hint="the run ends of it")


def _over() -> LimitError:
    return LimitError("episode_over", "the episode of this key is over", hint="ask before the agent returns")
