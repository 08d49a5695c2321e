"""The keys and values of the rows that an engine decodes, and the two ways in which a forward meets them.

    Prefill   packed prompts: attention within each prompt, whose keys and values go to all rows of its completions
    Decode    one new token per row: its key and value join the row's, and it attends to all of them

Shapes: B active rows, S packed tokens, H query heads, K key-value heads, D head size, M cache length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from groupwise.algo.attention import Scoring, SharedPrompts


class KeyValueCache:
    """Keys and values of up to `most_rows` rows: per layer [rows, K, M, D], both sizes growing as they are needed."""

    def __init__(self, most_rows: int):
        self.most_rows = most_rows
        self.rows, self.length = 0, 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` rows of `length` tokens, keeping what is there. Grows by a quarter or more at a time."""
        if rows <= self.rows and length <= self.length:
            return
        if rows > self.rows:
            self.rows = min(self.most_rows, max(rows, self.rows * 2))
        if length > self.length:
            self.length = (max(length, self.length * 5 // 4) + 63) // 64 * 64
        for layer, (keys, values) in self.layers.items():
            self.layers[layer] = self._larger(keys), self._larger(values)

    def of(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's keys and values, made on first use in the type of `like` [..., K, D]."""
        if layer not in self.layers:
            shape = (self.rows, like.shape[-2], self.length, like.shape[-1])
            self.layers[layer] = (like.new_zeros(shape), like.new_zeros(shape))
        return self.layers[layer]

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy rows `source` over rows `target`, the first `length` tokens of them."""
        for pair in self.layers.values():
            for x in pair:
                x[target, :, :length] = x[source, :, :length]

    def _larger(self, x: Tensor) -> Tensor:
        larger = x.new_zeros(self.rows, x.shape[1], self.length, x.shape[3])
        larger[: x.shape[0], :, : x.shape[2]] = x
        return larger


class Prefill:
    """Layout of packed prompts that also writes each prompt's keys and values to the rows of its completions."""

    def __init__(
        self,
        cache: KeyValueCache,
        lengths: Sequence[int],
        rows_of_prompt: Sequence[Sequence[int]],
        device: torch.device,
    ):
        self.prompts = SharedPrompts(lengths, device=device)
        self.cache, self.rows_of_prompt = cache, [torch.tensor(rows, device=device) for rows in rows_of_prompt]
        self.lengths = list(lengths)

    def attend(self, layer: int, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scoring: Scoring) -> Tensor:
        keys, values = self.cache.of(layer, key_SKD)
        start = 0
        for rows, length in zip(self.rows_of_prompt, self.lengths, strict=True):
            stop = start + length
            keys[rows, :, :length] = key_SKD[start:stop].transpose(0, 1)
            values[rows, :, :length] = value_SKD[start:stop].transpose(0, 1)
            start = stop
        return self.prompts.attend(layer, query_SHD, key_SKD, value_SKD, scoring)


class Decode:
    """Layout of one new token per active row, attending to that row's cache."""

    def __init__(self, cache: KeyValueCache, position_B: Tensor):
        self.cache, self.position_B = cache, position_B.clone()  # the engine moves its own on
        self.row_B = torch.arange(len(position_B), device=position_B.device)
        self.longest = int(position_B.max()) + 1
        self.gap_BM = position_B[:, None] - torch.arange(self.longest, device=position_B.device)
        cache.reserve(len(position_B), self.longest)

    def attend(self, layer: int, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scoring: Scoring) -> Tensor:
        B, H, D = query_SHD.shape
        keys, values = self.cache.of(layer, key_SKD)
        keys[self.row_B, :, self.position_B] = key_SKD
        values[self.row_B, :, self.position_B] = value_SKD
        K = keys.shape[1]
        scores = scoring.scores(query_SHD.view(B, K, H // K, D), keys[:B, :, : self.longest])
        hidden_BM = self.gap_BM < 0
        if scoring.window is not None:
            hidden_BM = hidden_BM | (self.gap_BM >= scoring.window)
        weights = scores.masked_fill(hidden_BM[:, None, None], float("-inf")).softmax(-1)
        return (weights.to(values.dtype) @ values[:B, :, : self.longest]).view(B, H, D)
