"""Faults happen where and when they were asked for, and never otherwise."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time

import pytest

from groupwise.errors import ConfigError
from groupwise.store import faults
from wording import raises


@pytest.fixture
def inject(monkeypatch):
    def use(text: str):
        monkeypatch.setattr(faults, "_faults", faults.parse(text))

    return use


def run(code: str, *, asked: str | None) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != faults.VARIABLE}
    if asked is not None:
        environment[faults.VARIABLE] = asked
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)


def test_nothing_happens_unless_asked(monkeypatch):
    monkeypatch.setattr(faults, "_faults", {})
    faults.point("submit:after-spool")
    assert run("from groupwise.store.faults import point; point('a:b')", asked=None).returncode == 0
    assert run("from groupwise.store.faults import point; point('a:b')", asked="a:c:kill").returncode == 0


def test_kill_is_a_real_sigkill_at_the_kth_visit():
    code = "from groupwise.store.faults import point\nfor i in range(9):\n    print(i, flush=True)\n    point('a:b')"
    ran = run(code, asked="a:b:kill@3")
    assert ran.returncode == -signal.SIGKILL
    assert ran.stdout.split() == ["0", "1", "2"]


def test_raise_enospc_and_sleep(inject):
    inject("a:b:raise, c:d:enospc@2 ,e:f:sleep=0.05,g:h:memory")
    with raises(MemoryError):
        faults.point("g:h")
    with raises(faults.FaultInjected):
        faults.point("a:b")
    faults.point("c:d")
    with raises(OSError) as caught:
        faults.point("c:d")
    assert caught.value.errno == errno.ENOSPC
    begin = time.monotonic()
    faults.point("e:f")
    assert time.monotonic() - begin >= 0.05


def test_a_fault_happens_once_and_a_point_can_have_several(inject):
    inject("a:b:raise@1,a:b:enospc@3")
    with pytest.raises(faults.FaultInjected):
        faults.point("a:b")
    faults.point("a:b")
    with pytest.raises(OSError):
        faults.point("a:b")
    for _ in range(5):
        faults.point("a:b")


@pytest.mark.parametrize(
    "text", ["kill", "a:b:explode", "a:b:kill@0", "a:b:kill@x", ":kill", "a:sleep=-1", "a:sleep=z"]
)
def test_a_malformed_fault_is_refused(text):
    with raises(ConfigError):
        faults.parse(text)


def test_the_variable_is_checked_when_a_process_starts():
    ran = run("import groupwise.store.faults", asked="nonsense")
    assert ran.returncode == 1
    assert "GROUPWISE_FAULTS: 'nonsense' is not a fault" in ran.stderr
