"""THE RL LOOP. Read this first.

    for each step:
        groups   = sample G completions for each of P prompts with the present policy, and score them
        groups   = those whose rewards differ (the others teach nothing and were replaced)
        A        = each completion's advantage: its reward relative to its group
        learner  . one optimizer step on the policy loss of (tokens, behaviour logprobs, A)
        policy   = the next adapter version: published, loaded, activated

That is GRPO (DeepSeekMath, arXiv 2402.03300). The loop is on-policy: a step's completions are sampled by the version
that the step then trains, so behaviour logprobs are the anchor of the ratio and no extra forward is run. `run` wraps
the loop in what a person needs: a run directory, evaluation before, during and after, a display, a clean Ctrl-C.

    runs/<name>-<time>/  config.yaml  metrics.jsonl  rollouts/step_000001.jsonl  adapters/<name>/v000001/
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from groupwise.adapter_files import Provenance
from groupwise.adapters import AdapterStore
from groupwise.algo.advantage import with_advantages
from groupwise.assemble import Parts, Plan, make_plan, open_parts
from groupwise.config import RunConfig, dump_resolved
from groupwise.display import Display, open_display
from groupwise.errors import ConfigError, StorageError
from groupwise.evaluate import Evaluation, evaluate
from groupwise.health import Health
from groupwise.interrupt import StopRequest
from groupwise.rewards.base import RewardFunction
from groupwise.rollout import Collected, rollout_metrics, samples_of
from groupwise.swap import publish_and_swap
from groupwise.tracking import Tracking, open_trackers
from groupwise.train.learner import learning_rate_at
from groupwise.types import PolicyVersion, RolloutGroup

Evaluations = Mapping[str, Evaluation]  # by mode


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run leaves: its directory, the last policy, the evaluations before and after (empty without `eval`)."""

    run_dir: Path
    version: PolicyVersion
    steps: int
    interrupted: bool
    before: Evaluations
    after: Evaluations


def run(
    config: RunConfig, *, rewards: Sequence[RewardFunction] | None = None, display: Display | None = None
) -> RunResult:
    """Train as `config` says. `rewards` replaces the configured functions.

    Ctrl-C finishes the step, publishes it and returns with `interrupted`; a second one stops at once.
    """
    with StopRequest() as stop, display or open_display(config.train.steps) as shown:
        plan = make_plan(config, rewards=rewards)
        run_dir = open_run_dir(config)
        parts = open_parts(plan, on_phase=shown.phase)
        try:
            with open_trackers(
                config.tracking, run_dir=run_dir, run_name=run_dir.name, resolved_config=config.model_dump(mode="json")
            ) as tracking:
                return asyncio.run(train(plan, parts, run_dir, tracking=tracking, display=shown, stop=stop))
        finally:
            parts.engine.close()


async def train(
    plan: Plan, parts: Parts, run_dir: Path, *, tracking: Tracking, display: Display, stop: StopRequest
) -> RunResult:
    """The loop itself."""
    config, learner, health = plan.config, parts.learner, Health()
    store = AdapterStore(run_dir / "adapters")
    version, step = PolicyVersion.base(), 0
    evaluated: set[PolicyVersion] = set()
    before = after = await _evaluate(plan, parts, version, step=0, tracking=tracking, display=display)

    for step in range(1, config.train.steps + 1):
        started = time.monotonic()
        collected = await parts.collector.collect(step=step, version=version)
        groups = with_advantages(collected.groups, plan.advantage, weights=plan.reward_weights)
        samples = samples_of(groups)
        sampled_s = time.monotonic() - started

        display.phase("training")
        rate = learning_rate_at(
            step - 1,
            peak=config.train.learning_rate,
            warmup_steps=config.train.warmup_steps,
            steps=config.train.steps,
            schedule=config.train.schedule,
        )
        metrics = rollout_metrics(collected, plan.advantage)
        if samples:
            metrics |= learner.step(
                samples,
                plan.loss,
                learning_rate=rate,
                minibatches=config.train.minibatches,
                temperature=config.rollout.temperature,
            )
            trained_s = time.monotonic() - started - sampled_s
            info = Provenance(
                base_model=parts.base.name,
                base_hash=parts.base.hash,
                parent=version,
                step=step,
                config_hash=plan.config_hash,
                metrics={"reward/mean": metrics["reward/mean"]},
            )
            version = publish_and_swap(
                learner, store, parts.engine, name=config.name, info=info, keep=config.adapters.keep, protect=evaluated
            )
            metrics |= {"optim/lr": rate, "time/rollout_s": sampled_s, "time/train_s": trained_s}
        metrics["time/step_s"] = time.monotonic() - started
        metrics["perf/tok_s"] = metrics["rollout/tokens"] / metrics["time/step_s"]
        tracking.log(step, metrics)
        tracking.rollouts(step, _all_groups(collected, groups))
        display.step(step, metrics)
        for finding in health.findings(metrics):
            display.note(f"step {step}: {finding}")

        last = step == config.train.steps or stop.requested
        if config.eval is not None and (last or (config.eval.every and step % config.eval.every == 0)):
            after = await _evaluate(plan, parts, version, step=step, tracking=tracking, display=display)
            evaluated.add(version)
        if last:
            break

    if config.train.lora is None:
        learner.save_adapter(_made(run_dir / "model"))
    return RunResult(
        run_dir=run_dir, version=version, steps=step, interrupted=stop.requested, before=before, after=after
    )


def open_run_dir(config: RunConfig) -> Path:
    """Make the run directory and write the resolved configuration into it.

    Raises ConfigError if it holds a run already, StorageError if it cannot be written.
    """
    run_dir = config.run_path(now=datetime.now(UTC))
    if (run_dir / "metrics.jsonl").exists():
        raise ConfigError(f"run_dir {str(run_dir)!r} already holds a run", hint="name another, or remove it first")
    try:
        _made(run_dir)
        (run_dir / "config.yaml").write_text(dump_resolved(config), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"the run directory {run_dir} cannot be written: {error}") from error
    return run_dir


async def _evaluate(
    plan: Plan, parts: Parts, version: PolicyVersion, *, step: int, tracking: Tracking, display: Display
) -> Evaluations:
    """Evaluate, log under `eval/...` and say it in a line; nothing without `eval`."""
    config = plan.config.eval
    if config is None:
        return {}
    display.phase("evaluating")
    result = await evaluate(
        parts.engine,
        parts.eval_prompts,
        plan.rewards,
        version=version,
        params=plan.config.rollout.sampling(),
        modes=config.modes,
        seed=plan.config.seed,
    )
    metrics = {key: value for each in result.values() for key, value in each.metrics(by=config.by).items()}
    tracking.log(step, metrics)
    means = "  ".join(f"{mode} {each.mean():.1%}" for mode, each in result.items())
    display.note(f"evaluation at step {step}, {len(parts.eval_prompts)} held-out prompts, mean reward: {means}")
    return result


def _all_groups(collected: Collected, trained: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Everything that was sampled, with advantages where it was trained on."""
    with_advantage = {id(plain): group for plain, group in zip(collected.groups, trained, strict=True)}
    return [with_advantage.get(id(group), group) for group in collected.sampled]


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory
