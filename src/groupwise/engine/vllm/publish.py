"""Publishes a version from the trainer's disk to vLLM: with its own copy, its own name, a canary, a lease.

publish   the files are laid in their own directory, under a name that never was before (`name-v12-1f3a`):
          vLLM keeps prompts it has computed by an adapter's name and path, so one that is used again serves the
          old
canary    some tokens are sampled under that name; their log-probabilities must be those of the same files here, as
          far as rounding lets them (`vllm.gaps`)
lease     a version is unloaded, and its copy removed, when the last request that samples from it is done: an
          adapter that vLLM has pushed out of its memory is read again, and a missing directory ends its engine
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from groupwise.engine.vllm.client import VllmServer
from groupwise.engine.vllm.gaps import Gaps
from groupwise.errors import AdapterError, EngineError, StorageError
from groupwise.sampler import Scores
from groupwise.types import PolicyVersion

FILES = ("adapter_config.json", "adapter_model.safetensors")

LONGEST_NAME = 64  # of what a version is called there, without its number; a sum of adapters has a long name

_PLAIN = re.compile(r"[^\w.-]")  # what vLLM's names and directories are not to have


class TrainerScores(Scores, Protocol):
    """The trainer's scores of completions: the local engine over the same base weights."""

    def load(self, version: PolicyVersion, directory: Path) -> None: ...

    def adopt(self, version: PolicyVersion) -> None: ...

    def unload(self, version: PolicyVersion) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Published:
    """A version as vLLM knows it."""

    version: PolicyVersion
    name: str
    path: Path

    @property
    def label(self) -> str:
        """Return the name of a server's weights when they are this version's."""
        return str(self.path)


class Shelf:
    """The directory in which versions lie for vLLM, until `close`. `place` None is a temporary one."""

    def __init__(self, place: Path | None):
        if place is not None:
            place.mkdir(parents=True, exist_ok=True)
        self.path = Path(tempfile.mkdtemp(prefix="groupwise-vllm-", dir=place)).absolute()
        self.path.chmod(0o755)  # the server may be another user's

    def put(self, version: PolicyVersion, directory: Path) -> Published:
        """Return a copy of an adapter, hard links where they can be, under a new name. Raises AdapterError."""
        published = self.named(version)
        try:
            published.path.mkdir()
            for file in FILES:
                _link(directory / file, published.path / file)
        except OSError as error:
            raise AdapterError(f"the adapter in {directory} cannot be laid out for vLLM: {error}") from error
        return published

    def write(self, published: Published, write: Callable[[Path], None]) -> None:
        """Lay a checkpoint of all weights there, as `write` writes them. Raises StorageError."""
        try:
            published.path.mkdir()
            write(published.path)
        except OSError as error:
            self.remove(published)
            raise StorageError.of(
                error, f"the weights of {published.version} cannot be written for vLLM: {error}"
            ) from error

    def named(self, version: PolicyVersion) -> Published:
        """Return a version under a name that never was before."""
        called = _PLAIN.sub("-", version.name)[:LONGEST_NAME]
        name = f"{called}-v{version.number}-{secrets.token_hex(4)}"
        return Published(version=version, name=name, path=self.path / name)

    def remove(self, published: Published) -> None:
        shutil.rmtree(published.path, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


@dataclass(eq=False)
class LoadedAdapter:
    """A loaded version: how many requests sample from it, and whether it is to go after the last."""

    published: Published
    holders: int = 0
    retired: bool = False


class Leases:
    """The versions that requests may name. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[PolicyVersion, LoadedAdapter] = {}
        self._leaving: set[LoadedAdapter] = set()

    def add(self, published: Published) -> None:
        with self._lock:
            self._of[published.version] = LoadedAdapter(published)

    def __contains__(self, version: PolicyVersion) -> bool:
        return version in self._of

    @property
    def versions(self) -> list[PolicyVersion]:
        """Return those that requests may name."""
        return sorted(self._of)

    @property
    def alive(self) -> list[Published]:
        """Return the versions that every server must have: those that requests may name, or still sample from."""
        with self._lock:
            return [lease.published for lease in (*self._of.values(), *self._leaving)]

    def take(self, version: PolicyVersion) -> LoadedAdapter | None:
        """Hold a version for one request; None if it is not there."""
        with self._lock:
            lease = self._of.get(version)
            if lease is not None:
                lease.holders += 1
            return lease

    def give_back(self, lease: LoadedAdapter) -> bool:
        """Count a request as done; return whether it was the last of a version that is to go."""
        with self._lock:
            lease.holders -= 1
            return self._gone(lease)

    def retire(self, version: PolicyVersion) -> LoadedAdapter | None:
        """Retire a version: no new request may name it. Return its lease if no request holds it, else None."""
        with self._lock:
            lease = self._of.pop(version, None)
            if lease is None:
                return None
            lease.retired = True
            self._leaving.add(lease)
            return lease if self._gone(lease) else None

    def _gone(self, lease: LoadedAdapter) -> bool:
        if not lease.retired or lease.holders:
            return False
        self._leaving.discard(lease)
        return True


async def publish(
    server: VllmServer,
    published: Published,
    gaps: Gaps,
    prompt_ids: Sequence[int],
    *,
    timeout: float,
) -> None:
    """Load a version on a server and let it prove it. Raises ServerLost, EngineError."""
    await server.load(published.name, str(published.path), timeout=timeout)
    off = await gaps.too_far(server, published.name, published.version, prompt_ids)
    if off is not None:
        raise EngineError(
            f"{server.url} serves {published.name} with log-probabilities that are off by {off:.3g} nats in the mean "
            f"(at most {gaps.limit:.3g}): it is not the version that was trained",
            hint="are its vLLM, dtype and --logprobs-mode processed_logprobs as `groupwise vllm-serve` sets them?",
            kind="weights",
        )
