"""Check that a model can read samples: their lengths, token ids and recorded experts.

On a GPU an id or a position out of range would end the process, not the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from groupwise.errors import ContextLengthError, DataError
from groupwise.model.image_tokens import vision_of
from groupwise.model.load import LoadedModel
from groupwise.types import Sample


def check_readable(samples: Sequence[Sample], base: LoadedModel) -> None:
    """Raise ContextLengthError or DataError for what the model cannot read, a target that is read included."""
    for sample in samples:
        length = len(sample.prompt_ids) + len(sample.completion_ids)
        if length > base.context_length:
            raise ContextLengthError(
                f"a prompt of {len(sample.prompt_ids)} tokens and a completion of {len(sample.completion_ids)} do not "
                f"fit: the maximum context length is {base.context_length} tokens",
                hint="shorten the prompt or the completion",
            )
    check_ids(samples, base)
    check_routing(samples, base)


def check_routing(samples: Sequence[Sample], base: LoadedModel) -> None:
    """Raise DataError unless the experts that are recorded, where they are, can be the model's."""
    recorded = [sample.routed_experts for sample in samples if sample.routed_experts is not None]
    routing = base.routing if recorded else None
    for routed in recorded:
        if routing is None or not routing.has(routed):
            own = "no routers" if routing is None else f"{routing.layers} routers that choose {routing.chosen} "
            own += "" if routing is None else f"of {routing.experts} experts"
            raise DataError(
                f"routed_experts have {routed.shape[2]} experts of {routed.shape[1]} layers for each token, up to "
                f"number {routed.array().max(initial=-1)}; {base.name} has {own}",
                hint="train what this model sampled, or leave routed_experts out",
            )


def check_ids(samples: Sequence[Sample], base: LoadedModel) -> None:
    """Raise DataError unless the model has every token id, and every target that is read."""
    vision = vision_of(base.model)
    for sample in samples:
        ids = (*sample.prompt_ids, *sample.completion_ids)
        if (largest := max(ids if vision is None else vision.placeholders(ids))) >= base.vocabulary:
            raise DataError(f"token id {largest} is not in the vocabulary: ids go from 0 to {base.vocabulary - 1}")
        if (
            largest := max(compress(sample.targets or sample.completion_ids, sample.mask), default=0)
        ) >= base.vocabulary:
            raise DataError(f"target {largest} is not in the vocabulary: ids go from 0 to {base.vocabulary - 1}")
