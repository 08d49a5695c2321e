"""The state of the server: /health, /ready, /metrics, /v1/models, /v1/config and what it did lately.

/health says that the process lives, and to whom has the key everything else that it knows; it is 503 where the GPU is
lost to the process, which ends then. /ready is 503 unless the
server can do its whole work: answer, accept jobs, keep them, publish adapters. A disk that is full, fails or may not be
written and a damaged ledger all end it. Both are cheap, and neither waits for the engine.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import torch
from fastapi import APIRouter, Request, Response

from groupwise import __version__
from groupwise.config.job import GrpoJobConfig, JobConfig, SftJobConfig
from groupwise.errors import DeviceLostError, GroupwiseError, ModelError, NotReadyError
from groupwise.model.load import LoadedModel
from groupwise.run.memory_budget import device_memory
from groupwise.sdk.types import Answer, Check, Health, ModelCard, ModelList
from groupwise.server.errors import hidden
from groupwise.server.metrics import Sample
from groupwise.server.state import Server, server_of
from groupwise.server.storage import room_problem
from groupwise.server.wire import documented
from groupwise.store.ledger import Job, JobState

STARTED = time.time()

WORKER_LIVES = ("starting", "running", "stopped")  # stopped: the server is ending

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

router = APIRouter(tags=["Server"])


class ModelNotFoundError(ModelError):
    """No model, adapter or version of this name."""

    exit_code = 2


# ---- health ----
@router.get("/health", **documented(answer=Health, errors=[DeviceLostError]))
async def health(request: Request) -> Health:
    """Whether the process lives; 503 once its GPU is lost to it, until it ends. The only route without a key."""
    if (lost := server_of(request).engine.lost) is not None:
        raise lost
    if not getattr(request.state, "trusted", False):
        return Health(status="ok", version=__version__, uptime_seconds=time.time() - STARTED)
    return await asyncio.to_thread(_health, server_of(request))


@router.get("/v1/health", **documented(answer=Health, errors=[DeviceLostError]))
async def health_v1(request: Request) -> Health:
    """The same as /health, with everything."""
    if (lost := server_of(request).engine.lost) is not None:
        raise lost
    return await asyncio.to_thread(_health, server_of(request))


def _health(server: Server) -> Health:
    checks = list(_checks(server))
    jobs = _unfinished(server)
    running = next((job for job in jobs if job.state == JobState.RUNNING), None)
    active, stats = server.policies.active, dict(server.engine.stats())
    return Health(
        status="ok" if all(check.passed for check in checks) else "degraded",
        version=__version__,
        uptime_seconds=time.time() - STARTED,
        model=server.config.served_name,
        backend=str(server.base.device),
        active_adapter=None if active.is_base else active.name,
        active_version=str(active),
        adapters_loaded=stats["adapters"],
        scheduler=stats,
        gpu_memory=_gpu_memory(server),
        training={
            "active_job": None if running is None else {"job_id": running.id, "progress": running.progress},
            "queued": sum(job.state == JobState.QUEUED for job in jobs),
        },
        checks=checks,
    )


def _checks(server: Server) -> Iterator[Check]:
    """Yield what must be so for all to be well."""
    worker = server.supervisor.status
    ended = None if worker.state in WORKER_LIVES else f"it ended ({worker.last_exit}) and will be started again"
    problems = {
        "model_loaded": server.engine.unavailable_reason,
        "ledger": _ledger_problem(server),
        "storage": server.storage.problem(),
        "disk_space": _disk_problem(server),
        "training_worker": ended,
    }
    for name, problem in problems.items():
        yield Check(name=name, passed=problem is None, detail=hidden(problem, server.paths))


def _ledger_problem(server: Server) -> str | None:
    if server.ledger.damage is not None:
        return server.ledger.damage
    try:
        server.ledger.jobs(limit=1)
    except GroupwiseError as error:
        return error.message
    return None


def _disk_problem(server: Server) -> str | None:
    return room_problem(server.config.state_dir, server.config.min_free_bytes)


def _unfinished(server: Server) -> list[Job]:
    try:
        return server.ledger.jobs(states=(JobState.QUEUED, JobState.RUNNING))
    except GroupwiseError:
        return []


def _gpu_memory(server: Server) -> dict[str, float] | None:
    device = server.base.device
    if device.type != "cuda":  # gpu-only below: the memory that /v1/status shows
        return None
    free, total = torch.cuda.mem_get_info(device)
    return {"total_gb": total / 1e9, "free_gb": free / 1e9, "allocated_gb": torch.cuda.memory_allocated(device) / 1e9}


class Ready(Answer):
    ready: bool


@router.get("/ready", **documented(answer=Ready, errors=[NotReadyError]))
async def ready(request: Request) -> Ready:
    """Whether the server can answer, accept jobs, keep them and publish adapters; 503 with the reason where not."""
    server = server_of(request)
    problem = await asyncio.to_thread(_problem, server)
    if problem is not None:
        raise NotReadyError(f"the server is not ready: {problem}", hint="see /health", retry_after=10)
    return Ready(ready=True)


def _problem(server: Server) -> str | None:
    """Return why the server cannot do all that it should."""
    problem = _ledger_problem(server) or server.storage.problem() or _disk_problem(server)
    return problem or server.engine.unavailable_reason


# ---- metrics ----
_METRICS: dict[str, Any] = documented()

_METRICS["responses"][200] = {"description": "Prometheus's text format.", "content": {"text/plain": {}}}


@router.get("/metrics", response_class=Response, **_METRICS)
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    text = await asyncio.to_thread(server_of(request).recorder.exposition)
    return Response(text, headers={"content-type": METRICS_TYPE})


def gauges(server: Server) -> Iterator[Sample]:
    """Yield what is asked for when metrics are read."""
    name = {"model_name": server.config.served_name}
    stats = server.engine.stats()
    yield "num_requests_running", name, stats["running"]
    yield "num_requests_waiting", name, stats["waiting"]
    yield "num_requests_waiting_for_adapters", name, server.policies.waiting
    yield "adapter_versions_loaded", {}, stats["adapters"]
    active = server.policies.active
    yield "adapter_active_info", {"name": active.name, "version": str(active.number)}, 1
    yield "disk_free_bytes", {}, shutil.disk_usage(server.config.state_dir).free
    yield "ready", {}, float(_problem(server) is None)
    yield "worker_restarts", {}, server.supervisor.status.restarts
    for stage in ("canary", "shadow"):
        trial = server.policies.trial
        yield f"{stage}_share", {}, trial.share if trial is not None and trial.stage == stage else 0.0
    yield from _learning_gauges(server)
    yield from _training_gauges(server)


def _learning_gauges(server: Server) -> Iterator[Sample]:
    try:
        for state, count in server.feedback.counts().items():
            yield "feedback_kept", {"state": state}, count
        for kind, count in server.feedback.transition_counts().items():
            yield "learn_transitions", {"kind": kind}, count
    except GroupwiseError:
        return


def _training_gauges(server: Server) -> Iterator[Sample]:
    try:
        jobs = server.ledger.jobs()
    except GroupwiseError:
        return
    states = Counter(job.state for job in jobs)
    for state in JobState:
        yield "jobs", {"state": state.value}, states[state]
    running = next((job for job in jobs if job.state == JobState.RUNNING), None)
    yield "training_active", {}, float(running is not None)
    if running is not None:
        yield "train_step", {}, running.step
        yield "train_progress", {}, running.progress
        for metric, value in running.metrics.items():
            yield "train_metric", {"metric": metric}, value


# ---- models ----
@router.get("/v1/models", **documented(answer=ModelList))
async def models(request: Request) -> ModelList:
    """The served model, the base, and every adapter by name and by version: what `model` may say."""
    return ModelList(data=await asyncio.to_thread(_models, server_of(request)))


@router.get("/v1/models/{model:path}", **documented(answer=ModelCard, errors=[ModelNotFoundError]))
async def model(request: Request, model: str) -> ModelCard:
    """One of them."""
    cards = await asyncio.to_thread(_models, server_of(request))
    for card in cards:
        if card.id == model:
            return card
    raise ModelNotFoundError(
        f"there is no model {model[:64]!r}", hint="GET /v1/models lists what there is", field="model"
    )


def _models(server: Server) -> list[ModelCard]:
    length, served, active = server.engine.context_length, server.config.served_name, server.policies.active
    started = int(STARTED)

    def card(id: str, root: str, parent: str | None, created: int = started) -> ModelCard:
        return ModelCard(id=id, created=created, owned_by="groupwise", root=root, parent=parent, max_model_len=length)

    newest = {name: active if name == active.name else server.store.newest(name) for name in server.store.names()}
    cards = {served: card(served, str(active), None), "base": card("base", server.base.name, None)}
    for info in server.store.list():
        version, parent = info.version, str(info.parent)
        created = int(datetime.fromisoformat(info.created).timestamp())
        cards[str(version)] = card(str(version), str(version), parent, created)
        if version.name != served and version == newest.get(version.name):
            cards[version.name] = card(version.name, str(version), parent, created)
    return list(cards.values())


# ---- configuration and history ----
class MemoryShown(Answer):
    """The device's memory, in GB (10^9 bytes): a GPU's, or on a CPU the machine's."""

    total_gb: float
    free_gb: float | None
    """Null on a CPU."""
    model_gb: float
    """Of it the base model's weights."""


class TrainingShown(Answer):
    """What a job trains with that says nothing itself: every field of `config` of /v1/train/grpo and /v1/train/sft."""

    grpo: dict[str, Any]
    sft: dict[str, Any]


class ConfigAnswer(Answer):
    """What this server was told, and what came of it. Secrets are left out."""

    model: str
    base_hash: str
    context_length: int
    device: str
    dtype: str
    config: dict[str, Any]
    memory: MemoryShown
    training: TrainingShown
    run: str | None
    """The run that `groupwise serve RUN` was given; its curves and completions are at /run/ui/."""


@router.get("/v1/config", **documented(answer=ConfigAnswer))
async def config(request: Request) -> ConfigAnswer:
    """Every setting with its effective value."""
    server = server_of(request)
    return ConfigAnswer(
        model=server.base.name,
        base_hash=server.base.hash,
        context_length=server.base.context_length,
        device=str(server.base.device),
        dtype=str(server.base.model.dtype).removeprefix("torch."),
        config=server.config.public(),
        memory=_memory(server.base),
        training=TrainingShown(grpo=_acting(GrpoJobConfig()), sft=_acting(SftJobConfig())),
        run=getattr(request.app.state, "run", None),
    )


def _memory(base: LoadedModel) -> MemoryShown:
    weights = sum(each.numel() * each.element_size() for each in base.model.parameters())
    free = None
    if base.device.type == "cuda":  # gpu-only: its free memory
        free = torch.cuda.mem_get_info(base.device)[0] / 1e9
    return MemoryShown(total_gb=device_memory(base.device) / 1e9, free_gb=free, model_gb=weights / 1e9)


def _acting(config: JobConfig) -> dict[str, Any]:
    return config.model_dump(mode="json") | config.effective(None)


class DecodeStats(Answer):
    """The last minute. Gaps between tokens are those of streams."""

    tok_per_sec: float
    p50_itl_ms: float
    p99_itl_ms: float
    mean_itl_ms: float
    sample_count: int
    """Gaps that were measured; where this is 0 the latencies are 0, too, and say nothing."""
    window_secs: float


@router.get("/v1/stats/decode", **documented(answer=DecodeStats))
async def decode_stats(request: Request) -> dict[str, Any]:
    """How fast tokens come."""
    return server_of(request).recorder.decode_stats()


class RecentRequest(Answer):
    """A request that sampled."""

    id: str
    """The answer's own `id`."""
    request_id: str
    """The answer's `x-request-id`, by which the server's log calls it, too."""
    timestamp_unix_ms: int
    route: str
    model: str
    adapter: str
    prompt_preview: str
    completion_preview: str
    prompt_tokens: int
    completion_tokens: int
    duration_ms: float
    streamed: bool
    finish_reason: str
    """stop, length, tool_calls, or timeout, error, client_disconnect."""


@router.get("/v1/stats/recent-requests", **documented(answer=list[RecentRequest]))
async def recent_requests(request: Request) -> list[dict[str, Any]]:
    """The latest hundred, newest first."""
    return server_of(request).recorder.recent()
