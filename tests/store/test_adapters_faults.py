"""The adapter store under SIGKILL, full disks and rivals. After each fault: every listed version is whole, what was
acknowledged is there, nothing is left in staging, and the numbers go on.

Faults happen in children that this file forks when it is run as a script (`python test_adapters_faults.py kill ROOT`):
one interpreter without torch, threads or pytest, so that a fork costs milliseconds.
"""

import errno
import io
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from groupwise.errors import StorageError
from groupwise.store.adapters import AdapterStore
from groupwise.store.files import CONFIG, WEIGHTS, Provenance
from groupwise.types import PolicyVersion

ORIGIN = Provenance(base_model="tiny", base_hash="aaaa")
KEY = "base_model.model.layers.0.q_proj.lora_{}.weight"
FILE_SYSTEM_CALLS = ("open", "mkdir", "rename", "replace", "fsync", "unlink", "rmdir")


def publish(store: AdapterStore, *, width: int = 8) -> PolicyVersion:
    def write(directory: Path):
        (directory / CONFIG).write_text(
            json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]})
        )
        weights = {KEY.format("A"): np.ones((2, width), np.float32), KEY.format("B"): np.ones((width, 2), np.float32)}
        save_file(weights, directory / WEIGHTS)

    return store.publish("math", write, info=ORIGIN)


def at_call(k: int, action: Callable[[], None], patch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Run `action` at the k-th (from 1) point that changes the file system; returns whether it was reached.

    A point is before each call of `os`, and after `open`: there a file that was opened for writing is empty.
    """
    points = 0

    def tick():
        nonlocal points
        points += 1
        if points == k:
            action()

    def after(call):
        def opened(*args, **kwargs):
            file = call(*args, **kwargs)
            tick()
            return file

        return opened

    def before(call):
        def called(*args, **kwargs):
            tick()
            return call(*args, **kwargs)

        return called

    for name in FILE_SYSTEM_CALLS:
        patch.setattr(os, name, before(getattr(os, name)))
    patch.setattr(io, "open", after(io.open))  # what Path.open and Path.write_text call
    return lambda: points >= k


def check(root: Path, *, acknowledged: list[PolicyVersion]) -> AdapterStore:
    """Reopen the store as the next process would; it must be whole."""
    store = AdapterStore(root)
    assert not list(root.glob(".staging-*")), "staging was not swept"
    assert not list(root.glob(".quarantine/*")), "a torn version had become visible"
    versions = store.versions("math")
    assert set(acknowledged) <= set(versions)
    assert all(store.path(version).is_dir() for version in versions)
    assert store.active.is_base or store.active in versions
    return store


# --- what the children do ---


def start(work: Callable[[], None]) -> int:
    """Fork a child that does `work` and exits 0, or 1 with a traceback."""
    if pid := os.fork():
        return pid
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def join(pid: int) -> int:
    """The exit status, or minus the signal that the child died of."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def publish_activate_and_delete(root: Path):
    store = AdapterStore(root)
    store.activate(publish(store))
    store.delete(PolicyVersion("math", 1))
    publish(store)
    store.rollback()


def kill_at_every_call(root: Path) -> int:
    """SIGKILL before each single call that changes the file system, in a fresh store each time."""
    template = AdapterStore(root / "template")
    kept = [publish(template) for _ in range(2)]
    template.activate(kept[1])
    for k in itertools.count(1):
        home = Path(shutil.copytree(template.root, root / str(k)))

        def work(home=home, k=k):
            at_call(k, die, pytest.MonkeyPatch())
            publish_activate_and_delete(home)

        status = join(start(work))
        assert status in (0, -signal.SIGKILL), status
        store = check(home, acknowledged=kept[1:])
        assert store.active in (kept[1], PolicyVersion("math", 3))
        before = max(version.number for version in store.versions("math"))
        assert publish(store).number in (before + 1, before + 2)  # 2: the version that was deleted is not reused
        if status == 0:
            return k - 1
    raise AssertionError


def kill_at_random_times(root: Path) -> int:
    """SIGKILL after a random delay a child that publishes again and again; what it told of must be there."""
    rng = np.random.default_rng(0)
    acknowledged: list[PolicyVersion] = []
    kills = 25
    for _ in range(kills):
        reader, writer = os.pipe()

        def work(writer=writer):
            store = AdapterStore(root)
            while True:
                version = publish(store, width=20_000)
                os.write(writer, f"{version}\n".encode())

        pid = start(work)
        os.close(writer)
        time.sleep(rng.uniform(0.005, 0.12))
        os.kill(pid, signal.SIGKILL)
        assert join(pid) == -signal.SIGKILL
        with open(reader) as lines:
            acknowledged += [PolicyVersion.parse(line.strip()) for line in lines]
        store = check(root, acknowledged=acknowledged)
        assert publish(store).number == len(store.versions("math"))  # no gaps, nothing twice
    return kills


def limit_every_file_size(root: Path) -> int:
    """A file system that takes no more than `limit` bytes per file, for limits up to where all fit."""
    store = AdapterStore(root)
    kept = [publish(store)]
    store.activate(kept[0])
    for limit in range(0, 100_000, 13):

        def work(limit=limit):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                publish(AdapterStore(root))
            except StorageError:
                assert not list(root.glob(".staging-*"))
                os._exit(75)

        status = join(start(work))
        store = check(root, acknowledged=kept)
        if status == 0:
            assert store.versions("math")[-1] == PolicyVersion("math", 2)
            return limit // 13
        assert status == 75
        assert store.versions("math") == tuple(kept)
    raise AssertionError


def rivals(root: Path) -> int:
    """Four processes publish at once, and each opens the store (which recovers it) again and again."""

    def work():
        for _ in range(8):
            publish(AdapterStore(root))

    assert [join(pid) for pid in [start(work) for _ in range(4)]] == [0, 0, 0, 0]
    store = check(root, acknowledged=[PolicyVersion("math", number) for number in range(1, 33)])
    assert len(store.versions("math")) == 32
    return 32


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (kill_at_every_call, kill_at_random_times, limit_every_file_size, rivals)
}


@pytest.mark.parametrize(
    ("scenario", "at_least"),
    [
        ("kill_at_every_call", 40),
        pytest.param("kill_at_random_times", 25, marks=pytest.mark.slow),
        ("limit_every_file_size", 30),
        pytest.param("rivals", 32, marks=pytest.mark.slow),
    ],
)
def test_scenario(scenario, at_least, tmp_path):
    command = [sys.executable, __file__, scenario, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= at_least  # the faults did happen


@pytest.mark.parametrize("action", ["publish", "activate", "delete"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failing_call_is_a_storage_error_that_changes_nothing(action, code, tmp_path):
    def fail():
        raise OSError(code, os.strerror(code))

    faults = 0
    for k in itertools.count(1):
        root = tmp_path / str(k)
        store = AdapterStore(root)
        versions = [publish(store), publish(store)]
        store.activate(versions[0])
        act = {
            "publish": lambda store=store: publish(store),
            "activate": lambda store=store: store.activate(PolicyVersion("math", 2)),
            "delete": lambda store=store: store.delete(PolicyVersion("math", 2)),
        }[action]
        with pytest.MonkeyPatch.context() as patch:
            reached = at_call(k, fail, patch)
            try:
                act()
                failed = False
            except StorageError:
                failed = True
            was_reached = reached()
        if not was_reached:
            break
        faults += failed
        store = check(root, acknowledged=versions[:1])
        assert store.active == versions[0] or (action == "activate" and store.active == versions[1])
        if failed and action != "delete":
            assert store.versions("math") == tuple(versions)
    assert faults >= 4


def test_every_file_is_on_the_disk_before_the_rename_and_the_rename_after_it(tmp_path, monkeypatch):
    """A killed process leaves its writes in the page cache, a power cut does not: what counts is the order of calls."""
    store = AdapterStore(tmp_path)
    publish(store)
    calls: list[tuple[str, int]] = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor):
        calls.append(("fsync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def record_rename(source, target, **kwargs):
        calls.append(("rename", os.stat(source).st_ino))
        rename(source, target, **kwargs)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    directory = store.path(publish(store))
    moved = calls.index(("rename", directory.stat().st_ino))
    before = {inode for call, inode in calls[:moved] if call == "fsync"}
    assert before >= {path.stat().st_ino for path in (directory, *directory.iterdir())}
    assert ("fsync", directory.parent.stat().st_ino) in calls[moved:]


def test_a_version_being_written_is_not_swept_by_another_process(tmp_path):
    store = AdapterStore(tmp_path)

    def write(directory: Path):
        subprocess.run(
            [sys.executable, "-c", f"from groupwise.store.adapters import *; AdapterStore({str(tmp_path)!r})"],
            check=True,
        )
        (directory / CONFIG).write_text(
            json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]})
        )
        weights = {KEY.format("A"): np.ones((2, 8), np.float32), KEY.format("B"): np.ones((8, 2), np.float32)}
        save_file(weights, directory / WEIGHTS)

    assert store.publish("math", write, info=ORIGIN) == PolicyVersion("math", 1)


def test_a_lock_that_is_never_released_is_an_error_and_not_a_hang(tmp_path, monkeypatch):
    from groupwise.store import files as adapter_files
    from wording import raises  # not in the processes that this file is the program of

    store = AdapterStore(tmp_path)
    monkeypatch.setattr(adapter_files, "LOCK_TIMEOUT_S", 0.02)
    with adapter_files.locked(tmp_path), raises(StorageError):
        publish(store)


def test_a_store_that_cannot_be_made_says_where(tmp_path):
    from wording import raises

    (tmp_path / "file").write_text("")
    with raises(StorageError):
        AdapterStore(tmp_path / "file" / "adapters")


if __name__ == "__main__":
    print(SCENARIOS[sys.argv[1]](Path(sys.argv[2])))
