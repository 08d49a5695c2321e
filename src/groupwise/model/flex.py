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

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from groupwise.model.attention import Layout, Scoring, SharedPrompts
from groupwise.model.packed_check import packed_forward_gap, packed_tolerance
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
        positions: where each token stands in its rows; sliding windows count in these.
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
        """Prompts and their completions, given and packed as for `SharedPrompts`."""
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
        """Lines of prefix trees, given and packed as for `PrefixTree`: depth-first already."""
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

    def attend(self, layer: int, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scoring: Scoring) -> Tensor:
        query, key, value = (  # [1, heads, T, D]; autocast rotates in float32
            pad(x.to(value_SKD.dtype), (0, 0, 0, 0, 0, self.T - self.S)).transpose(0, 1).unsqueeze(0)
            for x in (scoring.scaled(query_SHD), key_SKD, value_SKD)
        )
        cap = None if scoring.softcap is None else _capped(scoring.softcap, value.device, value.dtype)
        kernel = partial(_kernel(value.device.type), score_mod=cap, block_mask=self.blocks(scoring.window))
        if scoring.sinks is None:
            out = kernel(query, key, value, scale=1.0, enable_gqa=True)
        else:
            out, aux = kernel(query, key, value, scale=1.0, enable_gqa=True, return_aux=_log_sums())
            seen = torch.sigmoid(aux.lse - scoring.sinks[:, None])  # the part of the softmax that is not the sink's
            out = (out * seen[..., None]).to(value.dtype)
        return out[0].transpose(0, 1)[: self.S]

    def blocks(self, window: int | None) -> BlockMask:
        """Which tiles are computed, and which of them are masked; the same one each time."""
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
    """Visible pairs of each tile [R / BLOCK, n]."""
    return visible_RT.view(len(visible_RT) // BLOCK, BLOCK, -1, BLOCK).sum((1, 3))


def _listed(chosen_nn: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles of each row are chosen, and their numbers, the chosen first: as BlockMask wants them."""
    chosen = chosen_nn[None, None].int()
    return chosen.sum(-1, dtype=torch.int32), chosen.argsort(dim=-1, descending=True, stable=True).int()


@cache
def _log_sums() -> Any:
    """Asks the kernel for log sum exp(scores) [1, H, T] beside the output."""
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
def _compiled() -> Callable[..., Any]:  # gpu-only: FlexAttention's compiled kernels (train.attention flex)
    """Compiled when first called, again when the length of a row first changes, and then for rows of any length."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


# ----------------------------------------------------------------------------------------------------------------------
# Whether a model can be trained with FlexAttention where it is: found out by trying it, before the first step.
#
# What the kernels support (head sizes, types, GPUs, versions of Triton) changes with each torch, so nothing of it is
# written down here. On the model's first use
#
#     the packed forward with it is compared with the model's own, as every packed forward is (`packed_check`)
#     each kind of layer that this meets is compared with `SharedPrompts`, output and gradients, on random rows of two
#     lengths: for the first torch compiles kernels of their own, for the second those for rows of any length
#
# and whatever is raised, or differs by more than rounding, is the reason not to use it. With gradient checkpointing the
# trial is under a checkpoint too, whose hooks torch must keep out of what it traces: uncompiled it does not, and with a
# softcap gradients are wrong (seen on CPUs, torch 2.13).
# ----------------------------------------------------------------------------------------------------------------------

PROMPTS, COMPLETIONS, OWNERS = (300, 150), (130, 0, 90, 160), (0, 0, 0, 1)  # tokens: tiles of every kind
LENGTHS = (1, 2)  # times these
TOLERANCE, TOLERANCE_16_BITS = 5e-3, 3e-2  # of the norm of what is compared


def why_not_flex(model: PreTrainedModel, *, checkpointing: bool) -> str | None:
    """Why FlexAttention cannot be used to train this packed model on its device; None if it can. `checkpointing`: with
    gradient checkpointing."""
    if model.device.type != "cuda":  # gpu-only below: the trial of FlexAttention with a model
        return f"it needs a CUDA GPU, and the model is on {model.device.type!r}"
    if importlib.util.find_spec("torch.nn.attention.flex_attention") is None:
        return f"torch {torch.__version__} does not have it"
    return trouble(model, checkpointing=checkpointing)


def trouble(model: PreTrainedModel, *, checkpointing: bool) -> str | None:
    """What goes wrong when it is tried; None if nothing does."""
    layout_of, tolerance = partial(_Compared, checkpointing=checkpointing), packed_tolerance(model)
    try:
        gap = packed_forward_gap(model, layout_of=layout_of)
    except Exception as error:  # compilers raise all kinds
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if gap <= tolerance:
        return None
    return f"its forward differs from the model's own by {gap:.3g} nats (tolerance {tolerance:g})"


class _Compared:
    """Attends by a `Forest`, having compared it for each kind of layer that it meets."""

    def __init__(self, *lengths: Any, checkpointing: bool, device: torch.device):
        self._forest, self._checkpointing = Forest.of_groups(*lengths, device=device), checkpointing
        self._seen: set[tuple[tuple[int, int, int, int], Scoring, bool]] = set()
        self.states = self._forest.states

    def attend(self, layer: int, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scoring: Scoring) -> Tensor:
        heads = (query_SHD.shape[1], key_SKD.shape[1], query_SHD.shape[-1], value_SKD.shape[-1])
        kind = (heads, scoring, scoring.sinks is None)
        if kind not in self._seen:
            self._seen.add(kind)
            _compare(heads, value_SKD, scoring, self._checkpointing)
        return self._forest.attend(layer, query_SHD, key_SKD, value_SKD, scoring)


def _compare(heads: tuple[int, int, int, int], like: Tensor, scoring: Scoring, checkpointing: bool) -> None:
    """Raises ArithmeticError where outputs or gradients are not those of `SharedPrompts`."""
    limit = TOLERANCE_16_BITS if like.itemsize == 2 else TOLERANCE
    for times in LENGTHS:
        prompts, completions = ([n * times for n in part] for part in (PROMPTS, COMPLETIONS))
        forest = Forest.of_groups(prompts, completions, OWNERS, device=like.device)
        merged = SharedPrompts(prompts, completions, OWNERS, device=like.device)
        want, got = (_tried(layout, forest.S, heads, like, scoring, checkpointing) for layout in (merged, forest))
        for what, x, y in zip(("output", "gradient of q", "gradient of k", "gradient of v"), want, got, strict=True):
            gap, size = float((x - y).norm()), float(x.norm())
            if not gap <= limit * size:
                raise ArithmeticError(
                    f"its {what} differs from merged's by {gap:.2g}, of {size:.2g} (tolerance {limit:g})"
                )


def _tried(
    layout: Layout, S: int, heads: tuple[int, int, int, int], like: Tensor, scoring: Scoring, checkpointing: bool
) -> list[Tensor]:
    """The output for random queries, keys and values, and their gradients, in float32."""
    H, K, D, V = heads
    g = torch.Generator().manual_seed(0)
    shapes = ((H, D), (K, D), (K, V), (H, V))
    query, key, value, slope = (torch.randn(S, *shape, generator=g).to(like) for shape in shapes)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    with torch.enable_grad():
        if checkpointing:
            out: Any = checkpoint(layout.attend, 0, query, key, value, scoring, use_reentrant=False)
        else:
            out = layout.attend(0, query, key, value, scoring)
        return [x.detach().float() for x in (out, *torch.autograd.grad(out, inputs, slope))]
