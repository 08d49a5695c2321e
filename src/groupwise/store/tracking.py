"""Writes a run's metrics, findings and rollouts to its directory, and to trackers (TensorBoard, W&B, Trackio, MLflow).

    <run>/metrics.jsonl                  always: a line per step, {"step", "time", <metric>: <number>, ...}
    <run>/health.jsonl                   a line per event: a finding began, became an error or ended; a note
    <run>/rollouts/step_000012.jsonl     a line per group: what was asked, sampled, scored; with the token ids
    <run>/tensorboard/                   and W&B, Trackio, MLflow, where the config asks for them

`metrics.jsonl` has our names alone; the trackers get TRL's as well, unless the key `tracking.trl_names` is false.
The JSON is strict: a metric that is NaN or infinite is null, and its name is in the line's "non_finite". In rollouts,
where the value must come back exactly, such a number is the string "NaN", "Infinity" or "-Infinity".

JSONL must succeed (StorageError otherwise): it is the record. A remote tracker may fail: that is logged and counted.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from groupwise.config.run import TrackingConfig
from groupwise.errors import ConfigError, DataError, StorageError
from groupwise.store.rollouts import group_from_json, group_to_json
from groupwise.store.trl_names import TokenCount, trl_metrics
from groupwise.types import RolloutGroup

if TYPE_CHECKING:
    from groupwise.run.health import Event

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"

HEALTH = "health.jsonl"

ROLLOUTS = "rollouts"

_OWN_KEYS = ("step", "time", "non_finite")


class Tracker(Protocol):
    """What a run writes its metrics to. `step` counts finished optimizer steps."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Tracking:
    """Everything that is written during a run; what `open_trackers` returns. A context manager.

    `failures` counts the errors of each tracker in `trackers`; the first of each is logged as a warning.
    """

    def __init__(self, run_dir: Path, *, trackers: Mapping[str, Tracker] | None = None, trl_names: bool = True):
        self.run_dir = Path(run_dir)
        self.trackers = dict(trackers or {})
        self.failures: Counter[str] = Counter()
        with _recording(self.run_dir / METRICS):
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
        with _recording(self.run_dir / METRICS):
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
        with _recording(self.run_dir / HEALTH), (self.run_dir / HEALTH).open("a", encoding="utf-8") as file:
            file.writelines(lines)

    def rollouts(self, step: int, groups: Sequence[RolloutGroup]) -> Path:
        """Write one step's groups; a step that is done again replaces its file. Raises StorageError."""
        path = self.run_dir / ROLLOUTS / f"step_{step:06d}.jsonl"
        temporary = path.with_suffix(".tmp")
        with _recording(path):
            with temporary.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(group_to_json(group), allow_nan=False) + "\n" for group in groups)
            os.replace(temporary, path)
        return path

    def close(self) -> None:
        """Finish every tracker. Safe to call twice."""
        self._each(lambda tracker: tracker.close())
        self.trackers.clear()
        with _recording(self.run_dir / METRICS):
            self._metrics.close()

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in self.trackers.items():
            try:
                act(tracker)
            except Exception as error:  # whatever somebody's network does, training goes on
                self.failures[name] += 1
                if self.failures[name] == 1:
                    log.warning("%s failed (%s: %s); metrics.jsonl is complete", name, type(error).__name__, error)


def open_trackers(
    config: TrackingConfig, *, run_dir: Path, run_name: str, resolved_config: Mapping[str, Any]
) -> Tracking:
    """Open what the config asks for. Raises ConfigError if a package is missing or a tracker cannot start."""
    openers: dict[str, Callable[[ModuleType], Tracker]] = {}
    if config.tensorboard:
        openers["tensorboard"] = lambda _: TensorBoardTracker(run_dir / "tensorboard")
    if (project := config.wandb) is not None:
        openers["wandb"] = lambda wandb: WandbTracker(
            wandb,
            run_dir,
            config.wandb_name or run_name,
            resolved_config,
            project=project,
            entity=config.wandb_entity,
        )
    if (trackio_project := config.trackio) is not None:
        openers["trackio"] = lambda trackio: TrackioTracker(trackio, trackio_project, run_name, resolved_config)
    if (experiment := config.mlflow) is not None:
        openers["mlflow"] = lambda mlflow: MlflowTracker(mlflow, experiment, run_name, resolved_config)
    modules = {name: _import(name) for name in openers}  # all, before any run is made anywhere
    tracking = Tracking(run_dir, trl_names=config.trl_names)
    for name, opener in openers.items():
        try:
            tracking.trackers[name] = opener(modules[name])
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


# --- trackers; each module is imported only when the config asks for it ---
class TensorBoardTracker:
    """Event files, written with tensorboard alone (its SummaryWriter in torch would import torch here)."""

    def __init__(self, directory: Path):
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._writer = writer.EventFileWriter(str(directory))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=key, simple_value=value) for key, value in metrics.items()]
        now = datetime.now(UTC).timestamp()
        self._writer.add_event(self._event(wall_time=now, step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Weights & Biases. The run directory's name is the run's id there, so that a resumed run goes on in its own.

    Where there is no key, and WANDB_MODE does not say what to do then, a warning says so once and the run is recorded
    offline, in `<run directory>/wandb`.
    """

    def __init__(
        self,
        wandb: ModuleType,
        run_dir: Path,
        run_name: str,
        config: Mapping[str, Any],
        *,
        project: str,
        entity: str | None = None,
    ):
        offline = "WANDB_MODE" not in os.environ and not _has_key(wandb)
        if offline:
            log.warning(
                "there is no W&B key: the run is recorded offline; `wandb login`, then `wandb sync %s`, uploads it",
                run_dir / "wandb" / "offline-run-*",
            )
        self._run = wandb.init(
            project=project,
            entity=entity,
            name=run_name,
            id=run_dir.name,
            resume="allow",
            dir=str(run_dir),
            config=dict(config),
            **({"mode": "offline"} if offline else {}),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def _has_key(wandb: ModuleType) -> bool:
    """Return whether W&B knows who runs this, without asking anybody."""
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except TypeError:  # before 0.31 it asks, and has this instead
        return bool(wandb.api.api_key)


class TrackioTracker:
    """Trackio, which keeps runs in a local SQLite file unless it is told otherwise."""

    def __init__(self, trackio: ModuleType, project: str, run_name: str, config: Mapping[str, Any]):
        self._trackio = trackio
        trackio.init(project=project, name=run_name, config=dict(config), resume="allow")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        self._trackio.finish()


class MlflowTracker:
    """MLflow at MLFLOW_TRACKING_URI. The config's leaves are its params, under dotted names."""

    MAX_PARAM_CHARS = 500  # what the oldest supported servers take

    def __init__(self, mlflow: ModuleType, experiment: str, run_name: str, config: Mapping[str, Any]):
        self._mlflow = mlflow
        mlflow.set_experiment(experiment)
        mlflow.start_run(run_name=run_name)
        mlflow.log_params({key: str(value)[: self.MAX_PARAM_CHARS] for key, value in _leaves(config)})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def check_installed(config: TrackingConfig) -> None:
    """Raise ConfigError for a tracker whose package is not installed; imports none."""
    for name in ("tensorboard", "wandb", "trackio", "mlflow"):
        if getattr(config, name) and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"tracking.{name} is set but the package {name!r} is not installed",
                hint=f"pip install 'groupwise[{name}]', or leave tracking.{name} out",
                field=f"tracking.{name}",
            )


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"tracking.{name} is set but the package {name!r} cannot be imported: {error}",
            hint=f"pip install 'groupwise[{name}]', or leave tracking.{name} out",
        ) from error


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


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


@contextmanager
def _recording(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError.of(error, f"{path} cannot be written: {error}") from error


def _drop_torn_line(path: Path) -> None:
    """Cut what follows the last newline: a kill during a write left it, and the next line must not join it."""
    if path.exists():
        data = path.read_bytes()
        if not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)
