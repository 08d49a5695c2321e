"""The gradient of each teacher loss against an independent float64 implementation over the model's own logits."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
import torch
from learner_cases import GROUPS, assert_same, gradients, on_policy
from transformers import PreTrainedModel

from groupwise.algo.distillation import soft_divergence, with_teacher_advantages
from groupwise.algo.loss import resolve_loss
from groupwise.model.head import Head
from groupwise.model.load import plain_attention
from groupwise.train.forward import fused_logprobs
from groupwise.train.learner import Learner
from groupwise.train.training_batch import TrainingBatch
from groupwise.types import Sample, SequenceScores

K, TEMPERATURE, COEFFICIENT = 4, 0.8, 0.7


def full_logprobs(model: PreTrainedModel, sample: Sample) -> torch.Tensor:
    """[T, V]: the distribution that each completion token of a sample is of, by the model's own forward."""
    ids = torch.tensor([(*sample.prompt_ids, *sample.completion_ids)])
    first = len(sample.prompt_ids) - 1
    with plain_attention(model):
        logits = model(input_ids=ids).logits[0, first : first + len(sample.completion_ids)]
    return (logits / TEMPERATURE).log_softmax(-1)


@pytest.fixture(scope="module")
def teacher(make_base) -> PreTrainedModel:
    return make_base(seed=3).model


def scores_of(teacher: PreTrainedModel, sample: Sample, k: int = K) -> SequenceScores:
    with torch.no_grad():
        logprobs = full_logprobs(teacher, sample)
    best = logprobs.topk(k)
    top = tuple(
        tuple(zip(ids, values, strict=True))
        for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    )
    own = logprobs.gather(1, torch.tensor(sample.completion_ids)[:, None])[:, 0]
    return SequenceScores(logprobs=tuple(own.tolist()), top=top)


@pytest.fixture
def samples(make_learner, make_samples) -> list[Sample]:
    return on_policy(make_learner(), [s for s in make_samples(GROUPS) if s.prompt_ids], temperature=TEMPERATURE)


def independent(learner: Learner, per_token, samples: list[Sample]) -> list[torch.Tensor]:
    """The gradient of the mean over trained tokens of per_token(log pi [T, V], sample) [T]."""
    tokens, total = sum(sum(s.mask) for s in samples), torch.zeros((), dtype=torch.float64)
    for sample in samples:
        each = per_token(full_logprobs(learner.model, sample), sample)
        total = total + (each * torch.tensor(sample.mask)).sum() / tokens
    total.backward()
    return gradients(learner)


def test_the_sampled_token(make_learner, samples: list[Sample], teacher):
    """-w (A + c (log q - log mu)), with w the ratio to the sampler."""
    scores = [scores_of(teacher, sample) for sample in samples]

    def per_token(logprobs_TV: torch.Tensor, sample: Sample) -> torch.Tensor:
        own_T = logprobs_TV.gather(1, torch.tensor(sample.completion_ids)[:, None])[:, 0]
        sampled_T = torch.tensor(sample.behaviour_logprobs, dtype=torch.float64)
        teacher_T = torch.tensor(scores[samples.index(sample)].logprobs, dtype=torch.float64)
        return -(own_T - sampled_T).exp() * (sample.advantage + COEFFICIENT * (teacher_T - sampled_T))

    expected = independent(make_learner(), per_token, samples)
    learner = make_learner(micro_tokens=23)
    taught = with_teacher_advantages(samples, scores, coefficient=COEFFICIENT)
    learner.forward_backward(taught, resolve_loss("importance_sampling"), temperature=TEMPERATURE)
    assert_same(gradients(learner), expected)


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("alone", [True, False])
def test_the_teachers_own_completions(make_learner, make_samples, samples: list[Sample], minibatches: int, alone: bool):
    """Beside the policy gradient: c sum -log pi / tokens at temperature 1, over the tokens of the step's demonstrations
    and of no other samples; alone there is nothing else. Both are cut into as many steps."""
    shown = [replace(s, advantage=0.0, behaviour_logprobs=None) for s in make_samples(GROUPS, seed=5) if s.prompt_ids]
    policy = [] if alone else samples
    spec = resolve_loss("importance_sampling")
    cut = {"minibatches": minibatches, "passes": 1, "temperature": TEMPERATURE}
    batch = TrainingBatch.cut(policy, spec, shuffle=Random(0), demonstrations=shown, coefficient=COEFFICIENT, **cut)
    assert sorted(row for rows in batch.shown[0] for row in rows) == list(range(len(shown)))
    assert batch.steps == len(batch.shown[0]) == minibatches
    for step, (rows, shown_rows) in enumerate(batch.step_rows):
        reference = make_learner()
        mine, theirs = [policy[row] for row in rows], [shown[row] for row in shown_rows]
        total = torch.zeros((), dtype=torch.float64)
        for sample in mine:
            own_T = full_logprobs(reference.model, sample).gather(1, torch.tensor(sample.completion_ids)[:, None])[:, 0]
            sampled_T = torch.tensor(sample.behaviour_logprobs, dtype=torch.float64)
            each = -(own_T - sampled_T).exp() * sample.advantage * torch.tensor(sample.mask)
            total = total + each.sum() / sum(sum(s.mask) for s in mine)
        for sample in theirs:
            ids = torch.tensor([(*sample.prompt_ids, *sample.completion_ids)])
            with plain_attention(reference.model):
                logits_TV = reference.model(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1]
            each = torch.nn.functional.cross_entropy(logits_TV, ids[0, len(sample.prompt_ids) :], reduction="none")
            total = total + COEFFICIENT * (each * torch.tensor(sample.mask)).sum() / sum(sum(s.mask) for s in theirs)
        total.backward()
        learner = make_learner(micro_tokens=23)
        metrics = batch.accumulate(learner, step)
        assert_same(gradients(learner), gradients(reference))
        assert metrics["loss/cross_entropy"] > 0 and ("loss/policy" in metrics) == (not alone)


def divergence(p_TV: torch.Tensor, q_TV: torch.Tensor, ids_TK: torch.Tensor, kind: str) -> torch.Tensor:
    """Over K tokens and the rest, from probabilities of the whole vocabulary."""
    outside = torch.ones_like(p_TV).scatter(1, ids_TK, 0.0)
    p, q = (torch.cat([x.gather(1, ids_TK), (x * outside).sum(1, keepdim=True)], dim=1) for x in (p_TV, q_TV))
    if kind == "jsd":
        return ((p * (2 * p / (p + q)).log()).sum(1) + (q * (2 * q / (p + q)).log()).sum(1)) / 2
    return (p * (p / q).log()).sum(1) if kind == "reverse" else (q * (q / p).log()).sum(1)


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_the_teachers_likeliest_tokens(make_learner, samples: list[Sample], teacher, kind: str, weight: float):
    """Alone, and with the policy gradient of rewards. Some samples have no teacher."""
    samples = [replace(s, advantage=weight * s.advantage) for s in samples]
    scores = [None if i == 2 else scores_of(teacher, sample) for i, sample in enumerate(samples)]

    def per_token(logprobs_TV: torch.Tensor, sample: Sample) -> torch.Tensor:
        own_T = logprobs_TV.gather(1, torch.tensor(sample.completion_ids)[:, None])[:, 0]
        sampled_T = torch.tensor(sample.behaviour_logprobs, dtype=torch.float64)
        policy_T = -(own_T - sampled_T).exp() * sample.advantage
        if (said := scores[samples.index(sample)]) is None:
            return policy_T
        with torch.no_grad():
            q_TV = full_logprobs(teacher, sample).exp()
        ids_TK = torch.tensor([[id for id, _ in top] for top in said.top])
        return policy_T + COEFFICIENT * divergence(logprobs_TV.exp(), q_TV, ids_TK, kind)

    expected = independent(make_learner(), per_token, samples)
    taught = [s if said is None else replace(s, soft_targets=said.top) for s, said in zip(samples, scores, strict=True)]
    spec = resolve_loss("importance_sampling", soft_kl=kind, soft_kl_coeff=COEFFICIENT)
    for micro_tokens in (10_000, 17):
        learner = make_learner(micro_tokens=micro_tokens)
        metrics = learner.forward_backward(taught, spec, temperature=TEMPERATURE)
        assert_same(gradients(learner), expected)
        assert metrics["loss/soft_kl"] > 0
    padded = make_learner()
    padded.packed = False
    padded.forward_backward(taught, spec, temperature=TEMPERATURE)
    assert_same(gradients(padded), expected)


def test_the_whole_vocabulary_is_the_exact_divergence(make_learner, samples: list[Sample], teacher):
    """With K the vocabulary nothing is left over, and a mean of the sampled form has the same gradient."""
    vocabulary = int(teacher.get_input_embeddings().weight.shape[0])  # type: ignore[operator]

    def per_token(logprobs_TV: torch.Tensor, sample: Sample) -> torch.Tensor:
        with torch.no_grad():
            q_TV = full_logprobs(teacher, sample)
        return (logprobs_TV.exp() * (logprobs_TV - q_TV)).sum(1)

    samples = [replace(s, advantage=0.0) for s in samples]
    expected = independent(make_learner(), per_token, samples)
    taught = [replace(s, soft_targets=scores_of(teacher, s, vocabulary).top) for s in samples]
    learner = make_learner()
    learner.forward_backward(taught, resolve_loss("dapo", soft_kl="reverse"), temperature=TEMPERATURE)
    assert_same(gradients(learner), expected, atol=1e-7)


def test_a_sure_policys_gradient_in_float32():
    """The policy leaves the teacher's other tokens 1e-9 and less, of which 1 minus the sum knows nothing in float32:
    those are most of what there is to learn, and the gradient of 32 bits has them as that of 64."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 8, generator=g, dtype=torch.float64)
    weight = torch.randn(12, 8, generator=g, dtype=torch.float64)
    ids = (hidden @ weight.T).topk(2).indices
    hidden = hidden + 25 * torch.nn.functional.normalize(weight[ids].mean(1), dim=1)
    teacher = (torch.randn(6, 12, generator=g, dtype=torch.float64)).log_softmax(1).gather(1, ids)
    found = []
    for dtype in (torch.float64, torch.float32):
        leaf, head = hidden.to(dtype).clone().requires_grad_(), Head(weight.to(dtype), None, 1.0, None)
        both = torch.cat([ids[:, :1], ids], dim=1)
        logprobs, _ = fused_logprobs(leaf, head, both, rest=True)
        soft_divergence(logprobs[:, 1:], teacher.to(dtype), "forward").sum().backward()
        found.append((leaf.grad.double(), logprobs[:, -1].detach().double()))
    (exact, rest), (rounded, _) = found
    assert float(rest.max()) < -20
    assert float((rounded - exact).norm() / exact.norm()) < 1e-5


def test_a_loss_that_reads_no_soft_targets_is_as_without_them(make_learner, samples: list[Sample], teacher):
    taught = [replace(s, soft_targets=scores_of(teacher, s).top) for s in samples]
    plain, other = make_learner(), make_learner()
    for spec in (resolve_loss("grpo"), resolve_loss("grpo", kl="k3")):
        plain.forward_backward(samples, spec)
        other.forward_backward(taught, spec)
        assert_same(gradients(plain), gradients(other))
    assert other.forward(taught) == plain.forward(samples)
    plain.forward_backward_supervised(samples)
    other.forward_backward_supervised(taught)
    assert_same(gradients(plain), gradients(other))


def test_with_a_reference_and_as_it_arrives(make_learner, samples: list[Sample], teacher):
    """Beside a KL to the reference; and in parts, as a streamed step, whose update is that of the whole batch."""
    taught = [replace(s, soft_targets=scores_of(teacher, s).top) for s in samples]
    spec = resolve_loss("grpo", kl="k3", soft_kl="forward")
    whole, streamed = make_learner(), make_learner()
    expected = whole.step(taught, spec, learning_rate=0.1)
    step = streamed.begin_step()
    for part in (taught[:4], taught[4:]):
        step.accumulate(part, spec)
    found = step.finish(learning_rate=0.1)
    assert_same([p.detach() for p in streamed.parameters], [p.detach() for p in whole.parameters])
    assert found["loss/soft_kl"] == pytest.approx(expected["loss/soft_kl"]) and not math.isnan(found["kl/mean"])
