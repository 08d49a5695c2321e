"""Decides whose turn it is: which of the waiting jobs is taken next, and who makes way for it.

A job waits for every earlier job of its tenant that makes a version of the same adapter, or of the adapter that it
continues (`base_adapter`), or that continues the adapter that it makes a version of. So jobs of one adapter run in the
order in which they were posted, whatever else runs, and each starts from the same version as if all jobs had run one
at a time.

The tenant and adapter with the fewest tokens go first (start-time fair queueing, Goyal et al. 1996). Each tenant has a
clock, which counts the tokens trained for it over its weight; each adapter has one, which counts them over the job's
weight. Of the jobs that may run, the next is of the tenant furthest behind, of its adapter furthest behind, the oldest.
A waiting job preempts a running one that is QUANTUM tokens ahead of it: the running job is saved, waits, and resumes
when it is behind. So an adapter with work gets its share of the tokens, and soon, however many jobs others have.

A deadline brings a job forward among the jobs of its tenant, the earliest deadline first, and with it the jobs that it
waits for, as long as its adapter is at most LEAD ahead of the adapter that would be next without deadlines; and it is
preempted LEAD later. Its tokens count as usual, so that the waiting jobs catch up: deadlines put an adapter at most a
LEAD and a QUANTUM (and a step) behind its share, and never a tenant. A deadline that has passed has no effect.

Time without work saves up no tokens: a clock that begins to count again starts from the clock furthest behind among
those with work, and no clock is ever more than CREDIT behind the first.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import groupby
from operator import itemgetter
from typing import Any

from groupwise.store.ledger_schema import JobRecord, update_job
from groupwise.store.ledger_tables import READS

QUANTUM = 1 << 14  # tokens; saving a job and taking it again costs little compared with so many

CREDIT = 4 * QUANTUM

LEAD = 2 * QUANTUM  # that a deadline brings forward; with a QUANTUM it is less than CREDIT, so that nothing is forgiven

Weights = Callable[[str], int]  # of a tenant

_UNFINISHED = "finished_at IS NULL AND version IS NULL"  # waiting, or being trained

_BEFORE = "ahead.tenant = job.tenant AND ahead.seq < job.seq AND ahead.finished_at IS NULL AND ahead.version IS NULL"

_MAKES = f"ahead.adapter IN (job.adapter, {READS.format('job.')}) AND {_BEFORE}"  # what it makes, or begins from

# from what it will make; + takes its affinity away, with which no index of an expression is used
_BEGINS = f"{READS.format('ahead.')} = +job.adapter AND {_BEFORE}"

_CLOCK = "SELECT max(turn) FROM main.job AS other WHERE other.tenant = {}"

_OWN = "SELECT max(own) FROM main.job AS other WHERE other.tenant = {} AND other.adapter = {}"

_MAY_BEGIN = f"""
    SELECT *, NULL AS position FROM job WHERE seq = ? AND state = 'queued'
    AND NOT EXISTS (SELECT 1 FROM main.job AS ahead INDEXED BY job_makes WHERE {_MAKES})
    AND NOT EXISTS (SELECT 1 FROM main.job AS ahead INDEXED BY job_reads WHERE {_BEGINS})
"""

_TENANTS = f"""
    WITH RECURSIVE some (tenant) AS (
        SELECT min(tenant) FROM main.job WHERE {_UNFINISHED} UNION ALL
        SELECT (SELECT min(tenant) FROM main.job WHERE {_UNFINISHED} AND tenant > some.tenant) FROM some
        WHERE some.tenant IS NOT NULL
    )
    SELECT tenant, ({_CLOCK.format("some.tenant")}) AS clock FROM some WHERE tenant IS NOT NULL ORDER BY clock
"""

_BY_OWN = f"SELECT seq, adapter, own FROM main.job WHERE tenant = ? AND {_UNFINISHED} ORDER BY own, seq"

_OLDEST = f"SELECT seq FROM main.job WHERE tenant = ? AND adapter = ? AND {_UNFINISHED} ORDER BY seq LIMIT 1"

_DUE = """
    SELECT adapter FROM main.job WHERE tenant = ? AND state = 'queued' AND deadline IS NOT NULL AND deadline > ?
    ORDER BY deadline, seq
"""

_NEEDS = f"""
    SELECT min(seq) FROM (
        SELECT ahead.seq FROM main.job JOIN main.job AS ahead INDEXED BY job_makes ON {_MAKES} WHERE job.seq = :job
        UNION ALL
        SELECT ahead.seq FROM main.job JOIN main.job AS ahead INDEXED BY job_reads ON {_BEGINS} WHERE job.seq = :job
    )
"""

_TRAINING = "SELECT *, NULL AS position FROM job WHERE state = 'running' AND version IS NULL"


@dataclass(frozen=True)
class Standing:
    """Holds the training, in tokens of the fair-share clocks, that a job's tenant (`clock`) and adapter (`own`) have
    had so far, and `lead`, the tokens by which the job's deadline brings it forward."""

    job: str
    tenant: str
    adapter: str
    clock: float
    own: float
    lead: float = 0.0

    @classmethod
    def of(cls, db: sqlite3.Connection, row: sqlite3.Row) -> Standing:
        tenant, adapter = row["tenant"], row["adapter"]
        (clock,) = db.execute(_CLOCK.format("?"), (tenant,)).fetchone()
        return cls(row["id"], tenant, adapter, clock, _own(db, tenant, adapter), lead_of(row["deadline"]))

    def leads(self, other: Standing) -> float:
        """Return by how many tokens this one is ahead: its tenant, or within one tenant its adapter."""
        if self.tenant != other.tenant:
            return self.clock - other.clock
        return self.own - self.lead - (other.own - other.lead)


def lead_of(deadline: float | None) -> float:
    """Return how many tokens of its adapter's clock a job's deadline brings it forward: none once it has passed."""
    return LEAD if deadline is not None and deadline > time.time() else 0.0


def no_weights(tenant: str) -> int:
    """Return the weight of a tenant whose keys set none."""
    return 1


def next_job(db: sqlite3.Connection) -> sqlite3.Row | None:
    """Return the job whose turn it is; None if none waits that could run."""
    for _, tied in groupby(db.execute(_TENANTS).fetchall(), key=itemgetter("clock")):
        firsts = [first for row in tied if (first := _next_of(db, row["tenant"])) is not None]
        if firsts:  # of tenants that have had as much, the one whose adapter has had less
            return min(firsts, key=lambda row: (_own(db, row["tenant"], row["adapter"]), row["seq"]))
    return None


def _next_of(db: sqlite3.Connection, tenant: str) -> sqlite3.Row | None:
    """Return the job of a tenant whose turn it is: one with a deadline, unless that is too far ahead."""
    heads = ((own, db.execute(_MAY_BEGIN, (seq,)).fetchone()) for own, seq in _by_clock(db, tenant))
    behind, first = next(((own, row) for own, row in heads if row is not None), (0.0, None))
    if first is None:
        return None
    for adapter in dict.fromkeys(row["adapter"] for row in db.execute(_DUE, (tenant, time.time()))):
        if _own(db, tenant, adapter) <= behind + LEAD:
            due = _first_for(db, tenant, adapter)
            if due is not None and _own(db, tenant, due["adapter"]) <= behind + LEAD:
                return due
    return first


def _first_for(db: sqlite3.Connection, tenant: str, adapter: str) -> sqlite3.Row | None:
    """Return the job that is to begin so that an adapter's oldest can end: itself, or what it waits for; None where
    that is being trained."""
    oldest = db.execute(_OLDEST, (tenant, adapter)).fetchone()
    seq, needed = None, None if oldest is None else oldest["seq"]
    while needed is not None:
        seq, needed = needed, db.execute(_NEEDS, {"job": needed}).fetchone()[0]
    return None if seq is None else db.execute(_MAY_BEGIN, (seq,)).fetchone()


def _own(db: sqlite3.Connection, tenant: str, adapter: str) -> float:
    return db.execute(_OWN.format("?", "?"), (tenant, adapter)).fetchone()[0]


def _by_clock(db: sqlite3.Connection, tenant: str) -> Iterator[tuple[float, int]]:
    """Yield (clock, its oldest job) of a tenant's adapters that have work, the furthest behind first.

    A job has its adapter's clock as it last set it, so that the adapter's is that or more: of a thousand that wait,
    those are looked at that seem to be no further ahead than the one that is asked for.
    """
    seen, found = set[str](), list[tuple[float, int]]()
    for row in db.execute(_BY_OWN, (tenant,)):
        while found and found[0] <= (row["own"], row["seq"]):
            yield heappop(found)
        if row["adapter"] not in seen:
            seen.add(row["adapter"])
            own = _own(db, tenant, row["adapter"])
            oldest = db.execute(_OLDEST, (tenant, row["adapter"])).fetchone()
            if oldest is not None:  # else it has ended just now
                heappush(found, (own, oldest["seq"]))
    yield from sorted(found)


def training(db: sqlite3.Connection, worker: str | None = None) -> list[sqlite3.Row]:
    """Return the jobs that are being trained, oldest first: all, or those in the hands of a worker."""
    mine = "" if worker is None else "AND worker = :worker"
    return db.execute(f"{_TRAINING} {mine} ORDER BY seq", {"worker": worker}).fetchall()


def makes_way(waiting: Standing, running: Sequence[Standing]) -> Standing | None:
    """Return which of the running ones is to make way for the one that waits: the first of those that are QUANTUM ahead
    of it, if any."""
    first = max(running, key=lambda each: each.leads(waiting), default=None)
    return first if first is not None and first.leads(waiting) >= QUANTUM else None


def needs_none_beside(job: JobRecord) -> bool:
    """Return whether this job must be trained alone: it uses torch's random generator, of which a process has one, or a
    worker died with it and others."""
    return job.alone or bool(job.config.get("lora_dropout") or job.config.get("gradient_checkpointing"))


# ---- clocks ----
def price_of_taking(job: JobRecord) -> int:
    """Return the tokens that taking a job counts as: an endless number of small jobs is not free, and a job that is
    trained alone keeps all others waiting."""
    return QUANTUM if needs_none_beside(job) else QUANTUM // 16


def charge(db: sqlite3.Connection, row: sqlite3.Row, *, tokens: int, weight: int, of_tenant: int) -> None:
    """Count tokens that were trained for a job, whose weights are its own and its tenant's."""
    standing = Standing.of(db, row)
    (first,) = db.execute("SELECT max(turn) FROM main.job").fetchone()
    (ahead,) = db.execute("SELECT max(own) FROM main.job WHERE tenant = ?", (row["tenant"],)).fetchone()
    turn = max(standing.clock, first - CREDIT) + tokens / of_tenant
    own = max(standing.own, ahead - CREDIT) + tokens / weight
    update_job(db, row["seq"], turn=turn, own=own)


def clocks_of_new(db: sqlite3.Connection, tenant: str, adapter: str) -> dict[str, Any]:
    """Return the columns of a job that is being queued: clocks that stood still begin with the others'."""
    busy = db.execute(_TENANTS).fetchone()
    first = db.execute("SELECT max(turn) FROM main.job").fetchone()[0] or 0
    clock = db.execute(_CLOCK.format("?"), (tenant,)).fetchone()[0] or 0
    its, _ = next(_by_clock(db, tenant), (None, None))
    ahead = db.execute("SELECT max(own) FROM main.job WHERE tenant = ?", (tenant,)).fetchone()[0] or 0
    own = _own(db, tenant, adapter) or 0
    return {"turn": max(clock, _resumed_at(busy and busy["clock"], first)), "own": max(own, _resumed_at(its, ahead))}


def _resumed_at(last: float | None, first: float) -> float:
    """Return where a clock begins to count again: `last` is the furthest behind of those that have work, if any."""
    return first if last is None else max(last, first - CREDIT)
