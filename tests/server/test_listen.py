"""The port and the state directory: taken ones are refused with who has them."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from groupwise.server.listen import StartError, bind, incoming, own, url_of
from wording import raises

HOLD = "import sys; from pathlib import Path; from groupwise.server.listen import own\n"
HOLD += "with own(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


def test_a_free_port_listens_at_once() -> None:
    with bind("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname(), timeout=5):
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_port_in_use_is_named_with_its_owner() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with raises(StartError) as refused:
            bind("127.0.0.1", port)
    assert refused.value.exit_code == 3
    assert str(port) in str(refused.value) and str(os.getpid()) in str(refused.value)
    bind("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid", "a" * 70])
def test_an_address_that_is_not_ours_is_refused(host: str) -> None:
    with raises(StartError):
        bind(host, 0)


def test_a_state_directory_has_one_owner(tmp_path: Path) -> None:
    state = tmp_path / "a" / "state"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(state)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout and other.stdout.readline() == "held\n"
    with raises(StartError) as refused, own(state):
        pass
    assert refused.value.exit_code == 3 and str(other.pid) in str(refused.value)
    other.kill()  # the kernel gives the lock back
    other.communicate()
    for _ in range(2):
        with own(state):
            assert str(os.getpid()) in (state / "server.lock").read_text()


def test_a_child_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    with own(tmp_path):
        child = subprocess.Popen(["sleep", "20"], close_fds=False)
    try:
        with own(tmp_path):
            pass
    finally:
        child.kill()
        child.wait()


def test_a_state_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with raises(StartError), own(tmp_path / "file" / "state"):
        pass


def test_what_is_too_large_for_memory_waits_on_the_state_directorys_disk(tmp_path: Path) -> None:
    before = tempfile.gettempdir()
    with incoming(tmp_path), tempfile.SpooledTemporaryFile(max_size=1) as spooled:
        spooled.write(b"xx")
        assert os.fstat(spooled.fileno()).st_size == 2
        assert tempfile.gettempdir() == str(tmp_path / "incoming")
        assert (tmp_path / "incoming").stat().st_mode & 0o077 == 0 and not list((tmp_path / "incoming").iterdir())
    assert tempfile.gettempdir() == before
    (tmp_path / "file").write_text("x")
    with raises(StartError), incoming(tmp_path / "file"):
        pass
