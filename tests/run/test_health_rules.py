"""Each rule on a series made for it: silent while all is well, there at the right step, over when it is well again."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import get_args

import numpy as np
import pytest

from groupwise.algo.metrics import rollout_metrics
from groupwise.config.run import RunConfig, parse_config
from groupwise.config.yaml import parse_keys
from groupwise.run.health import Event, HealthMonitor
from groupwise.run.health_report import examine
from groupwise.run.health_rule import COMPARE, RUN_KEYS, Aggregate, Condition, KeyNames, Rule, Times, aggregate
from groupwise.run.health_rules import RULES, TABLE, read_rules
from groupwise.types import Completion, FinishReason, Prompt, Rollout, RolloutGroup, Turn
from slow_cases import crossed
from wording import raises

ROOT = Path(__file__).parent.parent.parent
Value = float | Callable[[int], float]
BY_ID = {rule.id: rule for rule in RULES}


@dataclass(frozen=True)
class Case:
    """`sick` metrics make the rule hold after `after` steps, `worse` ones an error (default: no such level or none
    to try), `well` ones do not. A function gives the value at a step, counted from 0."""

    sick: Mapping[str, Value]
    well: Mapping[str, Value]
    after: int
    worse: Mapping[str, Value] = field(default_factory=dict)
    severity: str = "warn"
    name: str = ""


FLAT = {"eval/greedy/reward": 0.5}
SOLVED = {"reward/frac_zero_std": 0.9, "reward/frac_best": 0.95, "reward/max": 1.0}
CASES = {
    "env.failed": Case({"env/failed_frac": 0.2}, {"env/failed_frac": 0.01}, 3, {"env/failed_frac": 0.9}),
    "env.tool_errors": Case({"env/tool_error_frac": 0.8}, {"env/tool_error_frac": 0.2}, 5),
    "env.no_calls": Case({"env/tool_calls": 0.0, "env/tools": 2.0}, {"env/tool_calls": 0.5, "env/tools": 2.0}, 10),
    "policy.fell_apart": Case(
        {"reward/mean": lambda t: 0.3 * (t < 2), "rollout/truncated_frac": lambda t: float(t > 1)},
        {"reward/mean": 0.3, "rollout/truncated_frac": 0.1},
        5,
        severity="error",
    ),
    "policy.fell_silent": Case(
        {"reward/mean": lambda t: 0.3 * (t < 2), "rollout/len_mean": lambda t: 50.0 if t < 2 else 3.0},
        {"reward/mean": 0.3, "rollout/len_mean": 50.0},
        5,
        severity="error",
    ),
    "preference.unlikely": Case(
        {"preference/chosen_gain": -0.3, "preference/margin": 1.0},
        {"preference/chosen_gain": -0.05, "preference/margin": 1.0},
        10,
        {"preference/chosen_gain": -0.9, "preference/margin": 1.0},
    ),
    "preference.no_signal": Case({"preference/accuracy": 0.5}, {"preference/accuracy": 0.8}, 30),
    "reward.stuck_zero": Case({"reward/mean": 0.03}, {"reward/mean": 0.5}, 20, {"reward/mean": 0.0}),
    "reward.exploited": Case(
        {"reward/exact/part": lambda t: max(0.35, 0.7 - 0.045 * t), "reward/mean": lambda t: 8.8 + t},
        {"reward/exact/part": 0.7, "reward/mean": lambda t: 8.8 + t},
        12,
        {"reward/exact/part": 0.0, "reward/mean": 36.0},
        name="exact",
    ),
    "reward.silent": Case({"reward/form/mean": 0.0}, {"reward/form/mean": 0.5}, 20, name="form"),
    "reward.error_rate": Case(
        {"rollout/error_frac": 0.2}, {"rollout/error_frac": 0.01}, 3, {"rollout/error_frac": 0.9}
    ),
    "reward.not_applicable": Case({"rollout/excluded_frac": 0.5}, {"rollout/excluded_frac": 0.1}, 3),
    "teacher.unlike": Case({"teacher/kl": 6.0}, {"teacher/kl": 1.0}, 5),
    "reward.gamed": Case(
        {
            "eval/greedy/reward": lambda t: max(0.5, 0.8 - 0.1 * t),
            "eval/greedy/training_reward": lambda t: 0.8 + 0.01 * t,
        },
        {"eval/greedy/reward": lambda t: 0.8 + 0.01 * t, "eval/greedy/training_reward": lambda t: 0.9 + 0.01 * t},
        3,
        {"eval/greedy/reward": 0.1, "eval/greedy/training_reward": 2.0},
        name="greedy",
    ),
    "reward.hack_suspect": Case(
        {"rollout/len_mean": lambda t: 10.0 + t, **FLAT}, {"rollout/len_mean": 50.0, **FLAT}, 20
    ),
    "reward.noise": Case({"reward/judge/noise": 0.6}, {"reward/judge/noise": 0.0}, 3, name="judge"),
    "reward.dominated": Case({"reward/form/share": 0.05}, {"reward/form/share": 0.4}, 5, name="form"),
    "reward.falling": Case({"reward/mean": lambda t: 0.9 - 0.02 * t}, {"reward/mean": 0.5}, 30),
    "reward.lost": Case(
        {"reward/mean": lambda t: max(0.5, 0.9 - 0.006 * t)},
        {"reward/mean": 0.9},
        51,
        {"reward/mean": lambda t: max(0.2, 0.5 - 0.006 * t)},
    ),
    "reward.flat": Case(
        {"reward/mean": lambda t: 0.4 + 0.1 * (t % 2), "reward/frac_zero_std": 0.2, "optim/lr": 1e-5},
        {"reward/mean": lambda t: 0.4 + 0.01 * t, "reward/frac_zero_std": 0.2, "optim/lr": 1e-5},
        100,
    ),
    "eos.missing": Case({"rollout/truncated_frac": 1.0}, {"rollout/truncated_frac": 0.1}, 5, severity="error"),
    "len.clipped": Case(
        {"rollout/truncated_frac": 0.5}, {"rollout/truncated_frac": 0.1}, 5, {"rollout/truncated_frac": 0.95}
    ),
    "env.limits": Case({"env/limit_frac": 0.95}, {"env/limit_frac": 0.5}, 5),
    "len.monotone_max": Case(
        {"rollout/len_mean": lambda t: 20.0 + t, "rollout/truncated_frac": 0.2},
        {"rollout/len_mean": 30.0, "rollout/truncated_frac": 0.2},
        20,
    ),
    "len.collapse": Case(
        {"rollout/len_mean": lambda t: 50.0 - 2 * t, "reward/mean": 0.3},
        {"rollout/len_mean": 50.0, "reward/mean": 0.3},
        20,
    ),
    "policy.one_token": Case(
        {"rollout/top_token_frac": 0.9}, {"rollout/top_token_frac": 0.2}, 5, {"rollout/top_token_frac": 1.0}
    ),
    "entropy.collapse": Case({"loss/entropy": 0.005}, {"loss/entropy": 0.4}, 10, {"loss/entropy": 0.0}),
    "entropy.high": Case({"loss/entropy": lambda t: 1.5 + 0.01 * t}, {"loss/entropy": 0.4}, 20),
    "kl.high": Case({"kl/mean": 1.0}, {"kl/mean": 0.1}, 10, {"kl/mean": 3.0}),
    "kl.exploded": Case({"loss/kl": 50.0}, {"loss/kl": 0.1}, 1, {"loss/kl": 156_433.0}),
    "policy.destroyed": Case({"final/logprob_drop": 0.3}, {"final/logprob_drop": 0.03}, 1, {"final/logprob_drop": 7.7}),
    "clip.high": Case({"loss/clip_frac": 0.4}, {"loss/clip_frac": 0.05}, 10),
    "eval.regress": Case(
        {"eval/greedy/reward": lambda t: 0.8 if t == 0 else 0.7},
        {"eval/greedy/reward": 0.8},
        2,
        {"eval/greedy/reward": 0.1},
        name="greedy",
    ),
    "group.solved": Case(
        {**SOLVED, "reward/mean": lambda t: min(0.95, 0.1 * t)},
        {**SOLVED, "reward/frac_zero_std": 0.3, "reward/mean": 0.95},
        10,
    ),
    "group.same_answer": Case({"rollout/frac_same": 0.6}, {"rollout/frac_same": 0.05}, 5, {"rollout/frac_same": 1.0}),
    "group.zero_std": Case(
        {"reward/frac_zero_std": 0.9}, {"reward/frac_zero_std": 0.3}, 10, {"reward/frac_zero_std": 1.0}
    ),
    "adv.skip_ratio": Case({"rollout/groups_trained": lambda t: 2.0 * (t % 2)}, {"rollout/groups_trained": 4.0}, 10),
    "data.too_long": Case({"data/too_long_frac": 0.3}, {"data/too_long_frac": 0.0}, 3),
    "grad.nan": Case({"optim/refused": 1.0}, {"optim/refused": 0.0}, 1, {"optim/refused": 1.0}),
    "loss.nan": Case({"loss/policy": math.nan}, {"loss/policy": 0.1}, 1, severity="error"),
    "grad.explode": Case({"optim/grad_norm": 30.0}, {"optim/grad_norm": 0.7}, 5, {"optim/grad_norm": 1000.0}),
    "grad.zero_streak": Case({"optim/grad_norm": 0.0}, {"optim/grad_norm": 0.7}, 5, severity="error"),
    "lr.zero": Case({"optim/lr": 0.0}, {"optim/lr": 1e-4}, 5),
    "mismatch.logp": Case(
        {"mismatch/logprob_diff_mean": 0.2},
        {"mismatch/logprob_diff_mean": 1e-6},
        5,
        {"mismatch/logprob_diff_mean": 2.0},
    ),
    "mismatch.on_policy": Case(
        {"mismatch/logprob_diff_mean": 0.05, "rollout/staleness_max": 0.0},
        {"mismatch/logprob_diff_mean": 1e-6, "rollout/staleness_max": 0.0},
        10,
    ),
    "mismatch.dropped": Case({"mismatch/dropped_tokens": 3.0}, {"mismatch/dropped_tokens": 0.0}, 1),
    "sampling.kept_mass": Case({"sampling/kept_mass": 0.3}, {"sampling/kept_mass": 0.9}, 10),
    "is.min": Case({"mismatch/ratio_min": 0.01}, {"mismatch/ratio_min": 0.9}, 10),
    "is.clipped_frac": Case({"mismatch/clipped_frac": 0.5}, {"mismatch/clipped_frac": 0.01}, 10, name="clipped"),
    "staleness.max": Case({"rollout/staleness_max": 12.0}, {"rollout/staleness_max": 1.0}, 10),
    "selection.short": Case(
        {"rollout/selection_len": -0.1}, {"rollout/selection_len": 0.01}, 10, {"rollout/selection_len": -0.5}
    ),
    "selection.long": Case(
        {"rollout/selection_len": 0.1}, {"rollout/selection_len": -0.01}, 10, {"rollout/selection_len": 0.5}
    ),
    "selection.reward": Case({"rollout/selection_reward": 0.3}, {"rollout/selection_reward": 0.0}, 10),
    "sync.slow": Case({"time/sync_s": 9.0}, {"time/sync_s": 0.1}, 5),
}


def metrics_at(series: Mapping[str, Value], t: int) -> dict[str, float]:
    return {key: value(t) if callable(value) else value for key, value in series.items()}


def feed(health: HealthMonitor, series: Mapping[str, Value], steps: int, *, first: int = 1, t: int = 0) -> list[Event]:
    """The events of `steps` steps."""
    return [event for i in range(steps) for event in health.step(first + i, metrics_at(series, t + i))]


def kinds(events: list[Event], id: str) -> list[tuple[str, int]]:
    return [(event.kind, event.step) for event in events if event.finding is not None and event.finding.id == id]


def test_every_rule_has_a_case():
    assert list(CASES) == [rule.id for rule in RULES]


@pytest.mark.parametrize("id", CASES)
def test_silent_while_all_is_well(id: str):
    assert feed(HealthMonitor(), CASES[id].well, 60) == []


@pytest.mark.parametrize("id", CASES)
def test_it_begins_in_time_and_once_and_goes_away(id: str):
    case, rule, health = CASES[id], BY_ID[id], HealthMonitor()
    assert kinds(feed(health, case.sick, case.after - 1), id) == []
    began = feed(health, case.sick, 1, first=case.after, t=case.after - 1)
    assert kinds(began, id) == [("began", case.after)]
    (event,) = (event for event in began if event.finding is not None and event.finding.id == id)
    finding = event.finding
    assert finding is not None and finding.severity == case.severity and finding.name == case.name
    assert finding.label in event.text and finding.says in event.text and "{" not in event.text
    assert [each.id for each in health.standing].count(id) == 1
    longest = max(min(each.window, 60) for each in (rule, *rule.also))
    over = feed(health, case.well, longest + rule.settle, first=case.after + 1)
    ((kind, step),) = kinds(over, id)
    assert kind == "ended" and step >= case.after + rule.settle
    assert id not in [each.id for each in health.standing]


@pytest.mark.parametrize("id", [id for id, case in CASES.items() if case.worse])
def test_it_becomes_an_error_and_says_so_once(id: str):
    case, health = CASES[id], HealthMonitor()
    feed(health, case.sick, case.after)
    events = feed(health, case.worse, 40, first=case.after + 1, t=case.after)
    assert [kind for kind, _ in kinds(events, id)] == ["worse"]
    assert {each.id: each.severity for each in health.standing}[id] == "error"


def test_which_rules_have_an_error_level():
    both = {rule.id for rule in RULES if rule.warn is not None and rule.error is not None}
    assert both == {id for id, case in CASES.items() if case.worse}
    assert {rule.id for rule in RULES if rule.warn is None} == {
        id for id, case in CASES.items() if case.severity == "error"
    }


# ---- what only looks like it ----


@pytest.mark.parametrize(
    ("id", "series"),
    [
        ("reward.stuck_zero", {"reward/mean": lambda t: 0.004 * t}),  # low, and rising
        ("reward.stuck_zero", {"reward/mean": -0.5}),  # a penalty: nothing is known about its scale
        ("reward.silent", {"reward/form/mean": -0.5}),
        ("reward.falling", {"reward/mean": lambda t: -1.0 - t}),
        ("reward.hack_suspect", {"rollout/len_mean": lambda t: 10.0 + t}),  # nobody looked at held-out prompts
        (
            "reward.hack_suspect",
            {"rollout/len_mean": lambda t: 10.0 + t, "eval/greedy/reward": lambda t: 0.3 + 0.02 * t},
        ),
        ("group.solved", {**SOLVED, "reward/frac_zero_std": 1.0, "reward/mean": 0.0}),
        ("group.solved", {**SOLVED, "reward/frac_best": 0.5, "reward/mean": lambda t: 0.05 * t}),  # some have no best
        ("group.solved", {**SOLVED, "reward/max": lambda t: 9.0 + t, "reward/mean": lambda t: 8.0 + t}),  # no bound
        ("reward.silent", {"reward/form/mean": lambda t: float(t < 3)}),  # it has been there
        ("reward.exploited", {"reward/exact/part": lambda t: 0.7 - 0.03 * t, "reward/mean": lambda t: 9.0 - 0.2 * t}),
        ("reward.exploited", {"reward/brevity/part": lambda t: -0.1 * t, "reward/mean": lambda t: 0.1 * t}),  # a price
        (  # now and then one is right
            "reward.exploited",
            {"reward/exact/part": lambda t: 0.06 * (t % 5 == 0), "reward/mean": lambda t: 0.1 * t},
        ),
        ("group.zero_std", {**SOLVED, "reward/mean": lambda t: min(0.9, 0.1 * t)}),
        ("len.clipped", {"rollout/truncated_frac": 1.0}),  # eos.missing says more
        ("len.monotone_max", {"rollout/len_mean": lambda t: 20.0 + t, "rollout/truncated_frac": 0.0}),
        (
            "len.collapse",
            {"rollout/len_mean": lambda t: 50.0 - 2 * t, "reward/mean": lambda t: 0.02 * t},
        ),  # it got brief
        ("entropy.high", {"loss/entropy": lambda t: 4.0 - 0.05 * t}),  # high, and falling
        ("grad.explode", {"optim/grad_norm": lambda t: 20.0 if t == 7 else 0.5}),  # once
        ("mismatch.on_policy", {"mismatch/logprob_diff_mean": 0.05, "rollout/staleness_max": 2.0}),
        ("mismatch.on_policy", {"mismatch/logprob_diff_mean": 0.05}),
        ("kl.high", {"kl/mean": lambda t: 40.0 if t % 4 == 0 else 0.03}),  # single tokens
        ("eval.regress", {"eval/greedy/add/reward": lambda t: 0.5 - 0.1 * t}),  # a part of the held-out prompts
        ("grad.zero_streak", {"optim/grad_norm": lambda t: float(t % 4 == 0)}),
        ("loss.nan", {"loss/policy": 0.0}),
    ],
)
def test_what_is_something_else(id: str, series: Mapping[str, Value]):
    assert kinds(feed(HealthMonitor(), series, 40), id) == []


@pytest.mark.parametrize(("dropped", "severity"), [(0.15, "error"), (0.0, None)])
def test_groups_that_are_dropped_for_their_age_are_named_as_selection(dropped: float, severity: str | None):
    """A run that drew completions of 11.47 tokens and, as it dropped late groups, trained those of 9.51."""
    late = (11.47 - 0.85 * 9.51) / 0.15 if dropped else 11.47
    health, random = HealthMonitor(), Random(0)

    def group(mean: float) -> RolloutGroup:
        lengths = [max(1, round(random.gauss(mean, 2))) for _ in range(4)]
        completions = [
            Completion(token_ids=(5,) * n, logprobs=(-1.0,) * n, text="", finish_reason=FinishReason.STOP)
            for n in lengths
        ]
        rollouts = [Rollout(turns=(Turn((1,), c),), reward=float(i % 2)) for i, c in enumerate(completions)]
        return RolloutGroup(prompt=Prompt(id="p"), rollouts=tuple(rollouts))

    for step in range(1, 21):
        trained = [group(9.51 if dropped else 11.47) for _ in range(17)]
        sampled = [*trained, *(group(late) for _ in range(round(20 * dropped)))]
        health.step(step, rollout_metrics(sampled, trained=trained, used=trained))
    found = {each.id: each for each in health.standing}
    if severity is None:
        assert not any(id.startswith("selection") for id in found)
    else:
        assert found["selection.short"].severity == severity
        assert "-17%" in found["selection.short"].says and "too late" in found["selection.short"].cause


def test_a_rule_that_explains_another_replaces_it():
    """Rewards rise, then all groups are equal: the task is solved, not stuck."""
    health = HealthMonitor()
    feed(health, {**SOLVED, "reward/frac_zero_std": 0.2, "reward/mean": lambda t: 0.05 * t}, 20)
    feed(health, {**SOLVED, "reward/frac_zero_std": 1.0, "reward/mean": 1.0}, 30, first=21)
    assert [each.id for each in health.standing] == ["group.solved"]


def test_a_reward_hack_is_named_and_not_taken_for_success():
    """Right answers are given up for the reward that can be had without them, until every group is equal: from 0.70 to
    0 of `exact`, from 8.8 to 36 in total."""

    def hack(t: int) -> dict[str, Value]:
        exact, tags = max(0.0, 0.7 - 0.04 * t), min(36.0, 8.1 + 1.2 * t)
        equal = 1.0 if t > 25 else 0.1
        return {
            "reward/exact/mean": exact,
            "reward/exact/part": exact,
            "reward/tags/mean": tags,
            "reward/tags/part": tags,
            "reward/mean": exact + tags,
            "reward/max": max(36.0, exact + tags),
            "reward/frac_zero_std": equal,
            "reward/frac_best": equal,
            "loss/entropy": 0.1,
        }

    health, events = HealthMonitor(), list[Event]()
    for t in range(150):
        events += health.step(t + 1, {name: float(value) for name, value in hack(t).items()})
    labels = {event.finding.label for event in events if event.finding is not None}
    assert "reward.exploited (exact)" in labels
    assert not {"group.solved", "reward.silent (exact)", "reward.exploited (tags)"} & labels
    first = next(event for event in events if event.finding is not None)
    assert first.finding is not None and first.finding.id == "reward.exploited" and first.step < 20
    assert {each.label: each.severity for each in health.standing}["reward.exploited (exact)"] == "error"


@pytest.mark.parametrize(
    ("completions", "solved"),
    crossed((8, 64, 256), (0.01, 0.1, 0.5), quick=lambda *both: both in {(8, 0.01), (8, 0.5), (64, 0.01), (256, 0.1)}),
)
def test_luck_is_not_taken_for_a_policy_that_fell_apart(completions: int, solved: float):
    """No false alarm in 200 runs of 40 steps whose share of solved tasks stays, with answers of any length."""
    rng = np.random.default_rng(completions)
    for _ in range(200):
        health = HealthMonitor()
        cut = rng.uniform(0, 1)
        for step in range(40):
            reward, truncated = (float(rng.binomial(completions, p)) / completions for p in (solved, cut))
            length = float(rng.normal(50, 10))
            health.step(
                step + 1, {"reward/mean": reward, "rollout/truncated_frac": truncated, "rollout/len_mean": length}
            )
            assert not {each.id for each in health.standing} & {"policy.fell_silent"}
            if completions >= 64:
                assert "policy.fell_apart" not in {each.id for each in health.standing}


@pytest.mark.parametrize(
    ("sign", "found"),
    [
        ({"loss/entropy": 0.0001}, "entropy.collapse"),
        ({"rollout/truncated_frac": 1.0}, "eos.missing"),
        ({"rollout/truncated_frac": 0.5}, "len.clipped"),
        ({"rollout/top_token_frac": 0.99}, "policy.one_token"),
        ({"kl/mean": 3.0}, "kl.high"),
    ],
)
def test_what_fell_apart_is_not_solved(sign: dict[str, float], found: str):
    """Equal rewards after a rise, but no end tokens, no entropy, one token, or far from the reference."""
    health = HealthMonitor()
    events = feed(health, {**SOLVED, **sign, "reward/mean": lambda t: min(0.95, 0.1 * t)}, 30)
    assert kinds(events, found) and not kinds(events, "group.solved")


# ---- the data ----


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_is_whole(rule: Rule):
    earlier = [each.id for each in RULES[: RULES.index(rule)]]
    assert set(rule.unless) <= set(earlier)  # what explains it has been judged before it
    assert rule.warn is not None or rule.error is not None
    assert rule.remedies and rule.cause and rule.says.format(value=1.0, window=2, name="x", key=RUN_KEYS)
    assert ("*" in rule.metric) == ("{name}" in rule.says)
    assert any(not remedy.only_if for remedy in rule.remedies)  # one at least is always there, in words or as a key


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_every_key_of_a_remedy_exists(rule: Rule):
    named: list[str] = []
    names = KeyNames(lambda key: named.append(key) or key)  # what its texts call keys
    for text in (rule.says, rule.cause, *(text for each in rule.remedies for text in (each.text, each.job_text))):
        text.format(value=1.0, window=2, name="x", key=names)
    for remedy in rule.remedies:
        named += (*remedy.overrides, *remedy.only_if)
    for key in named:
        assert has(RunConfig, key), key


def has(model: type, dotted: str) -> bool:
    """Whether the configuration has the key, through sections that may be null."""
    for part in parse_keys(dotted):
        fields = getattr(model, "model_fields", {})
        if part not in fields:
            return False
        annotation = fields[part].annotation
        options = getattr(annotation, "__args__", (annotation,))
        model = next((each for each in options if hasattr(each, "model_fields")), type(None))
    return True


@pytest.mark.parametrize(
    ("values", "of", "expected"),
    [
        ([1, 2, 6], "mean", 3.0),
        ([1, 2, 6], "median", 2),
        ([1, 2, 6], "last", 6),
        ([0, 2, 0, 0], "zeros", 0.75),
        (range(1, 21), "gain", 15.0),  # the last five minus the first five
        (range(1, 21), "growth", 6.0),
        ([1.0, 2.0], "gain", 1.0),
        ([0, 0, 5], "growth", 1.0),
        ([0.5, 1.0, 0.75], "drop", 0.25),
        ([-1.0, -2.0], "drop", 0.5),
        ([0.0, 0.0], "drop", 0.0),
        ([1.0] * 3 + [4.0] * 3, "rise", 3.0 - 3 * math.sqrt(0.9) * 1.0),
        ([1.0, 2.0] * 6, "rise", 0.0 - 3 * math.sqrt(0.5) * math.sqrt(0.5)),
        ([4.0] * 10 + [1.0] * 10, "decline", 0.25),
        ([1.0, 2.0] * 15, "decline", 1.0),  # noise
        ([0.0] * 5 + [1.0] * 5, "decline", 1.0),
        ([0.0] * 2, "fall", 0.0),
        ([2.0] * 12 + [0.0] * 12, "fall", 1 - 4 * math.sqrt(4 / 23 / 2) / math.sqrt(5) / 2),
        ([1.0, 2.0] * 6, "fall", 0.0),
        ([3, 2, 1], "trend", -1.0),
        ([2, 2, 1, 3], "trend", 1 / 6),
        ([1, 3, 2], "trend", 1 / 3),
        ([1], "trend", 0.0),
        ([1, math.nan, math.inf], "not_finite", 2.0),
    ],
)
def test_aggregates(values, of, expected):
    assert aggregate(list(values), of) == pytest.approx(expected)


def test_a_drop_that_standard_errors_explain_is_none():
    condition = Condition(metric="m", of="drop", least=2, op=">", threshold=0.1, errors="e")
    assert condition.measure([0.8, 0.6], [0.01, 0.01]) == pytest.approx(0.25)
    assert condition.measure([0.8, 0.6], [0.2, 0.2]) == 0.0 == condition.measure([0.8, 0.6], [0.01, math.nan])
    assert condition.measure([0.8, 0.6]) == pytest.approx(0.25), "records without standard errors count as they are"
    assert condition.measure([math.nan, 0.8, 0.6], [math.nan, 0.01, 0.01]) == pytest.approx(0.25)


@pytest.mark.parametrize("id", ["eval.regress", "reward.falling"])
def test_runs_in_which_nothing_changes_but_by_chance_are_seldom_warned_of(id: str):
    """20 evaluations of 64 prompts, and 60 steps of 16 prompts in groups of 4, by policies that stay what they are."""
    rng, runs = np.random.default_rng(0), 40
    wrong = 0
    for _ in range(runs):
        health, chances = HealthMonitor(), rng.beta(1, 1, 64)
        for t in range(20):
            did = rng.random(64) < chances
            error = float(did.std(ddof=1)) / 8
            health.step(t, {"eval/sampled/reward": float(did.mean()), "eval/sampled/reward_stderr": error})
        events = [health.step(t, {"reward/mean": rng.binomial(64, 0.2) / 64}) for t in range(60)]
        labels = {each.id for each in health.standing} | {e.finding.id for es in events for e in es if e.finding}
        wrong += id in labels
    assert wrong <= 0.1 * runs + 3.1 * math.sqrt(0.09 * runs)


def test_what_has_surely_fallen_is_told_of_although_evaluations_have_errors():
    health = HealthMonitor()
    for t, mean in enumerate((0.5, 0.7, 0.68, 0.4)):
        health.step(t, {"eval/sampled/reward": mean, "eval/sampled/reward_stderr": 0.04})
        assert bool(health.standing) == (t == 3)
    (finding,) = health.standing
    assert (finding.id, finding.severity, finding.value) == ("eval.regress", "error", pytest.approx(0.3 / 0.7))


def test_values_that_are_not_finite_are_no_values():
    condition = Condition(metric="m", of="mean", window=3, op=">", threshold=0.5)
    assert condition.measure([1.0, math.nan, 1.0]) is None  # two of the three that it needs
    assert condition.measure([1.0, 1.0, 1.0, math.inf, 2.0]) is None
    assert Condition(metric="m", window=3, least=1, op=">", threshold=0.5).measure([math.nan, 1.0]) == 1.0


# ---- real runs ----


def recorded() -> Iterator[tuple[str, list[dict]]]:
    runs = json.loads((ROOT / "docs" / "learning.json").read_text(encoding="utf-8"))["runs"]
    yield from ((name, run["metrics"]) for name, run in runs.items())


@pytest.mark.parametrize(("name", "records"), recorded())
def test_runs_that_learned_are_healthy_and_the_controls_are_not(name: str, records: list[dict]):
    """The demo for three seeds; with rewards that carry no information; with learning rate 0."""
    report = examine(records, config=parse_config({"data": {"source": "x.jsonl"}, "rewards": ["a:b"]}))
    ids = {finding.id for finding in report.findings}
    if name.startswith("seed"):
        assert (report.status, report.findings) == ("ok", ())
    elif name == "shuffled rewards":
        assert report.status == "error" and {"group.zero_std", "eval.regress", "reward.stuck_zero"} <= ids
    else:
        assert (report.status, ids) == ("warn", {"lr.zero"})


def hacking(way: str) -> Iterator[tuple[str, list[dict]]]:
    """The evaluations of the runs of benchmarks/hacking.py that were trained one way, and the training lengths."""
    for name, run in json.loads((ROOT / "docs" / "hacking.json").read_text(encoding="utf-8"))["runs"].items():
        if name.startswith(way):
            series = {
                "eval/sampled/reward": run["right"],
                "eval/sampled/training_reward": run["trained_by"],
                "rollout/len_mean": run["length"],
            }
            at = sorted({int(step) for values in series.values() for step in values})
            yield (
                name,
                [
                    {"step": step, **{metric: v[str(step)] for metric, v in series.items() if str(step) in v}}
                    for step in at
                ],
            )


@pytest.mark.parametrize(("name", "records"), hacking("gameable"))
def test_a_reward_that_is_gamed_is_named_by_its_second_evaluation_below_the_best(name: str, records: list[dict]):
    """From runs of the starter whose reward rose while right answers vanished: named while half of them were left or
    soon after, as an error at the end, and before what says less: long completions, a held-out reward that fell."""
    report = examine(records)
    (gamed,) = (each for each in report.findings if each.id == "reward.gamed")
    assert (gamed.label, gamed.severity, gamed.ended) == ("reward.gamed (sampled)", "error", None)
    best = max(records, key=lambda each: each.get("eval/sampled/reward", 0.0))["step"]
    assert best < gamed.began <= best + 10
    assert not {"eval.regress"} & {each.id for each in report.findings}
    assert any("eval.best" in each.text for each in gamed.advice)


@pytest.mark.parametrize(("name", "records"), hacking("mended"))
def test_a_reward_that_is_not_gamed_is_not_called_so(name: str, records: list[dict]):
    """The same task, trained by what is evaluated; and what is told by a reward that pays for trying as well."""
    assert not {"reward.gamed"} & {each.id for each in examine(records).findings}
    for record in records:
        if "eval/sampled/reward" in record:
            record["eval/sampled/training_reward"] = 0.2 + 0.8 * record["eval/sampled/reward"]
    assert not {"reward.gamed"} & {each.id for each in examine(records).findings}


@pytest.mark.parametrize(("name", "records"), recorded())
def test_the_demo_does_not_game_its_reward(name: str, records: list[dict]):
    """Evaluated by the reward that trains it, and the shuffled rewards, by which both fall."""
    both = [
        each | {key.replace("/reward", "/training_reward"): value for key, value in each.items() if "eval/" in key}
        for each in records
    ]
    assert not {"reward.gamed"} & {each.id for each in examine(both).findings}


REPLAYS = Path(__file__).parent / "replays"


def replayed(path: Path) -> tuple[HealthMonitor, list[Event]]:
    """The health of a run whose metrics are a table, as they would be told while it goes on."""
    health, events = HealthMonitor(), list[Event]()
    with path.open(newline="", encoding="utf-8") as file:
        for record in csv.DictReader(file):
            events += health.step(int(record.pop("step")), {name: float(value) for name, value in record.items()})
    return health, events


def test_a_reward_that_is_lost_over_hundreds_of_steps_is_named():
    """The shape of a run of a 0.6B model whose mean reward fell from 0.8 to 0.09 by step 251, with noise: too slow for
    what looks at 30 steps. It is named before a half is lost, as an error while there is something left, and stands at
    the end; it is neither called flat nor as good as it gets meanwhile."""
    health, events = replayed(REPLAYS / "reward_0.8_to_0.09.csv")
    first = {(e.finding.id, e.finding.severity): e.step for e in reversed(events) if e.finding is not None}
    assert first["reward.lost", "warn"] < 115 and first["reward.lost", "error"] < 185
    standing = {each.id: each for each in health.standing}
    assert standing["reward.lost"].severity == "error" and "from its best" in standing["reward.lost"].says
    advice = [each.text for each in standing["reward.lost"].advice]
    assert advice[0].startswith("go back to the version before it fell") and "eval.best" in advice[-1]
    assert "reward.flat" not in standing


@pytest.mark.long
def test_noise_around_one_level_is_not_called_lost():
    """Whatever the draw, a mean reward that keeps its level, rises, or dips for some steps has lost nothing."""
    for seed in range(20):
        draw = Random(seed)
        for level in (lambda t: 0.5, lambda t: 0.2 + 0.003 * t, lambda t: 0.3 if 100 < t < 104 else 0.5):
            health = HealthMonitor()
            for t in range(200):
                events = health.step(t + 1, {"reward/mean": max(0.0, level(t) + draw.gauss(0, 0.08))})
                assert not kinds(events, "reward.lost"), (seed, t)


# ---- the document ----


def row(rule: Rule) -> str:
    """The rule's row in docs/metrics.md."""
    limits = [
        f"{severity} {condition.op} {condition.threshold:g}"
        for severity in ("warn", "error")
        if (condition := rule.condition(severity)) is not None
    ]
    when = f"{measured(rule)}: {', '.join(limits)}"
    when += "".join(f"; {measured(each)} {each.op} {each.threshold:g}" for each in rule.also)
    when += f"; unless {', '.join(f'`{id}`' for id in rule.unless)}" if rule.unless else ""
    keys = dict.fromkeys(key for remedy in rule.remedies for key in remedy.overrides)
    return f"| `{rule.id}` | {when} | {rule.cause.format(key=RUN_KEYS)} | {', '.join(f'`{key}`' for key in keys)} |"


def measured(condition: Rule | Condition) -> str:
    return f"{condition.of.replace('_', ' ')} of {condition.window} `{condition.metric}`"


def test_the_document_has_every_rule():
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").split("## Health")[1]
    assert re.findall(r"^\| `.*$", text, re.MULTILINE) == [row(rule) for rule in RULES]


# ---- the table ----
def test_the_table_says_only_what_a_rule_can_do() -> None:
    conditions = [*RULES, *(condition for rule in RULES for condition in rule.also)]
    assert {each.of for each in conditions} <= set(get_args(Aggregate)) and {each.op for each in conditions} <= {
        *COMPARE
    }
    assert all(each.window >= (each.least or 1) > 0 for each in conditions)
    assert all(isinstance(each, str) and each in BY_ID for rule in RULES for each in rule.unless)
    changes = [change for rule in RULES for remedy in rule.remedies for change in remedy.overrides.values()]
    assert any(isinstance(change, Times) for change in changes) and not any(isinstance(c, dict) for c in changes)


@pytest.mark.parametrize(
    ("written", "wrong"),
    [
        ("warn: 0.05", "worn: 0.05"),
        ("cause:", "why:"),
        ("      - check\n", "      - chekc\n"),
        ("{times: 0.3}", "{times: 0.3, most_: 1}"),
        ("do: learn more slowly, set:", "do: learn more slowly, put:"),
    ],
)
def test_a_mistake_in_the_table_is_refused(tmp_path: Path, written: str, wrong: str) -> None:
    text = TABLE.read_text("utf-8")
    assert written in text
    (tmp_path / "rules.yaml").write_text(text.replace(written, wrong, 1), encoding="utf-8")
    with raises((TypeError, KeyError)):
        read_rules(tmp_path / "rules.yaml")
