"""tools/simulated_gpu.py: results are those of the CPU, and each way of waiting is seen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from simulated_gpu import GPU, SimulatedGpu

WAITS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "list": lambda x: x.tolist(),
    "bool": lambda x: bool((x > 0).any()),
    "to the CPU": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "bools": lambda x: x[x > 0],
    "bincount": lambda x: x.long().abs().bincount(),
    "from a list": lambda x: torch.tensor([1.0], device=x.device),
    "from the CPU": lambda x: torch.ones(3).to(x.device, non_blocking=True),
    "indices": lambda x: x[torch.tensor([0, 1])],
}
PROCEEDS: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda x: (x * 2 + 1).softmax(0),
    "views": lambda x: x.view(2, 3).transpose(0, 1)[1:],
    "index": lambda x: x[torch.zeros(2, dtype=torch.long, device=x.device)],
    "pinned": lambda x: torch.ones(3).pin_memory().to(x.device, non_blocking=True),
    "made there": lambda x: torch.arange(4, device=x.device) + x.new_zeros(4),
}


@pytest.mark.parametrize(("waits", "what"), [(n, what) for n, all in ((1, WAITS), (0, PROCEEDS)) for what in all])
def test_what_waits(waits: int, what: str):
    gpu, function = SimulatedGpu(), {**WAITS, **PROCEEDS}[what]
    with gpu:
        x = torch.arange(6.0).pin_memory().to(GPU, non_blocking=True)
        assert x.is_cuda and x.device == GPU
        with gpu.counting() as counts:
            function(x)
    assert bool(counts.waits) == bool(waits), counts.waited


def test_launches_and_gradients():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(5, 3)
    model(x).square().mean().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    gpu = SimulatedGpu()
    with gpu:
        gpu.move(model)
        there = x.pin_memory().to(GPU, non_blocking=True)
        with gpu.counting() as counts:
            model(there).square().mean().backward()
        assert counts.operations["addmm"] == 2 and counts.operations["tanh"] == 1 and not counts.waits
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad.cpu(), gradient)
        with gpu.counting() as counts:
            there.view(3, 5).transpose(0, 1)
        assert not counts.launches
