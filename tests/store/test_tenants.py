"""Tenants in the store: what one has, no other reads, replaces, evicts or delays; and the owner's is as it was."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from groupwise.errors import ConfigError, IdempotencyConflictError, JobNotFoundError, QueueFullError
from groupwise.store import ledger_repair, ledger_schema, ledger_tables
from groupwise.store.feedback import Feedback, FeedbackLog
from groupwise.store.keys import KeyFile
from groupwise.store.ledger import Job, Ledger, RolloutRecord, kept_rollouts
from groupwise.store.tenants import check_tenant, home_of, tenants_in
from wording import raises

OURS, THEIRS = "acme", "globex"


@pytest.fixture
def whole(tmp_path: Path) -> Iterator[Ledger]:
    book = Ledger(tmp_path / "ledger.db")
    yield book
    book.close()


def submit(book: Ledger, **options) -> Job:
    given = {"kind": "grpo", "adapter": "math", "config": {}, "summary": {}, "payload": b"{}", "steps": 1}
    return book.submit(**{**given, "auto_load": True, **options})[0]


def rollout(id: str, text: str = "said") -> RolloutRecord:
    return RolloutRecord(id, (1, 2), (7, 2), (-0.1, -0.5), "math@3", 0.7, "stop", text)


def rating(id: str, of: str) -> Feedback:
    return Feedback(id=id, rollout=of, version="math@3", score=1.0, created_at=1.0)


# ---- what is seen ----
def test_a_tenants_ledger_is_opened_once(whole: Ledger) -> None:
    """Whoever fails to begin a tenant, with a full disk say, tries again with each request."""
    assert whole.of(OURS) is whole.of(OURS) and whole.of(OURS) is not whole.of(THEIRS)


def test_of_one_tenant_another_sees_nothing_and_the_whole_has_all(whole: Ledger) -> None:
    ours, theirs, owner = whole.of(OURS), whole.of(THEIRS), whole.of("")
    job = submit(ours, rewards={"r": 0.5})
    ours.save_rollouts([rollout("r")])
    FeedbackLog(ours).add(rating("f", "r"))
    for other in (theirs, owner):
        assert other.jobs() == [] and other.rollouts(["r"]) == {} and FeedbackLog(other).list() == []
        assert FeedbackLog(other).counts()["waiting"] == 0 and FeedbackLog(other).waiting() == []
        assert kept_rollouts(whole.path, other.tenant, ["r"]) == {}
        for act in (other.job, other.events, other.metrics, other.cancel, other.payload):
            with pytest.raises(JobNotFoundError):
                act(job.id)
        with pytest.raises(JobNotFoundError):
            other.jobs(before=job.id)
        with other.reader("counting") as db:
            for table in ledger_tables.SHARE:
                assert db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] == 0
    assert ours.job(job.id).tenant == whole.job(job.id).tenant == OURS
    assert set(ours.rollouts(["r"])) == set(whole.rollouts(["r"])) == {"r"}


def test_who_forgets_a_tenant_in_a_statement_is_told_by_sqlite(whole: Ledger) -> None:
    ours = whole.of(OURS)
    for statement in ("DELETE FROM rollout", "UPDATE job SET step = 1", "INSERT INTO setting VALUES ('a', '1')"):
        with pytest.raises(sqlite3.OperationalError, match="view"), ours.database.transaction("forgetting") as db:
            db.execute(statement)


def test_an_idempotency_key_is_its_tenants(whole: Ledger) -> None:
    books = [whole.of(OURS), whole.of(THEIRS), whole.of("")]
    jobs = [submit(book, idempotency_key="k", fingerprint=str(i)) for i, book in enumerate(books)]
    assert len({job.id for job in jobs}) == 3
    for i, (book, job) in enumerate(zip(books, jobs, strict=True)):
        again = book.by_key("k", str(i))
        assert again is not None and again.id == job.id
        with pytest.raises(IdempotencyConflictError):
            book.by_key("k", "another body")
        kept, new = FeedbackLog(book).add(rating(f"f{i}", "r"), key="k", fingerprint=str(i))
        assert new and FeedbackLog(book).by_key("k", str(i)) == kept


def test_the_queue_and_its_room_are_the_tenants_own(whole: Ledger) -> None:
    ours, theirs = whole.of(OURS), whole.of(THEIRS)
    for _ in range(3):
        submit(ours, max_queued=3)
    with raises(QueueFullError):
        submit(ours, max_queued=3)
    assert submit(theirs, max_queued=3).position == 1


def test_the_numbers_that_a_client_is_told_count_the_tenants_own(whole: Ledger) -> None:
    """By others' it would know how much they do meanwhile."""
    ours, theirs = whole.of(OURS), whole.of(THEIRS)
    job, found = submit(ours), list[int]()
    for round in range(3):
        ours.save_rollouts([rollout(f"a{round}")])
        FeedbackLog(ours).add(rating(f"fa{round}", f"a{round}"))
        for i in range(5 * round):
            theirs.save_rollouts([rollout(f"b{round}-{i}")])
            FeedbackLog(theirs).add(rating(f"fb{round}-{i}", "b"))
            submit(theirs, max_queued=1000)
        with ours.reader("looking") as db:
            found.append(db.execute("SELECT max(seq) FROM rollout").fetchone()[0])
    assert found == [1, 2, 3]
    assert [each.seq for each in FeedbackLog(ours).list()] == [3, 2, 1]
    assert [each.seq for each in FeedbackLog(ours).list(before=3, limit=1)] == [2]
    ours.cancel(job.id)
    assert [each.seq for each in ours.events(job.id)] == [1, 2, 3]
    assert [each.seq for each in ours.events(job.id, after=2)] == [3]


def test_a_look_for_new_events_does_not_read_those_there_are(whole: Ledger) -> None:
    """A stream looks four times a second, however long the job's story is by then."""
    ours, steps = whole.of(OURS), list[None]()
    job = submit(ours)
    with whole._db.transaction("telling much") as db:
        row = "SELECT seq, 0, 'message', 'info', 'still at it', '{}' FROM main.job"
        for _ in range(300):
            db.execute(f"INSERT INTO main.event (job, at, kind, level, message, data) {row}")
    events = ours.events(job.id)
    assert [each.seq for each in events] == [*range(1, len(events) + 1)] and len(events) > 300
    ours._db._connection.set_progress_handler(lambda: steps.append(None), 1)  # of SQLite's machine
    assert ours.events(job.id, after=len(events)) == []
    ours._db._connection.set_progress_handler(None, 0)
    assert len(steps) < 10 * len(events)


# ---- fairness ----
def test_a_hundred_waiting_jobs_delay_anothers_first_by_the_one_that_runs(whole: Ledger) -> None:
    ours, theirs = whole.of(OURS), whole.of(THEIRS)
    for _ in range(100):
        submit(ours, max_queued=1000)
    running = whole.lease("w")
    assert running is not None and running.job.tenant == OURS
    mine = submit(theirs)
    whole.cancelled(running)
    following = whole.lease("w")
    assert following is not None and following.job.id == mine.id
    whole.cancelled(following)
    assert (lease := whole.lease("w")) is not None and lease.job.tenant == OURS  # and nobody starves


def test_turns_go_round_and_within_a_tenant_the_oldest_is_first(whole: Ledger) -> None:
    books = {name: whole.of(name) for name in ("", OURS, THEIRS)}
    submitted = {
        name: [submit(book).id for _ in range(count)]
        for (name, book), count in zip(books.items(), (3, 5, 1), strict=True)
    }
    order: list[str] = []
    while (lease := whole.lease("w")) is not None:
        order.append(lease.job.tenant)
        assert lease.job.id == submitted[lease.job.tenant].pop(0)
        whole.fail(lease, {"code": "x", "message": "x", "hint": None})
    assert order == ["", OURS, THEIRS, "", OURS, "", OURS, OURS, OURS]


def test_a_job_that_crashes_again_and_again_loses_its_turn(whole: Ledger) -> None:
    first, other = submit(whole.of(OURS)), submit(whole.of(THEIRS))
    assert (lease := whole.lease("w")) is not None and lease.job.id == first.id
    whole.expire("w")
    assert (lease := whole.lease("w")) is not None and lease.job.id == other.id


# ---- retention ----
def test_a_flood_of_rollouts_evicts_the_flooder_only(whole: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_schema, "KEEP_ROLLOUTS", 5)
    ours, theirs, owner = whole.of(OURS), whole.of(THEIRS), whole.of("")
    for book, id in ((ours, "a"), (owner, "o")):
        book.save_rollouts([rollout(id)])
    theirs.save_rollouts([rollout(f"b{i}") for i in range(20)])
    for book, id in ((ours, "a"), (owner, "o")):
        book.save_rollouts([rollout(f"{id}2")])
        assert set(book.rollouts([id, f"{id}2"])) == {id, f"{id}2"}
    assert set(theirs.rollouts([f"b{i}" for i in range(20)])) == {f"b{i}" for i in range(15, 20)}
    whole.prune()
    assert set(whole.rollouts(["a", "a2", "o", "o2"])) == {"a", "a2", "o", "o2"}


def test_so_do_many_bytes(tmp_path: Path) -> None:
    book = Ledger(tmp_path / "ledger.db", rollout_bytes=500)
    ours, theirs = book.of(OURS), book.of(THEIRS)
    ours.save_rollouts([rollout("a")])
    theirs.save_rollouts([rollout(f"b{i}", "x" * 200) for i in range(9)])
    ours.save_rollouts([rollout("a2")])
    assert set(book.rollouts(["a", "a2"])) == {"a", "a2"} and "b0" not in book.rollouts(["b0"])
    book.close()


def test_rewards_are_written_to_the_tenants_rollouts_only(whole: Ledger) -> None:
    ours, theirs = whole.of(OURS), whole.of(THEIRS)
    ours.save_rollouts([rollout("r")])
    submit(theirs, rewards={"r": -9.0})
    with whole.reader("looking") as db:
        assert db.execute("SELECT reward FROM rollout").fetchone()[0] is None


def test_a_repaired_ledger_knows_whose_everything_is(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with_key = {"idempotency_key": "k", "fingerprint": "f"}
    book = Ledger(path)
    job, mine = submit(book.of(OURS), **with_key), submit(book.of(""), **with_key)
    book.of(OURS).save_rollouts([rollout("r")])
    book.back_up()
    late = submit(book.of(THEIRS), **with_key)
    book.close()
    path.write_bytes(b"no database at all" * 1000)
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    asked: list[str] = []
    assert ledger_repair.repair(path, find=lambda tenant, adapter, job: asked.append(tenant))
    book = Ledger(path)
    for tenant, made in ((OURS, job), ("", mine), (THEIRS, late)):
        assert [each.id for each in book.of(tenant).jobs()] == [made.id]
        known = book.of(tenant).by_key("k", "f")
        assert known is not None and known.id == made.id
    assert set(book.of(OURS).rollouts(["r"])) == {"r"} and asked == [OURS, "", THEIRS]
    book.close()


# ---- names, places and keys ----
@pytest.mark.parametrize(
    "name", ["", "A", "a b", "../x", "-a", "a\n", "a:b", "a.b", "a" * 33, "a'; DROP TABLE job; --"]
)
def test_what_cannot_name_a_tenant_is_refused_everywhere(tmp_path: Path, whole: Ledger, name: str) -> None:
    with raises(ConfigError) as caught:
        check_tenant(name)
    assert caught.value.field == "tenant"
    if name:
        for act in (lambda: home_of(tmp_path, name), lambda: whole.of(name)):
            with pytest.raises(ConfigError):
                act()
        with pytest.raises(ConfigError):
            KeyFile(tmp_path).add("app", role="read", tenant=name)


def test_the_owners_place_is_the_state_directory_as_ever(tmp_path: Path) -> None:
    assert home_of(tmp_path, "") == tmp_path and tenants_in(tmp_path) == []
    home_of(tmp_path, OURS).mkdir(parents=True)
    assert tenants_in(tmp_path) == [OURS]


def test_a_tenants_key_is_never_an_admins_and_its_bounds_are_the_tenants(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path)
    with raises(ConfigError) as caught:
        keys.add("boss", role="admin", tenant=OURS)
    assert caught.value.field == "role"
    with raises(ConfigError) as caught:
        keys.add("mine", role="train", adapters=3)
    assert caught.value.field == "adapters"
    keys.add("one", role="train", tenant=OURS, adapters=3, jobs=2)
    keys.add("two", role="read", tenant=OURS, adapters=5)
    keys.add("phone", role="sample")
    assert [keys.bound(OURS, name) for name in ("adapters", "jobs", "bytes")] == [3, 2, None]
    assert keys.bound(THEIRS, "adapters") is None
    assert [key.label for key in keys.all()] == ["acme:one", "acme:two", "phone"]
    assert '"tenant": ""' not in keys.path.read_text()  # of the owner's keys the file says what it said before
