"""Enforces what a tenant may have, by the bounds of its keys (`groupwise keys add`): adapters, bytes on disk, jobs.

    quotas.check_adapter("math", find)     another adapter is to be made: 507 `tenant_full` where there are as many
    quotas.check_bytes()                   more is to be kept: 507 where the tenant's directory holds as much; before a
                                           job is queued, too
    quotas.check_job                       in the transaction that queues a job: the adapter that it makes, and 429
                                           `quota_exceeded` where as many jobs wait or run

The owner has no such bounds. Bytes are those of adapters, their optimizers and Tinker's checkpoints; what is under
way when the bound is reached may end. A day's tokens and a minute's requests are a key's own (`usage`).
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from groupwise.errors import GroupwiseError
from groupwise.server.usage import QuotaError
from groupwise.store.adapters import AdapterStore
from groupwise.store.files import Provenance
from groupwise.store.keys import KeyFile
from groupwise.store.ledger import RETRY_SECONDS
from groupwise.store.tenants import OWNER
from groupwise.types import PolicyVersion

COUNTED = ("adapters", "tinker")  # directories


class TenantFullError(GroupwiseError):
    """The tenant has reached its limit. The disk is not full, and other tenants' requests are accepted."""

    code, status, exit_code = "tenant_full", 507, 2


@dataclass(frozen=True)
class Quotas:
    """The bounds of one tenant, whose things are in `home`. A change of its keys counts from the next check on."""

    keys: KeyFile
    tenant: str
    home: Path

    def check_adapter(self, name: str, find: Callable[[], Collection[str]]) -> None:
        """Raise TenantFullError where the tenant has the adapters that `find` returns, and may not have another one."""
        most = self._bound("adapters")
        if most is not None and name not in (names := find()) and len(names) >= most:
            raise TenantFullError(
                f"{self.tenant} has {len(names)} adapters, or jobs that make them, and may have {most}",
                hint="delete one (DELETE /v1/adapters/NAME), or ask the server's owner for a larger bound",
            )

    def check_bytes(self) -> None:
        """Raise TenantFullError where the tenant keeps as much as it may. For threads."""
        if (most := self._bound("bytes")) is None:
            return
        if (kept := bytes_in(self.home)) >= most:
            raise TenantFullError(
                f"{self.tenant} keeps {kept} bytes, and may keep {most}",
                hint="delete adapters or checkpoints, or ask the server's owner for a larger bound",
            )

    def check_job(self, store: AdapterStore, db: sqlite3.Connection, job: str) -> None:
        """Raise QuotaError where with this job more wait or run than may, TenantFullError where it makes an adapter too
        many; in the transaction that queues it (`store.ledger.Claim`)."""
        if self.tenant == OWNER:
            return
        rows = db.execute("SELECT id, adapter FROM job WHERE finished_at IS NULL").fetchall()
        most, others = self._bound("jobs"), [row["adapter"] for row in rows if row["id"] != job]
        if most is not None and len(others) >= most:
            raise QuotaError(
                f"{len(others)} jobs of {self.tenant} wait or run, and {most} may",
                hint="wait for one to end, or cancel one",
                retry_after=RETRY_SECONDS,
            )
        (mine,) = (row["adapter"] for row in rows if row["id"] == job)
        self.check_adapter(mine, lambda: {*store.names(), *others})

    def _bound(self, name: str) -> int | None:
        return None if self.tenant == OWNER else self.keys.bound(self.tenant, name)


class TenantStore(AdapterStore):
    """The adapters of a tenant, of which there are no more than its quotas allow."""

    def __init__(self, root: Path, quotas: Quotas):
        super().__init__(root)
        self._quotas = quotas

    def publish(
        self,
        name: str,
        write: Callable[[Path], None],
        *,
        info: Provenance,
        admit: Callable[[], PolicyVersion | None] | None = None,
        number: int | None = None,
    ) -> PolicyVersion:
        """See `AdapterStore.publish`. Raises TenantFullError, too."""

        def admitted() -> PolicyVersion | None:
            self._quotas.check_adapter(name, self.names)
            return None if admit is None else admit()

        self._quotas.check_bytes()
        return super().publish(name, write, info=info, admit=admitted, number=number)


def bytes_in(home: Path) -> int:
    """Return how many bytes a tenant keeps; what goes meanwhile does not count."""
    total, folders = 0, [str(home / folder) for folder in COUNTED]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        total += entry.stat(follow_symlinks=False).st_size
    return total
