"""Any order of operations, by hypothesis, against a model of the ledger that is a list of dictionaries.

Two connections are used in turn, as server and worker would; either may be closed and opened again at any time. The
model knows neither SQL nor leases on disk: it says what each operation must answer, and after each step both
connections must show its jobs.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_ledger import DAY, ERROR, Clock

from groupwise.errors import IdempotencyConflictError, LeaseLostError, NotCancellableError, QueueFullError
from groupwise.store import ledger, ledger_attempts, ledger_schema
from groupwise.store.ledger import JobState, Lease, Ledger
from groupwise.store.ledger_attempts import MAX_SERVER_DEATHS, Cause

MAX_ATTEMPTS, MAX_QUEUED, KEEP_JOBS = 3, 4, 3
WORKERS = st.sampled_from(["a", "b"])
PICK = st.integers(min_value=0, max_value=1_000)
FINAL = ("completed", "failed", "cancelled")
DOINGS = ("renew", "check", "progress", "published", "fail", "cancelled", "release", "orphaned", "measured", "shrink")
DOINGS += ("put_aside",)


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.clock, self.set_by = Clock(), [0.0, 0.0]  # since each of the two was opened
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        for module in (ledger, ledger_attempts, ledger_schema):
            patch.setattr(module, "time", self.clock)
        patch.setattr(ledger, "KEEP_JOBS", KEEP_JOBS)
        self.path = Path(self.stack.enter_context(tempfile.TemporaryDirectory())) / "ledger.db"
        self.books = [self.open(), self.open()]
        self.turn = 0
        self.jobs: list[dict[str, Any]] = []  # the model
        self.leases: list[tuple[Lease, dict[str, Any]]] = []

    def open(self) -> Ledger:
        return Ledger(self.path, max_attempts=MAX_ATTEMPTS)

    @property
    def book(self) -> Ledger:
        self.turn += 1
        return self.books[self.turn % 2]

    def teardown(self) -> None:
        for book in self.books:
            book.close()
        self.stack.close()

    # --- the model ---

    def now(self) -> float:
        """For how old things are, to the one that is used next: a clock that was set ahead makes nothing old."""
        return min(self.clock.wall, self.clock.wall - self.set_by[(self.turn + 1) % 2])

    def where(self, *states: str) -> list[dict[str, Any]]:
        return [job for job in self.jobs if job["state"] in states]

    def end(self, job: dict[str, Any], state: str) -> None:
        job.update(state=state, worker=None, finished=self.clock.wall)

    def free(self, job: dict[str, Any]) -> bool:
        """No job of its adapter is before it."""
        before = self.jobs[: self.jobs.index(job)]
        return not any(each["adapter"] == job["adapter"] and each["state"] in ("queued", "training") for each in before)

    def take_back(self, job: dict[str, Any], cause: Cause = Cause.CRASH, *, beside: bool = False) -> None:
        if job["cancel"]:
            self.end(job, "cancelled")
        elif cause is Cause.STOP:
            job.update(state="queued", worker=None)
        elif cause is Cause.SERVER:
            deaths = 1 if job["step"] > job["died_at"] else job["deaths"] + 1
            job.update(deaths=deaths, died_at=max(job["step"], job["died_at"]), state="queued", worker=None)
            if deaths >= MAX_SERVER_DEATHS and beside:
                job.update(deaths=0, alone=True)
            elif deaths >= MAX_SERVER_DEATHS:
                self.end(job, "failed")
        elif beside:
            job.update(state="queued", worker=None, alone=True)
        elif cause is Cause.MEMORY and job["pass"] > job["longest"]:
            job.update({"state": "queued", "worker": None, "pass": max(job["longest"], job["pass"] // 2)})
        elif job["crashes"] + 1 >= MAX_ATTEMPTS:
            self.end(job, "failed")
        else:
            job.update(state="queued", worker=None, crashes=job["crashes"] + 1)

    def holds(self, lease: Lease, job: dict[str, Any]) -> bool:
        return (job["state"], job["worker"], job["attempt"]) == ("training", lease.worker, lease.attempt)

    # --- the client ---

    @rule(
        key=st.sampled_from([None, None, "x", "y"]),
        body=st.sampled_from("AB"),
        auto_load=st.booleans(),
        adapter=st.sampled_from("abc"),
    )
    def submit(self, key: str | None, body: str, auto_load: bool, adapter: str) -> None:
        known = [j for j in self.jobs if key is not None and j["key"] == key and j["keyed"] >= self.now() - DAY]
        options: dict[str, Any] = {"kind": "sft", "adapter": adapter, "config": {}, "summary": {}, "steps": 3}
        options |= {"payload": body.encode(), "auto_load": auto_load, "max_queued": MAX_QUEUED}
        try:
            job, is_new = self.book.submit(**options, idempotency_key=key, fingerprint=body)
        except IdempotencyConflictError:
            assert known and known[-1]["body"] != body
        except QueueFullError:
            assert not known and len(self.where("queued")) >= MAX_QUEUED  # more: some came back
        else:
            assert is_new == (not known)
            if known:
                assert job.id == known[-1]["id"] and known[-1]["body"] == body
                return
            assert len(self.where("queued")) < MAX_QUEUED
            for other in self.jobs:
                other["key"] = None if other["key"] == key else other["key"]
            entry = {"id": job.id, "body": body, "key": key, "keyed": self.clock.wall, "auto_load": auto_load}
            entry |= {"state": "queued", "worker": None, "until": 0.0, "attempt": 0, "crashes": 0, "cancel": False}
            entry |= {"adapter": adapter, "alone": False}
            entry |= {"deaths": 0, "died_at": -1, "pass": 0, "longest": 0, "swaps": 0}
            self.jobs.append(entry | {"step": 0, "version": None, "finished": None})

    @precondition(lambda self: self.jobs)
    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        job = self.jobs[pick % len(self.jobs)]
        if job["state"] in ("swapping", *FINAL):
            with pytest.raises(NotCancellableError):
                self.book.cancel(job["id"])
            return
        self.book.cancel(job["id"])
        job["cancel"] = True
        if job["state"] == "queued" or self.clock.ticks >= job["until"]:
            self.end(job, "cancelled")

    # --- the worker ---

    @rule(worker=WORKERS, seconds=st.sampled_from([5, 30]))
    def lease(self, worker: str, seconds: int) -> None:
        dead = [job for job in self.where("training") if self.clock.ticks >= job["until"]]
        for job in dead:
            self.take_back(job, beside=len(dead) > 1)
        lease = self.book.lease(worker, seconds=seconds)
        waiting = [job for job in self.where("queued") if self.free(job)]
        assert (lease is None) == (not waiting)
        if lease is not None:
            job = next(each for each in waiting if each["id"] == lease.job.id)  # whose turn it is: test_ledger_turns
            job.update(state="training", worker=worker, until=self.clock.ticks + seconds, attempt=job["attempt"] + 1)
            assert (lease.job.id, lease.worker, lease.attempt) == (job["id"], worker, job["attempt"])
            self.leases.append((lease, job))

    @precondition(lambda self: self.leases)
    @rule(pick=PICK, do=st.sampled_from(DOINGS))
    def work(self, pick: int, do: str) -> None:
        lease, job = self.leases[-1 - pick % min(len(self.leases), 4)]  # the last ones, most of which still hold
        held = self.holds(lease, job)
        step, version = job["step"] + 1, f"a@{self.turn}"
        book = self.book
        calls = {
            "renew": lambda: book.renew(lease, seconds=20),
            "check": lambda: book.check(lease),
            "progress": lambda: book.progress(lease, phase="training", step=step, metrics={"loss": step}),
            "published": lambda: book.published(lease, version),
            "fail": lambda: book.fail(lease, ERROR),
            "cancelled": lambda: book.cancelled(lease),
            "release": lambda: book.release(lease),
            "orphaned": lambda: book.release(lease, orphaned=True),
            "measured": lambda: book.measured(lease, largest=9, longest=4),
            "shrink": lambda: book.shrink(lease, "memory ran out"),
            "put_aside": lambda: book.put_aside(lease, "memory ran out"),
        }
        if not held:
            with pytest.raises(LeaseLostError):
                calls[do]()
            return
        answer = calls[do]()
        if do == "renew":
            assert answer is job["cancel"]
            job["until"] = self.clock.ticks + 20
        elif do == "progress":
            job["step"] = step
        elif do == "published":
            job.update(version=version, state="swapping", worker=None, cancel=False)
            if not job["auto_load"]:
                self.end(job, "completed")
        elif do in ("fail", "cancelled"):
            self.end(job, "failed" if do == "fail" else "cancelled")
        elif do in ("release", "put_aside"):
            job.update(state="queued", worker=None, alone=job["alone"] or do == "put_aside")
            if job["cancel"]:
                self.end(job, "cancelled")
        elif do == "orphaned":
            self.take_back(job, Cause.SERVER)
        elif do == "measured":
            job.update({"pass": 9, "longest": 4})
        elif do == "shrink":
            assert (answer is None) == (job["pass"] <= job["longest"])
            job["pass"] = max(job["longest"], job["pass"] // 2)
            assert answer is None or answer.micro_tokens == job["pass"]

    # --- the supervisor ---

    @rule(worker=WORKERS, cause=st.sampled_from(Cause))
    def expire(self, worker: str, cause: Cause) -> None:
        dead = [job for job in self.where("training") if job["worker"] == worker]
        assert self.book.expire(worker, cause=cause) == [job["id"] for job in dead]
        for job in dead:
            self.take_back(job, cause, beside=len(dead) > 1)

    @precondition(lambda self: self.jobs)
    @rule(pick=PICK, dies=st.booleans())
    def begin_swap(self, pick: int, dies: bool) -> None:
        candidates = self.where("swapping") or self.jobs
        job = candidates[pick % len(candidates)]
        may = job["state"] == "swapping" and job["swaps"] < MAX_SERVER_DEATHS
        assert self.book.begin_swap(job["id"]) is may
        if may and dies:
            job["swaps"] += 1
        elif may:
            self.book.put_off_swap(job["id"])
        elif job["state"] == "swapping":
            self.end(job, "failed")

    @precondition(lambda self: self.jobs)
    @rule(pick=PICK, is_good=st.booleans())
    def end_swap(self, pick: int, is_good: bool) -> None:
        candidates = self.where("swapping") or self.jobs
        job = candidates[pick % len(candidates)]
        state = "completed" if is_good else "failed"
        book = self.book

        def end() -> Any:
            return book.complete(job["id"]) if is_good else book.refuse_swap(job["id"], ERROR)

        if job["version"] is None or job["state"] not in ("swapping", state):
            with pytest.raises(ValueError):  # whose words say the state that it met
                end()
            return
        assert end().state == state
        if job["state"] == "swapping":
            self.end(job, state)

    @rule()
    def prune(self) -> None:
        now = self.now()
        self.book.prune()
        for job in self.jobs:
            if job["keyed"] < now - DAY:
                job["key"] = None
        finished = [job for job in self.jobs if job["finished"] is not None]
        newest = finished[-KEEP_JOBS:]
        gone = [j for j in finished if j["key"] is None and (j["finished"] < now - 7 * DAY or j not in newest)]
        self.jobs = [job for job in self.jobs if job not in gone]
        for job in gone:
            job.update(state="gone")
        assert {path.stem for path in (self.path.parent / "spool").iterdir()} == {job["id"] for job in self.jobs}

    # --- the world ---

    @rule(seconds=st.sampled_from([1, 6, 31, DAY / 2, 4 * DAY]))
    def time_passes(self, seconds: float) -> None:
        self.clock.pass_(seconds)

    @rule(seconds=st.sampled_from([-10 * DAY, -60, 60, DAY]))
    def somebody_sets_the_clock(self, seconds: float) -> None:
        self.clock.wall += seconds
        self.set_by = [by + seconds for by in self.set_by]

    @rule(which=st.sampled_from([0, 1]))
    def restart(self, which: int) -> None:
        self.books[which].close()
        self.books[which], self.set_by[which] = self.open(), 0.0

    # --- what must hold ---

    @invariant()
    def both_connections_show_the_model(self) -> None:
        waiting = [job["id"] for job in self.where("queued")]
        expected = [
            {
                **{key: job[key] for key in ("id", "attempt", "step", "version")},
                "state": "running" if job["state"] in ("training", "swapping") else job["state"],
                "cancel": job["cancel"],
                "alone": job["alone"] and job["state"] not in FINAL,
                "finished": job["finished"],
                "position": waiting.index(job["id"]) + 1 if job["id"] in waiting else None,
                "last metrics": {"loss": float(job["step"])} if job["step"] else {},
            }
            for job in self.jobs
        ]
        for book in self.books:
            shown = [
                {
                    "id": job.id,
                    "attempt": job.attempt,
                    "step": job.step,
                    "version": job.version,
                    "state": job.state.value,
                    "cancel": job.cancel_requested,
                    "alone": job.alone and job.state.value not in FINAL,
                    "finished": job.finished_at,
                    "position": job.position,
                    "last metrics": job.metrics,
                }
                for job in reversed(book.jobs())
            ]
            assert shown == expected
            assert [job.id for job in book.published_jobs()] == [job["id"] for job in self.where("swapping")]

    @invariant()
    def the_events_tell_the_same_story(self) -> None:
        for job in self.jobs[-2:]:
            events = self.book.events(job["id"])
            told = [event.data["state"] for event in events if event.kind == "state"]
            assert told[0] == "queued" and JobState(told[-1]) is self.book.job(job["id"]).state
            assert sum(state in FINAL for state in told) == (job["state"] in FINAL)
            assert sum("version" in event.data for event in events) == (job["version"] is not None)
            assert self.book.payload(job["id"]) == job["body"].encode()


TestLedgerAgainstItsModel = LedgerMachine.TestCase
TestLedgerAgainstItsModel.settings = settings(
    max_examples=40, stateful_step_count=40, suppress_health_check=list(HealthCheck)
)
