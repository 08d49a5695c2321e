"""Reward functions in worker processes that can be killed: one that hangs or crashes costs only its group.

    with RewardPool(config.rewards, folder=config.folder, workers=4, timeout_s=60) as pool:
        scored = await score(groups, functions, pool=pool)

A worker is a fresh interpreter (never a fork of one with threads) that loads the functions by their references and
answers one call at a time; `workers` of them share the calls in the order in which these come. A call is one function
on one group, and is answered as soon as it is done. Async functions of all groups share one more worker, in whose event
loop they run concurrently.

The deadline of a call is `timeout_s` times the completions of its group, from when it begins. A worker that misses it,
or ends, is killed with all its descendants and replaced; the call fails with the cause and what was printed last. Where
an async worker is lost, the calls that were in it are each repeated alone, so that only the guilty one fails. A
function that did not answer three times running is not called again before `timeout_s` has passed: a batch in which
everything hangs ends, and is refused, after three deadlines and not after one per group.

What reward code prints is shown, line by line (`printed`); its stdin is empty. The workers and everything
that they started end with this process, also when it is killed with SIGKILL (see `rewards.sandbox_child`).
Functions that have no reference (given as Python objects) are not the pool's: `score` calls them in its own process.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from groupwise.errors import RewardError
from groupwise.rewards.base import reward_names
from groupwise.rewards.call import AT_START, FailureKind, GroupScores, RewardFunction, RewardSpec, TrainerState
from groupwise.rewards.pool_call import Patience, PooledCall
from groupwise.rewards.pool_worker import LoadRequest, ScoreRequest, decode_answer
from groupwise.rewards.workers import Lane, WorkerProcess

CLOSE_S = 10.0

TOGETHER = 256  # async calls in flight

GRACE_S = 2.0  # beyond its deadline, for an async function to be cancelled by its worker


class RewardPool:
    """Workers for the functions of `specs`; nothing is started before `warm` or the first call. Threads may share it,
    and so may event loops.

    `memory_mb` limits the address space of a worker (none by default: some libraries reserve much more than they use).
    Raises ConfigError for two equal names.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        *,
        folder: str | Path | None = None,
        workers: int = 1,
        timeout_s: float = 60.0,
        memory_mb: int | None = None,
    ):
        if workers < 1 or timeout_s <= 0:
            raise ValueError(f"workers is {workers} and timeout_s {timeout_s}; both must be positive")
        self.timeout_s = timeout_s
        self._specs = dict(zip(reward_names(specs), specs, strict=True))
        self._setup = {
            "specs": [LoadRequest.of(each) for each in specs],
            "folder": None if folder is None else str(folder),
        }
        self._memory_mb = memory_mb
        self._numbers = itertools.count()
        self._patience = Patience(timeout_s)
        self._closed = False
        self._lock = threading.Lock()
        self._alone: deque[PooledCall] = deque()
        self._together: deque[PooledCall] = deque()
        self._alone_lanes = [self._lane(self._alone, together=False) for _ in range(workers)]
        self._together_lane = self._lane(self._together, together=True)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def runs(self, function: RewardFunction) -> bool:
        """Return whether the pool runs this function."""
        return function.spec is not None and self._specs.get(function.name) == function.spec

    def warm(self, functions: Sequence[RewardFunction] = ()) -> None:
        """Start the workers that `functions` (those of `load_rewards`) will need, without waiting for them."""
        if not functions or not all(each.is_async for each in functions):
            self._start(self._alone_lanes)
        if any(each.is_async for each in functions):
            self._start([self._together_lane])

    async def call(
        self,
        function: RewardFunction,
        columns: Mapping[str, list[Any]],
        *,
        size: int,
        prompt_id: str,
        state: TrainerState = AT_START,
    ) -> GroupScores:
        """Return the function's values for one group of `size` completions; failures are values, too.

        `columns` is what `RewardFunction.accepted` let through. Raises RewardError if the pool is closed.
        """
        try:
            data = pickled(function, columns)
        except RewardError as error:
            return GroupScores.failed(error.message, FailureKind.EXCEPTION, size)
        return await self.answer(
            function.name, data, size=size, prompt_id=prompt_id, state=state, together=function.is_async
        )

    async def answer(
        self, name: str, columns: bytes, *, size: int, prompt_id: str, state: TrainerState, together: bool
    ) -> GroupScores:
        """Call the function `name` on pickled `columns` and return its scores; `together` says that it is async."""
        request = ScoreRequest(
            number=next(self._numbers),
            name=name,
            columns=columns,
            size=size,
            prompt_id=prompt_id,
            state=state,
            deadline_s=self.timeout_s * size,
        )
        call = PooledCall(request, Future(), self._patience, self._submit_alone if together else None)
        self._submit(call, together=together)
        return await asyncio.wrap_future(call.future)

    def close(self, *, timeout_s: float = CLOSE_S) -> None:
        """Kill the workers with all that they started. Calls that are waited for fail. Returns within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
        lanes = [*self._alone_lanes, self._together_lane]
        for lane in lanes:
            lane.stop()
        for lane in lanes:
            if lane.ident is not None:
                lane.join(max(0.0, deadline - time.monotonic()))
        for call in (*self._alone, *self._together):
            call.fail("was not called: the pool was closed", FailureKind.CRASH)

    def _lane(self, waiting: deque[PooledCall], *, together: bool) -> Lane:
        setup = {**self._setup, "together": together}
        worker = WorkerProcess("groupwise.rewards.pool_worker", setup, memory_mb=self._memory_mb, decode=decode_answer)
        grace_s = GRACE_S if together else 0.0
        return Lane(worker, waiting, capacity=TOGETHER if together else 1, grace_s=grace_s)

    def _submit(self, call: PooledCall, *, together: bool) -> None:
        lanes = [self._together_lane] if together else self._alone_lanes
        self._start(lanes)
        (self._together if together else self._alone).append(call)
        for lane in lanes:
            lane.wake()

    def _submit_alone(self, call: PooledCall) -> None:
        call.again = None
        try:
            self._submit(call, together=False)
        except RewardError as error:
            call.fail(f"was not called: {error.message}", FailureKind.CRASH)

    def _start(self, lanes: Sequence[Lane]) -> None:
        with self._lock:
            if self._closed:
                raise RewardError("the reward pool is closed", hint="make another, or keep it open for the whole run")
            for lane in lanes:
                if lane.ident is None:
                    lane.start()


def pickled(function: RewardFunction, columns: Mapping[str, list[Any]]) -> bytes:
    """Return the columns of a call, to be sent. Raises RewardError for what pickle does not take."""
    try:
        return pickle.dumps(dict(columns))
    except Exception as error:
        cause = f"reward {function.name!r}: its columns cannot be sent to a worker: {type(error).__name__}: {error}"
        raise RewardError(cause) from error
