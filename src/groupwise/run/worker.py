"""The worker: a process that trains the jobs it leases, next to the server and at a lower priority.

    python -m groupwise.run.worker --state DIR --model NAME --dtype D --device D [--threads N] [--worker ID]

It loads the model once, then leases, trains, publishes; `job_queue` says how a job can end. On SIGTERM it finishes the
steps, saves checkpoints, gives the jobs back and exits with 0; before it has taken a job, it exits at once.

The process ends with its parent: the kernel sends SIGTERM, and if that is not enough, `job_queue.LeaseHeartbeat` ends
it; at once, by SIGKILL, where it works in the parent's own memory (`store.mapped_weights`). The worker of the next
server waits for one that is in a step: two at a time would move each other's checkpoints. Whether the parent still
lives is asked before torch is imported, which takes seconds: the worker of a server that died ends during that, too.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from groupwise import platform
from groupwise.errors import GroupwiseError, NotReadyError
from groupwise.store import files
from groupwise.store.job_checkpoint import trained_in
from groupwise.store.keys import KeyFile
from groupwise.store.ledger import Ledger

if TYPE_CHECKING:  # torch is imported when the parent has been seen alive
    from groupwise.model.load import LoadedModel
    from groupwise.run.job_queue import LeaseHeartbeat

POLL_S = 0.2
PREDECESSOR_S = 15.0  # how long to wait for a worker whose parent died
NICENESS = 10
ARENAS = 2  # of the allocator: any thread of a job may compute for all, and few do at once

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Work until SIGTERM, or until the parent is gone. Returns the exit status."""
    options = _options(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    if not (parent := _die_with_parent(options.parent)):
        return 0
    with suppress(OSError):
        os.nice(NICENESS)  # the server first
    platform.share_arenas(ARENAS)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        _work(options, parent)
    except GroupwiseError as error:
        log.error("%s", error)
        return error.exit_code
    return 0


def _leave(*_: object) -> None:
    """End at once; a signal handler for as long as no job has been taken."""
    os._exit(0)


def _work(options: argparse.Namespace, parent: int) -> None:
    with platform.importing():
        import torch

        from groupwise.model.image_tokens import vision_of
        from groupwise.run.job import WorkerContext
        from groupwise.run.job_queue import LeaseHeartbeat, Worker
        from groupwise.run.job_turns import StepTurns
        from groupwise.store.mapped_weights import map_weights
        from groupwise.store.rundir import IMAGES
        from groupwise.train.together import JointPasses, may_share

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    state: Path = options.state
    weights = KeyFile(state).weight
    with closing(Ledger(state / "ledger.db", weights=weights)) as ledger:
        heartbeat = LeaseHeartbeat(ledger, parent=parent)
        if heartbeat.orphaned:  # for kernels that do not tell
            return
        heartbeat.start()
        store = trained_in(state)
        for warning in store.warnings:
            log.warning("%s", warning)
        base = _load(options, heartbeat, parent)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, heartbeat.stop)
        with _alone(state, heartbeat):
            files.sweep(state)  # weights that another worker died writing
            map_weights(base, state)
            if (vision := vision_of(base.model)) is not None:
                vision.keep_in(state / IMAGES)
            platform.spare()  # or each job's end would look through it for a second
            log.info("%s is ready: %s on %s", options.worker, base.name, base.device)
            threads = torch.get_num_threads()
            passes = JointPasses(at_once=threads) if may_share(base) else None
            shared = {"passes": passes, "threads": threads, "turns": StepTurns(weights)}
            place = WorkerContext(base=base, ledger=ledger, store=store, state_dir=state, **shared)
            Worker(place, heartbeat, name=options.worker).serve()


def _load(options: argparse.Namespace, heartbeat: LeaseHeartbeat, parent: int) -> LoadedModel:
    """Return the base model; over the server's own weights, this process ends with the server at once."""
    from groupwise.run.job_queue import load_base

    base, is_shared = load_base(
        options.model,
        dtype=options.dtype,
        quantization=options.quantization,
        cast_lm_head=options.cast_lm_head,
        device=options.device,
        weights=options.weights,
        owner=parent,
    )
    if is_shared:
        heartbeat.patience_s = 0.0
        _die_with_parent(parent, by=signal.SIGKILL)
    return base


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m groupwise.run.worker", description="Train the jobs of a server.")
    parser.add_argument("--state", type=Path, required=True, help="the server's state directory")
    parser.add_argument("--model", required=True, help="'starter', a directory or a Hugging Face name")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--quantization", choices=("nf4", "int8"))
    parser.add_argument("--cast-lm-head", default="auto", choices=("auto", "float32", "none"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--weights", type=Path, help="where the parent offers its base weights")
    parser.add_argument("--threads", type=int, help="of torch; its own choice without")
    parser.add_argument("--worker", default="worker", help="the name to lease under")
    parser.add_argument("--parent", type=int, help="the process to end with; the one that started this without")
    return parser.parse_args(arguments)


def _die_with_parent(parent: int | None, *, by: signal.Signals = signal.SIGTERM) -> int | None:
    """Ask the kernel (Linux) for a signal when the parent dies; returns the parent, for kernels that do not tell.

    None if it is gone already: it died while this process was starting.
    """
    parent = parent or os.getppid()
    platform.die_with_parent(by)
    return parent if os.getppid() == parent else None


@contextmanager
def _alone(state: Path, heartbeat: LeaseHeartbeat) -> Iterator[None]:
    """Wait until no other worker uses `state`, and hold it for the block. A worker whose server was killed may still be
    in its last step.

    Raises NotReadyError if it does not end. The kernel gives the lock back, however a process ends.
    """
    descriptor = os.open(state / "worker.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + PREDECESSOR_S
        while not platform.try_lock(descriptor):
            if heartbeat.stopping or time.monotonic() > deadline:
                raise NotReadyError(
                    f"waited for another worker on {state}, which still runs", hint="end it: see `fuser worker.lock`"
                )
            time.sleep(POLL_S)
        yield
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
