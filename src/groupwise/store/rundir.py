"""The run directory: created, locked, found again, and rolled back to its last checkpoint.

runs/<name>-<time>/
    config.yaml                    every effective value
    metrics.jsonl, health.jsonl    a line a step and an evaluation; what was found wrong
    rollouts/step_000001.jsonl     a line a group
    evaluations/step_000000.greedy.jsonl
    images/<sha256>.png            of prompts, each once
    adapters/<name>/v000001/       the versions
    checkpoints/step-000025/       where to continue from
    tracked.json                   what W&B, Trackio and MLflow know the run by
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from groupwise.config.run import RunConfig, TrainConfig, dump_resolved, identity, resolved
from groupwise.config.stages import STAGES
from groupwise.errors import ConfigError, InUseError
from groupwise.platform import is_locked, try_lock
from groupwise.store import checkpoint, files
from groupwise.store.adapters import AdapterStore
from groupwise.types import PolicyVersion

CONFIG, METRICS, HEALTH, LOCK = "config.yaml", "metrics.jsonl", "health.jsonl", ".lock"

ROLLOUTS, EVALUATIONS, ADAPTERS, IMAGES = "rollouts", "evaluations", "adapters", "images"


def shown_name(run_dir: Path) -> str:
    """Return what trackers call a run: its directory's name; of a stage, that of its run before it.

    >>> shown_name(Path("runs/sums-20260101T120000Z/stages/examples"))
    'sums-20260101T120000Z-examples'
    """
    place = run_dir.absolute()
    return f"{place.parent.parent.name}-{place.name}" if place.parent.name == STAGES else place.name


@contextmanager
def open_run_dir(
    config: RunConfig, *, note: Callable[[str], None] = lambda text: None
) -> Iterator[tuple[Path, checkpoint.RunState | None]]:
    """Yield the run's directory, locked against other processes, and the state from which a resumed run continues
    (`resume: auto`). A finished run continues if `train.steps` asks for more; otherwise, if `run_dir` names it, it is
    only concluded again. `note` gets the reason if a run that could resume starts over.

    The directory is locked before anything in it is changed: a run that is being trained stays as it is.

    Raises:
        ConfigError: the directory holds another run, or this one and `resume` is never.
        InUseError: another process trains in it.
        StorageError: it cannot be written.
    """
    run_dir = reserve_run_dir(config, note=note)
    with owned(run_dir):
        try:
            yield run_dir, _entered(run_dir, config)
        except BaseException:
            with suppress(OSError):
                if config.run_dir is None and {each.name for each in run_dir.iterdir()} <= {CONFIG, LOCK}:
                    shutil.rmtree(run_dir)  # nothing was begun: the model could not be loaded
            raise


def reserve_run_dir(config: RunConfig, *, note: Callable[[str], None] = lambda text: None) -> Path:
    """Return the directory of the run that continues, or make one for a new run, which no other process gets.

    Raises the errors of `open_run_dir`, except that of the lock.
    """
    if config.resume == "auto" and config.run_dir is None:
        begun, why_anew = _unfinished(config)
        if begun is not None:
            return begun
        if why_anew:
            note(f"resume=auto begins a new run: {why_anew}")
    check_place(config)
    path = config.run_path(now=datetime.now(UTC))
    if config.run_dir is not None:
        _check_free(path, config)
    with files.writing(f"making the run directory {path}"):
        if config.run_dir is not None:
            path.mkdir(parents=True, exist_ok=True)
            return path
        return _made(path)


def check_place(config: RunConfig) -> None:
    """Raise ConfigError where the run's directory cannot be made, and InUseError where another process trains in it, as
    far as that is seen without making or locking anything."""
    key, value = ("output_dir", config.output_dir) if config.run_dir is None else ("run_dir", config.run_dir)
    path = Path(value).absolute()
    there = next(each for each in (path, *path.parents) if each.exists())
    if not there.is_dir():
        raise ConfigError(
            f"{key} {value!r} cannot be a directory: {there} is a file", hint=f"name another: {key}=DIR", field=key
        )
    if not os.access(there, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise ConfigError(
            f"{key} {value!r} cannot be written: user {os.geteuid()} may not write to {there}",
            hint=f"name another: {key}=DIR, or let this user write there (`ls -ld {there}`)",
            field=key,
        )
    if config.run_dir is not None and is_locked(path / LOCK):
        raise _in_use(path)


def _in_use(directory: Path) -> InUseError:
    return InUseError(f"another process is training in {directory}", hint="wait for it, or end it")


@contextmanager
def owned(directory: Path) -> Iterator[None]:
    """Context manager: no other process trains in this directory, which is made if need be. Raises InUseError if one
    does."""
    with files.writing(f"locking {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not try_lock(descriptor):
            raise _in_use(directory)
        yield
    finally:
        os.close(descriptor)


def _made(path: Path) -> Path:
    """Return a new directory: `path`, or path-2, path-3, ... if other runs of that name began in the same second."""
    for number in itertools.count(1):
        numbered = path if number == 1 else path.with_name(f"{path.name}-{number}")
        with suppress(FileExistsError):
            numbered.mkdir(parents=True)
            return numbered
    raise AssertionError("there is always a free number")


def _entered(run_dir: Path, config: RunConfig) -> checkpoint.RunState | None:
    """Make the directory ready for the run: wound back to its checkpoint, or with its configuration. It is locked."""
    _check_free(run_dir, config)
    if not (run_dir / CONFIG).exists() or config.resume == "never":
        with files.writing(f"making the run directory {run_dir}"):
            files.replace(run_dir / CONFIG, dump_resolved(config))
        return None
    standing, changed = _held(run_dir, config)
    if changed:
        standing = checkpoint.reopen(run_dir)
        with files.writing(f"writing the configuration of {run_dir}"):
            files.replace(run_dir / CONFIG, dump_resolved(config))
    if standing is None or not standing.finished:
        _wind_back(run_dir, config.name, standing)
    return standing


def check_begun(run_dir: Path, config: RunConfig) -> None:
    """Raise ConfigError where something was begun in the run's directory that this run does not continue, as its stages
    would, before it has metrics of its own."""
    if config.resume == "never" and (run_dir / STAGES).exists():
        raise _not_free(run_dir)
    if config.resume == "auto" and (run_dir / CONFIG).exists():
        _held(run_dir, config)


def _held(run_dir: Path, config: RunConfig) -> tuple[checkpoint.RunState | None, bool]:
    """Return the state of the run that the directory holds, and whether the configuration asks for more steps of it.
    Raises ConfigError where it is another run."""
    changed = _changes(run_dir / CONFIG, config)
    standing = checkpoint.standing(run_dir) if not changed or _is_longer(changed, config) else None
    if changed and standing is None:
        raise ConfigError(
            f"run_dir {str(run_dir)!r} holds a run with another {', '.join(changed)}",
            hint="resume with the configuration of that run, or with more train.steps and no other change; or name "
            "another directory",
            field="run_dir",
        )
    return standing, bool(changed)


def _is_longer(changed: Mapping[str, object], config: RunConfig) -> bool:
    """Return whether the configuration asks for more steps of a run, and for nothing else; a warm-up that is shorter
    because a short run has no room for a longer one was not asked for."""
    steps = changed.get("train.steps")
    if not isinstance(steps, int) or steps >= config.train.steps:
        return False
    derived = {"train.steps": steps, "train.warmup_steps": TrainConfig(steps=steps).warmup_steps}
    return all(key in derived and value == derived[key] for key, value in changed.items())


def _check_free(run_dir: Path, config: RunConfig) -> None:
    if config.resume == "never" and (run_dir / METRICS).exists():
        raise _not_free(run_dir)


def _not_free(run_dir: Path) -> ConfigError:
    return ConfigError(
        f"run_dir {str(run_dir)!r} already holds a run",
        hint="name another, remove it, or go on with it if it was not finished: resume=auto",
    )


def _unfinished(config: RunConfig) -> tuple[Path | None, str]:
    """Return the run in `output_dir` that continues: the newest of this configuration that is not over; else, of
    those that have fewer steps than are asked for and differ in nothing else, the one that made most, so that no trial
    of a step takes the place of a run. Without one: why the newest of this name does not continue, "" where there is
    none."""
    why, shorter = "", list[tuple[int, Path]]()
    for run_dir in _named_like(config):
        changed = _changes(run_dir / CONFIG, config)
        standing = checkpoint.standing(run_dir) if not changed or _is_longer(changed, config) else None
        if changed and standing is None:
            why = why or f"{run_dir} has another {', '.join(changed)}"
        elif changed and standing is not None:
            shorter.append((standing.step, run_dir))
        elif standing is None or not standing.is_over:
            return run_dir, ""
        else:
            more = f"train.steps={2 * standing.step}"
            why = why or f"{run_dir} was finished after step {standing.step}; with more, as in {more}, it goes on"
    if shorter:
        return max(shorter, key=lambda each: each[0])[1], ""  # the first of equals, which is the newest
    return None, why


def _named_like(config: RunConfig) -> Iterator[Path]:
    """Yield the runs of this name in `output_dir`, the newest first."""
    pattern = re.compile(rf"{re.escape(config.name)}-(\d{{8}}T\d{{6}}Z)(?:-(\d+))?")
    matches = [(pattern.fullmatch(path.name), path) for path in Path(config.output_dir).glob(f"{config.name}-*")]
    begun = [(match[1], int(match[2] or 1), path) for match, path in matches if match]
    yield from (path for _, _, path in sorted(begun, reverse=True) if (path / CONFIG).exists())


def as_they_continue(configs: Mapping[str, RunConfig]) -> dict[str, RunConfig]:
    """Return the runs of one command, by their labels. Where it is one that continues (`resume: auto`) and not all of
    them are over, those that are have their directory as `run_dir`: they are concluded again, and not trained again."""
    over = dict[str, Path]()
    for label, config in configs.items():
        if config.resume == "auto" and config.run_dir is None:
            same = (path for path in _named_like(config) if not _changes(path / CONFIG, config))
            if (newest := next(same, None)) is not None and checkpoint.is_over(newest) and newest not in over.values():
                over[label] = newest
    if len(over) == len(configs):
        return dict(configs)
    named = {label: {"run_dir": str(run_dir)} for label, run_dir in over.items()}
    return {label: config.model_copy(update=named.get(label, {})) for label, config in configs.items()}


def _changes(saved: Path, config: RunConfig) -> dict[str, object]:
    """Return the keys in which a saved configuration differs from this one, with the values that it has."""
    yaml = YAML(typ="safe")
    try:
        before = identity(dict(yaml.load(saved.read_text(encoding="utf-8"))))
        now = identity(resolved(config))
    except (OSError, YAMLError, ValueError, TypeError):
        return {"configuration, or one that cannot be read": None}
    return dict(_differing(before, now))


def _differing(before: Mapping[str, object], now: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the dotted keys whose values differ, each with the value before."""
    for key in {**before, **now}:
        old, new = before.get(key), now.get(key)
        if _text(old) == _text(new):
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from ((f"{key}.{inner}", value) for inner, value in _differing(old, new))
        else:
            yield key, old


def _text(value: object) -> str:
    """Return a value of a configuration for comparison: 1, 1.0 and true differ, and a number that is none equals
    itself."""
    return json.dumps(value, default=str)


def _wind_back(run_dir: Path, name: str, standing: checkpoint.RunState | None) -> None:
    """Forget what was written after the checkpoint: it will be written again."""
    step = -1 if standing is None else standing.step
    version = PolicyVersion.base() if standing is None else standing.version
    with files.writing(f"winding {run_dir} back to its checkpoint"):
        files.sweep(run_dir)
        for record in filter(Path.exists, (run_dir / METRICS, run_dir / HEALTH)):
            kept = [line for line in record.read_text(encoding="utf-8").splitlines() if _is_of(line, step)]
            files.replace(record, "".join(f"{line}\n" for line in kept))
        for path in (*run_dir.glob(f"{ROLLOUTS}/step_*"), *run_dir.glob(f"{EVALUATIONS}/*_*")):
            if int(path.name.partition(".")[0].partition("_")[2]) > step:
                path.unlink()
        shutil.rmtree(run_dir / "model", ignore_errors=True)
    if (run_dir / ADAPTERS).is_dir():
        AdapterStore(run_dir / ADAPTERS).rewind(name, version.number)


def _is_of(line: str, step: int) -> bool:
    """Return whether a record is of this step or an earlier one; a torn line is of none."""
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False
