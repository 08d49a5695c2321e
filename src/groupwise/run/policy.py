"""Publish -> load -> activate -> let go: how a trained adapter becomes the policy that samples.

The order makes every crash harmless: a version is on disk, whole, before any engine loads it; it is loaded before the
alias points to it; and the version before it is forgotten last, by an engine that finishes the requests using it. With
in-flight updates (PipelineRL, arXiv 2509.19128) those requests continue under the new version instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, cast

from groupwise.model.load import LoadedModel
from groupwise.sampler import Sampler, UpdatesInFlight
from groupwise.store.adapters import AdapterStore
from groupwise.store.files import Provenance
from groupwise.train.learner import Learner
from groupwise.types import PolicyVersion


class Policy:
    """The policy that is trained, as versions: `newest` was published last, `sampling` is the one that samples.

    Of older versions the newest `keep` and those in `protected` stay on disk, and those that `in_use` names stay in the
    engine: an episode that has begun asks for its version again at every turn. Without an adapter (full-parameter
    training) engine and learner share the weights, and only the name changes. With `in_flight`, which says what becomes
    of keys and values, completions under way go on under each version that is synced. What is published becomes active
    in the store; with `by_promotion` only what `activate` is called with does.
    """

    def __init__(
        self,
        learner: Learner,
        store: AdapterStore,
        sampler: Sampler,
        *,
        name: str,
        base: LoadedModel,
        keep: int,
        config_hash: str,
        in_use: Callable[[], Collection[PolicyVersion]] = tuple,
        in_flight: Literal["keep", "recompute"] | None = None,
        by_promotion: bool = False,
    ):
        self._learner, self._store, self._sampler, self._base = learner, store, sampler, base
        self._name, self._keep, self._config_hash = name, keep, config_hash
        self._in_use, self._in_flight, self._by_promotion = in_use, in_flight, by_promotion
        self.newest = self.sampling = PolicyVersion.base()
        self.protected: set[PolicyVersion] = set()
        self._loaded: set[PolicyVersion] = set()
        self.step = 0  # of `newest`

    def publish(self, *, step: int, metrics: Mapping[str, float], sync: bool) -> PolicyVersion:
        """Make the policy after `step` the newest version, loaded and active; with `sync`, the one that samples.

        Raises:
            AdapterError, StorageError: it could not be published; the policy is the one it was.
        """
        if self.newest.is_base or step != self.step:
            self.newest, self.step = self._published(step, metrics), step
            self._loaded.add(self.newest)
        if sync and self.sampling != self.newest:
            self._take_over()
        self._let_go()
        return self.newest

    def begin(self, adapter: Path) -> None:
        """Start from a saved adapter, which becomes version 1. Raises AdapterError if it does not fit."""
        self._learner.load_adapter(adapter)
        self.publish(step=0, metrics={}, sync=True)

    def resume(self, *, newest: PolicyVersion, sampling: PolicyVersion, step: int) -> None:
        """Continue from a checkpoint. Raises AdapterError, AdapterNotFoundError if a version is not there."""
        self.newest, self.sampling, self.step = newest, sampling, step
        for version in {newest, sampling}:
            if version.is_base:
                continue
            if self._learner.lora is None:
                self._learner.gather_weights()
                self._sampler.adopt(version)
            else:
                self._sampler.load(version, self._store.path(version))
            self._loaded.add(version)
        if self._learner.lora is not None and not self._by_promotion:
            self._store.activate(newest)

    def activate(self, version: PolicyVersion) -> None:
        """Make a version the one that requests without a name get, in the store."""
        self._store.activate(version)

    @contextmanager
    def held(self, version: PolicyVersion) -> Iterator[None]:
        """Load a version on disk into the engine for the block."""
        there = version.is_base or version in self._loaded
        if not there:
            self._sampler.load(version, self._store.path(version))
        try:
            yield
        finally:
            if not there and version not in self._loaded:
                self._sampler.unload(version)

    def _published(self, step: int, metrics: Mapping[str, float]) -> PolicyVersion:
        if self._learner.lora is None:  # the engine samples from the very weights that were trained
            version = PolicyVersion(self._name, step)
            self._learner.gather_weights()
            self._sampler.adopt(version)
            return version
        info = Provenance(
            base_model=self._base.name,
            base_hash=self._base.hash,
            quantization=self._base.quantization,
            parent=self.newest,
            step=step,
            config_hash=self._config_hash,
            metrics=dict(metrics),
        )
        version = self._store.publish(self._name, self._learner.save_adapter, info=info)
        self._sampler.load(version, self._store.path(version))
        if not self._by_promotion:
            self._store.activate(version)
        return version

    def _take_over(self) -> None:
        """Sample with the newest version from now on."""
        if self._in_flight is not None:
            engine = cast(UpdatesInFlight, self._sampler)
            engine.replace(self.sampling, self.newest, recompute=self._in_flight == "recompute")
            self._loaded.add(self.sampling)  # also the base, for which newer versions answer until no request names it
        self.sampling = self.newest

    def _let_go(self) -> None:
        """Forget the versions that are not needed any more, in the engine and on the disk."""
        needed = {self.newest, self.sampling}
        held = needed.union(self._in_use())
        for version in self._loaded - held:
            self._sampler.unload(version)
        self._loaded &= held
        if self._learner.lora is not None:
            self._store.prune(self._name, keep=self._keep, protect=self.protected | needed)
