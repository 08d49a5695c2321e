"""Keeps the audit log: a line of JSON for each request that changes something, the owner's apart from each tenant's.

    STATE_DIR/audit.jsonl                   the owner's, and changes of keys
    STATE_DIR/tenants/acme/audit.jsonl      acme's; audit.jsonl.1 to .4 are older

    log.append(Change(at=now(), who="acme:app", tenant="acme", method="DELETE", route="/v1/adapters/{name}", ...))

Mode 0600. Each file has at most MOST_BYTES, and KEPT older ones stay; one tenant's changes do not push out another's. A
line has names and ids, and no body, no query and no key. It is written when the request has been answered; the kernel
has it then, and a power cut may lose the last seconds.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from groupwise.errors import StorageError
from groupwise.store.tenants import OWNER, home_of, tenants_in

FILE = "audit.jsonl"
MOST_BYTES, KEPT = 8 << 20, 4
MOST_TEXT = 200  # characters of a value that a request made up


class Change(BaseModel):
    """Holds the audit log's entry of a request, made or refused: `at` is UTC, ISO 8601; `things` are the names in its
    path and results, such as a job's id."""

    model_config = ConfigDict(frozen=True)

    at: str
    who: str
    tenant: str = OWNER
    method: str
    route: str
    things: dict[str, str] = {}
    status: int
    request: str = ""


def now() -> str:
    """Return the time, as `Change.at` has it."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"


class AuditLog:
    """The logs of a state directory. Threads may share it; each line is written at once."""

    def __init__(self, state_dir: Path):
        self._state_dir, self._lock = state_dir, threading.Lock()

    def append(self, change: Change) -> None:
        """Write a line. Raises StorageError."""
        path = home_of(self._state_dir, change.tenant) / FILE
        line = change.model_dump_json().encode() + b"\n"
        try:
            with self._lock:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                if path.exists() and path.stat().st_size + len(line) > MOST_BYTES:
                    _rotate(path)
                _write(path, line)
        except OSError as error:
            raise StorageError.of(error, f"cannot write {path}: {error.strerror or error}") from error

    def read(self, tenant: str, *, limit: int) -> list[Change]:
        """Return a tenant's newest changes, the newest first. Raises StorageError."""
        found: list[Change] = []
        for line in _lines(home_of(self._state_dir, tenant) / FILE):
            with suppress(ValidationError):  # a line that a kill cut off
                found.append(Change.model_validate_json(line))
            if len(found) == limit:
                break
        return found

    def read_all(self, *, limit: int) -> list[Change]:
        """Return the newest changes of the owner and of every tenant, the newest first. Raises StorageError."""
        found = [each for whose in (OWNER, *tenants_in(self._state_dir)) for each in self.read(whose, limit=limit)]
        return sorted(found, key=lambda change: change.at, reverse=True)[:limit]


def _write(path: Path, line: bytes) -> None:
    """Write a line behind the last one. What a kill or a full disk cut off ends first, so that this does not join."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        if os.write(descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def _rotate(path: Path) -> None:
    for number in range(KEPT, 0, -1):
        newer = path if number == 1 else path.with_name(f"{path.name}.{number - 1}")
        with suppress(FileNotFoundError):
            os.replace(newer, path.with_name(f"{path.name}.{number}"))


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a log, the last first."""
    files: Sequence[Path] = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, KEPT + 1))]
    for each in files:
        try:
            lines = each.read_bytes().splitlines()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StorageError.of(error, f"cannot read {each}: {error.strerror or error}") from error
        yield from reversed(lines)
