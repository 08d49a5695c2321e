"""The ledger's files: its records, how it is opened, spooled payloads, SQLite's errors.

WAL with synchronous=FULL: a committed transaction survives SIGKILL and a power cut (on a local file system; not NFS).
Every writer begins with BEGIN IMMEDIATE, so that what it reads cannot change before it writes. Any number of processes
and threads may use one file; a writer waits at most BUSY_SECONDS for the others.

A spooled payload has two lines before it: the sha256 of all that follows, which tells a torn file from a whole one,
and what was accepted as JSON, {"row": {<column>: ...}, "key": {...} or null}: a job whose row cannot be read any more
can be queued again from it (`ledger_repair`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sqlite3
import threading
import time
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any
from uuid import uuid4

from groupwise.errors import (
    DamagedPayloadError,
    JobNotFoundError,
    LedgerDamagedError,
    NotReadyError,
    StorageError,
)
from groupwise.model.image_tokens import packed_ids, unpacked_ids
from groupwise.recorded import RoutedExperts, SamplingMask
from groupwise.store.ledger_tables import READABLE, create_tables, see_as
from groupwise.store.tenants import OWNER

BUSY_SECONDS = 5.0
KEEP_SECONDS = 7 * 24 * 3600.0  # finished jobs and rollouts
KEEP_ROLLOUTS, KEEP_ROLLOUT_BYTES = 1_000_000, 4 << 30
FORGET_ROWS = 10_000  # in one transaction, so that a large clean-up delays others only shortly
SPOOL, SPOOLED = "spool", ".payload"  # the directory next to the ledger, and the ending of the jobs' files there
REPAIR = "stop the server, and start it once with --repair-ledger: docs/troubleshooting.md#ledger_damaged"
PHASES = ("waiting", "loading", "training", "publishing", "swapping", "done")

_JOB = """
    SELECT job.*, CASE state WHEN 'queued' THEN
        (SELECT count(*) FROM job AS other
         WHERE other.state = 'queued' AND other.seq <= job.seq AND other.tenant = job.tenant) END AS position
    FROM job
"""
_PLACES = "SELECT seq, row_number() OVER (PARTITION BY tenant ORDER BY seq) FROM job WHERE state = 'queued'"
_ROLLOUT_COLUMNS = (
    "id, prompt_ids, completion_ids, logprobs, version, temperature, finish_reason, text, reshaped, kept, "
    "kept_logprobs, routed_experts"
)

_DISK = {  # the error of the file system that SQLite's stands for; 0 where it does not say
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EACCES,
    sqlite3.SQLITE_PERM: errno.EACCES,
    sqlite3.SQLITE_IOERR: 0,
    sqlite3.SQLITE_CANTOPEN: 0,
}
_ACCEPTED = {  # of a job when it is accepted
    **dict.fromkeys(("id", "kind", "adapter", "config", "summary", "effective"), str),
    "auto_load": bool,
    "steps": int,
    "created_at": float,
}
_PERHAPS = {"tenant": str, "deadline": float}
_SPOOL_HEAD = b"groupwise payload 1 sha256 "
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_WAITING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class JobState(StrEnum):
    """The state of a job. The last three are final."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self not in (JobState.QUEUED, JobState.RUNNING)


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """Holds a training job as it was when it was read.

    `effective` has the values in use where `config` has null, as far as they are known; all are known once a worker has
    begun. `phase` is one of PHASES; a failed job keeps the phase in which it failed. `attempt` counts the workers that
    took it. `metrics` are the finite ones of the last step. `error` is {"code", "message", "hint"}. `position` is 1 for
    the next of the waiting jobs, and None unless the job waits. `micro_tokens` is None until memory ran out: then it is
    the number of tokens in a pass with which the job continues, instead of its configuration's. `unhealthy` is the
    error of health at its end: its version is stored, and only a person can activate it. `alone`: it is trained alone,
    because a worker with it and other jobs died or ran out of memory. `turn` and `own` are the clocks of its tenant and
    of its adapter as it last set them (`ledger_turns`), and `tokens` counts the trained tokens. `deadline` is the time
    by which it should end, in seconds since 1970.
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
    unhealthy: str | None = None
    tenant: str = OWNER
    effective: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False
    turn: float = 0.0
    own: float = 0.0
    tokens: int = 0
    deadline: float | None = None

    @property
    def weight(self) -> int:
        """Share of its tenant's training that its adapter gets, relative to the tenant's other adapters."""
        return int(self.config.get("weight") or 1)

    @property
    def progress(self) -> float:
        """Return the share of the steps that is done, 0 to 1."""
        if self.state is JobState.COMPLETED:
            return 1.0
        return min(self.step / self.steps, 1.0) if self.steps else 0.0


@dataclass(frozen=True)
class Lease:
    """The right of a worker to work on a job, as long as it renews it."""

    job: JobRecord
    worker: str
    attempt: int


@dataclass(frozen=True)
class LedgerEvent:
    """An event of a job. `seq` grows over all jobs; `kind` is "state", "metrics" or "message"."""

    seq: int
    job_id: str
    at: float
    kind: str
    level: str
    message: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class RolloutRecord:
    """A completion that was sampled over HTTP, so that a reward for its id is enough to train on it.

    `logprobs` are the policy's own at this temperature. `reshaped` names the sampling parameters by which its tokens
    were drawn from another distribution (`SamplingParams.reshaped`); none for an on-policy sample of all of the policy.
    `kept`, `kept_logprobs` and `routed_experts` are those of the completion (`types.Completion`), where it has them.
    """

    id: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: str
    temperature: float
    finish_reason: str
    text: str
    reshaped: tuple[str, ...] = ()
    kept: SamplingMask | None = None
    kept_logprobs: tuple[float, ...] = ()
    routed_experts: RoutedExperts | None = None


class Database:
    """Holds a connection to the ledger that the threads of this process share, for all tenants or for one. Do not use
    it across a fork.

    `damage` describes the first damage that this instance, or another one with the same `found`, has found in the file;
    None without damage. A damaged file cannot be relied on, and nothing more is written to it.
    """

    def __init__(self, path: Path, tenant: str | None = None, *, found: list[str] | None = None):
        self._path, self._lock = path, threading.Lock()
        self.found: list[str] = [] if found is None else found
        with self.storing(f"opening {path}"):
            self._connection = open_database(path, tenant)

    @property
    def damage(self) -> str | None:
        return self.found[0] if self.found else None

    @contextmanager
    def reading(self, what: str) -> Iterator[sqlite3.Connection]:
        """Yield the connection for single statements that change nothing."""
        with self._lock, self.storing(what):
            yield self._connection

    @contextmanager
    def transaction(self, what: str) -> Iterator[sqlite3.Connection]:
        """Yield the connection within a transaction: all that is done within is on the disk afterwards, or none of it
        if there was an error. Not re-entrant."""
        with self._lock, self.storing(what):
            if self.damage is not None:
                raise LedgerDamagedError(self.damage, hint=REPAIR)
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # after some errors SQLite has rolled back by itself
                    self._connection.execute("ROLLBACK")
                raise

    def back_up(self, target: Path) -> None:
        """Copy the ledger's present state to `target`, a single file, without delaying others. Raises
        LedgerDamagedError."""
        with self.storing("backing up the ledger"), closing(sqlite3.connect(self._path)) as source:
            with closing(sqlite3.connect(target)) as copy:
                source.backup(copy)
                copy.execute("PRAGMA journal_mode=DELETE")
                check_integrity(copy, self._path)
            fsync(target)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextmanager
    def storing(self, what: str) -> Iterator[None]:
        """See `storing`, and damage is remembered."""
        try:
            with storing(what, at=self._path):
                yield
        except LedgerDamagedError as error:
            self.found.append(error.message)
            raise


@contextmanager
def storing(what: str, *, at: Path) -> Iterator[None]:
    """Turn a failure of SQLite or of the file system into a GroupwiseError that says what was being done."""
    try:
        yield
    except StorageError:
        raise
    except (sqlite3.Error, OSError) as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte: the rest are finer kinds of it
        if isinstance(error, OSError):
            raise StorageError.of(error, f"{what} failed: {error}") from error
        if code in _DISK:
            cause = OSError(_DISK[code], str(error)) if _DISK[code] else _asked(at) or error
            raise StorageError.of(cause, f"{what} failed: {error}") from error
        if code in _WAITING:
            hint = "other processes are writing; if this goes on, see who holds the file with `fuser`"
            raise NotReadyError(f"{what} failed: the ledger was locked for {BUSY_SECONDS:g} s", hint=hint) from error
        if code in _DAMAGE:
            raise LedgerDamagedError(f"{what} failed: {at} is damaged: {error}", hint=REPAIR) from error
        raise


def temporary_failure(error: sqlite3.Error) -> bool:
    """Return whether SQLite could not read the file for now, and so cannot say whether it is whole."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in _DISK or code in _WAITING


def _asked(path: Path) -> OSError | None:
    """Return what the file system says to a page more behind the ledger's files: SQLite tells a failure, and not
    which."""
    probe = path.parent / f".staging-{uuid4().hex}"
    try:
        at = max((file.stat().st_size for file in (path, Path(f"{path}-wal")) if file.exists()), default=0)
        try:
            with open(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
                os.pwrite(file.fileno(), bytes(4096), at)
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
        if path.exists() and not os.access(path, os.W_OK):  # it is not opened: `_keep_private` says why
            return PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    except OSError as error:
        return error
    return None


def check_integrity(db: sqlite3.Connection, path: Path) -> None:
    """Raise LedgerDamagedError unless SQLite finds the file whole and every job and event in it can be read."""
    (found, *_) = db.execute("PRAGMA integrity_check(1)").fetchone()
    if found != "ok":
        said = "; ".join(line for line in str(found).splitlines() if line and not line.startswith("***"))
        raise LedgerDamagedError(f"{path} is damaged: {said}", hint=REPAIR)
    for table, readable in READABLE.items():
        row = db.execute(f"SELECT rowid FROM {table} WHERE ({readable}) IS NOT TRUE LIMIT 1").fetchone()
        if row is not None:
            raise LedgerDamagedError(f"{path} is damaged: row {row[0]} of table {table} cannot be read", hint=REPAIR)


def open_database(path: Path, tenant: str | None = None) -> sqlite3.Connection:
    """Return a connection to a ledger, which is made if need be; of everything, or of one tenant."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _keep_private(path)
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        connection.row_factory = sqlite3.Row
        _enter_wal(connection)
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute(f"PRAGMA journal_size_limit={64 << 20}")
        create_tables(connection, path)
        see_as(connection, tenant)
    except BaseException:
        connection.close()
        raise
    return connection


def _keep_private(path: Path) -> None:
    """Make the ledger readable for its owner only, because it holds prompts and completions. SQLite gives the files
    next to it the same mode.

    An existing ledger is opened only by SQLite, never here: a process that closes a file loses all its locks on the
        file (POSIX), also those of SQLite's connections. Another process that closes the ledger would then take itself
        for the last one and remove the write-ahead log, and what this process wrote there afterwards would be lost.
    """
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    for each in (path, *(path.with_name(path.name + ending) for ending in ("-wal", "-shm"))):
        with suppress(OSError):  # there is none, or it is another user's, who decides
            if (mode := each.stat().st_mode) & 0o077:
                each.chmod(mode & ~0o077)


def open_to_read(path: Path, tenant: str | None = None) -> sqlite3.Connection:
    """Return a connection that changes nothing, of everything or of one tenant. Raises sqlite3.OperationalError if
    there is no such file."""
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_SECONDS)
    db.row_factory = sqlite3.Row
    see_as(db, tenant)
    return db


def _enter_wal(connection: sqlite3.Connection) -> None:
    """Change to WAL, which needs the file for itself and does not wait for it: processes that start together retry."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def read_row(db: sqlite3.Connection, id: str) -> sqlite3.Row:
    """Return a job's row. Raises JobNotFoundError."""
    row = db.execute(f"{_JOB} WHERE id = ?", (id,)).fetchone()
    if row is None:
        raise JobNotFoundError(
            f"there is no job {id[:64]!r}", hint="list the jobs; finished ones are forgotten after 7 days"
        )
    return row


def read_job(db: sqlite3.Connection, id: str) -> JobRecord:
    """Return one job. Raises JobNotFoundError."""
    return to_job(read_row(db, id))


def read_jobs(db: sqlite3.Connection, rest: str, values: Sequence[Any] = ()) -> list[JobRecord]:
    """Return the jobs that `rest` of a statement asks for: what it says behind FROM job."""
    rows = db.execute(f"SELECT *, NULL AS position FROM job {rest}", values).fetchall()
    waits = any(row["state"] == JobState.QUEUED for row in rows)
    places = dict(map(tuple, db.execute(_PLACES))) if waits else {}
    return [to_job(row, position=places.get(row["seq"])) for row in rows]


def to_job(row: sqlite3.Row, *, position: int | None = None) -> JobRecord:
    """Return a row of jobs as the record; its `position` where the row does not have it."""
    values: dict[str, Any] = {key: row[key] for key in JobRecord.__dataclass_fields__}
    values["position"] = position or values["position"]
    with _readable("job", row["seq"]):
        values |= {key: json.loads(row[key]) for key in ("config", "summary", "metrics", "effective")}
        values |= {key: bool(row[key]) for key in ("auto_load", "cancel_requested", "alone")}
        values["state"] = JobState(row["state"])
        values["error"] = None if row["error"] is None else json.loads(row["error"])
    return JobRecord(**values)


def to_event(row: sqlite3.Row, job_id: str) -> LedgerEvent:
    """Return a row of the events as the record."""
    with _readable("event", row["seq"]):
        data = json.loads(row["data"])
    return LedgerEvent(row["seq"], job_id, row["at"], row["kind"], row["level"], row["message"], data)


@contextmanager
def _readable(table: str, seq: int | str) -> Iterator[None]:
    """Raise LedgerDamagedError for an invalid value inside the block: damage that SQLite did not notice."""
    try:
        yield
    except (ValueError, TypeError) as error:
        message = f"row {seq} of table {table} cannot be read: {error}"
        raise LedgerDamagedError(f"the ledger is damaged: {message}", hint=REPAIR) from error


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
    cursor = db.execute(f"INSERT INTO main.{table} ({', '.join(row)}) VALUES ({marks(values)})", values)
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def update_job(db: sqlite3.Connection, seq: int, **columns: Any) -> None:
    """Change columns of a job."""
    assignments = ", ".join(f"{name} = ?" for name in columns)
    db.execute(f"UPDATE main.job SET {assignments} WHERE seq = ?", (*columns.values(), seq))


def write_rollouts(db: sqlite3.Connection, records: Iterable[RolloutRecord]) -> None:
    """Add rollouts; one with a known id replaces it."""
    columns = f"{_ROLLOUT_COLUMNS}, created_at, upto, nth"
    statement = (
        f"INSERT OR REPLACE INTO main.rollout ({columns}, tenant) VALUES ({marks(columns.split(','))}, tenant())"
    )
    last = "SELECT coalesce(max(upto), 0), coalesce(max(nth), 0) FROM main.rollout WHERE tenant = tenant()"
    now, (upto, count) = time.time(), db.execute(last).fetchone()
    for nth, record in enumerate(records, start=count + 1):
        prompt, completion = map(packed_ids, (record.prompt_ids, record.completion_ids))
        logprobs = array("d", record.logprobs).tobytes()
        kept = None if record.kept is None else record.kept.to_bytes()
        own = None if record.kept is None else array("d", record.kept_logprobs).tobytes()
        upto += len(prompt) + len(completion) + len(logprobs) + len(record.text.encode())
        routed = None if record.routed_experts is None else record.routed_experts.to_bytes()
        upto += len(kept or b"") + len(own or b"") + len(routed or b"")
        rest = (record.version, record.temperature, record.finish_reason, record.text, " ".join(record.reshaped))
        db.execute(statement, (record.id, prompt, completion, logprobs, *rest, kept, own, routed, now, upto, nth))


def read_rollouts(db: sqlite3.Connection, ids: Sequence[str]) -> dict[str, RolloutRecord]:
    """Return those of the rollouts that there are, by id."""
    found: dict[str, RolloutRecord] = {}
    for begin in range(0, len(ids), 1000):
        some = list(ids[begin : begin + 1000])
        query = f"SELECT {_ROLLOUT_COLUMNS} FROM rollout WHERE id IN ({marks(some)})"
        for row in db.execute(query, some):
            values: dict[str, Any] = dict(row)
            with _readable("rollout", values["id"]):
                for name in ("prompt_ids", "completion_ids"):
                    values[name] = unpacked_ids(values[name])
                values["logprobs"] = tuple(array("d", values["logprobs"]))
                values["reshaped"] = tuple(values["reshaped"].split())
                values["kept"] = None if values["kept"] is None else SamplingMask.from_bytes(values["kept"])
                values["kept_logprobs"] = tuple(array("d", values["kept_logprobs"] or b""))
                if (routed := values["routed_experts"]) is not None:
                    values["routed_experts"] = RoutedExperts.from_bytes(routed)
                found[values["id"]] = RolloutRecord(**values)
    return found


def write_rewards(db: sqlite3.Connection, job: str, rewards: Mapping[str, float]) -> None:
    """Note which rewards a job was posted for rollouts, by their ids; those that are not kept are passed over."""
    statement = "UPDATE main.rollout SET job = ?, reward = ? WHERE id IN (SELECT id FROM rollout WHERE id = ?)"
    db.executemany(statement, [(job, reward, id) for id, reward in rewards.items()])


def forget_rollouts(db: sqlite3.Connection, *, now: float, keep_bytes: int, tenant: str) -> int:
    """Delete at most FORGET_ROWS of a tenant's rollouts that are too old, too many, or of which nothing is within its
    newest `keep_bytes`; returns how many. One that feedback waits for is only ever too old."""
    mine = "FROM main.rollout WHERE tenant = :tenant"
    too_old = f"SELECT seq {mine} AND created_at < :before"
    too_many = f"SELECT seq {mine} AND nth <= (SELECT max(nth) {mine}) - :most"
    too_large = f"SELECT seq {mine} AND upto <= (SELECT max(upto) {mine}) - :bytes"
    unrated = " AND ".join(
        f"NOT EXISTS (SELECT 1 FROM main.feedback WHERE feedback.{column} = rollout.id AND trained_by IS NULL)"
        for column in ("rollout", "worse")
    )
    statement = f"""
        DELETE FROM main.rollout WHERE seq IN
            ({too_old} UNION {too_many} AND {unrated} UNION {too_large} AND {unrated} LIMIT :rows)
    """
    bounds = {"before": now - KEEP_SECONDS, "most": KEEP_ROLLOUTS, "bytes": keep_bytes, "rows": FORGET_ROWS}
    return db.execute(statement, {**bounds, "tenant": tenant}).rowcount


def elapsed() -> float:
    """Return seconds on a clock that cannot be set, and that also runs while the machine sleeps, if the system has such
    a clock."""
    return time.clock_gettime(_CLOCK)


def marks(values: Collection[Any]) -> str:
    """Return the question marks for `values` in a statement."""
    return ", ".join("?" * len(values))


def dump(value: Any) -> str:
    """Return strict JSON: NaN raises ValueError."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


# ---- payloads ----
def write_payload(path: Path, payload: bytes, *, row: Mapping[str, Any], key: Mapping[str, Any] | None) -> None:
    """Write a payload with what was accepted, for its owner's eyes, and force it to the disk."""
    accepted = dump({"row": row, "key": key}).encode() + b"\n"
    digest = hashlib.sha256(accepted)
    digest.update(payload)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.writelines((_SPOOL_HEAD, digest.hexdigest().encode(), b"\n", accepted, payload))
        file.flush()
        os.fsync(file.fileno())


def read_payload(path: Path) -> bytes:
    """Return the inverse of `write_payload`. Raises DamagedPayloadError unless it is what was written,
    FileNotFoundError."""
    head, _, rest = path.read_bytes().partition(b"\n")
    digest = hashlib.sha256(rest).hexdigest()
    if head != _SPOOL_HEAD + digest.encode():
        raise DamagedPayloadError(
            f"the payload {path.name} is damaged: its {len(rest)} bytes do not have the checksum that was written with "
            "them",
            hint="submit the job again; see what the disk has (`dmesg`)",
        )
    return rest.partition(b"\n")[2]


def read_accepted(path: Path) -> tuple[dict[str, Any], dict[str, Any] | None] | None:
    """Return the row and the idempotency key of the job whose payload this is; None where they cannot be read."""
    try:
        with path.open("rb") as file:
            file.readline(len(_SPOOL_HEAD) + 65)
            accepted = json.loads(file.readline())
        row, key = dict(accepted["row"]), accepted["key"] and dict(accepted["key"])
        kinds = {name: type(value) for name, value in row.items()}
        owned = _ACCEPTED | {name: kind for name, kind in _PERHAPS.items() if name in row}
        whole = kinds == owned and row["id"] == path.stem and (key is None or set(key) == {"key", "fingerprint"})
        return (row, key) if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def fsync(path: Path) -> None:
    """Force a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
