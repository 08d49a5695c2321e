"""What Ray is asked for, and what is refused before it is: none of this needs Ray."""

from __future__ import annotations

import importlib.util
import threading
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.config.run import RunConfig, parse_config
from groupwise.engine.worker_group import WorkerLost
from groupwise.errors import ConfigError, RewardError, TrainingError
from groupwise.run import ray as ray_launch
from groupwise.run.ray import _outcome, roles_of, supervise
from groupwise.run.stop_request import StopRequest
from groupwise.store.checkpoint import RunState
from groupwise.store.rundir import open_run_dir
from groupwise.types import PolicyVersion
from wording import raises


def config(launcher: Any = "ray", **keys: Any) -> RunConfig:
    return parse_config({"data": {"source": "x.jsonl"}, "rewards": ["m:f"], "launcher": launcher, **keys})


def test_a_bundle_for_each_learner_and_engine_and_one_for_the_reward_workers() -> None:
    launcher = {"kind": "ray", "engines": 3, "cpus": 4, "reward_cpus": 0.5}
    roles = roles_of(config(launcher, scoring={"workers": 6}, train={"devices": 2}))
    assert roles.bundles == [{"CPU": 4.0}] * 5 + [{"CPU": 3.0}]
    places = roles.places("group", "/here")
    assert [place.index for place in places.learners] == [0, 1]
    assert [place.index for place in places.engines] == [2, 3, 4] and places.envs is None
    assert (places.rewards.index, places.rewards.share) == (5, {"CPU": 0.5})
    assert {place.folder for place in (*places.learners, *places.engines, places.rewards)} == {"/here"}


@pytest.mark.parametrize(("workers", "reward_cpus"), [(0, 1.0), (2, 0.0)])
def test_reward_workers_that_need_nothing_have_no_bundle(workers: int, reward_cpus: float) -> None:
    """Ray has no empty ones; they are then beside the last engine."""
    roles = roles_of(config({"kind": "ray", "reward_cpus": reward_cpus}, scoring={"workers": workers}))
    assert roles.bundles == [{"CPU": 1.0}] * 2
    assert roles.places("group", "/here").rewards.index == 1


ENVS = """
class Guess:
    def reset(self, case, seed): return "Guess."
    def step(self, message): return None
    def score(self, episode): return 1.0
class Hotel:
    def build_dataset(self, tokenizer): return [{"prompt": "a", "case_idx": 0}]
    def score_episode(self, model, tokenizer, completion, case_idx): return 1.0
async def agent(case): return 1.0
"""


@pytest.mark.parametrize(
    ("env", "env_cpus", "workers", "last", "indices"),
    [
        ({"environment": "ray_envs_here:Guess"}, 0.5, 2, [{"CPU": 1.0}], (2, 3)),  # one of rewards, one of these
        ({"environment": "ray_envs_here:Guess"}, 0.0, 2, [], (2, 1)),
        ({"environment": "ray_envs_here:Guess"}, 0.5, 0, [], (2, None)),
        ({"environment": "ray_envs_here:Hotel"}, 0.5, 2, [], (2, None)),  # asks the policy itself
        ({"agent": "ray_envs_here:agent"}, 0.5, 2, [], (2, None)),
        ({"harness": {"command": ["true"]}}, 0.5, 2, [], (2, None)),
    ],
)
def test_environment_workers_have_a_bundle_where_there_are_environments(
    tmp_path: Path, env: dict[str, Any], env_cpus: float, workers: int, last: list[dict], indices: tuple
) -> None:
    (tmp_path / "ray_envs_here.py").write_text(ENVS)
    launcher = {"kind": "ray", "env_workers": workers, "env_cpus": env_cpus}
    roles = roles_of(config(launcher, env=env, folder=str(tmp_path)))
    assert roles.bundles == [{"CPU": 1.0}] * 2 + [{"CPU": 2.0}] + last
    places = roles.places("group", "/here")
    assert (places.rewards.index, places.envs and places.envs.index) == indices


@pytest.mark.parametrize(
    ("device", "asked", "there", "gpus"),
    [
        ("auto", None, 0.0, 0.0),
        ("auto", None, 8.0, 1.0),
        ("auto", 0.0, 8.0, 0.0),
        ("cuda", None, 0.0, 1.0),
        ("cuda", 0.5, 1.0, 0.5),
        ("cpu", None, 8.0, 0.0),
    ],
)
def test_gpus_are_as_the_device_says(device: str, asked: float | None, there: float, gpus: float) -> None:
    roles = roles_of(config({"kind": "ray", "gpus": asked}, device=device), gpus_there=there)
    assert [bundle.get("GPU", 0.0) for bundle in roles.bundles] == [gpus, gpus, 0.0]


@pytest.mark.parametrize(
    ("vllm", "device", "there", "servers", "gpus"),
    [
        ({"servers": 2}, "cpu", 0.0, 2, 0.0),
        ({}, "cpu", 0.0, 1, 0.0),
        ({}, "auto", 8.0, 6, 1.0),  # two train
        ({"tensor_parallel_size": 4}, "auto", 8.0, 1, 4.0),
        ({"servers": 3, "tensor_parallel_size": 4}, "cuda", 8.0, 3, 4.0),  # the cluster may grow
        ({"urls": ["http://a:1"]}, "auto", 8.0, 0, 4.0),
    ],
)
def test_a_bundle_for_each_vllm_server(
    vllm: dict[str, Any], device: str, there: float, servers: int, gpus: float
) -> None:
    run = config({"kind": "ray", "cpus": 2}, engine="vllm", vllm=vllm, device=device, train={"devices": 2})
    roles = roles_of(run, gpus_there=there)
    learner, server = {"CPU": 2.0, "GPU": 1.0}, {"CPU": 2.0, "GPU": gpus}
    if not there:
        del learner["GPU"], server["GPU"]
    assert roles.bundles == [*[learner] * 2, *[server] * servers, {"CPU": 2.0}]
    places = roles.places("group", "/here")
    assert [place.index for place in places.engines] == list(range(2, 2 + servers))
    assert all(place.share == server for place in places.engines)


@pytest.mark.parametrize(
    "keys",
    [
        {"engine": "vllm", "vllm": {"mode": "colocate"}},
        {"engine": "vllm", "vllm": {"gpus": "1"}},
        {"engine": "vllm", "vllm": {"sleep": True}},
        {"engine": "vllm", "launcher": {"kind": "ray", "engines": 2}},
        {"train": {"lora": None}},
        {"device": "cuda:1"},
        {"device": "cpu", "launcher": {"kind": "ray", "gpus": 1}},
        {"device": "cuda", "launcher": {"kind": "ray", "gpus": 0}},
    ],
)
def test_what_does_not_go_with_ray_is_refused(keys: dict[str, Any]) -> None:
    with raises(ConfigError):
        roles_of(config(**keys))


@pytest.mark.parametrize(
    ("launcher", "field"),
    [
        ({"kind": "torchrun", "engines": 2}, "launcher.engines"),
        ({"kind": "slurm", "restarts": 1}, "launcher.restarts"),
        ({"kind": "ray", "partition": "gpu"}, "launcher.partition"),
        ({"kind": "ray", "nodes": 2}, "launcher.nodes"),
        ({"kind": "ray", "engines": 0}, "launcher.engines"),
        ({"kind": "ray", "cpus": 0}, "launcher.cpus"),
    ],
)
def test_every_key_acts_or_is_refused(launcher: dict[str, Any], field: str) -> None:
    with raises(ConfigError, field=field):
        config(launcher)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_error_says_what_to_install() -> None:
    with raises(ConfigError):
        supervise(config(), lambda config, **options: None)


def test_rank_0_says_why_it_ended_though_another_ended_first() -> None:
    running: list[Future[Any]] = [Future(), Future()]
    running[1].set_exception(TrainingError("rank 0 ended"))
    threading.Timer(0.2, running[0].set_exception, [RewardError("every reward failed")]).start()
    with pytest.raises(RewardError):
        _outcome(running, lambda: None, StopRequest())


def test_a_lost_rank_is_known_at_once_and_a_stop_is_asked_for_once() -> None:
    running: list[Future[Any]] = [Future(), Future()]
    stop, asked = StopRequest(), []
    stop.requested = True
    threading.Timer(1.2, running[1].set_exception, [WorkerLost("it died")]).start()
    with raises(WorkerLost):
        _outcome(running, lambda: asked.append("stop"), stop)
    assert asked == ["stop"]


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_learners_that_come_later_find_a_run_that_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str
) -> None:
    """The first are lost after the last checkpoint; it is that run which the next conclude, and no new one."""
    version = PolicyVersion("run", 2)
    standing = RunState(step=2, version=version, sampler=version, synced=2, finished=True)

    def attempt(config: RunConfig, *_: Any) -> tuple[Path, RunState | None]:
        with open_run_dir(config) as (run_dir, found):
            pass
        if found is not None:
            return run_dir, found
        (run_dir / "metrics.jsonl").write_text("{}\n")
        (at := run_dir / "checkpoints" / "step-000002").mkdir(parents=True)
        (at / "run.json").write_text(standing.dump())
        raise WorkerLost("it died")

    monkeypatch.setattr(ray_launch, "_attempt", attempt)
    monkeypatch.setattr(ray_launch, "connected", lambda address: nullcontext())
    monkeypatch.setattr(ray_launch, "placed", lambda bundles, **options: nullcontext())
    monkeypatch.setattr(ray_launch, "ray_module", lambda: SimpleNamespace(cluster_resources=dict))
    result: Any = supervise(config(resume=resume, output_dir=str(tmp_path)), lambda config, **options: None)
    run_dir, found = result
    assert found == standing and list(tmp_path.iterdir()) == [run_dir]


def test_the_launchers_section_makes_it_no_other_run(tmp_path: Path) -> None:
    """A run on Ray goes on without it, and the other way round."""
    keys = {"run_dir": str(tmp_path / "run"), "resume": "auto"}
    for launcher in ("ray", "torchrun"):
        with open_run_dir(config(launcher, **keys)) as found:
            assert found == (tmp_path / "run", None)
    with raises(ConfigError), open_run_dir(config(seed=1, **keys)):
        pass
