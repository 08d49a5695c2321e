"""What the host waits for the GPU for while it trains, on a simulated one."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from groupwise.algo.loss import resolve_loss
from groupwise.train.learner import Learner
from groupwise.types import Sample

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from simulated_gpu import SimulatedGpu

MOST_WAITS_OF_A_PASS = 1  # forward and backward of a batch, whatever its micro-batches: the metrics
MOST_WAITS_OF_A_STEP = 1  # of the optimizer: the norm, which must be finite
MOST_LAUNCHES_OF_A_STEP = 16  # however many parameters there are


def batch() -> list[Sample]:
    return [
        Sample(
            prompt_ids=tuple(range(10 + p, 16 + 2 * p)),
            completion_ids=tuple(range(30 + g, 35 + 2 * g)),
            mask=(1,) * (5 + g),
            behaviour_logprobs=(-5.0,) * (5 + g),
            advantage=1.0 if g % 2 else -1.0,
        )
        for p in range(3)
        for g in range(3)
    ]


@pytest.mark.parametrize("spec", ["grpo", "gspo", "cispo"])
def test_a_training_step_waits_once_for_each_part(make_base, spec: str):
    gpu, loss = SimulatedGpu(), resolve_loss(spec)
    mine = {}
    for micro_tokens in (10_000, 40):
        base = make_base(dtype=torch.float32)
        with gpu:
            gpu.move(base.model)
            learner = Learner(base, micro_tokens=micro_tokens)
            learner.forward_backward(batch(), loss)
            learner.optim_step(learning_rate=1e-3)
            with gpu.counting() as counts:
                mine[micro_tokens] = learner.forward_backward(batch(), loss)
            assert counts.operations["scaled_dot_product_attention"] >= (2 if micro_tokens > 40 else 4)
            assert 0 < counts.waits <= MOST_WAITS_OF_A_PASS, counts.waited
            with gpu.counting() as counts:
                learner.optim_step(learning_rate=1e-3)
            assert counts.waits <= MOST_WAITS_OF_A_STEP, counts.waited
            assert counts.launches <= MOST_LAUNCHES_OF_A_STEP < len(learner.parameters), counts.operations
    learner = Learner(make_base(dtype=torch.float32))
    learner.forward_backward(batch(), loss)
    learner.optim_step(learning_rate=1e-3)
    expected = learner.forward_backward(batch(), loss)
    for metrics in mine.values():
        assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_a_logprob_that_is_not_finite_is_still_dropped(make_base):
    """The host knows that there is one, and asks the device which."""
    samples = batch()
    broken = samples[4]
    samples[4] = replace(broken, behaviour_logprobs=(float("nan"), *(broken.behaviour_logprobs or ())[1:]))
    learner = Learner(make_base())
    assert learner.forward_backward(samples, resolve_loss("grpo"))["mismatch/dropped_tokens"] == 1
