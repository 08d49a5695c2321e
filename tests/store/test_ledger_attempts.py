"""Attempts that end without a word: whose fault it is, how many there may be, and smaller passes for want of memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_ledger import publish, submit, take

from groupwise.store.ledger import JobState, Ledger
from groupwise.store.ledger_attempts import MAX_SERVER_DEATHS, Cause
from wording import wording


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Ledger]:
    book = Ledger(tmp_path / "ledger.db", max_attempts=2)
    yield book
    book.close()


def last_message(book: Ledger, id: str) -> str:
    return book.events(id)[-1].message


# --- the worker's own deaths, and others ---


@pytest.mark.parametrize("cause", [Cause.STOP, Cause.SERVER, None], ids=["stopped", "server died", "in order"])
def test_what_is_not_the_jobs_fault_uses_up_no_attempt(book, cause):
    job = submit(book)
    for attempt in (1, 2, 3):
        lease = take(book)
        assert lease.attempt == attempt
        if cause is None:
            book.release(lease)
        else:
            assert book.expire("w", cause=cause) == [job.id]
        assert book.job(job.id).state is JobState.QUEUED and book.job(job.id).position == 1
    for state in (JobState.QUEUED, JobState.FAILED):  # the worker's own deaths
        take(book), book.expire("w")
        assert book.job(job.id).state is state
    error = book.job(job.id).error
    assert error and error["code"] == "crashed_repeatedly" and error["message"].startswith("2 attempts crashed")


@pytest.mark.parametrize("cause", Cause)
def test_what_was_to_be_cancelled_is_cancelled_whoever_died(book, cause):
    job = submit(book)
    take(book)
    book.cancel(job.id)
    book.expire("w", cause=cause)
    assert book.job(job.id).state is JobState.CANCELLED


# --- several jobs in one worker's hands ---


def two_in_hand(book: Ledger) -> list[str]:
    ids = [submit(book).id, submit(book, adapter="sql").id]
    assert [take(book).job.id for _ in ids] == ids
    return ids


@pytest.mark.parametrize("cause", [Cause.CRASH, Cause.MEMORY])
def test_of_several_none_is_to_blame_and_each_goes_on_by_itself(book, cause):
    ids = two_in_hand(book)
    for _ in range(3):  # more than `max_attempts`
        assert book.expire("w", cause=cause) == ids
        jobs = [book.job(id) for id in ids]
        assert [(job.state, job.alone, job.micro_tokens) for job in jobs] == [(JobState.QUEUED, True, None)] * 2
        assert [take(book).job.id for _ in ids] == ids
    book.cancel(ids[1])
    book.expire("w", cause=cause)
    assert [book.job(id).state for id in ids] == [JobState.QUEUED, JobState.CANCELLED]
    take(book), book.expire("w", cause=cause)
    take(book), book.expire("w", cause=cause)  # by itself it is to blame
    assert book.job(ids[0]).state is JobState.FAILED


def test_of_several_whose_server_died_too_often_each_goes_on_by_itself(book):
    ids = two_in_hand(book)
    for death in range(1, MAX_SERVER_DEATHS + 1):
        book.expire("w", cause=Cause.SERVER)
        assert [book.job(id).alone for id in ids] == [death == MAX_SERVER_DEATHS] * 2
        leases = [take(book) for _ in ids]
    for lease in leases:
        book.release(lease, orphaned=True, beside=1)
    assert [book.job(id).state for id in ids] == [JobState.QUEUED] * 2


def test_what_is_put_aside_counts_for_nothing(book):
    job = submit(book)
    for _ in range(3):
        book.put_aside(take(book), "memory ran out")
    assert (book.job(job.id).state, book.job(job.id).alone) == (JobState.QUEUED, True)


def test_leases_that_end_together_are_nobodys_fault(book, monkeypatch):
    ids = two_in_hand(book)
    monkeypatch.setattr("groupwise.store.ledger.is_live", lambda row: False)
    take(book, "heir")
    assert [book.job(id).alone for id in ids] == [True, True]


# --- deaths of the server ---


@pytest.mark.parametrize("orphaned", [False, True], ids=["both died", "the worker could save"])
def test_a_job_with_which_the_server_dies_again_and_again_is_given_up(book, orphaned):
    job, other = submit(book), submit(book)
    for death in range(1, MAX_SERVER_DEATHS + 1):
        lease = take(book)
        book.progress(lease, phase="training", step=3)
        if orphaned:
            book.release(lease, orphaned=True)
        else:
            book.expire("w", cause=Cause.SERVER)
        expected = JobState.QUEUED if death < MAX_SERVER_DEATHS else JobState.FAILED
        assert book.job(job.id).state is expected
    error = book.job(job.id).error
    assert error and error["code"] == "server_died_repeatedly"
    assert error["message"] == "the server died 5 times while this job ran, and it never got beyond step 3"
    assert take(book).job.id == other.id


def test_a_job_that_gets_further_each_time_is_not_given_up(book):
    job = submit(book, steps=100)
    for step in range(3 * MAX_SERVER_DEATHS):
        lease = take(book)
        book.progress(lease, phase="training", step=step // 2)  # two deaths at each step
        book.expire("w", cause=Cause.SERVER)
    assert book.job(job.id).state is JobState.QUEUED
    for _ in range(MAX_SERVER_DEATHS - 2):
        lease = take(book)
        book.progress(lease, phase="training", step=5)  # from its last checkpoint, which is behind
        book.expire("w", cause=Cause.SERVER)
    assert book.job(job.id).state is JobState.QUEUED
    take(book), book.expire("w", cause=Cause.SERVER)
    assert book.job(job.id).state is JobState.FAILED


def test_a_swap_in_which_the_server_dies_again_and_again_is_given_up(book):
    job = publish(book)
    for _ in range(3):
        assert book.begin_swap(job.id)
        book.put_off_swap(job.id)  # the disk was full, say
    for _ in range(MAX_SERVER_DEATHS):
        assert book.begin_swap(job.id)
    assert not book.begin_swap(job.id)
    ended = book.job(job.id)
    assert (ended.state, ended.phase, ended.version) == (JobState.FAILED, "swapping", "math@1")
    assert ended.error and ended.error["code"] == "server_died_repeatedly"
    wording(ended.error)
    assert book.published_jobs() == [] and not book.begin_swap(job.id)


def test_there_is_no_swap_of_what_is_not_published(book):
    job = submit(book)
    assert not book.begin_swap(job.id) and book.job(job.id).state is JobState.QUEUED


# --- smaller passes ---


def test_a_job_whose_memory_ran_out_goes_on_with_half_until_its_longest_sample_is_a_pass(book):
    job = submit(book)
    lease = take(book)
    book.measured(lease, largest=1000, longest=300)
    sizes = []
    while shrunk := book.shrink(lease, "memory ran out"):
        sizes.append(shrunk.micro_tokens)
        event = book.events(job.id)[-1]
        assert (event.level, event.data["micro_tokens"]) == ("warning", shrunk.micro_tokens)
    assert sizes == [500, 300]
    assert last_message(book, job.id) == "memory ran out; the job goes on with at most 300 tokens in a pass"


def test_a_worker_that_the_kernel_ended_for_memory_is_no_attempt_while_there_is_a_half(book):
    job = submit(book)
    for tokens in (500, 250, 125, 100):
        book.measured(take(book), largest=2 * tokens, longest=100)
        book.expire("w", cause=Cause.MEMORY)
        assert (book.job(job.id).state, book.job(job.id).micro_tokens) == (JobState.QUEUED, tokens)
        assert f"at most {tokens} tokens in a pass" in last_message(book, job.id)
    for state in (JobState.QUEUED, JobState.FAILED):
        book.measured(take(book), largest=100, longest=100)
        book.expire("w", cause=Cause.MEMORY)
        assert book.job(job.id).state is state
    error = book.job(job.id).error
    assert error and error["code"] == "out_of_memory"
    wording(error)


def test_where_nobody_knows_the_sizes_of_passes_nothing_is_halved(book):
    job = submit(book)
    assert book.shrink(take(book), "memory ran out") is None
    book.expire("w", cause=Cause.MEMORY)
    take(book), book.expire("w", cause=Cause.MEMORY)
    failed = book.job(job.id)
    assert failed.micro_tokens is None and failed.error and failed.error["code"] == "out_of_memory"
