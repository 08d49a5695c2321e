"""A state directory with a tiny model, and jobs on it: submit, do, look. Imported by the tests of jobs, and run as a
script by the one that kills: `python job_place.py ROOT FAULT...`.

The script does one job in a forked child per fault, which SIGKILL ends; then leases it again until it is published. It
prints a line of JSON per fault. One process without other threads, so that a fork costs milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from groupwise.config.job import parse_job_config
from groupwise.model.load import LoadedModel, load_model
from groupwise.run.job import WorkerContext
from groupwise.run.job_queue import LeaseHeartbeat, Worker
from groupwise.store import faults
from groupwise.store import files as adapter_files
from groupwise.store.adapters import AdapterStore
from groupwise.store.ledger import Ledger
from groupwise.store.ledger_attempts import Cause
from groupwise.store.ledger_schema import JobRecord, JobState, Lease
from groupwise.train.together import JointPasses
from groupwise.train.training_batch import TrainingBatch
from groupwise.types import PolicyVersion

SMALL = {"lora_rank": 2, "lora_alpha": 4.0, "target_modules": ["q_proj", "down_proj"], "learning_rate": 0.01}
PROMPTS = ((5, 6, 7, 8), (9, 10, 11), (12, 13, 14, 15, 16))
REPLIES = ((20, 21, 22), (23, 24), (25, 26, 27, 28), (29,))
REWARDS = (1.0, 0.0, 0.5, 0.0)


def groups(
    prompts: Sequence[Sequence[int]] = PROMPTS,
    *,
    rewards: Sequence[float] = REWARDS,
    logprob: float | None = None,
) -> dict[str, Any]:
    """A payload; `logprob` is that of every token, None posts none."""

    def completion(ids: Sequence[int], reward: float) -> dict[str, Any]:
        logprobs = None if logprob is None else [logprob] * len(ids)
        return {"ids": list(ids), "logprobs": logprobs, "reward": reward}

    def group(prompt: Sequence[int]) -> dict[str, Any]:
        return {"prompt_ids": list(prompt), "completions": list(map(completion, REPLIES, rewards))}

    return {"groups": [group(prompt) for prompt in prompts]}


def examples(count: int = 5) -> dict[str, Any]:
    rows = [
        {"prompt_ids": [30 + i, 31, 32], "completion_ids": [40 + i, 41, 42, 43], "mask": [1, 1, 0, 1]}
        for i in range(count)
    ]
    return {"examples": rows}


class Place:
    """A workplace, and short words for what tests do with it. Leases are renewed by nobody. With `passes`, jobs are
    trained beside each other."""

    def __init__(self, directory: Path, base: LoadedModel, *, passes: JointPasses | None = None):
        directory.mkdir(exist_ok=True)
        self.ledger, self.store = Ledger(directory / "ledger.db"), AdapterStore(directory / "adapters")
        self.workplace = WorkerContext(
            base=base, ledger=self.ledger, store=self.store, state_dir=directory, passes=passes, threads=1
        )
        self.directory, self.base = directory, base
        self.heartbeat = LeaseHeartbeat(self.ledger)
        self.worker = Worker(self.workplace, self.heartbeat, name="worker")

    def submit(self, payload: dict[str, Any], *, kind: str = "grpo", adapter: str = "math", **config: Any) -> JobRecord:
        parsed = parse_job_config(kind, {**SMALL, **config})
        if kind == "grpo":
            steps = parsed.steps(completions=sum(len(group.get("completions", ())) for group in payload["groups"]))
        else:
            steps = parsed.steps(examples=len(payload["examples"]))
        job, _ = self.ledger.submit(
            kind=kind,
            adapter=adapter,
            config=parsed.model_dump(mode="json"),
            summary={},
            payload=json.dumps(payload).encode(),
            steps=steps,
            auto_load=True,
        )
        return job

    def lease(self) -> Lease:
        lease = self.ledger.lease("worker")
        assert lease is not None
        return lease

    def do(self, payload: dict[str, Any] | None = None, **options: Any) -> JobRecord:
        """Submit the payload (without one: a job waits already) and do the oldest job."""
        if payload is not None:
            self.submit(payload, **options)
        lease = self.lease()
        self.worker.do(lease)
        return self.ledger.job(lease.job.id)

    def serve(self, *, seconds: float = 300) -> list[JobRecord]:
        """Have the worker do all jobs that there are, as many at once as it will; returns them, the oldest first."""
        failed: list[BaseException] = []

        def serve() -> None:
            try:
                self.worker.serve()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=serve)
        thread.start()
        deadline = time.monotonic() + seconds
        while thread.is_alive() and not all(job.state.is_final or job.version for job in self.ledger.jobs()):
            assert time.monotonic() < deadline, [(job.adapter, job.state, job.step) for job in self.ledger.jobs()]
            time.sleep(0.02)
        self.heartbeat.stop()
        thread.join()
        self.heartbeat.stopping = False
        if failed:
            raise failed[0]
        return self.ledger.jobs()[::-1]

    def version(self, job: JobRecord) -> PolicyVersion:
        assert job.version is not None, job.error
        return PolicyVersion.parse(job.version)

    def weights(self, job: JobRecord) -> bytes:
        return (self.store.path(self.version(job)) / adapter_files.WEIGHTS).read_bytes()

    def messages(self, job: JobRecord) -> list[str]:
        return [event.message for event in self.ledger.events(job.id) if event.kind == "message"]

    def at_step(self, monkeypatch: Any, step: int, act: Callable[[], object]) -> None:
        """Call `act` when the gradient of step `step` (from 0) has been computed."""
        plain = TrainingBatch.accumulate

        def accumulate(batch: TrainingBatch, learner: Any, number: int) -> Any:
            metrics = plain(batch, learner, number)
            if number == step:
                act()
            return metrics

        monkeypatch.setattr(TrainingBatch, "accumulate", accumulate)


# --- the script ---

CRASHING = {"iterations": 2, "minibatches": 3, "checkpoint_interval": 2, "lora_dropout": 0.1}


def main(root: Path, wanted: Sequence[str]) -> None:
    torch.set_num_threads(1)
    base = load_model(str(root / "model"), device="cpu", dtype="float32")
    template = root / "template"

    def prepare() -> None:
        place = Place(template, base)
        place.do(groups(logprob=-2.0), iterations=1)  # there is a version to continue
        place.submit(groups(PROMPTS[::-1]), **CRASHING)
        place.ledger.close()

    def serve(state: Path) -> None:
        place = Place(state, base)
        while (lease := place.ledger.lease("worker")) is not None:
            place.worker.do(lease)

    for killed in kill_children(root, wanted, prepare, serve):
        print(json.dumps({"fault": killed.fault, "ended": killed.ended, **_look(killed.state)}), flush=True)


@dataclass(frozen=True)
class Killed:
    """How the children of one fault `ended`, how many jobs the first had in its hands, and the `state` they left."""

    fault: str
    state: Path
    ended: list[int]
    in_hand: int


def kill_children(
    root: Path,
    wanted: Sequence[str],
    prepare: Callable[[], None],
    serve: Callable[[Path], None],
    *,
    cause: Cause = Cause.CRASH,
) -> Iterator[Killed]:
    """For no fault and each that is wanted, a child serves a copy of what `prepare` made in root/template until it is
    killed; its jobs are taken back for the cause, and another child does what is left."""
    assert _in_child(prepare) == 0
    for number, fault in enumerate(("", *wanted)):
        state = Path(shutil.copytree(root / "template", root / str(number)))

        def work(fault=fault, state=state) -> None:
            faults._faults.update(faults.parse(fault))
            serve(state)

        ended, in_hand = [_in_child(work)], 0
        if fault:
            ledger = Ledger(state / "ledger.db")
            in_hand = len(ledger.expire("worker", cause=cause))
            ledger.close()
            ended.append(_in_child(lambda work=work: work(fault="")))
        yield Killed(fault, state, ended, in_hand)


def _look(state: Path) -> dict[str, Any]:
    ledger, store = Ledger(state / "ledger.db"), AdapterStore(state / "adapters")
    job = ledger.jobs()[0]
    versions = store.versions("math")
    files = [store.path(version) / adapter_files.WEIGHTS for version in versions]
    found = {
        "state": job.state,
        "phase": job.phase,
        "version": job.version,
        "attempt": job.attempt,
        "steps": [each["step"] for each in ledger.metrics(job.id)],
        "versions": [str(version) for version in versions],
        "hashes": [hashlib.sha256(path.read_bytes()).hexdigest() for path in files],
        "moments": {
            f"{path.parts[-3]}@{int(path.parts[-2][1:])}": hashlib.sha256(path.read_bytes()).hexdigest()
            for path in (state / "adapters" / ".optimizer").glob("*/*/learner.safetensors")
        },
        "left": [str(path) for path in state.glob("checkpoints/*")] + [str(p) for p in store.root.glob(".staging*")],
        "waiting": len(ledger.jobs(states=[JobState.QUEUED])),
    }
    ledger.close()
    return found


def _in_child(work: Callable[[], None]) -> int:
    """Fork a child that does `work`; its exit status, or minus the signal that ended it."""
    if (pid := os.fork()) == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


KILLED = -signal.SIGKILL

if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
