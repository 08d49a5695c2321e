"""Opens a three-method environment for `groupwise env check`: the same object, its methods watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from groupwise.bridges.aitraining.three_method import LegacyEnv
from groupwise.bridges.aitraining.three_method_rollouts import ThreeMethodRollouts
from groupwise.config.run import EnvConfig
from groupwise.model.load import LoadedModel
from groupwise.tasks.check.opening import CheckRequest, in_time, rows_of
from groupwise.tasks.check.play import Opened
from groupwise.tasks.check.watch import Watch
from groupwise.tasks.env_loading import EnvFactory

METHODS_AN_EPISODE = 6  # so many times a method's time for a whole episode that is one method


class WatchedLegacyEnv(LegacyEnv):
    """An environment of three methods, watched."""

    def __init__(self, watch: Watch, *args: Any, **kwargs: Any):
        self._watch = watch
        super().__init__(*args, **kwargs)

    def score(self, instance: Any, *, model: Any, completion: Any, case: Any) -> float | None:
        """See the base class."""
        score = super().score
        return self._watch.call("score_episode", score, instance, model=model, completion=completion, case=case)

    def _call(self, method: str, *args: Any) -> Any:
        return self._watch.call(method, super()._call, method, *args)


def open_watched(factory: EnvFactory, wanted: CheckRequest, base: LoadedModel, say: Callable[[str], None]) -> Opened:
    """Return the environment, watched and ready to play. Raises ConfigError, EnvError, DataError."""
    watch, notes = Watch(), list[str]()
    config = wanted.env.model_copy(
        update={
            "step_timeout_s": EnvConfig.model_fields["step_timeout_s"].default,  # its one method has the episode's
            "timeout_s": min(wanted.env.timeout_s, METHODS_AN_EPISODE * wanted.env.step_timeout_s),
        }
    )
    say("making its dataset ...")
    env: WatchedLegacyEnv = in_time(
        lambda: WatchedLegacyEnv(watch, factory, config, base.tokenizer, note=notes.append), factory.name, wanted
    )
    rows = rows_of(wanted)
    if rows is None:
        prompts = in_time(env.cases, f"{factory.name}.build_dataset", wanted)
    else:
        prompts = env.check(rows, str(wanted.data))
    assert prompts is not None
    return Opened(
        name=factory.name,
        make_play=lambda sampler: ThreeMethodRollouts(sampler, base, env, run=wanted.params, note=notes.append),
        prompts=prompts,
        tokenizer=base.tokenizer,
        context=base.context_length,
        params=wanted.params,
        calls=watch.calls,
        steps=False,
        notes=notes,
    )
