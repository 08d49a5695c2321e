"""The ledger's file: its records and tables, how it is opened and upgraded, and what SQLite's errors mean here.

WAL with synchronous=FULL: a committed transaction survives SIGKILL and a power cut (on a local file system; not NFS).
Every writer begins with BEGIN IMMEDIATE, so that what it reads cannot change before it writes. Any number of processes
and threads may use one file; a writer waits at most BUSY_SECONDS for the others.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from groupwise.errors import GroupwiseError, JobNotFoundError, NotReadyError, StorageError

BUSY_SECONDS = 5.0
KEEP_SECONDS = 7 * 24 * 3600.0  # finished jobs and rollouts
KEEP_ROLLOUTS = 1_000_000
FORGET_ROWS = 10_000  # in one transaction: nobody waits long for a large clean-up
PHASES = ("waiting", "loading", "training", "publishing", "swapping", "done")

# user_version n: the first n were applied. A released one is never edited; a change of the tables is one more.
MIGRATIONS = (
    """
    CREATE TABLE job (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,  -- the order of submission
        id TEXT NOT NULL UNIQUE,
        kind TEXT NOT NULL,
        adapter TEXT NOT NULL,
        state TEXT NOT NULL DEFAULT 'queued',
        phase TEXT NOT NULL DEFAULT 'waiting',
        config TEXT NOT NULL,
        summary TEXT NOT NULL,
        auto_load INTEGER NOT NULL,
        cancel_requested INTEGER NOT NULL DEFAULT 0,
        attempt INTEGER NOT NULL DEFAULT 0,     -- how often it was leased: with the worker's name, the fencing token
        released INTEGER NOT NULL DEFAULT 0,    -- how many of these were orderly stops
        step INTEGER NOT NULL DEFAULT 0,
        steps INTEGER NOT NULL,
        metrics TEXT NOT NULL DEFAULT '{}',
        version TEXT,
        error TEXT,
        created_at REAL NOT NULL,
        started_at REAL,
        finished_at REAL,
        worker TEXT,
        lease_until REAL NOT NULL DEFAULT 0,    -- monotonic clock
        lease_seconds REAL NOT NULL DEFAULT 0
    );
    CREATE INDEX job_state ON job (state, seq);
    CREATE TABLE idempotency (
        key TEXT PRIMARY KEY,
        fingerprint TEXT NOT NULL,
        job INTEGER NOT NULL REFERENCES job (seq) ON DELETE CASCADE,
        created_at REAL NOT NULL
    );
    CREATE INDEX idempotency_job ON idempotency (job);
    CREATE TABLE event (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        job INTEGER NOT NULL REFERENCES job (seq) ON DELETE CASCADE,
        at REAL NOT NULL,
        kind TEXT NOT NULL,
        level TEXT NOT NULL,
        message TEXT NOT NULL,
        data TEXT NOT NULL
    );
    CREATE INDEX event_job ON event (job, seq);
    CREATE TABLE rollout (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        prompt_ids BLOB NOT NULL,               -- int32
        completion_ids BLOB NOT NULL,           -- int32
        logprobs BLOB NOT NULL,                 -- float64: they come back exactly
        version TEXT NOT NULL,
        temperature REAL NOT NULL,
        finish_reason TEXT NOT NULL,
        text TEXT NOT NULL,
        created_at REAL NOT NULL
    );
    CREATE INDEX rollout_age ON rollout (created_at)
    """,
    """
    -- deaths of the server while the job was leased, in a row without a step further than death_step
    ALTER TABLE job ADD COLUMN server_deaths INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE job ADD COLUMN death_step INTEGER NOT NULL DEFAULT -1;
    -- swaps that were begun and did not end, since the server died in them
    ALTER TABLE job ADD COLUMN swaps_begun INTEGER NOT NULL DEFAULT 0;
    -- tokens: of a pass after memory ran out (else as configured), of the largest pass, of the longest sample
    ALTER TABLE job ADD COLUMN micro_tokens INTEGER;
    ALTER TABLE job ADD COLUMN pass_tokens INTEGER;
    ALTER TABLE job ADD COLUMN least_tokens INTEGER
    """,
    """
    -- the options by which only a part of the distribution was drawn from, as top_p=0.9
    ALTER TABLE rollout ADD COLUMN narrowed TEXT NOT NULL DEFAULT ''
    """,
)

JOBS = """
    SELECT job.*, CASE state WHEN 'queued' THEN
        (SELECT count(*) FROM job AS other WHERE other.state = 'queued' AND other.seq <= job.seq) END AS position
    FROM job
"""
_ROLLOUT_COLUMNS = "id, prompt_ids, completion_ids, logprobs, version, temperature, finish_reason, text, narrowed"

_DISK = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
)
_WAITING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class JobState(StrEnum):
    """Where a job stands. The last three are final."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self not in (JobState.QUEUED, JobState.RUNNING)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job as it stood when it was read.

    `phase` is one of PHASES; a failed job keeps the one it failed in. `attempt` counts how often a worker took it.
    `metrics` are those of the last step, without the ones that were not finite. `error` is {"code", "message", "hint"}.
    `position` is 1 for the next of the waiting jobs, and None unless it waits. `micro_tokens` is None until memory ran
    out: then the number of tokens in a pass that the job goes on with, instead of its configuration's.
    """

    id: str
    kind: str
    adapter: str
    state: JobState
    phase: str
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    auto_load: bool
    cancel_requested: bool
    attempt: int
    step: int
    steps: int
    metrics: Mapping[str, float]
    version: str | None
    error: Mapping[str, Any] | None
    created_at: float
    started_at: float | None
    finished_at: float | None
    position: int | None
    micro_tokens: int | None = None

    @property
    def progress(self) -> float:
        """The part of the steps that is done, 0 to 1."""
        if self.state is JobState.COMPLETED:
            return 1.0
        return min(self.step / self.steps, 1.0) if self.steps else 0.0


@dataclass(frozen=True)
class Lease:
    """The right of a worker to work on a job, as long as it renews it."""

    job: Job
    worker: str
    attempt: int


@dataclass(frozen=True)
class Event:
    """Something that happened to a job. `seq` grows over all jobs; `kind` is "state", "metrics" or "message"."""

    seq: int
    job_id: str
    at: float
    kind: str
    level: str
    message: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class RolloutRecord:
    """A completion that was sampled over HTTP, so that a reward for its id is enough to train on it. `narrowed` names
    the options by which only a part of the distribution was drawn from (`SamplingParams.narrowed`)."""

    id: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: str
    temperature: float
    finish_reason: str
    text: str
    narrowed: str = ""


class Database:
    """One connection that the threads of this process share. Do not carry it across a fork."""

    def __init__(self, path: Path):
        self._lock = threading.Lock()
        with storing(f"opening {path}"):
            self._connection = _open(path)

    @contextmanager
    def reading(self, what: str) -> Iterator[sqlite3.Connection]:
        """For single statements that change nothing."""
        with self._lock, storing(what):
            yield self._connection

    @contextmanager
    def transaction(self, what: str) -> Iterator[sqlite3.Connection]:
        """All that is done within is on the disk afterwards, or none of it if there was an error. Not re-entrant."""
        with self._lock, storing(what):
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # after some errors SQLite has rolled back by itself
                    self._connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        with self._lock:
            self._connection.close()


@contextmanager
def storing(what: str) -> Iterator[None]:
    """Turn a failure of SQLite or of the file system into a GroupwiseError that says what was being done."""
    try:
        yield
    except StorageError:
        raise
    except (sqlite3.Error, OSError) as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte: the rest are finer kinds of it
        if isinstance(error, OSError) or code in _DISK:
            hint = "free some disk space or fix the permissions, then try again; what was stored before is unchanged"
            raise StorageError(f"{what} failed: {error}", hint=hint) from error
        if code in _WAITING:
            hint = "other processes are writing; if this goes on, see who holds the file with `fuser`"
            raise NotReadyError(f"{what} failed: the ledger was locked for {BUSY_SECONDS:g} s", hint=hint) from error
        if code in _DAMAGE:
            hint = "restore ledger.db, or move it away to begin with an empty one; adapters are not in it"
            raise GroupwiseError(f"{what} failed: the ledger is damaged: {error}", hint=hint) from error
        raise


def _open(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    _keep_private(path)
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        connection.row_factory = sqlite3.Row
        _enter_wal(connection)
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute(f"PRAGMA journal_size_limit={64 << 20}")
        _migrate(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _keep_private(path: Path) -> None:
    """Prompts and completions are in it: for its owner's eyes. SQLite gives the files beside it the same mode."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    for each in (path, *(path.with_name(path.name + ending) for ending in ("-wal", "-shm"))):
        with suppress(OSError):  # there is none, or it is another user's, who decides
            if (mode := each.stat().st_mode) & 0o077:
                each.chmod(mode & ~0o077)


def read_only(path: Path) -> sqlite3.Connection:
    """A connection to a ledger that exists, for reading."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_SECONDS)


def _enter_wal(connection: sqlite3.Connection) -> None:
    """The change to WAL needs the file for itself and does not wait for it: processes that start together retry."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    if _user_version(connection) == len(MIGRATIONS):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        done = _user_version(connection)  # another process may have been first
        if done > len(MIGRATIONS):
            raise GroupwiseError(
                f"{path} was written by a newer groupwise: its tables are of version {done}, this one knows "
                f"{len(MIGRATIONS)}",
                hint="upgrade groupwise, or give it another state directory",
            )
        for migration in MIGRATIONS[done:]:
            for statement in migration.split(";"):
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version={len(MIGRATIONS)}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _user_version(connection: sqlite3.Connection) -> int:
    return connection.execute("PRAGMA user_version").fetchone()[0]


def read_row(db: sqlite3.Connection, id: str) -> sqlite3.Row:
    """A job's row. Raises JobNotFoundError."""
    row = db.execute(f"{JOBS} WHERE id = ?", (id,)).fetchone()
    if row is None:
        raise JobNotFoundError(
            f"there is no job {id[:64]!r}", hint="list the jobs; finished ones are forgotten after 7 days"
        )
    return row


def read_job(db: sqlite3.Connection, id: str) -> Job:
    """One job. Raises JobNotFoundError."""
    return to_job(read_row(db, id))


def to_job(row: sqlite3.Row) -> Job:
    """A row of JOBS as the record."""
    values: dict[str, Any] = {key: row[key] for key in Job.__dataclass_fields__}
    values |= {key: json.loads(row[key]) for key in ("config", "summary", "metrics")}
    values |= {key: bool(row[key]) for key in ("auto_load", "cancel_requested")}
    values["state"] = JobState(row["state"])
    values["error"] = None if row["error"] is None else json.loads(row["error"])
    return Job(**values)


def record_event(
    db: sqlite3.Connection,
    seq: int,
    kind: str,
    message: str,
    *,
    level: str = "info",
    data: Mapping[str, Any] | None = None,
) -> None:
    """Tell of something that happened to a job."""
    entry = {"job": seq, "at": time.time(), "kind": kind, "level": level, "message": message}
    insert(db, "event", {**entry, "data": dump(data or {})})


def insert(db: sqlite3.Connection, table: str, row: Mapping[str, Any]) -> int:
    """Add a row; returns its number. `table` and the column names are ours, never a request's."""
    values = list(row.values())
    cursor = db.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks(values)})", values)
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def update_job(db: sqlite3.Connection, seq: int, **columns: Any) -> None:
    """Change columns of a job."""
    assignments = ", ".join(f"{name} = ?" for name in columns)
    db.execute(f"UPDATE job SET {assignments} WHERE seq = ?", (*columns.values(), seq))


def write_rollouts(db: sqlite3.Connection, records: Iterable[RolloutRecord]) -> None:
    """Add rollouts; one with a known id replaces it."""
    statement = f"INSERT OR REPLACE INTO rollout ({_ROLLOUT_COLUMNS}, created_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    now = time.time()
    for record in records:
        prompt, completion = (array("i", ids).tobytes() for ids in (record.prompt_ids, record.completion_ids))
        logprobs = array("d", record.logprobs).tobytes()
        rest = (record.version, record.temperature, record.finish_reason, record.text, record.narrowed, now)
        db.execute(statement, (record.id, prompt, completion, logprobs, *rest))


def read_rollouts(db: sqlite3.Connection, ids: Sequence[str]) -> dict[str, RolloutRecord]:
    """Those of the rollouts that there are, by id."""
    found: dict[str, RolloutRecord] = {}
    for begin in range(0, len(ids), 1000):
        some = list(ids[begin : begin + 1000])
        query = f"SELECT {_ROLLOUT_COLUMNS} FROM rollout WHERE id IN ({marks(some)})"
        for id, prompt, completion, logprobs, *rest in db.execute(query, some):
            token_ids = (tuple(array("i", prompt)), tuple(array("i", completion)))
            found[id] = RolloutRecord(id, *token_ids, tuple(array("d", logprobs)), *rest)
    return found


def forget_rollouts(db: sqlite3.Connection) -> int:
    """Delete at most FORGET_ROWS of the rollouts that are too old or too many; returns how many."""
    too_old = "SELECT seq FROM rollout WHERE created_at < ?"
    too_many = "SELECT seq FROM rollout WHERE seq <= (SELECT max(seq) FROM rollout) - ?"
    statement = f"DELETE FROM rollout WHERE seq IN ({too_old} UNION ALL {too_many} LIMIT ?)"
    return db.execute(statement, (time.time() - KEEP_SECONDS, KEEP_ROLLOUTS, FORGET_ROWS)).rowcount


def marks(values: Collection[Any]) -> str:
    """The question marks for `values` in a statement."""
    return ", ".join("?" * len(values))


def dump(value: Any) -> str:
    """Strict JSON: NaN is a ValueError."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
