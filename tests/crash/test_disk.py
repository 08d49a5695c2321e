"""A disk that is full, files that may not grow, a directory that is read-only: refused in clear words, nothing lost."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from groupwise.errors import RemoteError
from groupwise.run.job_queue import LEASE_S
from groupwise.sdk.client import Client
from wording import raises

from .place import Place, a_place, sha256
from .traffic import GRPO
from .verdict import differing, left_over

PAGE = 4096
DONE_S = 240.0  # a worker that met a full disk tries again after 30 s
GROUP = {
    "messages": [{"role": "user", "content": "What is 47 + 138?"}],
    "completions": [{"text": "185", "reward": 1.0}, {"text": "184", "reward": 0.0}],
}
REFUSED_START = (3, 75)  # something is missing; try again later


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 MiB."""
    where = tmp_path / "disk"
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(where)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root can mount a small disk")
    try:
        yield where
    finally:
        subprocess.run(["umount", "--lazy", str(where)], check=True)


def submit(client: Client, key: str, **config: Any) -> str:
    options = {**GRPO, "minibatches": 1, "output_name": "chain", "seed": 3, **config}
    return client.train_grpo([GROUP], idempotency_key=key, **options).job_id


def refused(call: Callable[[], object]) -> RemoteError:
    with raises(RemoteError) as caught:
        call()
    assert (caught.value.status, caught.value.code) == (507, "storage_full"), caught.value
    return caught.value


@contextmanager
def without_room(directory: Path) -> Iterator[None]:
    """Within: every byte of the file system is taken."""
    filler = directory / "filler"
    try:
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(PAGE))
        yield
    finally:
        filler.unlink()


@contextmanager
def without_growth(place: Place, *, largest: int) -> Iterator[None]:
    """Within: the server and its worker write no file beyond `largest` bytes."""
    pids = [place.pid, *place.workers()]  # all live on: a full disk is no reason to kill a worker
    limits = [resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids]
    for pid, (_, hard) in zip(pids, limits, strict=True):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (largest, hard))
    try:
        yield
    finally:
        for pid, limit in zip(pids, limits, strict=True):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)


def content(directory: Path) -> dict[str, str]:
    return {str(path): sha256(path) for path in directory.rglob("*") if path.is_file()}


def serve_through(place: Place, starving: Callable[[], Any], *, seconds: float) -> None:
    """One job before, one caught in the middle, one refused and sent again after; then all is as if never starved."""
    with Client(place.url) as client:
        place.start()
        place.await_ready()
        first = client.wait(submit(client, "first"), timeout=DONE_S)
        caught = submit(client, "caught", iterations=100, checkpoint_interval=1)
        place.until(lambda: client.status(caught).step >= 1, "the job does not begin")
        workers = place.workers()
        with starving():
            refused(lambda: submit(client, "late"))
            assert client.chat("What is 2 + 3?", max_tokens=4).system_fingerprint == first.adapter_version
            time.sleep(seconds)
            assert place.workers() == workers
            assert client.status(caught).state in ("queued", "running")
            assert client.adapters.list().active_version == first.adapter_version
            refused(lambda: submit(client, "late"))
        late = submit(client, "late")
        assert [client.wait(id, timeout=DONE_S).adapter_version for id in (caught, late)] == ["chain@2", "chain@3"]
        assert client.status(caught).attempt > 1
        assert len(client.jobs()) == 3
    assert place.stop() == 0
    assert place.faults_of_state() == left_over(place) == differing(place) == []


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_while(tmp_path: Path, disk: Path) -> None:
    with a_place(tmp_path, state=disk / "state") as place:
        serve_through(place, lambda: without_room(disk), seconds=10)  # a checkpoint comes along meanwhile


@pytest.mark.slow
def test_files_that_may_not_grow_for_a_while(tmp_path: Path) -> None:
    with a_place(tmp_path) as place:
        beyond_the_lease = LEASE_S + 15  # which nobody can renew meanwhile
        serve_through(place, lambda: without_growth(place, largest=16 * PAGE), seconds=beyond_the_lease)


@pytest.mark.slow
def test_a_server_that_is_killed_on_a_full_disk_says_so_and_starts_once_there_is_room(
    tmp_path: Path, disk: Path
) -> None:
    with a_place(tmp_path, state=disk / "state") as place, Client(place.url) as client:
        place.start()
        place.await_ready()
        version = client.wait(submit(client, "first"), timeout=DONE_S).adapter_version
        open_job = submit(client, "second", iterations=100, checkpoint_interval=1)
        place.until(lambda: client.status(open_job).step >= 1, "the job does not begin")
        with without_room(disk):
            place.kill_server()
            place.kill_workers()
            place.start()
            if place.ends_or_answers():
                ready = httpx2.get(f"{place.url}/ready")
                assert ready.status_code == 503 and "storage_full" in ready.text
                assert client.adapters.list().active_version == version
                refused(lambda: submit(client, "third"))
                place.kill_server()
                place.await_no_worker()
            else:
                assert place.end() in REFUSED_START
                assert "Traceback" not in place.words and "No space left" in place.words
            assert place.faults_of_state() == []
        place.start()
        place.await_ready()
        assert client.adapters.list().active_version == version
        assert client.wait(open_job, timeout=DONE_S).adapter_version == "chain@2"
        place.stop()
        assert place.faults_of_state() == left_over(place) == differing(place) == []


@pytest.mark.slow
def test_a_read_only_directory_is_refused_and_left_as_it_is(tmp_path: Path, disk: Path) -> None:
    with a_place(tmp_path, state=disk / "state") as place, Client(place.url) as client:
        place.start()
        place.await_ready()
        version = client.wait(submit(client, "first"), timeout=DONE_S).adapter_version
        assert place.stop() == 0
        before = content(place.state)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        place.start()
        assert place.end() == 3
        assert "Traceback" not in place.words and "Read-only file system" in place.words
        assert content(place.state) == before
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        place.start()
        place.await_ready()
        assert client.adapters.list().active_version == version


def test_a_server_that_may_write_no_file_ends_with_the_reason(tmp_path: Path) -> None:
    with a_place(tmp_path) as place:
        place.start(largest_file=0)
        assert place.end() in REFUSED_START
        assert "Traceback" not in place.words and "too large" in place.words
