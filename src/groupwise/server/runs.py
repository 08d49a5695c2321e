"""The routes of `groupwise ui`: runs on disk, read as they are written. Nothing is changed by any of them.

GET /v1/runs, /v1/runs/{run}          how far each is; one with its configuration
GET /v1/runs/{run}/metrics            its steps, or those behind a cursor
GET /v1/runs/{run}/health             what is going wrong in it
GET /v1/runs/{run}/evaluations        what it changed on the held-out prompts
GET /v1/runs/{run}/rollouts[/{id}]    its completions, in pages; and the group of one
GET /v1/runs/{run}/images/{digest}    an image of its prompts
GET /v1/diff                          where configurations and held-out rewards differ
GET /v1/metrics/definitions           what each metric means (groupwise.server.findings)
GET /v1/events, /v1/events/{run}      the list whenever it changes; a run's metrics while it is in progress
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from groupwise.errors import GroupwiseError, RequestError
from groupwise.server.event_stream import following, sse
from groupwise.server.findings import told
from groupwise.server.kept_images import ImageNotFoundError, shown_image
from groupwise.server.run_files import RecordPage, RunFiles
from groupwise.server.run_pairs import against
from groupwise.server.run_rollouts import SampleQuery, change_of, facets, group, page, prompt_id, sorted_page
from groupwise.server.schema_rollouts import MOST_ROWS, RolloutFacets, RolloutNotFoundError, RolloutPage, Sort
from groupwise.server.schema_runs import (
    RunDetail,
    RunDiff,
    RunEvaluations,
    RunHealth,
    RunList,
    RunMetrics,
    RunRolloutGroup,
)
from groupwise.server.wire import documented
from groupwise.store.rundir import IMAGES

POLL_S = 0.5

RUN_PREFIX = "/run"  # where a live server has the pages of its run

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
    """List every run that was opened, as it is now."""
    return await run_in_threadpool(_listed, _runs(request), request.app.state.served)


def _listed(runs: Mapping[str, RunFiles], served: str | None) -> RunList:
    return RunList(runs=[run.summary() for run in runs.values()], served=served)


@router.get("/runs/{run}", **documented(answer=RunDetail, errors=[RunNotFoundError]))
async def show_run(request: Request, run: str) -> RunDetail:
    """Show one run, with its configuration and its adapter versions."""
    return await run_in_threadpool(_run(request, run).detail)


@router.get("/runs/{run}/metrics", **documented(answer=RunMetrics, errors=[RunNotFoundError, RequestError]))
async def run_metrics(request: Request, run: str, after: Cursor = None) -> RunMetrics:
    """Return the metrics of each step so far, or only those after a cursor."""
    lines = await run_in_threadpool(_run(request, run).metrics.since, after)
    return RunMetrics(run=run, steps=[dict(record) for record in lines.records], next=lines.next, anew=lines.anew)


@router.get("/runs/{run}/health", **documented(answer=RunHealth, errors=[RunNotFoundError]))
async def run_health(request: Request, run: str) -> RunHealth:
    """Say what is going wrong in a run by its metrics, with the cause and the overrides to try."""
    return await run_in_threadpool(judged, _run(request, run))


def judged(run: RunFiles) -> RunHealth:
    """Return the answer of .../health."""
    report = run.health()
    return RunHealth(run=run.id, status=report.status, findings=told(report, lambda found: [*map(str, found.advice)]))


@router.get("/runs/{run}/evaluations", **documented(answer=RunEvaluations, errors=[RunNotFoundError]))
async def run_evaluations(request: Request, run: str) -> RunEvaluations:
    """Count the held-out prompts that got better and worse, with those whose reward changed most, before and after."""
    return await run_in_threadpool(change_of, _run(request, run))


@router.get("/diff", **documented(answer=RunDiff, errors=[RunNotFoundError]))
async def diff(request: Request, run: Annotated[list[str], Query(min_length=1, max_length=64)]) -> RunDiff:
    """Compare the named runs: their configurations, the keys in which these are not the same, and how the last held-out
    evaluation of each differs from that of the first, prompt by prompt."""
    return await run_in_threadpool(_differ, [_run(request, id) for id in dict.fromkeys(run)])


def _differ(runs: list[RunFiles]) -> RunDiff:
    configs = {run.id: run.values() for run in runs}
    keys = dict.fromkeys(key for config in configs.values() for key in config)
    return RunDiff(
        configs=configs,
        differs=[key for key in keys if len({json.dumps(c.get(key)) for c in configs.values()}) > 1],
        held_out=against(runs),
    )


# ---- completions ----
@router.get(
    "/runs/{run}/rollouts",
    **documented(answer=RolloutPage, errors=[RunNotFoundError, RolloutNotFoundError, RequestError]),
)
async def run_rollouts_page(
    request: Request,
    run: str,
    after: Annotated[int | None, Query(ge=0, le=2**62, description="The `next` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_ROWS)] = 200,
    step: Annotated[int | None, Query(ge=0, le=10**9, description="Of this step alone.")] = None,
    contains: Annotated[
        str | None, Query(max_length=500, description="Text of the prompt or the completion; case does not count.")
    ] = None,
    finish_reason: Annotated[Literal["stop", "length"] | None, Query(description="length: cut.")] = None,
    version: Annotated[str | None, Query(max_length=100)] = None,
    reward_min: float | None = None,
    reward_max: float | None = None,
    tag: Annotated[
        str | None, Query(max_length=500, pattern="^[^=]+=", description="name=value: a column of the prompt, as text.")
    ] = None,
    like: Annotated[
        str | None,
        Query(max_length=100, description="A rollout's id: only completions of the same prompt, at any step."),
    ] = None,
    sort: Annotated[
        Sort, Query(description="Other than newest reads all of it, which is refused of a large run without a step.")
    ] = "newest",
) -> RolloutPage:
    """List the completions that a run sampled, the newest step first."""
    found = _run(request, run)
    name, _, value = (tag or "").partition("=")
    wanted = SampleQuery(
        step=step,
        contains=contains,
        finish_reason=finish_reason,
        version=version,
        reward_min=reward_min,
        reward_max=reward_max,
        tag=None if tag is None else (name, value),
        prompt_id=None if like is None else await run_in_threadpool(prompt_id, found, like),
    )
    if sort == "newest":
        return await run_in_threadpool(page, found, wanted, after=after, limit=limit)
    return await run_in_threadpool(sorted_page, found, wanted, sort, after=after, limit=limit)


@router.get("/runs/{run}/rollouts/facets", **documented(answer=RolloutFacets, errors=[RunNotFoundError]))
async def count_run_rollouts(request: Request, run: str) -> RolloutFacets:
    """Count the steps, versions, ends and tags that a run's completions can be filtered by."""
    return await run_in_threadpool(facets, _run(request, run))


@router.get(
    "/runs/{run}/rollouts/{id}", **documented(answer=RunRolloutGroup, errors=[RunNotFoundError, RolloutNotFoundError])
)
async def run_rollout(request: Request, run: str, id: str) -> RunRolloutGroup:
    """Show the group of a rollout: every completion of its prompt, token by token, with the parts of its reward."""
    return await run_in_threadpool(group, _run(request, run), id)


_SHOWN = documented(errors=[RunNotFoundError, ImageNotFoundError])
_SHOWN["responses"][200] = {"description": "The file, as the run keeps it.", "content": {"image/*": {}}}


@router.get("/runs/{run}/images/{digest}", **_SHOWN)
async def run_image(request: Request, run: str, digest: str) -> Response:
    """Return an image of a run's prompts, by the SHA-256 of its file, as its rollouts name it."""
    folder = _run(request, run).directory / IMAGES
    return await run_in_threadpool(shown_image, folder, digest, hint="GET .../rollouts/{id} names a prompt's images")


# ---- as it happens ----
@router.get("/events", **documented(streams=True))
async def live(request: Request) -> Response:
    """Send the list of runs as server-sent events, at once and whenever it is another one: the `event` is `runs`, and
    its data the answer of /v1/runs."""
    return following(_follow_all(_runs(request), request.app.state.served))


_FOLLOWED = documented(errors=[RunNotFoundError, RequestError], streams=True)

_FOLLOWED["responses"][204] = {"description": "The run does not go on, and nothing comes behind this cursor."}


@router.get("/events/{run}", **_FOLLOWED)
async def follow(
    request: Request,
    run: str,
    after: Cursor = None,
    last_event_id: Annotated[str | None, Header(description="As `after`; an EventSource sends it by itself.")] = None,
) -> Response:
    """Send a run's metrics as they are written, as server-sent events; the stream ends when the run does.

    Each event has the cursor behind it as its `id` and the answer of /v1/runs/{run}/metrics as its data."""
    files = _run(request, run)
    after = last_event_id or after
    going, lines = await run_in_threadpool(_look, files, after)
    if not going and not lines.records:
        return Response(status_code=204)
    return following(_follow(files, after))


def _look(run: RunFiles, after: str | None) -> tuple[bool, RecordPage]:
    """Return state and lines. The state is read first: if the run has ended by then, the lines are all there will
    be."""
    return run.is_running(), run.metrics.since(after)


async def _follow(run: RunFiles, after: str | None) -> AsyncGenerator[bytes, None]:
    while True:
        going, lines = await run_in_threadpool(_look, run, after)
        if lines.records or lines.next != after:
            after = lines.next
            data = {"run": run.id, "steps": lines.records, "next": lines.next, "anew": lines.anew}
            yield sse(_json(data), id=lines.next)
        if not going:
            return
        yield b""
        await asyncio.sleep(POLL_S)


async def _follow_all(runs: Mapping[str, RunFiles], served: str | None) -> AsyncGenerator[bytes, None]:
    before = ""
    while True:
        now = (await run_in_threadpool(_listed, runs, served)).model_dump_json()
        if now != before:
            before = now
            yield sse(now, event="runs")
        yield b""
        await asyncio.sleep(POLL_S)


def _json(data: Any) -> str:
    return json.dumps(data, allow_nan=False)
