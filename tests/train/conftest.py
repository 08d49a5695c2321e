"""Learners on tiny random models."""

from __future__ import annotations

import pytest
import torch
from learner_cases import LORA

from groupwise.train.learner import Learner


@pytest.fixture
def make_learner(make_base):
    """A learner whose adapter already differs from the base; `lora=None` trains all parameters."""

    def make(architecture: str = "qwen3", *, dtype=torch.float64, lora=LORA, **options) -> Learner:
        learner = Learner(make_base(architecture, dtype=dtype), lora=lora, **options)
        if lora is not None:
            g = torch.Generator().manual_seed(1)
            for parameter in learner.parameters:
                parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=g))
        return learner

    return make
