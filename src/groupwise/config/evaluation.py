"""The configuration's `eval` section: what a run evaluates on, when, and by which reward."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from groupwise.config.data import DatasetConfig
from groupwise.config.rewards import Rewards
from groupwise.config.section import Section, Temperature, Text, conflict

Mode = Literal["greedy", "sampled"]

EVAL_SAMPLING = ("temperature", "top_p", "max_tokens")  # keys of `eval` in the place of those of `rollout`


class EvalConfig(Section):
    """Evaluation on held-out prompts, before, during and after training."""

    data: DatasetConfig | None = None
    """The prompts; read in order, all of them or the first `limit`; an environment may have them in `eval_cases`."""
    limit: int | None = Field(default=None, ge=1)
    """Evaluate on the first of the environment's own `eval_cases` only; null is all. With `data` it is `data.limit`."""
    rewards: Rewards = ()
    """The rewards of evaluations, written as the run's `rewards`; empty is the run's. With others, the training
    reward is recorded as well, as eval/<mode>/training_reward: if that rises while these fall, the policy exploits
    the reward."""
    every: int = Field(default=25, ge=0)
    """Steps between evaluations; 0 is only before and after."""
    modes: Annotated[tuple[Mode, ...], Field(strict=False, min_length=1)] = ("greedy", "sampled")
    """`greedy` decodes at temperature 0, `sampled` as in training but for the three keys that follow."""
    temperature: Temperature | None = None
    """The temperature of mode sampled; null is `rollout.temperature`."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """The top_p of mode sampled; null is `rollout.top_p`."""
    max_tokens: int | None = Field(default=None, ge=1, le=1 << 20)
    """Longest completion in both modes, in tokens; null is `rollout.max_tokens`."""
    by: Text | None = None
    """A column of the dataset to break the means down by."""
    k: int = Field(default=1, ge=1, le=1024)
    """Completions of each prompt in mode sampled: their mean is avg@k, the share of prompts solved at all pass@k, and
    the share solved by the answer that most of them give maj@k."""
    success: float = 1.0
    """The reward from which a completion counts as solved, for pass@k and maj@k."""
    answer: Text | None = None
    """The part of a completion that votes in maj@k: `final` (the default for null), `number`, or `module:function`,
    your own function of the completion's text (docs/evaluation.md)."""
    best: Mode | Literal["loss"] | None = None
    """Keep and report the version with the best mean reward in this mode, or with kind sft and dpo and `loss` the one
    of the least loss on held-out rows; null is the last version, as is what is kept with `train.lora: null`."""
    patience: int = Field(default=0, ge=0)
    """Stop after this many evaluations without a new best; 0 never stops."""
    show: int = Field(default=4, ge=0)
    """Prompts whose completions are shown side by side at the end."""

    @field_validator("modes")
    @classmethod
    def _no_repeats(cls, modes: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(modes)) < len(modes):
            raise ValueError(f"{list(modes)} names a mode twice; name each once")
        return modes

    @model_validator(mode="after")
    def _acts(self) -> EvalConfig:
        if self.rewards and not any(reward.weight for reward in self.rewards):
            raise conflict("rewards", "every weight is 0, so evaluations would count nothing; give one a weight")
        if self.limit is not None and self.data is not None:
            raise conflict("limit", f"{self.limit} acts on an environment's own cases; set eval.data.limit")
        if self.k > 1 and "sampled" not in self.modes:
            raise conflict("k", f"{self.k} acts in mode sampled only; modes is {list(self.modes)}")
        for key in ("temperature", "top_p"):
            if (value := getattr(self, key)) is not None and "sampled" not in self.modes:
                raise conflict(key, f"{value:g} acts in mode sampled only; modes is {list(self.modes)}")
        if self.answer is not None and self.k == 1:
            raise conflict("answer", f"{self.answer!r} votes among several completions, and k is 1; raise eval.k")
        if self.best not in (None, "loss", *self.modes):
            raise conflict("best", f"{self.best!r} is not evaluated; modes is {list(self.modes)}")
        if self.patience and self.best is None:
            raise conflict("patience", f"{self.patience} needs a mode to watch: set eval.best")
        if self.patience and not self.every:
            raise conflict("patience", f"{self.patience} needs evaluations during the run: set eval.every")
        return self
