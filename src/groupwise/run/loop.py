"""THE RL LOOP. Read this first.

    for each step:
        groups   = sample G completions for each of P prompts with the policy, and score them        (batches)
        groups   = those whose rewards differ (the others teach nothing and were replaced)
        A        = each completion's advantage: its reward relative to its group                     (update)
        learner  . one or more optimizer steps on the policy loss of (tokens, behaviour logprobs, A)
        policy   = the next adapter version: published, loaded, sampled from                         (swap)

That is GRPO (DeepSeekMath, arXiv 2402.03300). As it stands the loop is on-policy: a step's completions are sampled by
the version that the step then trains, so behaviour logprobs are the anchor of the ratio and no extra forward is run.
`rollout.weight_sync_interval` and `rollout.max_staleness` let sampling run ahead of training; `batches` explains how.

`run_loop` adds what a person needs: a run directory (`rundir`), checkpoints to go on from, evaluation before,
during and after (`running`), a display, a clean Ctrl-C.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from groupwise.algo.metrics import Metrics, time_metrics
from groupwise.config.run import RunConfig
from groupwise.rewards.base import RewardFunction
from groupwise.run.assemble import Elsewhere, Parts, Plan, make_plan, open_parts
from groupwise.run.display import Display, open_display
from groupwise.run.evaluate import BestVersion, Evaluation, evaluate, load_evaluations, save_evaluations
from groupwise.run.health import Health
from groupwise.run.launch import on_all_ranks
from groupwise.run.policy import Policy
from groupwise.run.update import Update
from groupwise.store import checkpoint
from groupwise.store.adapters import AdapterStore
from groupwise.store.checkpoint import RunState
from groupwise.store.rundir import ADAPTERS, METRICS, find_adapter, open_run_dir
from groupwise.store.tracking import Tracking, open_trackers, read_metrics
from groupwise.tasks.transcript import template_check
from groupwise.types import PolicyVersion, RolloutGroup

if TYPE_CHECKING:
    from groupwise.train.ranks import Ranks


# ----------------------------------------------------------------------------------------------------------------------
# A run in progress: its machines, its policy, where it stands; what `loop` does around a step.
# ----------------------------------------------------------------------------------------------------------------------

Evaluations = Mapping[str, Evaluation]  # by mode


class Running:
    """What changes while a run goes on. `changed` is the last step that changed the policy."""

    def __init__(self, plan: Plan, parts: Parts, run_dir: Path, *, tracking: Tracking, display: Display):
        self.plan, self.parts, self.run_dir = plan, parts, run_dir
        self.tracking, self.display, self.health = tracking, display, Health(plan.config)
        self.update = Update(plan, parts.learner, parts.scorer)
        self.policy = Policy(
            parts.learner,
            AdapterStore(run_dir / ADAPTERS),
            parts.engine,
            name=plan.config.name,
            base=parts.base,
            keep=plan.config.adapters.keep,
            config_hash=plan.config_hash,
        )
        self._best = BestVersion(patience=0 if plan.config.eval is None else plan.config.eval.patience)
        self._evaluated: dict[PolicyVersion, int] = {}  # the step at which a version was

    # -- where it stands -----------------------------------------------------------------------------------------------

    async def begin(self) -> int:
        """Before the first step: the adapter to start from, the evaluation before. Returns 0, the steps done."""
        if (start := self.plan.config.adapters.start) is not None:
            located = find_adapter(start)
            located.check_base(self.parts.base.hash)
            with located.held():
                self.policy.begin(located.directory)
            if self.plan.reads_reference:
                self.parts.learner.keep_reference()
        self.parts.batches.sync(self.policy.sampling, step=0)
        await self.evaluate(0)
        return 0

    def resume(self, standing: RunState) -> int:
        """Go on from the newest checkpoint, whose standing this is. Returns the steps done."""
        found, saved, batches = checkpoint.newest(self.run_dir), standing.parts, self.parts.batches
        assert found is not None
        self.parts.learner.load(found)
        self.update.load_state_dict(saved["update"])
        batches.load_state_dict(saved["batches"])
        self._best.load_state_dict(saved["best"])
        self._evaluated = {PolicyVersion.parse(version): step for version, step in saved["evaluated"].items()}
        self.policy.resume(newest=standing.version, sampling=standing.sampler, step=saved["published"])
        self._protect()
        batches.sync(standing.sampler, step=standing.synced)
        self.health.replay(read_metrics(self.run_dir / METRICS))
        self.display.note(
            f"the run in {self.run_dir} was finished after step {standing.step}"
            if standing.finished
            else f"going on after step {standing.step} in {self.run_dir}"
        )
        return standing.step

    def save(self, step: int, *, finished: bool) -> None:
        """Write a checkpoint of the run after `step`."""
        version = self.publish({}, sync=False)
        standing = RunState(
            step=step,
            version=version,
            sampler=self.policy.sampling,
            synced=self.parts.batches.synced,
            finished=finished,
            parts={
                "update": self.update.state_dict(),
                "batches": self.parts.batches.state_dict(),
                "best": self._best.state_dict(),
                "evaluated": {str(version): at for version, at in self._evaluated.items()},
                "published": self.policy.step,
            },
        )
        checkpoint.save(self.run_dir, self.parts.learner, standing)
        self._protect()

    # -- around a step -------------------------------------------------------------------------------------------------

    def publish(self, metrics: Mapping[str, float], *, sync: bool) -> PolicyVersion:
        """The policy as it is now, as a version."""
        if not self.update.changed:
            return self.policy.newest
        kept = {key: value for key, value in metrics.items() if key == "reward/mean"}
        return self.policy.publish(step=self.update.changed, metrics=kept, sync=sync)

    def sync(self, step: int, metrics: Mapping[str, float]) -> Metrics:
        """Sample with the policy as it is now. Returns how long that took."""
        started = time.monotonic()
        self.parts.batches.sync(self.publish(metrics, sync=True), step=step)
        return {"time/sync_s": time.monotonic() - started}

    def log(self, step: int, trained: Sequence[RolloutGroup], metrics: Mapping[str, float], *, seconds: float) -> None:
        """Write a step down and show it."""
        collected = self.parts.batches.collected
        with_advantage = {id(plain): group for plain, group in zip(collected.groups, trained, strict=True)}
        metrics = {**metrics, **time_metrics(metrics, {"step": seconds})}
        self.tracking.log(step, metrics)
        self.tracking.rollouts(step, [with_advantage.get(id(group), group) for group in collected.sampled])
        self.display.step(step, metrics)
        self._watch(step, metrics)

    async def evaluate(self, step: int) -> bool:
        """Evaluate the policy as it is, log it and say it in a line; whether to stop, since nothing gets better."""
        config, parts = self.plan.config.eval, self.parts
        if config is None:
            return False
        self.display.phase("evaluating")
        version = self.publish({}, sync=False)
        result = await evaluate(
            parts.play,
            parts.eval_prompts,
            parts.scorer,
            version=version,
            params=self.plan.config.rollout.sampling(),
            modes=config.modes,
            seed=self.plan.config.seed,
            k=config.k,
            success=config.success,
        )
        save_evaluations(self.run_dir, step, result)
        metrics = {}
        for each in result.values():
            metrics |= each.metrics(by=config.by) | each.details()
        self.tracking.log(step, metrics)
        means = "  ".join(f"{mode} {each.mean():.1%}" for mode, each in result.items())
        self.display.note(
            f"evaluation at step {step}, {len(parts.eval_prompts)} held-out prompts, mean reward: {means}"
        )
        for failures in filter(None, (each.failures() for each in result.values())):
            self.display.note(failures)
        self._watch(step, metrics)
        self._evaluated[version] = step
        if config.best is not None:
            self._best.observe(version, result[config.best].mean())
        self._protect()
        return self._best.stop

    def conclude(self) -> tuple[PolicyVersion, Evaluations, Evaluations]:
        """The run's policy, which is made active, the evaluations before the run and of that policy."""
        version = self._best.version or self.policy.newest
        if self.parts.learner.lora is None:
            self.parts.learner.save_adapter(self._model_dir())
        else:
            self.policy.activate(version)
        if self.plan.config.eval is None:
            return version, {}, {}
        before, after = (load_evaluations(self.run_dir, at) for at in (0, self._evaluated[version]))
        return version, before, after

    def _watch(self, step: int, metrics: Mapping[str, float]) -> None:
        """Say what is wrong, when it begins and when it ends, and write it down."""
        events = self.health.step(step, metrics)
        self.tracking.health(events)
        self.display.health(events, self.health.standing)

    def _model_dir(self) -> Path:
        directory = self.run_dir / "model"
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def _protect(self) -> None:
        """What must stay on the disk: evaluated versions, and those of the checkpoint."""
        self.policy.protected = {*self._evaluated, self.policy.newest, self.policy.sampling}


# ----------------------------------------------------------------------------------------------------------------------
# Ctrl-C: while there is a step to be finished the first asks for a clean stop, the second stops at once.
# ----------------------------------------------------------------------------------------------------------------------


class StopRequest:
    """Within: SIGINT and SIGTERM set `requested`; a second one raises KeyboardInterrupt, and so does the first while
    not `graceful`, when nothing has been begun that could be finished. For the main thread only."""

    def __init__(self, *, graceful: bool = True) -> None:
        self.requested, self.graceful = False, graceful
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested or not self.graceful:
            raise KeyboardInterrupt
        self.requested = True
        os.write(2, b"\nstopping after this step; once more stops at once\n")  # print may not be called in a handler


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run leaves: its directory, its policy (the best version where `eval.best` asks for it, else the last), the
    evaluations before it and of that policy (empty without `eval`)."""

    run_dir: Path
    version: PolicyVersion
    steps: int
    interrupted: bool
    before: Evaluations
    after: Evaluations


def run_loop(
    config: RunConfig,
    *,
    rewards: Sequence[RewardFunction] | None = None,
    display: Display | None = None,
    elsewhere: Elsewhere | None = None,
    stop: StopRequest | None = None,
) -> RunResult:
    """Train as `config` says. `rewards` replaces the configured functions, `elsewhere` engine, reward workers and
    environments, and `stop` is who else may ask for a clean stop.

    Ctrl-C finishes the step, publishes it and returns with `interrupted`; a second one stops at once, and so does one
    before the first step. Under torchrun each process calls this, and rank 0 does it (`cluster.learners`).
    """

    def lead(ranks: Ranks | None) -> RunResult:
        with stop or StopRequest(graceful=False) as asked, display or open_display(config.train.steps) as shown:
            return _run(config, ranks, rewards=rewards, shown=shown, elsewhere=elsewhere, stop=asked)

    return on_all_ranks(config, lead)


def _run(
    config: RunConfig,
    ranks: Ranks | None,
    *,
    rewards: Sequence[RewardFunction] | None,
    shown: Display,
    elsewhere: Elsewhere | None,
    stop: StopRequest,
) -> RunResult:
    plan = make_plan(config, rewards=rewards)
    resolved = config.model_dump(mode="json")
    with (
        open_run_dir(config) as (run_dir, standing),
        open_parts(plan, on_phase=shown.phase, say=shown.note, ranks=ranks, elsewhere=elsewhere) as parts,
        open_trackers(config.tracking, run_dir=run_dir, run_name=run_dir.name, resolved_config=resolved) as tracking,
    ):
        if plan.env is not None:
            shown.note(str(template_check(parts.base.tokenizer)))
        for warning in plan.warnings:
            shown.note(f"warning: {warning}")
        running = Running(plan, parts, run_dir, tracking=tracking, display=shown)
        return asyncio.run(train(running, standing, stop=stop))


async def train(running: Running, standing: RunState | None, *, stop: StopRequest) -> RunResult:
    """The loop itself."""
    config, batches = running.plan.config, running.parts.batches
    step = await running.begin() if standing is None else running.resume(standing)
    last = step == config.train.steps or (standing is not None and standing.finished)
    stop.graceful = True
    try:
        while not last:
            step, started = step + 1, time.monotonic()
            groups, metrics = await running.update(batches, step=step, on_phase=running.display.phase)
            if _every(config.rollout.weight_sync_interval, step):
                metrics |= running.sync(step, metrics)
            running.log(step, groups, metrics, seconds=time.monotonic() - started)

            last = step == config.train.steps or stop.requested
            if config.eval is not None and (last or _every(config.eval.every, step)):
                last |= await running.evaluate(step)
            if last or _every(config.checkpoint.every, step):
                running.save(step, finished=last and not stop.requested)
    finally:
        await batches.close()
    version, before, after = running.conclude()
    return RunResult(
        run_dir=running.run_dir,
        version=version,
        steps=step,
        interrupted=stop.requested,
        before=before,
        after=after,
    )


def _every(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0
