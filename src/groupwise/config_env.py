"""The configuration's `env` section: an environment that plays the other side of an episode, or an agent that plays all
of it and asks the policy through OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from groupwise.section import Section, Text, conflict

NOT_OF_AGENTS = ("workers", "lockstep", "step_timeout_s", "stop_at_cut")  # they rule over an environment's `step`


class EnvConfig(Section):
    """Episodes of several turns: which environment or agent, and how long one may go on."""

    environment: Text | None = None
    """`module:Class`; the module may stand beside the config file. Either this ..."""
    agent: Text | None = None
    """... or `module:function` (or a class): a program that plays an episode by itself with an OpenAI client."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class or function."""
    workers: int = Field(default=2, ge=0, le=1024)
    """Processes that environments live in, many episodes in each, replaced when lost; 0: in this one, unprotected."""
    max_turns: int = Field(default=8, ge=1, le=4096)
    """Turns of the policy in an episode."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens that the policy may say in an episode; null is as many as its turns allow (`rollout.max_tokens` each)."""
    max_tool_calls: int | None = Field(default=None, ge=1)
    """Tool calls in an episode; null does not count them."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Seconds that an episode may take, sampling included."""
    step_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds that one method of the environment may take."""
    concurrency: int = Field(default=256, ge=1, le=65536)
    """Episodes played at once."""
    lockstep: bool = False
    """Sample turns in rounds, those of all episodes together: the same bytes for a seed, at the pace of the slowest."""
    train_turns: Literal["all", "first"] = "all"
    """`all` trains every turn; `first` the first one only, as three-method environments did elsewhere."""
    on_error: Literal["exclude", "zero", "stop"] = "exclude"
    """An episode in which the environment fails: left out of its group, reward 0, or the end of the run."""
    max_characters: int = Field(default=200_000, ge=1)
    """Longest message that an environment may send at once."""
    stop_at_cut: bool = True
    """A turn cut at `rollout.max_tokens` ends the episode; false passes it on as it is."""

    @model_validator(mode="after")
    def _one_player(self) -> EnvConfig:
        if (self.environment is None) == (self.agent is None):
            given = "neither" if self.agent is None else "both"
            raise conflict("environment", f"there is {given} of environment and agent; name one of them")
        if self.agent is None:
            return self
        for key in self.differing(NOT_OF_AGENTS):
            raise conflict(key, "does nothing for an agent, which decides that itself; leave it out")
        return self

    def differing(self, keys: Sequence[str]) -> list[str]:
        """Those of the keys that ask for something else than the default; `workers: 0` asks for nothing."""
        fields = type(self).model_fields
        nothing = {"workers": 0}
        return [
            key for key in keys if (value := getattr(self, key)) != fields[key].default and value != nothing.get(key)
        ]
