"""A ledger whose file is damaged: found before anything relies on it, and no accepted job is lost by its repair."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from groupwise.errors import DamagedPayloadError, LedgerDamagedError, StorageFullError
from groupwise.store import ledger_repair
from groupwise.store.ledger import Job, JobState, Ledger, RolloutRecord
from groupwise.store.ledger_repair import BACKUP, check, repair
from wording import raises

Fill = Callable[..., dict[str, Job]]
ERROR = {"code": "x", "message": "it failed", "hint": None}


def nothing(tenant: str, adapter: str, job: str) -> None:
    """The store has no version of any job."""


def submit(book: Ledger, number: int, **options) -> Job:
    given = {"kind": "grpo", "adapter": "math", "config": {"note": "c" * 300}, "summary": {"warnings": []}}
    given |= {"payload": f"payload {number}".encode(), "steps": 3, "auto_load": True, "max_queued": 1000}
    return book.submit(**given, idempotency_key=f"key-{number}", fingerprint=str(number), **options)[0]


def rollout(number: int) -> RolloutRecord:
    return RolloutRecord(f"r{number}", (1, 2), (7,), (-0.5,), "base", 1.0, "stop", "t" * 200)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "ledger.db"


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[Path, dict[str, Job]]]:
    """State directories with and without a backup."""
    roots = {backup: tmp_path_factory.mktemp("state") / "state" for backup in (True, False)}
    return {backup: (root, make(root / "ledger.db", backup=backup)) for backup, root in roots.items()}


@pytest.fixture
def fill(path: Path, filled: dict[bool, tuple[Path, dict[str, Job]]]) -> Fill:
    def fill(path: Path, *, backup: bool) -> dict[str, Job]:
        shutil.copytree(filled[backup][0], path.parent)
        return filled[backup][1]

    return fill


def make(path: Path, *, backup: bool) -> dict[str, Job]:
    """Thirty jobs, of which the last ten came after the backup; two ended in each of the ways."""
    book = Ledger(path)
    for number in range(30):
        if number == 20 and backup:
            book.back_up()
        job = submit(book, number)
        book.save_rollouts([rollout(number)])
        if number % 10 < 4:
            lease = book.lease("w")
            assert lease is not None
            book.progress(lease, phase="training", step=1, metrics={"loss": 1.0})
            if number % 10 < 2:
                book.published(lease, f"math@{number + 1}")
                book.complete(lease.job.id)
            else:
                book.fail(lease, ERROR)
        assert book.job(job.id)
    jobs = {job.id: job for job in book.jobs()}
    book.close()  # and the log is folded into the file
    assert not Path(f"{path}-wal").exists()
    return jobs


def page_size(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[16:18], "big")


def flip(path: Path, page: int) -> None:
    size, data = page_size(path), bytearray(path.read_bytes())
    data[page * size : (page + 1) * size] = bytes(255 - byte for byte in data[page * size : (page + 1) * size])
    path.write_bytes(data)


def pages(path: Path) -> int:
    return path.stat().st_size // page_size(path)


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def told(path: Path) -> str | None:
    """What is to be done about the ledger, if it is damaged."""
    try:
        check(path)
    except LedgerDamagedError as error:
        return str(error.hint)
    return None


def repaired(path: Path, find: ledger_repair.FindVersion = nothing) -> Ledger:
    assert repair(path, find=find)
    check(path)
    assert repair(path, find=find) is None
    return Ledger(path)


def test_a_whole_ledger_is_left_as_it_is(path: Path, fill: Fill) -> None:
    check(path)  # there is none yet
    assert repair(path, find=nothing) is None and not path.exists()
    fill(path, backup=True)
    before = content(path.parent)
    check(path)
    assert repair(path, find=nothing) is None
    assert before.items() <= content(path.parent).items()


@pytest.mark.parametrize("backup", [True, False])
def test_whichever_page_is_flipped_it_is_found_and_no_accepted_job_is_lost(
    path: Path, fill: Fill, backup: bool
) -> None:
    jobs = fill(path, backup=backup)
    whole, found = path.read_bytes(), 0
    for page in range(pages(path)):
        path.write_bytes(whole)
        flip(path, page)
        if (hint := told(path)) is None:
            continue  # the page is of no use
        assert "nothing was changed" in hint and "--repair-ledger" in hint
        assert ("20 jobs" in hint) == backup
        found += 1
        book = repaired(path)
        after = {job.id: job for job in book.jobs()}
        assert after.keys() == jobs.keys(), f"page {page}"
        for number, job in enumerate(sorted(jobs.values(), key=lambda job: job.created_at)):
            known = after[job.id]
            assert (known.adapter, known.config, known.steps) == (job.adapter, job.config, job.steps)
            assert known.state in (job.state, JobState.QUEUED)
            assert book.payload(job.id) == f"payload {number}".encode()
            assert submit(book, number).id == job.id  # its idempotency key still counts
        assert not backup or [after[id].state for id in after] != [JobState.QUEUED] * len(after)
        book.close()
        for kept in path.parent.glob("ledger.db.damaged-*"):
            assert kept.read_bytes() != whole
            kept.unlink()
    assert found >= 5


@pytest.mark.parametrize("damage", ["gone", "empty", "half", "other bytes"])
def test_a_file_of_which_little_is_left(path: Path, fill: Fill, damage: str) -> None:
    jobs = fill(path, backup=True)
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "half": data[: len(data) // 2], "other bytes": b"rubbish " * 9000}[damage])
    with raises(LedgerDamagedError):
        check(path)
    book = repaired(path)
    assert {job.id for job in book.jobs()} == jobs.keys()
    states = {job.id: job.state for job in book.jobs()}
    assert sum(state is jobs[id].state for id, state in states.items()) >= 26  # of the ten after the backup four ended
    book.close()


def test_what_sqlite_does_not_notice_is_found_too(path: Path, fill: Fill) -> None:
    """A byte within a text: SQLite has no checksums, but the text is no JSON any more."""
    jobs = fill(path, backup=True)
    data = path.read_bytes()
    at = data.index(b'{"note":"ccc')
    path.write_bytes(data[:at] + b"\x00" + data[at + 1 :])
    with raises(LedgerDamagedError):
        check(path)
    book = repaired(path)
    assert {job.id: job.config for job in book.jobs()} == {id: job.config for id, job in jobs.items()}
    book.close()


@pytest.mark.parametrize(
    ("published", "auto_load", "state", "phase"),
    [
        (None, True, JobState.QUEUED, "waiting"),
        (("math@7", True), True, JobState.COMPLETED, "done"),
        (("math@7", False), True, JobState.RUNNING, "swapping"),
        (("math@7", False), False, JobState.COMPLETED, "done"),
    ],
)
def test_a_job_that_has_published_since_is_not_trained_again(
    path: Path, published: tuple[str, bool] | None, auto_load: bool, state: JobState, phase: str
) -> None:
    book = Ledger(path)
    options = {"config": {}, "summary": {}, "payload": b"{}", "steps": 1, "auto_load": auto_load}
    backed_up = book.submit(kind="sft", adapter="math", **options)[0]
    book.back_up()
    late = book.submit(kind="sft", adapter="math", **options)[0]
    book.close()
    path.unlink()
    asked: list[tuple[str, str]] = []

    def find(tenant: str, adapter: str, job: str) -> tuple[str, bool] | None:
        asked.append((adapter, job))
        return published

    book = repaired(path, find)
    assert asked == [("math", backed_up.id), ("math", late.id)]
    for id, source in ((backed_up.id, "the backup"), (late.id, "what was submitted")):
        job = book.job(id)
        assert (job.state, job.phase, job.version) == (state, phase, None if published is None else "math@7")
        assert any(source in event.message for event in book.events(id))
    if state is JobState.RUNNING:
        assert [job.id for job in book.published_jobs()] == [backed_up.id, late.id]
    book.close()


@pytest.mark.parametrize("kth", range(1, 8))
def test_a_repair_that_is_interrupted_is_finished(
    path: Path, fill: Fill, monkeypatch: pytest.MonkeyPatch, kth: int
) -> None:
    """Killed at any rename: nothing starts before it is called again, and then all is there."""
    jobs = fill(path, backup=True)
    Path(f"{path}-wal").write_bytes(b"a log")
    flip(path, 2)
    renames, rename = 0, os.rename

    def die(source: str | Path, target: str | Path) -> None:
        nonlocal renames
        renames += 1
        if renames == kth:
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", die)
        try:
            repair(path, find=nothing)
        except KeyboardInterrupt:
            with pytest.raises(LedgerDamagedError):
                check(path)
            patch.setattr(os, "rename", rename)
            assert repair(path, find=nothing)
        else:
            assert kth > 4
    check(path)
    book = Ledger(path)
    assert {job.id for job in book.jobs()} == jobs.keys()
    book.close()
    left = {file.name for file in path.parent.iterdir()} - {"ledger.db", "ledger.db-wal", "ledger.db-shm"}
    assert {name for name in left if ".damaged-" not in name} == {BACKUP, "spool"}


def test_the_disk_fills_up_during_a_repair(path: Path, fill: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said, and the damaged file is still there for the next one."""
    fill(path, backup=True)
    flip(path, 2)
    before = content(path.parent)

    plain: Callable[..., list[int]] = ledger_repair._bring_over
    monkeypatch.setattr(
        ledger_repair,
        "_bring_over",
        lambda source, db, table: (db.execute("PRAGMA max_page_count=1"), plain(source, db, table))[1],
    )
    with raises(StorageFullError):
        repair(path, find=nothing)
    assert before.items() <= content(path.parent).items()
    monkeypatch.undo()
    repaired(path).close()


# ---- while it is used ----


def test_damage_that_is_met_in_use_is_remembered(path: Path, fill: Fill) -> None:
    fill(path, backup=False)
    book = Ledger(path)
    for page in range(1, pages(path)):
        flip(path, page)
    assert book.damage is None
    with raises(LedgerDamagedError) as caught:
        list(map(book.events, [job.id for job in book.jobs(limit=1000)]))
    assert caught.value.status == 503
    assert book.damage == caught.value.message
    book.close()


def test_a_backup_is_a_whole_ledger_and_never_one_that_is_damaged(path: Path, fill: Fill) -> None:
    fill(path, backup=True)
    backup = path.with_name(BACKUP)
    assert backup.stat().st_mode & 0o077 == 0
    with sqlite3.connect(backup) as copy:
        assert copy.execute("SELECT count(*) FROM job").fetchone()[0] == 20
        assert copy.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    before = backup.read_bytes()
    book = Ledger(path)
    with raises(StorageFullError):
        book.back_up(least_free=1 << 60)
    book.back_up()
    newer = backup.read_bytes()
    assert newer != before
    flip(path, 5)
    with pytest.raises(LedgerDamagedError):
        book.back_up()
    assert backup.read_bytes() == newer and book.damage is not None
    assert not path.with_name(f"{BACKUP}.tmp").exists()
    book.close()


def test_others_write_while_it_is_backed_up(path: Path) -> None:
    book, other = Ledger(path), Ledger(path)
    copy = sqlite3.connect(path)
    copy.execute("BEGIN")
    copy.execute("SELECT count(*) FROM job").fetchone()  # as a backup, which reads one moment
    job = submit(other, 1)
    book.back_up()
    copy.close()
    with sqlite3.connect(path.with_name(BACKUP)) as saved:
        assert saved.execute("SELECT id FROM job").fetchall() == [(job.id,)]
    book.close()
    other.close()


# ---- payloads ----


def test_a_torn_payload_is_told_from_a_whole_one(path: Path) -> None:
    book = Ledger(path)
    job = submit(book, 1)
    spooled = path.parent / "spool" / f"{job.id}.payload"
    whole = spooled.read_bytes()
    assert book.payload(job.id) == b"payload 1"
    for torn in (
        b"",
        whole[:-1],
        whole[:40],
        whole + b"x",
        whole.replace(b"payload 1", b"payload 2"),
        bytes(len(whole)),
    ):
        spooled.write_bytes(torn)
        with raises(DamagedPayloadError):
            book.payload(job.id)
    spooled.write_bytes(whole)
    assert book.payload(job.id) == b"payload 1"
    book.close()


def test_what_is_no_payload_of_ours_makes_no_job(path: Path) -> None:
    book = Ledger(path)
    job = submit(book, 1)
    book.close()
    spool = path.parent / "spool"
    head, accepted, rest = (spool / f"{job.id}.payload").read_bytes().split(b"\n", 2)
    others = (b"", b"rubbish", b"head\n{", b"head\n[1]\nrest", head + b'\n{"row": {"id": 3}, "key": null}\n', accepted)
    for number, text in enumerate((*others, b"\n".join((head, accepted, rest)))):  # the last: of another job
        (spool / f"{number:032x}.payload").write_bytes(text)
    path.unlink()
    book = repaired(path)
    assert [known.id for known in book.jobs()] == [job.id]
    book.close()
