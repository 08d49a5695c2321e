"""What comes back from the device: the same numbers, side by side in one copy of each type."""

from __future__ import annotations

import torch

from groupwise.model.transfer import on_host


def test_what_is_copied_together_comes_apart_again():
    g = torch.Generator().manual_seed(0)
    given = {
        "first": torch.randn(3, 4, generator=g, requires_grad=True),
        "half": torch.randn(2, 5, generator=g).bfloat16(),
        "transposed": torch.randn(4, 3, generator=g).T,
        "one": torch.tensor(2.0),
        "none": torch.zeros(0, 7),
        "other half": torch.randn(6, generator=g).bfloat16(),
    }
    found = on_host(given)
    assert list(found) == list(given)
    for name, x in given.items():
        mine = found[name]
        assert (mine.dtype, mine.shape, mine.requires_grad) == (x.dtype, x.shape, False)
        assert torch.equal(mine, x) and mine.is_contiguous()
        assert not mine.numel() or mine.data_ptr() != x.data_ptr()
    assert len({each.untyped_storage().data_ptr() for each in found.values()}) == 2  # of float32, and of bfloat16
    assert on_host({}) == {}
