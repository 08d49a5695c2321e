"""The supervisor: keeps the worker process alive, and turns what it publishes into the active policy.

    the ledger is damaged        no worker is started any more, and no job is blamed
    worker dies                  its jobs can be leased at once; it starts again after 1, 2, 4, ... up to 60 s
    ... for want of memory       as above, in smaller passes (`ledger_attempts`)
    worker outlives its lease    it hangs: SIGKILL, then as above; unless the disk is full, so that it cannot renew
    job is published             `policies.swap(version)`, then `completed`; or `failed`, and the old version stays
    server stops                 SIGTERM (the worker saves, releases its lease and exits), SIGKILL at the deadline

The kernel ends the worker first when memory runs out, also while it still imports. The worker writes directly into
`logs/worker.log`, so that neither process waits for the other. If it dies with a job, the end of its output is kept
next to that file, so that a job that is given up because it killed its workers can say how.

At start, versions that a crash left published but not active are swapped in before the first worker runs. A job that
was running when the server was killed, or was stopped too slowly, continues, and this does not count as a failed
attempt. But a job with which the server dies repeatedly, in training or in its swap, is given up.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from groupwise.config.serve import SECRETS
from groupwise.errors import GroupwiseError, LedgerDamagedError, StorageError
from groupwise.platform import oom_kills, set_oom_score
from groupwise.server.webhooks import Webhooks
from groupwise.store import faults
from groupwise.store.ledger import Job, Ledger
from groupwise.store.ledger_attempts import Cause
from groupwise.store.ledger_schema import KEEP_SECONDS
from groupwise.store.tenants import OWNER
from groupwise.types import PolicyVersion

WORKER = "worker"  # the name under which it leases; attempts tell one process from the next
TEMPORARY = 75  # the exit code of errors that pass by themselves
LONGEST_DELAY_S = 60.0
SWAP_AGAIN_S = 5.0
JUDGE_AGAIN_S = 30.0  # after a gate whose rewards failed, say
OOM_SCORE = 500  # when memory runs out the kernel is to end the worker, not the server
MAX_LOG_BYTES = 16 << 20
LAST_LINES, LAST_BYTES = 40, 16 << 10

log = logging.getLogger(__name__)


class Swaps(Protocol):
    """The part of `Policies` that is needed here."""

    async def swap(self, version: PolicyVersion) -> object:
        """Load, verify and activate. Raises GroupwiseError, and the version that was active still is."""
        ...


class Admits(Protocol):
    """The part of `Gatekeeper` that is needed here."""

    async def decide(
        self, job: Job, version: PolicyVersion
    ) -> tuple[Literal["activate", "refused", "trial", "wait"], str]:
        """Return the decision about a published version, and its reason. Raises GroupwiseError for a temporary
        failure."""
        ...


class SwappedIn(Protocol):
    """Provides the parts of a tenant's server that the supervisor needs."""

    @property
    def policies(self) -> Swaps: ...


class HasPolicies(Protocol):
    """The part of `Tenants` that is needed here."""

    async def of(self, tenant: str) -> SwappedIn:
        """Return a tenant's."""
        ...


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """The state of the worker process. `waiting`: none runs; it is started again after a pause."""

    state: Literal["starting", "running", "waiting", "stopped"] = "starting"
    pid: int | None = None
    restarts: int = 0
    last_exit: str | None = None


def worker_command(
    *,
    state_dir: Path,
    model: str,
    dtype: str,
    device: str,
    quantization: str | None = None,
    cast_lm_head: str = "auto",
    threads: int | None = None,
    weights: Path | None = None,
    worker: str = WORKER,
) -> list[str]:
    """Return the command line of `groupwise.run.worker`, as a child of this process. `weights` is where it offers its
    own."""
    command = [sys.executable, "-m", "groupwise.run.worker", "--state", str(state_dir), "--model", model]
    command += ["--dtype", dtype, "--device", device, "--worker", worker, "--parent", str(os.getpid())]
    command += ["--cast-lm-head", cast_lm_head]
    command += [] if quantization is None else ["--quantization", quantization]
    command += [] if weights is None else ["--weights", str(weights)]
    return command if threads is None else [*command, "--threads", str(threads)]


class Supervisor:
    """Runs a worker process, restarts it, and swaps in the versions that it publishes. Call `start` and `stop` in the
    server's event loop."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        policies: Swaps,
        command: Sequence[str],
        log_path: Path,
        worker: str = WORKER,
        webhooks: Webhooks | None = None,
        first_delay_s: float = 1.0,
        poll_s: float = 0.2,
        grace_s: float = 5.0,
        swap_timeout_s: float = 120.0,
    ):
        self._ledger, self._policies, self._webhooks = ledger, policies, webhooks
        self._command, self._log_path, self._worker = list(command), log_path, worker
        self._first_delay_s, self._poll_s = first_delay_s, poll_s
        self._grace_s, self._swap_timeout_s = grace_s, swap_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._has_run = False  # a worker of this supervisor
        self._log_offset = 0  # where its words begin
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Future[None]] = []
        self._overdue_since: float | None = None
        self._swapping = asyncio.Lock()
        self._again_at: dict[str, float] = {}  # job -> when its swap, which failed for a passing reason, is tried again
        self._status = WorkerStatus()
        self.gate: Admits | None = None  # decides which of the owner's versions are swapped in; None: all of them
        self.tenants: HasPolicies | None = None

    @property
    def status(self) -> WorkerStatus:
        return self._status

    def last_words(self, job_id: str) -> str | None:
        """Return the end of what the worker said before it died with this job, if it did."""
        with suppress(OSError):
            return self._words_path(job_id).read_text(encoding="utf-8")
        return None

    async def start(self) -> None:
        """Finish what was published, then watch. Returns when the worker has been started, not when it has loaded."""
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        for words in self._log_path.parent.glob("died-with-*.log"):
            if words.stat().st_mtime < time.time() - KEEP_SECONDS:  # the job is forgotten by now
                words.unlink(missing_ok=True)
        await _guarded(self._finish_tenants)
        await _guarded(self._finish_owners)
        await _guarded(self._clean)
        self._tasks = [
            asyncio.ensure_future(self._keep_worker()),
            asyncio.ensure_future(_every(self._poll_s, self._finish_owners)),
            asyncio.ensure_future(_every(self._poll_s, self._finish_tenants)),
            asyncio.ensure_future(_every(5 * self._poll_s, self._kill_overdue)),
            asyncio.ensure_future(_every(5 * self._poll_s, self._bound_log)),
        ]
        if self._webhooks is not None:
            self._tasks.append(asyncio.ensure_future(self._webhooks.run()))

    async def _clean(self) -> None:
        await asyncio.to_thread(self._ledger.recover)

    async def stop(self, *, timeout_s: float = 30.0) -> None:
        """Stop watching and swapping; end the worker in order, or by force after `timeout_s`."""
        self._stopping.set()
        for task in self._tasks[1:]:
            task.cancel()
        self._signal(signal.SIGTERM)
        if self._tasks:
            await asyncio.wait(self._tasks[:1], timeout=timeout_s)
            self._signal(signal.SIGKILL)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._status = replace(self._status, state="stopped", pid=None)

    # --- the worker process ---

    async def _keep_worker(self) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            try:
                last_exit = await self._run_worker()
            except GroupwiseError as error:  # its end could not be recorded: a full disk, a damaged ledger
                last_exit = error.message
            except Exception as error:  # it could not even be started
                log.exception("the worker process")
                last_exit = str(error)
            if self._stopping.is_set():
                return
            if (damage := self._ledger.damage) is not None:
                log.critical("no job is trained until the ledger is repaired: %s", damage)
                self._status = replace(self._status, state="waiting", pid=None, last_exit="the ledger is damaged")
                await self._stopping.wait()
                return
            failures = 1 if time.monotonic() - began > LONGEST_DELAY_S else failures + 1
            delay = min(LONGEST_DELAY_S, self._first_delay_s * 2 ** min(failures - 1, 30))
            log.error("the worker ended (%s); it starts again in %g s; see %s", last_exit, delay, self._log_path)
            restarts = self._status.restarts + 1
            self._status = WorkerStatus(state="waiting", restarts=restarts, last_exit=last_exit)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
                return

    async def _run_worker(self) -> str:
        """Start the worker and wait for its end; returns how it ended. Its jobs can then be leased again."""
        # the new worker begins without a lease; a job that one is held for was left by a server that died
        await self._take_back("", Cause.CRASH if self._has_run else Cause.SERVER)
        environment = {name: value for name, value in os.environ.items() if name not in SECRETS.values()}
        with self._log_path.open("ab") as output:
            self._log_offset = output.tell()
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                process_group=0,  # Ctrl-C in the server's terminal is the server's
            )
        set_oom_score(OOM_SCORE, process.pid)  # now: the worker's imports take seconds, and much of the memory
        self._process, self._has_run, kills = process, True, oom_kills()
        self._status = replace(self._status, state="running", pid=process.pid)
        if self._stopping.is_set():  # while it was being started
            self._signal(signal.SIGTERM)
        code = await process.wait()
        self._process = None
        if code == LedgerDamagedError.exit_code:
            await asyncio.to_thread(self._ledger.verify)
        cause = Cause.MEMORY if code == -signal.SIGKILL and oom_kills() > kills else Cause.CRASH
        cause = Cause.STOP if self._stopping.is_set() else cause
        await self._take_back(_tail(self._log_path, self._log_offset), cause)
        return _ending(code, cause)

    async def _take_back(self, words: str, cause: Cause) -> None:
        """Make the jobs of a dead worker available for another lease. `words` is the end of its output."""
        for job_id in await asyncio.to_thread(self._ledger.expire, self._worker, cause=cause):
            log.warning("a worker ended with job %s in its hands (%s)", job_id, cause)
            if words and cause in (Cause.CRASH, Cause.MEMORY):
                self._words_path(job_id).write_text(words, encoding="utf-8")

    async def _kill_overdue(self) -> None:
        """Kill a worker that lives but let its lease expire: it hangs. Not at once: perhaps the whole machine slept,
        and the worker is about to renew. Nor while nothing can be written: then no worker can renew."""
        if self._process is None or not await asyncio.to_thread(self._ledger.overdue, self._worker):
            self._overdue_since = None
        elif self._overdue_since is None:
            self._overdue_since = time.monotonic()
        elif time.monotonic() - self._overdue_since >= self._grace_s:
            self._overdue_since = None
            await self._take_back(_tail(self._log_path, self._log_offset), Cause.CRASH)
            log.error("the worker has let its lease expire; it hangs and is killed")
            self._signal(signal.SIGKILL)

    async def _bound_log(self) -> None:
        await asyncio.to_thread(self._empty_log)

    def _empty_log(self) -> None:
        """Move what a log of more than MAX_LOG_BYTES holds next to it. The worker has it open to append, and goes on at
        its beginning."""
        if self._log_path.exists() and self._log_path.stat().st_size > MAX_LOG_BYTES:
            with suppress(OSError):  # the disk is full, and has more room without
                shutil.copyfile(self._log_path, self._log_path.with_suffix(".log.1"))
            os.truncate(self._log_path, 0)
            self._log_offset = 0

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _words_path(self, job_id: str) -> Path:
        return self._log_path.parent / f"died-with-{job_id}.log"

    # --- swaps ---

    async def _finish_owners(self) -> None:
        await self._finish_published(lambda job: job.tenant == OWNER)

    async def _finish_tenants(self) -> None:
        """Finish those of tenants, which no gate judges: the owner's may be judged for minutes meanwhile."""
        await self._finish_published(lambda job: job.tenant != OWNER)

    async def _finish_published(self, wanted: Callable[[Job], bool]) -> None:
        for job in filter(wanted, await asyncio.to_thread(self._ledger.published_jobs)):
            if self._again_at.get(job.id, 0.0) <= time.monotonic():
                await self._finish(job)

    async def _admitted(self, job: Job) -> bool:
        """Return whether the job's version is to be swapped in now; the gate's other decisions are carried out here."""
        if self.gate is None or job.tenant != OWNER:
            return True
        version = PolicyVersion.parse(str(job.version))
        try:
            decision, why = await self.gate.decide(job, version)
        except (GroupwiseError, TimeoutError) as error:
            log.warning("%s of job %s is not judged yet (%s); it is tried again", version, job.id, error)
            self._again_at[job.id] = time.monotonic() + JUDGE_AGAIN_S
            return False
        if decision == "refused":
            await asyncio.to_thread(self._ledger.refuse_version, job.id, why)
        elif decision == "trial":
            await asyncio.to_thread(self._ledger.complete, job.id, message=f"{version} {why}")
        elif decision == "wait":
            self._again_at[job.id] = time.monotonic() + SWAP_AGAIN_S
        return decision == "activate"

    async def _finish(self, job: Job) -> None:
        """Activate what `job` published and complete it, or refuse it with the reason. A swap in which the server dies
        has been begun and not ended, which the ledger counts: one at a time, so that none is blamed for another."""
        if not await self._admitted(job):
            return
        async with self._swapping:
            await self._finish_admitted(job)

    async def _finish_admitted(self, job: Job) -> None:
        if not await asyncio.to_thread(self._ledger.begin_swap, job.id):
            log.error("job %s is given up: servers died in its swap", job.id)
            return
        ended = False
        try:
            ended = await self._end(job)
        finally:
            if not ended:
                with suppress(GroupwiseError):
                    self._ledger.put_off_swap(job.id)

    async def _end(self, job: Job) -> bool:
        """Return whether the swap ended, well or not; it is tried again if it did not."""
        version = PolicyVersion.parse(str(job.version))
        faults.point("swap:before-load")
        try:
            error = await self._swap(job, version)
        except (GroupwiseError, TimeoutError) as temporary:  # a full disk, a busy server: the version does not spoil
            log.warning("%s of job %s is not active yet (%s); it is tried again", version, job.id, temporary)
            self._again_at[job.id] = time.monotonic() + SWAP_AGAIN_S
            return False
        if error is None:
            await asyncio.to_thread(self._ledger.complete, job.id, message=f"{version} is active")
        else:
            log.error("%s of job %s was refused: %s", version, job.id, error.message)
            await asyncio.to_thread(self._ledger.refuse_swap, job.id, error.as_dict())
        self._again_at.pop(job.id, None)
        return True

    async def _swap(self, job: Job, version: PolicyVersion) -> GroupwiseError | None:
        """None if `version` is active now, else why it will not be. Raises what passes by itself."""
        try:
            async with asyncio.timeout(self._swap_timeout_s):
                policies = self._policies
                if job.tenant != OWNER and self.tenants is not None:
                    policies = (await self.tenants.of(job.tenant)).policies
                await policies.swap(version)
        except TimeoutError:  # it may be active a moment later, so that it must not be called refused
            raise TimeoutError(f"the swap took more than {self._swap_timeout_s:g} s") from None
        except GroupwiseError as error:
            if error.exit_code == TEMPORARY or isinstance(error, StorageError):  # the version does not spoil
                raise
            return error
        except Exception:
            log.exception("the swap to %s failed", version)
            return GroupwiseError(f"{version} was not activated: internal error", hint="see the server's log")
        return None


async def _every(seconds: float, work: Callable[[], Awaitable[None]]) -> None:
    """Do `work` again and again; one that fails is logged and tried again, more and more slowly."""
    delay = seconds
    while True:
        await asyncio.sleep(delay)
        delay = seconds if await _guarded(work) else min(LONGEST_DELAY_S, 2 * delay)


async def _guarded(work: Callable[[], Awaitable[None]]) -> bool:
    try:
        await work()
    except GroupwiseError as error:
        log.error("%s failed: %s", getattr(work, "__name__", work), error)
        return False
    except Exception:
        log.exception("%s failed", getattr(work, "__name__", work))
        return False
    return True


def _tail(path: Path, offset: int) -> str:
    """Return the last lines of what was written to `path` behind `offset`."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(offset, size - LAST_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    return "\n".join(text.splitlines()[-LAST_LINES:])


def _ending(code: int, cause: Cause) -> str:
    if code >= 0:
        return f"exit status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"{name}, for want of memory" if cause is Cause.MEMORY else name
