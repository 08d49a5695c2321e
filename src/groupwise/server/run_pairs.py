"""Differences of evaluations of runs on disk, prompt by prompt, with their errors (`run.evaluate.paired_tests`).

    within    one run: a later evaluation less an earlier one
    against   several runs: the last evaluation of each less that of the first

The same held-out prompts are answered on both sides, so a difference is the mean of what each prompt's reward changed
by. Its error is that of these changes: much smaller than if the two means were taken for independent.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from groupwise.errors import DataError
from groupwise.run.evaluate import Evaluation, evaluation_files, load_evaluations, paired_tests
from groupwise.server.rollout_view import finite
from groupwise.server.run_files import RunFiles
from groupwise.server.schema_runs import PairedChange, RunBeside

_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, IndexError, OSError)  # what a damaged file raises

log = logging.getLogger(__name__)


def within(run: RunFiles, first: int, last: int) -> list[PairedChange]:
    """Return what changed from the evaluation at step `first` to that at step `last`, for each mode and measure that
    both have; nothing where they cannot be read or are not of the same prompts."""
    return _changes(_read(run.directory, last), _read(run.directory, first))


def against(runs: Sequence[RunFiles]) -> list[RunBeside]:
    """Return how each run but the first compares with the first; a run is left out where its last evaluation is not
    of the same prompts."""
    first, *others = runs
    yardstick = _last(first.directory)
    found = ((run, _changes(_last(run.directory), yardstick)) for run in others)
    return [RunBeside(run=run.id, against=first.id, changes=changes) for run, changes in found if changes]


def _changes(new: Mapping[str, Evaluation], old: Mapping[str, Evaluation]) -> list[PairedChange]:
    shared = [mode for mode in new if mode in old]
    try:
        tests = paired_tests({mode: new[mode] for mode in shared}, old)
    except (DataError, *_DAMAGE) as error:
        log.info("two evaluations are not compared: %s", error)
        return []
    return [
        PairedChange(
            measure=measure,
            prompts=test.prompts,
            difference=test.difference,
            error=finite(test.standard_error),
            p=test.p_value,
        )
        for measure, test in tests.items()
    ]


def _last(directory: Path) -> Mapping[str, Evaluation]:
    steps = [step for files in evaluation_files(directory).values() for step in files]
    return _read(directory, max(steps)) if steps else {}


def _read(directory: Path, step: int) -> Mapping[str, Evaluation]:
    try:
        return load_evaluations(directory, step)
    except (DataError, *_DAMAGE) as error:
        log.warning("the evaluation at step %d is left out: %s: %s", step, type(error).__name__, error)
        return {}
