"""AdamW with moments in 8 bits: it is bitsandbytes', goes on where it stood, and says what it needs."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from groupwise.algo.loss import resolve_loss
from groupwise.config.lora import LoraSpec
from groupwise.config.run import OptimizerConfig, parse_config
from groupwise.errors import ConfigError, ModelError, TrainingError
from groupwise.run.loop import run_loop
from groupwise.train.learner import Learner
from groupwise.train.optimizer import make_optimizer
from running_jobs import Dies, adapter_bytes, config
from wording import raises

SMALL = OptimizerConfig(optimizer="adamw_8bit", weight_decay=0.1)
LARGE = LoraSpec(rank=128)  # matrices of 4096 values and more, below which bitsandbytes keeps 32 bits


@pytest.fixture
def bitsandbytes():
    return pytest.importorskip("bitsandbytes")


def test_steps_are_those_of_bitsandbytes(bitsandbytes) -> None:
    g = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(128, 64, generator=g), torch.randn(3, 128, 64, generator=g)
    ends = []
    for make in (
        lambda p: make_optimizer([p], SMALL),
        lambda p: bitsandbytes.optim.AdamW8bit([p], lr=0.0, weight_decay=0.1, betas=(0.9, 0.999), eps=1e-8),
        lambda p: make_optimizer([p], OptimizerConfig(weight_decay=0.1)),
    ):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = make(parameter)
        for gradient in gradients:
            optimizer.param_groups[0]["lr"] = 1e-2
            parameter.grad = gradient.clone()
            optimizer.step()
        ends.append(parameter.detach())
    assert torch.equal(ends[0], ends[1]) and not torch.equal(ends[0], ends[2])
    assert float((ends[0] - ends[2]).abs().mean()) < 2e-3


def test_a_learner_goes_on_with_the_same_bytes(bitsandbytes, make_base, make_samples, tmp_path: Path) -> None:
    samples, spec = make_samples(((5, (4, 6)), (3, (7,)))), resolve_loss("grpo")

    def learner() -> Learner:
        return Learner(make_base(dtype=torch.float32), lora=LARGE, optimizer=SMALL)

    first, second = learner(), learner()
    for _ in range(2):
        first.step(samples, spec, learning_rate=1e-2)
    first.save(tmp_path)
    second.load(tmp_path)
    kept = [state for state in first.optimizer.state.values() if state["state1"].dtype == torch.uint8]
    assert kept and any(bool(state["state1"].any()) for state in kept)
    for each in (first, second):
        each.step(samples, spec, learning_rate=1e-2)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters, second.parameters, strict=True))
    other = Learner(make_base(dtype=torch.float32), lora=LARGE)
    with raises(TrainingError):
        other.load(tmp_path)


def test_a_run_is_resumed_with_the_same_bytes(bitsandbytes, tmp_path: Path) -> None:
    options = {"train": {"optimizer": "adamw_8bit", "lora": {"rank": 32}}}
    whole = run_loop(config(tmp_path / "whole", **options)).run_dir
    with pytest.raises(Dies.Now):
        run_loop(config(tmp_path / "dies", resume="auto", **options), display=Dies(4, total=6, stream=io.StringIO()))
    resumed = run_loop(config(tmp_path / "dies", resume="auto", **options)).run_dir
    assert adapter_bytes(resumed) == adapter_bytes(whole)


def test_what_it_needs(bitsandbytes, monkeypatch, make_base) -> None:
    with raises(ConfigError):
        Learner(make_base(), optimizer=OptimizerConfig(optimizer="paged_adamw_8bit"))
    monkeypatch.setattr("groupwise.model.quantized.importlib.util.find_spec", lambda name: None)
    with raises(ModelError):
        Learner(make_base(), optimizer=SMALL)
    options = {"optimizer": "adamw_8bit", "parallel": "fsdp", "lora": None}
    with raises(ConfigError):
        parse_config({"data": {"source": "x.jsonl"}, "rewards": ["length"], "train": options})
