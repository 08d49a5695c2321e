"""Prompts' keys shared by their rows: the grid against a product per row, and slots that come and go."""

from __future__ import annotations

import pytest
import torch

from groupwise.engine.kv_cache import Grid, KeyValueCache


@pytest.mark.parametrize(
    ("slots", "kind"),
    [
        ([0, 0, 0, 1, 1, 1], "whole"),  # cell i is row i
        ([0, 1, 0, 1, 1], "gaps"),  # rows were moved, members are missing
        ([0] * 20 + list(range(1, 12)), "slot by slot"),  # one large group among small ones
        ([0, 1, 2], "single"),
        ([11], "slot by slot"),  # of the others no row is there
    ],
)
def test_each_row_times_its_prompt(slots: list[int], kind: str) -> None:
    g = torch.Generator().manual_seed(0)
    lengths = [3 + slot % 2 for slot in range(max(slots) + 1)]
    B, P, K, R, D = len(slots), len(lengths), 2, 3, 5
    x, prompts = torch.randn(B, K, R, D, generator=g), torch.randn(P, K, D, 4, generator=g)
    grid = Grid(slots, [lengths[slot] for slot in slots], lengths, torch.device("cpu"))
    assert (grid.members is not None) == (kind == "slot by slot")
    assert (grid.members is None and grid.cell_B is None) == (kind in ("whole", "single"))
    expected = torch.stack([x[row] @ prompts[slot] for row, slot in enumerate(slots)])
    torch.testing.assert_close(grid.product(x, prompts), expected)
    assert grid.shared_B.tolist() == [lengths[slot] for slot in slots]


def test_the_last_prompt_moves_into_a_free_slot() -> None:
    cache = KeyValueCache(8)
    assert list(cache.add_prompts([2, 3, 4])) == [0, 1, 2]
    like = torch.zeros(1, 1, 1), torch.zeros(1, 1, 2)
    keys, values = cache.prompts.of(0, *like)
    assert (keys.shape[-1], values.shape[-1]) == (1, 2)
    for slot in range(3):
        keys[slot], values[slot] = slot, 10 + slot
    assert cache.drop_prompt(0) == 2 and cache.lengths == [4, 3]
    assert keys[0, 0, :4, 0].tolist() == [2] * 4 and values[0, 0, :4, 0].tolist() == [12] * 4
    assert cache.drop_prompt(1) is None and cache.lengths == [4]
    assert list(cache.add_prompts([9] * 5)) == [1, 2, 3, 4, 5]  # grows, and keeps what is there
    keys, _ = cache.prompts.of(0, *like)
    assert keys.shape[2] >= 9 and keys[0, 0, :4, 0].tolist() == [2] * 4
