"""The configuration of a training request: the `config` of a GRPO or a supervised (SFT) job.

    parse_job_config("grpo", {...})   a mapping -> GrpoJobConfig, every problem in one ConfigError
    parse_job_config("sft", {...})    a mapping -> SftJobConfig

An empty mapping is a whole request: GRPO with clip 0.2, k3 times 0.1, rank 16. What is not given and the chosen loss
does not read is null, so that a dumped configuration parses as the same one; what is given and not read is refused.
Rank, alpha and targets are null until it is known whether an adapter is continued, which then has its own.

A job of output name N continues `base_adapter`, or without one the newest version of N where there is one: rounds of
training add up. `base_adapter: base` starts fresh. No torch here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from groupwise.config.algo import AlgoConfig
from groupwise.config.lora import Alpha, Dropout, LoraSpec, Rank, Targets
from groupwise.config.loss import LossSpec, loss_of
from groupwise.config.other_names import OTHER_NAMES
from groupwise.config.run import LearningRate, OptimizerConfig, RolloutConfig, Steps
from groupwise.config.section import AdapterName, NullIsAbsent, Section, Temperature, conflict
from groupwise.config.yaml import Document, validate
from groupwise.errors import FieldError
from groupwise.types import BASE, PolicyVersion

if TYPE_CHECKING:
    from groupwise.store.adapters import AdapterStore

Kind = Literal["grpo", "sft"]

CHECKPOINT_INTERVAL = 10

MAX_TOKENS = RolloutConfig.model_fields["max_tokens"].default  # what a constant reduction divides by

# Where a job's defaults differ from a run's. A run has no KL unless it is asked for: its held-out evaluations show what
# it unlearns. A job is one of many rounds on whatever its users scored, and nothing else may be looking: by default it
# stays near the base model. Kiln, whose requests these are, has the same three.
_CLIP_EPSILON, _KL_COEFF, _KL = 0.2, 0.1, "k3"

LATEST_S = 366 * 24 * 3600  # seconds; a deadline further away than that is none

_A_DEADLINE = "give seconds from when it is posted (3600), or a time with its offset ('2030-01-31T18:00:00Z')"

_ADAPTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}(@[0-9]{1,12})?")


def _adapter(value: Any) -> Any:
    if isinstance(value, str) and not _ADAPTER.fullmatch(value):
        raise ValueError(f"{value[:80]!r} is not valid; write 'name', 'name@3' or {BASE!r}")
    return value


def _deadline(value: Any) -> Any:
    """Check a deadline: seconds, or the text of a time."""
    if isinstance(value, str):
        try:
            at = datetime.fromisoformat(value)
        except ValueError:
            raise ValueError(f"{value[:80]!r} is no time; {_A_DEADLINE}") from None
        if at.tzinfo is None:
            raise ValueError(f"{value[:80]!r} does not say of which time zone it is; {_A_DEADLINE}")
    elif value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"{str(value)[:80]} is no deadline; {_A_DEADLINE}")
    elif value is not None and not 0 < value <= LATEST_S:
        raise ValueError(f"{value} is not in (0, {LATEST_S}]; {_A_DEADLINE}")
    return value


def _targets_of(saved: Mapping[str, Any]) -> Any:
    """Return what PEFT's configuration targets: modules, and parameters of modules."""
    modules, parameters = saved.get("target_modules"), saved.get("target_parameters") or ()
    return [*(modules or ()), *parameters] if parameters and not isinstance(modules, str) else modules


def _default_kl_coeff(given: Mapping[str, Any]) -> float | None:
    wanted = given.get("policy_loss") == "grpo" if given.get("kl") is None else given["kl"] != "none"
    return _KL_COEFF if wanted else None


def _default_clip_epsilon(given: Mapping[str, Any]) -> float | None:
    mine = given.get("policy_loss") == "grpo" and given.get("surrogate") in (None, "clip")
    return _CLIP_EPSILON if mine and None in (given.get("clip_low"), given.get("clip_high")) else None


class JobAdapterOptions(Section):
    """The adapter that a job makes a version of, the job's turn in the queue, and whether its version goes live."""

    output_name: AdapterName | None = None
    """The adapter to make the next version of; null: the server makes a name up."""
    base_adapter: Annotated[str | None, BeforeValidator(_adapter)] = None
    """The adapter to continue: a version (`math@3`), a name (its newest version), or `base`: a fresh adapter. null: the
    newest version of `output_name` if there is one, else a fresh adapter."""
    auto_load: bool = True
    """Make the new version the active one."""
    weight: int = Field(default=1, ge=1, le=100)
    """The adapter's share of the training if several adapters want more than there is: this many times as many tokens
    as an adapter of weight 1 of the same tenant."""
    deadline: Annotated[float | str | None, BeforeValidator(_deadline)] = None
    """The time by which the job should end: seconds from its submission, or a time with its offset, as in
    `2030-01-31T18:00:00Z`. Until then it goes before others of the same tenant, by no more than it would get back."""


class JobConfig(NullIsAbsent, OptimizerConfig, JobAdapterOptions):  # the target's fields come first
    """The options that GRPO and SFT jobs share. null means the same as leaving a field out."""

    lora_rank: Rank | None = None
    """Rank of the adapter; null is that of the adapter that is continued, 16 for a fresh one."""
    lora_alpha: Alpha | None = None
    """Scale of the adapter, alpha / rank; null is that of the adapter that is continued, 32 for a fresh one."""
    lora_dropout: Dropout = LoraSpec().dropout
    """Dropout on the adapter's input while training."""
    target_modules: Targets | None = None
    """`all-linear` (the projections of attention and of dense MLPs), `experts` (the routed experts of a mixture),
    `vision` and `projector` (of a model that sees), or a list of these and of names of modules; null is those of the
    adapter that is continued, all-linear for a fresh one."""
    checkpoint_interval: int | None = Field(default=None, ge=1)
    """Steps between checkpoints, from which the job continues if its worker dies; null is 10."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after warm-up: constant, or falling to 0, which it would reach just after the last step."""
    warmup_steps: Steps = 0
    """Steps in which the learning rate rises from 0."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Fixes initialisation, dropout and the order of minibatches."""

    def parent(self, store: AdapterStore, *, name: str | None) -> PolicyVersion:
        """Return the version that a job of this output name would continue now; a name alone means its newest healthy
        version. Raises AdapterNotFoundError."""
        wanted = self.base_adapter or name
        if wanted in (None, BASE):
            return PolicyVersion.base()
        if (newest := store.newest(wanted)) is not None:
            return newest
        return PolicyVersion.base() if self.base_adapter is None else store.resolve(wanted)

    def effective(self, saved: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return what acts where the request says nothing, of the fields for which that can be said: those of a fresh
        adapter, or of the one that is continued, whose PEFT configuration is `saved`."""
        fresh = LoraSpec()
        own = {"r": fresh.rank, "lora_alpha": fresh.alpha, "target_modules": fresh.targets} if saved is None else saved
        found = {
            "lora_rank": own.get("r"),
            "lora_alpha": own.get("lora_alpha"),
            "target_modules": _targets_of(own),
            "checkpoint_interval": CHECKPOINT_INTERVAL,
        }
        return {name: value for name, value in found.items() if getattr(self, name) is None}

    def differences(self, saved: Mapping[str, Any]) -> list[tuple[str, object, object]]:
        """Return (field, given, the adapter's own) for each field in which the request differs from the continued
        adapter."""
        own = {"lora_rank": saved["r"], "lora_alpha": saved["lora_alpha"]}
        given = {field: getattr(self, field) for field in own}
        return [(field, given[field], own[field]) for field in own if given[field] not in (None, own[field])]


class GrpoJobConfig(AlgoConfig, JobConfig):
    """Training on groups of scored completions. `policy_loss` alone is the whole published algorithm; with `grpo`, the
    default, `clip_epsilon` is 0.2 and `kl_coeff` 0.1."""

    learning_rate: LearningRate = 1e-5
    """Peak learning rate; 0 changes nothing, as a control."""
    kl: str | None = Field(default=None, min_length=1)
    """The estimator of the divergence from the base model: k1, k2, k3, k3_unbiased; null is k3 where `kl_coeff` is
    above 0."""
    kl_coeff: float | None = Field(default_factory=_default_kl_coeff, ge=0)
    """The weight of the KL; 0 is off. The default is 0.1, and null (off) with another `policy_loss` than grpo."""
    clip_epsilon: float | None = Field(default_factory=_default_clip_epsilon, ge=0)
    """How far the ratio may go from 1: `clip_low` and `clip_high`, unless these are given. The default is 0.2, and null
    (the preset's own) with another `policy_loss` than grpo."""
    reduction_length: float | None = None
    """Tokens that `constant` (dr_grpo) divides by, whatever the job's completions have; null is 256, as in a run that
    does not set `rollout.max_tokens`."""
    iterations: int = Field(default=1, ge=1, le=10_000)
    """Passes over the groups."""
    minibatches: int = Field(default=1, ge=1, le=10_000)
    """Optimizer steps in one pass, of about as many completions each, groups whole where that is possible; at most one
    per completion."""
    temperature: Temperature | None = None
    """The one the completions were sampled at; null is what was recorded with them, else 1."""
    teacher_coefficient: float = Field(default=1.0, gt=0, le=1e6)
    """Weight of `teacher_logprobs` of completions (docs/distillation.md)."""
    router_replay: bool | None = None
    """In a mixture of experts, whether each token is trained with the experts with which it was sampled
    (docs/mixtures.md). null: if they are recorded, which the local engine does; true: always, or the job is refused;
    false: never."""

    def loss_overrides(self) -> dict[str, Any]:
        """Return the loss options, with `clip_epsilon` as the two it stands for and `kl_coeff` with its estimator."""
        overrides = super().loss_overrides()
        if self.clip_epsilon is not None:
            overrides = {"clip_low": self.clip_epsilon, "clip_high": self.clip_epsilon, **overrides}
        if self.kl_coeff == 0:
            del overrides["kl_coeff"]
        elif self.kl_coeff is not None:
            overrides.setdefault("kl", _KL)
        return overrides

    def loss(self, *, recorded: bool) -> LossSpec:
        """Return the loss of a job. `recorded`: log-probabilities come with the completions, of whatever policy sampled
        them; without any, the policy that the job starts from counts as the one that did."""
        return loss_of(self, max_tokens=MAX_TOKENS, stale=recorded, dropout=self.lora_dropout > 0, section="")

    def trains_flat(self, *, recorded: bool) -> bool:
        """Return whether groups of equal rewards are trained on too, as a KL or entropy term has a gradient there."""
        return self.loss(recorded=recorded).needs_flat(self.iterations * self.minibatches, stale=recorded)

    def effective(self, saved: Mapping[str, Any] | None) -> dict[str, Any]:
        kl = {"kl": _KL} if self.kl is None and self.kl_coeff else {}
        return super().effective(saved) | kl

    def steps(self, *, completions: int) -> int:
        """Return the optimizer steps of a job that trains on this many completions."""
        return self.iterations * min(self.minibatches, completions)

    @model_validator(mode="after")
    def _loss_acts(self) -> GrpoJobConfig:
        if self.kl_coeff == 0 and self.kl not in (None, "none"):
            raise conflict("kl", f"{self.kl!r} has no effect with kl_coeff 0; give kl_coeff, or leave kl out")
        if self.clip_epsilon is not None and None not in (self.clip_low, self.clip_high):
            raise conflict("clip_epsilon", f"{self.clip_epsilon} has no effect beside clip_low and clip_high")
        try:
            self.loss(recorded=False)
        except FieldError as error:
            raise self._in_request_terms(error) from error
        return self

    def _in_request_terms(self, error: FieldError) -> ValidationError:
        """Return an error of the loss as one of the field that the request has for it."""
        field = error.field
        if field in ("clip_low", "clip_high") and getattr(self, field) is None:
            field, error = "clip_epsilon", error.renamed("clip_epsilon")
        message = f"{error.message}; {error.hint}" if error.hint else error.message
        return conflict(field if field in type(self).model_fields else "policy_loss", message)


class SftJobConfig(JobConfig):
    """Supervised training: cross-entropy on what the mask marks, usually what the assistant says."""

    epochs: int = Field(default=3, ge=1, le=10_000)
    """Passes over the examples."""
    batch_size: int = Field(default=8, ge=1, le=65536)
    """Examples in one optimizer step."""

    def steps(self, *, examples: int) -> int:
        """Return the optimizer steps of a job with this many examples."""
        return self.epochs * math.ceil(examples / self.batch_size)


MODELS: Mapping[str, type[GrpoJobConfig] | type[SftJobConfig]] = {"grpo": GrpoJobConfig, "sft": SftJobConfig}

# What other systems, or the other kind of job, call our keys; only for "did you mean".
_JOB_NAMES = {
    **{key: ours for key, name in OTHER_NAMES.items() if (ours := name.rpartition(".")[2]) != key},
    "lora_r": "lora_rank",
    "rank": "lora_rank",
    "r": "lora_rank",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    **dict.fromkeys(("targets", "lora_targets", "lora_target_modules"), "target_modules"),
    "name": "output_name",
    "adapter_name": "output_name",
    "base_model": "base_adapter",
    "save_steps": "checkpoint_interval",
}
_LENGTHS = ("epochs", "num_epochs", "num_train_epochs", "iterations", "num_iterations", "steps", "max_steps")
_KIND_NAMES: Mapping[str, Mapping[str, str]] = {
    "grpo": dict.fromkeys(_LENGTHS, "iterations") | {"epsilon": "clip_epsilon"},
    "sft": dict.fromkeys(_LENGTHS, "epochs"),
}
JOB_OTHER_NAMES: Mapping[str, Mapping[str, str]] = {
    kind: {other: ours for other, ours in {**_JOB_NAMES, **names}.items() if ours in MODELS[kind].model_fields}
    for kind, names in _KIND_NAMES.items()
}

NOT_OF_JOBS: Mapping[str, str] = dict.fromkeys(  # keys that no job has, and why
    ("parameters", "trainable_parameters", "full_finetuning"),
    "a job makes an adapter, and target_modules says what it changes: all-linear, vision, projector, experts, or a "
    "list; all parameters are trained by groupwise run (train.lora: null) and the SDK (lora_rank=0)",
)


# ---- a run's keys in the words of a request ----
_FIELDS = {
    "train.passes": "iterations",
    "train.lora.rank": "lora_rank",
    "train.lora.alpha": "lora_alpha",
    "train.lora.dropout": "lora_dropout",
    "train.lora.targets": "target_modules",
}
SAMPLED_WITH = {  # what was said when the completions were sampled, before a job is posted
    "rollout.group_size": "n",
    "rollout.max_tokens": "max_tokens",
    "rollout.temperature": "temperature",
    "rollout.stop": "stop",
}


def job_field(key: str, kind: str) -> str | None:
    """Return the field of a job's `config` for a run's key; None where it has none.

    >>> job_field("train.passes", "grpo"), job_field("train.lora.rank", "sft"), job_field("rollout.refill", "grpo")
    ('iterations', 'lora_rank', None)
    """
    section, _, name = key.partition(".")
    field = _FIELDS.get(key, name if section in ("algo", "train") else "")
    return field if field in MODELS[kind].model_fields else None


def job_name(key: str) -> str:
    """Return a request's name of a run's key, for texts.

    >>> job_name("train.learning_rate"), job_name("rollout.max_tokens")
    ('config.learning_rate', 'max_tokens')
    """
    return SAMPLED_WITH.get(key) or f"config.{_FIELDS.get(key, key.partition('.')[2])}"


def deadline_at(deadline: float | str | None, *, posted: float) -> float | None:
    """Return a job's deadline in seconds since 1970, where it was posted then.

    >>> deadline_at(60, posted=100.0), deadline_at("1970-01-01T00:01:00Z", posted=100.0)
    (160.0, 60.0)
    """
    if isinstance(deadline, str):
        return datetime.fromisoformat(deadline).timestamp()
    return None if deadline is None else posted + deadline


def parse_job_config(kind: str, data: Mapping[str, Any]) -> GrpoJobConfig | SftJobConfig:
    """Raise ConfigError with every problem: key, value, what is valid, what was probably meant."""
    names, document = JOB_OTHER_NAMES[kind], Document(dict(data))
    return validate(document, MODELS[kind], other_names=names, elsewhere=lambda name, value: NOT_OF_JOBS.get(name, ""))
