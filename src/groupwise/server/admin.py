"""The state of the server: /health, /ready, /metrics, /v1/models, /v1/config and what it did lately.

/health says that the process lives, and to whom has the key everything else that it knows; it is 503 where the GPU is
lost to the process, which ends then. /ready is 503 unless the
server can do its whole work: answer, accept jobs, keep them, publish adapters. A disk that is full, fails or may not be
written and a damaged ledger all end it. Both are cheap, and neither waits for the engine.
"""

from __future__ import annotations

import asyncio
import copy
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import torch
from fastapi import APIRouter, Request, Response

from groupwise import __version__
from groupwise.config.job import GrpoJobConfig, JobConfig, SftJobConfig
from groupwise.errors import DeviceLostError, GroupwiseError, ModelError, NotReadyError
from groupwise.model.image_tokens import vision_of
from groupwise.model.load import LoadedModel
from groupwise.run.memory_budget import device_memory
from groupwise.sdk.types import Answer, Check, Health, ModelCard, ModelList
from groupwise.server.errors import hidden
from groupwise.server.images import sees
from groupwise.server.metrics import Sample
from groupwise.server.state import Parts, given
from groupwise.server.storage import StorageProbe, room_problem
from groupwise.server.wire import documented
from groupwise.store.ledger import Job, JobState

if TYPE_CHECKING:
    from groupwise.server.supervisor import Supervisor

STARTED = time.time()

WORKER_LIVES = ("starting", "running", "stopped")  # stopped: the server is ending

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

router = APIRouter(tags=["Server"])


@dataclass(frozen=True, kw_only=True)
class HealthParts(Parts):
    """The parts of a server that these routes and the gauges read."""

    supervisor: Supervisor
    storage: StorageProbe
    paths: Mapping[str, str]


State = Annotated[HealthParts, given(HealthParts)]


class ModelNotFoundError(ModelError):
    """No model, adapter or version of this name."""

    exit_code = 2


# ---- health ----
@router.get("/health", **documented(answer=Health, errors=[DeviceLostError]))
async def health(request: Request, parts: State) -> Health:
    """Say whether the process lives; 503 once its GPU is lost to it, until it ends. The only route without a key."""
    _check_device(parts)
    if not getattr(request.state, "trusted", False):
        return Health(status="ok", version=__version__, uptime_seconds=time.time() - STARTED)
    return await asyncio.to_thread(_health, parts)


@router.get("/v1/health", **documented(answer=Health, errors=[DeviceLostError]))
async def health_v1(parts: State) -> Health:
    """Answer as /health does, with everything."""
    _check_device(parts)
    return await asyncio.to_thread(_health, parts)


def _check_device(parts: HealthParts) -> None:
    """Raise DeviceLostError once the engine's device is lost: each time a copy, which holds no request's frames."""
    if (lost := parts.engine.lost) is not None:
        raise copy.copy(lost).with_traceback(None)


def _health(parts: HealthParts) -> Health:
    checks = list(_checks(parts))
    jobs = _unfinished(parts)
    running = next((job for job in jobs if job.state == JobState.RUNNING), None)
    active, stats = parts.policies.active, dict(parts.engine.stats())
    return Health(
        status="ok" if all(check.passed for check in checks) else "degraded",
        version=__version__,
        uptime_seconds=time.time() - STARTED,
        model=parts.config.served_name,
        backend=str(parts.base.device),
        active_adapter=None if active.is_base else active.name,
        active_version=str(active),
        images=sees(vision_of(parts.base.tokenizer)),
        adapters_loaded=stats["adapters"],
        scheduler=stats,
        gpu_memory=_gpu_memory(parts),
        training={
            "active_job": None if running is None else {"job_id": running.id, "progress": running.progress},
            "queued": sum(job.state == JobState.QUEUED for job in jobs),
        },
        checks=checks,
    )


def _checks(parts: HealthParts) -> Iterator[Check]:
    """Yield what must be so for all to be well."""
    worker = parts.supervisor.status
    ended = None if worker.state in WORKER_LIVES else f"it ended ({worker.last_exit}) and will be started again"
    problems = {
        "model_loaded": parts.engine.unavailable_reason,
        "ledger": _ledger_problem(parts),
        "storage": parts.storage.problem(),
        "disk_space": _disk_problem(parts),
        "training_worker": ended,
    }
    for name, problem in problems.items():
        yield Check(name=name, passed=problem is None, detail=hidden(problem, parts.paths))


def _ledger_problem(parts: HealthParts) -> str | None:
    if parts.ledger.damage is not None:
        return parts.ledger.damage
    try:
        parts.ledger.jobs(limit=1)
    except GroupwiseError as error:
        return error.message
    return None


def _disk_problem(parts: HealthParts) -> str | None:
    return room_problem(parts.config.state_dir, parts.config.min_free_bytes)


def _unfinished(parts: HealthParts) -> list[Job]:
    try:
        return parts.ledger.unfinished()
    except GroupwiseError:
        return []


def _gpu_memory(parts: HealthParts) -> dict[str, float] | None:
    device = parts.base.device
    if device.type != "cuda":  # gpu-only below: the memory that /v1/status shows
        return None
    free, total = torch.cuda.mem_get_info(device)
    return {"total_gb": total / 1e9, "free_gb": free / 1e9, "allocated_gb": torch.cuda.memory_allocated(device) / 1e9}


class Ready(Answer):
    ready: bool


@router.get("/ready", **documented(answer=Ready, errors=[NotReadyError]))
async def ready(parts: State) -> Ready:
    """Say whether the server can answer, accept jobs, keep them and publish adapters; 503 with the reason where not."""
    problem = await asyncio.to_thread(_problem, parts)
    if problem is not None:
        raise NotReadyError(f"the server is not ready: {problem}", hint="see /health", retry_after=10)
    return Ready(ready=True)


def _problem(parts: HealthParts) -> str | None:
    """Return why the server cannot do all that it should."""
    problem = _ledger_problem(parts) or parts.storage.problem() or _disk_problem(parts)
    return problem or parts.engine.unavailable_reason


# ---- metrics ----
_METRICS: dict[str, Any] = documented()

_METRICS["responses"][200] = {"description": "Prometheus's text format.", "content": {"text/plain": {}}}


@router.get("/metrics", response_class=Response, **_METRICS)
async def metrics(parts: State) -> Response:
    """Report counters, gauges and histograms to Prometheus."""
    text = await asyncio.to_thread(parts.recorder.exposition)
    return Response(text, headers={"content-type": METRICS_TYPE})


def gauges(parts: HealthParts) -> Iterator[Sample]:
    """Yield what is asked for when metrics are read."""
    name = {"model_name": parts.config.served_name}
    stats = parts.engine.stats()
    yield "num_requests_running", name, stats["running"]
    yield "num_requests_waiting", name, stats["waiting"]
    yield "num_requests_waiting_for_adapters", name, parts.policies.waiting
    yield "adapter_versions_loaded", {}, stats["adapters"]
    active = parts.policies.active
    yield "adapter_active_info", {"name": active.name, "version": str(active.number)}, 1
    yield "disk_free_bytes", {}, shutil.disk_usage(parts.config.state_dir).free
    yield "ready", {}, float(_problem(parts) is None)
    yield "worker_restarts", {}, parts.supervisor.status.restarts
    for stage in ("canary", "shadow"):
        trial = parts.policies.trial
        yield f"{stage}_share", {}, trial.share if trial is not None and trial.stage == stage else 0.0
    yield from _learning_gauges(parts)
    yield from _training_gauges(parts)


def _learning_gauges(parts: HealthParts) -> Iterator[Sample]:
    try:
        for state, count in parts.feedback.counts().items():
            yield "feedback_kept", {"state": state}, count
        for kind, count in parts.feedback.transition_counts().items():
            yield "learn_transitions", {"kind": kind}, count
    except GroupwiseError:
        return


def _training_gauges(parts: HealthParts) -> Iterator[Sample]:
    try:
        jobs = parts.ledger.jobs()
    except GroupwiseError:
        return
    states = Counter(job.state for job in jobs)
    for state in JobState:
        yield "jobs", {"state": state.value}, states[state]
    running = [job for job in jobs if job.state == JobState.RUNNING]
    yield "training_active", {}, float(bool(running))
    for job in running:  # of one adapter there is one
        whose = {"adapter": job.adapter, "tenant": job.tenant}
        yield "train_step", whose, job.step
        yield "train_progress", whose, job.progress
        for metric, value in job.metrics.items():
            yield "train_metric", whose | {"metric": metric}, value


# ---- models ----
@router.get("/v1/models", **documented(answer=ModelList))
async def models(parts: State) -> ModelList:
    """List the served model, the base, and every adapter by name and by version: what `model` may say."""
    return ModelList(data=await asyncio.to_thread(_models, parts))


@router.get("/v1/models/{model:path}", **documented(answer=ModelCard, errors=[ModelNotFoundError]))
async def model(model: str, parts: State) -> ModelCard:
    """Show one of the models."""
    cards = await asyncio.to_thread(_models, parts)
    for card in cards:
        if card.id == model:
            return card
    raise ModelNotFoundError(
        f"there is no model {model[:64]!r}", hint="GET /v1/models lists what there is", field="model"
    )


def _models(parts: HealthParts) -> list[ModelCard]:
    length, served, active = parts.engine.context_length, parts.config.served_name, parts.policies.active
    started = int(STARTED)

    def card(id: str, root: str, parent: str | None, created: int = started) -> ModelCard:
        return ModelCard(id=id, created=created, owned_by="groupwise", root=root, parent=parent, max_model_len=length)

    infos = parts.store.list()
    newest = {info.version.name: info.version for info in infos if info.unhealthy is None} | {active.name: active}
    cards = {served: card(served, str(active), None), "base": card("base", parts.base.name, None)}
    for info in infos:
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
    """The part of it that the base model's weights take."""


class TrainingShown(Answer):
    """The default settings of jobs: every field of `config` of /v1/train/grpo and /v1/train/sft, as in a job that sets
    none."""

    grpo: dict[str, Any]
    sft: dict[str, Any]


class ConfigAnswer(Answer):
    """The configuration of this server, without secrets, and what came of it: model, device, memory, jobs' defaults."""

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
async def config(request: Request, parts: State) -> ConfigAnswer:
    """Show every setting with its effective value."""
    return ConfigAnswer(
        model=parts.base.name,
        base_hash=parts.base.hash,
        context_length=parts.base.context_length,
        device=str(parts.base.device),
        dtype=str(parts.base.model.dtype).removeprefix("torch."),
        config=parts.config.public(),
        memory=_memory(parts.base),
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
async def decode_stats(parts: State) -> dict[str, Any]:
    """Measure how fast tokens come."""
    return parts.recorder.decode_stats()


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
async def recent_requests(parts: State) -> list[dict[str, Any]]:
    """List the latest hundred requests, newest first."""
    return parts.recorder.recent()
