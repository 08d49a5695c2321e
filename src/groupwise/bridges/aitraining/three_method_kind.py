"""aitraining's three-method environments as a kind of environment that runs and `env check` know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from groupwise.bridges.aitraining.three_method import LegacyEnv
from groupwise.config.run import EnvConfig
from groupwise.errors import ConfigError
from groupwise.tasks.env_kind import EnvContract, EnvKind, PlayParts
from groupwise.tasks.env_loading import EnvFactory
from groupwise.types import Prompt

if TYPE_CHECKING:
    from groupwise.model.load import LoadedModel
    from groupwise.tasks.check.opening import CheckRequest
    from groupwise.tasks.check.play import Opened
    from groupwise.tasks.rollout_sources import RolloutSource

METHODS = ("build_dataset", "score_episode")


class ThreeMethods(EnvKind):
    """A class with `build_dataset` and `score_episode`; its one instance is made when it is first needed."""

    makes_prompts = own_texts = needs_model = True
    case_methods = ("build_dataset(self, tokenizer)", "build_eval_dataset(self, tokenizer)")

    def __init__(self, factory: EnvFactory, config: EnvConfig, model: str):
        self.name = factory.name
        self._factory, self._config, self._model = factory, config, model

    @cached_property
    def env(self) -> LegacyEnv:
        """Return the environment, made with the model's tokenizer, which its dataset needs. Raises ConfigError,
        EnvError."""
        from groupwise.model.load import load_tokenizer

        return LegacyEnv(self._factory, self._config, load_tokenizer(self._model))

    def cases(self, *, held_out: bool = False) -> list[Prompt] | None:
        """See the base class."""
        return self.env.cases(held_out=held_out)

    def check(self, prompts: Sequence[Prompt], source: str) -> list[Prompt]:
        """See the base class."""
        return self.env.check(prompts, source)

    def open_play(self, parts: PlayParts) -> RolloutSource:
        """Return how prompts become groups whose episodes `score_episode` plays."""
        from groupwise.bridges.aitraining.three_method_rollouts import ThreeMethodRollouts

        return ThreeMethodRollouts(parts.engine, parts.base, self.env, run=parts.run)

    def open_check(self, wanted: CheckRequest, base: LoadedModel | None, say: Callable[[str], None]) -> Opened:
        """See the base class."""
        from groupwise.bridges.aitraining.three_method_check import open_watched

        if base is None:
            raise ConfigError(f"{self.name} is played with a model, and none is loaded")
        return open_watched(self._factory, wanted, base, say)


CONTRACT = EnvContract(
    recognises=lambda made: not hasattr(made, "step") and all(callable(getattr(made, name, None)) for name in METHODS),
    load=ThreeMethods,
    methods=" and ".join(METHODS),
)
