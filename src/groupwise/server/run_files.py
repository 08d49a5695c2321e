"""Reads the directory of a run while another process may write it: its metrics as they grow, its state, its config.

    MetricsFile    metrics.jsonl: the lines after a cursor; the cursor restarts if the file was replaced
    RunFiles       the files of one run
    open_runs      the runs of several directories, each with its own id
    with_stages    the same, and after each run the stages that came before it

Only whole lines are read: text after the last newline is incomplete. This module writes and locks nothing.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from groupwise.config.run import RunConfig, parse_config
from groupwise.config.stages import STAGES
from groupwise.config.yaml import Document, leaves
from groupwise.errors import ConfigError, RequestError, StorageError
from groupwise.platform import is_locked
from groupwise.run.health_report import Report, examine
from groupwise.server.schema_runs import RunDetail, RunState, RunSummary
from groupwise.store.rollouts import plain
from groupwise.store.rundir import CONFIG
from groupwise.store.tracking import METRICS

FRESH_S = 60.0  # a run that was written to so lately is in progress, wherever the process is that holds its lock

_LOCK = ".lock"

_CURSOR = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")

_EVALUATED = re.compile(r"eval/([^/]+)/reward")

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RecordPage:
    """Records behind a cursor, the cursor behind them, and whether they replace all that came before."""

    records: tuple[Record, ...]
    next: str
    anew: bool


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """The last step, the last value of each metric, when the first line was written, and how many lines are none."""

    step: int
    last: Mapping[str, float]
    started: str | None
    damaged: int


class MetricsFile:
    """metrics.jsonl, of which each byte is read once. Cursors are "<inode>-<offset>"."""

    def __init__(self, path: Path):
        self._path, self._lock = path, threading.Lock()
        self._inode = self._offset = 0
        self._lines: list[tuple[int, Record]] = []  # (offset behind it, what it says)
        self._step = self._damaged = 0
        self._last: dict[str, float] = {}

    def since(self, after: str | None = None) -> RecordPage:
        """Return the lines after the cursor `after`, or all without one. Raises RequestError for an invalid cursor."""
        if after is not None and not _CURSOR.fullmatch(after):
            raise RequestError(
                f"after is {after[:64]!r}; it must be the `next` of an answer, or left out", field="after"
            )
        with self._lock:
            self._read_on()
            inode, offset = map(int, (after or "0-0").split("-"))
            goes_on = inode == self._inode and offset <= self._offset
            records = tuple(record for end, record in self._lines if not goes_on or end > offset)
            return RecordPage(records=records, next=f"{self._inode}-{self._offset}", anew=not goes_on)

    def standing(self) -> RunProgress:
        """Return how far it is."""
        with self._lock:
            self._read_on()
            started = self._lines[0][1]["time"] if self._lines else None
            return RunProgress(step=self._step, last=dict(self._last), started=started, damaged=self._damaged)

    def by_step(self) -> list[dict[str, Any]]:
        """Return a record a step; what was written twice counts as it was written last."""
        found: dict[int, dict[str, Any]] = {}
        for record in self.since().records:
            found[record["step"]] = {**found.get(record["step"], {}), **record}
        return [found[step] for step in sorted(found)]

    def _read_on(self) -> None:
        try:
            with self._path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self._forget(stat.st_ino)
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:  # a run that has just begun
            return self._forget(0)
        except OSError as error:
            raise StorageError.of(error, f"{self._path} cannot be read: {error.strerror}") from error
        for line in new[: new.rfind(b"\n") + 1].splitlines(keepends=True):
            self._offset += len(line)
            record = _record(line)
            if record is None:
                self._damaged += 1
            else:
                self._lines.append((self._offset, record))
                self._step = max(self._step, record["step"])
                self._last |= {key: value for key, value in record.items() if isinstance(value, int | float)}

    def _forget(self, inode: int) -> None:
        self._inode, self._offset, self._damaged, self._step = inode, 0, 0, 0
        self._lines.clear()
        self._last.clear()


def _record(line: bytes) -> Record | None:
    """Return a line as it may be sent: a number that is not finite is null. None for what is not a line of metrics."""
    try:
        raw = json.loads(line)
        record = {"step": int(raw["step"]), "time": str(raw["time"])}
        return record | {key: _number(raw[key]) for key in raw if key not in ("step", "time", "non_finite")}
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def _number(value: Any) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return value


class RunFiles:
    """Reads the files of a run's directory. `id` is the run's id in the API."""

    def __init__(self, directory: Path, *, id: str):
        self.directory, self.id = directory, id
        self.metrics = MetricsFile(directory / METRICS)

    def config(self) -> tuple[Mapping[str, Any], str | None]:
        """Return the configuration, and, if it cannot be read, the reason."""
        path = self.directory / CONFIG
        try:
            stat = path.stat()
            return _config(path, stat.st_mtime_ns, stat.st_size), None
        except (ConfigError, OSError) as error:
            return {}, f"{CONFIG} cannot be read: {getattr(error, 'message', error)}"

    def values(self) -> dict[str, Any]:
        """Return the configuration as JSON has it, under dotted names."""
        return plain(dict(leaves(self.config()[0])))

    def summary(self) -> RunSummary:
        """Return how far it is."""
        config, now = self.config()[0], self.metrics.standing()
        steps = _at(config, "train.steps", int)
        evaluated = ((_EVALUATED.fullmatch(key), value) for key, value in now.last.items())
        return RunSummary(
            run=self.id,
            directory=str(self.directory),
            name=_at(config, "name", str) or self.directory.name,
            model=_at(config, "model", str),
            state=self._state(now.step, steps),
            step=now.step,
            steps=steps,
            reward=now.last.get("reward/mean"),
            evaluated={match[1]: value for match, value in evaluated if match},
            seed=_at(config, "seed", int),
            started=now.started,
            updated=self._updated(),
        )

    def detail(self) -> RunDetail:
        """Return it with the configuration, the versions, and what is wrong with the files."""
        problem, summary = self.config()[1], self.summary()
        notes = [problem] if problem else []
        if damaged := self.metrics.standing().damaged:
            notes.append(f"lines of {METRICS} that are no metrics, and are left out: {damaged}")
        return RunDetail(
            **summary.model_dump(),
            config=self.values(),
            changed=self._changed(),
            versions=self._versions(),
            notes=notes,
        )

    def health(self) -> Report:
        """Return the findings, open or ended; with overrides for this configuration, if it is one of this version."""
        return examine(self.metrics.by_step(), config=self._known())

    def _known(self) -> RunConfig | None:
        try:
            return parse_config(self.config()[0])
        except ConfigError:
            return None

    def _changed(self) -> list[str]:
        known = self._known()
        return [] if known is None else [key for key, _ in leaves(known.model_dump(mode="json", exclude_defaults=True))]

    def kept_step(self) -> int | None:
        """Return the step of the version that the run keeps as its best (`eval.best`); None where it keeps the last."""
        mode = _at(self.config()[0], "eval.best", str)
        values = {line["step"]: line.get(f"eval/{mode}/reward") for line in self.metrics.by_step()}
        scored = {step: value for step, value in values.items() if value is not None}
        return max(scored, key=lambda step: scored[step]) if mode and scored else None

    def is_running(self) -> bool:
        return self.summary().state == "running"

    def _state(self, step: int, steps: int | None) -> RunState:
        whole = steps is not None and step >= steps
        if self._is_locked() or (not whole and time.time() - self._touched() < FRESH_S):
            return "running"
        return "finished" if whole else "stopped" if step else "empty"

    def _is_locked(self) -> bool:
        """Return whether a process of this machine trains in the directory, as far as the kernel says."""
        return is_locked(self.directory / _LOCK)

    def _touched(self) -> float:
        times = [
            (self.directory / name).stat().st_mtime for name in (METRICS, CONFIG) if (self.directory / name).exists()
        ]
        return max(times, default=0.0)

    def _updated(self) -> str | None:
        touched = self._touched()
        return datetime.fromtimestamp(touched, UTC).isoformat(timespec="milliseconds") if touched else None

    def _versions(self) -> list[str]:
        found = [path for path in self.directory.glob("adapters/*/v*") if path.name[1:].isdigit()]
        return [f"{path.parent.name}@{int(path.name[1:])}" for path in sorted(found)]


@lru_cache(maxsize=64)
def _config(path: Path, changed: int, size: int) -> Mapping[str, Any]:
    """Read once for each state of the file."""
    return Document.read(path).data


def _at(config: Mapping[str, Any], dotted: str, kind: type) -> Any:
    """Return a value of the configuration; None where it has none of this kind."""
    value: Any = config
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, kind) else None


def is_run(directory: Path) -> bool:
    """Return whether it is, or is about to become, the directory of a run."""
    return (directory / METRICS).is_file() or (directory / CONFIG).is_file()


def open_runs(directories: Sequence[Path]) -> dict[str, RunFiles]:
    """Return the runs by id: the shortest ends of their paths that tell them apart, with `~` for the slashes.

    Raises ConfigError for a directory that is not a run, and for one that is named twice.
    """
    for directory in directories:
        if not is_run(directory):
            raise ConfigError(f"{directory} is no run: it has neither {METRICS} nor {CONFIG}", hint=_meant(directory))
    paths = [directory.resolve() for directory in directories]
    twice = [str(path) for i, path in enumerate(paths) if path in paths[:i]]
    if twice:
        raise ConfigError(f"{twice[0]} is named twice", hint="name each run once")
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    ids = ["~".join(path.parts[-depth:]) for path in paths]
    return {id: RunFiles(path, id=id) for id, path in zip(ids, paths, strict=True)}


def with_stages(runs: Mapping[str, RunFiles]) -> dict[str, RunFiles]:
    """Return the runs, and behind each those of its stages that have begun, as their own runs, the last one first.
    One that is among the runs already is not added."""
    known, found = {run.directory for run in runs.values()}, dict[str, RunFiles]()
    for id, run in runs.items():
        found[id] = run
        stages = [path for path in (run.directory / STAGES).glob("*") if is_run(path) and path not in known]
        for path in sorted(stages, key=lambda path: (path / CONFIG).stat().st_mtime, reverse=True):
            name = f"{id}~{STAGES}~{path.name}"
            found[name] = RunFiles(path, id=name)
    return found


def _meant(directory: Path) -> str:
    if not directory.is_dir():
        return "there is no such directory; name a run's, such as runs/NAME-TIME"
    inside = sorted(path.name for path in directory.iterdir() if path.is_dir() and is_run(path))
    if not inside:
        return "name a run's directory, such as runs/NAME-TIME"
    return f"it holds the runs {', '.join(inside[-3:])}: name them, or all as {directory}/*"
