"""The layout of several packed rows, one after another, that know nothing of each other.

Rows whose padded grids have one shape (completions a prompt, longest prompt, longest completion) are scored together:
attention is a batch over prompts, and the products of one do not depend on how many there are. All others are scored
one by one. So each row has, to the bit, what it has alone, and not even a number that is not finite is seen by
another: padding holds a row's own tokens (`attention.Lines`).

Shapes: S tokens of all rows, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from groupwise.model.attention import Layout, Moved, Scoring, SharedPrompts
from groupwise.model.recurrence import States
from groupwise.model.transfer import on_device


class JointLayout:
    """The layout of rows that have one each, of this many tokens (`sizes`)."""

    def __init__(self, layouts: Sequence[Layout], sizes: Sequence[int], *, device: torch.device | str = "cpu"):
        starts = [0, *accumulate(sizes)]
        alike: dict[object, list[int]] = {}
        for number, layout in enumerate(layouts):
            alike.setdefault(_shape(layout) or number, []).append(number)
        self._parts = [_merged(layouts, mine, device) for mine in alike.values()]
        self._sizes = [sum(sizes[number] for number in mine) for mine in alike.values()]
        order = [token for mine in alike.values() for token in _order(layouts, mine, starts)]
        self._there: tuple[Tensor, Tensor] | None = None  # where each token stands in the parts, and back
        if order != sorted(order):
            there = torch.tensor(order)
            back = torch.empty_like(there).index_copy(0, there, torch.arange(len(order)))
            self._there = on_device(there, device), on_device(back, device)

    @property
    def states(self) -> States:
        """Raise NotImplementedError: recurrent layers of several rows are not computed together."""
        raise NotImplementedError("rows of several learners have no states in recurrent layers")

    def see_ahead(self, ahead_S: Tensor, *, in_windows: bool = False) -> None:
        """Raise NotImplementedError: models that see are not computed for several learners."""
        raise NotImplementedError("rows of several learners have no images")

    def attend(self, layer: int, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scoring: Scoring) -> Tensor:
        queries, keys, values = (self._moved(x).split(self._sizes) for x in (query_SHD, key_SKD, value_SKD))
        parts = zip(self._parts, queries, keys, values, strict=True)
        out = [layout.attend(layer, query, key, value, scoring) for layout, query, key, value in parts]
        return self._moved(torch.cat(out), back=True)

    def _moved(self, x_SHD: Tensor, *, back: bool = False) -> Tensor:
        """Return the tokens in the order of the parts, or from it."""
        if self._there is None:
            return x_SHD
        there, here = reversed(self._there) if back else self._there
        return Moved.apply(x_SHD.flatten(1), there, here, None, 1.0).view(x_SHD.shape)  # type: ignore[union-attr]


def _shape(layout: Layout) -> tuple[int, int, int] | None:
    """Return what grids must have alike to be one; None: of another kind, which stays by itself. So does a grid with
    lines of one token: to a product with one column a batch of one is another sum than a batch of several."""
    if type(layout) is not SharedPrompts or 1 in (layout.L, layout.C):
        return None
    return layout.G, layout.L, layout.C


def _merged(layouts: Sequence[Layout], mine: Sequence[int], device: torch.device | str) -> Layout:
    """Return the layout of all prompts of these rows and then all of their completions; of one row its own."""
    if len(mine) == 1:
        return layouts[mine[0]]
    prompts: list[int] = []
    completions: list[int] = []
    prompt_of_row: list[int] = []
    owners: list[int] = []
    for owner, number in enumerate(mine):
        layout = layouts[number]
        assert isinstance(layout, SharedPrompts)
        of_prompts, of_completions, of_rows = layout.lengths
        prompt_of_row += [prompt + len(prompts) for prompt in of_rows]
        owners += [owner] * len(of_prompts)
        prompts += of_prompts
        completions += of_completions
    return SharedPrompts(prompts, completions, prompt_of_row, owners=owners, device=device)


def _order(layouts: Sequence[Layout], mine: Sequence[int], starts: Sequence[int]) -> list[int]:
    """Return the tokens of these rows in the order of their part."""
    if len(mine) == 1:
        return [*range(starts[mine[0]], starts[mine[0] + 1])]
    splits = [starts[number] + getattr(layouts[number], "split", 0) for number in mine]
    prompts = [range(starts[number], split) for number, split in zip(mine, splits, strict=True)]
    completions = [range(split, starts[number + 1]) for number, split in zip(mine, splits, strict=True)]
    return [*chain.from_iterable(prompts + completions)]
