"""The sandbox: runs untrusted programs (what a policy wrote) with limits, isolated, killed with all their descendants.

    outcome = run_python("print(input()[::-1])", stdin="abc", limits=Limits(wall_s=2))
    outcome.status, outcome.stdout                # ("ok", "cba\\n")

Everywhere a box has: CPU seconds, address space, size of a file, processes and open files limited by the kernel
(setrlimit); a wall clock; an empty environment and its own directory that is removed; no terminal; output of which
more than a bound is never held; no privilege to be gained (no_new_privs); and an end in which every descendant is
killed, also one in its own session, also when the owner is killed with SIGKILL.

`isolation()` says which of the following this machine has besides, and `groupwise doctor` shows it:

namespaces  no network, not even loopback; no sight of other processes; and of the files only Python, /usr and the like,
            read-only. Datasets, home directories, credentials and the sockets of other programs are not there. Files
            that it writes are in memory, `disk_mb` and a file a page in all. If the owner is root, the program runs as
            a user that no other process has.
filtered    system calls that a program does without are refused (seccomp): sockets of another family than AF_UNIX, of
            which some lead out of a network namespace (AF_VSOCK, to the machine's host); new namespaces, in which it
            would have every capability; memory beside its address space (memfd, System V); io_uring, BPF, keys
group       a control group (cgroup version 2) for each box: memory, its files included, and processes are limited for
            all its processes together. Without, memory is limited for each: `processes` times `memory_mb` is the most

It does NOT protect from: errors of the kernel, most of whose system calls are there (no virtual machine); side
channels; what stands world-readable in /usr and in the Python installation; CPU seconds of several processes (up to
`processes` times `cpu_s`, within the wall clock). Without a control group the kernel's own memory for a program is not
counted: what waits unread in Unix sockets, about 200 KiB each, of which each process may have `open_files`. Without
namespaces it does not protect from malice at all: the program reads and writes files as the user who runs it, and can
stop that user's processes; without the filter it also has the network.
`ProgramResult.isolated` says which it was, and `require_isolation` refuses to run without namespaces.

POSIX only. A box costs two starts of Python, about 50 ms. Code in it sees the installed packages, not the files next to
the caller's.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from groupwise.errors import GroupwiseError
from groupwise.platform import control_groups, exists, ready

Status = Literal["ok", "error", "timeout", "memory", "output", "killed", "lost"]
KEEPER = Path(__file__).with_name("sandbox_child.py")
GRACE_S = 15.0  # for the keeper to kill, and to say so
PROBE_S = 60.0
LONGEST_LENGTH = 8  # bytes of a frame's head
LIBRARIES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # all that a keeper, which /proc shows, gets of our environment
GROUP = "groupwise-box-"  # and the keeper's process id: a box's control group


class SandboxError(GroupwiseError):
    """A box could not be made, or not as isolated as it was required to be. Never what the program in it did."""

    code = "sandbox_failed"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a program: seconds, MiB, counts. CPU, memory and open files are limited for each process; in a control
    group memory and disk together are limited for the box, too."""

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_mb: int = 1024
    disk_mb: int = 64
    """Largest file; with namespaces all files together, which are in memory, and at most one of them for each 4 KiB."""
    processes: int = 32
    open_files: int = 64
    output_bytes: int = 1 << 20
    """The most bytes of stdout, and of stderr; a program that prints more is ended."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name} is {value}; it must be positive")


@dataclass(frozen=True, kw_only=True)
class ProgramResult:
    """Holds the result of running a program.

    `status`: "ok" (exit code 0), "error" (another exit code), "timeout" (wall clock or CPU), "memory" (the program
    ended with a MemoryError, or its box used all its memory), "output" (too much output), "killed" (by a signal, or for
    too many processes), "lost" (SIGKILL without having reached a limit: the kernel when memory is short, or another
    process; the program itself only if system calls are not filtered). `stdout` and `stderr` have the output up to the
    end.
    """

    status: Status
    stdout: str
    stderr: str
    seconds: float
    cpu_s: float
    exit_code: int | None
    signal: int | None
    isolated: bool


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """The means by which a box is isolated on this machine."""

    namespaces: bool
    """No network, files read-only and few, other processes out of sight."""
    own_user: bool
    """The program is another user than the owner (who is root)."""
    filtered: bool = False
    """No sockets but Unix', no new namespaces, no memory outside the address space."""
    group: str | None = None
    """The control group in which each box has one of its own; None where there is none to be had."""
    reason: str = ""
    """Why it is not more."""

    def __str__(self) -> str:
        files = "no files but Python's and the system's, read-only"
        if self.namespaces:
            has = f"namespaces: no network, no other processes, {files}" + "; system calls filtered" * self.filtered
        elif self.filtered:
            has = "limits only, no isolation: no network, but this user's files and processes are open"
        else:
            has = "limits only, no isolation: network and files are open"
        lacks = []
        if self.namespaces and not self.filtered:
            lacks.append("no filter of system calls: AF_VSOCK sockets, memfd memory and new user namespaces are open")
        if self.group is None:
            lacks.append("memory is limited for each process, not for all of a box together")
        return "; ".join([has, *lacks]) + (f" ({self.reason})" if self.reason else "")


@functools.cache
def isolation() -> Isolation:
    """Return the best separation that works here, found by trying it; takes a tenth of a second or two the first time.

    Raises SandboxError where not even a box without isolation runs.
    """
    users = (True, False) if os.geteuid() == 0 else (False,)
    reasons: list[str] = []
    for namespaces, own_user, filtered in itertools.product((True, False), users, (True, False)):
        level = Isolation(namespaces=namespaces, own_user=own_user, filtered=filtered)
        why = _why_not(level)
        if why is None:
            return _grouped(level, reasons)
        reasons.append(why)
    raise SandboxError(f"no program can be run in a box here: {'; '.join(dict.fromkeys(reasons))}")


def _grouped(level: Isolation, reasons: list[str]) -> Isolation:
    """Return the level with a control group, if one can be had."""
    try:
        candidates = control_groups()
    except OSError as error:
        candidates, reasons = [], [*reasons, f"no control group: {error}"]
    for parent in candidates:
        _remove_left_groups(parent)
        better = replace(level, group=str(parent))
        if (why := _why_not(better)) is None:
            return replace(better, reason="; ".join(dict.fromkeys(reasons)))
        reasons.append(why)
    return replace(level, reason="; ".join(dict.fromkeys(reasons)))


def _why_not(level: Isolation) -> str | None:
    """Return what keeps a box from being so separated; None if nothing does. Raises SandboxError where time runs
    out."""
    with Box(untrusted([sys.executable, "-c", ""], limits=Limits(wall_s=PROBE_S), level=level)) as box:
        end = box.wait(timeout=PROBE_S + GRACE_S)
    if end.get("exit") == 0:
        return None
    if end.get("reason") == "wall":
        raise SandboxError(f"no program can be run in a box here: one that does nothing takes more than {PROBE_S:g} s")
    return end.get("setup") or f"the interpreter does not start: {end.get('stderr', '').strip()[-200:]}"


def _remove_left_groups(parent: Path) -> None:
    """Remove the groups of keepers that were killed. One that has processes cannot be removed."""
    for left in parent.glob(f"{GROUP}*"):
        with suppress(OSError, ValueError):
            if not exists(int(left.name.removeprefix(GROUP))):
                left.rmdir()


# ---- running ----


def run_python(
    code: str, *, stdin: str = "", limits: Limits = Limits(), require_isolation: bool = False
) -> ProgramResult:
    """Run `code` as a script with `stdin` as its input. It is main.py in an empty directory.

    Raises SandboxError: no box could be made, or `require_isolation` and there are no namespaces.
    """
    return run(
        python("main.py"), files={"main.py": code}, stdin=stdin, limits=limits, require_isolation=require_isolation
    )


def run(
    argv: Sequence[str],
    *,
    files: Mapping[str, str] | None = None,
    stdin: str = "",
    limits: Limits = Limits(),
    require_isolation: bool = False,
) -> ProgramResult:
    """Run a program, by absolute path, in a directory that holds `files` (names without "/" and their texts).

    Raises SandboxError: no box could be made, the program is not there, or `require_isolation` and no namespaces.
    """
    level = checked_isolation(require_isolation)
    with Box(untrusted(argv, files=files, stdin=stdin, limits=limits, level=level)) as box:
        return outcome_of(box.wait(timeout=limits.wall_s + GRACE_S), limits, level)


def python(script: str) -> tuple[str, ...]:
    """Return the command that runs a script of the box's directory: without the user's packages, writing no byte
    code."""
    return (sys.executable, "-s", "-P", "-B", "-X", "utf8", script)


def checked_isolation(required: bool) -> Isolation:
    """Return `isolation()`. Raises SandboxError if isolation is `required` and there is none."""
    level = isolation()
    if required and not level.namespaces:
        what = "files" if level.filtered else "files and network"
        raise SandboxError(
            f"untrusted code would run with this user's {what}: {level.reason}",
            hint="allow user namespaces, or accept it with require_isolation: false",
        )
    return level


def untrusted(
    argv: Sequence[str],
    *,
    limits: Limits,
    level: Isolation,
    files: Mapping[str, str] | None = None,
    stdin: str = "",
) -> dict[str, Any]:
    """Return the keeper's specification of a program that is not trusted."""
    directory = "/tmp" if level.namespaces else tempfile.mkdtemp(prefix="groupwise-box-")
    environment = {"PATH": "/usr/bin:/bin", "HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8"}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    installed = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    return {
        "argv": list(argv),
        "env": environment | threads | {"PYTHONHASHSEED": "0"},
        "cwd": directory,
        "private": True,
        "files": dict(files or {}),
        "stdin": stdin,
        "namespaces": level.namespaces,
        "own_user": level.own_user,
        "filtered": level.filtered,
        "group": level.group and f"{level.group}/{GROUP}",
        "shown": sorted(installed),
        "limits": {
            "wall_s": limits.wall_s,
            "cpu_s": limits.cpu_s,
            "memory_mb": limits.memory_mb,
            "disk_mb": limits.disk_mb,
            "processes": limits.processes,
            "open_files": limits.open_files,
        },
        "output_bytes": limits.output_bytes,
        "keep": "first",
    }


def trusted(
    argv: Sequence[str], *, env: Mapping[str, str], limits: Mapping[str, Any] | None, output_bytes: int
) -> dict[str, Any]:
    """Return the keeper's specification of a program of ours: nothing is hidden from it, and it runs where we do. Of
    what it prints the last `output_bytes` are kept; `limits` are those of the keeper, None without a limit of any
    kind."""
    return {
        "argv": list(argv),
        "env": dict(env),
        "cwd": os.getcwd(),
        "private": False,
        "files": {},
        "stdin": None,
        "namespaces": False,
        "own_user": False,
        "filtered": False,
        "group": None,
        "shown": [],
        "limits": None if limits is None else dict(limits),
        "output_bytes": output_bytes,
        "keep": "last",
    }


def workspace_program(
    argv: Sequence[str],
    *,
    cwd: str,
    env: Mapping[str, str],
    stdin: str | None,
    limits: Mapping[str, Any],
    output_bytes: int,
    level: Isolation | None,
    shown: Sequence[str] = (),
    port: int | None = None,
) -> dict[str, Any]:
    """Return the keeper's specification of a program that works in the directory `cwd`, and leaves there what it did.

    With a `level` it is isolated so far: it may write to `cwd` and /tmp, sees `shown` besides, and of the network there
    is 127.0.0.1:`port`, whose listening socket `Box.listener` returns. Without, it runs as `trusted` ones do. `limits`
    are those of the keeper, any of which may be absent; isolated it needs `disk_mb`, `processes`, and `memory_mb` or
    `data_mb`.
    """
    spec = trusted(argv, env=env, limits=limits, output_bytes=output_bytes) | {"cwd": cwd, "stdin": stdin}
    if level is None:
        return spec
    return spec | {
        "private": True,
        "namespaces": level.namespaces,
        "own_user": level.own_user,
        "filtered": level.filtered,
        "group": level.group and f"{level.group}/{GROUP}",
        "shown": sorted({sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *shown}),
        "workspace": cwd,
        "port": port,
    }


def outcome_of(end: Mapping[str, Any], limits: Limits, level: Isolation) -> ProgramResult:
    """Return the keeper's last message as an Outcome. Raises SandboxError if the program was never started."""
    if end.get("setup"):
        raise SandboxError(f"the program could not be started in its box: {end['setup']}")
    number, lines = end["signal"], end["stderr"].rstrip().splitlines()
    status: Status = "ok" if end["exit"] == 0 else "error"
    if end["reason"] == "output":
        status = "output"
    elif end["reason"] == "wall" or number == signal.SIGXCPU or (number is not None and end["cpu_s"] >= limits.cpu_s):
        status = "timeout"
    elif end["reason"] == "memory":
        status = "memory"
    elif number == signal.SIGKILL and end["reason"] is None:
        status = "lost"
    elif number is not None:
        status = "killed"
    elif status == "error" and lines and lines[-1].startswith("MemoryError"):
        status = "memory"
    return ProgramResult(
        status=status,
        stdout=end["stdout"],
        stderr=end["stderr"],
        seconds=end["seconds"],
        cpu_s=end["cpu_s"],
        exit_code=end["exit"],
        signal=number,
        isolated=level.namespaces,
    )


# ---- a box ----


class Channel:
    """Messages of bytes between two processes, over a socket: each with its length before it."""

    def __init__(self, sock: socket.socket, *, longest: int):
        self.socket = sock
        self.longest = longest

    def send(self, message: bytes, *, timeout: float | None = None) -> None:
        """Send a message. Raises TimeoutError, or OSError if the other end is closed."""
        self.socket.settimeout(timeout)
        self.socket.sendall(_framed(message))

    def send_hearing(
        self, message: bytes, *, hear: Callable[[], object], patient_for: Callable[[], float | None]
    ) -> None:
        """Send a message, and call `hear` whenever there is something to receive: who waits until its own messages are
        read does not read this one. Raises TimeoutError where nothing happens for `patient_for()` seconds, OSError if
        the other end is closed, and what `hear` raises."""
        left = memoryview(_framed(message))
        while left:
            said, has_room = ready([self.socket], [self.socket], timeout=patient_for())
            if said:
                hear()
            elif has_room:
                self.socket.setblocking(False)
                with suppress(BlockingIOError):
                    left = left[self.socket.send(left) :]
            else:
                raise TimeoutError

    def receive(self, *, timeout: float | None = None) -> bytes:
        """Return the next message. Raises TimeoutError, EOFError at the end, ValueError for one longer than
        `longest`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        length = int.from_bytes(self._exactly(LONGEST_LENGTH, deadline), "big")
        if length > self.longest:
            raise ValueError(f"a message of {length} bytes; {self.longest} is the most")
        return self._exactly(length, deadline)

    def _exactly(self, count: int, deadline: float | None) -> bytes:
        data = bytearray()
        while len(data) < count:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            self.socket.settimeout(left)
            try:
                part = self.socket.recv(min(count - len(data), 1 << 20))
            except ConnectionError:
                part = b""
            if not part:
                raise EOFError("the other side has ended")
            data += part
        return bytes(data)


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(LONGEST_LENGTH, "big") + message


class Box:
    """A program and the process that watches it (`rewards.sandbox_child`), started at once.

    `channel`, if asked for, leads to the program, which finds its descriptor in place of "{channel}" among its
    arguments. Ends with the `with` block."""

    def __init__(self, spec: Mapping[str, Any], *, channel: bool = False, longest: int = 1 << 20):
        ours, theirs = socket.socketpair() if channel else (None, None)
        self.channel = None if ours is None else Channel(ours, longest=longest)
        number = None if theirs is None else theirs.fileno()
        argv = [part.replace("{channel}", str(number)) for part in spec["argv"]] if channel else spec["argv"]
        self._gate, their_gate = socket.socketpair() if spec.get("port") is not None else (None, None)
        gate = None if their_gate is None else their_gate.fileno()
        data = json.dumps({**spec, "argv": argv, "channel": number, "gate": gate}).encode()
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", str(KEEPER), str(os.getpid())],
                env={name: os.environ[name] for name in LIBRARIES if name in os.environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[each for each in (number, gate) if each is not None],
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            for mine in (ours, self._gate):
                if mine is not None:
                    mine.close()
            raise SandboxError(f"no process can be started: {error}") from error
        finally:
            for other in (theirs, their_gate):
                if other is not None:
                    other.close()
        self._buffer = bytearray()
        self._end: dict[str, Any] | None = None
        self._lock = threading.Lock()  # of the keeper's stdin
        self._write(b"%08x" % len(data) + data)

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Return the keeper's process id."""
        return self._keeper.pid

    def listener(self, *, timeout: float) -> socket.socket | None:
        """Return the socket that listens on the specification's port in the box's own network; None if the box has
        ended."""
        assert self._gate is not None  # for a specification with a port
        self._gate.settimeout(timeout)
        with suppress(OSError):
            _, descriptors, _, _ = socket.recv_fds(self._gate, 1, 1)
            if descriptors:
                return socket.socket(fileno=descriptors[0])
        return None

    def output(self, *, timeout: float) -> str:
        """Return the end of the program's output, if the last output is kept."""
        self._write(b"t")
        told = self._line(time.monotonic() + timeout)
        return told.get("stdout", "") + told.get("stderr", "")

    def end(self) -> None:
        """Tell the keeper to kill everything; from any thread, any number of times."""
        with self._lock, suppress(OSError):
            if self._keeper.stdin is not None:
                self._keeper.stdin.close()

    def wait(self, *, timeout: float) -> dict[str, Any]:
        """Return the `end` message of the keeper, once everything in the box is dead. Raises SandboxError after
        `timeout`."""
        deadline = time.monotonic() + timeout
        while self._end is None:
            self._end = self._line(deadline).get("end")
        return self._end

    def close(self, *, timeout: float = GRACE_S) -> dict[str, Any]:
        """End it now, wait until it has, and let go of what it held; the `end` message, empty where there is none."""
        self.end()
        for mine in (self._gate, self.channel and self.channel.socket):
            if mine is not None:
                mine.close()
        try:
            return self.wait(timeout=timeout)
        except SandboxError:
            return {}
        finally:
            with suppress(subprocess.TimeoutExpired):
                self._keeper.wait(1.0)
            if self._keeper.poll() is None:
                self._keeper.kill()
                self._keeper.wait()
            if self._keeper.stdout is not None:
                self._keeper.stdout.close()

    def _write(self, data: bytes) -> None:
        with self._lock, suppress(BrokenPipeError, ValueError):  # it is gone, or was ended; `wait` says how
            while data and self._keeper.stdin is not None:
                data = data[self._keeper.stdin.write(data) :]

    def _line(self, deadline: float) -> dict[str, Any]:
        """Return the keeper's next line."""
        stdout = self._keeper.stdout
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if stdout is None or stdout.closed:
                raise SandboxError("the box was closed")
            if left <= 0 or not ready([stdout], timeout=left)[0]:
                raise SandboxError(f"waited too long for the end of a box (keeper {self.pid})")
            part = os.read(stdout.fileno(), 1 << 16)
            if not part:
                raise SandboxError(f"the keeper of a box ended with status {self._keeper.wait(GRACE_S)}")
            self._buffer += part
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        return json.loads(line)
