""".github/ and .pre-commit-config.yaml: they parse, and what they run is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
TARGETS = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def read(path: Path) -> Any:
    return YAML(typ="safe").load(path.read_text(encoding="utf-8"))


def check_paths(command: str) -> None:
    """Each word of a command that looks like a path of ours is one, and each target of make."""
    assert set(re.findall(r"\bmake (\w+)", command)) <= TARGETS
    for word in re.findall(r"(?<![\w./])(?:tests|tools|docs|benchmarks)/[\w./]*\w", command):
        assert (ROOT / word).exists(), word


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_a_workflow_runs_is_there(path: Path) -> None:
    workflow = read(path)
    assert {"name", "on", "permissions", "jobs"} <= workflow.keys()
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert all(("run" in step) != ("uses" in step) for step in steps)
    assert all("@" in step["uses"] for step in steps if "uses" in step)
    for step in steps:
        check_paths(step.get("run", ""))


def test_the_pythons_that_are_tested_are_those_that_are_promised() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    promised = [each.rpartition(" ")[2] for each in project["classifiers"] if re.search(r":: 3\.\d+$", each)]
    tests = read(ROOT / ".github/workflows/test.yml")
    assert tests["jobs"]["test"]["strategy"]["matrix"]["python"] == promised


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_what_it_needs(path: Path) -> None:
    form = read(path)
    assert form["name"] and form["description"]
    asked = [each for each in form["body"] if each["type"] != "markdown"]
    assert len({each["id"] for each in asked}) == len(asked) and all(each["attributes"]["label"] for each in asked)
    assert any(each.get("validations", {}).get("required") for each in asked)


def test_a_commit_is_looked_at_by_what_make_lint_runs() -> None:
    (local,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    commands = [hook["entry"] for hook in local["hooks"]]
    assert all(any(tool in each for each in commands) for tool in ("ruff check", "ruff format", "lint-imports"))
    for command in commands:
        check_paths(command)
