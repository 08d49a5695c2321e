"""What an actor does on its machine, called here without Ray: the engine's, the reward worker's, what they refuse."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from groupwise.config.run import RunConfig, parse_config
from groupwise.engine.local import LocalEngine
from groupwise.errors import ModelError, StorageError
from groupwise.model.load import LoadedModel, load_model
from groupwise.rewards.call import AT_START, FailureKind
from groupwise.rewards.call import Failure as RewardFailure
from groupwise.run import ray_engines
from groupwise.run.ray_actors import enter, seen_here
from groupwise.run.ray_engines import EngineActor
from groupwise.run.ray_rewards import RewardActor
from groupwise.types import PolicyVersion, SamplingParams, SamplingRequest
from wording import raises

REWARD = """
import os, time
def slow(completions):
    time.sleep(60)
def dies(completions):
    os._exit(3)
def length(completions):
    return [len(each) for each in completions]
"""


@pytest.fixture(scope="module")
def config() -> RunConfig:
    keys = {"model": "starter", "device": "cpu", "dtype": "float32", "rollout": {"batch_rows": 8}}
    return parse_config({"data": {"source": "x.jsonl"}, "rewards": ["m:f"], "launcher": "ray", **keys})


@pytest.fixture(scope="module")
def base(config: RunConfig) -> LoadedModel:
    return load_model(config.model, device=config.device, dtype=config.dtype)


@pytest.fixture
def actor(config: RunConfig, base: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineActor]:
    monkeypatch.chdir(os.getcwd())  # it enters another
    actor = EngineActor()
    actor.open(config, os.getcwd(), base.hash)
    yield actor
    actor._engine.close()


def test_an_engine_samples_what_the_local_one_does(actor: EngineActor, base: LoadedModel) -> None:
    request = SamplingRequest(prompt_ids=(5, 10, 5, 11), params=SamplingParams(max_tokens=6, seed=1), n=3)
    with closing(LocalEngine(base, max_rows=8)) as local:
        (expected,) = local.generate([request])
    request = pickle.loads(pickle.dumps(request))
    assert [each.token_ids for each in asyncio.run(actor.sample(request))] == [each.token_ids for each in expected]


def test_a_version_that_the_machine_does_not_see_is_named(
    actor: EngineActor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engines, "SEEN_S", 0.2)
    with raises(StorageError):
        asyncio.run(actor.load(PolicyVersion("run", 1), str(tmp_path / "v000001")))


def test_another_model_than_the_learners_is_refused(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(os.getcwd())
    with raises(ModelError):
        EngineActor().open(config, os.getcwd(), "0" * 16)


def test_a_machine_without_the_folder_is_named(tmp_path: Path) -> None:
    with raises(StorageError):
        enter(str(tmp_path / "elsewhere"))
    seen_here(tmp_path)


@pytest.mark.slow
def test_a_reward_worker_keeps_the_deadline_and_survives_its_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unsteady.py").write_text(REWARD)
    rewards = [f"unsteady:{name}" for name in ("slow", "dies", "length")]
    specs = parse_config({"data": {"source": "x.jsonl"}, "rewards": rewards}).rewards
    actor = RewardActor()
    actor.open(specs, tmp_path, 0.5, str(tmp_path))

    async def asked() -> list:
        columns = pickle.dumps({"completions": ["a", "bcd"]})
        names = ("slow", "dies", "length")
        return [await actor.answer(name, columns, 2, "p", AT_START, False) for name in names]

    with closing(actor._pool):
        slow, dies, length = asyncio.run(asked())
    assert [each.kind for each in (slow.values[0], dies.values[0]) if isinstance(each, RewardFailure)] == [
        FailureKind.TIMEOUT,
        FailureKind.CRASH,
    ]
    assert length.values == [1.0, 3.0]
