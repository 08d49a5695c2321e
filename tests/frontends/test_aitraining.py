"""aitraining's flags: what has a counterpart is mapped with its defaults, environments are refused by name."""

import json

import pytest

from groupwise.errors import ConfigError
from groupwise.frontends.aitraining import flags
from groupwise.frontends.aitraining_keys import KEYS
from groupwise.frontends.importing import import_run
from groupwise.frontends.spelling import LoadedRun, read_run

HOTEL = [
    "--model",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "--rl-env-module",
    "my_envs.hotel_env",
    "--rl-env-class",
    "HotelEnv",
    "--rl-num-generations",
    "4",
    "--rl-max-new-tokens=256",
    "--peft",
]


def imported(*arguments: str) -> LoadedRun:
    return import_run([*arguments], system="aitraining")


def test_the_documented_command_with_its_defaults():
    loaded = imported("aitraining", "llm", "--train", "--trainer", "grpo", "--project-name", "my/hotel", *HOTEL)
    config = loaded.config
    assert (config.name, config.model) == ("hotel", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B")
    assert (config.rollout.group_size, config.rollout.prompts_per_step, config.rollout.max_tokens) == (4, 2, 256)
    assert (config.rollout.top_k, config.algo.kl, config.algo.kl_coeff) == (50, "k3", 0.1)
    assert (config.algo.policy_loss, config.algo.clip_low, config.algo.clip_high) == ("grpo", 0.2, 0.2)
    assert (config.train.learning_rate, config.train.schedule) == (3e-5, "linear")
    assert config.train.lora is not None and (config.train.lora.rank, config.train.lora.dropout) == (16, 0.05)


def test_environments_are_refused_by_name_and_nothing_makes_them_run():
    with pytest.raises(ConfigError) as caught:
        imported(*HOTEL).runnable()
    message = str(caught.value)
    assert "rl_env_module: environments are not in this version; say data and rewards" in message
    assert "it runs with" not in message


def test_with_prompts_and_rewards_it_is_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": str(i)}) + "\n" for i in range(10)))
    without_environment = [each for each in HOTEL if "env" not in each and each != "HotelEnv"]
    config = imported(*without_environment, "--epochs", "3", "data.source=p.jsonl", "rewards=[m:f]").runnable()
    assert config.train.steps == 15 and config.train.warmup_steps == 2  # 10% of 15
    missing = imported(*without_environment)
    with pytest.raises(ConfigError, match=r"it runs with: data.source=FILE.jsonl rewards=\[MODULE:FUNCTION\]"):
        missing.runnable()


def test_the_saved_parameters_of_all_its_trainers_are_known(tmp_path):
    saved = {key.name: None for key in KEYS} | {"trainer": "grpo", "rl_num_generations": 8, "peft": True, "lr": "1e-5"}
    (tmp_path / "training_params.json").write_text(json.dumps(saved | {"dpo_beta": 0.1, "project_name": "p"}))
    config = read_run(tmp_path / "training_params.json").config
    assert (config.rollout.group_size, config.train.learning_rate) == (8, 1e-5)


def test_a_configuration_file_with_params(tmp_path):
    (tmp_path / "c.yaml").write_text("task: llm\nparams:\n  trainer: grpo\n  project_name: p\n  rl_kl_coef: 0\n")
    assert read_run(tmp_path / "c.yaml").config.algo.kl is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rl-num-generation", "4"], "did you mean rl_num_generations?"),
        (["--trainer", "ppo"], "ppo is not trained here; write grpo"),
        (["--batch-size", "3", "--gradient-accumulation", "1"], "write gradient_accumulation: 4"),
        (["--peft", "true", "stray"], "'stray' is not a flag"),
        (["-x"], "'-x' is not a flag"),
        (["--rl-loss-type", "cispo"], "it must be one of grpo, bnpo, dr_grpo, dapo"),
    ],
)
def test_what_cannot_be_read(arguments, message):
    with pytest.raises(ConfigError) as caught:
        imported(*arguments)
    assert message in str(caught.value)


def test_flags_as_a_document():
    document = flags(["llm", "--a-b", "1", "--c=x=y", "--d"])
    assert document.data == {"a_b": "1", "c": "x=y", "d": "true"}
