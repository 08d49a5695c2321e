"""The job ledger in SQLite: an accepted job survives a kill of server or worker at any time.

    queued --lease--> running --published--> running, phase "swapping" --complete--> completed
       ^                 |  |                                      `--refuse_swap--> failed
       `-release, expire-'  `--fail--> failed     `--cancelled--> cancelled

The server submits, cancels and completes; a worker leases a job and reports on it. A lease is for some seconds and is
renewed by a heartbeat; a worker that dies or stalls loses it, and the job is leased again. Each lease has a number, the
attempt, that is never given out twice for a job: every write of a worker checks (worker, attempt), so that one that
wakes up late changes nothing (LeaseLostError). A job therefore may run more than once but publishes at most once.
`ledger_attempts` says how often it may, and what else becomes of a job whose worker died.

    <state>/ledger.db             jobs, events, idempotency keys, recent rollouts; feedback (`store.feedback`)
    <state>/ledger.backup.db      a copy of it, of the last hour (`ledger_repair`)
    <state>/spool/<job>.payload   what the job trains on; on the disk before the job is accepted
    <state>/checkpoints/<job>/    the worker's; removed with the job

Leases are measured with the monotonic clock, which all processes of a machine share: setting the wall clock takes no
lease away. That clock restarts at a reboot; a lease that seems to last longer than it was given is from before one.
Timestamps are wall clock, seconds since 1970; setting the clock ahead makes no row old.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from groupwise.errors import (
    DamagedPayloadError,
    GroupwiseError,
    IdempotencyConflictError,
    NotCancellableError,
    QueueFullError,
    StorageFullError,
)
from groupwise.store import faults
from groupwise.store.ledger_attempts import (
    MAX_SEQ,
    MAX_SERVER_DEATHS,
    Cause,
    finish,
    held_by,
    in_passes,
    is_live,
    put_aside,
    release,
    server_deaths,
    shrink,
    take_back,
    until,
)
from groupwise.store.ledger_repair import BACKUP
from groupwise.store.ledger_schema import (
    FORGET_ROWS,
    KEEP_ROLLOUT_BYTES,
    KEEP_SECONDS,
    SPOOL,
    SPOOLED,
    Database,
    check_integrity,
    dump,
    elapsed,
    forget_rollouts,
    fsync,
    insert,
    marks,
    open_to_read,
    read_job,
    read_jobs,
    read_payload,
    read_rollouts,
    read_row,
    record_event,
    storing,
    to_event,
    to_job,
    update_job,
    write_payload,
    write_rewards,
    write_rollouts,
)
from groupwise.store.ledger_schema import JobRecord as Job
from groupwise.store.ledger_schema import JobState as JobState
from groupwise.store.ledger_schema import Lease as Lease
from groupwise.store.ledger_schema import LedgerEvent as Event
from groupwise.store.ledger_schema import RolloutRecord as RolloutRecord
from groupwise.store.ledger_tables import tenant_key
from groupwise.store.ledger_turns import (
    Standing,
    Weights,
    charge,
    clocks_of_new,
    next_job,
    no_weights,
    price_of_taking,
    training,
)
from groupwise.store.tenants import OWNER

WORKER_PHASES = ("loading", "training", "publishing")  # what a worker may report

KEY_SECONDS = 24 * 3600.0  # how long an idempotency key counts

KEEP_JOBS = 1024  # finished ones

RETRY_SECONDS = 30.0  # what a client is told when the queue is full

_TORN_SECONDS = 3600.0  # a temporary file this old has no writer any more

_ID = re.compile(r"[0-9a-f]{32}")

Claim = Callable[[sqlite3.Connection, str], None]  # in the transaction that queues a job, with its id
Admits = Callable[[Job, Sequence[Job]], bool]  # whether a job may begin while others are being trained


class Ledger:
    """Records the jobs of a state directory, or with `tenant` the part of one tenant (`of`). Threads may share it;
    processes open their own. `weights` returns a tenant's weight when tenants share the training.

    Every method raises StorageError if the disk does not take a change (the data before it is untouched), and
    NotReadyError if other processes keep the file locked for seconds.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_attempts: int = 3,
        rollout_bytes: int = KEEP_ROLLOUT_BYTES,
        tenant: str | None = None,
        found: list[str] | None = None,
        weights: Weights = no_weights,
    ):
        self.path, self.tenant, self._weights = Path(path), tenant, weights
        self.max_attempts, self._rollout_bytes = max_attempts, rollout_bytes
        self._views, self._opening = dict[str, Ledger](), threading.Lock()
        self._spool = self.path.parent / SPOOL
        self._checkpoints = self.path.parent / "checkpoints"
        self._began = time.time() - elapsed()
        self._db = Database(self.path, tenant, found=found)
        with storing(f"making {self._spool}", at=self.path):
            self._spool.mkdir(mode=0o700, exist_ok=True)
            fsync(self.path.parent)

    def close(self) -> None:
        """Close it, and what `of` made of it."""
        for view in self._views.values():
            view.close()
        self._db.close()

    def of(self, tenant: str) -> Ledger:
        """Return the same ledger as one tenant sees it (the owner is ""): its jobs, rollouts, feedback and idempotency
        keys, and none of another's. It is opened once, and closed with this one."""
        options: dict[str, Any] = {"max_attempts": self.max_attempts, "rollout_bytes": self._rollout_bytes}
        options["weights"] = self._weights
        with self._opening:
            if tenant not in self._views:
                self._views[tenant] = Ledger(self.path, **options, tenant=tenant, found=self._db.found)
            return self._views[tenant]

    # --- submitting and reading ---

    def submit(
        self,
        *,
        kind: str,
        adapter: str,
        config: Mapping[str, Any],
        summary: Mapping[str, Any],
        payload: bytes,
        steps: int,
        auto_load: bool,
        idempotency_key: str | None = None,
        fingerprint: str = "",
        max_queued: int = 32,
        id: str | None = None,
        effective: Mapping[str, Any] | None = None,
        rewards: Mapping[str, float] | None = None,
        claim: Claim | None = None,
        deadline: float | None = None,
    ) -> tuple[Job, bool]:
        """Queue a job: (job, True). When this returns, the job and its payload are on the disk. `id` is 32 hexadecimal
        digits that no job has; None makes some up. `effective` is what is known of `Job.effective` by now, `rewards`
        are those of the rollouts that it names, by their ids. `deadline` is when the job is to have ended, in seconds
        since 1970. `claim` is called with the job's id in the transaction
        that queues it: what it raises queues nothing.

        An `idempotency_key` of the last 24 hours gives (its job, False), if the body's `fingerprint` is the same.

        Raises:
            IdempotencyConflictError: the key came with another body.
            QueueFullError: `max_queued` jobs wait already.
        """
        with self._db.reading("looking for room in the queue") as db:
            if known := self._find_known(db, idempotency_key, fingerprint):
                return known, False
            _check_room(db, max_queued)
        id = id or uuid4().hex
        row = {"id": id, "kind": kind, "adapter": adapter, "config": dump(config), "summary": dump(summary)}
        row |= {"auto_load": auto_load, "steps": steps, "created_at": time.time(), "effective": dump(effective or {})}
        row |= {"tenant": self.tenant} if self.tenant else {}
        row |= {} if deadline is None else {"deadline": float(deadline)}
        entry = None
        if idempotency_key is not None:
            entry = {"key": tenant_key(self.tenant, idempotency_key), "fingerprint": fingerprint}
        temporary = self._spool / f".{id}.tmp"
        try:
            with storing("spooling a job", at=self.path):
                faults.point("submit:before-spool")
                write_payload(temporary, payload, row=row, key=entry)
                faults.point("submit:after-spool")
            limits = {"max_queued": max_queued, "rewards": rewards or {}, "claim": claim, "entry": entry}
            job = self._queue(row, temporary, idempotency_key, fingerprint, **limits)
        except BaseException:
            self._discard_payload(id)
            raise
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        faults.point("submit:after-commit")
        return job, job.id == id

    def _queue(
        self,
        row: Mapping[str, Any],
        spooled: Path,
        key: str | None,
        fingerprint: str,
        *,
        entry: Mapping[str, str] | None,
        max_queued: int,
        rewards: Mapping[str, float],
        claim: Claim | None,
    ) -> Job:
        """Commit the row and its payload; or return the job that the same key made meanwhile."""
        with self._db.transaction("queueing a job") as db:
            if known := self._find_known(db, key, fingerprint):
                return known
            _check_room(db, max_queued)
            seq = insert(db, "job", {**row, **clocks_of_new(db, self.tenant or OWNER, row["adapter"])})
            if entry is not None:
                insert(db, "idempotency", {**entry, "job": seq, "created_at": time.time()})
            record_event(db, seq, "state", "queued", data={"state": JobState.QUEUED, "phase": "waiting"})
            write_rewards(db, row["id"], rewards)
            if claim is not None:
                claim(db, row["id"])
            os.rename(spooled, self._payload_path(row["id"]))  # in here: `prune` removes files without a row
            fsync(self._spool)
            faults.point("submit:before-commit")
            return read_job(db, row["id"])

    def by_key(self, key: str, fingerprint: str) -> Job | None:
        """Return the job that this idempotency key of the last 24 hours stands for. Raises IdempotencyConflictError."""
        with self._db.reading("looking for an idempotency key") as db:
            return self._find_known(db, key, fingerprint)

    def job(self, id: str) -> Job:
        """Return one job. Raises JobNotFoundError."""
        with self._db.reading("reading a job") as db:
            return read_job(db, id)

    def jobs(
        self, *, states: Collection[JobState] | None = None, limit: int = 1024, before: str | None = None
    ) -> list[Job]:
        """Return the jobs in these states (all of them without), newest first; with `before`, those that were submitted
        before that job. Raises JobNotFoundError where it is not known."""
        wanted = list(JobState if states is None else states)
        asked = f"WHERE state IN ({marks(wanted)}) AND seq < ? ORDER BY seq DESC LIMIT ?"
        with self._db.reading("listing the jobs") as db:
            end = MAX_SEQ if before is None else read_row(db, before)["seq"]
            return read_jobs(db, asked, (*wanted, end, limit))

    def unfinished(self) -> list[Job]:
        """Return all jobs that have not ended, newest first."""
        return self.jobs(states=(JobState.QUEUED, JobState.RUNNING), limit=MAX_SEQ)

    def pending(self) -> frozenset[str]:
        """Return the adapters that jobs which have not ended make, or made, the next version of."""
        with self._db.reading("listing the adapters that jobs make") as db:
            return frozenset(row["adapter"] for row in db.execute("SELECT adapter FROM job WHERE finished_at IS NULL"))

    def ended(self) -> list[str]:
        """Return the ids of all jobs that have ended, in the order in which they did."""
        with self._db.reading("listing the jobs that have ended") as db:
            return [
                row["id"]
                for row in db.execute("SELECT id FROM job WHERE finished_at IS NOT NULL ORDER BY finished_at, seq")
            ]

    def payload(self, id: str) -> bytes:
        """Return the job's submitted payload. Raises JobNotFoundError, or DamagedPayloadError if it is damaged."""
        job = self.job(id)
        with storing(f"reading the payload of job {id}", at=self.path):
            try:
                return read_payload(self._payload_path(job.id))
            except FileNotFoundError:
                message = f"the payload of job {id} is missing"
                raise DamagedPayloadError(message, hint="submit the job again") from None

    def payload_bytes(self, id: str) -> int:
        """Return how many bytes the job was submitted with; 0 where they are gone."""
        with suppress(OSError):
            return self._payload_path(id).stat().st_size
        return 0

    def events(self, id: str, *, after: int = 0, limit: int = 1000) -> list[Event]:
        """Return the job's events with a `seq` above `after`, oldest first; a tenant's are numbered within the
        job. Raises JobNotFoundError."""
        with self._db.reading("reading a job's events") as db:
            job = read_row(db, id)["seq"]
            if not self.tenant:
                query = "SELECT * FROM event WHERE job = ? AND seq > ? ORDER BY seq LIMIT ?"
                return [to_event(row, id) for row in db.execute(query, (job, after, limit)).fetchall()]
            query = "SELECT * FROM main.event WHERE job = ? ORDER BY seq LIMIT ? OFFSET ?"  # the index finds the place
            rows = db.execute(query, (job, limit, after)).fetchall()
            return [replace(to_event(row, id), seq=seq) for seq, row in enumerate(rows, after + 1)]

    def metrics(self, id: str) -> list[dict[str, Any]]:
        """{"step", "time", <metric>: <number>} per step; of a step that was run again after a crash, the last run."""
        query = "SELECT * FROM event WHERE job = ? AND kind = 'metrics' ORDER BY seq"
        with self._db.reading("reading a job's metrics") as db:
            rows = db.execute(query, (read_row(db, id)["seq"],)).fetchall()
            events = [to_event(row, id) for row in rows]
        steps = [{"time": event.at, **event.data} for event in events]
        return sorted({step["step"]: step for step in steps}.values(), key=lambda step: step["step"])

    def cancel(self, id: str) -> Job:
        """Cancel at once what no worker holds; ask the worker otherwise. Raises NotCancellableError, JobNotFoundError.

        A job whose version is published can no longer be cancelled: what it was to do is done.
        """
        with self._db.transaction("cancelling a job") as db:
            row = read_row(db, id)
            if row["version"] is not None or JobState(row["state"]).is_final:
                where = f"{row['state']}, phase {row['phase']}" if row["state"] == JobState.RUNNING else row["state"]
                raise NotCancellableError(
                    f"job {id} cannot be cancelled: it is {where}",
                    hint="only jobs that wait or train can; to undo a version, activate the one before it",
                )
            if not row["cancel_requested"]:
                update_job(db, row["seq"], cancel_requested=True)
                record_event(db, row["seq"], "message", "cancel requested")
            if row["state"] == JobState.QUEUED or not is_live(row):
                finish(db, row["seq"], JobState.CANCELLED, "cancelled")
            return read_job(db, id)

    # --- the worker's half ---

    def lease(self, worker: str, *, seconds: float = 30, admits: Admits | None = None) -> Lease | None:
        """Take the job whose turn it is (`ledger_turns`). Return None if there is none, or if `admits` does not admit
        it while the present jobs are trained (`admits` None: all are admitted). First, jobs whose lease has expired
        wait again.

        A job with `max_attempts` attempts that ended without a report fails ("crashed_repeatedly") and is passed over.
        """
        with self._db.transaction("leasing a job") as db:
            dead = [row for row in training(db) if not is_live(row)]
            for row in dead:
                take_back(db, row, Cause.CRASH, max_attempts=self.max_attempts, beside=len(dead) - 1)
            if (row := next_job(db)) is None:
                return None
            job = read_job(db, row["id"])
            if admits is not None and not admits(job, [to_job(each) for each in training(db)]):
                return None
            attempt, now = row["attempt"] + 1, time.time()
            charge(db, row, tokens=price_of_taking(job), weight=job.weight, of_tenant=self._weights(job.tenant))
            update_job(db, row["seq"], state=JobState.RUNNING, phase="loading", worker=worker, attempt=attempt)
            update_job(db, row["seq"], started_at=row["started_at"] or now, **until(seconds))
            data = {"state": JobState.RUNNING, "phase": "loading", "attempt": attempt}
            record_event(db, row["seq"], "state", f"attempt {attempt} begins", data=data)
            lease = Lease(read_job(db, row["id"]), worker, attempt)
        faults.point("lease:after-commit")
        return lease

    def standings(self) -> tuple[Standing | None, list[Standing]]:
        """Return how the job whose turn it is stands, if one waits, and how those stand that are being trained."""
        with self._db.reading("looking whose turn it is") as db:
            row = next_job(db)
            return None if row is None else Standing.of(db, row), [Standing.of(db, each) for each in training(db)]

    def renew(self, lease: Lease, *, seconds: float = 30) -> bool:
        """Hold the job for `seconds` from now; return whether a client asked to cancel it. Raises LeaseLostError."""
        with self._db.transaction("renewing a lease") as db:
            row = held_by(db, lease)
            update_job(db, row["seq"], **until(seconds))
            return bool(row["cancel_requested"])

    def check(self, lease: Lease) -> None:
        """Raise LeaseLostError unless the worker still holds the job."""
        with self._db.reading("checking a lease") as db:
            held_by(db, lease)

    def progress(
        self,
        lease: Lease,
        *,
        phase: str,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        message: str | None = None,
        tokens: int = 0,
    ) -> None:
        """Report where the job is. `step` counts finished steps, and `tokens` are those of this one. Raises
        LeaseLostError."""
        if phase not in WORKER_PHASES:
            raise ValueError(f"phase is {phase!r}; it must be one of {', '.join(WORKER_PHASES)}")
        with self._db.transaction("recording a job's progress") as db:
            row = held_by(db, lease)
            step = row["step"] if step is None else step
            update_job(db, row["seq"], phase=phase, step=step, tokens=row["tokens"] + tokens)
            if tokens:
                charge(db, row, tokens=tokens, weight=lease.job.weight, of_tenant=self._weights(lease.job.tenant))
            if phase != row["phase"]:
                data = {"state": JobState.RUNNING, "phase": phase, "attempt": lease.attempt}
                record_event(db, row["seq"], "state", phase, data=data)
            if metrics is not None:
                finite = {key: float(value) for key, value in metrics.items() if math.isfinite(value)}
                left_out = sorted(metrics.keys() - finite.keys())
                update_job(db, row["seq"], metrics=dump(finite))
                data = {"step": step, **finite, **({"non_finite": left_out} if left_out else {})}
                record_event(db, row["seq"], "metrics", f"step {step} of {row['steps']}", data=data)
            if message is not None:
                record_event(db, row["seq"], "message", message)
        faults.point("progress:after-commit")

    def published(self, lease: Lease, version: str, *, unhealthy: str | None = None) -> None:
        """Record that the job's version is in the store: the worker is done, the server now swaps and completes it.

        Without `auto_load` there is nothing to swap and the job is completed. So it is where the version is `unhealthy`
        (which says why): it is not to become active by itself. Raises LeaseLostError.
        """
        faults.point("publish:before-ledger")
        with self._db.transaction("recording a publication") as db:
            row = held_by(db, lease)
            late = "; the request to cancel came too late" if row["cancel_requested"] else ""
            update_job(
                db, row["seq"], version=version, phase="swapping", cancel_requested=False, worker=None, lease_until=0
            )
            update_job(db, row["seq"], unhealthy=unhealthy)
            data = {"state": JobState.RUNNING, "phase": "swapping", "version": version, "attempt": lease.attempt}
            record_event(db, row["seq"], "state", f"published {version}{late}", data=data)
            if unhealthy is not None:
                message = f"completed, and {version} was not made active: {unhealthy}"
                finish(db, row["seq"], JobState.COMPLETED, message, level="warning", unhealthy=unhealthy)
            elif not row["auto_load"]:
                finish(db, row["seq"], JobState.COMPLETED, "completed without loading it, as asked")
        faults.point("publish:after-ledger")

    def fail(self, lease: Lease, error: Mapping[str, Any]) -> None:
        """Record that the job cannot succeed: final. `error` is {"code", "message", "hint"}. Raises LeaseLostError."""
        with self._db.transaction("recording a failure") as db:
            row = held_by(db, lease)
            finish(db, row["seq"], JobState.FAILED, str(error.get("message", "failed")), error=error)

    def cancelled(self, lease: Lease) -> None:
        """Record that the worker has stopped as it was asked to: final. Raises LeaseLostError."""
        with self._db.transaction("recording a cancellation") as db:
            finish(db, held_by(db, lease)["seq"], JobState.CANCELLED, "cancelled")

    def release(self, lease: Lease, *, orphaned: bool = False, beside: int = 0, made_way: bool = False) -> None:
        """Record that the worker has saved and stops, or that the job makes way for another (`made_way`): the job waits
        again, and this attempt does not count. Raises LeaseLostError.

        `orphaned` says that the worker stops because the server died; `beside` is the number of other jobs that it had.
        `ledger_attempts` says how that counts.
        """
        with self._db.transaction("releasing a job") as db:
            release(db, held_by(db, lease), orphaned=orphaned, beside=beside, made_way=made_way)

    def measured(self, lease: Lease, *, largest: int, longest: int) -> None:
        """Record what memory depends on: the tokens of the job's `largest` pass, and of its `longest` sample."""
        with self._db.transaction("recording the size of a job") as db:
            update_job(db, held_by(db, lease)["seq"], pass_tokens=largest, least_tokens=longest)

    def settled(self, lease: Lease, effective: Mapping[str, Any]) -> None:
        """Record what acts where the job's configuration has null. Raises LeaseLostError."""
        with self._db.transaction("recording what a job was begun with") as db:
            update_job(db, held_by(db, lease)["seq"], effective=dump(effective))

    def shrink(self, lease: Lease, reason: str) -> Job | None:
        """Have the job continue with half the tokens in a pass, because memory ran out, and return the job. None if its
        passes cannot be smaller.

        Raises LeaseLostError.
        """
        with self._db.transaction("making a job's passes smaller") as db:
            row = held_by(db, lease)
            if (tokens := shrink(db, row)) is None:
                return None
            message = f"{reason}; the job goes on with {in_passes(tokens)}"
            record_event(db, row["seq"], "message", message, level="warning", data={"micro_tokens": tokens})
            return read_job(db, row["id"])

    def put_aside(self, lease: Lease, reason: str) -> None:
        """Record that the attempt ended for a reason that another job may have caused: the job waits again, this
        attempt does not count, and the next attempt runs alone. Raises LeaseLostError."""
        with self._db.transaction("putting a job aside") as db:
            put_aside(db, held_by(db, lease), reason)

    def expire(self, worker: str, *, cause: Cause = Cause.CRASH) -> list[str]:
        """Take note that a worker is dead, of this cause: the jobs it held can be leased at once, or fail. Returns
        their ids."""
        with self._db.transaction("taking back a dead worker's jobs") as db:
            rows = training(db, worker)
            for row in rows:
                take_back(db, row, cause, max_attempts=self.max_attempts, beside=len(rows) - 1)
        return [row["id"] for row in rows]

    def overdue(self, worker: str) -> list[str]:
        """Return the jobs whose lease this worker has let expire, oldest first: it hangs, or is dead."""
        with self._db.reading("looking for expired leases") as db:
            return [row["id"] for row in training(db, worker) if not is_live(row)]

    # --- the server's half ---

    def published_jobs(self) -> list[Job]:
        """Return the jobs whose version waits to be swapped in, oldest first."""
        with self._db.reading("listing the published jobs") as db:
            return read_jobs(db, "WHERE state = 'running' AND version IS NOT NULL ORDER BY seq")

    def begin_swap(self, id: str) -> bool:
        """Record that the job's version is being swapped in. Return False if the job has no version to swap in, or if
        so many servers have died in this swap that the job now fails.

        The caller ends the swap: by `complete`, `refuse_swap` or `put_off_swap`. Raises JobNotFoundError.
        """
        with self._db.transaction("beginning a swap") as db:
            row = read_row(db, id)
            if row["version"] is None or row["state"] != JobState.RUNNING:
                return False
            if row["swaps_begun"] < MAX_SERVER_DEATHS:
                update_job(db, row["seq"], swaps_begun=row["swaps_begun"] + 1)
                return True
            what = f"while {row['version']}, which stays in the store, was being swapped in"
            error = server_deaths(row["swaps_begun"], what)
            finish(db, row["seq"], JobState.FAILED, error["message"], error=error)
            return False

    def put_off_swap(self, id: str) -> None:
        """Record that a swap did not end, and it was not the server that died. Raises JobNotFoundError."""
        with self._db.transaction("putting off a swap") as db:
            row = read_row(db, id)
            update_job(db, row["seq"], swaps_begun=max(0, row["swaps_begun"] - 1))

    def complete(self, id: str, *, message: str = "") -> Job:
        """Complete a job whose version is active (or need not be). Again is harmless. Raises JobNotFoundError."""
        faults.point("swap:before-complete")
        job = self._end_swap(id, JobState.COMPLETED, message=message or "completed")
        faults.point("swap:after-complete")
        return job

    def refuse_version(self, id: str, reason: str) -> Job:
        """Record that the version exists and is not to become active by itself (a gate): the job is completed, and
        `unhealthy` says why. Raises JobNotFoundError."""
        message = f"completed, and its version was not made active: {reason}"
        return self._end_swap(id, JobState.COMPLETED, message=message, unhealthy=reason)

    def refuse_swap(self, id: str, error: Mapping[str, Any]) -> Job:
        """Record that the version exists but was not activated: the job failed in phase "swapping". Raises
        JobNotFoundError."""
        return self._end_swap(id, JobState.FAILED, message=str(error.get("message", "swap refused")), error=error)

    def _end_swap(
        self,
        id: str,
        state: JobState,
        *,
        message: str,
        error: Mapping[str, Any] | None = None,
        unhealthy: str | None = None,
    ) -> Job:
        with self._db.transaction("ending a swap") as db:
            row = read_row(db, id)
            if row["version"] is None or row["state"] not in (JobState.RUNNING, state):
                raise ValueError(f"job {id} is {row['state']} in phase {row['phase']}; no swap of it can end")
            if row["state"] == JobState.RUNNING and unhealthy is not None:
                update_job(db, row["seq"], unhealthy=unhealthy)
                finish(db, row["seq"], state, message, level="warning", unhealthy=unhealthy)
            elif row["state"] == JobState.RUNNING:
                finish(db, row["seq"], state, message, error=error)
            return read_job(db, id)

    # --- rollouts ---

    def save_rollouts(self, records: Sequence[RolloutRecord]) -> None:
        """Keep what was sampled for 7 days, and of all at most the newest million and the newest `rollout_bytes`."""
        with self._db.transaction("saving rollouts") as db:
            write_rollouts(db, records)
            whose = self.tenant or OWNER
            forget_rollouts(db, now=self._now(), keep_bytes=self._rollout_bytes, tenant=whose)

    def rollouts(self, ids: Sequence[str]) -> dict[str, RolloutRecord]:
        """Return those of the rollouts that are still kept, by id."""
        with self._db.reading("reading rollouts") as db:
            return read_rollouts(db, ids)

    @contextmanager
    def reader(self, what: str) -> Iterator[sqlite3.Connection]:
        """Yield a separate connection that only reads, so that a large query delays no other request."""
        with self._db.storing(what), closing(open_to_read(self.path, self.tenant)) as db:
            yield db

    # --- keeping it whole ---

    @property
    def database(self) -> Database:
        """Return the connection, for modules with other tables in the same file."""
        return self._db

    @property
    def damage(self) -> str | None:
        """Return the damage found since the ledger was opened; then nothing in it can be relied on."""
        return self._db.damage

    def verify(self) -> None:
        """Read and check the whole ledger, without delaying other requests. Raises LedgerDamagedError."""
        with self.reader("checking the ledger") as db:
            check_integrity(db, self.path)

    def back_up(self, *, least_free: int = 0) -> None:
        """Read the whole ledger and copy it to a file next to it, which replaces the last copy. Other requests continue
        meanwhile.

        Raises LedgerDamagedError, and then the previous copy stays; StorageFullError if less than `least_free` bytes
        would be free afterwards.
        """
        copy = self.path.with_name(f"{BACKUP}.tmp")
        with storing("backing up the ledger", at=self.path):
            size, free = self.path.stat().st_size, shutil.disk_usage(self.path.parent).free
            if free - size < least_free:
                hint = "free some disk space: a damaged ledger can be repaired best from a recent copy"
                raise StorageFullError(f"there is no room to back up the ledger: {free} bytes are free", hint=hint)
            copy.unlink(missing_ok=True)
            os.close(os.open(copy, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            try:
                self._db.back_up(copy)
                os.replace(copy, self.path.with_name(BACKUP))
                fsync(self.path.parent)
            finally:
                copy.unlink(missing_ok=True)

    # --- cleaning ---

    def prune(self) -> None:
        """Forget finished jobs beyond a tenant's newest 1,024 or older than 7 days, with their files, and old rollouts.

        A job whose idempotency key still counts stays. Removes what crashes left in the spool, too.
        """
        now = self._now()
        with self._db.transaction("pruning the ledger") as db:
            db.execute("DELETE FROM main.idempotency WHERE created_at < ?", (now - KEY_SECONDS,))
            db.execute(
                """
                DELETE FROM main.job WHERE finished_at IS NOT NULL AND seq NOT IN (SELECT job FROM idempotency) AND (
                    finished_at < ? OR seq IN (
                        SELECT seq FROM (
                            SELECT seq, row_number() OVER (PARTITION BY tenant ORDER BY seq DESC) AS nth FROM job
                            WHERE finished_at IS NOT NULL)
                        WHERE nth > ?))
                """,
                (now - KEEP_SECONDS, KEEP_JOBS),
            )
            tenants = [row[0] for row in db.execute("SELECT DISTINCT tenant FROM rollout")]
        for tenant in tenants:
            pruned = FORGET_ROWS
            while pruned == FORGET_ROWS:
                with self._db.transaction("pruning rollouts") as db:
                    bounds = {"now": self._now(), "keep_bytes": self._rollout_bytes}
                    pruned = forget_rollouts(db, **bounds, tenant=tenant)
        self._sweep(older_than=time.time() - _TORN_SECONDS)

    def recover(self) -> None:
        """Remove what a crash left. For a server that has not begun to take jobs, while no worker runs."""
        self._sweep(older_than=math.inf)

    def _sweep(self, *, older_than: float) -> None:
        """Remove the files of jobs that are not in the ledger, and the checkpoints of finished jobs.

        Ids are never used again.
        """
        with self._db.transaction("cleaning the spool") as db:  # no process moves a payload into place meanwhile
            ids = {row["id"] for row in db.execute("SELECT id FROM job")}
            unfinished = {row["id"] for row in db.execute("SELECT id FROM job WHERE finished_at IS NULL")}
            for path in self._spool.iterdir():
                with suppress(FileNotFoundError):  # its writer was faster
                    is_torn = path.suffix == ".tmp" and path.stat().st_mtime < older_than
                    if is_torn or (_ID.fullmatch(path.stem) and path.stem not in ids):
                        path.unlink()
            left = [
                path for path in self._checkpoints.glob("*") if _ID.fullmatch(path.name) and path.name not in unfinished
            ]
        for path in left:
            shutil.rmtree(path, ignore_errors=True)

    # --- inside ---

    def _now(self) -> float:
        """Return the time for how old things are. A clock that jumps a month ahead while the ledger is open makes
        nothing a month old: then it is the time without that jump."""
        return min(time.time(), self._began + elapsed())

    def _payload_path(self, id: str) -> Path:
        return self._spool / f"{id}{SPOOLED}"

    def _find_known(self, db: sqlite3.Connection, key: str | None, fingerprint: str) -> Job | None:
        """Return the job that this idempotency key made, if the key still counts."""
        query = "SELECT idempotency.*, job.id FROM idempotency JOIN job ON job.seq = idempotency.job"
        query += " WHERE key = tenant_key(?)"
        row = db.execute(query, (key,)).fetchone()
        if row is None:
            return None
        if row["created_at"] < self._now() - KEY_SECONDS:
            if db.in_transaction:
                db.execute("DELETE FROM main.idempotency WHERE key = tenant_key(?)", (key,))
            return None
        if row["fingerprint"] != fingerprint:
            raise IdempotencyConflictError(
                f"the idempotency key {str(key)[:64]!r} was used for job {row['id']} with another body",
                hint="send the same body again, or a new key with the new body",
            )
        return read_job(db, row["id"])

    def _discard_payload(self, id: str) -> None:
        """Remove the payload of a job that was not accepted, if that can be known; `prune` does it otherwise."""
        with suppress(GroupwiseError), self._db.reading("looking for a job") as db:
            if db.execute("SELECT 1 FROM job WHERE id = ?", (id,)).fetchone() is None:
                self._payload_path(id).unlink(missing_ok=True)


def kept_rollouts(path: Path, tenant: str | None, ids: Sequence[str]) -> dict[str, RolloutRecord]:
    """`Ledger.rollouts` of what a tenant sees, for a process that only looks: nothing is made, repaired or locked."""
    with storing("reading rollouts", at=path), closing(open_to_read(path, tenant)) as db:
        return read_rollouts(db, ids)


def _check_room(db: sqlite3.Connection, max_queued: int) -> None:
    waiting = db.execute("SELECT count(*) FROM job WHERE state = 'queued'").fetchone()[0]
    if waiting >= max_queued:
        raise QueueFullError(
            f"{waiting} jobs wait already; at most {max_queued} may",
            hint="wait for one to start, or cancel one",
            retry_after=RETRY_SECONDS,
        )
