"""Tells what is going wrong in training, from its metrics, in words: the routes of health and of metrics' definitions.

GET /v1/train/health/{job_id}    what a job's metrics say is going wrong, why, and what to do
GET /v1/metrics/definitions      what each metric means, what is good, and what to do where it is not

The rules are those of runs (`groupwise.run.health`); remedies are in the words of a job's own configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool

from groupwise.errors import JobNotFoundError
from groupwise.run.health import Finding
from groupwise.run.health_report import Report, examine_job
from groupwise.sdk.types import Answer
from groupwise.server.job_remedies import job_remedies
from groupwise.server.state import given
from groupwise.server.wire import documented
from groupwise.store.ledger import Ledger

router = APIRouter(prefix="/v1/train", tags=["training"])


@dataclass(frozen=True, kw_only=True)
class FindingParts:
    """The part of a server that this route uses."""

    ledger: Ledger


class JobFinding(Answer):
    """A problem that a rule found in the metrics of a job or a run."""

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


class Findings(Answer):
    """Problems that a job's or a run's metrics show: those that stand, and those that are over."""

    status: Literal["ok", "warn", "error"]
    """The worst of what stands."""
    findings: list[JobFinding]


class JobHealth(Findings):
    """The answer of GET /v1/train/health/{job_id}: findings in the order in which they began."""

    job_id: str


@router.get("/health/{job_id}", **documented(answer=JobHealth, errors=[JobNotFoundError]))
async def job_health(job_id: str, parts: Annotated[FindingParts, given(FindingParts)]) -> JobHealth:
    """Say what is going wrong in a job by its metrics, with the cause and what to do."""
    return await run_in_threadpool(_judged, parts.ledger, job_id)


def _judged(ledger: Ledger, job_id: str) -> JobHealth:
    job, report = ledger.job(job_id), examine_job(ledger.metrics(job_id))

    def remedies(finding: Finding) -> list[str]:
        return job_remedies(finding.id, job.kind, job.config, name=finding.name)

    return JobHealth(job_id=job_id, status=report.status, findings=told(report, remedies))


def told(report: Report, remedies: Callable[[Finding], Sequence[str]]) -> list[JobFinding]:
    """Return the findings of a report, each with its remedies."""
    return [
        JobFinding(
            id=finding.id,
            severity=finding.severity,
            metric=finding.metric,
            began=finding.began,
            ended=finding.ended,
            says=finding.says,
            cause=finding.cause,
            remedies=list(remedies(finding)),
        )
        for finding in report.findings
    ]
