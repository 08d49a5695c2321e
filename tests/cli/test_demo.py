"""`groupwise demo`: trains, shows, serves what was trained with the run's pages, and ends at Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from cli_project import cli
from threads import THREADS
from wording import wording

SMALL = ("rollout.prompts_per_step=2", "rollout.group_size=4", "eval.data.args.n=4", "rollout.max_tokens=8")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


@contextmanager
def demo(*words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "groupwise", "demo", *SMALL, *words]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GROUPWISE_")}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment | {"OMP_NUM_THREADS": THREADS}, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def until(process: subprocess.Popen[str], text: str) -> str:
    """The line of stderr that has `text`."""
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if text in line:
            return line
    raise AssertionError("".join(said))


def test_it_trains_and_serves_the_new_version_beside_the_runs_pages():
    with demo("--steps", "1", "train.learning_rate=0.1", "--serve", "--no-open", "--port", "0") as process:
        url = until(process, "ready on").split()[-1]
        (run,) = httpx2.get(f"{url}/run/v1/runs", timeout=120).json()["runs"]
        assert run["name"] == "arithmetic" and run["step"] == 1
        asked = {"messages": [{"role": "user", "content": "2+3="}], "max_tokens": 4}
        reply = httpx2.post(f"{url}/v1/chat/completions", json=asked, timeout=120).json()
        assert reply["system_fingerprint"] == "arithmetic@1"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and "Traceback" not in err
    assert "best after training" in out and "worst after training" in out and "groupwise chat runs/arithmetic-" in out


@pytest.mark.slow
def test_ctrl_c_while_it_trains_saves_and_serves_nothing():
    with demo("--steps", "500", "eval=null", "--serve") as process:
        until(process, "step 1/500")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in err and "ready on" not in err
    assert "of 500, as asked; everything is saved" in out


@pytest.mark.slow
def test_where_nobody_could_end_it_nothing_is_served():
    """`make demo` in a script ends by itself, and says what to type."""
    with demo("--steps", "1", "train.learning_rate=0.1", "eval=null") as process:
        _, err = process.communicate(timeout=240)
    assert process.returncode == 0 and "  groupwise serve runs/arithmetic-" in err and "ready on" not in err


def test_a_wrong_override_is_told_and_makes_nothing(tmp_path):
    refused = cli("demo", "train.step=3")
    assert refused.exit_code == 2
    wording(refused.stderr)
    assert not Path("runs").exists()
