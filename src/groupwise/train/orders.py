"""Rank 0 runs the run; the other ranks do with their learner what it does with its own.

    rank 0    `Leading`: a verb is first sent to the others as an order, then done
    others    `follow`: wait for an order, do it, again, until rank 0 says that it has ended

So sampling, rewards, evaluation, the run's files and every decision are rank 0's alone and cannot differ, and the loop
does not know how many there are. Verbs are called one at a time; of those that call each other the outermost is sent.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.errors import ConfigError, TrainingError
from groupwise.model.load import LoadedModel
from groupwise.train.parallel import ParallelLearner
from groupwise.train.ranks import Ranks
from groupwise.train.shards import ShardedLearner

VERBS = (
    "check_alike",
    "forward",
    "forward_backward",
    "forward_backward_supervised",
    "forward_backward_custom",
    "step",
    "optim_step",
    "zero_grad",
    "divide_gradients",
    "end_batch",
    "keep_reference",
    "set_micro_tokens",
    "gather_weights",
    "save_adapter",
    "spread_state",
)
_END = "end"

if TYPE_CHECKING:
    _Base = ParallelLearner
else:
    _Base = object


class Leading(_Base):
    """Of rank 0's learner: sends its verbs. What is read from files is read here and spread, unless it is sharded."""

    _inside = False

    def load_adapter(self, directory: Path) -> None:
        super().load_adapter(directory)
        self.spread_state()

    def load(self, directory: Path) -> None:
        if self.sharded:
            self._order("load", directory)
        else:
            super().load(directory)
            self.spread_state()

    def save(self, directory: Path) -> None:
        if self.sharded:
            self._order("save", directory)
        else:
            super().save(directory)

    def _order(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Have it done by all, this one included."""
        method = getattr(super(), verb)
        if self._inside:
            return method(*args, **kwargs)
        self.ranks.send_order(_written(verb, args, kwargs))
        self._inside = True
        try:
            return method(*args, **kwargs)
        finally:
            self._inside = False


def _ordered(verb: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: self._order(verb, *args, **kwargs)


for _verb in VERBS:
    setattr(Leading, _verb, _ordered(_verb))


class LeadingLearner(Leading, ParallelLearner):
    """Rank 0's, where every rank has all weights."""


class LeadingShardedLearner(Leading, ShardedLearner):
    """Rank 0's, where every rank has a part of them."""


def learner_of(base: LoadedModel, *, ranks: Ranks, sharded: bool, cpu_offload: bool, **options: Any) -> ParallelLearner:
    """This rank's, which for rank 0 has made sure that the others' are alike. Raises ConfigError, RankLostError."""
    if sharded:
        options["cpu_offload"] = cpu_offload
    if not ranks.leads:
        return (ShardedLearner if sharded else ParallelLearner)(base, ranks=ranks, **options)
    learner = (LeadingShardedLearner if sharded else LeadingLearner)(base, ranks=ranks, **options)
    learner.check_alike()
    return learner


def follow(learner: ParallelLearner) -> Any:
    """Do what rank 0 orders until it has ended; returns what `end` was given.

    Raises:
        TrainingError: rank 0 ended with an error.
        RankLostError: a rank is gone.
    """
    while True:
        verb, args, kwargs = pickle.loads(learner.ranks.next_order())
        if verb != _END:
            getattr(learner, verb)(*args, **kwargs)
            continue
        result, error = args
        if error is not None:
            raise TrainingError(f"rank 0 ended: {error}", hint="what it says itself is the cause")
        return result


def end(ranks: Ranks, result: object = None, *, error: BaseException | None = None) -> None:
    """Of rank 0: the run is over, with this result or error, and the others need not wait. Raises RankLostError."""
    ranks.send_order(_written(_END, (result, None if error is None else f"{type(error).__name__}: {error}"), {}))


def _written(verb: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """The order. Raises ConfigError for an argument that only this process has, before anyone waits for it."""
    try:
        return pickle.dumps((verb, args, dict(kwargs)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{verb} cannot be sent to the other ranks: {error}",
            hint="pass functions that a module has by name, or call the verb of a ParallelLearner on every rank",
        ) from error
