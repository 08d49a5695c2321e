"""`groupwise init`: each template is written, checked and run for two steps; nothing is written over."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
import typer

from cli_project import cli
from groupwise.cli.init import NEXT, TEMPLATES
from groupwise.cli.main import app
from slow_cases import long_case
from wording import wording

ROOT = Path(__file__).parents[2]
SMALL = ("rollout.prompts_per_step=2", "rollout.group_size=4", "scoring.workers=0", "eval=null")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def judge() -> Iterator[str]:
    """The address of the template's judge."""
    spec = importlib.util.spec_from_file_location("my_judge", TEMPLATES / "judge" / "my_judge.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with ThreadingHTTPServer(("127.0.0.1", 0), module.Judge) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"rewards[0].args.base_url=http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()


@pytest.mark.parametrize(
    "template", ["arithmetic", long_case("images"), pytest.param("tool-env", marks=pytest.mark.slow), "judge"]
)
def test_a_template_is_checked_and_trains(template, judge, monkeypatch):
    written = cli("init", "mine", "--from", template)
    assert written.exit_code == 0, written.stderr
    given = (*SMALL, judge) if template == "judge" else SMALL
    if template == "tool-env":
        given = tuple(word for word in given if "scoring" not in word)
    if template == "images":
        given = (*given, "data.limit=8")  # of 960, all of which would be looked at twice
    monkeypatch.chdir("mine")
    assert cli("check", "my_run.yaml", *given, "--json").exit_code == 0
    ran = cli("run", "my_run.yaml", *given, "train.steps=2", "--json")
    assert ran.exit_code == 0, ran.stderr
    result = json.loads(ran.stdout)
    if template == "images":
        shown = ("--image", "pictures/held_out-0.png", "--temperature", 0, "--max-tokens", 4, "--json")
        answer = cli("chat", "my-images", "How many circles are there? Just the number.", *shown)
        assert json.loads(answer.stdout)["version"] == "my-images@2", answer.stderr
    assert result["steps"] == 2 and Path(result["run_dir"], "metrics.jsonl").exists()


@pytest.mark.parametrize("template", NEXT)
def test_what_to_type_next_is_there(template):
    """`cd`, then commands of ours that exist, with files that were written; the README names the same."""
    written = json.loads(cli("init", "mine", "--from", template, "--json").stdout)
    first, *commands = written["next"]
    assert first == "cd mine" and len(commands) == 2
    page = Path("mine/README.md").read_text()
    for line in commands:
        for command in line.split(" & "):
            assert command in page, command
            program, *words = shlex.split(command)
            assert program == "python" or words[0] in typer.main.get_command(app).commands
            assert all(Path("mine", word).exists() for word in words if word.endswith((".py", ".yaml")))
    assert written["files"] == sorted(path.name for path in Path("mine").iterdir())
    assert not any("pyc" in name for name in written["files"])


def test_the_readme_shows_the_files_of_the_first_template():
    readme = (ROOT / "README.md").read_text()
    for name in ("my_rewards.py", "my_run.yaml"):
        shown = re.search(rf"```\w+\n# {re.escape(name)}\n(.*?)```", readme, re.DOTALL)
        assert shown is not None and shown[1] in (TEMPLATES / "arithmetic" / name).read_text()


def test_nothing_is_written_over(place):
    Path("mine").mkdir()
    assert cli("init", "mine").exit_code == 0  # an empty folder is no harm
    Path("mine/my_run.yaml").write_text("name: precious\n")
    before = sorted(place.rglob("*"))
    refused = cli("init", "mine", "--from", "judge")
    assert refused.exit_code == 2
    wording(refused.stderr)
    assert Path("mine/my_run.yaml").read_text() == "name: precious\n"
    Path("file").touch()
    assert cli("init", "file").exit_code == 2
    assert sorted(place.rglob("*")) == sorted([*before, place / "file"])


@pytest.mark.parametrize("named", [".", "link"])
def test_an_empty_folder_is_filled_and_stays_the_one_in_which_somebody_stands(place, monkeypatch, named):
    folder = place / "mine"
    folder.mkdir(mode=0o750)
    (place / "link").symlink_to("mine")
    before = folder.stat()
    if named == ".":
        monkeypatch.chdir(folder)
    told = json.loads(cli("init", named, "--json").stdout)
    assert "my_run.yaml" in told["files"] and told["files"] == sorted(path.name for path in folder.iterdir())
    assert (folder.stat().st_ino, folder.stat().st_mode) == (before.st_ino, before.st_mode)
    assert [line for line in told["next"] if line.startswith("cd ")] == ([] if named == "." else ["cd link"])


def test_a_template_that_is_not_there_leaves_nothing(place):
    refused = cli("init", "mine", "--from", "judg")
    assert refused.exit_code == 2
    wording(refused.stderr)
    assert not any(place.iterdir())


def test_what_cannot_be_written_leaves_nothing(place, monkeypatch):
    monkeypatch.setattr("groupwise.cli.init.DATA", "README.md")  # is no program: as if my_data.py failed
    failed = cli("init", "mine")
    assert failed.exit_code == 1
    wording(failed.stderr)
    assert not any(place.iterdir())


def test_what_people_copy_is_no_link():
    """Examples that are templates are copies of them, and so is the demo's configuration: `cp -r` takes all of them."""
    for folder in ("configs", "examples", "deploy", "skills"):
        assert not [path for path in (ROOT / folder).rglob("*") if path.is_symlink()]
    for copy, file in [
        ("configs/arithmetic.yaml", "demo/arithmetic.yaml"),
        ("examples/live_loop.py", "live-loop/live_loop.py"),
        ("examples/envs/calculator.py", "tool-env/calculator.py"),
        ("examples/envs/calculator.yaml", "tool-env/my_run.yaml"),
    ]:
        assert (ROOT / copy).read_bytes() == (TEMPLATES / file).read_bytes(), f"cp {TEMPLATES / file} {ROOT / copy}"
