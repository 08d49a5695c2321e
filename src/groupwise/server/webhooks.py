"""Webhooks: reports the end of each job, and the steps of automatic training (gates, canaries, ...), to the operator's
URL, at least once and across restarts.

    POST <url>
    x-groupwise-delivery:  <job id>                      the same in every attempt: what a receiver deduplicates by
    x-groupwise-timestamp: <unix seconds of the attempt>
    x-groupwise-signature: sha256=<hex of HMAC-SHA256(secret, timestamp "." body)>
    {"job_id", "job_type", "status", "adapter_name", "adapter_path", "error", "timestamp", ...}

The URL comes from the operator's configuration, never from a request; redirects are not followed, proxies and netrc are
not read from the environment, and the answer's body is not read. An attempt has 5 s. Anything but a 2xx is tried again
after 1, 2, 4, ... up to 300 s, for 24 hours in all; neither a clock that is set nor a server that is away counts.

Deliveries are not queued: a finished job of the ledger is still to be reported if the record (one small file next to
    the ledger) does not list it as settled. So a kill between the two repeats a delivery and never loses one. If there
    is no record yet, the jobs that have finished by then count as settled. The record also has the seconds for which a
    job's delivery has been tried.

Transitions of automatic training (`store.feedback`) are reported one after another, in order, by the same rules:

    x-groupwise-delivery:  transition-<seq>
    {"event": <kind>, "seq", "message", "data", "timestamp"}
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import math
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2

from groupwise.errors import AdapterError, AdapterNotFoundError, ConfigError, JobNotFoundError, StorageError
from groupwise.store import files as adapter_files
from groupwise.store.adapters import AdapterStore
from groupwise.store.feedback import FeedbackLog, Transition
from groupwise.store.ledger import Job, JobState, Ledger
from groupwise.store.ledger_schema import elapsed
from groupwise.types import PolicyVersion

ENDED = (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED)
ATTEMPT_S = 5.0
LONGEST_DELAY_S = 300.0
KEEP_TRYING_S = 24 * 3600.0
TOLD = "webhooks.transition"  # the setting: the last transition that was told

log = logging.getLogger(__name__)


@dataclass
class _Delivery:
    """A job whose end is still to be told. `due` is on the monotonic clock; `since` on that of `elapsed`, as if all the
    seconds in which it was tried had been in a row."""

    job: Job
    since: float
    attempts: int = 0
    due: float = 0.0


@dataclass
class _Pending:
    """The transition that is to be told next; `due` and `since` as of `_Delivery`."""

    seq: int
    since: float
    attempts: int = 0
    due: float = 0.0


class Webhooks:
    """Tells `url` how jobs ended, while `run` runs. `record` is the file that remembers who was told of what.

    Raises ConfigError if `url` is not one that can be posted to.
    """

    def __init__(
        self,
        ledger: Ledger,
        store: AdapterStore,
        *,
        url: str,
        record: Path,
        secret: str | None = None,
        poll_s: float = 1.0,
        first_delay_s: float = 1.0,
    ):
        self._url = _checked(url)
        self._ledger, self._store, self._record = ledger, store, record
        self._secret, self._poll_s, self._first_delay_s = secret, poll_s, first_delay_s
        self._pending: dict[str, _Delivery] = {}
        self._settled, self._tried = self._read_record()
        self._book = FeedbackLog(ledger)
        self._transition: _Pending | None = None  # the oldest that is still to be told

    @property
    def pending(self) -> int:
        """Deliveries that have not succeeded yet."""
        return len(self._pending)

    async def run(self) -> None:
        """Deliver until cancelled. Neither a receiver nor a disk that fails ends it."""
        limit = httpx2.Timeout(ATTEMPT_S)
        async with httpx2.AsyncClient(timeout=limit, follow_redirects=False, trust_env=False) as client:
            while True:
                try:
                    await asyncio.to_thread(self._notice)
                except Exception:
                    log.exception("webhooks: the ledger was not read; the next look is in %g s", self._poll_s)
                try:
                    await self._tell_transitions(client)
                except Exception:
                    log.exception("webhooks: transitions were not told; the next attempt is in %g s", self._poll_s)
                try:
                    await self._deliver(client)
                except Exception:
                    log.exception("webhooks: what was tried was not recorded; it is again in %g s", self._poll_s)
                await asyncio.sleep(self._poll_s)

    # --- what is to be told ---

    def _notice(self) -> None:
        """Find the jobs that have ended and are not settled. The ledger is asked at every look, for ids alone: nothing
        else that happens in the queue says whether a job has ended."""
        ended = self._ledger.ended()
        if self._settled is None:
            self._write_record(ended)
            self._settled = set(ended)
        self._settled &= set(ended)  # the ledger forgets finished jobs in time, and so does the record
        for id in ended:
            if id not in self._settled and id not in self._pending:
                with suppress(JobNotFoundError):  # forgotten just now
                    job = self._ledger.job(id)
                    self._pending[id] = _Delivery(job, since=elapsed() - self._tried.pop(id, 0.0))

    def _settle(self, delivery: _Delivery) -> None:
        assert self._settled is not None
        self._pending.pop(delivery.job.id, None)
        self._settled.add(delivery.job.id)
        self._write_record(self._settled)

    def _read_record(self) -> tuple[set[str] | None, dict[str, float]]:
        """Return the settled jobs (None if the record is missing or cannot be read), and the seconds for which the
        other jobs have been tried."""
        try:
            record = json.loads(self._record.read_bytes())
            tried = {id: float(seconds) for id, seconds in record["tried_s"].items() if 0 <= seconds <= KEEP_TRYING_S}
            return {str(id) for id in record["settled"]}, tried
        except FileNotFoundError:
            return None, {}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            log.warning("webhooks: %s cannot be read; the ends of past jobs count as told", self._record)
            return None, {}

    def _write_record(self, settled: Collection[str]) -> None:
        tried = {id: round(elapsed() - delivery.since, 1) for id, delivery in self._pending.items()}
        record = {"settled": sorted(settled), "tried_s": tried}
        with adapter_files.writing(f"recording deliveries in {self._record}"):
            adapter_files.replace(self._record, json.dumps(record) + "\n")

    # --- telling it ---

    async def _deliver(self, client: httpx2.AsyncClient) -> None:
        """Attempt each delivery that is due; for how long the others have been tried is recorded."""
        settled: list[bool] = []
        for delivery in [each for each in self._pending.values() if each.due <= time.monotonic()]:
            try:
                settled.append(await self._attempt(client, delivery))
            except Exception:
                log.exception("webhooks: an attempt at job %s failed", delivery.job.id)
        if not all(settled):
            await asyncio.to_thread(self._write_record, self._settled or ())

    async def _attempt(self, client: httpx2.AsyncClient, delivery: _Delivery) -> bool:
        """Return whether it is settled now."""
        job = delivery.job
        delay = min(LONGEST_DELAY_S, self._first_delay_s * 2 ** min(delivery.attempts, 30))
        delivery.attempts += 1
        delivery.due = time.monotonic() + delay
        path = await asyncio.to_thread(self._path_of, job)
        problem = await self._post(client, job.id, payload(job, path=path))
        if problem is None:
            log.info("webhooks: told of job %s (%s)", job.id, job.state)
            await asyncio.to_thread(self._settle, delivery)
        elif elapsed() - delivery.since > KEEP_TRYING_S:
            log.error("webhooks: gave up on job %s after %d attempts: %s", job.id, delivery.attempts, problem)
            await asyncio.to_thread(self._settle, delivery)
        else:
            log.warning("webhooks: job %s, attempt %d: %s; again in %g s", job.id, delivery.attempts, problem, delay)
            return False
        return True

    async def _tell_transitions(self, client: httpx2.AsyncClient) -> None:
        """Tell those that are due, oldest first. Where nothing was ever told, those that there are by then count as
        told."""
        told = await asyncio.to_thread(self._book.setting, TOLD)
        if told is None:
            newest = await asyncio.to_thread(self._book.transitions, limit=1)
            await asyncio.to_thread(self._book.set, TOLD, newest[0].seq if newest else 0)
            return
        while (following := await asyncio.to_thread(self._book.next_transition, told)) is not None:
            if not await self._tell(client, following):
                return
            told = following.seq
            await asyncio.to_thread(self._book.set, TOLD, told)

    async def _tell(self, client: httpx2.AsyncClient, transition: Transition) -> bool:
        """Return whether the transition is settled: taken, or given up."""
        if self._transition is None or self._transition.seq != transition.seq:
            self._transition = _Pending(transition.seq, since=elapsed())
        pending = self._transition
        if pending.due > time.monotonic():
            return False
        delay = min(LONGEST_DELAY_S, self._first_delay_s * 2 ** min(pending.attempts, 30))
        pending.attempts, pending.due = pending.attempts + 1, time.monotonic() + delay
        body = {"event": transition.kind, "seq": transition.seq, "message": transition.message}
        body |= {"data": dict(transition.data), "timestamp": utc(transition.at)}
        problem = await self._post(client, f"transition-{transition.seq}", body)
        if problem is not None and elapsed() - pending.since <= KEEP_TRYING_S:
            log.warning("webhooks: transition %d: %s; again in %g s", transition.seq, problem, delay)
            return False
        if problem is not None:
            log.error("webhooks: gave up on transition %d: %s", transition.seq, problem)
        return True

    async def _post(self, client: httpx2.AsyncClient, delivery: str, said: Mapping[str, Any]) -> str | None:
        """Return one attempt; None if it was taken, else why not."""
        body = json.dumps(said, allow_nan=False).encode()
        headers = {"content-type": "application/json", "user-agent": "groupwise", "x-groupwise-delivery": delivery}
        if self._secret:
            now = int(time.time())
            headers["x-groupwise-timestamp"] = str(now)
            headers["x-groupwise-signature"] = signature(self._secret, timestamp=now, body=body)
        try:
            async with asyncio.timeout(ATTEMPT_S):  # of the whole attempt; the client's own limits are per phase
                async with client.stream("POST", self._url, content=body, headers=headers) as response:
                    return None if response.is_success else f"it answered {response.status_code}"
        except TimeoutError:
            return f"no answer within {ATTEMPT_S:g} s"
        except httpx2.HTTPError as error:
            return type(error).__name__  # its text may hold the URL, and that a token

    def _path_of(self, job: Job) -> Path | None:
        if job.version is None:
            return None
        try:
            return self._store.path(PolicyVersion.parse(job.version)).absolute()
        except (AdapterError, AdapterNotFoundError, StorageError):  # deleted, or damaged, since; or not to be read
            return None


def payload(job: Job, *, path: Path | None) -> dict[str, Any]:
    """Return the body posted for a finished job. `path` is the directory of the version that it made."""
    error = job.error or {}
    return {
        "job_id": job.id,
        "job_type": job.kind,
        "status": str(job.state),
        "adapter_name": job.adapter,
        "adapter_path": None if path is None else str(path),
        "error": error.get("message"),
        "timestamp": utc(job.finished_at),
        "adapter_version": job.version,
        "error_code": error.get("code"),
        "step": job.step,
        "steps": job.steps,
        "metrics": {name: value for name, value in job.metrics.items() if math.isfinite(value)},
        "unhealthy": job.unhealthy,
        "warnings": warnings_of(job),
        "created_at": utc(job.created_at),
        "started_at": utc(job.started_at),
    }


def warnings_of(job: Job) -> list[str]:
    """Return what is legal and perhaps not meant, what the job did not do as it was asked to, and what to do about
    it."""
    warnings = list(job.summary.get("warnings", ()))
    if job.micro_tokens is not None:
        warnings.append(
            f"memory ran out: the job went on with at most {job.micro_tokens} tokens in a pass; config.micro_tokens is "
            f"{job.config.get('micro_tokens')}"
        )
    if job.unhealthy is not None and job.version is not None:
        name, _, number = job.version.partition("@")
        warnings.append(
            f"{job.version} is stored and was not made active, as {_why(job)}; to activate it all the same: "
            f'POST /v1/adapters/{name}/activate {{"version": {number}}}, or groupwise adapters activate {job.version}'
        )
    return warnings


def _why(job: Job) -> str:
    if str(job.unhealthy).startswith("the gate"):
        return f"{job.unhealthy}"
    return f"the job's health is error: {job.unhealthy}. GET /v1/train/health/{job.id} has causes and remedies"


def signature(secret: str, *, timestamp: int, body: bytes) -> str:
    """Return the value of x-groupwise-signature. A receiver computes it too, compares with `hmac.compare_digest`, and
    refuses timestamps that are minutes old."""
    return "sha256=" + hmac.new(secret.encode(), f"{timestamp}.".encode() + body, hashlib.sha256).hexdigest()


def utc(seconds: float | None) -> str | None:
    """Return Unix seconds as ISO 8601, in the form of answers.

    >>> utc(0.25), utc(None)
    ('1970-01-01T00:00:00.250Z', None)
    """
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _checked(url: str) -> str:
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL:
        parsed = httpx2.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(
            f"webhook_url is {url[:64]!r}; it must be an absolute http or https URL",
            hint="write it like https://example.com/hooks/groupwise",
            field="webhook_url",
        )
    return url
