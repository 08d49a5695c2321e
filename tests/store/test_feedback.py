"""Feedback in the ledger's database: what counts, what jobs take and give back, what is forgotten."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.store import ledger_repair
from groupwise.store.feedback import MAX_FAILURES, Feedback, FeedbackLog, FeedbackTakenError, new_id, opinions
from groupwise.store.ledger import Job, Ledger, RolloutRecord


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "ledger.db")
    yield ledger
    ledger.close()


@pytest.fixture
def log(ledger: Ledger) -> FeedbackLog:
    return FeedbackLog(ledger)


def rating(rollout: str = "r", **fields: Any) -> Feedback:
    return Feedback(id=new_id(), rollout=rollout, version="base", created_at=time.time(), **fields)


def rollout(id: str) -> RolloutRecord:
    return RolloutRecord(
        id=id,
        prompt_ids=(1, 2),
        completion_ids=(3,) * 100,
        logprobs=(-0.5,) * 100,
        version="base",
        temperature=1.0,
        finish_reason="stop",
        text="x" * 1000,
    )


def submit(ledger: Ledger, log: FeedbackLog, seqs: list[int]) -> Job:
    job, _ = ledger.submit(
        kind="grpo",
        adapter="a",
        config={},
        summary={"warnings": []},
        payload=b"x",
        steps=1,
        auto_load=True,
        claim=lambda db, id: log.claim(db, seqs, id),
    )
    return job


def states(log: FeedbackLog) -> list[str]:
    return [each.state for each in log.list()][::-1]


def test_a_job_takes_feedback_once_and_gives_it_back_if_it_fails(ledger: Ledger, log: FeedbackLog) -> None:
    seqs = [log.add(rating(score=1.0))[0].seq for _ in range(3)]
    job = submit(ledger, log, seqs[:2])
    assert states(log) == ["training", "training", "waiting"]
    with pytest.raises(FeedbackTakenError):
        submit(ledger, log, seqs[1:])
    assert states(log)[2] == "waiting" and len(ledger.jobs()) == 1, "all or nothing"
    ledger.cancel(job.id)
    assert states(log) == ["waiting"] * 3
    assert log.give_back() == 2 and log.give_back() == 0
    assert [each.failures for each in log.waiting()] == [1, 1, 0]
    for _ in range(MAX_FAILURES - 1):
        ledger.cancel(submit(ledger, log, seqs[:2]).id)
        log.give_back()
    assert states(log) == ["dropped", "dropped", "waiting"] and [each.seq for each in log.waiting()] == seqs[2:]


def test_what_nothing_can_be_trained_on_is_dropped(log: FeedbackLog) -> None:
    seqs = [log.add(rating(score=1.0))[0].seq for _ in range(2)]
    log.failed(seqs[:1], for_good=True)
    log.failed(seqs[1:])
    assert states(log) == ["dropped", "waiting"] and [each.failures for each in log.waiting()] == [1]


def test_feedback_of_a_forgotten_job_counts_as_trained(ledger: Ledger, log: FeedbackLog) -> None:
    job = submit(ledger, log, [log.add(rating(score=1.0))[0].seq])
    with sqlite3.connect(ledger.path) as db:
        db.execute("DELETE FROM job WHERE id = ?", (job.id,))
    assert states(log) == ["trained"] and log.give_back() == 0 and log.waiting() == []


def test_rated_rollouts_outlive_newer_ones_until_they_are_trained(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db", rollout_bytes=20_000)
    log = FeedbackLog(ledger)
    ledger.save_rollouts([rollout("rated"), rollout("worse"), rollout("other")])
    seq = log.add(rating("rated", worse="worse"))[0].seq
    for i in range(40):
        ledger.save_rollouts([rollout(f"later-{i}")])
    assert set(ledger.rollouts(["rated", "worse", "other"])) == {"rated", "worse"}
    submit(ledger, log, [seq])
    ledger.save_rollouts([rollout("last")])
    assert not ledger.rollouts(["rated", "worse"])
    ledger.close()


def test_the_last_word_of_an_author_counts_and_a_comparison_is_a_score(log: FeedbackLog) -> None:
    said = [
        rating("a", score=0.0, author="ann"),
        rating("a", score=1.0, author="ann", correction="x"),
        rating("a", score=0.5, author="bob"),
        rating("a", correction="y", author="ann"),
        rating("a", worse="b"),
        rating("c", worse="b"),
        rating("b", worse="c"),
    ]
    found = opinions([log.add(each)[0] for each in said])
    assert sorted(found["a"].scores) == [0.5, 1.0, 1.0] and found["a"].corrections == ["y"]
    assert found["b"].scores == [0.0, 1.0] and found["c"].scores == [0.0], "b against c was said again"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.floats(0, 1)), max_size=20))
def test_there_is_one_score_for_each_author_and_rollout(said: list[tuple[str, str, float]]) -> None:
    ratings = [
        Feedback(seq=i, id=str(i), rollout=r, version="base", score=s, author=a, created_at=0.0)
        for i, (r, a, s) in enumerate(said)
    ]
    found = opinions(ratings)
    last = {(r, a): s for r, a, s in said}
    for r in {r for r, _, _ in said}:
        assert sorted(found[r].scores) == sorted(s for (own, _), s in last.items() if own == r)
    assert set(found) == {r for r, _, _ in said}


def test_what_a_version_was_rated_counts_lost_comparisons_too(ledger: Ledger, log: FeedbackLog) -> None:
    ledger.save_rollouts([rollout("a"), rollout("b")])
    said = (rating("a", score=0.25, author="x"), rating("a", correction="x", author="y"), rating("a", worse="b"))
    last = [log.add(each)[0].seq for each in said][-1]
    assert sorted(vote for _, vote, _ in log.rated("base", after=0)) == [0.0, 0.0, 0.25, 1.0]
    assert log.rated("base", after=last) == log.rated("other@1", after=0) == []


def test_an_author_has_one_vote_for_each_answer(ledger: Ledger, log: FeedbackLog) -> None:
    """The last one, of a score, comparisons and a correction together; nobody in particular is one author."""
    ledger.save_rollouts([rollout("a"), rollout("b")])
    for _ in range(22):
        log.add(rating("a", score=1.0, author="eager"))
    log.add(rating("a", score=0.0, author="eager"))
    for score in (1.0, 0.5):
        log.add(rating("a", score=score))
    log.add(rating("b", correction="z", author="eager"))
    log.add(rating("b", score=0.75, author="eager"))
    assert sorted(vote for _, vote, _ in log.rated("base", after=0)) == [0.0, 0.5, 0.75]


def test_of_one_author_the_first_votes_count_where_that_is_asked(ledger: Ledger, log: FeedbackLog) -> None:
    ledger.save_rollouts([rollout(str(i)) for i in range(8)])
    for i in range(8):
        log.add(rating(str(i), score=float(i < 2), author="flood" if i < 5 else None if i < 7 else "ann"))
    assert [vote for _, vote, _ in log.rated("base", after=0, of_one=3)] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert len(log.rated("base", after=0, of_one=1)) == 3 and len(log.rated("base", after=0)) == 8


def test_a_clock_that_is_set_back_loses_no_rating(ledger: Ledger, log: FeedbackLog) -> None:
    ledger.save_rollouts([rollout(str(i)) for i in range(25)])
    begin, _ = log.newest()
    for i in range(25):
        log.add(replace(rating(str(i), score=1.0), created_at=time.time() - 3600))
    came = log.rated("base", after=begin)
    assert [vote for _, vote, _ in came] == [1.0] * 25 and came == sorted(came)


def test_many_ratings_of_one_answer_hide_no_other(log: FeedbackLog) -> None:
    quiet = {log.add(rating(f"quiet {i}", score=1.0))[0].seq for i in range(24)}
    for i in range(300):
        log.add(rating("loud", score=0.0, author=str(i)))
    waiting = log.waiting(limit=100)
    assert quiet < {each.seq for each in waiting} and len(waiting) == 100
    assert [each.seq for each in waiting] == sorted(each.seq for each in waiting)


def test_transitions_and_settings_are_kept(ledger: Ledger, log: FeedbackLog) -> None:
    assert log.setting("paused", False) is False
    first = log.note("paused", "by hand", settings={"paused": True})
    second = log.note("resumed", "by hand", data={"x": 1}, settings={"paused": False})
    assert [each.kind for each in log.transitions()] == ["resumed", "paused"] and log.setting("paused") is False
    assert log.transitions(after=first.seq) == [second]


def test_a_damaged_ledger_keeps_its_feedback(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    ledger = Ledger(path)
    kept, _ = FeedbackLog(ledger).add(rating(score=0.5), key="k", fingerprint="f")
    FeedbackLog(ledger).note("paused", "by hand", settings={"paused": True})
    ledger.back_up()
    ledger.close()
    with sqlite3.connect(path) as db:  # a row that SQLite takes and nobody can read
        db.execute("INSERT INTO transition (at, kind, message, data) VALUES (0, 'x', 'x', 'no JSON')")
    assert ledger_repair.repair(path, find=lambda tenant, adapter, job: None)
    ledger = Ledger(path)
    assert FeedbackLog(ledger).list() == [kept] and FeedbackLog(ledger).setting("paused") is True
    assert [each.kind for each in FeedbackLog(ledger).transitions()] == ["paused"]
    ledger.close()
