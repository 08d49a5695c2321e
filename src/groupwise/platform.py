"""Asks the operating system for whatever is beyond portable Python, in one place: Linux and macOS are supported.

    require_supported     a plain error on Windows, which has neither `fork` nor `flock`, and on an old Python
    cores, memory_bytes   what this process may use of the machine, limits of its control group (container) included
    try_lock, unlock      advisory locks of open files (`flock`)
    ready                 which of several sockets and pipes can be read or written, whatever their numbers
    run_coroutine         a coroutine to its end, also in a notebook, whose thread has an event loop already
    importing, spared     blocks without garbage collection: of anything, or of the objects that were there before
    the rest              priorities, limits and facts that the kernel gives or not

Only Linux has /proc, control groups and prctl. Where a fact is not to be had, a function returns what its docstring
says, and callers go on without. Standard library only, and nothing is looked up at import. `rewards/sandbox_child.py`
has system calls of its own: it runs as a script that imports nothing of ours.
"""

from __future__ import annotations

import contextvars
import ctypes
import gc
import importlib
import math
import os
import select
import signal
import sys
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from groupwise.errors import GroupwiseError, ModelError

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


LONGEST_POLL_S = 2_000_000.0  # poll takes milliseconds of 31 bits, and who waits for more than 23 days waits for ever


class HasFileno(Protocol):
    """A socket, a pipe, or another open file."""

    def fileno(self) -> int: ...


def _optional(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:  # on Windows; `require_supported` says so
        return None


fcntl, resource = _optional("fcntl"), _optional("resource")

PYTHON = (3, 11)
PROC, CONTROL_GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
M_ARENA_MAX = -8  # of glibc's malloc.h
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
OF_PYTHON = 10_000  # objects that an interpreter may exempt from garbage collection by itself (3.12 does)
_OOM_COUNTS = ("memory.events.local", "memory.events", "memory.oom_control")  # a line each: name, number
_LISTENING = "0A"  # a socket's state in /proc/net/tcp


class UnsupportedPlatformError(GroupwiseError):
    """Groupwise does not run on this operating system."""

    code, status, exit_code = "unsupported_platform", 503, 3


def require_supported() -> None:
    """Raise UnsupportedPlatformError on Windows, or for a Python older than the package's `requires-python`."""
    if sys.version_info < PYTHON:
        version, needed = (".".join(map(str, each)) for each in (sys.version_info[:3], PYTHON))
        raise UnsupportedPlatformError(
            f"Groupwise needs Python {needed} or newer; this is {version} ({sys.executable})",
            hint=f"in the repository: python{needed} -m venv .venv; .venv/bin/pip install --editable .",
        )
    if sys.platform == "win32" or fcntl is None:
        raise UnsupportedPlatformError(
            f"Groupwise does not run on Windows (sys.platform is {sys.platform!r}); use WSL: `wsl --install`, then "
            "install and start Groupwise in the Linux shell that `wsl` opens",
            hint="https://learn.microsoft.com/windows/wsl/install; a server there is reached from Windows at localhost",
        )


# ---- processors and memory ----


def cores() -> int:
    """Return the number of processor cores that this process may use, at least 1: its affinity where the system has one
    (Linux), and no more than the quota of its control group."""
    try:
        count = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # macOS
        count = os.cpu_count() or 1
    for group in _own_groups("cpu"):
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
            if quota != "max":
                count = min(count, -(-int(quota) // int(period)))
    return max(1, count)


def check_device(device: str) -> None:
    """Raise ModelError for `cuda` or `mps` where neither this system nor the installed torch can have it, as far as
    that is known without importing torch: a build for CPUs, a Mac, or none."""
    from importlib.metadata import version  # not in every process that looks at the platform: it takes its time

    for_cpus, mac = version("torch").endswith("+cpu"), sys.platform == "darwin"
    if (device.startswith("cuda") and (for_cpus or mac)) or (device == "mps" and not mac):  # gpu-aware
        raise no_such_gpu(device)


def no_such_gpu(device: str) -> ModelError:
    """Return the error for a device that is not there."""
    return ModelError(
        f"device is {device!r}, and torch sees no such GPU",
        hint="device=auto takes what there is; groupwise doctor says what that is, and which torch is installed",
        field="device",
    )


def memory_bytes() -> int:
    """Return the machine's memory in bytes, or the limit of this process's control group where that is less; 0 where
    neither is known."""
    found = []
    with suppress(OSError, ValueError):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for group in _own_groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # "max" is not a number: no limit
                found.append(int((group / name).read_text(encoding="ascii")))
    return min((each for each in found if each > 0), default=0)


def resident_bytes(pid: int) -> int:
    """Return bytes of memory that a process has; 0 where the kernel does not say (macOS, or the process is gone)."""
    return _statm(pid, 1)


def address_space_bytes(pid: int) -> int:
    """Return bytes of a process's address space; 0 where the kernel does not say."""
    return _statm(pid, 0)


def _statm(pid: int, field: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        return int((PROC / str(pid) / "statm").read_text(encoding="ascii").split()[field]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def mapped_files() -> list[str] | None:
    """Return the lines of /proc/self/maps, one for each mapping of this process: address range, permissions, offset,
    device, inode, file. None where the system does not say."""
    try:
        return (PROC / "self" / "maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None


# ---- secrets ----


def hide_memory() -> None:
    """Keep other processes of this user from reading this one's memory and environment in /proc: the kernel then asks
    for a right that only root has (CAP_SYS_PTRACE). No core is dumped any more. Without effect where there is no prctl,
    and against root. A program that this process starts is readable again."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


# ---- running out of memory ----


def set_oom_score(score: int, pid: int | None = None) -> None:
    """Set of a process (None: this one) how soon the kernel ends it when memory runs out: 1000 is first. Without effect
    where it cannot be set."""
    with suppress(OSError):
        (PROC / str(pid or "self") / "oom_score_adj").write_text(str(score), encoding="ascii")


def oom_kills() -> int:
    """Return how many processes the kernel has ended for want of memory so far; 0 where it does not say.

    Linux counts them for each control group (`oom_kill` in memory.events.local, or of cgroup version 1 in
    memory.oom_control) and for the machine (/proc/vmstat). This process's group is read, and where that has no count
    the machine's, which rises for other users' processes, too.
    """
    of_group = (group / name for group in _own_groups("memory") for name in _OOM_COUNTS)
    for path in (*of_group, PROC / "vmstat"):
        with suppress(OSError, ValueError):
            for line in path.read_text(encoding="ascii").splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


# ---- control groups ----


def _own_groups(controller: str) -> Iterator[Path]:
    """Yield where this process's control group may be; none without them. A container may see its own group as the root
    of the mount."""
    with suppress(OSError, ValueError):
        for line in (PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, inside = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            mount = CONTROL_GROUPS / controller if controllers else CONTROL_GROUPS
            yield from dict.fromkeys((mount / inside.strip("/"), mount))


def control_groups(process: Path = PROC / "self") -> list[Path]:
    """Return where a process, given as its directory in /proc, may make control groups (version 2) that count memory
    and processes: in its own or in the one above. That has to be prepared (`cgroup.subtree_control`), or delegated to
    it by systemd, when this prepares it. Raises OSError, with the reason, where there are none."""
    own = _own_group(process)
    refused = []
    for group in (own, own.parent) if (own.parent / "cgroup.controllers").exists() else (own,):
        wanted = {"memory", "pids"}
        if not wanted <= {*(group / "cgroup.controllers").read_text().split()}:
            refused.append(f"{group} has not the controllers memory and pids")
        elif not wanted <= {*(group / "cgroup.subtree_control").read_text().split()} and not _prepared(group):
            refused.append(f"{group}/cgroup.subtree_control has not memory and pids")
        elif not os.access(group, os.W_OK):
            refused.append(f"{group} cannot be written")
        else:
            return [group]
    raise OSError("; ".join(refused))


def _own_group(process: Path) -> Path:
    """Return the directory of a process's group in the hierarchy of version 2. Raises OSError where that is not
    mounted."""
    lines = (process / "cgroup").read_text().splitlines()
    inside = next((line.partition("0::")[2] for line in lines if line.startswith("0::")), None)
    for line in (process / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if inside is not None and after.split()[0] == "cgroup2":
            root, mounted = before.split()[3:5]
            if root == "/" or f"{inside}/".startswith(f"{root}/"):
                return Path(mounted, inside[len(root) if root != "/" else 0 :].strip("/"))
    raise OSError("cgroup version 2 is not mounted")


def _prepared(group: Path) -> bool:
    """Have children of a group that systemd has delegated to us count what is counted here."""
    with suppress(OSError, AttributeError):  # macOS has no os.getxattr
        if os.getxattr(group, "user.delegate") == b"1":
            (group / "cgroup.subtree_control").write_text("+memory +pids")
            return True
    return False


# ---- locks ----


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Take the lock (flock) of an open file if it is free; a `shared` lock if no process has it exclusively. Return
    whether it was taken. The kernel releases the lock when the process ends, in any way."""
    require_supported()
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Release the lock of an open file."""
    require_supported()
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_locked(path: Path) -> bool:
    """Return whether a process of this machine holds the flock of a file, without touching that; False where the kernel
    has no list of locks (macOS) or there is no such file."""
    with suppress(OSError):
        inode = path.stat().st_ino
        lines = (PROC / "locks").read_text().splitlines()
        return any(f":{inode} " in line for line in lines if " FLOCK " in line)
    return False


def trim_memory() -> None:
    """Give the kernel back what was freed and the C library still holds (glibc, `malloc_trim`): freed blocks between
    others that are in use, in an arena of each thread. Elsewhere nothing happens."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def share_arenas(most: int) -> None:
    """Have the threads of this process allocate from so many arenas (glibc, `mallopt`): with one for each thread, what
    one of them once needed, and freed, is held for it. To be called before there are threads. Elsewhere nothing
    happens."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, most)


# ---- processes ----


def die_with_parent(by: signal.Signals) -> None:
    """Have the kernel (Linux) send this process a signal when its parent dies; elsewhere nothing happens."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)


def exists(pid: int) -> bool:
    """Return whether there is a process of that id, a zombie included."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def session_below(parent: int) -> int | None:
    """Return the session that a child of the process leads; None where there is none, or without /proc."""
    with suppress(OSError):
        for child in map(int, (PROC / str(parent) / "task" / str(parent) / "children").read_text().split()):
            if os.getsid(child) == child:
                return child
    return None


def kill_session(session: int) -> None:
    """Send SIGKILL to every process of a session, in all its process groups."""
    for path in PROC.glob("[0-9]*"):
        with suppress(OSError, ValueError):
            if os.getsid(int(path.name)) == session:
                os.kill(int(path.name), signal.SIGKILL)


def stderr_path() -> str:
    """Return a path by which another process can write to this one's stderr; /dev/null where there is none."""
    path = PROC / str(os.getpid()) / "fd" / "2"
    if path.exists():
        return str(path)
    with suppress(OSError):
        return os.ttyname(2)
    return os.devnull


def listener_of(port: int) -> int | None:
    """Return the process that listens on a TCP port, where the system tells this user."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return None
    for directory in PROC.glob("[0-9]*/fd"):
        with suppress(OSError):
            if any(os.readlink(entry) in inodes for entry in directory.iterdir()):
                return int(directory.parent.name)
    return None


# ---- waiting ----


def ready(
    reading: Sequence[HasFileno], writing: Sequence[HasFileno] = (), *, timeout: float | None
) -> tuple[list[HasFileno], list[HasFileno]]:
    """Return those that can be read, or are at their end, and those that can be written, as soon as there are any; none
    after `timeout` seconds. `select.select` takes no descriptor from 1024 on, which a server and a run may have."""
    poll = select.poll()
    events: dict[int, int] = {}
    for things, event in ((reading, select.POLLIN), (writing, select.POLLOUT)):
        for thing in things:
            number = thing.fileno()
            events[number] = events.get(number, 0) | event
    for number, wanted in events.items():
        poll.register(number, wanted)
    if timeout is not None and timeout > LONGEST_POLL_S:
        timeout = None
    told = dict(poll.poll(None if timeout is None else max(0, math.ceil(1000 * timeout))))
    said = [each for each in reading if told.get(each.fileno(), 0) & ~select.POLLOUT]
    return said, [each for each in writing if told.get(each.fileno(), 0) & ~select.POLLIN]


# ---- limits ----


def raise_open_files(wanted: int) -> int:
    """Allow this process `wanted` open files, or as many as it can be allowed; returns how many that are."""
    require_supported()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(OSError, ValueError):  # macOS refuses more than its own limit, whatever `hard` is
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return wanted if soft == resource.RLIM_INFINITY else soft


def limit_process(*, cpu_s: int | None, more_bytes: int) -> None:
    """Limit this process: so many seconds of a processor, no core dump, and so much more address space than it has,
    where the kernel says how much that is."""
    require_supported()
    limits = {resource.RLIMIT_CORE: 0} | ({} if cpu_s is None else {resource.RLIMIT_CPU: cpu_s})
    if present := address_space_bytes(os.getpid()):
        limits[resource.RLIMIT_AS] = present + more_bytes
    for which, most in limits.items():
        with suppress(OSError, ValueError):
            resource.setrlimit(which, (most, most))


def limit_processor(more_s: int) -> None:
    """Limit this process: so many more seconds of a processor than it has had, and then SIGXCPU ends it."""
    require_supported()
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime) + 1 + more_s
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


@contextmanager
def importing() -> Iterator[None]:
    """Turn the garbage collector off inside the block. Imported modules are not garbage, and collecting takes a sixth
    of the time of importing torch and transformers."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


_exempt = False  # whether objects are exempt from garbage collection; counting them takes long in a large process


def spare() -> bool:
    """Collect garbage once, and exempt the objects that are left from later collections; return True if any were.

    Modules, models and prompts stay until the process ends; each full collection would look through them for a quarter
    of a second. Garbage goes first, or it would stay, too: a model whose modules refer to each other is only freed by a
    collection. Where objects are exempt already, no more are: those made since are few, and some will be garbage."""
    global _exempt
    gc.collect()
    if _exempt or gc.get_freeze_count() > OF_PYTHON:
        _exempt = True
        return False
    gc.freeze()
    _exempt = True
    return True


@contextmanager
def spared() -> Iterator[None]:
    """Exempt the objects that exist at the start of the block from garbage collection (`spare`)."""
    global _exempt
    mine = spare()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()
            _exempt = False


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it to its end and return its result: `asyncio.run`, which refuses where this thread's event loop is running.

    A notebook's is. There it runs in its own thread, and this one waits; an exception that ends the waiting, such
    as KeyboardInterrupt, cancels it first.
    """
    import asyncio  # not where the platform is first looked at: it does not import everywhere

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()

    async def cancellable() -> T:
        task = asyncio.current_task()
        assert task is not None
        begun.set_result((asyncio.get_running_loop(), task))
        return await coroutine

    with ThreadPoolExecutor(1, thread_name_prefix="run_coroutine") as thread:
        try:
            return thread.submit(contextvars.copy_context().run, asyncio.run, cancellable()).result()
        except BaseException:
            if begun.done():
                loop, task = begun.result()
                with suppress(RuntimeError):  # it has ended, by raising this
                    loop.call_soon_threadsafe(task.cancel)
            raise
