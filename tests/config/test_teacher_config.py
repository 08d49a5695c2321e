"""The section `teacher` of a run's configuration: what it takes, and what does not go together."""

from __future__ import annotations

from typing import Any

import pytest
import ruamel.yaml

from groupwise.config.run import RunConfig, dump_resolved, parse_config
from groupwise.config.teacher import TeacherConfig
from groupwise.errors import ConfigError

DATA = {"data": {"source": "x"}}
ADAPTER = {"adapter": "runs/better"}
SELF = {"self": True, "loss": "sdpo", "context": "hint"}
URL = {"base_url": "http://127.0.0.1:8000/v1", "model": "big"}
REWARDS = {"rewards": ["mine:right"]}
SFT = {**ADAPTER, "loss": "sft"}


def parsed(teacher: dict[str, Any], **sections: Any) -> RunConfig:
    return parse_config({**DATA, "teacher": teacher, **sections})


@pytest.mark.parametrize("teacher", [ADAPTER, {"model": "big"}, SELF, URL], ids=["adapter", "model", "self", "url"])
def test_a_teacher_does_without_rewards(teacher: dict):
    assert parsed(teacher).rewards == ()
    assert parsed(teacher, **REWARDS).teacher == TeacherConfig(**teacher)
    with pytest.raises(ConfigError, match=r"name a reward function, an environment \(env\) or a teacher"):
        parse_config(DATA)


def test_a_run_without_rewards_is_evaluated_by_the_evaluations_own():
    evaluation = {"data": {"source": "y"}, "rewards": ["mine:right"]}
    config = parsed(ADAPTER, eval=evaluation)
    assert config.rewards == () and config.eval is not None and config.eval.rewards[0].function == "mine:right"
    with pytest.raises(ConfigError, match="every weight is 0, so evaluations would count nothing"):
        parsed(ADAPTER, eval=evaluation | {"rewards": [{"function": "mine:right", "weight": 0}]})


def test_a_teacher_that_samples_does_so_alone_or_beside_the_policy():
    """Alone nothing is of the policy, so that what it draws from may be narrowed, too."""
    assert parsed(SFT).samples_nothing and parsed({**SFT, "reward_weight": 0}, **REWARDS).samples_nothing
    assert not parsed({**SFT, "completions": 2, "least_reward": 0.5}, **REWARDS).samples_nothing
    assert not parsed(ADAPTER).samples_nothing and not parse_config(DATA | REWARDS).samples_nothing
    assert parsed(SFT, rollout={"top_p": 0.9}).rollout.top_p == 0.9


def test_it_is_written_as_it_is_read():
    config = parsed({**SELF, "top_k": 8, "divergence": "jsd"}, **REWARDS)
    assert parse_config(ruamel.yaml.YAML(typ="safe").load(dump_resolved(config))).teacher == config.teacher


@pytest.mark.parametrize(
    ("teacher", "said"),
    [
        ({}, "teacher.model: there is none of model, adapter, self and base_url"),
        ({**ADAPTER, "model": "big"}, "there are model and adapter; name one teacher"),
        ({**ADAPTER, **URL}, "there are adapter and base_url; name one teacher"),
        ({"base_url": "http://x/v1"}, "teacher.model: required with base_url"),
        ({**URL, "base_url": "localhost:8000"}, "must be a URL"),
        ({"self": True, "loss": "sdpo"}, "teacher.context: required with self"),
        ({"self": True, "context": "hint"}, "set loss: sdpo"),
        ({**ADAPTER, "loss": "sdpo"}, "set self: true"),
        ({**ADAPTER, "divergence": "forward"}, "'forward' acts with top_k only"),
        ({**ADAPTER, "template": "{context} {prompt}"}, "acts with context only"),
        ({**SELF, "template": "{context}"}, "it must have {prompt} once"),
        ({**ADAPTER, "dtype": "float32"}, "acts with model, when it is loaded in this process only"),
        ({**URL, "dtype": "float32"}, "acts with model, when it is loaded in this process only"),
        ({**ADAPTER, "timeout_s": 5.0}, "5.0 acts with base_url only"),
        ({**ADAPTER, "coefficient": 0}, "teacher.coefficient"),
        ({**ADAPTER, "top_k": -1}, "teacher.top_k"),
        ({**ADAPTER, "reward_weight": 0.5}, "0.5 acts with rewards, and there are none"),
        ({**SELF, "context": "best_completion"}, "best_completion is told by rewards"),
        ({**SELF, "loss": "sft"}, "teacher.self: does not go with loss sft"),
        ({**URL, "loss": "sft"}, "teacher.base_url: does not go with loss sft"),
        ({**SFT, "top_k": 4}, "4 acts with loss opd or sdpo only"),
        ({**SFT, "context": "best_completion"}, "name a column"),
        ({**SFT, "least_reward": 1.0}, "1 is of rewards, and there are none"),
        ({**SFT, "completions": 4}, "set rollout.group_size"),
        ({**ADAPTER, "completions": 4}, "4 acts with loss sft only"),
        ({**ADAPTER, "temperature": 0.5}, "0.5 acts with loss sft only"),
        ({**ADAPTER, "least_reward": 1.0}, "1.0 acts with loss sft only"),
    ],
)
def test_what_does_not_go_together(teacher: dict, said: str):
    with pytest.raises(ConfigError) as refused:
        parsed(teacher)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("teacher", "sections", "said"),
    [
        (ADAPTER, {"rollout": {"top_p": 0.9}}, "rollout.top_p"),
        (ADAPTER, {"rollout": {"structured_outputs_regex": "a"}}, "rollout.structured_outputs"),
        (URL, {"rollout": {"temperature": 0.8}}, "rollout.temperature"),
        ({**ADAPTER, "top_k": 4}, {"rollout": {"replay": {"size": 4}}}, "teacher.top_k"),
        ({**ADAPTER, "context": "hint"}, {"env": {"environment": "a:B"}}, "teacher.context"),
        (
            ADAPTER,
            {"eval": {"data": {"source": "y"}}},
            "evaluation is by rewards, and there are none; name some (eval.r",
        ),
        (ADAPTER, {"train": {"lora": None}}, "teacher.adapter"),
        (SELF, {"engine": "vllm"}, "set engine: local"),
        (SFT, {"env": {"environment": "a:B"}}, "an environment is played in several"),
        (SFT, {**REWARDS, "rollout": {"stream_groups": 2}}, "stream_groups: does not go with teacher.loss sft"),
        (SFT, {**REWARDS, "rollout": {"replay": {"size": 4}}}, "replay: does not go with teacher.loss sft"),
        (SFT, {"algo": {"kl": "k3", "kl_coeff": 0.1}}, "algo.kl: 'k3' is of what the policy samples"),
        (SELF, {"rollout": {"max_staleness": 1, "in_flight_updates": True}}, "in_flight_updates"),
    ],
)
def test_what_does_not_go_with_other_sections(teacher: dict, sections: dict, said: str):
    with pytest.raises(ConfigError) as refused:
        parsed(teacher, **sections)
    assert said in str(refused.value)
