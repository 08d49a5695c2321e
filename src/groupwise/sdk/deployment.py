"""A deployment: an engine, the adapters that were pushed into it, and the version that it serves.

It belongs to a run, or lives on: `WeightSyncScope`. One that lives on has a name and is found again by it; its adapters
are in a store of its own, so that the versions of successive trainers never share a number.

Whoever samples holds the version that is served: it stays loaded for the requests that are still to be sent, whatever
is served meanwhile. So a sync neither waits for sampling nor breaks it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Generic, TypeVar

from groupwise.engine.local import LocalEngine
from groupwise.errors import ConfigError
from groupwise.model.load import LoadedModel
from groupwise.sdk import cookbook_config as cookbook
from groupwise.sdk.cookbook_config import (
    NAMES,
    DeployConfig,
    InfraConfig,
    WeightSyncConfig,
    WeightSyncScope,
    model_of,
)
from groupwise.store.adapters import AdapterStore
from groupwise.store.files import is_name
from groupwise.types import Completion, PolicyVersion, SamplingRequest

# ----------------------------------------------------------------------------------------------------------------------
# What runs in this process, by name: who asks for a name that runs gets what runs under it.
# ----------------------------------------------------------------------------------------------------------------------

T = TypeVar("T")


class Running(Generic[T]):
    """Things by name. Two who ask for a new name at once get one thing: the first opens it, the other waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[str, T] = {}

    def attach(self, name: str, open_it: Callable[[], T]) -> tuple[T, bool]:
        """What runs under `name`, and whether it was opened just now. Raises what `open_it` raises."""
        with self._lock:
            if (found := self._by_name.get(name)) is not None:
                return found, False
            self._by_name[name] = opened = open_it()
            return opened, True

    def find(self, name: str) -> T | None:
        """What runs under `name`, if anything does."""
        with self._lock:
            return self._by_name.get(name)

    def forget(self, name: str, thing: T) -> None:
        """Let go of `thing`, if it is what runs under `name`."""
        with self._lock:
            if self._by_name.get(name) is thing:
                del self._by_name[name]


class Deployment:
    """An engine over `base`, with its store of adapters; a `Sampler`. `serving` is the version that new calls get."""

    def __init__(self, name: str, *, base: LoadedModel, engine: LocalEngine, store: AdapterStore):
        self.name, self.base, self.engine, self.store = name, base, engine, store
        self.serving = PolicyVersion.base()
        self._lock = threading.Lock()
        self._held: Counter[PolicyVersion] = Counter()
        self._retired: set[PolicyVersion] = set()  # to be forgotten when nobody holds them

    def serve(self, version: PolicyVersion) -> None:
        """New calls get `version`, which is loaded; the one before is forgotten when nobody holds it any more."""
        before, self.serving = self.serving, version
        if before != version:
            self.unload(before)

    @contextmanager
    def holding(self, version: PolicyVersion | None = None) -> Iterator[PolicyVersion]:
        """Within: a loaded version, or the one that is served now, stays loaded."""
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
        """Completions that wait for a row, for each one that has a row."""
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


_RUNNING: Running[Deployment] = Running()


def find_deployment(name: str) -> Deployment | None:
    """The long-lived deployment of this name, if it runs in this process."""
    return _RUNNING.find(name)


def attach_deployment(name: str, open_it: Callable[[], Deployment], *, model: str) -> tuple[Deployment, bool]:
    """The deployment of this name, and whether it was opened just now.

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


# ----------------------------------------------------------------------------------------------------------------------
# What one's own loop runs on: the model, the adapter, the hardware, the engine, when weights are synced and saved.
#
#     LoopConfig(log_path="runs/mine", base_model="starter", lora_rank=16,
#                infra=InfraConfig(training_shape_id="cpu-small"),
#                deployment=DeployConfig(tokenizer_model="starter"),
#                weight_sync=WeightSyncConfig(weight_sync_interval=1, dcp_save_interval=10))
#
# The recipe's `cookbook.Config` has the same fields under the same names, and `setup_infra` takes either. No torch
# here.
# ----------------------------------------------------------------------------------------------------------------------

__all__ = ["DeployConfig", "InfraConfig", "LoopConfig", "WeightSyncConfig", "WeightSyncScope"]


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """One loop. `lora_rank` 0 trains all parameters. `temperature` is both the sampler's and the one at which the
    trainer scores. `policy_job_id` and `reference_job_id` name the trainers: what runs under that name in this process
    is attached to, and else opened under it."""

    log_path: str
    base_model: str
    lora_rank: int = 16
    lora_alpha: float = 32.0
    max_seq_len: int | None = None
    temperature: float = 1.0
    seed: int = 0
    policy_job_id: str | None = None
    reference_job_id: str | None = None
    infra: InfraConfig = field(default_factory=InfraConfig)
    deployment: DeployConfig = field(default_factory=DeployConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)

    def __post_init__(self) -> None:
        sync = self.weight_sync
        checks = (
            (
                is_name(self.policy_job_id or "policy"),
                f"policy_job_id {self.policy_job_id!r} cannot be a name; {NAMES}",
            ),
            (self.lora_rank >= 0, f"lora_rank is {self.lora_rank}; it must be 0 (all parameters) or more"),
            (self.lora_alpha > 0, f"lora_alpha is {self.lora_alpha}; it must be positive"),
            (self.temperature > 0, f"temperature is {self.temperature}; it must be positive"),
            (self.max_seq_len is None or self.max_seq_len > 1, f"max_seq_len is {self.max_seq_len}; 2 at least"),
            (sync.weight_sync_interval >= 0, f"weight_sync_interval is {sync.weight_sync_interval}; 0 is never"),
            (sync.dcp_save_interval >= 0, f"dcp_save_interval is {sync.dcp_save_interval}; 0 is never"),
        )
        for valid, message in checks:
            if not valid:
                raise ConfigError(message)
        if not self.lora_rank and self.deployment.weight_sync_scope == WeightSyncScope.PER_DEPLOYMENT:
            raise ConfigError(
                "weight_sync_scope per_deployment takes adapters, and lora_rank 0 trains all parameters",
                hint="set lora_rank, or give the run an engine of its own (per_trainer)",
            )


def loop_config(config: LoopConfig | cookbook.Config) -> LoopConfig:
    """A recipe's configuration as a loop's; what the service calls a model is the one whose tokenizer is named."""
    if not isinstance(config, LoopConfig):
        shared = [each.name for each in fields(LoopConfig) if hasattr(config, each.name)]
        config = LoopConfig(**{name: getattr(config, name) for name in shared})
    return replace(config, base_model=model_of(config.base_model, config.deployment))
