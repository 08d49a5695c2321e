"""A key of another system in a configuration of ours is answered with what it is here."""

from __future__ import annotations

from typing import Any

import pytest

from groupwise.config.formats.format import config_formats
from groupwise.config.formats.known_elsewhere import known_elsewhere
from groupwise.config.run import parse_config
from groupwise.errors import ConfigError
from groupwise.run.importing import read_words

RUN: dict[str, Any] = {"data": {"source": "x.jsonl"}, "rewards": ["m:f"]}
MEANT = {
    "report_to": "tracking",
    "num_train_epochs": "train.steps",
    "system_prompt": "data.system",
    "max_seq_length": "rollout.max_prompt_tokens",
    "full_finetuning": "train.lora",
    "use_vllm": "engine",
    "enable_thinking": "chat.template_kwargs.enable_thinking",
    "batch_size": "rollout.prompts_per_step",
    "adapter": "adapters.start",
    "wandb": "tracking.wandb",
}


@pytest.mark.parametrize("name", MEANT)
def test_the_key_that_was_meant_is_named(name: str) -> None:
    for section in ({name: 1}, {"train": {name: 1}}):
        with pytest.raises(ConfigError) as caught:
            parse_config(RUN | section)
        assert caught.value.kind == "unknown" and MEANT[name] in caught.value.message


@pytest.mark.parametrize("name", ["wandb", "adapter", "report-to"])
def test_as_an_option_too(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_words(["run.yaml", f"--{name}=x"])
    assert MEANT[name.replace("-", "_")] in str(caught.value.hint)


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("train.steps=10", "train.steps=10"),
        ("rollout.group-size", "rollout.group_size=VALUE"),
        ("train.stepz=10", "train.steps"),
        ("beta=0.2", "dpo.beta or algo.kl_coeff"),
        ("=1", "the keys of the configuration are"),
    ],
)
def test_as_an_option_with_its_section(option: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_words(["run.yaml", f"--{option}"])
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize("name", ["push_to_hub", "hub_model_id", "hub_private_repo", "hub_token", "repo_id"])
def test_a_command_that_does_it_is_named(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(RUN | {name: "x"})
    assert "groupwise push RUN --to OWNER/NAME" in caught.value.message


def test_what_is_not_here_is_said_to_be_so() -> None:
    said = known_elsewhere("push_to_hub")
    assert said and not any(key.here for each in config_formats() for key in each.keys if key.name == "push_to_hub")
    assert known_elsewhere("nobodys_key") == ""


def test_every_key_of_every_table_has_an_answer() -> None:
    names = {key.name.rpartition(".")[2] for each in config_formats() for key in each.keys}
    assert len(names) > 500 and all(map(known_elsewhere, names))


@pytest.mark.parametrize(("section", "without"), [({"train": {"lora": False}}, True), ({"rollout": False}, False)])
def test_null_is_proposed_where_it_is_valid(section: dict[str, Any], without: bool) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(RUN | section)
    assert ("null" in caught.value.message) == without
