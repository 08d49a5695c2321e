"""GET /v1/train/health/{job_id}: the rules of runs, over the metrics of a job."""

from pathlib import Path

import pytest

from groupwise.algo.metrics import definitions
from groupwise.server.findings import router
from groupwise.server.metric_definitions import definitions_router
from groupwise.store.ledger import Ledger
from serving import served


@pytest.fixture
def ledger_of_failures(tmp_path: Path) -> tuple[Ledger, str]:
    ledger = Ledger(tmp_path / "ledger.db")
    job, _ = ledger.submit(kind="grpo", adapter="x", config={}, summary={}, payload=b"{}", steps=30, auto_load=True)
    lease = ledger.lease("w")
    assert lease is not None
    for step in range(1, 21):
        ledger.progress(lease, phase="training", step=step, metrics={"reward/frac_zero_std": 0.95, "reward/mean": 0.0})
    return ledger, job.id


def test_a_finding_has_its_cause_and_what_to_do(tmp_path: Path, ledger_of_failures: tuple[Ledger, str]) -> None:
    import httpx2

    ledger, job = ledger_of_failures
    ledger.close()
    with served(tmp_path, [router]) as server:
        health = httpx2.get(f"{server.url}/v1/train/health/{job}", timeout=120).json()
        assert health["job_id"] == job and health["status"] in ("warn", "error")
        finding = health["findings"][0]
        assert finding["metric"].startswith("reward/") and finding["says"] and finding["cause"] and finding["remedies"]
        assert finding["ended"] is None and 1 <= finding["began"] <= 20
        missing = httpx2.get(f"{server.url}/v1/train/health/none", timeout=120)
        assert missing.status_code == 404 and missing.json()["error"]["code"] == "job_not_found"


def test_remedies_are_the_jobs_own(tmp_path: Path) -> None:
    """A run's override is no use to who posts jobs."""
    import httpx2

    ledger = Ledger(tmp_path / "ledger.db")
    config = {"learning_rate": 1e-5, "policy_loss": "grpo"}
    job, _ = ledger.submit(kind="grpo", adapter="x", config=config, summary={}, payload=b"{}", steps=30, auto_load=True)
    lease = ledger.lease("w")
    assert lease is not None
    for step in range(1, 11):
        ledger.progress(lease, phase="training", step=step, metrics={"optim/grad_norm": 500.0, "optim/lr": 0.0})
    ledger.close()
    with served(tmp_path, [router]) as server:
        findings = {
            each["id"]: each
            for each in httpx2.get(f"{server.url}/v1/train/health/{job.id}", timeout=120).json()["findings"]
        }
    assert "learn more slowly: config.learning_rate=3e-06" in findings["grad.explode"]["remedies"]
    assert "config.learning_rate is 0" in findings["lr.zero"]["cause"]
    assert not any("train." in remedy for each in findings.values() for remedy in each["remedies"])


def test_the_table_of_metrics_is_served_with_the_rules_that_judge_each(tmp_path: Path) -> None:
    import httpx2

    Ledger(tmp_path / "ledger.db").close()
    with served(tmp_path, [definitions_router]) as server:
        rows = {
            row["metric"]: row
            for row in httpx2.get(f"{server.url}/v1/metrics/definitions", timeout=120).json()["definitions"]
        }
    assert list(rows) == [each.metric for each in definitions()]
    cut = rows["rollout/truncated_frac"]
    assert cut["good"] == "near 0" and "rollout.max_tokens" in cut["otherwise"]
    rules = {rule["id"]: rule for rule in cut["rules"]}
    assert rules["len.clipped"]["holds"] == "mean of 10 steps: warn > 0.3, error > 0.8"
    assert rules["len.clipped"]["remedies"]
    assert [rule["id"] for rule in rows["reward/<name>/noise"]["rules"]] == ["reward.noise"]
    assert rows["rollout/count"]["rules"] == [] and rows["rollout/count"]["good"] == ""
