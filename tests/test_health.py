"""Findings: each after a full window, once, and again only after it had gone away."""

from __future__ import annotations

import math

import pytest

from groupwise.health import RULES, WINDOW, Health

FINE = {
    "reward/frac_zero_std": 0.3,
    "rollout/truncated_frac": 0.0,
    "mismatch/logprob_diff_mean": 1e-5,
    "loss/entropy": 0.4,
    "optim/grad_norm": 0.7,
    "rollout/error_frac": 0.0,
}
BAD = {
    "no signal": ("reward/frac_zero_std", 0.95, "95% of the groups"),
    "truncation": ("rollout/truncated_frac", 0.5, "50% of the completions were cut"),
    "mismatch": ("mismatch/logprob_diff_mean", 0.1, "0.1 nats a token"),
    "entropy": ("loss/entropy", 0.001, "0.001 nats"),
    "gradients": ("optim/grad_norm", math.inf, "norm is inf"),
    "rewards": ("rollout/error_frac", 0.2, "20% of the completions"),
}


def feed(health: Health, steps: int, **changed: float) -> list[str]:
    metrics = FINE | {key.replace("__", "/"): value for key, value in changed.items()}
    return [finding for _ in range(steps) for finding in health.findings(metrics)]


def test_all_rules_are_tested():
    assert [rule.name for rule in RULES] == list(BAD) and {rule.needs for rule in RULES} == set(FINE)


def test_a_healthy_run_is_silent():
    assert feed(Health(), 3 * WINDOW) == []


@pytest.mark.parametrize("name", BAD)
def test_each_finding(name: str):
    """Nothing before the window is full, then once, with the value and what to do."""
    key, value, says = BAD[name]
    health = Health()
    assert feed(health, WINDOW - 1, **{key: value}) == []
    (finding,) = feed(health, 1, **{key: value})
    assert finding.startswith(f"{name}: ") and says in finding and "{" not in finding
    assert feed(health, 2 * WINDOW, **{key: value}) == []


def test_a_finding_that_went_away_comes_again():
    health = Health()
    assert len(feed(health, WINDOW, rollout__truncated_frac=1.0)) == 1
    assert feed(health, 2 * WINDOW) == []
    assert len(feed(health, WINDOW, rollout__truncated_frac=1.0)) == 1


def test_a_metric_that_is_not_logged():
    """Supervised or skipped steps have fewer metrics: a rule judges the steps that have its own."""
    health = Health()
    findings = [found for _ in range(2 * WINDOW) for found in health.findings({"loss/entropy": 0.0})]
    assert len(findings) == 1 and findings[0].startswith("entropy")
    assert [found for _ in range(2 * WINDOW) for found in Health().findings({})] == []
