"""The ledger under SIGKILL, SIGSTOP, rivals and full disks. The processes and their checker are in ledger_crash.py."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from groupwise.errors import GroupwiseError, LedgerDamagedError, NotReadyError, StorageError
from groupwise.store import faults, ledger_schema, ledger_tables
from groupwise.store.ledger import Job, JobState, Ledger, RolloutRecord
from wording import raises

SCRIPT = Path(__file__).parent.with_name("ledger_crash.py")


def play(scenario: str, root: Path) -> dict[str, int]:
    command = [sys.executable, str(SCRIPT), scenario, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_nothing_wrong(counts: dict[str, int]) -> None:
    assert counts and not any(counts.values()), counts


@pytest.mark.slow
def test_sigkill_at_every_named_point_and_at_random_times(tmp_path):
    counts = play("kills", tmp_path / "state")
    assert counts.pop("kills") >= 60
    jobs, leases = counts.pop("jobs"), counts.pop("leases")
    assert jobs >= 20 and leases > jobs  # some were indeed begun again
    assert_nothing_wrong(counts)


def test_a_worker_that_was_stopped_beyond_its_lease_changes_nothing_when_it_wakes(tmp_path):
    counts = play("stopped", tmp_path / "state")
    assert counts.pop("refused") == 8
    assert (counts.pop("jobs"), counts.pop("leases")) == (1, 1)  # the sleeper does not tell of its own
    assert_nothing_wrong(counts)


LOOK = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1])
print(*db.execute("SELECT count(*) FROM setting").fetchone())
db.close()
"""


def _looked_at(path: Path) -> int:
    """Return how many settings another process counts, which closes the ledger then."""
    looked = subprocess.run([sys.executable, "-c", LOOK, str(path)], capture_output=True, text=True, check=True)
    return int(looked.stdout)


def _opened_again(path: Path) -> None:
    Ledger(path).close()


def _read(path: Path) -> None:
    ledger_schema.open_to_read(path).close()


def _failed(path: Path) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR
    with pytest.raises(StorageError), ledger_schema.storing("trying", at=path):
        raise error


@pytest.mark.parametrize("then", [_opened_again, _read, _failed])
def test_another_process_that_closes_the_ledger_leaves_the_log_to_who_has_it_open(tmp_path, then):
    """Whatever this process did with the file meanwhile. POSIX: who closes a file that it opened once more has no locks
    on it any more, and then the other one would take itself for the last and remove the log."""
    path = tmp_path / "ledger.db"
    database = ledger_schema.Database(path)
    then(path)
    for number in range(1, 4):
        with database.transaction("writing") as db:
            db.execute("INSERT INTO setting (key, value) VALUES (?, '1')", (f"a{number}",))
        assert _looked_at(path) == number and Path(f"{path}-wal").exists()
    database.close()
    assert _looked_at(path) == 3


def test_rivals_get_one_job_per_key_and_one_lease_per_job(tmp_path):
    counts = play("rivals", tmp_path / "state")
    assert (counts.pop("jobs"), counts.pop("leases")) == (8, 8)
    assert_nothing_wrong(counts)


@pytest.mark.slow
def test_files_that_may_not_grow(tmp_path):
    counts = play("small_files", tmp_path / "state")
    assert counts.pop("full") >= 50
    assert (counts.pop("jobs"), counts.pop("leases")) == (2, 2)
    assert_nothing_wrong(counts)


# --- within one process ---


def submit(book: Ledger, **options) -> Job:
    defaults = {"kind": "grpo", "adapter": "math", "config": {}, "summary": {}, "payload": b"{}", "steps": 2}
    return book.submit(**{**defaults, "auto_load": True, **options})[0]


def files(book: Ledger) -> set[str]:
    return {path.name for path in (book.path.parent / "spool").iterdir()}


def dump(path: Path) -> list[str]:
    with sqlite3.connect(path) as connection:
        lines = list(connection.iterdump())
    connection.close()
    return lines


@pytest.fixture
def book(tmp_path):
    book = Ledger(tmp_path / "state" / "ledger.db")
    yield book
    book.close()


def test_a_full_database_is_a_507_and_earlier_jobs_stay(book):
    kept = submit(book, payload=b"kept")
    pages = book._db._connection.execute("PRAGMA page_count").fetchone()[0]
    book._db._connection.execute(f"PRAGMA max_page_count={pages}")
    lease = book.lease("w")
    assert lease
    with raises(StorageError) as caught:
        submit(book, config={"large": "x" * 100_000})
    assert caught.value.status == 507 and caught.value.code == "storage_full"
    with pytest.raises(StorageError):
        book.progress(lease, phase="training", step=1, message="x" * 100_000)
    assert book.job(kept.id).step == 0
    assert [job.id for job in book.jobs()] == [kept.id]
    assert files(book) == {f"{kept.id}.payload"}
    book._db._connection.execute("PRAGMA max_page_count=100000")
    book.progress(lease, phase="training", step=1, message="x" * 100_000)
    assert submit(book, config={"large": "x" * 100_000}).state is JobState.QUEUED
    assert book._db._connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


def test_a_read_only_ledger_is_a_507(book):
    submit(book)
    book._db._connection.execute("PRAGMA query_only=ON")  # root may write where the modes say it may not
    before = dump(book.path)
    for write in (lambda: submit(book), lambda: book.lease("w"), lambda: book.cancel(book.jobs()[0].id)):
        with raises(StorageError):
            write()
    assert dump(book.path) == before and len(files(book)) == 1


@pytest.mark.parametrize("point", ["submit:before-spool", "submit:after-spool", "submit:before-commit"])
@pytest.mark.parametrize(("action", "error"), [("enospc", StorageError), ("raise", faults.FaultInjected)])
def test_a_submit_that_fails_half_way_leaves_nothing(book, monkeypatch, point, action, error):
    kept = submit(book)
    before = dump(book.path)
    monkeypatch.setattr(faults, "_faults", faults.parse(f"{point}:{action}"))
    with raises(error):
        submit(book, idempotency_key="k")
    assert dump(book.path) == before
    assert files(book) == {f"{kept.id}.payload"}
    assert submit(book, idempotency_key="k").position == 2


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("kth", [1, 2])  # the payload's, the directory's
def test_an_fsync_that_fails_is_a_507_and_is_not_tried_again(book, monkeypatch, code, kth):
    calls, fsync = 0, os.fsync

    def fail(descriptor):
        nonlocal calls
        calls += 1
        if calls == kth:
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with raises(StorageError):
        submit(book)
    assert (calls, book.jobs(), files(book)) == (kth, [], set())


def test_the_payload_is_on_the_disk_before_the_job_is_in_the_ledger(book, monkeypatch):
    """A killed process leaves its writes in the page cache, a power cut does not: what counts is the order of calls."""
    calls: list[str] = []
    names: dict[int, str] = {}
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append(f"fsync {path.suffix or path.name}")
        names[os.fstat(descriptor).st_ino] = path.name
        fsync(descriptor)

    def record_rename(source, target):
        assert os.stat(source).st_ino in names
        calls.append("rename")
        rename(source, target)

    def at_point(name):
        with sqlite3.connect(book.path) as other:
            calls.append(f"{name}: {other.execute('SELECT count(*) FROM job').fetchone()[0]}")
        other.close()

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    monkeypatch.setattr(faults, "point", at_point)
    submit(book)
    assert calls == [
        "submit:before-spool: 0",
        "fsync .tmp",
        "submit:after-spool: 0",
        "rename",
        "fsync spool",
        "submit:before-commit: 0",
        "submit:after-commit: 1",
    ]
    settings = [
        book._db._connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")
    ]
    assert settings == ["wal", 2]


def test_a_locked_ledger_is_a_503_and_not_a_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_schema, "BUSY_SECONDS", 0.05)
    book = Ledger(tmp_path / "ledger.db")
    other = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with raises(NotReadyError) as caught:
        submit(book)
    assert caught.value.retry_after > 0
    assert book.jobs() == [] and files(book) == set()
    other.execute("ROLLBACK")
    submit(book)
    other.close()
    book.close()


def test_processes_that_start_together_wait_for_the_one_that_makes_the_file(tmp_path):
    """SQLite refuses the change to WAL at once, whatever its timeout, while another process is about to write."""
    other = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(0.1, lambda: other.execute("COMMIT"))
    timer.start()
    book = Ledger(tmp_path / "ledger.db")
    timer.join()
    assert submit(book).position == 1
    book.close()
    other.close()


def test_a_damaged_ledger_and_one_of_another_version_are_refused(tmp_path):
    (tmp_path / "ledger.db").write_bytes(b"this is no database, " * 500)
    with raises(LedgerDamagedError):
        Ledger(tmp_path / "ledger.db")
    for version, upgrades in ((99, True), (min(ledger_tables.UPGRADES) - 2, False)):
        other = tmp_path / str(version) / "ledger.db"
        Ledger(other).close()
        with sqlite3.connect(other) as connection:
            connection.execute(f"PRAGMA user_version={version}")
        connection.close()
        with raises(GroupwiseError) as caught:
            Ledger(other)
        assert ("upgrade" in str(caught.value.hint)) is upgrades


@pytest.mark.parametrize("version", [each - 1 for each in ledger_tables.UPGRADES])
def test_a_ledger_of_a_version_before_is_brought_up_to_date(tmp_path, version):
    """What later versions added is taken away again, and a rollout is kept."""
    added = {
        7: ["ALTER TABLE rollout DROP COLUMN job", "ALTER TABLE rollout DROP COLUMN reward"],
        8: [
            *(f"DROP INDEX {index}" for index in ("job_tenant", "rollout_age", "rollout_upto", "rollout_nth")),
            "DROP INDEX feedback_tenant",
            *(f"ALTER TABLE {table} DROP COLUMN tenant" for table in ("job", "rollout", "feedback")),
            *(f"ALTER TABLE {table} DROP COLUMN nth" for table in ("rollout", "feedback")),
            "ALTER TABLE job DROP COLUMN turn",
            "CREATE INDEX rollout_age ON rollout (created_at)",
            "CREATE INDEX rollout_upto ON rollout (upto)",
            "ALTER TABLE feedback DROP COLUMN sender",
            "DROP TABLE known_vote",
            "DROP TABLE distrusted",
        ],
        9: [
            *(f"DROP INDEX {index}" for index in ("job_turn", "job_own", "job_makes", "job_reads")),
            *(f"ALTER TABLE job DROP COLUMN {column}" for column in ("alone", "own", "tokens")),
        ],
        10: [
            *(f"DROP INDEX {index}" for index in ("job_ahead", "job_behind", "job_waiting", "job_deadline")),
            "ALTER TABLE job DROP COLUMN deadline",
        ],
    }
    assert added.keys() == ledger_tables.UPGRADES.keys()
    path = tmp_path / "ledger.db"
    book = Ledger(path)
    kept = RolloutRecord("kept", (1, 2), (7, 2), (-0.1, -0.5), "math@3", 0.7, "stop", "said")
    book.save_rollouts([kept])
    with book.reader("looking") as db:
        tables = _tables(db)
    book.close()
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in (each for later, its in reversed(added.items()) if later > version for each in its):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version={version}")
    for _ in range(2):
        with closing(Ledger(path)) as book:
            assert book.rollouts(["kept"]) == {"kept": kept}
            job = submit(book, rewards={"kept": 0.5, "forgotten": 1.0})
            with book.reader("looking") as db:
                assert tuple(db.execute("SELECT job, reward FROM rollout").fetchone()) == (job.id, 0.5)
                assert _tables(db) == tables


def _tables(db: sqlite3.Connection) -> dict[str, set[str]]:
    """Return the columns of each table and index."""
    names = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'")]
    return {name: {str(row[1]) for row in db.execute(f"PRAGMA table_info({name})")} for name in names}


def test_a_ledger_that_cannot_be_made_says_where(tmp_path):
    (tmp_path / "file").write_text("")
    with raises(StorageError):
        Ledger(tmp_path / "file" / "ledger.db")
