"""A server's process tree: its command line, its start and its end, and nothing left behind whoever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from groupwise.cli.main import app
from groupwise.config.engine import VllmConfig
from groupwise.engine.vllm import server as vllm_server
from groupwise.engine.vllm.server import ServerLaunch, ServerProcess, Shape, engine_options, keep_up, launch_of, rank_of
from groupwise.errors import ConfigError
from processes import becomes, descendants, running
from wording import raises

TREE = """
import os, subprocess, sys, time
print("started", flush=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]])
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]], start_new_session=True)
time.sleep(600)
"""  # as vLLM: processes below that outlive it if nobody ends them
OWNER = """
import sys, time
from pathlib import Path
from groupwise.engine.vllm.server import ServerLaunch, ServerProcess
server = ServerProcess(ServerLaunch(argv=tuple(sys.argv[1:]), environment={}, url="", log=Path("/dev/null")))
print(server.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[str]:
    """An argument that only this test's processes have."""
    marker = f"tree-of-{tmp_path}"
    yield marker
    for pid in running(marker):
        os.kill(pid, signal.SIGKILL)


def launch(marker: str, log: Path, code: str = TREE) -> ServerLaunch:
    return ServerLaunch(argv=(sys.executable, "-c", code, marker), environment=dict(os.environ), url="", log=log)


def options(argv: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, value in pairwise(argv) if name.startswith("--")}


def test_the_command_line_says_all_that_the_run_needs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    config = VllmConfig(
        python=sys.executable,
        port=8001,
        gpus="2,3",
        tensor_parallel_size=2,
        max_model_len=4096,
        arguments=("--swap-space", "2"),
        environment={"VLLM_CPU_KVCACHE_SPACE": "1"},
    )
    targets = ("q_proj", "v_proj")
    shape = Shape(model="m", dtype="bfloat16", context_length=1024, rank=12, targets=targets, rows=64)
    made = launch_of(config, shape)
    said = options(made.argv)
    assert made.argv[:3] == (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    assert "--enable-lora" in made.argv
    wanted = {"--port": "8001", "--max-model-len": "1024", "--max-lora-rank": "16", "--max-num-seqs": "64"}
    wanted |= {"--logprobs-mode": "processed_logprobs", "--generation-config": "vllm", "--dtype": "bfloat16"}
    wanted |= {"--tensor-parallel-size": "2", "--lora-target-modules": "q_proj", "--swap-space": "2"}
    assert wanted.items() <= said.items() and made.url == "http://127.0.0.1:8001"
    set_ = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "CUDA_VISIBLE_DEVICES": "2,3", "VLLM_CPU_KVCACHE_SPACE": "1"}
    assert set_.items() <= made.environment.items() and "PYTHONPATH" not in made.environment
    assert launch_of(VllmConfig(), shape).url != launch_of(VllmConfig(), shape).url
    assert "--no-enable-chunked-prefill" not in made.argv  # which ends the engine on CPUs only
    on_cpu = options(launch_of(config, replace(shape, cpu=True)).argv)
    assert on_cpu["--no-enable-chunked-prefill"] == "--max-num-batched-tokens"
    assert "--hf-overrides" not in made.argv
    whole = replace(shape, float32_head=True)
    assert json.loads(options(launch_of(config, whole).argv)["--hf-overrides"]) == {"head_dtype": "float32"}
    assert engine_options(config, whole)["hf_overrides"] == {"head_dtype": "float32"}
    assert "--hf-overrides" not in launch_of(config, replace(whole, dtype="float32")).argv
    with raises(ConfigError):
        launch_of(VllmConfig(python="nowhere/python"), shape)
    with raises(ConfigError):
        rank_of(600)


@pytest.mark.parametrize(
    ("changed", "cpu", "beside", "backend"),
    [
        ({}, False, False, "nccl"),
        ({}, False, True, "ipc"),
        ({}, True, False, "groupwise_gloo"),
        ({"transfer": "file"}, False, False, None),
        ({"tensor_parallel_size": 2}, False, False, "nccl"),
        ({"tensor_parallel_size": 2}, False, True, None),  # only one of its workers is on the learner's GPU
        ({"host": "0.0.0.0"}, False, True, None),  # it would unpickle what anybody sends it
        ({"arguments": ("--weight-transfer-config", '{"backend": "ipc"}')}, False, False, None),
        ({"arguments": ("--worker-extension-cls=theirs.Extension",)}, True, False, None),
    ],
)
def test_a_server_is_started_for_the_way_by_which_it_gets_whole_models(changed, cpu: bool, beside: bool, backend):
    shape = Shape(model="m", dtype="bfloat16", context_length=64, rank=1, targets=(), rows=4, cpu=cpu, reloads=True)
    config = VllmConfig(python=sys.executable, **changed)
    made = launch_of(config, shape, beside_rank_0=beside)
    ours = made.argv[: len(made.argv) - len(config.arguments)]
    assert json.loads(options(ours).get("--weight-transfer-config", "{}")) == ({"backend": backend} if backend else {})
    assert made.environment.get("VLLM_ALLOW_INSECURE_SERIALIZATION") == ("1" if backend == "ipc" else None)
    plugin = made.environment.get("PYTHONPATH")
    assert (plugin is not None) == ("--worker-extension-cls" in ours) == (backend == "groupwise_gloo")
    assert plugin is None or (Path(plugin) / f"{backend}.py").is_file()
    adapters = launch_of(config, replace(shape, reloads=False, targets=("q_proj",)), beside_rank_0=beside)
    assert "--weight-transfer-config" not in adapters.argv[: len(ours)]


def test_stop_ends_the_whole_tree(marker: str, tmp_path: Path):
    server = ServerProcess(launch(marker, tmp_path / "logs" / "log"))
    assert becomes(lambda: len(running(marker)) == 3) and server.ended is None
    server.stop()
    assert not running(marker) and "vLLM ended" in (server.ended or "")


def test_a_server_that_ends_says_how_and_what_it_said_last(marker: str, tmp_path: Path):
    log = tmp_path / "log"
    log.write_text("of an earlier one\n")
    server = ServerProcess(launch(marker, log, "import sys; print('no such model'); sys.exit(3)"))
    assert server.wait(120)
    assert f"status 3; the end of {log}:\nno such model" in (server.ended or "") and "earlier" not in server.ended
    server.stop()


@pytest.mark.parametrize("victim", ["server", "keeper", "owner"])
def test_nothing_is_left_whoever_is_killed(victim: str, marker: str, tmp_path: Path):
    """`setsid`, as vLLM's processes may do it, takes nothing out of the keeper's reach; only where the keeper itself is
    killed does what has left its session stay."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, sys.executable, "-c", TREE, marker], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    keeper = int(owner.stdout.readline())
    assert becomes(lambda: len(running(marker)) == 4)  # with the owner itself
    below = {pid: os.getsid(pid) for pid in descendants(keeper)}
    (server,) = [pid for pid, session in below.items() if pid == session and os.getsid(pid) != keeper][:1]
    os.kill({"server": server, "keeper": keeper, "owner": owner.pid}[victim], signal.SIGKILL)
    escaped = 1 if victim == "keeper" else 0
    expected = escaped + (0 if victim == "owner" else 1)
    assert becomes(lambda: len(running(marker)) == expected), running(marker)
    owner.kill()
    owner.wait()
    owner.stdout.close()


KEPT = """
import sys
from pathlib import Path
from groupwise.engine.vllm.server import ServerLaunch, keep_up
launch = ServerLaunch(argv=tuple(sys.argv[2:]), environment={}, url="", log=Path(sys.argv[1]))
keep_up(launch, say=lambda text: print(text.splitlines()[0], flush=True))
"""


def test_a_server_is_started_again_until_the_command_is_told_to_end(marker: str, tmp_path: Path):
    words = [str(tmp_path / "log"), sys.executable, "-c", TREE, marker]
    command = subprocess.Popen([sys.executable, "-c", KEPT, *words], stdout=subprocess.PIPE, text=True)
    assert command.stdout is not None
    assert becomes(lambda: len(running(marker)) == 4)
    first = set(running(marker)) - {command.pid}
    os.kill(min(first), signal.SIGKILL)
    assert command.stdout.readline().startswith("vLLM ended with signal 9")
    assert becomes(lambda: len(running(marker)) == 4 and not first & set(running(marker)))
    command.send_signal(signal.SIGTERM)
    command.wait(120)
    assert not running(marker)
    command.stdout.close()


def test_one_that_ends_at_once_every_time_is_not_started_for_ever(marker: str, tmp_path: Path):
    with raises(ConfigError):
        keep_up(launch(marker, tmp_path / "log", "import sys; sys.exit(1)"), say=lambda text: None)


def test_the_command_reads_the_runs_file(monkeypatch: pytest.MonkeyPatch):
    kept: list[ServerLaunch] = []
    monkeypatch.setattr(vllm_server, "keep_up", lambda launch, say: kept.append(launch))
    recipe = Path(__file__).parents[2] / "configs" / "arithmetic.yaml"
    words = ["vllm-serve", str(recipe), f"vllm.python={sys.executable}", "dtype=float32", "train.lora.rank=5"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    said = options(kept[0].argv)
    assert {"--port": "8000", "--dtype": "float32", "--max-lora-rank": "8"}.items() <= said.items()
    assert "engine=vllm vllm.urls=[http://127.0.0.1:8000]" in result.stderr
