"""One episode as the endpoint sees it: what the agent may still ask, what the policy answered.

The limits of the configuration end an episode by refusing the next request: status 403, and the limit as the error's
code, which is also the episode's `stop`. What the agent does then is its own affair: it may return a reward for what
it has, or raise, which is worth 0.

    max_turns, max_tool_calls, max_tokens, template     as in `episode`

A conversation that fills the context is a 400 `context_length_exceeded`, which agents know from elsewhere: they may
shorten it and continue. An episode that ends there has the stop "context".

All methods are for the endpoint's event loop. A request whose client went away is not a turn.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from groupwise.config.run import EnvConfig
from groupwise.errors import (
    ChatError,
    ContextLengthError,
    EnvError,
    GrammarError,
    GroupwiseError,
    OverloadedError,
    RequestError,
)
from groupwise.model.chat import opens_thought
from groupwise.model.reply_formats.parser import ReplyPart
from groupwise.sampler import LiveEngine, Sampler
from groupwise.seeds import seed_of
from groupwise.tasks.conversations import AgentRequest, Conversations
from groupwise.tasks.dialects.form import ending_of
from groupwise.tasks.dialects.responses import ResponseStore
from groupwise.tasks.openai import AgentChatRequest, AgentReply
from groupwise.tasks.reply import TextStream
from groupwise.types import (
    Completion,
    FinishReason,
    Message,
    PolicyVersion,
    SamplingParams,
    SamplingRequest,
    conversation_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LimitError(GroupwiseError):
    """The episode may not continue; `code` says which limit it is at."""

    status, exit_code = 403, 1

    def __init__(self, limit: str, message: str, *, hint: str | None = None):
        super().__init__(message, hint=hint)
        self.code = limit


class PolicyFailedError(GroupwiseError):
    """Sampling failed. The agent gets an error, and the run ends with this exception."""


Hear = Callable[[Sequence[ReplyPart]], None]


@dataclass(kw_only=True, eq=False)
class AgentSession:
    """An episode in progress.

    Args:
        number: of the episode in its group; with `seed`, the group's, it seeds what the policy says.
        stop: the limit that ended the episode, if one did.
        failed: has the exception when the policy could not be asked.
        state: what the agent calls the state in which the policy speaks next, for `algo.credit: gigpo`.
        recorded: the engine records which tokens were left to draw from, so that a request may say what is left.
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
    state: str | None = None
    over: bool = False
    recorded: bool = True
    responses: ResponseStore = field(default_factory=ResponseStore)  # what the episode stored of its answers
    _asked: int = 0
    _named: int = 0
    _conversations: Conversations = field(init=False)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._conversations = Conversations(self.tokenizer)

    @property
    def under_way(self) -> int:
        """Return how many requests the policy is answering."""
        return len(self._tasks)

    async def answer(
        self, request: AgentChatRequest, *, id: str = "", ignored: Sequence[str] = (), hear: Hear | None = None
    ) -> AgentReply:
        """Return the policy's next turn in the conversation that `request` shows, under the answer's `id`. `ignored`
        are parameters that change nothing, as the client calls them. `hear` is told of the answer's parts as they are
        sampled, where the engine streams, and otherwise when it is whole; all of them, and before this returns.

        Raises:
            LimitError, ContextLengthError: the episode is at a limit.
            RequestError, ChatError, GrammarError: the messages cannot be shown, or the answer not be what is asked for.
            PolicyFailedError: the engine failed.
        """
        messages = request.conversation
        await self._last_turns()
        self._check_open()
        self._check_limits(messages)
        asked = self._ask(messages, request)
        params = self._params(asked, request)
        self.ignored += bool(ignored)
        self.ignored_names.update(ignored)
        reply = self._conversations.reply(asked, one_call=request.parallel_tool_calls is False)
        text, state = TextStream(self.tokenizer, params), self.state

        def said(token_id: int) -> None:
            if hear is not None and (parts := reply.push(text.push(token_id))):
                hear(parts)

        completion = await self._sample(asked, params, None if hear is None else said)
        if self.over:
            raise _over()
        if completion.finish_reason is FinishReason.ABORT:
            raise self._fail(EnvError("a completion was aborted"))
        if self.stop == "context":  # it was shortened
            self.stop = None
        rest = [*reply.push(text.finish(completion.text)), *reply.finish()]
        if hear is not None:
            hear(rest)
        prompt_ids = asked.transcript.prompt_ids
        ending = ending_of(
            completion,
            called=bool(reply.calls),
            stop=params.stop,
            prompt_tokens=len(prompt_ids),
            context=self.sampler.context_length,
            most=request.most_tokens,
            thinks=opens_thought(prompt_ids, self.tokenizer),
            tokenizer=self.tokenizer,
        )
        message = self._conversations.answer(asked, completion, reply=reply, id=id, state=state)
        if self.state is state:  # none was named meanwhile for what comes next
            self.state = None
        return AgentReply(message=message, parts=tuple(reply.parts), ending=ending)

    def reward(self, value: float, answer: str | None = None) -> None:
        """Add `value` to what the turn of the answer with this id was given, or else the one answered last. For any
        thread. Raises EnvError where there is none."""
        if self.over:
            raise EnvError("a turn was given a reward after the episode", hint="give it before the agent returns")
        answered = self._conversations.answered
        node = next((each for each in reversed(answered) if answer in (None, each.id)), None)
        if node is None:
            known = ", ".join(repr(each.id) for each in answered) or "none so far"
            which = "no turn to be rewarded" if answer is None else f"no answer {answer!r} in this episode"
            raise EnvError(f"there is {which}; answers: {known}", hint="reward a turn once the policy has answered")
        self._conversations.reward(node, value)

    def count(self, request: AgentChatRequest) -> int:
        """Return how many tokens the policy would be shown. Raises as `answer`."""
        self._check_open()
        return len(self._ask(request.conversation, request).transcript.prompt_ids)

    def new_id(self, kind: str) -> str:
        """Return an id for the next answer: `kind` and numbers."""
        self._named += 1
        return f"{kind}{self.number}-{self._named}"

    async def end(self) -> Conversations:
        """End the session once the agent has returned: pending sampling is cancelled, later requests are refused."""
        self.over = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return self._conversations

    # ---- limits ----
    def _check_open(self) -> None:
        if self.over:
            raise _over()

    async def _last_turns(self) -> None:
        """Wait while the last turns of `max_turns` are under way, for each may still turn out to be none: that a client
        gave up a request may be seen only after its next request has arrived."""
        most, answered = self.config.max_turns, self._conversations.answered
        while not self.over and len(answered) < most <= len(answered) + self.under_way:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    def _check_limits(self, messages: tuple[Message, ...]) -> None:
        config, so_far = self.config, self._conversations
        if len(so_far.answered) >= config.max_turns:
            raise self._at("max_turns", f"the policy had its {config.max_turns} turns (env.max_turns)")
        if config.max_tool_calls is not None and so_far.calls > config.max_tool_calls:
            raise self._at("max_tool_calls", f"{so_far.calls} tool calls are more than {config.max_tool_calls}")
        size = sum(len(str(message.get("content") or "")) for message in messages)
        if size > config.max_characters:
            raise RequestError(
                f"the messages have {size:,} characters; env.max_characters is {config.max_characters:,}",
                hint="shorten them, or raise that",
                field="messages",
            )

    def _ask(self, messages: tuple[Message, ...], request: AgentChatRequest) -> AgentRequest:
        """Return what the policy sees."""
        try:
            return self._conversations.ask(messages, request.offered_tools)
        except ChatError as error:
            said = next((message for message in reversed(messages) if message["role"] == "assistant"), None)
            if said is None or len(said.get("tool_calls") or ()) < 2:
                raise
            message = f"a message with several calls cannot be shown again: {error.message}"
            raise self._at("template", message) from error

    def _params(self, asked: AgentRequest, request: AgentChatRequest) -> SamplingParams:
        """Return how the answer is drawn: as the run says, no longer than everything allows."""
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
            request.narrowed(self.params, asked.transcript.prompt_ids, self.tokenizer, recorded=self.recorded),
            max_tokens=most,
            stop=(*self.params.stop, *request.stop_strings),
            top_logprobs=request.top_logprobs or self.params.top_logprobs,
            seed=seed_of(self.seed, self.number, self._asked),
        )

    def _at(self, limit: str, message: str) -> LimitError:
        self.stop = self.stop or limit
        return LimitError(limit, f"the episode is over: {message}")

    # ---- the policy ----
    async def _sample(
        self, asked: AgentRequest, params: SamplingParams, said: Callable[[int], None] | None
    ) -> Completion:
        prompt_ids = asked.transcript.prompt_ids
        request = SamplingRequest(
            prompt_ids=prompt_ids,
            params=params,
            version=self.version,
            cache=True,
            conversation=conversation_of(self.seed, self.number),
        )
        self._asked += 1
        task = asyncio.ensure_future(self._draw(request, said))
        self._tasks.add(task)
        try:
            (completion,) = await task
            return completion
        except asyncio.CancelledError:
            task.cancel()
            if self.over:
                raise _over() from None
            raise
        except (GrammarError, OverloadedError):  # of what was asked for, not of the policy
            raise
        except Exception as error:
            raise self._fail(error) from error
        finally:
            self._tasks.discard(task)

    async def _draw(self, request: SamplingRequest, said: Callable[[int], None] | None) -> list[Completion]:
        """Return the completion; `said` hears of its tokens in this event loop, where the engine streams."""
        grammar, prepare = request.params.grammar, getattr(self.sampler, "prepare", None)
        if grammar is not None and prepare is not None:  # in a thread: others are answered meanwhile
            held = prepare(grammar, sender=request.conversation)  # it is there until this returns
            await asyncio.shield(asyncio.wrap_future(held))
        if said is None or "on_token" not in inspect.signature(self.sampler.submit).parameters:
            return (await self.sampler.sample([request]))[0]
        loop = asyncio.get_running_loop()

        def on_token(_: int, token_id: int, *__: Any) -> None:
            with suppress(RuntimeError):  # the loop has been closed: no request waits
                loop.call_soon_threadsafe(said, token_id)

        (future,) = cast("LiveEngine", self.sampler).submit([request], on_token=on_token)
        return await asyncio.wrap_future(future)

    def _fail(self, error: Exception) -> PolicyFailedError:
        with suppress(InvalidStateError):
            self.failed.set_exception(error)
        return PolicyFailedError(f"the policy could not be asked: {error}", hint="the run ends of it")


def _over() -> LimitError:
    return LimitError("episode_over", "the episode of this key is over", hint="ask before the agent returns")
