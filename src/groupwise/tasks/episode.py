"""From a prompt to a group of rollouts: completions (`SingleTurnRollouts`) or episodes (`EpisodeRollouts`).

The loop, evaluation and everything after them know only that a group comes back. Prompts that are begun together have
their first turns admitted together; the episodes of a group that see the same first prompt share it.

Each episode draws from seeds of its own, (seed of the group, number of the episode, number of the turn), so that what
it says does not depend on which others happen to be under way, but for float rounding in another batch: the same words,
with log-probabilities that differ in their last bits. With `env.lockstep` turns are sampled in rounds, of all episodes
together (`Lockstep`), and not even that depends on how long anybody's tools took.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from groupwise.config.run import EnvConfig
from groupwise.errors import ChatError, ClusterError, EnvError, GroupwiseError
from groupwise.model.chat import encode_prompt
from groupwise.tasks.env import (
    Episode,
    Observation,
    OwnThread,
    ToolEnv,
    observation_of,
    priced,
    reward_of,
    step_result_of,
    told_of,
)
from groupwise.tasks.structured import of_reply
from groupwise.tasks.transcript import Transcript
from groupwise.types import (
    Completion,
    FinishReason,
    Message,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutGroup,
    Sampler,
    SamplingParams,
    SamplingRequest,
    Turn,
    seed_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# ----------------------------------------------------------------------------------------------------------------------
# One episode: the policy and an environment take turns until one of them, or a limit, ends it.
#
#     reset -> messages -> [ the policy speaks -> step -> messages and a reward ] ... -> score -> a rollout
#
# Whatever the environment does, an episode ends in a rollout: what it raises, a method that hangs and an answer that
# breaks the contract are the rollout's `error` (`env.on_error` says what that is worth), limits are its `stop`.
#
#     done            the environment ended it
#     max_turns       it had `env.max_turns` turns
#     max_tokens      a turn was cut at `rollout.max_tokens`, or it said `env.max_tokens` tokens
#     max_tool_calls  it made more than `env.max_tool_calls` calls; those of the last turn were not run
#     template        it made several calls in one message, and the model's chat template takes one
#     context         the conversation fills the model's context
#     timeout         it took `env.timeout_s` seconds
#
# The reward is the sum of what the turns and `score` gave. An episode that a limit ended before the environment gave
# anything is worth 0: a policy that talks until it is cut has failed, and is not excused.
# ----------------------------------------------------------------------------------------------------------------------

# (prompt ids, at most so many tokens, the number of the turn) -> the policy's answer
Speak = Callable[[tuple[int, ...], int, int], Awaitable[Completion]]


class PolicyError(Exception):
    """Sampling from the policy failed, which is not the environment's fault."""

    def __init__(self, cause: Exception):
        super().__init__(str(cause))
        self.cause = cause


@dataclass(kw_only=True, eq=False)
class Player:
    """An episode in progress. `begin` resets the environment, `play` plays it to its end.

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
    _thread: OwnThread = field(default_factory=OwnThread)
    _state: str | None = None  # in which the policy speaks next
    _calls: int = 0
    _rewards: list[float | None] = field(default_factory=list)
    _info: dict[str, list[float]] = field(default_factory=dict)

    async def begin(self) -> None:
        """Make and reset the environment: `transcript` is there, or `error`."""
        try:
            self._env = await self._call(self.make, what=f"{self.name}()")
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
        """The episode as a rollout; `first` is what the policy answered already. Cancelling it closes everything.

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
            await self._close()
        return priced(self._rollout(stop, reward), self.config)

    # -- turns ---------------------------------------------------------------------------------------------------------

    async def _played(self, first: Completion | None) -> tuple[str, float]:
        """Why the episode ended, and its reward."""
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
        """The environment answers; why the episode is over, or None."""
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
        """The transcript that begins with what the policy was asked first."""
        return self.transcript

    @property
    def taken(self) -> int:
        """Turns so far."""
        return 0 if self.transcript is None else len(self.transcript.turns)

    @property
    def said(self) -> int:
        """Tokens that the policy said so far."""
        return 0 if self.transcript is None else self.transcript.said

    def _trains(self) -> bool:
        return self.config.train_turns == "all" or not self.taken

    def _room(self) -> int:
        """Tokens that the policy may still say, in the context and in its budget."""
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

    async def _close(self) -> None:
        close = getattr(self._env, "close", None)
        try:
            if callable(close):
                await self._call(close, what=f"{self.name}.close")
        except EnvError as error:
            if self.error is None and self.config.on_error == "stop":  # else what came before it counts
                self._fail(error)
        finally:
            self._thread.close()

    async def _call(self, function: Callable[..., Any], *args: Any, what: str) -> Any:
        try:
            return await self._thread.call(function, *args, timeout_s=self.config.step_timeout_s, what=what)
        except GroupwiseError:
            raise
        except Exception as error:
            raise EnvError.raised(what, error) from error


T = TypeVar("T")


class RolloutSource(Protocol):
    """How groups of rollouts are made for prompts; one implementation for each kind of task."""

    def prepare(self, prompt: Prompt) -> Prompt:
        """The prompt as `begin` takes it. Raises ChatError."""
        ...

    def begin(
        self, prompts: Sequence[Prompt], *, seeds: Sequence[int], n: int, params: SamplingParams, version: PolicyVersion
    ) -> list[Awaitable[RolloutGroup]]:
        """Begin all of them; a group of `n` unscored rollouts for each, in their order. Call it in an event loop."""
        ...

    def close(self) -> None:
        """Let go of what it holds besides the sampler: processes, connections, an endpoint."""
        ...


class SingleTurnRollouts:
    """Single-turn tasks: the completion of the prompt is the whole rollout."""

    def __init__(self, sampler: Sampler, tokenizer: PreTrainedTokenizerBase):
        self._sampler, self._tokenizer = sampler, tokenizer

    def prepare(self, prompt: Prompt) -> Prompt:
        """The prompt with its token ids."""
        return encode_prompt(prompt, self._tokenizer)

    def begin(
        self, prompts: Sequence[Prompt], *, seeds: Sequence[int], n: int, params: SamplingParams, version: PolicyVersion
    ) -> list[Awaitable[RolloutGroup]]:
        """As `RolloutSource.begin`."""
        requests = [
            SamplingRequest(
                prompt_ids=prompt.token_ids,
                params=replace(self._drawn(prompt, params), seed=seed),
                n=n,
                version=version,
            )
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        futures = self._sampler.submit(requests)

        async def group(prompt: Prompt, at: int) -> RolloutGroup:
            return group_of(prompt, await asyncio.wrap_future(futures[at]))

        return [group(prompt, at) for at, prompt in enumerate(prompts)]

    def _drawn(self, prompt: Prompt, params: SamplingParams) -> SamplingParams:
        """In a chat a thought may come before what must be said; text is continued as it is."""
        return params if prompt.messages is None else of_reply(params, prompt.token_ids, self._tokenizer)

    def close(self) -> None:
        """Does nothing: there is nothing to close."""


class Environments(Protocol):
    """Makes an environment for each episode; calls may take `patience_s` seconds beyond `env.step_timeout_s`."""

    @property
    def name(self) -> str: ...

    @property
    def patience_s(self) -> float: ...

    def make(self) -> Any: ...

    def close(self) -> None: ...


class EpisodeRollouts:
    """Multi-turn tasks: each prompt is a case of an environment, in which `n` episodes are played, each by a `player`
    (`Player`, or `self_play.Match` where an environment has several players)."""

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: PreTrainedTokenizerBase,
        factory: Environments,
        config: EnvConfig,
        *,
        player: Callable[..., Player] | None = None,
    ):
        self._sampler, self._tokenizer, self._factory = sampler, tokenizer, factory
        self._kind = player or Player
        self._config = config.model_copy(update={"step_timeout_s": config.step_timeout_s + factory.patience_s})
        self._cache = config.max_turns > 1
        self._rounds = Lockstep(sampler) if config.lockstep else None
        self._slots = Slots(config.concurrency, rounds=self._rounds)

    def close(self) -> None:
        """Close what the environments share (processes, connections)."""
        self._factory.close()

    def prepare(self, prompt: Prompt) -> Prompt:
        """The prompt itself: what the policy is asked, `reset` says."""
        return prompt

    def begin(
        self, prompts: Sequence[Prompt], *, seeds: Sequence[int], n: int, params: SamplingParams, version: PolicyVersion
    ) -> list[Awaitable[RolloutGroup]]:
        """As `RolloutSource.begin`."""
        return [
            self._group(prompt, seed=seed, n=n, params=params, version=version)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]

    async def _group(
        self, prompt: Prompt, *, seed: int, n: int, params: SamplingParams, version: PolicyVersion
    ) -> RolloutGroup:
        async with self._slots.take(n) as party:
            players = [
                self._player(prompt, seed=seed, number=number, params=params, version=version) for number in range(n)
            ]
            await asyncio.gather(*(player.begin() for player in players))
            first = await self._first_turns(players, seed=seed, params=params, version=version)
            rollouts = await together([_played(each, said, party) for each, said in zip(players, first, strict=True)])
        seen = next((player.opening for player in players if player.opening is not None), None)
        if seen is not None:
            ids = seen.turns[0].prompt_ids if seen.turns else ()
            prompt = replace(prompt, messages=tuple(seen.messages[: seen.begun]), tools=seen.tools, token_ids=ids)
        return RolloutGroup(prompt=prompt, rollouts=tuple(rollouts))

    def _player(
        self, prompt: Prompt, *, seed: int, number: int, params: SamplingParams, version: PolicyVersion
    ) -> Player:
        async def speak(prompt_ids: tuple[int, ...], most: int, turn: int) -> Completion:
            assert player.transcript is not None
            drawn = of_reply(params, prompt_ids, self._tokenizer, tools=player.transcript.tools)
            drawn = replace(drawn, max_tokens=most, seed=seed_of(seed, number, turn))
            request = SamplingRequest(prompt_ids=prompt_ids, params=drawn, version=version, cache=self._cache)
            (completion,) = await self._sample(request)
            return completion

        player = self._kind(
            make=self._factory.make,
            name=self._factory.name,
            case=case_of(prompt),
            seed=seed,
            config=self._config,
            params=params,
            tokenizer=self._tokenizer,
            context=self._sampler.context_length,
            speak=speak,
        )
        return player

    async def _first_turns(
        self, players: Sequence[Player], *, seed: int, params: SamplingParams, version: PolicyVersion
    ) -> list[Completion | None]:
        """The first turns of players that all see the same prompt, sampled as one group; else None for each."""
        begun = [player.transcript for player in players if player.transcript is not None]
        if len({each.prompt_ids for each in begun}) != 1 or len(begun) < len(players):
            return [None] * len(players)
        prompt_ids, tools = begun[0].prompt_ids, begun[0].tools
        most = min(params.max_tokens, self._config.max_tokens or params.max_tokens)
        if len(prompt_ids) >= self._sampler.context_length:
            return [None] * len(players)
        drawn = replace(of_reply(params, prompt_ids, self._tokenizer, tools=tools), max_tokens=most, seed=seed)
        request = SamplingRequest(
            prompt_ids=prompt_ids, params=drawn, n=len(players), version=version, cache=self._cache
        )
        return [*await self._sample(request)]

    async def _sample(self, request: SamplingRequest) -> list[Completion]:
        """Its completions, for as many episodes, in this round or at once."""
        if self._rounds is not None:
            return await asyncio.wrap_future(self._rounds.submit([request], episodes=request.n)[0])
        (completions,) = await self._sampler.sample([request])
        return completions


async def _played(player: Player, first: Completion | None, party: Party) -> Rollout:
    try:
        return await player.play(first)
    finally:
        party.leave()


def case_of(prompt: Prompt) -> dict[str, Any]:
    """The columns of a prompt and, where it is a row of the configuration's `data`, what it asks as `prompt`."""
    asked = prompt.text if prompt.messages is None else list(prompt.messages)
    return dict(prompt.columns) if asked is None else {"prompt": asked, **prompt.columns}


class Lockstep:
    """`env.lockstep`: collects the requests of all running episodes and submits them together, in rounds.

    What an episode is told then follows from the seeds alone, bit for bit, since batches are made of the same requests
    in the same order however long environments take; and the slowest environment sets the pace of all. Episodes `join`
    and `leave` in the event loop; `submit` may be called from any thread.
    """

    def __init__(self, sampler: Sampler):
        self._sampler = sampler
        self._lock = threading.Lock()
        self._playing = 0
        self._asked: list[_Asked] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def context_length(self) -> int:
        return self._sampler.context_length

    def join(self, episodes: int) -> None:
        """Add `episodes` to those that are running."""
        self._loop = asyncio.get_running_loop()
        with self._lock:
            self._playing += episodes

    def leave(self, episodes: int) -> None:
        """Remove `episodes` from those that are running."""
        with self._lock:
            self._playing -= episodes
        self._look()

    def submit(self, requests: Sequence[SamplingRequest], *, episodes: int = 1) -> list[Future[list[Completion]]]:
        """As `Sampler.submit`, in the next round; so many episodes wait for it."""
        futures: list[Future[list[Completion]]] = [Future() for _ in requests]
        with self._lock:
            self._asked.append(_Asked(list(requests), futures, episodes))
        self._look()
        return futures

    def _look(self) -> None:
        """See whether everybody waits, after what is about to happen in the event loop anyway: who joins in it."""
        if self._loop is not None:
            with suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        with self._lock:
            waiting = [each for each in self._asked if not all(future.cancelled() for future in each.futures)]
            if not waiting or sum(each.episodes for each in waiting) < self._playing:
                return
            self._asked = []
        waiting.sort(key=lambda each: [(request.params.seed or 0, request.prompt_ids) for request in each.requests])
        try:
            given = self._sampler.submit([request for each in waiting for request in each.requests])
        except Exception:  # of one of them: each for itself
            for each in waiting:
                each.submit(self._sampler)
            return
        answers = iter(given)
        for each in waiting:
            for future in each.futures:
                _follow(future, next(answers))


@dataclass
class _Asked:
    """Requests of one call, the futures that it got for them, and the episodes that wait for it."""

    requests: list[SamplingRequest]
    futures: list[Future[list[Completion]]]
    episodes: int

    def submit(self, sampler: Sampler) -> None:
        try:
            for future, answer in zip(self.futures, sampler.submit(self.requests), strict=True):
                _follow(future, answer)
        except Exception as error:
            for future in self.futures:
                with suppress(InvalidStateError):
                    future.set_exception(error)


def _follow(future: Future[Any], other: Future[Any]) -> None:
    """Settle `future` as `other` is, and cancel that if nobody waits any more."""

    def settle(done: Future[Any]) -> None:
        with suppress(InvalidStateError):
            if done.cancelled():
                future.cancel()
            elif (error := done.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(done.result())

    other.add_done_callback(settle)
    future.add_done_callback(lambda each: other.cancel() if each.cancelled() else None)


@dataclass(eq=False)
class Party:
    """Episodes that begin together. Each leaves when it is over; the last one's leaving is left to `end`, when those
    that come after it have joined."""

    rounds: Lockstep | None
    episodes: int
    _left: int = field(default=0)

    def begin(self) -> None:
        if self.rounds is not None:
            self.rounds.join(self.episodes)

    def leave(self) -> None:
        """One of the episodes is over."""
        self._left += 1
        if self.rounds is not None and self._left < self.episodes:
            self.rounds.leave(1)

    def end(self) -> None:
        if self.rounds is not None:
            self.rounds.leave(self.episodes - min(self._left, self.episodes - 1))


class Slots:
    """At most `most` episodes at once, whatever their groups' sizes. A group gets its slots together, and in turn. In
    `rounds` those that come after it join before it leaves."""

    def __init__(self, most: int, *, rounds: Lockstep | None = None):
        self._most, self._taken, self._rounds = most, 0, rounds
        self._waiting: deque[tuple[int, asyncio.Future[None], Party]] = deque()

    @asynccontextmanager
    async def take(self, n: int) -> AsyncIterator[Party]:
        """Wait for `n` slots (all there are, for a larger group) and hold them within."""
        slots, turn = min(n, self._most), asyncio.get_running_loop().create_future()
        party = Party(self._rounds, n)
        self._waiting.append((slots, turn, party))
        self._let_in()
        try:
            await turn
            yield party
        finally:
            if not turn.cancelled():  # cancelled: whoever waited was given up
                self._taken -= slots
            self._let_in()
            if not turn.cancelled():
                party.end()

    def _let_in(self) -> None:
        while self._waiting and self._taken + self._waiting[0][0] <= self._most:
            slots, turn, party = self._waiting.popleft()
            if not turn.cancelled():
                self._taken += slots
                party.begin()
                turn.set_result(None)


async def play_all(
    play: RolloutSource,
    prompts: Sequence[Prompt],
    *,
    seeds: Sequence[int],
    n: int,
    params: SamplingParams,
    version: PolicyVersion,
) -> list[RolloutGroup]:
    """Begin all of them and wait for all: a group of `n` unscored rollouts for each prompt, in their order."""
    return await asyncio.gather(*play.begin(prompts, seeds=seeds, n=n, params=params, version=version))


async def together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results, in order. The first exception is raised once all others have been cancelled and are over."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def group_of(prompt: Prompt, completions_G: Sequence[Completion]) -> RolloutGroup:
    """Single-turn rollouts of an encoded prompt, unscored."""
    return RolloutGroup(
        prompt=prompt, rollouts=tuple(Rollout(turns=(Turn(prompt.token_ids, c),)) for c in completions_G)
    )
