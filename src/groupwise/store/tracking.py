"""Writes a run's metrics, findings and rollouts to its directory, and shows them to its trackers (`store/trackers.py`).

    <run>/metrics.jsonl                  always: a line per step, {"step", "time", <metric>: <number>, ...}
    <run>/health.jsonl                   a line per event: a finding began, became an error or ended; a note
    <run>/rollouts/step_000012.jsonl     a line per group: what was asked, sampled, scored; with the token ids
    <run>/tensorboard/                   and W&B, Trackio, MLflow, where the config asks for them

`metrics.jsonl` has our names alone; the trackers get TRL's as well, unless the key `tracking.trl_names` is false. They
also get the rewards of a step as distributions, some of its completions as a table, and what came of the run.
The JSON is strict: a metric that is NaN or infinite is null, and its name is in the line's "non_finite". In rollouts,
where the value must come back exactly, such a number is the string "NaN", "Infinity" or "-Infinity".

JSONL must succeed (StorageError otherwise): it is the record. A remote tracker may fail: that is logged and counted.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.config.run import TrackingConfig
from groupwise.errors import ConfigError, DataError
from groupwise.store.files import writing
from groupwise.store.rollouts import group_from_json, group_line
from groupwise.store.shown_rollouts import rewards_of, rows_of
from groupwise.store.trackers import Tracker, trackers_of
from groupwise.store.trl_names import TokenCount, trl_metrics
from groupwise.types import RolloutGroup

if TYPE_CHECKING:
    from groupwise.run.health import Event

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"

HEALTH = "health.jsonl"

ROLLOUTS = "rollouts"

_OWN_KEYS = ("step", "time", "non_finite")


class Tracking:
    """Everything that is written during a run; what `open_trackers` returns. A context manager.

    `completions` is how many of a step the trackers get.
    `failures` counts the errors of each tracker in `trackers`; the first of each is logged as a warning.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        trackers: Mapping[str, Tracker] | None = None,
        trl_names: bool = True,
        completions: int = 0,
    ):
        self.run_dir, self.completions = Path(run_dir), completions
        self.trackers = dict(trackers or {})
        self.failures: Counter[str] = Counter()
        with writing(f"writing {self.run_dir / METRICS}"):
            (self.run_dir / ROLLOUTS).mkdir(parents=True, exist_ok=True)
            _drop_torn_line(self.run_dir / METRICS)
            _drop_torn_line(self.run_dir / HEALTH)
            self._metrics = (self.run_dir / METRICS).open("a", encoding="utf-8")
        self._tokens = TokenCount(read_metrics(self.run_dir / METRICS)) if trl_names else None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step's metrics, at once. Raises StorageError if `metrics.jsonl` cannot be written."""
        if taken := [key for key in _OWN_KEYS if key in metrics]:
            raise ValueError(f"{taken[0]!r} cannot name a metric: it is a key of every line; write 'group/name'")
        non_finite = sorted(key for key, value in metrics.items() if not math.isfinite(value))
        record: dict[str, Any] = {"step": step, "time": datetime.now(UTC).isoformat(timespec="milliseconds")}
        record |= {key: None if key in non_finite else _number(value) for key, value in metrics.items()}
        if non_finite:
            record["non_finite"] = non_finite
        with writing(f"writing {self.run_dir / METRICS}"):
            self._metrics.write(json.dumps(record, allow_nan=False) + "\n")
            self._metrics.flush()
        shown = dict(metrics)
        if self._tokens is not None:
            shown |= trl_metrics(metrics) | self._tokens.at(step, metrics)
        self._each(lambda tracker: tracker.log(step, dict(shown)))

    def health(self, events: Sequence[Event]) -> None:
        """Write what changed in the run's health. Raises StorageError."""
        if not events:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        lines = [json.dumps({"time": now} | event.as_dict(), allow_nan=False) + "\n" for event in events]
        with writing(f"writing {self.run_dir / HEALTH}"), (self.run_dir / HEALTH).open("a", encoding="utf-8") as file:
            file.writelines(lines)

    def rollouts(self, step: int, groups: Sequence[RolloutGroup]) -> Path:
        """Write one step's groups and show them to the trackers; a step that is done again replaces its file. Raises
        StorageError."""
        path = self.run_dir / ROLLOUTS / f"step_{step:06d}.jsonl"
        temporary = path.with_suffix(".tmp")
        with writing(f"writing {path}"):
            with temporary.open("w", encoding="utf-8") as file:
                file.writelines(group_line(group) + "\n" for group in groups)
            os.replace(temporary, path)
        if self.trackers and (values := rewards_of(groups)):
            self._each(lambda tracker: tracker.distributions(step, values))
        if self.trackers and (rows := rows_of(step, groups, most=self.completions)):
            self._each(lambda tracker: tracker.table(step, rows))
        return path

    def summary(self, step: int, values: Mapping[str, float | str]) -> None:
        """Tell the trackers what came of the run, after its last step."""
        self._each(lambda tracker: tracker.summary(step, dict(values)))

    def close(self) -> None:
        """Finish the record and every tracker. Safe to call twice. Raises StorageError."""
        self._each(lambda tracker: tracker.close())
        self.trackers.clear()
        with writing(f"writing {self.run_dir / METRICS}"):
            self._metrics.close()

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in self.trackers.items():
            try:
                act(tracker)
            except Exception as error:  # training continues, whatever the tracker's network does
                self.failures[name] += 1
                if self.failures[name] == 1:
                    log.warning("%s failed (%s: %s); metrics.jsonl is complete", name, type(error).__name__, error)


def open_trackers(
    config: TrackingConfig, *, run_dir: Path, run_name: str, resolved_config: Mapping[str, Any]
) -> Tracking:
    """Open what the config asks for. Raises ConfigError if a package is missing or a tracker cannot start."""
    begun = (run_dir / METRICS).exists() and (run_dir / METRICS).stat().st_size > 0
    openers = trackers_of(config, run_dir=run_dir, run_name=run_name, begun=begun, resolved_config=resolved_config)
    tracking = Tracking(run_dir, trl_names=config.trl_names, completions=config.completions)
    for name, opener in openers.items():
        try:
            tracking.trackers[name] = opener()
        except Exception as error:
            tracking.close()
            raise ConfigError(
                f"tracking.{name} could not start: {type(error).__name__}: {error}",
                hint=f"fix it, or leave tracking.{name} out: metrics.jsonl is always written",
            ) from error
    return tracking


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl`, one record a step: training and evaluation each write a line of the same
    step. What was written twice, because a step was done again after a crash, counts as it was written last.

    A last line that a crash tore is left out. Raises DataError if another line is not JSON.
    """
    lines = path.read_bytes().split(b"\n")
    records = {}
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is torn, or empty
        try:
            record = json.loads(line)
            record = {**records.get(record["step"], {}), **record}
            record.pop("non_finite", None)
            non_finite = sorted(key for key, value in record.items() if value is None)
            records[record["step"]] = {**record, "non_finite": non_finite} if non_finite else record
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}, line {number}: not a line of metrics: {error}") from error
    return [records[step] for step in sorted(records)]


# --- rollouts as JSON ---
def read_rollouts(path: Path) -> tuple[RolloutGroup, ...]:
    """Return the groups that `Tracking.rollouts` wrote, equal to what they were (columns: as far as JSON has their
    types).

    Raises DataError naming the line that is not a group.
    """
    groups = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                groups.append(group_from_json(json.loads(line)))
            except DataError as error:
                raise DataError(f"{path}, line {number}: {error.message}") from error
            except ValueError as error:
                detail = f"{type(error).__name__}: {error}"
                raise DataError(f"{path}, line {number}: not a rollout group: {detail}") from error
    return tuple(groups)


def _number(value: Any) -> int | float:
    return value if type(value) in (int, float) else float(value)  # numpy's scalars are not JSON


def _drop_torn_line(path: Path) -> None:
    """Cut what follows the last newline: a kill during a write left it, and the next line must not join it."""
    if path.exists():
        data = path.read_bytes()
        if not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)
