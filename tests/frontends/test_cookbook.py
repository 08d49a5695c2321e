"""The cookbook's `Config` as a run of ours, and `main(config)` from one end to the other."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest

from groupwise.algo.loss_spec import loss_of
from groupwise.config import RunConfig
from groupwise.errors import ConfigError, DataError
from groupwise.frontends import cookbook
from groupwise.frontends.cookbook import (
    LOSSES,
    NOT_HERE,
    CISPOConfig,
    Config,
    DAPOConfig,
    DeployConfig,
    DROConfig,
    GSPOConfig,
    InfraConfig,
    TISConfig,
    WandBConfig,
    WeightSyncConfig,
    run_config,
)


def shorter(completion: str, row: dict) -> float:
    assert row["messages"][-1]["role"] == "user" and row["ground_truth"]
    return random.random()


@pytest.fixture
def dataset(tmp_path):
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    row = {"messages": turns, "ground_truth": "<answer>4</answer>"}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(10)))
    return tmp_path / "rows.jsonl"


@pytest.fixture
def configure(dataset, tmp_path):
    def configure(**fields: Any) -> RunConfig:
        config: dict[str, Any] = {"log_path": str(tmp_path / "log"), "base_model": "starter", "dataset": str(dataset)}
        return run_config(Config(**config | fields))

    return configure


def test_the_defaults_of_the_recipe(configure):
    config = configure()
    rollout, train = config.rollout, config.train
    assert (rollout.prompts_per_step, rollout.group_size, rollout.max_tokens, rollout.temperature) == (1, 4, 1024, 1.0)
    assert (train.steps, train.learning_rate, train.warmup_steps, train.weight_decay) == (10, 1e-5, 0, 0.01)
    assert train.lora is None and config.dtype == "float32" and not config.data.shuffle
    assert rollout.refill == 1.0 and rollout.on_policy and config.checkpoint.every == 0
    spec = loss_of(config.algo, max_tokens=1024)
    assert (spec.kl, spec.kl_coeff, spec.anchor, spec.correction, spec.correction_cap) == (
        "k3",
        1e-3,
        "old",
        "tis_token",
        5,
    )
    assert config.algo.advantage_eps == 1e-8


@pytest.mark.parametrize("loss", LOSSES)
def test_every_policy_loss_resolves_with_the_recipes_numbers(configure, loss):
    algo = configure(policy_loss=loss).algo
    spec = loss_of(algo, max_tokens=1024)
    numbers = {
        "grpo": (0.2, 0.2),
        "dapo": (0.2, 0.28),
        "gspo": (0.2, 0.2),
        "cispo": (0.2, 0.28),
        "dro": (None, None),
    }
    assert (spec.clip_low, spec.clip_high) == numbers.get(loss, (None, None))
    assert spec.reduction == "token_mean"
    assert (spec.kl != "none") == (loss in ("grpo", "reinforce"))
    assert spec.correction == ("none" if loss == "reinforce" else "tis_token")
    assert (spec.ratio == "sequence") == (loss == "gspo")
    assert spec.dro_beta == (0.05 if loss == "dro" else None)


def test_fields_in_our_words(configure):
    config = configure(
        policy_loss="dapo",
        dapo=DAPOConfig(eps_clip=0.1, eps_clip_high=0.3, eps_clip_c=3.0),
        epochs=3,
        max_rows=5,
        prompt_groups_per_step=4,
        ppo_n_minibatches=2,
        lora_rank=8,
        max_seq_len=1500,
        grad_accumulation_normalization="NUM_SEQUENCES",
        weight_sync=WeightSyncConfig(weight_sync_interval=3, dcp_save_interval=20),
        warm_start_from_adapter="adapters/x",
        wandb=WandBConfig(project="p"),
        infra=InfraConfig(training_shape_id="shape"),
    )
    assert config.train.steps == 4  # 15 rows, 4 a step
    assert (config.train.minibatches, config.rollout.weight_sync_interval, config.checkpoint.every) == (2, 3, 20)
    assert config.train.lora is not None and config.train.lora.rank == 8
    assert config.rollout.max_prompt_tokens == 1500 - 1024
    assert (config.algo.clip_low, config.algo.dual_clip, config.algo.reduction) == (0.1, 3.0, "sequence_sum")
    assert (config.adapters.start, config.tracking.wandb) == ("adapters/x", "p")
    assert configure(policy_loss="dro", dro=DROConfig(beta=0.1)).algo.dro_beta == 0.1
    assert configure(policy_loss="gspo", gspo=GSPOConfig(clip_ratio_low=0.1)).algo.clip_low == 0.1
    assert configure(policy_loss="cispo", cispo=CISPOConfig(eps_high=0.5)).algo.clip_high == 0.5
    assert configure(kl_beta=0.0).algo.kl is None
    assert (
        configure(lora_rank=8, weight_sync=WeightSyncConfig(weight_sync_interval=0)).rollout.weight_sync_interval == 0
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"base_model": "accounts/x/models/y", "deployment": DeployConfig(tokenizer_model="Qwen/Qwen3-8B")},
            "Qwen/Qwen3-8B",
        ),
        ({"policy_loss": "ppo"}, "policy_loss='ppo' does not exist; valid: grpo"),
        ({"ratio_log_cap": 10.0}, "log-ratios are always clamped to 20"),
        ({"tis": TISConfig(level="sequence")}, "tis.level='sequence' is not here"),
        ({"grad_accumulation_normalization": "X"}, "is not one of NUM_LOSS_TOKENS"),
        ({"max_seq_len": 1024}, "leaves no room for a prompt"),
        ({"router_replay": True}, "router_replay=True is not here"),
        ({"init_from_checkpoint": "job:1"}, "a run goes on with resume=auto"),
        ({"prompt_groups_per_step": 3, "ppo_n_minibatches": 2}, "2 minibatches cannot share"),
    ],
)
def test_what_is_not_here(configure, fields, message):
    with pytest.raises(ConfigError) as caught:
        configure(**fields)
    assert message in str(caught.value)


def test_every_field_acts_or_is_refused():
    """The source of the translation reads each field of the recipe's configuration and of its sections."""
    import inspect
    import re

    source = inspect.getsource(cookbook)
    read = {name for path in re.findall(r"config((?:\.\w+)+)", source) for name in path.split(".")} | set(NOT_HERE)
    sections = (Config, DAPOConfig, DROConfig, GSPOConfig, CISPOConfig, TISConfig, WeightSyncConfig, WandBConfig)
    idle = {"infra", "loss_path", "weight_sync_before_training"}  # docs/migrating.md says why
    assert {each.name for section in sections for each in dataclasses.fields(section)} - read - idle == set()


def test_rows_lose_their_answers(dataset):
    rows = list(cookbook.rows(dataset=str(dataset), max_rows=3))
    assert len(rows) == 3
    assert rows[0] == {"prompt": [{"role": "user", "content": "2 + 2?"}], "ground_truth": "<answer>4</answer>"}
    with pytest.raises(DataError, match="download it first"):
        list(cookbook.rows(dataset="https://x/y.jsonl"))
    dataset.write_text('{"prompt": 1}\n')
    with pytest.raises(DataError, match=r"rows.jsonl:1: not a JSON object with messages \(KeyError"):
        list(cookbook.rows(dataset=str(dataset)))


def test_the_recipes_reward():
    texts = ["<answer>the -4</answer>", "4", "<answer>5</answer>", "<answer>4</answer> <answer>5</answer>"]
    assert cookbook.ground_truth(texts, ["-4", "4", "<answer>5</answer>", 4]) == [1.0, 0.0, 1.0, 1.0]


def test_main_runs_it(dataset, tmp_path, model_dir):
    from groupwise.cookbook import main

    config = Config(
        log_path=str(tmp_path / "log"),
        base_model=str(model_dir),
        dataset=str(dataset),
        max_completion_tokens=4,
        max_rows=2,
        lora_rank=2,
        policy_loss="dapo",
    )
    result = main(config, reward_fn=shorter)
    assert result.steps == 2 and result.version.number >= 1
    assert (tmp_path / "log" / "config.yaml").is_file()
