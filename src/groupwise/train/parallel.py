"""Data parallel: every rank trains on its share of each batch, and all make the same optimizer step (DDP).

All ranks call the same verbs with the same arguments, the whole batch, as one learner would be called. A loss divides
by counts of the whole batch, which every rank knows, so a rank's gradient is one summand of the batch's:

    grad = sum over ranks of d/dtheta sum over the rank's tokens of loss(token) / D

and the adapters of one rank and of many are the same but for rounding, whatever the shares. What is decided from
gradients (a step is refused, training stops) is decided after they were added up, and so by all ranks alike.

Every rank has all weights; with an adapter the gradients, a few megabytes, are all that travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from groupwise.algo.loss import combined
from groupwise.algo.metrics import Metrics
from groupwise.errors import ConfigError
from groupwise.model.load import LoadedModel
from groupwise.model.packing import MicroBatch
from groupwise.train.learner import Learner, Listener, TokenLoss
from groupwise.train.learner_state import restore, state_of
from groupwise.train.ranks import Ranks
from groupwise.train.shares import shares
from groupwise.types import Sample

BUCKET = 1 << 26  # gradient values that travel at once

Term = Callable[[MicroBatch, Tensor | None], TokenLoss]


class ParallelLearner(Learner):
    """A learner that is one of several; `Learner` says what the verbs do.

    `on_logprobs` is shown the rank's own share only. Raises RankLostError from every verb, if a rank is gone.
    """

    def __init__(self, base: LoadedModel, *, ranks: Ranks, **options: Any):
        self.ranks = ranks
        super().__init__(base, **options)

    @property
    def sharded(self) -> bool:
        """Whether what is trained is cut into parts; here every rank has all of it."""
        return False

    def check_alike(self) -> None:
        """Raises ConfigError where ranks have another model or other versions."""
        mine = {
            "the weights of the model": self.base.hash,
            "trained tensors": [tuple(parameter.shape) for parameter in self.parameters],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        for rank, theirs in enumerate(self.ranks.gather(mine, phase="comparing models and versions")):
            if wrong := [what for what, value in mine.items() if theirs[what] != value]:
                raise ConfigError(
                    f"rank {rank} has other {', '.join(wrong)} than rank {self.ranks.rank}",
                    hint="give all machines the same files and packages; groupwise doctor names versions",
                )

    def forward(
        self, samples: Sequence[Sample], *, temperature: float = 1.0, reference: bool = False
    ) -> list[tuple[float, ...]]:
        mine = self._mine(samples)
        rows = super().forward([samples[row] for row in mine], temperature=temperature, reference=reference)
        out: list[tuple[float, ...]] = [()] * len(samples)
        for theirs in self.ranks.gather(list(zip(mine, rows, strict=True)), phase="log-probabilities"):
            for row, logprobs in theirs:
                out[row] = logprobs
        return out

    def save_adapter(self, directory: Path) -> None:
        if self.ranks.leads:
            super().save_adapter(directory)

    def save(self, directory: Path) -> None:
        if self.ranks.leads:
            super().save(directory)

    def spread_state(self) -> None:
        """Every rank takes over what rank 0 has: parameters, the optimizer's moments, counters."""
        state = self.ranks.spread(state_of(self) if self.ranks.leads else None, phase="spreading the state")
        if state is not None and not self.ranks.leads:
            restore(self, *state)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _mine(self, samples: Sequence[Sample]) -> list[int]:
        return shares(samples, self.ranks.size)[self.ranks.rank]

    def _accumulate(
        self,
        samples: Sequence[Sample],
        term: Term,
        temperature: float,
        *,
        reads_reference: bool = False,
        on_logprobs: Listener | None = None,
    ) -> Metrics:
        mine = self._mine(samples)

        def named(batch: MicroBatch) -> MicroBatch:
            """With its rows as those of the whole batch."""
            return replace(batch, rows=tuple(mine[row] for row in batch.rows))

        metrics = super()._accumulate(
            [samples[row] for row in mine],
            lambda batch, reference_N: term(named(batch), reference_N),
            temperature,
            reads_reference=reads_reference,
            on_logprobs=on_logprobs and (lambda batch, logprobs_N: on_logprobs(named(batch), logprobs_N)),
        )
        return combined(self.ranks.gather(metrics, phase="forward and backward"))

    def _clip(self) -> float:
        self._sum_gradients()
        return super()._clip()

    def _sum_gradients(self) -> None:
        """A parameter that no rank has a gradient of keeps having none."""
        has = self.ranks.gather([p.grad is not None for p in self.parameters], phase="gradients")
        touched = [p for p, *any_rank in zip(self.parameters, *has, strict=True) if any(any_rank)]
        for bucket in _buckets(touched):
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket])
            self.ranks.sum(flat, phase="gradients")
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = part.view_as(parameter)

    @contextmanager
    def _seeded_dropout(self, micro_batch: int) -> Iterator[None]:
        with super()._seeded_dropout(micro_batch * self.ranks.size + self.ranks.rank):
            yield


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
