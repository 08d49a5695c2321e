"""Says why a job waits, and in about how many seconds it begins.

    adapter    a job before it has to do with its adapter: it begins from what that one makes
    alone      it must have none beside it, or what is trained must
    turn       others come first: they have had less
    room       its turn is next, and as many are trained as there is room for
    worker     the worker is being started

Only a tenant's own jobs are read, so that nobody learns of another's: what has its reason in them is `turn`, without a
time. Times are those of the jobs at work, if they go on as until now: the steps that are left, or a QUANTUM of tokens,
after which a job makes way.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from groupwise.sdk.types import Waits
from groupwise.store.ledger_schema import JobRecord, JobState
from groupwise.store.ledger_turns import QUANTUM, needs_none_beside

Reason = Literal["adapter", "alone", "turn", "room", "worker"]

AT_ONCE_S = 2.0  # after which a worker would have taken a job whose turn it is


def why_waits(job: JobRecord, active: Sequence[JobRecord], waits_for: Sequence[str], *, worker: bool) -> Waits | None:
    """Return why a job waits; None if it does not.

    Args:
        active: the tenant's jobs that have not ended.
        waits_for: the ids of those that it must come after.
        worker: whether there is one that could train it.
    """
    if job.state is not JobState.QUEUED:
        return None
    if not worker:
        return _told("worker", "the training worker is being started")
    if waits_for:
        return _after(waits_for, [each for each in active if each.id in waits_for])
    running = [each for each in active if each.state is JobState.RUNNING and each.version is None]
    before = sum(each.state is JobState.QUEUED and _goes_before(each, job) for each in active)
    times = [seconds for each in running if (seconds := seconds_to_make_way(each)) is not None]
    by_itself = next((each for each in running if needs_none_beside(each)), None)
    if by_itself is not None or (running and needs_none_beside(job)):
        text = "it is trained by itself" if by_itself is None else f"job {by_itself.id} is trained by itself"
        return _told("alone", text, job=by_itself and by_itself.id, seconds=max(times, default=None))
    if not before and time.time() - job.created_at < AT_ONCE_S:
        return _told("turn", "it begins at once, if there is room", seconds=0.0)
    seconds = min(times) * (1 + before // len(running)) if times else None
    if before:
        return _told("turn", f"{before} that have had less begin before it", seconds=seconds)
    if not running:
        return _told("turn", "the worker loads the model, or trains what others posted")
    return _told("room", "its turn is next, and as many are trained as there is room for", seconds=seconds)


def _after(ids: Sequence[str], ahead: Sequence[JobRecord]) -> Waits:
    """Return that a job waits for those, oldest first, that have to do with its adapter."""
    times = [seconds_left(each) for each in ahead]
    seconds = None if None in times else sum(each or 0.0 for each in times)
    what = "one job that has" if len(ahead) == 1 else f"{len(ahead)} jobs that have"
    text = f"it begins from what {what} to do with its adapter will make"
    return _told("adapter", text, job=ids[-1], seconds=seconds)


def _goes_before(one: JobRecord, other: JobRecord) -> bool:
    return (one.own, one.created_at) < (other.own, other.created_at)


def _told(reason: Reason, text: str, *, job: str | None = None, seconds: float | None = None) -> Waits:
    return Waits(reason=reason, message=text, job_id=job, about_seconds=None if seconds is None else round(seconds, 1))


def seconds_left(job: JobRecord) -> float | None:
    """Return how long a job still takes; None before its first step."""
    step = job.metrics.get("time/step_s")
    return None if step is None else (job.steps - job.step) * step


def seconds_to_make_way(job: JobRecord) -> float | None:
    """Return how long a job still has its place: to its end, or for a quantum of its tokens; None before its first
    step."""
    left, step = seconds_left(job), job.metrics.get("time/step_s")
    if left is None or step is None or not job.step:
        return None
    a_step = job.tokens / max(job.step, 1) / job.weight
    return min(left, step * QUANTUM / a_step) if a_step else left
