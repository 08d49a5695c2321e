"""Why a job waits, and when it begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from random import Random
from typing import Any

import pytest

from groupwise.server.waiting import Queue
from groupwise.store.ledger import Ledger
from groupwise.store.ledger_schema import Lease
from groupwise.store.ledger_turns import QUANTUM
from wording import wording


class Book:
    """A ledger, and what is said of its jobs."""

    def __init__(self, ledger: Ledger):
        self.ledger = ledger

    def post(
        self, adapter: str, *, kind: str = "grpo", summary=None, deadline: float | None = None, **config: Any
    ) -> str:
        options = {"kind": kind, "summary": summary or {}, "payload": b"{}", "steps": 10, "auto_load": False}
        return self.ledger.submit(adapter=adapter, config=config, deadline=deadline, **options)[0].id

    def take(self) -> Lease:
        lease = self.ledger.lease("w")
        assert lease is not None
        return lease

    def at_work(self, adapter: str, *, tokens: int = 0, **config: Any) -> Lease:
        """A job that has made its first of ten steps, in two seconds."""
        self.post(adapter, **config)
        lease = self.take()
        if tokens:
            self.ledger.progress(lease, phase="training", step=1, metrics={"time/step_s": 2.0}, tokens=tokens)
        return lease

    def why(self, id: str, *, worker: bool = True) -> tuple[str, str | None, float | None] | None:
        said = Queue(self.ledger.unfinished(), worker=worker).why(self.ledger.job(id))
        if said is None:
            return None
        wording(said.message.replace(str(said.job_id), "JOB"))
        return said.reason, said.job_id, said.about_seconds


@pytest.fixture
def book(tmp_path) -> Iterator[Book]:
    ledger = Ledger(tmp_path / "ledger.db")
    yield Book(ledger)
    ledger.close()


@pytest.fixture
def later(monkeypatch) -> None:
    monkeypatch.setattr("groupwise.server.waiting.AT_ONCE_S", -1.0)


def test_one_that_nothing_is_before_begins_at_once(book):
    assert book.why(book.post("math")) == ("turn", None, 0.0)


def test_one_that_the_worker_has_not_taken_waits_for_it(book, later):
    assert book.why(book.post("math")) == ("turn", None, None)


def test_what_does_not_wait_has_no_reason(book):
    assert book.why(book.at_work("math").job.id) is None


def test_without_a_worker_none_begins(book):
    assert book.why(book.post("math"), worker=False) == ("worker", None, None)


def test_a_job_waits_for_the_one_before_it_of_its_adapter(book):
    first = book.at_work("math", tokens=64)
    second, third = book.post("math"), book.post("sql", base_adapter="math")
    assert book.why(second) == ("adapter", first.job.id, 18.0)  # nine steps
    assert book.why(third) == ("adapter", second, None)  # nobody knows how long the second one takes


def test_a_job_that_waits_for_several_begins_when_all_have_ended(book):
    first = book.at_work("math", tokens=64)
    beside = book.at_work("sql", tokens=64, base_adapter="code")
    assert book.why(book.post("code", base_adapter="math")) == ("adapter", beside.job.id, 36.0)
    book.ledger.published(first, "math@1")
    assert book.why(book.post("math", base_adapter="sql")) is not None
    assert book.why(book.post("sql", base_adapter="code@2"))[1] != beside.job.id  # code's, or the second of math's


@pytest.mark.parametrize("seed", range(8))
def test_what_has_to_wait_for_no_other_is_what_a_worker_may_take(book, seed):
    """What is said of a random queue is what the ledger does with it."""
    random = Random(seed)
    for _ in range(24):
        book.post(random.choice("abcdefgh"), base_adapter=random.choice([None, "base", "a", "b@2", "c", "d", "h"]))
        if random.random() < 0.2 and (lease := book.ledger.lease("w")) is not None and random.random() < 0.5:
            book.ledger.published(lease, "x@1")
    active = book.ledger.unfinished()
    queue = Queue(active, worker=True)
    said = [job.id for job in active if (why := queue.why(job)) is not None and why.reason != "adapter"]
    taken = iter(lambda: book.ledger.lease("w"), None)
    assert sorted(lease.job.id for lease in taken) == sorted(said)


# --- deadlines ---


def outlook(book: Book, id: str, lately=()) -> tuple[str, float | None]:
    queue, job = Queue(book.ledger.unfinished(), worker=True, lately=lately), book.ledger.job(id)
    said = queue.deadline(job, queue.why(job))
    assert said is not None and said.at == "2030-01-31T18:00:00Z"
    wording(said.message)
    return said.outlook, said.about_seconds


@pytest.fixture
def clock(monkeypatch) -> Iterator[Callable[[float], None]]:
    """Sets the time, in seconds after the deadline."""

    def set_to(late: float) -> None:
        for module in ("server.waiting", "store.ledger", "store.ledger_attempts"):
            monkeypatch.setattr(f"groupwise.{module}.time.time", lambda: DUE + late)

    set_to(-100)
    return set_to


DUE = datetime(2030, 1, 31, 18, tzinfo=UTC).timestamp()


def test_whether_a_job_ends_in_time_is_said_from_how_long_its_steps_take(book, clock):
    lease = book.at_work("math", deadline=DUE)
    id = lease.job.id
    assert outlook(book, id) == ("unknown", None)
    book.ledger.progress(lease, phase="training", step=1, metrics={"time/step_s": 2.0}, tokens=64)
    assert outlook(book, id) == ("in_time", 18.0)
    clock(-10)
    assert outlook(book, id) == ("late", 18.0)
    clock(5)
    assert outlook(book, id) == ("missed", None)
    book.ledger.published(lease, "math@1")
    assert outlook(book, id) == ("missed", None)


def test_a_job_that_has_made_no_step_is_as_fast_as_others_were(book, clock):
    lately = book.at_work("sql", tokens=64)
    book.ledger.published(lately, "sql@1")  # 32 tokens a second
    ended = [book.ledger.job(lately.job.id)]
    summary = {"prompt_tokens": 320, "completion_tokens": 640}
    in_time = book.post("math", summary=summary, deadline=DUE, iterations=2)  # 60 s
    late = book.post("math", summary=summary, deadline=DUE, iterations=2)
    assert outlook(book, in_time, ended) == ("in_time", 60.0)
    assert outlook(book, late, ended) == ("unknown", None)  # nobody has begun what it waits for
    examples = book.post("code", kind="sft", summary={"tokens": 960}, deadline=DUE, epochs=4)
    assert outlook(book, examples, ended) == ("late", 120.0)
    assert outlook(book, examples) == ("unknown", None)


@pytest.mark.parametrize(("end", "late", "said"), [("ends", -1, "met"), ("ends", 9, "missed"), ("fails", -1, "missed")])
def test_what_has_ended_has_met_its_deadline_or_not(book, clock, end, late, said):
    lease = book.at_work("math", deadline=DUE)
    clock(late)
    if end == "ends":
        book.ledger.published(lease, "math@1")
    else:
        book.ledger.fail(lease, {"code": "x", "message": "no"})
    assert outlook(book, lease.job.id) == (said, None)


def test_without_a_deadline_nothing_is_said(book):
    job = book.ledger.job(book.post("math"))
    assert Queue([job], worker=True).deadline(job, None) is None


def test_as_many_are_trained_as_there_is_room_for(book, later):
    book.at_work("math", tokens=QUANTUM // 2)
    book.at_work("sql", tokens=QUANTUM)
    assert book.why(book.post("code")) == ("room", None, 2.0)  # a quantum of sql's
    assert book.why(book.post("more")) == ("turn", None, 2.0)
    assert book.why(book.post("most")) == ("turn", None, 4.0)  # the third, and there are two places


def test_before_the_first_steps_nobody_knows(book, later):
    book.at_work("math")
    assert book.why(book.post("code")) == ("room", None, None)


def test_what_has_none_beside_it_waits_for_all_that_run(book, later):
    book.at_work("math", tokens=QUANTUM)
    book.at_work("sql", tokens=QUANTUM // 4)
    assert book.why(book.post("code", lora_dropout=0.1)) == ("alone", None, 8.0)


def test_beside_what_has_none_beside_it_others_wait(book):
    first = book.at_work("math", tokens=64, gradient_checkpointing=True)
    assert book.why(book.post("code")) == ("alone", first.job.id, 18.0)
