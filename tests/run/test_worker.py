"""The worker as a process: it works, stops in order, and ends with the server that started it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from forked import ONE_SERVER, forked
from groupwise.config.job import parse_job_config
from groupwise.errors import NotReadyError
from groupwise.run import worker
from groupwise.store.ledger import Ledger
from groupwise.store.ledger_schema import JobState
from job_place import PROMPTS, SMALL, Place, groups
from processes import becomes, running
from wording import raises

WAIT_S = 120  # for a process that must import torch on a busy machine

linux = pytest.mark.skipif(sys.platform != "linux", reason="its kernel tells a process that its parent died")


def command(state: Path, model: Path) -> list[str]:
    options = ["--state", str(state), "--model", str(model), "--dtype", "float32", "--device", "cpu"]
    return [sys.executable, "-m", "groupwise.run.worker", *options, "--threads", "1"]


def queue(state: Path, *, steps: int) -> tuple[Ledger, str]:
    state.mkdir(exist_ok=True)
    ledger = Ledger(state / "ledger.db")
    config = parse_job_config("grpo", {**SMALL, "iterations": steps})
    job, _ = ledger.submit(
        kind="grpo",
        adapter="math",
        config=config.model_dump(mode="json"),
        summary={},
        payload=json.dumps(groups(PROMPTS[:1])).encode(),
        steps=steps,
        auto_load=False,
    )
    return ledger, job.id


def a_parent_of(words: list[str], **options) -> subprocess.Popen[bytes]:
    """A process that starts another and waits."""
    code = f"import subprocess, time; p = subprocess.Popen({words!r}); time.sleep(1000)"
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, **options)


@ONE_SERVER
def test_it_works_stops_in_order_and_goes_on(model_dir, tmp_path):
    state = tmp_path / "state"
    ledger, first = queue(state, steps=2)
    with forked(*command(state, model_dir)[2:], folder=tmp_path) as process:
        assert becomes(lambda: ledger.job(first).state.is_final, within_s=WAIT_S)
        assert ledger.job(first).state == JobState.COMPLETED
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) >= min(19, own + worker.NICENESS)
        second = queue(state, steps=10_000)[1]
        assert becomes(lambda: ledger.job(second).step > 3, within_s=WAIT_S)
        process.terminate()
        process.join(WAIT_S)
        assert process.exitcode == 0, (tmp_path / "stderr").read_text()
    job = ledger.job(second)
    assert (job.state, job.position) == (JobState.QUEUED, 1) and job.step > 3
    assert list(state.glob(f"checkpoints/{second}/step-*"))
    ledger.close()


@ONE_SERVER
@pytest.mark.slow
def test_it_trains_without_what_only_linux_has(model_dir, tmp_path):
    state = tmp_path / "state"
    ledger, id = queue(state, steps=1)
    with forked("bare_platform", *command(state, model_dir)[2:], folder=tmp_path) as process:
        ended = becomes(lambda: ledger.job(id).state.is_final, within_s=WAIT_S)
        assert ended and ledger.job(id).state == JobState.COMPLETED, (tmp_path / "stderr").read_text()
        process.terminate()
        process.join(WAIT_S)
        assert process.exitcode == 0
    ledger.close()


@ONE_SERVER
@linux
def test_it_ends_with_its_parent(model_dir, tmp_path):
    state = tmp_path / "state"
    ledger, id = queue(state, steps=10_000)
    with forked(*command(state, model_dir)[2:], folder=tmp_path, parent=True) as parent:
        assert becomes(lambda: ledger.job(id).step > 1, within_s=WAIT_S)
        parent.kill()
    assert becomes(lambda: ledger.job(id).state == JobState.QUEUED, within_s=WAIT_S)  # it even gave the job back
    assert "ended with the server" in ledger.events(id)[-1].message  # which counts: see ledger_attempts
    ledger.close()


# --- before it has taken a job ---


def test_one_whose_parent_is_dead_already_ends_before_it_imports_torch(model_dir, tmp_path):
    state = tmp_path / "state"
    ledger, id = queue(state, steps=1)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    arguments = [*command(state, model_dir)[3:], "--parent", str(gone.pid)]
    code = f"import sys; from groupwise.run.worker import main; assert main({arguments!r}) == 0; "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], timeout=WAIT_S, check=True)
    assert ledger.job(id).attempt == 0
    ledger.close()


def a_torch_that_takes_for_ever(folder: Path, began: Path) -> dict[str, str]:
    """The environment of a process in which importing torch touches `began` and never ends."""
    (folder / "torch").mkdir()
    code = f"import pathlib, time\npathlib.Path({str(began)!r}).touch()\ntime.sleep(1000)\n"
    (folder / "torch" / "__init__.py").write_text(code)
    return {**os.environ, "PYTHONPATH": str(folder)}


@linux
def test_one_whose_parent_dies_while_it_imports_torch_ends(model_dir, tmp_path):
    began, state = tmp_path / "began", tmp_path / "state"
    ledger, id = queue(state, steps=1)
    parent = a_parent_of(command(state, model_dir), env=a_torch_that_takes_for_ever(tmp_path, began))
    try:
        assert becomes(began.exists, within_s=WAIT_S)
        assert len(running(str(state))) == 1
    finally:
        parent.kill()
        parent.wait()
    assert becomes(lambda: not running(str(state)), within_s=WAIT_S)
    assert ledger.job(id).attempt == 0
    ledger.close()


def test_sigterm_while_it_imports_torch_ends_it_at_once(model_dir, tmp_path):
    began, state = tmp_path / "began", tmp_path / "state"
    ledger, _ = queue(state, steps=1)
    process = subprocess.Popen(command(state, model_dir), env=a_torch_that_takes_for_ever(tmp_path, began))
    try:
        assert becomes(began.exists, within_s=WAIT_S)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()
    ledger.close()


@pytest.fixture
def place(make_base, tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path, make_base("qwen3", dtype=torch.float32))
    yield made
    made.ledger.close()


def test_it_waits_for_the_one_before_it(place, monkeypatch):
    with worker._alone(place.directory, place.heartbeat):
        monkeypatch.setattr(worker, "PREDECESSOR_S", 0.2)
        began = time.monotonic()
        with raises(NotReadyError), worker._alone(place.directory, place.heartbeat):
            pass
        assert time.monotonic() - began >= 0.2
        monkeypatch.setattr(worker, "PREDECESSOR_S", 60)
        place.heartbeat.stop()
        with pytest.raises(NotReadyError), worker._alone(place.directory, place.heartbeat):  # at once
            pass
    with worker._alone(place.directory, place.heartbeat):
        pass


def test_a_model_that_is_not_there_is_said_before_anything_is_leased(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(os, "nice", lambda more: None)
    monkeypatch.setattr(worker, "_die_with_parent", lambda parent: os.getppid())
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    arguments = ["--state", str(tmp_path), "--model", str(tmp_path / "nowhere"), "--device", "cpu"]
    assert worker.main(arguments) == 3
    assert "nowhere" in caplog.text
