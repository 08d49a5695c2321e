"""A step that arrives in parts is the step on all of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from learner_cases import GROUPS, LORA, SPECS, assert_same, gradients, on_policy, parameters

from groupwise.algo.loss import resolve_loss
from groupwise.errors import ConfigError, TrainingError
from groupwise.train.learner import Learner
from wording import raises

CUTS = ([0, 3, 5, 6, 10], [0, 10], [0, 1, 1, 10])  # by groups; at once; a single row, none, the rest


def parts_of(samples: list, cuts: list[int]) -> list[list]:
    return [samples[start:stop] for start, stop in pairwise(cuts)]


STREAMED = [name for name in SPECS if SPECS[name].streams]


@pytest.mark.parametrize(
    ("name", "cuts"), [*((n, CUTS[0]) for n in STREAMED), *(("grpo with k3", c) for c in CUTS[1:])]
)
def test_the_update_is_that_of_the_whole(make_learner, make_samples, name: str, cuts: list[int]):
    """Parameters, moments and metrics, though the size of the batch is known only at the end."""
    whole, streamed = make_learner(), make_learner()
    samples = on_policy(whole, make_samples(GROUPS), temperature=0.8)
    expected = whole.step(samples, SPECS[name], learning_rate=0.01, temperature=0.8)

    stream = streamed.begin_step(temperature=0.8)
    for part in parts_of(samples, cuts):
        stream.accumulate(part, SPECS[name])
    metrics = stream.finish(learning_rate=0.01)
    assert_same(parameters(streamed), parameters(whole))
    assert metrics == pytest.approx(expected, rel=1e-6, abs=1e-8)
    for mine, its in zip(streamed.parameters, whole.parameters, strict=True):
        for moment in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(streamed.optimizer.state[mine][moment], whole.optimizer.state[its][moment])


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "prompt_mean", "constant", "sequence_sum", "sum"])
def test_the_gradient_of_every_reduction(make_learner, make_samples, monkeypatch, reduction: str):
    """Before AdamW, which hides a factor: with all terms that a loss can have."""
    length = {"reduction_length": 9} if reduction == "constant" else {}
    entropy = {"entropy_coeff": 0.05} if reduction == "token_mean" else {}
    spec = resolve_loss("grpo", reduction=reduction, kl="k3", correction="tis_token", **length, **entropy)
    learner = make_learner()
    samples = on_policy(learner, make_samples(GROUPS))
    samples = [replace(each, group=g) for g, part in enumerate(parts_of(samples, CUTS[0])) for each in part]
    learner.forward_backward(samples, spec)
    expected = gradients(learner)
    seen: list[list[torch.Tensor]] = []
    original = Learner.optim_step
    monkeypatch.setattr(
        Learner, "optim_step", lambda self, **options: seen.append(gradients_of(self)) or original(self, **options)
    )
    stream = learner.begin_step()
    for part in parts_of(samples, CUTS[0]):
        stream.accumulate(part, spec)
    stream.finish(learning_rate=0.0)
    assert_same(seen[0], expected)


@pytest.mark.parametrize("before", [0, 1])
def test_a_part_that_fails_in_its_midst_leaves_no_gradient(make_learner, make_samples, before: int):
    """As the first of a step it may come again; after another, whose gradient it has spoilt, no step is made."""
    learner, spec = make_learner(threads=1, micro_tokens=12), SPECS["grpo"]
    first, second = make_samples(GROUPS[:2], seed=1), make_samples(GROUPS[2:], seed=2)
    shown: list[int] = []

    def fails(batch, logprobs_N) -> None:
        shown.append(len(logprobs_N))
        if len(shown) == 2:
            raise ValueError("a bug")

    stream, start = learner.begin_step(), parameters(learner)
    for _ in range(before):
        stream.accumulate(first, spec)
    with pytest.raises(ValueError, match="a bug"):
        stream.accumulate(second, spec, on_logprobs=fails)
    if before:
        with raises(TrainingError):
            stream.apply(learning_rate=0.1)
        assert_same(parameters(learner), start, atol=0)
        stream.accumulate(first, spec)
    stream.accumulate(second, spec)
    found = gradients(learner)
    whole = learner.begin_step()
    for part in (*[first] * before, second):
        whole.accumulate(part, spec)
    assert_same(found, gradients(learner), atol=0)


def gradients_of(learner: Learner) -> list[torch.Tensor]:
    return [p.grad.clone() for p in learner.parameters]


def test_in_float32(make_learner, make_samples):
    """Sums are larger than means, and no less exact."""
    whole, streamed = (make_learner(dtype=torch.float32) for _ in range(2))
    samples = on_policy(whole, make_samples(GROUPS))
    whole.forward_backward(samples, SPECS["grpo"])
    expected = gradients(whole)
    stream = streamed.begin_step()
    for part in parts_of(samples, CUTS[0]):
        stream.accumulate(part, SPECS["grpo"])
    for parameter, grad in zip(streamed.parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad / stream.rows, grad, rtol=1e-3, atol=1e-6)


def test_an_entropy_bonus_beside_rows_is_refused(make_learner):
    with raises(ConfigError):
        make_learner().begin_step().accumulate([], resolve_loss("grpo", entropy_coeff=0.1))


def test_nothing_to_train_on_changes_nothing(make_learner, make_samples):
    learner = make_learner()
    before = parameters(learner)
    stream = learner.begin_step()
    assert stream.finish(learning_rate=0.1) == {}
    masked = [replace(sample, mask=(0,) * len(sample.mask)) for sample in make_samples(GROUPS)]
    stream.accumulate([], SPECS["grpo"])
    stream.accumulate(masked, SPECS["grpo"])
    assert (stream.tokens, stream.rows) == (0, 0)
    assert stream.finish(learning_rate=0.1) == {}
    assert learner.steps == 0 and all(map(torch.equal, before, parameters(learner)))


def test_what_was_left_behind_is_forgotten(make_learner, make_samples):
    """A step that was begun and given up, as when sampling failed, is no part of the next."""
    clean, other = make_learner(), make_learner()
    samples = on_policy(clean, make_samples(GROUPS))
    other.begin_step().accumulate(samples[:4], SPECS["grpo"])
    for learner in (clean, other):
        stream = learner.begin_step()
        stream.accumulate(samples, SPECS["grpo"])
        stream.finish(learning_rate=0.01)
    assert all(map(torch.equal, parameters(clean), parameters(other)))


def test_dropout_differs_from_part_to_part_and_repeats(make_learner, make_samples):
    """The same rows in two parts are not dropped alike; the whole is the same another time."""
    lora, (sample,) = LORA.model_copy(update={"dropout": 0.5}), make_samples(((4, (6,)),))
    grads = []
    for parts in (1, 2, 2):
        learner = make_learner(lora=lora)
        stream = learner.begin_step()
        for _ in range(parts):
            stream.accumulate([sample], resolve_loss("reinforce"))
        grads.append(gradients(learner))
    assert not any(torch.allclose(2 * one, two) for one, two in zip(grads[0], grads[1], strict=True) if one.any())
    assert all(map(torch.equal, grads[1], grads[2]))
