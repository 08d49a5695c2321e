"""The directory of a run: made, found again, and wound back to its last checkpoint.

runs/<name>-<time>/
    config.yaml                    every effective value
    metrics.jsonl, health.jsonl    a line a step and an evaluation; what was found wrong
    rollouts/step_000001.jsonl     a line a group
    evaluations/step_000000.greedy.jsonl
    adapters/<name>/v000001/       the versions
    checkpoints/step-000025/       where to go on from
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from ruamel.yaml import YAML

from groupwise import adapter_files as files
from groupwise import checkpoint
from groupwise.adapters import AdapterStore
from groupwise.config import RunConfig, dump_resolved
from groupwise.configfile import to_yaml
from groupwise.errors import ConfigError, StorageError
from groupwise.evaluate import Evaluation
from groupwise.group_json import group_from_json, group_to_json
from groupwise.types import PolicyVersion

CONFIG, METRICS, ROLLOUTS, EVALUATIONS, ADAPTERS = "config.yaml", "metrics.jsonl", "rollouts", "evaluations", "adapters"
_WHERE = ("run_dir", "output_dir", "resume", "launcher")  # which do not make it another run
_ON_WHAT = ("devices", "parallel", "cpu_offload", "deadline_s", "attention")  # of `train`: nor do these


def run_dir_of(config: RunConfig) -> Path:
    """The directory of the run that goes on (`resume: auto`), or of a new one. Raises as `open_run_dir`."""
    return _found(config)[0]


def open_run_dir(config: RunConfig) -> tuple[Path, checkpoint.Standing | None]:
    """The run's directory, and where the run stands if it is one that goes on (`resume: auto`). The run that `run_dir`
    names may be finished: there is nothing left to do but to conclude it again.

    Raises ConfigError if the directory holds another run, or this one and `resume` is never; StorageError if it cannot
    be written.
    """
    run_dir, begun = _found(config)
    if begun:
        found = checkpoint.newest(run_dir)
        standing = None if found is None else checkpoint.read(found)
        if standing is None or not standing.finished:
            _wind_back(run_dir, config.name, standing)
        return run_dir, standing
    with files.writing(f"making the run directory {run_dir}"):
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / CONFIG).write_text(dump_resolved(config), encoding="utf-8")
    return run_dir, None


@contextmanager
def owned(run_dir: Path) -> Iterator[None]:
    """Within: no other process may train in this directory. Raises StorageError if one does."""
    descriptor = os.open(run_dir / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not files.try_lock(descriptor):
            raise StorageError(f"another process is training in {run_dir}", hint="wait for it, or end it")
        yield
    finally:
        os.close(descriptor)


def _found(config: RunConfig) -> tuple[Path, bool]:
    """The run's directory, and whether it holds the run already."""
    if config.resume == "auto" and (run_dir := _begun(config)) is not None:
        return run_dir, True
    run_dir = config.run_path(now=datetime.now(UTC))
    if (run_dir / METRICS).exists():
        raise ConfigError(
            f"run_dir {str(run_dir)!r} already holds a run",
            hint="name another, remove it, or go on with it if it was not finished: resume=auto",
        )
    return run_dir, False


def _begun(config: RunConfig) -> Path | None:
    """The run of this configuration in `run_dir`, or the newest in `output_dir` that was not finished. Raises
    ConfigError if `run_dir` holds another."""
    if config.run_dir is not None:
        candidates = [Path(config.run_dir)]
    else:
        pattern = re.compile(rf"{re.escape(config.name)}-\d{{8}}T\d{{6}}Z")
        found = Path(config.output_dir).glob(f"{config.name}-*")
        candidates = sorted((path for path in found if pattern.fullmatch(path.name)), reverse=True)
    for run_dir in candidates:
        if not (run_dir / CONFIG).exists():
            continue
        changed = _changes(run_dir / CONFIG, config)
        if changed and config.run_dir is not None:
            raise ConfigError(
                f"run_dir {str(run_dir)!r} holds a run with another {', '.join(changed)}",
                hint="resume with the configuration that the run was started with, or name another directory",
            )
        at = checkpoint.newest(run_dir)
        finished = at is not None and checkpoint.read(at).finished
        if not changed and (config.run_dir is not None or not finished):
            return run_dir
    return None


def _changes(saved: Path, config: RunConfig) -> list[str]:
    """The keys in which a saved configuration differs from this one."""
    yaml = YAML(typ="safe")
    before, now = (dict(yaml.load(text)) for text in (saved.read_text(encoding="utf-8"), dump_resolved(config)))
    for data in (before, now):
        data["train"] = {key: value for key, value in data["train"].items() if key not in _ON_WHAT}
    keys = (key for key in {**before, **now} if key not in _WHERE)
    return [key for key in keys if to_yaml({key: before.get(key)}) != to_yaml({key: now.get(key)})]


def _wind_back(run_dir: Path, name: str, standing: checkpoint.Standing | None) -> None:
    """Forget what was written after the checkpoint: it will be written again."""
    step = -1 if standing is None else standing.step
    version = PolicyVersion.base() if standing is None else standing.version
    with files.writing(f"winding {run_dir} back to its checkpoint"):
        for record in run_dir.glob("*.jsonl"):
            kept = [line for line in record.read_text(encoding="utf-8").splitlines() if _is_of(line, step)]
            files.replace(record, "".join(f"{line}\n" for line in kept))
        for path in (*run_dir.glob(f"{ROLLOUTS}/step_*"), *run_dir.glob(f"{EVALUATIONS}/step_*")):
            if int(path.name[5:11]) > step:
                path.unlink()
        shutil.rmtree(run_dir / "model", ignore_errors=True)
    if (run_dir / ADAPTERS).is_dir():
        AdapterStore(run_dir / ADAPTERS).rewind(name, version.number)


def _is_of(line: str, step: int) -> bool:
    """Whether a record is of this step or an earlier one; a torn line is of none."""
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False


def save_evaluations(run_dir: Path, step: int, evaluations: Mapping[str, Evaluation]) -> None:
    """Write down what was evaluated at `step`, by mode; done again it replaces what was there. Raises StorageError."""
    directory = run_dir / EVALUATIONS
    with files.writing(f"writing the evaluation at step {step}"):
        directory.mkdir(exist_ok=True)
        for mode, evaluation in evaluations.items():
            head = {"version": str(evaluation.version), "success": evaluation.success}
            lines = [head, *(group_to_json(group) for group in evaluation.groups)]
            text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
            files.replace(directory / f"step_{step:06d}.{mode}.jsonl", text)


def load_evaluations(run_dir: Path, step: int) -> dict[str, Evaluation]:
    """Inverse of `save_evaluations`. Raises DataError for a file that is none."""
    found = {}
    for path in sorted((run_dir / EVALUATIONS).glob(f"step_{step:06d}.*.jsonl")):
        mode = path.name.split(".")[1]
        head, *groups = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        found[mode] = Evaluation(
            mode=mode,
            version=PolicyVersion.parse(head["version"]),
            success=head["success"],
            groups=tuple(map(group_from_json, groups)),
        )
    return found
