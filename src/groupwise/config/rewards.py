"""The reward functions of a run, and where they are run."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from groupwise.config.data import REASONING_GYM, SCORE_ANSWER
from groupwise.config.section import Name, Section, Text


class RewardConfig(Section):
    """Configures a reward function. In YAML, a plain string is `{function: <string>}`."""

    function: Text
    """`module:function`, where the module may be in the config file's folder; or `path/to/file.py:function`; or
    `reasoning-gym`, the score of its tasks."""
    weight: float = 1.0
    """The reward's factor in the sum; 0 records the reward without using it."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments passed on every call."""
    name: Name | None = None
    """The reward's name in metrics; null is the function's own."""


class ScoringConfig(Section):
    """Worker processes and time limits of reward functions."""

    workers: int = Field(default=2, ge=0, le=1024)
    """Processes that run them, killed and replaced when they hang or crash; 0 runs them in this one, unprotected."""
    timeout_s: float = Field(default=5.0, gt=0)
    """Seconds that a function may take for each completion of a group; raise it for a slow judge."""


def _reward(entry: Any) -> Any:
    entry = {"function": entry} if isinstance(entry, str) else entry
    if isinstance(entry, dict) and entry.get("function") == REASONING_GYM:
        return {"name": REASONING_GYM, **entry, "function": SCORE_ANSWER}
    return entry


Rewards = Annotated[tuple[Annotated[RewardConfig, BeforeValidator(_reward)], ...], Field(strict=False)]
