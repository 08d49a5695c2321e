"""The routes of `groupwise ui`: runs on disk, read as they are written. Nothing is changed by any of them.

GET /v1/runs, /v1/runs/{run}          how far each is; one with its configuration
GET /v1/runs/{run}/metrics            its steps, or those behind a cursor
GET /v1/runs/{run}/health             what is going wrong in it
GET /v1/runs/{run}/rollouts[/{id}]    its completions, in pages; and the group of one
GET /v1/diff                          where configurations differ
GET /v1/events, /v1/events/{run}      the list whenever it changes; a run's metrics while it goes on
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from groupwise.errors import GroupwiseError, RequestError
from groupwise.server import run_rollouts
from groupwise.server.events import following
from groupwise.server.findings import told
from groupwise.server.protocol_rollouts import MOST_ROWS, RolloutGroup, RolloutNotFoundError, RolloutPage
from groupwise.server.protocol_runs import RunDetail, RunDiff, RunHealth, RunList, RunMetrics
from groupwise.server.run_files import Lines, RunFiles
from groupwise.server.run_rollouts import Wanted
from groupwise.server.wire import documented

POLL_S = 0.5

router = APIRouter(prefix="/v1", tags=["runs"])
Cursor = Annotated[str | None, Query(max_length=64, description="The `next` of an answer before.")]


class RunNotFoundError(GroupwiseError, LookupError):
    """No run of this id was opened."""

    code, status, exit_code = "run_not_found", 404, 2


def _runs(request: Request) -> Mapping[str, RunFiles]:
    return request.app.state.runs


def _run(request: Request, id: str) -> RunFiles:
    runs = _runs(request)
    if id not in runs:
        raise RunNotFoundError(f"there is no run {id[:64]!r} here", hint="GET /v1/runs lists those that were opened")
    return runs[id]


# ---- runs ----
@router.get("/runs", **documented(answer=RunList))
async def list_runs(request: Request) -> RunList:
    """Every run that was opened, as it is now."""
    return await run_in_threadpool(_listed, _runs(request))


def _listed(runs: Mapping[str, RunFiles]) -> RunList:
    return RunList(runs=[run.summary() for run in runs.values()])


@router.get("/runs/{run}", **documented(answer=RunDetail, errors=[RunNotFoundError]))
async def show_run(request: Request, run: str) -> RunDetail:
    """One run, with its configuration and its adapter versions."""
    return await run_in_threadpool(_run(request, run).detail)


@router.get("/runs/{run}/metrics", **documented(answer=RunMetrics, errors=[RunNotFoundError, RequestError]))
async def run_metrics(request: Request, run: str, after: Cursor = None) -> RunMetrics:
    """What was recorded of each step so far, or only what came behind a cursor."""
    lines = await run_in_threadpool(_run(request, run).metrics.since, after)
    return RunMetrics(run=run, steps=[dict(record) for record in lines.records], next=lines.next, anew=lines.anew)


@router.get("/runs/{run}/health", **documented(answer=RunHealth, errors=[RunNotFoundError]))
async def run_health(request: Request, run: str) -> RunHealth:
    """What is going wrong in a run by its metrics, with the cause and the overrides to try."""
    return await run_in_threadpool(_judged, _run(request, run))


def _judged(run: RunFiles) -> RunHealth:
    report = run.health()
    return RunHealth(run=run.id, status=report.status, findings=told(report, lambda found: [*map(str, found.advice)]))


@router.get("/diff", **documented(answer=RunDiff, errors=[RunNotFoundError]))
async def diff(request: Request, run: Annotated[list[str], Query(min_length=1, max_length=64)]) -> RunDiff:
    """The configurations of the named runs, and the keys in which they are not the same."""
    return await run_in_threadpool(_differ, [_run(request, id) for id in dict.fromkeys(run)])


def _differ(runs: list[RunFiles]) -> RunDiff:
    configs = {run.id: run.values() for run in runs}
    keys = dict.fromkeys(key for config in configs.values() for key in config)
    return RunDiff(
        configs=configs, differs=[key for key in keys if len({json.dumps(c.get(key)) for c in configs.values()}) > 1]
    )


# ---- completions ----
@router.get("/runs/{run}/rollouts", **documented(answer=RolloutPage, errors=[RunNotFoundError, RequestError]))
async def run_rollouts_page(
    request: Request,
    run: str,
    after: Annotated[int | None, Query(ge=0, le=2**62, description="The `next` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_ROWS)] = 200,
    step: Annotated[int | None, Query(ge=0, le=10**9, description="Of this step alone.")] = None,
    contains: Annotated[str | None, Query(max_length=500, description="Text of the completion.")] = None,
    finish_reason: Annotated[Literal["stop", "length"] | None, Query(description="length: cut.")] = None,
    version: Annotated[str | None, Query(max_length=100)] = None,
    reward_min: float | None = None,
    reward_max: float | None = None,
) -> RolloutPage:
    """The completions that a run sampled, the newest step first."""
    wanted = Wanted(
        step=step,
        contains=contains,
        finish_reason=finish_reason,
        version=version,
        reward_min=reward_min,
        reward_max=reward_max,
    )
    found = _run(request, run)
    return await run_in_threadpool(run_rollouts.page, found, wanted, after=after, limit=limit)


@router.get(
    "/runs/{run}/rollouts/{id}", **documented(answer=RolloutGroup, errors=[RunNotFoundError, RolloutNotFoundError])
)
async def run_rollout(request: Request, run: str, id: str) -> RolloutGroup:
    """The group of a rollout: every completion of its prompt, token by token, with the parts of its reward."""
    return await run_in_threadpool(run_rollouts.group, _run(request, run), id)


# ---- as it happens ----
@router.get("/events", **documented(streams=True))
async def live(request: Request) -> Response:
    """The list of runs as server-sent events, at once and whenever it is another one: the `event` is `runs`, and its
    data the answer of /v1/runs."""
    return following(_follow_all(_runs(request)))


_FOLLOWED = documented(errors=[RunNotFoundError, RequestError], streams=True)
_FOLLOWED["responses"][204] = {"description": "The run does not go on, and nothing comes behind this cursor."}


@router.get("/events/{run}", **_FOLLOWED)
async def follow(
    request: Request,
    run: str,
    after: Cursor = None,
    last_event_id: Annotated[str | None, Header(description="As `after`; an EventSource sends it by itself.")] = None,
) -> Response:
    """A run's metrics as they are written, as server-sent events; the stream ends when the run does.

    Each event has the cursor behind it as its `id` and the answer of /v1/runs/{run}/metrics as its data."""
    files = _run(request, run)
    after = last_event_id or after
    going, lines = await run_in_threadpool(_look, files, after)
    if not going and not lines.records:
        return Response(status_code=204)
    return following(_follow(files, after))


def _look(run: RunFiles, after: str | None) -> tuple[bool, Lines]:
    """The state is read first: if the run has ended by then, the lines are all there will be."""
    return run.is_running(), run.metrics.since(after)


async def _follow(run: RunFiles, after: str | None) -> AsyncGenerator[bytes, None]:
    while True:
        going, lines = await run_in_threadpool(_look, run, after)
        if lines.records or lines.next != after:
            after = lines.next
            data = {"run": run.id, "steps": lines.records, "next": lines.next, "anew": lines.anew}
            yield f"id: {lines.next}\ndata: {_json(data)}\n\n".encode()
        if not going:
            return
        yield b""
        await asyncio.sleep(POLL_S)


async def _follow_all(runs: Mapping[str, RunFiles]) -> AsyncGenerator[bytes, None]:
    before = ""
    while True:
        now = (await run_in_threadpool(_listed, runs)).model_dump_json()
        if now != before:
            before = now
            yield f"event: runs\ndata: {now}\n\n".encode()
        yield b""
        await asyncio.sleep(POLL_S)


def _json(data: Any) -> str:
    return json.dumps(data, allow_nan=False)
