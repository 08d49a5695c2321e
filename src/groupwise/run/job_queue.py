"""The jobs of a ledger: how each of them can end, how many are trained at once, and the leases that are renewed.

    published          the server swaps the version in and completes the job
    it cannot be done  failed, with code, message and hint; the next job is taken
    cancelled          within a step
    SIGTERM            finish the step, checkpoint, give the job back
    its share is used  the same, and the job whose turn it is begins (`ledger_turns`)
    a damaged ledger   the process ends; the job is left as it is
    a full disk        give the job back and try again later, a number of times
    out of memory      again from its checkpoint: first without other jobs, then with half the tokens in a pass, until
                       a pass is a single sample
    a lost GPU         the process ends, which counts as the next
    killed, crashed    the supervisor, or the end of the lease, has the job leased again; it goes on from its checkpoint
    lease lost         another worker has the job: stop, write nothing

`Worker` trains the jobs, each in its own thread; `job_room` says how many at once. `LeaseHeartbeat` is a further
thread, which renews the leases and ends the process when its parent is gone. `worker.py` is the process of these
threads. The end of one job does not affect another, unless the process ends.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
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
    StorageError,
    TryAgainError,
)
from groupwise.model.load import LoadedModel, load_model, resolve_device, resolve_dtype
from groupwise.model.lost_device import lost_device
from groupwise.platform import trim_memory
from groupwise.run.job import JobCancelled, WorkerContext, is_memory, run_job
from groupwise.run.job_room import MOST_AT_ONCE, JobRoom
from groupwise.store.cuda_ipc import attach_weights
from groupwise.store.job_checkpoint import Checkpoints
from groupwise.store.ledger import Ledger
from groupwise.store.ledger_schema import Lease
from groupwise.store.ledger_turns import makes_way

BEAT_S = 1.0  # of the thread
LEASE_S = 30.0
RENEW_S = 5.0
POLL_S = 0.2  # between two looks into an empty queue
PARENT_GRACE_S = 10.0  # for the step that is being done when the parent dies; none over the parent's own memory
PAUSE_S = 30.0  # after the disk was full
MAX_PAUSES = 20  # of one job
AT_LEAST_S = 30.0  # that a job is trained before it makes way: saving it and taking it again are not free

log = logging.getLogger(__name__)


@dataclass(eq=False)
class HeldLease:
    """Holds a lease that is being renewed. `lost` is set once another worker has the job; `beside` is the largest
    number of other jobs held at the same time; `makes_way` asks for a checkpoint and a return to the queue, because the
    job has used its share."""

    lease: Lease
    lost: LeaseLostError | None = None
    beside: int = 0
    makes_way: bool = False
    since: float = field(default_factory=time.monotonic)


class LeaseHeartbeat:
    """A thread that renews the leases of the jobs at hand and ends the process when its parent is gone."""

    def __init__(self, ledger: Ledger, *, parent: int | None = None):
        self.stopping = False
        self.patience_s = PARENT_GRACE_S
        self._ledger, self._parent = ledger, parent
        self._held: list[HeldLease] = []
        self._changing = threading.Lock()
        self._orphan_since: float | None = None
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, *_: object) -> None:
        """Ask for an orderly end; a signal handler."""
        self.stopping = True

    @contextmanager
    def holding(self, lease: Lease) -> Iterator[HeldLease]:
        """Renew the lease during the block."""
        mine = HeldLease(lease)
        with self._changing:
            self._held = [*self._held, mine]
            for each in self._held:
                each.beside = max(each.beside, len(self._held) - 1)
        try:
            yield mine
        finally:
            with self._changing:
                self._held = [each for each in self._held if each is not mine]

    @property
    def orphaned(self) -> bool:
        """Return whether the parent is gone."""
        return self._parent is not None and os.getppid() != self._parent

    def raise_if_stopped(self, held: HeldLease) -> None:
        """Raise what is to end the job: LeaseLostError, JobCancelled or Interrupted."""
        if held.lost is not None:
            raise held.lost
        if self._ledger.job(held.lease.job.id).cancel_requested:
            raise JobCancelled
        if self.stopping or held.makes_way:
            raise Interrupted("the worker was asked to stop, or the job to make way")

    def make_way(self, job: str) -> None:
        """Have a job saved and wait, unless it was taken just now, or another one is being saved."""
        if not any(each.makes_way for each in self._held):
            for each in self._held:
                each.makes_way = each.lease.job.id == job and time.monotonic() - each.since >= AT_LEAST_S

    def _beat(self) -> None:
        renewed_at, fails = 0.0, False
        while True:
            time.sleep(BEAT_S)
            self._mind_parent()
            if not self._held or time.monotonic() - renewed_at < RENEW_S:
                continue
            try:
                for held in self._held:
                    self._renew(held)
                renewed_at, fails = time.monotonic(), False
            except Exception:  # the disk is full, say; it may be over before the supervisor loses its patience
                if not fails:
                    log.exception("the leases cannot be renewed yet")
                fails = True

    def _renew(self, held: HeldLease) -> None:
        try:
            self._ledger.renew(held.lease, seconds=LEASE_S)
        except LeaseLostError as error:
            held.lost = error

    def _mind_parent(self) -> None:
        if not self.orphaned:
            return
        self._orphan_since = self._orphan_since or time.monotonic()
        self.stopping = True
        if time.monotonic() - self._orphan_since >= self.patience_s:
            log.error("the parent process is gone; the jobs go on from their last checkpoints another time")
            os._exit(1)


class Worker:
    """Does the jobs of one ledger."""

    def __init__(self, place: WorkerContext, heartbeat: LeaseHeartbeat, *, name: str):
        self._place, self._heartbeat, self._name = place, heartbeat, name
        self._room = JobRoom(place.base, place.ledger)
        self._pauses: Counter[str] = Counter()
        self._places, self._opening = dict[str, WorkerContext](), threading.Lock()
        self._rests_until = 0.0  # after the disk was full: until then no job is taken

    def serve(self) -> None:
        """Lease and do jobs until the heartbeat is stopped. What ends the process in one of them lets the others save
        and give their jobs back."""
        threads = torch.get_num_threads()
        pool = ThreadPoolExecutor(MOST_AT_ONCE, "job", initializer=torch.set_num_threads, initargs=(threads,))
        doing: set[Future[None]] = set()
        with pool:
            try:
                while not self._heartbeat.stopping:
                    for each in [each for each in doing if each.done()]:
                        doing.remove(each)
                        each.result()
                    if (lease := self._lease()) is not None:
                        doing.add(pool.submit(self._do_in_thread, lease))
                    elif doing:
                        self._have_way_made()
                        wait(doing, POLL_S, FIRST_COMPLETED)
                    else:
                        self._rest(POLL_S)
            finally:
                self._heartbeat.stop()
        for each in doing:
            each.result()

    def _lease(self) -> Lease | None:
        if time.monotonic() < self._rests_until:
            return None
        try:
            return self._place.ledger.lease(self._name, seconds=LEASE_S, admits=self._room.admits)
        except (StorageError, TryAgainError):
            log.exception("the queue cannot be read")
            self._rest(PAUSE_S)
            return None

    def _have_way_made(self) -> None:
        """Have the job that is too far ahead of one that waits for want of room make way for it."""
        if time.monotonic() < self._rests_until:
            return
        with suppress(StorageError, TryAgainError):
            waiting, running = self._place.ledger.standings()
            if waiting is not None and (first := makes_way(waiting, running)) is not None:
                self._heartbeat.make_way(first.job)

    def _do_in_thread(self, lease: Lease) -> None:
        self.do(lease)
        _free_memory()

    def do(self, lease: Lease) -> None:
        """Do one job and record how it ended."""
        log.info("job %s: attempt %d begins (%s)", lease.job.id, lease.attempt, lease.job.adapter)
        try:
            with self._heartbeat.holding(lease) as held:
                self._do(held)
        except LeaseLostError as error:
            log.warning("job %s: %s", lease.job.id, error.message)

    def _do(self, held: HeldLease) -> None:
        smaller: Lease | None = held.lease
        while smaller is not None:
            smaller = self._attempt(smaller, held)

    def _attempt(self, lease: Lease, held: HeldLease) -> Lease | None:
        """Run the job once; return the lease to continue with if memory ran out and the job's passes can be smaller."""
        ledger = self._place.ledger
        try:
            place, stops = self._place_of(lease.job.tenant), self._heartbeat.raise_if_stopped
            version = run_job(lease, place, raise_if_stopped=lambda: stops(held))
            log.info("job %s: published %s", lease.job.id, version)
        except LeaseLostError:
            raise
        except JobCancelled:
            log.info("job %s: cancelled", lease.job.id)
            self._record(lambda: ledger.cancelled(lease))
            Checkpoints(self._place.state_dir, lease.job.id).discard()
        except Interrupted:
            log.info("job %s: given back", lease.job.id)
            how = {"orphaned": self._heartbeat.orphaned, "made_way": held.makes_way and not self._heartbeat.stopping}
            self._record(lambda: ledger.release(lease, beside=held.beside, **how))
        except LedgerDamagedError:  # no fault of the job's
            raise
        except (StorageError, TryAgainError) as error:
            self._pause(lease, error)
        except Exception as error:
            if (lost := lost_device(error, self._place.base.device)) is not None:  # as if the process had died
                log.error("job %s: %s", lease.job.id, lost, exc_info=error)
                raise SystemExit(lost.exit_code) from error
            if is_memory(error) and held.beside:
                self._put_aside(lease, error)
                return None
            if is_memory(error) and (smaller := self._shrink(lease, error)):
                return smaller
            log.error("job %s failed: %s", lease.job.id, error, exc_info=not isinstance(error, GroupwiseError))
            self._fail(lease, error)

    def _place_of(self, tenant: str) -> WorkerContext:
        """Return a tenant's place. Its adapters are looked through once, however many jobs it has."""
        with self._opening:
            if tenant not in self._places:
                self._places[tenant] = self._place.of(tenant)
            return self._places[tenant]

    def _put_aside(self, lease: Lease, error: Exception) -> None:
        """Return the job to the queue, to continue alone: memory ran out while other jobs ran, which may have taken
        it."""
        log.warning("job %s: memory ran out beside others: %s", lease.job.id, error)
        traceback.clear_frames(error.__traceback__)
        reason = describe(error)["message"] or ""
        self._record(lambda: self._place.ledger.put_aside(lease, reason))

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
        """Give the job back, and take none for a while: for what passes by itself."""
        ledger, id = self._place.ledger, lease.job.id
        self._pauses[id] += 1
        log.warning("job %s is paused: %s", id, error)
        if self._pauses[id] > MAX_PAUSES:
            return self._fail(lease, error)
        with suppress(StorageError, TryAgainError):
            message = f"paused ({error.code}): {error.message}; the job is tried again in {PAUSE_S:.0f} s"
            ledger.progress(lease, phase=ledger.job(id).phase, message=message)
        self._rests_until = time.monotonic() + PAUSE_S
        self._record(lambda: ledger.release(lease))

    def _record(self, act: Callable[[], None]) -> None:
        """Write the end of a job into the ledger, as soon as the disk takes it."""
        while True:
            try:
                return act()
            except (StorageError, TryAgainError):
                log.exception("the end of a job cannot be recorded yet")
                if self._heartbeat.stopping:  # the lease ends by itself
                    return
                self._rest(PAUSE_S)

    def _rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._heartbeat.stopping and time.monotonic() < until:
            time.sleep(min(POLL_S, seconds))


def _free_memory() -> None:
    gc.collect()  # module trees refer to themselves
    trim_memory()
    if torch.cuda.is_available():  # gpu-only: what a failed pass had goes back
        torch.cuda.empty_cache()


def describe(error: Exception) -> dict[str, str | None]:
    """Return {"code", "message", "hint"} of the error that ended a job, in the words of a request."""
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


def load_base(
    model: str,
    *,
    dtype: str,
    device: str,
    weights: Path | None,
    owner: int,
    quantization: str | None = None,
    cast_lm_head: str = "auto",
) -> tuple[LoadedModel, bool]:
    """Return the base model, and whether its weights are those that process `owner` offers at `weights`
    (`store.mapped_weights`).

    They are on a GPU, where the offer can be taken; otherwise this process loads weights of its own.
    """
    place = resolve_device(device)
    if weights is not None and place.type == "cuda":  # gpu-only: a worker over the server's weights (CUDA IPC)
        try:
            kind = str(resolve_dtype(dtype, place)).removeprefix("torch.")
            base = load_model(model, device="cpu", dtype=kind, quantization=quantization, cast_lm_head=cast_lm_head)
            attach_weights(base, weights, parent=owner)
        except ModelError as error:
            log.warning("%s; this process has a copy of its own on the GPU", error.message)
        else:
            return base, True
    base = load_model(model, device=device, dtype=dtype, quantization=quantization, cast_lm_head=cast_lm_head)
    return base, False
