"""Whose turn it is: which of the waiting jobs is taken next.

A job waits for those of its tenant that came before it and have to do with it: those that make a version of the same
adapter, or of the one that it continues (`base_adapter`), or that continue the adapter it makes a version of. So jobs
of one adapter run in the order in which they were posted, whoever runs beside them, and each begins from what it would
have begun from had all run one after another.

Of the jobs that may run, it is the turn of the oldest one of the tenant whose last job was taken longest ago: who has
many waiting makes another wait for one at most.
"""

from __future__ import annotations

import sqlite3

_READ = "json_extract({0}.config, '$.base_adapter')"  # what a job continues, by name or version

_READS = f"substr({_READ}, 1, instr({_READ} || '@', '@') - 1)"  # ... by name

_AHEAD = f"""
    SELECT id FROM job AS ahead
    WHERE ahead.tenant = job.tenant AND ahead.seq < job.seq
    AND ahead.state IN ('queued', 'running') AND ahead.version IS NULL
    AND (ahead.adapter IN (job.adapter, {_READS.format("job")}) OR {_READS.format("ahead")} = job.adapter)
"""

_NEXT = f"""
    SELECT * FROM job WHERE state = 'queued' AND NOT EXISTS ({_AHEAD})
    ORDER BY (SELECT max(turn) FROM job AS other WHERE other.tenant = job.tenant), seq LIMIT 1
"""

_TRAINING = "SELECT *, NULL AS position FROM job WHERE state = 'running' AND version IS NULL"


def next_job(db: sqlite3.Connection) -> sqlite3.Row | None:
    """Return the job whose turn it is; None if none waits that could run."""
    return db.execute(_NEXT).fetchone()


def training(db: sqlite3.Connection, worker: str | None = None) -> list[sqlite3.Row]:
    """Return the jobs that are being trained, oldest first: all, or those in the hands of a worker."""
    mine = "" if worker is None else "AND worker = :worker"
    return db.execute(f"{_TRAINING} {mine} ORDER BY seq", {"worker": worker}).fetchall()
