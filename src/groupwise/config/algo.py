"""Advantages and the policy loss of a configuration: the keys of `algo`, of a run and of a posted job.

Equations: `algo/advantage.py`, `algo/loss.py`. What goes with what in a loss, and the presets: `config/loss.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from groupwise.config.section import Section, Text, conflict

ReferenceKind = Literal["base", "start", "ema", "refresh"]


def _published_advantage(given: Mapping[str, Any]) -> Literal["group_std", "mean"]:
    """Dr. GRPO is a loss and a mean without a deviation (arXiv 2503.20783); GDPO has its own scales."""
    mean = given.get("policy_loss") == "dr_grpo" and given.get("aggregation") != "normalize_then_sum"
    return "mean" if mean else "group_std"


class LossConfig(Section):
    """The policy loss. `policy_loss` alone is the whole published algorithm; every other loss option is
    null, which is the preset's own value, or overrides it. `groupwise.config.loss` explains and checks them."""

    policy_loss: Text = "grpo"
    """The preset: grpo, dapo, gspo, cispo, ...; in a run also a function of yours, module:function."""
    surrogate: Text | None = None
    """How ratio and advantage make the objective: clip, unclipped, cispo, dppo_tv, dppo_kl, dro, reinforce,
    sapo, vespo."""
    ratio: Text | None = None
    """The importance ratio: token, sequence."""
    anchor: Text | None = None
    """The policy that the ratio is taken against: behaviour, old."""
    clip_low: float | None = None
    """How far below 1 the ratio may go; with DPPO the divergence of a token that becomes less likely."""
    clip_high: float | None = None
    """How far above 1 the ratio may go; with DPPO the divergence of a token that becomes likelier."""
    dual_clip: float | None = None
    """Largest ratio where the advantage is negative."""
    dro_beta: float | None = None
    """Weight of half the squared log-ratio to the anchor: DRO's; with DPPO none unless given."""
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
    """The weight of the KL."""
    reduction: Text | None = None
    """How token losses become one number: token_mean, sequence_mean, prompt_mean, constant, sequence_sum, sum."""
    reduction_length: float | None = None
    """Tokens that `constant` divides by."""
    entropy_coeff: float | None = None
    """Weight of the entropy bonus."""

    def loss_overrides(self) -> dict[str, Any]:
        """Return the loss options that are not null, for `resolve_loss(policy_loss, **overrides)`."""
        names = LossConfig.model_fields.keys() - {"policy_loss"}
        return {name: value for name, value in self if name in names and value is not None}


class AdvantageConfig(Section):
    """Options of how rewards become advantages; `groupwise.algo.advantage` has the equations."""

    aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Several rewards: add them and normalise the sum, or normalise each and add (GDPO)."""
    advantage: Literal["group_std", "mean", "batch_std", "leave_one_out"] = Field(default_factory=_published_advantage)
    """Baseline and scale of the rewards in a group; the default is group_std, and mean with dr_grpo."""
    advantage_eps: float = Field(default=1e-4, gt=0, le=1)
    """Added to the standard deviation that `group_std` and `batch_std` divide by."""
    advantage_ddof: Annotated[int, Field(ge=0, le=1)] = 1
    """The number subtracted from n in that deviation's denominator: 1, the sample's deviation; 0, the population's."""

    @model_validator(mode="after")
    def _acts(self) -> AdvantageConfig:
        for key in ("advantage_eps", "advantage_ddof") if self.advantage in ("mean", "leave_one_out") else ():
            if (value := getattr(self, key)) != AdvantageConfig.model_fields[key].default:
                raise conflict(key, f"{value} does not act with advantage {self.advantage!r}, which divides by nothing")
        if self.aggregation == "normalize_then_sum" and self.advantage != "group_std":
            message = f"{self.advantage!r} does not act with aggregation normalize_then_sum, which has its own scales"
            raise conflict("advantage", message)
        return self


class AlgoConfig(AdvantageConfig, LossConfig):  # the loss's fields come first: the default of `advantage` reads them
    """Advantages and the policy loss."""


class CreditConfig(AdvantageConfig):
    """Credit inside an episode of several turns, which a run has and a posted job has not: what is posted is one turn.
    `groupwise.algo.advantage` has the equations."""

    credit: Literal["episode", "turn", "gigpo"] = "episode"
    """Credit inside an episode of several turns: each turn has the episode's advantage; or that of its own return, what
    it and later turns were given (turn); or the episode's and that of its return among turns of the group that were
    taken in the same state (gigpo)."""
    turn_discount: float | None = Field(default=None, gt=0, le=1)
    """gamma, by which a later turn's reward counts less in a turn's return; null is 1, and with gigpo 0.95."""
    turn_baseline: Literal["index", "group"] = "index"
    """With credit turn, the returns with which a turn's return is compared: those of the group's turns of the same
    number, or of all its turns."""
    step_advantage_weight: float = Field(default=1.0, gt=0)
    """With credit gigpo, the weight of the advantage among turns in the same state, relative to the episode's."""

    @property
    def gamma(self) -> float:
        """Return `turn_discount`, or its default."""
        default = 0.95 if self.credit == "gigpo" else 1.0
        return default if self.turn_discount is None else self.turn_discount

    @model_validator(mode="after")
    def _credit_acts(self) -> CreditConfig:
        for key, needed in (
            ("turn_discount", ("turn", "gigpo")),
            ("turn_baseline", ("turn",)),
            ("step_advantage_weight", ("gigpo",)),
        ):
            if (value := getattr(self, key)) != CreditConfig.model_fields[key].default and self.credit not in needed:
                raise conflict(key, f"{value!r} does not act with credit {self.credit!r}; set credit: {needed[-1]}")
        if self.credit != "episode" and self.aggregation == "normalize_then_sum":
            message = f"{self.credit!r} does not go with aggregation normalize_then_sum: a turn has one reward"
            raise conflict("credit", f"{message}; set aggregation: sum_then_normalize")
        return self


class RunAlgoConfig(CreditConfig, AlgoConfig):
    """The algorithm options that only a run has, not a job: credit of turns, the reference policy, adaptive KL, masking
    of truncated completions."""

    algorithm: Text | None = None
    """An algorithm of yours or of a package, in the place of `advantage`: its name, or module:Class."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the divergence acts: as a term of the loss, or subtracted from the reward before advantages."""
    kl_target: float | None = Field(default=None, gt=0)
    """Nats per token that the weight is adapted to (arXiv 1909.08593); null keeps it."""
    kl_horizon: float = Field(default=10.0, ge=1)
    """How slowly the weight adapts: it changes by at most 0.2 / kl_horizon of itself in a step."""
    reference: ReferenceKind = "base"
    """The policy that the divergence is taken from: the base model, the adapter that the run starts from, an average
    of the policy, or the policy as it was every so many steps."""
    reference_decay: float = Field(default=0.99, ge=0, lt=1)
    """Decay of the average, per step."""
    reference_every: int = Field(default=64, ge=1)
    """Steps between refreshes."""
    mask_truncated: bool = False
    """Leave completions that were cut at their longest out of the loss, of an episode all turns: if one was cut, or
    there was no room for another. Their rewards count in the group as before, unless `truncated_votes` is false."""
    truncated_votes: bool = True
    """With mask_truncated, whether a completion that was cut counts in its group's mean and deviation, as in TRL. With
    false only the others are compared; otherwise cut completions that are all wrong would raise every other one."""

    @model_validator(mode="after")
    def _acts_in_a_run(self) -> RunAlgoConfig:
        if self.kl in (None, "none"):
            for key in ("kl_in", "kl_target"):
                self._refuse(key, "acts with a KL term only: set kl (to k3, say) and kl_coeff")
        if self.kl_in == "reward" and (self.kl != "k1" or not self.kl_coeff):
            message = f"the reward takes kl k1 with a kl_coeff above 0; they are {self.kl} and {self.kl_coeff}"
            raise conflict("kl_in", f"{message}: the gradient of another estimator would be wrong there")
        if self.algorithm is not None:
            for key in ("credit", "aggregation", "advantage_eps", "advantage_ddof", "kl_in"):
                self._refuse(key, "does not go with algorithm, which makes the advantages itself")
            if self.advantage != _published_advantage({"policy_loss": self.policy_loss}):
                raise conflict("advantage", f"{self.advantage!r} does not act with algorithm; leave one of the two out")
        if not self.mask_truncated:
            self._refuse("truncated_votes", "acts with mask_truncated only")
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
