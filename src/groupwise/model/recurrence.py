"""Layers that hand a state from token to token, in packed rows: short convolutions and linear recurrences.

    kind            state of a row                               layers
    convolution     the last W - 1 inputs                        LFM2; before the recurrence of the others
    recurrence      what its rule makes of all tokens so far     gated delta rule: Qwen3-Next, Qwen3.5; state space
                                                                 (Mamba 2): Falcon-H1, Granite 4 hybrid

A packed row is a forest of segments: a prompt, and each completion that continues where it ends; or, in a prefix tree,
what lies between two forks. A segment starts with the state in which its parent ended, so a prompt's state is computed
once for its group and gets the gradients of all completions:

    a a a b b | A A | B | C C        segments a, b; then A and B from the end of a, C from the end of b

All segments of the same depth run together, those of like lengths as one batch. Padding is where a rule leaves its
state as it is.

transformers' layers call module-level functions for both kinds, and pass on the keyword `layout` of the model's
forward, as its attention does; but there is no registry for them. So `pack_recurrent_layers` rebinds these names in the
modules that have them: without a layout they are as before, with one its `States` decide what is a row. The projections
around them see the packed row. `packed_check` compares all of it with the model's own forward before any use.

Shapes: S packed tokens, B segments or rows, T tokens of each (padded), C channels of a convolution, W its width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from groupwise.model.transfer import on_device

NO_STEP = -1e30  # of which softplus is 0

CHUNK = 64  # tokens: segments whose lengths round up to the same multiple are one batch

# (inputs of each token [B, T, ...], states before the first or None) -> (outputs [B, T, ...], states after the last)
Rule = Callable[[Sequence[Tensor], Tensor | None], tuple[Tensor, Tensor]]


class States(Protocol):
    """Runs a packed row's convolutions and recurrences."""

    def convolve(self, layer: int, x_SC: Tensor, weight_CW: Tensor) -> Tensor:
        """Return each channel's causal convolution, sum_j weight[W - 1 - j] x[t - j], 0 before the first token -> [S,
        C]."""
        ...

    def recur(self, layer: int, rule: Rule, inputs: Sequence[Tensor], idle: Sequence[float]) -> Tensor:
        """`rule` along each row of tokens -> its outputs [S, ...].

        Args:
            inputs: the inputs of each token [S, ...].
            idle: what each input is where there is no token, so that the rule leaves the state as it is.
        """
        ...


class PackedSegment(NamedTuple):
    """Consecutive tokens of a packed row, from `start` on; `parent`: the index of the segment that it continues."""

    start: int
    length: int
    parent: int | None


def segments_of_groups(
    prompt_lengths: Sequence[int], completion_lengths: Sequence[int], prompt_of_row: Sequence[int]
) -> list[PackedSegment]:
    """Prompts, then their completions, as `SharedPrompts` has them."""
    segments: list[PackedSegment] = []
    start, of_prompt = 0, dict[int, int]()
    lines = [*((n, None) for n in prompt_lengths), *zip(completion_lengths, prompt_of_row, strict=True)]
    for line, (length, prompt) in enumerate(lines):
        if length:
            if prompt is None:
                of_prompt[line] = len(segments)
            segments.append(PackedSegment(start, length, None if prompt is None else of_prompt.get(prompt)))
        start += length
    return segments


def segments_of_tree(paths: Sequence[Sequence[int]], own: Sequence[int]) -> list[PackedSegment]:
    """Return the lines of prefix trees, as `PrefixTree` has them, cut where others fork off."""
    before: dict[int, int] = {}  # of each token the one before it in its rows; -1: none
    for path, n in zip(paths, own, strict=True):
        for at in range(len(path) - n, len(path)):
            before[path[at]] = path[at - 1] if at else -1
    followers = [0] * (len(before) + 1)
    for earlier in before.values():
        followers[earlier] += 1
    segments: list[PackedSegment] = []
    segment_of: list[int] = []
    for token in range(len(before)):
        earlier = before[token]
        if earlier >= 0 and earlier == token - 1 and followers[earlier] == 1:
            segments[-1] = segments[-1]._replace(length=segments[-1].length + 1)
        else:
            segments.append(PackedSegment(token, 1, segment_of[earlier] if earlier >= 0 else None))
        segment_of.append(len(segments) - 1)
    return segments


class _SegmentBatch(NamedTuple):
    """Segments that are run together, as [B, T] cells."""

    B: int
    T: int
    parents_B: Tensor | None  # where their states are among those of the level before


class _Plan(NamedTuple):
    """The batches of each level, a level after those that it continues; its states are those of its batches, one after
    another. The cells of all batches are N."""

    levels: list[list[_SegmentBatch]]
    token_N: Tensor  # of each cell
    empty_N: Tensor  # the cells without one
    cell_S: Tensor  # of each token
    roots: Tensor  # where in the first level the states of the segments that continue nothing are


class Segments:
    """`States` of a packed row that is a forest of segments, each of which stands after its parent.

    Args:
        make: makes the segments, when a recurrent layer first needs them.
    """

    def __init__(self, make: Callable[[], Sequence[PackedSegment]], *, device: torch.device | str = "cpu"):
        self._make, self.device = make, device
        self._edges: dict[int, tuple[Tensor, Tensor]] = {}

    @cached_property
    def segments(self) -> Sequence[PackedSegment]:
        return self._make()

    @cached_property
    def _plan(self) -> _Plan:
        return _plan_of(self.segments, self.device)

    def convolve(self, layer: int, x_SC: Tensor, weight_CW: Tensor) -> Tensor:
        S, W = len(x_SC), weight_CW.shape[1]
        edge_E, before_EW = self._edges_of(W)
        padded = pad(x_SC, (0, 0, W - 1, 0))
        out = padded[W - 1 :] * weight_CW[:, -1]
        for j in range(1, W):  # as one row; then the positions that this gets wrong are recomputed
            out = out + padded[W - 1 - j : W - 1 - j + S] * weight_CW[:, -1 - j]
        windows_EWC = padded.index_select(0, before_EW.flatten()).view(*before_EW.shape, -1)
        return out.index_copy(0, edge_E, (windows_EWC * weight_CW.T).sum(1))

    def recur(self, layer: int, rule: Rule, inputs: Sequence[Tensor], idle: Sequence[float]) -> Tensor:
        return self.run(rule, inputs, idle)[0]

    def run(self, rule: Rule, inputs: Sequence[Tensor], idle: Sequence[float]) -> tuple[Tensor, Tensor]:
        """See `recur`, and the states after the segments that continue nothing, in their order."""
        cells = [
            x.index_select(0, self._plan.token_N).index_fill(0, self._plan.empty_N, y)
            for x, y in zip(inputs, idle, strict=True)
        ]
        outputs: list[Tensor] = []
        after: Tensor | None = None
        first, start = None, 0
        for level in self._plan.levels:
            states = []
            for batch in level:
                stop = start + batch.B * batch.T
                rows = [x[start:stop].view(-1, batch.T, *x.shape[1:]) for x in cells]
                before = None if after is None or batch.parents_B is None else after.index_select(0, batch.parents_B)
                out, state = rule(rows, before)
                outputs.append(out.flatten(0, 1))
                states.append(state)
                start = stop
            after = torch.cat(states)
            first = after if first is None else first
        assert first is not None
        return torch.cat(outputs).index_select(0, self._plan.cell_S), first.index_select(0, self._plan.roots)

    def last_inputs(self, x_SC: Tensor, W: int) -> Tensor:
        """Return the last W - 1 inputs of the segments that continue nothing, zeros before the first -> [B, C, W -
        1]."""
        rows = [
            [s + n + i if n + i >= 0 else -1 for i in range(1 - W, 0)]
            for s, n, parent in self.segments
            if parent is None
        ]
        at_BW = on_device(rows, x_SC.device, torch.long).view(len(rows), W - 1) + 1
        return pad(x_SC, (0, 0, 1, 0)).index_select(0, at_BW.flatten()).view(*at_BW.shape, -1).transpose(1, 2)

    def _edges_of(self, W: int) -> tuple[Tensor, Tensor]:
        """Return tokens [E] of which not all of the W - 1 before them stand before them in the packed row, and for each
        where in the row padded with W - 1 zeros it and those before it stand [E, W]."""
        if W not in self._edges:
            edges, windows = [], []
            for start, length, parent in self.segments:
                before = self._tail(parent, W - 1)
                for i in range(min(W - 1, length)):
                    tokens = [*before, *range(start, start + i + 1)][-W:]
                    edges.append(start + i)
                    windows.append([0] * (W - len(tokens)) + [token + W - 1 for token in tokens])
            edge_E = on_device(edges, self.device, torch.long)
            self._edges[W] = edge_E, on_device(windows, self.device, torch.long).view(-1, W)
        return self._edges[W]

    def _tail(self, segment: int | None, count: int) -> list[int]:
        """Up to `count` tokens that come last where a segment ends."""
        tail: list[int] = []
        while segment is not None and len(tail) < count:
            start, length, parent = self.segments[segment]
            tail = [*range(start + max(0, length - count + len(tail)), start + length), *tail]
            segment = parent
        return tail


def _plan_of(segments: Sequence[PackedSegment], device: torch.device | str) -> _Plan:
    depth: list[int] = []
    for segment in segments:
        depth.append(0 if segment.parent is None else depth[segment.parent] + 1)
    place: dict[int, int] = {}  # of each segment's state among those of its level
    levels: list[list[_SegmentBatch]] = []
    token_N, cell_S = [], [0] * sum(segment.length for segment in segments)
    for level in range(max(depth, default=-1) + 1):
        sized: dict[int, list[int]] = {}
        for i, segment in enumerate(segments):
            if depth[i] == level:
                sized.setdefault(-(-segment.length // CHUNK), []).append(i)
        levels.append([])
        for chosen in sized.values():
            T = max(segments[i].length for i in chosen)
            parents = [place[parent] for i in chosen if (parent := segments[i].parent) is not None]
            levels[-1].append(_SegmentBatch(len(chosen), T, on_device(parents, device) if level else None))
            for start, length, _ in (segments[i] for i in chosen):
                cell_S[start : start + length] = range(len(token_N), len(token_N) + length)
                token_N += [*range(start, start + length), *[-1] * (T - length)]
        place |= {i: at for at, i in enumerate(chain(*sized.values()))}
    roots = [place[i] for i in range(len(segments)) if not depth[i]]
    where, cells, at_roots = (torch.tensor(x, dtype=torch.long) for x in (token_N, cell_S, roots))
    empty_N = (where < 0).nonzero()[:, 0]
    tensors = (on_device(x, device) for x in (where.clamp(min=0), empty_N, cells, at_roots))
    return _Plan(levels, *tensors)
