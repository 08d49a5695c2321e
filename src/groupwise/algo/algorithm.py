"""The protocol of an algorithm of one's own: two hooks, from a group's rewards to what its tokens learn.

    algo: {algorithm: "my_algorithms:MaxRL"}        or the name that an installed package gives it

    advantages       the rewards of a group -> one advantage a rollout      in the place of `algo.advantage`
    token_weights    a rollout and one of its samples -> a weight a token   1 each, unless the algorithm says more

The policy loss (`algo.policy_loss`), its ratio, clipping and reduction act on what comes out as on any advantage. A
function takes the place of an algorithm that has only the first hook. A package makes an algorithm known by an entry
point of the group `groupwise.algorithms`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from groupwise.algo.advantage import Reward, differ, is_valid
from groupwise.algo.samples import segments_of
from groupwise.config.load import load_object
from groupwise.errors import ConfigError, TrainingError
from groupwise.extensions import extension, extension_names
from groupwise.types import Rollout, RolloutGroup, Sample


class Algorithm:
    """Turns the rewards of a group into what its tokens learn: advantages and per-token streams. Extend it; the loop
    calls both hooks in one thread."""

    def advantages(self, rewards: Sequence[float], rollouts: Sequence[Rollout]) -> Sequence[float]:
        """Return one advantage for each rollout.

        Args:
            rewards: two or more, finite, of which two differ; a group of equal rewards has advantages 0.
            rollouts: the scored rollouts of these samples; those that could not be scored are left out.
        """
        raise NotImplementedError

    def token_weights(self, rollout: Rollout, sample: Sample) -> Sequence[float] | None:
        """Return the factor of the rollout's advantage at each token of `sample.completion_ids`; None: 1.

        A rollout has one sample, or several where a turn does not continue from the one before.
        """
        return None


class FunctionAlgorithm(Algorithm):
    """A function `(rewards, rollouts) -> advantages`."""

    def __init__(self, function: Callable[..., Sequence[float]]):
        self._function = function

    def advantages(self, rewards: Sequence[float], rollouts: Sequence[Rollout]) -> Sequence[float]:
        """Return the function's advantages."""
        return self._function(rewards, rollouts)


def load_algorithm(name: str, *, folder: str | Path | None = None) -> Algorithm:
    """Return the algorithm of an installed package, or that `module:attribute` names: a class, made without arguments,
    an instance, or a function. Raises ConfigError, LoadError."""
    known, installed = extension_names("groupwise.algorithms"), extension("groupwise.algorithms", name)
    if installed is None and ":" not in name and "." not in name:
        listed = f"{', '.join(known)} or " if known else ""
        raise ConfigError(f"algo.algorithm {name!r} is not installed; valid: {listed}module:Class", field="algorithm")
    named: Any = load_object(name, folder=folder) if installed is None else installed
    made: Any = named() if inspect.isclass(named) else named
    return made if isinstance(made, Algorithm) else FunctionAlgorithm(made)


def group_advantages(algorithm: Algorithm, group: RolloutGroup) -> list[Reward]:
    """Return an advantage for each rollout of a group; None where it could not be scored, and for all of a group with
    fewer than two that could.

    Raises:
        TrainingError: the algorithm fails, or returns something else than one finite number a rollout.
    """
    scored = [(i, rollout) for i, rollout in enumerate(group.rollouts) if is_valid(rollout.reward)]
    result: list[Reward] = [None] * len(group.rollouts)
    if len(scored) < 2:
        return result
    rewards = [float(rollout.reward or 0.0) for _, rollout in scored]
    found = [0.0] * len(rewards)
    if differ(rewards):
        found = _called(lambda: algorithm.advantages(rewards, [rollout for _, rollout in scored]), "advantages") or []
        _check(found, len(rewards), f"{type(algorithm).__name__}.advantages", "rollouts")
    for (i, _), value in zip(scored, found, strict=True):
        result[i] = value
    return result


def with_token_weights(samples: Sequence[Sample], groups: Sequence[RolloutGroup], algorithm: Algorithm) -> list[Sample]:
    """Return the samples that `samples_of(groups)` made with the algorithm's weights of their tokens. Raises
    TrainingError."""
    owners = [
        rollout
        for group in groups
        for rollout in group.rollouts
        if rollout.advantage is not None
        for _ in segments_of(rollout.turns)
    ]
    return [_weighted(sample, rollout, algorithm) for sample, rollout in zip(samples, owners, strict=True)]


def _weighted(sample: Sample, rollout: Rollout, algorithm: Algorithm) -> Sample:
    weights = _called(lambda: algorithm.token_weights(rollout, sample), "token_weights")
    if weights is None:
        return sample
    _check(weights, len(sample.completion_ids), f"{type(algorithm).__name__}.token_weights", "tokens")
    own = sample.weights or (1.0,) * len(sample.completion_ids)
    return replace(sample, weights=tuple(a * b for a, b in zip(own, weights, strict=True)))


def _called(hook: Callable[[], Sequence[float] | None], name: str) -> list[float] | None:
    """Return the hook's numbers, or None as it does. Raises TrainingError if the hook raises or returns a value that is
    not a number."""
    try:
        values = hook()
        return None if values is None else [float(value) for value in values]
    except Exception as error:
        raise TrainingError(f"the algorithm's {name} raised {type(error).__name__}: {error}") from error


def _check(values: Sequence[float], length: int, hook: str, what: str) -> None:
    if len(values) != length:
        raise TrainingError(f"{hook} returned {len(values)} numbers for {length} {what}", hint="return one for each")
    if not all(math.isfinite(value) for value in values):
        raise TrainingError(f"{hook} returned a number that is not finite", hint="return finite numbers")
