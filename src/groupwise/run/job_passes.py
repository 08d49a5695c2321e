"""How the jobs of a worker share its processors: small passes together, a large one at a time.

A worker computes with as many threads as it would for one job alone, however many it trains: requests are answered
beside it. What fits into joint passes (`train.together`) is computed there, as many passes at once as there are
threads; whatever is larger has all of them for itself, in its turn, and no pass is computed meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from groupwise.model.packing import MicroBatch, packed_tokens
from groupwise.train.together import JOIN_TOKENS, Joined, JointPasses

if TYPE_CHECKING:
    from collections.abc import Iterator

LARGE_VERBS = ("forward", "forward_backward", "forward_backward_supervised")


class JobPasses(Joined):
    """The strategy of a job that may be trained beside others."""

    def __init__(self, place: JointPasses):
        super().__init__(place)
        self._halts = False

    def announced(self, verb: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[None]:
        if verb in LARGE_VERBS and packed_tokens(args[0]) > JOIN_TOKENS:
            return self._by_itself()
        return super().announced(verb, args, kwargs)

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
