"""Counts what each named key used, by day, and enforces the bounds that a key may have (`--tokens-per-day` of
`groupwise keys add`).

    usage.check_rate(key)             # a request came: 429 `rate_limited` where there were too many in a minute
    usage.check_tokens(key)           # it wants to sample: 429 `quota_exceeded` where the day's tokens are used up
    usage.sampled(key, 35, 12)        # prompt tokens, tokens sampled
    /v1/usage                         # what each used, by day

Days are UTC. Tokens are those of chats, completions and batches, also of what was broken off (without a bound on the
key's tokens: of an answer that is not streamed only the prompt's); jobs' are not among them.
What is under way when the bound is reached may end, so that a day can have more than its bound by what one key may have
under way at once.

    STATE_DIR/usage.json    the counts of the last 32 days: written every few seconds and when the server stops; a kill
                            loses those seconds
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter
from pydantic import TypeAdapter

from groupwise.errors import TryAgainError
from groupwise.sdk.types import Answer
from groupwise.server.metrics import Sample
from groupwise.server.state import given
from groupwise.server.wire import documented
from groupwise.store import files
from groupwise.store.keys import Key

FILE = "usage.json"
DAYS = 32
SAVE_S = 5.0

log = logging.getLogger(__name__)


class RateLimitError(TryAgainError):
    """A key sent more requests in a minute than it may."""

    code, status = "rate_limited", 429


class QuotaError(TryAgainError):
    """A key has used up its tokens of the day."""

    code, status = "quota_exceeded", 429


class UsedByKey(Answer):
    """Counts of the requests and tokens of a named key on one day."""

    requests: int = 0
    """Requests that sampled."""
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class UsageAnswer(Answer):
    """Counts of the requests and tokens of named keys, by day."""

    days: dict[str, dict[str, UsedByKey]]
    """A day (UTC) of the last 32 -> a key's name -> its counts. Jobs' tokens are not among them. To the owner a
    tenant's key is `TENANT:NAME`."""


_DAYS = TypeAdapter(dict[str, dict[str, UsedByKey]])  # "2026-11-28" -> a key's name -> what it used


@dataclass
class _Bucket:
    """Requests that may come at once: one more every 60 / limit seconds, up to a minute's."""

    level: float
    at: float


class KeyUsage:
    """Counts for one server; raises StorageError where those of the server before it cannot be read. For the event
    loop; `save` may run in a thread."""

    def __init__(self, path: Path):
        self._path = path
        hint = "put a copy of it back, or remove it: then the counts of all keys begin at 0"
        self._days = files.read_json(path, _DAYS, hint=hint) or {}
        self._buckets: dict[str, _Bucket] = {}
        self._saved, self._lock = time.monotonic(), threading.Lock()
        self._made = self._kept = 0  # texts of the counts: how many were made, and which was written last

    def check_rate(self, key: Key) -> None:
        """Count a request of a key, and raise RateLimitError if it is one too many."""
        if (limit := key.requests_per_minute) is None:
            return
        now = time.monotonic()
        bucket = self._buckets.setdefault(key.label, _Bucket(limit, now))
        bucket.level, bucket.at = min(limit, bucket.level + (now - bucket.at) * limit / 60), now
        if bucket.level < 1:
            raise RateLimitError(
                f"the key {key.name} may send {limit} requests a minute",
                hint="send it again later",
                retry_after=(1 - bucket.level) * 60 / limit,
            )
        bucket.level -= 1

    def check_tokens(self, key: Key) -> None:
        """Raise QuotaError if a key has used up its tokens of today."""
        used = self._today().get(key.label, UsedByKey()).tokens
        if key.tokens_per_day is not None and used >= key.tokens_per_day:
            now = datetime.now(UTC)
            midnight = (now + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
            raise QuotaError(
                f"the key {key.name} has used {used} tokens today (UTC), and may use {key.tokens_per_day}",
                hint="wait until midnight UTC, or ask the server's owner for a larger bound",
                retry_after=math.ceil((midnight - now).total_seconds()),
            )

    def sampled(self, key: Key, prompt_tokens: int, completion_tokens: int) -> None:
        """Count what a request of a key took."""
        today = self._today()
        used = today.get(key.label, UsedByKey())
        today[key.label] = UsedByKey(
            requests=used.requests + 1,
            prompt_tokens=used.prompt_tokens + prompt_tokens,
            completion_tokens=used.completion_tokens + completion_tokens,
        )
        if time.monotonic() - self._saved > SAVE_S:
            self._saved = time.monotonic()
            threading.Thread(target=self._keep, args=self._text(), name="usage").start()

    def days(self) -> dict[str, dict[str, UsedByKey]]:
        """Return the usage by day and key's name, as counts; the latest day comes last."""
        return {day: dict(keys) for day, keys in sorted(self._days.items())}

    def samples(self) -> Iterable[Sample]:
        """Yield today's counts as gauges."""
        for name, used in list(self._days.get(_day(), {}).items()):
            for kind in ("requests", "prompt_tokens", "completion_tokens"):
                yield f"key_{kind}_today", {"key": name}, getattr(used, kind)

    def save(self) -> None:
        """Write the counts. A disk that does not take them is told in the log: no request fails for it."""
        self._keep(*self._text())

    def _keep(self, number: int, text: str) -> None:
        """Write what is newer than what was written: threads may come in another order than their counts."""
        try:
            with self._lock:
                if number > self._kept:
                    files.replace(self._path, text, mode=0o600)
                    self._kept = number
        except OSError as error:
            log.warning("the usage of keys cannot be kept in %s: %s", self._path, error)

    def _today(self) -> dict[str, UsedByKey]:
        today = _day()
        if today not in self._days:
            self._days[today] = {}
            for old in sorted(self._days)[:-DAYS]:
                del self._days[old]
        return self._days[today]

    def _text(self) -> tuple[int, str]:
        """Return the counts as they are now, and which text of them this is."""
        self._made += 1
        return self._made, _DAYS.dump_json(self._days).decode()


def _day() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}"


# ---- the route ----
router = APIRouter(tags=["Server"])


@dataclass(frozen=True, kw_only=True)
class UsageParts:
    """The part of a server that this route reads."""

    usage: KeyUsage


@router.get("/v1/usage", **documented(answer=UsageAnswer))
async def usage(parts: Annotated[UsageParts, given(UsageParts)]) -> UsageAnswer:
    """Say what each named key used, by day."""
    return UsageAnswer(days=parts.usage.days())
