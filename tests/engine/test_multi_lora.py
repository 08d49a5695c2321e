"""Adapters beside a base of 16 bits: those of modules that share an input act as one; training computes the same."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from groupwise.engine.local import LocalEngine
from groupwise.engine.multi_lora import AdapterBank, read_adapter
from groupwise.model.load import share_weights
from groupwise.train.learner import Learner
from groupwise.types import PolicyVersion, Sample, SamplingParams, SamplingRequest

VERSION = PolicyVersion("policy", 1)


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def beside(request: Any, monkeypatch: Any) -> torch.dtype:
    """The type of adapters' products, as on a CPU and as on a GPU."""
    for module in ("groupwise.train.lora", "groupwise.engine.multi_lora"):
        monkeypatch.setattr(f"{module}.adapter_dtype", lambda device, of: request.param)
    return request.param


@torch.inference_mode()
def test_a_policy_alone_computes_what_it_does_among_others(make_base, make_adapter, beside: torch.dtype):
    base = make_base("llama", dtype=torch.bfloat16)
    model: Any = share_weights(base.model)
    bank = AdapterBank(model)
    mine, other = (read_adapter(make_adapter(base, seed=seed), device=base.device) for seed in (1, 2))
    for weights in (mine, other):
        bank.prepare(weights)
        assert {half.dtype for pair in weights.pairs.values() for half in pair} == {beside}
    attention = model.model.layers[0].self_attn
    modules = attention.q_proj, attention.k_proj, attention.v_proj
    x = torch.randn(6, modules[0].in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    bank.select([mine] * 6)
    assert bank.alone() is not None
    alone = bank.project(modules, x)
    bank.select([mine] * 5 + [other])
    assert bank.alone() is None
    torch.testing.assert_close(alone[:5], bank.project(modules, x)[:5], rtol=2e-2, atol=2e-2)
    bank.select([None] * 6)
    assert not torch.allclose(alone, bank.project(modules, x), rtol=2e-2, atol=2e-2), "the adapter does something"


def test_the_trainer_computes_what_the_sampler_did(make_base, tmp_path, beside: torch.dtype):
    base = make_base(dtype=torch.bfloat16)
    learner = Learner(base)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in learner.parameters:
            weight.normal_(std=0.05, generator=draw)
    learner.save_adapter(tmp_path)
    params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    with closing(LocalEngine(base, max_rows=8)) as engine:
        engine.load(VERSION, tmp_path)
        request = SamplingRequest(prompt_ids=(5, 6, 7), params=params, n=8, version=VERSION)
        (completions,) = engine.generate([request])
    first = Sample(prompt_ids=(5, 6, 7), completion_ids=(1,), mask=(1,))
    samples = [replace(first, completion_ids=c.token_ids, mask=(1,) * len(c.token_ids)) for c in completions]
    told = learner.forward(samples)
    gaps = [
        abs(a - b) for mine, c in zip(told, completions, strict=True) for a, b in zip(mine, c.logprobs, strict=True)
    ]
    assert len(gaps) == 96 and sum(gaps) / len(gaps) < 0.03
