"""The health of a run from what it has recorded: every finding, those that are over included."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from groupwise.config.job import job_name
from groupwise.config.run import RunConfig
from groupwise.run.health import Event, Finding, HealthMonitor, worst_first
from groupwise.run.health_rule import KeyNames
from groupwise.run.health_rules import RULES

Status = Literal["ok", "warn", "error"]

# A job's batch is the same at each of its steps, so how its rewards and lengths change from step to step says nothing.
_OF_RUNS = ("reward.stuck_zero", "reward.falling", "reward.hack_suspect", "len.monotone_max", "len.collapse")


@dataclass(frozen=True, kw_only=True)
class Report:
    """The report of a run's health: `findings` in the order in which they began; `ended` is None for those that stand.
    `last_step` is the last one that was recorded, None where nothing was."""

    last_step: int | None
    findings: tuple[Finding, ...]
    notes: tuple[Event, ...]

    @property
    def standing(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.ended is None)

    @property
    def status(self) -> Status:
        """Return the worst severity of the open findings."""
        severities = {finding.severity for finding in self.standing}
        return "error" if "error" in severities else "warn" if severities else "ok"

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "status": self.status,
            "last_step": self.last_step,
            "findings": [finding.as_dict() for finding in self.findings],
            "notes": [note.as_dict() for note in self.notes],
        }


def examine(records: Iterable[Mapping[str, Any]], *, config: RunConfig | None = None) -> Report:
    """Judge a run by its records, as `read_metrics` gives them: the same as if it had been watched."""
    return _judged(records, HealthMonitor(config))


def examine_job(steps: Iterable[Mapping[str, Any]]) -> Report:
    """Judge a job of the live server by its steps, as `Ledger.metrics` gives them; in the words of a request."""
    records = [{**dict.fromkeys(step.get("non_finite", ())), **step} for step in steps]
    rules = [rule for rule in RULES if rule.id not in _OF_RUNS]
    return _judged(records, HealthMonitor(rules=rules, keys=KeyNames(job_name)))


def _judged(records: Iterable[Mapping[str, Any]], health: HealthMonitor) -> Report:
    records = list(records)
    events = health.replay(records)
    ended = [event.finding for event in events if event.kind == "ended" and event.finding is not None]
    return Report(
        last_step=max((record["step"] for record in records), default=None),
        findings=tuple(sorted([*ended, *health.standing], key=worst_first)),
        notes=tuple(event for event in events if event.kind == "note"),
    )
