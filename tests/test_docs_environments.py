"""docs/environments.md: its examples run, its tables are those of the code."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import PydanticUndefined
from ruamel.yaml import YAML
from typer.testing import CliRunner

from groupwise.algo.metrics import STOPS
from groupwise.cli.envs import envs_app
from groupwise.config.run import EnvConfig, parse_config
from groupwise.run.health_rules import RULES
from groupwise.run.loop import run_loop
from groupwise.store.tracking import read_metrics
from groupwise.tasks.env_loading import load_factory
from groupwise.tasks.tools import CallOutcome

PAGE = (Path(__file__).parent.parent / "docs" / "environments.md").read_text(encoding="utf-8")
EXAMPLES = Path(__file__).parent.parent / "examples" / "envs"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def blocks(language: str) -> list[str]:
    return [block for kind, block in BLOCKS if kind == language]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every example in its file."""
    for block in (*blocks("python"), *blocks("yaml")):
        if (name := re.match(r"# ([\w.]+\.(?:py|yaml))\b", block)) is not None:
            (tmp_path / name[1]).write_text(block)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- tables ----


def default_of(name: str) -> Any:
    field = EnvConfig.model_fields[name]
    return field.get_default(call_default_factory=True) if field.default is PydanticUndefined else field.default


def row(name: str) -> str:
    value = default_of(name)
    shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return f"| `{name}` | `{shown}` | {EnvConfig.model_fields[name].description} |"


def test_the_table_has_every_key_with_its_default():
    assert re.findall(r"^\| `.*$", section("All keys"), re.MULTILINE) == [row(name) for name in EnvConfig.model_fields]


def test_every_stop_has_its_row():
    assert tuple(re.findall(r"^\| `(\w+)`", section("Why an episode ends"), re.MULTILINE)) == ("stop", *STOPS)


def test_the_rules_and_the_kinds_of_errors_are_the_codes():
    ids = {rule.id for rule in RULES if rule.id.startswith("env.")}
    assert set(re.findall(r"`(env\.\w+)`", section("While it trains"))) == ids
    kinds = {f"env/tool_{kind}" for kind in CallOutcome if kind is not CallOutcome.OK} | {"env/tool_errors"}
    assert set(re.findall(r"`(env/tool_\w+)`", section("Tools"))) == kinds


def test_every_key_that_is_named_is_one():
    named = set(re.findall(r"`env\.(\w+)", PAGE)) - {rule.id.removeprefix("env.") for rule in RULES}
    assert named <= set(EnvConfig.model_fields)


# ---- examples ----


def test_there_are_examples():
    assert {kind for kind, _ in BLOCKS} == {"python", "yaml", "pycon"}


@pytest.mark.parametrize("name", ["my_envs:Guess", "my_shop:Shop"])
def test_the_environments_are_fit(folder, name):
    result = CliRunner().invoke(envs_app, ["check", name, "--folder", str(folder), "--no-model", "--json"])
    answer = json.loads(result.stdout)
    assert [each for each in answer["findings"] if each["severity"] == "error"] == [] and result.exit_code == 0
    assert not [each for each in answer["findings"] if each["check"] == "hack"]


def test_the_environment_of_an_mcp_server_loads(folder):
    assert load_factory(EnvConfig(environment="my_notes:Notes"), folder=folder).name == "Notes"


def test_the_configuration_is_one(folder):
    config = parse_config(YAML(typ="safe").load(blocks("yaml")[0]))
    assert config.env is not None and load_factory(config.env, folder=folder).make().highest == 20


def test_the_rollout_function_trains(folder):
    rows = [{"prompt": [{"role": "user", "content": f"What is {n} + 13?"}]} for n in range(40, 48)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = YAML(typ="safe").load(next(block for block in blocks("yaml") if block.startswith("# rolled.yaml")))
    settings |= {"device": "cpu", "dtype": "float32", "folder": str(folder), "run_dir": str(folder / "run")}
    settings |= {"rollout": {**settings["rollout"], "prompts_per_step": 4, "group_size": 4}, "train": {"steps": 1}}
    (row,) = read_metrics(run_loop(parse_config(settings)).run_dir / "metrics.jsonl")
    assert row["env/failed_frac"] == row["env/foreign_tokens"] == 0 and row["rollout/turns_mean"] == 2


@pytest.mark.parametrize("name", ["openai_agents_calculator.py", "openai_agents_calculator.yaml"])
def test_an_agent_of_the_page_is_the_example(folder, name):
    """Which is trained in tests/slow/test_openai_agents.py."""
    shown = (folder / name).read_text().removeprefix(f"# {name}\n")
    assert (EXAMPLES / name).read_text().endswith(shown) and shown.startswith(("import re\n", "name: "))


def test_sessions():
    test = doctest.DocTestParser().get_doctest("\n".join(blocks("pycon")), {}, "environments.md", None, None)
    shown: list[str] = []
    assert test.examples and doctest.DocTestRunner().run(test, out=shown.append).failed == 0, "".join(shown)
