"""Losses and batches that the learner's tests have in common, and how they look inside it."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from groupwise.algo.loss import resolve_loss
from groupwise.config.lora import LoraSpec
from groupwise.train.learner import Learner
from groupwise.types import Sample

LORA = LoraSpec(rank=2, alpha=4.0, targets=["k_proj", "down_proj"])  # PEFT takes a while for every module
GROUPS = ((5, (4, 1, 6)), (0, (5, 3)), (9, (2,)), (3, (7, 0, 3, 2)))
SPECS = {
    "grpo": resolve_loss("grpo"),
    "grpo with k3": resolve_loss("grpo", kl="k3", kl_coeff=0.1),
    "dapo with entropy": resolve_loss("dapo", entropy_coeff=0.05),
    "gspo": resolve_loss("gspo", clip_low=5.0, clip_high=5.0),
    "vespo": resolve_loss("vespo"),
    "luspo with tis": resolve_loss("luspo", correction="tis_sequence", kl="k1", kl_coeff=0.1),
    "dr_grpo": resolve_loss("dr_grpo", reduction_length=8, kl="k3_unbiased", kl_coeff=0.1),
}


def gradients(learner: Learner) -> list[torch.Tensor]:
    grads = [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in learner.parameters]
    learner.model.zero_grad()
    assert any(bool(grad.any()) for grad in grads)
    return grads


def assert_same(first: list[torch.Tensor], second: list[torch.Tensor], *, atol: float = 1e-9) -> None:
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=atol)


def parameters(learner: Learner) -> list[torch.Tensor]:
    return [p.detach().clone() for p in learner.parameters]


def on_policy(learner: Learner, samples: list[Sample], *, temperature: float = 1.0) -> list[Sample]:
    """The samples with behaviour logprobs near the policy's, as sampling would have given them."""
    current = learner.forward(samples, temperature=temperature)
    near = [tuple(0.0 if math.isnan(x) else x + 0.01 * math.sin(i) for i, x in enumerate(row)) for row in current]
    return [replace(s, behaviour_logprobs=row) for s, row in zip(samples, near, strict=True)]
