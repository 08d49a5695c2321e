"""Keeps on disk what clients saved over the Tinker wire, found by tinker:// paths; it outlives sessions and processes.

    tinker://<run>/weights/<name>            trainer and optimizer, to continue from
    tinker://<run>/sampler_weights/<name>    a version in the server's adapter store, which chats can name too
    tinker://<run>/external_weights/<name>   the adapter as files, in PEFT's layout, to take away

    <state>/tinker/runs/<run>/<kind>/<name>/record.json       what is known of it
    <state>/tinker/runs/<run>/weights/<name>/<number>/        a state (`sdk.trainer`), the one that the record names
    <state>/tinker/runs/<run>/external_weights/<name>/<number>/   the files

The record is written last and in one step: what has a record is whole, what has none was never saved, and what is
overwritten is the old one until it is the new one. A checkpoint past its time to live is not found any more, and
removed.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from groupwise.errors import GroupwiseError, RequestError
from groupwise.server.errors import echo
from groupwise.store import files

WEIGHTS, SAMPLER_WEIGHTS, EXTERNAL_WEIGHTS = "weights", "sampler_weights", "external_weights"
TYPES = {WEIGHTS: "training", SAMPLER_WEIGHTS: "sampler", EXTERNAL_WEIGHTS: "external"}
RECORD = "record.json"

_RUN = re.compile(r"[0-9a-f]{32}:train:[0-9]{1,9}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class CheckpointNotFoundError(GroupwiseError, LookupError):
    """No such checkpoint: it never was, was deleted, or is past its time to live."""

    code, status, exit_code = "checkpoint_not_found", 404, 2


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Describes a saved checkpoint. `created` and `expires` are seconds since 1970; `lora` is its adapter's rank and
    targets. A checkpoint for training or download has a directory, `state`; one for sampling has an adapter version,
    `version`."""

    run: str
    kind: str
    name: str
    base_model: str
    lora: Mapping[str, Any]
    created: float = field(default_factory=time.time)
    expires: float | None = None
    user_metadata: Mapping[str, str] | None = None
    state: str | None = None
    version: str | None = None
    size_bytes: int = 0
    published: bool = False

    @property
    def path(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    def public(self) -> dict[str, Any]:
        """Return it as the package's listings have it."""
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": TYPES[self.kind],
            "time": _iso(self.created),
            "tinker_path": self.path,
            "size_bytes": self.size_bytes,
            "public": self.published,
            "user_metadata": self.user_metadata,
            "expires_at": None if self.expires is None else _iso(self.expires),
        }


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def parse_path(path: str) -> tuple[str, str, str]:
    """Return a tinker:// path -> run, kind, name. Raises RequestError."""
    parts = path.removeprefix("tinker://").split("/")
    if not path.startswith("tinker://") or len(parts) != 3 or parts[1] not in TYPES or not _RUN.fullmatch(parts[0]):
        hint = f"it looks like tinker://<run>/weights/<name>; in place of weights may be {' or '.join([*TYPES][1:])}"
        raise RequestError(f"{echo(path)} is no path of a checkpoint", hint=hint, field="path")
    check_checkpoint_name(parts[2])
    return parts[0], parts[1], parts[2]


def check_checkpoint_name(name: str) -> None:
    """Raise RequestError unless `name` can be a checkpoint's, and so a file's."""
    if not _NAME.fullmatch(name):
        hint = "1 to 128 of A-Z a-z 0-9 . _ - beginning with a letter or digit"
        raise RequestError(f"{echo(name)} cannot name a checkpoint", hint=hint, field="path")


class TinkerCheckpoints:
    """The checkpoints of one state directory. Every method touches the disk: call it in a thread. `admit` is called
    before more is kept, and raises where nothing may be."""

    def __init__(self, root: Path, *, admit: Callable[[], None] = lambda: None):
        self._runs, self._admit = root / "runs", admit
        self._writing = threading.Lock()
        for place in [*self._runs.glob(f"*/{WEIGHTS}/*/"), *self._runs.glob(f"*/{EXTERNAL_WEIGHTS}/*/")]:
            # what was being saved when the server ended
            for each in place.iterdir():
                if each.is_dir():
                    self.discard(each)

    def new_state(self, run: str, kind: str, name: str) -> Path:
        """Return where the files of tinker://`run`/`kind`/`name` are to be written, before it is recorded. Raises what
        `admit` does."""
        self._admit()
        return self._place(run, kind, name) / uuid4().hex

    def discard(self, directory: Path) -> None:
        """Remove what was written at a `new_state`, unless the record names it: an error after the record was written
        leaves what was saved."""
        found = self._read(directory.parent / RECORD, also_expired=True)
        if found is None or found.state != directory.name:
            shutil.rmtree(directory, ignore_errors=True)

    def directory(self, checkpoint: Checkpoint) -> Path:
        """Return the files of one to continue from, or to take away."""
        return self._place(checkpoint.run, checkpoint.kind, checkpoint.name) / str(checkpoint.state)

    def record(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return what was saved can be found from now on, in place of what had its name -> what is recorded of it.
        Raises StorageError."""
        with self._writing:
            before = self._read(self._record(checkpoint), also_expired=True)
            if checkpoint.state is not None:
                saved = self.directory(checkpoint).iterdir()
                checkpoint = replace(checkpoint, size_bytes=sum(each.stat().st_size for each in saved))
            self._write(checkpoint)
            if before is not None and before.state is not None:
                shutil.rmtree(self.directory(before), ignore_errors=True)
        return checkpoint

    def keep_for(self, path: str, seconds: int | None) -> Checkpoint:
        """Let it expire so many seconds from now, or never. Raises as `find`, and StorageError."""
        with self._writing:
            kept = replace(self.find(path), expires=None if seconds is None else time.time() + seconds)
            self._write(kept)
        return kept

    def publish(self, path: str, published: bool) -> None:
        """Mark it as published, or no longer. Raises as `find`, and StorageError."""
        with self._writing:
            self._write(replace(self.find(path), published=published))

    def find(self, path: str) -> Checkpoint:
        """Return the checkpoint of a path. Raises RequestError, CheckpointNotFoundError."""
        run, kind, name = parse_path(path)
        found = self._read(self._place(run, kind, name) / RECORD)
        if found is None:
            hint = "GET /api/v1/checkpoints lists those there are"
            raise CheckpointNotFoundError(f"there is no checkpoint {path}", hint=hint)
        return found

    def find_state(self, path: str) -> Checkpoint:
        """See `find`, of one that training continues from."""
        found = self.find(path)
        if found.kind != WEIGHTS:
            hint = "go on from what save_state (save_weights) saved"
            raise RequestError(f"{path} has no state of the trainer", hint=hint, field="path")
        return found

    def find_sampler(self, path: str) -> Checkpoint:
        """See `find`, of one for sampling; it has a version."""
        found = self.find(path)
        if found.version is None:
            hint = "sample from what save_weights_for_sampler saved"
            raise RequestError(f"{path} is not for sampling", hint=hint, field="path")
        return found

    def exists(self, run: str, kind: str, name: str) -> bool:
        """Return whether this name is taken."""
        return self._read(self._place(run, kind, name) / RECORD) is not None

    def list(self, run: str | None = None) -> list[Checkpoint]:
        """Return those of a run, or all, the newest first."""
        if run is not None and not _RUN.fullmatch(run):
            return []
        found = (self._read(path) for path in self._runs.glob(f"{run or '*'}/*/*/{RECORD}"))
        return sorted((each for each in found if each is not None), key=lambda each: -each.created)

    def expired(self) -> Iterator[Checkpoint]:
        """Yield those past their time to live."""
        for path in self._runs.glob(f"*/*/*/{RECORD}"):
            found = self._read(path, also_expired=True)
            if found is not None and found.expires is not None and found.expires < time.time():
                yield found

    def delete(self, checkpoint: Checkpoint) -> None:
        """Remove it, its record first, unless another one has its name by now. Raises StorageError."""
        record = self._record(checkpoint)
        with self._writing, files.writing(f"removing {checkpoint.path}"):
            if self._read(record, also_expired=True) != checkpoint:
                return
            record.unlink()
            if checkpoint.state is not None:
                shutil.rmtree(self.directory(checkpoint), ignore_errors=True)
        with suppress(OSError):  # the directories, if nothing else is in them
            for path in record.parents[:3]:
                path.rmdir()

    def _place(self, run: str, kind: str, name: str) -> Path:
        return self._runs / run / kind / name

    def _record(self, checkpoint: Checkpoint) -> Path:
        return self._place(checkpoint.run, checkpoint.kind, checkpoint.name) / RECORD

    def _write(self, checkpoint: Checkpoint) -> None:
        path = self._record(checkpoint)
        with files.writing(f"recording {checkpoint.path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            files.replace(path, json.dumps(asdict(checkpoint)))
            for directory in path.parents[1:4]:  # they may be as new
                files.fsync(directory)

    def _read(self, path: Path, *, also_expired: bool = False) -> Checkpoint | None:
        try:
            checkpoint = Checkpoint(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        over = checkpoint.expires is not None and checkpoint.expires < time.time()
        return None if over and not also_expired else checkpoint
