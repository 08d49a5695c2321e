"""The run directory: created, locked, found again, and rolled back to its last checkpoint.

runs/<name>-<time>/
    config.yaml                    every effective value
    metrics.jsonl, health.jsonl    a line a step and an evaluation; what was found wrong
    rollouts/step_000001.jsonl     a line a group
    evaluations/step_000000.greedy.jsonl
    adapters/<name>/v000001/       the versions
    checkpoints/step-000025/       where to go on from
"""

from __future__ import annotations

import difflib
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from groupwise.config.run import RunConfig, dump_resolved, identity, resolved
from groupwise.errors import AdapterError, AdapterNotFoundError, ConfigError, DataError, InUseError
from groupwise.platform import is_locked, try_lock
from groupwise.store import checkpoint, files
from groupwise.store.adapters import AdapterStore
from groupwise.types import BASE, PolicyVersion

CONFIG, METRICS, HEALTH = "config.yaml", "metrics.jsonl", "health.jsonl"
ROLLOUTS, EVALUATIONS, ADAPTERS = "rollouts", "evaluations", "adapters"


@contextmanager
def open_run_dir(config: RunConfig) -> Iterator[tuple[Path, checkpoint.RunState | None]]:
    """Context manager: the run's directory, locked against other processes, and the state from which a resumed run goes
    on (`resume: auto`). The run that `run_dir` names may be finished: then there is nothing left but to conclude it
    again.

    The directory is locked before anything in it is changed: a run that is being trained stays as it is.

    Raises:
        ConfigError: the directory holds another run, or this one and `resume` is never.
        InUseError: another process trains in it.
        StorageError: it cannot be written.
    """
    run_dir = reserve_run_dir(config)
    with owned(run_dir):
        yield run_dir, _entered(run_dir, config)


def reserve_run_dir(config: RunConfig) -> Path:
    """The directory of the run that goes on, or of a new one, which is made here and given to nobody else.

    Raises as `open_run_dir`, but for the lock.
    """
    if config.resume == "auto" and config.run_dir is None and (begun := _unfinished(config)) is not None:
        return begun
    check_place(config)
    path = config.run_path(now=datetime.now(UTC))
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
    if config.run_dir is not None and is_locked(path / ".lock"):
        raise _in_use(path)


def _in_use(directory: Path) -> InUseError:
    return InUseError(f"another process is training in {directory}", hint="wait for it, or end it")


@contextmanager
def owned(directory: Path) -> Iterator[None]:
    """Context manager: no other process trains in this directory, which is made if need be. Raises InUseError if one
    does."""
    with files.writing(f"locking {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not try_lock(descriptor):
            raise _in_use(directory)
        yield
    finally:
        os.close(descriptor)


def _made(path: Path) -> Path:
    """A new directory: `path`, or path-2, path-3, ... if other runs of that name began in the same second."""
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
    if changed := _changes(run_dir / CONFIG, config):
        raise ConfigError(
            f"run_dir {str(run_dir)!r} holds a run with another {', '.join(changed)}",
            hint="resume with the configuration that the run was started with, or name another directory",
        )
    found = checkpoint.newest(run_dir)
    standing = None if found is None else checkpoint.read(found)
    if standing is None or not standing.finished:
        _wind_back(run_dir, config.name, standing)
    return standing


def _check_free(run_dir: Path, config: RunConfig) -> None:
    if config.resume == "never" and (run_dir / METRICS).exists():
        raise ConfigError(
            f"run_dir {str(run_dir)!r} already holds a run",
            hint="name another, remove it, or go on with it if it was not finished: resume=auto",
        )


def _unfinished(config: RunConfig) -> Path | None:
    """The newest run of this configuration in `output_dir` that was not finished."""
    pattern = re.compile(rf"{re.escape(config.name)}-(\d{{8}}T\d{{6}}Z)(?:-(\d+))?")
    matches = [(pattern.fullmatch(path.name), path) for path in Path(config.output_dir).glob(f"{config.name}-*")]
    begun = [(match[1], int(match[2] or 1), path) for match, path in matches if match]
    for _, _, run_dir in sorted(begun, reverse=True):
        if (run_dir / CONFIG).exists() and not _changes(run_dir / CONFIG, config):
            at = checkpoint.newest(run_dir)
            if at is None or not checkpoint.read(at).finished:
                return run_dir
    return None


def _changes(saved: Path, config: RunConfig) -> list[str]:
    """The keys in which a saved configuration differs from this one."""
    yaml = YAML(typ="safe")
    try:
        before = identity(dict(yaml.load(saved.read_text(encoding="utf-8"))))
        now = identity(resolved(config))
    except (OSError, YAMLError, ValueError, TypeError):
        return ["configuration, or one that cannot be read"]
    return [key for key in {**before, **now} if _text(before.get(key)) != _text(now.get(key))]


def _text(value: object) -> str:
    """A value of a configuration for comparison: 1, 1.0 and true differ, and a number that is none equals itself."""
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
        for path in (*run_dir.glob(f"{ROLLOUTS}/step_*"), *run_dir.glob(f"{EVALUATIONS}/step_*")):
            if int(path.name.removeprefix("step_").partition(".")[0]) > step:
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


# ----------------------------------------------------------------------------------------------------------------------
# What users mean by a run, a store, an adapter or a trained policy. Every command resolves names here.
#
# RUN         a run's directory; the name of one under `runs/`; or the `name` of its configuration: the newest such run
# an adapter  RUN                                the run's policy: its active version, else its newest
#             RUN@N                              version N of that run
#             RUN/NAME@N or RUN/NAME             a version in a run's store, by the adapter's name
#             NAME@N or NAME                     in the newest run that has an adapter of this name
#             DIR                                a directory in PEFT's layout, from anywhere
# a policy    an adapter with its base model; or a RUN that trained all parameters, whose model is in RUN/model
# ----------------------------------------------------------------------------------------------------------------------

RUNS = Path("runs")
UNTRAINED = "untrained"  # the `kind` of the error about a run that has published nothing
STORE = "adapters"  # a run's store is in this folder of it
MODEL = "model"  # the trained weights of a run with `train.lora: null`
_VERSIONS, _WEIGHTS = f"{STORE}/*/v[0-9]*", f"{MODEL}/config.json"


@dataclass(frozen=True, kw_only=True)
class Located:
    """An adapter on disk. `base_hash` is None where nobody recorded the base model's; `quantization` is how that was
    loaded (`nf4`, `int8`)."""

    version: PolicyVersion
    directory: Path
    base_model: str | None = None
    base_hash: str | None = None
    quantization: str | None = None

    @property
    def run_dir(self) -> Path | None:
        """The run that it is a version of; None for a directory from elsewhere."""
        run_dir = self.directory.absolute().parents[2]
        return run_dir if self.directory.absolute().parents[1].name == STORE and (run_dir / CONFIG).is_file() else None

    @property
    def store(self) -> AdapterStore | None:
        """The store that it is a version of; None for a directory from elsewhere."""
        published = (self.directory / files.SIDECAR).is_file()
        return AdapterStore(self.directory.absolute().parents[1]) if published else None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context manager: the run that it is of does not remove it. Raises AdapterNotFoundError if it has."""
        with ExitStack() as stack:
            try:
                stack.enter_context(files.in_use(self.directory))
            except FileNotFoundError:
                message = f"the adapter in {self.directory} was removed just now"
                raise AdapterNotFoundError(message, hint="name a newer version") from None
            yield

    def check_base(self, base_hash: str) -> None:
        """Raise AdapterError if the adapter is known to be of another base model than the one with this hash."""
        if self.base_hash is not None and self.base_hash != base_hash:
            raise AdapterError(
                f"the adapter in {self.directory} was trained on {self.base_model} with base hash {self.base_hash}; "
                f"the model that is loaded has base hash {base_hash}",
                hint="set `model` to the base model that the adapter was trained on"
                + (f", and quantization to {self.quantization}" if self.quantization else ""),
            )


@dataclass(frozen=True, kw_only=True)
class TrainedPolicy:
    """What a run trained, or an adapter from elsewhere: the model to load and the adapter over it (None where all
    parameters were trained). `run_dir` is None for an adapter that is of no run."""

    model: str
    adapter: Located | None
    run_dir: Path | None

    @property
    def quantization(self) -> str | None:
        """How the model is to be loaded."""
        return None if self.adapter is None else self.adapter.quantization


def find_run(text: str) -> Path:
    """The directory of the run that is meant: a path, a directory under runs/, or the newest run of a name there.

    Raises DataError if there is none.
    """
    if (run := _run_with((METRICS,), text)) is not None:
        return run
    runs = sorted(path.parent for path in RUNS.glob(f"*/{METRICS}"))
    names = [word for path in runs for word in (path.name, path.name.rpartition("-")[0]) if word]
    if similar := difflib.get_close_matches(text, names, n=1):
        raise DataError(f"there is no run {text!r} under {RUNS.resolve()}", hint=f"did you mean {similar[0]}?")
    known = f"; there are: {', '.join(path.name for path in runs[-5:])}" if runs else ""
    raise DataError(
        f"there is no run {text!r}: no {METRICS} in {text} or {RUNS / text}",
        hint=f"name a run's directory, or a run under {RUNS.resolve()}{known}",
    )


def newest_run(root: Path = RUNS, *, adapter: str = "*") -> Path:
    """The run under `root` with the newest version of an adapter. Raises AdapterNotFoundError when there is none."""
    versions = list(root.glob(f"*/{STORE}/{adapter}/v[0-9]*"))
    if not versions:
        raise AdapterNotFoundError(
            f"no run under {root.resolve()} has an adapter",
            hint="name one by its place: RUN_DIR/NAME@N, or --run RUN_DIR or --store DIR where the command has them",
        )
    return max(versions, key=lambda path: (path.stat().st_mtime_ns, path)).parents[2]


def open_store(*, run: Path | str | None = None, store: Path | None = None) -> AdapterStore:
    """The store of `run`, or the one at `store`, or the newest run's. Nothing is created: it must be there."""
    if run is not None and store is not None:
        raise AdapterNotFoundError("both a run and a store are given", hint="give --run RUN_DIR or --store DIR")
    if run is not None:
        run = _run_with((_VERSIONS,), str(run)) or Path(run)
    directory = store or (run or newest_run()) / STORE
    if not directory.is_dir():
        raise AdapterNotFoundError(
            f"there is no adapter store {directory.resolve()}", hint="a run keeps its adapters in RUN_DIR/adapters"
        )
    return AdapterStore(directory)


def find_adapter(text: str) -> Located:
    """The adapter that is meant. Raises AdapterNotFoundError, or AdapterError for a damaged or unfit directory."""
    path = Path(text)
    if (path / files.CONFIG).exists():
        return _directory(path)
    where, at, number = text.rpartition("@") if "@" in text else (text, "", "")
    for name, version in ((text, ""), (where, at + number)):
        if (run := _run_with((_VERSIONS,), name)) is not None:
            return _of_run(run, version)
    if (path.parent / STORE).is_dir():
        return _in_store(open_store(run=path.parent), path.name)
    if path.parent == Path(".") and files.is_name(where) and any(RUNS.glob(f"*/{STORE}/{where}/v[0-9]*")):
        return _in_store(open_store(run=newest_run(adapter=where)), text)
    if (begun := _run_with((CONFIG,), where)) is not None:
        raise AdapterNotFoundError(
            f"the run {begun} has published no version: nothing was trained in it yet",
            hint=f"groupwise health {begun} says why",
            kind=UNTRAINED,
        )
    if text and path.is_dir():
        return _directory(path)
    names = sorted({path.name for path in RUNS.glob(f"*/{STORE}/*") if path.is_dir() and files.is_name(path.name)})
    known = f"; adapters of the runs in {RUNS.resolve()}: {', '.join(names[:8])}" if names else ""
    raise AdapterNotFoundError(
        f"there is no run and no adapter {text!r}, and no such directory",
        hint=f"name a run (its directory or its name), RUN@N, or a directory with {files.CONFIG}{known}",
    )


def find_version(text: str | None) -> Located | None:
    """As `find_adapter`; None for None and for "base", which both mean the model alone."""
    return None if text in (None, BASE) else find_adapter(text)


def find_policy(text: str) -> TrainedPolicy:
    """The trained policy that is meant: as `find_adapter`, and runs that trained all parameters.

    Raises AdapterNotFoundError or AdapterError as that does, AdapterError where the base model is not known.
    """
    run = _run_with((_VERSIONS, _WEIGHTS), text)
    if run is not None and not any(run.glob(_VERSIONS)):
        return TrainedPolicy(model=str(run / MODEL), adapter=None, run_dir=run)
    located = find_adapter(text)
    model = _model_of_run(located.run_dir) if located.run_dir is not None else located.base_model
    if model is None:
        raise AdapterError(
            f"the adapter in {located.directory} does not say which model it was trained on",
            hint="name the model: groupwise serve MODEL --adapter DIR",
        )
    return TrainedPolicy(model=model, adapter=located, run_dir=located.run_dir)


def _run_with(patterns: Sequence[str], text: str) -> Path | None:
    """The run of this directory or name that has a file of one of the `patterns`."""
    if not text:
        return None
    for path in (Path(text), RUNS / text):
        if any(any(path.glob(pattern)) for pattern in patterns):
            return path
    named = re.compile(rf"{re.escape(text)}-(\d{{8}}T\d{{6}}Z)(?:-(\d+))?")
    found = [(match, path) for path in RUNS.glob("*") if (match := named.fullmatch(path.name))]
    with_files = [
        ((match[1], int(match[2] or 1)), path)
        for match, path in found
        if any(any(path.glob(pattern)) for pattern in patterns)
    ]
    return max(with_files)[1] if with_files else None


def _model_of_run(run_dir: Path) -> str | None:
    """The `model` of a run's configuration; only this key is read, so that the run may be of another version."""
    try:
        return str(YAML(typ="safe").load((run_dir / CONFIG).read_text(encoding="utf-8"))["model"])
    except (OSError, YAMLError, ValueError, TypeError, KeyError):
        return None


def _of_run(run: Path, number: str) -> Located:
    """Version `number` ("@80"; "" for its policy) of the run's adapter: the active one's, or the only one there is."""
    store = open_store(run=run)
    names = store.names()
    name = store.active.name if not store.active.is_base else names[0] if len(names) == 1 else None
    if name is None:
        raise AdapterNotFoundError(
            f"{run} has the adapters {', '.join(names)}, and none of them is active", hint=f"name one: {run}/{names[0]}"
        )
    return _in_store(store, name + number)


def _in_store(store: AdapterStore, name: str | None) -> Located:
    try:
        version = store.resolve(name)
    except AdapterNotFoundError as error:
        raise AdapterNotFoundError(f"{error.message} in {store.root}, and no such directory", hint=error.hint) from None
    if version.is_base:
        raise AdapterNotFoundError(
            f"no version is active in {store.root}", hint="name a version, or leave --adapter out for the base model"
        )
    directory, info = store.path(version), store.info(version)
    return _located(directory, info)


def _directory(path: Path) -> Located:
    """A PEFT directory; one that a store published is also checked against its sidecar."""
    try:
        files.check_adapter(path)
    except AdapterError as error:
        raise AdapterError(f"{path} is not an adapter that can be used: {error.message}", hint=error.hint) from error
    place = path.resolve()
    published = re.fullmatch(r"v(\d{6,12})", place.name)  # in a store
    version = PolicyVersion(place.parent.name, int(published[1])) if published else PolicyVersion(place.name, 1)
    if not (path / files.SIDECAR).exists():
        return Located(version=version, directory=path)
    if damage := files.find_damage(path, version=version, hashes=True):
        raise AdapterError(f"the adapter in {path} is damaged: {damage}", hint="use another version")
    return _located(path, files.read_info(path, version=version))


def _located(directory: Path, info: files.AdapterInfo) -> Located:
    return Located(
        version=info.version,
        directory=directory,
        base_model=info.base_model,
        base_hash=info.base_hash,
        quantization=info.quantization,
    )
