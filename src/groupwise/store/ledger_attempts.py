"""Records attempts at a job: the lease that holds it, and the job's state after an attempt that ended without a report.

    crash     the worker died by itself, or let its lease expire: `max_attempts` of these fail the job
    memory    the kernel killed the worker because memory ran out: the job continues with half the tokens in a pass,
              until its longest sample alone is a pass; from then on this counts as a crash
    server    server and worker died together, or the machine did: MAX_SERVER_DEATHS of these in a row, without a
              further step, fail the job; fewer do not count
    stop      the worker did not save in time when the server stopped: does not count

If a worker with several jobs crashes, runs out of memory or dies with the server too often, any of the jobs may be the
cause, and the others must not fail for it: the attempt does not count, and each job continues alone (`alone`), so that
the next such end is surely its own.

Leases are on the monotonic clock; see `ledger`.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from groupwise.errors import LeaseLostError
from groupwise.store.ledger_schema import JobState as JobState
from groupwise.store.ledger_schema import Lease as Lease
from groupwise.store.ledger_schema import dump, record_event, update_job

MAX_SERVER_DEATHS = 5

MAX_SEQ = 2**63 - 1  # of SQLite's integers

_HELD = "SELECT * FROM job WHERE id = ? AND worker = ? AND attempt = ? AND state = 'running' AND version IS NULL"


class Cause(StrEnum):
    """Reason why an attempt ended before its worker could report a result."""

    CRASH = "crash"
    MEMORY = "memory"
    SERVER = "server"
    STOP = "stop"


# ---- the lease ----
def is_live(row: sqlite3.Row) -> bool:
    """Return whether the lease still holds. If more time is left than was given, the clock has restarted in a reboot:
    then it does not hold."""
    return 0 < row["lease_until"] - time.monotonic() <= row["lease_seconds"] + 1  # 1: for rounding


def until(seconds: float) -> dict[str, float]:
    """Return the columns of a lease for `seconds` from now."""
    return {"lease_until": time.monotonic() + seconds, "lease_seconds": seconds}


def held_by(db: sqlite3.Connection, lease: Lease) -> sqlite3.Row:
    """Return the row of the leased job. Raises LeaseLostError unless the lease is the one that holds it."""
    row = db.execute(_HELD, (lease.job.id, lease.worker, lease.attempt)).fetchone()
    if row is None:
        now = db.execute("SELECT state, attempt FROM job WHERE id = ?", (lease.job.id,)).fetchone()
        where = f"it is {now['state']}, attempt {now['attempt']}" if now else "it is forgotten"
        raise LeaseLostError(
            f"{lease.worker} no longer holds job {lease.job.id} (attempt {lease.attempt}): {where}",
            hint="stop working on it and drop what was made",
        )
    return row


# ---- ends ----
def requeue(db: sqlite3.Connection, seq: int, message: str, *, level: str = "warning") -> None:
    """Make the job wait again, in its old place."""
    update_job(db, seq, state=JobState.QUEUED, phase="waiting", worker=None, lease_until=0)
    record_event(db, seq, "state", message, level=level, data={"state": JobState.QUEUED, "phase": "waiting"})


def finish(
    db: sqlite3.Connection,
    seq: int,
    state: JobState,
    message: str,
    *,
    error: Mapping[str, Any] | None = None,
    level: str = "info",
    **more: Any,
) -> None:
    """End the job. One that failed keeps the phase it failed in. `more` stands in the event's data."""
    update_job(db, seq, state=state, finished_at=time.time(), worker=None, lease_until=0)
    if state is JobState.FAILED:
        update_job(db, seq, error=dump(error))
    else:
        update_job(db, seq, phase="done")
    data = {"state": state, **({"error": error} if error else {}), **more}
    record_event(db, seq, "state", message, level="error" if state is JobState.FAILED else level, data=data)


def take_back(db: sqlite3.Connection, row: sqlite3.Row, cause: Cause, *, max_attempts: int, beside: int = 0) -> None:
    """End an attempt whose worker is gone: the job waits again, unless it was to be cancelled or fails for good.
    `beside` is the number of other jobs that the worker had."""
    seq, attempt = row["seq"], row["attempt"]
    if row["cancel_requested"]:
        finish(db, seq, JobState.CANCELLED, "cancelled")
    elif cause is Cause.STOP:
        _not_counted(db, row, f"attempt {attempt} was stopped with the server; the job waits for another")
    elif cause is Cause.SERVER:
        _server_died(db, row, beside=beside)
    elif beside:
        put_aside(db, row, f"attempt {attempt} ended without a word, beside others")
    elif cause is Cause.MEMORY and (tokens := shrink(db, row)):
        message = f"memory ran out, and the kernel ended attempt {attempt}; the job goes on with {in_passes(tokens)}"
        _not_counted(db, row, message)
    else:
        _crashed(db, row, cause, max_attempts=max_attempts)


def release(
    db: sqlite3.Connection, row: sqlite3.Row, *, orphaned: bool, beside: int = 0, made_way: bool = False
) -> None:
    """End an attempt whose worker saved and stopped. `orphaned`: the worker stopped because its server had died; it had
    `beside` other jobs. `made_way`: the job makes way for the job whose turn it is."""
    if row["cancel_requested"]:
        finish(db, row["seq"], JobState.CANCELLED, "cancelled")
    elif orphaned:
        _server_died(db, row, beside=beside)
    elif made_way:
        _not_counted(db, row, "the job has had its share, is saved, and makes way for others", level="info")
    else:
        _not_counted(db, row, "the worker stopped in order; the job waits for the next", level="info")


def put_aside(db: sqlite3.Connection, row: sqlite3.Row, reason: str) -> None:
    """End an attempt for a reason that may be another job's: this one continues by itself."""
    if row["cancel_requested"]:
        return finish(db, row["seq"], JobState.CANCELLED, "cancelled")
    update_job(db, row["seq"], alone=True)
    _not_counted(db, row, f"{reason}; the job goes on with none beside it")


def _not_counted(db: sqlite3.Connection, row: sqlite3.Row, message: str, *, level: str = "warning") -> None:
    update_job(db, row["seq"], released=row["released"] + 1)
    requeue(db, row["seq"], message, level=level)


def _server_died(db: sqlite3.Connection, row: sqlite3.Row, *, beside: int = 0) -> None:
    got_further = row["step"] > row["death_step"]
    deaths = 1 if got_further else row["server_deaths"] + 1
    update_job(db, row["seq"], server_deaths=deaths, death_step=max(row["step"], row["death_step"]))
    if deaths < MAX_SERVER_DEATHS:
        _not_counted(db, row, f"attempt {row['attempt']} ended with the server; the job waits for another")
        return
    if beside:
        update_job(db, row["seq"], server_deaths=0)
        return put_aside(db, row, f"the server died {deaths} times while this job and others ran")
    error = server_deaths(deaths, f"while this job ran, and it never got beyond step {row['death_step']}")
    finish(db, row["seq"], JobState.FAILED, error["message"], error=error)


def server_deaths(count: int, what: str) -> dict[str, str]:
    """Return the error of a job that is given up because it seems to kill the server."""
    hint = "see `dmesg` and the server's log; if memory ran out, lower micro_tokens or post fewer completions"
    return {"code": "server_died_repeatedly", "message": f"the server died {count} times {what}", "hint": hint}


def _crashed(db: sqlite3.Connection, row: sqlite3.Row, cause: Cause, *, max_attempts: int) -> None:
    attempts = row["attempt"] - row["released"]
    if attempts < max_attempts:
        requeue(db, row["seq"], f"attempt {row['attempt']} ended without a word; the job waits for another")
        return
    where = f"in phase {row['phase']!r} at step {row['step']}"
    if cause is Cause.MEMORY:
        message = f"memory ran out {where}, with {in_passes(row['pass_tokens'])}, and the kernel ended the worker"
        hint = "set gradient_checkpointing, post fewer or shorter completions, or use a lower lora_rank"
        error = {"code": "out_of_memory", "message": message, "hint": hint}
    else:
        message = f"{attempts} attempts crashed; the last {where}"
        hint = "see the end of logs/worker.log; a worker that was killed from outside has no last words there"
        error = {"code": "crashed_repeatedly", "message": message, "hint": hint}
    finish(db, row["seq"], JobState.FAILED, message, error=error)


# ---- smaller passes ----
def shrink(db: sqlite3.Connection, row: sqlite3.Row) -> int | None:
    """Halve the tokens of the job's passes and return the new number. None if there cannot be fewer, or if the number
    is not known yet."""
    now, least = row["pass_tokens"], row["least_tokens"]
    if now is None or now <= least:
        return None
    tokens = max(least, now // 2)
    update_job(db, row["seq"], micro_tokens=tokens, pass_tokens=tokens)
    return tokens


def in_passes(tokens: int | None) -> str:
    """Return how large the passes are, in words."""
    return "passes of any size" if tokens is None else f"at most {tokens} tokens in a pass"
