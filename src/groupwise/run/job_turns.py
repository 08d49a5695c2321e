"""Decides which of the jobs at hand makes its next step: none gets far ahead of one that could make a step itself.

A job may always make a step while no other job computes, so that fairness never leaves processors idle. While others
compute, a job waits once it is SLACK tokens ahead of the job furthest behind (`ledger_turns` says how tokens count),
until that job has caught up or no job computes. So jobs that keep pace make their small steps together, in joint
passes; a job with steps of thousands of tokens waits while others make many of theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from groupwise.store.ledger_schema import JobRecord
from groupwise.store.ledger_turns import QUANTUM, Standing, Weights, lead_of, no_weights

SLACK = QUANTUM // 4

LOOK_S = 0.2  # between two looks whether a job that waits is to end


class StepTurns:
    """The turns of the jobs of one worker, each in its own thread. `weights` are those of tenants."""

    def __init__(self, weights: Weights = no_weights):
        self._weights = weights
        self._jobs: dict[str, JobRecord] = {}
        self._clocks: dict[tuple[str, ...], float] = {}  # of the tenants, and of their adapters, of jobs at hand
        self._stepping: set[str] = set()
        self._changed = threading.Condition()

    @contextmanager
    def joined(self, job: JobRecord) -> Iterator[None]:
        """Register the job as one of the worker's for the block."""
        with self._changed:
            self._jobs[job.id] = job
            for name, clock in zip(_names(job), (job.turn, job.own), strict=True):
                self._clocks[name] = max(self._clocks.get(name, 0), clock)
        try:
            yield
        finally:
            with self._changed:
                del self._jobs[job.id]
                left = {name for each in self._jobs.values() for name in _names(each)}
                for name in set(_names(job)) - left:  # the ledger knows how far they are
                    del self._clocks[name]
                self._changed.notify_all()

    @contextmanager
    def step(self, job: JobRecord, tokens: int, raise_if_stopped: Callable[[], None]) -> Iterator[None]:
        """Context manager: a step of this many tokens, once it is the job's turn. `raise_if_stopped` is asked while it
        waits."""
        while not self._begin(job):
            raise_if_stopped()
        try:
            yield
        finally:
            with self._changed:
                self._stepping.discard(job.id)
                tenants, its = _names(job)
                self._clocks[tenants] += tokens / self._weights(job.tenant)
                self._clocks[its] += tokens / job.weight
                self._changed.notify_all()

    def _begin(self, job: JobRecord) -> bool:
        with self._changed:
            if self._changed.wait_for(lambda: self._may_step(job), LOOK_S):
                self._stepping.add(job.id)
                return True
        return False

    def _may_step(self, job: JobRecord) -> bool:
        mine = self._standing(job)
        return not self._stepping or all(mine.leads(self._standing(each)) <= SLACK for each in self._jobs.values())

    def _standing(self, job: JobRecord) -> Standing:
        clock, own = (self._clocks[name] for name in _names(job))
        return Standing(job.id, job.tenant, job.adapter, clock, own, lead_of(job.deadline))


def _names(job: JobRecord) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of a job's clocks: its tenant's, and its adapter's."""
    return (job.tenant,), (job.tenant, job.adapter)
