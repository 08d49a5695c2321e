"""The cookbook's `Config` as a run of ours, and `main(config)` from one end to the other."""

from __future__ import annotations

import dataclasses
import json
import random
import warnings
from typing import Any

import pytest

from groupwise.bridges.cookbook import config as cookbook
from groupwise.bridges.cookbook.config import (
    IDLE,
    LOSSES,
    NOT_HERE,
    CISPOConfig,
    ConcurrencyConfig,
    Config,
    DAPOConfig,
    DROConfig,
    GSPOConfig,
    RunnerConfig,
    TISConfig,
    WandBConfig,
    notes,
    run_config,
)
from groupwise.config.loss import loss_of
from groupwise.config.run import RunConfig
from groupwise.errors import ConfigError, DataError
from groupwise.sdk.sections import DeployConfig, InfraConfig, WeightSyncConfig, WeightSyncScope
from wording import raises


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
        return run_config(Config(**config | {"deployment": DeployConfig(tokenizer_model="starter")} | fields))

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


def test_fields_in_our_words(configure, monkeypatch):
    monkeypatch.setattr(cookbook, "_has_wandb", lambda: True)
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
        router_replay=True,
        wandb=WandBConfig(project="p", entity="team", run_name="first"),
        infra=InfraConfig(training_shape_id="shape"),
        concurrency=ConcurrencyConfig(max_window=64),
    )
    assert config.train.steps == 4  # 15 rows, 4 a step
    assert (config.train.minibatches, config.rollout.weight_sync_interval, config.checkpoint.every) == (2, 3, 20)
    assert config.train.lora is not None and config.train.lora.rank == 8
    assert config.rollout.max_prompt_tokens == 1500 - 1024
    assert (config.algo.clip_low, config.algo.dual_clip, config.algo.reduction) == (0.1, 3.0, "sequence_sum")
    assert config.train.router_replay is True and configure().train.router_replay is False
    assert config.adapters.start == "adapters/x" and config.rollout.batch_rows == 64 and config.resume == "auto"
    tracking = config.tracking
    assert (tracking.wandb, tracking.wandb_entity, tracking.wandb_name) == ("p", "team", "first")
    assert configure(wandb=WandBConfig(entity="team")).tracking.wandb == "grpo-tinker"
    assert configure(wandb=WandBConfig()).tracking.wandb is None
    fixed = ConcurrencyConfig(mode="fixed", max_concurrency=8)
    assert configure(concurrency=fixed).rollout.batch_rows == 8
    assert configure(policy_loss="dro", dro=DROConfig(beta=0.1)).algo.dro_beta == 0.1
    assert configure(policy_loss="gspo", gspo=GSPOConfig(clip_ratio_low=0.1)).algo.clip_low == 0.1
    assert configure(policy_loss="cispo", cispo=CISPOConfig(eps_high=0.5)).algo.clip_high == 0.5
    assert configure(kl_beta=0.0).algo.kl is None
    assert (
        configure(lora_rank=8, weight_sync=WeightSyncConfig(weight_sync_interval=0)).rollout.weight_sync_interval == 0
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"deployment": DeployConfig()},
        {"concurrency": ConcurrencyConfig(max_concurrency=4)},
        {"concurrency": ConcurrencyConfig(mode="fast")},
        {"gspo": GSPOConfig(seq_ratio_log_cap=5.0)},
        {"runner": RunnerConfig(status_file="status.json")},
        {"policy_loss": "ppo"},
        {"ratio_log_cap": 10.0},
        {"tis": TISConfig(level="sequence")},
        {"grad_accumulation_normalization": "X"},
        {"max_seq_len": 1024},
        {"init_from_checkpoint": "job:1"},
        {"prompt_groups_per_step": 3, "ppo_n_minibatches": 2},
        {"prompt_groups_per_step": 0},
        {"max_rows": -1},
        {"epochs": 0},
        {"kl_beta": -0.1},
    ],
)
def test_what_is_not_here(configure, fields):
    with raises(ConfigError):
        configure(**fields)


def test_a_dataset_without_rows_is_refused(configure, dataset):
    assert configure(max_rows=None).train.steps == 10
    dataset.write_text("\n")
    with raises(DataError):
        configure()


def test_every_field_acts_or_is_refused():
    """The source of the translation reads each field, or a line says why it changes nothing."""
    import inspect
    import re

    from groupwise.bridges.cookbook import recipe as main_module

    source = inspect.getsource(cookbook) + inspect.getsource(main_module)
    read = {name for path in re.findall(r"\w+((?:\.\w+)+)", source) for name in path.split(".")} | set(NOT_HERE)
    sections = (DAPOConfig, DROConfig, GSPOConfig, CISPOConfig, TISConfig, WeightSyncConfig, WandBConfig)
    known = {name.rpartition(".")[2] for name in IDLE} | {"infra"}
    for section in (Config, ConcurrencyConfig, InfraConfig, DeployConfig, *sections):
        assert {each.name for each in dataclasses.fields(section)} - read - known == set(), section


@pytest.mark.parametrize("name", IDLE)
def test_what_changes_nothing_is_said_in_a_line_when_it_is_set(name, dataset, tmp_path):
    """And not when it has its default."""
    whole = Config(
        log_path=str(tmp_path),
        base_model="starter",
        dataset=str(dataset),
        deployment=DeployConfig(tokenizer_model="starter", deployment_id="e", weight_sync_scope="per_deployment"),
    )
    bare = dataclasses.replace(whole, deployment=DeployConfig(tokenizer_model="starter"))
    assert notes(bare) == []
    section, _, field = name.rpartition(".")
    value = "other" if name != "deployment.weight_sync_scope" else WeightSyncScope.PER_DEPLOYMENT
    if "timeout" in field:
        value = 7
    changed: Any = {field: value}
    if section:
        changed = {section: dataclasses.replace(getattr(whole, section), **changed)}
    (said,) = [line for line in notes(dataclasses.replace(whole, **changed)) if name in line.partition(": ")[0]]
    assert IDLE[name] in said


def test_rows_lose_their_answers(dataset):
    rows = list(cookbook.rows(dataset=str(dataset), max_rows=3))
    assert len(rows) == 3
    assert rows[0] == {"prompt": [{"role": "user", "content": "2 + 2?"}], "ground_truth": "<answer>4</answer>"}
    with raises(DataError):
        list(cookbook.rows(dataset="nowhere.jsonl"))
    dataset.write_text("\n" + dataset.read_text().replace("\n", "\n\n"))
    assert len(list(cookbook.rows(dataset=str(dataset), max_rows=3))) == 3  # empty lines are none
    messages = [{"role": "user", "content": "2 + 2?\u2028Why?"}]
    dataset.write_text(json.dumps({"messages": messages}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [row["prompt"] for row in cookbook.rows(dataset=str(dataset))] == [messages]
    for wrong in ('{"prompt": 1}\n', '{"messages": "2 + 2?"}\n', '{"messages": ["2 + 2?"]}\n'):
        dataset.write_text(wrong)
        with raises(DataError):
            list(cookbook.rows(dataset=str(dataset)))


def test_the_recipes_reward():
    texts = ["<answer>the -4</answer>", "4", "<answer>5</answer>", "<answer>4</answer> <answer>5</answer>"]
    assert cookbook.ground_truth(texts, ["-4", "4", "<answer>5</answer>", 4]) == [1.0, 0.0, 1.0, 1.0]
    texts = ["<answer>none</answer> 4 <answer>4</answer>", "<ANSWER>\n4</Answer>", "<answer>4"]
    assert cookbook.ground_truth(texts, [4, 4, 4]) == [0.0, 1.0, 0.0]  # the first answer counts, whatever is outside it


def test_main_runs_it(dataset, tmp_path, model_dir):
    from groupwise.bridges.cookbook.recipe import main

    config = Config(
        log_path=str(tmp_path / "log"),
        base_model=str(model_dir),
        dataset=str(dataset),
        max_completion_tokens=4,
        max_rows=2,
        lora_rank=2,
        policy_loss="dapo",
        deployment=DeployConfig(tokenizer_model=str(model_dir)),
    )
    result = main(config, reward_fn=shorter)
    assert result.steps == 2 and result.version.number >= 1
    assert (tmp_path / "log" / "config.yaml").is_file()


def small(tmp_path, model_dir, dataset, **fields):
    config: dict[str, Any] = {
        "log_path": str(tmp_path / "log"),
        "base_model": str(model_dir),
        "dataset": str(dataset),
        "max_completion_tokens": 4,
        "max_rows": 6,
        "deployment": DeployConfig(tokenizer_model=str(model_dir)),
    }
    return Config(**config | fields)


def test_the_page_runs_as_it_is_published(dataset, tmp_path, model_dir, monkeypatch):
    """Its keywords with its values, but for files that are here; and what each means is said once."""
    from groupwise.bridges.cookbook.recipe import main

    monkeypatch.setattr(cookbook, "_has_wandb", lambda: False)
    shape = "accounts/fireworks/trainingShapes/qwen3-8b-128k-h200"
    config = Config(
        log_path=str(tmp_path / "grpo_logs"),
        base_model="accounts/fireworks/models/qwen3-8b",
        dataset=str(dataset),
        max_rows=2,
        epochs=1,
        completions_per_prompt=4,
        max_completion_tokens=4,
        temperature=1.0,
        max_seq_len=100,
        policy_loss="grpo",
        infra=InfraConfig(training_shape_id=shape, ref_training_shape_id=f"{shape}-forward"),
        deployment=DeployConfig(deployment_id="grpo-serving", tokenizer_model=str(model_dir)),
        weight_sync=WeightSyncConfig(weight_sync_interval=1, first_checkpoint_type="base"),
        wandb=WandBConfig(entity="my-team", project="grpo-experiment"),
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result = main(config)
    assert result.steps == 2 and (tmp_path / "grpo_logs" / "metrics.jsonl").is_file()
    said = [str(each.message) for each in warned if each.category is UserWarning]
    about = ("base_model=", "wandb:", "infra.training_shape_id:", "infra.ref_", "deployment.deployment_id")
    assert len(said) == len(about) and all(line.startswith(name) for line, name in zip(said, about, strict=True)), said


def test_main_without_a_tokenizer_is_a_value_error(dataset, tmp_path, model_dir):
    from groupwise.bridges.cookbook.recipe import main

    for deployment in (DeployConfig(), DeployConfig(tokenizer_model="")):
        with raises(ValueError):
            main(small(tmp_path, model_dir, dataset, deployment=deployment))
    assert not (tmp_path / "log").exists()


def test_main_refuses_another_tokenizer_than_the_models(dataset, tmp_path, model_dir):
    """The same under another name is fine."""
    import shutil

    from groupwise.bridges.cookbook.recipe import main

    same = tmp_path / "same"
    shutil.copytree(model_dir, same)
    deployment = DeployConfig(tokenizer_model=str(same))
    assert main(small(tmp_path, model_dir, dataset, deployment=deployment, max_rows=1)).steps == 1
    with raises(ConfigError):
        main(small(tmp_path, model_dir, dataset, deployment=DeployConfig(tokenizer_model="starter")))
    template = next(same.glob("chat_template.jinja"))
    template.write_text(template.read_text() + " ")
    with raises(ConfigError):
        main(small(tmp_path, model_dir, dataset, deployment=DeployConfig(tokenizer_model=str(same))))


def vowels(completion: str, row: dict) -> float:
    return sum(map(completion.count, "aeiou")) / (1 + len(completion))


@pytest.mark.slow
def test_the_same_script_started_again_goes_on_from_its_checkpoints(dataset, tmp_path, model_dir, monkeypatch):
    """A crash in step 5, with checkpoints every two steps: the second start ends as one that was never interrupted."""
    from groupwise.bridges.cookbook.recipe import main
    from groupwise.run.training_run import TrainingRun

    def config(name: str) -> Config:
        sync = WeightSyncConfig(dcp_save_interval=2)
        log_path = str(tmp_path / name)
        return small(tmp_path, model_dir, dataset, log_path=log_path, weight_sync=sync, lora_rank=2, policy_loss="dapo")

    def crash(self, step, *args, **options):
        if step == 5:
            raise RuntimeError("the power went")
        return log(self, step, *args, **options)

    log = TrainingRun.log
    main(config("whole"), reward_fn=vowels)
    with monkeypatch.context() as patched:
        patched.setattr(TrainingRun, "log", crash)
        with pytest.raises(RuntimeError, match="the power went"):
            main(config("torn"), reward_fn=vowels)
    result = main(config("torn"), reward_fn=vowels)
    assert result.steps == 6
    rewards = [
        [json.loads(line)["reward/mean"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "torn")
    ]
    assert len(rewards[0]) == 6 and rewards[0] == rewards[1]
    whole, torn = (sorted((tmp_path / name / "adapters").glob("*/v*/*.safetensors"))[-1] for name in ("whole", "torn"))
    assert torn.read_bytes() == whole.read_bytes()
    again = main(config("torn"), reward_fn=vowels)  # it was finished: nothing is left to do
    assert (again.steps, again.version) == (6, result.version)


def test_trajectories_are_written_as_the_recipe_writes_them(dataset, tmp_path, model_dir):
    from groupwise.bridges.cookbook.recipe import main

    config = small(tmp_path, model_dir, dataset, trajectory_dir=str(tmp_path / "told"), max_rows=2, lora_rank=2)
    result = main(config, reward_fn=vowels)
    files = sorted(path.name for path in (tmp_path / "told").iterdir())
    assert files == ["step_0001.jsonl", "step_0002.jsonl"] and result.steps == 2
    lines = [json.loads(line) for line in (tmp_path / "told" / "step_0001.jsonl").read_text().splitlines()]
    assert [line["completion_index"] for line in lines] == [0, 1, 2, 3]
    first = lines[0]
    assert (first["step"], first["prompt_group"], first["ground_truth"]) == (1, 0, "<answer>4</answer>")
    assert first["prompt"] == [{"role": "user", "content": "2 + 2?"}]
    assert first["reward"] == vowels(first["completion"], {}) and first["truncated"] == (first["completion_len"] == 4)
    assert abs(sum(line["advantage"] for line in lines)) < 1e-6


def test_a_dataset_may_be_a_url(dataset, tmp_path, model_dir):
    """It is fetched once, into the run's directory."""
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    asked = []

    class Rows(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200 if self.path == "/rows.jsonl" else 404)
            self.end_headers()
            self.wfile.write(dataset.read_bytes())

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Rows)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/rows.jsonl"
        for _ in range(2):
            config = run_config(small(tmp_path, model_dir, url))
            assert config.train.steps == 6
        assert asked == ["/rows.jsonl"]
        with raises(DataError):
            run_config(small(tmp_path, model_dir, url + "x", log_path=str(tmp_path / "other")))
    finally:
        server.shutdown()
        server.server_close()
