"""The ways to compute attention over a micro-batch: which layouts say who attends to whom in its packed row.

    MERGED    `SharedPrompts` and `PrefixTree`: matrix products and softmaxes over padded grids; on any device
    BOTH_WAYS `SharedPrompts` alone
    FLEX      `Forest`: FlexAttention's compiled kernels, for both; on CUDA GPUs

They compute the same but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from groupwise.model.attention import Layout, SharedPrompts
from groupwise.model.flex import Forest
from groupwise.model.image_tokens import vision_of
from groupwise.model.prefix_tree import PrefixTree


@dataclass(frozen=True)
class Layouts:
    """The makers of layouts: of groups, called as `SharedPrompts` is, and of prefix trees, called as `PrefixTree` is;
    `of_tree` None: all are laid out as groups."""

    of_groups: Callable[..., Layout]
    of_tree: Callable[..., Layout] | None


MERGED = Layouts(SharedPrompts, PrefixTree)

BOTH_WAYS = Layouts(SharedPrompts, None)  # of models whose tokens of an image see each other

FLEX = Layouts(Forest.of_groups, Forest.of_tree)


def merged_for(model: PreTrainedModel) -> Layouts:
    """Return the layouts of matrix products for a model: without trees where its tokens of an image see each other."""
    vision = vision_of(model)
    return MERGED if vision is None or not vision.both_ways else BOTH_WAYS
