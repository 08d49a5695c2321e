"""A deployment: an engine with its adapter store and the version that new requests sample from.

A deployment ends with its run, or stays: `WeightSyncScope`. One that stays is found again by its name; its adapters are
in its own store, so that the versions of successive trainers never share a number.

A sampling call holds the served version: it stays loaded for the call's remaining requests, even if another version is
served meanwhile. So a sync neither waits for sampling nor breaks it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from groupwise.engine.local import LocalEngine
from groupwise.errors import ConfigError
from groupwise.model.load import LoadedModel
from groupwise.sdk.opened_once import OpenedOnce
from groupwise.store.adapters import AdapterStore
from groupwise.types import Completion, PolicyVersion, SamplingRequest


class Deployment:
    """An engine over `base`, with its store of adapters; a `Sampler`. `serving` is the version that new calls get."""

    def __init__(self, name: str, *, base: LoadedModel, engine: LocalEngine, store: AdapterStore):
        self.name, self.base, self.engine, self.store = name, base, engine, store
        self.serving = PolicyVersion.base()
        self._lock = threading.Lock()
        self._held: Counter[PolicyVersion] = Counter()
        self._retired: set[PolicyVersion] = set()  # forgotten when no call holds them

    def serve(self, version: PolicyVersion) -> None:
        """Serve `version`, which must be loaded, to new calls; the previous one is unloaded once no call uses it."""
        before, self.serving = self.serving, version
        if before != version:
            self.unload(before)

    @contextmanager
    def holding(self, version: PolicyVersion | None = None) -> Iterator[PolicyVersion]:
        """Keep a loaded version, or the served one, loaded during the block."""
        with self._lock:
            version = version or self.serving
            self._held[version] += 1
        try:
            yield version
        finally:
            with self._lock:
                self._held[version] -= 1
            self._let_go(version)

    def backlog(self) -> float:
        """Return completions waiting in the engine's queue, divided by those being decoded."""
        stats = self.engine.stats()
        return stats["waiting"] / max(stats["running"], 1)

    # -- the Sampler protocol ------------------------------------------------------------------------------------------

    @property
    def context_length(self) -> int:
        return self.engine.context_length

    def submit(self, requests: Sequence[SamplingRequest]) -> list[Future[list[Completion]]]:
        return self.engine.submit(requests)

    async def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Completion]]:
        return await self.engine.sample(requests)

    def load(self, version: PolicyVersion, directory: Path) -> None:
        self.engine.load(version, directory)
        with self._lock:
            self._retired.discard(version)

    def adopt(self, version: PolicyVersion) -> None:
        self.engine.adopt(version)

    def unload(self, version: PolicyVersion) -> None:
        if not version.is_base:
            with self._lock:
                self._retired.add(version)
            self._let_go(version)

    def close(self) -> None:
        """Stop the engine; requests in flight fail. Closing again does nothing."""
        _RUNNING.forget(self.name, self)
        self.engine.close()

    def _let_go(self, version: PolicyVersion) -> None:
        with self._lock:
            if version not in self._retired or self._held[version] or version == self.serving:
                return
            self._retired.discard(version)
        self.engine.unload(version)


_RUNNING: OpenedOnce[Deployment] = OpenedOnce()


def find_deployment(name: str) -> Deployment | None:
    """Return the long-lived deployment of this name, if it runs in this process."""
    return _RUNNING.find(name)


def attach_deployment(name: str, open_it: Callable[[], Deployment], *, model: str) -> tuple[Deployment, bool]:
    """Return the deployment of this name, and whether it was opened just now.

    Raises:
        ConfigError: it runs, and over another model.
    """
    found, opened = _RUNNING.attach(name, open_it)
    if found.base.name != model:
        raise ConfigError(
            f"deployment {name!r} runs over {found.base.name}, and base_model is {model}",
            hint="choose another deployment_id, or close that deployment",
        )
    return found, opened
