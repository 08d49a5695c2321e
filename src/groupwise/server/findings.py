"""GET /v1/train/health/{job_id}: what a job's metrics say is going wrong, why, and what to do.

The rules are those of runs (`groupwise.health`); remedies are in words, with the settings to look at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool

from groupwise.errors import JobNotFoundError
from groupwise.health import Finding, examine
from groupwise.server.state import server_of
from groupwise.server.wire import Answer, documented

router = APIRouter(prefix="/v1/train", tags=["training"])


class JobFinding(Answer):
    """Something that looks wrong in a job's metrics."""

    id: str
    """The rule's name, as in docs/metrics.md."""
    severity: Literal["warn", "error"]
    metric: str
    began: int
    """The step at which it began."""
    ended: int | None
    """The step at which it was over; null while it stands."""
    says: str
    cause: str
    remedies: list[str]


class JobHealth(Answer):
    """The answer of GET /v1/train/health/{job_id}: findings in the order in which they began."""

    job_id: str
    status: Literal["ok", "warn", "error"]
    """The worst of what stands."""
    findings: list[JobFinding]


@router.get("/health/{job_id}", **documented(answer=JobHealth, errors=[JobNotFoundError]))
async def job_health(request: Request, job_id: str) -> JobHealth:
    """What is going wrong in a job by its metrics, with the cause and what to do."""
    steps = await run_in_threadpool(server_of(request).ledger.metrics, job_id)
    return _judged(job_id, steps)


def _judged(job_id: str, steps: Sequence[Mapping[str, Any]]) -> JobHealth:
    report = examine(steps)
    return JobHealth(job_id=job_id, status=report.status, findings=[_told(each) for each in report.findings])


def _told(finding: Finding) -> JobFinding:
    return JobFinding(
        id=finding.id,
        severity=finding.severity,
        metric=finding.metric,
        began=finding.began,
        ended=finding.ended,
        says=finding.says,
        cause=finding.cause,
        remedies=[str(advice) for advice in finding.advice],
    )
