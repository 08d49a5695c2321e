"""A run in progress: its machines, its policy, where it stands; what `loop` does around a step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from groupwise.algo.metrics import Metrics, time_metrics
from groupwise.assemble import Parts, Plan
from groupwise.display import Display
from groupwise.evaluate import BestVersion, Evaluation, evaluate, load_evaluations, save_evaluations
from groupwise.health.watch import Health
from groupwise.store import checkpoint
from groupwise.store.adapters import AdapterStore
from groupwise.store.checkpoint import RunState
from groupwise.store.rundir import ADAPTERS, METRICS, find_adapter
from groupwise.store.tracking import Tracking, read_metrics
from groupwise.swap import Policy
from groupwise.types import PolicyVersion, RolloutGroup
from groupwise.update import Update

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
