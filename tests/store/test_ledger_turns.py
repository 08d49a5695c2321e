"""Whose turn it is: jobs of one adapter in their order, and others beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_ledger import submit, take

from groupwise.store.ledger import JobState, Ledger


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Ledger]:
    book = Ledger(tmp_path / "ledger.db")
    yield book
    book.close()


def post(book: Ledger, adapter: str, base: str | None = None) -> str:
    return submit(book, adapter=adapter, config={"base_adapter": base}).id


# --- what a job waits for ---


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        (("math", None), ("math", None), True),
        (("math", None), ("math", "base"), True),
        (("math", None), ("sql", None), False),
        (("math", None), ("sql", "math"), True),  # it continues what the first one makes
        (("math", None), ("sql", "math@3"), True),
        (("math", None), ("sql", "math2"), False),
        (("math", "sql"), ("sql", None), True),  # the first one continues what is there before it
        (("math", "sql@1"), ("sql", None), True),
        (("math", "base"), ("sql", "base"), False),
        (("math", "sql"), ("code", "sql"), False),
    ],
)
def test_a_job_waits_for_those_before_it_that_have_to_do_with_it(book, first, second, waits):
    one, two = post(book, *first), post(book, *second)
    lease = take(book)
    assert lease.job.id == one
    beside = book.lease("w")
    assert (beside is None) is waits
    if beside is None:
        book.published(lease, f"{lease.job.adapter}@1")  # its swap need not be over
        beside = take(book)
    assert beside.job.id == two


def test_a_job_that_waits_again_is_still_before_the_next_of_its_adapter(book):
    one, two, other = post(book, "math"), post(book, "math"), post(book, "sql")
    book.release(take(book))
    assert [take(book).job.id, take(book).job.id] == [one, other]
    assert book.lease("w") is None and book.job(two).position == 1


def test_another_tenants_adapter_of_the_same_name_is_another_one(book):
    submit(book.of("acme"), adapter="math")
    submit(book.of("bell"), adapter="math")
    assert {take(book).job.tenant, take(book).job.tenant} == {"acme", "bell"}


# --- what may begin ---


def test_a_worker_may_not_admit_the_job_whose_turn_it_is(book):
    one, two = post(book, "math"), post(book, "sql")
    seen = []

    def admits(job, running) -> bool:
        seen.append((job.id, [each.id for each in running]))
        return not running

    assert take(book, admits=admits).job.id == one
    assert book.lease("w", admits=admits) is None and book.job(two).state is JobState.QUEUED
    assert seen == [(one, []), (two, [one])]
