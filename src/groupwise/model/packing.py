"""Packs samples into micro-batches: rows with shared prefixes and no padding, with the batch counts that losses divide
by.

Worked example. Three samples, the first two of one group (equal `prompt_ids`, adjacent):

    prompt (5, 6)  completion (7, 2)  mask (1, 1)         prompt (8,)  completion (9, 4, 2)  mask (1, 0, 1)
    prompt (5, 6)  completion (3,)    mask (1,)

    input_ids_S   5 6 8 | 7 2 | 3 | 9 4 2          each prompt once, then the completions
    positions_S   0 1 0 | 2 3 | 2 | 1 2 3          a completion continues its prompt
    source_N      1 3   | 1   | 2 7                the packed position whose hidden state predicts each loss token
    target_N      7 2   | 3   | 9 2                ... which is this one; the masked 4 has no entry at all
    row_N         0 0   | 1   | 2 2

Masked tokens are attended to and do not exist anywhere after `source_N`: no loss, statistic or count can read them.
Of a sample with `targets` those stand in target_N, and its completion in input_ids_S all the same.

Samples that begin alike in more than an equal prompt, as segments of an episode whose history was rewritten do, are
packed as a prefix tree where that is worth it (`algo.prefixes`). Then a packed token may stand in the completions of
several rows, and is a loss token of each that marks it. The first two samples of above and one that forks off them:

    prompt (5, 6, 7, 4)  completion (9,)  mask (1,)

    input_ids_S   5 6 3 | 7 2 | 4 9                in the order of tokens, each line what it adds
    positions_S   0 1 2 | 2 3 | 3 4
    source_N      1 3   | 1   | 5                  rows as they came
    target_N      7 2   | 3   | 9

A model that cannot run packed gets padded rows instead (`padded_batches`): every prompt with its completion in a row of
its own, the rows of a micro-batch as wide as its longest, one after the other in `input_ids_S`.

Shapes: S packed tokens (or padded ones), N loss tokens, B rows (completions) of the micro-batch.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, groupby

import numpy as np
import torch
from torch import Tensor

from groupwise.algo.prefixes import Line, cut, families, tree_of
from groupwise.errors import ConfigError, TrainingError
from groupwise.model.attention import Layout
from groupwise.model.layouts import MERGED, Layouts
from groupwise.model.load import widest_float
from groupwise.model.transfer import on_device
from groupwise.recorded import BITMAP, DROPPED, KEPT, MaskEntry, SamplingMask, words_of
from groupwise.types import Sample

Family = tuple[list[int], list[Line] | None]  # rows, and their tree where they are packed as one

LANE_TOKENS = 128  # fewer are not worth their own thread

MAX_PADDING = 4  # a micro-batch's grid of prompts and completions, as attention pads it, over its token budget


@dataclass(frozen=True)
class Padded:
    """Instead of a layout: rows of `width` tokens each, padded on the right, for the model's own attention."""

    width: int


class KeptRanges:
    """The parts of the vocabulary that the N loss tokens of a micro-batch could be drawn from: a `SamplingMask`'s words
    with their ranges, on the host, so that what is read of them goes to the device in copies of known sizes.

    Raises:
        TrainingError: they are of another vocabulary than `vocabulary`, that of the model's LM head, when it is read.
    """

    def __init__(self, entries: Sequence[MaskEntry], vocabulary: int, device: torch.device):
        self._kinds, self._vocabulary, self._device = np.array([kind for kind, _ in entries]), vocabulary, device
        self._starts = np.array([0, *accumulate(len(words) for _, words in entries)])
        self._words = np.concatenate([words for _, words in entries]).astype("int32")

    def dropped(self, tokens: slice, vocabulary: int) -> Tensor | None:
        """Return for some of the tokens what they could not be (bools [tokens, vocabulary]); None where each could be
        anything."""
        if vocabulary != self._vocabulary:
            raise TrainingError(
                f"what was sampled is recorded as parts of {self._vocabulary} ids, and the model has {vocabulary}",
                hint="train the model that sampled, or sample with top_p 1, top_k 0 and min_p 0",
            )
        kind_n, starts = self._kinds[tokens], self._starts[tokens.start : tokens.stop + 1]
        if starts[0] == starts[-1]:
            return None
        words, row = self._words[starts[0] : starts[-1]], np.repeat(np.arange(len(kind_n)), np.diff(starts))
        listed = kind_n[row] != BITMAP
        dropped_nV = on_device(kind_n == KEPT, self._device)[:, None].repeat(1, vocabulary)
        places = (on_device(x, self._device, torch.long) for x in (row[listed], words[listed]))
        dropped_nV[tuple(places)] = on_device(kind_n[row[listed]] == DROPPED, self._device)
        if not listed.all():
            bit_32 = torch.arange(32, dtype=torch.int32, device=self._device)
            bits = (on_device(words[~listed], self._device).view(-1, words_of(vocabulary), 1) >> bit_32) & 1
            whole = on_device(np.flatnonzero(kind_n == BITMAP), self._device)
            dropped_nV[whole] = bits.flatten(1)[:, :vocabulary] == 0
        return dropped_nV


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward and backward pass. `rows` are indices into the list of samples it was cut from."""

    samples: tuple[Sample, ...]
    rows: tuple[int, ...]
    input_ids_S: Tensor
    positions_S: Tensor
    layout: Layout | Padded
    source_N: Tensor
    target_N: Tensor
    row_N: Tensor
    places: tuple[tuple[Sequence[int], ...], ...]  # for each row, where its tokens stand in input_ids_S, in parts

    @property
    def copies_S(self) -> Tensor:
        """Return for each token of a forward the number of rows in which other tokens follow it, float32 [S]: 0 for
        padding and for the last token of a row, which is only a target; more than 1 for tokens that rows share."""
        copies = torch.zeros(len(self.input_ids_S))
        for parts in self.places:
            for part in parts:
                copies[_places(part)] += 1
            last = [place for part in parts for place in part[-1:]][-1:]
            copies[last] -= 1
        if isinstance(self.layout, Padded):
            copies = copies.view(-1, self.layout.width)[:, :-1].flatten()
        return on_device(copies, self.input_ids_S.device)

    def routed_experts(self) -> Tensor | None:
        """Return the sampler's experts for the tokens that a forward runs, [layers, S, K], -1 where it is not
        recorded; None where it is for none of the rows."""
        recorded = [sample.routed_experts for sample in self.samples]
        if not (known := [each for each in recorded if each is not None]):
            return None
        chosen_SLK = torch.full((len(self.input_ids_S), *known[0].shape[1:]), -1)
        for routed, parts in zip(recorded, self.places, strict=True):
            if routed is not None:
                places = torch.cat(list(map(_places, parts)))
                mine = torch.from_numpy(routed.array().astype("int64"))
                places = places[: len(mine)]
                chosen_SLK[places] = torch.where(mine[: len(places)] < 0, chosen_SLK[places], mine[: len(places)])
        if isinstance(self.layout, Padded):
            chosen_SLK = chosen_SLK.view(-1, self.layout.width, *chosen_SLK.shape[1:])[:, :-1].flatten(0, 1)
        return on_device(chosen_SLK.transpose(0, 1).contiguous(), self.input_ids_S.device)

    def kept(self, own: Sequence[int] | None = None) -> KeptRanges | None:
        """Return what the sampler could draw for each loss token, or for the `own` ones of a process; None where that
        is the whole vocabulary for all."""
        known = {sample.kept.vocabulary for sample in self.samples if sample.kept is not None}
        if not known:
            return None
        vocabulary = min(known)
        entries: list[MaskEntry] = []
        for sample in self.samples:
            mine = sample.kept or SamplingMask.whole(vocabulary, len(sample.mask))
            entries += [entry for entry, trained in zip(mine.entries(), sample.mask, strict=True) if trained]
        entries = entries if own is None else [entries[token] for token in own]
        return KeptRanges(entries, vocabulary, self.target_N.device) if entries else None

    @cached_property
    def soft_targets(self) -> tuple[Tensor, Tensor]:
        """The soft targets of the loss tokens: ids [N, K], and log-probabilities [N, K] in the device's `widest_float`,
        -inf in places that are not filled (with an id that is there already); K is 0 where no row has any."""
        rows: list[tuple[tuple[int, float], ...]] = []
        for sample in self.samples if any(each.soft_targets for each in self.samples) else ():
            mine = sample.soft_targets or ((),) * len(sample.mask)
            rows += [targets for targets, trained in zip(mine, sample.mask, strict=True) if trained]
        width = max(map(len, rows), default=0)
        flat = [pair for targets in rows for pair in (*targets, *_unfilled(targets, width))]
        shape = len(self.row_N), width
        id_NK = torch.tensor([id for id, _ in flat], dtype=torch.long).view(shape)
        logprob_NK = torch.tensor([x for _, x in flat], dtype=widest_float(self.row_N.device)).view(shape)
        return on_device(id_NK, self.row_N.device), on_device(logprob_NK, self.row_N.device)

    def per_token(self, values_by_row: Sequence[Sequence[float] | None]) -> Tensor | None:
        """Return one value per completion token of each row -> those of loss tokens [N], in the device's
        `widest_float`; None if one has none."""
        known = [values for values in values_by_row if values is not None]
        if len(known) < len(self.samples):
            return None
        if [len(values) for values in known] != [len(sample.mask) for sample in self.samples]:
            raise ValueError("there are other numbers of values than completion tokens; give one for each")
        return on_device(_flat(known, float)[self._trained], self.row_N.device, widest_float(self.row_N.device))

    @cached_property
    def _trained(self) -> np.ndarray:
        """Return the positions of the loss tokens among the completion tokens of all rows, one row after another."""
        return _trained(self.samples)

    def per_row(self, values_B: Sequence[float]) -> Tensor:
        """Return one value per row -> those of loss tokens [N], in the device's `widest_float`."""
        return on_device(values_B, self.row_N.device, widest_float(self.row_N.device))[self.row_N]

    def of_rows(self, values: Sequence[Sequence[float]] | None) -> Tensor | None:
        """Return the same of values for every sample of the list that this was cut from."""
        return None if values is None else self.per_token([values[row] for row in self.rows])

    @property
    def advantages_N(self) -> Tensor:
        """Return the advantage of each loss token: the sample's, times the token's weight if it has weights."""
        if all(s.weights is None for s in self.samples):
            return self.per_row([s.advantage for s in self.samples])
        advantages = self.per_token([s.weights or (1.0,) * len(s.mask) for s in self.samples])
        assert advantages is not None
        return advantages * self.per_row([s.advantage for s in self.samples])

    @property
    def behaviour_N(self) -> Tensor | None:
        """Return the behaviour logprobs of the loss tokens, None unless every sample has them."""
        return self.per_token([s.behaviour_logprobs for s in self.samples])

    @property
    def behaviour_is_finite(self) -> bool:
        """Return whether all of them are, of completion tokens without loss too: the host knows it and need not
        wait."""
        known = [s.behaviour_logprobs for s in self.samples if s.behaviour_logprobs is not None]
        return bool(np.isfinite(_flat(known, float)).all())


def _places(part: Sequence[int]) -> Tensor:
    if isinstance(part, range):
        return torch.arange(part.start, part.stop)
    return torch.as_tensor(part, dtype=torch.long)


def _flat(values_by_row: Sequence[Sequence[float]], dtype: type) -> np.ndarray:
    """Return the numbers of all rows, one row's after another's."""
    return np.fromiter(chain.from_iterable(values_by_row), dtype, sum(map(len, values_by_row)))


def _trained(samples: Sequence[Sample]) -> np.ndarray:
    """Return where the masks of these rows, one after another, are not 0."""
    return np.flatnonzero(_flat([sample.mask for sample in samples], bool))


def _counted(lengths: Sequence[int]) -> np.ndarray:
    """Return 0, 1, 2, ... for each of these lengths, one after another."""
    ends = np.cumsum(lengths, dtype=int)
    return np.arange(sum(lengths)) - _repeated(ends - np.array(lengths, int), lengths)


def _repeated(values: Sequence[int] | np.ndarray, times: Sequence[int]) -> np.ndarray:
    """Return each value so many times."""
    return np.repeat(np.asarray(values, int), np.asarray(times, int))


def _unfilled(targets: Sequence[tuple[int, float]], width: int) -> list[tuple[int, float]]:
    """Return what fills a token's soft targets up to `width`; it repeats an id, so that the others stay the others."""
    return [(targets[0][0] if targets else 0, -math.inf)] * (width - len(targets))


def count_loss_tokens(samples: Sequence[Sample]) -> int:
    """Return the number of a batch's loss tokens, the denominator of token means."""
    return sum(sum(sample.mask) for sample in samples)


def packed_tokens(samples: Sequence[Sample]) -> int:
    """Return tokens of a batch, where neighbours with equal prompts share theirs."""
    prompts = [prompt for prompt, _ in groupby(sample.prompt_ids for sample in samples)]
    return sum(map(len, prompts)) + sum(len(sample.completion_ids) for sample in samples)


def count_sequences(samples: Sequence[Sample], *, by_prompt: bool = False) -> int:
    """Sequences with loss tokens: the denominator of their means. One that is masked whole is not in the batch. With
    `by_prompt`, prompts with loss tokens.

    Raises:
        ConfigError: a sample does not say which prompt it is of.
    """
    return sum(any(any(sample.mask) for sample in sequence) for sequence in _sequences(samples, by_prompt))


def sequence_lengths(samples: Sequence[Sample], *, by_prompt: bool = False) -> list[int]:
    """Return for each sample the loss tokens of its sequence: its own, and those of the other segments of its episode;
    with `by_prompt` those of all samples of its prompt."""
    return [count_loss_tokens(sequence) for sequence in _sequences(samples, by_prompt) for _ in sequence]


def _sequences(samples: Sequence[Sample], by_prompt: bool) -> Iterator[list[Sample]]:
    """Yield samples one by one, the segments of an episode together; or those of a prompt."""
    if by_prompt and any(sample.group is None for sample in samples):
        raise ConfigError(
            "reduction 'prompt_mean' averages over prompts, and these samples do not say which prompt they are of",
            hint="use sequence_mean or token_mean; runs and posted groups know their prompts",
            field="reduction",
        )
    sequence: list[Sample] = []
    for sample in samples:
        if sequence and (sample.group != sequence[0].group if by_prompt else not sample.continues):
            yield sequence
            sequence = []
        sequence.append(sample)
    if sequence:
        yield sequence


def micro_batches(
    samples: Sequence[Sample], *, token_budget: int, device: torch.device | str = "cpu", layouts: Layouts = MERGED
) -> Iterator[MicroBatch]:
    """Cut samples into packed micro-batches of at most `token_budget` tokens, each shared one counted once.

    Groups (adjacent samples with equal prompts) and trees stay together unless one alone exceeds the budget; a single
    sample that does is still one micro-batch. Groups are taken in order of length, so that attention pads little, and
    groups of very different shapes are kept apart; so are groups and trees, which are packed in different ways. The
    result does not depend on the cut (split invariance) but for rounding.
    """
    return _cut(samples, _families(samples, layouts), token_budget, device, layouts)


def side_by_side(
    samples: Sequence[Sample],
    *,
    token_budget: int,
    lanes: int,
    device: torch.device | str = "cpu",
    layouts: Layouts = MERGED,
) -> tuple[int, Iterator[MicroBatch]]:
    """Return how many micro-batches, up to `lanes`, are to be run at once, and micro-batches of like sizes that
    together stay within the budget then. Groups and trees stay whole: where one of them needs much of the budget, and
    where there is little to do, one after another is run, as `micro_batches` cuts them."""
    every = list(_families(samples, layouts))
    costs = [cost for family in every for cost in _costs(samples, family)]
    lanes, budget = _shared_budget(costs, token_budget, lanes)
    return lanes, _cut(samples, every, budget, device, layouts)


def pair_batches(
    samples: Sequence[Sample],
    *,
    token_budget: int,
    lanes: int = 1,
    device: torch.device | str = "cpu",
    layouts: Layouts = MERGED,
) -> tuple[int, Iterator[MicroBatch]]:
    """Return the same as `side_by_side` of samples that stand in twos. A pair is never cut apart, and stands together
    in its micro-batch; an equal prompt is in it once. One that alone exceeds the budget is a micro-batch."""
    twos = [[row, row + 1] for row in range(0, len(samples), 2)]
    pairs = [list(_groups(samples, two, sys.maxsize)) for two in twos]
    costs = [_cost_of_all(samples, pair) for pair in pairs]
    lanes, budget = _shared_budget(costs, token_budget, lanes)
    batches = _batches_of_groups(samples, pairs, budget)
    return lanes, (pack(samples, groups, device=device, layouts=layouts) for groups in batches)


def _families(samples: Sequence[Sample], layouts: Layouts) -> Iterator[Family]:
    """Yield groups and trees, or groups alone where there is no layout of trees."""
    for rows, tree in families(samples):
        yield rows, None if layouts.of_tree is None else tree


def _shared_budget(costs: Sequence[int], token_budget: int, lanes: int) -> tuple[int, int]:
    """Return how many micro-batches to run at once, and the budget of each."""
    lanes = min([lanes, len(costs), sum(costs) // LANE_TOKENS, *(token_budget // cost for cost in costs)])
    if lanes < 2:
        return 1, token_budget
    each, rounds = token_budget // lanes, -(-sum(costs) // token_budget)
    while (budget := _even_budget(costs, lanes * rounds)) > each:
        rounds += 1
    return lanes, budget


def _even_budget(costs: Sequence[int], batches: int) -> int:
    """Return the smallest budget with which `costs`, in ascending order one after another, fill so many batches at
    most."""

    def filled(budget: int) -> int:
        count, used = 1, 0
        for cost in sorted(costs):
            count, used = (count, used + cost) if used + cost <= budget else (count + 1, cost)
        return count

    return bisect_left(range(sum(costs)), True, lo=max(costs), key=lambda budget: filled(budget) <= batches)


def _costs(samples: Sequence[Sample], family: Family) -> list[int]:
    rows, tree = family
    if tree is not None:
        return [sum(line.own for line in tree)]
    return [_cost(samples, group) for group in _groups(samples, rows, sys.maxsize)]


def _cut(
    samples: Sequence[Sample],
    every: Iterable[Family],
    token_budget: int,
    device: torch.device | str,
    layouts: Layouts,
) -> Iterator[MicroBatch]:
    rows: list[int] = []
    parts: list[tuple[list[int], int]] = []
    for family, tree in every:
        if tree is None:
            rows.extend(family)
        else:
            parts.extend(cut(tree, token_budget))
    for groups in _batches_of_groups(
        samples, [[group] for group in _groups(samples, rows, token_budget)], token_budget
    ):
        yield pack(samples, groups, device=device, layouts=layouts)
    for rows in _batches_of_trees(parts, token_budget):
        yield pack_tree(samples, rows, device=device, layouts=layouts)


def pack(
    samples: Sequence[Sample],
    groups: Sequence[Sequence[int]],
    *,
    device: torch.device | str,
    layouts: Layouts = MERGED,
) -> MicroBatch:
    """Return one micro-batch of these groups of row indices; the rows of a group must have equal prompts."""
    prompts = [samples[group[0]].prompt_ids for group in groups]
    rows = [row for group in groups for row in group]
    mine = [samples[row] for row in rows]
    prompt_of_row = [p for p, group in enumerate(groups) for _ in group]
    widths, lengths = [len(prompt) for prompt in prompts], [len(sample.completion_ids) for sample in mine]
    starts = [0, *accumulate(widths)]
    begins = [starts[-1], *accumulate(lengths, initial=starts[-1])][1:]
    ids = _flat([*prompts, *(sample.completion_ids for sample in mine)], int)
    within_T = _counted(lengths)  # T completion tokens, trained or not
    positions = np.concatenate([_counted(widths), within_T + _repeated([widths[p] for p in prompt_of_row], lengths)])
    first_T = _repeated([starts[p + 1] for p in prompt_of_row], lengths)  # what predicts it is the prompt's last
    before_T = np.where(within_T == 0, first_T, np.arange(len(within_T)) + starts[-1]) - 1
    places = [
        (range(starts[p], starts[p + 1]), range(begin, begin + length))
        for p, begin, length in zip(prompt_of_row, begins, lengths, strict=False)
    ]
    layout = layouts.of_groups(widths, lengths, prompt_of_row, device=device)
    return _micro_batch(samples, rows, layout, (ids, positions, *_loss_tokens(mine, before_T)), places, device)


def pack_tree(
    samples: Sequence[Sample], rows: Sequence[int], *, device: torch.device | str, layouts: Layouts = MERGED
) -> MicroBatch:
    """Return one micro-batch of these rows as prefix trees: every token that any of them have in common stands in it
    once."""
    lines = tree_of(samples, rows)
    ids: list[int] = []
    positions: list[int] = []
    paths: dict[int, list[int]] = {}  # where each row's tokens stand in the packed row
    path: list[int] = []
    for line in lines:
        path = [*path[: line.known], *range(len(ids), len(ids) + line.own)]
        paths[line.row] = path
        ids.extend(line.ids[line.known :])
        positions.extend(range(line.known, len(line.ids)))
    mine = [samples[row] for row in rows]
    before = [[0, *paths[row]][len(sample.prompt_ids) : -1] for row, sample in zip(rows, mine, strict=True)]
    assert layouts.of_tree is not None
    layout = layouts.of_tree([paths[line.row] for line in lines], [line.own for line in lines], device=device)
    whole = [(paths[row],) for row in rows]
    columns = (ids, positions, *_loss_tokens(mine, _flat(before, int)))
    return _micro_batch(samples, rows, layout, columns, whole, device)


def _loss_tokens(mine: Sequence[Sample], before_T: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return source_N, target_N and row_N of these rows; `before_T` is the place in the packed row of what stands in
    front of each completion token, one row's after another's."""
    trained = _trained(mine)
    target_T = _flat([sample.targets or sample.completion_ids for sample in mine], int)
    row_T = _repeated(range(len(mine)), [len(sample.completion_ids) for sample in mine])
    return before_T[trained], target_T[trained], row_T[trained]


def _micro_batch(
    samples: Sequence[Sample],
    rows: Sequence[int],
    layout: Layout | Padded,
    columns: Sequence[Sequence[int] | np.ndarray],
    places: Sequence[tuple[Sequence[int], ...]],
    device: torch.device | str,
) -> MicroBatch:
    tensors = (on_device(column, device, torch.long) for column in columns)
    input_ids_S, positions_S, source_N, target_N, row_N = tensors
    return MicroBatch(
        samples=tuple(samples[row] for row in rows),
        rows=tuple(rows),
        input_ids_S=input_ids_S,
        positions_S=positions_S,
        layout=layout,
        source_N=source_N,
        target_N=target_N,
        row_N=row_N,
        places=tuple(places),
    )


def padded_batches(
    samples: Sequence[Sample], *, token_budget: int, device: torch.device | str = "cpu", pairs: bool = False
) -> Iterator[MicroBatch]:
    """Cut samples into micro-batches of padded rows, of at most `token_budget` tokens with the padding.

    A single sample that is longer is still one micro-batch. Rows are taken in order of length, so that there is little
    padding. With `pairs`, samples stand in twos, which stay together.
    """
    many = 2 if pairs else 1
    units = [range(row, row + many) for row in range(0, len(samples), many)]
    lengths = [max(len(samples[row].prompt_ids) + len(samples[row].completion_ids) for row in unit) for unit in units]
    batch: list[int] = []
    for number in sorted(range(len(units)), key=lengths.__getitem__):
        if batch and (len(batch) + many) * lengths[number] > token_budget:
            yield pad(samples, batch, device=device)
            batch = []
        batch += units[number]
    if batch:
        yield pad(samples, batch, device=device)


def pad(samples: Sequence[Sample], rows: Sequence[int], *, device: torch.device | str) -> MicroBatch:
    """Return one micro-batch of these rows, each padded to the longest of them."""
    whole = [(*samples[row].prompt_ids, *samples[row].completion_ids) for row in rows]
    width = max(map(len, whole))
    ids = np.zeros((len(rows), width), int)
    for row_S, line in zip(ids, whole, strict=True):
        row_S[: len(line)] = line
    mine = [samples[row] for row in rows]
    lengths = [len(sample.completion_ids) for sample in mine]
    begins = [b * width + len(sample.prompt_ids) for b, sample in enumerate(mine)]
    before_T = _repeated(begins, lengths) + _counted(lengths) - 1
    positions = np.tile(np.arange(width), len(rows))
    places = [(range(b * width, b * width + len(line)),) for b, line in enumerate(whole)]
    columns = (ids.reshape(-1), positions, *_loss_tokens(mine, before_T))
    return _micro_batch(samples, rows, Padded(width), columns, places, device)


def _batches_of_groups(
    samples: Sequence[Sample], units: Sequence[list[list[int]]], token_budget: int
) -> Iterator[list[list[int]]]:
    """Yield the groups of each micro-batch; those of a unit stay together."""
    batch: list[list[int]] = []
    used, shape = 0, (0, 0, 0)
    for unit in sorted(units, key=lambda unit: _cost_of_all(samples, unit)):
        cost = _cost_of_all(samples, unit)
        mine = tuple(map(max, zip(*(_shape(samples, group) for group in unit), strict=True)))
        longest = tuple(map(max, shape, mine))
        padded = (len(batch) + len(unit)) * (longest[0] + longest[1] * longest[2])
        if batch and (used + cost > token_budget or padded > MAX_PADDING * token_budget):
            yield batch
            batch, used, longest = [], 0, mine
        batch += unit
        used, shape = used + cost, longest
    if batch:
        yield batch


def _batches_of_trees(parts: Sequence[tuple[list[int], int]], token_budget: int) -> Iterator[list[int]]:
    """Yield parts of trees (rows, tokens) together up to the budget."""
    batch: list[int] = []
    used = 0
    for rows, tokens in parts:
        if batch and used + tokens > token_budget:
            yield batch
            batch, used = [], 0
        batch, used = batch + rows, used + tokens
    if batch:
        yield batch


def _groups(samples: Sequence[Sample], rows: Sequence[int], token_budget: int) -> Iterator[list[int]]:
    """Yield groups of adjacent rows with equal prompts, cut if they exceed the budget."""
    group: list[int] = []
    used = 0
    for row in rows:
        sample = samples[row]
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
    """Return the prompt tokens, the completions, and the tokens of the longest completion."""
    return len(samples[group[0]].prompt_ids), len(group), max(len(samples[row].completion_ids) for row in group)


def _cost_of_all(samples: Sequence[Sample], groups: Sequence[Sequence[int]]) -> int:
    return sum(_cost(samples, group) for group in groups)


def _cost(samples: Sequence[Sample], group: Sequence[int]) -> int:
    return len(samples[group[0]].prompt_ids) + sum(len(samples[row].completion_ids) for row in group)
