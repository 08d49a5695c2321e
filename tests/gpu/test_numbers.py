"""Sampler and trainer compute the same log-probabilities, in 32, 16 and 4 bits."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from groupwise.algo.loss import resolve_loss
from groupwise.engine.local import LocalEngine
from groupwise.model.load import LoadedModel, load_model
from groupwise.train.learner import Learner
from groupwise.types import PolicyVersion, Sample, SamplingParams, SamplingRequest

VERSION = PolicyVersion("policy", 1)


def trained(base: LoadedModel, folder: Path, **options: object) -> Learner:
    """A learner whose adapter changes the model, saved in `folder`."""
    learner = Learner(base, **options)  # type: ignore[arg-type]
    draw = torch.Generator(base.device).manual_seed(0)
    with torch.no_grad():
        for weight in learner.parameters:
            weight.normal_(std=0.05, generator=draw)
    learner.save_adapter(folder)
    return learner


def sampled(base: LoadedModel, folder: Path, **options: object) -> list[Sample]:
    """Completions of a loaded adapter at temperature 1, with the sampler's log-probabilities."""
    prompts = [tuple(base.tokenizer(f"What is {a} + {2 * a}?")["input_ids"]) for a in (7, 31, 118, 64)]
    params = SamplingParams(max_tokens=48, seed=3, ignore_eos=True)
    with closing(LocalEngine(base, **options)) as engine:  # type: ignore[arg-type]
        engine.load(VERSION, folder)
        requests = [SamplingRequest(prompt_ids=p, params=params, n=16, version=VERSION) for p in prompts]
        groups = engine.generate(requests)
    return [
        Sample(
            prompt_ids=prompt,
            completion_ids=c.token_ids,
            mask=(1,) * len(c.token_ids),
            behaviour_logprobs=c.logprobs,
            advantage=1.0 if i % 2 else -1.0,
        )
        for prompt, group in zip(prompts, groups, strict=True)
        for i, c in enumerate(group)
    ]


def mismatch(learner: Learner, samples: list[Sample]) -> tuple[float, float]:
    """Mean and largest distance in nats, over all tokens."""
    pairs = zip(learner.forward(samples), samples, strict=True)
    gaps = [abs(a - b) for mine, s in pairs for a, b in zip(mine, s.behaviour_logprobs or (), strict=True)]
    assert len(gaps) == 64 * 48
    return sum(gaps) / len(gaps), max(gaps)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dtype", "mean", "most"), [("float32", 1e-4, 5e-3), ("bfloat16", 5e-2, 2.0)])
@pytest.mark.parametrize("attention", ["merged", "flex"])
def test_the_trainer_computes_what_the_sampler_did(tmp_path, dtype, mean, most, attention, compiled):
    base = load_model("starter", device="cuda", dtype=dtype)
    learner = trained(base, tmp_path, attention=attention)
    gap = mismatch(learner, sampled(base, tmp_path, compile=compiled))
    assert gap[0] < mean and gap[1] < most


def test_a_wrong_adapter_would_show(tmp_path):
    """The tolerances above are far below what another policy's log-probabilities differ by."""
    base = load_model("starter", device="cuda", dtype="bfloat16")
    trained(base, tmp_path)
    assert mismatch(Learner(base), sampled(base, tmp_path))[0] > 0.1


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_quantised_base_is_sampled_and_trained(tmp_path, kind: str):
    pytest.importorskip("bitsandbytes")
    base = load_model("starter", device="cuda", dtype="bfloat16", quantization=kind)
    learner = trained(base, tmp_path)
    samples = sampled(base, tmp_path)
    assert mismatch(learner, samples)[0] < 0.05
    before = learner.forward(samples[:2])
    spec = resolve_loss("grpo")
    for _ in range(4):
        metrics = learner.step(
            [replace(s, behaviour_logprobs=s.behaviour_logprobs) for s in samples], spec, learning_rate=1e-2
        )
        assert metrics["optim/refused"] == 0.0 and 0 < metrics["optim/grad_norm"] < float("inf")
    after = learner.forward(samples[:2])
    assert sum(after[0]) < sum(before[0]) and sum(after[1]) > sum(before[1]), "advantages are -1 and 1"
