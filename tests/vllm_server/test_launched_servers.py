"""One file, two vLLM servers, started by `groupwise launch` and on a Ray cluster of two machines; one is killed.

    make vllm                                                     installs vLLM in .venv-vllm
    pytest -m slow tests/vllm_server/test_launched_servers.py     about six minutes on two cores, 8 GB

The run ends as if nobody had been killed: every prompt is there once, and what is trained is what was sampled.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from groupwise.engine.vllm.server import free_port
from processes import becomes, descendants
from running_jobs import metrics_of, rollouts_of

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
STEPS = 30
CLOSE = 1e-4  # nats
MINUTES = 600  # seconds, on a machine with other work
CONFIG = f"""
name: servers
data: {{source: "groupwise.tasks.starter.tasks:prompts", args: {{skill: [add], style: bare, n: 512}}}}
rewards: ["groupwise.rewards.text:exact_match"]
rollout: {{prompts_per_step: 8, group_size: 4, max_tokens: 8, refill: 1.0}}
train: {{steps: {STEPS}, learning_rate: 1.0e-3, lora: {{rank: 4}}, deadline_s: 120}}
checkpoint: {{every: 5}}
dtype: float32
device: cpu
engine: vllm
vllm:
  servers: 2
  python: {PYTHON}
  log: vllm.log
  environment:
    VLLM_CPU_KVCACHE_SPACE: "1"
    VLLM_CPU_OMP_THREADS_BIND: nobind
    OMP_NUM_THREADS: "1"
    HF_HUB_OFFLINE: "1"
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv-vllm: `make vllm` installs it"),
]


class Launched:
    """`groupwise launch` in a folder of its own, once or, of several machines, once for each."""

    def __init__(self, place: Path, *words: str, machines: int = 1, environment: dict[str, str] | None = None):
        (place / "run.yaml").write_text(CONFIG)
        self.place, self.run_dir = place, place / "run"
        self.log = (place / "launch.log").open("w+")
        command = [sys.executable, "-m", "groupwise", "launch", "run.yaml", "run_dir=run", *words]
        self.processes = [
            subprocess.Popen(
                [*command, *(["--node", str(node)] if machines > 1 else [])],
                cwd=place,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
                stdout=self.log,
                stderr=self.log,
            )
            for node in range(machines)
        ]

    def servers(self, *roots: int) -> list[int]:
        """The API servers of vLLM below these processes."""
        found = []
        for pid in (pid for root in roots or [each.pid for each in self.processes] for pid in descendants(root)):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                found += [pid] if words[0] == str(PYTHON).encode() and b"--port" in words else []
        return found

    def steps(self) -> int:
        return len(list((self.run_dir / "rollouts").glob("step_*.jsonl")))

    def reaches(self, step: int) -> None:
        there = lambda: self.steps() >= step or self.processes[0].poll() is not None  # noqa: E731
        assert becomes(there, within_s=MINUTES), self.said()
        assert self.processes[0].poll() is None, self.said()

    def ended(self) -> int:
        return max(each.wait(timeout=MINUTES) for each in self.processes)

    def said(self) -> str:
        self.log.seek(0)
        logs = [path.read_text()[-1500:] for path in sorted(self.place.glob("vllm*.log"))]
        return "\n".join([self.log.read()[-4000:], *logs])


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    begun: list[Launched] = []

    def begin(*words: str, **options: Any) -> Launched:
        begun.append(Launched(tmp_path, *words, **options))
        return begun[-1]

    yield begin
    for each in begun:
        for process in each.processes:
            process.terminate()
        for process in each.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            process.wait()
        each.log.close()


def assert_nothing_is_lost(run: Launched) -> None:
    """Each step has its groups whole, no prompt twice; as many tokens are trained as were sampled for what is trained,
    with the log-probabilities that the trainer computes."""
    groups = list(rollouts_of(run.run_dir))
    drawn = [group["prompt"]["id"] for group in groups]
    assert len(drawn) == len(set(drawn)) == 8 * STEPS
    assert all(len(group["rollouts"]) == 4 and not any(each["error"] for each in group["rollouts"]) for group in groups)
    steps = [line for line in metrics_of(run.run_dir) if "reward/mean" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    for line, at in zip(steps, range(0, len(groups), 8), strict=True):
        rollouts = [group["rollouts"] for group in groups[at : at + 8]]
        sampled = [[sum(len(turn["token_ids"]) for turn in each["turns"]) for each in group] for group in rollouts]
        assert line["rollout/tokens"] == sum(map(sum, sampled))
        differ = [len({each["reward"] for each in group}) > 1 for group in rollouts]
        assert line.get("train/tokens", 0) == sum(sum(each) for each, told in zip(sampled, differ, strict=True) if told)
    assert max(line.get("mismatch/logprob_diff_max", 0.0) for line in steps) < CLOSE


def kill_one(run: Launched, *roots: int, after: int) -> None:
    """SIGKILL an API server once so many steps are done; another takes its place."""
    run.reaches(after)
    had = set(run.servers(*roots))
    assert len(had) == 2, run.said()
    os.kill(victim := min(had), signal.SIGKILL)
    replaced = lambda: len(set(run.servers(*roots)) - {victim}) == 2  # noqa: E731
    assert becomes(lambda: replaced() or run.processes[0].poll() is not None, within_s=MINUTES), run.said()
    assert replaced(), f"the run was over before another came: {run.said()}"


def test_a_launch_with_two_learners_loses_a_server(launch) -> None:
    run = launch("train.devices=2")
    kill_one(run, after=5)
    assert run.ended() == 0, run.said()
    assert_nothing_is_lost(run)
    assert not run.servers()


def test_two_machines_with_a_learner_and_a_server_each(launch) -> None:
    """The server of the second machine, which the first one started there, is the one that is killed."""
    where = ("launcher.nodes=2", "launcher.address=127.0.0.1", f"launcher.port={free_port('127.0.0.1')}")
    run = launch("train.devices=2", *where, machines=2)
    run.reaches(5)
    (first,), (second,) = (run.servers(each.pid) for each in run.processes)
    os.kill(second, signal.SIGKILL)
    assert becomes(lambda: run.servers(run.processes[1].pid) not in ([], [second]), within_s=MINUTES), run.said()
    assert run.ended() == 0 and not run.servers(), run.said()
    assert first and run.said().count("is lost: ") == 1
    assert_nothing_is_lost(run)


def test_a_ray_cluster_of_two_machines_loses_a_server(launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_worker_niceness", "0")  # Ray's own is 15: beside other work nothing would come of it
    cluster_utils = pytest.importorskip(
        "ray.cluster_utils", reason="Ray is not installed: pip install 'groupwise[ray]'"
    )
    small = {"num_cpus": 2, "object_store_memory": 80 << 20}
    two = cluster_utils.Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    try:
        two.add_node(**small)
        ray = ("launcher.kind=ray", "launcher.cpus=1", "launcher.reward_cpus=0.5", "launcher.start_timeout_s=240")
        run = launch(*ray, environment={"RAY_ADDRESS": two.address})
        raylets = [each.process.pid for node in two.list_all_nodes() for each in node.all_processes["raylet"]]
        kill_one(run, *raylets, after=5)
        assert len(run.servers(*raylets)) == 2
        assert run.ended() == 0, run.said()
        assert_nothing_is_lost(run)
        assert becomes(lambda: not run.servers(*raylets), within_s=60)
    finally:
        two.shutdown()
