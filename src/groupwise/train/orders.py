"""Rank 0 runs the run; the other ranks do with their learner what it does with its own.

    rank 0    a strategy with `orders`: a verb is first sent to the others as an order, then done
    others    `follow`: wait for an order, do it, again, until rank 0 says that it has ended

So sampling, rewards, evaluation, the run's files and every decision are rank 0's alone and cannot differ, and the
loop does not know how many there are. Verbs are called one at a time; of those that call each other the outermost is
sent.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from groupwise.errors import TrainingError
from groupwise.model.parts import Parts
from groupwise.train.data_parallel import DataParallel, order_bytes
from groupwise.train.fully_sharded import FullySharded
from groupwise.train.ranks import Ranks

if TYPE_CHECKING:
    from groupwise.train.learner import Learner

_END = "end"


def strategy_of(
    ranks: Ranks,
    *,
    sharded: bool = False,
    cpu_offload: bool = False,
    parts: Parts | None = None,
    shard_size: int | None = None,
    context_size: int = 1,
) -> DataParallel:
    """Return this rank's strategy, for a learner that rank 0 leads. Raises ConfigError as `FullySharded`."""
    options = {"orders": ranks.leads, "context_size": context_size}
    if sharded:
        return FullySharded(ranks, cpu_offload=cpu_offload, parts=parts, shard_size=shard_size, **options)
    return DataParallel(ranks, **options)


def follow(learner: Learner) -> Any:
    """Do what rank 0 orders until it has ended; returns what `end` was given.

    Raises:
        TrainingError: rank 0 ended with an error.
        RankLostError: a rank is gone.
    """
    assert isinstance(learner.strategy, DataParallel)
    while True:
        verb, args, kwargs = pickle.loads(learner.strategy.ranks.next_order())
        if verb != _END:
            getattr(learner, verb)(*args, **kwargs)
            continue
        result, error = args
        if error is not None:
            raise TrainingError(f"rank 0 ended: {error}", hint="what it says itself is the cause")
        return result


def end(ranks: Ranks, result: object = None, *, error: BaseException | None = None) -> None:
    """End, on rank 0, the run with this result or error, and the others need not wait. Raises RankLostError."""
    ranks.send_order(order_bytes(_END, (result, None if error is None else f"{type(error).__name__}: {error}"), {}))
