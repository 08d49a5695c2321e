"""Rollout functions of TRL (`GRPOTrainer(rollout_func=...)`, TRL 0.29 to 1.16), unchanged.

    env:
      agent: groupwise.bridges.trl.rollout_func:RolloutFunc
      args: {function: my_rollouts:rollout_func}
    data: {source: prompts.jsonl}
    rewards: [my_rollouts:reward]

    def rollout_func(prompts, trainer):
        said = trainer.generate(prompts)
        return {key: [each[key] for each in said] for key in ("prompt_ids", "completion_ids", "logprobs")}

It gets all prompts that are begun together, each as many times as it has generations, as the dataset has them: a
text, or a list of messages. It returns one entry for each (`rollout_rows`), and asks the policy through `trainer`
(`rollout_trainer`). It is called in a thread, one call at a time, as TRL does.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from groupwise.config.load import load_object
from groupwise.config.run import EnvConfig
from groupwise.errors import ConfigError
from groupwise.tasks.env_kind import EnvKind, PlayParts

if TYPE_CHECKING:
    from groupwise.tasks.rollout_sources import RolloutSource

NOT_HERE = ("max_turns", "max_tokens", "max_tool_calls", "max_characters", "concurrency")  # the function decides


class RolloutFunc(EnvKind):
    """A rollout function. Raises LoadError, and ConfigError for what cannot be called with (prompts, trainer).

    Args:
        function: `module:function`.
        folder: a folder in which the module may be; the configuration's.
    """

    columns = None  # what the function returns by its own names
    takes_cases = False
    own_texts = True

    def __init__(self, function: str, folder: str | None = None):
        self.name = function.replace(":", ".").rpartition(".")[2]
        self._function = load_object(function, folder=folder)
        if inspect.iscoroutinefunction(self._function):
            raise ConfigError(f"{function!r} is async; a rollout function is called in a thread, as TRL does")
        try:
            inspect.signature(self._function).bind([], None)
        except TypeError:
            takes = ", ".join(inspect.signature(self._function).parameters) or "nothing"
            raise ConfigError(
                f"{function!r} takes {takes}; a rollout function takes (prompts, trainer)",
                hint="args and processing_class, which TRL once gave, are trainer.args and trainer.processing_class",
            ) from None

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> Any:
        """Return what the function returns."""
        return self._function(prompts, trainer)

    def configured(self, config: EnvConfig) -> RolloutFunc:
        """See the base class."""
        for key in config.differing(NOT_HERE):
            raise ConfigError(f"env.{key} does nothing for a rollout function, which decides that itself; leave it out")
        return self

    def open_play(self, parts: PlayParts) -> RolloutSource:
        """Return how all prompts that are begun together become groups, in one call of the function."""
        from groupwise.bridges.trl.rollout_func_rollouts import RolloutFuncRollouts

        return RolloutFuncRollouts(parts.engine, parts.base, self, parts.config, run=parts.run, scored=parts.scored)
