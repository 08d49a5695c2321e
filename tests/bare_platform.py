"""`python -m bare_platform MODULE ARGUMENTS...`: a module run as on a system without what only Linux has: no /proc, no
prctl, no affinity of processes, no pidfd, no memfd, no extended attributes. What Python code asks for it, ours or a
library's, fails as it does there."""

from __future__ import annotations

import ctypes
import os
import runpy
import sys
from typing import Any

ABSENT = ("sched_getaffinity", "sched_setaffinity", "pidfd_open", "memfd_create", "getxattr")


def hide() -> None:
    """From here on, and for the life of the process."""
    for name in ABSENT:
        if hasattr(os, name):
            delattr(os, name)
    found = ctypes.CDLL.__getattr__

    def without_prctl(library: ctypes.CDLL, name: str) -> Any:
        if name == "prctl":
            raise AttributeError(name)
        return found(library, name)

    ctypes.CDLL.__getattr__ = without_prctl  # type: ignore[method-assign]
    sys.addaudithook(_no_proc)


def _no_proc(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith(("/proc", "/sys/fs/cgroup")):
        raise FileNotFoundError(2, "No such file or directory", str(arguments[0]))


if __name__ == "__main__":
    hide()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
