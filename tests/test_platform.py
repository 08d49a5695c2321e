"""What the operating system is asked, where it answers and where it does not: another kernel, a container, Windows."""

import asyncio
import contextvars
import gc
import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import traceback
from contextlib import closing
from pathlib import Path

import pytest

from cli_project import Project
from forked import ONE_SERVER, forked
from groupwise import platform
from groupwise.errors import GroupwiseError, ModelError
from groupwise.platform import UnsupportedPlatformError, control_groups
from processes import many_files
from wording import raises

SOURCE = Path(platform.__file__).parent
ELSEWHERE = {"platform.py", "rewards/sandbox_child.py"}  # the second is a script that imports nothing of ours


def test_only_one_module_asks_the_operating_system() -> None:
    modules = r"^\s*(?:import|from) (?:fcntl|resource|pwd|grp)\b"
    asks = re.compile(modules + r"|[\"']/proc|sched_getaffinity|\.prctl\b|/sys/fs/")
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if any(asks.search(line) for line in path.read_text(encoding="utf-8").splitlines())
    }
    assert found <= ELSEWHERE


# ---- Windows, and an old Python ----


def refused(prelude: str, *, python: str = sys.executable) -> str:
    """What `groupwise --help` says of a platform that `prelude` makes; it has imported nothing that is not ours."""
    code = (
        f"import sys; {prelude}\n"
        "try:\n import groupwise.cli.main\n"
        "except SystemExit as ended:\n"
        " assert not {'typer', 'pydantic', 'rich', 'torch'} & set(sys.modules)\n"
        " sys.exit(ended.code)"
    )
    ran = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    )
    assert ran.returncode == 3 and not ran.stdout and "Traceback" not in ran.stderr, ran.stderr
    return ran.stderr


def test_every_command_says_on_windows_that_it_needs_wsl() -> None:
    hidden = "sys.modules['fcntl'] = sys.modules['resource'] = None; sys.platform = 'win32'"
    first, *rest = refused(hidden).splitlines()
    assert first.startswith("error: Groupwise does not run on Windows") and "WSL: `wsl --install`" in first
    assert len(rest) == 1


def test_an_old_python_is_named_with_the_one_that_is_needed() -> None:
    said = refused("sys.version_info = (3, 10, 4, 'final', 0)")
    assert "needs Python 3.11 or newer; this is 3.10.4" in said and "python3.11 -m venv" in said


def test_what_needs_a_lock_says_the_same_without_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "fcntl", None)
    for call in (lambda: platform.try_lock(0), lambda: platform.unlock(0), lambda: platform.raise_open_files(9)):
        with raises(UnsupportedPlatformError):
            call()
    assert issubclass(UnsupportedPlatformError, GroupwiseError)


# ---- macOS: no affinity, no /proc, no prctl, no control groups ----


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.delattr(os, "getxattr", raising=False)
    monkeypatch.setattr(platform, "PROC", tmp_path / "no-proc")
    monkeypatch.setattr(platform, "CONTROL_GROUPS", tmp_path / "no-groups")
    monkeypatch.setattr(platform.ctypes, "CDLL", lambda name: object())


def test_what_is_not_told_is_a_default(bare: None, tmp_path: Path) -> None:
    assert platform.cores() == os.cpu_count()
    assert platform.memory_bytes() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert platform.resident_bytes(os.getpid()) == platform.address_space_bytes(os.getpid()) == 0
    assert platform.mapped_files() is platform.session_below(os.getpid()) is platform.listener_of(80) is None
    assert platform.oom_kills() == 0 and platform.is_locked(tmp_path) is False
    assert platform.stderr_path() in (os.devnull,) or Path(platform.stderr_path()).exists()
    platform.set_oom_score(1000)
    platform.die_with_parent(signal.SIGTERM)
    platform.kill_session(1 << 30)
    with pytest.raises(OSError):
        control_groups()


def test_a_machine_without_any_answer_has_one_core_and_no_known_memory(
    bare: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    monkeypatch.setattr(os, "sysconf", lambda name: (_ for _ in ()).throw(ValueError(name)))
    assert (platform.cores(), platform.memory_bytes()) == (1, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells only on Linux")
def test_what_linux_tells(tmp_path: Path) -> None:
    assert platform.cores() <= len(os.sched_getaffinity(0))
    assert 0 < platform.resident_bytes(os.getpid()) < platform.address_space_bytes(os.getpid())
    assert platform.mapped_files() and Path(platform.stderr_path()).exists()
    (tmp_path / "lock").touch()
    descriptor = os.open(tmp_path / "lock", os.O_RDWR)
    assert not platform.is_locked(tmp_path / "lock")
    assert platform.try_lock(descriptor) and platform.is_locked(tmp_path / "lock")
    other = os.open(tmp_path / "lock", os.O_RDWR)
    assert not platform.try_lock(other) and not platform.try_lock(other, shared=True)
    platform.unlock(descriptor)
    assert platform.try_lock(other)
    for each in (descriptor, other):
        os.close(each)
    assert platform.exists(os.getpid()) and not platform.exists(1 << 30)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_freed_memory_between_blocks_in_use_goes_back_to_the_kernel() -> None:
    """As after a run: what is left lies between much that is free, in an arena that shrinks at its end only."""

    def fragmented() -> None:
        blocks = [bytes(8000) for _ in range(8000)]  # 64 MB
        left.extend(blocks[::100])

    left: list[bytes] = []
    thread = threading.Thread(target=fragmented)
    thread.start()
    thread.join()
    before = platform.resident_bytes(os.getpid())
    platform.trim_memory()
    assert platform.resident_bytes(os.getpid()) < before - (30 << 20) and len(left) == 80


ARENAS = """
import os, sys, threading
from groupwise import platform
platform.share_arenas(int(sys.argv[1]))
end, left = threading.Event(), []
def needs_much(freed):
    kept = [bytes(8000) for _ in range(4000)]  # 32 MB
    left.append(kept.pop())
    kept.clear()
    freed.set()
    end.wait()
for _ in range(8):
    freed = threading.Event()
    threading.Thread(target=needs_much, args=(freed,)).start()
    freed.wait()
print(platform.resident_bytes(os.getpid()))
end.set()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc has arenas")
def test_what_one_thread_has_freed_another_takes() -> None:
    """Eight threads need 32 MB each, one after another."""
    run = [subprocess.run([sys.executable, "-c", ARENAS, most], capture_output=True, check=True) for most in ("1", "8")]
    shared, each = (int(done.stdout) for done in run)
    assert shared < each - (30 << 20)


@ONE_SERVER
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param(["--help"], "Exit codes", marks=pytest.mark.slow),
        (["doctor"], "starter: "),
        (["check", "run.yaml"], "sampled with"),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else "",
)
def test_commands_work_without_what_only_linux_has(
    arguments: list[str], says: str, project: Project, tmp_path: Path
) -> None:
    with forked("bare_platform", "groupwise", *arguments, folder=project.folder) as process:
        process.join(120)
        said = [(project.folder / name).read_text() for name in ("stdout", "stderr")]
        assert process.exitcode == 0, said
    assert says in said[0] and "Traceback" not in said[1]


# ---- a container's limits ----


def a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    monkeypatch.setattr(platform, "PROC", tmp_path)
    monkeypatch.setattr(platform, "CONTROL_GROUPS", tmp_path / "groups")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/box\n")
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("quota", "expected"), [("150000 100000", 2), ("100000 100000", 1), ("5000 100000", 1), ("max 100000", 8), ("", 8)]
)
def test_a_quota_of_processors_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    a_group(tmp_path, monkeypatch, {"box/cpu.max": quota})
    assert platform.cores() == expected


def test_a_limit_of_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_group(tmp_path, monkeypatch, {"box/memory.max": "1048576\n"})
    assert platform.memory_bytes() == 1 << 20
    (tmp_path / "groups" / "box" / "memory.max").write_text("max\n")
    assert platform.memory_bytes() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# ---- memory that ran out ----


def test_the_kernels_count_is_read_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "PROC", tmp_path)
    assert platform.oom_kills() == 0
    for text, count in (("oom_kill 3\n", 3), ("oom_killer 4\n", 0), ("oom_kill many\n", 0), ("", 0)):
        (tmp_path / "vmstat").write_text(text)
        assert platform.oom_kills() == count


@pytest.mark.parametrize(
    ("told", "at"),
    [
        ("0::/a.slice/b.service", "a.slice/b.service/memory.events.local"),
        ("0::/", "memory.events.local"),
        ("0::/../elsewhere", "memory.events"),
        ("5:cpu,cpuacct:/x\n4:memory:/x/y\n0::/", "memory/x/y/memory.oom_control"),
        ("9:memory,hugetlb:/docker/ab\n0::/", "memory/memory.oom_control"),
    ],
)
def test_the_count_of_the_workers_own_group_counts_before_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str, at: str
) -> None:
    monkeypatch.setattr(platform, "PROC", tmp_path)
    monkeypatch.setattr(platform, "CONTROL_GROUPS", tmp_path / "groups")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(f"{told}\n")
    (tmp_path / "vmstat").write_text("oom_kill 70\n")
    assert platform.oom_kills() == 70
    (tmp_path / "groups" / at).parent.mkdir(parents=True)
    (tmp_path / "groups" / at).write_text("low 1\noom 2\noom_kill 3\noom_group_kill 4\n")
    assert platform.oom_kills() == 3


# ---- where control groups may be made ----


def process_in(folder: Path, *, group: str, mounts: str) -> Path:
    (folder / "process").mkdir()
    (folder / "process" / "cgroup").write_text(f"4:memory:/old\n0::{group}\n")
    (folder / "process" / "mountinfo").write_text(mounts.replace("MOUNT", str(folder / "mount")))
    return folder / "process"


def group_at(path: Path, *, has: str = "cpu memory pids", shares: str = "memory pids") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "cgroup.controllers").write_text(f"{has}\n")
    (path / "cgroup.subtree_control").write_text(f"{shares}\n")
    return path


MOUNTED = "22 1 0:21 / /proc rw - proc proc rw\n35 24 0:30 ROOT MOUNT rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(("root", "group"), [("/", "/a.slice/b.scope"), ("/docker", "/docker/a.slice/b.scope")])
def test_where_control_groups_may_be_made(tmp_path, root, group):
    above = group_at(tmp_path / "mount" / "a.slice")
    own = group_at(above / "b.scope", shares="")
    process = process_in(tmp_path, group=group, mounts=MOUNTED.replace("ROOT", root))
    assert control_groups(process) == [above]  # its own has processes, and prepares nothing
    group_at(own, shares="cpu memory pids")
    assert control_groups(process) == [own]


def test_where_there_are_no_control_groups(tmp_path):
    group_at(tmp_path / "mount" / "a", has="hugetlb", shares="")
    process = process_in(tmp_path, group="/a", mounts=MOUNTED.replace("ROOT", "/"))
    with raises(OSError):
        control_groups(process)
    group_at(tmp_path / "mount" / "a", shares="cpu")
    with raises(OSError):
        control_groups(process)
    (process / "mountinfo").write_text("22 1 0:21 / /proc rw - proc proc rw\n")
    with raises(OSError):
        control_groups(process)


# ---- coroutines, where an event loop runs already ----


async def in_a_notebook(call):
    """`call`, as a cell of a notebook calls it: in the thread of a running event loop."""
    return call()


def test_a_coroutine_runs_to_its_end_with_and_without_a_loop():
    where = contextvars.ContextVar("where", default="nowhere")

    async def work():
        await asyncio.sleep(0)
        return where.get()

    where.set("here")
    assert platform.run_coroutine(work()) == "here"
    assert asyncio.run(in_a_notebook(lambda: platform.run_coroutine(work()))) == "here"


def test_what_a_coroutine_raises_is_raised_there_too():
    async def fails():
        raise ValueError("no")

    with raises(ValueError):
        asyncio.run(in_a_notebook(lambda: platform.run_coroutine(fails())))


def main_thread_waits() -> bool:
    """Whether it is in `Future.result`."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return any(each.f_code.co_name == "result" for each, _ in traceback.walk_stack(frame))


def test_ctrl_c_in_a_notebook_cancels_the_coroutine():
    """It comes in the main thread, which waits."""
    ended = []

    async def work():
        try:
            while not main_thread_waits():
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)  # the main thread takes it, and Python's handlers run there
            await asyncio.sleep(120)
        finally:
            ended.append("cancelled")

    async def cell():
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                platform.run_coroutine(work())
        finally:
            signal.signal(signal.SIGINT, before)

    asyncio.run(cell())
    assert ended == ["cancelled"]


def test_a_device_that_cannot_be_here_is_refused_without_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+cpu")
    for device, system in (("cuda", "linux"), ("cuda:1", "linux"), ("mps", "linux"), ("cuda", "darwin")):
        monkeypatch.setattr(platform.sys, "platform", system)
        with raises(ModelError, field="device"):
            platform.check_device(device)
    platform.check_device("mps")
    monkeypatch.setattr(platform.sys, "platform", "linux")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0")
    for device in ("auto", "cpu", "cuda"):  # whether there is a GPU torch alone knows
        platform.check_device(device)


# ---- garbage ----
@pytest.mark.parametrize("collects", [True, False])
def test_while_modules_are_imported_nobody_looks_for_garbage(collects: bool) -> None:
    """Nor where nobody did before; and again after an import that failed."""
    before, during = gc.isenabled(), list[bool]()
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(ImportError), platform.importing():
            importlib.import_module("groupwise.nothing", during.append(gc.isenabled()))
        assert during == [False] and gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


SPARES = """
import gc, weakref
from groupwise.platform import OF_PYTHON, spared


class Tree:
    def __init__(self):
        self.itself, self.leaves = self, [[] for _ in range(2 * OF_PYTHON)]


def left():
    return weakref.ref(Tree())


gc.disable()
begins, earlier, kept = gc.get_freeze_count(), left(), Tree()
assert earlier() is not None
with spared():
    assert earlier() is None, "garbage stays"
    spares = gc.get_freeze_count()
    assert spares > 2 * OF_PYTHON and not any(each is kept for each in gc.get_objects())
    later, added = left(), Tree()
    with spared():
        assert later() is None and gc.get_freeze_count() <= spares
        assert any(each is added for each in gc.get_objects()), "it would stay when it is garbage"
    assert gc.get_freeze_count() > begins, "the outer one goes on"
assert gc.get_freeze_count() == 0 and any(each is kept for each in gc.get_objects())
"""


def test_garbage_goes_before_what_stays_is_spared() -> None:
    """And what was made since is looked through: spared, it could never go."""
    subprocess.run([sys.executable, "-c", SPARES], check=True, timeout=120)


def test_what_can_be_read_or_written_is_found_whatever_its_number() -> None:
    with many_files(), closing(socket.socketpair()[0]) as lone:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            assert ours.fileno() >= 1024
            assert platform.ready([ours], timeout=0) == ([], [])
            assert platform.ready([ours], [ours], timeout=None) == ([], [ours])
            theirs.send(b"x")
            assert platform.ready([ours, theirs], [theirs], timeout=None) == ([ours], [theirs])
            assert platform.ready([ours], timeout=1e8) == ([ours], [])  # more than poll itself can wait
        assert platform.ready([lone], timeout=None) == ([lone], [])  # its other end is closed
