"""The metrics of a run on disk, whole: one that is damaged is refused, but for a last line that is being written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.errors import ConfigError, DataError
from groupwise.store.rundir import METRICS, ROLLOUTS
from groupwise.store.tracking import read_metrics


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The record of one run. `lines` has a mapping a step; `rollouts` the file of each step."""

    directory: Path
    label: str
    lines: tuple[Mapping[str, Any], ...]
    rollouts: Mapping[int, Path]


def read_run(directory: Path, *, label: str | None = None) -> RunRecord:
    """Read the run in `directory`. Raises ConfigError, with the missing file, if it is not a run; DataError if its
    metrics are damaged."""
    if not directory.is_dir():
        raise ConfigError(f"there is no directory {directory}", hint="name a run's directory, such as runs/NAME-TIME")
    if not (directory / METRICS).is_file():
        inside = sorted(path.parent.name for path in directory.glob(f"*/{METRICS}"))
        hint = f"it holds the runs {', '.join(inside[-3:])}: name one" if inside else "name a run's directory"
        raise ConfigError(f"{directory} is no run: it has no {METRICS}", hint=hint)
    try:
        lines = tuple(read_metrics(directory / METRICS))
    except OSError as error:
        raise DataError(f"{directory / METRICS} cannot be read: {error}") from error
    return RunRecord(
        directory=directory,
        label=label or directory.name,
        lines=lines,
        rollouts=_step_files(directory / ROLLOUTS),
    )


def read_runs(directories: Sequence[Path]) -> list[RunRecord]:
    """Return the runs, labelled by the shortest ends of their paths that tell them apart."""
    paths = [directory.resolve() for directory in directories]
    if len(set(paths)) < len(paths):
        raise ConfigError("the same run is named twice", hint="compare a run with others, each named once")
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return [
        read_run(given, label="/".join(path.parts[-depth:])) for given, path in zip(directories, paths, strict=True)
    ]


def _step_files(directory: Path) -> dict[int, Path]:
    """Return `step_000012.jsonl` of each step."""
    named = ((re.fullmatch(r"step_(\d+)\.jsonl", path.name), path) for path in directory.glob("step_*.jsonl"))
    return dict(sorted((int(match[1]), path) for match, path in named if match))
