"""What is to be done about a job's findings is said in the words of a job, and would be accepted."""

from __future__ import annotations

import re
from typing import Any

import pytest
from ruamel.yaml import YAML

from groupwise.config.job import parse_job_config
from groupwise.run.health_rules import RULES
from groupwise.server.findings import _INSTEAD, in_job_words, job_remedies

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
        assert not RUN_KEY.search(in_job_words(f"{rule.says} {rule.cause}").replace("metrics.jsonl", "")), rule.id
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


def test_texts_that_have_another_in_a_job_are_still_there() -> None:
    assert set(_INSTEAD) <= {remedy.text for rule in RULES for remedy in rule.remedies}


def test_causes_name_the_jobs_fields() -> None:
    assert in_job_words("train.learning_rate is 0") == "config.learning_rate is 0"
    assert (
        in_job_words("answers need more tokens than rollout.max_tokens") == "answers need more tokens than max_tokens"
    )
