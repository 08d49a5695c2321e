"""What the command line means by a run, a store or an adapter.

a run       a directory with `adapters/` in it; where none is named, the one under `runs/` that published last
an adapter  RUN_DIR/NAME@N or RUN_DIR/NAME     a version in a run's store
            RUN_DIR                            the run's active version
            NAME@N or NAME                     in the newest run
            DIR                                a directory in PEFT's layout, from anywhere
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from groupwise import adapter_files as files
from groupwise.adapters import AdapterStore
from groupwise.errors import AdapterError, AdapterNotFoundError
from groupwise.types import PolicyVersion

RUNS = Path("runs")
STORE = "adapters"  # a run's store is in this folder of it


@dataclass(frozen=True, kw_only=True)
class Located:
    """An adapter on disk. `base_hash` is None where nobody recorded the base model's."""

    version: PolicyVersion
    directory: Path
    base_model: str | None = None
    base_hash: str | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within: the run that it is of does not remove it. Raises AdapterNotFoundError if it has."""
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
                hint="set `model` to the base model that the adapter was trained on",
            )


def newest_run(root: Path = RUNS) -> Path:
    """The run under `root` with the newest adapter version. Raises AdapterNotFoundError when there is none."""
    versions = list(root.glob(f"*/{STORE}/*/v[0-9]*"))
    if not versions:
        raise AdapterNotFoundError(
            f"no run under {root.resolve()} has an adapter",
            hint="name a run with --run RUN_DIR, or a store with --store DIR",
        )
    return max(versions, key=lambda path: (path.stat().st_mtime_ns, path)).parents[2]


def open_store(*, run: Path | None = None, store: Path | None = None) -> AdapterStore:
    """The store of `run`, or the one at `store`, or the newest run's. Nothing is created: it must be there."""
    if run is not None and store is not None:
        raise AdapterNotFoundError("both a run and a store are given", hint="give --run RUN_DIR or --store DIR")
    directory = store or (run or newest_run()) / STORE
    if not directory.is_dir():
        raise AdapterNotFoundError(
            f"there is no adapter store {directory.resolve()}", hint="a run keeps its adapters in RUN_DIR/adapters"
        )
    return AdapterStore(directory)


def find_adapter(text: str) -> Located:
    """What `--adapter` names. Raises AdapterNotFoundError, or AdapterError for a damaged or unfit directory."""
    path = Path(text)
    if path.is_dir():
        if (path / STORE).is_dir() and not (path / files.CONFIG).exists():
            return _in_store(open_store(run=path), None)
        return _directory(path)
    if path.parent == Path("."):
        return _in_store(open_store(), text)
    if (path.parent / STORE).is_dir():
        return _in_store(open_store(run=path.parent), path.name)
    raise AdapterNotFoundError(
        f"there is no adapter {text!r}: {path.parent} is no run, and there is no such directory",
        hint="write RUN_DIR/NAME@N, NAME@N of the newest run, or a directory with adapter_config.json",
    )


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
    return Located(version=version, directory=directory, base_model=info.base_model, base_hash=info.base_hash)


def _directory(path: Path) -> Located:
    """A PEFT directory; one that a store published is also checked against its sidecar."""
    try:
        files.check_adapter(path)
    except AdapterError as error:
        raise AdapterError(f"{path} is not an adapter that can be used: {error.message}", hint=error.hint) from error
    version = PolicyVersion(path.resolve().name, 1)
    if not (path / files.SIDECAR).exists():
        return Located(version=version, directory=path)
    if damage := files.find_damage(path, version=version, hashes=True):
        raise AdapterError(f"the adapter in {path} is damaged: {damage}", hint="use another version")
    info = files.read_info(path, version=version)
    return Located(version=version, directory=path, base_model=info.base_model, base_hash=info.base_hash)
