"""/v1/train/*: jobs are submitted, listed, followed and cancelled; the worker process runs them.

A submission is answered when the job is on the disk. What it asks for is checked and tokenised by the reader
(`server.submit` says what, `server.reader` where), and the ledger is used in threads: the loop, which serves
completions, never waits for either.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import APIRouter, Header, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from groupwise.config.job import LATEST_S, deadline_at
from groupwise.errors import (
    AdapterError,
    ChatError,
    IdempotencyConflictError,
    JobNotFoundError,
    NotCancellableError,
    QueueFullError,
    RequestError,
    StorageError,
    TryAgainError,
)
from groupwise.sdk.types import (
    CancelAnswer,
    JobError,
    JobMetrics,
    TrainQueue,
    TrainStatus,
    TrainSubmitted,
    WaitingJob,
)
from groupwise.server.bodies import check_content_type
from groupwise.server.encode import at_field
from groupwise.server.errors import Paths, hidden
from groupwise.server.event_stream import following, sse
from groupwise.server.policies import check_free_name
from groupwise.server.quotas import TenantFullError
from groupwise.server.reader import RawBody, Reader, receive_body
from groupwise.server.schema_train import GrpoRequest, SftRequest
from groupwise.server.state import given
from groupwise.server.storage import check_room
from groupwise.server.submit import Submission, read_grpo, read_sft
from groupwise.server.waiting import Queue
from groupwise.server.webhooks import ENDED, utc, warnings_of
from groupwise.server.wire import documented
from groupwise.store.ledger import Claim, Event, Job, JobState, Ledger

if TYPE_CHECKING:
    from groupwise.config.serve import ServeConfig
    from groupwise.server.quotas import Quotas
    from groupwise.server.supervisor import Supervisor
    from groupwise.store.adapters import AdapterStore

EVENTS_POLL_S = 0.25
PAGE = 500  # events read at once
LATELY = 8  # jobs that have ended, whose speed others may have
MOST_JOBS = 1024  # that have ended, in one answer
LOSSES = ("loss/policy", "loss/cross_entropy")  # what a step reports; the first that is there

log = logging.getLogger(__name__)

router = APIRouter(prefix="/v1/train", tags=["training"])
IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=255)]
SUBMIT_ERRORS = (RequestError, ChatError, IdempotencyConflictError, QueueFullError, TenantFullError, StorageError)
SUBMIT_CODES = (
    "context_length_exceeded",
    "unsupported_content",
    "invalid_image",
    "adapter_not_found",
    "invalid_adapter",
)
GRPO_CODES = (*SUBMIT_CODES, "no_signal", "rollout_not_found")
MAX_EVENT_ID = 10**18 - 1


@dataclass(frozen=True, kw_only=True)
class JobParts:
    """The parts of a server that these routes use."""

    config: ServeConfig
    store: AdapterStore
    ledger: Ledger
    reader: Reader
    supervisor: Supervisor
    paths: Mapping[str, str]
    quotas: Quotas


Jobs = Annotated[JobParts, given(JobParts)]


# ---- submitting ----
@router.post("/grpo", **documented(GrpoRequest, TrainSubmitted, errors=SUBMIT_ERRORS, codes=GRPO_CODES))
async def train_grpo(request: Request, parts: Jobs, idempotency_key: IdempotencyKey = None) -> TrainSubmitted:
    """Train an adapter on groups of scored completions.

    Each completion is trained by how its reward compares with those of its group. The answer comes at once; follow the
    job at /v1/train/status/{job_id}. With `Idempotency-Key`, the same request again gives the same job."""

    def read(body: RawBody, pending: frozenset[str]) -> Awaitable[Submission]:
        ledger = parts.ledger
        state = {"store": parts.store, "ledger": ledger.path, "tenant": ledger.tenant, "pending": pending}
        return parts.reader.read_to_train(request, body, read_grpo, **state)

    return await _receive(request, parts, read, idempotency_key)


@router.post("/sft", **documented(SftRequest, TrainSubmitted, errors=SUBMIT_ERRORS, codes=SUBMIT_CODES))
async def train_sft(request: Request, parts: Jobs, idempotency_key: IdempotencyKey = None) -> TrainSubmitted:
    """Train an adapter on conversations: what the assistant says in them becomes likelier."""

    def read(body: RawBody, pending: frozenset[str]) -> Awaitable[Submission]:
        return parts.reader.read_to_train(request, body, read_sft, store=parts.store, pending=pending)

    return await _receive(request, parts, read, idempotency_key)


async def _receive(
    request: Request,
    parts: JobParts,
    read: Callable[[RawBody, frozenset[str]], Awaitable[Submission]],
    key: str | None,
) -> TrainSubmitted:
    """Return the job that a body asks for, queued. One that was accepted before gets the same answer, whatever has
    changed since: a full disk, other adapters."""
    async with receive_body(request, parts.reader) as body:
        fingerprint = hashlib.sha256(f"{request.url.path}\n{body.digest}".encode()).hexdigest()
        if key is not None and (job := await run_in_threadpool(parts.ledger.by_key, key, fingerprint)):
            return await run_in_threadpool(_told_of, parts, _submitted(job, is_new=False))
        check_content_type(request)
        submission = await read(body, await run_in_threadpool(parts.ledger.pending))
    submitted = await run_in_threadpool(partial(_submit, parts, submission, fingerprint, key))
    request.state.things = {"job": submitted.job_id, "adapter": submitted.adapter_name}
    return submitted


def _submit(parts: JobParts, submission: Submission, fingerprint: str, key: str | None) -> TrainSubmitted:
    """Raise TenantFullError and QuotaError, too."""
    parts.quotas.check_bytes()
    claim = partial(parts.quotas.check_job, parts.store)
    submitted = submit(parts.config, parts.ledger, submission, fingerprint, key, claim=claim)
    return _told_of(parts, submitted)


def _told_of(parts: JobParts, submitted: TrainSubmitted) -> TrainSubmitted:
    """Return the answer with what is to be expected of the job; without it where the ledger cannot be read now: the job
    is queued, and a client that met an error would post it again."""
    try:
        queue, job = _queue_of(parts), parts.ledger.job(submitted.job_id)
    except (StorageError, TryAgainError):
        log.exception("job %s is queued, and what it waits for cannot be read", submitted.job_id)
        return submitted
    waits = queue.why(job)
    return submitted.model_copy(update={"waits": waits, "deadline": queue.deadline(job, waits)})


def submit(
    config: ServeConfig,
    ledger: Ledger,
    submission: Submission,
    fingerprint: str = "",
    key: str | None = None,
    *,
    claim: Claim | None = None,
) -> TrainSubmitted:
    """Queue a job that was checked. `claim` is the ledger's. Raises RequestError, QueueFullError, StorageError."""
    check_room(config.state_dir, config.min_free_bytes, what="jobs")
    try:
        check_free_name(submission.adapter, served_name=config.served_name)
    except AdapterError as error:
        raise at_field(error, "config.output_name") from error
    job, is_new = ledger.submit(
        id=submission.id,
        effective=submission.effective,
        kind=submission.kind,
        adapter=submission.adapter,
        config=submission.config,
        summary=submission.summary,
        payload=submission.payload,
        steps=submission.steps,
        auto_load=submission.auto_load,
        rewards=submission.rewards,
        idempotency_key=key,
        fingerprint=fingerprint,
        max_queued=config.max_queued_jobs,
        claim=claim,
        deadline=_deadline(submission.config.get("deadline")),
    )
    return _submitted(job, is_new=is_new)


def _deadline(told: float | str | None) -> float | None:
    """Return when a job that is posted now is to have ended. Raises RequestError where that is over, or too far off."""
    now = time.time()
    at = deadline_at(told, posted=now)
    if at is not None and not now < at <= now + LATEST_S:
        what = f"{now - at:.0f} s ago" if at <= now else f"more than {LATEST_S // 86400} days from now"
        raise RequestError(
            f"config.deadline is {told!r}, which is {what}; the server's time is {utc(now)}",
            hint="give a later time, or seconds from now" if at <= now else "give an earlier one, or none",
            field="config.deadline",
        )
    return at


def _submitted(job: Job, *, is_new: bool) -> TrainSubmitted:
    message = _queued(job) if is_new else f"This Idempotency-Key was used for this job before; it is {job.state}"
    return TrainSubmitted(
        job_id=job.id,
        state=job.state.value,
        message=message,
        adapter_name=job.adapter,
        position=job.position,
        waits=None,
        deadline=None,
        warnings=list(job.summary["warnings"]),
    )


def _queue_of(parts: JobParts) -> Queue:
    """Return the jobs that have not ended, to say why each waits."""
    lately = parts.ledger.jobs(states=ENDED, limit=LATELY)
    return Queue(parts.ledger.unfinished(), worker=parts.supervisor.status.state == "running", lately=lately)


def _queued(job: Job) -> str:
    position = f"position {job.position} in queue"
    if job.kind == "sft":
        return f"Queued SFT training with {job.summary['examples']} examples ({position})"
    groups, completions = job.summary["groups"], job.summary["completions"]
    return f"Queued GRPO training with {groups} groups ({completions} completions, {position})"


# ---- looking ----
@router.get("/status", **documented(answer=list[TrainStatus], errors=[JobNotFoundError]))
async def status_of_all(
    parts: Jobs,
    before: Annotated[
        str | None, Query(max_length=64, description="A job's id: only jobs that have ended and came before it.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_JOBS, description="Jobs that have ended, at most.")] = MOST_JOBS,
) -> list[TrainStatus]:
    """List the jobs: those that run, those that wait by their turn, those that have ended, newest first. Where as many
    have ended as `limit` says there may be more: `before` with the last one's id asks for them."""

    def read() -> list[TrainStatus]:
        ended = None if before is None else parts.ledger.jobs(states=ENDED, before=before, limit=limit)
        return statuses(parts, _ordered(parts, limit) if ended is None else ended)

    return await run_in_threadpool(read)


@router.get("/status/{job_id}", **documented(answer=TrainStatus, errors=[JobNotFoundError]))
async def status_of_one(job_id: str, parts: Jobs) -> TrainStatus:
    """Show one job."""
    (status,) = await run_in_threadpool(lambda: statuses(parts, [parts.ledger.job(job_id)]))
    return status


@router.get("/queue", **documented(answer=TrainQueue))
async def queue(parts: Jobs) -> TrainQueue:
    """Show the jobs that run, those that wait, and those that have ended."""
    return await run_in_threadpool(_shown, parts)


@router.get("/metrics/{job_id}", **documented(answer=JobMetrics, errors=[JobNotFoundError]))
async def metrics(job_id: str, parts: Jobs) -> JobMetrics:
    """Return loss, reward, KL, gradient norm, tokens per second and more, of every step so far."""
    steps = await run_in_threadpool(parts.ledger.metrics, job_id)
    return JobMetrics(job_id=job_id, steps=[{**step, "time": utc(step["time"])} for step in steps])


def _ordered(parts: JobParts, limit: int = MOST_JOBS) -> list[Job]:
    """Return a job whose version is being swapped in runs too; it comes behind the one that trains."""
    active, ended = parts.ledger.unfinished(), parts.ledger.jobs(states=ENDED, limit=limit)
    known = {job.id for job in ended}  # one that ended between the two reads is in both
    turn = sorted(active, key=lambda job: (job.position or 0, job.version is not None, job.created_at))
    return [*(job for job in turn if job.id not in known), *ended]


def _shown(parts: JobParts) -> TrainQueue:
    jobs = _ordered(parts)
    found = list(zip(jobs, statuses(parts, jobs), strict=True))
    running = [status for job, status in found if job.state is JobState.RUNNING]
    return TrainQueue(
        running=running[0] if running else None,
        beside=running[1:],
        queued=[
            WaitingJob(
                job_id=job.id,
                job_type=_kind(job),
                adapter_name=job.adapter,
                position=job.position,
                waits=status.waits,
            )
            for job, status in found
            if job.position is not None
        ],
        completed=[status for job, status in found if job.state.is_final],
    )


def statuses(parts: JobParts, jobs: Sequence[Job]) -> list[TrainStatus]:
    """Return the status of each of the jobs."""
    queue = None
    if any(job.state is JobState.QUEUED or job.deadline is not None for job in jobs):
        queue = _queue_of(parts)
    return [_status(parts, job, queue) for job in jobs]


def _status(parts: JobParts, job: Job, queue: Queue | None) -> TrainStatus:
    waits = queue and queue.why(job)
    losses = (job.metrics[name] for name in LOSSES if name in job.metrics)
    return TrainStatus(
        job_id=job.id,
        kind=_kind(job),
        state=job.state.value,
        phase=job.phase,
        progress=job.progress,
        step=job.step,
        steps=job.steps,
        current_loss=next(losses, None),
        adapter_name=job.adapter,
        adapter_version=job.version,
        metrics=dict(job.metrics),
        created_at=str(utc(job.created_at)),
        started_at=utc(job.started_at),
        finished_at=utc(job.finished_at),
        elapsed_secs=_seconds(job.created_at, job),
        duration_secs=None if job.started_at is None else _seconds(job.started_at, job),
        position=job.position,
        waits=waits,
        deadline=queue and queue.deadline(job, waits),
        attempt=job.attempt,
        cancel_requested=job.cancel_requested,
        error=_error(parts, job),
        config={**job.config, **job.effective},
        summary={key: value for key, value in job.summary.items() if key not in ("changed", "warnings")},
        changed=job.summary.get("changed"),
        unhealthy=job.unhealthy,
        warnings=hidden(warnings_of(job), parts.paths),
    )


def _seconds(since: float, job: Job) -> float:
    """Return the seconds from then to the end of the job, or to now."""
    return max(0.0, (job.finished_at or time.time()) - since)


def _kind(job: Job) -> Literal["grpo", "sft"]:
    return "sft" if job.kind == "sft" else "grpo"


def _error(parts: JobParts, job: Job) -> JobError | None:
    if job.error is None:
        return None
    code = str(job.error.get("code", "error"))
    words = parts.supervisor.last_words(job.id) if code == "crashed_repeatedly" else None
    said = {"message": str(job.error.get("message", "")), "hint": job.error.get("hint"), "log": words}
    return JobError(code=code, **hidden(said, parts.paths))


# ---- following ----
_EVENTS = documented(errors=[JobNotFoundError, RequestError], streams=True)
_EVENTS["responses"][204] = {"description": "The job has ended, and nothing comes behind this id."}


@router.get("/events/{job_id}", **_EVENTS)
async def events(
    job_id: str,
    parts: Jobs,
    after: Annotated[int, Query(ge=0, le=MAX_EVENT_ID, description="Only events behind this id.")] = 0,
    last_event_id: Annotated[str | None, Header(description="As `after`; an EventSource sends it by itself.")] = None,
) -> Response:
    """Send what happens to a job, as server-sent events; the stream ends with the job.

    Each event has an `id`, and as data {"kind": "state" | "metrics" | "message", "at", "level", "message", "data"}. One
    who comes back with the last id misses nothing; 204 says that there is nothing more to come."""
    after = _event_id(last_event_id, default=after)
    job, found = await run_in_threadpool(_look, parts, job_id, after)
    if job.state.is_final and not found:
        return Response(status_code=204)
    return following(_follow(parts, job_id, after))


def _event_id(text: str | None, *, default: int) -> int:
    if not text:
        return default
    if not re.fullmatch(rf"[0-9]{{1,{len(str(MAX_EVENT_ID))}}}", text):
        raise RequestError(
            f"Last-Event-ID is {text[:64]!r}; ids are whole numbers up to {MAX_EVENT_ID}",
            hint="send the id of the last event, or none",
        )
    return int(text)


def _look(parts: JobParts, job_id: str, after: int) -> tuple[Job, list[Event]]:
    """Return job and events. The job is read first: if it has ended by then, the events behind are all there will
    be."""
    return parts.ledger.job(job_id), parts.ledger.events(job_id, after=after, limit=PAGE)


async def _follow(parts: JobParts, job_id: str, after: int) -> AsyncGenerator[bytes, None]:
    while True:
        job, found = await run_in_threadpool(_look, parts, job_id, after)
        for event in found:
            after = event.seq
            yield _sse(event, parts.paths)
        if len(found) == PAGE:
            continue
        if job.state.is_final or parts.supervisor.status.state == "stopped":  # then nothing more happens here
            return
        yield b""
        await asyncio.sleep(EVENTS_POLL_S)


def _sse(event: Event, private: Paths) -> bytes:
    fields = {"kind": event.kind, "at": utc(event.at), "level": event.level, "message": event.message}
    data = json.dumps(hidden({**fields, "data": dict(event.data)}, private), allow_nan=False)
    return sse(data, id=event.seq)


# ---- cancelling ----
@router.delete("/queue/{job_id}", **documented(answer=CancelAnswer, errors=[JobNotFoundError, NotCancellableError]))
async def remove_from_queue(job_id: str, parts: Jobs) -> CancelAnswer:
    """Cancel a job, whether it waits or runs."""
    return await _cancel(parts.ledger, job_id)


@router.post("/cancel/{job_id}", **documented(answer=CancelAnswer, errors=[JobNotFoundError, NotCancellableError]))
async def cancel(job_id: str, parts: Jobs) -> CancelAnswer:
    """Cancel a job: at once if it waits, after its step if it runs."""
    return await _cancel(parts.ledger, job_id)


async def _cancel(ledger: Ledger, job_id: str) -> CancelAnswer:
    job = await run_in_threadpool(ledger.cancel, job_id)
    return CancelAnswer(job_id=job.id, status="cancelled" if job.state is JobState.CANCELLED else "cancelling")
