"""What one's own loop runs on: the model, the adapter, the hardware, the engine, when weights are synced and saved.

    LoopConfig(log_path="runs/mine", base_model="starter", lora_rank=16,
               infra=InfraConfig(training_shape_id="cpu-small"),
               deployment=DeployConfig(tokenizer_model="starter"),
               weight_sync=WeightSyncConfig(weight_sync_interval=1, dcp_save_interval=10))

The recipe's `cookbook.Config` has the same fields under the same names, and `setup_infra` takes either. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum

from groupwise.adapter_files import is_name
from groupwise.errors import ConfigError
from groupwise.frontends import cookbook
from groupwise.frontends.cookbook import InfraConfig, WeightSyncConfig

__all__ = ["DeployConfig", "InfraConfig", "LoopConfig", "WeightSyncConfig", "WeightSyncScope"]


NAMES = "names are 1 to 64 of A-Z a-z 0-9 . _ -, beginning with a letter or digit, and not 'base'"


class WeightSyncScope(StrEnum):
    """Whose the engine is."""

    PER_TRAINER = "per_trainer"  # the run's: opened and closed with it
    PER_DEPLOYMENT = "per_deployment"  # long-lived: successive trainers push into it, and none restarts it


@dataclass(frozen=True, kw_only=True)
class DeployConfig(cookbook.DeployConfig):
    """The engine. `tokenizer_model` is required to sample; `deployment_id` names an engine that outlives the run, and
    `store` the directory of its adapters (deployments/<id> unless it is named)."""

    weight_sync_scope: WeightSyncScope = WeightSyncScope.PER_TRAINER
    deployment_id: str | None = None
    store: str | None = None
    sample_timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.weight_sync_scope not in tuple(WeightSyncScope):
            valid = ", ".join(WeightSyncScope)
            raise ConfigError(f"weight_sync_scope is {self.weight_sync_scope!r}; valid: {valid}")
        per_deployment = self.weight_sync_scope == WeightSyncScope.PER_DEPLOYMENT
        if per_deployment and not self.deployment_id:
            raise ConfigError("weight_sync_scope per_deployment needs a deployment_id: the engine's name")
        for option in ("deployment_id", "store"):
            if getattr(self, option) and not per_deployment:
                raise ConfigError(
                    f"{option} {getattr(self, option)!r} acts with weight_sync_scope per_deployment only: "
                    "an engine per trainer is the run's own"
                )
        if self.deployment_id and not is_name(self.deployment_id):
            raise ConfigError(f"deployment_id {self.deployment_id!r} cannot be a name", hint=NAMES)
        if not self.sample_timeout > 0:
            raise ConfigError(f"sample_timeout is {self.sample_timeout}; it must be positive (seconds)")


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
    deployment: cookbook.DeployConfig = field(default_factory=DeployConfig)
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
        if not self.lora_rank and self.deploy.weight_sync_scope == WeightSyncScope.PER_DEPLOYMENT:
            raise ConfigError(
                "weight_sync_scope per_deployment takes adapters, and lora_rank 0 trains all parameters",
                hint="set lora_rank, or give the run an engine of its own (per_trainer)",
            )

    @property
    def deploy(self) -> DeployConfig:
        """`deployment`, with the defaults of what a recipe's has not."""
        given = self.deployment
        return given if isinstance(given, DeployConfig) else DeployConfig(tokenizer_model=given.tokenizer_model)


def loop_config(config: LoopConfig | cookbook.Config) -> LoopConfig:
    """A recipe's configuration as a loop's."""
    if isinstance(config, LoopConfig):
        return config
    shared = [each.name for each in fields(LoopConfig) if hasattr(config, each.name)]
    return LoopConfig(**{name: getattr(config, name) for name in shared})
