"""Decides whose turn it is: which of the waiting jobs is taken next, and who makes way for it.

A job waits for those of its tenant that came before it and have to do with it: those that make a version of the same
adapter, or of the one that it continues (`base_adapter`), or that continue the adapter it makes a version of. So jobs
of one adapter run in the order in which they were posted, whoever runs beside them, and each begins from what it would
have begun from had all run one after another.

Who has had less goes first (start-time fair queueing, Goyal et al. 1996). A tenant has a clock, which counts the tokens
that were trained for it, and so has each of its adapters, which counts them over the `weight` of the job. Of the jobs
that may run it is the turn of one of the tenant that is furthest behind, of its adapter that is, the oldest. A job that
has come QUANTUM tokens ahead of one that waits makes way for it: it is saved, waits, and goes on when it is behind.
So an adapter gets its share of the tokens while it has work, whoever has more, and soon.

Who has had no work does not save it up: a clock that begins to count again does so from the furthest behind of those
that have some, and none is ever more than CREDIT behind the first.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import groupby
from operator import itemgetter
from typing import Any

from groupwise.store.ledger_schema import JobRecord, update_job
from groupwise.store.ledger_tables import READS

QUANTUM = 1 << 14  # tokens; being saved and taken again costs little beside so many

CREDIT = 4 * QUANTUM

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

_TRAINING = "SELECT *, NULL AS position FROM job WHERE state = 'running' AND version IS NULL"


@dataclass(frozen=True)
class Standing:
    """How much an adapter, and its tenant, have had by now."""

    job: str
    tenant: str
    adapter: str
    clock: float
    own: float

    @classmethod
    def of(cls, db: sqlite3.Connection, row: sqlite3.Row) -> Standing:
        tenant, adapter = row["tenant"], row["adapter"]
        (clock,) = db.execute(_CLOCK.format("?"), (tenant,)).fetchone()
        (own,) = db.execute(_OWN.format("?", "?"), (tenant, adapter)).fetchone()
        return cls(row["id"], tenant, adapter, clock, own)

    def leads(self, other: Standing) -> float:
        """Return by how many tokens this one is ahead: its tenant, or within one tenant its adapter."""
        return self.own - other.own if self.tenant == other.tenant else self.clock - other.clock


def next_job(db: sqlite3.Connection) -> sqlite3.Row | None:
    """Return the job whose turn it is; None if none waits that could run."""
    for _, tied in groupby(db.execute(_TENANTS).fetchall(), key=itemgetter("clock")):
        firsts = [first for row in tied if (first := _next_of(db, row["tenant"])) is not None]
        if firsts:
            return min(firsts, key=itemgetter("seq"))
    return None


def _next_of(db: sqlite3.Connection, tenant: str) -> sqlite3.Row | None:
    heads = (db.execute(_MAY_BEGIN, (seq,)).fetchone() for _, seq in _by_clock(db, tenant))
    return next((row for row in heads if row is not None), None)


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
            (own,) = db.execute(_OWN.format("?", "?"), (tenant, row["adapter"])).fetchone()
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
    """Return whether nothing may be trained beside this job: torch has one generator in a process, or workers died with
    it and others."""
    return job.alone or bool(job.config.get("lora_dropout") or job.config.get("gradient_checkpointing"))


# ---- clocks ----
def price_of_taking(job: JobRecord) -> int:
    """Return how many tokens it counts as that a job is taken: small ones without end are not free, and one that has
    none beside it keeps all others waiting."""
    return QUANTUM if needs_none_beside(job) else QUANTUM // 16


def charge(db: sqlite3.Connection, row: sqlite3.Row, *, tokens: int, weight: int) -> None:
    """Count tokens that were trained for a job."""
    standing = Standing.of(db, row)
    (first,) = db.execute("SELECT max(turn) FROM main.job").fetchone()
    (ahead,) = db.execute("SELECT max(own) FROM main.job WHERE tenant = ?", (row["tenant"],)).fetchone()
    turn = max(standing.clock, first - CREDIT) + tokens
    own = max(standing.own, ahead - CREDIT) + tokens / weight
    update_job(db, row["seq"], turn=turn, own=own)


def clocks_of_new(db: sqlite3.Connection, tenant: str, adapter: str) -> dict[str, Any]:
    """Return the columns of a job that is being queued: clocks that stood still begin with the others'."""
    busy = db.execute(_TENANTS).fetchone()
    first = db.execute("SELECT max(turn) FROM main.job").fetchone()[0] or 0
    clock = db.execute(_CLOCK.format("?"), (tenant,)).fetchone()[0] or 0
    its, _ = next(_by_clock(db, tenant), (None, None))
    ahead = db.execute("SELECT max(own) FROM main.job WHERE tenant = ?", (tenant,)).fetchone()[0] or 0
    own = db.execute(_OWN.format("?", "?"), (tenant, adapter)).fetchone()[0] or 0
    return {"turn": max(clock, _resumed_at(busy and busy["clock"], first)), "own": max(own, _resumed_at(its, ahead))}


def _resumed_at(last: float | None, first: float) -> float:
    """Return where a clock begins to count again: `last` is the furthest behind of those that have work, if any."""
    return first if last is None else max(last, first - CREDIT)
