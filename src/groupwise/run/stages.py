"""The stages of a run, one after another, before it: runs of their own in its directory.

    <run>/stages/examples/    a whole run directory: configuration, metrics, checkpoints, adapters
    <run>/stages/...          the next one, which starts from the adapter of the one before
    <run>/                    the run itself, which starts from the last one's

A run that is resumed continues with the stage in which it was killed; those that were finished are not done again.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from groupwise.config.run import RunConfig, dump_resolved
from groupwise.config.stages import STAGES, stage_config, stage_names
from groupwise.config.world import world
from groupwise.run.plan import make_plan
from groupwise.store import checkpoint, files
from groupwise.store.rundir import CONFIG, check_begun, reserve_run_dir

if TYPE_CHECKING:
    from groupwise.run.loop import RunResult


def run_stages(config: RunConfig, run: Callable[[RunConfig], RunResult]) -> tuple[RunConfig, RunResult | None]:
    """Have `run` do all stages of a configuration. Returns the run that is left to do, with its directory; and the
    result of the stage that was interrupted, or trained nothing, after which nothing is left to do.

    Raises:
        GroupwiseError: of any of the stages, before the first of them begins; or what `run` raises.
    """
    stages, here = [stage_config(config, number) for number in range(len(config.stages))], world()
    for stage in stages if here.leads else ():
        make_plan(stage)
    run_dir = _reserved(config)
    config, start = config.model_copy(update={"run_dir": str(run_dir)}), None
    for name, stage in zip(stage_names(config), stages, strict=True):
        directory = run_dir / STAGES / name
        if here.size > 1 or not checkpoint.is_over(directory):  # of several processes only the first would see it
            where = {"run_dir": str(directory), "resume": "auto"}
            adapters = stage.adapters if start is None else stage.adapters.model_copy(update={"start": str(start)})
            result = run(stage.model_copy(update={**where, "adapters": adapters}))
            if result.interrupted or not result.trained:
                return config, result
        start = directory
    return config, None


def _reserved(config: RunConfig) -> Path:
    """Return the run's directory, in which its configuration stands from now on, so that it is found again. Raises
    ConfigError where stages of another run were trained in it."""
    if not world().leads:  # only the first process writes to it
        return config.run_path(now=datetime.now(UTC))
    run_dir = reserve_run_dir(config)
    check_begun(run_dir, config)  # stages that are over are not looked at again
    if not (run_dir / CONFIG).exists():
        with files.writing(f"making the run directory {run_dir}"):
            files.replace(run_dir / CONFIG, dump_resolved(config))
    return run_dir
