"""`LoopConfig`, the configuration of a loop of your own: model, adapter, hardware, engine, weight sync and saving.

    LoopConfig(log_path="runs/mine", base_model="starter", lora_rank=16,
               infra=InfraConfig(training_shape_id="cpu-small"),
               deployment=DeployConfig(tokenizer_model="starter"),
               weight_sync=WeightSyncConfig(weight_sync_interval=1, dcp_save_interval=10))

The cookbook's recipe has the same fields under the same names, and `setup_infra` takes either. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from os import PathLike
from typing import Any, Protocol

from groupwise.config.lora import ALL_LINEAR, targets_of
from groupwise.config.trained import TEXT, checked_parts
from groupwise.errors import ConfigError
from groupwise.sdk.sections import (
    NAMES,
    DeployConfig,
    InfraConfig,
    WeightSyncConfig,
    WeightSyncScope,
    model_of,
)
from groupwise.store.files import is_name

__all__ = ["DeployConfig", "InfraConfig", "LoopConfig", "WeightSyncConfig", "WeightSyncScope"]


_KINDS: Mapping[str, tuple[Any, str]] = {
    "log_path": (str | PathLike, "the name of a directory"),
    "base_model": (str, "the name of a model"),
    "lora_rank": (Integral, "a whole number"),
    "lora_alpha": (Real, "a number"),
    "temperature": (Real, "a number"),
    "infra": (InfraConfig, "an InfraConfig"),
    "deployment": (DeployConfig, "a DeployConfig"),
    "weight_sync": (WeightSyncConfig, "a WeightSyncConfig"),
}


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The configuration of one loop; `setup_infra` reads it.

    `lora_rank` 0 trains all parameters, of a model that sees those of `parameters`: `all`, or a list of `text`,
    `vision` and `projector`. `lora_targets` is what an adapter changes, as in a run's `train.lora.targets`.
    `temperature` is used for sampling and for the trainer's log-probabilities.
    `policy_job_id` and `reference_job_id` are names of trainers: a trainer of that name that already runs in this
    process is reused, otherwise one is opened under it."""

    log_path: str
    base_model: str
    lora_rank: int = 16
    lora_alpha: float = 32.0
    lora_targets: str | Sequence[str] = ALL_LINEAR
    parameters: str | Sequence[str] = TEXT
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
        for name, (kind, wanted) in _KINDS.items():
            if not isinstance(value := getattr(self, name), kind):
                raise ConfigError(f"{name} is a {type(value).__name__}; it must be {wanted}")
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
        object.__setattr__(self, "parameters", checked_parts(self.parameters, adapter=self.lora_rank > 0))
        try:
            object.__setattr__(self, "lora_targets", targets_of(self.lora_targets))
        except ValueError as error:
            raise ConfigError(f"lora_targets: {error}", field="lora_targets", kind="invalid") from None
        if not self.lora_rank and self.deployment.weight_sync_scope == WeightSyncScope.PER_DEPLOYMENT:
            raise ConfigError(
                "weight_sync_scope per_deployment takes adapters, and lora_rank 0 trains all parameters",
                hint="set lora_rank, or give the run an engine of its own (per_trainer)",
            )


class LikeLoopConfig(Protocol):
    """A configuration with fields of `LoopConfig` under the same names, such as the cookbook's; others are not read."""

    @property
    def log_path(self) -> str: ...

    @property
    def base_model(self) -> str: ...

    @property
    def deployment(self) -> DeployConfig: ...


def loop_config(config: LoopConfig | LikeLoopConfig) -> LoopConfig:
    """Return a recipe's configuration as a loop's; what the service calls a model is the one whose tokenizer is
    named."""
    if not isinstance(config, LoopConfig):
        shared = [each.name for each in fields(LoopConfig) if hasattr(config, each.name)]
        config = LoopConfig(**{name: getattr(config, name) for name in shared})
    return replace(config, base_model=model_of(config.base_model, config.deployment))
