"""The supervisor with real processes and a real ledger: what dies comes back, what is published becomes active."""

import asyncio
import json
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch

from groupwise import platform
from groupwise.config.job import GrpoJobConfig
from groupwise.engine.local import LocalEngine
from groupwise.errors import NotReadyError, StorageError, SwapRefusedError
from groupwise.model.load import LoadedModel, load_model
from groupwise.server import supervisor
from groupwise.server.policies import Policies
from groupwise.server.schema_train import GrpoRequest, ScoredCompletion, ScoredGroup
from groupwise.server.submit import prepare_grpo
from groupwise.server.supervisor import LAST_LINES, OOM_SCORE, WORKER, Supervisor, worker_command
from groupwise.store.adapters import AdapterStore
from groupwise.store.files import Provenance
from groupwise.store.ledger import JobState, Ledger
from groupwise.store.ledger_attempts import MAX_SERVER_DEATHS
from groupwise.store.tenants import OWNER
from groupwise.tasks.dialects.chat_form import ChatMessage
from groupwise.types import PolicyVersion
from wording import wording

# Workers: processes that lease from the same ledger as `groupwise.run.worker` does.
PREAMBLE = """
import os, signal, sys, time
from pathlib import Path
from groupwise.store.ledger import Ledger
state = Path({state!r})
ledger = Ledger(state / "ledger.db")
(state / f"started-{{os.getpid()}}").touch()
def lease(seconds=3600):
    while (found := ledger.lease("worker", seconds=seconds)) is None:
        time.sleep(0.01)
    return found
"""
ORDERLY = """
held = lease()
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
while not stop:
    time.sleep(0.01)
ledger.release(held)
"""
POISONED = """
held = lease()
print("\\n".join(f"line {i}" for i in range(100)), file=sys.stderr, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
STARVED = """
held = lease()
if held.job.micro_tokens == 100:
    ledger.published(held, "math@1")
    time.sleep(60)
ledger.measured(held, largest=held.job.micro_tokens or 800, longest=100)
counts = state / "vmstat"
head, count, tail = counts.read_text().splitlines()
counts.write_text(f"{head}\\noom_kill {int(count.split()[1]) + 1}\\n{tail}\\n")
print("dying", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
HANGING = """
held = lease(seconds=0.2)
if held.attempt == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
ledger.published(held, "math@1")
time.sleep(60)
"""
STARVING = """
held = lease(seconds=0.2)
while not (state / "room").exists():
    time.sleep(0.01)
ledger.renew(held)
(state / "renewed").touch()
time.sleep(60)
"""
DAMAGED = """
held = lease()
while not (state / "damaged").exists():
    time.sleep(0.01)
sys.exit(3)
"""
STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
held = lease()
time.sleep(60)
"""
CHATTY = """
while True:
    print("y" * 99, flush=True)
    time.sleep(0.001)
"""
CONFESSING = """
import json
(state / "environment.json").write_text(json.dumps(dict(os.environ)))
(state / "group").write_text(str(os.getpgid(0)))
time.sleep(60)
"""


class Swaps:
    """Stands where `Policies` does. `outcomes` are raised in turn; after them, swaps succeed."""

    def __init__(self, *outcomes: Exception | None, seconds: float = 0.0):
        self.outcomes, self.seconds = list(outcomes), seconds
        self.asked: list[str] = []
        self.active = "base"

    async def swap(self, version: PolicyVersion) -> None:
        self.asked.append(str(version))
        await asyncio.sleep(self.seconds)
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if outcome is not None:
            raise outcome
        self.active = str(version)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "ledger.db")
    yield ledger
    ledger.close()


def submit(ledger: Ledger, *, auto_load: bool = True) -> str:
    options = {"config": {}, "summary": {}, "payload": b"{}", "steps": 2, "auto_load": auto_load}
    return ledger.submit(kind="grpo", adapter="math", **options)[0].id


def publish(ledger: Ledger, version: str = "math@1", *, tenant: str = OWNER) -> str:
    """A job as the worker leaves it: published, not yet active."""
    id = submit(ledger if tenant == OWNER else ledger.of(tenant))
    lease = ledger.lease("another")
    assert lease is not None and lease.job.id == id
    ledger.published(lease, version)
    return id


def supervise(
    ledger: Ledger,
    worker: str,
    test: Callable[[Supervisor], Awaitable[None]],
    *,
    swaps: Swaps | None = None,
    stop_s: float = 5.0,
    **options,
) -> Supervisor:
    """Run `test` beside a supervisor whose worker is this script, and stop it as the server does."""
    state = ledger.path.parent
    command = [sys.executable, "-c", PREAMBLE.format(state=str(state)) + worker]
    defaults = {"first_delay_s": 0.01, "poll_s": 0.02, "grace_s": 0.1}

    async def main() -> Supervisor:
        supervisor = Supervisor(
            ledger=ledger,
            policies=swaps or Swaps(),
            command=command,
            log_path=state / "logs" / "worker.log",
            **defaults | options,
        )
        await supervisor.start()
        try:
            await test(supervisor)
        finally:
            await supervisor.stop(timeout_s=stop_s)
        return supervisor

    return asyncio.run(main())


async def until(condition: Callable[[], object], *, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        await asyncio.sleep(0.01)


def starts(ledger: Ledger) -> int:
    return len(list(ledger.path.parent.glob("started-*")))


def alive(pid: int | None) -> bool:
    assert pid is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# ---- the worker process ----


def test_a_killed_worker_comes_back_and_takes_its_job_again_at_once(ledger: Ledger) -> None:
    id = submit(ledger)

    async def test(supervisor: Supervisor) -> None:
        await until(lambda: ledger.job(id).attempt == 1)
        first = supervisor.status.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: ledger.job(id).attempt == 2)  # the lease was for an hour
        assert supervisor.status.pid != first and supervisor.status.restarts == 1

    supervise(ledger, ORDERLY, test)


def test_the_kernel_ends_the_worker_first_also_before_it_has_imported_anything(ledger: Ledger) -> None:
    async def test(supervisor: Supervisor) -> None:
        await until(lambda: supervisor.status.pid)
        pid = supervisor.status.pid
        assert pid is not None
        assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == str(OOM_SCORE)

    supervise(ledger, "time.sleep(60)", test, stop_s=0.1)


def test_no_worker_is_started_on_a_damaged_ledger_and_no_job_is_blamed(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker meets the damage, and says it by its exit status; the server looks for itself."""
    ids = [submit(ledger) for _ in range(3)]
    path, met = ledger.path, ledger.path.parent / "damaged"

    async def test(supervisor: Supervisor) -> None:
        await until(lambda: ledger.job(ids[0]).attempt == 1)
        with closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'job_state'").fetchone()
        with path.open("r+b") as file:
            file.seek((page - 1) * 4096)
            file.write(b"\xff" * 4096)
        met.touch()
        await until(lambda: supervisor.status.last_exit == "the ledger is damaged")
        assert supervisor.status.restarts == 0 and starts(ledger) == 1
        assert ledger.damage is not None

    supervise(ledger, DAMAGED, test)
    assert "no job is trained until the ledger is repaired" in caplog.text
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT state, error FROM job NOT INDEXED WHERE seq = 1").fetchone() == ("running", None)


def test_the_log_of_a_worker_that_never_ends_is_bounded(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MAX_LOG_BYTES", 20_000)
    log = ledger.path.parent / "logs" / "worker.log"

    async def test(supervisor: Supervisor) -> None:
        await until(lambda: log.with_suffix(".log.1").exists() and 0 < log.stat().st_size < 20_000)
        assert supervisor.status.restarts == 0

    supervise(ledger, CHATTY, test, stop_s=0.1)
    for path in (log, log.with_suffix(".log.1")):
        *lines, _ = path.read_text().split("\n")  # the last one may be cut
        assert set(lines) <= {"y" * 99} and path.stat().st_size
    assert starts(ledger) == 1


def test_stopping_lets_the_worker_release_its_job(ledger: Ledger) -> None:
    id = submit(ledger)
    pids: list[int | None] = []

    async def test(supervisor: Supervisor) -> None:
        await until(lambda: ledger.job(id).attempt == 1)
        pids.append(supervisor.status.pid)

    supervisor = supervise(ledger, ORDERLY, test)
    assert supervisor.status.state == "stopped" and supervisor.status.pid is None
    assert not alive(pids[0])
    assert ledger.job(id).state is JobState.QUEUED
    assert "in order" in ledger.events(id)[-1].message  # released by itself, so the attempt does not count


def test_a_worker_that_does_not_stop_is_killed_at_the_deadline(ledger: Ledger) -> None:
    id = submit(ledger)
    pids: list[int | None] = []

    async def test(supervisor: Supervisor) -> None:
        await until(lambda: ledger.job(id).attempt == 1)
        pids.append(supervisor.status.pid)

    supervise(ledger, STUBBORN, test, stop_s=0.3)
    assert not alive(pids[0])
    assert ledger.job(id).state is JobState.QUEUED  # taken back: the next server's worker need not wait for the lease


def test_stopping_at_once_leaves_no_process_behind(ledger: Ledger) -> None:
    async def test(supervisor: Supervisor) -> None:
        pass  # the worker is being started just now

    supervise(ledger, STUBBORN, test, stop_s=0.3)
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [line for line in running if str(ledger.path.parent).encode() in line]


def test_a_job_that_kills_its_worker_every_time_fails_with_its_last_words(ledger: Ledger) -> None:
    id = submit(ledger)

    async def test(supervisor: Supervisor) -> None:
        await until(lambda: ledger.job(id).state is JobState.FAILED)
        await until(lambda: supervisor.last_words(id))

    supervisor = supervise(ledger, POISONED, test)
    error = ledger.job(id).error
    assert error is not None and error["code"] == "crashed_repeatedly"
    words = supervisor.last_words(id)
    assert words is not None and words.splitlines() == [f"line {i}" for i in range(100 - LAST_LINES, 100)]
    assert supervisor.last_words("0" * 32) is None
    assert "SIGKILL" in str(supervisor.status.last_exit)
    assert starts(ledger) >= 3


def test_a_worker_that_hangs_is_killed_once_its_lease_is_over(ledger: Ledger) -> None:
    id = submit(ledger)

    async def test(supervisor: Supervisor) -> None:
        await until(lambda: ledger.job(id).state is JobState.COMPLETED)
        assert supervisor.status.restarts == 1

    supervise(ledger, HANGING, test)
    assert ledger.job(id).attempt == 2


def test_a_worker_that_cannot_renew_because_nothing_can_be_written_is_left_alone(ledger: Ledger) -> None:
    id, state = submit(ledger), ledger.path.parent
    database = ledger._db._connection

    async def test(supervisor: Supervisor) -> None:
        await until(lambda: ledger.job(id).attempt == 1)
        database.execute("PRAGMA query_only=ON")  # as a full disk would
        await asyncio.sleep(1.0)  # beyond lease and grace
        assert ledger.overdue(WORKER) == [id]
        (state / "room").touch()
        await until(lambda: (state / "renewed").exists())
        database.execute("PRAGMA query_only=OFF")
        await asyncio.sleep(0.5)
        assert supervisor.status.restarts == 0 and ledger.job(id).attempt == 1

    supervise(ledger, STARVING, test, stop_s=0.0)


def test_a_worker_that_has_no_lease_is_left_alone(ledger: Ledger) -> None:
    async def test(supervisor: Supervisor) -> None:
        await until(lambda: starts(ledger) == 1)
        await asyncio.sleep(0.5)
        assert supervisor.status.restarts == 0

    supervise(ledger, "time.sleep(60)", test)


def test_the_pauses_between_restarts_grow(ledger: Ledger) -> None:
    ends: list[float] = []

    async def test(supervisor: Supervisor) -> None:
        for count in (1, 2, 3):
            await until(lambda count=count: supervisor.status.restarts >= count)
            ends.append(time.monotonic())
        assert supervisor.status.last_exit == "exit status 3"

    supervise(ledger, "sys.exit(3)", test, first_delay_s=0.3)
    assert ends[1] - ends[0] >= 0.3 and ends[2] - ends[1] >= 0.6


def test_a_command_that_cannot_be_started_does_not_end_the_supervisor(ledger: Ledger) -> None:
    async def main() -> None:
        supervisor = Supervisor(
            ledger=ledger,
            policies=(swaps := Swaps()),
            command=["/nonexistent/worker"],
            log_path=ledger.path.parent / "logs" / "worker.log",
            first_delay_s=0.01,
            poll_s=0.02,
        )
        await supervisor.start()
        await until(lambda: supervisor.status.restarts >= 3)
        publish(ledger)
        await until(lambda: swaps.active == "math@1")
        await supervisor.stop()
        assert "nonexistent" in str(supervisor.status.last_exit)

    asyncio.run(main())


def test_what_a_killed_server_left_running_is_leased_at_once(ledger: Ledger) -> None:
    """The server and its worker died together; the lease would hold for another hour."""
    id = submit(ledger)
    assert ledger.lease(WORKER, seconds=3600) is not None

    async def test(supervisor: Supervisor) -> None:
        await until(lambda: ledger.job(id).attempt == 2)

    supervise(ledger, ORDERLY, test)


def test_a_job_is_not_to_blame_for_a_few_deaths_of_the_server_but_for_many_without_progress(ledger: Ledger) -> None:
    id = submit(ledger)
    for death in range(1, MAX_SERVER_DEATHS + 1):
        assert ledger.lease(WORKER, seconds=30) is not None  # and server and worker are killed
        expected = JobState.QUEUED if death < MAX_SERVER_DEATHS else JobState.FAILED

        async def test(supervisor: Supervisor, expected: JobState = expected) -> None:
            await until(lambda: ledger.job(id).state is expected)

        supervise(ledger, "time.sleep(60)", test, stop_s=0.0)
    error = ledger.job(id).error
    assert error is not None and error["code"] == "server_died_repeatedly"


def test_a_worker_that_the_kernel_ended_for_want_of_memory_goes_on_in_smaller_passes(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's count is a file of the test's; the worker, its SIGKILL and everything else are real. A group of
    processes is not told, so that the machine's count is read."""
    counts = ledger.path.parent / "vmstat"
    counts.write_text("nr_free_pages 12345\noom_kill 7\npgfault 1\n")
    monkeypatch.setattr(platform, "PROC", counts.parent)
    id = submit(ledger)

    async def test(supervisor: Supervisor) -> None:
        await until(lambda: ledger.job(id).state is JobState.COMPLETED)

    supervisor = supervise(ledger, STARVED, test)
    job = ledger.job(id)
    assert (job.attempt, job.micro_tokens) == (4, 100)  # 400, 200, 100: no attempt of it counted
    assert supervisor.status.last_exit == "SIGKILL, for want of memory"
    assert supervisor.last_words(id) == "dying"


def test_nobody_says_of_a_worker_that_was_killed_by_hand_that_memory_ran_out(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though meanwhile the kernel ended somebody else's process: the machine's count rises, its group's does not."""
    state = ledger.path.parent
    monkeypatch.setattr(platform, "PROC", state)
    monkeypatch.setattr(platform, "CONTROL_GROUPS", state)
    (state / "self").mkdir()
    (state / "self" / "cgroup").write_text("0::/server\n")
    (state / "server").mkdir()
    (state / "server" / "memory.events.local").write_text("oom_kill 0\n")
    (state / "vmstat").write_text("nr_free_pages 12345\noom_kill 7\npgfault 1\n")
    id = submit(ledger)

    async def test(supervisor: Supervisor) -> None:
        await until(lambda: ledger.job(id).state is JobState.FAILED)

    supervisor = supervise(ledger, STARVED, test)
    job = ledger.job(id)
    assert (state / "vmstat").read_text().splitlines()[1] != "oom_kill 7"
    assert job.error is not None and job.error["code"] == "crashed_repeatedly" and job.micro_tokens is None
    said = [*job.error.values(), *(event.message for event in ledger.events(id)), supervisor.status.last_exit]
    assert "memory" not in " ".join(map(str, said)) and supervisor.status.last_exit == "SIGKILL"


def test_a_worker_that_is_stopped_by_force_was_no_attempt_that_failed(ledger: Ledger) -> None:
    id = submit(ledger)
    for attempt in range(1, 5):

        async def test(supervisor: Supervisor, attempt: int = attempt) -> None:
            await until(lambda: ledger.job(id).attempt == attempt)

        supervisor = supervise(ledger, STUBBORN, test, stop_s=0.1)
        assert ledger.job(id).state is JobState.QUEUED
        assert supervisor.last_words(id) is None


def test_what_a_crash_left_is_removed_before_the_worker_runs(ledger: Ledger) -> None:
    done = publish(ledger)
    checkpoint, torn = ledger.path.parent / "checkpoints" / done, ledger.path.parent / "spool" / ".x.tmp"
    checkpoint.mkdir(parents=True)
    torn.write_text("x")

    async def test(supervisor: Supervisor) -> None:
        assert not checkpoint.exists() and not torn.exists()

    supervise(ledger, "time.sleep(60)", test, stop_s=0.0)


def test_the_worker_does_not_get_the_servers_secrets_nor_its_ctrl_c(ledger: Ledger, monkeypatch) -> None:
    monkeypatch.setenv("GROUPWISE_API_KEY", "hush")
    monkeypatch.setenv("GROUPWISE_WEBHOOK_SECRET", "hush")
    monkeypatch.setenv("GROUPWISE_OTHER", "kept")

    async def test(supervisor: Supervisor) -> None:
        await until(lambda: (ledger.path.parent / "group").exists() and (ledger.path.parent / "group").read_text())

    supervise(ledger, CONFESSING, test)
    environment = json.loads((ledger.path.parent / "environment.json").read_text())
    assert "hush" not in environment.values() and environment["GROUPWISE_OTHER"] == "kept"
    assert (ledger.path.parent / "group").read_text() != str(os.getpgid(0))


def test_the_workers_words_are_in_its_log(ledger: Ledger) -> None:
    async def test(supervisor: Supervisor) -> None:
        path = ledger.path.parent / "logs" / "worker.log"
        await until(lambda: path.exists() and "a word" in path.read_text())

    supervise(ledger, "print('a word', flush=True); time.sleep(60)", test)


def test_the_command_names_everything_the_worker_needs() -> None:
    command = worker_command(state_dir=Path("s"), model="starter", dtype="float32", device="cpu", threads=2)
    assert command[:3] == [sys.executable, "-m", "groupwise.run.worker"]
    pairs = dict(zip(command[3::2], command[4::2], strict=True))
    assert pairs == {
        "--state": "s",
        "--model": "starter",
        "--dtype": "float32",
        "--device": "cpu",
        "--cast-lm-head": "auto",
        "--worker": WORKER,
        "--parent": str(os.getpid()),
        "--threads": "2",
    }
    assert "--threads" not in worker_command(state_dir=Path("s"), model="starter", dtype="auto", device="auto")


# ---- swaps ----

IDLE = "time.sleep(60)"


def swap_once(ledger: Ledger, swaps: Swaps, ids: Sequence[str], **options) -> None:
    async def test(supervisor: Supervisor) -> None:
        await until(lambda: all(ledger.job(id).state.is_final for id in ids))

    supervise(ledger, IDLE, test, swaps=swaps, stop_s=0.0, **options)


def test_a_published_job_is_completed_only_once_its_version_is_active(ledger: Ledger) -> None:
    seen: list[JobState] = []

    class Watching(Swaps):
        async def swap(self, version: PolicyVersion) -> None:
            seen.append(ledger.jobs()[0].state)
            await super().swap(version)
            seen.append(ledger.jobs()[0].state)

    async def test(supervisor: Supervisor) -> None:
        id = publish(ledger)
        await until(lambda: ledger.job(id).state.is_final)

    swaps = Watching()
    supervise(ledger, IDLE, test, swaps=swaps, stop_s=0.0)
    job = ledger.jobs()[0]
    assert seen == [JobState.RUNNING, JobState.RUNNING]
    assert (job.state, job.version, swaps.active, swaps.asked) == (JobState.COMPLETED, "math@1", "math@1", ["math@1"])
    assert "math@1" in ledger.events(job.id)[-1].message


def test_what_a_crash_left_published_is_finished_before_the_first_worker_runs(ledger: Ledger) -> None:
    ids = [publish(ledger, "math@1"), publish(ledger, "math@2")]

    async def main() -> None:
        swaps = Swaps()
        command = [sys.executable, "-c", PREAMBLE.format(state=str(ledger.path.parent))]
        supervisor = Supervisor(ledger=ledger, policies=swaps, command=command, log_path=ledger.path.parent / "w.log")
        await supervisor.start()
        assert swaps.asked == ["math@1", "math@2"]  # the newest wins
        assert [ledger.job(id).state for id in ids] == [JobState.COMPLETED] * 2
        assert starts(ledger) == 0
        await supervisor.stop(timeout_s=0)

    asyncio.run(main())


def test_a_refused_version_fails_the_job_and_the_old_one_stays(ledger: Ledger) -> None:
    id = publish(ledger)
    swaps = Swaps(SwapRefusedError("the canary sang another song", hint="compare"))
    swap_once(ledger, swaps, [id])
    job = ledger.job(id)
    assert (job.state, job.phase, job.version, swaps.active) == (JobState.FAILED, "swapping", "math@1", "base")
    assert job.error is not None
    assert job.error["code"] == "swap_refused" and job.error["hint"] == "compare"
    wording(job.error)


def test_no_tenant_waits_while_the_owners_version_is_judged(ledger: Ledger) -> None:
    """A gate plays its held-out prompts, which takes minutes; tenants have none."""
    judged = asyncio.Event()

    class Slow:
        async def decide(self, job, version):
            await judged.wait()
            return "activate", "it is well"

    async def test(supervisor: Supervisor) -> None:
        supervisor.gate = Slow()
        owners, theirs = publish(ledger, "math@1"), publish(ledger, "theirs@1", tenant="acme")
        await until(lambda: ledger.job(theirs).state is JobState.COMPLETED, seconds=20)
        assert ledger.job(owners).state is JobState.RUNNING
        judged.set()
        await until(lambda: ledger.job(owners).state is JobState.COMPLETED)

    swaps = Swaps()
    supervise(ledger, IDLE, test, swaps=swaps, stop_s=0.0)
    assert swaps.asked == ["theirs@1", "math@1"]


def test_a_refusal_does_not_hold_up_the_next_version(ledger: Ledger) -> None:
    ids = [publish(ledger, "math@1"), publish(ledger, "math@2")]
    swaps = Swaps(SwapRefusedError("no"))
    swap_once(ledger, swaps, ids)
    assert [ledger.job(id).state for id in ids] == [JobState.FAILED, JobState.COMPLETED]
    assert swaps.active == "math@2"


@pytest.mark.parametrize("passing", [StorageError("the disk is full"), NotReadyError("busy")])
def test_what_passes_by_itself_is_tried_again(ledger: Ledger, passing: Exception, monkeypatch) -> None:
    monkeypatch.setattr("groupwise.server.supervisor.SWAP_AGAIN_S", 0.05)
    id = publish(ledger)
    swaps = Swaps(passing, passing)
    swap_once(ledger, swaps, [id])
    assert ledger.job(id).state is JobState.COMPLETED and swaps.asked == ["math@1"] * 3


def test_a_swap_in_which_servers_died_is_not_tried_for_ever(ledger: Ledger, monkeypatch) -> None:
    """But one that is put off, by a full disk or an orderly stop, may be tried as often as it takes."""
    monkeypatch.setattr("groupwise.server.supervisor.SWAP_AGAIN_S", 0.0)
    put_off, poison = publish(ledger), publish(ledger, "math@2")
    for _ in range(MAX_SERVER_DEATHS):
        assert ledger.begin_swap(poison)
    swaps = Swaps(*[StorageError("the disk is full") for _ in range(2 * MAX_SERVER_DEATHS)])
    swap_once(ledger, swaps, [put_off, poison])
    assert "math@2" not in swaps.asked and ledger.job(put_off).state is JobState.COMPLETED
    error = ledger.job(poison).error
    assert error is not None and error["code"] == "server_died_repeatedly"


def test_a_stop_in_the_middle_of_a_swap_is_no_death(ledger: Ledger, monkeypatch) -> None:
    monkeypatch.setattr("groupwise.server.supervisor.SWAP_AGAIN_S", 0.0)
    id = publish(ledger)
    for _ in range(MAX_SERVER_DEATHS + 1):
        swaps = Swaps(NotReadyError("busy"), seconds=0.1)

        async def test(supervisor: Supervisor, swaps: Swaps = swaps) -> None:
            await until(lambda: len(swaps.asked) == 2)  # the second would succeed

        supervise(ledger, IDLE, test, swaps=swaps, stop_s=0.0)
        assert ledger.job(id).state is JobState.RUNNING
    swap_once(ledger, Swaps(), [id])
    assert ledger.job(id).state is JobState.COMPLETED


def test_a_swap_that_takes_too_long_is_tried_again_not_waited_for(ledger: Ledger, monkeypatch) -> None:
    monkeypatch.setattr("groupwise.server.supervisor.SWAP_AGAIN_S", 0.05)
    id = publish(ledger)
    swaps = Swaps(seconds=30.0)

    async def test(supervisor: Supervisor) -> None:
        await until(lambda: len(swaps.asked) == 2)
        swaps.seconds = 0.0
        await until(lambda: ledger.job(id).state.is_final)

    supervise(ledger, IDLE, test, swaps=swaps, stop_s=0.0, swap_timeout_s=0.2)
    assert ledger.job(id).state is JobState.COMPLETED


def test_a_bug_in_the_swap_fails_the_job_and_not_the_server(ledger: Ledger) -> None:
    ids = [publish(ledger, "math@1"), publish(ledger, "math@2")]
    swap_once(ledger, Swaps(RuntimeError("secret detail")), ids)
    error = ledger.job(ids[0]).error
    assert error is not None and "secret detail" not in str(error)
    wording(error)
    assert ledger.job(ids[1]).state is JobState.COMPLETED


def test_a_ledger_that_fails_for_a_while_is_tried_again(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    id = publish(ledger)
    complete, failures = ledger.complete, [StorageError("the disk is full")] * 2

    def sometimes(job_id: str, *, message: str = ""):
        if failures:
            raise failures.pop()
        return complete(job_id, message=message)

    monkeypatch.setattr(ledger, "complete", sometimes)
    swap_once(ledger, Swaps(), [id])
    assert ledger.job(id).state is JobState.COMPLETED


def test_a_job_that_is_not_to_be_loaded_needs_no_swap(ledger: Ledger) -> None:
    id = submit(ledger, auto_load=False)
    lease = ledger.lease("another")
    assert lease is not None
    ledger.published(lease, "math@1")
    swaps = Swaps()
    swap_once(ledger, swaps, [id])
    assert ledger.job(id).state is JobState.COMPLETED and swaps.asked == []


# ---- the real parts ----


def canary(base: LoadedModel, adapter: Path, *, off: float = 0.0) -> dict[str, list]:
    """What a trainer would have measured under the adapter, by transformers alone; `off` nats beside the truth."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    ids = [5, 9, 14, 3, 8, 21]
    with torch.no_grad():
        model = AutoModelForCausalLM.from_config(base.model.config, attn_implementation="eager").to(torch.float64)
        model.load_state_dict(base.model.state_dict())
        model = PeftModel.from_pretrained(model, str(adapter)).to(torch.float64).eval()
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    values = [float(logprobs[t - 1, ids[t]]) + off for t in range(3, 6)]
    return {"prompt_ids": ids[:3], "completion_ids": ids[3:], "logprobs": values}


@pytest.mark.parametrize(("off", "state", "active"), [(0.0, "completed", "math@1"), (0.5, "failed", "base")])
def test_a_version_is_active_only_if_the_engine_computes_what_its_trainer_did(
    ledger: Ledger, make_base, make_adapter, off: float, state: str, active: str
) -> None:
    base = make_base("qwen3", dtype=torch.float32)
    adapter = make_adapter(base)
    store = AdapterStore(ledger.path.parent / "adapters")
    info = Provenance(base_model=base.name, base_hash=base.hash, canary=canary(base, adapter, off=off))
    id = publish(ledger, str(store.import_(adapter, "math", info=info)))

    async def main() -> None:
        engine = LocalEngine(base)
        policies = Policies(store, engine, base=base, served_name="tiny")
        await policies.start()
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        log_path = ledger.path.parent / "logs" / "worker.log"
        supervisor = Supervisor(ledger=ledger, policies=policies, command=command, log_path=log_path)
        await supervisor.start()
        await supervisor.stop(timeout_s=0)
        assert str(policies.active) == str(store.active) == active
        policies.close()
        engine.close()

    asyncio.run(main())
    job = ledger.job(id)
    assert job.state == state
    assert (job.error is None) == (state == "completed")
    if job.error is not None:
        assert job.error["code"] == "swap_refused"
        wording(job.error)


@pytest.mark.slow
def test_a_submitted_job_is_trained_by_the_real_worker_and_then_active(ledger: Ledger, monkeypatch) -> None:
    """From a request to the active policy: `prepare_grpo`, `run.worker`, `Policies`, each as the server has it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    base, state = load_model("starter", device="cpu"), ledger.path.parent
    store = AdapterStore(state / "adapters")
    completions = [ScoredCompletion(text="185", reward=1.0), ScoredCompletion(text="184", reward=0.0)]
    group = ScoredGroup(messages=[ChatMessage(role="user", content="What is 47 + 138?")], completions=completions)
    request = GrpoRequest(groups=[group], config=GrpoJobConfig(output_name="sums", learning_rate=1e-3))
    submission = prepare_grpo(request, base=base, store=store, rollouts=ledger.rollouts)
    job, _ = ledger.submit(
        kind=submission.kind,
        adapter=submission.adapter,
        config=submission.config,
        summary=submission.summary,
        payload=submission.payload,
        steps=submission.steps,
        auto_load=submission.auto_load,
    )
    command = worker_command(state_dir=state, model="starter", dtype="auto", device="cpu", threads=1)

    async def main() -> None:
        engine = LocalEngine(base)
        policies = Policies(store, engine, base=base, served_name="starter")
        await policies.start()
        log_path = state / "logs" / "worker.log"
        supervisor = Supervisor(ledger=ledger, policies=policies, command=command, log_path=log_path)
        await supervisor.start()
        try:
            await until(lambda: ledger.job(job.id).state.is_final, seconds=120)
        finally:
            await supervisor.stop()
        assert str(policies.active) == "sums@1", log_path.read_text()
        policies.close()
        engine.close()

    asyncio.run(main())
    done = ledger.job(job.id)
    assert (done.state, done.version, done.step, done.error) == (JobState.COMPLETED, "sums@1", 1, None)
    assert store.info(PolicyVersion("sums", 1)).job == job.id
