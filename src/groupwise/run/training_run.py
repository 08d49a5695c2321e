"""A run in progress: its components, its policy, its state; what `train` calls in a step and around it."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from groupwise.algo.metrics import Metrics, rollout_metrics, time_metrics
from groupwise.config.stages import STAGES, stage_names
from groupwise.model.image_tokens import vision_of
from groupwise.run.assemble import Components
from groupwise.run.display import Display
from groupwise.run.evaluate import (
    BestVersion,
    Evaluation,
    evaluate,
    load_evaluations,
    run_summary,
    save_evaluations,
)
from groupwise.run.health import Event, HealthMonitor
from groupwise.run.held_out_loss import held_out_loss, held_out_samples
from groupwise.run.plan import RunPlan
from groupwise.run.policy import Policy
from groupwise.run.promote import Promotion
from groupwise.run.update import PolicyUpdates
from groupwise.sampler import GivesMemoryBack
from groupwise.seeds import seed_of
from groupwise.store import checkpoint
from groupwise.store.adapters import AdapterStore
from groupwise.store.checkpoint import RunState
from groupwise.store.locate import find_adapter
from groupwise.store.rundir import ADAPTERS, IMAGES, METRICS
from groupwise.store.tracking import Tracking, read_metrics
from groupwise.types import PolicyVersion, RolloutGroup, Sample

Evaluations = Mapping[str, Evaluation]  # by mode


class TrainingRun:
    """A run in progress: everything of it that `train` calls and that changes from step to step."""

    def __init__(self, plan: RunPlan, parts: Components, run_dir: Path, *, tracking: Tracking, display: Display):
        self.plan, self.parts, self.run_dir = plan, parts, run_dir
        self.tracking, self.display, self.health = tracking, display, HealthMonitor(plan.config)
        if (vision := vision_of(parts.base.model)) is not None:
            vision.keep_in(run_dir / IMAGES)
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
        self._checkpoint: RunState | None = None  # the newest one's, without the states of the parts
        self._held_out: list[Sample] | None = None  # what the loss is computed of, once it was prepared
        self._started = self._sampling_s = 0.0  # of the present step: when it began, seconds spent waiting for groups

    def _promotion(self, store: AdapterStore) -> Promotion | None:
        config, parts = self.plan.config, self.parts
        if config.promote is None:
            return None
        temperature = config.eval_sampling().temperature
        others = {"base": parts.base, "temperature": temperature, "prompts": len(parts.eval_prompts)}
        return Promotion(config.promote, self.policy, store, parts.engine, self._evaluation, **others)

    def _evaluations_after(self, step: int) -> int:
        """Return how many evaluations follow that of `step`: every so many steps, and the last step's."""
        config, steps = self.plan.config.eval, self.plan.config.train.steps
        if config is None or step >= steps:
            return 0
        return math.ceil(steps / config.every) - step // config.every if config.every else 1

    def _open_promotion(self, promotion: Promotion, *, step: int, kept: Mapping[str, Any] | None = None) -> None:
        """Prepare the judging of what is evaluated after `step`, given what a checkpoint kept of it; say where none can
        pass."""
        promotion.open()
        if kept is not None:
            promotion.load_state_dict(kept)
        if (warning := promotion.warning(self._evaluations_after(step))) is not None:
            self.display.note(f"warning: promote: {warning}")

    # -- the state of the run ------------------------------------------------------------------------------------------

    async def begin(self) -> int:
        """Prepare the first step: load the adapter to start from, and evaluate. Return 0, the steps done."""
        if self.promotion is not None:
            self._open_promotion(self.promotion, step=0)
        start = self.plan.config.adapters.start
        if names := stage_names(self.plan.config):
            start = str(self.run_dir / STAGES / names[-1])
        if start is not None:
            located = find_adapter(start)
            located.check_base(self.parts.base.hash)
            with located.held():
                self.policy.begin(located.directory)
            if self.plan.keeps_reference:
                self.parts.learner.keep_reference()
        self.parts.batches.sync(self.policy.sampling, step=0)
        await self.evaluate(0)
        return 0

    def resume(self, state: RunState) -> int:
        """Continue from the newest checkpoint with this state. Return the steps done."""
        found, saved, batches = checkpoint.newest(self.run_dir), state.parts, self.parts.batches
        assert found is not None
        self.parts.learner.load(found)
        self.updates.load_state_dict(saved["update"])
        batches.load_state_dict(saved["batches"])
        self._best.load_state_dict(saved["best"])
        self._evaluated = {PolicyVersion.parse(version): step for version, step in saved["evaluated"].items()}
        self.policy.resume(newest=state.version, sampling=state.sampler, step=saved["published"])
        if self.promotion is not None:
            self._open_promotion(self.promotion, step=state.step, kept=saved["promotion"])
        self._hold(state)
        batches.sync(state.sampler, step=state.synced)
        self.parts.scorer.begin_step(state.step)  # what is evaluated before the next step is told of this one
        self.health.replay(read_metrics(self.run_dir / METRICS))
        self.display.note(
            f"the run in {self.run_dir} was finished after step {state.step}"
            if state.finished
            else f"going on after step {state.step} in {self.run_dir}"
        )
        return state.step

    def save_checkpoint(self, step: int, *, finished: bool) -> None:
        """Write a checkpoint of the run after `step`; after a second call for a step, what was evaluated since is in
        it, too."""
        version = self.publish({}, sync=False)
        state = RunState(
            step=step,
            version=version,
            sampler=self.policy.sampling,
            synced=self.parts.batches.synced,
            finished=finished,
            concluded=False,
            parts={
                "update": self.updates.state_dict(),
                "batches": self.parts.batches.state_dict(),
                "best": self._best.state_dict(),
                "evaluated": {str(version): at for version, at in self._evaluated.items()},
                "published": self.policy.step,
                "promotion": None if self.promotion is None else self.promotion.state_dict(),
            },
        )
        if self._checkpoint is not None and self._checkpoint.step == step:  # the learner is what it was
            checkpoint.restate(self.run_dir, state)
        else:
            checkpoint.save(self.run_dir, self.parts.learner, state)
        self._hold(state)

    # -- a step --------------------------------------------------------------------------------------------------------

    async def sample_and_score(self, step: int) -> AsyncIterator[list[RolloutGroup]]:
        """Yield the groups of a step, sampled by the policy and scored when their completions are complete: all at
        once, or `rollout.stream_groups` at a time. The caller trains on them before it waits for the next."""
        self._started, self._sampling_s = time.monotonic(), 0.0
        self.parts.scorer.begin_step(step)
        waits_since = self._started
        self.display.phase("sampling")
        async for groups in self.parts.batches.sample_and_score(chunk=self.plan.config.rollout.stream_groups):
            self._sampling_s += time.monotonic() - waits_since
            if isinstance(self.parts.engine, GivesMemoryBack):
                await self.parts.engine.rest()
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
        """Return the policy as it is now, as a version; with `sync` the one that samples from now on."""
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
        seconds = {"step": time.monotonic() - self._started}
        if "time/train_s" in metrics:  # now with what was trained in them
            seconds["train"] = metrics["time/train_s"]
        metrics = {**metrics, **time_metrics(metrics, seconds)}
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
        result = await self._evaluation(version) if parts.eval_prompts else {}
        save_evaluations(self.run_dir, step, result)
        if metrics := await self._held_out_loss():
            told = "  ".join(f"{name.removeprefix('eval/')} {value:.4g}" for name, value in metrics.items())
            rows = len({sample.group for sample in self._held_out or ()})
            self.display.note(f"evaluation at step {step}, {rows} held-out rows: {told}")
        for each in result.values():
            metrics |= each.metrics(by=config.by) | each.details()
        self.tracking.log(step, metrics)
        if result:
            means = "  ".join(f"{mode} {each.said()}" for mode, each in result.items())
            self.display.note(
                f"evaluation at step {step}, {len(parts.eval_prompts)} held-out prompts, mean reward: {means}"
            )
        for failures in filter(None, (each.failures() for each in result.values())):
            self.display.note(failures)
        self._watch(step, metrics)
        self._evaluated[version] = step
        if config.best == "loss":
            self._best.observe(version, -metrics["eval/loss"])
        elif config.best is not None:
            self._best.observe(version, result[config.best].mean())
        await self._promote(step, version, result)
        self._protect()
        return self.out_of_patience

    def evaluated(self, step: int) -> bool:
        """Return whether the policy was evaluated after this step."""
        return step in self._evaluated.values()

    @property
    def out_of_patience(self) -> bool:
        """Return whether `eval.patience` evaluations in a row were no better than the best, so that the run ends."""
        return self._best.stop

    async def _evaluation(self, version: PolicyVersion, *, draw: int = 0) -> Evaluations:
        """`version` on the held-out prompts; with another `draw` than 0, which all evaluations of the run have, by
        other seeds."""
        config, parts, seed = self.plan.config.eval, self.parts, self.plan.config.seed
        assert config is not None
        return await evaluate(
            parts.play,
            parts.eval_prompts,
            parts.scorer,
            version=version,
            params=self.plan.config.eval_sampling(),
            modes=config.modes,
            seed=seed if draw == 0 else seed_of("evaluation", seed, draw) >> 20,
            k=config.k,
            success=config.success,
            answer=self.plan.answer,
            counted=parts.scorer.beside(self.plan.eval_rewards),
        )

    async def _held_out_loss(self) -> Metrics:
        """Return the loss of the held-out rows under the policy as it is; nothing where the run has none."""
        plan, parts = self.plan, self.parts
        if not plan.eval_answers:
            return {}
        if self._held_out is None:
            self._held_out = await held_out_samples(plan.eval_answers, parts.rollouts)
        samples, preferences = self._held_out, plan.config.dpo if plan.config.kind == "dpo" else None
        return await self.updates.in_learner_thread(lambda: held_out_loss(parts.learner, samples, preferences))

    async def _promote(self, step: int, version: PolicyVersion, result: Evaluations) -> None:
        """Let what was evaluated become the active version, or not, and say so; `promote` decides."""
        if self.promotion is None:
            return
        if step == 0:
            return await self.promotion.begin(version, result)
        told = await self.promotion.consider(version, result, later=self._evaluations_after(step))
        if told is not None:
            event = Event(kind="note", step=step, text=told)
            self.tracking.health([event])
            self.display.health([event], self.health.standing)

    async def conclude(self, step: int, *, finished: bool) -> tuple[PolicyVersion, Evaluations, Evaluations]:
        """Return the run's policy after `step`, which is made active unless `promote` decides what is, the evaluations
        before the run and of that policy: where it was chosen among several by the evaluations (`eval.best`) one by
        other seeds, as the draws that made it the best were lucky ones. Where all parameters are trained it is the
        last, as there are no weights of others. The trackers are told. A run that is killed in here concludes when it
        is resumed, and is over (`finished`) after that."""
        version, newest = self._best.version or self.policy.newest, self.policy.newest
        if self.parts.learner.lora is None:
            if version != newest:
                self.display.note(f"{version} was the best, and {newest} is kept: all parameters are trained")
            version = newest
            self.parts.learner.save_adapter(self._model_dir())
        elif self.promotion is None:
            self.policy.activate(version)
        else:
            self.promotion.conclude()
        before, after = {}, {}
        if self.plan.config.eval is not None:
            before, after = (load_evaluations(self.run_dir, at) for at in (0, self._evaluated[version]))
            after = await self._evaluated_again(version) or after
        self.tracking.summary(step, {"version": str(version), "steps": step, **run_summary(before, after)})
        if finished:
            checkpoint.conclude(self.run_dir)
        return version, before, after

    async def _evaluated_again(self, version: PolicyVersion) -> Evaluations:
        """Return the evaluation of the version that was chosen by its evaluation, by seeds that did not choose it;
        nothing where there was no choice, or by the loss of held-out rows."""
        config = self.plan.config.eval
        several = config is not None and config.best in config.modes and len(self._evaluated) > 1
        if not several or version != self._best.version:
            return {}
        step = self._evaluated[version]
        if not (result := load_evaluations(self.run_dir, step, again=True)):
            self.display.phase("evaluating")
            with self.policy.held(version):
                result = await self._evaluation(version, draw=1)
            save_evaluations(self.run_dir, step, result, again=True)
        means = "  ".join(f"{mode} {each.said()}" for mode, each in result.items())
        self.display.note(f"{version} was the best of {len(self._evaluated)}; evaluated again, by other seeds: {means}")
        return result

    def _watch(self, step: int, metrics: Mapping[str, float]) -> None:
        """Say what is wrong, when it begins and when it ends, and write it down."""
        events = self.health.step(step, metrics)
        self.tracking.health(events)
        self.display.health(events, self.health.standing)

    def _model_dir(self) -> Path:
        directory = self.run_dir / "model"
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def _hold(self, newest: RunState) -> None:
        """Remember the newest checkpoint, which was written or read just now, and protect its versions."""
        self._checkpoint = replace(newest, parts={})
        self._protect()

    def _protect(self) -> None:
        """Protect the versions that must stay on the disk: evaluated ones, and those of the newest checkpoint."""
        newest = self._checkpoint
        self.policy.protected = {*self._evaluated, *(() if newest is None else (newest.version, newest.sampler))}
