"""Posted jobs beside each other: what each leaves is to the byte what it leaves alone, whoever is beside it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forked import ONE_SERVER, forked
from groupwise.model.load import LoadedModel
from groupwise.run import job_queue, job_room
from groupwise.run.job_room import JobRoom
from groupwise.store import files, ledger_turns
from groupwise.store.ledger_schema import JobRecord, JobState
from groupwise.train.together import JointPasses
from groupwise.train.training_batch import TrainingBatch
from job_place import PROMPTS, Place, examples, groups

LONG = tuple(range(40, 60)) * 8  # beyond what joint passes take
MIXED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("math", groups(), {"lora_rank": 2, "iterations": 2, "minibatches": 2, "checkpoint_interval": 1}),
    ("sql", groups(PROMPTS[::-1], logprob=-2.0), {"lora_rank": 8, "policy_loss": "dapo", "iterations": 3}),
    ("code", groups(PROMPTS[:1]), {"lora_rank": 4, "kl_coeff": 0.5, "iterations": 4, "target_modules": ["o_proj"]}),
    ("talk", examples(), {"kind": "sft", "lora_rank": 16, "epochs": 2, "batch_size": 2, "schedule": "cosine"}),
    ("long", groups((LONG, LONG[::-1])), {"lora_rank": 2, "policy_loss": "cispo", "iterations": 2}),
]

LENGTH = {"grpo": "iterations", "sft": "epochs"}
WAIT_S = 300


@pytest.fixture(scope="module")
def base(make_base) -> LoadedModel:
    return make_base("qwen3", dtype=torch.float32, context=512)


@pytest.fixture
def place(base, tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "together", base, passes=JointPasses(at_once=2))
    yield made
    made.ledger.close()


def submit(place: Place, jobs=MIXED) -> None:
    for adapter, payload, options in jobs:
        place.submit(payload, adapter=adapter, **options)


def left_by(place: Place, job: JobRecord) -> dict[str, bytes | Any]:
    """What a job left on the disk, its id and the time aside."""
    version = place.version(job)
    directory = place.store.path(version)
    left: dict[str, Any] = {path.name: path.read_bytes() for path in directory.iterdir()}
    left[files.SIDECAR] = {**json.loads(left[files.SIDECAR]), "job": None, "created": None}
    moments = place.store.moments(version)  # of the newest of its name
    for path in () if moments is None else moments.glob("learner.*"):
        left[f"optimizer/{path.name}"] = path.read_bytes()
    return left


def alone(base: LoadedModel, folder: Path, jobs=MIXED) -> dict[str, dict[str, Any]]:
    """What each job leaves that is done by itself, one after another, by version."""
    place = Place(folder, base)
    for adapter, payload, options in jobs:
        place.do(payload, adapter=adapter, **options)
    found = made(place)
    place.ledger.close()
    return found


def made(place: Place) -> dict[str, dict[str, Any]]:
    return {str(job.version): left_by(place, job) for job in place.ledger.jobs() if job.version}


def together(place: Place) -> dict[str, dict[str, Any]]:
    place.serve()
    return made(place)


def all_in_a_step(monkeypatch: pytest.MonkeyPatch, count: int) -> list[int]:
    """Have `count` jobs wait for each other before their first gradient; returns the ranks of their adapters."""
    meeting, ranks, plain = threading.Barrier(count, timeout=WAIT_S), [], TrainingBatch.accumulate

    def accumulate(batch: TrainingBatch, learner: Any, number: int) -> Any:
        if number == 0:
            ranks.append(learner.lora.r)
            meeting.wait()
        return plain(batch, learner, number)

    monkeypatch.setattr(TrainingBatch, "accumulate", accumulate)
    return ranks


def in_steps_of(monkeypatch: pytest.MonkeyPatch, rank: int, step: int, act: Callable[[], object]) -> None:
    """Call `act` in step `step` of the job whose adapter has this rank, once its gradient is there."""
    plain = TrainingBatch.accumulate

    def accumulate(batch: TrainingBatch, learner: Any, number: int) -> Any:
        metrics = plain(batch, learner, number)
        if (learner.lora.r, number) == (rank, step):
            act()
        return metrics

    monkeypatch.setattr(TrainingBatch, "accumulate", accumulate)


# --- the same bytes ---


def test_jobs_of_other_ranks_losses_and_lengths_leave_what_they_leave_alone(base, place, tmp_path, monkeypatch):
    submit(place)
    ranks = all_in_a_step(monkeypatch, len(MIXED))
    found = together(place)
    assert sorted(ranks) == [2, 2, 4, 8, 16]  # at once
    monkeypatch.undo()
    assert found == alone(base, tmp_path / "alone")
    counts = place.workplace.passes.counts
    assert counts.passes and not counts.failed


def test_jobs_of_one_adapter_are_done_in_order_beside_others(base, place, tmp_path):
    rounds = [("math", groups(logprob=-1.0 - k), {"iterations": 2, "seed": k}) for k in range(3)]
    continued = ("sql", groups(PROMPTS[:1]), {"base_adapter": "math", "iterations": 2})
    jobs = [*rounds[:2], MIXED[3], continued, rounds[2], MIXED[1]]
    submit(place, jobs[:-1])
    found = together(place)
    assert found == alone(base, tmp_path / "alone", jobs[:-1])
    parents = {version: left[files.SIDECAR]["parent"] for version, left in found.items()}
    assert parents == {"math@1": "base", "math@2": "math@1", "talk@1": "base", "sql@1": "math@2", "math@3": "math@2"}


# --- neighbours ---


def beside_a_bad_one(place: Place, bad: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> JobRecord:
    """What becomes of a job of rank 3 beside the others, which are all well."""
    submit(place)
    place.submit(groups(), adapter="bad", **{"lora_rank": 3, "iterations": 6, **bad})
    all_in_a_step(monkeypatch, len(MIXED) + 1)
    *well, last = place.serve()
    assert all(job.version for job in well)
    return last


@pytest.fixture(scope="module")
def left_alone(base, tmp_path_factory) -> dict[str, dict[str, Any]]:
    return alone(base, tmp_path_factory.mktemp("alone"))


@pytest.mark.long
def test_a_neighbour_that_destroys_its_policy_changes_nothing(place, left_alone, monkeypatch):
    bad = beside_a_bad_one(place, {"learning_rate": 1.0, "max_grad_norm": 1e30, "checkpoint_interval": 1}, monkeypatch)
    assert bad.version == "bad@1" and bad.unhealthy
    assert {v: left for v, left in made(place).items() if not v.startswith("bad")} == left_alone


def test_a_neighbour_whose_weights_are_nan_changes_nothing(place, left_alone, monkeypatch):
    def poison(batch: TrainingBatch, learner: Any, number: int) -> Any:
        if learner.lora.r == 3:
            learner.parameters[0].data.fill_(float("nan"))
        return plain(batch, learner, number)

    plain = TrainingBatch.accumulate
    monkeypatch.setattr(TrainingBatch, "accumulate", poison)
    bad = beside_a_bad_one(place, {}, monkeypatch)
    assert bad.state is JobState.FAILED and bad.error["code"] == "training_failed"
    assert made(place) == left_alone


def test_a_neighbour_that_is_cancelled_changes_nothing(place, left_alone, monkeypatch):
    in_steps_of(monkeypatch, 3, 1, lambda: place.ledger.cancel(place.ledger.jobs()[0].id))
    bad = beside_a_bad_one(place, {}, monkeypatch)
    assert (bad.state, bad.step) == (JobState.CANCELLED, 2)
    assert made(place) == left_alone


def test_a_neighbour_with_a_bug_changes_nothing(place, left_alone, monkeypatch):
    def bug() -> None:
        raise RuntimeError("a bug")

    in_steps_of(monkeypatch, 3, 0, bug)
    bad = beside_a_bad_one(place, {}, monkeypatch)
    assert bad.error["code"] == "internal_error"
    assert made(place) == left_alone


def test_memory_that_runs_out_beside_others_has_the_job_go_on_by_itself(place, left_alone, monkeypatch):
    failures = []

    def run_out() -> None:
        failures.append(len(place.ledger.jobs(states=[JobState.RUNNING])))
        if len(failures) == 1:
            raise MemoryError

    in_steps_of(monkeypatch, 3, 2, run_out)
    submit(place)
    place.submit(groups(), adapter="bad", lora_rank=3, iterations=6, checkpoint_interval=1)
    meeting = threading.Barrier(len(MIXED) + 1, timeout=WAIT_S)
    place.at_step(monkeypatch, 0, meeting.wait)
    *_, bad = place.serve()
    assert (bad.version, bad.alone, bad.micro_tokens, bad.attempt) == ("bad@1", True, None, 2)
    assert {v: left for v, left in made(place).items() if v != "bad@1"} == left_alone


# --- by turns ---


@pytest.mark.long
def test_jobs_that_make_way_for_each_other_leave_what_they_leave_alone(base, place, tmp_path, monkeypatch):
    monkeypatch.setattr(job_room, "MOST_AT_ONCE", 2)
    monkeypatch.setattr(job_queue, "AT_LEAST_S", 0.0)
    monkeypatch.setattr(job_queue, "POLL_S", 0.002)
    monkeypatch.setattr(ledger_turns, "QUANTUM", 64)
    jobs = [(name, payload, {**more, LENGTH[more.get("kind", "grpo")]: 7}) for name, payload, more in MIXED]
    submit(place, [*jobs[:1], *jobs])  # the first adapter has two
    found = together(place)
    assert found == alone(base, tmp_path / "alone", [*jobs[:1], *jobs])
    assert sum(job.attempt > 1 for job in place.ledger.jobs()) >= 2


# --- what is not beside others ---


@pytest.mark.parametrize("options", [{"lora_dropout": 0.1}, {"gradient_checkpointing": True}])
def test_what_uses_the_processs_generator_is_trained_by_itself(place, monkeypatch, options):
    submit(place, MIXED[:2])
    place.submit(groups(), adapter="random", lora_rank=3, **options)
    submit(place, MIXED[3:4])
    seen, plain = [], job_queue.run_job

    def run(lease, context, **more):
        seen.append(lease.job.adapter)
        training = [job.adapter for job in place.ledger.jobs() if job.phase in ("loading", "training")]
        assert training == ["random"] or "random" not in training
        return plain(lease, context, **more)

    monkeypatch.setattr(job_queue, "run_job", run)
    assert all(job.version for job in place.serve())
    assert seen[-2:] == ["random", "talk"]  # nobody overtakes it, or it would never begin


def test_a_model_whose_products_are_not_small_has_one_job_at_a_time(base, place, monkeypatch):
    monkeypatch.setattr("groupwise.run.job_room.may_share", lambda model: False)
    submit(place, MIXED[:2])
    one, two = place.ledger.jobs()
    room = JobRoom(base, place.ledger)
    assert room.admits(one, []) and not room.admits(two, [one])


# --- killed ---

POINTS = (
    "train:after-step:kill@3",
    "checkpoint:after-rename:kill@2",
    "publish:after-rename:kill",
    "lease:after-commit:kill@3",
)


@ONE_SERVER
@pytest.mark.parametrize("cause", ["crash", "server"])
def test_what_was_killed_with_several_jobs_ends_with_the_same_bytes(model_dir, tmp_path, cause):
    (tmp_path / "model").symlink_to(model_dir)
    with forked("jobs_killed", tmp_path, cause, *POINTS, folder=tmp_path) as process:
        process.join(600)
        assert process.exitcode == 0, (tmp_path / "stderr").read_text()
    whole, *killed = [json.loads(line) for line in (tmp_path / "stdout").read_text().splitlines()]
    assert whole["ended"] == [0] and len(whole["left"]) == 4 and whole["begun_again"] == 0
    for one in killed:
        assert one["ended"] == [-9, 0] and one["in_hand"] > 1, one["fault"]
        assert one["left"] == whole["left"], one["fault"]
        assert one["alone"] == (one["in_hand"] if cause == "crash" else 0)
