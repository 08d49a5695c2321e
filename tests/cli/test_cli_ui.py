"""`groupwise ui`: which runs it opens, what it refuses, and that it serves until it is told to stop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from cli_project import cli
from run_place import make_run
from wording import wording


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_it_serves_a_run_by_name_and_an_empty_one_by_directory_until_sigterm() -> None:
    make_run(Path("runs/toy-20260101T000000Z"))
    make_run(Path("begun"), steps=0)
    command = [sys.executable, "-m", "groupwise", "ui", "toy", "begun", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        url = re.match(r"(http://127\.0\.0\.1:\d+)/ui/ shows 2 runs; Ctrl-C ends it", said)
        assert url is not None, said + process.stderr.read()
        runs = httpx2.get(f"{url[1]}/v1/runs", timeout=120).json()["runs"]
        assert [run["run"] for run in runs] == ["toy-20260101T000000Z", "begun"]
        assert "text/html" in httpx2.get(f"{url[1]}/ui/", timeout=120).headers["content-type"]
        with httpx2.stream("GET", f"{url[1]}/v1/events", timeout=120) as watched:
            assert next(watched.iter_lines()) == "event: runs"
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=120) == 0
        assert "Traceback" not in process.stderr.read()


def test_what_is_no_run_is_an_error_that_says_what_to_name() -> None:
    make_run(Path("many/one"))
    Path("nothing").mkdir()
    for given in ("none", "nothing", "many"):
        result = cli("ui", given)
        assert result.exit_code == 2 and given in result.stderr, result.stderr
        wording(result.stderr)
    assert cli("ui", "many/one", "many/one").exit_code == 2
    assert cli("ui", "many/one", "--host", "0.0.0.0").exit_code == 2  # needs a key
    assert cli("ui").exit_code == 2
