"""Programs that do their worst, in every kind of box that this machine can make."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from groupwise import sandbox
from groupwise.sandbox import (
    Isolation,
    Limits,
    SandboxError,
    isolation,
    run,
    run_async,
    run_python,
    run_python_async,
)
from processes import becomes, descendants, running

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
    monkeypatch.setattr(sandbox, "isolation", lambda: LEVELS[request.param])
    return LEVELS[request.param]


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
        ("import signal as s; s.signal(s.SIGXCPU, s.SIG_IGN)\nwhile True: pass", Limits(wall_s=30, cpu_s=1), "timeout"),
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
    from groupwise import sandbox
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
        import socket
        for address in (("127.0.0.1", 9), ("169.254.169.254", 80), ("10.0.0.1", 80)):
            try:
                socket.create_connection(address, 1)
            except OSError as error:
                print(error.errno)
        """
        outcome = run_python(textwrap.dedent(code), limits=QUICK)
        assert outcome.stdout == "101\n" * 3  # unreachable: there is no interface, not even loopback

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
        assert lines == ["False", "0000000000000000", "PermissionError"]

    def test_all_files_together_are_limited(self):
        code = "for i in range(8): open(f'f{i}', 'wb').write(b'x' * (1 << 20))"
        outcome = run_python(code, limits=Limits(disk_mb=4))
        assert outcome.status == "error" and "No space left" in outcome.stderr


# ---- the rest ----


def test_isolation_says_what_there_is(monkeypatch):
    level = isolation()
    assert str(level).startswith("namespaces" if level.namespaces else "limits only, no isolation")
    assert level.namespaces or level.reason


def test_isolation_can_be_required(monkeypatch):
    monkeypatch.setattr(sandbox, "isolation", lambda: Isolation(namespaces=False, own_user=False, reason="not today"))
    with pytest.raises(SandboxError, match="with this user's files and network: not today"):
        run_python("pass", require_isolation=True)
    assert not run_python("pass").isolated


def test_a_program_that_is_not_there(level):
    with pytest.raises(SandboxError, match=r"could not be started in its box: .*(No such file|not found)"):
        run(["/no/such/program"], limits=QUICK)


@pytest.mark.parametrize("name", ["wall_s", "cpu_s", "memory_mb", "output_bytes"])
def test_limits_are_positive(name):
    with pytest.raises(ValueError, match=f"{name} is 0; it must be positive"):
        Limits(**{name: 0})


def test_it_runs_beside_other_tasks():
    async def both() -> list[str]:
        code = "import time; print(time.monotonic()); time.sleep(1); print(time.monotonic())"
        outcomes = await asyncio.gather(*(run_python_async(code, limits=QUICK) for _ in range(2)))
        return [outcome.stdout for outcome in outcomes]

    (a, b), (c, d) = (map(float, text.split()) for text in asyncio.run(both()))
    assert max(a, c) < min(b, d)  # both ran at one time


def test_a_call_within_an_event_loop_works_too():
    async def inside() -> str:
        return run_python("print(1)", limits=QUICK).stdout

    assert asyncio.run(inside()) == "1\n"


def test_cancelling_ends_the_program():
    marker = f"cancelled-{os.getpid()}-{time.monotonic_ns()}"

    async def cancelled() -> float:
        argv = [sys.executable, "-c", "import time; time.sleep(1000)", marker]
        task = asyncio.create_task(run_async(argv, limits=Limits(wall_s=300)))
        while not running(marker):
            await asyncio.sleep(0.02)
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic() - began

    assert asyncio.run(cancelled()) < 10
    assert running(marker) == []
