"""The sections of a loop's configuration: machines, engine and weight sync, with the cookbook's names and defaults.

What names machines of the service (`SERVICE_ONLY`) is accepted, and said in a line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Any

from groupwise.errors import ConfigError
from groupwise.store.files import is_name

SERVICE = "accounts/"  # what names of the service begin with
NAMES = "names are 1 to 64 of A-Z a-z 0-9 . _ -, beginning with a letter or digit, and not 'base'"


@dataclass(frozen=True, kw_only=True)
class WeightSyncConfig:
    """Configures the steps between syncs of the sampling policy (1, N, or 0 for never), and between checkpoints (0: one
    at the end and one when the run is stopped, so that a killed run starts over)."""

    weight_sync_interval: int = 1
    dcp_save_interval: int = 0
    dcp_timeout: int = 2700
    first_checkpoint_type: str = "base"
    weight_sync_before_training: bool = False
    weight_sync_timeout: int = 600


@dataclass(frozen=True, kw_only=True)
class InfraConfig:
    """The machine that trains: `training_shape_id` and `ref_training_shape_id` are profiles of `groupwise profiles`,
    None the largest that this machine holds. The other fields name machines of a service, and change nothing here."""

    training_shape_id: str | None = None
    ref_training_shape_id: str | None = None
    region: str | None = None
    custom_image_tag: str | None = None
    accelerator_type: str | None = None
    accelerator_count: int | None = None
    node_count: int | None = None
    trainer_timeout_s: float = 3600
    extra_args: Sequence[str] | None = None
    trainer_replica_count: int | None = None
    purpose: str | None = None
    managed_by: str | None = None
    skip_validations: bool = False


class WeightSyncScope(StrEnum):
    """Owner of the engine: `per_trainer`, opened and closed with the loop, or `per_deployment`, which outlives it."""

    PER_TRAINER = "per_trainer"  # the run's: opened and closed with it
    PER_DEPLOYMENT = "per_deployment"  # long-lived: successive trainers push into it, and none restarts it


@dataclass(frozen=True, kw_only=True)
class DeployConfig:
    """The engine. `tokenizer_model` is required to sample; `deployment_id` is the engine's name.

    With `setup_infra` and the scope per_deployment the engine outlives the run and is found again by its name; `store`
    is then the directory of its adapters (deployments/<id> unless it is named).
    """

    weight_sync_scope: WeightSyncScope = WeightSyncScope.PER_TRAINER
    deployment_id: str | None = None
    store: str | None = None
    tokenizer_model: str | None = None
    tokenizer_revision: str | None = None
    sample_timeout: float = 600.0
    deployment_shape: str | None = None
    deployment_region: str | None = None
    deployment_accelerator_type: str | None = None
    deployment_timeout_s: float = 5400
    deployment_extra_args: Sequence[str] | None = None
    reattach_settle_timeout_s: int = 600
    hot_load_bucket_type: str = "FW_HOSTED"
    hot_load_trainer_job: str | None = None
    disable_speculative_decoding: bool = True
    replica_count: int | None = None
    extra_values: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.weight_sync_scope not in tuple(WeightSyncScope):
            valid = ", ".join(WeightSyncScope)
            raise ConfigError(f"weight_sync_scope is {self.weight_sync_scope!r}; valid: {valid}")
        per_deployment = self.weight_sync_scope == WeightSyncScope.PER_DEPLOYMENT
        if per_deployment and not self.deployment_id:
            raise ConfigError("weight_sync_scope per_deployment needs a deployment_id: the engine's name")
        if self.store and not per_deployment:
            raise ConfigError(
                f"store {self.store!r} acts with weight_sync_scope per_deployment only: an engine per trainer keeps "
                "its adapters in the run's directory"
            )
        if self.deployment_id and not is_name(self.deployment_id):
            raise ConfigError(f"deployment_id {self.deployment_id!r} cannot be a name", hint=NAMES)
        if not self.sample_timeout > 0:
            raise ConfigError(f"sample_timeout is {self.sample_timeout}; it must be positive (seconds)")


_ONE_MACHINE = "the run is in this process, on this machine"
_OWN_ENGINE = "the engine is the run's own, in this process, and ends with it"
_NO_WAIT = "nothing is waited for over a network here"
SERVICE_ONLY = {
    **{f"infra.{each.name}": _ONE_MACHINE for each in fields(InfraConfig)},
    "infra.ref_training_shape_id": "the reference, where kl_beta reads one, is the base model in this process",
    "deployment.weight_sync_scope": _OWN_ENGINE + "; groupwise.setup_infra has engines that live on",
    "deployment.sample_timeout": "completions are waited for as long as the engine works on them",
    "deployment.disable_speculative_decoding": "rollout.draft_tokens of a run of ours is what drafts",
    **{
        f"deployment.{name}": _OWN_ENGINE
        for name in (
            "deployment_id",
            "store",
            "deployment_shape",
            "deployment_region",
            "deployment_accelerator_type",
            "deployment_timeout_s",
            "deployment_extra_args",
            "reattach_settle_timeout_s",
            "hot_load_bucket_type",
            "hot_load_trainer_job",
            "replica_count",
            "extra_values",
        )
    },
    "weight_sync.dcp_timeout": _NO_WAIT,
    "weight_sync.weight_sync_timeout": _NO_WAIT,
    "weight_sync.first_checkpoint_type": "what is synced is whole each time: an adapter, or the weights themselves",
    "weight_sync.weight_sync_before_training": "the first prompts are always sampled by the policy that the run starts "
    "with",
}
"""Fields that change nothing where a run is in this process, and why."""


def idle_notes(section: Any, reasons: Mapping[str, str]) -> list[str]:
    """Return a line for each of the reasons why fields of `section` (dotted) that are not as by default change
    nothing."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        value, default = section, type(section)
        for part in name.split("."):
            value, default = getattr(value, part), _default(default, part)
        if value != default:
            names.setdefault(reason, []).append(name)
    return [f"{', '.join(each)}: {reason}" for reason, each in names.items()]


def _default(section: Any, name: str) -> Any:
    """Return a field's default; of a section its class, whose fields have theirs."""
    (field,) = (each for each in fields(section) if each.name == name)
    made = field.default if field.default_factory is MISSING else field.default_factory()
    return type(made) if is_dataclass(made) else made


def model_of(base_model: str, deployment: DeployConfig) -> str:
    """Return the model: `base_model`, or where that is the service's own name what `deployment.tokenizer_model`
    says."""
    if not base_model.startswith(SERVICE):
        return base_model
    if not deployment.tokenizer_model:
        raise ConfigError(
            f"base_model={base_model!r} is the service's; give a Hugging Face name",
            hint="such as base_model='Qwen/Qwen3-8B', or deployment=DeployConfig(tokenizer_model='Qwen/Qwen3-8B')",
        )
    return deployment.tokenizer_model


def require_tokenizer(tokenizer_model: str | None) -> str:
    """Raise ConfigError, a ValueError, if no tokenizer is named."""
    if not tokenizer_model:
        raise ConfigError(
            "deployment.tokenizer_model is not set; prompts are tokenised here, with the tokenizer that it names",
            hint="set deployment=DeployConfig(tokenizer_model=...) to what base_model is",
        )
    return tokenizer_model
