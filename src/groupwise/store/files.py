"""One adapter version on disk: what it must look like, and how it is written so that a crash cannot tear it.

    adapter_config.json          PEFT's configuration        adapter_model.safetensors    PEFT's weights
    groupwise.json               where it came from, and the size and sha256 of every other file

A version is a LoRA adapter that PEFT and vLLM load: keys `base_model.model.<path>.lora_A.weight`, floats, all finite,
and of what PEFT would compute with them nothing is left out (`adapter_config`).
safetensors refuses truncated files itself but accepts NaN, so the weights are read here. Nothing is ever unpickled.

The second half is the file system protocol of the store: one lock, staging directories, replacement in one step.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open

from groupwise.errors import AdapterError, ConfigError, GroupwiseError, InUseError, StorageError
from groupwise.platform import try_lock, unlock
from groupwise.store import faults
from groupwise.store.adapter_config import CONFIG as CONFIG
from groupwise.store.adapter_config import MAX_NAME, ExpertTargets, adapted, check_config
from groupwise.store.adapter_config import MAX_RANK as MAX_RANK
from groupwise.store.ledger_schema import fsync as fsync  # there, since the ledger imports nothing that this one does
from groupwise.types import BASE, PolicyVersion

T = TypeVar("T")

WEIGHTS = "adapter_model.safetensors"
SIDECAR = "groupwise.json"
FORMAT = 1

MAX_CONFIG_BYTES = 1 << 20
MAX_WEIGHTS_BYTES = 2 << 30
MAX_HEADER_BYTES = 16 << 20  # of the safetensors file; 252 modules have 75 kB
MAX_TENSORS = 1 << 16
LOCK_TIMEOUT_S = 60.0

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")
_COPY_BYTES = 1 << 20
STAGING, _ASIDE = ".staging-", ".replaced-"
_HALF = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
MAGNITUDE = ".lora_magnitude_vector"  # DoRA's, of a module
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # other OSErrors say nothing about the version

# A float is infinite or NaN exactly when all bits of its exponent are set: (integer view, those bits) per dtype.
# This reads bfloat16 too, which numpy has no type for.
_EXPONENT_BITS = {
    "F64": (np.uint64, 0x7FF0_0000_0000_0000),
    "F32": (np.uint32, 0x7F80_0000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Holds the origin of a version, as its publisher states it. `base_hash` names the exact base weights, and
    `quantization` (`nf4`, `int8`) how the base was loaded.

    `job` is the training job that made the version. `unhealthy` is the error of health at the job's end: such a version
    becomes active, and is meant by its adapter's name, only if a person activates it. `canary` has the trainer's
    log-probabilities under the version, with which a loading engine compares its own: {"prompt_ids", "completion_ids",
    "logprobs"}, at temperature 1.
    """

    base_model: str
    base_hash: str
    quantization: str | None = None
    parent: PolicyVersion = field(default_factory=PolicyVersion.base)
    step: int = 0
    config_hash: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    job: str | None = None
    unhealthy: str | None = None
    canary: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class AdapterInfo(Provenance):
    """The contents of a version's sidecar file: its origin, name, time and files. `created` is ISO 8601 UTC; `files`
    maps a name to (bytes, sha256)."""

    version: PolicyVersion
    created: str
    files: Mapping[str, tuple[int, str]]


def is_name(text: str) -> bool:
    """Return whether `text` can name an adapter, and therefore a directory."""
    return text != BASE and _NAME.fullmatch(text) is not None


def check_name(name: str) -> str:
    """Return `name`, or raise AdapterError if it cannot name an adapter."""
    if not is_name(name):
        raise AdapterError(
            f"{name[:80]!r} cannot name an adapter",
            hint=f"use 1 to 64 of A-Z a-z 0-9 . _ - starting with a letter or digit, and not {BASE!r}",
        )
    return name


def check_adapter(directory: Path) -> None:
    """Raise AdapterError unless `directory` holds a LoRA adapter that can be served: layout, config, finite weights."""
    for entry in sorted(directory.iterdir()):
        if entry.suffix in _PICKLES:
            raise AdapterError(
                f"{entry.name} may hold a pickle, which can run code when it is loaded",
                hint=f"save the adapter as {WEIGHTS} (PEFT: safe_serialization=True)",
            )
        if not stat.S_ISREG(entry.lstat().st_mode):
            raise AdapterError(f"{entry.name} is not a plain file; an adapter is a directory of plain files")
    config = _read_config(directory / CONFIG)
    weights = directory / WEIGHTS
    _check_size(weights, limit=MAX_WEIGHTS_BYTES)
    with weights.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise AdapterError(f"{WEIGHTS} is not a whole safetensors file: its header would have {length:,} bytes")
    try:
        with safe_open(weights, framework="np"):  # the header, overlaps and the file's length
            pass
    except SafetensorError as error:
        raise AdapterError(f"{WEIGHTS} is not a whole safetensors file: {error}") from error
    tensors = _read_header(weights)
    adapted(config, _ranks(tensors, dora=bool(config.get("use_dora"))))
    _check_finite(weights, tensors)


def _check_size(path: Path, *, limit: int) -> None:
    if not path.is_file():
        raise AdapterError(f"{path.name} is missing", hint=f"an adapter has {CONFIG} and {WEIGHTS}, as PEFT saves them")
    size = path.stat().st_size
    if size > limit:
        raise AdapterError(f"{path.name} has {size:,} bytes; the limit is {limit:,}")


def _read_config(path: Path) -> dict[str, Any]:
    _check_size(path, limit=MAX_CONFIG_BYTES)
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{CONFIG} holds a {type(config).__name__}; it must be an object")
    check_config(config)
    return config


def _read_header(path: Path) -> dict[str, dict[str, Any]]:
    """safetensors: 8 bytes of header length (little-endian), JSON {name: dtype, shape, data_offsets}, then the data."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    for tensor in header.values():
        tensor["begin"], tensor["end"] = (8 + length + offset for offset in tensor.pop("data_offsets"))
    return header


def adapted_names(directory: Path) -> list[str]:
    """Return the modules, and the parameters of experts, that a checked adapter changes: the names of its tensors say
    which, whatever patterns its configuration has."""
    before, after = "base_model.model.", ".lora_A.weight"
    targets = ExpertTargets(json.loads((directory / CONFIG).read_bytes()))
    keys = [key for key in _read_header(directory / WEIGHTS) if key.endswith(after)]
    return [targets.name(key.removeprefix(before).removesuffix(after)) for key in keys]


def _ranks(tensors: Mapping[str, dict[str, Any]], *, dora: bool = False) -> dict[str, int]:
    """Key -> its rank, of experts their number times that. Raises AdapterError unless the tensors are the two halves of
    LoRA, with DoRA also a magnitude of each output, and nothing else."""
    if len(tensors) > MAX_TENSORS:
        raise AdapterError(f"{WEIGHTS} has {len(tensors):,} tensors; the limit is {MAX_TENSORS:,}")
    if not any(".lora_A." in key for key in tensors):
        raise AdapterError(f"{WEIGHTS} has no LoRA weights; keys are 'base_model.model.<module>.lora_A.weight'")
    halves: dict[str, dict[str, list[int]]] = {}
    outputs = {
        key.removesuffix(MAGNITUDE): tensor["shape"] for key, tensor in tensors.items() if key.endswith(MAGNITUDE)
    }
    tensors = {key: tensor for key, tensor in tensors.items() if not key.endswith(MAGNITUDE)}
    for key, tensor in tensors.items():
        if not key.startswith("base_model.model."):
            raise AdapterError(f"{WEIGHTS}: {key[:120]!r} does not start with 'base_model.model.', as PEFT saves keys")
        match = _HALF.fullmatch(key)
        if match is None or len(match["module"]) > MAX_NAME:
            raise AdapterError(
                f"{WEIGHTS}: {key[:120]!r} is not served; keys are 'base_model.model.<module>.lora_A.weight' and lora_B"
            )
        halves.setdefault(match["module"], {})[match["half"]] = tensor["shape"]
    for module, shapes in halves.items():
        down, up = shapes.get("A", ()), shapes.get("B", ())
        if len(down) < 2 or len(up) < 2 or down[0] != up[1]:
            raise AdapterError(
                f"{WEIGHTS}: lora_A of {module[:120]!r} has shape {tuple(down)}, lora_B has {tuple(up)}; ranks differ"
            )
    wanted = {f"base_model.model.{module}": [shapes["B"][0]] for module, shapes in halves.items()} if dora else {}
    if outputs != wanted:
        odd = min((key for key in outputs.keys() | wanted if outputs.get(key) != wanted.get(key)), key=str)
        raise AdapterError(
            f"{WEIGHTS}: {odd[:120]!r} has a magnitude of shape {outputs.get(odd)}; with use_dora {str(dora).lower()} "
            f"it must be {wanted.get(odd)}"
        )
    return {module: shapes["A"][0] for module, shapes in halves.items()}


def _check_finite(path: Path, tensors: Mapping[str, dict[str, Any]]) -> None:
    data = np.memmap(path, dtype=np.uint8, mode="r")
    for key, tensor in tensors.items():
        if tensor["dtype"] not in _EXPONENT_BITS:
            valid = ", ".join(_EXPONENT_BITS)
            raise AdapterError(f"{WEIGHTS}: {key[:120]!r} has dtype {tensor['dtype']}; it must be one of {valid}")
        integer, bits = _EXPONENT_BITS[tensor["dtype"]]
        values = data[tensor["begin"] : tensor["end"]].view(integer)
        if bad := int(np.count_nonzero((values & integer(bits)) == bits)):
            raise AdapterError(
                f"{WEIGHTS}: {bad} of the {values.size} values of {key[:120]!r} are NaN or infinite",
                hint="the training step that made it diverged; publish an earlier one",
            )


def seal(directory: Path, *, provenance: Provenance) -> None:
    """Write the sidecar and force every file of `directory` to the disk. After this only a rename is missing.

    The sidecar does not hold its own version: the directory's place in the store says it.
    """
    files = {path.name: (path.stat().st_size, sha256(path)) for path in sorted(directory.iterdir())}
    sidecar = {
        "format": FORMAT,
        "base_model": provenance.base_model,
        "base_hash": provenance.base_hash,
        "quantization": provenance.quantization,
        "parent": str(provenance.parent),
        "step": provenance.step,
        "config_hash": provenance.config_hash,
        "metrics": {key: value if math.isfinite(value) else None for key, value in provenance.metrics.items()},
        "job": provenance.job,
        "unhealthy": provenance.unhealthy,
        "canary": None if provenance.canary is None else dict(provenance.canary),
        "created": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "files": files,
    }
    (directory / SIDECAR).write_text(json.dumps(sidecar, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    for path in directory.iterdir():
        fsync(path)
    fsync(directory)


def read_info(directory: Path, *, version: PolicyVersion) -> AdapterInfo:
    """Return the sidecar of a published version. Raises AdapterError if it is missing or garbled, GroupwiseError if it
    is of a newer format."""
    try:
        raw = json.loads((directory / SIDECAR).read_bytes())
        if raw["format"] > FORMAT:  # not damage, so not an AdapterError: a downgrade must not quarantine everything
            raise GroupwiseError(
                f"{version} was written by a newer groupwise: its sidecar has format {raw['format']}, this one reads "
                f"up to {FORMAT}",
                hint="upgrade groupwise",
            )
        return AdapterInfo(
            version=version,
            base_model=raw["base_model"],
            base_hash=raw["base_hash"],
            quantization=raw.get("quantization"),
            parent=PolicyVersion.parse(raw["parent"]),
            step=raw["step"],
            config_hash=raw["config_hash"],
            metrics={key: math.nan if value is None else value for key, value in raw["metrics"].items()},
            job=raw.get("job"),  # an older sidecar does not have these
            unhealthy=raw.get("unhealthy"),
            canary=raw.get("canary"),
            created=raw["created"],
            files={key: (whole_number(size), str(digest)) for key, (size, digest) in raw["files"].items()},
        )
    except (*_ABSENT, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise AdapterError(f"{version}: {SIDECAR} cannot be read: {type(error).__name__}: {error}") from error


def whole_number(value: Any) -> int:
    """Return a number from a JSON file, which may be damaged. Raises ValueError: 1e400 is infinite, and 1.5 is not a
    size."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:80]!r} is not a whole number")
    return value


def find_damage(directory: Path, *, version: PolicyVersion, hashes: bool) -> str | None:
    """Return why `directory` is not what was published, or None. `hashes` reads every byte, otherwise only the
    sizes."""
    try:
        info = read_info(directory, version=version)
    except AdapterError as error:
        return error.message
    for name in (CONFIG, WEIGHTS):
        if name not in info.files:
            return f"{SIDECAR} does not list {name}"
    for name, (size, digest) in info.files.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes; {size} were published"
        if hashes and sha256(path) != digest:
            return f"{name} does not have the sha256 that was published"
    return None


def copy_file(source: Path, target: Path, *, limit: int) -> None:
    """Copy a plain file of at most `limit` bytes and force it to the disk. Raises AdapterError, or OSError."""
    try:  # O_NONBLOCK: a FIFO must not be waited for. Links are followed: the Hugging Face cache is made of them.
        descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        raise AdapterError(f"{source} is missing", hint=f"an adapter has {CONFIG} and {WEIGHTS}") from None
    with open(descriptor, "rb") as reader:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise AdapterError(f"{source} is not a plain file")
        with target.open("xb") as writer:
            copied = 0
            while chunk := reader.read(_COPY_BYTES):
                copied += len(chunk)
                if copied > limit:
                    raise AdapterError(f"{source} has more than {limit:,} bytes, the limit for {source.name}")
                writer.write(chunk)
            writer.flush()
            os.fsync(writer.fileno())


def has_pickles(directory: Path) -> bool:
    """Return whether some file of `directory` is in a format that is loaded by unpickling."""
    return any(entry.suffix in _PICKLES for entry in directory.iterdir())


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


PROBE_BYTES = 1 << 16  # what a transaction of the ledger needs at most, as a rule


def check_writable(directory: Path) -> None:
    """Raise OSError unless the directory can be listed, and a file be made, written, forced to the disk and removed."""
    probe = staging_path(directory).with_suffix(".tmp")
    os.listdir(directory)
    try:
        with open(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)


def read_json(path: Path, kind: TypeAdapter[T], *, hint: str) -> T | None:
    """Return a JSON file's content; None if there is no file. `hint` says what to do about a damaged one.

    Raises StorageError if it cannot be read or is not of this kind.
    """
    try:
        return kind.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError.of(error, f"cannot read {path}: {error.strerror or error}") from error
    except ValidationError as error:
        raise StorageError(f"{path} is damaged: {error.error_count()} errors", hint=hint) from error


def replace(path: Path, content: str | bytes, *, mode: int = 0o666) -> None:
    """Put `content` at `path` in one step, with this mode less the umask: after a crash the file is the old one or the
    new one. Text is written as UTF-8."""
    data = content.encode() if isinstance(content, str) else content
    temporary = staging_path(path.parent)
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
        fsync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync(path.parent)


def write_new(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write a file that must not be there yet, with this mode less the umask.

    Raises ConfigError if something of that name is there, StorageError if it cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} exists already", hint="name another file, or remove it first") from None
    except OSError as error:
        raise StorageError.of(error, f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def new_directory(target: Path, *, fault: str) -> Iterator[Path]:
    """Context manager: a directory to write into, which becomes `target` at the end, in place of one that is there; if
    the block raises, `target` is as it was, and nothing else is left. Everything in it is on the disk before it has
    that name: what can be seen is whole (`whole_directory`, should a crash come between). One writer at a time; `fault`
    names its `faults.point`s."""
    staging = target.with_name(f"{STAGING}{target.name}")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(staging, ignore_errors=True)  # what a crash left
    staging.mkdir()
    try:
        yield staging
        for path in (*staging.rglob("*"), staging):
            fsync(path)
        faults.point(f"{fault}:before-rename")
        replace_directory(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)  # a full disk is to have it back
        raise
    faults.point(f"{fault}:after-rename")


def replace_directory(staging: Path, target: Path) -> None:
    """Rename a directory to `target`, in place of the one that is there. After a crash `whole_directory` finds the old
    one or the new one."""
    aside = _aside(target)
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    try:
        staging.rename(target)
    except OSError:
        if not target.exists() and aside.exists():
            aside.rename(target)
        raise
    fsync(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def whole_directory(target: Path) -> Path:
    """Return where the content of `target` is: there, or set aside if a crash interrupted its replacement."""
    aside = _aside(target)
    return aside if aside.exists() and not target.exists() else target


def set_aside(root: Path, pattern: str) -> list[Path]:
    """Return the directories that were to be replaced in `root` when a crash came, by the names that they had."""
    return [root / path.name.removeprefix(_ASIDE) for path in root.glob(f"{_ASIDE}{pattern}")]


def _aside(target: Path) -> Path:
    return target.with_name(f"{_ASIDE}{target.name}")


@contextmanager
def filling(target: Path) -> Iterator[Path]:
    """Context manager: a directory to write into, which becomes `target` at the end. Where an empty one is there, which
    a shell may stand in or a volume be mounted on, its files come in there, all of them or none. If the block raises,
    nothing is left. Raises OSError."""
    there = target.is_dir()
    target.parent.mkdir(parents=True, exist_ok=True)
    staged, moved = staging_path(target if there else target.parent), list[Path]()
    try:
        staged.mkdir()
        yield staged
        if not there:
            staged.rename(target)
            return
        for path in sorted(staged.iterdir()):
            moved.append(path.rename(target / path.name))
    except BaseException:
        for path in moved:
            path.rename(staged / path.name)
        raise
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def staging_path(root: Path) -> Path:
    """Return a new name that `sweep` will remove unless what has it is renamed, or locked by a living process."""
    return root / f"{STAGING}{uuid4().hex}"


@contextmanager
def staging(root: Path) -> Iterator[Path]:
    """Yield a directory that is gone afterwards unless it was renamed. Its lock tells `sweep` that its writer is
    alive."""
    path, descriptor = staging_path(root), -1
    try:
        with locked(root):  # sweep() must not see it before it is locked
            path.mkdir()
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try_lock(descriptor)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if descriptor >= 0:
            _unlock(descriptor)


def sweep(root: Path) -> None:
    """Remove what crashes left in staging. The lock is held."""
    for leftover in root.glob(f"{STAGING}*"):
        if not leftover.is_dir():
            leftover.unlink(missing_ok=True)  # a file that was never moved into place
            continue
        descriptor = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY)
        if try_lock(descriptor):
            shutil.rmtree(leftover, ignore_errors=True)
            _unlock(descriptor)
        else:
            os.close(descriptor)


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the store's lock, which the kernel releases when its holder dies. Not re-entrant."""
    descriptor = os.open(root / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while not try_lock(descriptor):
            if time.monotonic() > deadline:
                raise InUseError(
                    f"waited {LOCK_TIMEOUT_S:.0f} s for {root / '.lock'}, which another process holds",
                    hint="see who holds it with `fuser`, and end that process if it hangs",
                )
            time.sleep(0.005)
        yield
    finally:
        _unlock(descriptor)


@contextmanager
def in_use(directory: Path) -> Iterator[None]:
    """Context manager: `try_move` leaves the directory alone. Raises FileNotFoundError if it is not there,
    InUseError if its lock cannot be had."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while not try_lock(descriptor, shared=True):  # who publishes or removes it just now is soon done
            if time.monotonic() > deadline:
                raise InUseError(f"waited {LOCK_TIMEOUT_S:.0f} s for {directory}, which another process holds")
            time.sleep(0.005)
        if not directory.exists() or os.fstat(descriptor).st_ino != directory.stat().st_ino:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(directory))
        yield
    finally:
        _unlock(descriptor)


def try_move(directory: Path, target: Path, *, before: Callable[[], None]) -> bool:
    """Call `before` and rename a directory, unless a process uses it (`in_use`); return whether it was renamed."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not try_lock(descriptor):
            return False
        before()
        directory.rename(target)
        return True
    finally:
        _unlock(descriptor)


def _unlock(descriptor: int) -> None:
    """Release and close. Closing alone would not do: a child forked meanwhile has a copy, which keeps the lock."""
    unlock(descriptor)
    os.close(descriptor)


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Turn a failure of the file system into a StorageError that says what was being done."""
    try:
        yield
    except StorageError:
        raise
    except (OSError, SafetensorError) as error:
        if isinstance(error, SafetensorError) and "os error" not in str(error):  # safetensors hides the OSError in it
            raise
        raise StorageError.of(error, f"{what} failed: {error}") from error
