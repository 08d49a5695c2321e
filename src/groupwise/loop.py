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

`run` wraps the loop in what a person needs: a run directory (`rundir`), checkpoints to go on from, evaluation before,
during and after (`running`), a display, a clean Ctrl-C.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from groupwise.assemble import Elsewhere, make_plan, open_parts
from groupwise.cluster.learners import on_all_ranks
from groupwise.config.run import RunConfig
from groupwise.display import Display, open_display
from groupwise.interrupt import StopRequest
from groupwise.rewards.base import RewardFunction
from groupwise.running import Evaluations, Running
from groupwise.store.checkpoint import RunState
from groupwise.store.rundir import open_run_dir
from groupwise.store.tracking import open_trackers
from groupwise.tasks.transcript import template_check
from groupwise.types import PolicyVersion

if TYPE_CHECKING:
    from groupwise.train.ranks import Ranks


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


def run(
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
