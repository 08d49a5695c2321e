"""Remedies are computed from the run's configuration, change something, and start."""

from __future__ import annotations

import shlex

import pytest

from groupwise.config.loss import loss_of
from groupwise.config.run import RunConfig, dump_resolved, load_config, parse_config
from groupwise.run.health_remedies import advise
from groupwise.run.health_rule import Remedy, Times
from groupwise.run.health_rules import RULES


def config(**sections) -> RunConfig:
    return parse_config({"data": {"source": "x.jsonl"}, "rewards": ["a:b"], **sections})


def overrides(remedy: Remedy, given: RunConfig, **options) -> tuple[str, ...] | None:
    """None where the remedy is not proposed."""
    advice = advise([remedy], given, **options)
    return advice[0].overrides if advice else None


@pytest.mark.parametrize(
    ("key", "change", "sections", "expected"),
    [
        ("rollout.group_size", Times(2, most=64), {}, "16"),
        ("rollout.group_size", Times(2, most=64), {"rollout": {"group_size": 40}}, "64"),
        ("rollout.group_size", Times(2, most=64), {"rollout": {"group_size": 64}}, None),
        ("rollout.group_size", Times(2, most=64), {"rollout": {"group_size": 100}}, None),  # not the other way
        ("train.learning_rate", Times(0.3), {"train": {"learning_rate": 3e-4}}, "9e-05"),
        ("train.learning_rate", Times(0.3), {"train": {"learning_rate": 0.0}}, None),
        ("rollout.weight_sync_interval", Times(0.5, least=1), {"rollout": {"weight_sync_interval": 5}}, "2"),
        ("rollout.weight_sync_interval", Times(0.5, least=1), {}, None),
        ("rollout.max_staleness", Times(0.5), {"rollout": {"max_staleness": 1}}, "0"),
        ("rollout.max_prompt_tokens", Times(2), {}, None),  # null: there is nothing to double
        ("algo.mask_truncated", True, {}, "true"),
        ("algo.mask_truncated", True, {"algo": {"mask_truncated": True}}, None),
        ("dtype", "float32", {"dtype": "float32"}, None),
        ("algo.kl_coeff", 0.01, {}, None),  # refused: there is no KL term
        ("algo.kl_coeff", 0.01, {"algo": {"kl": "k3"}}, "0.01"),
        ("algo.clip_high", 0.3, {"algo": {"policy_loss": "reinforce"}}, None),  # refused by the loss
        ("data.curriculum.weight", True, {}, "true"),  # through a section that is null
        ("eval.best", "{name}", {}, None),  # refused: there is no evaluation
        ("eval.best", "{name}", {"eval": {"data": {"source": "y.jsonl"}}}, "greedy"),
    ],
)
def test_a_change(key, change, sections, expected):
    found = overrides(Remedy(text="x", overrides={key: change}), config(**sections), name="greedy")
    assert found == (None if expected is None else (f"{key}={expected}",))


def test_only_if():
    remedy = Remedy(text="x", overrides={"algo.kl": "k3", "algo.kl_coeff": 0.01}, only_if={"algo.kl": None})
    assert overrides(remedy, config()) == ("algo.kl=k3", "algo.kl_coeff=0.01")
    assert overrides(remedy, config(algo={"kl": "k2"})) is None
    assert overrides(Remedy(text="words"), config()) == ()


def test_without_a_configuration_the_keys_are_named():
    (advice,) = advise([Remedy(text="do it", overrides={"dtype": "float32"})], None)
    assert str(advice) == "do it (dtype)" and advice.overrides == ()
    (advice,) = advise([Remedy(text="do it", overrides={"dtype": "float32"})], config())
    assert str(advice) == "do it: dtype=float32"


CONFIGS = {
    "default": {},
    "dapo": {"algo": {"policy_loss": "dapo", "kl": "k3", "kl_coeff": 0.05}, "train": {"minibatches": 4, "passes": 2}},
    "gspo": {"algo": {"policy_loss": "gspo", "entropy_coeff": 0.01}, "rollout": {"weight_sync_interval": 4}},
    "dr_grpo": {"algo": {"policy_loss": "dr_grpo", "correction": "tis_token", "anchor": "old"}},
    "overlap": {
        "algo": {"correction": "mask_token", "correction_cap": 3.0},
        "rollout": {"max_staleness": 4, "max_prompt_tokens": 100, "temperature": 1.2},
        "eval": {"data": {"source": "y.jsonl"}},
    },
    "reinforce": {"algo": {"policy_loss": "reinforce", "advantage": "leave_one_out"}, "train": {"lora": None}},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_remedy_of_every_rule_starts_as_it_is_copied(name, tmp_path):
    """Written by `dump_resolved`, read with the overrides, and the loss resolves; and it is another run."""
    given = config(**CONFIGS[name])
    saved = tmp_path / "config.yaml"
    saved.write_text(dump_resolved(given), encoding="utf-8")
    plain = load_config(saved)
    copied = {advice.overrides for rule in RULES for advice in advise(rule.remedies, given, name="greedy")} - {()}
    assert len(copied) > 8
    for overrides in sorted(copied):
        changed = load_config(saved, shlex.split(shlex.join(overrides)))
        loss_of(changed.algo, max_tokens=changed.rollout.max_tokens)
        assert changed != plain, overrides
