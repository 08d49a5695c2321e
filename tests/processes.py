"""Looking at processes from outside, for tests that kill them."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


def running(marker: str) -> list[int]:
    """Processes with the marker among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if marker.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def descendants(pid: int) -> list[int]:
    """Children of all threads of a process, their children and so on."""
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            children += map(int, path.read_text().split())
    return [*children, *(below for child in children for below in descendants(child))]


def becomes(true: Callable[[], object], *, within_s: float = 120) -> bool:
    """Whether it becomes true in time."""
    deadline = time.monotonic() + within_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@contextmanager
def many_files(count: int = 1100) -> Iterator[None]:
    """So many more open files, so that what is opened has numbers that select() does not take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * count + 1000
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"this process may have {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]
    try:
        yield
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
