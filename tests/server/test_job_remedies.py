"""What is to be done about a job's findings is said in the words of a job, and would be accepted."""

from __future__ import annotations

import re
from typing import Any

import pytest
from ruamel.yaml import YAML

from groupwise.config.job import job_name, parse_job_config
from groupwise.run.health_report import examine_job
from groupwise.run.health_rule import KeyNames
from groupwise.run.health_rules import RULES
from groupwise.server.job_remedies import job_remedies

RUN_KEY = re.compile(r"\b(?:train|algo|rollout|data|eval|env|scoring)\.\w+|metrics\.jsonl|groupwise (?:check|run|env)")
OVERRIDE = re.compile(r"config\.(\w+)=(\S+)")
GIVEN: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {}),
    ("grpo", {"policy_loss": "dapo", "kl": "k3", "kl_coeff": 0.05, "iterations": 4, "warmup_steps": 2}),
    ("grpo", {"policy_loss": "gspo", "entropy_coeff": 0.01, "minibatches": 4}),
    ("grpo", {"learning_rate": 0.0, "kl_coeff": 0}),
    ("sft", {"learning_rate": 1e-4}),
]


def accepted(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """A job's configuration as the ledger keeps it."""
    return parse_job_config(kind, given).model_dump(mode="json")


@pytest.mark.parametrize(("kind", "given"), GIVEN)
def test_every_remedy_of_every_rule_is_a_jobs_and_would_be_accepted(kind: str, given: dict[str, Any]) -> None:
    config, changed = accepted(kind, given), 0
    for rule in RULES:
        for remedy in job_remedies(rule.id, kind, config, name="greedy"):
            assert not RUN_KEY.search(remedy), remedy
            overrides = {key: YAML(typ="safe").load(value) for key, value in OVERRIDE.findall(remedy)}
            if overrides:
                before, after = (parse_job_config(kind, each) for each in (config, {**config, **overrides}))
                assert before != after, remedy
                changed += 1
        told = f"{rule.says} {rule.cause}".format(value=1.0, window=2, name="x", key=KeyNames(job_name))
        assert not RUN_KEY.search(told.replace("metrics.jsonl", "")), rule.id
    assert changed >= (5 if kind == "grpo" and config["learning_rate"] else 1)


def test_a_runs_key_is_the_jobs_field_with_its_new_value() -> None:
    found = job_remedies("reward.falling", "grpo", accepted("grpo", {"learning_rate": 1e-5}))
    assert "learn more slowly: config.learning_rate=3e-06" in found
    assert "sample more completions of a prompt: n of /v1/completions/batch" in found


def test_what_a_job_has_already_is_not_proposed() -> None:
    with_kl, without = accepted("grpo", {}), accepted("grpo", {"kl_coeff": 0})
    assert with_kl["kl"] is None and with_kl["kl_coeff"] == 0.1  # the estimator is the default one
    held = "hold the policy near the reference: config.kl=k3 config.kl_coeff=0.01"
    assert held not in job_remedies("reward.falling", "grpo", with_kl)
    assert held in job_remedies("reward.falling", "grpo", without)
    once = job_remedies("clip.high", "grpo", accepted("grpo", {"iterations": 1, "minibatches": 4}))
    assert "cut a batch into fewer steps: config.minibatches=2" in once
    assert not any("config.iterations" in each for each in once)


def test_what_nobody_can_do_to_a_job_is_left_out() -> None:
    found = job_remedies("group.zero_std", "grpo", accepted("grpo", {}))
    assert found == [
        "sample more completions of a prompt: n of /v1/completions/batch",
        "use a finer reward, or other prompts",
    ]
    assert job_remedies("staleness.max", "grpo", accepted("grpo", {})) == []


def test_a_remedy_in_words_has_others_in_a_job() -> None:
    found = job_remedies("reward.stuck_zero", "grpo", accepted("grpo", {}))
    assert "read what was posted: GET /v1/rollouts?job=" in found
    found = job_remedies("grad.zero_streak", "grpo", accepted("grpo", {}))
    assert "look at clip_frac, masked_frac and reward/std: GET /v1/train/metrics/{job_id}" in found


def test_causes_name_the_jobs_fields() -> None:
    steps = [{"step": step, "optim/lr": 0.0} for step in range(1, 31)]
    causes = {finding.id: finding.cause for finding in examine_job(steps).findings}
    assert causes["lr.zero"].startswith("config.learning_rate is 0"), causes
