"""Says why a job waits, in about how many seconds it begins, and whether it ends by its deadline.

    adapter    an earlier job trains the same adapter: this one begins from its version
    alone      it must be trained alone, or a job that is trained must be
    turn       other jobs come first: their tenant or adapter has had less training
    room       its turn is next, and as many jobs are trained as there is room for
    worker     the worker is being started

Only a tenant's own jobs are read, so that no tenant learns of another's: if the reason lies in those, it is `turn`,
without a time. Times are estimated from the running jobs at their present speed: the steps that are left, or a QUANTUM
of tokens, after which a job makes way. For a job that has made no step, the time is estimated from its tokens at the
median speed of the tenant's jobs that have.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Literal

from groupwise.sdk.types import Deadline, Waits
from groupwise.store.ledger_schema import JobRecord, JobState
from groupwise.store.ledger_turns import QUANTUM, lead_of, needs_none_beside

Reason = Literal["adapter", "alone", "turn", "room", "worker"]
Outlook = Literal["in_time", "late", "unknown", "met", "missed"]

AT_ONCE_S = 2.0  # after which a worker would have taken a job whose turn it is


@dataclass(frozen=True)
class _Part:
    """Holds the jobs of a line before a place: their number, the last one's place and id, and the seconds that they
    still take."""

    count: int
    last: tuple[int, str]
    seconds: float | None


class _Line:
    """Jobs of one kind in the order of their places, and for each what it and those before it are."""

    def __init__(self):
        self._places: list[int] = []
        self._parts: list[_Part] = []

    def add(self, place: int, job: JobRecord) -> None:
        """Add the job behind the last."""
        seconds, before = seconds_left(job), self._parts[-1].seconds if self._parts else 0.0
        both = None if seconds is None or before is None else before + seconds
        self._places.append(place)
        self._parts.append(_Part(len(self._places), (place, job.id), both))

    def before(self, place: int) -> _Part | None:
        """Return those before this place, if there are any."""
        count = bisect_left(self._places, place)
        return self._parts[count - 1] if count else None


class Queue:
    """A tenant's jobs that have not ended, of which it says why each waits.

    What one waits for are all before it that make its adapter, make what it continues, or continue its adapter
    (`ledger_turns`). They are found by what they make and continue, and added up beforehand: a job's answer takes no
    longer where it waits for a thousand.
    """

    def __init__(self, active: Sequence[JobRecord], *, worker: bool, lately: Sequence[JobRecord] = ()):
        """Begin with the jobs, newest first. `worker` says whether there is one that could train them; `lately` are
        some that have ended, as fast as which others may be."""
        self._speeds = [speed for each in (*active, *lately) if (speed := _speed(each)) is not None]
        self._has_worker = worker
        self._running = [each for each in active if each.state is JobState.RUNNING and each.version is None]
        self._clocks = sorted(_clock(each) for each in active if each.state is JobState.QUEUED)
        times = (seconds_to_make_way(each) for each in self._running)
        self._times = [seconds for seconds in times if seconds is not None]
        self._places = {job.id: place for place, job in enumerate(reversed(active))}
        self._lines: dict[tuple[str, str | None], _Line] = {}  # of (what it makes, what it continues)
        self._lines_of: dict[str, set[tuple[str, str | None]]] = {}  # an adapter -> those that make or continue it
        for job in reversed(active):
            if job.version is None:
                made, base = key = job.adapter, continues(job)
                self._lines.setdefault(key, _Line()).add(self._places[job.id], job)
                for name in (made, base) if base is not None else (made,):
                    self._lines_of.setdefault(name, set()).add(key)

    def why(self, job: JobRecord) -> Waits | None:
        """Return why a job waits; None if it does not."""
        if job.state is not JobState.QUEUED:
            return None
        if not self._has_worker:
            return _told("worker", "the training worker is being started")
        if (said := self._after(job)) is not None:
            return said
        running = self._running
        before = bisect_left(self._clocks, _clock(job))
        by_itself = next((each for each in running if needs_none_beside(each)), None)
        if by_itself is not None or (running and needs_none_beside(job)):
            text = "it is trained by itself" if by_itself is None else f"job {by_itself.id} is trained by itself"
            return _told("alone", text, job=by_itself and by_itself.id, seconds=max(self._times, default=None))
        if not before and time.time() - job.created_at < AT_ONCE_S:
            return _told("turn", "it begins at once, if there is room", seconds=0.0)
        seconds = min(self._times) * (1 + before // len(running)) if self._times else None
        if before:
            return _told("turn", f"{before} that have had less begin before it", seconds=seconds)
        if not running:
            return _told("turn", "the worker loads the model, or trains what others posted")
        return _told("room", "its turn is next, and as many are trained as there is room for", seconds=seconds)

    def deadline(self, job: JobRecord, waits: Waits | None) -> Deadline | None:
        """Return whether a job ends by its deadline; None where it has none. `waits` is why it waits."""
        if job.deadline is None:
            return None
        at, now = job.deadline, time.time()
        if job.state.is_final:
            ended = job.finished_at or now
            if job.state is not JobState.COMPLETED:
                return _due(at, "missed", f"it did not complete: it is {job.state}")
            late = ended - at
            return (
                _due(at, "missed", f"it ended {late:.0f} s late") if late > 0 else _due(at, "met", "it ended in time")
            )
        if now > at:
            return _due(
                at, "missed", f"it was to have ended {now - at:.0f} s ago; it goes on, as one without a deadline"
            )
        seconds = self._ends_in(job, waits)
        if seconds is None:
            return _due(at, "unknown", "nobody can say yet how long it takes")
        late = now + seconds - at
        if late > 0:
            return _due(at, "late", f"if all goes on as it does, it ends about {late:.0f} s late", seconds)
        return _due(at, "in_time", f"if all goes on as it does, it ends about {-late:.0f} s before", seconds)

    def _ends_in(self, job: JobRecord, waits: Waits | None) -> float | None:
        """Return the seconds until a job ends, if all jobs keep their present speed; None if that cannot be
        estimated."""
        if job.version is not None:
            return 0.0
        seconds, begins = seconds_left(job), 0.0 if waits is None else waits.about_seconds
        if seconds is None and self._speeds and (tokens := _tokens(job)) is not None:
            seconds = tokens / median(self._speeds)
        return None if seconds is None or begins is None else begins + seconds

    def _after(self, job: JobRecord) -> Waits | None:
        """Return that a job waits for those before it that have to do with its adapter, if there are any."""
        base, place = continues(job), self._places.get(job.id, len(self._places))
        keys = set(self._lines_of.get(job.adapter, ()))
        keys |= {key for key in self._lines_of.get(base or "", ()) if key[0] == base}
        parts = [part for key in keys if (part := self._lines[key].before(place)) is not None]
        if not parts:
            return None
        count, (_, last) = sum(part.count for part in parts), max(part.last for part in parts)
        seconds = None if any(part.seconds is None for part in parts) else sum(part.seconds or 0.0 for part in parts)
        what = "one job that has" if count == 1 else f"{count} jobs that have"
        text = f"it begins from what {what} to do with its adapter will make"
        return _told("adapter", text, job=last, seconds=seconds)


def continues(job: JobRecord) -> str | None:
    """Return the name of the adapter that a job says it continues."""
    return (job.config.get("base_adapter") or "").partition("@")[0] or None


def _clock(job: JobRecord) -> tuple[float, float]:
    return job.own - lead_of(job.deadline), job.created_at


def _due(at: float, outlook: Outlook, message: str, seconds: float | None = None) -> Deadline:
    told = f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}"
    about = None if seconds is None else round(seconds, 1)
    return Deadline(at=told, outlook=outlook, message=message, about_seconds=about)


def _tokens(job: JobRecord) -> int | None:
    """Return how many packed tokens a job trains; None where its summary does not say."""
    told = job.summary
    if job.kind == "sft":
        return told["tokens"] * int(job.config["epochs"]) if "tokens" in told else None
    if "completion_tokens" not in told:
        return None
    return (told["prompt_tokens"] + told["completion_tokens"]) * int(job.config["iterations"])


def _speed(job: JobRecord) -> float | None:
    """Return how many packed tokens a second a job trains, or trained; None before its first step."""
    seconds = job.metrics.get("time/step_s")
    return job.tokens / job.step / seconds if seconds and job.step and job.tokens else None


def _told(reason: Reason, text: str, *, job: str | None = None, seconds: float | None = None) -> Waits:
    return Waits(reason=reason, message=text, job_id=job, about_seconds=None if seconds is None else round(seconds, 1))


def seconds_left(job: JobRecord) -> float | None:
    """Return how long a job still takes; None before its first step."""
    step = job.metrics.get("time/step_s")
    return None if step is None else (job.steps - job.step) * step


def seconds_to_make_way(job: JobRecord) -> float | None:
    """Return how long a job still has its place: to its end, or for a quantum of its tokens; None before its first
    step."""
    left, step = seconds_left(job), job.metrics.get("time/step_s")
    if left is None or step is None or not job.step:
        return None
    a_step = job.tokens / max(job.step, 1) / job.weight
    return min(left, step * QUANTUM / a_step) if a_step else left
