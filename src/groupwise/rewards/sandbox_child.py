"""The sandbox's supervising process (the keeper), between our process and the program. Standard library, one thread.

    owner --stdin-->  keeper    a specification (8 hex digits: its length; JSON); "t" asks for the output since the last
                                one; and for as long as stdin is open, the box may live
    owner <--stdout-- keeper    a line of JSON for each "t", and {"end": ...} when everything in the box is dead

It forks the program, reads what it prints (keeping a bounded part), watches limits and owner, and ends it with all its
descendants, also those in their own sessions. With namespaces that is done by the kernel: the program's init is
process 1 of a process namespace, and when that one goes, all go. Without, orphans become the keeper's children
(PR_SET_CHILD_SUBREAPER) and are looked up in /proc.

Specification: argv, env, cwd; files {name: text} for a private directory; stdin (text or null); channel (a descriptor
that the program inherits, or null); namespaces, own_user, shown (directories that are visible); filtered (system calls,
see `filter_of`); group (the path of a control group to be made, less its last part, or null); limits {wall_s, cpu_s,
memory_mb, disk_mb, processes, open_files}, null for none; output_bytes, keep ("first": more than that ends the program;
"last": what was before is dropped). With namespaces also, if at all: workspace (a directory that is visible, may be
written and is where the program starts), port and gate (the program has 127.0.0.1, and the socket that listens there on
`port` is sent through the descriptor `gate`). `limits` may say `data_mb` in place of memory_mb: only what a process may
write and does not share counts, not what it merely reserves. `end`: setup (why it could not be started), reason
("wall", "output", "processes", "memory", "closed"), exit, signal, seconds, cpu_s, stdout, stderr.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from typing import Any, NoReturn

LINUX = sys.platform == "linux"
TICK_S = 0.02  # between looks at the child where the kernel has no pidfd
SWEEP_S = 10.0  # for killing descendants that cannot be killed
COUNT_S = 0.05  # between counts of processes where the kernel does not count them for this box alone
MANY_USERS = 1_900_000_000
BYTES_A_FILE = 4096  # of `disk_mb`, for the kernel's own memory of each file

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 36, 38
NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 4096, 16384, 1 << 18, 2
SECCOMP_MODE_FILTER = 2
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000  # a system call of Linux 5.12
DEVICES = ("null", "zero", "full", "random", "urandom")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
CONFIGURATION = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> None:
    """Call a function of libc that returns 0. Raises OSError."""
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def main() -> None:
    spec = json.loads(read_exactly(int(read_exactly(8), 16)))
    try:
        end = Keeper(spec, owner=int(sys.argv[1])).run()
    except OSError as error:
        end = {"setup": str(error)}
    with contextlib.suppress(BrokenPipeError):
        say({"end": end})


def read_exactly(count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (part := os.read(0, count - len(data))):
            os._exit(0)  # the owner is gone
        data += part
    return data


def say(message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]


class Capture:
    """Captures the program's output on one descriptor: its first or its last `limit` bytes."""

    def __init__(self, *, limit: int, last: bool):
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.reading, False)
        self.limit, self.last = limit, last
        self.data = bytearray()
        self.excess = False

    def take(self) -> bool:
        """Read what is there now, once. False where there is nothing, or nothing more to come."""
        try:
            part = os.read(self.reading, 1 << 16)
        except BlockingIOError:
            return False
        self.data += part
        if len(self.data) > self.limit:
            self.excess = not self.last
            del self.data[slice(0, -self.limit) if self.last else slice(self.limit, None)]
        return bool(part)

    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


class Keeper:
    def __init__(self, spec: dict[str, Any], *, owner: int):
        self.spec = spec
        self.owner = owner
        self.limits: dict[str, Any] = spec["limits"] or {}
        self.user = own_user() if spec["own_user"] else None
        self.captures = [Capture(limit=spec["output_bytes"], last=spec["keep"] == "last") for _ in range(2)]
        self.told = False  # to end, by a signal
        self.ended = 0, 0.0  # the program's status and CPU seconds
        self.group: ControlGroup | None = None
        # Whether the kernel's count of a user's processes is of those in this box alone.
        self.counted = self.user is not None or (spec["namespaces"] and os.geteuid() != 0)

    def run(self) -> dict[str, Any]:
        """Start the program, wait for its end, end everything else; the `end` message."""
        self._listen()
        if self.spec["group"] is not None:
            members = self.limits["processes"] + (1 if self.spec["namespaces"] else 0)  # with process 1
            self.group = ControlGroup(f"{self.spec['group']}{os.getpid()}", self.limits, processes=members)
        try:
            return self._run()
        finally:
            if self.group is not None:
                self.group.remove()

    def _run(self) -> dict[str, Any]:
        if self.spec["namespaces"]:
            enter_namespaces(users=not self.spec["own_user"])
        if self.spec.get("gate") is not None:
            open_gate(self.spec["gate"], self.spec["port"])
        self._follow_owner()  # after the namespaces: a change of credentials forgets it
        report_reading, report_writing = os.pipe()
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            self._child(report_writing)
        os.close(report_writing)
        for capture in self.captures:
            os.close(capture.writing)
        if self.spec["channel"] is not None:
            os.close(self.spec["channel"])
        reason = self._watch(child, started)
        status, cpu_s = sweep(child, self.ended)
        for capture in self.captures:
            while capture.take() and not capture.excess:
                pass
        if reason is None and self.group is not None and self.group.out_of_memory():
            reason = "memory"
        end = {"reason": reason, "cpu_s": cpu_s} | _of_status(status)
        with open(report_reading, "rb") as report:  # all its writers are dead
            for line in report.read().splitlines():
                end |= json.loads(line)
        end["stdout"], end["stderr"] = (capture.text() for capture in self.captures)
        end["seconds"] = time.monotonic() - started
        self._remove_directory()
        return end

    # ---- the owner ----

    def _listen(self) -> None:
        self.woken, wake = os.pipe()
        for descriptor in (self.woken, wake):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

        def told(number: int, frame: object) -> None:
            self.told |= number == signal.SIGTERM

        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, told)

    def _follow_owner(self) -> None:
        """SIGUSR1 when the thread that started this dies; whether that was the whole owner, `_watch` looks up."""
        if LINUX:
            call("prctl", PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0)
            call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def _watch(self, child: int, started: float) -> str | None:
        """Wait until the program ends (None), or must be ended, for "wall", "output", "processes" or "closed"."""
        pidfd = os.pidfd_open(child) if hasattr(os, "pidfd_open") else None
        wall_s = self.limits.get("wall_s")
        processes = None if self.counted or self.group or not LINUX else self.limits.get("processes")
        tick_s = TICK_S if pidfd is None else COUNT_S if processes else None
        open_captures = list(self.captures)
        while True:
            left = None if wall_s is None else started + wall_s - time.monotonic()
            if left is not None and left <= 0:
                return "wall"
            if self.told or os.getppid() != self.owner:
                return "closed"
            waiting = [0, self.woken, *(c.reading for c in open_captures), *([] if pidfd is None else [pidfd])]
            if tick_s is not None:
                left = tick_s if left is None else min(left, tick_s)
            ready = select.select(waiting, [], [], left)[0]
            for capture in [c for c in open_captures if c.reading in ready]:
                if not capture.take():
                    open_captures.remove(capture)
                if capture.excess:
                    return "output"
            if self.woken in ready:
                os.read(self.woken, 4096)
            if processes and len(descendants()) > processes:
                return "processes"
            if pidfd in ready or (pidfd is None and self._reaped(child)):
                return None
            if 0 in ready:
                if not os.read(0, 1):
                    return "closed"
                self._show_output()

    def _reaped(self, child: int) -> bool:
        """Wait on kernels without pidfd."""
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            self.ended = status, usage.ru_utime + usage.ru_stime
        return bool(ended)

    def _show_output(self) -> None:
        for capture in self.captures:
            while capture.take():
                if capture.excess or not capture.last:
                    break
        say({"stdout": self.captures[0].text(), "stderr": self.captures[1].text()})
        for capture in self.captures:
            capture.data.clear()

    # ---- the child ----

    def _child(self, report: int) -> NoReturn:
        """Become, with namespaces, their process 1, which forks the program; without, the program itself."""
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            if self.group is not None:
                self.group.enter()
            if self.spec["namespaces"]:
                die_with_parent()
                if self.user is not None and self.spec.get("workspace"):
                    give(self.spec["workspace"], self.user)
                make_root(self.spec["shown"], disk_mb=self.limits["disk_mb"], workspace=self.spec.get("workspace"))
                program = os.fork()
                if program:
                    self._init(program, report)
            self._become_program()
        except BaseException as error:
            os.write(report, json.dumps({"setup": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        finally:
            os._exit(127)

    def _init(self, program: int, report: int) -> NoReturn:
        """Process 1: reap orphans until the program ends. With this process the whole namespace ends."""
        for descriptor in (0, 1, 2, *(capture.writing for capture in self.captures)):
            os.close(descriptor)
        if self.spec["channel"] is not None:
            os.close(self.spec["channel"])
        while True:
            ended, status, usage = os.wait4(-1, 0)
            if ended == program:
                end = _of_status(status) | {"cpu_s": usage.ru_utime + usage.ru_stime}
                os.write(report, json.dumps(end).encode() + b"\n")
                os._exit(0)

    def _become_program(self) -> NoReturn:
        spec, limits = self.spec, self.limits
        os.setsid()
        os.dup2(stdin_of(spec["stdin"]), 0)
        os.dup2(self.captures[0].writing, 1)
        os.dup2(self.captures[1].writing, 2)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("800")  # when memory runs out, this goes before its owner
        directory = self._directory()
        if self.user is not None:
            if not spec["namespaces"]:
                os.chown(directory, self.user, self.user)
            become(self.user)
        os.chdir(directory)
        for name, text in spec["files"].items():
            with open(name, "w", encoding="utf-8", errors="replace", newline="") as file:
                file.write(text)
        die_with_parent()
        if spec["private"] and LINUX:
            drop_privileges()
        if self.counted and "processes" in limits:
            limits["tasks"] = limits["processes"]
        lower_limits(limits)
        if spec["channel"] is not None:
            os.set_inheritable(spec["channel"], True)
        if spec["filtered"]:
            families = (AF_UNIX,) if spec.get("gate") is None else (AF_UNIX, AF_INET)
            install(filter_of(os.uname().machine, program=os.getpid(), families=families))
        os.execve(spec["argv"][0], spec["argv"], spec["env"])

    def _directory(self) -> str:
        return "/tmp" if self.spec["namespaces"] and not self.spec.get("workspace") else self.spec["cwd"]

    def _remove_directory(self) -> None:
        if self.spec["private"] and not self.spec["namespaces"] and not self.spec.get("workspace"):
            import shutil

            shutil.rmtree(self.spec["cwd"], ignore_errors=True)


def stdin_of(text: str | None) -> int:
    """Return a descriptor from which the program reads `text`, then the end."""
    if text is None:
        return os.open("/dev/null", os.O_RDONLY)
    sealed = hasattr(os, "memfd_create")
    if sealed:
        descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        import tempfile

        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    data = text.encode("utf-8", "replace")
    while data:
        data = data[os.write(descriptor, data) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    if sealed:  # it is memory, and would be more than the program may have
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
    return descriptor


def _of_status(status: int) -> dict[str, int | None]:
    """Return the end; one of the two is None: process 1 reports the program's end, which replaces its own."""
    if os.WIFSIGNALED(status):
        return {"exit": None, "signal": os.WTERMSIG(status)}
    return {"exit": os.WEXITSTATUS(status), "signal": None}


# ---- killing ----


def sweep(child: int, known: tuple[int, float]) -> tuple[int, float]:
    """Kill the child and all that descends from this process, and reap it. The child's status and CPU seconds, which
    are the `known` ones if it was reaped before."""
    status, cpu_s = known
    if not LINUX:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
    deadline = time.monotonic() + SWEEP_S
    while time.monotonic() < deadline:
        try:
            ended, code, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            break  # there are none left
        if ended == child:
            status, cpu_s = code, usage.ru_utime + usage.ru_stime
        if ended:
            continue
        for pid in descendants() if LINUX else [child]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
    return status, cpu_s


def descendants() -> list[int]:
    """Return this process's children, their children and so on."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state != b"Z":
                    children.setdefault(int(parent), []).append(int(name))
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        below = children.pop(waiting.pop(), [])
        found += below
        waiting += below
    return found


def die_with_parent() -> None:
    if LINUX:
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


# ---- limits and users ----


def own_user() -> int:
    """Return a user id that no other process has while this one runs, so that its rights and its number of processes
    are its own. For root only. Some containers have no more than 65536 users."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    many = any(first <= MANY_USERS < first + count for first, _, count in ranges)
    return MANY_USERS + os.getpid() if many else 60_000 + os.getpid() % 4_000


def become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def drop_privileges() -> None:
    """Drop all capabilities, also as root, and prevent gaining new ones."""
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails for those that there are not, and where none are held
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def lower_limits(limits: dict[str, Any]) -> None:
    """Set the program's own limits, of which some may be absent."""
    for which, name, unit, more in (
        (resource.RLIMIT_CPU, "cpu_s", 1, 1),  # SIGXCPU at the limit, SIGKILL a second later
        (resource.RLIMIT_AS, "memory_mb", 1 << 20, 0),
        (resource.RLIMIT_DATA, "data_mb", 1 << 20, 0),
        (resource.RLIMIT_FSIZE, "disk_mb", 1 << 20, 0),
        (resource.RLIMIT_NOFILE, "open_files", 1, 0),
        (resource.RLIMIT_NPROC, "tasks", 1, 0),
    ):
        if name in limits:
            highest = resource.getrlimit(which)[1]
            wanted = (limits[name] * unit, limits[name] * unit + more)
            soft, hard = wanted if highest == resource.RLIM_INFINITY else (min(each, highest) for each in wanted)
            with contextlib.suppress(ValueError):  # macOS refuses some
                resource.setrlimit(which, (soft, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


# ---- control groups ----


class ControlGroup:
    """A control group (version 2) of the box: its memory, files in memory included, and its processes are counted
    together. Raises OSError where it cannot be made."""

    def __init__(self, path: str, limits: dict[str, Any], *, processes: int):
        self.path = path
        os.mkdir(self.path)
        try:
            memory = (limits.get("memory_mb", limits.get("data_mb", 0)) + limits["disk_mb"]) << 20
            self._write("memory.max", memory)
            with contextlib.suppress(OSError):  # kernels that count no swap, or have none
                self._write("memory.swap.max", 0)
            self._write("memory.oom.group", 1)  # what is short of memory ends as a whole
            self._write("pids.max", processes)
            self._door = os.open(f"{self.path}/cgroup.procs", os.O_WRONLY)  # with the rights of now
        except OSError:
            os.rmdir(self.path)
            raise

    def _write(self, name: str, value: int) -> None:
        with open(f"{self.path}/{name}", "w", encoding="ascii") as file:
            file.write(str(value))

    def enter(self) -> None:
        """Move this process into the group, in which its children then start."""
        os.write(self._door, b"0")
        os.close(self._door)

    def out_of_memory(self) -> bool:
        with open(f"{self.path}/memory.events", encoding="ascii") as file:
            return any(line.startswith("oom_kill ") and int(line.split()[1]) > 0 for line in file)

    def remove(self) -> None:
        """Remove the group when all its processes are dead, which takes the kernel a moment."""
        deadline = time.monotonic() + SWEEP_S
        while time.monotonic() < deadline:
            try:
                os.rmdir(self.path)
            except OSError:
                time.sleep(0.001)
            else:
                return


# ---- a filter of system calls ----
# What a program that is not trusted may not ask the kernel for, as a program for seccomp (BPF). Calls are numbers: here
# those of x86_64 and of aarch64.

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # which of the numbers, and the kernel's own name
X32 = 0x40000000  # and more: the numbers of another ABI of x86_64
ABSENT = (  # "not implemented": who would like to have them continues without
    *((319, 279), (447, 447)),  # memfd_create, memfd_secret: memory outside every address space, as in the next lines
    *((29, 194), (68, 186), (64, 190)),  # shmget, msgget, semget
    (278, 75),  # vmsplice: pages given to a pipe
    *((425, 425), (426, 426), (427, 427)),  # io_uring, by which filters are got round
    *((321, 280), (323, 282), (298, 241)),  # bpf, userfaultfd, perf_event_open
    *((248, 217), (249, 218), (250, 219)),  # keys
    (435, 435),  # clone3, whose flags cannot be looked at; glibc continues to clone
)
REFUSED = ((272, 97), (308, 268))  # unshare, setns: in a namespace of users of its own it would have every capability
SOCKETS = ((41, 198), (53, 199))  # socket, socketpair: families such as AF_VSOCK lead out of a network namespace
CLONE, KILL = (56, 220), (62, 129)
SETRLIMIT, PRLIMIT = (160, 164), (302, 261)
SIGNALS = (  # and which argument is the signal: tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal
    *(((200, 130), 1), ((234, 131), 2), ((129, 138), 1), ((297, 240), 2), ((424, 424), 1)),
)
NEW_NAMESPACES = 0x7E020000  # flags of clone
AF_UNIX, AF_INET = 1, 2

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions
ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000  # verdicts
NUMBER_AT, MACHINE_AT, ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data

Instructions = list[tuple[int, int, int, int]]  # struct sock_filter: code, jump if true, jump if false, value


def filter_of(machine: str, *, program: int, families: tuple[int, ...] = (AF_UNIX,)) -> Instructions:
    """Return the filter for a program whose process is `program` and whose sockets are of `families`. That one cannot
    have itself killed: who asks for a SIGKILL for it, for its group or for everybody, is ended by SIGSYS, and who sets
    another limit of CPU seconds, at which the kernel would send one, keeps the box's. A SIGKILL that arrives is then
    from outside (but for far-fetched ways: timers, a thread's number). Raises OSError for machines whose numbers are
    not known here."""
    if machine not in MACHINES:
        raise OSError(f"no filter of system calls for {machine}")
    which, name = MACHINES[machine]
    code: Instructions = [(LOAD, 0, 0, MACHINE_AT), (EQUAL, 1, 0, name), (RETURN, 0, 0, KILL_PROCESS)]
    code.append((LOAD, 0, 0, NUMBER_AT))
    if machine == "x86_64":
        code += _where(AT_LEAST, X32, _error(errno.ENOSYS))
    rules = [(call, _return(_error(errno.ENOSYS))) for call in ABSENT]
    rules += [(call, _return(_error(errno.EPERM))) for call in REFUSED]
    known = [*itertools.chain(*(_where(EQUAL, family, ALLOW) for family in families))]
    rules += [(call, [*_argument(0), *known, *_return(_error(errno.EAFNOSUPPORT))]) for call in SOCKETS]
    rules.append((CLONE, [*_argument(0), *_where(ANY_BIT, NEW_NAMESPACES, _error(errno.EPERM)), *_return(ALLOW)]))
    for call, argument in SIGNALS:
        rules.append((call, [*_argument(argument), *_where(EQUAL, signal.SIGKILL, KILL_PROCESS), *_return(ALLOW)]))
    aims = [_where(EQUAL, pid % (1 << 32), KILL_PROCESS) for pid in (program, -program, 0, -1)]
    deadly = [*_argument(0), *itertools.chain(*aims), *_return(ALLOW)]
    rules.append((KILL, [*_argument(1), (EQUAL, 1, 0, signal.SIGKILL), *_return(ALLOW), *deadly]))
    rules.append((SETRLIMIT, [*_argument(0), *_where(EQUAL, resource.RLIMIT_CPU, _error(0)), *_return(ALLOW)]))
    done = _where(ANY_BIT, 0xFFFFFFFF, _error(0))  # it says, where there is a pointer to a new limit
    asks = [*_argument(2), *done, *_argument(2, upper=True), *done, *_return(ALLOW)]
    rules.append((PRLIMIT, [*_argument(1), (EQUAL, 1, 0, resource.RLIMIT_CPU), *_return(ALLOW), *asks]))
    for call, decision in rules:
        code += [(EQUAL, 0, len(decision), call[which]), *decision]
    return [*code, *_return(ALLOW)]


def _argument(index: int, *, upper: bool = False) -> Instructions:
    """Its lower half, what the kernel takes of an int; or its upper one."""
    return [(LOAD, 0, 0, ARGUMENTS_AT + 8 * index + 4 * upper)]


def _where(test: int, value: int, verdict: int) -> Instructions:
    return [(test, 0, 1, value), *_return(verdict)]


def _return(verdict: int) -> Instructions:
    return [(RETURN, 0, 0, verdict)]


def _error(number: int) -> int:
    return ERRNO | number


def install(code: Instructions) -> None:
    """Install it for this process and what it becomes. Raises OSError where the kernel has no seccomp."""
    data = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in code))

    class Program(ctypes.Structure):  # struct sock_fprog
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    program = Program(len(code), ctypes.addressof(data))
    call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)


# ---- namespaces ----


def enter_namespaces(*, users: bool) -> None:
    """Processes (of children), network and IPC of its own; with `users` through a namespace of users, which needs no
    privilege. Raises OSError where the kernel or a container does not allow it."""
    if not LINUX:
        raise OSError(f"{sys.platform} has no namespaces")
    user, group = os.geteuid(), os.getegid()
    call("unshare", NEWPID | NEWNET | NEWIPC | (NEWUSER if users else 0))
    if users:
        for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)


def open_gate(gate: int, port: int) -> None:
    """Bring this network namespace's loopback up, and send a socket that listens in it through `gate`: who holds that
    answers the program from another network. Raises OSError."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))
    with socket.socket() as listener, socket.socket(fileno=gate) as through:
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        socket.send_fds(through, [b"-"], [listener.fileno()])


def give(directory: str, user: int) -> None:
    """Make a directory and all in it another user's; links themselves, not what they lead to."""
    os.chown(directory, user, user)
    for folder, folders, files in os.walk(directory):
        for name in (*folders, *files):
            os.chown(os.path.join(folder, name), user, user, follow_symlinks=False)


def make_root(shown: list[str], *, disk_mb: int, workspace: str | None = None) -> None:
    """Make its own root: the system's programs and `shown`, read-only; an empty /tmp in memory; /proc and five
    devices; and `workspace`, which may be written.

    Everything else of the machine's files, home directories and sockets among them, is not there.
    """
    call("unshare", NEWNS)  # here and not in the keeper, whose own root stays
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    mount("tmpfs", "/tmp", kind="tmpfs", flags=MS_NOSUID | MS_NODEV, options="size=1m,mode=755")
    os.mkdir("/tmp/old")
    call("pivot_root", b"/tmp", b"/tmp/old")
    os.chdir("/")
    make_writable("/tmp", "/dev/shm", disk_mb=disk_mb)
    for path in outermost([*SYSTEM, *CONFIGURATION, *shown]):
        show(path)
    if workspace is not None:
        bind(f"/old{workspace}", workspace)
    for name in DEVICES:
        bind(f"/old/dev/{name}", f"/dev/{name}")
    os.mkdir("/proc")
    with contextlib.suppress(OSError):  # some containers do not allow it; programs manage without
        mount("proc", "/proc", kind="proc", flags=MS_NOSUID | MS_NODEV | MS_NOEXEC)
    call("umount2", b"/old", MNT_DETACH)
    os.rmdir("/old")
    mount("none", "/", flags=MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def make_writable(*paths: str, disk_mb: int) -> None:
    """Empty directories in memory, which have `disk_mb`, and as many files as that is pages, together."""
    options = f"size={disk_mb}m,nr_inodes={(disk_mb << 20) // BYTES_A_FILE},mode=755"
    os.mkdir("/own")
    mount("tmpfs", "/own", kind="tmpfs", flags=MS_NOSUID | MS_NODEV, options=options)
    for number, path in enumerate(paths):
        part = f"/own/{number}"
        os.mkdir(part)
        os.chmod(part, 0o1777)
        bind(part, path)
    call("umount2", b"/own", MNT_DETACH)
    os.rmdir("/own")


def outermost(paths: list[str]) -> list[str]:
    """Return the paths without those that lie within another."""
    kept: list[str] = []
    for path in sorted(set(paths), key=len):
        if not any(f"{path}/".startswith(f"{other}/") for other in kept):
            kept.append(path)
    return kept


def show(path: str) -> None:
    """Make a file, directory or link of the old root visible at its place, read-only; nothing where it is not there."""
    old = f"/old{path}"
    if os.path.islink(old):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(os.readlink(old), path)
    elif os.path.exists(old):
        bind(old, path)
        attributes = (ctypes.c_uint64 * 4)(MS_RDONLY | MS_NOSUID, 0, 0, 0)  # struct mount_attr
        number, size = ctypes.c_long(MOUNT_SETATTR), ctypes.c_size_t(32)
        call("syscall", number, AT_FDCWD, path.encode(), AT_RECURSIVE, ctypes.byref(attributes), size)


def bind(source: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(source, target, flags=MS_BIND | MS_REC)


def mount(source: str, target: str, *, kind: str | None = None, flags: int = 0, options: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    try:
        call("mount", encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    except OSError as error:
        raise OSError(error.errno, f"mount of {target}: {os.strerror(error.errno or 0)}") from None


if __name__ == "__main__":
    main()
