"""Feedback on answers, in the job ledger's database: what people said of rollouts, and which job was trained on it.

    add         one rating, at most once for an idempotency key; on the disk when it returns
    waiting     the ratings that no job has taken, oldest first
    claim       in the transaction that queues a job: these ratings are that job's
    give_back   the ratings of jobs that failed or were cancelled wait again

Who rates is the `user` that a rating names, within the key that it came with. Ratings of those who are distrusted
(`store.raters`) are kept, and count nowhere.

A rating is about one rollout and holds any of: a score from 0 to 1 (a thumb is 1 or 0), a correction (the text that
should have been said), and the id of another rollout of the same prompt that is worse. A rating is in one of these
states, which follows from the job that took it: waiting, training, trained, dropped (nothing can be trained on it,
or MAX_FAILURES attempts came to nothing: jobs that failed, groups without a difference in scores), or distrusted.

Transitions (what automatic training did: jobs, gates, canaries) and a few durable settings of it are kept here, too.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal, get_args
from uuid import uuid4

from groupwise.errors import ConflictError, IdempotencyConflictError
from groupwise.model.image_tokens import unpacked_ids
from groupwise.store.ledger import Ledger, RolloutRecord
from groupwise.store.ledger_schema import dump, insert, marks, read_rollouts

KEEP_SECONDS = 365 * 24 * 3600.0
KEEP_FEEDBACK, KEEP_TRANSITIONS = 1_000_000, 10_000
MAX_FAILURES = 3
ENDED_BADLY = "('failed', 'cancelled')"

FeedbackState = Literal["waiting", "training", "trained", "dropped", "distrusted"]
Rater = tuple[str, str | None]  # the name of the key ('' is the owner's, or none) and the user, None if none was named

_DISTRUSTED = "(feedback.sender, coalesce(feedback.author, '')) IN (SELECT sender, author FROM distrusted)"
_WAITS = f"trained_by IS NULL AND failures < {MAX_FAILURES} AND NOT {_DISTRUSTED}"

_STATE = f"""
    CASE WHEN trained_by IS NULL THEN
             CASE WHEN failures >= {MAX_FAILURES} THEN 'dropped' WHEN {_DISTRUSTED} THEN 'distrusted' ELSE 'waiting' END
         WHEN job.state IN ('queued', 'running') THEN 'training'
         WHEN job.state IN {ENDED_BADLY} THEN 'waiting'
         ELSE 'trained' END
"""
_ROWS = f"SELECT feedback.*, {_STATE} AS state FROM feedback LEFT JOIN job ON job.id = feedback.trained_by"


class FeedbackTakenError(ConflictError):
    """Another job took some of the feedback first; no client is told of it."""


@dataclass(frozen=True, kw_only=True)
class Feedback:
    """Holds a rating of a rollout. `worse` names another rollout of the same prompt; the rated one is better."""

    seq: int = 0
    id: str
    rollout: str
    version: str
    score: float | None = None
    correction: str | None = None
    worse: str | None = None
    sender: str = ""
    author: str | None = None
    comment: str | None = None
    created_at: float
    trained_by: str | None = None
    failures: int = 0
    state: FeedbackState = "waiting"

    @property
    def rater(self) -> Rater:
        return self.sender, self.author


@dataclass(frozen=True)
class Transition:
    """An event of automatic training. `seq` grows; `kind` is a word for programs, `message` is for people."""

    seq: int
    at: float
    kind: str
    message: str
    data: Mapping[str, Any]


class FeedbackLog:
    """The feedback of one ledger. Threads may share it. Raises as the ledger does."""

    def __init__(self, ledger: Ledger):
        self.ledger, self._db = ledger, ledger.database

    # --- what people say ---

    def add(self, rating: Feedback, *, key: str | None = None, fingerprint: str = "") -> tuple[Feedback, bool]:
        """Keep a rating: (it, True). A `key` that is known gives (what it made, False), if the fingerprint is the same.

        Raises:
            IdempotencyConflictError: the key came with another body.
        """
        columns = ("id", "rollout", "version", "score", "correction", "worse", "sender", "author", "comment")
        columns = (*columns, "created_at")
        row = {name: getattr(rating, name) for name in columns}
        with self._db.transaction("keeping feedback") as db:
            if known := self._by_key(db, key, fingerprint):
                return known, False
            nth = "SELECT 1 + coalesce(max(nth), 0) FROM main.feedback WHERE tenant = tenant()"
            query = f"SELECT tenant_key(?) AS key, tenant() AS tenant, ({nth}) AS nth"
            whose = dict(db.execute(query, (key,)).fetchone())
            insert(db, "feedback", {**row, **whose, "fingerprint": fingerprint})
            return _read(db.execute(f"{_ROWS} WHERE feedback.id = ?", (rating.id,)).fetchone()), True

    def by_key(self, key: str, fingerprint: str) -> Feedback | None:
        """Return the feedback that this idempotency key made. Raises IdempotencyConflictError."""
        with self._db.reading("looking for an idempotency key") as db:
            return self._by_key(db, key, fingerprint)

    def _by_key(self, db: sqlite3.Connection, key: str | None, fingerprint: str) -> Feedback | None:
        row = None if key is None else db.execute(f"{_ROWS} WHERE feedback.key = tenant_key(?)", (key,)).fetchone()
        if row is not None and row["fingerprint"] != fingerprint:
            raise IdempotencyConflictError(
                f"the idempotency key {str(key)[:64]!r} was used for feedback {row['id']} with another body",
                hint="send the same body again, or a new key with the new body",
            )
        return None if row is None else _read(row)

    def list(
        self,
        *,
        rollout: str | None = None,
        version: str | None = None,
        state: FeedbackState | None = None,
        before: int | None = None,
        limit: int = 200,
    ) -> list[Feedback]:
        """Return ratings, newest first; `before` is the `seq` of the last one of the page before."""
        tests = {"rollout = ?": rollout, "version = ?": version, "state = ?": state, "seq < ?": before}
        given = {test: value for test, value in tests.items() if value is not None}
        where = f"WHERE {' AND '.join(given)}" if given else ""
        query = f"SELECT * FROM ({_ROWS}) {where} ORDER BY seq DESC LIMIT ?"
        with self._db.reading("listing feedback") as db:
            return [_read(row) for row in db.execute(query, (*given.values(), limit))]

    def by_ids(self, ids: Sequence[str]) -> list[Feedback]:
        """Return the ratings of these ids, oldest first."""
        with self._db.reading("reading feedback") as db:
            rows = db.execute(f"{_ROWS} WHERE feedback.id IN ({marks(ids)}) ORDER BY feedback.seq", list(ids))
            return [_read(row) for row in rows]

    def counts(self) -> dict[str, int]:
        """Return how many ratings are in each state."""
        with self._db.reading("counting feedback") as db:
            rows = db.execute(f"SELECT state, count(*) AS n FROM ({_ROWS}) GROUP BY state").fetchall()
        return dict.fromkeys(get_args(FeedbackState), 0) | {row["state"]: row["n"] for row in rows}

    def rated(self, version: str, *, after: int, of_one: int | None = None) -> list[tuple[int, float, Rater]]:
        """Return the votes that answers of a version got behind the rating of number `after`, the numbers under which
        they came, in that order, and whose they are: one of each rater for each answer (`votes`), however often it was
        rated and whatever the clock says; of one rater the first `of_one`, None is all."""
        query = f"""
            {_ROWS} LEFT JOIN rollout AS lost ON lost.id = feedback.worse
            WHERE feedback.seq > ? AND (feedback.version = ? OR lost.version = ?) AND NOT {_DISTRUSTED}
        """
        its = "SELECT id FROM rollout WHERE version = ? AND id IN (SELECT worse FROM feedback WHERE seq > ?)"
        with self.ledger.reader("reading scores") as db:
            ratings = [_read(row) for row in db.execute(query, (after, version, version))]
            lost = {row["id"] for row in db.execute(its, (version, after))}
        mine = lost | {rating.rollout for rating in ratings if rating.version == version}
        came = dict[tuple[str, Rater], int]()
        for rating in sorted(ratings, key=lambda each: each.seq):
            for rollout in filter(None, (rating.rollout, rating.worse)):
                came.setdefault((rollout, rating.rater), rating.seq)
        of_its = [(came[key], key[1], vote) for key, vote in votes(ratings).items() if key[0] in mine]
        its_votes = sorted(of_its, key=lambda each: each[0])
        counted, heard = list[tuple[int, float, Rater]](), Counter[Rater]()
        for seq, rater, vote in its_votes:
            heard[rater] += 1
            if of_one is None or heard[rater] <= of_one:
                counted.append((seq, vote, rater))
        return counted

    # --- what jobs take ---

    def waiting(self, *, limit: int = 10_000) -> list[Feedback]:
        """Return ratings that no job has taken, oldest first. Of more than `limit`, the newest rating of every answer
        comes before the second newest of any, so that many ratings of one answer hide no other answer. Reading delays
        no other request."""
        query = f"""
            SELECT * FROM (
                SELECT *, row_number() OVER (PARTITION BY rollout ORDER BY seq DESC) AS turn FROM ({_ROWS}) AS feedback
                WHERE {_WAITS}
            ) ORDER BY turn, seq DESC LIMIT ?
        """
        with self.ledger.reader("reading the waiting feedback") as db:
            return sorted((_read(row) for row in db.execute(query, (limit,))), key=lambda rating: rating.seq)

    def revision(self) -> tuple[int, int]:
        """Return another value whenever other ratings wait than before."""
        query = f"""
            SELECT (SELECT coalesce(max(seq), 0) FROM feedback) AS newest, count(*) AS waiting
            FROM feedback WHERE {_WAITS}
        """
        with self._db.reading("looking for feedback") as db:
            row = db.execute(query).fetchone()
        return row["newest"], row["waiting"]

    def newest(self) -> tuple[int, int]:
        """Return the numbers of the newest rating and of the newest transition; 0 without any."""
        query = """
            SELECT (SELECT coalesce(max(seq), 0) FROM feedback) AS rating,
                   (SELECT coalesce(max(seq), 0) FROM transition) AS transition
        """
        with self._db.reading("looking for feedback") as db:
            row = db.execute(query).fetchone()
        return row["rating"], row["transition"]

    def rollouts(self, ids: Sequence[str]) -> dict[str, RolloutRecord]:
        """Return the rollouts that are still kept, by id. Reading delays no other request."""
        with self.ledger.reader("reading rated rollouts") as db:
            return read_rollouts(db, ids)

    def asked(self, *, limit: int = 2000) -> list[tuple[int, ...]]:
        """Return the prompts of the newest `limit` rollouts that are kept, each once, in token ids."""
        query = "SELECT DISTINCT prompt_ids FROM (SELECT prompt_ids FROM rollout ORDER BY seq DESC LIMIT ?)"
        with self.ledger.reader("reading what was asked") as db:
            return [unpacked_ids(row["prompt_ids"]) for row in db.execute(query, (limit,))]

    def prompts_of(self, job: str, *, limit: int) -> list[tuple[int, ...]]:
        """Return prompts whose ratings a job took, newest first, each once, in token ids: at most `limit`, of answers
        that are kept."""
        query = """
            SELECT rollout.prompt_ids FROM feedback JOIN rollout ON rollout.id = feedback.rollout
            WHERE feedback.trained_by = ? GROUP BY rollout.prompt_ids ORDER BY max(feedback.seq) DESC LIMIT ?
        """
        with self.ledger.reader("reading what was rated") as db:
            return [unpacked_ids(row["prompt_ids"]) for row in db.execute(query, (job, limit))]

    def claim(self, db: sqlite3.Connection, seqs: Sequence[int], job: str) -> None:
        """Give these ratings to the job, in the transaction that queues it. Raises FeedbackTakenError unless all of
        them wait."""
        taken = 0
        for begin in range(0, len(seqs), 1000):
            some = list(seqs[begin : begin + 1000])
            query = f"UPDATE main.feedback SET trained_by = ? WHERE trained_by IS NULL AND seq IN ({marks(some)})"
            taken += db.execute(query, (job, *some)).rowcount
        if taken != len(seqs):
            message = f"{len(seqs) - taken} of {len(seqs)} ratings were taken by another job"
            raise FeedbackTakenError(message, hint="this job is not queued; the others go on")

    def give_back(self) -> int:
        """Let the ratings of jobs that failed or were cancelled wait again, and return how many they are."""
        query = f"""
            UPDATE main.feedback SET trained_by = NULL, failures = failures + 1
            WHERE trained_by IN (SELECT id FROM job WHERE state IN {ENDED_BADLY})
        """
        with self._db.transaction("giving feedback back") as db:
            return db.execute(query).rowcount

    def failed(self, seqs: Sequence[int], *, for_good: bool = False) -> None:
        """Count a failed job for these ratings, which wait, as none came of them; `for_good`, as many as drop them."""
        more = MAX_FAILURES if for_good else 1
        with self._db.transaction("dropping feedback") as db:
            for begin in range(0, len(seqs), 1000):
                some = list(seqs[begin : begin + 1000])
                where = f"trained_by IS NULL AND seq IN ({marks(some)})"
                query = f"UPDATE main.feedback SET failures = failures + ? WHERE {where}"
                db.execute(query, (more, *some))

    def prune(self) -> None:
        """Forget ratings that are a year old or beyond the newest million of a tenant, and old transitions."""
        with self._db.transaction("forgetting old feedback") as db:
            db.execute("DELETE FROM main.feedback WHERE created_at < ?", (time.time() - KEEP_SECONDS,))
            most = """
                DELETE FROM main.feedback WHERE tenant = ? AND seq <= (
                    SELECT seq FROM main.feedback WHERE tenant = ? ORDER BY nth DESC LIMIT 1 OFFSET ?)
            """
            for (tenant,) in db.execute("SELECT DISTINCT tenant FROM feedback").fetchall():
                db.execute(most, (tenant, tenant, KEEP_FEEDBACK))
            newest = "(SELECT coalesce(max(seq), 0) FROM transition)"
            db.execute(f"DELETE FROM main.transition WHERE seq <= {newest} - ?", (KEEP_TRANSITIONS,))
            db.execute("DELETE FROM main.known_vote WHERE seq < (SELECT min(seq) FROM feedback)")

    # --- what automatic training did ---

    def note(
        self,
        kind: str,
        message: str,
        *,
        data: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Transition:
        """Record a transition; `settings` change with it, or neither does."""
        at = time.time()
        with self._db.transaction("recording a transition") as db:
            seq = insert(db, "transition", {"at": at, "kind": kind, "message": message, "data": dump(data or {})})
            for key, value in (settings or {}).items():
                db.execute("INSERT OR REPLACE INTO main.setting (key, value) VALUES (?, ?)", (key, dump(value)))
        return Transition(seq, at, kind, message, data or {})

    def transitions(
        self, *, after: int = 0, before: int | None = None, limit: int = 50, kinds: Sequence[str] = ()
    ) -> list[Transition]:
        """Return transitions behind `after` and in front of `before`, newest first, of these kinds; none means all."""
        of = f" AND kind IN ({marks(kinds)})" if kinds else ""
        upto = "" if before is None else " AND seq < ?"
        query = f"SELECT * FROM transition WHERE seq > ?{of}{upto} ORDER BY seq DESC LIMIT ?"
        with self._db.reading("reading transitions") as db:
            rows = db.execute(query, (after, *kinds, *(() if before is None else (before,)), limit)).fetchall()
        return [_transition(row) for row in rows]

    def next_transition(self, after: int) -> Transition | None:
        """Return the oldest transition behind `after`."""
        with self._db.reading("reading transitions") as db:
            row = db.execute("SELECT * FROM transition WHERE seq > ? ORDER BY seq LIMIT 1", (after,)).fetchone()
        return None if row is None else _transition(row)

    def transition_counts(self) -> dict[str, int]:
        """Return how many transitions of each kind are kept."""
        with self._db.reading("counting transitions") as db:
            rows = db.execute("SELECT kind, count(*) AS n FROM transition GROUP BY kind ORDER BY kind").fetchall()
        return {row["kind"]: row["n"] for row in rows}

    def set(self, key: str, value: Any) -> None:
        """Keep a setting."""
        with self._db.transaction("keeping a setting") as db:
            db.execute("INSERT OR REPLACE INTO main.setting (key, value) VALUES (?, ?)", (key, dump(value)))

    def setting(self, key: str, default: Any = None) -> Any:
        """Return a setting that `note` kept."""
        with self._db.reading("reading a setting") as db:
            row = db.execute("SELECT value FROM setting WHERE key = ?", (key,)).fetchone()
        return default if row is None else json.loads(row["value"])


def _transition(row: sqlite3.Row) -> Transition:
    return Transition(row["seq"], row["at"], row["kind"], row["message"], json.loads(row["data"]))


def new_id() -> str:
    """Return an id that no feedback has."""
    return f"feedback-{uuid4().hex[:24]}"


@dataclass
class Opinion:
    """People's feedback on one rollout: `scores` from 0 to 1, and `corrections`, the texts that should have been said
    instead."""

    scores: list[float] = field(default_factory=list)
    corrections: list[str] = field(default_factory=list)

    @property
    def score(self) -> float | None:
        """Return the mean of the scores; None without any."""
        return fmean(self.scores) if self.scores else None


def _last_said(ratings: Iterable[Feedback]) -> dict[tuple[str, Rater, str], Feedback]:
    """Return each rater's last score of a rollout, its last correction, and its last comparison of a pair, by rollout,
    rater and kind. Ratings without a user count as those of one rater per key."""
    said: dict[tuple[str, Rater, str], Feedback] = {}
    for rating in sorted(ratings, key=lambda each: each.seq):
        first, second = sorted((rating.rollout, rating.worse or ""))
        kinds = {"score": rating.score, "correction": rating.correction, f"against {first}": rating.worse}
        for kind, value in kinds.items():
            if value is not None:
                said[second if kind.startswith("against") else rating.rollout, rating.rater, kind] = rating
    return said


def votes(ratings: Iterable[Feedback]) -> dict[tuple[str, Rater], float]:
    """Return by rollout and rater, from 0 to 1, the mean of the last score and of the last comparisons, in which the
    better rollout gets 1 and the worse one 0; 0 where there is a correction alone."""
    found: dict[tuple[str, Rater], list[float]] = {}
    corrected: dict[tuple[str, Rater], list[float]] = {}
    for (_, rater, kind), rating in _last_said(ratings).items():
        mine = found.setdefault((rating.rollout, rater), [])
        if kind == "score" and rating.score is not None:
            mine.append(rating.score)
        elif kind == "correction":
            corrected[rating.rollout, rater] = [0.0]
        elif rating.worse is not None:
            mine.append(1.0)
            found.setdefault((rating.worse, rater), []).append(0.0)
    return {key: fmean(each) for key, given in found.items() if (each := given or corrected.get(key, []))}


def opinions(ratings: Iterable[Feedback]) -> dict[str, Opinion]:
    """Return what each rollout got: of one rater the last of each kind counts. A comparison is a score of 1 for the
    better rollout and of 0 for the worse one."""
    found: dict[str, Opinion] = {}
    for (_, _, kind), rating in _last_said(ratings).items():
        opinion = found.setdefault(rating.rollout, Opinion())
        if kind == "score" and rating.score is not None:
            opinion.scores.append(rating.score)
        elif kind == "correction" and rating.correction is not None:
            opinion.corrections.append(rating.correction)
        elif rating.worse is not None:
            opinion.scores.append(1.0)
            found.setdefault(rating.worse, Opinion()).scores.append(0.0)
    return found


def _read(row: sqlite3.Row) -> Feedback:
    return Feedback(**{name: row[name] for name in Feedback.__dataclass_fields__})
