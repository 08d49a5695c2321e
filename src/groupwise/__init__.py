"""Groupwise: GRPO post-training you can start on a laptop and keep when you have a cluster.

    import groupwise
    result = groupwise.run_loop(groupwise.load_config("configs/arithmetic.yaml", ["train.steps=20"]))
    print(result.run_dir, result.version)

    infra = groupwise.setup_infra(groupwise.LoopConfig(...), needs_reference=False, needs_inference=True)
    infra.policy.forward_backward(datums, "ppo"), infra.policy.optim_step(groupwise.AdamParams())  # a loop of your own

    client = groupwise.Client("http://127.0.0.1:8420")  # of `groupwise serve`
    print(client.chat("What is 47 + 138?").text)

Importing the package costs nothing: every name below is imported from its module when it is first used, so torch is
loaded by what needs it (`run`, `load_model`, `Learner`, `LocalEngine`) and by nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.bridges.trl.from_trl import from_trl as from_trl
    from groupwise.config.loss import LossSpec as LossSpec
    from groupwise.config.loss import resolve_loss as resolve_loss
    from groupwise.config.run import RunConfig as RunConfig
    from groupwise.config.run import dump_resolved as dump_resolved
    from groupwise.config.run import parse_config as parse_config
    from groupwise.engine.local import LocalEngine as LocalEngine
    from groupwise.errors import GroupwiseError as GroupwiseError
    from groupwise.errors import JobFailedError as JobFailedError
    from groupwise.errors import RemoteError as RemoteError
    from groupwise.model.load import LoadedModel as LoadedModel
    from groupwise.model.load import load_model as load_model
    from groupwise.rewards.call import RewardFunction as RewardFunction
    from groupwise.run.config_file import load_config as load_config
    from groupwise.run.loop import RunResult as RunResult
    from groupwise.run.loop import run_loop as run_loop
    from groupwise.sdk.client import AsyncClient as AsyncClient
    from groupwise.sdk.client import Client as Client
    from groupwise.sdk.config import DeployConfig as DeployConfig
    from groupwise.sdk.config import InfraConfig as InfraConfig
    from groupwise.sdk.config import LoopConfig as LoopConfig
    from groupwise.sdk.config import WeightSyncConfig as WeightSyncConfig
    from groupwise.sdk.config import WeightSyncScope as WeightSyncScope
    from groupwise.sdk.datums import Datum as Datum
    from groupwise.sdk.datums import build_grpo_datums as build_grpo_datums
    from groupwise.sdk.datums import compute_advantages as compute_advantages
    from groupwise.sdk.infra import Infra as Infra
    from groupwise.sdk.infra import setup_infra as setup_infra
    from groupwise.sdk.losses import grpo_loss as grpo_loss
    from groupwise.sdk.losses import make_grpo_loss_fn as make_grpo_loss_fn
    from groupwise.sdk.sampler import DeploymentSampler as DeploymentSampler
    from groupwise.sdk.sampler import SampledCompletion as SampledCompletion
    from groupwise.sdk.trainer import AdamParams as AdamParams
    from groupwise.sdk.trainer import TrainingClient as TrainingClient
    from groupwise.sdk.trainer import TrainingService as TrainingService
    from groupwise.store.adapters import AdapterStore as AdapterStore
    from groupwise.train.learner import Learner as Learner
    from groupwise.types import Completion as Completion
    from groupwise.types import FinishReason as FinishReason
    from groupwise.types import Grammar as Grammar
    from groupwise.types import Message as Message
    from groupwise.types import PolicyVersion as PolicyVersion
    from groupwise.types import Prompt as Prompt
    from groupwise.types import Rollout as Rollout
    from groupwise.types import RolloutGroup as RolloutGroup
    from groupwise.types import Sample as Sample
    from groupwise.types import SamplingParams as SamplingParams
    from groupwise.types import SamplingRequest as SamplingRequest
    from groupwise.types import Turn as Turn

__version__ = "0.1.0"

# module -> the public names in it; the imports above say the same to type checkers
_PUBLIC = {
    "config.loss": (
        "LossSpec",
        "resolve_loss",
    ),
    "config.run": (
        "RunConfig",
        "dump_resolved",
        "parse_config",
    ),
    "engine.local": ("LocalEngine",),
    "errors": (
        "GroupwiseError",
        "JobFailedError",
        "RemoteError",
    ),
    "model.load": (
        "LoadedModel",
        "load_model",
    ),
    "rewards.call": ("RewardFunction",),
    "run.config_file": ("load_config",),
    "bridges.trl.from_trl": ("from_trl",),
    "run.loop": (
        "RunResult",
        "run_loop",
    ),
    "sdk.client": (
        "AsyncClient",
        "Client",
    ),
    "sdk.datums": (
        "Datum",
        "build_grpo_datums",
        "compute_advantages",
    ),
    "sdk.config": (
        "DeployConfig",
        "InfraConfig",
        "LoopConfig",
        "WeightSyncConfig",
        "WeightSyncScope",
    ),
    "sdk.infra": (
        "Infra",
        "setup_infra",
    ),
    "sdk.losses": (
        "grpo_loss",
        "make_grpo_loss_fn",
    ),
    "sdk.sampler": (
        "DeploymentSampler",
        "SampledCompletion",
    ),
    "sdk.trainer": (
        "AdamParams",
        "TrainingClient",
        "TrainingService",
    ),
    "store.adapters": ("AdapterStore",),
    "train.learner": ("Learner",),
    "types": (
        "Completion",
        "FinishReason",
        "Grammar",
        "Message",
        "PolicyVersion",
        "Prompt",
        "Rollout",
        "RolloutGroup",
        "Sample",
        "SamplingParams",
        "SamplingRequest",
        "Turn",
    ),
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = ["__version__", *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
