"""The Fireworks cookbook's recipe as it is called: `Config` and `main(config)`.

    from groupwise.bridges.cookbook.recipe import Config, DeployConfig, WeightSyncConfig, main

    result = main(Config(log_path="runs/gsm8k", base_model="Qwen/Qwen3-0.6B", dataset="gsm8k.jsonl", lora_rank=16,
                         policy_loss="dapo", deployment=DeployConfig(tokenizer_model="Qwen/Qwen3-0.6B"),
                         weight_sync=WeightSyncConfig(weight_sync_interval=4, dcp_save_interval=20)))

What its fields mean here is in `bridges.cookbook.config`. The same script, started again, continues from the newest
checkpoint in `log_path`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from groupwise.bridges.cookbook.config import (
    CISPOConfig,
    ConcurrencyConfig,
    Config,
    DAPOConfig,
    DROConfig,
    GSPOConfig,
    RunnerConfig,
    TISConfig,
    WandBConfig,
    notes,
    run_config,
)
from groupwise.errors import ConfigError
from groupwise.model.load import load_tokenizer
from groupwise.run.loop import RunResult, run_loop
from groupwise.sdk.sections import DeployConfig, InfraConfig, WeightSyncConfig, WeightSyncScope, model_of
from groupwise.store.files import replace
from groupwise.store.rundir import ROLLOUTS
from groupwise.store.tracking import read_rollouts
from groupwise.types import FinishReason, RolloutGroup

__all__ = [
    "CISPOConfig",
    "ConcurrencyConfig",
    "Config",
    "DAPOConfig",
    "DROConfig",
    "DeployConfig",
    "GSPOConfig",
    "InfraConfig",
    "RunnerConfig",
    "TISConfig",
    "WandBConfig",
    "WeightSyncConfig",
    "WeightSyncScope",
    "main",
]


def main(
    config: Config, *, cancel_on_exit: bool = False, reward_fn: Callable[[str, dict[str, Any]], float] | None = None
) -> RunResult:
    """Train as `config` says. `reward_fn(completion, row)` scores, or else the integer in <answer> is compared.

    Everything that was opened is closed in the end, with `cancel_on_exit` and without. What of `config` means something
    else here, or nothing, is said in a warning each.

    Raises ConfigError for what is not here and where `deployment.tokenizer_model` is not set (a ValueError), and what a
    run raises.
    """
    described = run_config(config, reward_fn=reward_fn)
    _check_tokenizer(config)
    for note in notes(config):
        warnings.warn(note, stacklevel=2)
    try:
        return run_loop(described)
    finally:
        if config.trajectory_dir is not None:
            _write_trajectories(Path(config.log_path) / ROLLOUTS, Path(config.trajectory_dir))


def _check_tokenizer(config: Config) -> None:
    """Raise ConfigError where `deployment` names another tokenizer than the model's, which is the one that is used."""
    model, named = model_of(config.base_model, config.deployment), config.deployment
    if named.tokenizer_model is None or (named.tokenizer_model == model and named.tokenizer_revision is None):
        return
    own, other = load_tokenizer(model), load_tokenizer(named.tokenizer_model, revision=named.tokenizer_revision)
    for what, same in (
        ("vocabulary", own.get_vocab() == other.get_vocab()),
        ("chat template", own.chat_template == other.chat_template),
    ):
        if not same:
            revision = "" if named.tokenizer_revision is None else f" at revision {named.tokenizer_revision!r}"
            raise ConfigError(
                f"deployment.tokenizer_model={named.tokenizer_model!r}{revision} has another {what} than {model}",
                hint="prompts are encoded with the model's own tokenizer; name the model there too",
            )


def _write_trajectories(rollouts: Path, directory: Path) -> None:
    """Write the groups that were trained, as the recipe writes them: a file a step, a line a completion."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in sorted(rollouts.glob("step_*.jsonl")):
        step = int(path.stem.removeprefix("step_"))
        trained = [each for each in read_rollouts(path) if any(r.advantage is not None for r in each.rollouts)]
        lines = [line for number, group in enumerate(trained) for line in _trajectory(step, number, group)]
        replace(directory / f"step_{step:04d}.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines))


def _trajectory(step: int, number: int, group: RolloutGroup) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "prompt_group": number,
            "completion_index": index,
            "prompt": list(group.prompt.messages or ()),
            "completion": rollout.completion.text,
            "reward": rollout.reward,
            "advantage": rollout.advantage,
            "completion_len": len(rollout.completion.token_ids),
            "truncated": rollout.completion.finish_reason is FinishReason.LENGTH,
            "ground_truth": group.prompt.columns.get("ground_truth"),
        }
        for index, rollout in enumerate(group.rollouts)
    ]
