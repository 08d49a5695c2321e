"""Real processes that train together over gloo: forks of the test's own, which has all modules and models already."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from groupwise.config.world import World
from groupwise.errors import RankLostError
from groupwise.train.ranks import Ranks, join

CPU = torch.device("cpu")
HANG_S = 120.0  # a rank that says nothing for so long hangs: its threads' stacks are in the test's captured output
Work = Callable[[Ranks], Any]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Pair:
    """`size` processes that do `work`; `results` waits for what they return or raise."""

    def __init__(self, work: Work, *, size: int = 2, deadline_s: float = 60.0):
        context, port = multiprocessing.get_context("fork"), free_port()
        self.processes, self._ends = [], []
        for rank in range(size):
            _until_other_threads_rest()
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(work, rank, size, port, deadline_s, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._ends.append(mine)

    def results(self, *, within_s: float = HANG_S) -> list[Any]:
        """By rank; an exception where one was raised, None where the process was killed."""
        try:
            return [self.result(rank, within_s=within_s) for rank in range(len(self.processes))]
        finally:
            self.kill()

    def result(self, rank: int, *, within_s: float = HANG_S) -> Any:
        """What one rank returned or raised."""
        return _received(self._ends[rank], within_s)

    def kill(self) -> None:
        """End what still runs, stopped or not."""
        for process in self.processes:
            process.kill()
            process.join()


def on_ranks(work: Work, *, size: int = 2, deadline_s: float = 60.0) -> list[Any]:
    """What `work` returns on each of `size` ranks; what one raises is raised here, a cause before its effects."""
    found = Pair(work, size=size, deadline_s=deadline_s).results()
    errors = [each for each in found if isinstance(each, BaseException)]
    for error in sorted(errors, key=lambda error: isinstance(error, RankLostError)):
        raise error
    return found


def _until_other_threads_rest() -> None:
    """Wait until no thread but this one computes. One that has been joined still runs for a moment, in which it gives
    back what MKL lent it, under a lock: a process that is forked then waits for this lock at its first product, for
    ever. On a busy machine that was one fork in a hundred."""
    until = time.monotonic() + HANG_S
    while any(state in "RD" for state in _states_of_other_threads()):
        assert time.monotonic() < until, "a thread of the test computes for ever"
        time.sleep(0.001)


def _states_of_other_threads() -> Iterator[str]:
    """The letters of proc(5): R runs or could, D waits for a disk, S sleeps."""
    for task in Path("/proc/self/task").glob("*"):
        if int(task.name) != threading.get_native_id():
            with suppress(OSError):  # it has ended
                yield (task / "stat").read_text().rpartition(") ")[2][0]


def _run(work: Work, rank: int, size: int, port: int, deadline_s: float, end: Connection) -> None:
    faulthandler.dump_traceback_later(HANG_S - 10)
    gc.freeze()  # what the test's process holds would be copied by each look for garbage
    torch.set_num_threads(1)  # a fork has none of the threads that the test's process computed with
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    try:
        ranks = join(World(rank=rank, size=size, local_rank=rank), device=CPU, deadline_s=deadline_s)
        result = work(ranks)
        ranks.close()
    except BaseException as error:
        error.add_note("".join(traceback.format_exception(error))[-3000:])
        result = error
    end.send_bytes(pickle.dumps(result))  # `send` would share tensors through this process
    end.close()
    os._exit(0)  # nothing of the test's process is to be closed here


def _received(end: Connection, within_s: float) -> Any:
    try:
        return pickle.loads(end.recv_bytes()) if end.poll(within_s) else TimeoutError(f"nothing within {within_s} s")
    except EOFError:
        return None
