"""What the host waits for the GPU for while it trains, and hands over what it trained, on a simulated one."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from groupwise.algo.loss import resolve_loss
from groupwise.config.lora import LoraSpec
from groupwise.engine.local import LocalEngine
from groupwise.train.learner import Learner
from groupwise.train.lora import lora_tensors
from groupwise.types import PolicyVersion, Sample
from slow_cases import long_case

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from simulated_gpu import SimulatedGpu

MOST_WAITS_OF_A_PASS = 1  # forward and backward of a batch, whatever its micro-batches: the metrics
MOST_WAITS_OF_A_STEP = 1  # of the optimizer: the norm, which must be finite
MOST_LAUNCHES_OF_A_STEP = 16  # however many parameters there are
MOST_WAITS_OF_A_PUBLISH = 1  # an adapter's way to the disk, and from there to the engine: the copy to the host
LAUNCHES_OF_A_SHAPE = 5  # ... and kernels for all adapters of one shape: two copies, two transpositions, the scale


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


@pytest.mark.parametrize("spec", ["grpo", long_case("gspo"), pytest.param("cispo", marks=pytest.mark.slow)])
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


def test_a_publish_waits_once_and_hands_over_every_bit(make_base, tmp_path: Path):
    """However many layers there are: kernels are counted by the shapes of adapters."""
    base, gpu, version = make_base(dtype=torch.float32), SimulatedGpu(), PolicyVersion("mine", 1)
    with gpu, torch.no_grad():
        gpu.move(base.model)
        learner, engine = (
            Learner(base, lora=LoraSpec(rank=3, alpha=7.0, use_rslora=True)),
            LocalEngine(base, compile=False),
        )
        for tensor in learner.parameters:
            tensor.add_(0.1)  # half of them begin as zeros
        mine = {name: tensor.cpu() for name, tensor in lora_tensors(learner.model).items()}
        with gpu.counting() as counts:
            learner.save_adapter(tmp_path)
            engine.load(version, tmp_path)
        pairs = {name: tuple(half.cpu() for half in pair) for name, pair in engine._weights_of(version).pairs.items()}
    shapes = {(a.shape, b.shape) for a, b in pairs.values()}
    assert len(mine) == 2 * len(pairs) > 2 * len(shapes)
    assert counts.waits <= MOST_WAITS_OF_A_PUBLISH, counts.waited
    assert counts.launches <= 2 + LAUNCHES_OF_A_SHAPE * len(shapes), counts.operations
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == save(mine, metadata={"format": "pt"})
    for name, (a, b) in pairs.items():
        key = f"base_model.model.{name}.lora_"
        assert torch.equal(a, mine[f"{key}A.weight"].T) and torch.equal(b, mine[f"{key}B.weight"].T * (7 / 3**0.5))
