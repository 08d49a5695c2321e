"""`launcher: ray` on two simulated machines: the run is the one without Ray, and stays it whoever is killed.

pip install 'groupwise[ray]' && pytest -m slow tests/slow/test_ray.py
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

from processes import becomes, descendants
from running_jobs import metrics_of, rollouts_of

cluster_utils = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed: pip install 'groupwise[ray]'")

pytestmark = pytest.mark.slow

STEPS = 60
CONFIG = f"""
name: ray
data: {{source: "groupwise.tasks.starter.tasks:prompts", args: {{skill: [add], style: bare, n: 512}}}}
eval:
  data: {{source: "groupwise.tasks.starter.tasks:prompts", args: {{skill: [add], style: bare, n: 8, split: test}}}}
rewards: ["groupwise.rewards.text:exact_match"]
rollout: {{prompts_per_step: 8, group_size: 4, max_tokens: 8, refill: 1.0}}
train: {{steps: {STEPS}, learning_rate: 1.0e-3, lora: {{rank: 4}}, deadline_s: 30}}
checkpoint: {{every: 2}}
launcher: {{kind: ray, engines: 2, cpus: 0.5, reward_cpus: 0.25, start_timeout_s: 240}}
"""
MINUTES = 300  # seconds, on a machine with other work


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    (folder / "config.yaml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two machines that hold a learner, two engines and the reward workers only together."""
    small = {"num_cpus": 1, "object_store_memory": 80 << 20}
    two = cluster_utils.Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    two.add_node(**small)
    yield two
    two.shutdown()


class Launched:
    """A `groupwise launch`, and the actors that it has on this cluster."""

    def __init__(self, cluster: Any, place: Path, name: str, *overrides: str):
        self.cluster, self.run_dir = cluster, place / name
        words = [sys.executable, "-m", "groupwise", "launch", "config.yaml", f"run_dir={name}", *overrides]
        environment = {**os.environ, "RAY_ADDRESS": cluster.address}
        self.log = (place / f"{name}.log").open("w+")
        self.process = subprocess.Popen(words, cwd=place, env=environment, stdout=self.log, stderr=self.log)

    def raylets(self) -> list[int]:
        nodes = self.cluster.list_all_nodes()
        return [each.process.pid for node in nodes for each in node.all_processes["raylet"]]

    def actors(self, kind: str) -> dict[int, int]:
        """The processes of this class, and the raylet of each."""
        title = f"ray::{kind}".encode()
        found = {}
        for raylet in self.raylets():
            for pid in descendants(raylet):
                with suppress(OSError):
                    if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title):
                        found[pid] = raylet
        return found

    @property
    def steps(self) -> int:
        return len(list((self.run_dir / "rollouts").glob("step_*.jsonl")))

    def reaches(self, step: int) -> None:
        """Wait until so many steps are done; the run is not over then."""
        assert becomes(lambda: self.steps >= step or self.process.poll() is not None, within_s=MINUTES), self.said()
        assert self.process.poll() is None, self.said()

    def kill_one(self, kind: str, *, after: int) -> None:
        """SIGKILL, once so many steps are done; another takes its place."""
        self.reaches(after)
        had = self.actors(kind)
        os.kill(victim := min(had), signal.SIGKILL)
        replaced = lambda: len(self.actors(kind).keys() - {victim}) == len(had)  # noqa: E731
        assert becomes(lambda: replaced() or self.process.poll() is not None, within_s=MINUTES), self.said()
        assert self.process.poll() is None, f"the run was over before another {kind} came: {self.said()}"

    def ended(self) -> tuple[int, str]:
        code = self.process.wait(timeout=MINUTES)
        return code, self.said()

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read()


@pytest.fixture
def launch(cluster: Any, place: Path) -> Iterator[Callable[..., Launched]]:
    begun: list[Launched] = []

    def begin(name: str, *overrides: str) -> Launched:
        begun.append(Launched(cluster, place, name, *overrides))
        return begun[-1]

    yield begin
    for each in begun:
        each.process.kill()
        each.process.wait()
        each.log.close()
    for kind in ("LearnerActor", "EngineActor", "RewardActor", "EnvActor"):
        assert becomes(lambda kind=kind: not begun[0].actors(kind), within_s=60), f"{kind} outlives its run"


@pytest.fixture(scope="module")
def alone(place: Path) -> Path:
    """The same configuration without Ray."""
    words = [sys.executable, "-m", "groupwise", "run", "config.yaml", "run_dir=alone"]
    subprocess.run(words, cwd=place, check=True, capture_output=True, timeout=MINUTES)
    return place / "alone"


def assert_same_run(run_dir: Path, alone: Path) -> None:
    """The same prompts in the same order; the same rewards, later but for the draws that rounding turns over."""
    drawn, expected = ([group["prompt"]["id"] for group in rollouts_of(each)] for each in (run_dir, alone))
    assert drawn == expected and len(set(drawn)) == len(drawn) == 8 * STEPS
    mine, theirs = ([line for line in metrics_of(each) if "reward/mean" in line] for each in (run_dir, alone))
    assert [line["step"] for line in mine] == [line["step"] for line in theirs]
    curves = [[line["reward/mean"] for line in lines] for lines in (mine, theirs)]
    assert curves[0][:3] == pytest.approx(curves[1][:3], abs=0.1)
    for at in range(0, STEPS, 20):
        ours, other = (sum(curve[at : at + 20]) / 20 for curve in curves)
        assert ours == pytest.approx(other, abs=0.1)
    assert max(line.get("mismatch/logprob_diff_mean", 0.0) for line in mine) < 1e-4


def test_two_machines_make_the_run_of_one(launch: Callable[..., Launched], alone: Path) -> None:
    run = launch("plain")
    run.reaches(1)
    for kind in ("EngineActor", "RewardActor"):  # a step needs one of each; the others may come later
        assert becomes(lambda kind=kind: len(run.actors(kind)) == 2, within_s=60), run.said()
    used = {raylet for kind in ("LearnerActor", "EngineActor", "RewardActor") for raylet in run.actors(kind).values()}
    assert used == set(run.raylets())
    code, said = run.ended()
    assert code == 0 and "Next:" in said, said
    assert_same_run(run.run_dir, alone)


def test_whoever_is_killed_no_prompt_is_lost(launch: Callable[..., Launched], alone: Path) -> None:
    run = launch("killed")
    run.kill_one("EngineActor", after=1)
    run.kill_one("RewardActor", after=20)
    run.kill_one("LearnerActor", after=40)
    code, said = run.ended()
    assert code == 0, said
    assert "engine" in said and "is lost and replaced" in said and "goes on from its last checkpoint" in said
    assert_same_run(run.run_dir, alone)


def test_a_learner_that_is_lost_too_often_is_a_named_error(launch: Callable[..., Launched]) -> None:
    run = launch("lost", "launcher.restarts=0", "train.steps=1000")
    run.reaches(1)
    os.kill(min(run.actors("LearnerActor")), signal.SIGKILL)
    code, said = run.ended()
    assert code == 75 and "learners were lost once" in said, said


def test_ctrl_c_is_a_clean_stop(launch: Callable[..., Launched]) -> None:
    run = launch("stopped", "train.steps=1000")
    run.reaches(1)
    run.process.send_signal(signal.SIGINT)
    code, said = run.ended()
    assert code == 130, said
    assert (run.run_dir / "checkpoints" / f"step-{run.steps:06d}" / "run.json").exists()


def test_two_learners_and_one_of_them_is_killed(launch: Callable[..., Launched], alone: Path) -> None:
    run = launch("two", "train.devices=2", "launcher.engines=1")
    run.kill_one("LearnerActor", after=20)
    code, said = run.ended()
    assert code == 0 and "goes on from its last checkpoint" in said, said
    assert_same_run(run.run_dir, alone)


def test_no_room_is_said(launch: Callable[..., Launched]) -> None:
    code, said = launch("crowded", "launcher.engines=5", "launcher.start_timeout_s=3").ended()
    assert code == 75 and "the cluster is too small (CPU: 3.5 of 2)" in said, said
    assert "did not find room within 3 s" in said


ENVS = """
class Adds:
    def cases(self):
        return [{"a": a, "b": b} for a in range(2, 10) for b in range(2, 10)]
    def reset(self, case, seed):
        self.answer, self.left = str(case["a"] + case["b"]), 2
        return f"{case['a']} + {case['b']} ="
    def step(self, message):
        self.left -= 1
        found = self.answer in message["content"]
        return [{"role": "user", "content": "Once more."}], float(found), not self.left
"""
PLAYS = ("data=null", "eval=null", "rewards=[]", "env={environment: adds:Adds, stop_at_cut: false}", "train.steps=40")
AWAY = ("launcher.cpus=0.4", "launcher.reward_cpus=0", "launcher.env_workers=2", "launcher.env_cpus=0.25")


def test_environments_are_actors_and_one_of_them_is_killed(launch: Callable[..., Launched], place: Path) -> None:
    (place / "adds.py").write_text(ENVS)
    words = [sys.executable, "-m", "groupwise", "run", "config.yaml", "run_dir=alone_with_env", *PLAYS]
    subprocess.run(words, cwd=place, check=True, capture_output=True, timeout=MINUTES)
    run = launch("with_env", *PLAYS, *AWAY)
    run.kill_one("EnvActor", after=5)
    code, said = run.ended()
    assert code == 0 and "environment worker" in said and "is lost and replaced" in said, said
    mine, theirs = metrics_of(run.run_dir), metrics_of(place / "alone_with_env")
    assert [line["step"] for line in mine] == [line["step"] for line in theirs] == [*range(1, 41)]
    first = [[line["reward/mean"] for line in lines[:5]] for lines in (mine, theirs)]
    assert first[0] == pytest.approx(first[1], abs=0.1)
    assert all(line["env/failed_frac"] == 0 for line in theirs)
    failed = [line["env/failed_frac"] for line in mine]
    assert sum(failed) <= 1.0 and failed[:5] == [0.0] * 5, failed  # those that it had, and no more


ASKS = """
import json, os, sys, urllib.request

body = {"messages": [{"role": "user", "content": sys.argv[1]}], "model": os.environ["OPENAI_MODEL"]}
head = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"])
"""
HARNESS = "env={harness: {command: [python, '{folder}/asks.py', '{prompt}']}}"


def test_the_programs_of_a_harness_play_beside_the_first_learner(launch: Callable[..., Launched], place: Path) -> None:
    (place / "asks.py").write_text(ASKS)
    code, said = launch("with_harness", HARNESS, "eval=null", "train.steps=2", "env.concurrency=8").ended()
    assert code == 0, said
    lines = [line for line in metrics_of(place / "with_harness") if "reward/mean" in line]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["env/failed_frac"] == line["env/program_failed"] == 0 for line in lines)
    assert any(line["train/tokens"] for line in lines)
