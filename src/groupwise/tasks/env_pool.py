"""Environments in worker processes that can be killed: one that hangs or crashes costs only its own episode.

    pool = EnvPool(config.env, name="Shop", folder=config.folder)           `tasks.rollout_sources.Environments`
    env = await pool.make();  await env.reset(case, seed);  await env.step(message);  ...  await env.close()

Each of `env.workers` processes has many episodes, which stay where they began. Of the ways to go wrong

    a method takes too long     its episode fails; its thread cannot be ended, so the process takes no new episodes, and
                                is ended when those that it has are over
    the process ends, or hangs  it is killed and replaced. The episodes that it had are played again elsewhere, up to
                                where they were: `reset` and every `step`, which must come out as before

Whose doing it was is found out: the episodes of which a method was being run are played again each in a process of its
own, and one that does it there as well fails. (Where it is everybody's, this is not asked: they fail.) An episode that
does not come out as before fails too: what happens in it depends on more than its case, its seed and the replies.

What environments print is shown (`rewards.printed`), and the end of it is in the cause when a process is lost. The
processes and everything that they started end with this one (see `workers`).
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.config.run import EnvConfig
from groupwise.errors import EnvError
from groupwise.rewards.workers import START_S, Lane, Loss, WorkerProcess
from groupwise.tasks.env import MoveResult, Observation, StepResult
from groupwise.tasks.env_worker import HostRequest, decode_answer

GRACE_S = 1.0  # beyond the time of a method, for its process to give it up by itself
AGAIN = 3  # times that an episode is played again
PATIENCE = 8  # episodes one after another that lost their processes, after which it is not asked whose doing it was
PATIENCE_S = START_S + 60.0  # for a process to be started, and an episode to be played again


class _Gone(Exception):
    """The process of the episode was lost, as `error` says. `suspect`: this episode may have caused it; `found`: it
    did."""

    def __init__(self, error: EnvError, *, suspect: bool = False, found: bool = False):
        super().__init__(error)
        self.error, self.suspect, self.found = error, suspect, found


class EnvPool:
    """`tasks.rollout_sources.Environments` over `config.workers` processes, started when it is made. Call `close` when
    done."""

    patience_s = PATIENCE_S

    def __init__(self, config: EnvConfig, *, name: str, folder: str | Path | None = None, players: Sequence[str] = ()):
        self.name, self.players = name, tuple(players)
        self._config = config
        self._setup = {"env": HostRequest.of(config), "folder": None if folder is None else str(folder)}
        self._numbers = itertools.count()
        self._closed = False
        self._retired: set[_EnvProcess] = set()
        self._alone: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._found = 0  # episodes that lost their processes, one after another without an answer of any other
        self._processes = [self._process() for _ in range(config.workers)]

    async def make(self) -> PooledEnv:
        """Return an environment for one episode; the user's instance is made in a worker process at `reset`."""
        return PooledEnv(self)

    def close(self) -> None:
        """Kill the processes with all that they started."""
        self._closed = True
        for process in (*self._processes, *self._retired):
            process.lane.stop()
        for process in (*self._processes, *self._retired):
            process.lane.join(timeout=10.0)

    # -- for PooledEnv -------------------------------------------------------------------------------------------------

    def enter(self) -> _EnvProcess:
        """Return the process with the fewest episodes, which has one more."""
        process = min(self._processes, key=lambda each: each.episodes)
        process.episodes += 1
        return process

    async def enter_alone(self) -> _EnvProcess | None:
        """Return a process for one episode, as many at once as there are others; None where it is not worth finding out
        whose doing the loss of a process was, since it is everybody's."""
        loop = asyncio.get_running_loop()
        if self._alone is None or self._alone[0] is not loop:
            self._alone = loop, asyncio.Semaphore(self._config.workers)
        slots = self._alone[1]
        await slots.acquire()
        if not self._patient:
            slots.release()
            return None
        process = self._process(slots.release)
        self._retired.add(process)
        process.episodes = 1
        return process

    def leave(self, process: _EnvProcess) -> None:
        """Take note that an episode in this process is over; a retired process ends with its last episode."""
        process.episodes -= 1
        if process.left is not None:
            process.left()
        if process in self._retired and not process.episodes:
            self._retired.discard(process)
            process.lane.stop()

    def retire(self, process: _EnvProcess) -> None:
        """Give the process no new episodes, as a thread in it hangs and cannot be ended."""
        if process in self._processes and not self._closed:
            self._processes[self._processes.index(process)] = self._process()
            self._retired.add(process)
            if not process.episodes:
                process.episodes = 1
                self.leave(process)

    def answered(self) -> None:
        """Take note that an environment answered."""
        self._found = 0

    def found(self) -> None:
        """Note that an episode was found to be the cause of a lost process."""
        self._found += 1

    def number(self) -> int:
        """Return a fresh number for an episode or a call."""
        return next(self._numbers)

    @property
    def limit_s(self) -> float:
        """Return the seconds that a method may take."""
        return self._config.step_timeout_s

    @property
    def _patient(self) -> bool:
        return self._found < PATIENCE

    def _process(self, left: Callable[[], None] | None = None) -> _EnvProcess:
        worker = WorkerProcess("groupwise.tasks.env_worker", self._setup, decode=decode_answer)
        waiting: deque[_Call] = deque()
        lane = Lane(worker, waiting, capacity=2 * self._config.concurrency, grace_s=GRACE_S)
        process = _EnvProcess(lane, waiting, left)
        process.lane.start()
        return process


@dataclass(eq=False)
class _EnvProcess:
    """A process, what its lane is to call next, and how many episodes it has. `left` is there if it is for one only,
    and is called when that is over."""

    lane: Lane
    waiting: deque[_Call]
    left: Callable[[], None] | None = None
    episodes: int = 0


@dataclass(eq=False)
class _Call:
    """A call of one method of one episode's environment, for `workers.Lane`."""

    number: int
    message: bytes
    deadline_s: float
    what: str
    alone: bool  # no other episode was ever in the process: what ends it is this episode's doing
    future: Future[dict[str, Any]]

    def begins(self) -> bool:
        return self.future.set_running_or_notify_cancel()

    def answered(self, answer: dict[str, Any], printed: Callable[[], str]) -> None:
        self._settle(self.future.set_result, answer)

    def unstarted(self, why: str) -> None:
        error = EnvError(f"{self.what} could not be called: {why}", field=self.what)
        self._settle(self.future.set_exception, error)

    def lost(self, loss: Loss) -> None:
        how = f"took longer than {self.deadline_s:g} s" if loss.late else loss.cause
        suspect = loss.late or not loss.killed  # else it was killed for another's sake
        kind = "timeout" if loss.late else None
        error = EnvError(f"{self.what} {how}{loss.printed}", field=self.what, kind=kind)
        self._settle(self.future.set_exception, _Gone(error, suspect=suspect, found=suspect and self.alone))

    def closed(self) -> None:
        error = EnvError(f"{self.what} was not answered: the environments are closed", field=self.what)
        self._settle(self.future.set_exception, error)

    def _settle(self, settle: Callable[[Any], None], value: Any) -> None:
        with suppress(InvalidStateError):  # the caller no longer waits
            settle(value)


class PooledEnv:
    """An environment in a process of the pool's, as the episode that plays it sees it. Raises EnvError."""

    def __init__(self, pool: EnvPool):
        self._pool, self._episode = pool, pool.number()
        self._process: _EnvProcess | None = None
        self._suspected: EnvError | None = None  # for a process whose loss may have been this episode's doing
        self._said: list[tuple[str, tuple[Any, ...], bytes]] = []  # method, arguments, digest of what came of it

    async def reset(self, case: Mapping[str, Any], seed: int) -> Observation | dict[str, Observation]:
        value = await self._ask("reset", dict(case), seed)
        if self._pool.players:
            return {player: _observation(told) for player, told in value.items()}
        return _observation(value)

    async def step(self, *said: Any) -> StepResult | MoveResult:
        value = await self._ask("step", *said)
        if self._pool.players:
            return MoveResult(**value)
        return StepResult(**{**value, "messages": tuple(value["messages"])})

    async def score(self, said: Any) -> float | dict[str, float] | None:
        return await self._ask("score", said)

    async def close(self) -> None:
        """End the episode. One whose process is lost has nothing left to close."""
        process = self._process
        if process is None:
            return
        try:
            await self._call(process, "close", ())
        except _Gone:
            pass
        finally:
            self._leave()

    async def _ask(self, method: str, *args: Any) -> Any:
        """Return what the method returns, wherever the episode has to be played for it."""
        for _ in range(1 + AGAIN):
            try:
                if self._process is None:
                    await self._enter()
                assert self._process is not None
                value = await self._call(self._process, method, args)
            except _Gone as gone:
                self._leave()
                if gone.found:
                    self._pool.found()
                    raise gone.error from None
                if gone.suspect:
                    self._suspected = gone.error
            else:
                self._pool.answered()
                self._said.append((method, args, _digest(value)))
                return value
        name = self._pool.name
        raise EnvError(f"{name}: the processes that had this episode were lost {AGAIN + 1} times", field=name)

    async def _enter(self) -> None:
        """Have a process, and in it the episode as far as it was."""
        pool = self._pool
        self._process = pool.enter() if self._suspected is None else await pool.enter_alone()
        if self._process is None:
            assert self._suspected is not None
            raise self._suspected
        for method, args, came in self._said:
            if _digest(await self._call(self._process, method, args)) != came:
                raise EnvError(
                    f"{pool.name}: the process that had this episode was lost, and played again {method} came out "
                    "otherwise",
                    hint="draw what is random from the case or the seed, and keep state on self",
                    field=pool.name,
                )

    def _leave(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            self._pool.leave(process)

    async def _call(self, process: _EnvProcess, method: str, args: tuple[Any, ...]) -> Any:
        """Make one call there. Raises _Gone, or EnvError for what the environment did."""
        pool, number = self._pool, self._pool.number()
        try:
            message = pickle.dumps((number, self._episode, method, pickle.dumps(args)))
        except Exception as error:
            where = f"{pool.name}.{method}"
            raise EnvError(f"{where}: what it gets cannot be sent: {error}", field=where) from error
        call = _Call(number, message, pool.limit_s, f"{pool.name}.{method}", process.left is not None, Future())
        process.waiting.append(call)
        process.lane.wake()
        answer = await asyncio.wrap_future(call.future)
        if answer.get("stuck"):
            pool.retire(process)
        if answer.get("gone"):
            raise _Gone(EnvError("the process was replaced"))
        if "error" in answer:
            raise EnvError(answer["error"], hint=answer.get("hint"), field=answer.get("field"), kind=answer.get("kind"))
        return answer["value"]


def _observation(value: Mapping[str, Any]) -> Observation:
    return Observation(messages=tuple(value["messages"]), tools=tuple(value["tools"]), state=value["state"])


def _digest(value: Any) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
