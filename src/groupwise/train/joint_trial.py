"""Tries whether joint passes over a base model compute the same bytes as its learners alone, before the first of them.

Whether they do depends on how this processor's library multiplies: a product of this many rows and columns must be the
same sum wherever its rows lie in memory, and the products of a batch the same whatever their number. The trial compares
both ways on the machine that trains, with adapters of two ranks over micro-batches of equal and of other shapes,
forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from groupwise.config.lora import LoraSpec
from groupwise.model.load import LoadedModel, share_weights
from groupwise.model.packing import micro_batches
from groupwise.train.forward import packed_logprobs
from groupwise.train.joint_pass import Seat, joint_gradients, joint_logprobs
from groupwise.train.lora import add_lora
from groupwise.types import Sample

SHAPES = ((7, (6, 3)), (7, (6, 5)), (12, (9, 1, 4)))  # tokens of a prompt and its completions, of each micro-batch

RANKS = (4, 16, 4)


def why_not_as_alone(base: LoadedModel) -> str | None:
    """Return the differences between a joint pass and the same passes alone; None without any."""
    seats = [_seat(base, number) for number in range(len(SHAPES))]
    with torch.no_grad():
        together, alone = joint_logprobs(seats), [packed_logprobs(seat.model, seat.batch) for seat in seats]
    if not _same([x for pair in together for x in pair], [x for pair in alone for x in pair]):
        return "log-probabilities"
    passed = joint_gradients(seats)
    for seat, found in zip(seats, passed, strict=True):
        assert found is not None
        logprobs_N, entropy_N = packed_logprobs(seat.model, seat.batch)
        expected = torch.autograd.grad(_loss(logprobs_N, entropy_N)[0], list(seat.parameters))
        if not logprobs_N.equal(found[0]) or not _same(found[2], expected):
            return "gradients"
    return None


def _seat(base: LoadedModel, number: int) -> Seat:
    """Return one of the made-up micro-batches, with an adapter neither half of which is zero."""
    model, (prompt, completions) = share_weights(base.model), SHAPES[number]
    add_lora(model, LoraSpec(rank=RANKS[number]), seed=number)
    parameters = [p for p in model.parameters() if p.requires_grad]
    draw = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in parameters:
            parameter.normal_(std=0.05, generator=draw)

    def ids(count: int) -> tuple[int, ...]:
        below = min(1000, model.config.get_text_config().vocab_size)
        return tuple(torch.randint(0, below, (count,), generator=draw).tolist())

    start = ids(prompt)
    samples = [Sample(prompt_ids=start, completion_ids=ids(n), mask=(1,) * n) for n in completions]
    (batch,) = micro_batches(samples, token_budget=1 << 12)
    return Seat(model, batch, 1.0, _loss, parameters)


def _loss(logprobs_N: Tensor, entropy_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    slopes = torch.linspace(-1, 1, len(logprobs_N), dtype=logprobs_N.dtype)
    return (logprobs_N * slopes).sum() + 0.1 * entropy_N.sum(), {}


def _same(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(a is not None and b is not None and a.equal(b) for a, b in pairs)
