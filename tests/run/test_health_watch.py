"""Watching a run step by step, and reading it afterwards: the same findings."""

from __future__ import annotations

import json
import math
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.config.run import parse_config
from groupwise.run.health import HealthMonitor
from groupwise.run.health_report import examine
from groupwise.run.health_rule import Condition, Remedy, Rule
from groupwise.run.health_rules import RULES
from groupwise.store.tracking import Tracking, read_metrics

HIGH = Rule(
    id="too.high",
    metric="m/*",
    window=2,
    op=">",
    warn=1.0,
    error=10.0,
    settle=2,
    says="{name} is {value:g} in {window} steps",
    cause="it is high",
    remedies=(Remedy(text="learn slowly", overrides={"train.learning_rate": 1e-6}),),
)
METRICS = sorted({each.metric.replace("*", "x") for rule in RULES for each in (rule, *rule.also)})


def said(health: HealthMonitor, *values: float | None, metric: str = "m/a") -> list[tuple[int, str]]:
    return [(event.step, event.kind) for i, value in enumerate(values) for event in health.step(i, {metric: value})]


def test_begin_worse_better_and_end():
    health = HealthMonitor(rules=[HIGH])
    assert said(health, 2, 2, 30, 30, 2, 2) == [(1, "began"), (2, "worse")]
    (finding,) = health.standing
    assert (finding.severity, finding.value, finding.began) == ("warn", 2.0, 1)  # better again, without a word
    assert [event.kind for event in health.step(6, {"m/a": -9})] == []  # once is not over
    (event,) = health.step(7, {"m/a": 0})
    assert (event.kind, event.text, health.standing) == ("ended", "too.high (a) is over", ())
    assert event.finding is not None and (event.finding.began, event.finding.ended) == (1, 7)
    assert said(health, 5, 5) == [(0, "began")]  # and it may come again


def test_each_metric_of_a_pattern_is_judged_by_itself():
    health = HealthMonitor(rules=[HIGH])
    said(health, 2, 2, metric="m/a")
    said(health, 2, 20, metric="m/b")
    assert [(each.label, each.severity) for each in health.standing] == [
        ("too.high (b)", "error"),  # errors first
        ("too.high (a)", "warn"),
    ]
    assert said(health, 2, 2, metric="m/a/deeper") == []


def test_a_step_without_the_metric_changes_nothing():
    health = HealthMonitor(rules=[HIGH])
    assert said(health, 2) == [] and health.step(1, {"other": 5.0}) == []
    assert said(health, 2) == [(0, "began")]
    assert health.step(2, {}) == [] and health.standing


def test_what_is_not_finite_is_no_measurement():
    health = HealthMonitor(rules=[HIGH])
    assert said(health, 2, math.inf, None, math.nan, 2) == []
    assert said(health, 2) == [(0, "began")]


def test_an_event_is_json_with_everything_in_it():
    health = HealthMonitor(parse_config({"data": {"source": "x.jsonl"}, "rewards": ["a:b"]}), rules=[HIGH])
    health.step(1, {"m/a": 2.0})
    (event,) = health.step(2, {"m/a": 4.0})
    assert event.text == "warn: too.high (a): a is 3 in 2 steps (it is high); learn slowly: train.learning_rate=1e-06"
    assert json.loads(json.dumps(event.as_dict(), allow_nan=False)) == {
        "step": 2,
        "event": "began",
        "text": event.text,
        "finding": {
            "id": "too.high",
            "label": "too.high (a)",
            "metric": "m/a",
            "severity": "warn",
            "began": 2,
            "ended": None,
            "of": "mean",
            "window": 2,
            "value": 3.0,
            "op": ">",
            "threshold": 1.0,
            "says": "a is 3 in 2 steps",
            "cause": "it is high",
            "remedies": [{"text": "learn slowly", "overrides": ["train.learning_rate=1e-06"]}],
        },
    }


def test_also_with_a_star_is_the_same_name_or_all():
    same = Rule(
        id="x", metric="m/*", window=1, op=">", warn=0.0, says="{name}", cause="c", remedies=(Remedy(text="t"),),
        also=(Condition(metric="n/*", of="last", window=1, op=">", threshold=0.0),),
    )  # fmt: skip
    health = HealthMonitor(rules=[same])
    health.step(1, {"n/a": 1.0, "n/b": -1.0, "m/a": 1.0, "m/b": 1.0})
    assert [each.name for each in health.standing] == ["a"]
    every = Rule(
        id="x", metric="m", window=1, op=">", warn=0.0, says="s", cause="c", remedies=(Remedy(text="t"),),
        also=(Condition(metric="n/*", of="last", window=1, op=">", threshold=0.0),),
    )  # fmt: skip
    health = HealthMonitor(rules=[every])
    assert health.step(1, {"m": 1.0}) == []  # nothing to look at
    assert health.step(2, {"n/a": 1.0, "n/b": -1.0, "m": 1.0}) == []
    assert [event.kind for event in health.step(3, {"n/a": 1.0, "n/b": 1.0, "m": 1.0})] == ["began"]


# ---- afterwards ----


def run(directory: Path, steps: int) -> list[tuple[str, int, str]]:
    """A run that goes wrong, watched as the loop watches it; what was said."""
    said, health = [], HealthMonitor()
    with Tracking(directory) as tracking:
        for step in range(steps):
            trained = {
                "reward/mean": max(0.0, 0.5 - 0.02 * step),
                "reward/frac_zero_std": min(1.0, 0.05 * step),
                "rollout/groups_trained": 4.0 - step // 10,
                "loss/policy": math.nan if step == 17 else 1e-9,
                "optim/grad_norm": 0.5,
                "rollout/len_mean": 10.0 + step,
            }
            for metrics in (trained, {"eval/greedy/reward": 0.5 - 0.01 * step} if step % 5 == 0 else {}):
                if metrics:
                    tracking.log(step, metrics)
                    events = health.step(step, metrics)
                    tracking.health(events)
                    said += [(event.kind, event.step, event.text) for event in events]
    return said


def test_a_run_is_judged_the_same_from_its_file(tmp_path):
    said = run(tmp_path, 45)
    assert {kind for kind, _, _ in said} == {"began", "worse", "ended", "note"}
    written = [json.loads(line) for line in (tmp_path / "health.jsonl").read_text().splitlines()]
    assert [(each["event"], each["step"], each["text"]) for each in written] == said
    records = read_metrics(tmp_path / "metrics.jsonl")
    again = [(event.kind, event.step, event.text) for event in HealthMonitor().replay(records)]
    assert again == said
    report = examine(records)
    assert sorted(finding.began for finding in report.findings) == [step for kind, step, _ in said if kind == "began"]
    errors = [finding.severity == "error" for finding in report.findings]
    assert errors == sorted(errors, reverse=True), "the worst first"
    assert report.last_step == 44 and report.status == "error"
    assert json.loads(json.dumps(report.as_dict(), allow_nan=False))["status"] == "error"


def test_a_run_that_goes_on_knows_what_it_has_said(tmp_path):
    """Replaying the first steps and then watching the others says what watching all would have."""
    said = run(tmp_path, 45)
    records = read_metrics(tmp_path / "metrics.jsonl")
    health = HealthMonitor()
    health.replay(records[:30])
    later = [(event.kind, event.step, event.text) for event in health.replay(records[30:])]
    assert later == [each for each in said if each[1] >= 30] and later


def test_nothing_is_wrong_with_nothing():
    report = examine([])
    assert (report.status, report.last_step, report.findings, report.notes) == ("ok", None, (), ())


numbers = st.none() | st.floats() | st.sampled_from([0.0, 1.0, -1.0])
steps = st.lists(st.dictionaries(st.sampled_from(METRICS), numbers, max_size=8), max_size=40)


@settings(max_examples=50)
@given(steps=steps)
def test_no_numbers_break_it_and_every_text_is_whole(steps):
    health = HealthMonitor()
    events = [event for i, metrics in enumerate(steps) for event in health.step(i, metrics)]
    json.dumps([event.as_dict() for event in events], allow_nan=False)
    stands: set[str] = set()
    for event in events:  # began, then perhaps worse, then ended, and so on
        if event.finding is None:
            continue
        key = event.finding.label
        assert (key in stands) == (event.kind != "began")
        stands = stands - {key} if event.kind == "ended" else stands | {key}
    assert stands == {finding.label for finding in health.standing}
