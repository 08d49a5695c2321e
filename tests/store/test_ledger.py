"""Jobs, leases, events, keys and rollouts, one operation at a time. Crashes are in test_ledger_crash.py, attempts that
end without a word in test_ledger_attempts.py, long mixed histories in test_ledger_model.py."""

from __future__ import annotations

import math
import os
import re
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from groupwise.errors import (
    DamagedPayloadError,
    IdempotencyConflictError,
    JobNotFoundError,
    LeaseLostError,
    NotCancellableError,
    QueueFullError,
    StorageError,
)
from groupwise.recorded import RoutedExperts
from groupwise.store import ledger, ledger_attempts, ledger_schema
from groupwise.store.ledger import Job, JobState, Lease, Ledger, RolloutRecord, kept_rollouts
from wording import raises

DAY = 24 * 3600.0
ERROR = {"code": "training_failed", "message": "it diverged", "hint": "lower the learning rate"}


@dataclass
class Clock:
    """What the ledger takes for `time`: a wall clock that can be set, and a monotonic one that cannot."""

    wall: float = 1_700_000_000.0
    ticks: float = 5000.0

    def time(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.ticks

    def clock_gettime(self, clock: int) -> float:
        return self.ticks

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def pass_(self, seconds: float) -> None:
        self.wall += seconds
        self.ticks += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    for module in (ledger, ledger_attempts, ledger_schema):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def book(tmp_path, clock):
    book = Ledger(tmp_path / "ledger.db")
    yield book
    book.close()


def submit(book: Ledger, **options) -> Job:
    defaults = {"kind": "grpo", "adapter": "math", "config": {"lr": 1e-5}, "summary": {"groups": 2}, "payload": b"{}"}
    return book.submit(**{**defaults, "steps": 4, "auto_load": True, **options})[0]


def take(book: Ledger, worker: str = "w", **options) -> Lease:
    lease = book.lease(worker, **options)
    assert lease is not None
    return lease


def publish(book: Ledger, **options) -> Job:
    submit(book, **options)
    lease = take(book)
    book.published(lease, "math@1")
    return book.job(lease.job.id)


def states_told(book: Ledger, id: str) -> list[str]:
    return [event.data.get("phase", event.data["state"]) for event in book.events(id) if event.kind == "state"]


def content(path: Path) -> list[str]:
    with sqlite3.connect(path) as connection:
        lines = list(connection.iterdump())
    connection.close()
    return lines


# --- submitting ---


def test_a_job_is_as_it_was_submitted_also_after_reopening(book, clock, tmp_path):
    payload = os.urandom(100_000)
    job, is_new = book.submit(
        kind="sft",
        adapter="prosa",
        config={"learning_rate": 1e-4, "text": 'ß " \ud800'},
        summary={"examples": 3, "warnings": ["w"]},
        payload=payload,
        steps=7,
        auto_load=False,
    )
    assert is_new
    assert job == Job(
        id=job.id,
        kind="sft",
        adapter="prosa",
        state=JobState.QUEUED,
        phase="waiting",
        config={"learning_rate": 1e-4, "text": 'ß " \ud800'},
        summary={"examples": 3, "warnings": ["w"]},
        auto_load=False,
        cancel_requested=False,
        attempt=0,
        step=0,
        steps=7,
        metrics={},
        version=None,
        error=None,
        created_at=clock.wall,
        started_at=None,
        finished_at=None,
        position=1,
    )
    assert job.progress == 0.0
    book.close()
    again = Ledger(tmp_path / "ledger.db")
    assert again.job(job.id) == job
    assert again.payload(job.id) == payload
    assert states_told(again, job.id) == ["waiting"]
    assert (tmp_path / "spool" / f"{job.id}.payload").stat().st_mode & 0o077 == 0  # other people's prompts
    again.close()


def test_an_unknown_job(book):
    for ask in (book.job, book.payload, book.events, book.metrics, book.cancel, book.complete):
        with raises(JobNotFoundError):
            ask("../../etc/passwd")


def test_a_payload_that_somebody_removed_is_named(book, tmp_path):
    job = submit(book)
    (tmp_path / "spool" / f"{job.id}.payload").unlink()
    with raises(DamagedPayloadError):
        book.payload(job.id)


def test_the_queue_is_in_order_and_has_an_end(book):
    ids = [submit(book).id for _ in range(3)]
    assert [book.job(id).position for id in ids] == [1, 2, 3]
    assert [job.id for job in book.jobs()] == ids[::-1]
    with raises(QueueFullError) as caught:
        submit(book, max_queued=3)
    assert caught.value.retry_after > 0 and caught.value.status == 429
    assert take(book).job.id == ids[0]
    assert [book.job(id).position for id in ids] == [None, 1, 2]
    assert submit(book, max_queued=3).position == 3
    assert len(list((book.path.parent / "spool").iterdir())) == 4


def test_jobs_by_state_and_limit(book):
    done = publish(book, auto_load=False)
    running, waiting = submit(book), submit(book)
    take(book)
    assert [job.id for job in book.jobs(states=[JobState.QUEUED])] == [waiting.id]
    assert [job.id for job in book.jobs(states={JobState.RUNNING, JobState.COMPLETED})] == [running.id, done.id]
    assert book.jobs(states=[]) == []
    assert [job.id for job in book.jobs(limit=1)] == [waiting.id]
    assert [job.id for job in book.jobs(before=waiting.id)] == [running.id, done.id]
    assert [job.id for job in book.jobs(before=waiting.id, limit=1)] == [running.id]
    assert book.jobs(states=[JobState.QUEUED], before=waiting.id) == book.jobs(before=done.id) == []
    with pytest.raises(JobNotFoundError):
        book.jobs(before="0" * 32)


def test_what_has_ended_is_listed_in_the_order_in_which_it_did(book, clock):
    first, second, third, _ = (submit(book) for _ in range(4))
    lease = take(book)
    for end in (lambda: book.cancel(third.id), lambda: book.fail(lease, ERROR), lambda: book.cancel(second.id)):
        clock.pass_(1)
        end()
    assert book.ended() == [third.id, first.id, second.id]


def test_a_key_finds_its_job_for_a_day(book, clock):
    assert book.by_key("k", "a") is None
    job = submit(book, idempotency_key="k", fingerprint="a")
    assert book.by_key("k", "a") == job and book.by_key("other", "a") is None
    with raises(IdempotencyConflictError) as refused:
        book.by_key("k", "b")
    assert job.id in str(refused.value)
    clock.pass_(DAY + 1)
    assert book.by_key("k", "a") is book.by_key("k", "b") is None


def test_an_idempotency_key_gives_one_job_for_a_day(book, clock):
    body = {"idempotency_key": "k", "fingerprint": "a"}
    first, again = submit(book, **body), submit(book, **body, payload=b"other", max_queued=1)
    assert first == again
    assert book.payload(first.id) == b"{}" and len(list((book.path.parent / "spool").iterdir())) == 1
    with raises(IdempotencyConflictError) as refused:
        submit(book, idempotency_key="k", fingerprint="b")
    assert first.id in str(refused.value)
    assert submit(book).id != submit(book).id  # without a key nothing is the same
    clock.pass_(DAY - 1)
    assert submit(book, **body).id == first.id
    clock.pass_(2)
    later = submit(book, idempotency_key="k", fingerprint="b")
    assert later.id != first.id
    assert submit(book, idempotency_key="k", fingerprint="b").id == later.id


# --- running ---


def test_the_course_of_a_job(book, clock):
    job = submit(book, steps=2)
    take(book, "w0"), book.expire("w0")
    clock.pass_(5)
    lease = take(book, "w1")
    started = book.job(job.id)
    assert (started.state, started.phase, started.attempt) == (JobState.RUNNING, "loading", 2)
    assert lease == Lease(started, "w1", 2)
    assert started.started_at == clock.wall - 5  # of the first attempt
    assert book.lease("w2") is None
    book.progress(lease, phase="training", step=1, metrics={"loss": 0.5, "kl": 0.0})
    half = book.job(job.id)
    assert (half.phase, half.step, half.progress, half.metrics) == ("training", 1, 0.5, {"loss": 0.5, "kl": 0.0})
    book.progress(lease, phase="training", step=2, metrics={"loss": 0.25}, message="a checkpoint")
    book.progress(lease, phase="publishing")
    clock.pass_(5)
    book.published(lease, "math@3")
    swapping = book.job(job.id)
    assert (swapping.state, swapping.phase, swapping.version) == (JobState.RUNNING, "swapping", "math@3")
    assert (swapping.finished_at, swapping.step) == (None, 2)
    assert [job.id for job in book.published_jobs()] == [job.id]
    assert book.lease("w2") is None and book.expire("w1") == []
    done = book.complete(job.id, message="math@3 is active")
    assert (done.state, done.phase, done.progress, done.error) == (JobState.COMPLETED, "done", 1.0, None)
    assert done.finished_at == clock.wall
    assert book.published_jobs() == []
    told = ["waiting", "loading", "waiting", "loading", "training", "publishing", "swapping", "completed"]
    assert states_told(book, job.id) == told
    assert book.events(job.id)[-1].message == "math@3 is active"


def test_without_auto_load_a_published_job_is_completed(book):
    job = publish(book, auto_load=False)
    assert (job.state, job.phase, job.version) == (JobState.COMPLETED, "done", "math@1")
    assert book.published_jobs() == []
    assert book.complete(job.id) == job


def test_a_refused_swap_fails_in_that_phase_and_keeps_the_version(book):
    job = publish(book)
    failed = book.refuse_swap(job.id, {"code": "swap_refused", "message": "the canary differs", "hint": None})
    assert (failed.state, failed.phase, failed.version) == (JobState.FAILED, "swapping", "math@1")
    assert failed.error == {"code": "swap_refused", "message": "the canary differs", "hint": None}
    assert book.refuse_swap(job.id, {"code": "again", "message": "again"}) == failed  # after a crash in between
    with raises(ValueError):
        book.complete(job.id)


def test_completing_again_is_harmless_and_too_early_is_a_bug(book):
    job = submit(book)
    for end in (book.complete, lambda id: book.refuse_swap(id, ERROR)):
        with raises(ValueError):
            end(job.id)
    lease = take(book)
    with pytest.raises(ValueError):
        book.complete(job.id)
    book.published(lease, "math@1")
    done = book.complete(job.id)
    events = book.events(job.id)
    assert book.complete(job.id) == done and book.events(job.id) == events


def test_a_failure_is_final_and_keeps_its_phase(book):
    submit(book)
    lease = take(book)
    book.progress(lease, phase="training", step=1)
    book.fail(lease, ERROR)
    job = book.job(lease.job.id)
    assert (job.state, job.phase, job.error, job.progress) == (JobState.FAILED, "training", ERROR, 0.25)
    last = book.events(job.id)[-1]
    assert (last.level, last.message, last.data) == ("error", "it diverged", {"state": "failed", "error": ERROR})
    assert book.lease("w") is None


@pytest.mark.parametrize("phase", ["swapping", "done", "waiting", "Training", ""])
def test_a_worker_reports_its_own_phases_only(book, phase):
    submit(book)
    with raises(ValueError):
        book.progress(take(book), phase=phase)


def test_metrics_are_by_step_without_what_is_not_finite(book, clock):
    job = submit(book)
    assert book.metrics(job.id) == []
    lease = take(book)
    for step, loss in ((1, 1.0), (2, math.nan), (3, 3.0)):
        book.progress(lease, phase="training", step=step, metrics={"loss": loss, "kl": 0.5, "norm": math.inf})
    assert book.job(job.id).metrics == {"loss": 3.0, "kl": 0.5}
    book.expire("w")
    lease = take(book)
    clock.pass_(9)
    book.progress(lease, phase="training", step=2, metrics={"loss": 2.0})  # from the checkpoint of step 1
    assert book.metrics(job.id) == [
        {"step": 1, "time": clock.wall - 9, "loss": 1.0, "kl": 0.5, "non_finite": ["norm"]},
        {"step": 2, "time": clock.wall, "loss": 2.0},
        {"step": 3, "time": clock.wall - 9, "loss": 3.0, "kl": 0.5, "non_finite": ["norm"]},
    ]


def test_events_can_be_followed(book):
    one, other = submit(book), submit(book)
    lease = take(book)
    for step in (1, 2, 3):
        book.progress(lease, phase="training", step=step, metrics={"loss": 1.0}, message=f"m{step}")
    events = book.events(one.id)
    assert [event.seq for event in events] == sorted({event.seq for event in events})
    assert {event.job_id for event in events} == {one.id}
    assert [event.message for event in events if event.kind == "message"] == ["m1", "m2", "m3"]
    followed, after = [], 0
    while part := book.events(one.id, after=after, limit=2):
        followed, after = followed + part, part[-1].seq
    assert followed == events
    assert not {event.seq for event in events} & {event.seq for event in book.events(other.id)}


# --- losing and giving back ---

WRITES = {
    "renew": lambda book, lease: book.renew(lease),
    "check": lambda book, lease: book.check(lease),
    "progress": lambda book, lease: book.progress(lease, phase="training", step=3, metrics={"loss": 1.0}, message="m"),
    "published": lambda book, lease: book.published(lease, "math@9"),
    "settled": lambda book, lease: book.settled(lease, {"lora_rank": 16}),
    "fail": lambda book, lease: book.fail(lease, ERROR),
    "cancelled": lambda book, lease: book.cancelled(lease),
    "release": lambda book, lease: book.release(lease),
}
LOSSES = {
    "another worker": lambda book, lease, clock: (clock.pass_(31), take(book, "other")),
    "the same worker, later": lambda book, lease, clock: (book.expire("w"), take(book, "w")),
    "released, taken again": lambda book, lease, clock: (book.release(lease), take(book, "w")),
    "waiting again": lambda book, lease, clock: book.expire("w"),
    "published": lambda book, lease, clock: book.published(lease, "math@1"),
    "completed": lambda book, lease, clock: (book.published(lease, "math@1"), book.complete(lease.job.id)),
    "failed": lambda book, lease, clock: book.fail(lease, ERROR),
    "cancelled": lambda book, lease, clock: (clock.pass_(31), book.cancel(lease.job.id)),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("loss", LOSSES)
def test_who_lost_the_lease_changes_nothing(book, clock, write, loss):
    submit(book)
    lease = take(book)
    LOSSES[loss](book, lease, clock)
    before = content(book.path)
    with raises(LeaseLostError):
        WRITES[write](book, lease)
    assert content(book.path) == before


def test_a_lease_is_of_one_worker_and_one_attempt(book):
    submit(book)
    lease = take(book)
    book.check(lease)
    for other in (replace(lease, worker="x"), replace(lease, attempt=2), replace(lease, attempt=0)):
        with pytest.raises(LeaseLostError):
            book.check(other)


def test_a_lease_of_a_forgotten_job_is_lost(book, clock):
    submit(book)
    lease = take(book)
    book.fail(lease, ERROR)
    clock.pass_(8 * DAY)
    book.prune()
    with raises(LeaseLostError):
        book.renew(lease)


def test_a_lease_holds_as_long_as_it_is_renewed(book, clock):
    submit(book)
    lease = take(book, seconds=30)
    for _ in range(5):
        clock.pass_(29)
        assert book.renew(lease, seconds=30) is False
        assert book.lease("other") is None
    clock.pass_(30.5)
    assert book.renew(lease, seconds=30) is False  # late, but nobody has taken the job
    clock.pass_(30.5)
    assert take(book, "other").attempt == 2


@pytest.mark.parametrize("jump", [-400 * DAY, -3600, 3600, 400 * DAY])
def test_setting_the_wall_clock_takes_no_lease_away_and_keeps_none_alive(book, clock, jump):
    submit(book)
    lease = take(book)
    clock.wall += jump
    clock.ticks += 29
    assert book.lease("thief") is None
    book.check(lease)
    clock.ticks += 2
    assert take(book, "heir").attempt == 2


@pytest.mark.parametrize("ticks", [0.5, 4000.0])
def test_a_reboot_ends_every_lease(book, clock, ticks):
    submit(book)
    take(book)
    clock.ticks = ticks  # the monotonic clock began anew
    assert take(book, "heir").attempt == 2


def test_expire_takes_back_only_that_workers_jobs(book):
    one, two = submit(book), submit(book, adapter="sql")
    take(book, "w1"), take(book, "w2")
    waiting = submit(book)
    assert book.expire("w1") == [one.id]
    assert [book.job(job.id).state for job in (one, two)] == [JobState.QUEUED, JobState.RUNNING]
    assert [book.job(job.id).position for job in (one, waiting)] == [1, 2]  # first in, first again
    assert book.events(one.id)[-1].level == "warning"
    assert book.expire("w1") == book.expire("stranger") == []


def test_a_job_that_kills_its_workers_fails_and_the_queue_moves_on(tmp_path, clock):
    book = Ledger(tmp_path / "ledger.db", max_attempts=2)
    poison, next_one = submit(book), submit(book)
    for attempt in (1, 2):
        lease = take(book, f"w{attempt}")
        assert (lease.job.id, lease.attempt) == (poison.id, attempt)
        book.progress(lease, phase="training", step=1)
        clock.pass_(31)
    assert take(book).job.id == next_one.id
    job = book.job(poison.id)
    assert (job.state, job.phase, job.finished_at) == (JobState.FAILED, "training", clock.wall)
    assert job.error and job.error["code"] == "crashed_repeatedly"
    assert job.error["message"] == "2 attempts crashed; the last in phase 'training' at step 1"
    book.close()


def test_overdue_names_the_jobs_whose_lease_a_worker_let_expire(book, clock):
    one, two = submit(book), submit(book, adapter="sql")
    lease = take(book, "w1", seconds=30)
    take(book, "w2", seconds=100)
    clock.pass_(29)
    assert book.overdue("w1") == []
    clock.pass_(2)
    assert book.overdue("w1") == [one.id] and book.overdue("w2") == book.overdue("stranger") == []
    assert book.job(one.id).state is JobState.RUNNING  # it only looks
    book.renew(lease, seconds=30)
    assert book.overdue("w1") == []
    book.published(lease, "math@1")
    clock.pass_(100)
    assert book.overdue("w1") == [] and book.overdue("w2") == [two.id]  # a published job has no lease


# --- cancelling ---


def test_a_waiting_job_is_cancelled_at_once(book, clock):
    job = submit(book)
    cancelled = book.cancel(job.id)
    assert (cancelled.state, cancelled.phase, cancelled.finished_at) == (JobState.CANCELLED, "done", clock.wall)
    assert cancelled.position is None and book.lease("w") is None


def test_a_running_job_is_asked_to_stop(book):
    submit(book)
    lease = take(book)
    asked = book.cancel(lease.job.id)
    assert (asked.state, asked.cancel_requested) == (JobState.RUNNING, True)
    assert book.cancel(lease.job.id) == asked
    assert book.renew(lease) is True
    book.cancelled(lease)
    assert book.job(lease.job.id).state is JobState.CANCELLED


@pytest.mark.parametrize("end", ["release", "expire", "time"])
def test_a_job_that_was_to_be_cancelled_does_not_run_again(book, clock, end):
    submit(book)
    lease = take(book)
    book.cancel(lease.job.id)
    if end == "release":
        book.release(lease)
    elif end == "expire":
        book.expire("w")
    clock.pass_(31)
    assert book.lease("w") is None
    assert book.job(lease.job.id).state is JobState.CANCELLED


def test_a_job_without_a_living_worker_is_cancelled_at_once(book, clock):
    submit(book)
    lease = take(book)
    clock.pass_(31)
    assert book.cancel(lease.job.id).state is JobState.CANCELLED


def test_cancelling_too_late(book):
    submit(book)
    lease = take(book)
    book.cancel(lease.job.id)
    book.published(lease, "math@1")
    job = book.job(lease.job.id)
    assert not job.cancel_requested
    assert book.events(job.id)[-1].message == "published math@1; the request to cancel came too late"
    with raises(NotCancellableError):
        book.cancel(job.id)
    book.complete(job.id)
    with raises(NotCancellableError) as caught:
        book.cancel(job.id)
    assert caught.value.status == 409
    twice = submit(book)
    book.cancel(twice.id)
    with raises(NotCancellableError):
        book.cancel(twice.id)


# --- rollouts ---


def rollout(id: str, *, text: str = "4") -> RolloutRecord:
    return RolloutRecord(id, (1, 2, 151_000), (7, 2), (-0.1, -1 / 3), "math@3", 0.7, "stop", text)


def test_rollouts_come_back_exactly(book):
    records = [rollout(f"r{i}", text="\u00e9\U0001f600" * i) for i in range(2500)]
    book.save_rollouts(records)
    book.save_rollouts([RolloutRecord("empty", (), (), (), "base", 0.0, "length", "", ("top_p", "min_p"))])
    found = book.rollouts([*(record.id for record in records), "unknown", "empty"])
    assert [found[record.id] for record in records] == records
    assert found["empty"].reshaped == ("top_p", "min_p") and found["r1"].reshaped == ()
    assert found["empty"].completion_ids == () and "unknown" not in found and len(found) == 2501
    book.save_rollouts([rollout("r0", text="again")])
    assert book.rollouts(["r0"])["r0"].text == "again"
    assert book.rollouts([]) == {}


def test_old_rollouts_are_forgotten_and_so_are_too_many(book, clock, monkeypatch):
    monkeypatch.setattr(ledger_schema, "KEEP_ROLLOUTS", 5)
    monkeypatch.setattr(ledger_schema, "FORGET_ROWS", 3)
    monkeypatch.setattr(ledger, "FORGET_ROWS", 3)
    names = [f"r{i}" for i in range(12)]
    book.save_rollouts([rollout(name) for name in names])
    assert book.rollouts(names).keys() == {*names[3:]}  # a little at a time, so that nobody waits
    book.prune()
    assert book.rollouts(names).keys() == {*names[-5:]}
    clock.pass_(6 * DAY)
    book.save_rollouts([rollout("new")])
    clock.pass_(2 * DAY)
    book.prune()
    assert list(book.rollouts([*names, "new"])) == ["new"]


# --- pruning ---


def test_rollouts_are_kept_up_to_so_many_bytes(tmp_path, clock):
    """Ten thousand long ones fill a disk; a million short ones need not."""
    book = Ledger(tmp_path / "other.db", rollout_bytes=6_000)
    long = replace(rollout("long"), completion_ids=tuple(range(500)), logprobs=(-1.0,) * 500)  # 6,000 bytes and more
    book.save_rollouts([rollout("first"), long])
    assert book.rollouts(["first", "long"]).keys() == {"long"}
    book.save_rollouts([replace(long, id="longer")])
    assert book.rollouts(["first", "long", "longer"]).keys() == {"longer"}
    routed = RoutedExperts((501, 3, 2), bytes(3_006))
    shorter = replace(long, completion_ids=(1,), logprobs=(-1.0,), routed_experts=routed)  # 3,000 bytes and more
    book.save_rollouts([replace(shorter, id=f"routed-{i}") for i in range(3)])
    found = book.rollouts(["longer", *(f"routed-{i}" for i in range(3))])
    assert found.keys() == {"routed-1", "routed-2"} and found["routed-2"].routed_experts == routed
    book.save_rollouts([rollout(f"short-{i}") for i in range(20)])
    assert len(book.rollouts([f"short-{i}" for i in range(20)])) == 20
    book.prune()
    assert len(book.rollouts([f"short-{i}" for i in range(20)])) == 20
    book.close()


def test_what_is_finished_is_forgotten_by_age_and_by_number(book, clock, tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "KEEP_JOBS", 3)
    finished = []
    for _ in range(5):
        job = publish(book, auto_load=False)
        (tmp_path / "checkpoints" / job.id).mkdir(parents=True)
        (tmp_path / "checkpoints" / job.id / "state").write_text("x")
        finished.append(job.id)
    running, waiting, swapping = submit(book), submit(book), submit(book, adapter="sql")
    take(book, seconds=100 * DAY)
    book.cancel(waiting.id)
    book.published(take(book), "math@7")
    waiting = submit(book)
    book.prune()
    assert {job.id for job in book.jobs()} == {*finished[-2:], running.id, waiting.id, swapping.id} | {
        job.id for job in book.jobs(states=[JobState.CANCELLED])
    }
    assert len(book.jobs(states=[JobState.CANCELLED])) == 1
    assert list((tmp_path / "checkpoints").iterdir()) == []  # nobody will go on from these
    clock.pass_(8 * DAY)
    book.prune()
    alive = {running.id, waiting.id, swapping.id}
    assert {job.id for job in book.jobs()} == alive
    assert {path.stem for path in (tmp_path / "spool").iterdir()} == alive
    with pytest.raises(JobNotFoundError):
        book.events(finished[-1])
    tables = content(book.path)
    assert not [line for line in tables if line.startswith('INSERT INTO "event"') and "completed" in line]


def test_a_clock_that_is_set_ahead_makes_nothing_old(book, clock):
    job = publish(book, auto_load=False, idempotency_key="k", fingerprint="a")
    book.save_rollouts([rollout("r")])
    clock.wall += 40 * DAY
    book.prune()
    assert submit(book, idempotency_key="k", fingerprint="a").id == job.id
    assert book.rollouts(["r"]) and book.job(job.id).state is JobState.COMPLETED
    clock.pass_(8 * DAY)
    book.prune()
    assert book.jobs() == [] and not book.rollouts(["r"])


def test_a_job_stays_while_its_key_counts(book, clock, monkeypatch):
    monkeypatch.setattr(ledger, "KEEP_JOBS", 0)
    job = publish(book, auto_load=False, idempotency_key="k", fingerprint="a")
    book.prune()
    assert submit(book, idempotency_key="k", fingerprint="a").id == job.id
    clock.pass_(DAY + 1)
    book.prune()
    assert book.jobs() == []


def test_pruning_removes_what_crashes_left_and_nothing_else(book, clock, tmp_path):
    job = submit(book)
    spool, checkpoints = tmp_path / "spool", tmp_path / "checkpoints"
    checkpoints.mkdir()
    orphan, old, young = spool / f"{'a' * 32}.payload", spool / ".b.tmp", spool / ".c.tmp"
    for path in (orphan, old, young, spool / "README", checkpoints / "notes"):
        path.write_text("x")
    (checkpoints / ("d" * 32)).mkdir()
    os.utime(old, (clock.wall - 4000, clock.wall - 4000))
    os.utime(young, (clock.wall - 10, clock.wall - 10))
    book.prune()
    assert {path.name for path in spool.iterdir()} == {f"{job.id}.payload", ".c.tmp", "README"}
    assert {path.name for path in checkpoints.iterdir()} == {"notes"}


def test_a_server_that_starts_removes_all_that_was_left(book, clock, tmp_path):
    finished = publish(book, auto_load=False)
    swapping, waiting = publish(book), submit(book)
    checkpoints = [tmp_path / "checkpoints" / job.id for job in (finished, swapping, waiting)]
    for path in (*checkpoints, tmp_path / "checkpoints" / ("d" * 32)):
        path.mkdir(parents=True)
    spooled = {path.name for path in (tmp_path / "spool").iterdir()}
    young = tmp_path / "spool" / ".c.tmp"  # a submission that was cut off just now
    young.write_text("x")
    os.utime(young, (clock.wall - 1, clock.wall - 1))
    book.recover()
    assert {path.name for path in (tmp_path / "spool").iterdir()} == spooled
    assert {*(tmp_path / "checkpoints").iterdir()} == {*checkpoints[1:]}
    assert len(book.jobs()) == 3


# --- threads, processes, imports ---


def test_threads_share_a_ledger(book):
    def client(number: int) -> str:
        return submit(book, max_queued=1000, idempotency_key=str(number // 2), fingerprint="f").id

    def worker(number: int) -> list[str]:
        done = []
        while lease := book.lease(f"w{number}"):
            book.progress(lease, phase="training", step=4, metrics={"loss": 0.0})
            book.published(lease, f"math@{number}")
            done.append(lease.job.id)
        return done

    with ThreadPoolExecutor(8) as pool:
        ids = set(pool.map(client, range(40)))
        assert len(ids) == 20
        leased = [id for done in pool.map(worker, range(8)) for id in done]
    assert sorted(leased) == sorted(ids)
    assert {job.id for job in book.published_jobs()} == ids


def test_the_ledger_imports_next_to_nothing():
    heavy = {"torch", "numpy", "pydantic", "groupwise.store.adapters"}
    code = f"import sys, groupwise.store.ledger; print({heavy} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.stdout.strip() == "set()", ran.stderr


def test_ids_are_names_of_files(book):
    assert re.fullmatch("[0-9a-f]{32}", submit(book).id)


def test_the_ledger_is_for_its_owners_eyes(tmp_path: Path):
    """It holds prompts and completions; one of an earlier version was readable by everybody."""
    path = tmp_path / "ledger.db"
    before = os.umask(0o022)
    try:
        for _ in range(2):
            ledger = Ledger(path)
            ledger.jobs()
            modes = {each.name: each.stat().st_mode & 0o777 for each in tmp_path.iterdir()}
            assert modes.pop("spool") == 0o700 and modes["ledger.db"] == 0o600 and set(modes.values()) == {0o600}
            ledger.close()
            path.chmod(0o644)
    finally:
        os.umask(before)


def test_rollouts_are_read_without_a_ledger_of_ones_own(tmp_path: Path):
    ledger = Ledger(tmp_path / "ledger.db")
    record = RolloutRecord("rollout-1", (1, 2), (3,), (-0.5,), "base@0", 1.0, "stop", "x")
    ledger.save_rollouts([record])
    assert kept_rollouts(tmp_path / "ledger.db", None, ["rollout-1", "rollout-2"]) == {"rollout-1": record}
    ledger.close()
    with pytest.raises(StorageError):
        kept_rollouts(tmp_path / "nothing.db", None, ["rollout-1"])
    assert not (tmp_path / "nothing.db").exists()
