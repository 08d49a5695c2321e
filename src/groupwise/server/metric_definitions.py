"""GET /v1/metrics/definitions: the table of metrics (`groupwise.algo.metrics`), with the health rules that judge each.
The web interface shows it at its numbers; `groupwise serve` and `groupwise ui` both send it.
"""

from __future__ import annotations

import re

from fastapi import APIRouter

from groupwise.algo.metrics import definitions
from groupwise.run.health_rule import RUN_KEYS, Rule
from groupwise.run.health_rules import RULES
from groupwise.sdk.types import Answer
from groupwise.server.wire import documented

definitions_router = APIRouter(prefix="/v1/metrics", tags=["metrics"])


class MetricRule(Answer):
    """A health rule about a metric."""

    id: str
    holds: str
    """The condition under which it holds, as "mean of 10: warn > 0.3, error > 0.8"."""
    remedies: list[str]


class MetricDefinition(Answer):
    """A metric. `<name>`, `<mode>` and the like in its name stand for any one part of it."""

    metric: str
    section: str
    means: str
    good: str
    """The range or the course to expect; empty where it is a plain count."""
    otherwise: str
    """What to do if it is not good; empty if only the rules say it."""
    rules: list[MetricRule]


class MetricDefinitions(Answer):
    """The answer of GET /v1/metrics/definitions, in the order of docs/metrics.md."""

    definitions: list[MetricDefinition]


@definitions_router.get("/definitions", **documented(answer=MetricDefinitions))
async def metric_definitions() -> MetricDefinitions:
    """Say what each metric means, what is good, and what to do where it is not."""
    return defined_metrics()


def defined_metrics() -> MetricDefinitions:
    """Return the answer of GET /v1/metrics/definitions."""
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
