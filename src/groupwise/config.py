"""The run's configuration: every knob with its bounds, its default and what it does.

    load_config     a YAML file and dotted overrides  -> RunConfig
    parse_config    a mapping from Python             -> RunConfig
    dump_resolved   RunConfig                         -> YAML with every effective value; it loads as the same run

Only `data` and `rewards` have no default. A key that does not exist, a value out of bounds and options that exclude
each other are refused with the key, the file's line, the value and what would be valid. Numbers are not read from
strings and true/false is not a number. There is one name per knob, and no secrets: tokens come from the environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from groupwise.configfile import Document, to_yaml, validate
from groupwise.errors import ConfigError
from groupwise.types import BASE, SamplingParams


def _is_not_base(name: str) -> str:
    if name == BASE:
        raise ValueError(f"{name!r} is what the model without an adapter is called; choose another name")
    return name


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]
AdapterName = Annotated[Name, AfterValidator(_is_not_base)]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], Field(strict=False)]  # strict=False: a YAML list becomes a tuple
Mode = Literal["greedy", "sampled"]
ADVANTAGE_EPS = 1e-4

# What other systems call our keys; only for "did you mean".
OTHER_NAMES = {
    "lr": "train.learning_rate",
    "max_steps": "train.steps",
    "lr_scheduler_type": "train.schedule",
    "num_generations": "rollout.group_size",
    "max_completion_length": "rollout.max_tokens",
    "max_new_tokens": "rollout.max_tokens",
    "beta": "algo.kl_coeff",
    "loss_type": "algo.policy_loss",
    "epsilon": "algo.clip_low",
    "epsilon_high": "algo.clip_high",
    "reward_funcs": "rewards",
    "lora_r": "train.lora.rank",
    "lora_alpha": "train.lora.alpha",
    "base_model": "model",
    "datasets": "data",
}


class Section(BaseModel):
    """A part of the configuration: no unknown keys, no silent conversions, no changes after loading."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class DatasetConfig(Section):
    """Where prompts come from."""

    source: Text
    """A `.jsonl` file (relative to the config's folder), `module:function` that returns rows, a Hugging Face dataset's
    name, or a directory with a saved dataset."""
    args: dict[str, Any] = {}
    """Keyword arguments of the function, or of `datasets.load_dataset`."""
    split: Text | None = None
    """The split of a Hugging Face dataset; null is `train`."""
    prompt_key: Text | None = None
    """The column with the prompt: a string, or a list of chat messages; null is `messages` or `prompt`."""
    system: Text | None = None
    """A system message to put before every chat prompt."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first rows; null is all."""

    @property
    def kind(self) -> Literal["jsonl", "function", "dataset"]:
        """How `source` is read."""
        if self.source.endswith(".jsonl"):
            return "jsonl"
        return "function" if re.fullmatch(r"[\w.]+:[\w.]+", self.source) else "dataset"

    @model_validator(mode="after")
    def _acts(self) -> DatasetConfig:
        if self.split is not None and self.kind != "dataset":
            raise conflict("split", f"{self.split!r} acts on Hugging Face datasets only; source is {self.source!r}")
        if self.args and self.kind == "jsonl":
            raise conflict("args", f"a .jsonl file takes no arguments; source is {self.source!r}")
        return self


class DataConfig(DatasetConfig):
    """The prompts to train on."""

    shuffle: bool = True
    """Draw in a new order every epoch, fixed by `seed`; false keeps the order of the rows."""


class EvalConfig(Section):
    """Evaluation on held-out prompts, before, during and after training."""

    data: DatasetConfig
    """The prompts; read in order, all of them or the first `limit`."""
    every: int = Field(default=25, ge=0)
    """Steps between evaluations; 0 is only before and after."""
    modes: Annotated[tuple[Mode, ...], Field(strict=False, min_length=1)] = ("greedy", "sampled")
    """`greedy` decodes at temperature 0, `sampled` as in training."""
    by: Text | None = None
    """A column of the dataset to break the means down by."""
    show: int = Field(default=4, ge=0)
    """Prompts whose completions are shown side by side at the end."""

    @field_validator("modes")
    @classmethod
    def _no_repeats(cls, modes: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(modes)) < len(modes):
            raise ValueError(f"{list(modes)} names a mode twice; name each once")
        return modes


class RewardConfig(Section):
    """One reward function. In YAML, a plain string is `{function: <string>}`."""

    function: Text
    """`module:function`; the module may stand beside the config file."""
    weight: float = 1.0
    """Its factor in the sum; 0 records the reward without using it."""
    args: dict[str, Any] = {}
    """Keyword arguments passed on every call."""
    name: Name | None = None
    """Its name in metrics; null is the function's own."""


def _reward(entry: Any) -> Any:
    return {"function": entry} if isinstance(entry, str) else entry


class RolloutConfig(Section):
    """How completions are sampled."""

    prompts_per_step: int = Field(default=32, ge=1, le=65536)
    """Prompts, and so groups, in one step's batch."""
    group_size: int = Field(default=8, le=4096)
    """Completions of each prompt."""
    max_tokens: int = Field(default=256, ge=1, le=1 << 20)
    """Longest completion, in tokens."""
    temperature: float = Field(default=1.0, gt=0, le=10)
    """Sampling temperature. Not 0, at which the completions of a group would all be the same."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 is off."""
    top_k: int = Field(default=0, ge=0)
    """Sample among this many likeliest tokens; 0 is off."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Drop tokens less likely than this fraction of the likeliest; 0 is off."""
    stop: Texts = ()
    """Strings that end a completion; they are cut from its text."""
    refill: float = Field(default=2.0, ge=1, le=64)
    """Groups with nothing to learn from are replaced by sampling at most `refill` times `prompts_per_step` prompts a
    step; 1 never replaces."""
    batch_rows: int = Field(default=256, ge=1, le=65536)
    """Completions that the local engine decodes at once."""

    @field_validator("group_size")
    @classmethod
    def _is_a_group(cls, group_size: int) -> int:
        if group_size < 2:
            raise ValueError(f"{group_size} is not valid; a group needs at least 2 completions to be compared")
        return group_size

    def sampling(self) -> SamplingParams:
        """The training rollouts' sampling parameters (without a seed)."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop=self.stop,
        )


class AlgoConfig(Section):
    """Advantages and the policy loss. `policy_loss` alone is the whole published algorithm; every other loss option is
    null, which is the preset's own value, or overrides it. `groupwise.algo.loss_spec` explains and checks them."""

    policy_loss: Text = "grpo"
    """The preset: grpo, dapo, gspo, cispo, ..."""
    surrogate: Text | None = None
    """How ratio and advantage make the objective: clip, unclipped, cispo, dro, reinforce, sapo, vespo."""
    ratio: Text | None = None
    """The importance ratio: token, sequence."""
    anchor: Text | None = None
    """The policy that the ratio is taken against: behaviour, old."""
    clip_low: float | None = None
    """How far below 1 the ratio may go."""
    clip_high: float | None = None
    """How far above 1 the ratio may go."""
    dual_clip: float | None = None
    """Largest ratio where the advantage is negative."""
    dro_beta: float | None = None
    """Weight of DRO's quadratic term."""
    sapo_tau_positive: float | None = None
    """SAPO's temperature where the advantage is positive."""
    sapo_tau_negative: float | None = None
    """SAPO's temperature where the advantage is negative."""
    correction: Text | None = None
    """For the gap between sampler and trainer: tis_token, tis_sequence, mask_token, mask_sequence, mask_geometric."""
    correction_cap: float | None = None
    """Largest ratio of the trainer's to the sampler's probability."""
    correction_floor: float | None = None
    """Smallest ratio of the trainer's to the sampler's probability."""
    opsm_threshold: float | None = None
    """Off-policy sequence mask: nats per token beyond which a sequence with a negative advantage is left out."""
    kl: Text | None = None
    """The estimator of the divergence from the reference: k1, k2, k3, k3_unbiased."""
    kl_coeff: float | None = None
    """Its weight."""
    reduction: Text | None = None
    """How token losses become one number: token_mean, sequence_mean, constant, sequence_sum, sum."""
    reduction_length: float | None = None
    """Tokens that `constant` divides by."""
    entropy_coeff: float | None = None
    """Weight of the entropy bonus."""
    advantage: Literal["group_std", "mean", "batch_std", "leave_one_out"] = "group_std"
    """Baseline and scale of the rewards in a group."""
    advantage_eps: float = Field(default=ADVANTAGE_EPS, gt=0, le=1)
    """Added to the standard deviation that `group_std` and `batch_std` divide by."""
    aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Several rewards: add them and normalise the sum, or normalise each and add (GDPO)."""

    def loss_overrides(self) -> dict[str, Any]:
        """The loss options that are not null, for `resolve_loss(policy_loss, **overrides)`."""
        mine = {"policy_loss", "advantage", "advantage_eps", "aggregation"}
        return {name: value for name, value in self if name not in mine and value is not None}

    @model_validator(mode="after")
    def _acts(self) -> AlgoConfig:
        if self.advantage_eps != ADVANTAGE_EPS and self.advantage in ("mean", "leave_one_out"):
            message = f"{self.advantage_eps} does not act with advantage {self.advantage!r}, which divides by nothing"
            raise conflict("advantage_eps", message)
        if self.aggregation == "normalize_then_sum" and self.advantage != "group_std":
            message = f"{self.advantage!r} does not act with aggregation normalize_then_sum, which has its own scales"
            raise conflict("advantage", message)
        return self


def _targets(value: Any) -> Any:
    if value == "all-linear" or (isinstance(value, list | tuple) and value and all(isinstance(x, str) for x in value)):
        return value if isinstance(value, str) else tuple(value)
    raise ValueError(f"{value!r} is not valid; write all-linear or a list of module names such as [q_proj, v_proj]")


def _betas(betas: tuple[float, float]) -> tuple[float, float]:
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"{list(betas)} is not valid; both must be in [0, 1)")
    return betas


Targets = Annotated[str | tuple[str, ...], BeforeValidator(_targets)]
Betas = Annotated[tuple[float, float], Field(strict=False), AfterValidator(_betas)]


class LoraConfig(Section):
    """The adapter that is trained."""

    rank: int = Field(default=16, ge=1, le=4096)
    """Rank of the two matrices."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale: the update is multiplied by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter's input while training."""
    targets: Targets = "all-linear"
    """`all-linear`, or the names of the modules to adapt."""


class TrainConfig(Section):
    """The optimizer (AdamW) and how the batch goes through the model."""

    steps: int = Field(default=100, ge=1)
    """Rollout batches to train on."""
    learning_rate: float = Field(default=1e-4, ge=0, le=1)
    """Peak learning rate; 0 changes nothing, as a control."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after warm-up: constant, or falling to 0, which it would reach just after the last step."""
    warmup_steps: int = Field(default_factory=lambda values: min(5, values.get("steps", 5)), ge=0)
    """Steps in which the learning rate rises from 0; the default is 5, or `steps` where that is less."""
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """AdamW's decoupled weight decay."""
    betas: Betas = (0.9, 0.999)
    """AdamW's decay rates of the two moments."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient is scaled down to this norm."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps on each rollout batch."""
    micro_tokens: int = Field(default=8192, ge=1)
    """Tokens in one forward and backward pass."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    lora: LoraConfig | None = LoraConfig()
    """null trains all parameters."""

    @model_validator(mode="after")
    def _fits(self) -> TrainConfig:
        if self.warmup_steps > self.steps:
            message = f"{self.warmup_steps} warm-up steps do not fit into train.steps = {self.steps}"
            raise conflict("warmup_steps", message)
        return self


class AdaptersConfig(Section):
    """The versions that training publishes."""

    keep: int = Field(default=3, ge=1)
    """Newest versions kept on disk, besides the evaluated, the active and the final ones."""


class TrackingConfig(Section):
    """Where metrics go besides `metrics.jsonl`, which is always written."""

    tensorboard: bool = False
    """Write TensorBoard event files into the run directory."""
    wandb: Text | None = None
    """Weights & Biases project."""
    trackio: Text | None = None
    """Trackio project."""
    mlflow: Text | None = None
    """MLflow experiment."""


class RunConfig(Section):
    """One training run. Instances are immutable; `load_config` and `parse_config` make them."""

    name: AdapterName = "run"
    """The run's name, and the adapter's: letters, digits, `.`, `_` and `-`; not "base"."""
    model: Text = "starter"
    """`starter` (the model in the package), a Hugging Face name, or a directory (relative to where you are)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto` is float32 on a CPU and bfloat16 on a GPU."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")] = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Fixes initialisation, the order of prompts and every draw."""
    output_dir: Text = "runs"
    """The run directory is `output_dir/name-<UTC time>` (relative to where you are) ..."""
    run_dir: Text | None = None
    """... unless it is named here."""
    folder: Annotated[Path, Field(strict=False)] = Path(".")
    """Where `data.source` and the modules of functions are looked up first; the default is the config file's folder."""
    data: DataConfig
    """The prompts to train on."""
    eval: EvalConfig | None = None
    """null does not evaluate."""
    rewards: Annotated[tuple[Annotated[RewardConfig, BeforeValidator(_reward)], ...], Field(strict=False, min_length=1)]
    """The reward functions; a completion's reward is their weighted sum."""
    rollout: RolloutConfig = RolloutConfig()
    """How completions are sampled."""
    algo: AlgoConfig = AlgoConfig()
    """Advantages and the policy loss."""
    train: TrainConfig = TrainConfig()
    """The optimizer."""
    adapters: AdaptersConfig = AdaptersConfig()
    """The versions that training publishes."""
    tracking: TrackingConfig = TrackingConfig()
    """Where metrics go."""

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        prompts, minibatches = self.rollout.prompts_per_step, self.train.minibatches
        if prompts % minibatches:
            message = f"{minibatches} minibatches cannot share rollout.prompts_per_step = {prompts} prompts evenly"
            raise conflict("train", "minibatches", message)
        if not any(reward.weight for reward in self.rewards):
            raise conflict("rewards", "every weight is 0, so there is nothing to train for; give one a weight")
        return self

    def run_path(self, *, now: datetime) -> Path:
        """The run directory: `run_dir`, or `output_dir/name-20250131T120000Z` for the UTC time `now`."""
        return Path(self.run_dir or f"{self.output_dir}/{self.name}-{now:%Y%m%dT%H%M%SZ}")


def conflict(*keys_and_message: str) -> ValidationError:
    """An error of a model validator that points at one of its keys: pydantic passes on the location of this kind."""
    *keys, message = keys_and_message
    kind = PydanticCustomError("conflict", "{message}", {"message": message})
    return ValidationError.from_exception_data("conflict", [InitErrorDetails(type=kind, loc=tuple(keys), input=None)])


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, apply overrides such as `train.steps=10` or `rewards[0].weight=0.5`, and check everything.

    Raises ConfigError with every problem: key, file and line, value, what is valid.
    """
    document = Document.read(path)
    for text in overrides:
        document.override(text, shorthand={"rewards": "function"})
    folder = document.data.get("folder", ".")
    if isinstance(folder, str):
        document.data["folder"] = str((Path(path).parent / folder).resolve())
    return validate(document, RunConfig, other_names=OTHER_NAMES)


def parse_config(data: Mapping[str, Any]) -> RunConfig:
    """The same checks and errors for a mapping made in Python."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"the configuration is a {type(data).__name__}; it must be a mapping")
    return validate(Document(dict(data)), RunConfig, other_names=OTHER_NAMES)


def dump_resolved(config: RunConfig) -> str:
    """YAML with every effective value, headed by the sizes that follow from them."""
    rollout = config.rollout
    completions = rollout.prompts_per_step * rollout.group_size
    sizes = f"{rollout.prompts_per_step} prompts x {rollout.group_size} = {completions} completions a step"
    head = f"# {sizes}, at most {completions * rollout.max_tokens} completion tokens\n"
    values = config.model_dump(mode="json") | {"folder": str(config.folder.resolve())}
    return head + to_yaml(values)
