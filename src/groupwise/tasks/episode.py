"""One episode: the policy and an environment take turns until one of them, or a limit, ends it.

    reset -> messages -> [ the policy speaks -> step -> messages and a reward ] ... -> score -> a rollout

Whatever the environment does, an episode ends in a rollout: what it raises, a method that hangs and an answer that
breaks the contract are the rollout's `error` (`env.on_error` says what that is worth), limits are its `stop`.

    done            the environment ended it
    max_turns       it had `env.max_turns` turns
    max_tokens      a turn was cut at `rollout.max_tokens`, or it said `env.max_tokens` tokens
    max_tool_calls  it made more than `env.max_tool_calls` calls; those of the last turn were not run
    template        it made several calls in one message, and the model's chat template takes one
    context         the conversation fills the model's context
    timeout         it took `env.timeout_s` seconds

The reward is the sum of what the turns and `score` gave. An episode that a limit ended before the environment gave
anything is worth 0: a policy that talks until it is cut has failed, and is not excused.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from groupwise.config.run import EnvConfig
from groupwise.errors import ChatError, ClusterError, EnvError, GroupwiseError
from groupwise.tasks.env import Episode, Observation, observation_of, priced, reward_of, step_result_of, told_of
from groupwise.tasks.own_thread import OwnThread
from groupwise.tasks.tool_env import ToolEnv
from groupwise.tasks.transcript import Transcript
from groupwise.types import Completion, FinishReason, Message, Rollout, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# (prompt ids, at most so many tokens, the number of the turn) -> the policy's answer
Speak = Callable[[tuple[int, ...], int, int], Awaitable[Completion]]


class PolicyError(Exception):
    """Sampling from the policy failed, which is not the environment's fault."""

    def __init__(self, cause: Exception):
        super().__init__(str(cause))
        self.cause = cause


@dataclass(kw_only=True, eq=False)
class Player:
    """An episode in progress. `begin` resets the environment, and `play` plays it to its end and closes it. The caller
    of `begin` calls `close` if it does not call `play`.

    Args:
        make: an instance of the environment; called in the episode's own thread.
        name: the environment's, for messages.
        speak: asks the policy.
        context: tokens that the model's context has.
    """

    make: Callable[[], Any]
    name: str
    case: Mapping[str, Any]
    seed: int
    config: EnvConfig
    params: SamplingParams
    tokenizer: PreTrainedTokenizerBase
    context: int
    speak: Speak
    transcript: Transcript | None = None
    error: str | None = None
    error_kind: str | None = None
    _env: Any = None
    _closed: bool = False
    _thread: OwnThread = field(default_factory=OwnThread)
    _state: str | None = None  # in which the policy speaks next
    _calls: int = 0
    _rewards: list[float | None] = field(default_factory=list)
    _info: dict[str, list[float]] = field(default_factory=dict)

    async def begin(self) -> None:
        """Make and reset the environment: `transcript` is there, or `error`."""
        try:
            self._env = await self._made()
            if isinstance(self._env, ToolEnv):
                self._env.thread = self._thread
            value = await self._call(self._env.reset, dict(self.case), self.seed, what=f"{self.name}.reset")
            seen: Observation = observation_of(value, limit=self.config.max_characters)
            tools: list[dict[str, Any]] = [dict(tool) for tool in seen.tools]
            self.transcript = Transcript(seen.messages, self.tokenizer, tools=tools)
            self._state = seen.state
        except ClusterError:  # there will be no environments any more
            raise
        except GroupwiseError as error:
            self._fail(error)

    async def play(self, first: Completion | None = None) -> Rollout:
        """Return the episode as a rollout; `first` is what the policy answered already. Cancelling it closes
        everything.

        Raises EnvError if the environment fails and `env.on_error` is stop, and what asking the policy raised.
        """
        stop, reward = "error", None
        try:
            if self.error is None:
                stop, reward = await self._played(first)
        except PolicyError as error:
            raise error.cause from None
        except ClusterError:
            raise
        except GroupwiseError as error:
            self._fail(error)
        finally:
            await self.close()
        return priced(self._rollout(stop, reward), self.config)

    # -- turns ---------------------------------------------------------------------------------------------------------

    async def _played(self, first: Completion | None) -> tuple[str, float]:
        """Return why the episode ended, and its reward."""
        try:
            async with asyncio.timeout(self.config.timeout_s):
                stop = await self._turns(first)
        except TimeoutError:  # the environment's own are EnvErrors by now
            stop = "timeout"
        return stop, await self._reward(stop)

    async def _turns(self, first: Completion | None) -> str:
        """Take turns; returns why the episode ended."""
        assert self.transcript is not None
        completion = first
        while True:
            if completion is None:
                room = min(self._room(), self.params.max_tokens)
                if room <= 0:
                    return "max_tokens" if self._spent() else "context"
                completion = await self._ask(room)
            message = self.transcript.speak(completion, trained=self._trains(), state=self._state)
            self._rewards.append(None)
            if completion.finish_reason is FinishReason.ABORT:
                raise EnvError("the completion was aborted")
            if completion.finish_reason is FinishReason.LENGTH and self.config.stop_at_cut:
                full = len(self.transcript.prompt_ids) + len(completion.token_ids) >= self.context
                return "context" if full else "max_tokens"
            self._calls += len(message.get("tool_calls") or ())
            if self.config.max_tool_calls is not None and self._calls > self.config.max_tool_calls:
                return "max_tool_calls"
            if (ended := await self._step(message)) is not None:
                return ended
            if self.taken >= self.config.max_turns:
                return "max_turns"
            completion = None

    async def _ask(self, room: int) -> Completion:
        assert self.transcript is not None
        try:
            return await self.speak(self.transcript.prompt_ids, room, self.taken)
        except Exception as error:
            raise PolicyError(error) from error

    async def _step(self, message: Message) -> str | None:
        """Let the environment answer; return why the episode is over, or None."""
        assert self.transcript is not None
        value = await self._call(self._env.step, message, what=f"{self.name}.step")
        result = step_result_of(value, limit=self.config.max_characters)
        self._rewards[-1] = result.reward
        self.transcript.reward(result.reward)
        for name, number in result.info.items():
            self._info.setdefault(name, []).append(number)
        if result.done:
            self.transcript.messages += result.messages
            return "done"
        forks, self._state = self.transcript.forks, result.state
        try:
            self.transcript.hear(result.messages)
        except ChatError:
            if len(message.get("tool_calls") or ()) > 1:  # Llama 3's template takes one call a message
                return "template"
            raise
        if self._state is None and self.transcript.forks > forks:  # its ids begin with a history that was rewritten
            self._state = "\n".join(f"{each['role']}: {each.get('content')}" for each in result.messages)
        return None

    @property
    def opening(self) -> Transcript | None:
        """Return the transcript that begins with the policy's first prompt."""
        return self.transcript

    @property
    def taken(self) -> int:
        """Turns so far."""
        return 0 if self.transcript is None else len(self.transcript.turns)

    @property
    def said(self) -> int:
        """Return the number of tokens that the policy has sampled so far."""
        return 0 if self.transcript is None else self.transcript.said

    def _trains(self) -> bool:
        return self.config.train_turns == "all" or not self.taken

    def _room(self) -> int:
        """Return tokens that the policy may still say, in the context and in its budget."""
        assert self.transcript is not None
        room = self.context - len(self.transcript.prompt_ids)
        return room if self.config.max_tokens is None else min(room, self.config.max_tokens - self.said)

    def _spent(self) -> bool:
        return self.config.max_tokens is not None and self.said >= self.config.max_tokens

    # -- the end -------------------------------------------------------------------------------------------------------

    def _check_turns(self, stop: str) -> None:
        """Raise EnvError where the policy could say nothing."""
        assert self.transcript is not None
        if not self.taken and stop == "timeout":
            limit = f"env.timeout_s = {self.config.timeout_s:g} s"
            raise EnvError(f"the policy said nothing within {limit}", kind="timeout")
        if not self.taken:
            size = len(self.transcript.prompt_ids)
            method, context = f"{self.name}.reset", self.context
            raise EnvError(f"{method} returned {size} tokens, and the model's context is {context}", field=method)

    async def _reward(self, stop: str) -> float:
        assert self.transcript is not None
        self._check_turns(stop)
        given = [reward for reward in self._rewards if reward is not None]
        if callable(score := getattr(self._env, "score", None)):
            episode = Episode(
                case=dict(self.case),
                seed=self.seed,
                messages=tuple(self.transcript.messages),
                rewards=tuple(self._rewards),
                stop=stop,
            )
            value = await self._call(score, episode, what=f"{self.name}.score")
            if value is not None:
                given.append(reward_of(value, f"{self.name}.score"))
        if not given and stop == "done":
            raise EnvError(
                f"{self.name} gave no reward in the whole episode",
                hint="return a reward from step, or write score(episode)",
                field=self.name,
            )
        return math.fsum(given)

    def _rollout(self, stop: str, reward: float | None) -> Rollout:
        transcript = self.transcript
        info = {name: math.fsum(values) for name, values in self._info.items()} | {"tool_calls": float(self._calls)}
        if transcript is not None:
            info["forks"] = float(transcript.forks)
        return Rollout(
            turns=() if transcript is None else tuple(transcript.turns),
            reward=reward,
            error=self.error,
            error_kind=self.error_kind,
            messages=() if transcript is None else tuple(transcript.messages[transcript.begun :]),
            stop=stop,
            info=info,
        )

    def _fail(self, error: GroupwiseError) -> None:
        self.error, self.error_kind = told_of(self.name, error), error.kind

    async def close(self) -> None:
        """Close the environment, and end the episode's thread; once, however often it is called."""
        if self._closed:
            return
        self._closed = True
        close = getattr(self._env, "close", None)
        try:
            if callable(close):
                await self._call(close, what=f"{self.name}.close")
        except EnvError as error:
            if self.error is None and self.config.on_error == "stop":  # else what came before it counts
                self._fail(error)
        finally:
            self._thread.close()

    async def _made(self) -> Any:
        """Return the environment; one that is made too late is closed by the thread that makes it."""
        return await self._in_time(self._thread.make, self.make, what=f"{self.name}()")

    async def _call(self, function: Callable[..., Any], *args: Any, what: str) -> Any:
        return await self._in_time(self._thread.call, function, *args, what=what)

    async def _in_time(self, run: Callable[..., Awaitable[Any]], *args: Any, what: str) -> Any:
        try:
            return await run(*args, timeout_s=self.config.step_timeout_s, what=what)
        except GroupwiseError:
            raise
        except Exception as error:
            raise EnvError.raised(what, error) from error
