"""Attention over packed rows and prefix trees by PyTorch's FlexAttention, with a mask from two numbers a token.

Both kinds of packed row are forests: a prompt with its completions is a tree of depth two, lines that fork off one
another are one of any depth. Numbered depth-first, the tokens that come after one in any of its rows are an interval:

    query attends to key     iff     enter[key] <= enter[query] < leave[key]

The row of `SharedPrompts([3, 2], [2, 1, 2], [0, 0, 1])`, prompts first, and that of two lines of which the second goes
on after two tokens of the first (`algo.prefixes`):

            a a a b  b | A A | B | C  C               5 6 7 8 | 9 3
    enter   0 1 2 6  7 | 3 4 | 5 | 8  9               0 1 2 3 | 4 5
    leave   6 6 6 10 10| 5 5 | 6 | 10 10              6 6 4 4 | 6 6

PyTorch's FlexAttention (arXiv 2412.05496) compiles this rule into one fused kernel, forward and backward. It works on
tiles of `BLOCK` x `BLOCK` scores: those without a visible pair are passed over, those that are visible whole are not
masked, and none is ever written to memory. Which tiles are which is found out once for a micro-batch and window.

The kernels need a CUDA GPU; on a CPU the uncompiled function computes the same densely, and without gradients.
`why_not_flex` decides whether a model can be trained this way.

Shapes: S packed tokens, T of them with padding, n = T / BLOCK, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from groupwise.model.attention import Scoring
from groupwise.model.recurrence import PackedSegment, Segments, segments_of_groups, segments_of_tree
from groupwise.model.transfer import on_device

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # tokens of a tile's side

LEAST = 2 * BLOCK  # tokens of a row: of a single tile torch would compile kernels of their own

ROWS = 8 * BLOCK  # queries whose visible keys are looked at at once


class Forest:
    """The layout of a packed row, whatever was packed. Made by `of_groups` or `of_tree`.

    Args:
        enter: each token's number, depth-first.
        leave: the first number after those that the token is visible to.
        positions: each token's position in its rows, in which sliding windows count.
        segments: makes the segments of the row, for recurrent layers.
    """

    def __init__(
        self,
        enter: Sequence[int],
        leave: Sequence[int],
        positions: Sequence[int],
        segments: Callable[[], list[PackedSegment]],
        *,
        device: torch.device | str = "cpu",
    ):
        self.S = len(enter)
        self.T = max(LEAST, -(-self.S // BLOCK) * BLOCK)
        alone = range(self.S, self.T)  # a padding token sees itself
        columns = ([*enter, *alone], [*leave, *(at + 1 for at in alone)], [*positions, *(0 for _ in alone)])
        self._enter_T, self._leave_T, self._position_T = (on_device(column, device, torch.int32) for column in columns)
        self._blocks: dict[int | None, BlockMask] = {}
        self.states = Segments(segments, device=device)

    @classmethod
    def of_groups(
        cls,
        prompt_lengths: Sequence[int],
        completion_lengths: Sequence[int] = (),
        prompt_of_row: Sequence[int] = (),
        *,
        device: torch.device | str = "cpu",
    ) -> Forest:
        """Return prompts and their completions, given and packed as for `SharedPrompts`."""
        sizes = list(prompt_lengths)
        for n, prompt in zip(completion_lengths, prompt_of_row, strict=True):
            sizes[prompt] += n
        ends = list(accumulate(sizes))
        next_up = [end - size for end, size in zip(ends, sizes, strict=True)]  # of each prompt, the next number
        owners = [*range(len(sizes)), *prompt_of_row]
        enter: list[int] = []
        leave: list[int] = []
        positions: list[int] = []
        for row, (n, owner) in enumerate(zip([*prompt_lengths, *completion_lengths], owners, strict=True)):
            is_prompt, begin = row < len(sizes), next_up[owner]
            next_up[owner] = begin + n
            enter.extend(range(begin, begin + n))
            leave.extend([ends[owner] if is_prompt else begin + n] * n)
            start = 0 if is_prompt else prompt_lengths[owner]
            positions.extend(range(start, start + n))
        segments = partial(segments_of_groups, prompt_lengths, completion_lengths, prompt_of_row)
        return cls(enter, leave, positions, segments, device=device)

    @classmethod
    def of_tree(
        cls, paths: Sequence[Sequence[int]], own: Sequence[int], *, device: torch.device | str = "cpu"
    ) -> Forest:
        """Return lines of prefix trees, given and packed as for `PrefixTree`: depth-first already."""
        S = sum(own)
        leave, positions = [S] * S, [0] * S
        before: Sequence[int] = ()
        start = 0
        for path, n in zip(paths, own, strict=True):
            known = len(path) - n
            for token in before[known:]:
                leave[token] = start
            positions[start : start + n] = range(known, len(path))
            before, start = path, start + n
        return cls(range(S), leave, positions, partial(segments_of_tree, paths, own), device=device)

    def see_ahead(self, ahead_S: Tensor, *, in_windows: bool = False) -> None:
        """Raise NotImplementedError: models that ask for it are laid out as groups (`layouts.BOTH_WAYS`)."""
        raise NotImplementedError("tokens of an image that see each other are laid out as groups only")

    def attend(self, layer: int, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scoring: Scoring) -> Tensor:
        query, key, value = (  # [1, heads, T, D]; autocast rotates in float32
            pad(x.to(value_SKD.dtype), (0, 0, 0, 0, 0, self.T - self.S)).transpose(0, 1).unsqueeze(0)
            for x in (query_SHD, key_SKD, value_SKD)
        )
        cap = None if scoring.softcap is None else _capped(scoring.softcap, value.device, value.dtype)
        told = {"score_mod": cap, "block_mask": self.blocks(scoring.window), "scale": scoring.scaling}
        kernel = partial(_kernel(value.device.type), **told)
        if scoring.sinks is None:
            out = kernel(query, key, value, enable_gqa=True)
        else:
            out, aux = kernel(query, key, value, enable_gqa=True, return_aux=_log_sums())
            seen = torch.sigmoid(aux.lse - scoring.sinks[:, None])  # the part of the softmax that is not the sink's
            out = (out * seen[..., None]).to(value.dtype)
        return out[0].transpose(0, 1)[: self.S]

    def blocks(self, window: int | None) -> BlockMask:
        """Return which tiles are computed, and which of them are masked; the same one each time."""
        if window not in self._blocks:
            self._blocks[window] = self._looked_at(window)
        return self._blocks[window]

    def _looked_at(self, window: int | None) -> BlockMask:
        from torch.nn.attention.flex_attention import BlockMask

        visible, at_T = self._rule(window), torch.arange(self.T, device=self._enter_T.device)
        counts_nn = torch.cat([_pairs(visible(0, 0, rows[:, None], at_T)) for rows in at_T.split(ROWS)])
        whole_nn = counts_nn == BLOCK * BLOCK
        return BlockMask.from_kv_blocks(
            *_listed((counts_nn > 0) & ~whole_nn), *_listed(whole_nn), BLOCK_SIZE=BLOCK, mask_mod=visible
        )

    def _rule(self, window: int | None) -> Callable[..., Tensor]:
        """(batch, head, query, key) -> whether it is visible; batch and head do not matter.

        What differs between micro-batches and windows it reads from a tensor: torch compiles numbers into the kernels.
        One tensor, for Inductor confuses the sizes of several where lengths vary (on CPUs, torch 2.13).
        """
        position_T = self._position_T
        hidden_T = torch.full_like(position_T, -1) if window is None else position_T - window  # the last that is
        told_4T = torch.stack([self._enter_T, self._leave_T, position_T, hidden_T])

        def visible(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
            after = (told_4T[0, key] <= told_4T[0, query]) & (told_4T[0, query] < told_4T[1, key])
            return after & (told_4T[2, key] > told_4T[3, query])

        return visible


def _pairs(visible_RT: Tensor) -> Tensor:
    """Return the visible pairs of each tile [R / BLOCK, n]."""
    return visible_RT.view(len(visible_RT) // BLOCK, BLOCK, -1, BLOCK).sum((1, 3))


def _listed(chosen_nn: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many tiles of each row are chosen, and their numbers, the chosen first: as BlockMask wants them."""
    chosen = chosen_nn[None, None].int()
    return chosen.sum(-1, dtype=torch.int32), chosen.argsort(dim=-1, descending=True, stable=True).int()


@cache
def _log_sums() -> Any:
    """Return the request that has the kernel return log sum exp(scores) [1, H, T] in addition to the output."""
    from torch.nn.attention.flex_attention import AuxRequest

    return AuxRequest(lse=True)


@cache
def _capped(softcap: float, device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    """(score, ...) -> the score, capped."""
    limit = torch.tensor(softcap, dtype=torch.promote_types(dtype, torch.float32), device=device)

    def capped(score: Tensor, batch: Any, head: Any, query: Any, key: Any) -> Tensor:
        return limit * torch.tanh(score / limit)

    return capped


def _kernel(device: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return _compiled() if device == "cuda" else flex_attention  # gpu-aware


@cache
def _compiled() -> Callable[..., Any]:  # gpu-seen: FlexAttention's compiled kernels (train.attention flex)
    """Compiled when first called, again when the length of a row first changes, and then for rows of any length."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
