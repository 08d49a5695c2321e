"""Training on preference pairs: against a plain forward, in whatever cut, and over several optimizer steps."""

from __future__ import annotations

import pytest
import torch
from learner_cases import LORA, assert_same, gradients, parameters
from transformers import PreTrainedModel

from groupwise.algo.preference import Pair
from groupwise.config.preference import PreferenceConfig
from groupwise.errors import TrainingError
from groupwise.model.load import plain_attention
from groupwise.model.packed_check import turn_plain
from groupwise.model.packing import pair_batches
from groupwise.train.learner import Learner
from groupwise.train.preference_step import train_on_pairs
from groupwise.train.reference import ReferenceSpec
from groupwise.types import Sample

SHAPES = ((5, (4, 6)), (3, (5, 3)), (9, (2, 1)), (3, (7, 2)), (14, (3, 8)))  # prompt, chosen and rejected
LOSSES = [PreferenceConfig(), PreferenceConfig(loss="ipo", beta=0.5)]


@pytest.fixture
def pairs(make_samples) -> list[Pair]:
    samples = make_samples(SHAPES)
    return list(zip(samples[0::2], samples[1::2], strict=True))


def logprob(model: PreTrainedModel, sample: Sample) -> torch.Tensor:
    """The log-probability of the trained tokens of a completion, by the model's own forward."""
    ids = torch.tensor([(*sample.prompt_ids, *sample.completion_ids)])
    with plain_attention(model):
        logits = model(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1]
    each = logits.log_softmax(-1)[torch.arange(len(sample.mask)), torch.tensor(sample.completion_ids)]
    return (each * torch.tensor(sample.mask)).sum()


def by_hand(learner: Learner, pairs: list[Pair], config: PreferenceConfig) -> torch.Tensor:
    losses = []
    for pair in pairs:
        ratios = []
        for sample in pair:
            with torch.no_grad(), learner.reference.active() as model:
                reference = logprob(model, sample)
            ratio = logprob(learner.model, sample) - reference
            ratios.append(ratio if config.loss == "sigmoid" else ratio / sum(sample.mask))
        margin = ratios[0] - ratios[1]
        if config.loss == "sigmoid":
            losses.append(-torch.nn.functional.logsigmoid(config.beta * margin))
        else:
            losses.append((margin - 1 / (2 * config.beta)) ** 2)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("config", LOSSES, ids=lambda each: each.loss)
def test_the_gradient_is_that_of_plain_forwards(make_learner, pairs, config):
    """In float64, a completion at a time, the reference being the model without its adapter."""
    learner = make_learner()
    metrics = learner.forward_backward_preference(pairs, config)
    mine = gradients(learner)
    loss = by_hand(learner, pairs, config)
    loss.backward()
    assert metrics["loss/preference"] == pytest.approx(float(loss.detach()), abs=1e-9)
    assert metrics["loss/entropy"] > 0
    assert_same(mine, gradients(learner))


@pytest.mark.parametrize("micro_tokens", [1, 12, 40])
@pytest.mark.parametrize("plain", [False, True])
def test_the_cut_changes_nothing(make_learner, pairs, micro_tokens, plain):
    """One pair at a time, a few, several at once in threads; packed, or in padded rows."""
    whole, cut = make_learner(), make_learner(micro_tokens=micro_tokens, threads=2)
    if plain:
        turn_plain(cut.model)
        cut.packed = False
    told = [each.forward_backward_preference(pairs, PreferenceConfig()) for each in (whole, cut)]
    assert told[0] == pytest.approx(told[1], abs=1e-9)
    assert_same(gradients(whole), gradients(cut))


def test_the_mean_is_over_pairs(make_learner, pairs):
    learner, config = make_learner(), PreferenceConfig()
    learner.forward_backward_preference(pairs, config)
    together = gradients(learner)
    parts = []
    for pair in pairs:
        learner.forward_backward_preference([pair], config)
        parts.append(gradients(learner))
    assert_same(together, [torch.stack(each).mean(0) for each in zip(*parts, strict=True)])


def test_an_untrained_adapter_tells_no_pair_apart(make_base, pairs):
    """Half of its output is 0: policy and reference are one, the loss is log 2 and the margin 0."""
    metrics = Learner(make_base(), lora=LORA).forward_backward_preference(pairs, PreferenceConfig())
    assert metrics["loss/preference"] == pytest.approx(0.693147, abs=1e-6)
    assert metrics["preference/margin"] == pytest.approx(0, abs=1e-6)


def test_the_reference_may_be_the_policy_that_it_starts_from(make_learner, pairs):
    learner = make_learner(reference=ReferenceSpec(kind="start"))
    with pytest.raises(TrainingError):
        learner.forward_backward_preference(pairs, PreferenceConfig())
    learner.keep_reference()
    assert learner.forward_backward_preference(pairs, PreferenceConfig())["preference/margin"] == pytest.approx(
        0, abs=1e-9
    )


def test_without_an_adapter_the_reference_is_a_copy(make_learner, pairs):
    learner = make_learner(lora=None)
    learner.keep_reference()
    first = train_on_pairs(learner, pairs, PreferenceConfig(), learning_rate=1e-3)
    assert first["preference/margin"] == pytest.approx(0, abs=1e-9)
    assert train_on_pairs(learner, pairs, PreferenceConfig(), learning_rate=1e-3)["preference/margin"] > 0


def test_chosen_completions_gain_on_rejected_ones(make_learner, pairs):
    learner = make_learner()
    told = [
        train_on_pairs(learner, pairs, PreferenceConfig(), learning_rate=5e-3, minibatches=2, passes=2)
        for _ in range(8)
    ]
    assert learner.steps == 8 * 2 * 2
    assert told[-1]["loss/preference"] < told[0]["loss/preference"] and told[-1]["preference/accuracy"] == 1
    assert told[-1]["preference/margin"] > told[0]["preference/margin"]


@pytest.mark.parametrize(("passes", "under_reference"), [(1, 2), (2, 1), (3, 1)])
def test_the_reference_is_computed_once_for_several_passes(make_learner, pairs, monkeypatch, passes, under_reference):
    """Of two minibatches a pass. What is learned is the same as with a reference for each of them."""
    learner, other, seen = make_learner(), make_learner(), list[bool]()
    forward = learner.strategy.logprobs

    def seen_forward(*args, **options):
        seen.append(torch.is_grad_enabled())
        return forward(*args, **options)

    monkeypatch.setattr(learner.strategy, "logprobs", seen_forward)
    told = train_on_pairs(learner, pairs, PreferenceConfig(), learning_rate=5e-3, minibatches=2, passes=passes)
    assert (seen.count(False), seen.count(True)) == (under_reference, 2 * passes)
    margins: list[float] = []
    for _ in range(passes):
        order = list(range(len(pairs)))
        other.shuffle.shuffle(order)
        for rows in (order[:2], order[2:]):
            each = other.forward_backward_preference([pairs[row] for row in rows], PreferenceConfig())
            margins.append(each["preference/margin"])
            other.optim_step(learning_rate=5e-3)
    assert_same(parameters(learner), parameters(other))
    assert told["preference/margin"] == pytest.approx(sum(margins) / len(margins), abs=1e-9) and any(margins)


def test_a_learning_rate_of_0_changes_nothing(make_learner, pairs):
    learner = make_learner()
    before = parameters(learner)
    train_on_pairs(learner, pairs, PreferenceConfig(), learning_rate=0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(learner), strict=True))


@pytest.mark.parametrize(("budget", "lanes"), [(1, 1), (30, 1), (64, 2), (4096, 2), (4096, 1)])
def test_a_pair_is_in_one_micro_batch_with_its_prompt_once(make_samples, budget, lanes):
    samples = make_samples(SHAPES * 12, holes=False)
    at_once, batches = pair_batches(samples, token_budget=budget, lanes=lanes)
    seen: list[int] = []
    for batch in batches:
        assert [row // 2 for row in batch.rows[0::2]] == [row // 2 for row in batch.rows[1::2]]
        assert all(row % 2 == 0 for row in batch.rows[0::2])
        tokens = sum(
            len(samples[row].prompt_ids) * (row % 2 == 0) + len(samples[row].completion_ids) for row in batch.rows
        )
        assert len(batch.input_ids_S) == tokens and (tokens * at_once <= budget or len(batch.rows) == 2)
        seen += batch.rows
    assert sorted(seen) == list(range(len(samples)))


def test_completions_after_two_prompts_are_a_pair_too(make_learner, make_samples):
    """As where a template renders an answer with calls of tools otherwise than one of text."""
    samples = make_samples(((5, (4,)), (6, (3,))))
    learner, config = make_learner(micro_tokens=1), PreferenceConfig()
    learner.forward_backward_preference([(samples[0], samples[1])], config)
    mine = gradients(learner)
    by_hand(learner, [(samples[0], samples[1])], config).backward()
    assert_same(mine, gradients(learner))
