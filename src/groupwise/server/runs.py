"""The routes of `groupwise ui`: runs on disk, read as they are written. Nothing is changed by any of them.

GET /v1/runs, /v1/runs/{run}          how far each is; one with its configuration
GET /v1/runs/{run}/metrics            its steps, or those behind a cursor
GET /v1/runs/{run}/health             what is going wrong in it
GET /v1/runs/{run}/evaluations        what it changed on the held-out prompts
GET /v1/runs/{run}/rollouts[/{id}]    its completions, in pages; and the group of one
GET /v1/diff                          where configurations differ
GET /v1/metrics/definitions           what each metric means (groupwise.server.findings)
GET /v1/events, /v1/events/{run}      the list whenever it changes; a run's metrics while it goes on
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import re
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Header, Query, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse
from starlette.types import Receive, Scope, Send

from groupwise import __version__
from groupwise.config.run import parse_config
from groupwise.config.serve import ServeConfig
from groupwise.config.yaml import Document
from groupwise.errors import ConfigError, GroupwiseError, RequestError, StorageError
from groupwise.platform import is_locked
from groupwise.run.health import Report, examine
from groupwise.run.record import leaves
from groupwise.sdk.types import Answer
from groupwise.server.bodies import describe
from groupwise.server.connections import close_overdue, make_server
from groupwise.server.errors import add_handlers
from groupwise.server.findings import definitions_router, told
from groupwise.server.guard import Gate, Guard
from groupwise.server.listen import bind, url_of
from groupwise.server.metrics import Recorder
from groupwise.server.run_rollouts import SampleQuery, change_of, facets, group, page, prompt_id, sorted_page
from groupwise.server.sampling import following, sse
from groupwise.server.schema import (
    MOST_ROWS,
    RolloutFacets,
    RolloutNotFoundError,
    RolloutPage,
    RunDetail,
    RunDiff,
    RunEvaluations,
    RunHealth,
    RunList,
    RunMetrics,
    RunRolloutGroup,
    RunState,
    RunSummary,
    Sort,
)
from groupwise.server.ui import SAFETY, Web
from groupwise.server.wire import documented
from groupwise.store.rollouts import plain
from groupwise.store.rundir import CONFIG
from groupwise.store.tracking import METRICS
from groupwise.types import PolicyVersion

# ----------------------------------------------------------------------------------------------------------------------
# The directory of a run, read while somebody else may be writing it: its metrics as they grow, its state, its config.
#
#     MetricsFile    metrics.jsonl: what is behind a cursor; the cursor of a file that was replaced begins anew
#     RunFiles       one run
#     open_runs      the runs of several directories, each under an id of its own
#
# Only whole lines are read: what follows the last newline is being written, or torn. Nothing here writes or locks.
# ----------------------------------------------------------------------------------------------------------------------

FRESH_S = 60.0  # a run that was written to so lately goes on, wherever the process is that holds its lock
_LOCK = ".lock"
_CURSOR = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
_EVALUATED = re.compile(r"eval/([^/]+)/reward")

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RecordPage:
    """Records behind a cursor, the cursor behind them, and whether they replace all that came before."""

    records: tuple[Record, ...]
    next: str
    anew: bool


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """The last step, the last value of each metric, when the first line was written, and how many lines are none."""

    step: int
    last: Mapping[str, float]
    started: str | None
    damaged: int


class MetricsFile:
    """metrics.jsonl, of which each byte is read once. Cursors are "<inode>-<offset>"."""

    def __init__(self, path: Path):
        self._path, self._lock = path, threading.Lock()
        self._inode = self._offset = 0
        self._lines: list[tuple[int, Record]] = []  # (offset behind it, what it says)
        self._step = self._damaged = 0
        self._last: dict[str, float] = {}

    def since(self, after: str | None = None) -> RecordPage:
        """What came behind `after`; all without one. Raises RequestError for what is no cursor."""
        if after is not None and not _CURSOR.fullmatch(after):
            raise RequestError(
                f"after is {after[:64]!r}; it must be the `next` of an answer, or left out", field="after"
            )
        with self._lock:
            self._read_on()
            inode, offset = map(int, (after or "0-0").split("-"))
            goes_on = inode == self._inode and offset <= self._offset
            records = tuple(record for end, record in self._lines if not goes_on or end > offset)
            return RecordPage(records=records, next=f"{self._inode}-{self._offset}", anew=not goes_on)

    def standing(self) -> RunProgress:
        """How far it is."""
        with self._lock:
            self._read_on()
            started = self._lines[0][1]["time"] if self._lines else None
            return RunProgress(step=self._step, last=dict(self._last), started=started, damaged=self._damaged)

    def by_step(self) -> list[dict[str, Any]]:
        """A record a step; what was written twice counts as it was written last."""
        found: dict[int, dict[str, Any]] = {}
        for record in self.since().records:
            found[record["step"]] = {**found.get(record["step"], {}), **record}
        return [found[step] for step in sorted(found)]

    def _read_on(self) -> None:
        try:
            with self._path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self._forget(stat.st_ino)
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:  # a run that has just begun
            return self._forget(0)
        except OSError as error:
            raise StorageError.of(error, f"{self._path} cannot be read: {error.strerror}") from error
        for line in new[: new.rfind(b"\n") + 1].splitlines(keepends=True):
            self._offset += len(line)
            record = _record(line)
            if record is None:
                self._damaged += 1
            else:
                self._lines.append((self._offset, record))
                self._step = max(self._step, record["step"])
                self._last |= {key: value for key, value in record.items() if isinstance(value, int | float)}

    def _forget(self, inode: int) -> None:
        self._inode, self._offset, self._damaged, self._step = inode, 0, 0, 0
        self._lines.clear()
        self._last.clear()


def _record(line: bytes) -> Record | None:
    """A line as it may be sent: a number that is not finite is null. None for what is not a line of metrics."""
    try:
        raw = json.loads(line)
        record = {"step": int(raw["step"]), "time": str(raw["time"])}
        return record | {key: _number(raw[key]) for key in raw if key not in ("step", "time", "non_finite")}
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def _number(value: Any) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return value


class RunFiles:
    """One run. `id` is what the API calls it."""

    def __init__(self, directory: Path, *, id: str):
        self.directory, self.id = directory, id
        self.metrics = MetricsFile(directory / METRICS)

    def config(self) -> tuple[Mapping[str, Any], str | None]:
        """The configuration, and why it cannot be read, if so."""
        path = self.directory / CONFIG
        try:
            stat = path.stat()
            return _config(path, stat.st_mtime_ns, stat.st_size), None
        except (ConfigError, OSError) as error:
            return {}, f"{CONFIG} cannot be read: {getattr(error, 'message', error)}"

    def values(self) -> dict[str, Any]:
        """The configuration as JSON has it, under dotted names."""
        return plain(dict(leaves(self.config()[0])))

    def summary(self) -> RunSummary:
        """How far it is."""
        config, now = self.config()[0], self.metrics.standing()
        steps = _at(config, "train.steps", int)
        evaluated = ((_EVALUATED.fullmatch(key), value) for key, value in now.last.items())
        return RunSummary(
            run=self.id,
            directory=str(self.directory),
            name=_at(config, "name", str) or self.directory.name,
            model=_at(config, "model", str),
            state=self._state(now.step, steps),
            step=now.step,
            steps=steps,
            reward=now.last.get("reward/mean"),
            evaluated={match[1]: value for match, value in evaluated if match},
            seed=_at(config, "seed", int),
            started=now.started,
            updated=self._updated(),
        )

    def detail(self) -> RunDetail:
        """With the configuration, the versions, and what is wrong with the files."""
        problem, summary = self.config()[1], self.summary()
        notes = [problem] if problem else []
        if damaged := self.metrics.standing().damaged:
            notes.append(f"lines of {METRICS} that are no metrics, and are left out: {damaged}")
        return RunDetail(**summary.model_dump(), config=self.values(), versions=self._versions(), notes=notes)

    def health(self) -> Report:
        """What is wrong, or was; with overrides for this configuration, if it is one of this version."""
        config = self.config()[0]
        try:
            known = parse_config(config)
        except ConfigError:
            known = None
        return examine(self.metrics.by_step(), config=known)

    def kept_step(self) -> int | None:
        """The step of the version that the run keeps as its best (`eval.best`); None where it keeps the last."""
        mode = _at(self.config()[0], "eval.best", str)
        values = {line["step"]: line.get(f"eval/{mode}/reward") for line in self.metrics.by_step()}
        scored = {step: value for step, value in values.items() if value is not None}
        return max(scored, key=lambda step: scored[step]) if mode and scored else None

    def is_running(self) -> bool:
        return self.summary().state == "running"

    def _state(self, step: int, steps: int | None) -> RunState:
        whole = steps is not None and step >= steps
        if self._is_locked() or (not whole and time.time() - self._touched() < FRESH_S):
            return "running"
        return "finished" if whole else "stopped" if step else "empty"

    def _is_locked(self) -> bool:
        """Whether a process of this machine trains in the directory, as far as the kernel says."""
        return is_locked(self.directory / _LOCK)

    def _touched(self) -> float:
        times = [
            (self.directory / name).stat().st_mtime for name in (METRICS, CONFIG) if (self.directory / name).exists()
        ]
        return max(times, default=0.0)

    def _updated(self) -> str | None:
        touched = self._touched()
        return datetime.fromtimestamp(touched, UTC).isoformat(timespec="milliseconds") if touched else None

    def _versions(self) -> list[str]:
        found = [path for path in self.directory.glob("adapters/*/v*") if path.name[1:].isdigit()]
        return [f"{path.parent.name}@{int(path.name[1:])}" for path in sorted(found)]


@lru_cache(maxsize=64)
def _config(path: Path, changed: int, size: int) -> Mapping[str, Any]:
    """Read once for each state of the file."""
    return Document.read(path).data


def _at(config: Mapping[str, Any], dotted: str, kind: type) -> Any:
    """A value of the configuration; None where it has none of this kind."""
    value: Any = config
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, kind) else None


def is_run(directory: Path) -> bool:
    """Whether it is, or is about to become, the directory of a run."""
    return (directory / METRICS).is_file() or (directory / CONFIG).is_file()


def open_runs(directories: Sequence[Path]) -> dict[str, RunFiles]:
    """The runs by id: the shortest ends of their paths that tell them apart, with `~` for the slashes.

    Raises ConfigError for what is no run, and for one that is named twice.
    """
    for directory in directories:
        if not is_run(directory):
            raise ConfigError(f"{directory} is no run: it has neither {METRICS} nor {CONFIG}", hint=_meant(directory))
    paths = [directory.resolve() for directory in directories]
    twice = [str(path) for i, path in enumerate(paths) if path in paths[:i]]
    if twice:
        raise ConfigError(f"{twice[0]} is named twice", hint="name each run once")
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    ids = ["~".join(path.parts[-depth:]) for path in paths]
    return {id: RunFiles(path, id=id) for id, path in zip(ids, paths, strict=True)}


def _meant(directory: Path) -> str:
    if not directory.is_dir():
        return "there is no such directory; name a run's, such as runs/NAME-TIME"
    inside = sorted(path.name for path in directory.iterdir() if path.is_dir() and is_run(path))
    if not inside:
        return "name a run's directory, such as runs/NAME-TIME"
    return f"it holds the runs {', '.join(inside[-3:])}: name them, or all as {directory}/*"


# ----------------------------------------------------------------------------------------------------------------------
# The routes.
# ----------------------------------------------------------------------------------------------------------------------

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
    """Every run that was opened, as it is now."""
    return await run_in_threadpool(_listed, _runs(request), request.app.state.served)


def _listed(runs: Mapping[str, RunFiles], served: str | None) -> RunList:
    return RunList(runs=[run.summary() for run in runs.values()], served=served)


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
    return await run_in_threadpool(judged, _run(request, run))


def judged(run: RunFiles) -> RunHealth:
    """The answer of .../health."""
    report = run.health()
    return RunHealth(run=run.id, status=report.status, findings=told(report, lambda found: [*map(str, found.advice)]))


@router.get("/runs/{run}/evaluations", **documented(answer=RunEvaluations, errors=[RunNotFoundError]))
async def run_evaluations(request: Request, run: str) -> RunEvaluations:
    """How many held-out prompts got better and worse, with those whose reward changed most, before and after."""
    return await run_in_threadpool(change_of, _run(request, run))


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
    """The completions that a run sampled, the newest step first."""
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
    """The steps, versions, ends and tags that a run's completions can be filtered by."""
    return await run_in_threadpool(facets, _run(request, run))


@router.get(
    "/runs/{run}/rollouts/{id}", **documented(answer=RunRolloutGroup, errors=[RunNotFoundError, RolloutNotFoundError])
)
async def run_rollout(request: Request, run: str, id: str) -> RunRolloutGroup:
    """The group of a rollout: every completion of its prompt, token by token, with the parts of its reward."""
    return await run_in_threadpool(group, _run(request, run), id)


# ---- as it happens ----
@router.get("/events", **documented(streams=True))
async def live(request: Request) -> Response:
    """The list of runs as server-sent events, at once and whenever it is another one: the `event` is `runs`, and its
    data the answer of /v1/runs."""
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
    """A run's metrics as they are written, as server-sent events; the stream ends when the run does.

    Each event has the cursor behind it as its `id` and the answer of /v1/runs/{run}/metrics as its data."""
    files = _run(request, run)
    after = last_event_id or after
    going, lines = await run_in_threadpool(_look, files, after)
    if not going and not lines.records:
        return Response(status_code=204)
    return following(_follow(files, after))


def _look(run: RunFiles, after: str | None) -> tuple[bool, RecordPage]:
    """The state is read first: if the run has ended by then, the lines are all there will be."""
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


# ----------------------------------------------------------------------------------------------------------------------
# `groupwise ui`: the web interface over runs on disk. No model, no training, nothing that writes.
#
# build_run_app    runs -> a FastAPI application, guarded and documented as the live server's is
# WithRun          ... of one run, under /run of a live server
# serve_runs       ... on a port, until SIGTERM or Ctrl-C
# ----------------------------------------------------------------------------------------------------------------------

ABOUT = """Runs of `groupwise run`, read from their directories while they are written or after. Nothing is changed.

Every error is `{"error": {"message", "type", "param", "code", "hint"}}`; every answer has an `x-request-id`."""


class RunsHealth(Answer):
    """The answer of GET /health."""

    status: str
    version: str
    uptime_seconds: float


def build_run_app(
    runs: Mapping[str, RunFiles], config: ServeConfig, *, gate: Gate | None = None, served: str | None = None
) -> FastAPI:
    """Every route over these runs, behind the guard. Of `config` the address, the key and the limits count. `served` is
    the version that the live server beside it answers with."""
    began = time.time()
    app = FastAPI(title="Groupwise", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.runs, app.state.served = runs, served

    @app.get("/health", tags=["Server"], **documented(answer=RunsHealth))
    async def health() -> RunsHealth:
        """That the server lives."""
        return RunsHealth(status="ok", version=__version__, uptime_seconds=time.time() - began)

    app.include_router(router)
    app.include_router(definitions_router)
    add_handlers(app)
    describe(app, config)
    app.openapi()["info"]["description"] = ABOUT
    app.add_middleware(Guard, config=config, gate=gate or Gate("ready"), recorder=Recorder(model_name="runs"))
    app.add_middleware(Web)
    return app


class WithRun:
    """ASGI application: a live server, and under /run what `groupwise ui` shows of the run that it serves.

    Args:
        served: what the run's adapter is called in the server's store; None if it has published none.
    """

    def __init__(self, app: FastAPI, run_dir: Path, config: ServeConfig, *, gate: Gate, served: PolicyVersion | None):
        runs = open_runs([run_dir])
        answers = str(PolicyVersion.base() if served is None else served)
        self._app, self._run_app = app, build_run_app(runs, config, gate=gate, served=answers)
        (app.state.run,) = runs  # its pages and the server's lead to each other

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and path == RUN_PREFIX:
            answer = RedirectResponse(f"{RUN_PREFIX.lstrip('/')}/ui/", status_code=308, headers=SAFETY)
            return await answer(scope, receive, send)
        if scope["type"] == "http" and path.startswith(f"{RUN_PREFIX}/"):
            scope = {**scope, "path": path.removeprefix(RUN_PREFIX)}
            return await self._run_app(scope, receive, send)
        await self._app(scope, receive, send)


def serve_runs(runs: Mapping[str, RunFiles], config: ServeConfig, *, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. Raises StartError if the port is taken."""
    with bind(config.host, config.port) as listener:
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        gate = Gate("ready")
        server = make_server(build_run_app(runs, config, gate=gate), config)

        async def process() -> None:
            def stop() -> None:
                gate.drain()
                server.should_exit = True

            for number in (signal.SIGTERM, signal.SIGINT):
                with suppress(ValueError, RuntimeError):  # not in the main thread, as in tests
                    asyncio.get_running_loop().add_signal_handler(number, stop)
            sweep = asyncio.create_task(close_overdue(server.server_state.connections, seconds=config.header_timeout_s))
            announce(f"{url_of(listener)}/ui/ shows {len(runs)} {'run' if len(runs) == 1 else 'runs'}; Ctrl-C ends it")
            await server.serve(sockets=[listener])
            sweep.cancel()

        asyncio.run(process())
