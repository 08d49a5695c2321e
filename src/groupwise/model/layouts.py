"""The ways to compute attention over a micro-batch: which layouts say who attends to whom in its packed row.

    MERGED    `SharedPrompts` and `PrefixTree`: matrix products and softmaxes over padded grids; on any device
    FLEX      `Forest`: FlexAttention's compiled kernels, for both; on CUDA GPUs

They compute the same but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from groupwise.model.attention import Layout, SharedPrompts
from groupwise.model.flex import Forest
from groupwise.model.prefix_tree import PrefixTree


@dataclass(frozen=True)
class Layouts:
    """What makes the layout of groups, called as `SharedPrompts` is, and that of prefix trees, called as `PrefixTree`
    is."""

    of_groups: Callable[..., Layout]
    of_tree: Callable[..., Layout]


MERGED = Layouts(SharedPrompts, PrefixTree)

FLEX = Layouts(Forest.of_groups, Forest.of_tree)
