"""The engine as one tenant has it: its versions under their own names, in the one engine that all share.

`math@1` of two tenants are two adapters; so is what each is called inside. What is computed for one tenant's prompt is
kept for that tenant's next ones and shared with no other's, also not of the base model (`SamplingRequest.apart`): an
answer that is quicker, or says so (`cached_tokens`), would tell what others ask.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.sampler import Scores
from groupwise.store.tenants import BETWEEN, label
from groupwise.types import Completion, Grammar, PolicyVersion, SamplingRequest, SequenceScores

if TYPE_CHECKING:
    from groupwise.errors import DeviceLostError
    from groupwise.sampler import LiveEngine, TokenSink


@dataclass(frozen=True, order=True)
class _OwnedVersion(PolicyVersion):
    """Names a tenant's version as the engine does, and shows the tenant's own name in messages."""

    def __str__(self) -> str:
        return f"{self.name.partition(BETWEEN)[2]}@{self.number}"


class TenantEngine(Scores):
    """A `LiveEngine` over another one, which it does not close."""

    def __init__(self, engine: LiveEngine, tenant: str):
        self._engine, self._tenant = engine, tenant
        self._loaded: set[PolicyVersion] = set()
        self._running, self._lock = 0, threading.Lock()

    def _mine(self, version: PolicyVersion) -> PolicyVersion:
        if version.is_base or isinstance(version, _OwnedVersion):
            return version
        return _OwnedVersion(label(self._tenant, version.name), version.number)

    def _asked(self, requests: Sequence[SamplingRequest]) -> list[SamplingRequest]:
        return [replace(each, version=self._mine(each.version), apart=self._tenant) for each in requests]

    # --- sampling ---

    def submit(
        self, requests: Sequence[SamplingRequest], *, on_token: TokenSink | None = None
    ) -> list[Future[list[Completion]]]:
        """See `LiveEngine.submit`."""
        futures = self._engine.submit(self._asked(requests), on_token=on_token)
        for request, future in zip(requests, futures, strict=True):
            self._count(request.n)
            future.add_done_callback(lambda _, n=request.n: self._count(-n))
        return futures

    async def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Completion]]:
        """See `Sampler.sample`."""
        return await self._engine.sample(self._asked(requests))

    def prepare(self, grammar: Grammar, *, sender: str = "") -> Future[Any]:
        """See `LiveEngine.prepare`."""
        return self._engine.prepare(grammar, sender=sender)

    def _count(self, more: int) -> None:
        with self._lock:
            self._running += more

    # --- scoring ---

    def score_sequence(self, ids: Sequence[int], version: PolicyVersion, **options: Any) -> SequenceScores:
        """See `Scores.score_sequence`."""
        return self._engine.score_sequence(ids, self._mine(version), **options)

    # --- versions ---

    def load(self, version: PolicyVersion, directory: Path) -> None:
        """See `Sampler.load`."""
        self._engine.load(self._mine(version), directory)
        self._loaded.add(version)

    def load_composed(self, version: PolicyVersion, parts: Sequence[tuple[Path, float]]) -> None:
        """See `LiveEngine.load_composed`."""
        self._engine.load_composed(self._mine(version), parts)
        self._loaded.add(version)

    def adopt(self, version: PolicyVersion) -> None:
        """Refuse: the base's weights are everybody's."""
        raise NotImplementedError("a tenant does not train the base's weights")

    def unload(self, version: PolicyVersion) -> None:
        """See `Sampler.unload`."""
        self._engine.unload(self._mine(version))
        self._loaded.discard(version)

    def close(self) -> None:
        """Unload what the tenant has loaded."""
        for version in list(self._loaded):
            self.unload(version)

    # --- what it is ---

    @property
    def context_length(self) -> int:
        return self._engine.context_length

    @property
    def vocabulary(self) -> int:
        return self._engine.vocabulary

    @property
    def lost(self) -> DeviceLostError | None:
        return self._engine.lost

    @property
    def unavailable_reason(self) -> str | None:
        return self._engine.unavailable_reason

    def stats(self) -> Mapping[str, int]:
        """Return the tenant's own: how many of its completions are under way, begun or not, and its adapters."""
        return {"running": self._running, "waiting": 0, "adapters": len(self._loaded)}
