"""THE RL LOOP. Read this first: `train`, at the end of this file, is the algorithm.

    for each step:
        groups   = sample G completions for each of P prompts with the policy, and score them     sample_and_score
        A        = each completion's advantage: its reward relative to its group                  advantages
        learner  . one or more optimizer steps on the policy loss of (tokens, logprobs, A)        train
        policy   = the next adapter version: published, loaded, sampled from                      publish
                   and every so many steps: evaluate, checkpoint

That is GRPO (DeepSeekMath, arXiv 2402.03300). Groups whose rewards are all equal teach nothing and are replaced while
sampling goes on (`batches`). As it stands the loop is on-policy: a step's completions are sampled by the version that
the step then trains, so behaviour logprobs are the anchor of the ratio and no extra forward is run.
`rollout.weight_sync_interval` and `rollout.max_staleness` let sampling run ahead of training; `batches` explains how.

What a person needs besides is `TrainingRun`: a run directory (`store/rundir.py`), checkpoints to go on from, evaluation
before, during and after, a display; and `StopRequest`, a clean Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from groupwise.algo.metrics import Metrics, rollout_metrics, time_metrics
from groupwise.config.run import RunConfig
from groupwise.platform import run_coroutine
from groupwise.rewards.base import RewardFunction
from groupwise.run.assemble import Components, RemoteBackends, open_components
from groupwise.run.display import STOPPING, Display, open_display
from groupwise.run.evaluate import BestVersion, Evaluation, evaluate, load_evaluations, save_evaluations
from groupwise.run.health import Event, HealthMonitor
from groupwise.run.launch import on_all_ranks
from groupwise.run.plan import RunPlan, make_plan
from groupwise.run.policy import Policy
from groupwise.run.promote import Promotion
from groupwise.run.update import PolicyUpdates
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
# A run in progress: its components, its policy, its state; what `train` calls in a step and around it.
# ----------------------------------------------------------------------------------------------------------------------

Evaluations = Mapping[str, Evaluation]  # by mode


class TrainingRun:
    """A run in progress: everything of it that `train` calls and that changes from step to step."""

    def __init__(self, plan: RunPlan, parts: Components, run_dir: Path, *, tracking: Tracking, display: Display):
        self.plan, self.parts, self.run_dir = plan, parts, run_dir
        self.tracking, self.display, self.health = tracking, display, HealthMonitor(plan.config)
        self.updates, store = PolicyUpdates(plan, parts.learner), AdapterStore(run_dir / ADAPTERS)
        self.policy = Policy(
            parts.learner,
            store,
            parts.engine,
            name=plan.config.name,
            base=parts.base,
            keep=plan.config.adapters.keep,
            config_hash=plan.config_hash,
            in_use=parts.batches.versions_in_use,
            in_flight=plan.config.rollout.in_flight_cache if plan.config.rollout.in_flight_updates else None,
            by_promotion=plan.config.promote is not None,
        )
        self.promotion = self._promotion(store)
        self._best = BestVersion(patience=0 if plan.config.eval is None else plan.config.eval.patience)
        self._evaluated: dict[PolicyVersion, int] = {}  # the step at which a version was
        self._started = self._sampling_s = 0.0  # of the present step: when it began, seconds spent waiting for groups

    def _promotion(self, store: AdapterStore) -> Promotion | None:
        config, parts = self.plan.config, self.parts
        if config.promote is None:
            return None
        temperature = config.eval_sampling().temperature
        others = {"base": parts.base, "temperature": temperature}
        return Promotion(config.promote, self.policy, store, parts.engine, self._evaluation, **others)

    # -- the state of the run ------------------------------------------------------------------------------------------

    async def begin(self) -> int:
        """Before the first step: the adapter to start from, the evaluation before. Returns 0, the steps done."""
        if self.promotion is not None:
            self.promotion.open()
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

    def resume(self, state: RunState) -> int:
        """Go on from the newest checkpoint, whose state this is. Returns the steps done."""
        found, saved, batches = checkpoint.newest(self.run_dir), state.parts, self.parts.batches
        assert found is not None
        self.parts.learner.load(found)
        self.updates.load_state_dict(saved["update"])
        batches.load_state_dict(saved["batches"])
        self._best.load_state_dict(saved["best"])
        self._evaluated = {PolicyVersion.parse(version): step for version, step in saved["evaluated"].items()}
        self.policy.resume(newest=state.version, sampling=state.sampler, step=saved["published"])
        if self.promotion is not None:
            self.promotion.open()
            self.promotion.load_state_dict(saved["promotion"])
        self._protect()
        batches.sync(state.sampler, step=state.synced)
        self.health.replay(read_metrics(self.run_dir / METRICS))
        self.display.note(
            f"the run in {self.run_dir} was finished after step {state.step}"
            if state.finished
            else f"going on after step {state.step} in {self.run_dir}"
        )
        return state.step

    def save_checkpoint(self, step: int, *, finished: bool) -> None:
        """Write a checkpoint of the run after `step`."""
        version = self.publish({}, sync=False)
        state = RunState(
            step=step,
            version=version,
            sampler=self.policy.sampling,
            synced=self.parts.batches.synced,
            finished=finished,
            parts={
                "update": self.updates.state_dict(),
                "batches": self.parts.batches.state_dict(),
                "best": self._best.state_dict(),
                "evaluated": {str(version): at for version, at in self._evaluated.items()},
                "published": self.policy.step,
                "promotion": None if self.promotion is None else self.promotion.state_dict(),
            },
        )
        checkpoint.save(self.run_dir, self.parts.learner, state)
        self._protect()

    # -- a step --------------------------------------------------------------------------------------------------------

    async def sample_and_score(self, step: int) -> AsyncIterator[list[RolloutGroup]]:
        """The groups of a step, sampled by the policy and scored as soon as their completions are there: all at once,
        or `rollout.stream_groups` at a time. Whoever iterates trains on them before the next are waited for."""
        self._started, self._sampling_s = time.monotonic(), 0.0
        self.parts.scorer.begin_step(step)
        waits_since = self._started
        self.display.phase("sampling")
        async for groups in self.parts.batches.sample_and_score(chunk=self.plan.config.rollout.stream_groups):
            self._sampling_s += time.monotonic() - waits_since
            self.display.phase("training")
            yield groups
            self.display.phase("sampling")
            waits_since = time.monotonic()
        self._sampling_s += time.monotonic() - waits_since
        self.display.phase("training")

    def trained(self, groups: Sequence[RolloutGroup]) -> Metrics:
        """After training on a step's groups, with their advantages: the replay buffer has them, and the metrics of what
        was sampled and of the time that it took."""
        batches, scorer, config = self.parts.batches, self.parts.scorer, self.plan.config
        batches.trained(groups)
        seconds = {"rollout": self._sampling_s, "train": time.monotonic() - self._started - self._sampling_s}
        collected = batches.collected
        metrics = rollout_metrics(
            collected.sampled,
            trained=groups,
            advantage=self.plan.config.algo,
            weights=self.plan.reward_weights,
            batch_groups=config.rollout.prompts_per_step,
            staleness=collected.ages,
            used=collected.groups,
            token_ages=collected.token_ages,
            replayed=collected.replayed,
            rerolled=collected.rerolled,
            too_long=collected.too_long,
        )
        metrics |= scorer.log.metrics() | batches.metrics()
        return metrics | time_metrics(metrics, seconds)

    def publish(self, metrics: Mapping[str, float], *, sync: bool) -> PolicyVersion:
        """The policy as it is now, as a version; with `sync` the one that samples from now on."""
        if not self.updates.changed:
            return self.policy.newest
        kept = {key: value for key, value in metrics.items() if key == "reward/mean"}
        return self.policy.publish(step=self.updates.changed, metrics=kept, sync=sync)

    def publish_and_sync(self, step: int, metrics: Mapping[str, float]) -> Metrics:
        """Publish the policy as it is now and sample with it. Returns how long that took."""
        started = time.monotonic()
        self.parts.batches.sync(self.publish(metrics, sync=True), step=step)
        return {"time/sync_s": time.monotonic() - started}

    def log(self, step: int, trained: Sequence[RolloutGroup], metrics: Mapping[str, float]) -> None:
        """Write a step down and show it."""
        collected = self.parts.batches.collected
        with_advantage = {id(plain): group for plain, group in zip(collected.groups, trained, strict=True)}
        metrics = {**metrics, **time_metrics(metrics, {"step": time.monotonic() - self._started})}
        self.tracking.log(step, metrics)
        self.tracking.rollouts(step, [with_advantage.get(id(group), group) for group in collected.sampled])
        self.display.step(step, metrics)
        self._watch(step, metrics)

    # -- after a step --------------------------------------------------------------------------------------------------

    async def evaluate(self, step: int) -> bool:
        """Evaluate the policy as it is, log it and say it in a line; whether to stop, since nothing gets better."""
        config, parts = self.plan.config.eval, self.parts
        if config is None:
            return False
        self.display.phase("evaluating")
        version = self.publish({}, sync=False)
        result = await self._evaluation(version)
        save_evaluations(self.run_dir, step, result)
        metrics = {}
        for each in result.values():
            metrics |= each.metrics(by=config.by) | each.details()
        self.tracking.log(step, metrics)
        means = "  ".join(f"{mode} {each.said()}" for mode, each in result.items())
        self.display.note(
            f"evaluation at step {step}, {len(parts.eval_prompts)} held-out prompts, mean reward: {means}"
        )
        for failures in filter(None, (each.failures() for each in result.values())):
            self.display.note(failures)
        self._watch(step, metrics)
        self._evaluated[version] = step
        if config.best is not None:
            self._best.observe(version, result[config.best].mean())
        await self._promote(step, version, result)
        self._protect()
        return self._best.stop

    async def _evaluation(self, version: PolicyVersion) -> Evaluations:
        """`version` on the held-out prompts."""
        config, parts = self.plan.config.eval, self.parts
        assert config is not None
        return await evaluate(
            parts.play,
            parts.eval_prompts,
            parts.scorer,
            version=version,
            params=self.plan.config.eval_sampling(),
            modes=config.modes,
            seed=self.plan.config.seed,
            k=config.k,
            success=config.success,
            answer=self.plan.answer,
            counted=parts.scorer.beside(self.plan.eval_rewards),
        )

    async def _promote(self, step: int, version: PolicyVersion, result: Evaluations) -> None:
        """Let what was evaluated become the active version, or not, and say so; `promote` decides."""
        if self.promotion is None:
            return
        if step == 0:
            return await self.promotion.begin(version, result)
        if (told := await self.promotion.consider(version, result)) is not None:
            event = Event(kind="note", step=step, text=told)
            self.tracking.health([event])
            self.display.health([event], self.health.standing)

    def conclude(self) -> tuple[PolicyVersion, Evaluations, Evaluations]:
        """The run's policy, which is made active unless `promote` decides what is, the evaluations before the run and
        of that policy."""
        version = self._best.version or self.policy.newest
        if self.parts.learner.lora is None:
            self.parts.learner.save_adapter(self._model_dir())
        elif self.promotion is None:
            self.policy.activate(version)
        else:
            self.promotion.conclude()
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
    not `graceful`, when nothing has been begun that could be finished. For the main thread only. `announce` is called
    in the signal handler when a clean stop was asked for."""

    def __init__(self, *, graceful: bool = True, announce: Callable[[], None] | None = None) -> None:
        self.requested, self.graceful, self.announce = False, graceful, announce
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
        if self.announce is not None:
            self.announce()
        else:
            os.write(2, f"\n{STOPPING}\n".encode())  # print may not be called in a handler


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run leaves: its directory, its policy (the best version where `eval.best` asks for it, else the last), the
    evaluations before it and of that policy (empty without `eval`), and what `promote` made active, if anything."""

    run_dir: Path
    version: PolicyVersion
    steps: int
    interrupted: bool
    before: Evaluations
    after: Evaluations
    promoted: PolicyVersion | None = None


def run_loop(
    config: RunConfig,
    *,
    rewards: Sequence[RewardFunction] | None = None,
    plan: RunPlan | None = None,
    display: Display | None = None,
    remote: RemoteBackends | None = None,
    stop: StopRequest | None = None,
) -> RunResult:
    """Train as `config` says. `rewards` replaces the configured functions, `plan` is the run's if it was
    made already (`plan.make_plan`), `remote` replaces engine, reward workers and
    environments, and `stop` is who else may ask for a clean stop.

    Ctrl-C finishes the step, publishes it and returns with `interrupted`; a second one stops at once, and so does one
    before the first step. Under torchrun each process calls this, and rank 0 does it (`cluster.learners`).
    """

    def lead(ranks: Ranks | None) -> RunResult:
        with stop or StopRequest(graceful=False) as asked, display or open_display(config.train.steps) as shown:
            asked.announce = shown.stopping
            return _run(plan or make_plan(config, rewards=rewards), ranks, shown=shown, remote=remote, stop=asked)

    return on_all_ranks(config, lead)


def _run(
    plan: RunPlan,
    ranks: Ranks | None,
    *,
    shown: Display,
    remote: RemoteBackends | None,
    stop: StopRequest,
) -> RunResult:
    config = plan.config
    resolved = config.model_dump(mode="json")
    with (
        open_run_dir(config) as (run_dir, state),
        open_components(plan, on_phase=shown.phase, say=shown.note, ranks=ranks, remote=remote) as parts,
        open_trackers(config.tracking, run_dir=run_dir, run_name=run_dir.name, resolved_config=resolved) as tracking,
    ):
        if plan.env is not None:
            shown.note(str(template_check(parts.base.tokenizer)))
        for warning in plan.warnings:
            shown.note(f"warning: {warning}")
        run = TrainingRun(plan, parts, run_dir, tracking=tracking, display=shown)
        return run_coroutine(train(run, state, stop=stop))


async def train(run: TrainingRun, state: RunState | None, *, stop: StopRequest) -> RunResult:
    """The algorithm: sample, score, advantages, train, publish; then log, evaluate, checkpoint. From the beginning, or
    from the `state` of a checkpoint."""
    config, batches = run.plan.config, run.parts.batches
    step = await run.begin() if state is None else run.resume(state)
    last = step == config.train.steps or (state is not None and state.finished)
    stop.graceful = True
    try:
        while not last:
            step += 1
            update = run.updates.begin(step)
            async for groups in run.sample_and_score(step):  # all of the step's at once, unless it is streamed
                await update.advantages(groups, sampled=batches.collected.sampled)
                await update.accumulate()
            metrics = await update.train()
            metrics |= run.trained(update.groups)
            if _every(config.rollout.weight_sync_interval, step):
                metrics |= run.publish_and_sync(step, metrics)
            run.log(step, update.groups, metrics)

            last = step == config.train.steps or stop.requested
            if config.eval is not None and (last or _every(config.eval.every, step)):
                last |= await run.evaluate(step)
            if last or _every(config.checkpoint.every, step):
                run.save_checkpoint(step, finished=last and not stop.requested)
    finally:
        await batches.close()
    version, before, after = run.conclude()
    return RunResult(
        run_dir=run.run_dir,
        version=version,
        steps=step,
        interrupted=stop.requested,
        before=before,
        after=after,
        promoted=None if run.promotion is None else run.promotion.promoted,
    )


def _every(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0
