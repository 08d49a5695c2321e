"""The bounds that a version must keep to take another's place: in a server (`gate`, `config.learn`) and in a run
(`promote`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, field_validator

from groupwise.config.section import Section, Text, conflict


class Bounds(Section):
    """Bounds on how much worse than another version one may be on the same held-out prompts, and how sure that is."""

    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """The confidence that the new version is not worse by more than `margin`. The rest, 5 %, is the chance that any
    version that is worse by more passes, of all that are ever judged on the same prompts."""
    margin: float = Field(default=0.02, ge=0)
    """How much lower the new version's mean reward may be. Below 3 / prompts only clearly better versions pass."""
    reward_range: Annotated[tuple[float, float], Field(strict=False)] = (0.0, 1.0)
    """The lowest and the highest reward that there can be, of all rewards together. A version with a reward outside is
    refused: how rare a loss could be overlooked depends on how large it could be."""
    max_kl: float | None = Field(default=None, gt=0)
    """Divergence from the other version, in nats a token, on what the new one sampled; null does not measure it."""
    max_length_ratio: float | None = Field(default=2.0, gt=1)
    """How many times longer, or shorter, the new version's completions may be on average; null does not limit it."""

    @field_validator("reward_range")
    @classmethod
    def _is_a_range(cls, given: tuple[float, float]) -> tuple[float, float]:
        if not (math.isfinite(given[0]) and math.isfinite(given[1]) and given[0] < given[1]):
            raise ValueError(f"{list(given)} is not a range; give the lowest and the highest reward, such as [0, 1]")
        return given

    @property
    def worst(self) -> float:
        """Return the worst difference that there can be between two rewards."""
        return self.reward_range[0] - self.reward_range[1]


class LastingBounds(Bounds):
    """Bounds of versions that follow each other: what each may differ from the one before adds up over many."""

    max_kl_total: float | None = Field(default=None, gt=0)
    """The same bound as `max_kl`, from the first version: the one from which a run starts; in a server the one that was
    active when the gate first judged, or that was since activated by hand. null does not measure it."""
    max_length_ratio_total: float | None = Field(default=4.0, gt=1)
    """The same bound as `max_length_ratio`, from that version; null does not limit it."""


class PromoteConfig(LastingBounds):
    """Promotion of a run's versions: each one that is evaluated and passes becomes the active one."""

    against: Text = "base"
    """The version with which it is compared: `base`; `active`, the version promoted before, at first the one from which
    the run starts; or a version as `adapters.start` names it. It is always compared with the best one promoted so far,
    too."""
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
        for name in ("max_kl", "max_kl_total"):
            if (most := getattr(self, name)) is not None and engine != "local":
                message = f"{most:g} is measured by the local engine, and engine is {engine}; leave it out"
                raise conflict("promote", name, message)
