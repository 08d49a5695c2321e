"""The processes that others are forked from end, without a word, with the process that started them."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys

import pytest

from groupwise.engine.forks import READY, frame, receive_frame

CHILD = """\
import sys
from groupwise.engine.forks import receive_setup, serve_forks
channel, setup = receive_setup(sys.argv[1])
channel.recv(1)
sys.exit(serve_forks(channel, 1, most_bytes=lambda descriptors: 1 << 30, work=lambda descriptors, most: None))
"""


@pytest.mark.parametrize("said", ["nothing", "half", "setup", "ready"])
def test_it_ends_wherever_the_other_end_is_killed(said: str) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
        )
    with ours:
        setup = frame(pickle.dumps(("setup",)))
        ours.sendall({"nothing": b"", "half": setup[:10]}.get(said, setup))
        if said == "ready":
            ours.sendall(b"1")
            assert ours.recv(len(READY)) == READY
    _, errors = child.communicate(timeout=60)
    assert (child.returncode, errors) == (0, b"")


def test_a_message_that_is_cut_is_an_end() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.sendall(frame(b"whole") + frame(b"cut")[:-1])
        theirs.close()
        assert receive_frame(ours) == b"whole"
        with pytest.raises(EOFError):
            receive_frame(ours)
