"""The audit log: a line for each change, the owner's apart from each tenant's, bounded, for its owner's eyes."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from groupwise.errors import StorageFullError
from groupwise.store import audit
from groupwise.store.audit import AuditLog, Change
from groupwise.store.tenants import home_of


def change(number: int, tenant: str = "") -> Change:
    at = f"2026-11-28T12:00:00.{number:06}Z"
    return Change(at=at, who="app", tenant=tenant, method="POST", route="/v1/x", things={"n": str(number)}, status=200)


def test_what_is_written_is_read_newest_first_and_by_tenant(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    for number in range(6):
        log.append(change(number, ("", "acme", "globex")[number % 3]))
    assert [each.things["n"] for each in log.read("acme", limit=10)] == ["4", "1"]
    assert [each.things["n"] for each in log.read("", limit=1)] == ["3"]
    assert [each.things["n"] for each in log.read_all(limit=4)] == ["5", "4", "3", "2"]
    assert log.read("nobody", limit=5) == []
    for tenant in ("", "acme"):
        assert stat.S_IMODE((home_of(tmp_path, tenant) / audit.FILE).stat().st_mode) == 0o600


def test_it_is_bounded_and_nobodys_flood_pushes_out_anothers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MOST_BYTES", 1000)
    log = AuditLog(tmp_path)
    log.append(change(0, "acme"))
    for number in range(200):
        log.append(change(number, "globex"))
    kept = sorted(home_of(tmp_path, "globex").iterdir())
    assert len(kept) == 1 + audit.KEPT and all(path.stat().st_size <= 1000 for path in kept)
    found = [int(each.things["n"]) for each in log.read("globex", limit=1000)]
    assert found == list(range(199, 199 - len(found), -1)) and len(found) > 20
    assert [each.things["n"] for each in log.read("acme", limit=10)] == ["0"]


def test_a_line_that_a_kill_cut_off_hides_no_other(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    log.append(change(1))
    with (tmp_path / audit.FILE).open("ab") as file:
        file.write(b'{"at": "2026-1')
    log.append(change(2))
    assert [each.things["n"] for each in log.read("", limit=10)] == ["2", "1"]


def test_a_line_that_a_full_disk_cut_off_is_told_and_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel writes what there is room for, and says how much that was."""
    log, write = AuditLog(tmp_path), os.write
    log.append(change(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:40]))
        with pytest.raises(StorageFullError):
            log.append(change(2))
    log.append(change(3))
    assert [each.things["n"] for each in log.read("", limit=10)] == ["3", "1"]


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: log.append(change(number)), range(200)))
    assert {each.things["n"] for each in log.read("", limit=1000)} == {str(number) for number in range(200)}
