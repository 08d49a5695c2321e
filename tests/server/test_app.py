"""A server process from its first to its last second, and the application as a whole."""

import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from forked import ONE_SERVER, forked
from groupwise.config.serve import ServeConfig
from groupwise.errors import DeviceLostError, ModelError
from groupwise.server.app import serve
from groupwise.store.ledger import Ledger
from processes import becomes, running
from threads import THREADS
from whole_server import whole
from wording import raises

SERVE = """
import sys
from groupwise.errors import DeviceLostError, GroupwiseError
from groupwise.server.app import serve
from groupwise.config.serve import serve_config
import json
try:
    given = json.loads(sys.argv[1])
    repair = given.pop("repair_ledger", False)
    serve(serve_config(given), repair_ledger=repair)
except GroupwiseError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
LOSES_ITS_GPU = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from cuda_errors import ASSERT, cuda_error
from groupwise.engine import decoder
sample, lost = decoder.sample_tokens, []
def breaks(logits, params, *rest, **options):
    if (params.temperature_B == 0.71).any():
        lost.append(True)
    if lost:  # from then on, whatever is asked of the device
        raise cuda_error(ASSERT)
    return sample(logits, params, *rest, **options)
decoder.sample_tokens = breaks
"""
START_S = 120  # for a process that may import torch, on a busy machine
CHAT = {"messages": [{"role": "user", "content": "What is 2+2?"}], "max_tokens": 4}
LONG = CHAT | {"max_tokens": 200, "ignore_eos": True, "stream": True}


@dataclass
class Process:
    """`serve` in a process of its own; `lines` is what it said so far."""

    popen: subprocess.Popen[str]
    port: int
    lines: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def said(self, text: str, *, seconds: float = START_S) -> bool:
        end = time.monotonic() + seconds
        while not any(text in line for line in self.lines):
            if time.monotonic() > end or self.popen.poll() is not None:
                return any(text in line for line in self.lines)
            time.sleep(0.01)
        return True


def start(state_dir: Path, **settings: Any) -> Process:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = {"state_dir": str(state_dir), "port": port, "min_free_bytes": 0, "worker_threads": 1, **settings}
    environment = {**os.environ, "OMP_NUM_THREADS": THREADS, "GROUPWISE_API_KEY": ""}
    popen = subprocess.Popen(
        [sys.executable, "-c", SERVE, json.dumps(given)], stderr=subprocess.PIPE, text=True, env=environment
    )
    process = Process(popen, given["port"])

    def collect() -> None:
        assert popen.stderr is not None
        for line in popen.stderr:
            process.lines.append(line)

    threading.Thread(target=collect, daemon=True).start()
    return process


@pytest.fixture
def started(model_dir: Path, tmp_path: Path) -> Iterator[Process]:
    process = start(tmp_path / "state", model=str(model_dir), shutdown_timeout_s=60)
    yield process
    process.popen.kill()
    process.popen.wait()


def count_jobs(path: Path) -> int:
    with closing(sqlite3.connect(path)) as db:
        return db.execute("SELECT count(*) FROM job").fetchone()[0]


# ---- what is missing is told at once ----
@pytest.mark.parametrize("taken", ["port", "state directory"])
def test_what_is_taken_ends_the_process_before_anything_is_loaded(taken: str, tmp_path: Path) -> None:
    from groupwise.server.listen import bind, own

    with bind("127.0.0.1", 0) as listener, own(tmp_path / "state"):
        port = listener.getsockname()[1]
        settings = {"port": port} if taken == "port" else {}
        process = start(tmp_path / ("other" if taken == "port" else "state"), **settings)
        assert process.popen.wait(timeout=START_S) == 3
    assert process.said(f"port {port}" if taken == "port" else f"pid {os.getpid()} ")
    assert not process.said("loading", seconds=0)


def test_a_damaged_ledger_ends_the_process_with_what_to_do(tmp_path: Path) -> None:
    state = tmp_path / "state"
    submit_and_damage(state)
    process = start(state)
    assert process.popen.wait(timeout=START_S) == 3
    assert process.said("ledger.db is damaged") and process.said("--repair-ledger") and process.said("9 jobs")
    assert not process.said("Traceback", seconds=0) and not process.said("loading", seconds=0)


def submit_and_damage(state: Path) -> list[str]:
    """The ids of twelve jobs in a ledger that was damaged after nine of them had been backed up."""
    ledger = Ledger(state / "ledger.db")
    options = {"summary": {"warnings": []}, "payload": b"{}", "steps": 1, "auto_load": True}
    ids = [ledger.submit(kind="sft", adapter="a", config={"n": "x" * 500}, **options)[0].id for _ in range(9)]
    ledger.back_up()
    ids += [ledger.submit(kind="sft", adapter="a", config={"n": "x" * 500}, **options)[0].id for _ in range(3)]
    ledger.close()
    data = (state / "ledger.db").read_bytes()
    (state / "ledger.db").write_bytes(data[:4096] + bytes(255 - byte for byte in data[4096:]))
    return ids


def test_nothing_heavy_is_imported_before_the_port_is_bound() -> None:
    code = "import sys, groupwise.server.app, groupwise.config.serve\n"
    code += (
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'numpy'} & set(sys.modules)\nassert not heavy, heavy"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=START_S).returncode == 0


def test_an_open_door_is_refused(tmp_path: Path) -> None:
    process = start(tmp_path / "state", host="0.0.0.0")
    assert process.popen.wait(timeout=START_S) == 2
    assert process.said("GROUPWISE_API_KEY") and not (tmp_path / "state").exists()


def test_a_model_that_is_not_there_ends_the_process(tmp_path: Path) -> None:
    said: list[str] = []
    with raises(ModelError) as refused:
        serve(ServeConfig(model=str(tmp_path / "no-such-model"), state_dir=tmp_path, port=0), announce=said.append)
    assert refused.value.exit_code == 3
    assert not any("ready on" in line for line in said)


# ---- a life ----
@pytest.mark.long
def test_a_life(started: Process) -> None:
    """Loading: health only. Ready: everything. SIGTERM: new requests are turned away, a stream ends; exit 0."""
    assert started.said("loading")
    with httpx2.Client(base_url=started.url, timeout=START_S) as http:
        assert http.get("/health").json()["status"] == "loading"
        early = http.post("/v1/chat/completions", json=CHAT)
        assert (early.status_code, early.json()["error"]["code"]) == (503, "not_ready")
        assert started.said("ready on"), started.lines
        assert http.get("/ready").json() == {"ready": True}
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
        with http.stream("POST", "/v1/chat/completions", json=LONG) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            started.popen.send_signal(signal.SIGTERM)
            assert started.said("stopping")
            late = httpx2.post(f"{started.url}/v1/chat/completions", json=CHAT, timeout=START_S)
            assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")
            assert int(late.headers["retry-after"]) >= 1
            received = [line for line in lines if line]
        assert received[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in received[-2].replace(" ", "")
    assert started.popen.wait(timeout=START_S) == 0
    assert started.said("stopped")
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", started.port), timeout=1)


@ONE_SERVER
def test_a_server_whose_gpu_is_lost_ends_to_be_started_again(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "loses_its_gpu.py").write_text(LOSES_ITS_GPU + SERVE)
    given = {"state_dir": str(tmp_path / "state"), "port": 0, "min_free_bytes": 0, "worker_threads": 1}
    given |= {"model": str(model_dir), "shutdown_timeout_s": 60}
    said = tmp_path / "stderr"
    with forked("loses_its_gpu", json.dumps(given), folder=tmp_path, environment={"GROUPWISE_API_KEY": ""}) as process:
        assert becomes(lambda: said.exists() and "ready on" in said.read_text(), within_s=START_S), said.read_text()
        (url,) = re.findall(r"ready on (\S+)", said.read_text())
        with httpx2.Client(base_url=url, timeout=START_S) as http:
            assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
            lost = http.post("/v1/chat/completions", json=CHAT | {"temperature": 0.71})
        assert (lost.status_code, lost.json()["error"]["code"]) == (503, "device_lost")
        assert int(lost.headers["retry-after"]) >= 1
        process.join(START_S)
        assert process.exitcode == 75 and "is lost to this process" in said.read_text()
        assert becomes(lambda: not running(str(tmp_path / "state")), within_s=START_S)


def test_health_says_that_the_gpu_is_lost(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with whole(tmp_path / "state", model_dir, api_key="secret") as site:
        assert (site.http.get("/health").status_code, site.http.get("/ready").status_code) == (200, 200)
        monkeypatch.setattr(site.server.engine, "_lost", DeviceLostError("cuda:0 is lost", retry_after=30))
        for path, headers in (("/health", {"authorization": ""}), ("/health", {}), ("/v1/health", {})):
            answer = site.http.get(path, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "device_lost")
            assert "cuda:0" in answer.json()["error"]["message"]
        assert site.http.get("/ready").status_code == 503
        assert site.http.post("/v1/chat/completions", json=CHAT).json()["error"]["code"] == "device_lost"


def test_a_signal_while_loading_ends_it_and_a_second_start_works(started: Process, tmp_path: Path) -> None:
    assert started.said("loading")
    started.popen.send_signal(signal.SIGINT)
    assert started.popen.wait(timeout=START_S) == 0
    with raises(ModelError):  # and no StartError: the state directory is free
        serve(ServeConfig(model=str(tmp_path / "no-such-model"), state_dir=tmp_path / "state", port=0))


@pytest.mark.slow
def test_a_kill_and_the_repair_of_the_ledger_lose_no_job_and_no_active_version(
    model_dir: Path, tmp_path: Path, make_adapter: Any
) -> None:
    state = tmp_path / "state"
    with whole(state, model_dir) as site:
        version = site.publish(make_adapter(site.server.base, seed=3), "math")
        assert site.http.post("/v1/adapters/load", json={"name": "math"}).status_code == 200
    ids = submit_and_damage(state)
    process = start(state, model=str(model_dir), repair_ledger=True)
    try:
        assert process.said("the ledger was repaired; the damaged file is kept as ledger.db.damaged-")
        assert process.said("ready on"), process.lines
        with httpx2.Client(base_url=process.url, timeout=START_S) as http:
            assert http.get("/health").json()["active_version"] == str(version)
            assert {job["job_id"] for job in http.get("/v1/train/status").json()} == set(ids)
        backup = state / "ledger.backup.db"
        assert becomes(lambda: backup.exists() and count_jobs(backup) == 12, within_s=START_S)
    finally:
        process.popen.kill()
        process.popen.wait()
    assert becomes(lambda: not running(str(state)), within_s=START_S)  # the worker ends with its server
    with whole(state, model_dir) as site:
        assert site.server.store.active == version
        assert {job.id for job in site.server.ledger.jobs()} == set(ids)


# ---- the application ----
def test_cors_is_off_unless_it_is_configured(model_dir: Path, tmp_path: Path) -> None:
    preflight = {"origin": "https://app.example", "access-control-request-method": "POST"}
    with whole(tmp_path / "a", model_dir) as site:
        response = site.http.options("/v1/chat/completions", headers=preflight)
        assert response.status_code == 405 and "access-control-allow-origin" not in response.headers
    with whole(tmp_path / "b", model_dir, cors_origins=("https://app.example",), api_key="k" * 20) as site:
        response = site.http.options("/v1/chat/completions", headers=preflight)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://app.example"
        refused = site.http.post("/v1/chat/completions", headers={"origin": "https://app.example", "authorization": ""})
        assert refused.status_code == 401  # and the page may read why
        assert refused.headers["access-control-allow-origin"] == "https://app.example"
        other = site.http.options("/v1/chat/completions", headers={**preflight, "origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


def test_the_gate_belongs_to_the_process(model_dir: Path, tmp_path: Path) -> None:
    with whole(tmp_path, model_dir) as site:
        assert site.http.get("/v1/models").status_code == 200
        site.gate.drain()
        assert site.http.get("/v1/models").json()["error"]["code"] == "shutting_down"
        assert site.http.get("/health").status_code == 200
