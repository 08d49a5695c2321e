"""A GPU whose memory does not suffice for a micro-batch: it is cut again, and nothing is lost or counted twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from groupwise.algo.loss import resolve_loss
from groupwise.errors import TrainingError
from groupwise.train.learner import Learner
from slow_cases import crossed
from wording import raises


@pytest.fixture
def small_memory(monkeypatch):
    """Give a learner memory for so many packed tokens in one pass; the pass fails forward, or in its backward."""

    def limit(learner: Learner, tokens: int, *, backward: bool) -> list[int]:
        own, tried, armed = learner._logprobs, list[int](), [False]

        def fail(gradient: torch.Tensor) -> torch.Tensor:
            if backward and armed[0]:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB.")
            return gradient

        def logprobs(batch: Any, *args: Any, **options: Any) -> Any:
            if torch.is_grad_enabled():
                tried.append(len(batch.input_ids_S))
                armed[0] = tried[-1] > tokens
                if armed[0] and not backward:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB.")
            return own(batch, *args, **options)

        learner.parameters[0].register_hook(fail)  # the first layer's, when most gradients are there
        monkeypatch.setattr(learner, "_logprobs", logprobs)
        return tried

    return limit


def gradients(learner: Learner, samples: Any, spec: Any) -> tuple[list[torch.Tensor], Any]:
    metrics = learner.forward_backward(samples, spec)
    return [p.grad.clone() for p in learner.parameters if p.grad is not None], metrics


@pytest.mark.parametrize(
    ("loss", "backward"), crossed(("grpo", "gspo"), (False, True), quick=lambda loss, late: late == (loss == "gspo"))
)
def test_a_micro_batch_that_does_not_fit_is_cut(make_base, make_samples, small_memory, loss: str, backward: bool):
    """Gradients, metrics and log-probabilities are those of a run with memory, also of losses that read a reference."""
    spec = resolve_loss(loss, kl="k3", kl_coeff=0.1)
    base, samples = make_base(dtype=torch.float64), make_samples([(9, (4, 1, 6, 8)), (3, (5, 3)), (12, (2, 7, 7))])
    roomy, tight = Learner(base, threads=1), Learner(base, threads=1)
    expected, told = gradients(roomy, samples, spec)
    tokens = roomy.micro_tokens
    tried = small_memory(tight, 60, backward=backward)
    with pytest.warns(UserWarning, match="micro_tokens"):
        found, metrics = gradients(tight, samples, spec)
    assert max(tried) > 60 and min(tried) <= 60 and tight.micro_tokens < tokens
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-9)
    assert metrics == pytest.approx(told, abs=1e-12)
    tried.clear()
    tight.zero_grad()
    gradients(tight, samples, spec)
    assert max(tried) <= 60, "what was learned stays"


def test_one_sample_that_does_not_fit_is_an_error(make_base, make_samples, small_memory):
    learner = Learner(make_base(), threads=1)
    small_memory(learner, 3, backward=False)
    with pytest.warns(UserWarning, match="micro_tokens"), raises(TrainingError):
        learner.forward_backward(make_samples([(4, (3, 2)), (5, (1, 6))]), resolve_loss("grpo"))
    assert all(p.grad is None or not p.grad.any() for p in learner.parameters)
