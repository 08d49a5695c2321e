"""`groupwise health RUN`: which run, what it prints, and commands that can be copied."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cli_project import cli
from groupwise.config.run import dump_resolved, load_config, parse_config
from groupwise.store.tracking import Tracking
from wording import wording

SICK = {
    "reward/frac_zero_std": 1.0,
    "reward/mean": 0.5,
    "rollout/groups_trained": 0.0,
    "reward/min": 0.5,
    "reward/max": 0.5,
}
WELL = {"reward/frac_zero_std": 0.25, "reward/mean": 0.5, "optim/grad_norm": 0.5}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def run(name: str, *, steps: int = 12, metrics: dict[str, float] = SICK, **config) -> Path:
    """A run's directory under runs/."""
    directory = Path("runs") / name
    with Tracking(directory) as tracking:
        for step in range(1, steps + 1):
            tracking.log(step, metrics)
    given = parse_config({"data": {"source": "x.jsonl"}, "rewards": ["a:b"], **config})
    (directory / "config.yaml").write_text(dump_resolved(given), encoding="utf-8")
    return directory


def commands(page: str) -> list[list[str]]:
    return [shlex.split(line) for line in page.splitlines() if line.strip().startswith("groupwise run ")]


# ---- what it prints ----


def test_a_healthy_run():
    run("good", metrics=WELL)
    result = cli("health", "runs/good")
    assert result.exit_code == 0 and "runs/good" in result.stdout
    wording(result.stdout)


def test_a_finding_with_its_steps_value_limit_cause_and_remedies():
    run("bad")
    result = cli("health", "bad")
    lines = result.stdout.splitlines()
    assert result.exit_code == 1 and lines[2].split("  ")[0] == "finding"
    assert [cell.strip() for cell in lines[3].split("  ") if cell] == [
        "group.zero_std",
        "error",
        "10 to now",
        "reward/frac_zero_std, mean of 10",
        "1",
        ">= 1",
    ]
    assert ["groupwise", "run", "runs/bad/config.yaml", "rollout.group_size=16"] in commands(result.stdout)
    wording(result.stdout)


def test_what_is_over_is_in_the_table_and_no_reason_to_fail():
    directory = run("recovered")
    with Tracking(directory) as tracking:
        for step in range(13, 40):
            tracking.log(step, WELL)
    result = cli("health", "recovered")
    assert result.exit_code == 0 and "10 to 17" in result.stdout
    wording(result.stdout)


def test_a_warning_is_no_reason_to_fail():
    run("warned", metrics=WELL | {"optim/lr": 0.0})
    result = cli("health", "warned")
    assert result.exit_code == 0 and "lr.zero" in result.stdout
    wording(result.stdout)


def test_as_json():
    run("bad")
    result = cli("health", "bad", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1 and (report["run"], report["status"], report["last_step"]) == ("runs/bad", "error", 12)
    (finding,) = report["findings"]
    assert (finding["id"], finding["began"], finding["ended"], finding["threshold"]) == (
        "group.zero_std",
        10,
        None,
        1.0,
    )
    assert ["rollout.group_size=16"] in [remedy["overrides"] for remedy in finding["remedies"]]
    assert [note["step"] for note in report["notes"]] == [1]


def test_every_command_can_be_copied():
    """It loads, as another run, also where the directory has a space and the run named its own."""
    run("my run", run_dir="runs/my run")
    result = cli("health", "my run")
    copied = commands(result.stdout)
    assert len(copied) > 1
    for groupwise, verb, path, *overrides in copied:
        assert (groupwise, verb) == ("groupwise", "run")
        config = load_config(path, overrides)
        assert config.run_dir is None and config != load_config(path, ["run_dir=null"])


def test_a_run_that_has_only_begun():
    run("begun", steps=0)
    result = cli("health", "begun")
    assert result.exit_code == 0
    wording(result.stdout)


def test_a_configuration_that_cannot_be_read_leaves_words():
    directory = run("old")
    (directory / "config.yaml").write_text("an_old_key: 1\n")
    result = cli("health", "old")
    assert result.exit_code == 1
    wording(result.stderr)
    assert "(rollout.group_size)" in result.stdout and commands(result.stdout) == []
    wording(result.stdout)
    (directory / "config.yaml").unlink()
    assert cli("health", "old").exit_code == 1


# ---- which run ----


def test_by_path_by_directory_and_by_name():
    run("math-20260101T120000Z")
    newest = run("math-20260102T120000Z", metrics=WELL)
    run("math-harder-20260103T120000Z")
    for text in (str(newest), str(newest.resolve()), newest.name, "math"):
        assert json.loads(cli("health", text, "--json").stdout)["status"] == "ok", text
    assert json.loads(cli("health", "math-harder", "--json").stdout)["run"].endswith("harder-20260103T120000Z")


def test_a_run_that_is_not_there():
    result = cli("health", "nonsense")
    assert result.exit_code == 2
    wording(result.stderr)
    run("good", metrics=WELL)
    wording(cli("health", "nonsense").stderr)
    assert cli("health", ".").exit_code == 2  # a directory, and no run
    assert json.loads(cli("health", "nonsense", "--json").stdout)["error"]["code"] == "invalid_data"


def test_a_run_and_a_server_exclude_each_other():
    run("good")
    result = cli("health", "good", "--url", "http://127.0.0.1:9")
    assert result.exit_code == 2
    wording(result.stderr)


def test_metrics_that_are_damaged():
    directory = run("good")
    (directory / "metrics.jsonl").write_text("nonsense\n")
    result = cli("health", "good")
    assert result.exit_code == 2
    wording(result.stderr)


def test_no_torch_is_needed(tmp_path):
    run("bad")
    code = (
        "import sys; from typer.testing import CliRunner; from groupwise.cli.main import app\n"
        "assert CliRunner().invoke(app, ['health', 'bad']).exit_code == 1\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'groupwise.sdk.client', 'groupwise.server'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
