"""Old adapter versions go: of those that jobs made, the newest `keep_versions` of each adapter stay.

    surplus    which versions of an adapter are older than that
    needed     which versions jobs that have not ended begin from, or have just made
    needing    a job that could not begin, or be finished, without some versions
    Retention  removes what is surplus and not needed, some time after it became so

The active version, the one that rollback would go to, and what answers a request stay, however old. What people
uploaded or merged stays until they delete it. A version is removed only when it has been free for GRACE_S: a
submission that is being read may still name it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from groupwise.config.job import parse_job_config
from groupwise.errors import AdapterError, AdapterNotFoundError, GroupwiseError
from groupwise.store.adapters import AdapterStore
from groupwise.store.files import AdapterInfo
from groupwise.store.ledger import Job, Ledger
from groupwise.types import PolicyVersion

EVERY_S = 30.0

GRACE_S = 60.0

log = logging.getLogger(__name__)


class Prunes(Protocol):
    """The part of `Policies` that is needed here."""

    async def prune(self, find: Callable[[], Collection[PolicyVersion]]) -> Sequence[PolicyVersion]:
        """Remove the unused ones of the versions that `find` names, and return them. `find` is called once no swap is
        under way."""
        ...


def surplus(infos: Iterable[AdapterInfo], *, keep: int | None) -> set[PolicyVersion]:
    """Return, of the versions of one adapter, oldest first, those beyond the newest `keep` that jobs made. None keeps
    all.

    Unhealthy ones are counted apart: they are not to push out the last that is well.
    """
    made = [info for info in infos if info.job is not None]
    kinds = [[info.version for info in made if (info.unhealthy is None) is well] for well in (True, False)]
    return set() if keep is None else {version for versions in kinds for version in versions[:-keep]}


def needed(jobs: Iterable[Job]) -> set[PolicyVersion]:
    """Return the versions that these jobs name: the one they begin from, the one they made. A bare name means the
    newest, which stays in any case; while a job reads it, it is held (`AdapterStore.held`), also where a newer one
    comes."""
    named = [text for job in jobs for text in (job.config.get("base_adapter"), job.version)]
    return {PolicyVersion.parse(text) for text in named if text is not None and "@" in text}


def needing(jobs: Iterable[Job], versions: Collection[PolicyVersion], store: AdapterStore) -> Job | None:
    """Return one of `jobs` that cannot do without `versions`. One that names an adapter, and no version, needs any one
    version that is as healthy as the one that it would begin from now."""
    return next((job for job in jobs if needed([job]) & set(versions) or _has_no_other(job, versions, store)), None)


def _has_no_other(job: Job, versions: Collection[PolicyVersion], store: AdapterStore) -> bool:
    try:
        start = parse_job_config(job.kind, job.config).parent(store, name=job.adapter)
        if start not in versions:
            return False
        others = [version for version in store.versions(start.name) if version not in versions]
        return not (others if store.unhealthy(start) else [other for other in others if store.unhealthy(other) is None])
    except (AdapterNotFoundError, AdapterError):  # a job ahead of it is to make it; or nothing can begin from it
        return False


class Retention:
    """Removes surplus versions of one store, while `run` runs."""

    def __init__(
        self,
        *,
        store: AdapterStore,
        ledger: Ledger,
        policies: Prunes,
        keep: int | None,
        every_s: float = EVERY_S,
        grace_s: float = GRACE_S,
    ):
        self._store, self._ledger, self._policies, self._keep = store, ledger, policies, keep
        self._every_s, self._grace_s = every_s, grace_s
        self._free_since: dict[PolicyVersion, float] = {}

    async def run(self) -> None:
        """Sweep again and again; a failure is logged, and the next one may succeed."""
        while self._keep is not None:
            try:
                await self.sweep()
            except GroupwiseError as error:
                log.warning("old adapter versions were not removed: %s", error)
            await asyncio.sleep(self._every_s)

    async def sweep(self) -> Sequence[PolicyVersion]:
        """Remove what has been free for long enough; returns it. Raises StorageError, NotReadyError."""
        free, now = await asyncio.to_thread(self._free), time.monotonic()
        self._free_since = {version: self._free_since.get(version, now) for version in free}
        due = {version for version, since in self._free_since.items() if now - since >= self._grace_s}
        removed = await self._policies.prune(lambda: due & self._free()) if due else ()
        if removed:
            shown = ", ".join(map(str, sorted(removed)))
            log.info("removed %s: older than the newest %d that jobs made (keep_versions)", shown, self._keep)
        return removed

    def _free(self) -> set[PolicyVersion]:
        """Return what is surplus and no job needs."""
        old: set[PolicyVersion] = set()
        for name in self._store.names():
            versions = self._store.versions(name)
            if self._keep is not None and len(versions) > self._keep:
                old |= surplus(self._infos(versions), keep=self._keep)
        return old - needed(self._ledger.unfinished()) if old else old

    def _infos(self, versions: Sequence[PolicyVersion]) -> list[AdapterInfo]:
        infos = []
        for version in versions:
            with suppress(AdapterError, AdapterNotFoundError):  # damaged, and set aside just now; or deleted
                infos.append(self._store.info(version))
        return infos
