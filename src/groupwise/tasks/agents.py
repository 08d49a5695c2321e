"""Agents: programs that play one episode and know nothing but an OpenAI client; loading, recording and training them.

    async def agent(case, *, client, model):
        answer = await client.chat.completions.create(model=model, messages=[...], tools=[...])
        ...
        return 1.0

It is called once for each episode, by name, with those of `case`, `client`, `base_url`, `api_key`, `model`, `seed` and
`episode` that it takes, and with `env.args`. `case` is a row of the dataset, `seed` the same for the episodes of a
group; `episode` is told what single turns were worth (`EpisodeCredit`). It may be async (it runs in the run's event
loop and must not block it) or not (it runs in a thread of its own). The key stands for the episode: give it to the
processes and sub-agents that belong to it, and to nothing else. `client` is an `AsyncOpenAI` (an `OpenAI`, where the
agent is not async) with that URL and key, on connections that all episodes share: a client that an agent makes itself
reads the certificates of the machine each time, some 70 ms. What it returns is

    a number                        the episode's reward
    {"reward": .., "metrics": {}}   the same; the numbers are logged as `env/<name>`
    {"turn_rewards": [..]}          alone or beside these: what each answer was worth, in their order, None for nothing
    None                            the configuration's `rewards` say what the episode is worth

and rewards of turns are added to the episode's, as in an environment.

A class is made once, with `env.args`; its instance is the agent (`__call__`) and may have `cases()` and `eval_cases()`,
the datasets. Both may be async.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from groupwise.algo.samples import segments_of
from groupwise.config.load import load_object, with_folder
from groupwise.config.run import EnvConfig
from groupwise.errors import (
    ChatError,
    ConfigError,
    ContextLengthError,
    EnvError,
    GrammarError,
    GroupwiseError,
    OverloadedError,
    RequestError,
)
from groupwise.model.chat import opens_thought
from groupwise.tasks.compat.three_method import warn
from groupwise.tasks.compat.trl import RolloutFunc, check_keys
from groupwise.tasks.conversations import AgentRequest, Conversations, FirstRequest
from groupwise.tasks.dialects.form import ending_of
from groupwise.tasks.dialects.responses import ResponseStore
from groupwise.tasks.env import EnvFactory, OwnThread, priced, reward_of
from groupwise.tasks.episode import Slots, case_of, together
from groupwise.tasks.openai import MODEL, AgentChatRequest, AgentReply
from groupwise.tasks.reply import ReplyPart, TextStream
from groupwise.types import (
    Completion,
    FinishReason,
    LiveEngine,
    Message,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutGroup,
    Sampler,
    SamplingParams,
    SamplingRequest,
    seed_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from groupwise.tasks.endpoint import Endpoint

CLIENT, EPISODE = "client", "episode"
OFFERED = ("case", "base_url", "api_key", "model", "seed", CLIENT, EPISODE)
NEEDED = ("base_url", "api_key")  # or the client


@dataclass(frozen=True, kw_only=True)
class Agent:
    """A loaded agent; `takes` are the keyword arguments, of those in `OFFERED`, that it is called with.

    Args:
        extra_s: seconds that a call may take beyond `env.timeout_s`, which it then keeps itself.
        columns: names of the `Rollout.columns` that it adds for reward functions.
        check: raises ConfigError for cases that cannot be played, before the first is.
        on_scored: is told of each rollout once the reward functions have seen it.
        on_close: is called when no more episodes are played for now.
    """

    name: str
    function: Callable[..., Any]
    takes: tuple[str, ...]
    args: Mapping[str, Any] = field(default_factory=dict)
    extra_s: float = 0.0
    columns: tuple[str, ...] = ()
    check: Callable[[Sequence[Prompt]], None] = lambda cases: None
    on_scored: Callable[[Rollout], None] = lambda rollout: None
    on_close: Callable[[], None] = lambda: None

    def bound(self, **offered: Any) -> Callable[[], Any]:
        """The call of one episode, without arguments; a coroutine function where the agent is async."""
        given = {**self.args, **{name: offered[name] for name in self.takes}}
        if not is_async(self.function):
            return lambda: self.function(**given)

        async def play() -> Any:
            return await self.function(**given)

        return play

    def cases(self, *, held_out: bool = False) -> list[Prompt] | None:
        """The dataset that it brings, as `EnvFactory.cases`; None if it brings none."""
        return EnvFactory(name=self.name, make_one=lambda: self.function, args={}).cases(held_out=held_out)


@dataclass(frozen=True, kw_only=True)
class AgentResult:
    """What an agent returned.

    Args:
        turn_rewards: what each answer was worth besides, in their order; empty for none.
        columns: what reward functions get of it by name.
        stop: why the episode ended, where that was not the agent's own doing.
        failure: it failed, and is worth what `env.on_error` says.
        ending: how it ended, for messages.
    """

    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: tuple[float | None, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)
    stop: str | None = None
    failure: EnvError | None = None
    ending: str = ""


def load_agent(config: EnvConfig, *, folder: str | Path | None = None) -> Agent:
    """The agent that the configuration names. A class is made here.

    Raises LoadError for what cannot be imported, ConfigError for what cannot be called as agents are, EnvError for a
    class that fails.
    """
    assert config.agent is not None  # else `load_env` is asked
    made: Any = load_object(config.agent, folder=folder)
    name, args = config.agent.replace(":", ".").rpartition(".")[2], dict(config.args)
    if inspect.isclass(made):
        made, args = _instance(made, name, with_folder(made, args, folder), config.agent), {}
    if isinstance(made, RolloutFunc):  # plays whole batches, and is not called as agents are
        check_keys(config)
        return Agent(name=made.name, function=made, takes=())
    return Agent(name=name, function=made, takes=_takes(made, args, config.agent), args=args)


def outcome_of(value: Any, agent: str) -> AgentResult:
    """Check what an agent returned. Raises EnvError."""
    if isinstance(value, AgentResult):
        return value
    if value is None:
        return AgentResult()
    if not isinstance(value, Mapping):
        return AgentResult(reward=reward_of(value, agent))
    if "reward" not in value and "turn_rewards" not in value:
        raise EnvError(
            f"{agent} returned an object with {', '.join(map(repr, value)) or 'nothing'} and no reward",
            hint='return {"reward": 1.0, "metrics": {...}, "turn_rewards": [...]}, a number, or None',
        )
    reward, metrics = value.get("reward"), value.get("metrics") or {}
    if not isinstance(metrics, Mapping):
        raise EnvError(f"{agent} returned metrics of type {type(metrics).__name__}; they are numbers by name")
    numbers = {str(name): float(each) for name, each in metrics.items() if isinstance(each, int | float)}
    return AgentResult(
        reward=None if reward is None else reward_of(reward, agent),
        metrics={name: number for name, number in numbers.items() if math.isfinite(number)},
        turn_rewards=_turn_rewards(value.get("turn_rewards"), agent),
    )


def _turn_rewards(value: Any, agent: str) -> tuple[float | None, ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise EnvError(f"{agent} returned turn_rewards of type {type(value).__name__}; they are a list of numbers")
    return tuple(None if each is None else reward_of(each, agent) for each in value)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine; an object is asked for its `__call__`."""
    called = function if inspect.isroutine(function) else type(function).__call__
    return inspect.iscoroutinefunction(called)


def _instance(made: type, name: str, args: Mapping[str, Any], reference: str) -> Any:
    try:
        inspect.signature(made).bind(**args)
    except TypeError as error:
        takes = ", ".join(inspect.signature(made).parameters) or "nothing"
        raise ConfigError(f"env.args does not fit {reference!r}, which takes {takes}: {error}") from None
    except ValueError:  # no signature to look at
        pass
    if not any("__call__" in vars(one) for one in made.__mro__):
        raise ConfigError(f"env.agent {reference!r} is a class without __call__", hint="an agent can be called")
    try:
        return made(**args)
    except GroupwiseError:
        raise
    except Exception as error:
        raise EnvError.raised(f"{name}()", error) from error


def _takes(function: Callable[..., Any], args: Mapping[str, Any], reference: str) -> tuple[str, ...]:
    """Those of `OFFERED` that it has parameters for. Raises ConfigError where it cannot be called so."""
    parameters = inspect.signature(function).parameters
    anything = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    takes = tuple(name for name in OFFERED if name in parameters or (anything and name not in (CLIENT, EPISODE)))
    listed = ", ".join(parameters) or "nothing"
    if CLIENT in takes and importlib.util.find_spec("openai") is None:
        message = f"env.agent {reference!r} takes a client, and openai is not installed"
        raise ConfigError(message, hint="pip install openai")
    if CLIENT not in takes and (missing := [name for name in NEEDED if name not in takes]):
        raise ConfigError(
            f"env.agent {reference!r} takes {listed}, and not {' and '.join(missing)}",
            hint="its head is `async def agent(case, *, client, model)`, or has base_url and api_key",
        )
    try:
        inspect.signature(function).bind(**dict.fromkeys(takes), **args)
    except TypeError as error:
        message = f"env.agent {reference!r} takes {listed}; {error}"
        raise ConfigError(message, hint="the others go to env.args") from None
    return takes


# ----------------------------------------------------------------------------------------------------------------------
# One episode as the endpoint sees it: what the agent may still ask, what the policy answered.
#
# The limits of the configuration end an episode by refusing the next request: status 403, and the limit as the error's
# code, which is also the episode's `stop`. What the agent does then is its own affair: it may return a reward for what
# it has, or raise, which is worth 0.
#
#     max_turns, max_tool_calls, max_tokens, template     as in `episode`
#
# A conversation that fills the context is a 400 `context_length_exceeded`, which agents know from elsewhere: they may
# shorten it and go on. An episode that ends there has the stop "context".
#
# All methods are for the endpoint's event loop. A request whose client went away is no turn.
# ----------------------------------------------------------------------------------------------------------------------


class LimitError(GroupwiseError):
    """The episode may not go on; `code` says which limit it is at."""

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
        """How many requests the policy is answering."""
        return len(self._tasks)

    async def answer(
        self, request: AgentChatRequest, *, id: str = "", ignored: Sequence[str] = (), hear: Hear | None = None
    ) -> AgentReply:
        """The policy's next turn in the conversation that `request` shows, under the answer's `id`. `ignored` are
        parameters that change nothing, as the client calls them. `hear` is told of the answer's parts as they are
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
        """How many tokens the policy would be shown. Raises as `answer`."""
        self._check_open()
        return len(self._ask(request.conversation, request).transcript.prompt_ids)

    def new_id(self, kind: str) -> str:
        """An id for the next answer: `kind` and numbers."""
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
        """What the policy sees."""
        try:
            return self._conversations.ask(messages, request.offered_tools)
        except ChatError as error:
            said = next((message for message in reversed(messages) if message["role"] == "assistant"), None)
            if said is None or len(said.get("tool_calls") or ()) < 2:
                raise
            message = f"a message with several calls cannot be shown again: {error.message}"
            raise self._at("template", message) from error

    def _params(self, asked: AgentRequest, request: AgentChatRequest) -> SamplingParams:
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
        request = SamplingRequest(prompt_ids=prompt_ids, params=params, version=self.version, cache=True)
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
        """The completion; `said` hears of its tokens in this event loop, where the engine streams."""
        grammar, prepare = request.params.grammar, getattr(self.sampler, "prepare", None)
        if grammar is not None and prepare is not None:  # in a thread: others are answered meanwhile
            episode = f"{self.seed}/{self.number}"
            await asyncio.shield(asyncio.wrap_future(prepare(grammar, sender=episode)))
        if said is None or "on_token" not in inspect.signature(self.sampler.submit).parameters:
            return (await self.sampler.sample([request]))[0]
        loop = asyncio.get_running_loop()

        def on_token(_: int, token_id: int, *__: Any) -> None:
            with suppress(RuntimeError):  # the loop has been closed: nobody waits
                loop.call_soon_threadsafe(said, token_id)

        (future,) = cast("LiveEngine", self.sampler).submit([request], on_token=on_token)
        return await asyncio.wrap_future(future)

    def _fail(self, error: Exception) -> PolicyFailedError:
        with suppress(InvalidStateError):
            self.failed.set_exception(error)
        return PolicyFailedError(f"the policy could not be asked: {error}", hint="the run ends of it")


def _over() -> LimitError:
    return LimitError("episode_over", "the episode of this key is over", hint="ask before the agent returns")


# ----------------------------------------------------------------------------------------------------------------------
# One episode that an agent plays: one call of it, and what it asked the policy meanwhile.
#
# Whatever the agent does, the episode ends in a rollout:
#
#     it returns                      its reward; None leaves that to reward functions
#     it raises                       the rollout's `error` (`env.on_error` says what that is worth)
#     it is at a limit                `stop`; reward 0 if it gives none or raises then (`session`)
#     it asks nothing                 an error: there is nothing to train
#     `env.timeout_s` have passed     while the policy speaks "timeout" and reward 0, otherwise an error: it hangs
#     the policy cannot be asked      no fault of the agent's: the exception is raised, and the run ends
#
# The trained tokens are those that were sampled, in the contexts in which they were (`conversations`). Of several
# conversations, reward functions see the one that was answered last.
# ----------------------------------------------------------------------------------------------------------------------

GRACE_S = 1.0  # in which an agent that was cancelled may clean up


@dataclass(frozen=True, kw_only=True)
class AgentEpisode:
    """An episode to be played. `scored`: reward functions score it too, so that the agent need not."""

    agent: Agent
    case: Mapping[str, Any]
    session: AgentSession
    endpoint: Endpoint
    scored: bool

    async def play(self) -> tuple[Rollout, FirstRequest | None]:
        """The rollout, and what the policy was first asked, if anything.

        Raises EnvError if the agent fails and `env.on_error` is stop, and what the engine raised if that failed.
        """
        session, outcome = self.session, AgentResult()
        error: EnvError | None = None
        async with self.endpoint.open(session) as key:
            try:
                outcome = await self._outcome(key)
            except EnvError as failure:
                error = failure
            said = await self.endpoint.end(session)
        session.stop = session.stop or outcome.stop
        reward, error = outcome.reward, error or outcome.failure
        if session.stop is not None:
            reward, error = reward or 0.0, None
        if error is None and (wrong := _give(outcome.turn_rewards, said, self.agent.name)) is not None:
            error = wrong
        given = [turn.reward for turn in said.turns() if turn.reward is not None]
        if error is None and given:
            reward = math.fsum([*given, reward or 0.0])
        if error is None and not said.answered:
            told = f"; {outcome.ending}" if outcome.ending else ""
            error = EnvError(f"{self.agent.name} never asked the policy: there is nothing to train{told}")
        if error is None and reward is None and not self.scored:
            error = EnvError(f"{self.agent.name} returned no reward, and the configuration has no reward functions")
        return priced(self._rollout(said, outcome, reward, error), session.config), said.first_request

    def _rollout(
        self, said: Conversations, outcome: AgentResult, reward: float | None, error: EnvError | None
    ) -> Rollout:
        info = {
            "tool_calls": float(said.calls),
            "forks": float(max(0, len(segments_of(said.turns())) - 1)),
            "ignored_parameters": float(self.session.ignored),
        }
        return Rollout(
            turns=said.turns(only_first=self.session.config.train_turns == "first"),
            reward=reward,
            error=None if error is None else error.message,
            error_kind=None if error is None else error.kind,
            messages=said.latest,
            stop=self.session.stop or "done",
            info={**outcome.metrics, **info},
            columns=outcome.columns,
        )

    async def _outcome(self, key: str) -> AgentResult:
        """What the agent returns. Raises EnvError for all that is its fault."""
        limit_s, failed = self.session.config.timeout_s + self.agent.extra_s, asyncio.wrap_future(self.session.failed)
        agent = asyncio.ensure_future(self._call(key))
        try:
            await asyncio.wait({agent, failed}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if self.session.failed.done():
                self.session.failed.result()
            if agent.done():
                return agent.result()
            if not self.session.under_way:
                message = f"{self.agent.name} had not returned after {limit_s:g} s, and the policy was not asked"
                raise EnvError(message, field=self.agent.name, kind="timeout")
            self.session.stop = self.session.stop or "timeout"
            return AgentResult()
        finally:
            failed.cancel()
            agent.cancel()
            await asyncio.wait({agent}, timeout=GRACE_S)
            if agent.done() and not agent.cancelled():
                agent.exception()  # seen

    async def _call(self, key: str) -> AgentResult:
        """One call of the agent. SystemExit is its failure too, not the end of the process."""
        name, thread = self.agent.name, OwnThread(self.agent.name)
        offered = {
            "case": dict(self.case),
            "base_url": self.endpoint.base_url,
            "api_key": key,
            "model": MODEL,
            "seed": self.session.seed,
        }
        if EPISODE in self.agent.takes:
            offered[EPISODE] = EpisodeCredit(self.session, self.agent.name)
        if CLIENT in self.agent.takes:
            make = self.endpoint.async_client if is_async(self.agent.function) else self.endpoint.client
            offered[CLIENT] = make(key)
        play = self.agent.bound(**offered)
        try:
            return outcome_of(await thread.call(play, timeout_s=None, what=name), name)
        except EnvError:
            raise
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise EnvError(f"{name} cancelled itself") from error
        except (Exception, SystemExit) as error:
            raise EnvError.raised(name, error) from error
        finally:
            thread.close()


@dataclass(frozen=True)
class EpisodeCredit:
    """The `episode` that an agent may take: it is told what single turns were worth, and in which state they are taken,
    which `algo.credit` reads.

        answer = await client.chat.completions.create(...)
        episode.reward(0.2)                 # to what was answered last
        episode.reward(0.2, answer.id)      # where several are asked at once

    Both may be called from any thread, and raise EnvError for a value that is none.
    """

    _session: AgentSession
    _agent: str

    def reward(self, value: float, answer: str | None = None) -> None:
        """Give a turn a reward: that of the answer with this id (of any dialect), or the one answered last. Several of
        a turn add up. The episode's reward is the sum of all of them and what the agent returns."""
        self._session.reward(reward_of(value, self._agent, did="gave a turn"), answer)

    def state(self, name: str) -> None:
        """Name the state in which the policy speaks next, equal for equal situations (GiGPO's anchor states). Without a
        name it is what the policy has heard since the answer that its request goes on from."""
        if not isinstance(name, str):
            raise EnvError(f"{self._agent} named a state {name!r}; it is a text", field=self._agent)
        self._session.state = name


def _give(rewards: Sequence[float | None], said: Conversations, agent: str) -> EnvError | None:
    """Add the rewards that an agent returned to its turns, in the order of the answers; what is wrong with them."""
    if rewards and len(rewards) != len(said.answered):
        message = f"{agent} returned {len(rewards)} turn_rewards, and the policy answered {len(said.answered)} times"
        return EnvError(message, hint="one for each answer, in their order, null for none", field=agent)
    for node, value in zip(said.answered, rewards, strict=False):
        if value is not None:
            said.reward(node, value)
    return None


# ----------------------------------------------------------------------------------------------------------------------
# Groups of episodes that agents play: a `RolloutSource`, as environments have one in `episode.EpisodeRollouts`.
# ----------------------------------------------------------------------------------------------------------------------


class AgentRollouts:
    """Each prompt is a case that the agent plays `n` times. Close it, or let go of it.

    Args:
        scored: reward functions score the episodes too, so that an agent need not.
        recorded: the engine records which tokens were left to draw from (`AgentSession`).
        note: is told once of each parameter that agents send and that changes nothing.
    """

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: PreTrainedTokenizerBase,
        agent: Agent,
        config: EnvConfig,
        *,
        scored: bool,
        recorded: bool = True,
        note: Callable[[str], None] = warn,
    ):
        self._sampler, self._tokenizer, self._recorded = sampler, tokenizer, recorded
        self._agent, self._config, self._scored, self._tell = agent, config, scored, note
        self._noted: set[str] = set()
        self._slots = Slots(config.concurrency)
        self._endpoint: Endpoint | None = None

    def prepare(self, prompt: Prompt) -> Prompt:
        """Returns the prompt unchanged, since the agent decides what the policy is asked."""
        return prompt

    def begin(
        self, prompts: Sequence[Prompt], *, seeds: Sequence[int], n: int, params: SamplingParams, version: PolicyVersion
    ) -> list[Awaitable[RolloutGroup]]:
        """As `RolloutSource.begin`."""
        if self._endpoint is None:
            from groupwise.tasks.endpoint import Endpoint  # a web server, for runs that need one

            self._endpoint = Endpoint(self._tokenizer)
            weakref.finalize(self, self._endpoint.stop)
        return [
            self._group(prompt, self._endpoint, seed=seed, n=n, params=params, version=version)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]

    def close(self) -> None:
        """Close the endpoint."""
        self._agent.on_close()
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    async def _group(
        self, prompt: Prompt, endpoint: Endpoint, *, seed: int, n: int, params: SamplingParams, version: PolicyVersion
    ) -> RolloutGroup:
        sessions = [
            AgentSession(
                sampler=self._sampler,
                tokenizer=self._tokenizer,
                config=self._config,
                params=params,
                version=version,
                seed=seed,
                number=number,
                recorded=self._recorded,
            )
            for number in range(n)
        ]
        async with self._slots.take(n):
            played = await together([self._episode(prompt, session, endpoint).play() for session in sessions])
        self._say_ignored({name for session in sessions for name in session.ignored_names})
        if (first := next((first for _, first in played if first is not None), None)) is not None:
            messages, tools, token_ids = first
            prompt = replace(prompt, messages=messages, tools=tools, token_ids=token_ids)
        return RolloutGroup(prompt=prompt, rollouts=tuple(rollout for rollout, _ in played))

    def _say_ignored(self, names: set[str]) -> None:
        if new := sorted(names - self._noted):
            self._noted |= names
            self._tell(
                f"{self._agent.name} asks with {', '.join(new)}, which change nothing: how the policy samples is the "
                "run's, whose distribution is trained (env/ignored_parameters counts such requests)"
            )

    def _episode(self, prompt: Prompt, session: AgentSession, endpoint: Endpoint) -> AgentEpisode:
        return AgentEpisode(
            agent=self._agent, case=case_of(prompt), session=session, endpoint=endpoint, scored=self._scored
        )
