"""What the learner reads of a configuration: advantages and the loss, the optimizer, the adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from groupwise.section import Section, Text, conflict

ALL_LINEAR = "all-linear"


ADVANTAGE_EPS = 1e-4


def _published_advantage(given: Mapping[str, Any]) -> Literal["group_std", "mean"]:
    """Dr. GRPO is a loss and a mean without a deviation (arXiv 2503.20783); GDPO has scales of its own."""
    mean = given.get("policy_loss") == "dr_grpo" and given.get("aggregation") != "normalize_then_sum"
    return "mean" if mean else "group_std"


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
    aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Several rewards: add them and normalise the sum, or normalise each and add (GDPO)."""
    advantage: Literal["group_std", "mean", "batch_std", "leave_one_out"] = Field(default_factory=_published_advantage)
    """Baseline and scale of the rewards in a group; the default is group_std, and mean with dr_grpo."""
    advantage_eps: float = Field(default=ADVANTAGE_EPS, gt=0, le=1)
    """Added to the standard deviation that `group_std` and `batch_std` divide by."""

    def loss_overrides(self) -> dict[str, Any]:
        """The loss options that are not null, for `resolve_loss(policy_loss, **overrides)`."""
        names = AlgoConfig.model_fields.keys() - {"policy_loss", "advantage", "advantage_eps", "aggregation"}
        return {name: value for name, value in self if name in names and value is not None}

    @model_validator(mode="after")
    def _acts(self) -> AlgoConfig:
        if self.advantage_eps != ADVANTAGE_EPS and self.advantage in ("mean", "leave_one_out"):
            message = f"{self.advantage_eps} does not act with advantage {self.advantage!r}, which divides by nothing"
            raise conflict("advantage_eps", message)
        if self.aggregation == "normalize_then_sum" and self.advantage != "group_std":
            message = f"{self.advantage!r} does not act with aggregation normalize_then_sum, which has its own scales"
            raise conflict("advantage", message)
        return self


class RunAlgoConfig(AlgoConfig):
    """What a run can do besides: it has a policy to compare with and completions that it cut itself."""

    kl_in: Literal["loss", "reward"] = "loss"
    """Where the divergence acts: a term of the loss, or taken off the reward before advantages."""
    kl_target: float | None = Field(default=None, gt=0)
    """Nats per token that the weight is adapted to (arXiv 1909.08593); null keeps it."""
    kl_horizon: float = Field(default=10.0, ge=1)
    """How slowly it adapts: the weight changes by at most 0.2 / kl_horizon of itself in a step."""
    reference: Literal["base", "start", "ema", "refresh"] = "base"
    """The policy that the divergence is taken from: the base model, the adapter that the run starts from, an average
    of the policy, or the policy as it was every so many steps."""
    reference_decay: float = Field(default=0.99, ge=0, lt=1)
    """Decay of the average, per step."""
    reference_every: int = Field(default=64, ge=1)
    """Steps between refreshes."""
    mask_truncated: bool = False
    """Leave completions that were cut at their longest out of the loss, of an episode all turns: if one was cut, or
    there was no room for another. Their rewards count in the group as before."""

    @model_validator(mode="after")
    def _acts_in_a_run(self) -> RunAlgoConfig:
        if self.kl in (None, "none"):
            for key in ("kl_in", "kl_target", "reference"):
                self._refuse(key, "acts with a KL term only: set kl (to k3, say) and kl_coeff")
        if self.kl_in == "reward" and (self.kl != "k1" or not self.kl_coeff):
            message = f"the reward takes kl k1 with a kl_coeff above 0; they are {self.kl} and {self.kl_coeff}"
            raise conflict("kl_in", f"{message}: the gradient of another estimator would be wrong there")
        if self.kl_target is None:
            self._refuse("kl_horizon", "acts with kl_target only")
        if self.reference != "ema":
            self._refuse("reference_decay", "acts with reference ema only")
        if self.reference != "refresh":
            self._refuse("reference_every", "acts with reference refresh only")
        return self

    def _refuse(self, key: str, why: str) -> None:
        if (value := getattr(self, key)) != type(self).model_fields[key].default:
            raise conflict(key, f"{value!r} {why}")


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


MAX_ALPHA = 1e6  # in practice it is a few times the rank; far beyond that float32 overflows


class LoraConfig(Section):
    """The adapter that is trained."""

    rank: int = Field(default=16, ge=1, le=4096)
    """Rank of the two matrices."""
    alpha: float = Field(default=32.0, gt=0, le=MAX_ALPHA)
    """Scale: the update is multiplied by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter's input while training."""
    targets: Targets = "all-linear"
    """Names of linear modules to adapt, or `all-linear`: the projections of attention and of dense MLPs, shared experts
    included; no router, no routed expert, not the LM head."""


class TrainConfig(Section):
    """The optimizer (AdamW) and how the batch goes through the model."""

    steps: int = Field(default=100, ge=1)
    """Rollout batches to train on."""
    learning_rate: float = Field(default=1e-4, ge=0, le=1)
    """Peak learning rate; 0 changes nothing, as a control."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """The learning rate after warm-up: constant, falling, or (wsd) constant and falling in the last `decay_steps`. What
    it falls to it would reach just after the last step."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Steps of wsd's fall; null is a fifth of the run."""
    final_rate: float = Field(default=0.0, ge=0, lt=1)
    """What the learning rate falls to, as a share of its peak."""
    warmup_steps: int = Field(default_factory=lambda values: min(5, values.get("steps", 5)), ge=0)
    """Steps in which the learning rate rises from 0; the default is 5, or `steps` where that is less."""
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """AdamW's decoupled weight decay."""
    betas: Betas = (0.9, 0.999)
    """AdamW's decay rates of the two moments."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient is scaled down to this norm."""
    minibatches: int = Field(default=1, ge=1)
    """Parts of each rollout batch, each with an optimizer step."""
    passes: int = Field(default=1, ge=1, le=64)
    """Times that each rollout batch is gone over."""
    micro_tokens: int = Field(default=8192, ge=1)
    """Tokens in one forward and backward pass, at most."""
    memory_gb: float | None = Field(default=None, gt=0)
    """GiB that the whole run may take: passes get as few tokens as that needs, by an estimate of the worst batch; null
    takes `micro_tokens`."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    attention: Literal["merged", "flex"] = "merged"
    """How training computes attention over packed rows: merged, by matrix products over padded grids, on any device;
    flex, by FlexAttention's compiled kernels, on a CUDA GPU. Where flex cannot be used, a warning says why, and merged
    is: the results are the same."""
    lora: LoraConfig | None = LoraConfig()
    """null trains all parameters."""
    devices: int | None = Field(default=None, ge=1, le=65536)
    """Processes that train together, each with a GPU where there are any (docs/scale.md); null is as many as were
    started, which is one without `groupwise launch`."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """What each of several processes has: all weights and a share of the batch, or also a share of the weights only."""
    cpu_offload: bool = False
    """With fsdp on GPUs: weights are in the CPU's memory and visit the GPU layer by layer."""
    deadline_s: float = Field(default=600.0, gt=0)
    """Seconds that processes wait for one another before the run ends with an error that says for whom."""

    @model_validator(mode="after")
    def _fits(self) -> TrainConfig:
        if self.warmup_steps > self.steps:
            message = f"{self.warmup_steps} warm-up steps do not fit into train.steps = {self.steps}"
            raise conflict("warmup_steps", message)
        if self.schedule == "constant" and self.final_rate:
            raise conflict("final_rate", f"{self.final_rate} does not act with schedule constant, which does not fall")
        if self.decay_steps is not None and self.schedule != "wsd":
            raise conflict("decay_steps", f"{self.decay_steps} acts with schedule wsd only, not {self.schedule}")
        if self.decay_steps is not None and self.warmup_steps + self.decay_steps > self.steps:
            message = f"{self.warmup_steps} warm-up and {self.decay_steps} decay steps do not fit into {self.steps}"
            raise conflict("decay_steps", message)
        if self.cpu_offload and self.parallel != "fsdp":
            raise conflict("cpu_offload", f"acts with parallel fsdp only, not {self.parallel}")
        return self


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """Which adapter to train. `targets` are names of linear modules, or "all-linear" (`model.adapted_modules`)."""

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: str | Sequence[str] = ALL_LINEAR
