"""`setup_infra`: what it opens, attaches to, refuses and closes; and how weights and states go on from there."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from sdk_cases import ADAM, sequences, weights

from groupwise.bridges.cookbook.recipe import Config
from groupwise.bridges.cookbook.recipe import DeployConfig as RecipeDeployConfig
from groupwise.errors import ConfigError, GroupwiseError, ModelError, StorageError, TrainingError
from groupwise.sdk.config import (
    DeployConfig,
    InfraConfig,
    LoopConfig,
    WeightSyncConfig,
    WeightSyncScope,
)
from groupwise.sdk.deployment import Deployment, find_deployment
from groupwise.sdk.infra import Infra, InfraError, setup_infra
from groupwise.sdk.profiles import Machine, choose_profile
from groupwise.sdk.sampler import SampledCompletion
from groupwise.store.rundir import owned
from groupwise.types import Message, PolicyVersion
from wording import raises, warns

QUESTION: list[Message] = [{"role": "user", "content": "What is 47 + 138?"}]
Setup = Callable[..., Infra]


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    """Every test here leaves no thread behind."""
    before = set(threading.enumerate())
    yield
    assert not [thread for thread in threading.enumerate() if thread not in before]


@pytest.fixture
def config(tmp_path: Path, model_dir: Path) -> LoopConfig:
    return LoopConfig(
        log_path=str(tmp_path / "run"),
        base_model=str(model_dir),
        lora_rank=4,
        infra=InfraConfig(training_shape_id="cpu-small"),
        deployment=DeployConfig(tokenizer_model=str(model_dir)),
        weight_sync=WeightSyncConfig(dcp_save_interval=2),
    )


def sample(infra: Infra, n: int = 2, seed: int = 1) -> list[SampledCompletion]:
    assert infra.sampler is not None
    return asyncio.run(infra.sampler.sample_with_tokens(QUESTION, n, max_tokens=4, seed=seed))


def train(infra: Infra, steps: range) -> None:
    for step in steps:
        infra.policy.forward_backward(sequences(step)[0], "cross_entropy")
        infra.policy.optim_step(ADAM)
        infra.weights.after_step(step, extra={"cursor": 3 * step}).result()


# ---- opening ----


def test_everything_is_opened_wired_and_closed(config: LoopConfig) -> None:
    before = copy.deepcopy(asdict(config))
    with setup_infra(config, needs_reference=True, needs_inference=True) as infra:
        assert infra.training_shape_id == "cpu-small" and infra.max_seq_len <= infra.profile.max_seq_len
        assert infra.reference is not None and infra.ref_profile is None  # the policy with its adapter off
        assert infra.deployment is not None and infra.deployment.base is infra.policy.learner.base  # in memory once
        assert {"policy_s", "deployment_s", "total_s"} == infra.boot_metrics.keys()
        data = sequences()[0]
        fresh = infra.policy.forward(data).result().logprobs
        train(infra, range(1, 3))
        assert infra.reference.forward(data).result().logprobs == fresh != infra.policy.forward(data).result().logprobs
        assert {completion.version for completion in sample(infra)} == {PolicyVersion("policy", 2)}
    infra.close()  # again does nothing
    assert asdict(config) == before


def test_only_what_is_needed_is_opened(config: LoopConfig) -> None:
    with setup_infra(config, needs_reference=False, needs_inference=False) as infra:
        assert infra.reference is None and infra.sampler is None and infra.deployment is None
        train(infra, range(1, 3))
        assert infra.weights.sync().result() == PolicyVersion.base()


def test_a_reference_profile_makes_a_reference_of_its_own(config: LoopConfig) -> None:
    config = replace(config, infra=InfraConfig(training_shape_id="cpu-small", ref_training_shape_id="cpu-small"))
    with setup_infra(config, needs_reference=True, needs_inference=False) as infra:
        assert infra.ref_training_shape_id == "cpu-small" and infra.reference is not None
        data = sequences()[0]
        fresh = infra.policy.forward(data).result().logprobs
        train(infra, range(1, 2))
        assert infra.reference.forward(data).result().logprobs == fresh
    with setup_infra(config, needs_reference=False, needs_inference=False) as infra:
        assert infra.reference is None and infra.ref_profile is None  # nobody reads it


def test_all_parameters_without_a_reference_profile_have_no_reference(config: LoopConfig) -> None:
    config = replace(config, lora_rank=0)
    with warns():
        infra = setup_infra(config, needs_reference=True, needs_inference=True)
    with infra:
        assert infra.reference is None
        before = sample(infra)[0]
        train(infra, range(1, 2))
        after = sample(infra)[0]
        assert after.version == PolicyVersion("policy", 1) and after.inference_logprobs != before.inference_logprobs


def test_a_recipes_config_is_taken(tmp_path: Path, model_dir: Path) -> None:
    recipe = Config(
        log_path=str(tmp_path),
        base_model=str(model_dir),
        dataset="none.jsonl",
        lora_rank=4,
        infra=InfraConfig(training_shape_id="cpu-small"),
        deployment=RecipeDeployConfig(tokenizer_model=str(model_dir)),
    )
    before = copy.deepcopy(recipe)
    with setup_infra(recipe, needs_reference=True, needs_inference=True) as infra:
        assert infra.reference is not None and sample(infra)
    assert recipe == before


def test_the_services_names_are_taken_for_what_is_here(config: LoopConfig, model_dir: Path) -> None:
    """A training shape is this machine's profile, an account's model the one whose tokenizer is named, a deployment's
    id the engine's name; what else names machines is said in a line."""
    shape = "accounts/fireworks/trainingShapes/qwen3-8b-128k-h200"
    published = replace(
        config,
        base_model="accounts/fireworks/models/qwen3-8b",
        infra=InfraConfig(training_shape_id=shape, region="US_OHIO_1"),
        deployment=DeployConfig(deployment_id="grpo-serving", tokenizer_model=str(model_dir)),
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        infra = setup_infra(published, needs_reference=True, needs_inference=True)
    with infra:
        assert infra.deployment_id == "grpo-serving"
        assert infra.profile == choose_profile(lora=True, machine=Machine.here())
        assert infra.policy.service.base.name == str(model_dir) and sample(infra)
    said = [str(each.message) for each in warned]
    assert any(line.startswith("infra.region: ") for line in said)
    assert any("is a shape of the service's; here it is the profile" in line for line in said)


# ---- refusing ----


@pytest.mark.parametrize("unset", [DeployConfig(), DeployConfig(tokenizer_model="")])
def test_a_tokenizer_must_be_named_to_sample(config: LoopConfig, unset: DeployConfig) -> None:
    config = replace(config, deployment=unset)
    with raises(ValueError):
        setup_infra(config, needs_reference=False, needs_inference=True)


def test_one_error_is_itself_and_said_once(config: LoopConfig) -> None:
    """The model is missing: trainer and engine both hear of it."""
    with raises(ModelError):
        setup_infra(replace(config, base_model="./nowhere"), needs_reference=False, needs_inference=True)


def test_several_errors_are_all_told_and_what_was_opened_is_closed(config: LoopConfig, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "adapters").write_text("where a directory should be")
    named = replace(config, policy_job_id="taken")
    broken = replace(named, lora_rank=8, log_path=str(tmp_path / "other"))
    own = InfraConfig(training_shape_id="cpu-small", ref_training_shape_id="cpu-small")  # a reference that can be had
    with (
        setup_infra(named, needs_reference=False, needs_inference=False),
        raises(InfraError) as raised,
    ):
        setup_infra(replace(broken, infra=own), needs_reference=True, needs_inference=True)
    assert raised.value.errors.keys() == {"policy", "deployment"}
    assert isinstance(raised.value, GroupwiseError) and raised.value.exit_code == 3


def test_a_deployment_does_not_live_on_alone(config: LoopConfig, tmp_path: Path) -> None:
    """What would have outlived the run is closed where the run could not be set up."""
    named = replace(config, policy_job_id="taken")
    broken = replace(per_deployment(named, tmp_path, run="a"), lora_rank=8)
    with (
        setup_infra(named, needs_reference=False, needs_inference=False),
        raises(ConfigError),
    ):
        setup_infra(broken, needs_reference=False, needs_inference=True)
    assert find_deployment("long-lived") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"infra": InfraConfig(training_shape_id="cpu-tiny")},
        {"infra": InfraConfig(training_shape_id="gpu-141g-full")},
        {"lora_rank": 0, "weight_sync": WeightSyncConfig(weight_sync_interval=2)},
    ],
)
def test_what_does_not_go_together_is_refused(config: LoopConfig, changes: dict) -> None:
    with raises(ConfigError):
        setup_infra(replace(config, **changes), needs_reference=False, needs_inference=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LoopConfig(log_path="x", base_model="starter", lora_rank=-1),
        lambda: LoopConfig(log_path="x", base_model="starter", temperature=0),
        lambda: LoopConfig(log_path="x", base_model="starter", weight_sync=WeightSyncConfig(weight_sync_interval=-1)),
        lambda: LoopConfig(log_path="x", base_model="starter", weight_sync=WeightSyncConfig(dcp_save_interval=-1)),
        lambda: DeployConfig(weight_sync_scope=WeightSyncScope.PER_DEPLOYMENT),
        lambda: DeployConfig(deployment_id="../mine"),
        lambda: DeployConfig(store="mine"),
        lambda: DeployConfig(weight_sync_scope=WeightSyncScope.PER_DEPLOYMENT, deployment_id="../mine"),
        lambda: LoopConfig(log_path="x", base_model="starter", policy_job_id="a/b"),
        lambda: DeployConfig(sample_timeout=0),
        lambda: LoopConfig(
            log_path="x",
            base_model="starter",
            lora_rank=0,
            deployment=DeployConfig(weight_sync_scope=WeightSyncScope.PER_DEPLOYMENT, deployment_id="mine"),
        ),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize(
    "changes",
    [{"lora_rank": "16"}, {"temperature": "1"}, {"infra": {"training_shape_id": "cpu-small"}}, {"log_path": None}],
    ids=str,
)
def test_what_is_of_another_kind_is_told_what_it_must_be(config: LoopConfig, changes: dict) -> None:
    with raises(ConfigError):
        replace(config, **changes)
    assert replace(config, log_path=Path("runs")).log_path == Path("runs")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("step", [-1, 1.5, "1", None])
def test_a_step_that_no_state_can_be_named_after_is_refused(config: LoopConfig, step: Any) -> None:
    with setup_infra(config, needs_reference=False, needs_inference=False) as infra:
        for call in (infra.weights.save, infra.weights.after_step):
            with raises(ConfigError):
                call(step)


def test_another_process_that_trains_in_the_same_log_path_is_not_disturbed(config: LoopConfig) -> None:
    with setup_infra(config, needs_reference=False, needs_inference=True) as infra:
        train(infra, range(1, 4))
    with owned(Path(config.log_path)):  # as another process would
        before = {str(path): path.stat().st_mtime_ns for path in Path(config.log_path).rglob("*")}
        with raises(StorageError):
            setup_infra(config, needs_reference=False, needs_inference=False)
        assert {str(path): path.stat().st_mtime_ns for path in Path(config.log_path).rglob("*")} == before
    infra = setup_infra(config, needs_reference=False, needs_inference=True)
    resumed = infra.weights.resume()
    assert resumed is not None and resumed.step == 2
    with raises(StorageError), owned(Path(config.log_path)):
        pass
    infra.close()
    infra.close()
    with owned(Path(config.log_path)):
        pass


# ---- attaching ----


def test_a_named_trainer_is_attached_to_and_closed_by_who_opened_it(config: LoopConfig) -> None:
    named = replace(config, policy_job_id="shared", weight_sync=WeightSyncConfig())
    with setup_infra(named, needs_reference=False, needs_inference=False) as first:
        train(first, range(1, 2))
        with setup_infra(named, needs_reference=False, needs_inference=True) as second:
            assert second.policy is first.policy and second.policy_job_id == "shared"
            assert second.weights.sync().result() == PolicyVersion("shared", 1)
            assert sample(second)[0].version == PolicyVersion("shared", 1)
        train(first, range(2, 3))  # goes on
        with raises(ConfigError):
            setup_infra(replace(named, lora_rank=8), needs_reference=False, needs_inference=False)
    with setup_infra(named, needs_reference=False, needs_inference=False) as third:
        assert third.policy is not first.policy


def test_a_trainer_that_is_attached_to_is_as_it_is_asked_for(config: LoopConfig) -> None:
    machines = InfraConfig(training_shape_id="cpu-small", ref_training_shape_id="cpu-small")
    named = replace(config, policy_job_id="shared", reference_job_id="compared", infra=machines)
    with setup_infra(named, needs_reference=True, needs_inference=False) as first:
        for changes in ({"temperature": 0.5}, {"lora_alpha": 8.0}):
            with raises(ConfigError):
                setup_infra(replace(named, **changes), needs_reference=False, needs_inference=False)
        for changes in ({"temperature": 0.5}, {"base_model": "starter"}):
            alone = replace(named, policy_job_id=None, **changes)
            with raises(ConfigError):
                setup_infra(alone, needs_reference=True, needs_inference=False)
        with setup_infra(replace(named, temperature=1), needs_reference=True, needs_inference=False) as second:
            assert second.policy is first.policy and second.reference is first.reference


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_reference_with_a_name_is_one_of_its_own(config: LoopConfig, lora_rank: int) -> None:
    named = replace(config, reference_job_id="compared", lora_rank=lora_rank)
    with setup_infra(named, needs_reference=True, needs_inference=False) as first:
        assert first.reference is not None and first.reference.service is not first.policy.service
        assert first.ref_training_shape_id == "cpu-small"
        with setup_infra(named, needs_reference=True, needs_inference=False) as second:
            assert second.reference is first.reference


def per_deployment(config: LoopConfig, tmp_path: Path, *, run: str) -> LoopConfig:
    deploy = DeployConfig(
        tokenizer_model=config.base_model,
        weight_sync_scope=WeightSyncScope.PER_DEPLOYMENT,
        deployment_id="long-lived",
        store=str(tmp_path / "store"),
    )
    return replace(config, deployment=deploy, log_path=str(tmp_path / run))


def test_successive_trainers_push_into_one_engine(config: LoopConfig, tmp_path: Path) -> None:
    with setup_infra(per_deployment(config, tmp_path, run="a"), needs_reference=False, needs_inference=True) as first:
        deployment = first.deployment
        assert isinstance(deployment, Deployment)
        train(first, range(1, 3))
        last = sample(first)
    assert find_deployment("long-lived") is deployment  # it outlives the run

    with setup_infra(per_deployment(config, tmp_path, run="b"), needs_reference=False, needs_inference=True) as second:
        assert second.deployment is deployment and second.policy.learner.base is deployment.base  # nothing is loaded
        assert sample(second) == last  # and serves what it served
        train(second, range(5, 6))
        assert sample(second)[0].version == PolicyVersion("policy", 3)  # no number comes twice
        assert deployment.engine.stats()["adapters"] == 1
    with setup_infra(per_deployment(config, tmp_path, run="a"), needs_reference=False, needs_inference=True) as again:
        resumed = again.weights.resume()  # the first run goes on, and nothing is restarted
        assert resumed is not None and resumed.step == 2 and again.deployment is deployment
        assert sample(again) == last
        train(again, range(3, 4))
        assert sample(again)[0].version == PolicyVersion("policy", 4)
    other = replace(per_deployment(config, tmp_path, run="c"), base_model=str(tmp_path))
    with raises(InfraError):
        setup_infra(other, needs_reference=False, needs_inference=True)
    deployment.close()
    assert find_deployment("long-lived") is None


def test_the_base_of_a_deployment_is_only_trained_over_by_who_attaches_to_it(
    config: LoopConfig, tmp_path: Path
) -> None:
    with setup_infra(per_deployment(config, tmp_path, run="a"), needs_reference=False, needs_inference=True) as first:
        deployment, before = first.deployment, sample(first)
        assert deployment is not None
        alone = DeployConfig(tokenizer_model=config.base_model, deployment_id="long-lived")  # the scope is per_trainer
        whole = replace(config, lora_rank=0, deployment=alone, log_path=str(tmp_path / "whole"))
        with setup_infra(whole, needs_reference=False, needs_inference=True) as second:
            train(second, range(1, 2))
            assert second.deployment is not deployment
        assert sample(first) == before
    deployment.close()


# ---- weights and states ----


@pytest.mark.parametrize(("interval", "numbers"), [(1, [1, 2, 3, 4]), (2, [0, 1, 1, 2]), (0, [0, 0, 0, 0])])
def test_weights_are_synced_at_the_end_of_a_window(config: LoopConfig, interval: int, numbers: list[int]) -> None:
    config = replace(config, weight_sync=WeightSyncConfig(weight_sync_interval=interval))
    with setup_infra(config, needs_reference=False, needs_inference=True) as infra:
        served = []
        for step in range(1, 5):
            train(infra, range(step, step + 1))
            served.append(sample(infra, n=1)[0].version.number)
        assert served == numbers
        assert not list(Path(config.log_path).glob("states/*"))  # dcp_save_interval 0 saves nothing


def test_a_sync_before_training_serves_the_fresh_policy(config: LoopConfig) -> None:
    config = replace(config, weight_sync=WeightSyncConfig(weight_sync_before_training=True))
    with setup_infra(config, needs_reference=False, needs_inference=True) as infra:
        assert infra.weights.resume() is None
        assert sample(infra)[0].version == PolicyVersion("policy", 1)


def test_what_is_synced_is_what_the_trainer_scores(config: LoopConfig) -> None:
    with setup_infra(config, needs_reference=False, needs_inference=True) as infra:
        train(infra, range(1, 3))
        completion = sample(infra, n=1)[0]
        (row,) = infra.policy.forward([completion.datum()]).result().logprobs
        start = completion.prompt_len
        assert completion.inference_logprobs[1:][start - 1 :] == pytest.approx(row[start - 1 :], abs=1e-4)


def test_all_parameters_go_on_too(config: LoopConfig) -> None:
    config = replace(config, lora_rank=0)
    with setup_infra(config, needs_reference=False, needs_inference=True) as infra:
        train(infra, range(1, 5))
        expected, said = weights(infra.policy), sample(infra)
    with setup_infra(config, needs_reference=False, needs_inference=True) as infra:
        resumed = infra.weights.resume()
        assert resumed is not None and resumed.step == 4
        assert weights(infra.policy) == expected and sample(infra) == said


def test_a_loop_goes_on_with_the_same_bytes(config: LoopConfig, tmp_path: Path) -> None:
    config = replace(config, weight_sync=WeightSyncConfig(weight_sync_interval=3, dcp_save_interval=2))
    straight = replace(config, log_path=str(tmp_path / "straight"))
    with setup_infra(straight, needs_reference=False, needs_inference=True) as infra:
        train(infra, range(1, 8))
        expected, said = weights(infra.policy), sample(infra)
    with setup_infra(config, needs_reference=False, needs_inference=True) as infra:
        assert infra.weights.resume() is None
        train(infra, range(1, 6))  # saved after 4, in the middle of a window; step 5 is lost
    with setup_infra(config, needs_reference=False, needs_inference=True) as infra:
        resumed = infra.weights.resume()
        assert resumed is not None and resumed.step == 4 and resumed.extra == {"cursor": 12}
        assert sample(infra)[0].version == PolicyVersion("policy", 1)  # the window's
        train(infra, range(5, 8))
        assert weights(infra.policy) == expected and sample(infra) == said
    states = sorted(path.name for path in Path(config.log_path, "states").iterdir())
    assert states == ["step-000002", "step-000004", "step-000006"]
    facts = json.loads(Path(config.log_path, "states", "step-000006", "state.json").read_text())
    assert facts["extra"]["serving"] == "policy@2"


def test_another_state_is_another_version(config: LoopConfig, tmp_path: Path) -> None:
    """After as many steps, and yet not the weights that were served."""
    with setup_infra(config, needs_reference=False, needs_inference=True) as infra:
        train(infra, range(1, 2))
        infra.policy.save_state(tmp_path / "one").result()
        infra.policy.forward_backward(sequences(8)[0], "cross_entropy")
        infra.policy.optim_step(ADAM)
        infra.policy.load_state(tmp_path / "one").result()
        assert infra.weights.sync().result() == PolicyVersion("policy", 2)
        assert infra.weights.sync().result() == PolicyVersion("policy", 2)  # nothing has changed since


def test_a_loop_that_begins_again_in_a_log_path_keeps_its_own_states(config: LoopConfig) -> None:
    config = replace(config, weight_sync=WeightSyncConfig(dcp_save_interval=1))
    with setup_infra(config, needs_reference=False, needs_inference=False) as infra:
        train(infra, range(7, 10))
    with setup_infra(config, needs_reference=False, needs_inference=False) as infra:  # and does not resume
        train(infra, range(1, 3))
        expected = weights(infra.policy)
    assert sorted(path.name for path in Path(config.log_path, "states").iterdir()) == [
        "step-000001",
        "step-000002",
        "step-000009",
    ]
    with setup_infra(config, needs_reference=False, needs_inference=False) as infra:
        resumed = infra.weights.resume()
        assert resumed is not None and (resumed.step, resumed.extra) == (2, {"cursor": 6})
        assert weights(infra.policy) == expected
    Path(config.log_path, "states", "step-000001", "state.json").write_text("{")  # damaged: nothing is guessed
    with setup_infra(config, needs_reference=False, needs_inference=False) as infra, raises(StorageError):
        infra.weights.resume()


def test_a_state_that_could_not_be_saved_costs_none_that_was(config: LoopConfig) -> None:
    config = replace(config, weight_sync=WeightSyncConfig())
    with setup_infra(config, needs_reference=False, needs_inference=True) as infra:
        train(infra, range(1, 2))
        infra.weights.save(1).result()
        expected = weights(infra.policy)
        train(infra, range(2, 3))
        infra.policy.forward_backward(sequences()[0], "cross_entropy")
        with raises(TrainingError):
            infra.weights.save(2).result()
        infra.policy.optim_step(ADAM)
        train(infra, range(3, 8))  # versions of the state before would go
    with setup_infra(config, needs_reference=False, needs_inference=True) as infra:
        resumed = infra.weights.resume()
        assert resumed is not None and resumed.step == 1 and weights(infra.policy) == expected
        assert sample(infra)[0].version == PolicyVersion("policy", 1)
