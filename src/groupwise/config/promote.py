"""What a version must pass to take another's place: in a server (`gate`, `config.learn`) and in a run (`promote`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from groupwise.config.section import Section, Text, conflict


class Bounds(Section):
    """How much worse than another version one may be on the same held-out prompts, and how sure that must be."""

    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """How sure it must be that the new version is not worse by more than `margin` (paired bootstrap over prompts)."""
    margin: float = Field(default=0.02, ge=0)
    """How much lower its mean reward may be."""
    max_kl: float | None = Field(default=None, gt=0)
    """Divergence from the other version, in nats a token, on what the new one sampled; null does not measure it."""
    max_length_ratio: float | None = Field(default=2.0, gt=1)
    """How many times longer, or shorter, its completions may be on average; null does not limit it."""


class PromoteConfig(Bounds):
    """Which of a run's versions become its active one: each that is evaluated and passes."""

    against: Text = "base"
    """What it must not be worse than: `base`; `active`, the version promoted before, at first what the run starts from;
    or a version as `adapters.start` names it. The best one promoted so far is always compared with, too."""
    mode: Literal["greedy", "sampled"] = "sampled"
    """The evaluation that decides."""

    def check(self, modes: Sequence[str] | None, *, adapter: bool, engine: str) -> None:
        """Raise ValueError where a run cannot judge so: `modes` are those that it evaluates, None without evaluations;
        `adapter`: it trains one."""
        if modes is None:
            raise conflict("promote", "judges versions by their evaluations, and there are none; set eval")
        if self.mode not in modes:
            raise conflict("promote", "mode", f"{self.mode!r} is not evaluated; eval.modes is {list(modes)}")
        if not adapter:
            raise conflict("promote", "train.lora is null, so that the run stores no versions; leave it out")
        if self.max_kl is not None and engine != "local":
            message = f"{self.max_kl:g} is measured by the local engine, and engine is {engine}; leave it out"
            raise conflict("promote", "max_kl", message)
