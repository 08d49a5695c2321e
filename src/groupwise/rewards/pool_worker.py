"""The worker process of a `RewardPool`: loads the functions, answers calls, and restores what a function changed.

Messages go over the inherited channel. The first is a pickled {"specs", "folder", "together"}; the worker answers with
{"ready": true} or {"failed": why}. Pickled calls follow; each is answered with JSON by `number`, perhaps after messages
with printed text. Pickle goes only from the parent to the worker.

With `together`, calls run concurrently, as tasks of one event loop. Without, they run one after another in the main
thread and outside any event loop, so that a function may use signals and `asyncio.run`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import pickle
import socket
import sys
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from groupwise.rewards.base import load_rewards
from groupwise.rewards.call import (
    Failure,
    FailureKind,
    FunctionCall,
    GroupScores,
    RewardFunction,
    RewardSpec,
    TrainerState,
)
from groupwise.rewards.printed import Prints
from groupwise.rewards.sandbox import Channel
from groupwise.rewards.workers import LONGEST_MESSAGE


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """A reward function to load: the fields of a `RewardConfig` that a worker needs. `RewardConfig` itself would have
    the worker import all that checks a configuration, which takes longer than the rest of its start."""

    function: str
    weight: float
    args: Mapping[str, Any]
    name: str | None

    @classmethod
    def of(cls, spec: RewardSpec) -> LoadRequest:
        return cls(function=spec.function, weight=spec.weight, args=spec.args, name=spec.name)


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """A call as it is sent: `columns` is pickled by itself, so that one that cannot be read spoils only its call."""

    number: int
    name: str
    columns: bytes
    size: int
    prompt_id: str
    state: TrainerState
    deadline_s: float


def encode_answer(number: int, answer: GroupScores) -> bytes:
    """Return an answer as JSON; `decode_answer` is the inverse."""
    values = [[each.kind, each.cause] if isinstance(each, Failure) else each for each in answer.values]
    return json.dumps({"number": number, "values": values, "logged": dict(answer.logged)}).encode()


def decode_answer(message: bytes) -> tuple[int, GroupScores]:
    data = json.loads(message)
    values = [Failure(each[1], FailureKind(each[0])) if isinstance(each, list) else each for each in data["values"]]
    return data["number"], GroupScores(values=values, logged=data["logged"])


def main(descriptor: int) -> None:
    """Serve the parent at the other end of this socket until it closes it."""
    channel, prints = Channel(socket.socket(fileno=descriptor), longest=LONGEST_MESSAGE), Prints()
    setup = pickle.loads(channel.receive())
    try:
        functions = {each.name: each for each in load_rewards(setup["specs"], folder=setup["folder"])}
    except BaseException as error:
        channel.send(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
        return
    channel.send(b'{"ready": true}')
    worker = RewardWorker(channel, functions, prints)
    with suppress(EOFError, BrokenPipeError):
        if setup["together"]:
            asyncio.run(worker.serve_together())
        else:
            worker.serve_one_by_one()


class RewardWorker:
    """The functions, the channel to the parent, and what the process was like before any of them was called."""

    def __init__(self, channel: Channel, functions: Mapping[str, RewardFunction], prints: Prints):
        self.channel = channel
        self.functions = functions
        self.prints = prints
        self.pid = os.getpid()
        self.surroundings = Surroundings()

    def serve_one_by_one(self) -> None:
        with asyncio.Runner() as runner:
            while True:
                request: ScoreRequest = pickle.loads(self.channel.receive())
                call = self._call(request)
                if isinstance(call, FunctionCall):
                    self._reply(request, self._answer_alone(call, request, runner))
                else:
                    self._reply(request, call)

    async def serve_together(self) -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        tasks: set[asyncio.Task[None]] = set()

        def read() -> None:
            try:
                request = pickle.loads(self.channel.receive())
            except EOFError:
                ended.set_result(None)
                loop.remove_reader(self.channel.socket)
                return
            tasks.add(task := loop.create_task(self._answer_together(request)))
            task.add_done_callback(tasks.discard)

        loop.add_reader(self.channel.socket, read)
        await ended

    def _call(self, request: ScoreRequest) -> FunctionCall | GroupScores:
        function = self.functions[request.name]
        try:
            columns = pickle.loads(request.columns)
        except Exception as error:
            cause = f"reward {request.name!r}: its columns cannot be read in a worker: {type(error).__name__}: {error}"
            return GroupScores.failed(cause, FailureKind.EXCEPTION, request.size)
        return FunctionCall(function, columns, size=request.size, prompt_id=request.prompt_id, state=request.state)

    def _answer_alone(self, call: FunctionCall, request: ScoreRequest, runner: asyncio.Runner) -> GroupScores:
        try:
            returned = call.begin()
            if inspect.isawaitable(returned):
                returned = runner.run(_within(returned, request.deadline_s))
        except BaseException as error:
            return _failed(call, error)
        return call.answer(returned)

    async def _answer_together(self, request: ScoreRequest) -> None:
        call = self._call(request)
        if isinstance(call, FunctionCall):
            try:
                answer = call.answer(await _within(call.begin(), request.deadline_s))
            except BaseException as error:
                answer = _failed(call, error)
        else:
            answer = call
        self._reply(request, answer)

    def _reply(self, request: ScoreRequest, answer: GroupScores) -> None:
        if os.getpid() != self.pid:
            os._exit(0)  # the function forked, and this is the child that it let continue
        self.surroundings.restore()
        if said := self.prints.message(f"reward {request.name}", whole="scoring.workers=0"):
            self.channel.send(said)
        self.channel.send(encode_answer(request.number, answer))


class _Late(Exception):
    """An async function did not end within its deadline, and was cancelled."""


async def _within(returned: Awaitable[Any], deadline_s: float) -> Any:
    limit = asyncio.timeout(deadline_s)
    try:
        async with limit:
            return await returned
    except TimeoutError:
        if limit.expired():
            raise _Late from None
        raise


def _failed(call: FunctionCall, error: BaseException) -> GroupScores:
    if isinstance(error, _Late):
        return GroupScores.failed("", FailureKind.TIMEOUT, call.size)  # the parent knows how to say it
    return call.failed(error)


class Surroundings:
    """The working directory and the standard streams, which a function may have changed or closed."""

    def __init__(self) -> None:
        self.directory = os.getcwd()
        self.descriptors = [os.dup(descriptor) for descriptor in range(3)]
        self.streams = [sys.stdin, sys.stdout, sys.stderr]

    def restore(self) -> None:
        """Put back what is not as it was."""
        os.chdir(self.directory)
        for descriptor, kept in enumerate(self.descriptors):
            with suppress(OSError):
                if os.path.sameopenfile(descriptor, kept):
                    continue
            os.dup2(kept, descriptor)
        for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
            if self.streams[number].closed:
                self.streams[number] = open(number, mode, closefd=False)  # noqa: SIM115, it stays open
            setattr(sys, name, self.streams[number])
