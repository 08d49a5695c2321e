"""Shares a worker's processors among its jobs: small passes are computed together, a large one at a time.

A worker with several jobs computes with as many threads as with one, because the server answers requests at the same
time. Micro-batches that fit into joint passes (`train.together`) are computed there, as many passes at once as there
are threads. A micro-batch that does not fit has all threads in its turn, and no joint pass runs meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from groupwise.model.packing import MicroBatch, packed_tokens
from groupwise.train.together import JOIN_TOKENS, Joined, JointPasses

if TYPE_CHECKING:
    from groupwise.train.learner import Learner

PASSES = ("forward", "forward_backward", "forward_backward_supervised")  # verbs, of the samples that they get first


class JobPasses(Joined):
    """Trains a job that may share the worker with other jobs: small micro-batches in joint passes, large ones alone."""

    def __init__(self, place: JointPasses):
        super().__init__(place)
        self._joins = False  # whether its small micro-batches can be in joint passes
        self._halts = False  # whether it has the processors for itself

    def shard(self, learner: Learner) -> None:
        super().shard(learner)
        self._joins = learner.packed and self._may[learner.model]

    def announced(self, verb: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[None]:
        if verb not in PASSES:
            return super().announced(verb, args, kwargs)
        joins = self._joins and self._place.why_not is None
        return super().announced(verb, args, kwargs) if joins and _is_small(args[0]) else self._by_itself()

    @contextmanager
    def _by_itself(self) -> Iterator[None]:
        with self._place.halted():
            self._halts = True
            try:
                yield
            finally:
                self._halts = False

    def _fits(self, model: PreTrainedModel, batch: MicroBatch) -> bool:
        return not self._halts and super()._fits(model, batch)


def _is_small(samples: Sequence[Any]) -> bool:
    return packed_tokens(samples) <= JOIN_TOKENS
