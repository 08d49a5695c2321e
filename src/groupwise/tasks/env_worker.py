"""The worker process of `env_pool`: hosts many episodes at once, with one environment instance for each.

`EnvHost` makes and calls them; a process of an `EnvPool` serves it to its parent, and an actor of Ray's is one.

Messages, over the channel that the process inherits: the first is a pickled {"env", "folder"}; it is answered with
{"ready": true} or {"failed": why}. Then come pickled (number, episode, method, arguments), each answered with JSON by
its number: {"value"} or {"error", "hint", "field", "kind"}, and {"stuck": true} once a method that took too long is
still being run. Calls run as tasks of one event loop; what is not async, in a thread of its episode's own.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from groupwise.errors import EnvError, GroupwiseError
from groupwise.pictures import Picture
from groupwise.rewards.printed import Prints
from groupwise.rewards.sandbox import Channel
from groupwise.rewards.workers import LONGEST_MESSAGE
from groupwise.tasks.env import (
    MoveResult,
    Observation,
    StepResult,
    move_result_of,
    observation_of,
    openings_of,
    reward_of,
    rewards_of,
    step_result_of,
)
from groupwise.tasks.env_loading import EnvFactory, load_factory
from groupwise.tasks.own_thread import OwnThread
from groupwise.tasks.tool_env import ToolEnv

if TYPE_CHECKING:
    from groupwise.config.run import EnvConfig


@dataclass(frozen=True, kw_only=True)
class HostRequest:
    """The fields of an `EnvConfig` that a worker needs. `EnvConfig` itself would have the worker import all that checks
    a configuration, which takes longer than the rest of its start."""

    environment: str | None
    args: Mapping[str, Any]
    max_characters: int
    step_timeout_s: float

    @classmethod
    def of(cls, config: EnvConfig) -> HostRequest:
        return cls(
            environment=config.environment,
            args=config.args,
            max_characters=config.max_characters,
            step_timeout_s=config.step_timeout_s,
        )


class EpisodeGone(EnvError):
    """The episode is not in this process: the one that had it was lost."""


class EnvHost:
    """Environments of `factory`, one for each episode, by its number. The methods raise EnvError, and but for `reset`
    and `close` EpisodeGone."""

    def __init__(self, config: HostRequest, factory: EnvFactory):
        self._config, self._factory = config, factory
        self._played: dict[int, _Played] = {}
        self.name = factory.name
        self.stuck = False  # a method that was given up is still being run

    async def reset(self, episode: int, case: Mapping[str, Any], seed: int) -> Observation | dict[str, Observation]:
        """Make the environment of a new episode, and begin it."""
        self._played[episode] = played = _Played(self, self._factory.name, self._config)
        await played.make(self._factory)
        value, limit = await played.call("reset", dict(case), seed), self._config.max_characters
        if players := self._factory.players:
            return openings_of(value, players, limit=limit)
        return observation_of(value, limit=limit)

    async def step(self, episode: int, *said: Any) -> StepResult | MoveResult:
        """Return the answer to what the policy said: a message, in a game after the name of its player."""
        value, limit = await self._of(episode).call("step", *said), self._config.max_characters
        if players := self._factory.players:
            return move_result_of(value, players, limit=limit)
        return step_result_of(value, limit=limit)

    async def score(self, episode: int, said: Any) -> float | dict[str, float] | None:
        """Return the result of `score`; None without such a method."""
        value, method = await self._of(episode).call("score", said), f"{self._factory.name}.score"
        if players := self._factory.players:
            return rewards_of(value, players, method)
        return None if value is None else reward_of(value, method)

    async def close(self, episode: int) -> None:
        """Let go of an episode, if it is here."""
        if (played := self._played.pop(episode, None)) is not None:
            await played.close()

    def _of(self, episode: int) -> _Played:
        if (played := self._played.get(episode)) is None:
            raise EpisodeGone("the environment worker that had this episode was lost")
        return played


class HostedEnv:
    """An environment of `host`, of the episode of this number, as what plays it sees it."""

    def __init__(self, host: EnvHost, episode: int):
        self._host, self._episode = host, episode

    async def reset(self, case: Mapping[str, Any], seed: int) -> Observation | dict[str, Observation]:
        return await self._host.reset(self._episode, case, seed)

    async def step(self, *said: Any) -> StepResult | MoveResult:
        return await self._host.step(self._episode, *said)

    async def score(self, said: Any) -> float | dict[str, float] | None:
        return await self._host.score(self._episode, said)

    async def close(self) -> None:
        await self._host.close(self._episode)


class _Played:
    """An environment and the thread in which its methods are called."""

    def __init__(self, host: EnvHost, name: str, config: HostRequest):
        self._host, self._name, self._limit_s = host, name, config.step_timeout_s
        self._env: Any = None
        self._thread = OwnThread()
        self._making: asyncio.Task[None] | None = None

    async def make(self, factory: EnvFactory) -> None:
        self._making = asyncio.create_task(self._make(factory))
        await self._making

    async def _make(self, factory: EnvFactory) -> None:
        self._env = await self._in_time(self._thread.make, factory.make, what=f"{self._name}()")
        if isinstance(self._env, ToolEnv):
            self._env.thread = self._thread

    async def call(self, method: str, *args: Any) -> Any:
        """Return a method's result; None if it does not exist."""
        what, function = f"{self._name}.{method}", getattr(self._env, method, None)
        if not callable(function):
            return None
        try:
            return await self._in_time(self._thread.call, function, *args, what=what)
        except GroupwiseError:
            raise
        except Exception as error:
            raise EnvError.raised(what, error) from error

    async def close(self) -> None:
        """Close the environment; one that is still being made, once it is."""
        if self._making is not None:
            self._making.cancel()
            await asyncio.wait([self._making])
        try:
            await self.call("close")
        finally:
            self._thread.close()

    async def _in_time(self, run: Callable[..., Awaitable[Any]], *args: Any, what: str) -> Any:
        try:
            return await run(*args, timeout_s=self._limit_s, what=what)
        except EnvError:
            self._host.stuck |= self._thread.busy
            raise


# ---- the process ----


def main(descriptor: int) -> None:
    """Serve the parent at the other end of this socket until it closes it."""
    channel, prints = Channel(socket.socket(fileno=descriptor), longest=LONGEST_MESSAGE), Prints()
    setup = pickle.loads(channel.receive())
    try:
        config: HostRequest = setup["env"]
        host = EnvHost(config, load_factory(config, folder=setup["folder"]))
    except BaseException as error:
        channel.send(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
        return
    channel.send(b'{"ready": true}')
    with suppress(EOFError, BrokenPipeError):
        asyncio.run(_CallServer(channel, host, prints).serve())
    os._exit(0)  # whatever threads are stuck in


class _CallServer:
    """Reads calls and answers them, as they end."""

    def __init__(self, channel: Channel, host: EnvHost, prints: Prints):
        self._channel, self._host, self._prints = channel, host, prints
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def read() -> None:
            try:
                message = self._channel.receive()
            except (EOFError, OSError):
                loop.remove_reader(self._channel.socket)
                ended.set_result(None)
                return
            self._tasks.add(task := loop.create_task(self._answer(message)))
            task.add_done_callback(self._tasks.discard)

        loop.add_reader(self._channel.socket, read)
        await ended

    async def _answer(self, message: bytes) -> None:
        number, episode, method, arguments = pickle.loads(message)
        try:
            values = pickle.loads(arguments)
            answer = {"value": encoded(await getattr(self._host, method)(episode, *values))}
        except EpisodeGone:
            answer = {"gone": True}
        except GroupwiseError as error:
            answer = {"error": error.message, "hint": error.hint, "field": error.field, "kind": error.kind}
        except BaseException as error:  # a case that cannot be unpickled here, or a result that is not JSON
            answer = {"error": f"{method}: {type(error).__name__}: {error}"}
        if said := self._prints.message(f"environment {self._host.name}", whole="env.workers=0"):
            self._channel.send(said)
        self._channel.send(json.dumps({"number": number, "stuck": self._host.stuck} | answer).encode())


def encoded(value: Any) -> Any:
    """Return the result of a method of the host as values for JSON. Raises EnvError for a value that cannot be
    written."""
    try:
        return json.loads(json.dumps(value, allow_nan=False, default=_plain))
    except (TypeError, ValueError) as error:
        raise EnvError(
            f"an answer cannot be sent: {error}", hint="messages, tools and info are what JSON has"
        ) from None


def _plain(value: Any) -> Any:
    """Observations and results as dicts, values of NumPy and of tensors of one element as Python's, mappings as dicts,
    pictures as data: URLs; anything else as its text."""
    if isinstance(value, Picture):
        return value.url
    if isinstance(value, Observation | StepResult | MoveResult):
        return asdict(value)
    if callable(item := getattr(value, "item", None)):
        return item()
    return dict(value) if isinstance(value, Mapping) else str(value)


def decode_answer(message: bytes) -> tuple[int, dict[str, Any]]:
    """Return the number of a call, and what came of it."""
    answer = json.loads(message)
    return answer.pop("number"), answer
