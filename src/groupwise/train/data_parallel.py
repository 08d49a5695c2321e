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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from groupwise.algo.loss_metrics import combined
from groupwise.algo.metrics import Metrics
from groupwise.errors import ConfigError
from groupwise.model.packing import MicroBatch
from groupwise.train.context_parallel import ContextGroup, why_not_cut
from groupwise.train.forward import packed_logprobs
from groupwise.train.ranks import Ranks
from groupwise.train.shares import shares
from groupwise.train.state import restore, state_of
from groupwise.train.strategy import MaybeTensor, Rows, SingleProcess
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
        context_size: so many ranks, one after another, have the same share, and compute its rows together
            (`context_parallel`).

    Raises:
        ConfigError: the ranks do not make groups of `context_size`.
    """

    def __init__(self, ranks: Ranks, *, orders: bool = False, context_size: int = 1):
        self.ranks, self.orders, self.context = ranks, orders, None
        if ranks.size % context_size:
            raise ConfigError(
                f"train.context_parallel_size is {context_size}, and {ranks.size} processes do not make such groups",
                hint="set it to a divisor of train.devices, or to 1",
                field="train.context_parallel_size",
            )
        self.context_size = context_size
        if context_size > 1:
            group = ranks.groups_of(context_size)
            self.runs_side_by_side = False  # tokens would be exchanged in any order
            self.context = ContextGroup(rank=ranks.rank % context_size, size=context_size, group=group)
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

    def shard(self, learner: Learner) -> None:
        """Raise ConfigError where a row of the model cannot be computed by `context_size` ranks together."""
        if self.context is None:
            return
        why = why_not_cut(learner.model, self.context_size, packed=learner.packed)
        if why is None and learner.balances:
            why = "routers are trained, whose auxiliary loss is of all tokens of a micro-batch"
        if why is not None:
            raise ConfigError(
                f"train.context_parallel_size is {self.context_size}, and {why}",
                hint="change it, or leave it out and save memory by train.gradient_checkpointing: true",
                field="train.context_parallel_size",
            )

    def share(self, samples: Sequence[Sample], *, pairs: bool = False) -> Sequence[int]:
        size = self.context_size
        return shares(samples, self.ranks.size // size, pairs=pairs)[self.ranks.rank // size]

    def gathered(self, mine: Sequence[int], rows: Rows, *, total: int) -> list[tuple[float, ...]]:
        out: list[tuple[float, ...]] = [()] * total
        told = [] if self.ranks.rank % self.context_size else list(zip(mine, rows, strict=True))
        for theirs in self.ranks.gather(told, phase="log-probabilities"):
            for row, logprobs in theirs:
                out[row] = logprobs
        return out

    def combined(self, metrics: Metrics) -> Metrics:
        return combined(self.ranks.gather(metrics, phase="forward and backward")[:: self.context_size])

    def of_row(self, x: MaybeTensor, *, dim: int) -> MaybeTensor:
        if x is None or self.context is None:
            return x
        return self.context.tokens(x.movedim(dim, -1)).movedim(-1, dim)

    def forward_only(self) -> AbstractContextManager[None]:
        return nullcontext() if self.context is None else self.ranks.named("forward")

    def forward_and_backward(self) -> AbstractContextManager[None]:
        return nullcontext() if self.context is None else self.ranks.named("forward and backward")

    def logprobs(
        self, model: PreTrainedModel, batch: MicroBatch, *, temperature: float, packed: bool
    ) -> tuple[Tensor, Tensor]:
        if self.context is None:
            return super().logprobs(model, batch, temperature=temperature, packed=packed)
        return packed_logprobs(model, batch, temperature=temperature, context=self.context)

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
    """Yield buckets of adjacent parameters of one type, up to `BUCKET` values."""
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
