"""FlexAttention's compiled kernels: the gradients of merged attention."""

from __future__ import annotations

import pytest
import torch

from groupwise.algo.loss import resolve_loss
from groupwise.model.layouts import FLEX, MERGED
from groupwise.model.load import load_model
from groupwise.train.learner import Learner
from groupwise.types import Sample

GROUPS = (
    [(5, (4, 1, 6)), (0, (5, 3)), (9, (2,)), (3, (7, 1, 3, 2))],
    [(200, (150, 90, 1)), (31, (70, 300))],
)


def gradients(learner: Learner, samples: list[Sample]) -> list[torch.Tensor]:
    learner.zero_grad()
    learner.forward_backward(samples, resolve_loss("grpo"))
    return [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in learner.parameters]


def assert_close(mine: list[torch.Tensor], theirs: list[torch.Tensor], tolerance: float) -> None:
    assert any(bool(each.any()) for each in theirs)
    for one, other in zip(mine, theirs, strict=True):
        assert float((one - other).norm()) <= tolerance * float(other.norm())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 5e-2)])
def test_the_kernels_compute_the_gradients_of_merged_attention(
    batch, dtype: str, tolerance: float, checkpointing: bool
):
    base = load_model("starter", device="cuda", dtype=dtype)
    merged, flex = (Learner(base, attention=kind, gradient_checkpointing=checkpointing) for kind in ("merged", "flex"))
    assert flex.why_not_flex is None and flex.layouts is FLEX and merged.layouts is MERGED
    for groups in GROUPS:
        samples = batch(*groups)
        assert_close(gradients(flex, samples), gradients(merged, samples), tolerance)


def test_the_kernels_compute_forked_histories(batch):
    """A prefix tree: lines that begin alike beyond their prompt."""
    base = load_model("starter", device="cuda", dtype="float32")
    merged, flex = (Learner(base, attention=kind) for kind in ("merged", "flex"))
    history = tuple(range(300, 700))
    said = [(7, at, 3) for at in (0, 120, 240)]
    samples = [
        Sample(
            prompt_ids=(*history, *range(at)),
            completion_ids=ids,
            mask=(1, 0, 1),
            behaviour_logprobs=(-6.9, 0.0, -6.9),
            advantage=1.0 - at / 100,
        )
        for at, ids in zip((0, 120, 240), said, strict=True)
    ]
    assert_close(gradients(flex, samples), gradients(merged, samples), 1e-3)


@pytest.mark.parametrize("attention", ["merged", "flex"])
def test_a_gpu_computes_what_a_cpu_does(batch, attention):
    """In float32, to its rounding: log-probabilities of every token, and the gradients."""
    here, there = (load_model("starter", device=device, dtype="float32") for device in ("cpu", "cuda"))
    samples = batch(*GROUPS[1])
    on_cpu, on_gpu = Learner(here), Learner(there, attention=attention)
    for mine, theirs in zip(on_gpu.forward(samples), on_cpu.forward(samples), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-3)
    with torch.no_grad():
        for one, other in zip(on_gpu.parameters, on_cpu.parameters, strict=True):
            one.copy_(other)
    mine = [gradient.cpu() for gradient in gradients(on_gpu, samples)]
    assert_close(mine, gradients(on_cpu, samples), 1e-2)
