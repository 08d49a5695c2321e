"""The sections by which a server learns from feedback: `learn` (automatic jobs), `gate` (which versions go live) and
`raters` (whose ratings count).

All are keys of the server's configuration, and off where they are left out:

    learn: {adapter: helper, after: 32, rewards: [my_rewards:helpful], config: {learning_rate: 1.0e-4}}
    gate: {prompts: {source: held_out.jsonl}, rewards: [my_rewards:exact], canary: 0.1}   # and shadow: {rewards: []}
    raters: {prompts: {source: known.jsonl}, rewards: [my_rewards:exact]}
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from groupwise.config.data import DatasetConfig
from groupwise.config.job import parse_job_config
from groupwise.config.promote import Bounds, LastingBounds
from groupwise.config.rewards import Rewards, ScoringConfig
from groupwise.config.section import AdapterName, Section, conflict
from groupwise.errors import ConfigError

DECIDED = ("output_name", "base_adapter", "auto_load", "temperature")  # of a job's config: by the server itself


class LearnConfig(Section):
    """Automatic jobs from feedback."""

    adapter: AdapterName
    """The adapter of which the jobs make versions."""
    after: int = Field(default=32, ge=2)
    """Ratings that have something to learn, from which a job is made: in their groups not all scores are the same."""
    rewards: Rewards = ()
    """The rewards of the further completions of a rated answer's prompt, from 0 to 1 as ratings are; a judge is one
    of them (docs/rewards.md). Without rewards, only prompts with several rated answers, and corrections, are trained
    on."""
    group_size: int = Field(default=8, ge=2, le=128)
    """Completions in a group that is not of rated answers alone."""
    max_tokens: int = Field(default=512, ge=1)
    """Longest of the completions that are sampled."""
    max_groups: int = Field(default=256, ge=1)
    """Prompts in one job, the newest feedback first."""
    max_behind: int | None = Field(default=8, ge=0)
    """The number of versions that may have gone live after the one that answered. Ratings of older answers are dropped,
    because they say little about the policy to be trained. null trains on all ratings."""
    max_share: float | None = Field(default=None, gt=0, lt=1)
    """The largest share of a job that one rater (`user`; those without one count as one rater) may have, or a phrase
    beyond its share of all requests, so that one rater cannot decide alone. Further ratings wait. null sets no
    limit."""
    proven: int | None = Field(default=None, ge=1)
    """The number of known prompts (`raters`) with which a rater must have agreed to count as a separate rater for
    `max_share`. All others count as one rater, so that ever new names get no larger part of a job than one. null counts
    each name as a rater."""
    max_jobs_per_hour: int = Field(default=4, ge=1, le=240)
    """Jobs that are made within an hour."""
    base: Literal["active", "newest"] = "active"
    """The version that a job continues: the active one, or the newest of `adapter`."""
    scoring: ScoringConfig = ScoringConfig()
    """The processes and time limits of the rewards."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Options of the jobs, as `config` of /v1/train/grpo."""

    @field_validator("config")
    @classmethod
    def _is_a_jobs(cls, config: dict[str, Any]) -> dict[str, Any]:
        for name in DECIDED:
            if name in config:
                raise ValueError(f"{name} is decided by the server for an automatic job; leave it out")
        try:
            parse_job_config("grpo", config)
        except ConfigError as error:
            raise ValueError(error.message) from error
        return config


def _fraction(value: Any) -> Any:
    """Return a share as 0.1, or "10%"."""
    if not isinstance(value, str):
        return value
    try:
        return float(value.strip().removesuffix("%")) / (100 if value.strip().endswith("%") else 1)
    except ValueError:
        raise ValueError(f"{value!r} is not valid; write a share such as 0.1 or 10%") from None


class ShadowConfig(Bounds):
    """Configures a shadow trial, before the canary or instead of it: a version that passed its gate answers some of the
    requests again after the active version has, and both answers are compared. Clients get only the active version's
    answers."""

    share: Annotated[float, BeforeValidator(_fraction)] = Field(default=0.1, gt=0, le=1)
    """The share of the requests for one completion that the active version answers; 0.1 or 10% is a tenth."""
    requests: int = Field(default=50, ge=2, le=10_000)
    """Pairs of answers on which it is decided."""
    margin: float = Field(default=0.2, ge=0)
    """How much lower the version's mean reward may be: wider than the gate's, as these answers have no seed in
    common."""
    rewards: Rewards | None = None
    """The rewards of the answers: functions that need no column but the completions, such as a judge. null is the
    gate's own; an empty list scores nothing, and only failures, length and KL are compared."""
    queue: int = Field(default=16, ge=1)
    """Requests that may wait to be answered once more; further ones are dropped."""
    max_errors: int = Field(default=5, ge=1)
    """Answers that fail under it before it can be refused for that: surely a larger share than under the active one."""
    minutes: float = Field(default=1440.0, gt=0)
    """After which it ends, though there are fewer pairs."""
    undecided: Literal["reject", "promote"] = "reject"
    """The decision about the version then; `promote` continues to the canary, if there is one."""


class CanaryConfig(Section):
    """A trial of a version that passed its gate: some of the requests are answered by it."""

    share: Annotated[float, BeforeValidator(_fraction)] = Field(default=0.1, gt=0, le=0.5)
    """The share of requests that name no adapter; 0.1 or 10% is a tenth."""
    margin: float = Field(default=0.2, gt=0, lt=1)
    """How much lower the canary's mean rating may be than that of the active version since the trial began."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """The confidence of each decision, for any number of looks: before the canary goes live, that its ratings are not
    lower by more than `margin`; before it is rolled back, that they are lower at all, or that more of its requests
    fail."""
    ratings: int | None = Field(default=None, ge=2)
    """Ratings of its answers after which the trial ends, if that is not known by then. null is as many as it takes
    until a version that is rated as the active one goes live in four of five cases; a canary says how many."""
    ratings_of_one: int | None = Field(default=None, ge=1)
    """Ratings of one rater (`user`; those without one are one) that count for each of the two versions, the first ones.
    null counts all; but what a `user` says of one version before it rates the other one is one rating, their mean."""
    max_errors: int = Field(default=5, ge=1)
    """Requests that fail under it before it can be rolled back for that."""
    minutes: float = Field(default=1440.0, gt=0)
    """After which the trial ends, though there are fewer ratings."""
    undecided: Literal["reject", "promote"] = "reject"
    """The decision about the canary if the trial ends and nothing is known."""


def _share(value: Any) -> Any:
    """Return the setting; a share alone is a canary, or a shadow, with that share."""
    return value if value is None or isinstance(value, dict | Section | bool) else {"share": value}


class RatersConfig(Section):
    """Prompts whose answers can be scored without people, by which it is seen whose ratings are worth anything."""

    prompts: DatasetConfig
    """Prompts, as `data` of a run (docs/recipe.md), with the columns that the rewards need. They must be asked as users
    ask, by your application for example, so that raters meet them."""
    rewards: Rewards
    """The rewards of answers to the known prompts, from 0 to 1: 1/2 and more is a good answer."""
    honest: float = Field(default=0.7, gt=0.5, lt=1)
    """The share of such answers that an honest rater rates as the rewards do, at least."""
    confidence: float = Field(default=0.99, gt=0.5, lt=1)
    """The confidence, for any number of looks, with which a rater must agree less often before its ratings are ignored:
    with 0.99 this happens to at most one honest rater in a hundred."""
    scoring: ScoringConfig = ScoringConfig()
    """The processes and time limits of the rewards."""

    @model_validator(mode="after")
    def _has_rewards(self) -> RatersConfig:
        if not self.rewards:
            raise conflict("rewards", "is empty; name at least one reward function")
        return self


class GateConfig(LastingBounds):
    """The gate that a version which a job made must pass before it becomes active."""

    prompts: DatasetConfig
    """Held-out prompts, as `data` of a run (docs/recipe.md). Every version that is judged looks at them, and the later
    it does the surer it has to be."""
    confirm: DatasetConfig | None = None
    """Further held-out prompts, which only versions look at that have passed on `prompts`: they are looked at less
    often, and last longer. `prompts` are then a sieve, at the full `confidence` each time, and these decide."""
    rewards: Rewards
    """The rewards of the completions."""
    max_kl_rated: float | None = Field(default=None, gt=0)
    """The same bound as `max_kl`, on the prompts with whose ratings the version was trained, where the change is
    largest and which the held-out prompts do not cover; `max_length_ratio` holds there, too. null measures it if
    `max_kl` is set, and allows any value."""
    samples: int = Field(default=1, ge=1, le=64)
    """Completions of each prompt, by the new version and by the active one."""
    temperature: float = Field(default=1.0, ge=0, le=10)
    """The temperature of the completions; 0 is greedy."""
    max_tokens: int = Field(default=256, ge=1)
    """Longest of these."""
    shadow: Annotated[ShadowConfig | None, BeforeValidator(_share)] = None
    """A trial after the gate and before the canary whose answers clients do not get, on a share of the requests, as 0.1
    or "10%" or with its options; null leaves it out."""
    canary: Annotated[CanaryConfig | None, BeforeValidator(_share)] = None
    """After the gate and the shadow, a trial on a share of the requests, as 0.1 or "10%" or with its options; null
    makes the version active at once."""
    scoring: ScoringConfig = ScoringConfig()
    """The processes and time limits of the rewards."""

    @model_validator(mode="after")
    def _has_rewards(self) -> GateConfig:
        if not self.rewards:
            raise conflict("rewards", "is empty; name at least one reward function")
        return self

    @property
    def shadowing(self) -> ShadowConfig | None:
        """Return `shadow`; where it is scored by the gate's own rewards and does not say their range, with that."""
        shadow = self.shadow
        if shadow is None or shadow.rewards is not None or "reward_range" in shadow.model_fields_set:
            return shadow
        return shadow.model_copy(update={"reward_range": self.reward_range})
