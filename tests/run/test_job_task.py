"""What a job trains on: the very batch that a run would train on, given the same groups."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from groupwise.algo.credit import has_signal
from groupwise.model.load import LoadedModel
from groupwise.run.display import LineDisplay
from groupwise.run.loop import run_loop
from groupwise.store.files import WEIGHTS, Provenance
from groupwise.store.rollouts import group_from_json
from groupwise.types import RolloutGroup
from job_place import Place, groups
from running_jobs import config, metrics_of, rollouts_of
from slow_cases import slow_but

LORA = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "down_proj"]}
GSPO = {"policy_loss": "gspo", "correction": "tis_sequence"}  # a job's correction; that of a run on its policy is none
OF_A_JOB = {"lora_rank": 4, "lora_alpha": 8.0, "target_modules": ["q_proj", "down_proj"], "learning_rate": 1e-3}


def moved_adapter(directory: Path, starter: LoadedModel) -> Path:
    """An adapter that is no longer the base: there a KL has a gradient."""
    place = Place(directory, starter)
    return place.store.path(place.version(place.do(groups(), iterations=3, **OF_A_JOB)))


def one_step(
    tmp_path: Path,
    start: Path,
    algo: dict[str, Any],
    *,
    rollout: dict[str, Any] | None = None,
    sections: dict[str, Any] | None = None,
    **train: int,
) -> tuple[list[RolloutGroup], Path, float]:
    """A run's only step: all groups that it sampled, the adapter that it made, the norm of its gradient."""
    given = config(
        tmp_path,
        rollout={"prompts_per_step": 8, "group_size": 4, "max_tokens": 8, "refill": 1.0, **(rollout or {})},
        train={"steps": 1, "warmup_steps": 0, "learning_rate": 1e-3, "lora": LORA, **train},
        adapters={"start": str(start)},
        algo=algo,
        checkpoint={"every": 0},
        **(sections or {}),
    )
    result = run_loop(given, display=LineDisplay(1, stream=io.StringIO()))
    sampled = [group_from_json(line) for line in rollouts_of(result.run_dir)]
    weights = next((result.run_dir / "adapters").rglob(WEIGHTS))
    return sampled, weights, metrics_of(result.run_dir)[-1]["optim/grad_norm"]


def posted(sampled: Sequence[RolloutGroup]) -> dict[str, Any]:
    """Groups that a run sampled as a job gets them."""

    def completion(rollout: Any) -> dict[str, Any]:
        said = rollout.completion
        kept = None if said.kept is None else b64encode(said.kept.to_bytes()).decode()
        own = {"ids": list(said.token_ids), "logprobs": list(said.behaviour_logprobs), "kept": kept}
        return {**own, "reward": rollout.reward}

    return {
        "groups": [
            {"prompt_ids": list(group.prompt.token_ids), "completions": list(map(completion, group.rollouts))}
            for group in sampled
        ]
    }


@pytest.mark.parametrize(
    ("of_the_run", "of_the_job"),
    [
        ({"policy_loss": "grpo", "kl": "k3", "kl_coeff": 0.1}, {}),  # a job's defaults
        ({"policy_loss": "grpo"}, {"kl_coeff": 0.0}),
        ({"policy_loss": "dapo", "entropy_coeff": 0.05}, {"policy_loss": "dapo", "entropy_coeff": 0.05}),
        pytest.param(
            {"policy_loss": "dr_grpo"},
            {"policy_loss": "dr_grpo", "reduction_length": 8.0},  # rollout.max_tokens
            marks=pytest.mark.slow,
        ),
        pytest.param(GSPO, {"policy_loss": "gspo"}, marks=pytest.mark.slow),
        pytest.param({"advantage": "batch_std"}, {"advantage": "batch_std", "kl_coeff": 0.0}, marks=pytest.mark.slow),
    ],
    ids=["kl", "no kl", "entropy", "dr_grpo", "gspo", "batch_std"],
)
def test_a_posted_job_makes_the_step_of_a_run_with_the_same_groups(starter, tmp_path, of_the_run, of_the_job):
    """Also where groups have equal rewards: another term of the loss may have a gradient there."""
    start = moved_adapter(tmp_path / "start", starter)
    sampled, weights, norm = one_step(tmp_path, start, of_the_run)
    assert 0 < sum(map(has_signal, sampled)) < len(sampled)
    place = Place(tmp_path / "place", starter)
    origin = Provenance(base_model=starter.name, base_hash=starter.hash)
    place.store.import_(start, "math", info=origin)  # without the moments that its job left
    job = place.do(posted(sampled), **OF_A_JOB, **of_the_job)
    assert job.metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-4)
    ours, theirs = load_file(place.store.path(place.version(job)) / WEIGHTS), load_file(weights)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-6)


def test_a_job_with_a_teacher_makes_the_step_of_a_run_with_it(starter, tmp_path):
    """The sampled form, with what the run's teacher said of each token."""
    start, algo = moved_adapter(tmp_path / "start", starter), {"policy_loss": "dapo"}
    sections = {"teacher": {"model": "starter", "coefficient": 2.0}}
    sampled, weights, norm = one_step(tmp_path, start, algo, sections=sections)
    assert sum(map(has_signal, sampled)) < len(sampled)
    groups = posted(sampled)
    for group, raw in zip(sampled, groups["groups"], strict=True):
        for rollout, completion in zip(group.rollouts, raw["completions"], strict=True):
            completion["teacher_logprobs"] = list(rollout.teacher[0].logprobs)
    place = Place(tmp_path / "place", starter)
    place.store.import_(start, "math", info=Provenance(base_model=starter.name, base_hash=starter.hash))
    job = place.do(groups, **OF_A_JOB, **algo, teacher_coefficient=2.0)
    assert job.metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert job.metrics["teacher/scored_frac"] == 1 and job.metrics["teacher/gap_max"] > 1e-3
    ours, theirs = load_file(place.store.path(place.version(job)) / WEIGHTS), load_file(weights)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-6)


def test_a_run_with_top_p_trains_what_it_sampled_and_a_job_the_same(starter, tmp_path):
    """The trainer's log-probabilities are the sampler's, of the nucleus, also the reference's, and what is on disk is
    enough to make the same step again."""
    start, algo = moved_adapter(tmp_path / "start", starter), {"policy_loss": "grpo", "kl": "k3", "kl_coeff": 0.1}
    narrowed = {"top_p": 0.8, "top_k": 30, "min_p": 0.01, "temperature": 1.3}
    sampled, weights, norm = one_step(tmp_path, start, algo, rollout=narrowed)
    (step,) = (line for line in metrics_of(weights.parents[3]) if "mismatch/ratio_max" in line)
    assert step["mismatch/ratio_min"] == pytest.approx(1, abs=1e-4) == step["mismatch/ratio_max"]
    assert 0.5 < step["sampling/kept_mass"] < 0.999
    assert all(rollout.completion.kept is not None for group in sampled for rollout in group.rollouts)
    place = Place(tmp_path / "place", starter)
    place.store.import_(start, "math", info=Provenance(base_model=starter.name, base_hash=starter.hash))
    job = place.do(posted(sampled) | {"temperature": 1.3}, **OF_A_JOB, **algo)
    assert job.metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-4)
    ours, theirs = load_file(place.store.path(place.version(job)) / WEIGHTS), load_file(weights)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-6)


WITH_KL = {"policy_loss": "grpo", "kl": "k3", "kl_coeff": 0.1}


@pytest.mark.parametrize("loss", slow_but([WITH_KL], of=(WITH_KL, GSPO)))
def test_several_optimizer_steps_are_those_of_a_run(starter, tmp_path, loss):
    """The same minibatches in the same order, also where they cut a group, against the same anchor and reference."""
    start = moved_adapter(tmp_path / "start", starter)
    sampled, weights, _ = one_step(tmp_path, start, loss, minibatches=8, passes=2)
    trained = sum(map(has_signal, sampled))
    assert 0 < trained < 8  # so that eight minibatches cut groups
    place = Place(tmp_path / "place", starter)
    place.store.import_(start, "math", info=Provenance(base_model=starter.name, base_hash=starter.hash))
    if "kl" not in loss:  # with a KL the others are trained, too
        sampled = [group for group in sampled if has_signal(group)]
    job = place.do(posted(sampled), **OF_A_JOB, **loss, minibatches=8, iterations=2)
    assert len(place.ledger.metrics(job.id)) == 16
    ours, theirs = load_file(place.store.path(place.version(job)) / WEIGHTS), load_file(weights)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-6)
