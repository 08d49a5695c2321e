"""Watching a run: which rules hold now, since when, and what to say about it.

    health = HealthMonitor(config)
    for step ...:
        events = health.step(step, metrics)      what began, became an error, or ended; and zeros that need a word
        health.standing                          what is wrong now

The same metrics give the same findings, whenever they are read: `examine` does it for a run on disk.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import itemgetter
from typing import Any, Literal

from groupwise.config.run import RunConfig
from groupwise.run.health_remedies import Advice, advise
from groupwise.run.health_rule import RUN_KEYS, Aggregate, Condition, KeyNames, Op, Rule, Severity
from groupwise.run.health_rules import RULES
from groupwise.run.health_zeros import explain_zeros

Metrics = Mapping[str, float | None]  # None, as metrics.jsonl has it: a number that was not finite

Kind = Literal["began", "worse", "ended", "note"]

OWN_KEYS = ("step", "time", "non_finite")  # of a record that are no metrics


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A rule that holds of a metric, or held. `value` is what was last measured while it did; `ended` is the step at
    which it was over, None while it stands. `name` is what the rule's `*` matched."""

    id: str
    metric: str
    name: str
    severity: Severity
    says: str
    cause: str
    advice: tuple[Advice, ...] = ()
    of: Aggregate
    window: int
    value: float
    op: Op
    threshold: float
    began: int
    ended: int | None = None

    @property
    def label(self) -> str:
        """Return the label by which findings are distinguished."""
        return f"{self.id} ({self.name})" if self.name else self.id

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "label": self.label,
            "metric": self.metric,
            "severity": self.severity,
            "began": self.began,
            "ended": self.ended,
            "of": self.of,
            "window": self.window,
            "value": self.value,
            "op": self.op,
            "threshold": self.threshold,
            "says": self.says,
            "cause": self.cause,
            "remedies": [{"text": each.text, "overrides": list(each.overrides)} for each in self.advice],
        }


@dataclass(frozen=True, kw_only=True)
class Event:
    """A change of a run's health at a step: a finding began, became an error ("worse") or ended; a note explains
    something once."""

    kind: Kind
    step: int
    text: str
    finding: Finding | None = None

    def as_dict(self) -> dict[str, Any]:
        finding = {} if self.finding is None else {"finding": self.finding.as_dict()}
        return {"step": self.step, "event": self.kind, "text": self.text, **finding}


@dataclass(frozen=True)
class _Series:
    """Holds a metric's last values, as many as any rule reads, and the rules that judge it (their places in the
    list)."""

    values: deque[float]
    judged_by: tuple[int, ...]


@dataclass
class _Open:
    """A finding that stands, and how often in a row its rule has not held."""

    finding: Finding
    quiet: int = 0


def worst_first(finding: Finding) -> tuple[bool, int]:
    """Order findings: errors before warnings, then as they began."""
    return finding.severity != "error", finding.began


class HealthMonitor:
    """Watches a run's metrics. `config` makes remedies concrete; without it they are words. `keys`: how findings name
    the keys of the configuration."""

    def __init__(self, config: RunConfig | None = None, *, rules: Sequence[Rule] = RULES, keys: KeyNames = RUN_KEYS):
        self._config, self._rules, self._keys = config, rules, keys
        self._series: dict[str, _Series | None] = {}  # None: no rule looks at it
        self._open: dict[tuple[str, str], _Open] = {}
        self._explained: set[str] = set()

    @property
    def standing(self) -> tuple[Finding, ...]:
        """Return the open findings, errors first."""
        findings = [each.finding for each in self._open.values()]
        return tuple(sorted(findings, key=worst_first))

    def step(self, step: int, metrics: Metrics) -> list[Event]:
        """Take in what was measured at a step, and say what changed. Training and evaluation may come one by one."""
        due: list[tuple[int, str]] = []
        for metric, value in metrics.items():
            if metric not in self._series:
                self._series[metric] = _series(self._rules, metric)
            if (series := self._series[metric]) is not None:
                series.values.append(math.nan if value is None else float(value))
                due += [(place, metric) for place in series.judged_by]
        due.sort(key=itemgetter(0))  # what explains another is judged before it
        events = [event for place, metric in due for event in self._judge(self._rules[place], metric, step)]
        for kind, text in explain_zeros(metrics).items():
            if kind not in self._explained:
                self._explained.add(kind)
                events.append(Event(kind="note", step=step, text=text))
        return events

    def replay(self, records: Iterable[Mapping[str, Any]]) -> list[Event]:
        """Take in the lines of `metrics.jsonl`, as `step` did when they were written: a run that goes on begins so."""
        events = []
        for record in records:
            metrics = {key: value for key, value in record.items() if key not in OWN_KEYS}
            evaluated = {key: value for key, value in metrics.items() if key.startswith("eval/")}
            trained = {key: value for key, value in metrics.items() if key not in evaluated}
            for part in (trained, evaluated):
                if part:
                    events += self.step(record["step"], part)
        return events

    # -- one rule, one metric ------------------------------------------------------------------------------------------

    def _judge(self, rule: Rule, metric: str, step: int) -> list[Event]:
        key, severity = (rule.id, metric), self._severity(rule, metric)
        stands = self._open.get(key)
        if severity is None:
            return [] if stands is None else self._quieter(key, stands, rule, step)
        finding = self._finding(rule, metric, severity, step)
        if stands is None:
            kind: Kind | None = "began"
            finding = replace(finding, advice=advise(rule.remedies, self._config, name=finding.name))
        else:
            kind = "worse" if (severity, stands.finding.severity) == ("error", "warn") else None
            finding = replace(finding, advice=stands.finding.advice, began=stands.finding.began)
        self._open[key] = _Open(finding)
        return [] if kind is None else [Event(kind=kind, step=step, text=_text(finding), finding=finding)]

    def _quieter(self, key: tuple[str, str], stands: _Open, rule: Rule, step: int) -> list[Event]:
        stands.quiet += 1
        if stands.quiet < rule.settle:
            return []
        del self._open[key]
        finding = replace(stands.finding, ended=step)
        return [Event(kind="ended", step=step, text=f"{finding.label} is over", finding=finding)]

    def _severity(self, rule: Rule, metric: str) -> Severity | None:
        """Return how bad it is now; None where the rule does not hold."""
        values, errors = self._of(metric), self._errors(rule, metric)
        measured: Severity | None = None
        for severity in ("warn", "error"):
            condition = rule.condition(severity)
            if condition is not None and condition.holds(values, errors):
                measured = severity
        if measured is None or any(id in rule.unless for id, _ in self._open):
            return None
        return measured if all(self._holds(each, rule, metric) for each in rule.also) else None

    def _holds(self, condition: Condition, rule: Rule, metric: str) -> bool:
        pattern = condition.metric
        if "*" in rule.metric:
            pattern = pattern.replace("*", _name(rule.metric, metric))
        names = [name for name, series in self._series.items() if series is not None and _fits(pattern, name)]
        return bool(names) and all(condition.holds(self._of(name)) for name in names)

    def _of(self, metric: str) -> list[float]:
        series = self._series[metric]
        return [] if series is None else list(series.values)

    def _errors(self, rule: Rule, metric: str) -> list[float]:
        """Return the standard errors of the metric's values; nothing where the rule asks for none, or there are
        none."""
        its = "" if rule.errors is None else rule.errors.replace("*", _name(rule.metric, metric))
        return self._of(its) if its in self._series else []

    def _finding(self, rule: Rule, metric: str, severity: Severity, step: int) -> Finding:
        condition = rule.condition(severity)
        assert condition is not None
        value = condition.measure(self._of(metric), self._errors(rule, metric))
        assert value is not None
        name = _name(rule.metric, metric)
        return Finding(
            id=rule.id,
            metric=metric,
            name=name,
            severity=severity,
            says=rule.says.format(value=value, window=rule.window, name=name, key=self._keys),
            cause=rule.cause.format(key=self._keys),
            of=rule.of,
            window=rule.window,
            value=value,
            op=rule.op,
            threshold=condition.threshold,
            began=step,
        )


def _text(finding: Finding) -> str:
    """Return a finding in a line."""
    first = f"; {finding.advice[0]}" if finding.advice else ""
    return f"{finding.severity}: {finding.label}: {finding.says} ({finding.cause}){first}"


@cache
def _pattern(metric: str) -> re.Pattern[str]:
    return re.compile(re.escape(metric).replace(r"\*", r"([^/]+)"))


def _fits(pattern: str, metric: str) -> bool:
    return pattern == metric or ("*" in pattern and _pattern(pattern).fullmatch(metric) is not None)


def _name(pattern: str, metric: str) -> str:
    """Return what `*` stands for; "" where the pattern has none."""
    match = _pattern(pattern).fullmatch(metric)
    return match[1] if match is not None and match.groups() else ""


def _series(rules: Sequence[Rule], metric: str) -> _Series | None:
    windows = [each.window for rule in rules for each in (rule, *rule.also) if _fits(each.metric, metric)]
    windows += [rule.window for rule in rules if rule.errors is not None and _fits(rule.errors, metric)]
    judged_by = tuple(place for place, rule in enumerate(rules) if _fits(rule.metric, metric))
    return _Series(deque(maxlen=max(windows)), judged_by) if windows else None
