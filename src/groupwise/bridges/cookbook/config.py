"""The Fireworks cookbook's `Config` of `rl_loop` as a run of ours: the names, defaults and losses of that recipe.

    policy_loss   the ratio is taken against the policy before a batch's first optimizer step (`anchor: old`), and
                  truncated importance sampling (`tis`) corrects for the sampler
    kl_beta       the coefficient of k3 against the base model; grpo and reinforce read it
    grad_accumulation_normalization   what the sum of token losses is divided by: NUM_LOSS_TOKENS, NUM_SEQUENCES, None

Rows are JSON lines with `messages` and what the reward reads, such as `ground_truth`; assistant turns at the end are
cut off. They are taken in order, `epochs` times. A prompt whose rewards are all equal is passed over and not replaced.
What names machines of the service (`IDLE`) is accepted, and said in a line; what asks for something that is not here
(`NOT_HERE`) is refused. Started again with the same configuration, the run in `log_path` goes on from its checkpoints.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from groupwise.config.formats.translation import run_name
from groupwise.config.held_objects import named
from groupwise.config.json_lines import json_lines
from groupwise.config.load import load_object
from groupwise.config.run import RunConfig, parse_config
from groupwise.errors import ConfigError, DataError
from groupwise.rewards.base import text_of
from groupwise.sdk.sections import (
    SERVICE,
    SERVICE_ONLY,
    DeployConfig,
    InfraConfig,
    WeightSyncConfig,
    idle_notes,
    model_of,
    require_tokenizer,
)
from groupwise.store.files import replace

LOSSES = ("grpo", "importance_sampling", "reinforce", "dapo", "dro", "gspo", "cispo")
REDUCTIONS = {"NUM_LOSS_TOKENS": "token_mean", "NUM_SEQUENCES": "sequence_sum", None: "sum"}
LOG_RATIO_CAP = 20.0
PROJECT = "grpo-tinker"  # the recipe's own, where only an entity is named
DOWNLOAD_S = 30.0
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_INTEGER = re.compile(r"-?\d+")


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
    seq_ratio_log_cap: float = 10.0
    kl_beta: float = 0.001


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
class ConcurrencyConfig:
    """Completions that are sampled at once: `max_concurrency` of mode "fixed", or `max_window`."""

    mode: str | None = "adaptive"
    max_concurrency: int | None = None
    initial_window: int | None = None
    min_window: int = 1
    max_window: int = 256
    prefill_queue_target: float = 0.5


@dataclass(frozen=True, kw_only=True)
class WandBConfig:
    """Weights & Biases, where metrics go besides the run directory; off without an entity and a project."""

    entity: str | None = None
    project: str | None = None
    run_name: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """Files for the service's own orchestration."""

    status_file: str | None = None
    metadata_file: str | None = None
    metrics_file: str | None = None
    output_model_path: str | None = None


@dataclass(frozen=True, kw_only=True)
class Config:
    """The recipe's configuration. `log_path` is the run directory; `base_model` a Hugging Face name, a directory or
    `starter`, or of the service's (accounts/...), where `deployment.tokenizer_model` names the model; `dataset` a JSONL
    file, or its URL."""

    log_path: str
    base_model: str
    dataset: str
    rollout_base_model: str | None = None
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
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    infra: InfraConfig = field(default_factory=InfraConfig)
    deployment: DeployConfig = field(default_factory=DeployConfig)
    wandb: WandBConfig | None = None
    concurrency: ConcurrencyConfig = ConcurrencyConfig()
    trajectory_dir: str | None = None
    step_timeout: int = 0
    runner: RunnerConfig = RunnerConfig()
    router_replay: bool = False
    router_replay_completion_only: bool = True
    init_from_checkpoint: str | None = None
    output_model_id: str | None = None
    policy_job_id: str | None = None
    reference_job_id: str | None = None
    policy_base_url: str | None = None
    reference_base_url: str | None = None
    save_final_checkpoint: bool = True


IDLE = {
    "rollout_base_model": "the model that is trained is the one that samples",
    "loss_path": "there is one way to compute the loss, and it is the exact one",
    "step_timeout": "no step is given up for the time that it takes",
    "policy_base_url": "there is no service to reach; it is ignored there too",
    "reference_base_url": "there is no service to reach; it is ignored there too",
    "gspo.kl_beta": "gspo has no KL term; nothing reads it there either",
    "router_replay_completion_only": "where routing is replayed, it is of prompts and completions",
    "concurrency.initial_window": "the engine takes completions as it has room for them, up to max_window",
    "concurrency.min_window": "the engine takes completions as it has room for them, up to max_window",
    "concurrency.prefill_queue_target": "the engine takes completions as it has room for them, up to max_window",
    **SERVICE_ONLY,
}
"""Fields that change nothing in `main`, and why."""

NOT_HERE = {
    "init_from_checkpoint": "a run goes on with resume=auto; an adapter to start from is warm_start_from_adapter",
    "output_model_id": "a run uploads nothing; `groupwise push RUN --to OWNER/NAME` does",
    "policy_job_id": "there is no service to attach to",
    "reference_job_id": "there is no service to attach to",
    "save_final_checkpoint": "the last version is always kept",
    "runner": "status and metrics are in log_path: metrics.jsonl, health.jsonl; `groupwise ui` shows them",
}
"""Fields that are refused, and why."""


def run_config(config: Config, *, reward_fn: Callable[[str, dict[str, Any]], float] | None = None) -> RunConfig:
    """Return the run. `reward_fn(completion, row)` is the default's place; it must be a function of a module.

    Raises ConfigError for what is not here, and where `deployment.tokenizer_model` is not set (a ValueError).
    """
    _refuse(config)
    rows_a_step, dataset = config.prompt_groups_per_step, local_dataset(config.dataset, Path(config.log_path))
    total = sum(1 for _ in rows(dataset=str(dataset), max_rows=config.max_rows)) * config.epochs
    if not total:
        raise DataError(f"dataset {config.dataset!r} has no rows", hint="write a JSON object with messages a line")
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
            "model": model_of(config.base_model, config.deployment),
            "dtype": "auto" if config.lora_rank else "float32",
            "run_dir": config.log_path,
            "resume": "auto",
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
                "batch_rows": _at_once(config.concurrency),
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
                "router_replay": config.router_replay,
            },
            "adapters": {"start": config.warm_start_from_adapter},
            "checkpoint": {"every": config.weight_sync.dcp_save_interval},
            "tracking": _tracking(config.wandb),
        }
    )


def notes(config: Config) -> list[str]:
    """Return the parts of the configuration that mean something else here, or nothing: a line for each reason."""
    said = []
    if config.base_model.startswith(SERVICE):
        model = model_of(config.base_model, config.deployment)
        said.append(
            f"base_model={config.base_model!r} is the service's name; deployment.tokenizer_model={model!r} is run"
        )
    if _tracked(config.wandb) and not _has_wandb():
        said.append("wandb: the package is not installed, so metrics are in log_path/metrics.jsonl only")
    return said + idle_notes(config, IDLE)


def _tracked(wandb: WandBConfig | None) -> bool:
    return wandb is not None and bool(wandb.project or wandb.entity)


def _has_wandb() -> bool:
    return importlib.util.find_spec("wandb") is not None


def _tracking(wandb: WandBConfig | None) -> dict[str, Any]:
    """Without the package the recipe continues without it."""
    if wandb is None or not _tracked(wandb) or not _has_wandb():
        return {}
    named = {"wandb_entity": wandb.entity, "wandb_name": wandb.run_name}
    return {"wandb": wandb.project or PROJECT} | {key: value for key, value in named.items() if value}


def _at_once(concurrency: ConcurrencyConfig) -> int:
    """Return completions that are decoded at once."""
    most = concurrency.max_concurrency
    if concurrency.mode not in ("adaptive", "fixed", None):
        raise ConfigError(f"concurrency.mode={concurrency.mode!r} does not exist; valid: adaptive, fixed")
    if concurrency.mode == "adaptive" and most is not None:
        hint = "set max_window, or mode='fixed'"
        raise ConfigError(f"concurrency.max_concurrency={most} acts with mode 'fixed' only", hint=hint)
    return concurrency.max_window if most is None else most


def _refuse(config: Config) -> None:
    defaults = {each.name: each.default for each in fields(Config)}
    for name, why in NOT_HERE.items():
        if getattr(config, name) != defaults[name]:
            raise ConfigError(f"{name}={getattr(config, name)!r} is not here: {why}")
    require_tokenizer(config.deployment.tokenizer_model)
    for name in ("max_rows", "epochs", "prompt_groups_per_step"):
        count = getattr(config, name)
        if (type(count) is not int or count < 1) and not (name == "max_rows" and count is None):
            raise ConfigError(f"{name}={count!r} is not valid; it must be a whole number, 1 or more")
    if not 0 <= config.kl_beta < math.inf:
        raise ConfigError(f"kl_beta={config.kl_beta!r} is not valid; it must be 0, without a KL, or more")
    if config.policy_loss not in LOSSES:
        raise ConfigError(f"policy_loss={config.policy_loss!r} does not exist; valid: {', '.join(LOSSES)}")
    if config.grad_accumulation_normalization not in REDUCTIONS:
        said = config.grad_accumulation_normalization
        raise ConfigError(
            f"grad_accumulation_normalization={said!r} is not one of NUM_LOSS_TOKENS, NUM_SEQUENCES, None"
        )
    if config.gspo.seq_ratio_log_cap != GSPOConfig.seq_ratio_log_cap:
        said = config.gspo.seq_ratio_log_cap
        raise ConfigError(f"gspo.seq_ratio_log_cap={said} is not here; log-ratios are always clamped to 20")
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
    """Return the preset with the recipe's numbers; the correction, the anchor, the KL, the reduction."""
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


def local_dataset(dataset: str, log_path: Path) -> Path:
    """Return a JSONL file, or of a URL its copy in `log_path`, fetched once. Raises DataError."""
    if "://" not in dataset:
        return Path(dataset)
    copy = log_path / "dataset.jsonl"
    if not copy.is_file():
        try:
            with urllib.request.urlopen(dataset, timeout=DOWNLOAD_S) as answer:
                text = answer.read().decode("utf-8")
        except (OSError, ValueError) as error:
            hint = "fetch it yourself and name the file"
            raise DataError(f"dataset {dataset!r} cannot be fetched: {error}", hint=hint) from error
        copy.parent.mkdir(parents=True, exist_ok=True)
        replace(copy, text)
    return copy


def rows(*, dataset: str, max_rows: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the first rows of a JSONL file, without assistant turns at the end. Raises DataError."""
    path = Path(dataset)
    if not path.is_file():
        raise DataError(f"there is no file {dataset}", hint="give a JSONL file, or its URL")
    for number, line in json_lines(path.read_text(encoding="utf-8"))[:max_rows]:
        try:
            row = json.loads(line)
            messages = list(row.pop("messages"))
            if not all(isinstance(message, Mapping) for message in messages):
                raise TypeError("messages is a list of objects, each with role and content")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            what = f"{path.name}:{number}: not a JSON object with messages ({type(error).__name__}: {error})"
            raise DataError(what) from None
        while messages and messages[-1].get("role") == "assistant":
            messages.pop()
        yield {"prompt": messages, **row}


def ground_truth(completions: Sequence[Any], ground_truth: Sequence[Any], **columns: Any) -> list[float]:
    """Return the recipe's reward: 1 where the integer in the first <answer> is that of the row's `ground_truth`, else
    0."""

    def integer(text: str) -> int | None:
        digits = _INTEGER.search(text)
        return int(digits[0]) if digits else None

    def answer(text: str) -> int | None:
        found = _ANSWER.search(text)
        return integer(found[1]) if found else None

    def gold(value: str) -> int | None:
        return answer(value) if _ANSWER.search(value) else integer(value)

    said = [answer(text_of(each)) for each in completions]
    return [float(a is not None and a == gold(str(b))) for a, b in zip(said, ground_truth, strict=True)]


def by_row(
    completions: Sequence[Any], prompts: Sequence[Any], *, reward_fn: str, folder: str = ".", **columns: Any
) -> list[float]:
    """Return a function of the recipe's kind, `reward_fn(completion, row)`, applied to each completion."""
    function = load_object(reward_fn, folder=folder)
    return [
        function(text_of(completion), {name: values[i] for name, values in columns.items()} | {"messages": prompts[i]})
        for i, completion in enumerate(completions)
    ]
