"""THE RL LOOP. Read this first: `train`, at the end of this file, is the algorithm.

    for each step:
        groups   = sample G completions for each of P prompts with the policy, and score them     sample_and_score
        A        = each completion's advantage: its reward relative to its group                  advantages
        learner  . one or more optimizer steps on the policy loss of (tokens, logprobs, A)        train
        policy   = the next adapter version: published, loaded, sampled from                      publish
                   and every so many steps: evaluate, checkpoint

That is GRPO (DeepSeekMath, arXiv 2402.03300). Groups whose rewards are all equal teach nothing and are replaced while
sampling continues (`batches`). As it stands the loop is on-policy: a step's completions are sampled by the version that
the step then trains, so behaviour logprobs are the anchor of the ratio and no extra forward is run.
`rollout.weight_sync_interval` and `rollout.max_staleness` let sampling run ahead of training; `batches` explains how.

What a person needs besides is `TrainingRun`: a run directory (`store/rundir.py`), checkpoints to go on from, evaluation
before, during and after, a display; and `StopRequest`, a clean Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from groupwise.config.run import RunConfig
from groupwise.model.load import auto_class
from groupwise.platform import run_coroutine
from groupwise.rewards.call import RewardFunction
from groupwise.run.assemble import Beside, RemoteBackends, open_components
from groupwise.run.display import Display, open_display
from groupwise.run.plan import RunPlan, make_plan
from groupwise.run.ranks import on_all_ranks
from groupwise.run.stages import run_stages
from groupwise.run.stop_request import StopRequest
from groupwise.run.training_run import Evaluations, TrainingRun
from groupwise.store.checkpoint import RunState
from groupwise.store.rundir import open_run_dir, shown_name
from groupwise.store.tracking import open_trackers
from groupwise.tasks.template_check import template_check
from groupwise.types import PolicyVersion

if TYPE_CHECKING:
    from groupwise.train.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a run: its directory, its policy (the best version where `eval.best` asks for it and an adapter is
    trained, else the last), the evaluations before it and of that policy (empty without `eval`), and the version that
    `promote` made active, if any. `newest` is the last version, `trained` whether a step changed the policy, and
    `out_of_patience` whether `eval.patience` ended the run. `loaded_by` is the class of transformers that loads the
    base model."""

    run_dir: Path
    version: PolicyVersion
    steps: int
    interrupted: bool
    before: Evaluations
    after: Evaluations
    promoted: PolicyVersion | None = None
    newest: PolicyVersion
    trained: bool
    out_of_patience: bool = False
    loaded_by: str


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
    before the first step. What `config.stages` names is run first, in the run's directory (`run/stages.py`). Under
    torchrun each process calls this, and rank 0 does it (`cluster.learners`).

    Raises:
        ConfigError, DataError, ModelError, LoadError: the run cannot begin; nothing was trained.
        RewardError, EnvError: nothing can be scored any more.
        TrainingError, EngineError: the numbers are not finite any more, or the sampler is lost.
        StorageError: the run's directory cannot be written, or another process trains in it.
    """

    if config.stages:
        run_stage = partial(run_loop, display=display, remote=remote, stop=stop)
        config, earlier = run_stages(config, run_stage)
        if earlier is not None:
            return earlier
        plan = None if plan is None else replace(plan, config=config)

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
    with opened_run(plan, shown=shown, ranks=ranks, remote=remote) as (run, state):
        return run_coroutine(train(run, state, stop=stop))


@contextmanager
def opened_run(
    plan: RunPlan,
    *,
    shown: Display,
    ranks: Ranks | None = None,
    remote: RemoteBackends | None = None,
    beside: Beside | None = None,
) -> Iterator[tuple[TrainingRun, RunState | None]]:
    """Context manager: a run with its directory, its components and its trackers, and the state that it continues from;
    what `train` takes. Raises as `run_loop` before the first step."""
    config = plan.config
    resolved = config.model_dump(mode="json")
    with (
        open_run_dir(config, note=shown.note) as (run_dir, state),
        open_components(plan, on_phase=shown.phase, say=shown.note, ranks=ranks, remote=remote, beside=beside) as parts,
        open_trackers(
            config.tracking, run_dir=run_dir, run_name=shown_name(run_dir), resolved_config=resolved
        ) as tracking,
    ):
        if plan.env is not None:
            shown.note(str(template_check(parts.base.tokenizer)))
        for warning in plan.warnings:
            shown.note(f"warning: {warning}")
        yield TrainingRun(plan, parts, run_dir, tracking=tracking, display=shown), state


async def train(run: TrainingRun, state: RunState | None, *, stop: StopRequest) -> RunResult:
    """Run the algorithm: sample, score, advantages, train, publish; then log, evaluate, checkpoint. It begins at step
    1, or continues from the `state` of a checkpoint."""
    config, batches = run.plan.config, run.parts.batches
    step = await run.begin() if state is None else run.resume(state)
    last, stopped = step == config.train.steps or (state is not None and state.finished), False
    stop.graceful = True
    try:
        # an evaluation in which the run was killed comes first
        if state is not None and _is_evaluated(config, step, last=last) and not run.evaluated(step):
            last |= await run.evaluate(step)
            run.save_checkpoint(step, finished=last)
        while not (last or stopped):
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

            last, stopped = step == config.train.steps, stop.requested
            if _is_evaluated(config, step, last=last or stopped):
                if stopped:  # who asked for it may not wait for the evaluation
                    run.save_checkpoint(step, finished=False)
                last |= await run.evaluate(step) and not stopped
            if last or stopped or _every(config.checkpoint.every, step):
                run.save_checkpoint(step, finished=last)
    finally:
        await batches.close()
    version, before, after = await run.conclude(step, finished=last)
    return RunResult(
        run_dir=run.run_dir,
        version=version,
        steps=step,
        interrupted=stop.requested,
        before=before,
        after=after,
        promoted=None if run.promotion is None else run.promotion.promoted,
        newest=run.policy.newest,
        trained=run.updates.changed > 0,
        out_of_patience=run.out_of_patience,
        loaded_by=auto_class(run.parts.base.model.config).__name__,
    )


def _is_evaluated(config: RunConfig, step: int, *, last: bool) -> bool:
    return config.eval is not None and (last or _every(config.eval.every, step))


def _every(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0
