"""Makes groups of rollouts from prompts: completions (`SingleTurnRollouts`) or episodes (`EpisodeRollouts`).

The loop, evaluation and everything after them know only that a group comes back. Prompts that are begun together have
their first turns admitted together; the episodes of a group that see the same first prompt share it.

Each episode samples with its own seeds, (seed of the group, number of the episode, number of the turn), so that its
text does not depend on the other episodes under way. Only float rounding does: in another batch the log-probabilities
differ in their last bits. With `env.lockstep` turns are sampled in rounds, of all episodes together (`Lockstep`), and
then even the rounding does not depend on how long a tool took.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from groupwise.config.run import EnvConfig
from groupwise.model.chat import encode_prompt
from groupwise.sampler import Sampler
from groupwise.seeds import seed_of
from groupwise.tasks.episode import Player
from groupwise.tasks.structured import of_reply
from groupwise.types import (
    Completion,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    SamplingRequest,
    Turn,
    conversation_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


class RolloutSource(Protocol):
    """Makes groups of rollouts for prompts; one implementation for each kind of task."""

    def prepare(self, prompt: Prompt) -> Prompt:
        """Return the prompt as `begin` takes it. Raises ChatError, and ContextLengthError for one that is too long to
        be used."""
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
        """Return the prompt with its token ids."""
        return encode_prompt(prompt, self._tokenizer)

    def begin(
        self, prompts: Sequence[Prompt], *, seeds: Sequence[int], n: int, params: SamplingParams, version: PolicyVersion
    ) -> list[Awaitable[RolloutGroup]]:
        """See `RolloutSource.begin`."""
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
        """Return how it is drawn: in a chat a thought may come before what must be said; text is continued as it is."""
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
        """Return the prompt itself: what the policy is asked, `reset` says."""
        return prompt

    def begin(
        self, prompts: Sequence[Prompt], *, seeds: Sequence[int], n: int, params: SamplingParams, version: PolicyVersion
    ) -> list[Awaitable[RolloutGroup]]:
        """See `RolloutSource.begin`."""
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
            try:
                await together([player.begin() for player in players])
                first = await self._first_turns(players, seed=seed, params=params, version=version)
                played = [_played(each, said, party) for each, said in zip(players, first, strict=True)]
                rollouts = await together(played)
            finally:  # also those whose first turn failed, or was given up
                await asyncio.gather(*(player.close() for player in players))
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
            request = SamplingRequest(
                prompt_ids=prompt_ids,
                params=drawn,
                version=version,
                cache=self._cache,
                conversation=conversation_of(seed, number),
            )
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
        """Return the first turns of players that all see the same prompt, sampled as one group; else None for each."""
        begun = [player.transcript for player in players if player.transcript is not None]
        if len({each.prompt_ids for each in begun}) != 1 or len(begun) < len(players):
            return [None] * len(players)
        prompt_ids, tools = begun[0].prompt_ids, begun[0].tools
        most = min(params.max_tokens, self._config.max_tokens or params.max_tokens)
        if len(prompt_ids) >= self._sampler.context_length:
            return [None] * len(players)
        drawn = replace(of_reply(params, prompt_ids, self._tokenizer, tools=tools), max_tokens=most, seed=seed)
        request = SamplingRequest(
            prompt_ids=prompt_ids,
            params=drawn,
            n=len(players),
            version=version,
            cache=self._cache,
            conversation=conversation_of(seed),
        )
        return [*await self._sample(request)]

    async def _sample(self, request: SamplingRequest) -> list[Completion]:
        """Sample the completions of a turn, for as many episodes, in this round or at once."""
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
    """Return the columns of a prompt and, where it is a row of the configuration's `data`, what it asks as `prompt`."""
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
        """See `Sampler.submit`, in the next round; so many episodes wait for it."""
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
    """Settle `future` with the result of `other`; cancel `other` if `future` is cancelled."""

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
        """Take note that one of the episodes is over."""
        self._left += 1
        if self.rounds is not None and self._left < self.episodes:
            self.rounds.leave(1)

    def end(self) -> None:
        if self.rounds is not None:
            self.rounds.leave(self.episodes - min(self._left, self.episodes - 1))


class Slots:
    """Limits the episodes that run at the same time to `most`, for groups of any size. A group gets all its slots
    together, and groups take turns. In `rounds` the next group joins before the one before it leaves."""

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
            if not turn.cancelled():  # cancelled: the waiting caller was given up
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
    """Return the results, in order. The first exception is raised once all others have been cancelled and are over."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def group_of(prompt: Prompt, completions_G: Sequence[Completion]) -> RolloutGroup:
    """Return single-turn rollouts of an encoded prompt, unscored."""
    return RolloutGroup(
        prompt=prompt, rollouts=tuple(Rollout(turns=(Turn(prompt.token_ids, c),)) for c in completions_G)
    )
