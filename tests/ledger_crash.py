"""Processes that use one ledger and are killed; run as a script: `python ledger_crash.py SCENARIO ROOT`.

Imports nothing but the standard library and `store.ledger`, so that a forked child starts in a millisecond. This
process never opens the ledger itself: SQLite must not be carried across a fork.

A child writes a line to ROOT/history after each fact that it was told of (O_APPEND: a line is whole or absent). A
scenario prints, as JSON, what happened; `check` has then compared history, ledger and published versions.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import resource
import signal
import sqlite3
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from groupwise.errors import GroupwiseError, LeaseLostError, StorageError
from groupwise.store import faults, ledger
from groupwise.store.ledger import JobState, Lease, Ledger

STEPS = 3
LEASE_SECONDS = 0.4
ENDLESS = 1_000_000  # attempts: here kills are no fault of the job
POINTS = {
    "server": (
        *("submit:before-spool", "submit:after-spool", "submit:before-commit", "submit:after-commit"),
        *("swap:before-complete", "swap:after-complete"),
    ),
    "worker": (
        *("lease:after-commit", "progress:after-commit"),
        *("publish:before-version", "publish:after-version", "publish:before-ledger", "publish:after-ledger"),
    ),
}


def payload_of(key: str) -> bytes:
    return json.dumps({"key": key, "filling": "x" * 5000}).encode()


def submit(book: Ledger, key: str) -> str:
    job, _ = book.submit(
        kind="grpo",
        adapter="math",
        config={"key": key},
        summary={},
        payload=payload_of(key),
        steps=STEPS,
        auto_load=True,
        idempotency_key=key,
        fingerprint=key,
        max_queued=ENDLESS,
    )
    return job.id


# --- history ---


def tell(root: Path, *words: object) -> None:
    descriptor = os.open(root / "history", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, (" ".join(map(str, words)) + "\n").encode())
    os.close(descriptor)


def told(root: Path, what: str) -> list[list[str]]:
    path = root / "history"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [words for kind, *words in lines if kind == what]


# --- a store of versions as small as can be, with the promise of the real one: one version per job ---


@contextmanager
def locked(root: Path):
    descriptor = os.open(root / "store.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def publish_version(root: Path, book: Ledger, lease: Lease) -> str:
    """Under the store's lock: is the job still ours, and has an earlier attempt published it already?"""
    faults.point("publish:before-version")
    with locked(root):
        book.check(lease)
        versions = sorted(path.name for path in root.glob("math@*"))
        for version in versions:
            if (root / version).read_text() == lease.job.id:
                return version
        version = f"math@{len(versions) + 1:06}"
        (root / ".staging").write_text(lease.job.id)
        os.rename(root / ".staging", root / version)
    faults.point("publish:after-version")
    return version


# --- the two roles ---


def serve(root: Path, *, submissions: int, until_done: bool = False) -> None:
    """Submit keys 0, 1, ...; those that were tried and not acknowledged come again. Complete what was published."""
    book = Ledger(root / "ledger.db", max_attempts=ENDLESS)
    acknowledged = {key for key, _ in told(root, "accepted")}
    keys = [key for (key,) in told(root, "tried") if key not in acknowledged]
    fresh = len({key for (key,) in told(root, "tried")})
    while True:
        waiting = len(book.jobs(states=[JobState.QUEUED]))
        if not keys and waiting < 3 and submissions:
            keys, fresh, submissions = [f"key-{fresh}"], fresh + 1, submissions - 1
            tell(root, "tried", keys[0])
        if keys:
            tell(root, "accepted", keys[0], submit(book, keys.pop(0)))
        for job in book.published_jobs():
            tell(root, "completed", book.complete(job.id).id)
        if random.random() < 0.05:
            book.prune()
        open_jobs = book.jobs(states=[JobState.QUEUED, JobState.RUNNING])
        if until_done and not (keys or submissions or open_jobs):
            return
        time.sleep(0.001)


def work(root: Path, *, name: str, dead: str | None) -> None:
    """Lease, train, publish, for ever. `dead` is a worker that the supervisor saw die."""
    book = Ledger(root / "ledger.db", max_attempts=ENDLESS)
    if dead is not None:
        book.expire(dead)
    while True:
        lease = book.lease(name, seconds=LEASE_SECONDS)
        if lease is None:
            time.sleep(0.002)
            continue
        tell(root, "leased", lease.job.id, lease.attempt)
        assert book.payload(lease.job.id) == payload_of(lease.job.config["key"])
        try:
            for step in range(1, STEPS + 1):
                book.renew(lease, seconds=LEASE_SECONDS)
                book.progress(lease, phase="training", step=step, metrics={"loss": 1 / step})
            version = publish_version(root, book, lease)
            book.published(lease, version)
        except LeaseLostError:
            tell(root, "lost", lease.job.id, lease.attempt)
            continue
        tell(root, "published", lease.job.id, lease.attempt)


# --- processes ---


def start(role: Callable[[], None], *, fault: str = "") -> int:
    """Fork a child that plays a role, with a fault, and exits 0, or 1 with a traceback."""
    if pid := os.fork():
        return pid
    try:
        random.seed(os.getpid())
        faults._faults = faults.parse(fault)
        role()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def join(pid: int) -> int:
    """The exit status, or minus the signal that the child died of."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    assert join(pid) == -signal.SIGKILL


# --- scenarios ---


def kills(root: Path) -> dict[str, int]:
    """A server and a worker; each round one of them dies at a named point or at a random time, then the other."""
    rng = random.Random(0)
    rounds = [(role, f"{point}:kill@{visit}") for role in POINTS for point in POINTS[role] for visit in (1, 4)]
    rounds += [(role, "") for role in ("server", "worker") * 5]
    rng.shuffle(rounds)
    count, dead = 0, None
    for number, (victim, fault) in enumerate(rounds):
        name = f"worker-{number}"
        told_dead = dead if number % 2 else None  # otherwise nobody tells, and its lease has to expire
        roles = {
            "server": lambda: serve(root, submissions=ENDLESS),
            "worker": lambda name=name, dead=told_dead: work(root, name=name, dead=dead),
        }
        pids = {role: start(roles[role], fault=fault if role == victim else "") for role in roles}
        if fault:
            assert join(pids.pop(victim)) == -signal.SIGKILL, f"{victim} did not reach {fault}"
            count += 1
        else:
            time.sleep(rng.uniform(0.0, 0.06))
        for pid in pids.values():
            kill(pid)
            count += 1
        dead = name
    drain(root)
    return {"kills": count, **check(root)}


def drain(root: Path) -> None:
    """What a restart without faults makes of it: everything that was tried is accepted and completed."""
    worker = start(lambda: work(root, name="last", dead=None))
    assert join(start(lambda: serve(root, submissions=0, until_done=True))) == 0
    kill(worker)


def check(root: Path) -> dict[str, int]:
    """Compare history, ledger and versions; returns the counts that must be zero, and some that must not."""
    connection = sqlite3.connect(root / "ledger.db")
    integrity = connection.execute("PRAGMA integrity_check").fetchone()[0]
    broken_references = len(connection.execute("PRAGMA foreign_key_check").fetchall())
    connection.close()
    book = Ledger(root / "ledger.db")
    ledger._TORN_SECONDS = -60.0  # every temporary file is waste now
    book.prune()
    jobs = {job.id: job for job in book.jobs(limit=ENDLESS)}
    accepted = {(key, id) for key, id in told(root, "accepted")}
    versions = Counter(path.read_text() for path in root.glob("math@*"))
    published = Counter(
        id for id in jobs for event in book.events(id, limit=ENDLESS) if event.data.get("phase") == "swapping"
    )
    leases = Counter(map(tuple, told(root, "leased")))
    counts = {
        "jobs": len(jobs),
        "leases": sum(leases.values()),
        "lost": sum(id not in jobs for _, id in accepted),
        "not_completed": sum(job.state is not JobState.COMPLETED for job in jobs.values()),
        "uncompleted_again": sum(jobs[id].state is not JobState.COMPLETED for (id,) in told(root, "completed")),
        "keys_with_two_jobs": len(jobs) - len({job.config["key"] for job in jobs.values()}),
        "keys_that_changed_jobs": len(accepted) - len({key for key, _ in accepted}),
        "keys_without_job": len({key for (key,) in told(root, "tried")} - {j.config["key"] for j in jobs.values()}),
        "published_twice": sum(count != 1 for count in (*published.values(), *versions.values())),
        "not_published": len(jobs.keys() - published.keys()) + len(jobs.keys() - versions.keys()),
        "wrong_version": sum((root / job.version).read_text() != job.id for job in jobs.values() if job.version),
        "attempts_given_twice": sum(count > 1 for count in leases.values()),
        "wrong_payloads": sum(book.payload(id) != payload_of(job.config["key"]) for id, job in jobs.items()),
        "waste_in_spool": len({path.name for path in (root / "spool").iterdir()} - {f"{id}.payload" for id in jobs}),
        "damaged": broken_references + (integrity != "ok"),
    }
    book.close()
    return counts


def stopped(root: Path) -> dict[str, int]:
    """SIGSTOP holds a worker beyond its lease; another does its job; the first wakes up and may change nothing."""

    def sleeper() -> None:
        book = Ledger(root / "ledger.db")
        lease = book.lease("sleeper", seconds=0.05)
        assert lease is not None
        book.check(lease)
        tell(root, "asleep")
        os.kill(os.getpid(), signal.SIGSTOP)
        refused = 0
        for write in (
            lambda: book.check(lease),
            lambda: book.renew(lease),
            lambda: book.progress(lease, phase="training", step=1, metrics={"loss": 0.0}),
            lambda: book.fail(lease, {"code": "x", "message": "x", "hint": None}),
            lambda: book.cancelled(lease),
            lambda: book.release(lease),
            lambda: publish_version(root, book, lease),
            lambda: book.published(lease, "math@000009"),
        ):
            try:
                write()
            except LeaseLostError:
                refused += 1
        os._exit(refused)

    join(start(lambda: tell(root, "accepted", "key-0", submit(Ledger(root / "ledger.db"), "key-0"))))
    pid = start(sleeper)
    os.waitpid(pid, os.WUNTRACED)
    time.sleep(0.1)
    drain(root)
    os.kill(pid, signal.SIGCONT)
    return {"refused": join(pid), **check(root)}


def rivals(root: Path) -> dict[str, int]:
    """Four processes at once create the ledger, submit the same keys, and lease whatever there is."""

    def rival() -> None:
        book = Ledger(root / "ledger.db")
        for number in range(8):
            tell(root, "accepted", f"key-{number}", submit(book, f"key-{number}"))
        while lease := book.lease(str(os.getpid())):
            tell(root, "leased", lease.job.id, lease.attempt)
            book.published(lease, publish_version(root, book, lease))
        for job in book.published_jobs():
            book.complete(job.id)

    assert [join(pid) for pid in [start(rival) for _ in range(4)]] == [0, 0, 0, 0]
    drain(root)
    return check(root)


def small_files(root: Path) -> dict[str, int]:
    """A file system that takes no more than `limit` bytes per file, for limits up to where all fit."""
    assert join(start(lambda: tell(root, "accepted", "key-0", submit(Ledger(root / "ledger.db"), "key-0")))) == 0

    def limited(limit: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            book = Ledger(root / "ledger.db")
            submit(book, "key-1")
        except StorageError:
            os._exit(75)
        except GroupwiseError:
            os._exit(1)

    def look() -> None:
        book = Ledger(root / "ledger.db")
        assert len(book.jobs()) == 1
        assert {path.name for path in (root / "spool").iterdir()} == {f"{book.jobs()[0].id}.payload"}

    full = 0
    for limit in range(0, 1 << 20, 1531):
        status = join(start(lambda limit=limit: limited(limit)))
        if status == 0:
            break
        assert status == 75, status
        assert join(start(look)) == 0
        full += 1
    tell(root, "tried", "key-1")
    drain(root)
    return {"full": full, **check(root)}


if __name__ == "__main__":
    scenario = {function.__name__: function for function in (kills, stopped, rivals, small_files)}[sys.argv[1]]
    home = Path(sys.argv[2])
    home.mkdir()
    print(json.dumps(scenario(home)))
