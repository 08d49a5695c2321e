"""Who makes the next step: nobody gets far ahead of one that could make one, and no processor is idle for that."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from groupwise.errors import Interrupted
from groupwise.run import job_turns
from groupwise.run.job_turns import SLACK, StepTurns
from groupwise.store.ledger import Ledger
from groupwise.store.ledger_schema import JobRecord
from groupwise.store.ledger_turns import LEAD


@pytest.fixture
def book(tmp_path) -> Iterator[Ledger]:
    book = Ledger(tmp_path / "ledger.db")
    yield book
    book.close()


def job(book: Ledger, adapter: str, *, tenant: str = "", weight: int = 1, deadline: float | None = None) -> JobRecord:
    options = {"kind": "sft", "summary": {}, "payload": b"{}", "steps": 9, "auto_load": False, "deadline": deadline}
    view = book.of(tenant) if tenant else book
    return view.submit(adapter=adapter, config={"weight": weight}, **options)[0]


def stop() -> None:
    raise Interrupted("it waits")


def is_held_back(turns: StepTurns, each: JobRecord) -> bool:
    try:
        with turns.step(each, 0, stop):
            return False
    except Interrupted:
        return True


@pytest.fixture(autouse=True)
def short_looks(monkeypatch) -> None:
    monkeypatch.setattr(job_turns, "LOOK_S", 0.01)


def trained(turns: StepTurns, each: JobRecord, tokens: int) -> None:
    """Make a step of so many tokens."""
    with turns.step(each, tokens, stop):
        pass


def test_one_that_is_ahead_waits_while_another_computes(book):
    turns, (one, two, three) = StepTurns(), (job(book, name) for name in ("a", "b", "c"))
    with ExitStack() as at_hand:
        for each in (one, two, three):
            at_hand.enter_context(turns.joined(each))
        trained(turns, one, SLACK)
        with turns.step(two, 1, stop):
            assert not is_held_back(turns, one)  # no more than SLACK ahead of c
        trained(turns, one, 1)
        with turns.step(two, 1, stop):
            assert is_held_back(turns, one)
        assert not is_held_back(turns, one)  # nobody computes
        with turns.step(three, 5, stop), turns.step(two, 1, stop):
            pass
        with turns.step(two, 1, stop):
            assert not is_held_back(turns, one)  # c has caught up


def test_the_weight_of_a_tenant_makes_tokens_count_less(book):
    turns = StepTurns(lambda tenant: 4 if tenant == "acme" else 1)
    heavy, other = job(book, "a", tenant="acme"), job(book, "b", tenant="bell")
    with turns.joined(heavy), turns.joined(other):
        for tokens, held in ((4 * SLACK, False), (4, True)):
            trained(turns, heavy, tokens)
            with turns.step(other, 0, stop):
                assert is_held_back(turns, heavy) is held


def test_others_wait_for_one_with_a_deadline_until_it_is_a_lead_ahead(book):
    turns, soon, other = StepTurns(), job(book, "a", deadline=time.time() + 600), job(book, "b")
    with turns.joined(soon), turns.joined(other):
        for tokens, held in ((0, True), (LEAD - SLACK - 1, True), (1, False)):
            trained(turns, soon, tokens)
            with turns.step(soon, 0, stop):
                assert is_held_back(turns, other) is held
        trained(turns, soon, 2 * SLACK)
        with turns.step(other, 0, stop):
            assert not is_held_back(turns, soon)
        trained(turns, soon, 1)
        with turns.step(other, 0, stop):
            assert is_held_back(turns, soon)


def test_a_weight_makes_tokens_count_less(book):
    turns, heavy, other = StepTurns(), job(book, "a", weight=4), job(book, "b")
    with turns.joined(heavy), turns.joined(other):
        trained(turns, heavy, 4 * SLACK)
        with turns.step(other, 0, stop):
            assert not is_held_back(turns, heavy)
        trained(turns, heavy, 4)
        with turns.step(other, 0, stop):
            assert is_held_back(turns, heavy)


def test_tenants_have_their_turns_whatever_their_adapters_have_had(book):
    turns, mine, more = StepTurns(), job(book, "a", tenant="acme"), job(book, "b", tenant="acme")
    theirs = job(book, "a", tenant="bell")
    with turns.joined(mine), turns.joined(more), turns.joined(theirs):
        trained(turns, mine, SLACK + 1)
        with turns.step(theirs, 0, stop):
            assert is_held_back(turns, more)  # it has had nothing, and its tenant has


def test_who_has_ended_holds_nobody_back(book):
    turns, one, two = StepTurns(), job(book, "a"), job(book, "b")
    began = threading.Event()

    def step() -> None:
        with turns.step(one, 0, lambda: None):
            began.set()

    with turns.joined(one):
        with ExitStack() as at_hand:
            at_hand.enter_context(turns.joined(two))
            trained(turns, one, SLACK + 1)
            computing = at_hand.enter_context(ExitStack())
            computing.enter_context(turns.step(two, 0, stop))
            thread = threading.Thread(target=step)
            thread.start()
            assert not began.wait(0.05)
        thread.join(30)
        assert began.is_set()


def test_nothing_is_kept_of_adapters_whose_jobs_have_ended(book):
    """A worker lives for months and trains thousands; the ledger knows how far each is."""
    turns, first, other = StepTurns(), job(book, "a"), job(book, "b")
    with turns.joined(other):
        for _ in range(2):
            with turns.joined(first):
                trained(turns, first, 5 * SLACK)
        assert {name[-1] for name in turns._clocks if len(name) == 2} == {"b"}
        assert turns._clocks[("",)] == 10 * SLACK  # its tenant has work: that clock goes on
    assert not turns._clocks
