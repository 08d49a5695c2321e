"""The policies that are served: which version answers a request, and how versions are loaded and swapped under load.

    lease(model, adapter)    a version, settled once when the request is admitted, loaded, and counted until it ends
    swap(version)            load -> verify on a canary -> activate in the store -> flip the alias; the old one drains

The alias is one assignment, and it is the last thing that a swap does: a request admitted before it ends on the old
version, one admitted after it begins on the new one, and a version that cannot be loaded or does not give its trainer's
log-probabilities never becomes active. Swaps, rollbacks and deletions wait for each other, first come first served, so
of a storm of swaps the newest wins.

When as many adapters are loaded as allowed, requests for another one wait, first come first served. For each version
that is waited for, the least recently requested of the loaded ones takes no new requests and is unloaded when its last
request has ended. So a stream of requests for loaded versions does not starve the waiting ones, and the waiting ones do
not stop the other versions.

Counts and the alias belong to the server's event loop and change only between awaits. Everything that is slow happens
elsewhere: files in threads, the engine's loading in one thread of its own, one adapter at a time.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol
from uuid import uuid4

from groupwise.errors import (
    AdapterError,
    AdapterNotFoundError,
    ConflictError,
    DeadlineError,
    GroupwiseError,
    InUseError,
    ModelError,
    OverloadedError,
    RequestError,
    SwapRefusedError,
)
from groupwise.sampler import LiveEngine
from groupwise.store import faults
from groupwise.store.adapters import AdapterStore
from groupwise.types import PolicyVersion

if TYPE_CHECKING:
    from groupwise.config.serve import ServeConfig
    from groupwise.model.load import LoadedModel
    from groupwise.server.metrics import Recorder

_MAX_TEXT = 80  # more than any name@number has: what is longer is not found, though as a file name it would be an error

_PROBE = tuple(range(1, 9))  # ids of any vocabulary: half a prompt, half a completion


_KEPT = {  # why a version cannot be deleted, by kind, and what to do
    "on_trial": ("it is on trial", "end its trial first: POST /v1/learn/reject"),
    "in_use": ("requests use it", "wait for them, or cancel them"),
    "active": ("it is active", "activate another one, or unload it, first"),
}


class AdapterInUseError(ConflictError):
    """The version is active, on trial, or used by requests that are being answered: `kind` says which ("active",
    "on_trial", "in_use"); it is None where a job that begins reads the version."""

    code = "adapter_in_use"


def check_free_name(name: str, *, served_name: str) -> None:
    """Raise AdapterError if `model` could not tell an adapter of this name from the active policy."""
    if name == served_name:
        raise AdapterError(
            f"{name!r} is what requests call the served model, so that no `model` could mean this adapter",
            hint="choose another name, or start the server with another --served-model-name",
        )


class ComposedAdapter(Protocol):
    """Names an adapter of a composition and its scale."""

    @property
    def name(self) -> str: ...

    @property
    def scale(self) -> float: ...


@dataclass
class _Loaded:
    """An adapter in the engine, or on its way there."""

    loading: asyncio.Future[None]
    users: int = 0
    used: int = 0  # when it was last asked for, in leases

    @property
    def failed(self) -> bool:
        return self.loading.done() and (self.loading.cancelled() or self.loading.exception() is not None)

    @property
    def idle(self) -> bool:
        return self.users == 0 and self.loading.done()


@dataclass(eq=False)
class _Waiting:
    """Holds a request that waits until there is room for its adapter. `turn` is its adapter's entry, which counts it
    already."""

    version: PolicyVersion
    load: Callable[[], None]
    turn: asyncio.Future[_Loaded]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The comparison of two versions' answers to one request, as (of the version on trial, of the active one): rewards,
    where both could be scored, and lengths in tokens. `gap`: the sum over the first answer's tokens of log p_new - log
    p_old, where it was measured."""

    rewards: tuple[float, float] | None
    tokens: tuple[int, int]
    gap: float | None = None


@dataclass
class Trial:
    """Holds the state of a trial: a version answers a share of the requests that name no version. A canary answers them
    instead of `against`, the active version; a shadow answers them again after it, unseen by clients, which makes
    `pairs`. `requests` and `errors` count both versions' requests (True: the version on trial); requests that name a
    version are not counted. `after`: the number of the newest rating when the trial began. `seconds`: the time for
    which servers have answered by it."""

    version: PolicyVersion
    against: PolicyVersion
    share: float
    since: float
    after: int = 0
    stage: Literal["shadow", "canary"] = "canary"
    pairs: list[Pair] = field(default_factory=list)
    requests: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    errors: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    seconds: float = 0.0

    @property
    def counts(self) -> dict[str, Any]:
        """Return the values that `go_on` needs in another process; fit for JSON."""
        counted: dict[str, Any] = {"requests": list(self.requests.values()), "errors": list(self.errors.values())}
        if self.pairs:
            counted["pairs"] = [[pair.rewards, pair.tokens, pair.gap] for pair in self.pairs]
        return {"version": str(self.version), "since": self.since, "seconds": self.seconds, **counted}

    def go_on(self, counts: Mapping[str, Any]) -> None:
        """Count on from there, if these are the counts of this trial."""
        if (counts["version"], counts["since"]) == (str(self.version), self.since):
            self.seconds = counts["seconds"]
            self.requests, self.errors = (
                dict(zip((True, False), counts[name], strict=True)) for name in ("requests", "errors")
            )
            self.pairs = [
                Pair(rewards=rewards and (rewards[0], rewards[1]), tokens=(tokens[0], tokens[1]), gap=gap)
                for rewards, tokens, gap in counts.get("pairs", ())
            ]

    def takes(self, key: str) -> bool:
        """Return whether the request, or the session, of this key is answered by the version on trial: always the
        same."""
        digest = hashlib.blake2b(f"{self.version}\n{key}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.share * 2**64

    def answered(self, version: PolicyVersion) -> None:
        """Count that a request begins under one of the two."""
        if version in (self.version, self.against):
            self.requests[version == self.version] += 1

    def failed(self, version: PolicyVersion) -> None:
        """Record that the request failed, through no fault of its client."""
        if version in (self.version, self.against):
            self.errors[version == self.version] += 1


class Policies:
    """The versions that can answer, over one store and one engine.

    Args:
        base: the model under all adapters; an adapter of another one is refused.
        served_name: the name that `model` may have for the active version.
        max_loaded: adapters kept in the engine besides the active one. Those that no request uses are unloaded, the
            one unused for longest first; where all are in use, requests for another one wait.
        max_waiting: the most requests that may wait for room; further ones are refused.
    """

    def __init__(
        self,
        store: AdapterStore,
        engine: LiveEngine,
        *,
        base: LoadedModel,
        served_name: str,
        max_loaded: int = 8,
        max_waiting: int = 128,
    ):
        self.served_name = served_name
        self.warnings: list[str] = []
        self.elsewhere: Callable[[str], str | None] = lambda text: None  # other names of policies -> ours (Tinker's)
        self.trial: Trial | None = None
        self._store, self._engine, self._base = store, engine, base
        self._max_loaded, self._max_waiting = max_loaded, max_waiting
        self._active = PolicyVersion.base()
        self._loaded: dict[PolicyVersion, _Loaded] = {}
        self._waiting: list[_Waiting] = []  # in the order in which they came
        self._leaving: set[PolicyVersion] = set()  # loaded, and taking no new requests: others wait for their places
        self._deleting: set[PolicyVersion] = set()
        self._leases = 0
        self._changing = asyncio.Lock()
        self._loader = ThreadPoolExecutor(1, "groupwise-adapters")

    async def start(self) -> None:
        """Load what the store says is active. If that cannot be served the base answers, and `warnings` says why."""
        while True:
            version = self._store.active
            try:
                async with self._changing, self._held(version, always=True):
                    await self._in_loader(lambda v=version: self._verify(v))
                    self._active = version
                return
            except GroupwiseError as error:
                if self._store.active == version:  # it was not quarantined just now
                    self.warnings.append(f"the active adapter {version} is not served, the base is: {error.message}")
                    return

    def close(self) -> None:
        self._loader.shutdown(wait=False, cancel_futures=True)

    # --- which version ---

    @property
    def active(self) -> PolicyVersion:
        """Return the version that answers requests without an adapter."""
        return self._active

    @property
    def in_use(self) -> dict[PolicyVersion, int]:
        """Return the adapters in the engine, and the number of requests that use each."""
        return {version: entry.users for version, entry in self._loaded.items()}

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait for room for their adapter."""
        return len(self._waiting)

    def resolve(self, *, model: str | None = None, adapter: str | None = None) -> PolicyVersion:
        """Return the version that a request means: the active one, "base", "name@12", or "name" (active if it is of
        that name, else the newest).

        Raises:
            ModelError: there is no such `model`.
            AdapterNotFoundError: there is no such `adapter`.
            RequestError: both name a policy, and not the same one.
        """
        if model in (None, self.served_name):
            return self._named(adapter)
        try:
            version = self._named(model)
        except AdapterNotFoundError as error:
            hint = f"use {self.served_name!r} for the active policy; {error.hint}"
            raise ModelError(f"there is no model {str(model)[:64]!r}", hint=hint) from None
        if adapter is not None and self._named(adapter) != version:
            raise RequestError(
                f"model is {str(model)[:64]!r} and adapter is {adapter[:64]!r}: two policies for one request",
                hint="give one of them",
                field="adapter",
            )
        return version

    def _named(self, text: str | None) -> PolicyVersion:
        text = text if text is None else self.elsewhere(text) or text
        if text is None or text == self._active.name:
            return self._active
        return self._store.resolve(text[:_MAX_TEXT])

    @asynccontextmanager
    async def lease(
        self,
        *,
        model: str | None = None,
        adapter: str | None = None,
        adapters: Sequence[ComposedAdapter] | None = None,
        patience_s: float | None = None,
        session: str | None = None,
    ) -> AsyncIterator[PolicyVersion]:
        """Yield the version that answers one request, which stays loaded until the request has ended.

        A request that names no version and has a `session` may be answered by the one that is on trial (a canary): all
        of a session by the same one.

        `adapters`, one or more, asks for their sum, each times its scale. Where there is no room for it, this waits
        for `patience_s` (None: without end).

        Raises:
            ModelError, AdapterNotFoundError, RequestError: as `resolve`.
            AdapterError: it cannot be loaded over this base model.
            DeadlineError: there was no room for it in time.
            OverloadedError: too many requests wait for room already.
        """
        if adapters is None:
            version, load = self.resolve(model=model, adapter=adapter), None
            free = session is not None and adapter is None and model in (None, self.served_name)
            trial = self.trial if free and self.trial is not None and self.trial.stage == "canary" else None
            if trial is not None and version == trial.against and trial.takes(session or ""):
                version = trial.version
        else:
            version, load = self._compose(adapters)
        async with self._held(version, load=load, patience_s=patience_s):
            yield version

    def _compose(self, parts: Sequence[ComposedAdapter]) -> tuple[PolicyVersion, Callable[[], None]]:
        """Return a version that spells out its sum, as in "0.5*math@3+1.0*sql@1", and what loads it."""
        terms = sorted((self._named(part.name), float(part.scale)) for part in parts)
        if any(version.is_base for version, _ in terms):
            raise RequestError("adapters names the base model, which is always in the sum", field="adapters")
        *_, (last, _) = terms
        name = "+".join(f"{scale}*{version}" for version, scale in terms).removesuffix(f"@{last.number}")
        composed = PolicyVersion(name, last.number)
        return composed, lambda: self._load_composed(composed, terms)

    # --- changing it ---

    async def swap(self, version: PolicyVersion) -> PolicyVersion:
        """Make `version` (or the base) the active one; returns the one before it. Done when new requests get it.

        Raises:
            SwapRefusedError: it cannot be loaded, or fails its canary. What was active still is.
            AdapterNotFoundError, StorageError: there is no such version; the activation could not be written.
        """
        async with self._changing:
            return await self._swap(version, lambda: self._store.activate(version))

    async def rollback(self) -> PolicyVersion:
        """Go back to what was active before, as `swap` does, and return it. Raises AdapterError if nothing was."""
        return await asyncio.shield(self._rollback())  # not to be given up half way

    async def _rollback(self) -> PolicyVersion:
        async with self._changing:
            before = self._store.active
            version = await asyncio.to_thread(self._store.rollback)
            try:
                await self._swap(version, lambda: None)
            except Exception:
                await asyncio.to_thread(self._store.activate, before)
                raise
            return version

    async def delete(self, versions: Sequence[PolicyVersion]) -> None:
        """Remove versions, all or none of them unless the disk fails.

        Raises:
            AdapterInUseError: one is active, or a request uses it.
            AdapterNotFoundError: there is no such version.
        """
        async with self._changing:
            for version in versions:
                users = self.in_use.get(version, 0)
                tried = self.trial is not None and version == self.trial.version
                if version in (self._active, self._store.active) or users or tried:
                    kind = "on_trial" if tried else "in_use" if users else "active"
                    reason, hint = _KEPT[kind]
                    raise AdapterInUseError(f"{version} cannot be deleted: {reason}", hint=hint, kind=kind)
            self._deleting.update(versions)
            try:
                for version in versions:
                    try:
                        await asyncio.to_thread(self._store.delete, version)
                    except InUseError as error:
                        message = f"{version} cannot be deleted: a job that begins reads it"
                        raise AdapterInUseError(message, hint="try again in a moment") from error
                    if version in self._loaded and self._loaded[version].idle:
                        self._unload(version)
            finally:
                self._deleting.difference_update(versions)

    async def prune(self, find: Callable[[], Collection[PolicyVersion]]) -> list[PolicyVersion]:
        """Remove the versions that `find` names and that are not needed, and return them. `find` is called in a thread,
        once no swap is under way. Raises StorageError.

        The active version, versions in use by requests, the target of a rollback, and the newest of each name stay.
        """
        async with self._changing:
            kept = {self._active, self._store.active, *(version for version, users in self.in_use.items() if users)}
            kept |= set() if self.trial is None else {self.trial.version, self.trial.against}
            free = set(await asyncio.to_thread(find)) - kept
            self._deleting.update(free)
            try:
                removed = await asyncio.to_thread(self._prune, free)
                for version in removed:
                    if version in self._loaded and self._loaded[version].idle:
                        self._unload(version)
            finally:
                self._deleting.difference_update(free)
        return removed

    def _prune(self, versions: Collection[PolicyVersion]) -> list[PolicyVersion]:
        removed: list[PolicyVersion] = []
        for name in {version.name for version in versions}:
            others = set(self._store.versions(name)).difference(versions)
            removed += self._store.prune(name, keep=1, protect=others)
        return removed

    def verify_files(self, directory: Path) -> None:
        """Raise AdapterError unless the engine can load this adapter over the base; for threads, not for the loop."""
        version = PolicyVersion(f"verify:{uuid4().hex}", 1)
        self._loader.submit(self._load, version, lambda: self._engine.load(version, directory)).result()
        self._engine.unload(version)

    async def _swap(self, version: PolicyVersion, activate: Callable[[], None]) -> PolicyVersion:
        before = self._active
        try:
            async with self._held(version, always=True):
                faults.point("swap:after-load")
                await self._in_loader(lambda: self._verify(version))
                faults.point("swap:after-verify")
                await asyncio.shield(self._flip(version, activate))
        except (AdapterError, ModelError) as error:
            raise SwapRefusedError(
                f"{version} was not activated, {before} is still active: {error.message}", hint=error.hint
            ) from error
        return before

    async def _flip(self, version: PolicyVersion, activate: Callable[[], None]) -> None:
        await asyncio.to_thread(activate)
        faults.point("swap:after-activate")
        self._active = version
        self._settle()

    # --- what the engine holds ---

    @asynccontextmanager
    async def _held(
        self,
        version: PolicyVersion,
        *,
        load: Callable[[], None] | None = None,
        always: bool = False,
        patience_s: float | None = None,
    ) -> AsyncIterator[None]:
        """`version` is loaded and counted as used. `always`: also where as many are loaded as may be."""
        if version.is_base:
            yield
            return
        if version in self._deleting:
            raise AdapterNotFoundError(f"{version} is being deleted")
        load = load or (lambda: self._load_stored(version))
        if always or self._may_enter(version):
            entry = self._enter(version, load)
        else:
            entry = await self._turn(version, load, patience_s)
        try:
            await asyncio.shield(entry.loading)  # a request that gives up does not stop the loading for others
            yield
        finally:
            self._leave(entry)

    def _may_enter(self, version: PolicyVersion) -> bool:
        """Return whether a request for it need not wait."""
        if version == self._active or version in self._loaded:
            return version not in self._leaving
        return not self._waiting and self._has_room()

    def _enter(self, version: PolicyVersion, load: Callable[[], None]) -> _Loaded:
        """Count a request for `version`, and begin to load it where it is not there."""
        entry = self._loaded.get(version)
        if entry is None or entry.failed:
            entry = self._loaded[version] = _Loaded(self._in_loader(load))
            entry.loading.add_done_callback(lambda _: self._settle())  # if no request wants it any more, it may go
        self._leases += 1
        entry.users, entry.used = entry.users + 1, self._leases
        return entry

    def _leave(self, entry: _Loaded) -> None:
        """Take note that a request that was counted has ended."""
        entry.users -= 1
        self._settle()

    async def _turn(self, version: PolicyVersion, load: Callable[[], None], patience_s: float | None) -> _Loaded:
        """Wait for room. Raises DeadlineError, OverloadedError."""
        if len(self._waiting) >= self._max_waiting:
            raise OverloadedError(
                f"{self._max_loaded} adapters besides the active one are loaded, requests use all of them, and "
                f"{len(self._waiting)} requests wait for others",
                hint="try again, use fewer adapters at a time, or raise max_loaded_adapters",
            )
        mine = _Waiting(version, load, asyncio.get_running_loop().create_future())
        self._waiting.append(mine)
        self._settle()
        try:
            async with asyncio.timeout(patience_s):
                return await mine.turn
        except BaseException as error:
            if mine in self._waiting:
                self._waiting.remove(mine)
                self._settle()
            elif not mine.turn.cancelled():  # its turn came just now
                self._leave(mine.turn.result())
            if not isinstance(error, TimeoutError):
                raise
            raise DeadlineError(
                f"after {patience_s:g} seconds there was still no room for {version}: {self._max_loaded} adapters "
                "besides the active one are loaded (max_loaded_adapters), and requests use all of them",
                hint="use fewer adapters at a time, or raise max_loaded_adapters",
            ) from error

    def _settle(self) -> None:
        """Let in the waiting requests for which there is room, and choose the versions that make room for the others:
        after a request has ended, come or given up."""
        self._unload_idle()
        for each in list(self._waiting):
            if self._may_enter(each.version) or self._is_next(each):
                self._waiting.remove(each)
                self._leaving.discard(each.version)
                each.turn.set_result(self._enter(each.version, each.load))
        wanted = {each.version for each in self._waiting} - self._loaded.keys()
        others = sorted(self._others(), key=lambda version: (version not in self._leaving, self._loaded[version].used))
        self._leaving = set(others[: len(wanted)])

    def _is_next(self, waiting: _Waiting) -> bool:
        """Return whether it is the first in the queue, and there is a place for its adapter or that is still loaded."""
        return waiting is self._waiting[0] and (waiting.version in self._loaded or self._has_room())

    def _has_room(self) -> bool:
        """Return whether one more adapter can be loaded; first unload an unused one if that makes the room."""
        self._unload_idle(room=1)
        return len(self._others()) < self._max_loaded

    def _unload_idle(self, *, room: int = 0) -> None:
        """Forget failures, and unload idle adapters, longest unused first, until `room` more may be loaded."""
        for version in [version for version, entry in self._loaded.items() if entry.failed and not entry.users]:
            del self._loaded[version]
        others = self._others()
        excess = len(others) + room - self._max_loaded
        idle = sorted((v for v in others if self._loaded[v].idle), key=lambda v: self._loaded[v].used)
        for version in idle[: max(0, excess)]:
            self._unload(version)

    def _others(self) -> list[PolicyVersion]:
        return [version for version in self._loaded if version != self._active]

    def _unload(self, version: PolicyVersion) -> None:
        del self._loaded[version]
        self._engine.unload(version)

    def _in_loader(self, work: Callable[[], None]) -> asyncio.Future[None]:
        future = asyncio.get_running_loop().run_in_executor(self._loader, work)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps no request waits any more
        return future

    # --- in the loader's thread ---

    def _load_stored(self, version: PolicyVersion) -> None:
        self._store.check_base(version, self._base.hash)
        directory = self._store.path(version)
        self._load(version, lambda: self._engine.load(version, directory))

    def _load_composed(self, version: PolicyVersion, terms: Sequence[tuple[PolicyVersion, float]]) -> None:
        for part, _ in terms:
            self._store.check_base(part, self._base.hash)
        paths = [(self._store.path(part), scale) for part, scale in terms]
        self._load(version, lambda: self._engine.load_composed(version, paths))

    def _load(self, version: PolicyVersion, load: Callable[[], None]) -> None:
        """Load and compute with it once: weights can be finite and what they compute not."""
        load()
        half = len(_PROBE) // 2
        if not all(map(math.isfinite, self._engine.score(_PROBE[:half], _PROBE[half:], version))):
            self._engine.unload(version)
            message, hint = "its log-probabilities are not finite", "its weights or its scale are too large"
            raise AdapterError(message, hint=hint, kind="not_finite")

    def _verify(self, version: PolicyVersion) -> None:
        """Compare a version with the log-probabilities that its trainer computed. Raises AdapterError if it differs."""
        canary = None if version.is_base else self._store.info(version).canary
        if not canary:
            return
        scored = self._engine.score(canary["prompt_ids"], canary["completion_ids"], version)
        gaps = [abs(mine - theirs) for mine, theirs in zip(scored, canary["logprobs"], strict=True)]
        gap, tolerance = sum(gaps) / max(1, len(gaps)), canary_tolerance(self._base)
        if not gap <= tolerance:  # nor if it is NaN
            raise AdapterError(
                f"on its canary the served log-probabilities differ from the trainer's by {gap:.3g} nats a token "
                f"(tolerance {tolerance:g})",
                hint="it stays in the store; compare trainer and engine before activating it",
            )


class RecordedPolicies(Policies):
    """Manages the policies of a server, or of a tenant in it, by `config`, and counts and times the swaps."""

    def __init__(
        self, config: ServeConfig, store: AdapterStore, engine: LiveEngine, *, base: LoadedModel, recorder: Recorder
    ):
        super().__init__(
            store,
            engine,
            base=base,
            served_name=config.served_name,
            max_loaded=config.max_loaded_adapters,
            max_waiting=max(1, config.max_concurrent // 2),  # the other half is for those that need not wait
        )
        self.recorder = recorder

    async def swap(self, version: PolicyVersion) -> PolicyVersion:
        began, ok = time.monotonic(), False
        try:
            before = await super().swap(version)
            ok = True
        finally:
            self.recorder.swapped(ok=ok, seconds=time.monotonic() - began)
        return before


def canary_tolerance(base: LoadedModel) -> float:
    """Return how far engine and trainer may be apart, in nats a token: rounding in the model's type."""
    return 1e-3 if base.model.dtype.itemsize >= 4 else 0.1
