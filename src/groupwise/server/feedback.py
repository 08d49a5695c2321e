"""POST and GET /v1/feedback: what people say of answers, by the answers' ids; and the answers kept for that.

A rating names a rollout: an id that /v1/completions/batch gave, or the id of a chat's answer (of the further choices of
one answer, the id, a hyphen and the choice's index). It may come days later, from another process, after a restart: as
long as the rollout is kept. It is on the disk when it is acknowledged.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Header, Query, Request
from pydantic import Field, model_validator

from groupwise.config.section import NullIsAbsent
from groupwise.errors import GroupwiseError, IdempotencyConflictError, RequestError, StorageError
from groupwise.sdk.types import FeedbackAnswer, FeedbackPage
from groupwise.server.bodies import read_body
from groupwise.server.schema_rollouts import MOST_ROWS, RolloutNotFoundError
from groupwise.server.schema_train import RolloutId
from groupwise.server.state import given
from groupwise.server.webhooks import utc
from groupwise.server.wire import OwnRequest, documented
from groupwise.store.feedback import Feedback, FeedbackLog, FeedbackState, new_id
from groupwise.store.ledger import Ledger, RolloutRecord
from groupwise.tasks.dialects.form import fault

if TYPE_CHECKING:
    from groupwise.server.metrics import Recorder

MOST_WAITING = 4096  # answers that are to be kept and are not on the disk yet; further ones are not kept
MOST_TEXT, MOST_COMMENT = 1 << 16, 4096  # characters
OPINIONS = ("score", "thumb", "correction", "better_than")

log = logging.getLogger(__name__)
router = APIRouter(prefix="/v1/feedback", tags=["feedback"])


# ---- what is said ----
class FeedbackRequest(NullIsAbsent, OwnRequest):
    """The body of POST /v1/feedback: at least one of `score`, `thumb`, `correction` and `better_than`."""

    elsewhere: ClassVar = {
        **dict.fromkeys(("id", "completion_id", "response_id", "message_id", "rollout"), "rollout_id"),
        **dict.fromkeys(("rating", "reward", "value"), "score, from 0 to 1"),
        **dict.fromkeys(("text", "answer", "edit"), "correction"),
        **dict.fromkeys(("worse", "rejected", "preferred_over"), "better_than"),
    }

    rollout_id: RolloutId
    """The `id` of a chat's answer (of its second choice, the id and `-1`), or a `rollout_id`."""
    score: Annotated[float, Field(ge=0, le=1)] | None = None
    """How good the answer was, from 0 (worst) to 1 (best)."""
    thumb: Literal["up", "down"] | None = None
    """A score of 1 or 0."""
    correction: Annotated[str, Field(min_length=1, max_length=MOST_TEXT)] | None = None
    """The whole answer that should have been given instead."""
    better_than: RolloutId | None = None
    """Another answer to the same prompt, which is worse than this one."""
    user: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """The user who rates; of several scores of one answer by the same user, with the same key, the last one counts."""
    comment: Annotated[str, Field(max_length=MOST_COMMENT)] | None = None
    """A comment for people; it is not trained on."""

    @model_validator(mode="after")
    def _says_something(self) -> FeedbackRequest:
        if all(getattr(self, name) is None for name in OPINIONS):
            message = "the feedback says nothing: give at least one of score, thumb, correction and better_than"
            raise fault("invalid_value", message, param="score")
        if self.score is not None and self.thumb is not None:
            raise fault("invalid_value", "score and thumb both say how good it was: give one of them", param="thumb")
        if self.better_than == self.rollout_id:
            raise fault("invalid_value", "better_than names the same answer as rollout_id", param="better_than")
        return self

    @property
    def points(self) -> float | None:
        return self.score if self.thumb is None else float(self.thumb == "up")


@dataclass(frozen=True, kw_only=True)
class RatingParts:
    """The parts of a server that these routes use."""

    feedback: FeedbackLog
    answers: AnswerLog
    recorder: Recorder


Ratings = Annotated[RatingParts, given(RatingParts)]

_ERRORS = (RolloutNotFoundError, RequestError, IdempotencyConflictError, StorageError)
IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=255)]


@router.post("", **documented(FeedbackRequest, FeedbackAnswer, errors=_ERRORS))
async def give_feedback(request: Request, parts: Ratings, idempotency_key: IdempotencyKey = None) -> FeedbackAnswer:
    """Say how good an answer was, what should have been said, or which of two answers is better.

    It is on the disk when this is answered. With `Idempotency-Key` the same request again is the same feedback."""
    body = await read_body(request, FeedbackRequest)
    fingerprint = hashlib.sha256(await request.body()).hexdigest()
    kept, is_new = await asyncio.to_thread(_keep, parts, body, sender_of(request), idempotency_key, fingerprint)
    if is_new:
        parts.recorder.rated(score=kept.score)
    return shown(kept)


def sender_of(request: Request) -> str:
    """Return the name of the key that a request came with; '' for the owner's, or none."""
    caller = request.state.caller
    return "" if caller is None or caller.key is None else caller.key.name


def _keep(
    parts: RatingParts, body: FeedbackRequest, sender: str, key: str | None, fingerprint: str
) -> tuple[Feedback, bool]:
    """Raise RolloutNotFoundError, RequestError, IdempotencyConflictError."""
    if key is not None and (known := parts.feedback.by_key(key, fingerprint)) is not None:
        return known, False  # also where the rollout has been forgotten since
    named = [id for id in (body.rollout_id, body.better_than) if id is not None]
    found = parts.feedback.rollouts(named)
    if len(found) < len(named):
        parts.answers.flush()  # it may have been answered just now
        found = parts.feedback.rollouts(named)
    for field in ("rollout_id", "better_than"):
        if (id := getattr(body, field)) is not None and id not in found:
            raise RolloutNotFoundError(
                f"{field}: there is no answer {id[:64]!r}",
                hint="give the id of an answer of this server; they are kept for 7 days, and chats unless keep_answers "
                "is false",
                field=field,
            )
    mine = found[body.rollout_id]
    if body.better_than is not None and found[body.better_than].prompt_ids != mine.prompt_ids:
        raise RequestError(
            f"better_than: {body.better_than!r} answers another prompt than {body.rollout_id!r}",
            hint="compare two answers to the same conversation; give scores to answers of different ones",
            field="better_than",
        )
    rating = Feedback(
        id=new_id(),
        rollout=body.rollout_id,
        version=mine.version,
        score=body.points,
        correction=body.correction,
        worse=body.better_than,
        sender=sender,
        author=body.user,
        comment=body.comment,
        created_at=time.time(),
    )
    return parts.feedback.add(rating, key=key, fingerprint=fingerprint)


@router.get("", **documented(answer=FeedbackPage))
async def list_feedback(
    parts: Ratings,
    rollout_id: Annotated[str | None, Query(max_length=64, description="Only of this answer.")] = None,
    version: Annotated[str | None, Query(max_length=100, description="Only of what this version sampled.")] = None,
    state: Annotated[FeedbackState | None, Query(description="Only in this state.")] = None,
    before: Annotated[int | None, Query(ge=0, le=2**62, description="The `next` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_ROWS)] = 200,
) -> FeedbackPage:
    """List what people said, newest first, and what became of it."""
    book = parts.feedback
    wanted: dict[str, Any] = {"rollout": rollout_id, "version": version, "state": state}
    rows = await asyncio.to_thread(lambda: book.list(**wanted, before=before, limit=limit))
    counts = await asyncio.to_thread(book.counts)
    return FeedbackPage(
        feedback=[shown(row) for row in rows], counts=counts, next=rows[-1].seq if len(rows) == limit else None
    )


def shown(rating: Feedback) -> FeedbackAnswer:
    """Return a rating as it is answered."""
    return FeedbackAnswer(
        id=rating.id,
        rollout_id=rating.rollout,
        version=rating.version,
        score=rating.score,
        correction=rating.correction,
        better_than=rating.worse,
        user=rating.author,
        key=rating.sender or None,
        comment=rating.comment,
        created_at=str(utc(rating.created_at)),
        state=rating.state,
        job_id=rating.trained_by,
    )


# ---- what is remembered ----
class AnswerLog:
    """Writes answers into the ledger, many in one transaction, in its own thread: no request waits for the disk.

    A kill loses the answers of the last moment, and feedback on them is refused; feedback that was acknowledged is
    never lost. Where the disk fails, answers are not kept and requests continue.
    """

    def __init__(self, ledger: Ledger):
        self._ledger = ledger
        self._changed = threading.Condition()
        self._waiting: list[RolloutRecord] = []
        self._asked = self._done = 0  # answers that were to be kept, and those of them that were written or given up
        self._closed = False
        self._thread: threading.Thread | None = None

    def keep(self, records: Sequence[RolloutRecord]) -> None:
        """Write these soon."""
        with self._changed:
            if self._closed or len(self._waiting) + len(records) > MOST_WAITING:
                return log.warning("%d answers are not kept: too many wait for the disk", len(records))
            self._waiting += records
            self._asked += len(records)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, name="groupwise-answers", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, *, timeout_s: float = 10.0) -> None:
        """Wait until what was to be kept by now is on the disk."""
        with self._changed:
            asked = self._asked  # by now: others go on asking
            self._changed.wait_for(lambda: self._done >= asked, timeout_s)

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=10.0)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                records, self._waiting = self._waiting, []
            try:
                self._ledger.save_rollouts(records)
            except GroupwiseError as error:
                log.warning("%d answers were not kept: %s", len(records), error)
            except Exception:
                log.exception("%d answers were not kept", len(records))
            with self._changed:
                self._done += len(records)
                self._changed.notify_all()
