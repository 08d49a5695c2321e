"""Programs that do their worst, in every kind of box that this machine can make."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from groupwise.rewards import sandbox, sandbox_child
from groupwise.rewards.sandbox import (
    Isolation,
    Limits,
    SandboxError,
    isolation,
    run,
    run_python,
)
from processes import becomes, descendants, many_files, running
from slow_cases import long_case
from wording import raises

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks things up in /proc")

LEVELS = {
    "namespaces": Isolation(namespaces=True, own_user=os.geteuid() == 0),
    "limits": Isolation(namespaces=False, own_user=False, reason="a test"),
}
QUICK = Limits(wall_s=20, cpu_s=20)
SYSTEM_PYTHON = Path("/usr/bin/python3")


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Isolation:
    """Each kind of box; the one that cannot be made here is left out."""
    if request.param == "namespaces" and not isolation().namespaces:
        pytest.skip(f"no namespaces here: {isolation().reason}")
    level = replace(LEVELS[request.param], filtered=isolation().filtered)
    monkeypatch.setattr(sandbox, "isolation", lambda: level)
    return level


@pytest.fixture
def filtered(level: Isolation) -> None:
    if not level.filtered:
        pytest.skip(f"no filter of system calls here: {isolation().reason}")


@pytest.fixture
def inside_namespaces() -> None:
    if not isolation().namespaces:
        pytest.skip(f"no namespaces here: {isolation().reason}")


# ---- what a program may do ----


def test_input_output_and_status(level):
    outcome = run_python(
        "import sys; print(input()[::-1]); print('e', file=sys.stderr); sys.exit(3)", stdin="añc", limits=QUICK
    )
    assert (outcome.status, outcome.stdout, outcome.stderr) == ("error", "cña\n", "e\n")
    assert (outcome.exit_code, outcome.signal, outcome.isolated) == (3, None, level.namespaces)
    assert 0 < outcome.cpu_s < 20 and 0 < outcome.seconds < 20


@pytest.mark.parametrize("number", [6, 11])
def test_what_a_signal_ended_has_no_exit_code(level, number):
    outcome = run_python(f"import os; os.kill(os.getpid(), {number})", limits=QUICK)
    assert (outcome.status, outcome.exit_code, outcome.signal) == ("killed", None, number)


def test_an_exception_is_an_error_with_its_line(level):
    outcome = run_python("x = 1\nraise KeyError('k')", limits=QUICK)
    assert outcome.status == "error"
    assert 'main.py", line 2' in outcome.stderr and outcome.stderr.endswith("KeyError: 'k'\n")


def test_nothing_to_read_is_an_end_not_a_wait(level):
    assert run_python("import sys; print(repr(sys.stdin.read()))", limits=QUICK).stdout == "''\n"


def test_large_input_arrives_whole_and_unread_input_blocks_nothing(level):
    text = "0123456789" * 100_000
    assert run_python("import sys; print(len(sys.stdin.read()))", stdin=text, limits=QUICK).stdout == "1000000\n"
    assert run_python("print(1)", stdin=text, limits=QUICK).stdout == "1\n"


def test_other_programs_and_files(level):
    outcome = run(["/bin/sh", "-c", "cat a.txt; pwd"], files={"a.txt": "text\n"}, limits=QUICK)
    assert outcome.stdout.startswith("text\n/") and outcome.status == "ok"


def test_installed_packages_are_there_and_what_is_not_allowed_to_be_there_is_not(level, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    monkeypatch.setenv("PYTHONPATH", "/anything")
    code = "import numpy, os, sys; print(sorted(os.environ), '/anything' in sys.path)"
    names = [
        "HOME",
        "LANG",
        "MKL_NUM_THREADS",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "PATH",
        "PYTHONHASHSEED",
        "TMPDIR",
    ]
    assert run_python(code, limits=QUICK).stdout == f"{names} False\n"


def test_a_process_with_many_open_files_has_boxes_too(level):
    with many_files():
        assert run_python("print(input())", stdin="a", limits=QUICK).stdout == "a\n"


def test_the_same_program_prints_the_same(level):
    code = "print({'a', 'b', 'c', 'd'}, hash('x'))"
    assert run_python(code, limits=QUICK).stdout == run_python(code, limits=QUICK).stdout


@pytest.mark.parametrize("code", ["print('\ud800')", "x = '\0'", "def", "\x00"])
def test_text_that_is_no_program_is_an_error_of_the_program(level, code):
    assert run_python(code, limits=QUICK).status in ("error", "ok")


def test_it_has_no_privileges(level):
    code = (
        "print(*(line.split()[1] for line in open('/proc/self/status') if line.startswith(('CapEff', 'NoNewPrivs'))))"
    )
    assert run_python(code, limits=QUICK).stdout == "0000000000000000 1\n"


def test_its_directory_is_empty_its_own_and_removed(level):
    code = "import os, tempfile; open('new', 'w').close(); print(os.getcwd(), tempfile.gettempdir(), *os.listdir())"
    first = run_python(code, limits=QUICK)
    directory, temporary, *files = first.stdout.split()
    ways = {
        Path(prefix).parts[2] for prefix in (sys.prefix, sys.base_prefix) if prefix.startswith("/tmp/")
    }  # to Python
    assert directory == temporary and sorted({*files} - ways) == ["main.py", "new"]
    assert directory == "/tmp" if level.namespaces else not Path(directory).exists()


# ---- what ends it ----


@pytest.mark.parametrize(
    ("code", "limits", "status"),
    [
        ("import time; time.sleep(60)", Limits(wall_s=0.5), "timeout"),
        long_case(
            "import signal as s; s.signal(s.SIGXCPU, s.SIG_IGN)\nwhile True: pass",
            Limits(wall_s=30, cpu_s=1),
            "timeout",
        ),
        ("x = ' ' * (1 << 34)", QUICK, "memory"),
        ("while True: print('x' * 10000)", Limits(output_bytes=50_000), "output"),
        ("import sys\nwhile True: print('x' * 10000, file=sys.stderr)", Limits(output_bytes=50_000), "output"),
        ("import ctypes; ctypes.string_at(0)", QUICK, "killed"),
        ("import os; os._exit(7)", QUICK, "error"),
        ("import os; os._exit(0)", QUICK, "ok"),
        ("open('f', 'wb').write(b'x' * (5 << 20))", Limits(disk_mb=4), "error"),
        ("a = [open('/dev/null') for _ in range(100)]", Limits(open_files=50), "error"),
    ],
)
def test_limits(level, code, limits, status):
    outcome = run_python(code, limits=limits)
    assert outcome.status == status, outcome
    assert len(outcome.stdout) <= limits.output_bytes and len(outcome.stderr) <= limits.output_bytes


def test_what_was_printed_before_the_end_is_kept(level):
    outcome = run_python("print('before', flush=True)\nimport time; time.sleep(60)", limits=Limits(wall_s=1))
    assert (outcome.status, outcome.stdout) == ("timeout", "before\n")


def test_a_hundred_megabytes_of_output_are_never_held(level):
    code = "import os\nfor _ in range(100): os.write(1, b'x' * (1 << 20))"
    outcome = run_python(code, limits=Limits(wall_s=30, output_bytes=1 << 16))
    assert outcome.status == "output" and outcome.stdout == "x" * (1 << 16)


def test_a_fork_bomb_stays_small_and_ends(level):
    marker = f"bomb-{os.getpid()}-{time.monotonic_ns()}"
    code = f"""
    import os, subprocess, sys, time
    for _ in range(200):
        try:
            sleep = [sys.executable, '-c', 'import time; time.sleep(1000)', {marker!r}]
            subprocess.Popen(sleep, start_new_session=True)
        except OSError:
            break
    time.sleep(1000)
    """
    began = time.monotonic()
    outcome = run_python(textwrap.dedent(code), limits=Limits(wall_s=3, processes=12))
    assert outcome.status in ("timeout", "killed")
    assert not running(marker) and time.monotonic() - began < 30


@pytest.mark.parametrize("end", ["time.sleep(1000)", "sys.exit(0)", "os.kill(os.getpid(), 9)"])
def test_grandchildren_in_sessions_of_their_own_end_too(level, end):
    marker = f"grandchild-{os.getpid()}-{time.monotonic_ns()}"
    code = f"""
    import os, subprocess, sys, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(1000)', {marker!r}])
        os._exit(0)
    time.sleep(0.3)
    {end}
    """
    run_python(textwrap.dedent(code), limits=Limits(wall_s=1.5))
    assert running(marker) == []


def test_a_program_that_ignores_signals_ends(level):
    code = "import signal as s, time\nfor n in {*range(1, 32)} - {9, 19}: s.signal(n, s.SIG_IGN)\ntime.sleep(99)"
    assert run_python(code, limits=Limits(wall_s=0.7)).status == "timeout"


def test_nothing_survives_an_owner_who_is_killed(level, tmp_path):
    marker = f"orphan-{os.getpid()}-{time.monotonic_ns()}"
    inner = f"""
    import subprocess, sys, time
    sleep = [sys.executable, '-c', 'import time; time.sleep(1000)', {marker!r}]
    subprocess.Popen(sleep, start_new_session=True)
    time.sleep(1000)
    """
    owner = f"""
    from groupwise.rewards import sandbox
    level = sandbox.{level!r}
    sandbox.isolation = lambda: level
    sandbox.run_python({textwrap.dedent(inner)!r}, limits=sandbox.Limits(wall_s=300))
    """
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(owner)], env=environment)
    try:
        assert becomes(lambda: running(marker))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert becomes(lambda: not running(marker))
    assert becomes(lambda: not list(tmp_path.iterdir()))


@pytest.mark.skipif(os.geteuid() != 0 or not SYSTEM_PYTHON.exists(), reason="for root, with a Python that all may read")
def test_without_namespaces_root_still_lends_its_name_to_nobody(monkeypatch, tmp_path):
    level = Isolation(namespaces=False, own_user=True, reason="a test")
    monkeypatch.setattr(sandbox, "isolation", lambda: level)
    (tmp_path / "secret").touch(mode=0o600)
    code = f"""
    import os, time
    print(os.getuid() > 1000, os.access('.', os.W_OK), os.access({str(tmp_path / "secret")!r}, os.R_OK))
    try:
        for _ in range(20):
            os.fork() or time.sleep(99)
    except OSError as error:
        print(type(error).__name__, os.getcwd())
    """
    argv = [str(SYSTEM_PYTHON), "-c", textwrap.dedent(code)]
    outcome = run(argv, limits=Limits(wall_s=20, processes=1))
    first, second = outcome.stdout.splitlines()
    assert first == "True True False"
    assert second.startswith("BlockingIOError /") and not Path(second.split()[1]).exists()


def test_no_descriptor_and_no_process_is_left(level):
    run_python("pass", limits=QUICK)
    before, others = sorted(os.listdir("/proc/self/fd")), set(descendants(os.getpid()))  # of other tests
    for _ in range(3):
        run_python("pass", limits=QUICK)
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert set(descendants(os.getpid())) <= others


# ---- what namespaces keep from it ----


@pytest.mark.usefixtures("inside_namespaces")
class TestNamespaces:
    def test_no_network(self):
        code = """
        for line in open("/proc/self/net/dev").readlines()[2:]:
            print(line.split()[0], *line.split()[1:3])
        print(open("/proc/self/net/route").readlines()[1:], open("/proc/self/net/if_inet6").read())
        """
        outcome = run_python(textwrap.dedent(code), limits=QUICK)
        assert outcome.stdout == "lo: 0 0\n[] \n"  # loopback is down, and there are no routes

    def test_a_server_of_this_process_cannot_be_reached(self):
        import socket

        with socket.create_server(("127.0.0.1", 0)) as server:
            code = f"import socket; socket.create_connection({server.getsockname()}, 1)"
            assert run_python(code, limits=QUICK).status == "error"

    def test_files_that_are_not_pythons_are_not_there(self, tmp_path):
        (tmp_path / "answers.jsonl").write_text("{}")
        home = os.path.expanduser("~")
        code = f"""
        import os
        for path in ({str(tmp_path)!r}, {__file__!r}, {home + "/.ssh"!r}, '/etc/passwd', '/run', '/sys', '/var'):
            print(os.path.exists(path))
        """
        assert run_python(textwrap.dedent(code), limits=QUICK).stdout == "False\n" * 7

    def test_what_is_there_cannot_be_written(self):
        code = """
        import os, sys
        for path in (os.__file__, '/usr/new', '/new', '/etc/new', sys.prefix + '/new'):
            try:
                open(path, 'a')
            except OSError as error:
                print(type(error).__name__)
        """
        lines = run_python(textwrap.dedent(code), limits=QUICK).stdout.split()
        assert len(lines) == 5 and set(lines) <= {"OSError", "PermissionError"}

    def test_other_processes_are_out_of_sight_and_reach(self):
        code = f"""
        import os
        print([name for name in os.listdir('/proc') if name.isdigit() and int(name) > 2])
        for pid in (1, {os.getpid()}, os.getppid()):
            try:
                os.kill(pid, 9)
            except OSError as error:
                print(type(error).__name__)
        print('still here')
        """
        lines = run_python(textwrap.dedent(code), limits=QUICK).stdout.splitlines()
        assert lines[0] == "[]" and lines[-1] == "still here"

    def test_it_is_nobody_and_can_become_nobody_else(self):
        code = """
        import os
        print(os.getuid() == 0, open('/proc/self/status').read().split('CapEff:')[1].split()[0])
        try:
            os.setuid(0)
        except OSError as error:
            print(type(error).__name__)
        """
        lines = run_python(textwrap.dedent(code), limits=QUICK).stdout.split()
        assert lines[:2] == ["False", "0000000000000000"] and lines[2].endswith("Error")

    @pytest.mark.parametrize("where", ["('/tmp',)", "('/tmp', '/dev/shm')"])
    def test_all_files_together_are_limited(self, where):
        code = f"for i in range(4):\n for d in {where}: open(f'{{d}}/f{{i}}', 'wb').write(b'x' * (1 << 20))"
        outcome = run_python(code, limits=Limits(disk_mb=3))
        assert outcome.status == "error" and "No space left" in outcome.stderr

    def test_empty_files_are_limited_too(self):
        code = "import os\nfor i in range(2000): open(f'/dev/shm/{i}', 'w').close(); os.mkdir(str(i))"
        outcome = run_python(code, limits=Limits(disk_mb=4))
        assert outcome.status == "error" and "No space left" in outcome.stderr
        assert run_python(code, limits=Limits(disk_mb=64)).status == "ok"


# ---- what the kernel is not asked for ----


@pytest.mark.usefixtures("filtered")
class TestFilter:
    """None of these sockets is ever connected: some lead out of the machine."""

    def test_no_socket_but_unix(self):
        code = """
        import asyncio, socket
        AF_ALG, AF_VSOCK = 38, 40
        for family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET, AF_ALG, AF_VSOCK):
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
                try:
                    socket.socket(family, kind)
                except OSError as error:
                    print(error.errno, end=" ")
        socket.socket(socket.AF_UNIX).close()
        asyncio.run(asyncio.sleep(0))
        print("done")
        """
        outcome = run_python(textwrap.dedent(code), limits=QUICK)
        assert outcome.stdout == f"{errno.EAFNOSUPPORT} " * 18 + "done\n"

    def test_no_namespaces_of_its_own(self):
        numbers = {"x86_64": (56, 435), "aarch64": (220, 435)}[os.uname().machine]
        code = f"""
        import ctypes, os
        libc, (clone, clone3) = ctypes.CDLL(None, use_errno=True), {numbers}
        here = os.open("/proc/self/ns/user", os.O_RDONLY)
        for flag in (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
            for result in (libc.unshare(flag), libc.setns(here, flag), libc.syscall(clone, flag | 17, 0, 0, 0, 0)):
                assert result == -1, flag
                print(ctypes.get_errno(), end=" ")
        print(libc.syscall(clone3, 0, 0), ctypes.get_errno())
        print(open("/proc/self/status").read().split("CapEff:")[1].split()[0])
        """
        outcome = run_python(textwrap.dedent(code), limits=QUICK)
        assert outcome.stdout == "1 " * 21 + f"-1 {errno.ENOSYS}\n0000000000000000\n", outcome

    def test_no_memory_beside_its_address_space(self):
        code = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        libc.memfd_create(b"x", 0) == -1 and print(ctypes.get_errno())
        libc.shmget(0, 4096, 0o1600) == -1 and print(ctypes.get_errno())
        libc.msgget(0, 0o1600) == -1 and print(ctypes.get_errno())
        libc.semget(0, 1, 0o1600) == -1 and print(ctypes.get_errno())
        libc.vmsplice(1, None, 0, 0) == -1 and print(ctypes.get_errno())
        for way in (lambda: os.write(0, b"x" * 100), lambda: os.truncate("/proc/self/fd/0", 1 << 20)):
            try:
                way()
            except OSError as error:
                print(type(error).__name__)
        """
        outcome = run_python(textwrap.dedent(code), stdin="text", limits=QUICK)
        assert outcome.stdout == f"{errno.ENOSYS}\n" * 5 + "PermissionError\n" * 2

    @pytest.mark.parametrize(
        "way",
        [
            "os.kill(os.getpid(), 9)",
            "os.kill(0, 9)",
            "os.killpg(os.getpgrp(), 9)",
            "signal.pthread_kill(threading.get_ident(), 9)",
            "signal.pidfd_send_signal(os.pidfd_open(os.getpid()), 9)",
            "ctypes.CDLL(None).sigqueue(os.getpid(), 9, 0)",
        ],
    )
    def test_a_program_cannot_pass_for_one_that_was_killed(self, way):
        outcome = run_python(f"import ctypes, os, signal, threading, time; {way}; time.sleep(9)", limits=QUICK)
        assert (outcome.status, outcome.signal) == ("killed", signal.SIGSYS)

    def test_nor_by_a_child(self):
        code = """
        import os
        for target in (os.getpid(), 0, -1, -os.getpid()):
            child = os.fork()
            if child == 0:
                os.kill(target, 9)
                os._exit(0)
            print(os.WTERMSIG(os.waitpid(child, 0)[1]), end=" ")
        """
        outcome = run_python(textwrap.dedent(code), limits=QUICK)
        assert outcome.stdout == f"{signal.SIGSYS:d} " * 4

    def test_a_limit_of_cpu_seconds_of_its_own_is_not_set(self):
        code = """
        import resource
        resource.setrlimit(resource.RLIMIT_CPU, (1, 1))  # whose end would be a SIGKILL, as if from outside
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
        print(resource.getrlimit(resource.RLIMIT_CPU), resource.getrlimit(resource.RLIMIT_NOFILE))
        """
        outcome = run_python(textwrap.dedent(code), limits=QUICK)
        assert outcome.stdout == "(20, 21) (20, 20)\n", outcome

    def test_what_programs_do_still_works(self):
        code = """
        import asyncio, concurrent.futures, multiprocessing, numpy, subprocess, sys, tempfile
        from multiprocessing import shared_memory

        def double(x): return 2 * x

        async def talk():
            code = "print(input() * 2)"
            child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdin=-1, stdout=-1)
            return (await child.communicate(b"ab"))[0].decode().strip()

        if __name__ == "__main__":
            with concurrent.futures.ThreadPoolExecutor(4) as threads:
                print(*threads.map(double, range(4)))
            with multiprocessing.get_context("fork").Pool(2) as pool:
                print(*pool.map(double, range(4)))
            print(subprocess.run(["/bin/sh", "-c", "echo $((6 * 7))"], capture_output=True, text=True).stdout.strip())
            sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"], start_new_session=True)
            sleeping.kill()
            print(sleeping.wait(), asyncio.run(talk()))
            block = shared_memory.SharedMemory(create=True, size=1 << 16)
            block.buf[:2] = b"ok"
            print(bytes(block.buf[:2]).decode(), int((numpy.eye(64) @ numpy.ones((64, 64))).sum()))
            block.close(), block.unlink()
            with tempfile.TemporaryFile() as file:
                print(file.write(b"x" * 1000))
        """
        outcome = run_python(textwrap.dedent(code), limits=Limits(wall_s=60, cpu_s=60, memory_mb=4096))
        assert outcome.stdout == "0 2 4 6\n0 2 4 6\n42\n-9 abab\nok 4096\n1000\n", outcome


NUMBERS = {
    "x86_64": {"read": 0, "socket": 41, "socketpair": 53, "clone": 56, "kill": 62, "tgkill": 234, "unshare": 272}
    | {"memfd_create": 319, "io_uring_setup": 425, "clone3": 435, "setrlimit": 160, "prlimit64": 302},
    "aarch64": {"read": 63, "socket": 198, "socketpair": 199, "clone": 220, "kill": 129, "tgkill": 131, "unshare": 97}
    | {"memfd_create": 279, "io_uring_setup": 425, "clone3": 435, "setrlimit": 164, "prlimit64": 261},
}
NAMES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def verdict(code: sandbox_child.Instructions, *, name: int, number: int, arguments: tuple[int, ...]) -> int:
    """What the kernel makes of a filter, for the instructions that ours has."""
    data = struct.pack("=IIQ6Q", number, name, 0, *(each % (1 << 64) for each in (*arguments, *[0] * 6)[:6]))
    loaded = at = 0
    while True:
        operation, true, false, value = code[at]
        if operation == sandbox_child.RETURN:
            return value
        if operation == sandbox_child.LOAD:
            loaded, jump = int.from_bytes(data[value : value + 4], sys.byteorder), 0
        else:
            tests = {
                sandbox_child.EQUAL: loaded == value,
                sandbox_child.AT_LEAST: loaded >= value,
                sandbox_child.ANY_BIT: loaded & value,
            }
            jump = true if tests[operation] else false
        at += 1 + jump


@pytest.mark.parametrize("machine", NUMBERS)
def test_the_filter_of_each_machine(machine):
    code = sandbox_child.filter_of(machine, program=7)
    allow, kill = sandbox_child.ALLOW, sandbox_child.KILL_PROCESS
    assert len(code) < 4096  # the kernel's limit

    def asked(call: str, *arguments: int) -> int:
        return verdict(code, name=NAMES[machine], number=NUMBERS[machine][call], arguments=arguments)

    def refused(number: int) -> int:
        return sandbox_child.ERRNO | number

    assert asked("read", 9, 9) == asked("socket", 1, 1) == asked("socketpair", 1) == asked("clone", 0x1200011) == allow
    assert asked("socket", 1 | 1 << 32) == allow  # an int's upper half is ignored by the kernel too
    for family in (0, 2, 10, 16, 17, 38, 40):
        assert asked("socket", family) == asked("socketpair", family) == refused(errno.EAFNOSUPPORT)
    assert asked("clone", 0x10000000 | 17) == asked("clone", 0x02000000) == refused(errno.EPERM)
    assert asked("unshare", 0) == refused(errno.EPERM)
    assert asked("memfd_create") == asked("io_uring_setup") == asked("clone3") == refused(errno.ENOSYS)
    assert [asked("kill", pid, 9) for pid in (7, -7, 0, -1)] == [kill] * 4
    assert asked("kill", 7, 15) == asked("kill", 8, 9) == asked("kill", -8, 9) == asked("tgkill", 7, 7, 15) == allow
    assert asked("tgkill", 7, 7, 9) == kill
    limit = 0x7F0000000000  # where a limit stands: the lower half of its address is 0
    assert asked("setrlimit", 0, limit) == asked("prlimit64", 0, 0, limit) == asked("prlimit64", 0, 0, 1) == refused(0)
    assert asked("setrlimit", 7, limit) == asked("prlimit64", 0, 7, limit) == asked("prlimit64", 0, 0, 0, 1) == allow
    other = NAMES["aarch64" if machine == "x86_64" else "x86_64"]
    assert verdict(code, name=other, number=NUMBERS[machine]["read"], arguments=()) == kill
    if machine == "x86_64":
        assert verdict(code, name=NAMES[machine], number=1 << 30, arguments=()) == refused(errno.ENOSYS)


def test_no_filter_for_other_machines():
    with raises(OSError):
        sandbox_child.filter_of("riscv64", program=7)


# ---- all of a box together ----


@pytest.mark.skipif(sys.platform != "linux" or isolation().group is None, reason="no control group to be had here")
class TestGroups:
    @pytest.fixture(params=LEVELS)
    def grouped(self, request, monkeypatch):
        level = replace(LEVELS[request.param], filtered=isolation().filtered, group=isolation().group)
        monkeypatch.setattr(sandbox, "isolation", lambda: level)
        before = {*Path(str(level.group)).iterdir()}
        yield
        assert {*Path(str(level.group)).iterdir()} == before

    def test_a_group_that_a_killed_keeper_left_is_removed(self, grouped):
        left = Path(str(sandbox.isolation().group), f"{sandbox.GROUP}999999999")
        left.mkdir()
        sandbox._grouped(sandbox.isolation(), [])

    def test_memory_of_all_processes_together(self, grouped):
        code = """
        import os, time
        for _ in range(8):
            if os.fork() == 0:
                held = bytearray(os.urandom(1)) * (60 << 20)
                time.sleep(60)
        time.sleep(60)
        """
        outcome = run_python(textwrap.dedent(code), limits=Limits(wall_s=50, memory_mb=128, disk_mb=16))
        assert (outcome.status, outcome.signal) == ("memory", signal.SIGKILL)

    def test_what_stays_within_is_left_alone(self, grouped):
        code = "import os\nfor i in range(3): os.fork() == 0 and os._exit(len(bytearray(50 << 20)) == 0)"
        assert run_python(code, limits=Limits(wall_s=50, memory_mb=512)).status == "ok"

    def test_processes_of_all_users_together(self, grouped):
        code = """
        import os, time
        try:
            for _ in range(50):
                os.fork() or time.sleep(60)
        except OSError as error:
            print(type(error).__name__)
        """
        outcome = run_python(textwrap.dedent(code), limits=Limits(wall_s=20, processes=5))
        assert outcome.stdout == "BlockingIOError\n"


# ---- the rest ----


def test_a_program_that_is_killed_from_outside_is_lost(level):
    marker = f"lost-{os.getpid()}-{time.monotonic_ns()}"

    def kill() -> None:
        becomes(lambda: running(marker))
        for pid in running(marker):
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    argv = [sys.executable, "-c", "import time; time.sleep(1000)", marker]
    outcome = run(argv, limits=Limits(wall_s=60))
    killer.join()
    assert (outcome.status, outcome.signal) == ("lost", signal.SIGKILL)


def test_isolation_says_what_there_is(monkeypatch):
    level = isolation()
    assert str(level).startswith("namespaces" if level.namespaces else "limits only, no isolation")
    assert (level.namespaces and level.filtered and level.group) or level.reason


@pytest.mark.parametrize(
    ("level", "says", "says_not"),
    [
        ({}, "limits only, no isolation: network and files are open", "no network"),
        ({"filtered": True}, "no isolation: no network, but this user's files and processes are open", "network and"),
        ({"namespaces": True}, "no filter of system calls: AF_VSOCK sockets, memfd memory and new user", "filtered"),
        ({"namespaces": True, "filtered": True}, "memory is limited for each process, not for all", "AF_VSOCK"),
        ({"namespaces": True, "filtered": True, "group": "/a"}, "system calls filtered (why)", "memory is limited"),
    ],
)
def test_what_does_not_hold_is_said(level, says, says_not):
    text = str(Isolation(**{"namespaces": False, "own_user": False, "reason": "why", **level}))
    assert says in text and says_not not in text and text.endswith("(why)")


def test_isolation_can_be_required(monkeypatch):
    monkeypatch.setattr(sandbox, "isolation", lambda: Isolation(namespaces=False, own_user=False, reason="not today"))
    with raises(SandboxError):
        run_python("pass", require_isolation=True)
    assert not run_python("pass").isolated


def test_a_program_that_is_not_there(level):
    with raises(SandboxError):
        run(["/no/such/program"], limits=QUICK)


@pytest.mark.parametrize("name", ["wall_s", "cpu_s", "memory_mb", "output_bytes"])
def test_limits_are_positive(name):
    with raises(ValueError):
        Limits(**{name: 0})


def test_a_call_within_an_event_loop_works_too():
    async def inside() -> str:
        return run_python("print(1)", limits=QUICK).stdout

    assert asyncio.run(inside()) == "1\n"
