"""Distributes a learner's verbs over processes: this one alone (`SingleProcess`), or several (`data_parallel`,
`fully_sharded`).

`Learner` says what the verbs do and is the same in all cases. Where processes must agree it asks its strategy: which
samples of a batch are this process's, how gradients and metrics are added up, how the norm of a gradient is taken, how
weights are cut and gathered, who writes files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from groupwise.algo.metrics import Metrics
from groupwise.model.checkpoint_tensors import TakeTensor, checkpoint_tensors
from groupwise.model.load import LoadedModel, share_weights
from groupwise.model.packing import MicroBatch
from groupwise.train.forward import packed_logprobs, plain_logprobs
from groupwise.train.state import load_state, save_state

if TYPE_CHECKING:
    from groupwise.train.learner import Learner

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)
TokenLoss = Callable[[Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]  # logprobs_N, entropy_N -> loss, metrics
Passed = tuple[Tensor, dict[str, Tensor], Sequence[Tensor | None]]  # log-probabilities, metrics, gradients
Rows = Sequence[tuple[float, ...]]  # a log-probability per completion token of each sample


def verb(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method of `Learner` that every rank must call: the strategy is told before it runs."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        learner: Any = args[0]
        with learner.strategy.announced(method.__name__, args[1:], kwargs):
            return method(*args, **kwargs)

    return call


class SingleProcess:
    """Trains in one process, which has all weights. Other strategies inherit its methods unless they override them."""

    sharded = False  # whether what is trained is cut into parts
    runs_side_by_side = True  # whether micro-batches of a small model may run in several threads

    def device(self, base: LoadedModel) -> torch.device:
        """Return the device on which the learner computes."""
        return base.device

    def tree(self, base: LoadedModel, *, all_parameters: bool) -> tuple[LoadedModel, PreTrainedModel]:
        """Return `base`, with whatever this strategy found out about it, and the model that is trained."""
        return base, share_weights(base.model)

    def tried(self, model: PreTrainedModel, why_not: Callable[[], str | None]) -> str | None:
        """Return why something cannot be had of the model where it is; None if it can. Ranks that have the model try
        each for itself."""
        return why_not()

    def agreed(self, why: str | None) -> str | None:
        """Return, amid a trial, what is wrong at any of the processes that must continue together."""
        return why

    def with_weights(self, model: PreTrainedModel, trial: Callable[[], T]) -> T:
        """Return what a trial returns that runs the model, whose weights are there meanwhile."""
        return trial()

    def as_if_whole(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """Context manager in which the model's parameters have the shapes, types and devices of whole ones, for what
        reads those alone."""
        return nullcontext()

    def shard(self, learner: Learner) -> None:
        """Cut the model into parts, before anything holds its parameters."""

    def announced(self, verb: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Announce a verb to the other processes, which then do it, too, during the block."""
        return nullcontext()

    # -- a batch -------------------------------------------------------------------------------------------------------

    def share(self, samples: Sequence[Any], *, pairs: bool = False) -> Sequence[int]:
        """Return the rows of a batch that this process computes, ascending; with `pairs`, both of each two."""
        return range(len(samples))

    def gathered(self, mine: Sequence[int], rows: Rows, *, total: int) -> list[tuple[float, ...]]:
        """Return what every process computed of its share `mine`, as that of all `total` samples."""
        return list(rows)

    def combined(self, metrics: Metrics) -> Metrics:
        """Return the sums and extremes of this process's share -> those of the batch."""
        return metrics

    def evened(self, batches: Iterator[MicroBatch], *, packed: bool) -> Iterator[MicroBatch]:
        """Return the micro-batches, and where all processes must run as many passes, empty ones besides (without
        rows)."""
        return batches

    def of_row(self, x: MaybeTensor, *, dim: int) -> MaybeTensor:
        """Return what stands for the tokens of a packed row, in this dimension, of those that this process computes."""
        return x

    def dropout_number(self, micro_batch: int) -> int:
        """Return the number on which dropout in this process's micro-batch depends, different in each process."""
        return micro_batch

    # -- forward, backward, step ---------------------------------------------------------------------------------------

    def forward_only(self) -> AbstractContextManager[None]:
        """Return the context for forward passes without a graph."""
        return nullcontext()

    def forward_and_backward(self) -> AbstractContextManager[None]:
        """Return the context for forward passes with a graph, and their backward passes."""
        return nullcontext()

    def logprobs(
        self, model: PreTrainedModel, batch: MicroBatch, *, temperature: float, packed: bool
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of the loss tokens [N]."""
        return (packed_logprobs if packed else plain_logprobs)(model, batch, temperature=temperature)

    def turn(self) -> AbstractContextManager[object]:
        """Wait for a processor on which this learner computes a micro-batch alone, and hold it for the block."""
        return nullcontext()

    def passed(self, learner: Learner, batch: MicroBatch, temperature: float, token_loss: TokenLoss) -> Passed | None:
        """Return the log-probabilities, metrics and gradients of a micro-batch that was computed with those of other
        learners; None: the learner computes it by itself."""

    def clip(self, parameters: Sequence[torch.nn.Parameter], max_norm: float) -> float:
        """Scale the gradient of the whole batch down to `max_norm`; returns its norm before."""
        return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))

    # -- weights and files ---------------------------------------------------------------------------------------------

    def check_reference(self) -> None:
        """Raise ConfigError where no copy of the model can be kept."""

    def gather_weights(self, learner: Learner) -> None:
        """Copy the trained weights into `learner.base`, in full-parameter training."""

    def stream_weights(self, learner: Learner, take: TakeTensor | None) -> None:
        """Do `Learner.stream_weights`."""
        if take is not None:
            for name, tensor in checkpoint_tensors(learner.model):
                take(name, tensor)

    def save_adapter(self, learner: Learner, directory: Path) -> None:
        """Do `Learner.save_adapter`."""
        learner.write_adapter(directory)

    def save(self, learner: Learner, directory: Path) -> None:
        """Do `Learner.save`."""
        save_state(learner, directory)

    def load(self, learner: Learner, directory: Path) -> None:
        """Do `Learner.load`."""
        load_state(learner, directory)

    def after_load_adapter(self, learner: Learner) -> None:
        """Give an adapter that only this process has read to the others."""

    def check_alike(self, learner: Learner) -> None:
        """Raise ConfigError where processes have different models or versions."""

    def spread_state(self, learner: Learner) -> None:
        """Let every process take over what rank 0 has: parameters, the optimizer's moments, counters."""
