"""Data parallel: every rank trains on its share of each batch, and all make the same optimizer step (DDP).

All ranks call the same verbs with the same arguments, the whole batch, as one learner would be called. A loss divides
by counts of the whole batch, which every rank knows, so a rank's gradient is one summand of the batch's:

    grad = sum over ranks of d/dtheta sum over the rank's tokens of loss(token) / D

and the adapters of one rank and of many are the same but for rounding, whatever the shares. What is decided from
gradients (a step is refused, training stops) is decided after they were added up, and so by all ranks alike.

Every rank has all weights; with an adapter the gradients, a few megabytes, are all that travels.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor

from groupwise.algo.loss_metrics import combined
from groupwise.algo.metrics import Metrics
from groupwise.errors import ConfigError
from groupwise.train.ranks import Ranks
from groupwise.train.shares import shares
from groupwise.train.state import restore, state_of
from groupwise.train.strategy import Rows, SingleProcess
from groupwise.types import Sample

if TYPE_CHECKING:
    from groupwise.train.learner import Learner

BUCKET = 1 << 26  # gradient values that travel at once


class DataParallel(SingleProcess):
    """Every rank has all weights and computes its share of each batch; gradients are added up (DDP).

    A learner's `on_logprobs` is shown the rank's own share only. Raises RankLostError from every verb, if a rank is
    gone.

    Args:
        ranks: this process among the others.
        orders: this is rank 0 and the others `follow`: each verb is first sent to them as an order. Otherwise all ranks
            call the same verbs themselves.
    """

    def __init__(self, ranks: Ranks, *, orders: bool = False):
        self.ranks, self.orders = ranks, orders
        self._inside = False  # a verb that was sent: those that it calls are part of it
        self._turn = RLock()  # of a thread: who samples may compare with the learner while that trains

    @contextmanager
    def announced(self, verb: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        if not self.orders:
            yield
            return
        with self._turn:
            if self._inside:
                yield
                return
            self.ranks.send_order(order_bytes(verb, args, kwargs))
            self._inside = True
            try:
                yield
            finally:
                self._inside = False

    def share(self, samples: Sequence[Sample], *, pairs: bool = False) -> Sequence[int]:
        return shares(samples, self.ranks.size, pairs=pairs)[self.ranks.rank]

    def gathered(self, mine: Sequence[int], rows: Rows, *, total: int) -> list[tuple[float, ...]]:
        out: list[tuple[float, ...]] = [()] * total
        for theirs in self.ranks.gather(list(zip(mine, rows, strict=True)), phase="log-probabilities"):
            for row, logprobs in theirs:
                out[row] = logprobs
        return out

    def combined(self, metrics: Metrics) -> Metrics:
        return combined(self.ranks.gather(metrics, phase="forward and backward"))

    def dropout_number(self, micro_batch: int) -> int:
        return micro_batch * self.ranks.size + self.ranks.rank

    def clip(self, parameters: Sequence[torch.nn.Parameter], max_norm: float) -> float:
        self._sum_gradients(parameters)
        return super().clip(parameters, max_norm)

    def save_adapter(self, learner: Learner, directory: Path) -> None:
        if self.ranks.leads:
            learner.write_adapter(directory)

    def save(self, learner: Learner, directory: Path) -> None:
        if self.ranks.leads:
            super().save(learner, directory)

    def load(self, learner: Learner, directory: Path) -> None:
        """Load the state: where rank 0 sends orders it alone reads the files, and the others are given what it read."""
        super().load(learner, directory)
        if self.orders:
            learner.spread_state()

    def after_load_adapter(self, learner: Learner) -> None:
        if self.orders:
            learner.spread_state()

    def check_alike(self, learner: Learner) -> None:
        mine = {
            "the weights of the model": learner.base.hash,
            "trained tensors": [tuple(parameter.shape) for parameter in learner.parameters],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        for rank, theirs in enumerate(self.ranks.gather(mine, phase="comparing models and versions")):
            if wrong := [what for what, value in mine.items() if theirs[what] != value]:
                raise ConfigError(
                    f"rank {rank} has other {', '.join(wrong)} than rank {self.ranks.rank}",
                    hint="give all machines the same files and packages; groupwise doctor names versions",
                )

    def spread_state(self, learner: Learner) -> None:
        state = self.ranks.spread(state_of(learner) if self.ranks.leads else None, phase="spreading the state")
        if state is not None and not self.ranks.leads:
            restore(learner, *state)

    def _sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Sum the gradients: a parameter that no rank has a gradient of keeps having none."""
        has = self.ranks.gather([p.grad is not None for p in parameters], phase="gradients")
        touched = [p for p, *any_rank in zip(parameters, *has, strict=True) if any(any_rank)]
        for bucket in _buckets(touched):
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket])
            self.ranks.sum(flat, phase="gradients")
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = part.view_as(parameter)


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Adjacent parameters of one type, up to `BUCKET` values."""
    bucket: list[Tensor] = []
    for parameter in parameters:
        if bucket and (bucket[0].dtype != parameter.dtype or sum(map(Tensor.numel, [*bucket, parameter])) > BUCKET):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


def order_bytes(verb: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Return the order. Raises ConfigError for an argument that only this process has, before anyone waits for it."""
    try:
        return pickle.dumps((verb, tuple(args), dict(kwargs)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{verb} cannot be sent to the other ranks: {error}",
            hint="pass functions that a module has by name",
        ) from error
