"""`groupwise demo`: trains, shows, serves what was trained with the run's pages, and ends at Ctrl-C."""

from __future__ import annotations

import os
import signal
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import httpx2
import pytest

from cli_project import cli
from forked import ONE_SERVER, forked
from processes import becomes
from wording import wording

SMALL = ("rollout.prompts_per_step=2", "rollout.group_size=4", "eval.data.args.n=4", "rollout.max_tokens=8")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


demo = partial(forked, "groupwise", "demo", *SMALL)  # the server that it becomes is a Python of its own


def until(process: ForkServerProcess, text: str) -> str:
    """The line of stderr that has `text`."""
    said = Path("stderr")
    assert becomes(lambda: process.exitcode is not None or (said.exists() and text in said.read_text()))
    return next((line for line in said.read_text().splitlines() if text in line), "") or pytest.fail(said.read_text())


def ended(process: ForkServerProcess) -> tuple[int | None, str, str]:
    """The exit code of one that was told to end, and all that it said."""
    process.join(120)
    return process.exitcode, Path("stdout").read_text(), Path("stderr").read_text()


@ONE_SERVER
def test_it_trains_and_serves_the_new_version_beside_the_runs_pages():
    words = ("--steps", "1", "train.learning_rate=0.1", "--serve", "--no-open", "--port", "0")
    with demo(*words, folder=Path()) as process:
        url = until(process, "ready on").split()[-1]
        (run,) = httpx2.get(f"{url}/run/v1/runs", timeout=120).json()["runs"]
        assert run["name"] == "arithmetic" and run["step"] == 1
        asked = {"messages": [{"role": "user", "content": "2+3="}], "max_tokens": 4}
        reply = httpx2.post(f"{url}/v1/chat/completions", json=asked, timeout=120).json()
        assert reply["system_fingerprint"] == "arithmetic@1"
        os.kill(process.pid or 0, signal.SIGINT)
        code, out, err = ended(process)
    assert code == 0 and "Traceback" not in err
    assert "best after training" in out and "worst after training" in out and "groupwise chat runs/arithmetic-" in out


@ONE_SERVER
@pytest.mark.slow
def test_ctrl_c_while_it_trains_saves_and_serves_nothing():
    with demo("--steps", "500", "eval=null", "--serve", folder=Path()) as process:
        until(process, "step 1/500")
        os.kill(process.pid or 0, signal.SIGINT)
        code, out, err = ended(process)
    assert code == 130 and "Traceback" not in err and "ready on" not in err
    assert "of 500, as asked; everything is saved" in out


@ONE_SERVER
@pytest.mark.slow
def test_where_nobody_could_end_it_nothing_is_served():
    """`make demo` in a script ends by itself, and says what to type."""
    with demo("--steps", "1", "train.learning_rate=0.1", "eval=null", folder=Path()) as process:
        code, _, err = ended(process)
    assert code == 0 and "  groupwise serve runs/arithmetic-" in err and "ready on" not in err


def test_a_wrong_override_is_told_and_makes_nothing(tmp_path):
    refused = cli("demo", "train.step=3")
    assert refused.exit_code == 2
    wording(refused.stderr)
    assert not Path("runs").exists()
