"""The section `teacher` of a run's configuration: what it takes, and what does not go together."""

from __future__ import annotations

from typing import Any

import pytest
import ruamel.yaml

from groupwise.config.run import RunConfig, dump_resolved, parse_config
from groupwise.config.teacher import TeacherConfig
from groupwise.errors import ConfigError
from wording import raises

DATA = {"data": {"source": "x"}}
ADAPTER = {"adapter": "runs/better"}
SELF = {"self": True, "loss": "sdpo", "context": "hint"}
URL = {"base_url": "http://127.0.0.1:8000/v1", "model": "big"}
REWARDS = {"rewards": ["mine:right"]}
SFT = {**ADAPTER, "loss": "sft"}
OWN_BEST = {"self": True, "loss": "sft", "best": 1, "least_reward": 1.0}


def parsed(teacher: dict[str, Any], **sections: Any) -> RunConfig:
    return parse_config({**DATA, "teacher": teacher, **sections})


@pytest.mark.parametrize("teacher", [ADAPTER, {"model": "big"}, SELF, URL], ids=["adapter", "model", "self", "url"])
def test_a_teacher_does_without_rewards(teacher: dict):
    assert parsed(teacher).rewards == ()
    assert parsed(teacher, **REWARDS).teacher == TeacherConfig(**teacher)
    with raises(ConfigError, field="rewards", kind="conflict"):
        parse_config(DATA)


def test_a_run_without_rewards_is_evaluated_by_the_evaluations_own():
    evaluation = {"data": {"source": "y"}, "rewards": ["mine:right"]}
    config = parsed(ADAPTER, eval=evaluation)
    assert config.rewards == () and config.eval is not None and config.eval.rewards[0].function == "mine:right"
    with raises(ConfigError, field="eval.rewards", kind="conflict"):
        parsed(ADAPTER, eval=evaluation | {"rewards": [{"function": "mine:right", "weight": 0}]})


def test_a_teacher_that_samples_does_so_alone_or_beside_the_policy():
    """Alone nothing is of the policy, so that what it draws from may be narrowed, too."""
    assert parsed(SFT).learns_no_rewards and parsed({**SFT, "reward_weight": 0}, **REWARDS).learns_no_rewards
    assert not parsed({**SFT, "completions": 2, "least_reward": 0.5}, **REWARDS).learns_no_rewards
    assert not parsed(ADAPTER).learns_no_rewards and not parse_config(DATA | REWARDS).learns_no_rewards
    assert parsed(SFT, rollout={"top_p": 0.9}).rollout.top_p == 0.9


def test_what_chooses_from_the_policys_own_needs_no_engine_of_the_teachers():
    rest = {"rollout": {"max_staleness": 1, "in_flight_updates": True}, **REWARDS}
    assert parsed({**OWN_BEST, "reward_weight": 0}, **rest).learns_no_rewards
    assert parsed({**OWN_BEST, "reward_weight": 0}, engine="vllm", **REWARDS).learns_no_rewards
    assert not parsed(OWN_BEST, env={"environment": "a:B"}).learns_no_rewards


def test_it_is_written_as_it_is_read():
    config = parsed({**SELF, "top_k": 8, "divergence": "jsd"}, **REWARDS)
    assert parse_config(ruamel.yaml.YAML(typ="safe").load(dump_resolved(config))).teacher == config.teacher


@pytest.mark.parametrize(
    ("teacher", "field"),
    [
        ({}, "teacher.model"),
        ({**ADAPTER, "model": "big"}, "teacher.adapter"),
        ({**ADAPTER, **URL}, "teacher.base_url"),
        ({"base_url": "http://x/v1"}, "teacher.model"),
        ({**URL, "base_url": "localhost:8000"}, "teacher.base_url"),
        ({"self": True, "loss": "sdpo"}, "teacher.context"),
        ({"self": True, "context": "hint"}, "teacher.loss"),
        ({**ADAPTER, "loss": "sdpo"}, "teacher.loss"),
        ({**ADAPTER, "divergence": "forward"}, "teacher.divergence"),
        ({**ADAPTER, "template": "{context} {prompt}"}, "teacher.template"),
        ({**SELF, "template": "{context}"}, "teacher.template"),
        ({**ADAPTER, "dtype": "float32"}, "teacher.dtype"),
        ({**URL, "dtype": "float32"}, "teacher.dtype"),
        ({**ADAPTER, "timeout_s": 5.0}, "teacher.timeout_s"),
        ({**ADAPTER, "coefficient": 0}, "teacher.coefficient"),
        ({**ADAPTER, "top_k": -1}, "teacher.top_k"),
        ({**ADAPTER, "reward_weight": 0.5}, "teacher.reward_weight"),
        ({**SELF, "context": "best_completion"}, "teacher.context"),
        ({**SELF, "loss": "sft"}, "teacher.context"),
        ({**OWN_BEST, "completions": 4}, "teacher.completions"),
        ({**OWN_BEST, "temperature": 0.5}, "teacher.temperature"),
        ({"self": True, "loss": "sft"}, "teacher.least_reward"),
        ({"self": True, "loss": "sft", "best": 1}, "teacher.best"),
        ({**ADAPTER, "best": 1}, "teacher.best"),
        ({**URL, "loss": "sft"}, "teacher.base_url"),
        ({**SFT, "top_k": 4}, "teacher.top_k"),
        ({**SFT, "context": "best_completion"}, "teacher.context"),
        ({**SFT, "least_reward": 1.0}, "teacher.least_reward"),
        ({**SFT, "completions": 4}, "teacher.completions"),
        ({**ADAPTER, "completions": 4}, "teacher.completions"),
        ({**ADAPTER, "temperature": 0.5}, "teacher.temperature"),
        ({**ADAPTER, "least_reward": 1.0}, "teacher.least_reward"),
    ],
)
def test_what_does_not_go_together(teacher: dict, field: str):
    with raises(ConfigError, field=field):
        parsed(teacher)


@pytest.mark.parametrize(
    ("teacher", "sections", "field"),
    [
        (ADAPTER, {"rollout": {"top_p": 0.9}}, "rollout.top_p"),
        (ADAPTER, {"rollout": {"structured_outputs_regex": "a"}}, "rollout.structured_outputs"),
        (URL, {"rollout": {"temperature": 0.8}}, "rollout.temperature"),
        ({**ADAPTER, "top_k": 4}, {"rollout": {"replay": {"size": 4}}}, "teacher.top_k"),
        ({**ADAPTER, "context": "hint"}, {"env": {"environment": "a:B"}}, "teacher.context"),
        (
            ADAPTER,
            {"eval": {"data": {"source": "y"}}},
            "eval",
        ),
        (ADAPTER, {"train": {"lora": None}}, "teacher.adapter"),
        (SELF, {"engine": "vllm"}, "teacher.self"),
        (SFT, {"env": {"environment": "a:B"}}, "teacher.loss"),
        ({**OWN_BEST, "reward_weight": 0}, {**REWARDS, "algo": {"kl": "k3"}}, "algo.kl"),
        (SFT, {**REWARDS, "rollout": {"stream_groups": 2}}, "rollout.stream_groups"),
        (SFT, {**REWARDS, "rollout": {"replay": {"size": 4}}}, "rollout.replay"),
        (SFT, {"algo": {"kl": "k3", "kl_coeff": 0.1}}, "algo.kl"),
        (SELF, {"rollout": {"max_staleness": 1, "in_flight_updates": True}}, "teacher.self"),
    ],
)
def test_what_does_not_go_with_other_sections(teacher: dict, sections: dict, field: str):
    with raises(ConfigError, field=field, kind="conflict"):
        parsed(teacher, **sections)
