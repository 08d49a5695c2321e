"""docs/migrating.md is true of the code: its tables, its fields, its commands."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shlex
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from groupwise.bridges.cookbook.config import Config
from groupwise.cli.main import app
from groupwise.config.algo import AlgoConfig
from groupwise.config.formats.format import format_named
from groupwise.config.formats.keys import Key
from groupwise.config.run import RunConfig
from groupwise.config.yaml import key_paths

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "migrating.md").read_text(encoding="utf-8")
SYSTEMS = ("axolotl", "trl", "aitraining", "prime-rl", "unsloth")
SECTIONS = dict(re.findall(r"<!-- ([\w-]+) -->(.*?)<!-- end -->", TEXT, re.DOTALL))
PUBLISHED = re.findall(r"^\| (?!published )(.+?) \|", SECTIONS["published"], re.MULTILINE)


def keys_of(system: str) -> tuple[Key, ...]:
    """The keys of a system's table: of Unsloth's what differs from TRL's."""
    keys, above = format_named(system).keys, format_named("trl").keys if system == "unsloth" else ()
    return tuple(key for key in keys if key not in above)


@cache
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_migrating", DOCS / "generate_migrating.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_what_the_script_makes():
    assert generator().page(TEXT) == TEXT, "run: python docs/generate_migrating.py"


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_key_is_in_its_systems_section_once(system):
    first = [line.split("|")[1] for line in SECTIONS[system].splitlines() if line.startswith("| `")]
    names = [name for cell in first for name in re.findall(r"`([^`]+)`", cell)]
    assert sorted(names) == sorted(key.name for key in keys_of(system))


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_table_is_consistent(system):
    keys = keys_of(system)
    names = {key.name for key in keys}
    assert names <= {key.name for key in format_named(system).keys}
    ours = {".".join(path) for path in key_paths(RunConfig)} | {f"algo.{name}" for name in AlgoConfig.model_fields}
    assert len(names) == len(keys)
    for key in keys:
        assert key.what or key.fate == "plain", key.name
        assert set(key.here) <= ours, key.name
        assert (key.fate == "plain") <= (len(key.here) == 1)
        if key.fate == "absent" and key.instead:
            for override in key.instead.split():
                name = override.partition("=")[0]
                assert name in names or name in ours, key.name


def test_every_field_of_the_cookbook_is_there():
    section = TEXT.split("## The cookbook", 1)[1]
    first = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {name for cell in first for name in re.findall(r"`(\w+)`", cell)} == {
        each.name for each in dataclasses.fields(Config)
    }


def test_the_links_inside_the_page_lead_somewhere():
    headings = {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in re.findall(r"^## (.*)$", TEXT, re.M)}
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= headings


def test_the_examples_of_python_import_what_there_is():
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        for line in block.splitlines():
            if line.startswith("from groupwise"):
                exec(line, {})


def test_the_commands_take_their_words():
    blocks = re.findall(r"^```(?:\w*)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("groupwise ")]
    assert len(lines) >= 6
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        command: Any = typer.main.get_command(app)
        command.commands[words[0]].make_context("groupwise", words[1:])


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_comes_out_as_the_table_says(name):
    made = generator()
    config = made.published()[name]["config"]
    word, _, instead = made.outcome(config)
    line = next(line for line in TEXT.splitlines() if line.startswith(f"| {name} |"))
    assert f" | {word} | " in line
    if word != "not read":  # a plugin's keys
        made.imported(config, *" ".join(instead).split()).runnable()
