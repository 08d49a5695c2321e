"""A worker's jobs: how they end, what becomes of leases and signals, and SIGKILL at every named point."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cuda_errors import ILLEGAL_ADDRESS, INVALID_VALUE, cuda_error
from forked import ONE_SERVER, forked
from groupwise.errors import Interrupted, LeaseLostError, StorageError
from groupwise.run import job_queue
from groupwise.run.job import JobCancelled, run_job
from groupwise.run.job_queue import LeaseHeartbeat, describe
from groupwise.store import faults
from groupwise.store.files import WEIGHTS
from groupwise.store.ledger_schema import JobState
from groupwise.train.learner import Learner
from groupwise.train.training_batch import TrainingBatch
from job_place import CRASHING, KILLED, Place, groups

HERE = Path(__file__).parent.parent
WAIT_S = 120  # for a process that must import torch on a busy machine


@pytest.fixture
def place(make_base, tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path, make_base("qwen3", dtype=torch.float32))
    yield made
    made.ledger.close()


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


# --- how a job ends ---


def out_of_memory() -> None:
    torch.empty(1 << 60)


def a_bug() -> None:
    raise RuntimeError("shapes differ\nand more lines")


@pytest.mark.parametrize(
    ("act", "code", "says", "advises"),
    [
        (out_of_memory, "out_of_memory", "memory ran out", "gradient_checkpointing"),
        pytest.param(
            *(raising(MemoryError()), "out_of_memory", "MemoryError", "gradient_checkpointing"), marks=pytest.mark.slow
        ),
        pytest.param(
            *(
                raising(torch.OutOfMemoryError("CUDA out of memory.")),
                "out_of_memory",
                "CUDA",
                "gradient_checkpointing",
            ),
            marks=pytest.mark.slow,
        ),
        (a_bug, "internal_error", "RuntimeError: shapes differ", "worker.log"),
    ],
    ids=["allocator", "python", "cuda", "bug"],
)
def test_an_error_in_one_job_fails_it_and_the_next_is_done(place, monkeypatch, act, code, says, advises):
    with monkeypatch.context() as patch:
        place.at_step(patch, 1, act)
        failed = place.do(groups(), iterations=3, checkpoint_interval=1)
    assert (failed.state, failed.phase, failed.step) == (JobState.FAILED, "training", 1)
    assert failed.error["code"] == code and says in failed.error["message"] and advises in failed.error["hint"]
    assert "\n" not in failed.error["message"]
    assert not (place.directory / "checkpoints" / failed.id).exists()
    assert place.do(groups(), iterations=3).version == "math@1"


def test_where_the_gpu_is_lost_the_process_ends_and_the_next_goes_on_with_the_job(place, monkeypatch):
    with monkeypatch.context() as patch:
        place.at_step(patch, 1, raising(cuda_error(ILLEGAL_ADDRESS)))
        with pytest.raises(SystemExit) as ended:
            place.do(groups(), iterations=3, checkpoint_interval=1)
    assert ended.value.code == 75
    assert place.ledger.jobs()[0].state == JobState.RUNNING
    place.ledger.expire("worker")  # as the supervisor does when the process has ended
    lease = place.lease()
    assert lease.attempt == 2
    place.worker.do(lease)
    assert place.ledger.job(lease.job.id).version == "math@1"


def test_an_error_of_the_gpu_that_loses_nothing_fails_the_job_alone(place, monkeypatch):
    with monkeypatch.context() as patch:
        place.at_step(patch, 0, raising(cuda_error(INVALID_VALUE)))
        assert place.do(groups()).state == JobState.FAILED
    assert place.do(groups()).version == "math@1"


def test_errors_speak_of_the_fields_of_a_request():
    from groupwise.errors import FieldError

    error = FieldError("{field}: 'x' is wrong", hint="lower {field}", field="train.lora.targets")
    assert describe(error) == {
        "code": "invalid_config",
        "message": "config.target_modules: 'x' is wrong",
        "hint": "lower config.target_modules",
    }


def test_a_cancelled_job_stops_before_its_next_step(place, monkeypatch):
    job = place.submit(groups(), iterations=50, checkpoint_interval=1)
    place.at_step(monkeypatch, 3, lambda: place.ledger.cancel(job.id))
    place.worker.do(place.lease())
    job = place.ledger.job(job.id)
    assert (job.state, job.step, job.version) == (JobState.CANCELLED, 4, None)
    assert place.store.names() == () and not (place.directory / "checkpoints" / job.id).exists()


def test_a_wish_to_cancel_during_the_last_step_still_counts(place, monkeypatch):
    job = place.submit(groups())
    place.at_step(monkeypatch, 0, lambda: place.ledger.cancel(job.id))
    place.worker.do(place.lease())
    assert place.ledger.job(job.id).state == JobState.CANCELLED and place.store.names() == ()


@pytest.mark.parametrize("step", [0, 2], ids=["before a checkpoint", "at the last step"])
def test_who_lost_the_lease_stops_and_publishes_nothing(place, monkeypatch, step):
    """The supervisor takes the worker for dead and another one has the job while this one is in a step."""
    others = []

    def take_over() -> None:
        place.ledger.expire("worker")
        others.append(place.ledger.lease("other"))

    with monkeypatch.context() as patch:
        place.at_step(patch, step, take_over)
        job = place.do(groups(logprob=-2.0), iterations=3)
    assert place.store.names() == () and not list(place.directory.glob("checkpoints/*/*"))
    assert (job.state, job.step, job.attempt) == (JobState.RUNNING, step, 2)
    place.worker.do(others[0])  # the other one ends it
    assert place.ledger.job(job.id).version == "math@1"


def test_a_lease_that_is_lost_between_training_and_the_rename(place, monkeypatch):
    plain = place.store.publish

    def publish(name, write, **options):
        def written(directory: Path) -> None:
            write(directory)
            place.ledger.expire("worker")

        return plain(name, written, **options)

    monkeypatch.setattr(place.store, "publish", publish)
    job = place.do(groups())
    assert place.store.names() == () and job.state == JobState.QUEUED
    assert not list(place.store.root.glob(".staging*"))


def test_sigterm_in_a_job_gives_it_back_and_it_ends_as_if_undisturbed(place, monkeypatch):
    whole = place.do(groups(), adapter="whole", **CRASHING)
    with monkeypatch.context() as patch:
        place.at_step(patch, 2, place.heartbeat.stop)
        job = place.do(groups(), **CRASHING)
    assert (job.state, job.step) == (JobState.QUEUED, 3)
    place.worker.serve()  # it was asked to stop: takes nothing
    assert place.ledger.job(job.id).attempt == 1
    place.heartbeat.stopping = False
    job = place.do()
    assert place.weights(job) == place.weights(whole)


# --- memory ---


@pytest.mark.parametrize("point", ["train:after-backward:memory@2", "checkpoint:before-rename:memory"])
def test_a_job_whose_memory_ran_out_goes_on_from_its_checkpoint_in_smaller_passes(place, monkeypatch, point):
    """The batch has 42 tokens, its longest sample 9."""
    whole = place.do(groups(), adapter="whole", iterations=3, checkpoint_interval=1)
    budgets = []
    plain = Learner.__init__

    def init(learner, *args, micro_tokens, **options) -> None:
        budgets.append(micro_tokens)
        plain(learner, *args, micro_tokens=micro_tokens, **options)

    monkeypatch.setattr(Learner, "__init__", init)
    inject(monkeypatch, point)
    job = place.do(groups(), iterations=3, checkpoint_interval=1)
    assert (budgets, job.micro_tokens, job.attempt) == ([8192, 21], 21, 1)
    before, after = place.messages(job)[-2:]
    assert "memory ran out: injected at" in before and "at most 21 tokens in a pass" in before
    began_anew = point.startswith("checkpoint")
    assert after.startswith("begins with" if began_anew else "goes on from the checkpoint at step 1 of 3")
    one, other = (load_file(place.store.path(place.version(each)) / WEIGHTS) for each in (whole, job))
    for name, tensor in one.items():
        assert torch.allclose(tensor, other[name], atol=1e-5), name


@pytest.mark.parametrize("step", [2, 0])
def test_memory_that_runs_out_as_a_job_goes_on_costs_it_no_steps_and_no_moments(place, monkeypatch, step: int) -> None:
    """The files that were being read are whole: the checkpoint, or the moments of the version that is continued."""
    place.do(groups(), adapter="start", lora_dropout=0.0)
    begun = {"base_adapter": "start@1", "iterations": 3}
    whole = place.do(groups(), adapter="whole", **begun)
    place.submit(groups(), **begun)
    if step:
        interrupted(place, step)
    load, tries = Learner.load, []

    def runs_out(learner: Learner, directory: Path) -> None:
        tries.append(directory.name)
        if len(tries) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        load(learner, directory)

    monkeypatch.setattr(Learner, "load", runs_out)
    job = place.do()
    went_on = "goes on from the checkpoint at step 2" if step else "with its optimizer's moments"
    assert job.micro_tokens == 21 and tries[0] == tries[1] and went_on in place.messages(job)[-1]
    one, other = (load_file(place.store.path(place.version(each)) / WEIGHTS) for each in (whole, job))
    for name, tensor in one.items():
        assert torch.allclose(tensor, other[name], atol=1e-5), name


def test_a_gpu_that_is_lost_as_a_job_goes_on_leaves_its_checkpoint(place, monkeypatch) -> None:
    whole = place.do(groups(), adapter="whole", iterations=3)
    place.submit(groups(), iterations=3)
    interrupted(place, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "load", lambda learner, directory: raising(cuda_error(ILLEGAL_ADDRESS))())
        with pytest.raises(SystemExit):
            place.do()
    place.ledger.expire("worker")
    job = place.do()
    assert "goes on from the checkpoint at step 2" in place.messages(job)[-1]
    assert place.weights(job) == place.weights(whole)


def interrupted(place: Place, steps: int) -> None:
    """Have the job that waits make so many steps, be saved and wait again."""
    lease, left = place.lease(), iter(range(steps))

    def stops() -> None:
        if next(left, None) is None:
            raise Interrupted("as asked")

    with pytest.raises(Interrupted):
        run_job(lease, place.workplace, raise_if_stopped=stops)
    place.ledger.release(lease)


@pytest.mark.slow
def test_memory_that_does_not_suffice_for_one_sample_fails_the_job(place, monkeypatch):
    sizes = []

    def run_out() -> None:
        sizes.append(place.ledger.jobs()[0].micro_tokens)
        raise MemoryError

    place.at_step(monkeypatch, 0, run_out)
    job = place.do(groups())
    assert sizes == [None, 21, 10, 9] and job.error["code"] == "out_of_memory"


@ONE_SERVER
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_real_limit_of_memory(model_dir, tmp_path):
    """One pass over this job's 12,880 tokens takes about 270 MiB; it gets 100."""
    with forked("job_memory", model_dir, tmp_path / "state", "100", folder=tmp_path) as process:
        process.join(WAIT_S)
        assert process.exitcode == 0, (tmp_path / "stderr").read_text()
    found = json.loads((tmp_path / "stdout").read_text())
    assert (found["version"], found["error"], found["attempt"]) == ("math@1", None, 1)
    assert found["micro_tokens"] < 12_880
    assert any("can't allocate memory" in message for message in found["messages"])


# --- a full disk ---


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_queue, "PAUSE_S", 0.01)


def inject(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(faults, "_faults", faults.parse(text))


@pytest.mark.parametrize("point", ["checkpoint:before-rename", "publish:before-rename"])
def test_a_full_disk_gives_the_job_back_and_it_goes_on_later(place, monkeypatch, short_pauses, point):
    whole = place.do(groups(), adapter="whole", **CRASHING)
    inject(monkeypatch, f"{point}:enospc")
    job = place.do(groups(), **CRASHING)
    assert job.state == JobState.QUEUED and place.store.versions("math") == ()
    assert any("paused (storage_full)" in message for message in place.messages(job))
    done = place.do()
    assert place.weights(done) == place.weights(whole)
    assert done.attempt == 2


def test_a_disk_that_stays_full_fails_the_job(place, monkeypatch, short_pauses):
    monkeypatch.setattr(job_queue, "MAX_PAUSES", 2)
    monkeypatch.setattr(place.ledger, "max_attempts", 2)  # which pauses do not use up
    inject(monkeypatch, ",".join(f"checkpoint:before-rename:enospc@{k}" for k in (1, 2, 3)))
    job = place.do(groups())
    assert (place.do().state, job.state) == (JobState.QUEUED, JobState.QUEUED)
    job = place.do()
    assert job.state == JobState.FAILED and job.error["code"] == "storage_full"


def test_an_end_that_cannot_be_recorded_is_recorded_later(place, monkeypatch, short_pauses):
    plain, refusals = place.ledger.fail, [StorageError("no space"), StorageError("no space")]

    def fail(lease, error) -> None:
        if refusals:
            raise refusals.pop()
        plain(lease, error)

    monkeypatch.setattr(place.ledger, "fail", fail)
    assert place.do(groups(rewards=(1.0,) * 4)).state == JobState.FAILED and not refusals


# --- the heartbeat ---


@pytest.fixture
def fast_pulse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_queue, "BEAT_S", 0.01)
    monkeypatch.setattr(job_queue, "RENEW_S", 0.02)


def until(holds: Callable[[], object], *, seconds: float = WAIT_S) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def test_the_pulse_renews_the_lease_and_hears_of_its_loss(place, fast_pulse):
    place.submit(groups())
    lease = place.ledger.lease("worker", seconds=1.5)
    heartbeat = LeaseHeartbeat(place.ledger)
    heartbeat.start()
    with heartbeat.holding(lease) as held:
        time.sleep(2.0)  # longer than the lease
        assert place.ledger.lease("other") is None
        heartbeat.raise_if_stopped(held)
        place.ledger.expire("worker")
        until(lambda: held.lost)
        with pytest.raises(LeaseLostError):
            heartbeat.raise_if_stopped(held)
        again = place.ledger.lease("worker")
        with heartbeat.holding(again) as other:
            heartbeat.raise_if_stopped(other)  # the loss was the other lease's


def test_what_ends_a_job(place):
    place.submit(groups())
    lease = place.lease()
    with place.heartbeat.holding(lease) as held:
        place.heartbeat.raise_if_stopped(held)
        place.heartbeat.stop(signal.SIGTERM, None)
        with pytest.raises(Interrupted):
            place.heartbeat.raise_if_stopped(held)
        place.ledger.cancel(lease.job.id)
        with pytest.raises(JobCancelled):
            place.heartbeat.raise_if_stopped(held)


def test_a_pulse_whose_renewal_fails_goes_on(place, fast_pulse, monkeypatch):
    place.submit(groups())
    calls = []

    def renew(lease, *, seconds) -> None:
        calls.append(seconds)
        raise StorageError("no space left on device")

    monkeypatch.setattr(place.ledger, "renew", renew)
    heartbeat = LeaseHeartbeat(place.ledger)
    heartbeat.start()
    with heartbeat.holding(place.lease()) as held:
        until(lambda: len(calls) > 3)
        heartbeat.raise_if_stopped(held)


# --- SIGKILL at every point ---

POINTS = (
    *("lease:after-commit", "train:after-backward", "train:after-step", "progress:after-commit"),
    *("checkpoint:before-rename", "checkpoint:after-rename", "checkpoint:after-cleaning"),
    *("publish:before-rename", "publish:after-rename", "publish:after-moments"),
    *("publish:before-ledger", "publish:after-ledger"),
)
LATER = ("train:after-backward@4", "train:after-step@6", "checkpoint:before-rename@3", "checkpoint:after-rename@2")


@pytest.fixture(scope="module")
def crashes(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What became of the same job without a fault (""), and killed at each point and leased again."""
    root = tmp_path_factory.mktemp("crashes")
    (root / "model").symlink_to(model_dir)
    wanted = [point.replace("@", ":kill@") if "@" in point else f"{point}:kill" for point in (*POINTS, *LATER)]
    with forked("job_place", root, *wanted, folder=root) as process:
        process.join(600)
        assert process.exitcode == 0, (root / "stderr").read_text()
    lines = [json.loads(line) for line in (root / "stdout").read_text().splitlines()]
    return {line["fault"].replace(":kill", ""): line for line in lines}


@ONE_SERVER  # they share `crashes`, too, which takes ten seconds
@pytest.mark.parametrize("point", [*POINTS, *LATER])
def test_a_killed_job_ends_with_the_same_bytes_in_one_version(crashes, point):
    whole, killed = crashes[""], crashes[point]
    assert whole["ended"] == [0] and killed["ended"] == [KILLED, 0]
    same = ("state", "phase", "version", "versions", "hashes", "moments", "steps", "waiting")
    assert {key: killed[key] for key in same} == {key: whole[key] for key in same}
    assert (whole["version"], whole["versions"]) == ("math@2", ["math@1", "math@2"])
    assert whole["steps"] == [1, 2, 3, 4, 5, 6] and list(whole["moments"]) == ["math@2"]
    assert killed["left"] == [] or point == "publish:after-ledger"
    assert killed["attempt"] == (1 if point == "publish:after-ledger" else 2)


def test_the_task_is_left_as_it_was():
    """`at_step` of these tests must have undone itself, or the others would not test the real thing."""
    assert TrainingBatch.accumulate.__module__ == "groupwise.train.training_batch"
