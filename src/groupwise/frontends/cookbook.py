"""The Fireworks cookbook's `Config` of `rl_loop` as a run of ours: the names, defaults and losses of that recipe.

    policy_loss   the ratio is taken against the policy before a batch's first optimizer step (`anchor: old`), and
                  truncated importance sampling (`tis`) corrects for the sampler
    kl_beta       the coefficient of k3 against the base model; grpo and reinforce read it
    grad_accumulation_normalization   what the sum of token losses is divided by: NUM_LOSS_TOKENS, NUM_SEQUENCES, None

Rows are JSON lines with `messages` and what the reward reads, such as `ground_truth`; assistant turns at the end are
cut off. They are taken in order, `epochs` times. A prompt whose rewards are all equal is passed over and not replaced.
What runs elsewhere there (`infra`, `deployment`) is of no concern here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from groupwise.config import RunConfig, parse_config
from groupwise.errors import ConfigError, DataError
from groupwise.frontends.callables import named
from groupwise.frontends.translation import run_name
from groupwise.load import load_object
from groupwise.rewards.base import text_of

LOSSES = ("grpo", "importance_sampling", "reinforce", "dapo", "dro", "gspo", "cispo")
REDUCTIONS = {"NUM_LOSS_TOKENS": "token_mean", "NUM_SEQUENCES": "sequence_sum", None: "sum"}
LOG_RATIO_CAP = 20.0
_INTEGER = re.compile(r"<answer>.*?(-?\d+).*?</answer>", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class DAPOConfig:
    """Clip bounds, and the dual clip."""

    eps_clip: float = 0.2
    eps_clip_high: float = 0.28
    eps_clip_c: float | None = None
    ratio_log_cap: float = LOG_RATIO_CAP


@dataclass(frozen=True, kw_only=True)
class DROConfig:
    """The weight of the quadratic term."""

    beta: float = 0.05


@dataclass(frozen=True, kw_only=True)
class GSPOConfig:
    """Clip bounds of the sequence's ratio."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2


@dataclass(frozen=True, kw_only=True)
class CISPOConfig:
    """Bounds of the clipped weight."""

    eps_low: float = 0.2
    eps_high: float = 0.28
    ratio_log_cap: float = LOG_RATIO_CAP


@dataclass(frozen=True, kw_only=True)
class TISConfig:
    """Truncated importance sampling between trainer and sampler."""

    cap: float = 5.0
    level: str = "token"


@dataclass(frozen=True, kw_only=True)
class WeightSyncConfig:
    """Steps between syncs of the sampling policy (1, N, or 0 for never), and between checkpoints (0: at the end)."""

    weight_sync_interval: int = 1
    dcp_save_interval: int = 0
    weight_sync_before_training: bool = False


@dataclass(frozen=True, kw_only=True)
class InfraConfig:
    """Machines of the service; here the run is in this process."""

    training_shape_id: str | None = None
    ref_training_shape_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class DeployConfig:
    """The service's deployment; here the tokenizer is the model's."""

    tokenizer_model: str | None = None


@dataclass(frozen=True, kw_only=True)
class WandBConfig:
    """Where metrics go besides the run directory."""

    project: str = "grpo-tinker"


@dataclass(frozen=True, kw_only=True)
class Config:
    """The recipe's configuration. `log_path` is the run directory; `base_model` a Hugging Face name, a directory or
    `starter`; `dataset` a JSONL file."""

    log_path: str
    base_model: str
    dataset: str
    learning_rate: float = 1e-5
    kl_beta: float = 0.001
    completions_per_prompt: int = 4
    max_completion_tokens: int = 1024
    temperature: float = 1.0
    epochs: int = 1
    max_rows: int = 100
    max_seq_len: int | None = None
    lora_rank: int = 0
    prompt_groups_per_step: int = 1
    grad_accumulation_normalization: str | None = "NUM_LOSS_TOKENS"
    policy_loss: str = "grpo"
    loss_path: str = "client"
    dapo: DAPOConfig = DAPOConfig()
    dro: DROConfig = DROConfig()
    gspo: GSPOConfig = GSPOConfig()
    cispo: CISPOConfig = CISPOConfig()
    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    ratio_log_cap: float = LOG_RATIO_CAP
    ppo_n_minibatches: int = 1
    tis: TISConfig = TISConfig()
    warm_start_from_adapter: str | None = None
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    infra: InfraConfig = InfraConfig()
    deployment: DeployConfig = DeployConfig()
    wandb: WandBConfig | None = None
    router_replay: bool = False
    init_from_checkpoint: str | None = None
    output_model_id: str | None = None
    policy_job_id: str | None = None
    reference_job_id: str | None = None
    save_final_checkpoint: bool = True


NOT_HERE = {
    "router_replay": "routing of experts is not replayed",
    "init_from_checkpoint": "a run goes on with resume=auto; an adapter to start from is warm_start_from_adapter",
    "output_model_id": "nothing is uploaded",
    "policy_job_id": "there is no service to attach to",
    "reference_job_id": "there is no service to attach to",
    "save_final_checkpoint": "the last version is always kept",
}


def run_config(config: Config, *, reward_fn: Callable[[str, dict[str, Any]], float] | None = None) -> RunConfig:
    """The run. `reward_fn(completion, row)` is the default's place; it must be a function of a module.

    Raises ConfigError for what is not here or has no effect.
    """
    _refuse(config)
    rows_a_step, dataset = config.prompt_groups_per_step, Path(config.dataset)
    total = sum(1 for _ in rows(dataset=str(dataset), max_rows=config.max_rows)) * config.epochs
    reward: dict[str, Any] = {"function": f"{__name__}:ground_truth"}
    scoring = {}
    if reward_fn is not None:
        found = named(reward_fn, what="reward_fn")
        args = {"reward_fn": found.name, "folder": str(found.folder)}
        reward = {"function": f"{__name__}:by_row", "args": args, "name": reward_fn.__name__}
        scoring = {"workers": 0} if found.only_here else {}
    return parse_config(
        {
            "name": run_name(Path(config.log_path).name),
            "model": config.base_model,
            "dtype": "auto" if config.lora_rank else "float32",
            "run_dir": config.log_path,
            "data": {
                "source": f"{__name__}:rows",
                "args": {"dataset": str(dataset.resolve()), "max_rows": config.max_rows},
                "shuffle": False,
            },
            "rewards": [reward],
            "scoring": scoring,
            "rollout": {
                "prompts_per_step": rows_a_step,
                "group_size": config.completions_per_prompt,
                "max_tokens": config.max_completion_tokens,
                "temperature": config.temperature,
                "refill": 1.0,
                "max_prompt_tokens": _longest(config),
                "weight_sync_interval": config.weight_sync.weight_sync_interval,
            },
            "algo": _loss(config),
            "train": {
                "steps": math.ceil(total / rows_a_step),
                "learning_rate": config.learning_rate,
                "warmup_steps": 0,
                "weight_decay": 0.01,
                "minibatches": config.ppo_n_minibatches,
                "lora": {"rank": config.lora_rank} if config.lora_rank else None,
            },
            "adapters": {"start": config.warm_start_from_adapter},
            "checkpoint": {"every": config.weight_sync.dcp_save_interval},
            "tracking": {"wandb": config.wandb and config.wandb.project},
        }
    )


def _refuse(config: Config) -> None:
    defaults = {each.name: each.default for each in fields(Config)}
    for name, why in NOT_HERE.items():
        if getattr(config, name) != defaults[name]:
            raise ConfigError(f"{name}={getattr(config, name)!r} is not here: {why}")
    if config.base_model.startswith("accounts/"):
        meant = config.deployment.tokenizer_model
        hint = f"is it base_model={meant!r}, as deployment.tokenizer_model?" if meant else "such as Qwen/Qwen3-8B"
        raise ConfigError(f"base_model={config.base_model!r} is the service's; give a Hugging Face name", hint=hint)
    if config.policy_loss not in LOSSES:
        raise ConfigError(f"policy_loss={config.policy_loss!r} does not exist; valid: {', '.join(LOSSES)}")
    if config.grad_accumulation_normalization not in REDUCTIONS:
        said = config.grad_accumulation_normalization
        raise ConfigError(
            f"grad_accumulation_normalization={said!r} is not one of NUM_LOSS_TOKENS, NUM_SEQUENCES, None"
        )
    for cap in (config.ratio_log_cap, config.dapo.ratio_log_cap, config.cispo.ratio_log_cap):
        if cap != LOG_RATIO_CAP:
            raise ConfigError(f"ratio_log_cap={cap} is not here; log-ratios are always clamped to {LOG_RATIO_CAP:g}")
    if config.tis.level != "token":
        hint = "algo.correction of a run of ours has tis_sequence, the product of the tokens' ratios"
        raise ConfigError(f"tis.level={config.tis.level!r} is not here; token is", hint=hint)


def _longest(config: Config) -> int | None:
    """`max_seq_len` holds prompt and completion."""
    if config.max_seq_len is None:
        return None
    room = config.max_seq_len - config.max_completion_tokens
    if room < 1:
        what = f"max_seq_len={config.max_seq_len} leaves no room for a prompt beside max_completion_tokens"
        raise ConfigError(f"{what}={config.max_completion_tokens}")
    return room


def _loss(config: Config) -> dict[str, Any]:
    """The preset with the recipe's numbers; the correction, the anchor, the KL, the reduction."""
    high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
    bounds: dict[str, dict[str, Any]] = {
        "grpo": {"clip_low": config.eps_clip, "clip_high": high},
        "dapo": {
            "clip_low": config.dapo.eps_clip,
            "clip_high": config.dapo.eps_clip_high,
            "dual_clip": config.dapo.eps_clip_c,
        },
        "dro": {"dro_beta": config.dro.beta},
        "gspo": {"clip_low": config.gspo.clip_ratio_low, "clip_high": config.gspo.clip_ratio_high},
        "cispo": {"clip_low": config.cispo.eps_low, "clip_high": config.cispo.eps_high},
    }
    loss = {
        "policy_loss": config.policy_loss,
        "advantage_eps": 1e-8,
        "reduction": REDUCTIONS[config.grad_accumulation_normalization],
    } | bounds.get(config.policy_loss, {})
    if config.policy_loss != "reinforce":
        loss |= {"anchor": "old", "correction": "tis_token", "correction_cap": config.tis.cap}
    if config.kl_beta > 0 and config.policy_loss in ("grpo", "reinforce"):
        loss |= {"kl": "k3", "kl_coeff": config.kl_beta}
    return loss


# ---- rows and rewards ----


def rows(*, dataset: str, max_rows: int | None = None) -> Iterator[dict[str, Any]]:
    """The first rows of a JSONL file, without assistant turns at the end. Raises DataError."""
    path = Path(dataset)
    if not path.is_file():
        hint = "download it first" if "://" in dataset else "give a JSONL file"
        raise DataError(f"there is no file {dataset}", hint=hint)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()[:max_rows], start=1):
        try:
            row = json.loads(line)
            messages = list(row.pop("messages"))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            what = f"{path.name}:{number}: not a JSON object with messages ({type(error).__name__}: {error})"
            raise DataError(what) from None
        while messages and messages[-1].get("role") == "assistant":
            messages.pop()
        yield {"prompt": messages, **row}


def ground_truth(completions: Sequence[Any], ground_truth: Sequence[Any], **columns: Any) -> list[float]:
    """The recipe's reward: 1 where the integer in the first <answer> is that of the row's `ground_truth`, else 0."""

    def integer(text: str) -> int | None:
        found = _INTEGER.search(text)
        return int(found[1]) if found else None

    def gold(value: Any) -> int | None:
        found = integer(str(value))
        digits = re.search(r"-?\d+", str(value)) if found is None else None
        return int(digits[0]) if digits else found

    said = [integer(text_of(each)) for each in completions]
    return [float(a is not None and a == gold(b)) for a, b in zip(said, ground_truth, strict=True)]


def by_row(
    completions: Sequence[Any], prompts: Sequence[Any], *, reward_fn: str, folder: str = ".", **columns: Any
) -> list[float]:
    """A function of the recipe's kind, `reward_fn(completion, row)`, applied to each completion."""
    function = load_object(reward_fn, folder=folder)
    return [
        function(text_of(completion), {name: values[i] for name, values in columns.items()} | {"messages": prompts[i]})
        for i, completion in enumerate(completions)
    ]
