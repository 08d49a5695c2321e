"""Offers what was saved over the Tinker wire as files to download, in PEFT's layout.

    Downloads.save_external    a model's adapter as a checkpoint of files, encrypted with age where that is asked for
    Downloads.files            an address for each file of such a checkpoint
    Downloads.archive          any checkpoint as a tar.gz, which packages up to 0.25 ask for

An address holds a secret, works for an hour and asks for no key: the package fetches it without one.
"""

from __future__ import annotations

import asyncio
import importlib
import secrets
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from groupwise.bridges.tinker import schema as bodies
from groupwise.bridges.tinker.checkpoints import (
    EXTERNAL_WEIGHTS,
    WEIGHTS,
    Checkpoint,
    CheckpointNotFoundError,
    TinkerCheckpoints,
    check_checkpoint_name,
)
from groupwise.bridges.tinker.futures import FutureResult, answer
from groupwise.bridges.tinker.training import Models, TrainedModel
from groupwise.errors import ConflictError, RequestError
from groupwise.sdk.trainer import TrainingClient
from groupwise.server.errors import echo
from groupwise.store import files
from groupwise.store.adapters import AdapterStore
from groupwise.store.archive import stream_archive
from groupwise.types import PolicyVersion

VALID_S = 3600.0  # an address
ARCHIVE, ENCRYPTED = "adapter.tar.gz", ".age"


@dataclass(frozen=True, kw_only=True)
class Link:
    """The files of `directory` by a secret, until a time (seconds since 1970). One that was `made` for it goes then."""

    token: str
    checkpoint: tuple[str, float]  # its path, and when it was saved
    directory: Path
    until: float
    made: bool


class Downloads:
    """The downloads that one server offers. Files that were made for one address lie in `root` and are removed with
    it."""

    def __init__(self, root: Path, models: Models, checkpoints: TinkerCheckpoints, store: AdapterStore):
        self._root, self._models, self._checkpoints, self._store = root, models, checkpoints, store
        self._links: dict[str, Link] = {}
        self._making = asyncio.Lock()
        shutil.rmtree(root, ignore_errors=True)  # of another process, whose addresses are gone

    async def save_external(self, model: TrainedModel, body: bodies.SaveExternal) -> FutureResult:
        """Return the adapter as it is now. Raises RequestError, ConflictError, TenantFullError, StorageError."""
        check_checkpoint_name(body.path)
        recipients = _recipients(body.age_encryption_recipients or ())
        if await asyncio.to_thread(self._checkpoints.exists, model.id, EXTERNAL_WEIGHTS, body.path):
            raise ConflictError(f"there is a checkpoint {body.path!r} of this run", hint="choose another name")
        new_state = self._checkpoints.new_state
        directory = await asyncio.to_thread(new_state, model.id, EXTERNAL_WEIGHTS, body.path)

        def write(trainer: TrainingClient) -> None:
            with files.writing(f"writing the adapter of {model.id}"):
                directory.mkdir(parents=True)
                trainer.learner.save_adapter(directory)

        def record() -> Checkpoint:
            with files.writing(f"writing the adapter of {model.id}"):
                if recipients:
                    _encrypt(directory, recipients)
                for path in (*directory.iterdir(), directory):
                    files.fsync(path)
            return self._checkpoints.record(
                self._models.checkpoint(model, EXTERNAL_WEIGHTS, body.path, body, state=directory.name)
            )

        try:
            await self._models.in_training(model, write)
            saved = await asyncio.to_thread(record)
        except BaseException:
            self._checkpoints.discard(directory)
            raise
        return answer(type="save_weights_external", path=saved.path, size_bytes=saved.size_bytes)

    async def files(self, path: str) -> tuple[Link, list[str]]:
        """Return the files of external weights. Raises RequestError, CheckpointNotFoundError."""
        saved = await asyncio.to_thread(self._checkpoints.find, path)
        if saved.kind != EXTERNAL_WEIGHTS:
            hint = "save_weights_external makes some"
            raise RequestError(f"{path} is not a checkpoint of external weights", hint=hint, field="path")
        directory = self._checkpoints.directory(saved)
        names = await asyncio.to_thread(lambda: sorted(each.name for each in directory.iterdir()))
        return self._known(saved) or self._link(saved, directory, made=False), names

    async def archive(self, path: str) -> Link:
        """Return a checkpoint's adapter as `ARCHIVE`, its files at the top. Raises RequestError,
        CheckpointNotFoundError, StorageError, ConfigError for one of another base model."""
        saved = await asyncio.to_thread(self._checkpoints.find, path)
        if saved.kind == EXTERNAL_WEIGHTS:
            raise RequestError(f"{path} is files already", hint="fetch them: .../external_weights_urls", field="path")
        async with self._making:
            if (link := self._known(saved)) is not None:
                return link
            directory = self._root / uuid4().hex
            try:
                if saved.kind == WEIGHTS:
                    await self._models.write_adapter(saved, directory)
                await asyncio.to_thread(self._pack, saved, directory)
            except BaseException:
                shutil.rmtree(directory, ignore_errors=True)
                raise
            return self._link(saved, directory, made=True)

    def find(self, token: str, name: str) -> Path:
        """Return the file of an address. Raises CheckpointNotFoundError."""
        link = self._links.get(token)
        if link is not None and link.until > time.time():
            path = link.directory / name
            if path.parent == link.directory and path.is_file():
                return path
        raise CheckpointNotFoundError("there is nothing at this address any more", hint="ask for a new one")

    def _pack(self, saved: Checkpoint, directory: Path) -> None:
        """Make `ARCHIVE` in `directory`; for a state of the trainer the directory then has only the adapter's files."""
        source = directory if saved.version is None else self._store.path(PolicyVersion.parse(saved.version))
        with files.writing(f"packing {saved.path}"):
            directory.mkdir(parents=True, exist_ok=True)
            with (directory / ARCHIVE).open("wb") as packed:
                packed.writelines(stream_archive(source, top="."))
            for each in directory.iterdir():
                if each.name != ARCHIVE:
                    each.unlink()

    def _known(self, saved: Checkpoint) -> Link | None:
        """Return one that has at least half of its time left."""
        late = time.time() + VALID_S / 2
        same = (link for link in self._links.values() if link.checkpoint == (saved.path, saved.created))
        return next((link for link in same if link.until > late), None)

    def _link(self, saved: Checkpoint, directory: Path, *, made: bool) -> Link:
        """Return a new one; those that are over go."""
        now = time.time()
        for over in [link for link in self._links.values() if link.until < now]:
            del self._links[over.token]
            if over.made:
                shutil.rmtree(over.directory, ignore_errors=True)
        token, checkpoint = secrets.token_urlsafe(32), (saved.path, saved.created)
        link = Link(token=token, checkpoint=checkpoint, directory=directory, until=now + VALID_S, made=made)
        self._links[token] = link
        return link


def _recipients(keys: Sequence[str]) -> list[object]:
    """Return the recipients of age (https://age-encryption.org/v1): `age1...`, or public keys of SSH.

    Raises RequestError.
    """
    if not keys:
        return []
    try:
        pyrage = _pyrage()
    except ImportError:
        raise RequestError(
            "age_encryption_recipients needs pyrage, which the server has not",
            hint="pip install 'groupwise[tinker]' where the server runs, or save without encryption",
        ) from None
    try:
        return [(pyrage.ssh if key.startswith("ssh-") else pyrage.x25519).Recipient.from_str(key) for key in keys]
    except pyrage.RecipientError as error:
        raise RequestError(
            f"age_encryption_recipients: {echo(str(error))}", hint="give keys as age1... or ssh-..."
        ) from None


def _encrypt(directory: Path, recipients: Sequence[object]) -> None:
    """Encrypt every file for these recipients, under its name and `ENCRYPTED`."""
    pyrage = _pyrage()
    for path in [*directory.iterdir()]:
        pyrage.encrypt_file(str(path), f"{path}{ENCRYPTED}", list(recipients))
        path.unlink()


def _pyrage() -> Any:
    """Return the package of the extra `tinker`, whose stubs do not say what it has. Raises ImportError without it."""
    return importlib.import_module("pyrage")
