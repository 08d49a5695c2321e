"""GET /v1/events: the server's state as server-sent events, for clients that would otherwise poll every second.

Each event is the answer of another route, sent at the beginning and whenever the answer changes:

    event: health       GET /v1/health
    event: decode       GET /v1/stats/decode
    event: requests     GET /v1/stats/recent-requests
    event: adapters     GET /v1/adapters
    event: jobs         GET /v1/train/status, then only the jobs that changed
    event: learn        GET /v1/learn

The stream is state, not history: events have no ids, and a client that reconnects gets the present state first. The
steps of a job are in its own stream, /v1/train/events/{job_id}.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

from fastapi import APIRouter, Response
from pydantic import TypeAdapter
from starlette.concurrency import run_in_threadpool

from groupwise.errors import GroupwiseError, JobNotFoundError
from groupwise.sdk.types import LearnAnswer
from groupwise.server import adapters, learn, train
from groupwise.server.adapters import AdapterParts, Adapters
from groupwise.server.admin import State, decode_stats, health_v1, recent_requests
from groupwise.server.event_stream import following, sse
from groupwise.server.learn import Learning, LearnParts
from groupwise.server.train import JobParts, Jobs
from groupwise.server.wire import documented
from groupwise.store.ledger import Job

router = APIRouter(tags=["Server"])

POLL_S = 0.5

REST = 20  # times as long as a look took it is until the next, if that is more: of thousands of adapters or jobs

NEWEST = 32  # jobs looked at besides those that have not ended: one may begin and end between two looks

ALWAYS_NEW = ("uptime_seconds", "elapsed_secs", "duration_secs")  # fields that say nothing when they change

JSON: TypeAdapter[Any] = TypeAdapter(Any)

Told = dict[str, Any]  # the last data of each event, without ALWAYS_NEW


@router.get("/v1/events", **documented(streams=True))
async def live(state: State, shelf: Adapters, jobs: Jobs, learn: Learning) -> Response:
    """Health, speed, the latest requests, adapters, jobs and learning from feedback, as server-sent events, whenever
    they change.

    The `event` is `health`, `decode`, `requests`, `adapters`, `jobs` or `learn`, and its data the answer of /v1/health,
    /v1/stats/decode, /v1/stats/recent-requests, /v1/adapters, /v1/train/status and /v1/learn; of jobs, after the first
    event, only those that changed. Who comes back is told everything again."""
    return following(_follow(state, _Shelf(shelf), _Jobs(jobs), _Learner(learn)))


async def _follow(state: State, shelf: _Shelf, jobs: _Jobs, learner: _Learner) -> AsyncGenerator[bytes, None]:
    told = Told()
    sources: dict[str, Callable[[], Awaitable[Any]]] = {
        "health": lambda: health_v1(state),
        "decode": lambda: decode_stats(state),
        "requests": lambda: recent_requests(state),
        "adapters": shelf.look,
        "jobs": jobs.look,
        "learn": learner.look,
    }
    due = dict.fromkeys(sources, 0.0)
    while state.supervisor.status.state != "stopped":  # then the server ends
        for name, look in sources.items():
            if (began := time.monotonic()) < due[name]:
                continue
            try:
                data = JSON.dump_python(await look(), mode="json", by_alias=True)
            except GroupwiseError:  # a ledger that is busy; the next look may succeed, and health says what is wrong
                continue
            due[name] = began + REST * (time.monotonic() - began)
            if data is not None and told.get(name) != (steady := _steady(data)):
                told[name] = steady
                yield sse(json.dumps(data, allow_nan=False), event=name)
        yield b""
        await asyncio.sleep(POLL_S)


def _steady(data: Any) -> Any:
    """Return what is compared: `data` without the clocks in it."""
    if isinstance(data, list):
        return [_steady(each) for each in data]
    return {k: v for k, v in data.items() if k not in ALWAYS_NEW} if isinstance(data, dict) else data


class _Shelf:
    """The adapters, read from the disk only when there are other versions or notes, or another one is active."""

    def __init__(self, parts: AdapterParts):
        self._parts = parts
        self._seen: object = None

    async def look(self) -> adapters.AdapterList | None:
        return await run_in_threadpool(self._read)

    def _read(self) -> adapters.AdapterList | None:
        store = self._parts.store
        versions = [version for name in store.names() for version in store.versions(name)]
        seen = (self._parts.policies.active, versions, store.notes())
        if seen == self._seen:
            return None
        found = adapters.list_adapters(self._parts)
        self._seen = seen
        return found


class _Learner:
    """Learning from feedback, read from the ledger only when there is other feedback, or something has happened."""

    def __init__(self, parts: LearnParts):
        self._parts = parts
        self._seen: object = None

    async def look(self) -> LearnAnswer | None:
        seen = await run_in_threadpool(self._state)
        if seen == self._seen:
            return None
        found = await learn.learning(self._parts)
        self._seen = seen
        return found

    def _state(self) -> object:
        parts, trainer = self._parts, self._parts.trainer
        reason = None if trainer is None else (trainer.reason, trainer.trainable)
        return parts.feedback.newest(), parts.policies.active, parts.policies.trial, reason


class _Jobs:
    """Watches the jobs of a server: reports all of them at first, then those that changed."""

    def __init__(self, parts: JobParts):
        self._parts, self._ledger = parts, parts.ledger
        self._known: dict[str, Job] | None = None

    async def look(self) -> Sequence[train.TrainStatus] | None:
        changed, known = await run_in_threadpool(self._changed)
        if self._known is None:
            told = await train.status_of_all(self._parts)
        else:
            told = await run_in_threadpool(train.statuses, self._parts, changed) or None
        self._known = known
        return told

    def _changed(self) -> tuple[list[Job], dict[str, Job]]:
        """Return the jobs that are not what they were, and all that are looked at."""
        before = self._known or {}
        jobs = {job.id: job for job in (*self._ledger.jobs(limit=NEWEST), *self._ledger.unfinished())}
        gone = (id for id in before.keys() - jobs.keys() if not before[id].state.is_final)
        left = [job for id in gone if (job := self._kept(id)) is not None]
        return [*(job for job in jobs.values() if before.get(job.id) != job), *left], jobs

    def _kept(self, id: str) -> Job | None:
        try:
            return self._ledger.job(id)
        except JobNotFoundError:  # forgotten meanwhile
            return None
