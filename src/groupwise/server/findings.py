"""What metrics say, in words.

GET /v1/train/health/{job_id}    what a job's metrics say is going wrong, why, and what to do
GET /v1/metrics/definitions      what each metric means, what is good, and what to do where it is not

The rules are those of runs (`groupwise.run.health`); remedies are in the words of a job's own configuration.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool

from groupwise.algo.metrics import definitions
from groupwise.config.job import SAMPLED_WITH, job_field, job_name, parse_job_config
from groupwise.errors import ConfigError, JobNotFoundError
from groupwise.run.health import Finding, Report, examine_job
from groupwise.run.health_remedies import RUN_KEYS, KeyNames, Remedy, Rule, changed
from groupwise.run.health_rules import RULES
from groupwise.sdk.types import Answer
from groupwise.server.state import Server, server_of
from groupwise.server.wire import documented

# ----------------------------------------------------------------------------------------------------------------------
# Remedies for a job: those of runs (`groupwise.run.health_rules`) in the words of POST /v1/train/grpo and
# /v1/train/sft.
#
#     train.learning_rate=9e-05      config.learning_rate=9e-05
#     rollout.group_size=16          in words: `n` of /v1/completions/batch, since whoever posts a job sampled before it
#     rollout.refill=2               left out: nobody refills a job
#
# A change is computed from the job's own configuration, and is left out if it changes nothing or would be refused.
# ----------------------------------------------------------------------------------------------------------------------

_REMEDIES: Mapping[str, Sequence[Remedy]] = {rule.id: rule.remedies for rule in RULES}
_JOB_KEYS = KeyNames(job_name)
_ELSEWHERE = {  # said before a job is posted
    **{key: f"{name} of /v1/completions/batch" for key, name in SAMPLED_WITH.items()},
    "rollout.prompts_per_step": "more groups in a job",
    "dtype": "groupwise serve --dtype float32",
}


def job_remedies(rule: str, kind: str, config: Mapping[str, Any], *, name: str = "") -> list[str]:
    """What to do about a finding of this rule in a job of this configuration, as it was accepted."""
    return [text for remedy in _REMEDIES[rule] if (text := _told(remedy, kind, _effective(config), name)) is not None]


def _effective(config: Mapping[str, Any]) -> dict[str, Any]:
    """With the estimator that a null stands for."""
    return {**config, "kl": "k3"} if config.get("kl") is None and config.get("kl_coeff") else dict(config)


def _told(remedy: Remedy, kind: str, config: Mapping[str, Any], name: str) -> str | None:
    """None where the job has no means for it."""
    text = (remedy.job_text or remedy.text).format(key=_JOB_KEYS)
    if not remedy.overrides:
        return text if remedy.for_jobs else None
    if all(key in _ELSEWHERE for key in remedy.overrides):
        return f"{text}: {', '.join(_ELSEWHERE[key] for key in remedy.overrides)}"
    if any(config.get(job_field(key, kind) or "") != value for key, value in remedy.only_if.items()):
        return None
    changes = dict(_changes(remedy, kind, config, name))
    if len(changes) < len(remedy.overrides) or not _is_valid(kind, {**config, **changes}):
        return None
    return f"{text}: {' '.join(f'config.{key}={_shown(value)}' for key, value in changes.items())}"


def _changes(remedy: Remedy, kind: str, config: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    """(field, its new value), of those that there are and that would be other ones."""
    for key, change in remedy.overrides.items():
        field = job_field(key, kind)
        if field is not None and (new := changed(config.get(field), change, name)) is not None:
            yield field, new


def _is_valid(kind: str, config: Mapping[str, Any]) -> bool:
    try:
        parse_job_config(kind, config)
    except ConfigError:
        return False
    return True


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


router = APIRouter(prefix="/v1/train", tags=["training"])


class JobFinding(Answer):
    """Something that looks wrong in the metrics of a job or a run."""

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
    """What stands, and what stood."""

    status: Literal["ok", "warn", "error"]
    """The worst of what stands."""
    findings: list[JobFinding]


class JobHealth(Findings):
    """The answer of GET /v1/train/health/{job_id}: findings in the order in which they began."""

    job_id: str


@router.get("/health/{job_id}", **documented(answer=JobHealth, errors=[JobNotFoundError]))
async def job_health(request: Request, job_id: str) -> JobHealth:
    """What is going wrong in a job by its metrics, with the cause and what to do."""
    return await run_in_threadpool(_judged, server_of(request), job_id)


def _judged(server: Server, job_id: str) -> JobHealth:
    job, report = server.ledger.job(job_id), examine_job(server.ledger.metrics(job_id))

    def remedies(finding: Finding) -> list[str]:
        return job_remedies(finding.id, job.kind, job.config, name=finding.name)

    return JobHealth(job_id=job_id, status=report.status, findings=told(report, remedies))


def told(report: Report, remedies: Callable[[Finding], Sequence[str]]) -> list[JobFinding]:
    """The findings of a report, each with its remedies."""
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


# ----------------------------------------------------------------------------------------------------------------------
# GET /v1/metrics/definitions: the table of metrics (`groupwise.algo.metrics`), with the health rules that judge each.
# The web interface shows it at its numbers; `groupwise serve` and `groupwise ui` both send it.
# ----------------------------------------------------------------------------------------------------------------------

definitions_router = APIRouter(prefix="/v1/metrics", tags=["metrics"])


class MetricRule(Answer):
    """A health rule about a metric."""

    id: str
    holds: str
    """When it holds, as "mean of 10: warn > 0.3, error > 0.8"."""
    remedies: list[str]


class MetricDefinition(Answer):
    """A metric. `<name>`, `<mode>` and the like in its name stand for any one part of it."""

    metric: str
    section: str
    means: str
    good: str
    """The range or the course to expect; empty where it is a plain count."""
    otherwise: str
    """What to do where it is not; empty where only the rules say it."""
    rules: list[MetricRule]


class MetricDefinitions(Answer):
    """The answer of GET /v1/metrics/definitions, in the order of docs/metrics.md."""

    definitions: list[MetricDefinition]


@definitions_router.get("/definitions", **documented(answer=MetricDefinitions))
async def metric_definitions() -> MetricDefinitions:
    """What each metric means, what is good, and what to do where it is not."""
    return defined_metrics()


def defined_metrics() -> MetricDefinitions:
    """The answer of GET /v1/metrics/definitions."""
    return MetricDefinitions(
        definitions=[
            MetricDefinition(
                metric=each.metric,
                section=each.section,
                means=each.means,
                good=each.good,
                otherwise=each.otherwise,
                rules=[_rule(rule) for rule in RULES if _judges(rule, each.metric)],
            )
            for each in definitions()
        ]
    )


def _judges(rule: Rule, metric: str) -> bool:
    return re.fullmatch(rule.metric.replace("*", "[^/]*"), metric) is not None


def _rule(rule: Rule) -> MetricRule:
    limits = [
        f"{severity} {condition.op} {condition.threshold:g}"
        for severity in ("warn", "error")
        if (condition := rule.condition(severity)) is not None
    ]
    window = "last value" if rule.window == 1 else f"{rule.of.replace('_', ' ')} of {rule.window} steps"
    return MetricRule(
        id=rule.id,
        holds=f"{window}: {', '.join(limits)}",
        remedies=[remedy.text.format(key=RUN_KEYS) for remedy in rule.remedies],
    )
