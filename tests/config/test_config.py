import re
import subprocess
import sys
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from groupwise.config.algo import AlgoConfig
from groupwise.config.loss import LossSpec, resolve_loss
from groupwise.config.other_names import OTHER_NAMES
from groupwise.config.run import RunConfig, dump_resolved, load_config, parse_config
from groupwise.config.serve import ServeConfig
from groupwise.config.yaml import key_paths, models_in
from groupwise.errors import ConfigError
from groupwise.run.config_file import read_run
from wording import raises

MINIMAL = {"data": {"source": "prompts.jsonl"}, "rewards": ["groupwise.rewards.text:exact_match"]}
TEXT = """\
name: arithmetic
data:
  source: prompts.jsonl
rewards:
  - groupwise.rewards.text:exact_match
  - function: my_rewards:short
    weight: 0.5
train:
  learning_rate: 1e-5
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "cfg.yaml"
        path.write_text(text)
        return path

    return write


def refusal(data: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(MINIMAL | data)
    return str(caught.value)


def test_a_file_and_overrides(write):
    config = load_config(write(TEXT), ["train.steps=10", "rewards[0].weight=2", "rollout.stop=['\\n', END]"])
    assert config.name == "arithmetic"
    assert config.train.learning_rate == 1e-5
    assert config.train.steps == 10
    assert [(reward.function, reward.weight) for reward in config.rewards] == [
        ("groupwise.rewards.text:exact_match", 2.0),
        ("my_rewards:short", 0.5),
    ]
    assert config.rollout.stop == ("\\n", "END")
    assert config.folder == write(TEXT).parent


def test_the_configuration_does_not_change():
    config = parse_config(MINIMAL)
    with pytest.raises(ValidationError):
        config.train.steps = 3  # type: ignore[misc]


def test_defaults_of_the_recipe():
    config = parse_config(MINIMAL)
    assert (config.rollout.prompts_per_step, config.rollout.group_size, config.train.lora.rank) == (32, 8, 16)
    assert config.algo.loss_overrides() == {}
    assert config.eval is None
    assert RunConfig.model_validate(MINIMAL) == config


@pytest.mark.parametrize(
    ("algo", "advantage"),
    [
        ({}, "group_std"),
        ({"policy_loss": "dapo"}, "group_std"),
        ({"policy_loss": "dr_grpo"}, "mean"),
        ({"policy_loss": "dr_grpo", "advantage": "group_std"}, "group_std"),
        ({"policy_loss": "dr_grpo", "aggregation": "normalize_then_sum"}, "group_std"),  # which has its own scales
    ],
)
def test_a_preset_brings_the_advantage_of_its_paper(algo, advantage):
    config = parse_config(MINIMAL | {"algo": algo})
    assert config.algo.advantage == advantage
    assert parse_config(yaml.safe_load(dump_resolved(config))).algo == config.algo


def test_samples_may_be_stale_ahead_of_training_and_where_they_are_replayed():
    stale = [{"max_staleness": 1}, {"weight_sync_interval": 2}, {"weight_sync_interval": 0}, {"replay": {"size": 4}}]
    assert all(parse_config(MINIMAL | {"rollout": rollout}).rollout.may_be_stale for rollout in stale)
    assert not parse_config(MINIMAL).rollout.may_be_stale


def test_the_sampling_parameters_are_the_rollouts():
    sampling = parse_config(MINIMAL | {"rollout": {"temperature": 0.7, "stop": ["x"]}}).rollout.sampling()
    assert (sampling.temperature, sampling.stop, sampling.max_tokens) == (0.7, ("x",), 256)


@pytest.mark.parametrize(("key", "value", "off"), [("top_p", 0.9, "1"), ("top_k", 20, "0"), ("min_p", 0.05, "0")])
def test_a_part_of_the_vocabulary_is_trained_where_it_is_recorded(key, value, off):
    """By the local engine. Of what vLLM samples the loss would compare log-probabilities of everything: the ratio would
    read 1 and the bias would not show."""
    narrowed = MINIMAL | {"rollout": {key: value}}
    with raises(ConfigError, kind="conflict"):
        parse_config(narrowed | {"engine": "vllm"})
    assert parse_config(narrowed).rollout.sampling().reshaped == (key,)
    parse_config(MINIMAL | {"engine": "vllm", "rollout": {key: float(off) if key != "top_k" else 0}})


def test_unknown_keys_are_named_with_line_and_suggestion(write):
    text = TEXT.replace("learning_rate", "learing_rate")
    with raises(ConfigError) as unknown:
        load_config(write(text))
    assert (unknown.value.field, unknown.value.kind) == ("train.learing_rate", "unknown")


@pytest.mark.parametrize(
    ("data", "suggestion"),
    [
        ({"train": {"max_tokens": 3}}, "did you mean rollout.max_tokens?"),  # exact elsewhere before similar beside
        ({"learning_rate": 1e-4}, "did you mean train.learning_rate?"),
        ({"group_sise": 4}, "did you mean rollout.group_size?"),
        ({"train": {"num_generations": 4}}, "did you mean rollout.group_size?"),
        (
            {"rewards": [{"function": "a:b", "wieght": 1}]},
            "rewards[0].wieght: unknown; did you mean rewards[0].weight?",
        ),
        ({"adapters": {"zzz": 1}}, "the keys of adapters are keep"),
        ({"eval": {"data": {"source": "x.jsonl", "shuffle": True}}}, "did you mean data.shuffle?"),
    ],
)
def test_suggestions(data, suggestion):
    assert suggestion in refusal(data)


def test_the_names_of_other_systems_point_at_keys():
    known = {".".join(path) for path in key_paths(RunConfig)}
    names = [re.split("[= ]", name)[0] for ours in OTHER_NAMES.values() for name in ours.split(" or ")]
    assert all(name in known or name.rpartition(".")[0] in known for name in names)


def test_all_problems_are_reported_together(write):
    text = TEXT + "  steps: '10'\n  betas: [0.9, 1.5]\nrollout: {group_size: 1, temperature: 0}\ndevice: gpu\n"
    with pytest.raises(ConfigError) as caught:
        load_config(write(text), ["algo.advantage=zscore"])
    message = str(caught.value)
    assert "cfg.yaml has 6 problems" in message
    assert "train.steps (cfg.yaml:10): '10' is not valid; it must be a valid integer" in message
    assert "train.betas (cfg.yaml:11): [0.9, 1.5] is not valid; both must be in [0, 1)" in message
    assert "rollout.group_size (cfg.yaml:12): 1 is not valid; a group needs at least 2 completions" in message
    assert "rollout.temperature (cfg.yaml:12): 0 is not valid; it must be greater than 0" in message
    assert "device (cfg.yaml:13): 'gpu' is not valid" in message
    assert "algo.advantage (given as 'algo.advantage=zscore'): 'zscore' is not valid; it must be 'group_std'" in message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"train": {"warmup_steps": 7, "steps": 5}},
            "train.warmup_steps: 7 warm-up steps do not fit into train.steps = 5",
        ),
        (
            {"train": {"minibatches": 3}},
            "train.minibatches: 3 minibatches cannot share rollout.prompts_per_step = 32 prompts evenly",
        ),
        ({"rewards": [{"function": "a:b", "weight": 0}]}, "rewards: every weight is 0"),
        ({"rewards": []}, "rewards: required and missing"),
        ({"rewards": "a:b"}, "rewards: 'a:b' is not valid; it must be a list"),
        ({"name": "base"}, "name: 'base' is what the model without an adapter is called"),
        ({"name": "../x"}, "name: '../x' is not valid"),
        (
            {"data": {"source": "x.jsonl", "split": "test"}},
            "data.split: 'test' of 'x.jsonl': a file has one",
        ),
        ({"data": {"source": "x.jsonl", "args": {"a": 1}}}, "data.args: a file takes no arguments"),
        ({"eval": {"every": 5}}, "eval.data: required and missing"),
        ({"eval": {"data": {"source": "x.jsonl"}, "modes": ["greedy", "greedy"]}}, "names a mode twice"),
        ({"algo": {"advantage": "mean", "advantage_eps": 1e-3}}, "0.001 does not act with advantage 'mean'"),
        (
            {"algo": {"advantage": "leave_one_out", "advantage_ddof": 0}},
            "0 does not act with advantage 'leave_one_out'",
        ),
        ({"algo": {"advantage_ddof": 2}}, "algo.advantage_ddof: 2 is not valid"),
        ({"algo": {"advantage": "mean", "aggregation": "normalize_then_sum"}}, "'mean' does not act with aggregation"),
        ({"train": {"steps": True}}, "train.steps: True is not valid"),
        ({"train": {"learning_rate": float("nan")}}, "train.learning_rate: nan is not valid"),
        (
            {"train": {"lora": {"targets": []}}},
            "train.lora.targets: [] is not valid; write all-linear, experts, vision, projector or a list",
        ),
        ({"train": {"parameters": ["eyes"]}}, "['eyes'] is not valid; write all, or a list of text, vision, projector"),
        ({"train": {"parameters": "all"}}, "train.parameters: acts with train.lora: null"),
        ({"train": None}, "train: None is not valid; it must be a mapping"),
        ({3: 4}, "[3]: every key must be a string"),
    ],
)
def test_refusals(data, message):
    assert message in refusal(data)


def test_a_missing_section_points_at_the_file(write):
    with raises(ConfigError) as missing:
        load_config(write("data: {source: x.jsonl}\n"))
    assert missing.value.field == "rewards"
    with pytest.raises(ConfigError) as missing:
        load_config(write("data: {}\nrewards: [a:b]\n"))
    assert (missing.value.field, missing.value.kind) == ("data.source", "missing")


def test_a_learning_rate_of_zero_is_a_control_experiment():
    assert parse_config(MINIMAL | {"train": {"learning_rate": 0}}).train.learning_rate == 0.0


def test_short_runs_need_no_change_of_the_warm_up():
    assert parse_config(MINIMAL | {"train": {"steps": 2}}).train.warmup_steps == 1
    assert parse_config(MINIMAL | {"train": {"steps": 1}}).train.warmup_steps == 0
    assert parse_config(MINIMAL).train.warmup_steps == 5


def test_training_all_parameters():
    assert parse_config(MINIMAL | {"train": {"lora": None}}).train.lora is None
    assert parse_config(MINIMAL | {"train": {"lora": {"targets": ["q_proj"]}}}).train.lora.targets == ("q_proj",)


def test_the_loss_options_are_those_of_the_loss():
    ours = {"policy_loss", "advantage", "advantage_eps", "advantage_ddof", "aggregation"}
    elsewhere = {"function", "soft_kl", "soft_kl_coeff"}  # policy_loss, and the section teacher
    assert set(AlgoConfig.model_fields) - ours == {field.name for field in fields(LossSpec)} - elsewhere
    algo = parse_config(MINIMAL | {"algo": {"policy_loss": "dapo", "clip_high": 0.3}}).algo
    assert algo.loss_overrides() == {"clip_high": 0.3}
    assert resolve_loss(algo.policy_loss, **algo.loss_overrides()).clip_high == 0.3


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("a/b.jsonl", "file"),
        ("b.parquet", "file"),
        ("pkg.mod:rows", "function"),
        ("../my data/rows.py:rows", "function"),
        ("openai/gsm8k", "dataset"),
        ("./saved", "dataset"),
    ],
)
def test_kinds_of_sources(source, kind):
    assert parse_config(MINIMAL | {"data": {"source": source}}).data.kind == kind


def test_every_field_is_documented():
    sections, fields_seen = [RunConfig], 0
    while sections:
        section = sections.pop()
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"
            sections += models_in(field.annotation)
            fields_seen += 1
    assert fields_seen > 60


def test_the_run_directory():
    now = datetime(2025, 1, 31, 12, tzinfo=UTC)
    assert parse_config(MINIMAL).run_path(now=now) == Path("runs/run-20250131T120000Z")
    assert parse_config(MINIMAL | {"run_dir": "here"}).run_path(now=now) == Path("here")


def test_the_dump_says_what_a_step_costs(write):
    dump = dump_resolved(load_config(write(TEXT)))
    assert dump.startswith("# 32 prompts x 8 = 256 completions a step, at most 65536 completion tokens\n")
    assert "learning_rate: 1e-05" in dump


def test_the_dump_loads_as_the_same_run_from_anywhere(write, tmp_path):
    config = load_config(write(TEXT), ["train.lora.targets=[q_proj]", "name=no", "rollout.stop=['1e-5', \"\\n\"]"])
    copy = tmp_path / "elsewhere" / "resolved.yaml"
    copy.parent.mkdir()
    copy.write_text(dump_resolved(config))
    assert load_config(copy) == config


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**63 - 1),
    rate=st.floats(0, 1),
    stop=st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1), max_size=3),
    weight=st.floats(0.1, 1e30),
)
def test_any_valid_run_survives_the_dump(tmp_path_factory, seed, rate, stop, weight):
    data = MINIMAL | {
        "seed": seed,
        "train": {"learning_rate": rate},
        "rollout": {"stop": stop},
        "rewards": [{"function": "a:b", "weight": weight, "args": {"patterns": stop}}],
        "folder": str(tmp_path_factory.getbasetemp()),
    }
    config = parse_config(data)
    path = tmp_path_factory.getbasetemp() / "dump.yaml"
    path.write_text(dump_resolved(config), encoding="utf-8")
    assert load_config(path) == config


def test_importing_the_package_stays_light():
    code = "import sys, groupwise; print('pydantic' in sys.modules)"
    code += "; import groupwise.config.run; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]


def test_the_home_may_be_written_in_a_file_which_no_shell_reads(tmp_path, monkeypatch):
    """Taken as it stands, `~/runs` is a directory called ~ where the command was typed."""
    monkeypatch.setenv("HOME", str(tmp_path))
    said = {"output_dir": "~/runs", "run_dir": "~/runs/one", "folder": "~/rewards", "vllm": {"adapter_dir": "~/seen"}}
    told = parse_config({"data": {"source": "x.jsonl"}, "rewards": ["m:f"], "engine": "vllm", **said})
    assert told.output_dir == f"{tmp_path}/runs" and told.run_dir == f"{tmp_path}/runs/one"
    assert told.folder == tmp_path / "rewards" and told.vllm.adapter_dir == f"{tmp_path}/seen"
    file = tmp_path / "elsewhere" / "run.yaml"
    file.parent.mkdir()
    file.write_text("data: {source: x.jsonl}\nrewards: [m:f]\nfolder: ~/rewards\n")
    for config in (load_config(file), read_run(file, []).config):
        assert config.folder == tmp_path / "rewards"
    assert ServeConfig.model_validate({"state_dir": "~/state"}).state_dir == tmp_path / "state"
