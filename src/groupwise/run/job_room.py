"""How many jobs a worker trains at once: what of them may be beside what, and no more than there is room for.

Jobs of small models that compute in joint passes (`train.together`) are trained beside each other, and each has the
bytes that it has alone. One after another are trained: jobs of all other models; those with dropout or with gradient
checkpointing, which use the one generator that torch has in a process; and those that a worker died with among others
(`JobRecord.alone`).
"""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.model.load import LoadedModel
from groupwise.store.ledger_schema import JobRecord
from groupwise.train.together import may_share

MOST_AT_ONCE = 64


class JobRoom:
    """Says whether a job may begin beside those that are being trained."""

    def __init__(self, base: LoadedModel):
        self._is_shared = may_share(base)

    def admits(self, job: JobRecord, running: Sequence[JobRecord]) -> bool:
        """Return whether there is room for the job; there is always for one."""
        if not running:
            return True
        if not self._is_shared or any(map(needs_none_beside, (job, *running))):
            return False
        return len(running) < MOST_AT_ONCE


def needs_none_beside(job: JobRecord) -> bool:
    """Return whether nothing may be trained beside this job."""
    return job.alone or bool(job.config.get("lora_dropout") or job.config.get("gradient_checkpointing"))
