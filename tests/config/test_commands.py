"""`groupwise run | check | import` on files of other systems, from one end to the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_project import Project, cli
from groupwise.config.run import load_config
from groupwise.store.tracking import read_metrics
from reference_files import QUICK_START, write_project

STARTER = ("base_model=starter", "trl.use_vllm=false")
DATA = ("datasets[0].path=gsm8k.jsonl", "datasets[0].name=null")
SHORT = ("max_steps=3", "trl.max_completion_length=12", "gradient_checkpointing=false")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with the quick start and what it needs; the working directory is another one."""
    project = tmp_path / "project"
    project.mkdir()
    (write_project(project) / "quickstart.yaml").write_text(QUICK_START)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return project


@pytest.mark.slow
def test_the_quick_start_runs_as_it_is_with_the_starter_and_without_vllm(folder):
    result = cli("run", folder / "quickstart.yaml", *STARTER, *DATA, *SHORT, "--json")
    assert result.exit_code == 0, result.stderr
    left = json.loads(result.stdout)
    run_dir = Path(left["run_dir"])
    assert run_dir.parent.name == "grpo-output" and left["steps"] == 3
    steps = [line for line in read_metrics(run_dir / "metrics.jsonl") if "reward/mean" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all("reward/accuracy_reward/mean" in line and "reward/format_reward/mean" in line for line in steps)
    assert "not as in Axolotl" not in result.stderr
    saved = load_config(run_dir / "config.yaml")
    assert saved.train.learning_rate == pytest.approx(5e-6 * 3 / 10)  # the third of its 10 steps of warm-up
    assert saved.rollout.group_size == 8 and saved.train.lora is not None and saved.train.lora.rank == 32


def test_run_refuses_what_is_not_here_before_anything_is_loaded(folder):
    result = cli("run", folder / "quickstart.yaml", "peft_use_dora=true")
    assert result.exit_code == 2
    assert "peft_use_dora (given as" in result.stderr and "-> it runs with: trl.use_vllm=false" in result.stderr


def test_check_lists_what_has_no_effect_and_what_differs(folder):
    result = cli("check", folder / "quickstart.yaml", *STARTER, *DATA, *SHORT, "lora_target_linear=null")
    assert result.exit_code == 0, result.stderr
    text = " ".join(result.stdout.split())
    assert "1 prompt x 8 = 8 completions" in text and "1 optimizer step" in text
    assert "3 steps, 3 optimizer steps, 0.25 epochs of 12 prompts" in text
    assert "warning: every optimizer step sees the completions of one prompt" in text
    assert "not as in Axolotl: lora_target_linear" in text
    assert "vllm.host, vllm.port" in text and "no effect here: " in text and "logging_steps" in text


def test_check_explains_what_run_would_refuse(folder):
    result = cli("check", folder / "quickstart.yaml", *STARTER, "fp8=true", *DATA, *SHORT, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 2 and "fp8" in result.stderr
    assert [each["key"] for each in report["not_here"]] == ["fp8 (given as 'fp8=true')"]
    assert report["system"] == "Axolotl"


def test_origins_need_no_model_and_no_data(folder):
    result = cli("check", folder / "quickstart.yaml", "trl.use_vllm=false", "--origins")
    assert result.exit_code == 0, result.stderr
    lines = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert lines["rollout.group_size"].split() == [
        "rollout.group_size",
        "8",
        "trl.num_generations",
        "quickstart.yaml:16",
    ]
    assert lines["scoring.timeout_s"].endswith("default")
    as_json = json.loads(cli("check", folder / "quickstart.yaml", "trl.use_vllm=false", "--origins", "--json").stdout)
    assert as_json["origins"]["train.steps"] == {"value": 200, "from": "max_steps quickstart.yaml:28"}


def test_import_writes_a_file_that_is_the_same_run(folder):
    out = folder / "native.yaml"
    given = (folder / "quickstart.yaml", *STARTER, *DATA, *SHORT, "lora_target_linear=null")
    result = cli("import", *given, "-o", out)
    assert result.exit_code == 0 and result.stdout == "" and "note: lora_target_linear" in result.stderr
    of_both = [json.loads(cli("check", *each, "--origins", "--json").stdout)["origins"] for each in (given, (out,))]
    values = [{key: entry["value"] for key, entry in origins.items()} for origins in of_both]
    assert values[0] == values[1]
    assert of_both[1]["rollout.group_size"]["from"].startswith("native.yaml:")
    assert cli("check", out).exit_code == 0


def test_import_prints_without_o_and_takes_flags(folder):
    printed = cli("import", folder / "quickstart.yaml").stdout
    assert (
        printed.startswith("# From quickstart.yaml")
        and "group_size: 8  # trl.num_generations quickstart.yaml:16" in printed
    )
    flags = cli("import", "--from", "aitraining", "--model", "starter", "--rl-num-generations", "8", "--peft")
    assert flags.exit_code == 0, flags.stderr
    assert "group_size: 8" in flags.stdout and "# data: to be said before this can run" in flags.stdout
    as_json = json.loads(cli("import", folder / "quickstart.yaml", "--json").stdout)
    assert as_json["yaml"] == printed and not as_json["not_here"]


def test_a_trl_file_runs(project: Project, model_dir):
    (project.folder / "trl.yaml").write_text(
        f"model_name_or_path: {model_dir}\ndataset_name: prompts.jsonl\nreward_funcs: [my_rewards.vowels]\n"
        "num_generations: 3\nper_device_train_batch_size: 6\nmax_steps: 2\nmax_completion_length: 6\n"
        "learning_rate: 0.01\nuse_peft: true\nlora_target_modules: all-linear\nbeta: 0.1\nnum_iterations: 2\n"
    )
    result = cli("run", "trl.yaml", "run_dir=out", "--json")
    assert result.exit_code == 0, result.stderr
    steps = [line for line in read_metrics(project.folder / "out" / "metrics.jsonl") if "reward/mean" in line]
    assert len(steps) == 1 and "loss/kl" in steps[0]  # 2 optimizer steps: two passes over one rollout batch


def test_a_native_file_prints_no_notes(project: Project):
    result = cli("check", project.config)
    assert result.exit_code == 0, result.stderr
    assert "no effect here" not in result.stdout and "not as in" not in result.stdout
    assert "on-policy" in result.stdout
