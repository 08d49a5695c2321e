"""What a run left on disk, read for the report. The run may be going on: a line that is being written is left out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from groupwise.config.run import RunConfig, parse_config
from groupwise.config.yaml import Document
from groupwise.errors import ConfigError, DataError
from groupwise.run.health import Report, examine
from groupwise.store.rundir import CONFIG, EVALUATIONS, METRICS, ROLLOUTS
from groupwise.store.tracking import read_metrics

Point = tuple[int, float | None]  # None: it was recorded, and was not finite


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run. `lines` has a mapping a step; `rollouts` the file of each step, `evaluations` the same by mode; `notes`
    what could not be read."""

    directory: Path
    label: str
    config: Mapping[str, Any]
    config_text: str
    lines: tuple[Mapping[str, Any], ...]
    rollouts: Mapping[int, Path]
    evaluations: Mapping[str, Mapping[int, Path]]
    health: Report
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        """The run's name in its configuration, or its directory's."""
        return str(self.setting("name") or self.directory.name)

    @property
    def steps(self) -> int:
        """Finished steps: step 0 is only evaluated."""
        return max((line["step"] for line in self.lines), default=0)

    @cached_property
    def metrics(self) -> list[str]:
        """The metrics that were recorded, in the order in which they came."""
        names = {key: None for line in self.lines for key in line if key not in ("step", "time", "non_finite")}
        return list(names)

    def points(self, metric: str) -> list[Point]:
        """(step, value) wherever the metric was recorded."""
        found = [(line["step"], line[metric]) for line in self.lines if metric in line]
        return [(step, _finite(value)) for step, value in found]

    def total(self, metric: str) -> float | None:
        """The sum over the steps; None where there is nothing to add."""
        values = [value for _, value in self.points(metric) if value is not None]
        return sum(values) if values else None

    def setting(self, dotted: str) -> Any:
        """A value of the configuration, None where it has none."""
        value: Any = self.config
        for key in dotted.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def elapsed_s(self) -> float | None:
        """Seconds from the first line to the last."""
        try:
            first, last = (datetime.fromisoformat(self.lines[i]["time"]) for i in (0, -1))
            return (last - first).total_seconds()
        except (IndexError, KeyError, TypeError, ValueError):
            return None


def read_run(directory: Path, *, label: str | None = None) -> RunRecord:
    """Read what `directory` holds. Raises ConfigError if it is no run, naming what is missing; DataError if its
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
    config, text, notes = _read_config(directory / CONFIG)
    return RunRecord(
        directory=directory,
        label=label or directory.name,
        config=config,
        config_text=text,
        lines=lines,
        rollouts=_step_files(directory / ROLLOUTS).get("", {}),
        evaluations=_step_files(directory / EVALUATIONS),
        health=examine(lines, config=_valid(config)),
        notes=tuple(notes),
    )


def read_runs(directories: Sequence[Path]) -> list[RunRecord]:
    """The runs, labelled by the shortest ends of their paths that tell them apart."""
    paths = [directory.resolve() for directory in directories]
    if len(set(paths)) < len(paths):
        raise ConfigError("the same run is named twice", hint="compare a run with others, each named once")
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return [
        read_run(given, label="/".join(path.parts[-depth:])) for given, path in zip(directories, paths, strict=True)
    ]


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a configuration that is not a section, under its dotted name."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read_config(path: Path) -> tuple[Mapping[str, Any], str, list[str]]:
    """The values and the text; a report does without when they cannot be read."""
    try:
        return Document.read(path).data, path.read_text(encoding="utf-8"), []
    except (ConfigError, OSError) as error:
        message = error.message if isinstance(error, ConfigError) else str(error)
        return {}, "", [f"the configuration is left out: {message}"]


def _valid(config: Mapping[str, Any]) -> RunConfig | None:
    """For remedies that can be copied; of an older run, whose keys are not today's, None."""
    try:
        return parse_config(config)
    except ConfigError:
        return None


def _step_files(directory: Path) -> dict[str, dict[int, Path]]:
    """`step_000012.jsonl` under "", `step_000012.greedy.jsonl` under "greedy", each by step."""
    found: dict[str, dict[int, Path]] = {}
    for path in sorted(directory.glob("step_*.jsonl")):
        if match := re.fullmatch(r"step_(\d+)(?:\.(.+))?\.jsonl", path.name):
            found.setdefault(match[2] or "", {})[int(match[1])] = path
    return {mode: dict(sorted(files.items())) for mode, files in found.items()}


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
