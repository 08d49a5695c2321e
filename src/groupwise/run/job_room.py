"""Says which jobs a worker trains at the same time, and how many fit into memory.

Jobs of small models that compute in joint passes (`train.together`) are trained together, and each computes the same
bytes as alone. Jobs of all other models, and jobs that must run alone (`ledger_turns.needs_none_beside`), are trained
one after another.

A further job needs memory for its adapter with gradient and AdamW's moments, its module tree, its part in joint passes,
and its data; larger passes are computed one at a time. All jobs together may take SHARE of the memory of the machine,
or of the process's control group. Jobs that wait, or that returned to the queue, are on the disk.
"""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.config.lora import LoraSpec
from groupwise.errors import ConfigError
from groupwise.model.adaptable import adapted_modules
from groupwise.model.load import LoadedModel
from groupwise.platform import memory_bytes
from groupwise.store.ledger import Ledger
from groupwise.store.ledger_schema import JobRecord
from groupwise.store.ledger_turns import needs_none_beside
from groupwise.train.together import may_share

MOST_AT_ONCE = 64  # threads

SHARE = 1 / 4

UNKNOWN_MEMORY = 4 << 30  # bytes, where the system does not say how much it has

TREE_BYTES = 16 << 20  # of a learner's module tree and its part in joint passes (benchmarks/many_jobs.py)

PAYLOAD_COPIES = 8  # bytes of a job's samples in memory, of each of its payload's


class JobRoom:
    """Says whether a job may begin while others are being trained."""

    def __init__(self, base: LoadedModel, ledger: Ledger, *, memory: int | None = None):
        self._base, self._ledger, self._is_shared = base, ledger, may_share(base)
        self.memory = int(SHARE * (memory_bytes() or UNKNOWN_MEMORY)) if memory is None else memory
        self._needs: dict[str, int] = {}

    def admits(self, job: JobRecord, running: Sequence[JobRecord]) -> bool:
        """Return whether there is room for the job. A single job always has room."""
        if not running:
            return True
        if not self._is_shared or any(map(needs_none_beside, (job, *running))):
            return False
        every = (job, *running)
        self._needs = {each.id: self._needs[each.id] for each in every if each.id in self._needs}  # not of those before
        return len(running) < MOST_AT_ONCE and sum(map(self.need_of, every)) <= self.memory

    def need_of(self, job: JobRecord) -> int:
        """Return the bytes that a job takes while it is trained."""
        if job.id not in self._needs:
            self._needs[job.id] = 16 * self._trained(job) + TREE_BYTES
            self._needs[job.id] += PAYLOAD_COPIES * self._ledger.payload_bytes(job.id)
        return self._needs[job.id]

    def _trained(self, job: JobRecord) -> int:
        """Return how many parameters the job's adapter has; 0 where it cannot be made, as the job will say."""
        told, fresh = {**job.config, **job.effective}, LoraSpec()
        targets = told.get("target_modules") or fresh.targets
        try:
            names = adapted_modules(self._base.model, targets if isinstance(targets, str) else tuple(targets))
        except ConfigError:
            return 0
        every = dict(self._base.model.named_modules())
        weights = (getattr(every.get(name), "weight", None) for name in names)
        width = sum(sum(weight.shape) for weight in weights if weight is not None)
        return int(told.get("lora_rank") or fresh.rank) * width
