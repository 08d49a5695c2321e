"""Samples -> micro-batches: packed rows with shared prompts, no padding, and the global counts that losses divide by.

Worked example. Three samples, the first two of one group (equal `prompt_ids`, adjacent):

    prompt (5, 6)  completion (7, 2)  mask (1, 1)         prompt (8,)  completion (9, 4, 2)  mask (1, 0, 1)
    prompt (5, 6)  completion (3,)    mask (1,)

    input_ids_S   5 6 8 | 7 2 | 3 | 9 4 2          each prompt once, then the completions
    positions_S   0 1 0 | 2 3 | 2 | 1 2 3          a completion continues its prompt
    source_N      1 3   | 1   | 2 7                the packed position whose hidden state predicts each loss token
    target_N      7 2   | 3   | 9 2                ... which is this one; the masked 4 has no entry at all
    row_N         0 0   | 1   | 2 2

Masked tokens are attended to and do not exist anywhere after `source_N`: no loss, statistic or count can read them.

Shapes: S packed tokens, N loss tokens, B rows (completions) of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from groupwise.algo.attention import SharedPrompts
from groupwise.types import Sample

MAX_PADDING = 4  # a micro-batch's grid of prompts and completions, as attention pads it, over its token budget


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass works on. `rows` are indices into the list of samples it was cut from."""

    samples: tuple[Sample, ...]
    rows: tuple[int, ...]
    input_ids_S: Tensor
    positions_S: Tensor
    layout: SharedPrompts
    source_N: Tensor
    target_N: Tensor
    row_N: Tensor

    def per_token(self, values_by_row: Sequence[Sequence[float] | None]) -> Tensor | None:
        """One value per completion token of each row -> those of loss tokens [N] (float64); None if one has none."""
        flat: list[float] = []
        for sample, values in zip(self.samples, values_by_row, strict=True):
            if values is None:
                return None
            flat.extend(value for value, trained in zip(values, sample.mask, strict=True) if trained)
        return torch.tensor(flat, dtype=torch.float64, device=self.row_N.device)

    def of_rows(self, values: Sequence[Sequence[float]] | None) -> Tensor | None:
        """The same of values for every sample of the list that this was cut from."""
        return None if values is None else self.per_token([values[row] for row in self.rows])

    @property
    def advantages_N(self) -> Tensor:
        """The advantage of each loss token: the sample's, times the token's weight where it has weights."""
        values = [
            [s.advantage] * len(s.mask) if s.weights is None else [s.advantage * w for w in s.weights]
            for s in self.samples
        ]
        advantages = self.per_token(values)
        assert advantages is not None
        return advantages

    @property
    def behaviour_N(self) -> Tensor | None:
        """Behaviour logprobs of the loss tokens, None unless every sample has them."""
        return self.per_token([s.behaviour_logprobs for s in self.samples])


def count_loss_tokens(samples: Sequence[Sample]) -> int:
    """Loss tokens of a batch: the denominator of token means."""
    return sum(sum(sample.mask) for sample in samples)


def count_loss_rows(samples: Sequence[Sample]) -> int:
    """Samples with loss tokens: the denominator of row means. One that is masked whole is not in the batch."""
    return sum(any(sample.mask) for sample in samples)


def groups_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Runs of adjacent samples with equal prompts."""
    return [list(group) for _, group in groupby(samples, key=lambda sample: sample.prompt_ids)]


def micro_batches(
    samples: Sequence[Sample], *, token_budget: int, device: torch.device | str = "cpu"
) -> Iterator[MicroBatch]:
    """Cut samples into packed micro-batches of at most `token_budget` tokens, a prompt shared by its completions.

    Groups (adjacent samples with equal prompts) stay together unless one alone exceeds the budget; a single sample that
    does is still one micro-batch. Groups are taken in order of length, so that attention pads little, and groups of
    very different shapes are kept apart. The result does not depend on the cut (split invariance) but for rounding.
    """
    batch: list[list[int]] = []
    used, shape = 0, (0, 0, 0)
    for group in sorted(_groups(samples, token_budget), key=lambda rows: _cost(samples, rows)):
        cost, mine = _cost(samples, group), _shape(samples, group)
        longest = tuple(map(max, shape, mine))
        padded = (len(batch) + 1) * (longest[0] + longest[1] * longest[2])
        if batch and (used + cost > token_budget or padded > MAX_PADDING * token_budget):
            yield pack(samples, batch, device=device)
            batch, used, longest = [], 0, mine
        batch.append(group)
        used, shape = used + cost, longest
    if batch:
        yield pack(samples, batch, device=device)


def pack(samples: Sequence[Sample], groups: Sequence[Sequence[int]], *, device: torch.device | str) -> MicroBatch:
    """One micro-batch of these groups of row indices; the rows of a group must have equal prompts."""
    prompts = [samples[group[0]].prompt_ids for group in groups]
    rows = [row for group in groups for row in group]
    prompt_of_row = [p for p, group in enumerate(groups) for _ in group]
    starts = [0]
    for prompt in prompts:
        starts.append(starts[-1] + len(prompt))
    ids = [token for prompt in prompts for token in prompt]
    positions = [i for prompt in prompts for i in range(len(prompt))]
    source: list[int] = []
    target: list[int] = []
    row_of: list[int] = []
    for b, (row, p) in enumerate(zip(rows, prompt_of_row, strict=True)):
        sample, begin, prompt_length = samples[row], len(ids), len(prompts[p])
        for i, (token, trained) in enumerate(zip(sample.completion_ids, sample.mask, strict=True)):
            if trained:
                source.append(begin + i - 1 if i else starts[p + 1] - 1)
                target.append(token)
                row_of.append(b)
        ids.extend(sample.completion_ids)
        positions.extend(range(prompt_length, prompt_length + len(sample.completion_ids)))
    lengths = [len(samples[row].completion_ids) for row in rows]
    tensors = (torch.tensor(x, dtype=torch.long, device=device) for x in (ids, positions, source, target, row_of))
    input_ids_S, positions_S, source_N, target_N, row_N = tensors
    return MicroBatch(
        samples=tuple(samples[row] for row in rows),
        rows=tuple(rows),
        input_ids_S=input_ids_S,
        positions_S=positions_S,
        layout=SharedPrompts([len(p) for p in prompts], lengths, prompt_of_row, device=device),
        source_N=source_N,
        target_N=target_N,
        row_N=row_N,
    )


def _groups(samples: Sequence[Sample], token_budget: int) -> Iterator[list[int]]:
    """Adjacent rows with equal prompts, cut where they exceed the budget."""
    group: list[int] = []
    used = 0
    for row, sample in enumerate(samples):
        same = group and samples[group[0]].prompt_ids == sample.prompt_ids
        if not same or used + len(sample.completion_ids) > token_budget:
            if group:
                yield group
            group, used = [], len(sample.prompt_ids)
        group.append(row)
        used += len(sample.completion_ids)
    if group:
        yield group


def _shape(samples: Sequence[Sample], group: Sequence[int]) -> tuple[int, int, int]:
    """Prompt tokens, completions, tokens of the longest completion."""
    return len(samples[group[0]].prompt_ids), len(group), max(len(samples[row].completion_ids) for row in group)


def _cost(samples: Sequence[Sample], group: Sequence[int]) -> int:
    return len(samples[group[0]].prompt_ids) + sum(len(samples[row].completion_ids) for row in group)
