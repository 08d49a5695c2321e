"""Processes that need not import torch anew, which takes five seconds: multiprocessing's fork server has imported it
once and forks them off. They are processes like any other, with a folder, an environment, files for what they say,
signals and an exit status of their own; only how they came to their modules differs. A story about the start of a
process, and one of each kind of process, is told by a real `python -m`.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from threads import THREADS

ONE_SERVER = pytest.mark.xdist_group("forked processes")  # of tests that call `forked`: it imports for seven seconds
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    ["groupwise.run.loop", "groupwise.run.assemble", "groupwise.run.job_queue", "groupwise.cli.main"]
)


@contextmanager
def forked(
    module: str,
    *arguments: str | Path,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    parent: bool = False,
) -> Iterator[ForkServerProcess]:
    """`python -m module ARGUMENTS...` in `folder`, killed at the end of the block; what it says is in the files
    `stdout` and `stderr` there. With `parent` the process is one that has started it as its child, and sleeps."""
    words = [module, *map(str, arguments)]
    variables = {"OMP_NUM_THREADS": THREADS, **(environment or {})}
    process = _SERVER.Process(target=_run, args=(words, folder, variables, parent))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def ran(
    module: str,
    *arguments: str | Path,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    within_s: float = 300,
) -> CompletedProcess[str]:
    """Wait for the end of `forked`'s process, and return its code and what it said."""
    with forked(module, *arguments, folder=folder, environment=environment) as process:
        process.join(within_s)
        assert process.exitcode is not None, f"{module} goes on after {within_s} s"
        code = process.exitcode
    said = [(folder / name).read_text(encoding="utf-8") for name in ("stdout", "stderr")]
    return CompletedProcess([module, *map(str, arguments)], code, *said)


def _run(words: Sequence[str], folder: Path, variables: Mapping[str, str], parent: bool) -> None:
    gc.freeze()  # what is here would be copied by each look for garbage
    os.environ.update(variables)
    os.chdir(folder)
    sys.path[:0] = [str(folder), *filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))]  # as at a start
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if parent and os.fork():
        time.sleep(1000)
    sys.argv = list(words)
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # the end of a forked process does not call them
