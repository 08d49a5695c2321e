"""The KV cache: each prompt's keys and values once for its group, each row's own besides; prefill and decode layouts.

    prompts   per layer [slots, K, L, D]    a prompt's keys and values, shared by all completions of it (its *group*)
    rows      per layer [rows,  K, M, D]    a row's own: its completion so far; in a conversation, all since the opening

    Prefill   packed prompts: attention within each prompt, whose keys and values go to its slot
    Extend    the next tokens of each row: their keys and values join the row's, and they attend to its prompt's and its
              own. One token of each in a decode step; the new messages where a conversation continues

A decode step scores a prompt's keys for all rows of the group as one product, so it reads a prompt of 512 tokens once
and not once per row, in every turn of a conversation too: what a group's episodes open with stays in one slot. For that
the rows are laid out as a grid of slots x members. Groups that have lost members leave cells of it empty; where most
would be (one large group among many small ones) it goes slot by slot instead. What the rows hold themselves is read as
far as the longest of them goes; where their lengths differ, for `PART` rows at a time (on a GPU `PART_GPU`), which the
engine keeps in order.

Recurrent layers (`model.recurrence`) have a state of fixed size instead: that in which a prompt ends is in its slot,
and each row starts with a copy of it, which every token replaces.

Shapes: B rows, S packed tokens, P slots in use, G most members of a slot, H query heads, K key-value heads, R = H / K,
D head size, L longest prompt, T most new tokens of a row, M most tokens that a row holds, N = L + M.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from groupwise.model.attention import Scoring, SharedPrompts, mask_of, softmax
from groupwise.model.recurrence import Rule, States
from groupwise.model.transfer import on_device

PART = 16  # rows

PART_GPU = 64  # ... where a part's eight kernels take as long to start as a part of 64 rows to read what is not there

Multiply = Callable[[Tensor, Tensor], Tensor]

MOST_EMPTY = 4  # cells of the grid per row, beyond which the grid is not worth its empty cells


class _Store:
    """Per layer keys and values [lines, K, length, D]; both sizes grow as they are needed. Of recurrent layers states
    [lines, ...], by layer and kind. Layers that attend with another's (`keys_from`) have none of their own."""

    def __init__(self, most_lines: int, keys_from: Mapping[int, int]):
        self.most_lines, self.lines, self.length = most_lines, 0, 0
        self.keys_from = keys_from
        self.most_length: float = math.inf  # as `most_lines`, what it does not grow beyond ahead of what is needed
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.states: dict[tuple[int, str], Tensor] = {}

    def reserve(self, lines: int, length: int) -> None:
        """Make room, keeping what is there. Grows by a quarter or more at a time.

        The sizes change last. Where the memory runs out they are what every layer has, and the next call tries again.
        """
        if lines <= self.lines and length <= self.length:
            return
        more = self.lines if lines <= self.lines else max(lines, min(self.most_lines, self.lines * 2))
        ahead = (max(length, self.length * 5 // 4) + 15) // 16 * 16
        longer = self.length if length <= self.length else int(max(length, min(self.most_length, ahead)))
        for layer, (keys, values) in self.layers.items():
            self.layers[layer] = _larger(keys, more, longer), _larger(values, more, longer)
        for kind, states in self.states.items():
            if len(states) < more:
                self.states[kind] = torch.cat([states, states.new_zeros(more - len(states), *states.shape[1:])])
        self.lines, self.length = more, longer

    def bound(self, lines: int, length: int, most_cells: float, *, used: tuple[int, int]) -> None:
        """Grow to `lines` by `length` at most. Where what is there would then be more than `most_cells`, keep only the
        lines and the length that are `used`."""
        self.most_lines, self.most_length = lines, length
        if max(self.lines, lines) * max(self.length, length) > most_cells:
            for layer, pair in self.layers.items():
                keys, values = (x[: used[0], :, : used[1]].clone() for x in pair)
                self.layers[layer] = keys, values
            for kind, states in self.states.items():
                self.states[kind] = states[: used[0]].clone()
            self.lines, self.length = used

    def release(self) -> None:
        """Give all memory back; what was there is gone."""
        self.lines = self.length = 0
        self.layers.clear()
        self.states.clear()

    def of(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's keys and values, made on first use in the sizes and types of `key` and `value` [..., K,
        D]."""
        layer = self.keys_from.get(layer, layer)
        if layer not in self.layers:
            keys, values = (x.new_zeros(self.lines, x.shape[-2], self.length, x.shape[-1]) for x in (key, value))
            self.layers[layer] = keys, values
        return self.layers[layer]

    def set_states(self, kind: tuple[int, str], lines: slice, states: Tensor) -> None:
        """Replace the states of these lines [B, ...]."""
        if kind not in self.states:
            self.states[kind] = states.new_zeros(self.lines, *states.shape[1:])
        self.states[kind][lines] = states

    def move(self, source: Tensor | int, target: Tensor | int, length: int) -> None:
        """Copy lines `source` over lines `target`, the first `length` tokens of them, and their states."""
        for pair in self.layers.values():
            for x in pair:
                x[target, :, :length] = x[source, :, :length]
        for states in self.states.values():
            states[target] = states[source]


@dataclass
class CacheNeed:
    """The most that a cache must hold until its rows have ended, if each says as much as it may."""

    rows: int = 0
    own: int = 0  # most tokens that a row holds itself
    slots: int = 0
    prompt: int = 0  # tokens of the longest prompt

    @property
    def tokens(self) -> int:
        """Return the tokens for which memory is allocated: those of two rectangles."""
        return self.rows * self.own + self.slots * self.prompt

    def with_rows(self, n: int, *, own: int, prompt: int, slots: int) -> CacheNeed:
        """Return the same and `n` rows more, with `slots` prompts that are not there yet."""
        return CacheNeed(self.rows + n, max(self.own, own), self.slots + slots, max(self.prompt, prompt))


class KeyValueCache:
    """The keys and values of up to `most_rows` rows and of their prompts. Slots 0..len(lengths)-1 are in use.

    Args:
        most_tokens: that there may be memory for, those of prompts included. One row is given more, if it needs it.
        keys_from: layers that attend with the keys and values of an earlier one, each with that one.
    """

    def __init__(
        self, most_rows: int, most_tokens: float = math.inf, *, keys_from: Mapping[int, int] = MappingProxyType({})
    ):
        self.most_tokens = most_tokens
        self.prompts, self.rows = _Store(most_rows, keys_from), _Store(most_rows, keys_from)
        self.lengths: list[int] = []  # tokens of the prompt in each slot
        self.openings: list[Opening | None] = []  # and the copy of it, where there is one
        self.prefilled: list[Prefilled | None] = []  # and whose prompt it is, from the first token to the last

    def fitting(self, need: CacheNeed, n: int, *, own: int, prompt: int, slots: int) -> int:
        """Return how many of `n` rows with the given lengths can be added to `need`: 0 to n, and 1 at least to none."""
        if self.most_tokens == math.inf:
            return n
        least = 0 if need.rows else 1
        while n > least and need.with_rows(n, own=own, prompt=prompt, slots=slots).tokens > self.most_tokens:
            n -= 1
        return n

    def prepare(self, need: CacheNeed, *, rows: int, longest: int) -> None:
        """Be ready for `need`: give back what only rows and prompts that have gone took. `rows` are in use now, and
        hold `longest` tokens at most."""
        if self.most_tokens < math.inf:
            own, prompts = need.rows * need.own, need.slots * need.prompt
            slots = len(self.lengths), max(self.lengths, default=0)
            self.rows.bound(need.rows, need.own, max(own, self.most_tokens - prompts), used=(rows, longest))
            self.prompts.bound(need.slots, need.prompt, prompts, used=slots)

    def add_prompts(self, lengths: Sequence[int]) -> range:
        """Add slots after the last one, for prompts that are about to be prefilled, and return their indices."""
        start = len(self.lengths)
        self.prompts.reserve(start + len(lengths), max((*self.lengths, *lengths), default=0))
        self.lengths += lengths
        self.openings += [None] * len(lengths)
        self.prefilled += [None] * len(lengths)
        return range(start, len(self.lengths))

    def drop_prompt(self, slot: int) -> int | None:
        """Free a slot; the last one moves into its place. -> the slot that moved, if one did."""
        last = len(self.lengths) - 1
        length, opening, prefilled = self.lengths.pop(), self.openings.pop(), self.prefilled.pop()
        if slot == last:
            return None
        self.prompts.move(last, slot, length)
        self.lengths[slot], self.openings[slot], self.prefilled[slot] = length, opening, prefilled
        return last

    def whole(self) -> dict[PromptKey, int]:
        """Return prompts that are completely in a slot, by their keys, so that equal requests can share them."""
        return {(id(it.owner), it.ids, it.apart): slot for slot, it in enumerate(self.prefilled) if it is not None}

    def forget(self, owner: object) -> None:
        """Stop sharing slots that were computed with the weights `owner`, which have changed or are gone."""
        self.prefilled = [None if there and there.owner is owner else there for there in self.prefilled]

    def opening(self, slot: int) -> Opening:
        """Return a copy of a slot's keys and values, made at most once."""
        opening = self.openings[slot]
        if opening is None:
            opening = Opening(_copies(self.prompts, slot, self.lengths[slot]), self.lengths[slot])
            self.openings[slot] = opening
        return opening

    def slot_of(self, opening: Opening) -> int:
        """Return the slot that holds this opening, or a new one into which it is copied."""
        for slot, there in enumerate(self.openings):
            if there is opening:
                return slot
        (slot,) = self.add_prompts([opening.length])
        self.openings[slot] = opening
        _put_back(self.prompts, slot, opening.layers, opening.length)
        return slot

    def sort(self, order: Tensor, length: int) -> None:
        """Put row `order[i]` in place i; the longest has `length` tokens of its own."""
        for pair in self.rows.layers.values():
            for x in pair:
                x[: len(order), :, :length] = x[order, :, :length]
        for states in self.rows.states.values():
            states[: len(order)] = states[order]

    def begin(self, rows: slice, slots: Sequence[int]) -> None:
        """Give rows the states in which the prompts in `slots` end."""
        for kind, states in self.prompts.states.items():
            self.rows.set_states(kind, rows, states[on_device(slots, states.device)])

    def held(self, row: int, count: int) -> Layers:
        """Return a copy of the keys and values of the first `count` tokens that a row holds itself."""
        return _copies(self.rows, row, count)

    def hold(self, row: int, layers: Layers, count: int) -> None:
        """Write, as the inverse of `held`, `count` tokens' keys and values into a row."""
        _put_back(self.rows, row, layers, count)

    def clear(self) -> None:
        """Free all slots."""
        self.lengths.clear()
        self.openings.clear()
        self.prefilled.clear()

    def release(self) -> None:
        """Free all slots, and give back the memory of prompts and rows."""
        self.clear()
        self.prompts.release()
        self.rows.release()


Layers = dict[int, tuple[Tensor, Tensor]]  # by layer, keys and values [K, n, D]

# the weights' id, the token ids and `SamplingRequest.apart`: equal prompts of one policy that may be computed together
PromptKey = tuple[int, tuple[int, ...], str]


@dataclass(frozen=True, eq=False)
class Prefilled:
    """A prefilled prompt: the weights it was computed with (`owner`; None: the base), its last hidden state, the
    experts of its tokens, where they are recorded, and whom it is computed for (`SamplingRequest.apart`)."""

    owner: object
    ids: tuple[int, ...]
    hidden_H: Tensor
    routed_PLK: Tensor | None = None
    apart: str = ""


@dataclass(eq=False)
class Opening:
    """A saved copy of a slot: keys and values of the tokens with which the conversations of a group begin."""

    layers: Layers
    length: int


def _larger(x: Tensor, lines: int, length: int) -> Tensor:
    """Return `x` [lines, K, length, D] in a tensor with at least so many lines and so much length."""
    lines, length = max(lines, x.shape[0]), max(length, x.shape[2])
    if x.shape[0] == lines and x.shape[2] == length:
        return x
    larger = x.new_zeros(lines, x.shape[1], length, x.shape[3])
    larger[: x.shape[0], :, : x.shape[2]] = x
    return larger


def _copies(store: _Store, line: int, length: int) -> Layers:
    return {
        layer: (keys[line, :, :length].clone(), values[line, :, :length].clone())
        for layer, (keys, values) in store.layers.items()
    }


def _put_back(store: _Store, line: int, layers: Layers, length: int) -> None:
    for layer, pair in layers.items():
        there = store.of(layer, *(kept_KnD.transpose(0, 1) for kept_KnD in pair))
        for x, kept_KnD in zip(there, pair, strict=True):
            x[line, :, :length] = kept_KnD[:, :length]


class Prefill:
    """Layout of packed prompts that also writes each prompt's keys and values to its slot."""

    def __init__(self, cache: KeyValueCache, slots: range, device: torch.device):
        self.cache, self.slots = cache, slice(slots.start, slots.stop)
        self.prompts = SharedPrompts(cache.lengths[self.slots], device=device)

    @property
    def states(self) -> States:
        return self

    def convolve(self, layer: int, x_SC: Tensor, weight_CW: Tensor) -> Tensor:
        segments = self.prompts.states
        self.cache.prompts.set_states((layer, "inputs"), self.slots, segments.last_inputs(x_SC, weight_CW.shape[1]))
        return segments.convolve(layer, x_SC, weight_CW)

    def recur(self, layer: int, rule: Rule, inputs: Sequence[Tensor], idle: Sequence[float]) -> Tensor:
        out_S, after_P = self.prompts.states.run(rule, inputs, idle)
        self.cache.prompts.set_states((layer, "state"), self.slots, after_P)
        return out_S

    def see_ahead(self, ahead_S: Tensor, *, in_windows: bool = False) -> None:
        """See `Layout.see_ahead`."""
        self.prompts.see_ahead(ahead_S, in_windows=in_windows)

    def attend(self, layer: int, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scoring: Scoring) -> Tensor:
        lines = self.prompts.prompts
        for store, x_SKD in zip(self.cache.prompts.of(layer, key_SKD, value_SKD), (key_SKD, value_SKD), strict=True):
            store[self.slots, :, : lines.width] = lines.place(x_SKD, x_SKD.shape[1])[:, :, 0, 0]
        return self.prompts.attend(layer, query_SHD, key_SKD, value_SKD, scoring)


def parts_of(lengths: Sequence[int], size: int) -> list[tuple[slice, int]]:
    """Return slices of rows, with the length of the longest row in each: all rows at once, or `size` at a time if
    lengths differ."""
    if len(lengths) < 2 * size or min(lengths) == max(lengths):
        return [(slice(0, len(lengths)), max(lengths))]
    return [(slice(at, at + size), max(lengths[at : at + size])) for at in range(0, len(lengths), size)]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class Apart:
    """Products of rows with their prompts, slot by slot; for many new tokens a row, where each product is large anyway.

    Args:
        slots: the slots of each row.
        shared: the first tokens of its slot that each row has; the rest of a longer one is hidden from it.
        lengths: tokens in each slot.
    """

    def __init__(self, slots: Sequence[int], shared: Sequence[int], lengths: Sequence[int], device: torch.device):
        self.P, self.L = len(lengths), max(lengths)
        self.slot_B, self.shared_B = on_device(slots, device), on_device(shared, device)
        self.ragged = min(shared) < self.L

    def product(self, x_BKRI: Tensor, prompts_PKIJ: Tensor, multiply: Multiply = torch.matmul) -> Tensor:
        """Return each row's [K, R, I] times its prompt's [K, I, J] -> [B, K, R, J]."""
        return multiply(x_BKRI, prompts_PKIJ.index_select(0, self.slot_B))


class Grid(Apart):
    """Products of rows with their prompts as one grid of slots x members; rebuilt when rows come or go."""

    def __init__(self, slots: Sequence[int], shared: Sequence[int], lengths: Sequence[int], device: torch.device):
        super().__init__(slots, shared, lengths, device)
        members: list[list[int]] = [[] for _ in lengths]
        for row, slot in enumerate(slots):
            members[slot].append(row)
        self.G = max(len(rows) for rows in members)
        self.members = None  # slots and their rows, when there would be too many empty cells
        self.cell_B = self.row_C = None  # None: cell i is row i
        if MOST_EMPTY * len(slots) < self.P * self.G:
            self.members = [(slot, on_device(rows, device)) for slot, rows in enumerate(members) if rows]
        else:
            cells = [(slot * self.G + i, row) for slot, rows in enumerate(members) for i, row in enumerate(rows)]
            if any(cell != row for cell, row in cells) or len(cells) < self.P * self.G:
                cell_B, row_C = [0] * len(slots), [0] * (self.P * self.G)
                for cell, row in cells:
                    cell_B[row], row_C[cell] = cell, row
                self.cell_B, self.row_C = (on_device(x, device) for x in (cell_B, row_C))

    def product(self, x_BKRI: Tensor, prompts_PKIJ: Tensor, multiply: Multiply = torch.matmul) -> Tensor:
        """See `Apart`."""
        B, K, R, _ = x_BKRI.shape
        if self.members is not None:
            parts = [
                multiply(x_BKRI[rows].transpose(0, 1).reshape(K, len(rows) * R, -1), prompts_PKIJ[slot])
                for slot, rows in self.members
            ]
            out = parts[0].new_empty(B, K, R, prompts_PKIJ.shape[-1])
            for (_, rows), mine in zip(self.members, parts, strict=True):
                out[rows] = mine.view(K, len(rows), R, -1).transpose(0, 1)
            return out
        x_CKRI = x_BKRI if self.row_C is None else x_BKRI.index_select(0, self.row_C)
        P, G = self.P, self.G
        x_PKNI = x_CKRI.reshape(P, G, K, R, -1).transpose(1, 2).reshape(P, K, G * R, -1)
        out_CKRJ = multiply(x_PKNI, prompts_PKIJ).view(P, K, G, R, -1).transpose(1, 2).reshape(P * G, K, R, -1)
        return out_CKRJ if self.cell_B is None else out_CKRJ.index_select(0, self.cell_B)


class Extend:
    """Attention layout of decoding: each row's new tokens attend to its part of the slot, to its own, and causally.

    Args:
        rows: consecutive ones.
        held: tokens that each has of its own already.
        ends: how many come now; None: one each.
    """

    def __init__(
        self,
        cache: KeyValueCache,
        grid: Apart,
        rows: slice,
        held: Sequence[int] | np.ndarray,
        ends: Sequence[int] | None = None,
    ):
        device, self.B, self.T = grid.slot_B.device, len(held), 1 if ends is None else max(ends)
        self.cache, self.grid, self.rows, self.held_B = cache, grid, rows, on_device(held, device)
        lengths = (np.asarray(held) + (1 if ends is None else np.asarray(ends))).tolist()
        self.parts, self.M = parts_of(lengths, PART if device.type == "cpu" else PART_GPU), max(lengths)
        self.uniform = ends is None and min(lengths) == self.M
        if ends is None:
            self.row_S, self.at_S = torch.arange(self.B, device=device), self.held_B
        else:
            self.lines, self.places = np.nonzero(np.arange(self.T) < np.asarray(ends)[:, None])
            self.row_S, self.t_S = on_device(self.lines, device), on_device(self.places, device)
            self.at_S = self.held_B[self.row_S] + self.t_S
        self._masks: dict[int | None, Tensor | None] = {}
        self._ahead_BT: Tensor | None = None
        self._in_windows = False
        cache.rows.reserve(rows.stop, self.M)

    @property
    def states(self) -> States:
        if self.T > 1:
            raise NotImplementedError("recurrent layers take one token of a row at a time")
        return self

    def convolve(self, layer: int, x_SC: Tensor, weight_CW: Tensor) -> Tensor:
        inputs_BCW = torch.cat([self.cache.rows.states[layer, "inputs"][self.rows], x_SC[..., None]], -1)
        self.cache.rows.set_states((layer, "inputs"), self.rows, inputs_BCW[..., 1:])
        return (inputs_BCW * weight_CW).sum(-1)

    def recur(self, layer: int, rule: Rule, inputs: Sequence[Tensor], idle: Sequence[float]) -> Tensor:
        before_B = self.cache.rows.states[layer, "state"][self.rows]
        out_BT, after_B = rule([x[:, None] for x in inputs], before_B)
        self.cache.rows.set_states((layer, "state"), self.rows, after_B)
        return out_BT[:, 0]

    def see_ahead(self, ahead_S: Tensor, *, in_windows: bool = False) -> None:
        """See `Layout.see_ahead`; an image is whole among the new tokens of its row."""
        self._in_windows, self._ahead_BT = in_windows, ahead_S.new_zeros(self.B, self.T)
        self._ahead_BT[self.row_S, self.t_S if self.T > 1 else 0] = ahead_S

    def attend(self, layer: int, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scoring: Scoring) -> Tensor:
        B, T, M, grid, K, H = self.B, self.T, self.M, self.grid, key_SKD.shape[1], query_SHD.shape[1]
        keys, values = (x[self.rows] for x in self.cache.rows.of(layer, key_SKD, value_SKD))
        for store, x_SKD in ((keys, key_SKD), (values, value_SKD)):
            if self.uniform:
                store[:, :, M - 1] = x_SKD
            else:
                store[self.row_S, :, self.at_S] = x_SKD
        prompts = self.cache.prompts.of(layer, key_SKD, value_SKD)
        prompt_keys, prompt_values = (x[: grid.P, :, : grid.L] for x in prompts)
        query_BKQD = self._queries(scoring.scaled(query_SHD), K)  # Q = R T
        shared = grid.product(query_BKQD, prompt_keys.transpose(-1, -2), scoring.products)
        mask_BTN, sinks = self._mask(scoring.window), scoring.sinks_of(K, T)
        looks, own = [], []
        for part, longest in self.parts:
            products = scoring.products(query_BKQD[part], keys[part, :, :longest].transpose(-1, -2))
            scores = scoring.capped(torch.cat([shared[part], products], -1))
            if mask_BTN is not None:
                scores.view(-1, H, T, grid.L + longest).add_(mask_BTN[part, None, :, : grid.L + longest])
            weights = softmax(scores, sinks).to(values.dtype)
            looks.append(weights[..., : grid.L])
            own.append(weights[..., grid.L :] @ values[part, :, :longest])
        out = (grid.product(_joined(looks), prompt_values) + _joined(own)).reshape(B, H, T, -1)
        return out[:, :, 0] if T == 1 else out.transpose(1, 2)[self.row_S, self.t_S]

    def _queries(self, query_SHD: Tensor, K: int) -> Tensor:
        """Return queries [B, K, R*T, D]; zeros if a row has fewer than T."""
        _, H, D = query_SHD.shape
        if self.T == 1:
            return query_SHD.view(self.B, K, -1, D)
        query_BTHD = query_SHD.new_zeros(self.B, self.T, H, D)
        query_BTHD[self.row_S, self.t_S] = query_SHD
        return query_BTHD.transpose(1, 2).reshape(self.B, K, -1, D)

    def _mask(self, window: int | None) -> Tensor | None:
        """Return the mask [B, T, N]: -inf for keys that a token may not attend to (past its prompt's end, later than
        itself, outside the window), else 0."""
        if window not in self._masks:
            hidden_BTN = self._hidden(window)
            self._masks[window] = None if hidden_BTN is None else mask_of(hidden_BTN)
        return self._masks[window]

    def _hidden(self, window: int | None) -> Tensor | None:
        grid, device = self.grid, self.held_B.device
        longest = grid.L + self.M  # keys that the longest row can have
        narrow = window is not None and window < longest
        if self.uniform and not grid.ragged and not narrow:
            return None
        at_L, at_M = torch.arange(grid.L, device=device), torch.arange(self.M, device=device)
        shared_B1 = grid.shared_B[:, None]
        at_BT1 = (self.held_B[:, None] + torch.arange(self.T, device=device))[..., None]
        behind_BTL = (at_L >= shared_B1)[:, None].expand(-1, self.T, -1)
        ahead_BT = None if self._in_windows and window is None else self._ahead_BT
        last_BT1 = at_BT1 if ahead_BT is None else at_BT1 + ahead_BT[..., None]
        hidden = torch.cat([behind_BTL, at_M > last_BT1], -1)
        if window is not None and narrow:
            key_BN = torch.cat([at_L.expand(self.B, -1), shared_B1 + at_M], 1)
            hidden |= shared_B1[..., None] + at_BT1 - key_BN[:, None] >= window
        return hidden
