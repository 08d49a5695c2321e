"""Stores raters in the job ledger's database: how often each agreed with known rewards, and which raters do not count.

    unheard     ratings of answers to certain prompts, oldest first, a page at a time
    keep        stores whether these raters' first ratings for each prompt agree with the known rewards
    agreed      for each rater, in the order of the ratings, whether it agreed
    proven      the raters that agreed at least so often
    distrust    a rater's ratings no longer count (`store.feedback`); `trust` undoes this, and restarts the comparison

A rater counts once for each prompt: later ratings, or ratings of further answers to the prompt, add no evidence.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from groupwise.model.image_tokens import packed_ids
from groupwise.store.feedback import Feedback, FeedbackLog, Rater
from groupwise.store.ledger_schema import dump

PAGE = 1000  # ratings


@dataclass(frozen=True)
class KnownVote:
    """Holds a rater's rating of an answer whose reward is known, and whether the two agreed."""

    rater: Rater
    prompt_ids: tuple[int, ...]
    seq: int
    agreed: bool


class RaterLog:
    """The record of the raters of one ledger: their ratings of known prompts, and who is distrusted. Threads may share
    it. Raises as the ledger does."""

    def __init__(self, feedback: FeedbackLog):
        self._feedback = feedback
        self._ledger, self._db = feedback.ledger, feedback.ledger.database

    def unheard(self, prompts: Collection[tuple[int, ...]], *, after: int) -> tuple[list[Feedback], int]:
        """Return the ratings behind the number `after` whose answers are to one of these prompts, of a page of all
        ratings, and the number of the page's last one; `after` where there are no more."""
        wanted = {packed_ids(prompt) for prompt in prompts}
        query = """
            SELECT feedback.id, feedback.seq, rollout.prompt_ids FROM feedback
            LEFT JOIN rollout ON rollout.id = feedback.rollout WHERE feedback.seq > ? ORDER BY feedback.seq LIMIT ?
        """
        with self._ledger.reader("reading ratings of known prompts") as db:
            rows = db.execute(query, (after, PAGE)).fetchall()
        ids = [row["id"] for row in rows if row["prompt_ids"] in wanted]
        return self._feedback.by_ids(ids), rows[-1]["seq"] if rows else after

    def keep(self, votes: Iterable[KnownVote], *, place: str, seq: int) -> None:
        """Keep what raters said, of each prompt the first; and that the ratings up to `seq` are heard, under the
        setting `place`."""
        with self._db.transaction("keeping what raters said") as db:
            for vote in votes:
                row = (*_columns(vote.rater), digest_of(vote.prompt_ids), vote.seq, vote.agreed)
                db.execute("INSERT OR IGNORE INTO main.known_vote VALUES (?, ?, ?, ?, ?)", row)
            db.execute("INSERT OR REPLACE INTO main.setting (key, value) VALUES (?, ?)", (place, dump(seq)))

    def agreed(self, prompts: Collection[tuple[int, ...]]) -> dict[Rater, list[bool]]:
        """Return for each rater whether it agreed with what is known of these prompts, in the order of the ratings."""
        wanted, found = {digest_of(prompt) for prompt in prompts}, dict[Rater, list[bool]]()
        with self._db.reading("reading what raters said") as db:
            rows = db.execute("SELECT * FROM known_vote ORDER BY seq").fetchall()
        for row in rows:
            if row["prompt"] in wanted:
                found.setdefault((row["sender"], row["author"] or None), []).append(bool(row["agreed"]))
        return found

    def proven(self, least: int) -> set[Rater]:
        """Return the raters who agreed with what is known of this many prompts."""
        query = "SELECT sender, author FROM known_vote WHERE agreed GROUP BY sender, author HAVING COUNT(*) >= ?"
        with self._db.reading("reading who agreed") as db:
            rows = db.execute(query, (least,)).fetchall()
        return {(row["sender"], row["author"] or None) for row in rows}

    def distrusted(self) -> set[Rater]:
        """Return the raters whose ratings count nowhere."""
        with self._db.reading("reading who is distrusted") as db:
            rows = db.execute("SELECT sender, author FROM distrusted").fetchall()
        return {(row["sender"], row["author"] or None) for row in rows}

    def distrust(self, rater: Rater) -> None:
        """Let the ratings of this rater count nowhere from now on, those that wait included."""
        with self._db.transaction("distrusting a rater") as db:
            db.execute("INSERT OR IGNORE INTO main.distrusted VALUES (?, ?, ?)", (*_columns(rater), time.time()))

    def trust(self, rater: Rater) -> bool:
        """Let the ratings of this rater count again, and forget what it said of known prompts; return whether it was
        distrusted."""
        its = "WHERE sender = ? AND author = ?"
        with self._db.transaction("trusting a rater") as db:
            db.execute(f"DELETE FROM main.known_vote {its}", _columns(rater))
            return db.execute(f"DELETE FROM main.distrusted {its}", _columns(rater)).rowcount > 0


def digest_of(prompt_ids: tuple[int, ...]) -> str:
    """Return a prompt's digest in the ledger."""
    return hashlib.sha256(packed_ids(prompt_ids)).hexdigest()[:32]


def _columns(rater: Rater) -> tuple[str, str]:
    return rater[0], rater[1] or ""
