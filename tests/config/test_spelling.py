"""Whose words a file is in, where every value comes from, and what `import` writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import ruamel.yaml

import groupwise
from groupwise.config.run import dump_resolved, load_config
from groupwise.errors import ConfigError
from groupwise.run.config_file import DEFAULT, read_run, system_of
from groupwise.run.importing import import_run, written
from groupwise.run.native_yaml import native_yaml
from reference_files import CPU, FULL_ASYNC, QUICK_START, write_project
from wording import raises, warns

NATIVE = """\
name: x
data: {source: prompts.jsonl}
rewards: [m:f, {function: m:g, weight: 0.5}]
train:
  steps: 7
"""


@pytest.mark.parametrize(
    ("text", "system"),
    [
        (NATIVE, "Groupwise"),
        ("nothing: known", "Groupwise"),
        (QUICK_START, "Axolotl"),
        ("rl: grpo", "Axolotl"),
        ("base_model: x\ntrl: {}", "Axolotl"),
        ("model_name_or_path: x", "TRL"),
        ("num_generations: 4", "TRL"),
        ("rl_env_module: x", "aitraining"),
        ("task: llm\nparams: {}", "aitraining"),
        ("max_steps: 3\norchestrator: {batch_size: 8}", "prime-rl"),
        ("trainer: {optim: {lr: 1e-6}}", "prime-rl"),
        ("optim: {lr: 1e-6}", "prime-rl"),  # of its trainer alone
        ("env: {agent: m:f}\ngroup_size: 4", "Groupwise"),
        ("data: {}\nnum_generations: 4", "Groupwise"),  # a native file with a stray key
    ],
)
def test_whose_words_a_file_is_in(text, system):
    assert system_of(ruamel.yaml.YAML(typ="safe").load(text)) == system


def test_a_native_file_is_read_as_ever(tmp_path):
    (tmp_path / "n.yaml").write_text(NATIVE)
    overrides = ["train.steps=9", "rewards[0].weight=2"]
    loaded = read_run(tmp_path / "n.yaml", overrides)
    assert loaded.config == load_config(tmp_path / "n.yaml", overrides) == loaded.runnable()
    assert loaded.system == "Groupwise" and not (loaded.idle or loaded.differs or loaded.refused)
    with raises(ConfigError, field="train.step", kind="unknown"):
        read_run(tmp_path / "n.yaml", ["train.step=3"])


def test_the_public_load_config_reads_every_spelling(tmp_path):
    (tmp_path / "n.yaml").write_text(NATIVE)
    (tmp_path / "a.yaml").write_text(QUICK_START)
    assert groupwise.load_config(tmp_path / "n.yaml").name == "x"
    assert groupwise.load_config(tmp_path / "a.yaml", ["trl.use_vllm=false"]).rollout.group_size == 8
    assert groupwise.load_config(tmp_path / "a.yaml").engine == "vllm"
    with raises(ConfigError):
        groupwise.load_config(tmp_path / "a.yaml", ["peft_use_dora=true"])
    with warns():
        groupwise.load_config(tmp_path / "a.yaml", ["trl.use_vllm=false", "lora_target_linear=null"])


def test_origins_of_a_native_file(tmp_path):
    (tmp_path / "n.yaml").write_text(NATIVE)
    loaded = read_run(tmp_path / "n.yaml", ["train.learning_rate=0.5", "rewards[0].weight=2"])
    origins = {key: (value, origin) for key, value, origin in loaded.origins()}
    assert origins["name"] == ("x", "n.yaml:1")
    assert origins["train.steps"] == (7, "n.yaml:5")
    assert origins["train.learning_rate"] == (0.5, "given as 'train.learning_rate=0.5'")
    assert origins["train.lora.rank"] == (16, DEFAULT)
    assert origins["rewards[0].function"] == ("m:f", "n.yaml:3")
    assert origins["rewards[0].weight"] == (2.0, "given as 'rewards[0].weight=2'")
    assert origins["rewards[1].weight"] == (0.5, "n.yaml:3")
    assert origins["rewards[1].name"] == (None, DEFAULT)


def test_origins_of_an_axolotl_file(tmp_path):
    (tmp_path / "a.yaml").write_text(QUICK_START)
    loaded = read_run(tmp_path / "a.yaml", ["trl.num_generations=4", "rollout.batch_rows=8"])
    origins = {key: origin for key, _, origin in loaded.origins()}
    assert origins["rollout.group_size"] == "trl.num_generations given as 'trl.num_generations=4'"
    assert origins["rollout.max_tokens"] == "trl.max_completion_length a.yaml:17"
    assert origins["rollout.batch_rows"] == "given as 'rollout.batch_rows=8'"
    assert origins["algo.policy_loss"] == "Axolotl's default of trl.loss_type"
    assert origins["rollout.min_p"] == DEFAULT
    assert "micro_batch_size a.yaml:26" in origins["rollout.prompts_per_step"]
    assert loaded.config.rollout.prompts_per_step == 2
    whole = {key for key, _, _ in loaded.origins()}
    assert {"train.lora.rank", "scoring.timeout_s", "tracking.wandb", "eval"} <= whole


@pytest.mark.parametrize("text", [QUICK_START, FULL_ASYNC, CPU], ids=["quick start", "async", "cpu"])
def test_what_import_writes_loads_as_the_same_run(tmp_path, text):
    (tmp_path / "a.yaml").write_text(text)
    loaded = import_run([str(tmp_path / "a.yaml"), "trl.use_vllm=false"])
    out = tmp_path / "out" / "native.yaml"
    out.parent.mkdir()
    written(loaded, out)
    again = load_config(out)
    assert dump_resolved(again) == dump_resolved(loaded.runnable())
    with raises(ConfigError):
        written(loaded, out)


def test_what_import_writes_says_where_each_value_came_from(tmp_path):
    (tmp_path / "a.yaml").write_text(QUICK_START)
    overrides = ["max_steps=5", "peft_use_dora=true"]
    text = native_yaml(import_run([str(tmp_path / "a.yaml"), *overrides]), folder=tmp_path)
    lines = text.splitlines()
    assert lines[0] == "# From a.yaml, which is in Axolotl's words."
    dora = "#   peft_use_dora (given as 'peft_use_dora=true'): vLLM serves no DoRA"
    assert dora in lines and "engine: vllm  # trl.use_vllm a.yaml:10" in lines
    assert "  group_size: 8  # trl.num_generations a.yaml:16" in lines
    assert "  steps: 5  # max_steps given as 'max_steps=5'" in lines
    assert any(line.startswith("#   attn_implementation (a.yaml:34): ") for line in lines)
    assert "folder" not in ruamel.yaml.YAML(typ="safe").load(text) and text.endswith("\n")


def test_what_is_said_of_data_that_are_to_be_named_yet_is_written(tmp_path):
    """A file without a dataset, whose rows are not to be shuffled."""
    (tmp_path / "t.yaml").write_text("model_name_or_path: starter\nreward_funcs: [m.f]\nshuffle_dataset: false\n")
    text = native_yaml(import_run([str(tmp_path / "t.yaml")]), folder=tmp_path)
    assert "# data: to be said before this can run" in text.splitlines()
    assert ruamel.yaml.YAML(typ="safe").load(text)["data"] == {"shuffle": False}


@pytest.mark.parametrize(
    ("names", "system"),
    [(["n.yaml"], None), ([], None), (["none.yaml"], None), (["x.yaml"], "verl")],
    ids=["ours", "no file", "a file that is not there", "an unknown format"],
)
def test_import_refuses_what_is_ours_and_what_is_not_there(tmp_path, names, system):
    (tmp_path / "n.yaml").write_text(NATIVE)
    with raises(ConfigError):
        import_run([str(tmp_path / name) for name in names], system=system)


def test_a_file_can_be_read_in_words_it_does_not_look_like(tmp_path):
    (tmp_path / "t.yaml").write_text("learning_rate: 0.1\nmodel_name_or_path: starter\n")
    assert import_run([str(tmp_path / "t.yaml"), "max_steps=1"], system="trl").config.model == "starter"


def test_the_python_reward_beside_the_file_is_used(tmp_path: Path):
    """Rewards named by dotted paths load from the file's folder."""
    from groupwise.rewards.base import load_rewards

    write_project(tmp_path)
    (tmp_path / "a.yaml").write_text(QUICK_START)
    config = read_run(tmp_path / "a.yaml", ["trl.use_vllm=false"]).runnable()
    assert [each.name for each in load_rewards(config.rewards, folder=config.folder)] == [
        "accuracy_reward",
        "format_reward",
    ]
