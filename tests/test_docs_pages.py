"""Every page (README, CONTRIBUTING, docs/): its links, files, commands, Python and YAML are real."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import ruamel.yaml
import typer

from groupwise.cli.main import app
from groupwise.config.formats.format import format_named
from groupwise.config.run import RunConfig, parse_config
from groupwise.config.serve import serve_config
from groupwise.config.yaml import Document, key_paths
from groupwise.run.config_file import GROUPWISE, system_of, understand

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "groupwise"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "benchmarks/README.md",
    ROOT / "skills/groupwise/SKILL.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]
OURS = re.compile(
    r"https://(?:github\.com/groupwise/groupwise/(?:blob|tree)|raw\.githubusercontent\.com/groupwise/groupwise)/main/"
)
SHELL = ("", "bash", "console")
OF_RUNS = {"run", "check", "eval", "launch", "vllm-serve"}  # commands that take CONFIG and overrides


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@cache
def prose(page: Path) -> str:
    """What is not in a block of code."""
    return re.sub(r"^```.*?^```", "", text(page), flags=re.MULTILINE | re.DOTALL)


def blocks(page: Path, *languages: str) -> list[str]:
    found = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text(page), re.MULTILINE | re.DOTALL)
    return [block for language, block in found if language in languages]


def inline_code(page: Path) -> list[str]:
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(page))]


def of_pages(*languages: str) -> list[tuple[Path, str]]:
    """Each block in one of the languages, with its page."""
    return [(page, block) for page in PAGES for block in blocks(page, *languages)]


# ---- links and files ----
@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and docs/site_hooks.py make them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_somewhere() -> None:
    every = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)\s]+)\)", prose(page))]
    assert [(name_of(page), link) for page, link in every if not leads_somewhere(page, link)] == []


def leads_somewhere(page: Path, link: str) -> bool:
    """Whether the file that a page's link names is there, with that heading; so is what is elsewhere."""
    target, _, anchor = link.partition("#")
    if ours := OURS.match(target):  # as the README has them, which is read on PyPI too
        there = ROOT / target[ours.end() :]
    elif re.match(r"https?:", target):
        return True
    else:
        there = (page.parent / target).resolve() if target else page
    return there.exists() and (not anchor or anchor in anchors(there))


def test_the_readme_has_absolute_links_alone() -> None:
    """It is the description of the package on PyPI, where a relative link leads nowhere."""
    assert [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(ROOT / "README.md")) if "://" not in link] == []


def is_file(name: str, page: Path) -> bool:
    """Whether a path as people write it is one: from the root, the package, the page, or a file's mere name."""
    places = (ROOT, SOURCE, page.parent, ROOT / "benchmarks", ROOT / "examples", ROOT / "examples/envs")
    return any((place / name).exists() for place in places) or name in names_of_modules()


@cache
def names_of_modules() -> set[str]:
    return {path.name for path in SOURCE.rglob("*.py")}


def test_every_python_file_that_is_named_exists() -> None:
    assert {name_of(page): gone for page in PAGES if (gone := files_gone(page))} == {}


def files_gone(page: Path) -> set[str]:
    """The Python files that a page names and that are nowhere. Those of a reader's own (`my_...`), and those that a
    block of the same page writes, are not ours."""
    named = {code.split()[-1] for code in inline_code(page) if re.fullmatch(r"(python )?[\w/]+\.py", code)}
    named |= {name for block in blocks(page, "mermaid") for name in re.findall(r"\w+(?:/\w+)*\.py", block)}
    theirs = {name for name in named if Path(name).name.startswith("my_") or f"# {name}" in text(page)}
    return {name for name in named - theirs if not is_file(name, page)}


def test_the_site_has_every_page_and_nothing_else() -> None:
    """`make docs` follows the links inside docs/, headings included; here: what it leaves out, and what leaves it."""
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^ +- .*: ([\w/]+\.md)$", config, re.MULTILINE)
    pages = (ROOT / "docs").rglob("*.md")
    assert sorted(listed) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in pages)


def test_links_that_leave_docs_lead_to_the_repository_on_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    from site_hooks import on_page_markdown  # pyright: ignore[reportMissingImports]

    config, page = (
        SimpleNamespace(repo_url="https://repo"),
        SimpleNamespace(file=SimpleNamespace(src_uri="tutorials/a.md")),
    )
    text = "[a](../b.md#c) [d](#e) [f](../../src/g.py) [h](https://i/j.py) [k](../../README.md#l) ![m](../n.png)"
    there = "https://repo/blob/main"
    expected = (
        f"[a](../b.md#c) [d](#e) [f]({there}/src/g.py) [h](https://i/j.py) [k]({there}/README.md#l) ![m](../n.png)"
    )
    assert on_page_markdown(text, page=page, config=config) == expected


# ---- commands ----
def lines_of(block: str) -> list[str]:
    """The commands of a block: continued lines joined, prompts and the output of a session left out."""
    lines = block.replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ").strip() for line in lines if not block.startswith("$ ") or line.startswith("$ ")]


def called(pattern: str) -> Iterator[tuple[Path, str]]:
    """Where a command begins so: lines of shell blocks, and what stands between backticks."""
    for page in PAGES:
        lines = [line for block in blocks(page, *SHELL) for line in lines_of(block)]
        for line in dict.fromkeys([*lines, *inline_code(page)]):
            if re.match(pattern, line):
                yield page, line


def words_of(line: str) -> list[str]:
    return shlex.split(re.split(r"\s(?:[<>|]|&&|;|&$)\s?", line)[0], comments=True)


def commands() -> list[str]:
    lines = [line for _, line in called(r"([A-Z_]+=\S+ )*groupwise ")]
    return sorted({line for line in lines if not re.search(r"groupwise (\w+ \||\.\.\.)", line)})


@cache
def run_keys() -> set[str]:
    """Every key that an override may set, those of the other systems' files among them."""
    ours = {".".join(path[:depth]) for path in key_paths(RunConfig) for depth in range(1, len(path) + 1)}
    return ours | {
        key.name for system in ("axolotl", "trl", "prime-rl", "unsloth") for key in format_named(system).keys
    }


def test_every_command_is_one() -> None:
    """Its words are commands, options and arguments that the command line takes; a mere name has none."""
    assert len(commands()) > 60
    assert {line: wrong for line in commands() if (wrong := wrong_in(line))} == {}


def wrong_in(line: str) -> object:
    """What the command line would refuse of a command; falsy if nothing."""
    words = words_of(line)
    words = words[words.index("groupwise") + 1 :]
    command: click.Command = typer.main.get_command(app)
    name = words[0] if words else ""
    while hasattr(command, "commands") and words and words[0] not in ("--help", "--version", "..."):
        if words[0] not in command.commands:  # pyright: ignore[reportAttributeAccessIssue]
            return words[0]
        command = command.commands[words.pop(0)]  # pyright: ignore[reportAttributeAccessIssue]
    if not words or {"--help", "--version"} & {*words} or words == ["..."]:
        return None
    try:
        command.make_context("groupwise", [*words])
    except Exception as error:  # click's, of which typer has a copy
        return f"{type(error).__name__}: {error}"
    if name not in OF_RUNS:
        return None
    keys = {re.sub(r"\[\d+\]", "", word.partition("=")[0]) for word in words if re.match(r"[a-z][\w.\[\]]*=", word)}
    return {key for key in keys if key not in run_keys() and not of_free_form(key)}


def test_a_command_that_is_none_is_seen() -> None:
    assert wrong_in("groupwise trains a.yaml") == "trains" and wrong_in("groupwise serve --fast")
    assert wrong_in("groupwise run a.yaml train.speed=3") == {"train.speed"}
    assert not wrong_in("groupwise run a.yaml train.steps=3 data.args.n=3")


def of_free_form(key: str) -> bool:
    """Arguments of a user's function: `data.args.n`, `rewards.args.limit`."""
    return ".args." in key


def test_the_page_of_commands_has_them_all() -> None:
    page = text(ROOT / "docs/cli.md")
    command: Any = typer.main.get_command(app)
    assert set(re.findall(r"`groupwise ([\w-]+)", page.split("## Exit codes")[0].split("|---|", 1)[1])) == set(
        command.commands
    )
    codes = re.findall(r"^\| (\d+) \|", page, re.MULTILINE)
    assert codes == re.findall(r"(?:Exit codes: |; )(\d+) ", command.epilog)  # what `groupwise --help` ends with


def test_every_script_that_is_run_exists_and_has_these_options() -> None:
    for page, line in called(r"([A-Z_]+=\S+ )*python3? [\w/]+\.py"):
        words = words_of(line)
        script = next(word for word in words if word.endswith(".py"))
        if Path(script).name.startswith(("my_", "score")) or f"# {script}" in text(page):
            continue
        places = [place / script for place in (ROOT, ROOT / "benchmarks") if (place / script).exists()]
        assert places, f"{name_of(page)}: {line}"
        source = "".join(each.read_text(encoding="utf-8") for each in (ROOT / "benchmarks").glob("*.py"))
        source += places[0].read_text(encoding="utf-8")
        for option in (word for word in words if re.match(r"--\w", word)):
            given = option.partition("=")[0]
            in_table = f'"{given[2:]}": '  # of options that are added in a loop
            assert f'"{given}"' in source or in_table in source, f"{name_of(page)}: {line}: {option}"


def test_every_make_target_and_test_folder_that_is_named_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page, line in called(r"make \w+( |$)"):
        assert line.split()[1] in targets, f"{name_of(page)}: {line}"
    for page, line in called(r"pytest "):
        paths = [word for word in words_of(line) if "/" in word]
        assert all((ROOT / path.partition("::")[0]).exists() for path in paths), f"{name_of(page)}: {line}"


def test_every_address_that_is_fetched_is_a_route() -> None:
    listed = re.findall(r"^### `\w+ (/\S*)`$", text(ROOT / "docs/api.md"), re.MULTILINE)  # all, as test_docs.py checks
    routes = [re.sub(r"\{\w+\}", "[^/]+", path) for path in listed]
    fetched = {url for page in PAGES for url in re.findall(r"curl [^`]*?localhost:8420(/[\w/$.-]*)", text(page))}
    assert len(fetched) > 8
    assert {url for url in fetched if not any(re.fullmatch(route, url) for route in routes)} == set()


# ---- Python and YAML ----
def test_the_code_is_python() -> None:
    for page, block in of_pages("python"):
        compile(block, name_of(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_what_the_code_imports_of_ours_is_there() -> None:
    imported = set()
    for page in PAGES:
        for block in blocks(page, "python", "pycon"):
            imported |= set(
                re.findall(r"^(?:>>> )?\s*from (groupwise[\w.]*) import (?!\()([\w, ]+)", block, re.MULTILINE)
            )
    names = {(module, name.split(" as ")[0].strip()) for module, listed in imported for name in listed.split(",")}
    assert len(names) > 30
    assert {name for name in names if not hasattr(importlib.import_module(name[0]), name[1])} == set()


def test_the_sessions_parse() -> None:
    for page, block in of_pages("pycon"):
        assert doctest.DocTestParser().get_examples(block, name_of(page))


@pytest.mark.parametrize(("page", "block"), [pytest.param(*each, id=name_of(each[0])) for each in of_pages("yaml")])
def test_the_yaml_is_a_configuration(page: Path, block: str) -> None:
    """A whole run, in whoever's words, or sections of one, which go with any prompts and rewards. A manifest of
    Kubernetes only parses."""
    data = ruamel.yaml.YAML(typ="safe").load(block)
    if "apiVersion" in data or isinstance(data, list):  # a list: the table of another format's keys
        return
    if {"learn", "gate", "raters"} & data.keys():  # a server's
        assert serve_config(data, environ={})
        return
    if system_of(data) != GROUPWISE:  # without its rows, which nobody counts then
        assert understand(Document(data, name_of(page)), ["max_steps=1"], folder=page.parent).runnable()
        return
    rest: dict[str, Any] = {} if "env" in data else {"data": {"source": "x.jsonl"}, "rewards": ["my_rewards:exact"]}
    parse_config({**rest, **data})
