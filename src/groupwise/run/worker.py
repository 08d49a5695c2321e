"""The worker: a process that trains one leased job after another, beside the server and below its priority.

    python -m groupwise.run.worker --state DIR --model NAME --dtype D --device D [--threads N] [--worker ID]

It loads the model once, then leases, trains, publishes. A thread renews the lease. How a job can end:

    published          the server swaps the version in and completes the job
    it cannot be done  failed, with code, message and hint; the next job is taken
    cancelled          within a step
    SIGTERM            finish the step, checkpoint, give the job back, exit 0
    a damaged ledger   exit; the job is left as it is
    a full disk        give the job back and try again later, a number of times
    out of memory      again from its checkpoint with half the tokens in a pass, until one sample alone is a pass
    killed, crashed    the supervisor, or the end of the lease, has the job leased again; it goes on from its checkpoint
    lease lost         another worker has the job: stop, write nothing

The process ends with its parent: the kernel sends SIGTERM, and if that is not enough the thread ends it; at once, by
SIGKILL, where it works in the parent's own memory (`model_ipc`). The worker of the next server waits for that: two at a
time would move each other's checkpoints.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from groupwise.config.job import job_name
from groupwise.errors import (
    FieldError,
    GroupwiseError,
    Interrupted,
    LeaseLostError,
    LedgerDamagedError,
    ModelError,
    NotReadyError,
    StorageError,
    TryAgainError,
)
from groupwise.model.load import LoadedModel, load_model, resolve_device, resolve_dtype
from groupwise.run.job import JobCancelled, Workplace, run_job
from groupwise.store import files
from groupwise.store.adapters import AdapterStore
from groupwise.store.checkpoint import Checkpoints
from groupwise.store.ledger import Ledger
from groupwise.store.ledger_schema import Lease
from groupwise.store.share import attach_weights, map_weights

BEAT_S = 1.0  # of the thread
LEASE_S = 30.0
RENEW_S = 5.0
POLL_S = 0.2  # between two looks into an empty queue
PARENT_GRACE_S = 10.0  # for the step that is being done when the parent dies; none over the parent's own memory
PREDECESSOR_S = 15.0  # how long to wait for a worker whose parent died
PAUSE_S = 30.0  # after the disk was full
MAX_PAUSES = 20  # of one job
NICENESS = 10

_PR_SET_PDEATHSIG = 1
_NO_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")

log = logging.getLogger(__name__)


class Pulse:
    """A thread that renews the lease of the job at hand and ends the process when its parent is gone."""

    def __init__(self, ledger: Ledger, *, parent: int | None = None):
        self.stopping = False
        self.patience_s = PARENT_GRACE_S
        self._ledger, self._parent = ledger, parent
        self._lease: Lease | None = None
        self._lost: LeaseLostError | None = None
        self._orphan_since: float | None = None
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, *_: object) -> None:
        """Ask for an orderly end; a signal handler."""
        self.stopping = True

    @contextmanager
    def holding(self, lease: Lease) -> Iterator[None]:
        """Within: the lease is renewed."""
        self._lost, self._lease = None, lease
        try:
            yield
        finally:
            self._lease = None

    @property
    def orphaned(self) -> bool:
        """Whether the parent is gone."""
        return self._parent is not None and os.getppid() != self._parent

    def attend(self) -> None:
        """Raise what is to end the job at hand: LeaseLostError, JobCancelled or Interrupted."""
        lease = self._lease
        assert lease is not None
        if self._lost is not None:
            raise self._lost
        if self._ledger.job(lease.job.id).cancel_requested:
            raise JobCancelled
        if self.stopping:
            raise Interrupted("the worker was asked to stop")

    def _beat(self) -> None:
        renewed_at, fails = 0.0, False
        while True:
            time.sleep(BEAT_S)
            self._mind_parent()
            if (lease := self._lease) is None or time.monotonic() - renewed_at < RENEW_S:
                continue
            try:
                self._ledger.renew(lease, seconds=LEASE_S)
                renewed_at, fails = time.monotonic(), False
            except LeaseLostError as error:
                if self._lease is lease:
                    self._lost = error
            except Exception:  # the disk is full, say; it may be over before the supervisor loses its patience
                if not fails:
                    log.exception("the lease cannot be renewed yet")
                fails = True

    def _mind_parent(self) -> None:
        if not self.orphaned:
            return
        self._orphan_since = self._orphan_since or time.monotonic()
        self.stopping = True
        if time.monotonic() - self._orphan_since >= self.patience_s:
            log.error("the parent process is gone; the job goes on from its last checkpoint another time")
            os._exit(1)


class Worker:
    """Does the jobs of one ledger."""

    def __init__(self, place: Workplace, pulse: Pulse, *, name: str):
        self._place, self._pulse, self._name = place, pulse, name
        self._pauses: Counter[str] = Counter()

    def serve(self) -> None:
        """Lease and do jobs until the pulse is stopped."""
        while not self._pulse.stopping:
            try:
                lease = self._place.ledger.lease(self._name, seconds=LEASE_S)
            except (StorageError, TryAgainError):
                log.exception("the queue cannot be read")
                self._rest(PAUSE_S)
                continue
            if lease is None:
                self._rest(POLL_S)
            else:
                self.do(lease)
                _free_memory()

    def do(self, lease: Lease) -> None:
        """Do one job and record how it ended."""
        log.info("job %s: attempt %d begins (%s)", lease.job.id, lease.attempt, lease.job.adapter)
        try:
            with self._pulse.holding(lease):
                self._do(lease)
        except LeaseLostError as error:
            log.warning("job %s: %s", lease.job.id, error.message)

    def _do(self, lease: Lease) -> None:
        smaller: Lease | None = lease
        while smaller is not None:
            smaller = self._attempt(smaller)

    def _attempt(self, lease: Lease) -> Lease | None:
        """One run at the job; the lease to go on with if memory ran out and the job's passes can be smaller."""
        ledger = self._place.ledger
        try:
            version = run_job(lease, self._place, attend=self._pulse.attend)
            log.info("job %s: published %s", lease.job.id, version)
        except LeaseLostError:
            raise
        except JobCancelled:
            log.info("job %s: cancelled", lease.job.id)
            self._record(lambda: ledger.cancelled(lease))
            Checkpoints(self._place.state_dir, lease.job.id).discard()
        except Interrupted:
            log.info("job %s: given back", lease.job.id)
            self._record(lambda: ledger.release(lease, orphaned=self._pulse.orphaned))
        except LedgerDamagedError:  # no fault of the job's
            raise
        except (StorageError, TryAgainError) as error:
            self._pause(lease, error)
        except Exception as error:
            if is_memory(error) and (smaller := self._shrink(lease, error)):
                return smaller
            log.error("job %s failed: %s", lease.job.id, error, exc_info=not isinstance(error, GroupwiseError))
            self._fail(lease, error)
            if "CUDA error" in str(error):  # after one of those every further call fails: a new process is needed
                raise SystemExit(1) from error

    def _shrink(self, lease: Lease, error: Exception) -> Lease | None:
        log.warning("job %s: memory ran out: %s", lease.job.id, error)
        traceback.clear_frames(error.__traceback__)  # which hold what did not fit
        _free_memory()
        try:
            job = self._place.ledger.shrink(lease, describe(error)["message"] or "")
        except (StorageError, TryAgainError):
            return None
        return None if job is None else replace(lease, job=job)

    def _fail(self, lease: Lease, error: Exception) -> None:
        reason = describe(error)
        self._record(lambda: self._place.ledger.fail(lease, reason))
        Checkpoints(self._place.state_dir, lease.job.id).discard()

    def _pause(self, lease: Lease, error: GroupwiseError) -> None:
        """Give the job back and wait, for what passes by itself."""
        ledger, id = self._place.ledger, lease.job.id
        self._pauses[id] += 1
        log.warning("job %s is paused: %s", id, error)
        if self._pauses[id] > MAX_PAUSES:
            return self._fail(lease, error)
        with suppress(StorageError, TryAgainError):
            message = f"paused ({error.code}): {error.message}; the job is tried again in {PAUSE_S:.0f} s"
            ledger.progress(lease, phase=ledger.job(id).phase, message=message)
        self._record(lambda: ledger.release(lease))
        self._rest(PAUSE_S)

    def _record(self, act: Callable[[], None]) -> None:
        """Write the end of a job into the ledger, as soon as the disk takes it."""
        while True:
            try:
                return act()
            except (StorageError, TryAgainError):
                log.exception("the end of a job cannot be recorded yet")
                if self._pulse.stopping:  # the lease ends by itself
                    return
                self._rest(PAUSE_S)

    def _rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._pulse.stopping and time.monotonic() < until:
            time.sleep(min(POLL_S, seconds))


def is_memory(error: Exception) -> bool:
    """Whether memory ran out."""
    said = isinstance(error, RuntimeError) and any(each in str(error) for each in _NO_MEMORY)
    return said or isinstance(error, MemoryError | torch.OutOfMemoryError)


def _free_memory() -> None:
    gc.collect()  # module trees refer to themselves
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def describe(error: Exception) -> dict[str, str | None]:
    """{"code", "message", "hint"} of what ended a job, in the words of a request."""
    text = str(error).strip().splitlines()
    first = text[0] if text else type(error).__name__
    if isinstance(error, GroupwiseError):
        if isinstance(error, FieldError) and error.field is not None:
            error = error.renamed(job_name(error.field))
        return {"code": error.code, "message": error.message, "hint": error.hint}
    if is_memory(error):
        hint = (
            "passes were made as small as they can be: set gradient_checkpointing, post shorter completions, or lower "
        )
        hint += "lora_rank"
        return {"code": "out_of_memory", "message": f"memory ran out: {first}", "hint": hint}
    hint = "this is a bug; logs/worker.log has the traceback"
    return {"code": "internal_error", "message": f"{type(error).__name__}: {first}", "hint": hint}


# --- the process ---


def main(arguments: Sequence[str] | None = None) -> int:
    """Work until SIGTERM, or until the parent is gone. Returns the exit status."""
    options = _options(arguments)
    if not (parent := _die_with_parent(options.parent)):
        return 0
    with suppress(OSError):
        os.nice(NICENESS)  # the server first
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        _work(options, parent)
    except GroupwiseError as error:
        log.error("%s", error)
        return error.exit_code
    return 0


def _work(options: argparse.Namespace, parent: int) -> None:
    state: Path = options.state
    with closing(Ledger(state / "ledger.db")) as ledger:
        pulse = Pulse(ledger, parent=parent)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, pulse.stop)
        pulse.start()
        store = AdapterStore(state / "adapters")
        for warning in store.warnings:
            log.warning("%s", warning)
        base = _load(options, pulse, parent)
        with _alone(state, pulse):
            files.sweep(state)  # weights that another worker died writing
            map_weights(base, state)
            gc.freeze()  # what is here now stays; looking through it after each job would take a second
            log.info("%s is ready: %s on %s", options.worker, base.name, base.device)
            place = Workplace(base=base, ledger=ledger, store=store, state_dir=state)
            Worker(place, pulse, name=options.worker).serve()


def _load(options: argparse.Namespace, pulse: Pulse, parent: int) -> LoadedModel:
    """The base model: on a GPU over the server's weights where it offers them, else with weights of its own."""
    device = resolve_device(options.device)
    if options.weights is not None and device.type == "cuda":
        try:
            dtype = str(resolve_dtype(options.dtype, device)).removeprefix("torch.")
            base = load_model(options.model, device="cpu", dtype=dtype)
            attach_weights(base, options.weights, parent=parent)
        except ModelError as error:
            log.warning("%s; this process has a copy of its own on the GPU", error.message)
        else:
            pulse.patience_s = 0.0  # the memory is the parent's
            _die_with_parent(parent, by=signal.SIGKILL)
            return base
    return load_model(options.model, device=options.device, dtype=options.dtype)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m groupwise.run.worker", description="Train the jobs of a server.")
    parser.add_argument("--state", type=Path, required=True, help="the server's state directory")
    parser.add_argument("--model", required=True, help="'starter', a directory or a Hugging Face name")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--weights", type=Path, help="where the parent offers its base weights")
    parser.add_argument("--threads", type=int, help="of torch; its own choice without")
    parser.add_argument("--worker", default="worker", help="the name to lease under")
    parser.add_argument("--parent", type=int, help="the process to end with; the one that started this without")
    return parser.parse_args(arguments)


def _die_with_parent(parent: int | None, *, by: signal.Signals = signal.SIGTERM) -> int | None:
    """Ask the kernel (Linux) for a signal when the parent dies; returns the parent, for kernels that do not tell.

    None if it is gone already: it died while this process was still importing.
    """
    parent = parent or os.getppid()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
    return parent if os.getppid() == parent else None


@contextmanager
def _alone(state: Path, pulse: Pulse) -> Iterator[None]:
    """Within: no other worker is on `state`. One whose server was killed may still be in its last step.

    Raises NotReadyError if it does not end. The kernel gives the lock back, however a process ends.
    """
    descriptor = os.open(state / "worker.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + PREDECESSOR_S
        while not files.try_lock(descriptor):
            if pulse.stopping or time.monotonic() > deadline:
                raise NotReadyError(
                    f"waited for another worker on {state}, which still runs", hint="end it: see `fuser worker.lock`"
                )
            time.sleep(POLL_S)
        yield
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
