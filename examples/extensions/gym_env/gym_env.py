"""Runs environments with Gymnasium's methods, if their observations and actions are texts.

class Lamp:
    num_cases = 100                                               train on this many seeds
    def reset(self, *, seed=None, options=None): ...              -> observation, info
    def step(self, action): ...                                   -> observation, reward, terminated, truncated, info

env: {environment: "my_envs:Lamp"}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groupwise.config.run import EnvConfig
from groupwise.tasks.env import StepResult
from groupwise.tasks.env_kind import EnvContract, EnvKind
from groupwise.tasks.env_loading import EnvFactory
from groupwise.tasks.rollout_sources import Environments
from groupwise.types import Message


class GymEpisode:
    """One episode, by the methods that a run calls."""

    def __init__(self, env: Any):
        self._env = env

    def cases(self) -> list[dict[str, Any]]:
        """Return a case for each seed of training."""
        return [{"seed": seed} for seed in range(self._env.num_cases)]

    def eval_cases(self) -> list[dict[str, Any]]:
        """Return as many seeds that no training sees."""
        return [{"seed": seed} for seed in range(self._env.num_cases, 2 * self._env.num_cases)]

    def reset(self, case: Mapping[str, Any], seed: int) -> str:
        """Begin the case; `seed` is that of the episode, and the case alone decides here."""
        observation, _ = self._env.reset(seed=case["seed"])
        return observation

    def step(self, message: Message) -> StepResult:
        """Pass on what the policy said."""
        said = str(message.get("content") or "")
        observation, reward, terminated, truncated, _ = self._env.step(said)
        heard = [Message(role="user", content=observation)]
        return StepResult(messages=heard, reward=reward, done=terminated or truncated)


class GymKind(EnvFactory):
    """Makes episodes in the run's own process: workers would load the class without its adapter."""

    in_workers = False

    def open_envs(self, config: EnvConfig, folder: Path) -> Environments:
        """Return what makes the episodes: this object."""
        return self


def load(factory: EnvFactory, config: EnvConfig, model: str) -> EnvKind:
    """Return the kind of environment for a class with Gymnasium's methods."""
    return GymKind(name=factory.name, make_one=lambda **args: GymEpisode(factory.make_one(**args)), args=factory.args)


CONTRACT = EnvContract(
    recognises=lambda made: hasattr(made, "num_cases") and hasattr(made, "reset") and hasattr(made, "step"),
    load=load,
    methods="Gymnasium's reset and step, with num_cases",
)
