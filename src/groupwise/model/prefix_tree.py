"""Attention over a packed prefix tree: every token once, each attending to all that came before it in its rows.

Rows that begin alike stand in the packed row as lines (`algo.prefixes`): the first whole, of each other one only what
it adds. A line's `path` is where all of its tokens stand, its own at the end; the path of a tree's second line here
goes through the first two tokens of the first:

    5 6 7 8 | 9 3        paths 0 1 2 3   and   0 1 4 5        positions 0 1 2 3 | 2 3

A token attends to the tokens of its path up to itself. So a line is a causal sequence of which only the end is asked
for, and the softmax over all of it is one softmax: nothing needs to be merged. Lines are cut into tiles of `QUERIES`
tokens, each with its path as keys; tiles of like sizes are computed together, padded, as far as `BATCHED` allows. The
backward pass computes a tile's scores again, so that no more is kept than queries, keys and values of the packed row,
and sums the gradients of keys that many lines share in float32:

    P = softmax(S)      dV = P^T dO      dS = P * (dO V^T - sum(P * dO V^T))      dQ = dS K      dK = dS^T Q

Shapes: S packed tokens, B tiles of N queries and T keys each (padded), H query heads, K key-value heads, R = H / K,
D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from groupwise.model.attention import Scoring, mask_of, softmax
from groupwise.model.recurrence import Segments, segments_of_tree
from groupwise.model.transfer import on_device

QUERIES = 128  # tokens of a line that are scored at once

BATCHED = 1 << 20  # scores of one head at most, where several tiles are computed together

PADDED = 1.5  # ... of which this many times those that are needed

SMALL = 1 << 13  # ... unless there are fewer than this: starting the operations costs more than padding

NEVER = 1 << 30  # the position of a padding key: after every query


@dataclass(frozen=True)
class _Tiles:
    """Tiles of similar sizes, computed together. The M = sum of their lengths queries fill the B x N grid, line by
    line."""

    queries_M: Tensor  # where they stand in the packed row
    slots_M: Tensor | None  # ... and in the grid; None: they fill it
    keys_BT: Tensor  # where their keys stand
    query_positions_BN: Tensor
    key_positions_BT: Tensor

    def grid(self, x_SHD: Tensor, heads: int) -> Tensor:
        """Queries, or what belongs to them -> [B, heads, R*N, D]."""
        (B, N), (_, H, D) = self.query_positions_BN.shape, x_SHD.shape
        x_BNHD = _spread(x_SHD.index_select(0, self.queries_M), self.slots_M, B, N)
        return x_BNHD.view(B, N, heads, H // heads, D).permute(0, 2, 3, 1, 4).reshape(B, heads, -1, D)

    def put(self, out_SHD: Tensor, x_BKND: Tensor) -> None:
        """Write the inverse of `grid` into `out`."""
        (B, N), (_, H, D) = self.query_positions_BN.shape, out_SHD.shape
        x = x_BKND.view(B, -1, H // x_BKND.shape[1], N, D).permute(0, 3, 1, 2, 4).reshape(B * N, H, D)
        out_SHD.index_copy_(0, self.queries_M, x if self.slots_M is None else x.index_select(0, self.slots_M))

    def keys(self, x_SKD: Tensor) -> Tensor:
        """Keys or values -> [B, K, T, D]."""
        B, T = self.keys_BT.shape
        return x_SKD.index_select(0, self.keys_BT.view(-1)).view(B, T, *x_SKD.shape[1:]).transpose(1, 2)

    def add(self, sum_SKD: Tensor, x_BKTD: Tensor) -> None:
        """Add the transpose of `keys` to `sum` (scatter_add: on CPUs much faster than index_add)."""
        x = x_BKTD.transpose(1, 2).to(sum_SKD.dtype).reshape(self.keys_BT.numel(), -1)
        sum_SKD.view(len(sum_SKD), -1).scatter_add_(0, self.keys_BT.view(-1, 1).expand_as(x), x)

    def weigh(self, query_BKND: Tensor, key_BKTD: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """Scaled queries -> (scores, with a softcap as they are before masking; their softmax), both [B, K, R*N, T]."""
        scores = scoring.scores(query_BKND, key_BKTD.transpose(-1, -2))
        query_BN1, key_B1T = self.query_positions_BN[:, :, None], self.key_positions_BT[:, None]
        hidden_BNT = key_B1T > query_BN1
        if scoring.window is not None:
            hidden_BNT |= key_B1T <= query_BN1 - scoring.window
        masked = scores if scoring.softcap is None else scores.clone()
        masked.view(*scores.shape[:2], -1, *hidden_BNT.shape[1:]).add_(mask_of(hidden_BNT)[:, None, None])
        return scores, softmax(masked, scoring.sinks_of(scores.shape[1], hidden_BNT.shape[1]))


class PrefixTree:
    """The layout of lines of one or more prefix trees.

    Args:
        paths: for each line the packed positions of its row's tokens, from the first to the last of its own.
        own: how many of each path are the line's own; the lines' own tokens stand in the packed row in this order.

    Example: the two lines above are PrefixTree([[0, 1, 2, 3], [0, 1, 4, 5]], [4, 2]).
    """

    def __init__(self, paths: Sequence[Sequence[int]], own: Sequence[int], *, device: torch.device | str = "cpu"):
        tiles = [
            (torch.tensor(path[:stop]), stop - start)
            for path, n in zip(paths, own, strict=True)
            for start, stop in _ranges(len(path) - n, len(path))
        ]
        self.tiles = [_tiles(batch, device) for batch in _batches(tiles)]
        self.states = Segments(partial(segments_of_tree, paths, own), device=device)

    def see_ahead(self, ahead_S: Tensor, *, in_windows: bool = False) -> None:
        """Raise NotImplementedError: models that ask for it are laid out as groups (`layouts.BOTH_WAYS`)."""
        raise NotImplementedError("tokens of an image that see each other are laid out as groups only")

    def attend(self, layer: int, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scoring: Scoring) -> Tensor:
        query_SHD, key_SKD = (x.to(value_SKD.dtype) for x in (query_SHD, key_SKD))  # autocast rotates in float32
        inputs = (scoring.scaled(query_SHD), key_SKD, value_SKD, scoring.sinks, self.tiles, scoring)
        return _TreeAttention.apply(*inputs)  # type: ignore[return-value]


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        tiles: list[_Tiles],
        scoring: Scoring,
    ) -> Tensor:
        out = value.new_empty(*query.shape[:2], value.shape[-1])
        for tile in tiles:
            _, weights = tile.weigh(tile.grid(query, key.shape[1]), tile.keys(key), scoring)
            tile.put(out, (weights.to(value.dtype) @ tile.keys(value)).to(value.dtype))
        ctx.save_for_backward(query, key, value)
        ctx.tiles, ctx.scoring = tiles, scoring
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        query, key, value = ctx.saved_tensors
        grad_query, grad_key, grad_value, grad_sinks = _gradients(grads[0], query, key, value, ctx.tiles, ctx.scoring)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), grad_sinks, None, None


def _gradients(
    grad_SHD: Tensor, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, tiles: list[_Tiles], scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of (scaled) queries, keys, values and sinks; of all but the first in float32 at least."""
    exact = torch.promote_types(value_SKD.dtype, torch.float32)
    grad_query = torch.empty_like(query_SHD)
    grad_key, grad_value = (torch.zeros(x.shape, dtype=exact, device=x.device) for x in (key_SKD, value_SKD))
    trained = scoring.sinks is not None and scoring.sinks.requires_grad
    grad_sinks = torch.zeros_like(scoring.sinks) if trained else None  # type: ignore[arg-type]
    for tile in tiles:
        query, grad = (tile.grid(x, key_SKD.shape[1]) for x in (query_SHD, grad_SHD))
        key, value = tile.keys(key_SKD), tile.keys(value_SKD)
        scores, weights = tile.weigh(query, key, scoring)
        tile.add(grad_value, weights.to(value.dtype).transpose(-1, -2) @ grad)
        slope = (grad @ value.transpose(-1, -2)).to(weights.dtype)
        if grad_sinks is not None:  # whose weight is what is missing to 1
            along = (slope * weights).sum(-1) * (1 - weights.sum(-1))
            grad_sinks -= (
                along.unflatten(2, (-1, grad.shape[2] * key_SKD.shape[1] // query_SHD.shape[1])).sum((0, 3)).view(-1)
            )
        slope = torch.ops.aten._softmax_backward_data(slope, weights, -1, weights.dtype)
        if scoring.softcap is not None:
            slope = slope * (1 - (scores / scoring.softcap).square())
        slope = slope.to(value.dtype)
        tile.put(grad_query, (slope @ key).to(grad_query.dtype))
        tile.add(grad_key, slope.transpose(-1, -2) @ query)
    if (factor := scoring.factors(query_SHD.dtype)[1]) != 1:
        for each in (grad_query, grad_key):
            each.mul_(factor)
    return grad_query, grad_key, grad_value, grad_sinks


def _spread(x_MHD: Tensor, slots: Tensor | None, height: int, width: int) -> Tensor:
    """Return tokens at `slots` of a zero-padded grid -> [height, width, heads, D]."""
    if slots is not None:
        x_MHD = x_MHD.new_zeros(height * width, *x_MHD.shape[1:]).index_copy_(0, slots, x_MHD)
    return x_MHD.reshape(height, width, *x_MHD.shape[1:])


def _ranges(start: int, stop: int) -> list[tuple[int, int]]:
    return [(at, min(at + QUERIES, stop)) for at in range(start, stop, QUERIES)]


def _batches(tiles: list[tuple[Tensor, int]]) -> list[list[tuple[Tensor, int]]]:
    """Tiles (path, queries) by size, as many together as the limits on padding and memory allow."""
    batches: list[list[tuple[Tensor, int]]] = []
    needed = widest = 0
    for path, queries in sorted(tiles, key=lambda tile: (len(tile[0]), tile[1])):
        area, together = len(path) * queries, max(widest, queries)
        padded = (len(batches[-1]) + 1) * len(path) * together if batches else 0
        if batches and padded <= max(SMALL, min(BATCHED, PADDED * (needed + area))):
            batches[-1].append((path, queries))
            needed, widest = needed + area, together
        else:
            batches.append([(path, queries)])
            needed, widest = area, queries
    return batches


def _tiles(batch: list[tuple[Tensor, int]], device: torch.device | str) -> _Tiles:
    lengths = [queries for _, queries in batch]
    width, full = max(lengths), len(set(lengths)) == 1
    positions = [torch.arange(len(path), dtype=torch.int32) for path, _ in batch]
    own = [at[-queries:] for at, (_, queries) in zip(positions, batch, strict=True)]
    slots = [torch.arange(queries) + b * width for b, queries in enumerate(lengths)]
    own_BN = pad_sequence(own, batch_first=True)  # a padding query stands at 0 and sees the first key: no NaN
    return _Tiles(
        queries_M=on_device(torch.cat([path[-queries:] for path, queries in batch]), device),
        slots_M=None if full else on_device(torch.cat(slots), device),
        keys_BT=on_device(pad_sequence([path for path, _ in batch], batch_first=True), device),
        query_positions_BN=on_device(own_BN, device),
        key_positions_BT=on_device(pad_sequence(positions, batch_first=True, padding_value=NEVER), device),
    )
