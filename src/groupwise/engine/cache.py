"""Keys and values: every prompt's once, every completion's in its row; and the three ways in which a forward meets them.

    prompts   per layer [slots, K, L, D]    a prompt's keys and values, shared by all completions of it (its *group*)
    rows      per layer [rows,  K, M, D]    what a row's own completion has added

    Prefill   packed prompts: attention within each prompt, whose keys and values go to its slot
    Resumed   packed ends of prompts, whose first tokens' keys and values were put into their slots (`prefix_cache`)
    Decode    one new token per row: its key and value join the row's, and it attends to its prompt's and its own

A decode step scores a prompt's keys for all rows of the group as one product, so it reads a prompt of 512 tokens once
and not once per row. For that the rows are laid out as a grid of slots x members. Groups that have lost members leave
cells of it empty; where most would be (one large group among many small ones) it goes slot by slot instead.

Shapes: B active rows, S packed tokens, P slots in use, G most members of a slot, H query heads, K key-value heads,
R = H / K, D head size, L longest prompt, T longest end of one, M longest completion, N = L + M.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from groupwise.algo.attention import Scoring, SharedPrompts, attend_masked, spread, unseen

MOST_EMPTY = 4  # cells of the grid per row, beyond which the grid is not worth its empty cells


class _Store:
    """Per layer keys and values [lines, K, length, D]; both sizes grow as they are needed."""

    def __init__(self, most_lines: int):
        self.most_lines, self.lines, self.length = most_lines, 0, 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def reserve(self, lines: int, length: int) -> None:
        """Make room, keeping what is there. Grows by a quarter or more at a time."""
        if lines <= self.lines and length <= self.length:
            return
        if lines > self.lines:
            self.lines = min(self.most_lines, max(lines, self.lines * 2))
        if length > self.length:
            self.length = (max(length, self.length * 5 // 4) + 15) // 16 * 16
        for layer, (keys, values) in self.layers.items():
            self.layers[layer] = self._larger(keys), self._larger(values)

    def of(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's keys and values, made on first use in the type of `like` [..., K, D]."""
        if layer not in self.layers:
            shape = (self.lines, like.shape[-2], self.length, like.shape[-1])
            self.layers[layer] = (like.new_zeros(shape), like.new_zeros(shape))
        return self.layers[layer]

    def move(self, source: Tensor | int, target: Tensor | int, length: int) -> None:
        """Copy lines `source` over lines `target`, the first `length` tokens of them."""
        for pair in self.layers.values():
            for x in pair:
                x[target, :, :length] = x[source, :, :length]

    def _larger(self, x: Tensor) -> Tensor:
        larger = x.new_zeros(self.lines, x.shape[1], self.length, x.shape[3])
        larger[: x.shape[0], :, : x.shape[2]] = x
        return larger


class KeyValueCache:
    """The keys and values of up to `most_rows` rows and of their prompts. Slots 0..len(lengths)-1 are in use."""

    def __init__(self, most_rows: int):
        self.prompts, self.rows = _Store(most_rows), _Store(most_rows)
        self.lengths: list[int] = []  # tokens of the prompt in each slot

    def add_prompts(self, lengths: Sequence[int]) -> range:
        """New slots behind the last, for prompts that are about to be prefilled."""
        start = len(self.lengths)
        self.lengths += lengths
        self.prompts.reserve(len(self.lengths), max(self.lengths))
        return range(start, len(self.lengths))

    def drop_prompt(self, slot: int) -> int | None:
        """Free a slot; the last one moves into its place. -> the slot that moved, if one did."""
        last = len(self.lengths) - 1
        length = self.lengths.pop()
        if slot == last:
            return None
        self.prompts.move(last, slot, length)
        self.lengths[slot] = length
        return last

    def kept(self, slot: int, row: int, count: int) -> dict[int, tuple[Tensor, Tensor]]:
        """A copy of the slot's keys and values and of the row's first `count`: by layer [K, n, D] each."""
        length = self.lengths[slot]
        return {
            layer: (
                torch.cat([self.prompts.layers[layer][0][slot, :, :length], keys[row, :, :count]], 1),
                torch.cat([self.prompts.layers[layer][1][slot, :, :length], values[row, :, :count]], 1),
            )
            for layer, (keys, values) in self.rows.layers.items()
        }

    def restore(self, slot: int, layers: dict[int, tuple[Tensor, Tensor]], known: int) -> None:
        """Put the first `known` of what was kept into a slot."""
        for layer, pair in layers.items():
            for store, x_KnD in zip(self.prompts.of(layer, pair[0].transpose(0, 1)), pair, strict=True):
                store[slot, :, :known] = x_KnD[:, :known]


class Prefill:
    """Layout of packed prompts that also writes each prompt's keys and values to its slot."""

    def __init__(self, cache: KeyValueCache, slots: range, device: torch.device):
        self.cache, self.slots = cache, slice(slots.start, slots.stop)
        self.prompts = SharedPrompts(cache.lengths[self.slots], device=device)

    def attend(self, layer: int, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scoring: Scoring) -> Tensor:
        prompts = self.prompts
        for store, x_SKD in zip(self.cache.prompts.of(layer, key_SKD), (key_SKD, value_SKD), strict=True):
            x_PLKD = spread(x_SKD, prompts.prompt_slots, prompts.P, prompts.L)
            store[self.slots, :, : prompts.L] = x_PLKD.transpose(1, 2)
        return prompts.attend(layer, query_SHD, key_SKD, value_SKD, scoring)


class Resumed:
    """Layout of packed prompts without their first `known` tokens, which are in their slots already.

    Token t of a prompt's end attends to the tokens before `known` and to those of the end up to itself.
    """

    def __init__(self, cache: KeyValueCache, slots: range, known: Sequence[int], device: torch.device):
        self.cache, self.slots = cache, slice(slots.start, slots.stop)
        lengths = cache.lengths[self.slots]
        ends = [length - start for length, start in zip(lengths, known, strict=True)]
        self.P, self.T, self.L = len(ends), max(ends), max(lengths)
        start_P = torch.tensor(known, device=device)
        end_P = torch.tensor(ends, device=device)
        at_T, at_L = torch.arange(self.T, device=device), torch.arange(self.L, device=device)
        prompt_S, self.t_S = (at_T < end_P[:, None]).nonzero(as_tuple=True)
        self.prompt_S, self.position_S = prompt_S, start_P[prompt_S] + self.t_S
        self.gap_PTL = start_P[:, None, None] + at_T[:, None] - at_L

    def attend(self, layer: int, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scoring: Scoring) -> Tensor:
        P, T, (_, H, D), K = self.P, self.T, query_SHD.shape, key_SKD.shape[1]
        keys, values = (store[self.slots, :, : self.L] for store in self.cache.prompts.of(layer, key_SKD))
        keys[self.prompt_S, :, self.position_S] = key_SKD
        values[self.prompt_S, :, self.position_S] = value_SKD
        query_PTHD = query_SHD.new_zeros(P, T, H, D)
        query_PTHD[self.prompt_S, self.t_S] = query_SHD
        out_PTHD = attend_masked(query_PTHD, keys, values, unseen(self.gap_PTL, scoring.window), scoring)
        return out_PTHD[self.prompt_S, self.t_S]


class Grid:
    """Which rows share which slot, laid out as slots x members. Made anew when rows come or go."""

    def __init__(self, slots: Sequence[int], lengths: Sequence[int], device: torch.device):
        self.P, self.L = len(lengths), max(lengths)
        members: list[list[int]] = [[] for _ in lengths]
        for row, slot in enumerate(slots):
            members[slot].append(row)
        self.G = max(len(rows) for rows in members)
        self.members = None  # by slot, when there would be too many empty cells
        self.cell_B = self.row_C = None  # None: cell i is row i
        if MOST_EMPTY * len(slots) < self.P * self.G:
            self.members = [torch.tensor(rows, device=device) for rows in members]
        else:
            cells = [(slot * self.G + i, row) for slot, rows in enumerate(members) for i, row in enumerate(rows)]
            if any(cell != row for cell, row in cells) or len(cells) < self.P * self.G:
                cell_B, row_C = [0] * len(slots), [0] * (self.P * self.G)
                for cell, row in cells:
                    cell_B[row], row_C[cell] = cell, row
                self.cell_B, self.row_C = (torch.tensor(x, device=device) for x in (cell_B, row_C))
        self.length_B = torch.tensor([lengths[slot] for slot in slots], device=device)
        self.ragged = len(set(lengths)) > 1

    def product(self, x_BKRI: Tensor, prompts_PKIJ: Tensor) -> Tensor:
        """Each row's [K, R, I] times its prompt's [K, I, J] -> [B, K, R, J]."""
        B, K, R, _ = x_BKRI.shape
        if self.members is not None:
            out = x_BKRI.new_empty(B, K, R, prompts_PKIJ.shape[-1])
            for rows, prompt_KIJ in zip(self.members, prompts_PKIJ, strict=True):
                mine = x_BKRI[rows].transpose(0, 1).reshape(K, len(rows) * R, -1) @ prompt_KIJ
                out[rows] = mine.view(K, len(rows), R, -1).transpose(0, 1)
            return out
        x_CKRI = x_BKRI if self.row_C is None else x_BKRI.index_select(0, self.row_C)
        P, G = self.P, self.G
        x_PKNI = x_CKRI.reshape(P, G, K, R, -1).transpose(1, 2).reshape(P, K, G * R, -1)
        out_CKRJ = (x_PKNI @ prompts_PKIJ).view(P, K, G, R, -1).transpose(1, 2).reshape(P * G, K, R, -1)
        return out_CKRJ if self.cell_B is None else out_CKRJ.index_select(0, self.cell_B)


class Decode:
    """Layout of one new token per active row, attending to its prompt and to the row's own completion so far."""

    def __init__(self, cache: KeyValueCache, grid: Grid, count_B: Tensor):
        self.cache, self.grid, self.count_B = cache, grid, count_B - 1  # the token that goes in was counted already
        low, high = (int(x) for x in self.count_B.aminmax())
        self.B, self.M, self.uniform = len(count_B), high + 1, low == high
        self.row_B = torch.arange(self.B, device=count_B.device)
        self._hidden: dict[int | None, Tensor | None] = {}
        cache.rows.reserve(self.B, self.M)

    def attend(self, layer: int, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scoring: Scoring) -> Tensor:
        B, M, grid, K, D = self.B, self.M, self.grid, key_SKD.shape[1], query_SHD.shape[2]
        keys, values = self.cache.rows.of(layer, key_SKD)
        for store, x_BKD in ((keys, key_SKD), (values, value_SKD)):
            if self.uniform:
                store[:B, :, M - 1] = x_BKD
            else:
                store[self.row_B, :, self.count_B] = x_BKD
        prompt_keys, prompt_values = (x[: grid.P, :, : grid.L] for x in self.cache.prompts.of(layer, key_SKD))
        query_BKRD = scoring.scaled(query_SHD).view(B, K, -1, D)
        shared = grid.product(query_BKRD, prompt_keys.transpose(-1, -2))
        own = query_BKRD @ keys[:B, :, :M].transpose(-1, -2)
        scores = scoring.finished(torch.cat([shared, own], -1))
        hidden_BN = self._hidden_from(scoring.window)
        if hidden_BN is not None:
            scores = scores.masked_fill_(hidden_BN[:, None, None], float("-inf"))
        weights = scores.softmax(-1).to(values.dtype)
        out = grid.product(weights[..., : grid.L], prompt_values) + weights[..., grid.L :] @ values[:B, :, :M]
        return out.reshape(B, -1, D)

    def _hidden_from(self, window: int | None) -> Tensor | None:
        """[B, N], True where a row may not look: behind its prompt or its own end, or beyond the window."""
        if window not in self._hidden:
            self._hidden[window] = self._hide(window)
        return self._hidden[window]

    def _hide(self, window: int | None) -> Tensor | None:
        grid, device = self.grid, self.count_B.device
        longest = grid.L + self.M  # keys that the longest row can have
        narrow = window is not None and window < longest
        if self.uniform and not grid.ragged and not narrow:
            return None
        at_L, at_M = torch.arange(grid.L, device=device), torch.arange(self.M, device=device)
        length_B1, count_B1 = grid.length_B[:, None], self.count_B[:, None]
        hidden = torch.cat([at_L >= length_B1, at_M > count_B1], 1)
        if window is not None and narrow:
            gap = length_B1 + count_B1 - torch.cat([at_L.expand(self.B, -1), length_B1 + at_M], 1)
            hidden |= gap >= window
        return hidden
