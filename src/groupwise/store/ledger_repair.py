"""Finds a damaged ledger when a server starts, and rebuilds it with `--repair-ledger`.

    check     raises LedgerDamagedError: what is damaged, which backup there is, what to do
    repair    a new ledger of every row that can still be read; of what cannot, the row of the backup; and of a job that
              neither has, what was accepted with its payload. The damaged files are kept.

SQLite survives crashes. If a disk returns other bytes than were written, or a program truncates the file, SQLite only
notices it. So the whole file is read when a server starts and whenever it is backed up. An accepted job is in three
places: the ledger, the backup (of the last hour), and the spool, whose files hold the job's row and its payload.

A row of the backup or the spool is older than the job. Whether the job has published since, the adapter store knows:
then it is not trained again.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from groupwise.errors import LedgerDamagedError
from groupwise.store.ledger_schema import (
    SPOOL,
    SPOOLED,
    JobState,
    check_integrity,
    fsync,
    insert,
    open_database,
    open_to_read,
    read_accepted,
    record_event,
    storing,
    temporary_failure,
    update_job,
)
from groupwise.store.ledger_tables import READABLE, VERSION

BACKUP = "ledger.backup.db"
FILES = ("", "-wal", "-shm")  # SQLite's
OF_JOBS = ("event", "idempotency")  # tables whose rows go with a job, by its number
ROWS = 1000  # read at once
LOOKS = 64  # into a table, before it is read
FURTHEST = 1_000_000  # rows that are looked for where the file does not say how many there were

# (tenant, adapter, job) -> the version that the job published, and whether it was ever active; None if there is none
FindVersion = Callable[[str, str, str], tuple[str, bool] | None]


def check(path: Path) -> None:
    """Raise LedgerDamagedError unless the ledger at `path` is whole, or there has never been one."""
    try:
        _check(path)
    except LedgerDamagedError as error:
        hint = (
            "nothing was changed. `groupwise serve --repair-ledger`, with the options that you start it with, keeps "
            "the damaged file and makes a new one: of what can be read in it, of "
            f"{_backup_in_words(path)}, and of what jobs were submitted with ({SPOOL}/)"
        )
        raise LedgerDamagedError(error.message, hint=hint) from error


def _check(path: Path) -> None:
    with storing("checking the ledger", at=path):
        if _repaired(path).exists():
            raise LedgerDamagedError(f"the repair of {path} was interrupted; it is to be finished")
        if not path.exists() or path.stat().st_size == 0:
            return _check_new(path, "is gone" if not path.exists() else "is empty")
        with closing(open_to_read(path)) as db:
            try:
                version = db.execute("PRAGMA user_version").fetchone()[0]
                if version == 0:
                    _check_new(path, "has no jobs in it")
                elif version == VERSION:  # another one is refused when it is opened
                    check_integrity(db, path)
            except sqlite3.DatabaseError as error:
                if temporary_failure(error):
                    raise
                raise LedgerDamagedError(f"{path} is damaged: {error}") from error


def _check_new(path: Path, what: str) -> None:
    """Check a new one: an empty state directory is not damaged; one with payloads or a backup but no ledger is."""
    if path.with_name(BACKUP).exists() or any(_spooled(path)):
        raise LedgerDamagedError(f"{path} {what}, though jobs were accepted here")


def _backup_in_words(path: Path) -> str:
    backup = path.with_name(BACKUP)
    with suppress(sqlite3.DatabaseError, OSError), closing(open_to_read(backup)) as db:
        at = datetime.fromtimestamp(backup.stat().st_mtime, UTC)
        jobs = db.execute("SELECT count(*) FROM job").fetchone()[0]
        return f"the backup of {at:%Y-%m-%dT%H:%M:%SZ} ({BACKUP}, {jobs} jobs)"
    return f"the backup, if there were one ({BACKUP})"


def repair(path: Path, *, find: FindVersion) -> str | None:
    """Rebuild the ledger at `path` if it is damaged; return a description of the repair, None if none was needed.

    No other process may use the ledger meanwhile. After a kill at any moment, call it again. Raises StorageError.
    """
    repaired = _repaired(path)
    with storing("repairing the ledger", at=path):
        if repaired.exists():
            counted = "; an interrupted repair was finished"
        else:
            try:
                _check(path)
                return None
            except LedgerDamagedError:
                counted = _build(path, repaired, find)
        kept = path.with_name(f"{path.name}.damaged-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
        for suffix in FILES:
            with suppress(FileNotFoundError):
                os.rename(f"{path}{suffix}", f"{kept}{suffix}")
        os.rename(repaired, path)
        fsync(path.parent)
    return f"the ledger was repaired; the damaged file is kept as {kept.name}{counted}"


# ---- building the new one ----
def _build(path: Path, repaired: Path, find: FindVersion) -> str:
    """Make the new ledger, under another name until it is whole; returns how many rows came from where."""
    building = path.with_name(f"{path.name}.repairing")
    for suffix in FILES:
        Path(f"{building}{suffix}").unlink(missing_ok=True)
    counts: Counter[str] = Counter()
    with closing(open_database(building)) as db, ExitStack() as opened:
        db.execute("BEGIN IMMEDIATE")
        older: dict[int, str] = {}  # jobs whose rows are older than they are, and where the rows are from
        for name, source in (("the damaged file", path), ("the backup", path.with_name(BACKUP))):
            if (connection := _open_source(source, opened)) is None:
                continue
            for table in READABLE:
                added = _bring_over(connection, db, table)
                counts[f"{table} rows from {name}"] += len(added)
                if table == "job" and source != path:
                    older |= dict.fromkeys(added, name)
        spooled = _queue_spooled(path, db)
        counts["job rows from the spool"] += len(spooled)
        _bring_up_to_date(db, {**older, **dict.fromkeys(spooled, "what was submitted")}, find)
        db.execute("COMMIT")
        check_integrity(db, building)
        db.execute("PRAGMA journal_mode=DELETE")  # one file again
    fsync(building)
    os.rename(building, repaired)
    fsync(path.parent)
    return "".join(f"; {count} {what}" for what, count in counts.items() if count)


def _open_source(path: Path, opened: ExitStack) -> sqlite3.Connection | None:
    """Return a ledger to read from; None where it does not even say which tables it has."""
    with suppress(sqlite3.DatabaseError):
        connection = opened.enter_context(closing(open_to_read(path)))
        connection.execute("SELECT name FROM sqlite_master").fetchall()
        return connection
    return None


def _bring_over(source: sqlite3.Connection, db: sqlite3.Connection, table: str) -> list[int]:
    """Add the rows of a table that can be read and are not there yet; returns their numbers."""
    if not source.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone():
        return []
    known = {row["name"] for row in db.execute(f"PRAGMA table_info({table})")}
    jobs = {row["seq"] for row in db.execute("SELECT seq FROM job")}
    last, added = _last(source, table), []
    for row in _rows(source, table, FURTHEST if last is None else last):
        values = {name: value for name, value in dict(row).items() if name in known}
        if table in OF_JOBS and values["job"] not in jobs:
            continue
        columns, marks = ", ".join(values), ", ".join("?" * len(values))
        statement = f"INSERT OR IGNORE INTO {table} ({columns}) VALUES ({marks})"
        if db.execute(statement, tuple(values.values())).rowcount:
            added.append(row["number"])
    if last is not None:  # numbers that were given out do not come back
        db.execute("UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = ?", (last, table))
    return added


def _rows(db: sqlite3.Connection, table: str, last: int) -> Iterator[sqlite3.Row]:
    """Yield the rows up to number `last` that can be read, in order. Where SQLite stumbles it is asked for half as
    many; a table of which nothing can be read, wherever one looks, is given up."""
    query = f"SELECT rowid AS number, * FROM {table} WHERE rowid BETWEEN ? AND ? AND ({READABLE[table]}) ORDER BY rowid"

    def read(low: int, high: int) -> list[sqlite3.Row] | None:
        try:
            return db.execute(query, (low, high)).fetchall()
        except sqlite3.DatabaseError:
            return None

    if all(read(number, number) is None for number in range(1, last + 1, max(1, last // LOOKS))):
        return
    ranges = [(low, low + ROWS - 1) for low in range(1, last + 1, ROWS)][::-1]
    while ranges:
        low, high = ranges.pop()
        rows, middle = read(low, high), (low + high) // 2
        if rows is not None:
            yield from rows
        elif low < high:
            ranges += [(middle + 1, high), (low, middle)]


def _last(db: sqlite3.Connection, table: str) -> int | None:
    """Return the highest number that a row can have, if the file says it."""
    for query in (f"SELECT seq FROM sqlite_sequence WHERE name = '{table}'", f"SELECT max(rowid) FROM {table}"):
        with suppress(sqlite3.DatabaseError):
            row = db.execute(query).fetchone()
            if row is not None and type(row[0]) is int and 0 <= row[0] < 1 << 40:
                return row[0]
            if row is not None and row[0] is None:
                return 0
    return None


def _queue_spooled(path: Path, db: sqlite3.Connection) -> list[int]:
    """Add the jobs whose payload is there and whose row is not, in the order in which they were accepted, and every
    idempotency key that is not known any more."""
    known = {row["id"]: row["seq"] for row in db.execute("SELECT id, seq FROM job")}
    found = [accepted for spooled in _spooled(path) if (accepted := read_accepted(spooled)) is not None]
    added = []
    for row, key in sorted(found, key=lambda accepted: accepted[0]["created_at"]):
        seq = known.get(row["id"])
        if seq is None:
            seq = insert(db, "job", row)
            record_event(db, seq, "state", "queued", data={"state": JobState.QUEUED, "phase": "waiting"})
            added.append(seq)
        if key is not None:
            with suppress(sqlite3.IntegrityError):  # it is known, or was used again
                insert(db, "idempotency", {**key, "job": seq, "created_at": row["created_at"]})
    return added


def _bring_up_to_date(db: sqlite3.Connection, older: Mapping[int, str], find: FindVersion) -> None:
    """Rows are older than their jobs: one that has published since is not trained again."""
    for seq, source in older.items():
        row = db.execute("SELECT * FROM job WHERE seq = ?", (seq,)).fetchone()
        if JobState(row["state"]).is_final:
            continue
        message = f"the ledger was damaged; this job is known from {source}"
        record_event(db, seq, "message", message, level="warning")
        if (published := find(row["tenant"], row["adapter"], row["id"])) is None:
            _change(db, seq, JobState.QUEUED, "waiting", version=None)
        elif published[1] or not row["auto_load"]:
            _change(db, seq, JobState.COMPLETED, "done", version=published[0], finished_at=time.time())
        else:
            _change(db, seq, JobState.RUNNING, "swapping", version=published[0])


def _change(db: sqlite3.Connection, seq: int, state: JobState, phase: str, **columns: Any) -> None:
    update_job(db, seq, state=state, phase=phase, worker=None, lease_until=0, **columns)
    data: Mapping[str, Any] = {"state": state, "phase": phase}
    record_event(db, seq, "state", state, data=data)


# ---- files ----
def _repaired(path: Path) -> Path:
    """Return a new ledger that is whole and has only to be moved into place."""
    return path.with_name(f"{path.name}.repaired")


def _spooled(path: Path) -> Iterator[Path]:
    return (path.parent / SPOOL).glob(f"*{SPOOLED}")
