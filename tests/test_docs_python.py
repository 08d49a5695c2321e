"""docs/python.md has every public name, and its examples run."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import groupwise
from cli_project import cli

ROOT = Path(__file__).parent.parent


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import generate_python

    return generate_python


def test_the_page_is_what_the_script_makes(generator: ModuleType) -> None:
    made = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    assert generator.page() == made, "run: python docs/generate_python.py"


def test_every_public_name_is_there_and_in_the_example_above_it(generator: ModuleType) -> None:
    there = [name for section in generator.SECTIONS for name in section.names.split()]
    assert sorted(there) == sorted(set(groupwise.__all__) - {"__version__"})
    for section in generator.SECTIONS:
        body = re.sub(r"from groupwise import (\([^)]*\)|.*)", "", section.example)
        assert set(section.names.split()) <= set(re.findall(r"\w+", body)), section.title


@pytest.mark.parametrize("number", [0, 1, 3, 4])
def test_an_example_runs(
    number: int, generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    section = generator.SECTIONS[number]
    exec(compile(section.example, section.title, "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out
    assert said == {1: "4 1\n", 4: "sums@1 sums@1\n"}.get(number, said)


@pytest.mark.xdist_group("live server")
def test_the_example_of_the_client_runs(
    live: Any, generator: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("GROUPWISE_URL", live.url)
    monkeypatch.delenv("GROUPWISE_API_KEY", raising=False)
    assert cli("adapters", "activate", "base").exit_code == 0
    section = generator.SECTIONS[2]
    exec(compile(section.example, section.title, "exec"), {"__name__": "__main__"})
    assert re.match(r"(sums@\d+|no_signal .*)\n", capsys.readouterr().out)
