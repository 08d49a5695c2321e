"""The trackers that a run shows itself to: TensorBoard, Weights & Biases, Trackio and MLflow, each by its own client.

                 metrics    distributions         tables                   the run's summary
    TensorBoard  scalars    histograms            text                     text
    W&B          history    histograms            tables                   the run's summary
    Trackio      metrics    histograms            tables                   a table
    MLflow       metrics    pictures (SVG), as    JSON tables, as          metrics, tags and summary.json
                            artifacts             artifacts

A package is imported only when the config asks for it. `tracked.json` in the run's directory says what W&B, Trackio and
MLflow know the run by, so that one that is resumed continues in its own there, and no other run does.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from groupwise.config.run import TrackingConfig
from groupwise.config.yaml import leaves
from groupwise.errors import ConfigError
from groupwise.store import files
from groupwise.store.masking import Masking
from groupwise.store.shown_rollouts import Row

log = logging.getLogger(__name__)

TRACKED = "tracked.json"
COMPLETIONS, SUMMARY = "completions", "summary"
BINS = 30


class Tracker(Protocol):
    """Receives the metrics, distributions and tables of a run, and shows them elsewhere. `step` counts finished
    optimizer steps."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def distributions(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Show how the values of each name are spread, none of which is empty or not finite."""
        ...

    def table(self, step: int, rows: Sequence[Row]) -> None:
        """Show completions, which all have the same columns."""
        ...

    def summary(self, step: int, values: Mapping[str, float | str]) -> None:
        """Show what came of the run."""
        ...

    def close(self) -> None: ...


def trackers_of(
    config: TrackingConfig, *, run_dir: Path, run_name: str, begun: bool, resolved_config: Mapping[str, Any]
) -> dict[str, Callable[[], Tracker]]:
    """Return by name how each tracker that the config asks for is opened; `begun`: the run has recorded something, so
    that it is resumed. Raises ConfigError if a package is missing, before any run is made anywhere.

    They get the run's configuration without what is a secret in it: many of them are elsewhere, and people share them.
    """
    resolved_config, known = Masking().config(resolved_config), Known(run_dir)
    openers: dict[str, Callable[[ModuleType], Tracker]] = {}
    if config.tensorboard:
        openers["tensorboard"] = lambda _: TensorBoardTracker(run_dir / "tensorboard")
    if (project := config.wandb) is not None:
        openers["wandb"] = lambda wandb: WandbTracker(
            wandb,
            run_dir,
            config.wandb_name or run_name,
            resolved_config,
            id=known.id(run_name, begun=begun),
            project=project,
            entity=config.wandb_entity,
        )
    if (trackio_project := config.trackio) is not None:
        openers["trackio"] = lambda trackio: TrackioTracker(
            trackio, trackio_project, known.id(run_name, begun=begun), resolved_config
        )
    if (experiment := config.mlflow) is not None:
        openers["mlflow"] = lambda mlflow: MlflowTracker(mlflow, experiment, run_name, resolved_config, known)
    modules = {name: _import(name) for name in openers}
    return {name: partial(opener, modules[name]) for name, opener in openers.items()}


class Known:
    """Remembers what trackers know a run by, in its directory (`tracked.json`)."""

    def __init__(self, run_dir: Path):
        self._path, self._run_dir = run_dir / TRACKED, run_dir

    def id(self, run_name: str, *, begun: bool) -> str:
        """Return the id of the run among all of its project: drawn once, since directories of many runs have one name,
        as those of stages. A run that was `begun` without one is known by the name of its directory."""
        if (id := self.get("id")) is None:
            plain = re.sub(r"[^\w.-]", "-", run_name)[:100]
            self.put("id", id := self._run_dir.name if begun else f"{plain}-{secrets.token_hex(4)}")
        return id

    def get(self, name: str) -> str | None:
        """Return what was put under this name; None without it."""
        return self._said().get(name)

    def put(self, name: str, value: str) -> None:
        """Keep a value. Raises StorageError."""
        with files.writing(f"writing {self._path}"):
            files.replace(self._path, json.dumps(self._said() | {name: value}) + "\n")

    def _said(self) -> dict[str, str]:
        return json.loads(self._path.read_text(encoding="utf-8")) if self._path.is_file() else {}


class TensorBoardTracker:
    """Event files, written with tensorboard alone (its SummaryWriter in torch would import torch here)."""

    def __init__(self, directory: Path):
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._histogram = importlib.import_module("tensorboard.plugins.histogram.summary_v2").histogram_pb
        self._text = importlib.import_module("tensorboard.plugins.text.summary_v2").text_pb
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._writer = writer.EventFileWriter(str(directory))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write(
            step,
            self._summary(value=[self._summary.Value(tag=key, simple_value=each) for key, each in metrics.items()]),
        )

    def distributions(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        for name, each in values.items():
            self._write(step, self._histogram(name, each, buckets=BINS))

    def table(self, step: int, rows: Sequence[Row]) -> None:
        self._write(step, self._text(COMPLETIONS, _markdown(rows)))

    def summary(self, step: int, values: Mapping[str, float | str]) -> None:
        self._write(step, self._text(SUMMARY, _markdown(_pairs(values))))

    def _write(self, step: int, summary: Any) -> None:
        now = datetime.now(UTC).timestamp()
        self._writer.add_event(self._event(wall_time=now, step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Weights & Biases. A resumed run continues in its own there, by its `id`.

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
        id: str,
        project: str,
        entity: str | None = None,
    ):
        offline = "WANDB_MODE" not in os.environ and not _has_key(wandb)
        if offline:
            log.warning(
                "there is no W&B key: the run is recorded offline; `wandb login`, then `wandb sync %s`, uploads it",
                run_dir / "wandb" / "offline-run-*",
            )
        self._wandb = wandb
        self._run = wandb.init(
            project=project,
            entity=entity,
            name=run_name,
            id=id,
            resume="allow",
            dir=str(run_dir),
            config=dict(config),
            **({"mode": "offline"} if offline else {}),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def distributions(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        self._run.log({name: self._wandb.Histogram(list(each)) for name, each in values.items()}, step=step)

    def table(self, step: int, rows: Sequence[Row]) -> None:
        self._run.log({COMPLETIONS: _table(self._wandb, rows)}, step=step)

    def summary(self, step: int, values: Mapping[str, float | str]) -> None:
        self._run.summary.update({f"{SUMMARY}/{name}": value for name, value in values.items()})

    def close(self) -> None:
        self._run.finish()


def _has_key(wandb: ModuleType) -> bool:
    """Return whether W&B has an API key here, without prompting the user."""
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except TypeError:  # before 0.31 it asks, and has this instead
        return bool(wandb.api.api_key)


class TrackioTracker:
    """Trackio, which keeps runs in a local SQLite file unless it is told otherwise. It tells runs by their names, so
    that a run's is its id."""

    def __init__(self, trackio: ModuleType, project: str, id: str, config: Mapping[str, Any]):
        self._trackio = trackio
        trackio.init(project=project, name=id, config=dict(config), resume="allow")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trackio.log(dict(metrics), step=step)

    def distributions(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        self._trackio.log({name: self._trackio.Histogram(list(each)) for name, each in values.items()}, step=step)

    def table(self, step: int, rows: Sequence[Row]) -> None:
        self._trackio.log({COMPLETIONS: _table(self._trackio, rows)}, step=step)

    def summary(self, step: int, values: Mapping[str, float | str]) -> None:
        self._trackio.log({SUMMARY: _table(self._trackio, _pairs(values))}, step=step)

    def close(self) -> None:
        self._trackio.finish()


class MlflowTracker:
    """MLflow at MLFLOW_TRACKING_URI. The config's leaves are its params, under dotted names. A resumed run continues in
    its own, with the params that it has; where that is gone, in a new one."""

    MAX_PARAM_CHARS = 500  # what the oldest supported servers take

    def __init__(self, mlflow: ModuleType, experiment: str, run_name: str, config: Mapping[str, Any], known: Known):
        self._mlflow = mlflow
        mlflow.set_experiment(experiment)
        if (before := known.get("mlflow")) is not None and self._continues(before):
            return
        run = mlflow.start_run(run_name=run_name)
        known.put("mlflow", run.info.run_id)
        mlflow.log_params({key: str(value)[: self.MAX_PARAM_CHARS] for key, value in leaves(config)})

    def _continues(self, run_id: str) -> bool:
        """Continue in a run; return whether it is there, in this experiment."""
        try:
            self._mlflow.start_run(run_id=run_id)
        except self._mlflow.exceptions.MlflowException as error:
            log.warning("MLflow's run %s cannot be continued, and a new one is begun: %s", run_id, error)
            return False
        return True

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({_mlflow_name(name): value for name, value in metrics.items()}, step=step)

    def distributions(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        for name, each in values.items():
            self._mlflow.log_text(_picture(name, step, each), f"{name}/step_{step:06d}.svg")

    def table(self, step: int, rows: Sequence[Row]) -> None:
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        self._mlflow.log_table(columns, f"{COMPLETIONS}/step_{step:06d}.json")

    def summary(self, step: int, values: Mapping[str, float | str]) -> None:
        numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
        self.log(step, {f"{SUMMARY}/{name}": value for name, value in numbers.items()})
        self._mlflow.set_tags({f"{SUMMARY}/{name}": value for name, value in values.items() if name not in numbers})
        self._mlflow.log_dict(dict(values), f"{SUMMARY}.json")

    def close(self) -> None:
        self._mlflow.end_run()


def _mlflow_name(name: str) -> str:
    """Return a metric's name as MLflow takes it, which refuses a whole step for one: pass@8 is pass_at_8 there."""
    return re.sub(r"[^\w./: -]", "_", name.replace("@", "_at_"))


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


# ---- in words and pictures ----


def _pairs(values: Mapping[str, float | str]) -> list[Row]:
    return [
        {"what": name, "value": value if isinstance(value, str) else f"{value:.6g}"} for name, value in values.items()
    ]


def _table(library: ModuleType, rows: Sequence[Row]) -> Any:
    """Return rows as the Table of W&B, or of Trackio, which has the same."""
    return library.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])


def _markdown(rows: Sequence[Row]) -> str:
    """Return rows as a table in Markdown; what would break out of a cell is escaped."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(map(_cell, row.values())) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: str | float | None) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        return f"{value:.4g}"
    escaped = value.replace("\\", "\\\\").replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return escaped.replace("\r", "").replace("\n", "<br>")


def _picture(name: str, step: int, values: Sequence[float]) -> str:
    """Return a histogram of the values as SVG."""
    import numpy as np

    counts, edges = np.histogram(values, bins=BINS)
    most, low, high = int(counts.max()), float(edges[0]), float(edges[-1])
    bars = "".join(
        f'<rect x="{20 + 12 * at}" y="{220 - 180 * count / most:.1f}" width="11" height="{180 * count / most:.1f}" '
        'fill="#4269d0"/>'
        for at, count in enumerate(map(int, counts))
    )
    words = (
        (20, 24, "start", f"{name}, step {step}: {len(values)} completions, at most {most} in a bar"),
        (20, 240, "start", f"{low:.4g}"),
        (20 + 12 * BINS, 240, "end", f"{high:.4g}"),
    )
    said = "".join(f'<text x="{x}" y="{y}" text-anchor="{at}" font-size="12">{text}</text>' for x, y, at, text in words)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 400 260" font-family="sans-serif">{bars}{said}</svg>'
