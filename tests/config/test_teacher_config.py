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


def parsed(teacher: dict[str, Any], **sections: Any) -> RunConfig:
    return parse_config({**DATA, "teacher": teacher, **sections})


@pytest.mark.parametrize("teacher", [ADAPTER, {"model": "big"}, SELF, URL], ids=["adapter", "model", "self", "url"])
def test_a_teacher_does_without_rewards(teacher: dict):
    assert parsed(teacher).rewards == ()
    assert parsed(teacher, **REWARDS).teacher == TeacherConfig(**teacher)
    with pytest.raises(ConfigError, match=r"name a reward function, an environment \(env\) or a teacher"):
        parse_config(DATA)


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
        (ADAPTER, {"eval": {"data": {"source": "y"}}}, "evaluation is by rewards"),
        (ADAPTER, {"train": {"lora": None}}, "teacher.adapter"),
        (SELF, {"engine": "vllm"}, "set engine: local"),
        (SELF, {"rollout": {"max_staleness": 1, "in_flight_updates": True}}, "in_flight_updates"),
    ],
)
def test_what_does_not_go_with_other_sections(teacher: dict, sections: dict, said: str):
    with pytest.raises(ConfigError) as refused:
        parsed(teacher, **sections)
    assert said in str(refused.value)
