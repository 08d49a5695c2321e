"""Resolves what users call a run, a store, an adapter or a trained policy; every command resolves names here.

RUN         a run's directory; the name of one under `runs/`; or the `name` of its configuration: the newest such run,
            and for its policy the newest that was finished, if one was; a warning names the others
an adapter  RUN                                the run's policy: its active version, else its newest
            RUN@N                              version N of that run
            RUN/NAME@N or RUN/NAME             a version in a run's store, by the adapter's name
            NAME@N or NAME                     in the newest run that has an adapter of this name
            DIR                                a directory in PEFT's layout, from anywhere
            hf://OWNER/NAME[@REVISION]         one on the Hugging Face hub (`hub_adapters`)
a policy    an adapter with its base model; or a RUN that trained all parameters, whose model is in RUN/model
"""

from __future__ import annotations

import difflib
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from groupwise.errors import AdapterError, AdapterNotFoundError, DataError, StorageError
from groupwise.store import checkpoint, files
from groupwise.store.adapters import AdapterStore
from groupwise.store.hub_adapters import REPOSITORY, SCHEME, base_of, download_adapter, is_on_hub, pushed_manner
from groupwise.store.rundir import CONFIG, METRICS
from groupwise.types import BASE, PolicyVersion

RUNS = Path("runs")

UNTRAINED = "untrained"  # the `kind` of the error about a run whose policy is the base

STORE = "adapters"  # a run's store is in this folder of it

MODEL = "model"  # the trained weights of a run with `train.lora: null`

_VERSIONS, _WEIGHTS = f"{STORE}/*/v[0-9]*", f"{MODEL}/config.json"


@dataclass(frozen=True, kw_only=True)
class Located:
    """An adapter on disk. `base_hash` is None where the base model's was not recorded; `quantization` is how the base
    was loaded (`nf4`, `int8`)."""

    version: PolicyVersion
    directory: Path
    base_model: str | None = None
    base_hash: str | None = None
    quantization: str | None = None

    @property
    def run_dir(self) -> Path | None:
        """Return the directory of the version's run; None for a directory from elsewhere."""
        run_dir = self.directory.absolute().parents[2]
        return run_dir if self.directory.absolute().parents[1].name == STORE and (run_dir / CONFIG).is_file() else None

    @property
    def store(self) -> AdapterStore | None:
        """Return the store of the version; None for a directory from elsewhere."""
        published = (self.directory / files.SIDECAR).is_file()
        return AdapterStore(self.directory.absolute().parents[1]) if published else None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the version's run from removing it during the block. Raises AdapterNotFoundError if it is gone."""
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
    """A policy that a run trained, or an adapter from elsewhere: the model to load and the adapter over it (None where
    all parameters were trained). `run_dir` is None for an adapter that is of no run."""

    model: str
    adapter: Located | None
    run_dir: Path | None

    @property
    def quantization(self) -> str | None:
        """Return how the model is to be loaded."""
        return None if self.adapter is None else self.adapter.quantization

    @property
    def manner(self) -> dict[str, Any]:
        """Return how its prompts and completions were in training (`manner_of`); of an adapter from the hub as it was
        pushed with it, of another directory nothing."""
        if self.run_dir is not None:
            return manner_of(self.run_dir)
        return {} if self.adapter is None else pushed_manner(self.adapter.directory)


def find_run(text: str) -> Path:
    """Return the directory of the run that is meant: a path, a directory under runs/, or the newest run of a name
    there.

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
    """Return the run under `root` with the newest version of an adapter. Raises AdapterNotFoundError when there is
    none."""
    versions = list(root.glob(f"*/{STORE}/{adapter}/v[0-9]*"))
    if not versions:
        raise AdapterNotFoundError(
            f"no run under {root.resolve()} has an adapter",
            hint="name one by its place: RUN_DIR/NAME@N, or --run RUN_DIR or --store DIR where the command has them",
        )
    return max(versions, key=lambda path: (path.stat().st_mtime_ns, path)).parents[2]


def open_store(*, run: Path | str | None = None, store: Path | None = None) -> AdapterStore:
    """Return the store of `run`, or the one at `store`, or the newest run's. Nothing is created: it must be there."""
    if run is not None and store is not None:
        raise AdapterNotFoundError("both a run and a store are given", hint="give --run RUN_DIR or --store DIR")
    if run is not None:
        run = _trained_run(str(run), _VERSIONS) or Path(run)
    directory = store or (run or newest_run()) / STORE
    if not directory.is_dir():
        raise AdapterNotFoundError(
            f"there is no adapter store {directory.resolve()}", hint="a run keeps its adapters in RUN_DIR/adapters"
        )
    return AdapterStore(directory)


def find_adapter(text: str) -> Located:
    """Return the adapter that is meant. Raises AdapterNotFoundError, AdapterError for a damaged or unfit directory, or
    HubError for one on the hub that cannot be had."""
    if is_on_hub(text):
        downloaded = download_adapter(text)
        return replace(_directory(downloaded), base_model=base_of(downloaded))
    text = os.path.expanduser(text)  # in a file no shell has
    path = Path(text)
    if (path / files.CONFIG).exists():
        return _directory(path)
    where, at, number = text.rpartition("@") if "@" in text else (text, "", "")
    for name, version in ((text, ""), (where, at + number)):
        if (run := _trained_run(name, _VERSIONS)) is not None:
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
    owned = REPOSITORY.fullmatch(where) and not Path(where).parent.is_dir()
    on_hub = f"; one on the Hugging Face hub is {SCHEME}{text}" if owned else ""
    raise AdapterNotFoundError(
        f"there is no run and no adapter {text!r}, and no such directory",
        hint=f"name a run (its directory or its name), RUN@N, or a directory with {files.CONFIG}{on_hub}{known}",
    )


def find_version(text: str | None) -> Located | None:
    """See `find_adapter`; None for None and for "base", which both mean the model alone."""
    return None if text in (None, BASE) else find_adapter(text)


def find_policy(text: str) -> TrainedPolicy:
    """Return the trained policy that is meant: as `find_adapter`, and runs that trained all parameters.

    Raises AdapterNotFoundError or AdapterError as that does, AdapterError where the base model is not known.
    """
    text = os.path.expanduser(text)
    run = None if (Path(text) / files.CONFIG).exists() else _trained_run(text, _VERSIONS, _WEIGHTS)
    if run is not None and not any(run.glob(_VERSIONS)):
        return TrainedPolicy(model=str(run / MODEL), adapter=None, run_dir=run)
    located = find_adapter(text) if run is None else _of_run(run, "")
    model = _model_of_run(located.run_dir) if located.run_dir is not None else located.base_model
    if model is None:
        raise AdapterError(
            f"the adapter in {located.directory} does not say which model it was trained on",
            hint="name the model: groupwise serve MODEL --adapter DIR",
        )
    return TrainedPolicy(model=model, adapter=located, run_dir=located.run_dir)


class SeveralRunsWarning(UserWarning):
    """A name means several runs; the message says which is taken and names the others."""


def _runs_with(patterns: Sequence[str], text: str) -> list[Path]:
    """Return the runs of this name that have a file of one of the `patterns`, newest first; a directory alone where
    `text` is its path or its name under runs/."""
    if not text:
        return []
    for path in (Path(text), RUNS / text):
        if any(any(path.glob(pattern)) for pattern in patterns):
            return [path]
    named = re.compile(rf"{re.escape(text)}-(\d{{8}}T\d{{6}}Z)(?:-(\d+))?")
    found = [(match, path) for path in RUNS.glob("*") if (match := named.fullmatch(path.name))]
    with_files = [
        ((match[1], int(match[2] or 1)), path)
        for match, path in found
        if any(any(path.glob(pattern)) for pattern in patterns)
    ]
    return [path for _, path in sorted(with_files, reverse=True)]


def _run_with(patterns: Sequence[str], text: str) -> Path | None:
    """Return the newest run of `_runs_with`; None where there is none."""
    return next(iter(_runs_with(patterns, text)), None)


def _trained_run(text: str, *patterns: str) -> Path | None:
    """Return the run whose policy is meant: of several the newest that was finished, or else the newest, with a
    SeveralRunsWarning."""
    runs = _runs_with(patterns, text)
    if len(runs) < 2:
        return next(iter(runs), None)
    finished = [path for path in runs if _was_finished(path)]
    chosen = (finished or runs)[0]
    others = [path for path in runs if path != chosen]
    which = "the newest that was finished" if finished else "the newest"
    message = f"{text} is {chosen} ({_how_far(chosen, chosen in finished)}), {which}; of this name there are also "
    message += ", ".join(f"{path} ({_how_far(path, path in finished)})" for path in others[:5])
    message += f" and {len(others) - 5} more" if len(others) > 5 else ""
    warnings.warn(message, SeveralRunsWarning, stacklevel=2)
    return chosen


def _how_far(run_dir: Path, finished: bool) -> str:
    """Return how many steps a run made and its newest version, as far as they are known."""
    versions = [PolicyVersion(path.parent.name, int(path.name[1:])) for path in run_dir.glob(_VERSIONS)]
    newest = f", {max(versions, key=lambda each: each.number)}" if versions else ""
    with suppress(StorageError):
        state = checkpoint.standing(run_dir)
        if state is not None:
            return f"{state.step} steps{'' if finished else ', not finished'}{newest}"
    return f"not finished{newest}"


def _was_finished(run_dir: Path) -> bool:
    """Return whether the run made all its steps; one whose checkpoint is damaged did not."""
    with suppress(StorageError):
        return checkpoint.is_over(run_dir)
    return False


@lru_cache(maxsize=16)
def _said(configuration: str) -> Any:
    """Return the values of a run's configuration from a cache; do not change them. A command reads them several
    times."""
    return YAML(typ="safe").load(configuration)


def _model_of_run(run_dir: Path) -> str | None:
    """Return the `model` of a run's configuration; only this key is read, so that the run may be of another version."""
    try:
        return str(_said((run_dir / CONFIG).read_text(encoding="utf-8"))["model"])
    except (OSError, YAMLError, ValueError, TypeError, KeyError):
        return None


def manner_of(run_dir: Path) -> dict[str, Any]:
    """Return what a run's prompts and completions had besides the messages, as far as it is there: `system`, the
    message before them, `chat`, how they were rendered, and `structured_outputs`, what completions had to be. Only
    these keys are read, whatever version wrote them."""
    try:
        said = _said((run_dir / CONFIG).read_text(encoding="utf-8"))
        data, rollout = said.get("data") or {}, said.get("rollout") or {}
        regex = rollout.get("structured_outputs_regex")
        form = rollout.get("structured_outputs") or ({"regex": regex} if regex else None)
        chat = dict(said.get("chat") or {})
        if os.path.isfile(file := os.path.join(said.get("folder", "."), chat.get("template") or "")):
            chat["template"] = file
        chat = {key: value for key, value in chat.items() if value}
        found = {"system": data.get("system"), "chat": chat, "structured_outputs": form}
    except (OSError, YAMLError, ValueError, TypeError, AttributeError):
        return {}
    return {key: value for key, value in found.items() if value}


def _of_run(run: Path, number: str) -> Located:
    """Version `number` ("@80"; "" for its policy) of the run's adapter: the active one's, or the only one there is."""
    store = open_store(run=run)
    names = store.names()
    if not number and store.base_was_chosen:
        raise AdapterNotFoundError(
            f"the policy of {run} is the base: no version was better where it was evaluated",
            hint=f"name a version: {run}@{store.versions(names[0])[-1].number}",
            kind=UNTRAINED,
        )
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
    """Return a PEFT directory; one that a store published is also checked against its sidecar."""
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
