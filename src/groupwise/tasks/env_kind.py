"""The protocol of what plays the episodes of a run: a kind of environment is loaded, checked and opened through it.

    env.environment    a class with reset and step (`env_loading.EnvFactory`), or one whose contract a package knows
    env.agent          a program with an OpenAI client (`agents.Agent`), or a class that is an `EnvKind` itself
    env.harness        a command in a workspace (`harness.load_harness`)

A run's plan and its parts ask an `EnvKind` for what they need and never which one it is. A package adds kinds in three
ways: a class that extends `EnvKind`, named by `env.agent`; a name, as in `textarena:Wordle-v0`, by an entry point of
the group `groupwise.environments`; a contract of classes, by one of the group `groupwise.environment_contracts`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from groupwise.errors import ConfigError
from groupwise.types import Prompt, Rollout, SamplingParams

if TYPE_CHECKING:
    from groupwise.config.run import EnvConfig
    from groupwise.model.load import LoadedModel
    from groupwise.sampler import Sampler
    from groupwise.tasks.check.opening import CheckRequest
    from groupwise.tasks.check.play import Opened
    from groupwise.tasks.env_loading import EnvFactory
    from groupwise.tasks.rollout_sources import Environments, RolloutSource


@dataclass(frozen=True, kw_only=True)
class PlayParts:
    """The parts with which episodes are played.

    Args:
        run: training's sampling parameters.
        scored: reward functions score the episodes too.
        recorded: the engine records which tokens were left to draw from.
        envs: the result of `open_envs`.
    """

    engine: Sampler
    base: LoadedModel
    config: EnvConfig
    run: SamplingParams
    scored: bool
    recorded: bool
    envs: Environments | None


class EnvKind:
    """Plays the episodes of a run with environments of one kind, and provides its prompts before the model is loaded.

    Attributes:
        name: the kind's name in messages.
        players: the players of its episodes, if there are several (`self_play`).
        columns: names of the `Rollout.columns` that it adds for reward functions; None: known after the first episode.
        makes_prompts: it makes the prompts itself, so that a run has no `data`.
        takes_cases: a row of data needs no prompt, because the environment makes the policy's prompts.
        own_texts: it also generates texts other than answers, which cannot be constrained (`rollout.grammar`).
        in_workers: its environments can run in other processes (`open_envs`).
        case_methods: the names of the methods that make its cases, for messages: of training, of evaluation.
        needs_model: `groupwise env check` plays it with a loaded model, even if scripts answer.
    """

    name: str
    players: tuple[str, ...] = ()
    columns: tuple[str, ...] | None = ()
    makes_prompts = False
    takes_cases = True
    own_texts = False
    in_workers = False
    case_methods = ("cases(self)", "eval_cases(self)")
    needs_model = False

    def configured(self, config: EnvConfig) -> EnvKind:
        """Return the kind under this configuration. Raises ConfigError for keys that would do nothing."""
        return self

    def cases(self, *, held_out: bool = False) -> list[Prompt] | None:
        """Return its own prompts, of training or of evaluation; None where it makes none. Raises DataError, EnvError,
        ConfigError."""
        return None

    def check(self, prompts: Sequence[Prompt], source: str) -> list[Prompt]:
        """Return the prompts of a run's data as it plays them. Raises ConfigError or DataError for one that it
        cannot."""
        return list(prompts)

    def on_scored(self, rollout: Rollout) -> None:
        """Take note that the reward functions have seen a rollout."""

    def open_envs(self, config: EnvConfig, folder: Path) -> Environments | None:
        """Start what makes the environments of episodes; None where there are none to make."""
        return None

    def open_play(self, parts: PlayParts) -> RolloutSource:
        """Return how prompts become groups. Raises ConfigError."""
        raise NotImplementedError(f"{type(self).__name__} does not say how its episodes are played")

    def open_check(self, wanted: CheckRequest, base: LoadedModel | None, say: Callable[[str], None]) -> Opened:
        """Return the environment for `groupwise env check`. Raises ConfigError if it cannot play episodes one by
        one."""
        hint = "try it in a short run: groupwise run CONFIG train.steps=2"
        raise ConfigError(f"env check plays episodes, and {self.name} plays whole batches", hint=hint)


@dataclass(frozen=True, kw_only=True)
class EnvContract:
    """A contract of environment classes other than reset and step.

    Args:
        recognises: whether a class keeps it.
        load: (factory, configuration of the environment, name of the model) -> the kind. Raises ConfigError.
        methods: the methods of such a class, for messages.
    """

    recognises: Callable[[type], bool]
    load: Callable[[EnvFactory, EnvConfig, str], EnvKind]
    methods: str = ""


def warn(message: str) -> None:
    """Say it as a warning."""
    warnings.warn(message, stacklevel=3)
