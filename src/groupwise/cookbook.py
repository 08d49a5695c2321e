"""The Fireworks cookbook's recipe as it is called: `Config` and `main(config)`.

    from groupwise.cookbook import Config, WeightSyncConfig, main

    result = main(Config(log_path="runs/gsm8k", base_model="Qwen/Qwen3-0.6B", dataset="gsm8k.jsonl", lora_rank=16,
                         policy_loss="dapo", weight_sync=WeightSyncConfig(weight_sync_interval=4)))

What its fields mean here is in `groupwise.frontends.cookbook`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from groupwise.frontends.cookbook import (
    CISPOConfig,
    Config,
    DAPOConfig,
    DeployConfig,
    DROConfig,
    GSPOConfig,
    InfraConfig,
    TISConfig,
    WandBConfig,
    WeightSyncConfig,
    run_config,
)
from groupwise.loop import RunResult, run

__all__ = [
    "CISPOConfig",
    "Config",
    "DAPOConfig",
    "DROConfig",
    "DeployConfig",
    "GSPOConfig",
    "InfraConfig",
    "TISConfig",
    "WandBConfig",
    "WeightSyncConfig",
    "main",
]


def main(config: Config, *, reward_fn: Callable[[str, dict[str, Any]], float] | None = None) -> RunResult:
    """Train as `config` says. `reward_fn(completion, row)` scores, or else the integer in <answer> is compared.

    Raises ConfigError for what is not here, and what a run raises.
    """
    return run(run_config(config, reward_fn=reward_fn))
