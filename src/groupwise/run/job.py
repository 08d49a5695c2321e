"""One job, from its payload to a published version. `worker.py` is the process that does them.

    parent      the version that is continued, or a fresh adapter
    task        what each optimizer step trains on (`run.update`)
    step 1..n   gradient, AdamW, every few steps a checkpoint; metrics into the ledger
    after it    how much less likely what was trained on has become: a policy that a step destroyed shows only here
    publish     into the adapter store, with a canary that a loading engine checks; the server then swaps, unless the
                job's health is `error` by its metrics: such a version is stored and marked, and only a person can
                activate it

A job that was killed and is leased again continues from its last checkpoint, or starts over, and ends with the same
bytes as an undisturbed job, in one version: an existing version with the job's id is taken instead of a second one.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from groupwise.algo.kl import logprob_drop
from groupwise.algo.metrics import Metrics
from groupwise.config.job import CHECKPOINT_INTERVAL, GrpoJobConfig, JobConfig, parse_job_config
from groupwise.config.lora import LoraSpec
from groupwise.errors import AdapterError, AdapterNotFoundError, ConfigError, Interrupted, TrainingError
from groupwise.model.load import LoadedModel
from groupwise.model.lost_device import lost_device
from groupwise.run.health_report import examine_job
from groupwise.run.job_passes import JobPasses
from groupwise.run.job_turns import StepTurns
from groupwise.run.job_update import Task, make_task
from groupwise.store import files
from groupwise.store.adapters import AdapterStore
from groupwise.store.files import Provenance
from groupwise.store.job_checkpoint import (
    Checkpoints,
    JobProgress,
    read_standing,
    read_start,
    trained_in,
)
from groupwise.store.job_payload import parse_payload
from groupwise.store.ledger import Ledger
from groupwise.store.ledger_schema import Lease
from groupwise.store.tenants import OWNER, home_of
from groupwise.train.learner import Learner, learning_rate_at
from groupwise.train.together import BUILDING, JointPasses
from groupwise.types import BASE, PolicyVersion, Sample

CANARY_TOKENS = 16
MEASURED_TOKENS = 8192  # prompts included: of the samples that are looked at before and after training

_NO_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")
# what reading rubbish raises
_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError, SafetensorError)


class JobCancelled(Exception):
    """A client cancelled the job."""


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """The resources that all jobs of one worker share. `passes` is where jobs that train at the same time join their
    passes, `turns` has them make their steps in turn, and `threads` are torch's, as of a job by itself (None: as
    many as torch has here)."""

    base: LoadedModel
    ledger: Ledger
    store: AdapterStore
    state_dir: Path
    passes: JointPasses | None = None
    threads: int | None = None
    turns: StepTurns = field(default_factory=StepTurns)

    def of(self, tenant: str) -> WorkerContext:
        """Return the same for a tenant's jobs, whose adapters are its own."""
        return self if tenant == OWNER else replace(self, store=trained_in(home_of(self.state_dir, tenant)))


@dataclass
class _Run:
    """A job at work."""

    place: WorkerContext
    lease: Lease
    config: JobConfig
    task: Task
    learner: Learner
    standing: JobProgress
    metrics: Metrics  # of the last step

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.place.state_dir, self.lease.job.id)

    def save(self) -> None:
        self.place.ledger.check(self.lease)
        self.checkpoints.save(self.learner, self.standing, self.task.start)

    def say(self, message: str) -> None:
        self.place.ledger.progress(self.lease, phase="training", step=self.standing.step, message=message)


def run_job(lease: Lease, place: WorkerContext, *, raise_if_stopped: Callable[[], None]) -> PolicyVersion:
    """Do the leased job and record its version in the ledger.

    `raise_if_stopped` is called between any two steps and raises what is to end the job.

    Raises:
        JobCancelled, Interrupted, LeaseLostError: from `raise_if_stopped`; Interrupted after a checkpoint.
        GroupwiseError: the job cannot be done.
    """
    job, checkpoints = lease.job, Checkpoints(place.state_dir, lease.job.id)
    version = place.store.version_of_job(job.adapter, job.id)
    if version is None:
        run = _open(lease, place)
        with place.turns.joined(job):
            _train(run, raise_if_stopped)
        raise_if_stopped()
        version = _publish(run)
    unhealthy = place.store.unhealthy(version)
    if unhealthy is None:  # else the next job continues from the version before, whose moments stay
        checkpoints.become_moments(version, place.store)
    place.ledger.published(lease, str(version), unhealthy=unhealthy)
    checkpoints.discard()
    return version


# --- opening ---


def _open(lease: Lease, place: WorkerContext) -> _Run:
    job = lease.job
    config = parse_job_config(job.kind, job.config)
    if job.micro_tokens is not None:  # memory ran out before
        config = config.model_copy(update={"micro_tokens": job.micro_tokens})
    task = make_task(config, parse_payload(job.kind, place.ledger.payload(job.id)), base=place.base)
    largest = min(task.largest, max(config.micro_tokens, task.longest))
    place.ledger.measured(lease, largest=largest, longest=task.longest)
    return _resumed(lease, place, config, task) or _begun(lease, place, config, task)


def _resumed(lease: Lease, place: WorkerContext, config: JobConfig, task: Task) -> _Run | None:
    """Return the job at its last checkpoint; None without one that can be read."""
    checkpoints = Checkpoints(place.state_dir, lease.job.id)
    if (newest := checkpoints.newest) is None:
        return None
    try:
        standing = read_standing(newest)
        learner = _new_learner(config, standing.lora, place)
        learner.load(newest)
        start = read_start(newest, lengths=[len(sample.completion_ids) for sample in task.samples])
        task = (task if start is None else task.with_start(start)).with_reference(learner)
    except _DAMAGED as error:
        _raise_unless_damaged(error, place)
        checkpoints.discard()
        message = f"the checkpoint cannot be read, so the job begins anew ({type(error).__name__}: {error})"
        place.ledger.progress(lease, phase="loading", step=0, message=message)
        return None
    run = _Run(place, lease, config, task, learner, standing, dict(lease.job.metrics))
    run.say(f"goes on from the checkpoint at step {standing.step} of {task.batch.steps}")
    return run


def _raise_unless_damaged(error: Exception, place: WorkerContext) -> None:
    """Raise an error for which what was read is not to blame, memory that ran out or a lost device: the job then goes
    on from the same files."""
    if is_memory(error) or lost_device(error, place.base.device) is not None:
        raise error


def is_memory(error: Exception) -> bool:
    """Return whether memory ran out."""
    said = isinstance(error, RuntimeError) and any(each in str(error) for each in _NO_MEMORY)
    return said or isinstance(error, MemoryError | torch.OutOfMemoryError)


def _begun(lease: Lease, place: WorkerContext, config: JobConfig, task: Task) -> _Run:
    """Return the job before its first step."""
    with _parent(config, place.store, name=lease.job.adapter) as (parent, directory):
        if directory is None:
            asked = {"rank": config.lora_rank, "alpha": config.lora_alpha, "targets": config.target_modules}
            given = {name: value for name, value in asked.items() if value is not None}
            lora = LoraSpec(**given, dropout=config.lora_dropout)
            learner = _new_learner(config, lora, place)
            message = f"begins with a fresh adapter of rank {lora.rank}"
            acting = config.effective(None)
        else:
            place.store.check_base(parent, place.base.hash)
            lora = _lora_of_parent(config, parent, directory)
            acting = config.effective(_saved(directory))
            learner, has_moments = _continued(config, lora, parent, directory, place)
            moments = "with its optimizer's moments" if has_moments else "with a fresh optimizer"
            message = f"continues {parent} (rank {lora.rank}) {moments}"
    place.ledger.settled(lease, acting)
    if task.reads_start:
        task = task.started(learner)
    task = task.with_reference(learner)
    run = _Run(place, lease, config, task, learner, JobProgress(parent=parent, lora=lora), {})
    run.say(message)
    return run


@contextmanager
def _parent(config: JobConfig, store: AdapterStore, *, name: str) -> Iterator[tuple[PolicyVersion, Path | None]]:
    """Hold the version that the job continues, so that it is not removed, and yield it with its directory (None for the
    base model).

    A name means its newest version; if this version is removed before it is held, the next newest is taken.
    """
    with ExitStack() as held:
        directory, version = None, config.parent(store, name=name)
        while not version.is_base and directory is None:
            try:
                directory = held.enter_context(store.held(version))
            except AdapterNotFoundError:
                gone, version = version, config.parent(store, name=name)
                if version == gone:
                    raise
        yield version, directory


def _saved(directory: Path) -> dict[str, Any]:
    """Return PEFT's configuration of a version."""
    return json.loads((directory / files.CONFIG).read_text(encoding="utf-8"))


def _lora_of_parent(config: JobConfig, parent: PolicyVersion, directory: Path) -> LoraSpec:
    """Return the adapter as it is. Raises ConfigError if the request wants another one."""
    saved = _saved(directory)
    for key, given, own in config.differences(saved):
        raise _differs(key, given, own, parent)
    targets = config.target_modules or tuple(files.adapted_names(directory))
    return LoraSpec(rank=saved["r"], alpha=saved["lora_alpha"], dropout=config.lora_dropout, targets=targets)


def _differs(key: str, given: object, own: object, parent: PolicyVersion) -> ConfigError:
    return ConfigError(
        f"{key} is {given!r}, but {parent}, which the job continues, has {own!r}",
        hint=f"leave {key} out, or start afresh with base_adapter: {BASE}",
    )


def _continued(
    config: JobConfig, lora: LoraSpec, parent: PolicyVersion, directory: Path, place: WorkerContext
) -> tuple[Learner, bool]:
    """Return a learner at `parent`, and whether it has the moments of the job that made it."""
    learner = _new_learner(config, lora, place)
    try:
        learner.load_adapter(directory, alpha_field="lora_alpha")
    except AdapterError as error:
        if config.target_modules is None:
            raise
        raise _differs("target_modules", config.target_modules, _saved(directory)["target_modules"], parent) from error
    if (moments := place.store.moments(parent)) is None:
        return learner, False
    try:
        learner.load(moments)
    except _DAMAGED as error:
        _raise_unless_damaged(error, place)
        learner = _new_learner(config, lora, place)
        learner.load_adapter(directory, alpha_field="lora_alpha")
        return learner, False
    return learner, True


def _new_learner(config: JobConfig, lora: LoraSpec, place: WorkerContext) -> Learner:
    with BUILDING:
        return Learner(
            place.base,
            lora=lora,
            optimizer=config,
            micro_tokens=config.micro_tokens,
            gradient_checkpointing=config.gradient_checkpointing,
            seed=config.seed,
            threads=place.threads,
            router_replay=not isinstance(config, GrpoJobConfig) or config.router_replay is not False,
            strategy=None if place.passes is None else JobPasses(place.passes),
        )


# --- training ---


def _train(run: _Run, raise_if_stopped: Callable[[], None]) -> None:
    interval, saved = run.config.checkpoint_interval or CHECKPOINT_INTERVAL, run.standing.step
    while run.standing.step < run.task.batch.steps:
        try:
            raise_if_stopped()
            _step(run, raise_if_stopped)
        except Interrupted:
            if run.standing.step > saved:
                run.save()
            raise
        if run.standing.step % interval == 0 or run.standing.step == run.task.batch.steps:
            run.save()
            saved = run.standing.step
    if not run.standing.applied:
        raise TrainingError(
            f"the job changed nothing: the gradients of all {run.task.batch.steps} steps were not finite",
            hint="look for huge rewards or log-probabilities, or lower learning_rate",
        )


def _step(run: _Run, raise_if_stopped: Callable[[], None]) -> None:
    config, task, step, began = run.config, run.task, run.standing.step, time.monotonic()
    packed = task.packed_tokens(step)
    rate = learning_rate_at(
        step,
        peak=config.learning_rate,
        warmup_steps=config.warmup_steps,
        steps=task.batch.steps,
        schedule=config.schedule,
    )
    with run.place.turns.step(run.lease.job, packed, raise_if_stopped):
        metrics, result = task.batch.take_step(run.learner, step, learning_rate=rate)
    run.standing = replace(run.standing, step=step + 1, applied=run.standing.applied + result.applied)
    seconds = time.monotonic() - began
    metrics = {
        **task.facts,
        **metrics,
        "optim/lr": rate,
        "optim/grad_norm": result.grad_norm,
        "optim/refused": float(not result.applied),
    }
    if run.standing.step == task.batch.steps:
        with suppress(AdapterNotFoundError):  # what it started from was deleted meanwhile
            metrics |= {"final/logprob_drop": _logprob_drop(run)}
    run.metrics = metrics | {"time/step_s": seconds, "perf/tok_s": task.tokens(step) / seconds}
    message = f"step {step + 1} was refused: its gradient is not finite, and the weights stay as they were"
    run.place.ledger.progress(
        run.lease,
        phase="training",
        step=run.standing.step,
        metrics=run.metrics,
        message=None if result.applied else message,
        tokens=packed,
    )


def _logprob_drop(run: _Run) -> float:
    """Return the nats per token by which the samples are less likely under the present policy than under the one that
    the job started from; of some of them."""
    task, config, parent = run.task, run.config, run.standing.parent
    samples = task.some(MEASURED_TOKENS)
    if parent.is_base:
        before = run.learner.forward(samples, temperature=task.batch.temperature, reference=True)
    else:
        start = _new_learner(config, run.standing.lora, run.place)
        with run.place.store.held(parent) as directory:
            start.load_adapter(directory, alpha_field="lora_alpha")
        before = start.forward(samples, temperature=task.batch.temperature)
    return logprob_drop(samples, before, run.learner.forward(samples, temperature=task.batch.temperature))


# --- publishing ---


def _publish(run: _Run) -> PolicyVersion:
    job, base, store, ledger = run.lease.job, run.place.base, run.place.store, run.place.ledger
    ledger.progress(run.lease, phase="publishing", step=run.standing.step)
    info = Provenance(
        base_model=base.name,
        base_hash=base.hash,
        quantization=base.quantization,
        parent=run.standing.parent,
        step=run.learner.steps,
        config_hash=hashlib.sha256(json.dumps(job.config, sort_keys=True).encode()).hexdigest()[:16],
        metrics={key: value for key, value in run.metrics.items() if _is_told(key, value)},
        job=job.id,
        unhealthy=_unhealthy(run),
        canary=_canary(run),
    )

    def admit() -> PolicyVersion | None:
        ledger.check(run.lease)
        return store.version_of_job(job.adapter, job.id)

    return store.publish(job.adapter, run.learner.save_adapter, info=info, admit=admit)


def _is_told(metric: str, value: float) -> bool:
    """Return whether it is one of those that a version tells. The ledger keeps finite ones only: a job that continues
    knows no others."""
    return metric.startswith(("reward/", "loss/")) and math.isfinite(value)


def _unhealthy(run: _Run) -> str | None:
    """Return what is wrong with the job by its metrics, where that is an error; None where its version may become
    active."""
    report = examine_job(run.place.ledger.metrics(run.lease.job.id))
    errors = [finding for finding in report.standing if finding.severity == "error"]
    return "; ".join(f"{finding.says} ({finding.label})" for finding in errors) or None


def _canary(run: _Run) -> dict[str, list[int] | list[float]]:
    """Return what a sampler that has loaded the adapter must compute, too."""
    sample = next(sample for sample in run.task.samples if sample.completion_ids)
    ids = sample.completion_ids[:CANARY_TOKENS]
    probe = Sample(prompt_ids=sample.prompt_ids, completion_ids=ids, mask=(1,) * len(ids))
    (logprobs,) = run.learner.forward([probe])
    if not all(map(math.isfinite, logprobs)):
        raise TrainingError(
            "the trained adapter gives log-probabilities that are not finite, so it is not published",
            hint="lower learning_rate",
        )
    return {"prompt_ids": list(sample.prompt_ids), "completion_ids": list(ids), "logprobs": list(logprobs)}
