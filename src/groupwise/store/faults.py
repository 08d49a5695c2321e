"""Named fault points, at which the crash tests kill the process; they do nothing otherwise.

    GROUPWISE_FAULTS="publish:after-rename:kill"          SIGKILL the first time that point is reached
    GROUPWISE_FAULTS="submit:before-commit:enospc@3,progress:after-commit:sleep=0.5"

A fault is `<point>:<action>[=<seconds>][@<k>]`; several are separated by commas. The k-th time (from 1; the first
without `@`) that this process comes to the point it does the action, once. Without the variable `point` costs one
comparison.

    kill      SIGKILL to this process            raise     FaultInjected, a bug's stand-in
    enospc    OSError "no space left on device"  sleep=s   wait s seconds (0.1)
    memory    MemoryError
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from dataclasses import dataclass

from groupwise.errors import ConfigError

VARIABLE = "GROUPWISE_FAULTS"
ACTIONS = ("kill", "raise", "enospc", "memory", "sleep")


class FaultInjected(RuntimeError):
    """Error that the action `raise` raises: a RuntimeError, because it stands for an unforeseen error."""


@dataclass
class _Fault:
    action: str
    seconds: float
    visits_left: int


def parse(text: str) -> dict[str, list[_Fault]]:
    """Return the faults by point. Raises ConfigError if `text` is not a list of faults."""
    faults: dict[str, list[_Fault]] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        point, colon, what = entry.rpartition(":")
        what, _, visit = what.partition("@")
        action, _, seconds = what.partition("=")
        try:
            fault = _Fault(action, float(seconds or 0.1), int(visit or 1))
        except ValueError:
            fault = _Fault("", 0, 0)
        if not (point and colon and action in ACTIONS and fault.visits_left >= 1 and fault.seconds >= 0):
            raise ConfigError(
                f"{VARIABLE}: {entry!r} is not a fault",
                hint=f"write <point>:<action>[@<k>], as in 'publish:after-rename:kill@2', with {', '.join(ACTIONS)}",
            )
        faults.setdefault(point, []).append(fault)
    return faults


_faults = parse(os.environ.get(VARIABLE, ""))
_lock = threading.Lock()


def point(name: str) -> None:
    """Name a place in the code; does nothing unless the environment asks for a fault here."""
    if not _faults:
        return
    with _lock:
        due = []
        for fault in _faults.get(name, ()):
            fault.visits_left -= 1
            if fault.visits_left == 0:
                due.append(fault)
    for fault in due:
        _act(name, fault)


def _act(name: str, fault: _Fault) -> None:
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "sleep":
        time.sleep(fault.seconds)
    elif fault.action == "enospc":
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (injected at {name})")
    elif fault.action == "memory":
        raise MemoryError(f"injected at {name}")
    else:
        raise FaultInjected(f"injected at {name}")
