"""Targets that are not the next token: values and gradients of transformers' own forward, packed in every way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from learner_cases import LORA, assert_same, gradients
from torch import Tensor

from groupwise.algo.loss import resolve_loss
from groupwise.model import packing as cutting
from groupwise.model.attention import SharedPrompts
from groupwise.model.load import plain_attention
from groupwise.model.packing import MicroBatch, micro_batches, pack, pack_tree
from groupwise.model.prefix_tree import PrefixTree
from groupwise.train.learner import Learner
from groupwise.types import Sample
from wording import raises

LOSS = resolve_loss("reinforce", reduction="sum")  # -sum A log p
VOCABULARY = 280


def targeted(layout: type) -> list[Sample]:
    """Groups whose completions are so alike that they are packed as a tree, or only share their prompts. Each has its
    own targets, two of them over the same tokens; a mask with a hole; and one without targets."""
    g = torch.Generator().manual_seed(0)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, VOCABULARY, (n,), generator=g).tolist())

    samples = []
    for _ in range(2):
        prompt, begun = ids(6), ids(24)
        for length in (3, 5, 5):
            said = (*begun, *ids(length)) if layout is PrefixTree else ids(length)
            mask = (1, 0, *(1,) * (len(said) - 2))
            advantage = float(torch.randn((), generator=g))
            given = Sample(
                prompt_ids=prompt, completion_ids=said, mask=mask, advantage=advantage, targets=ids(len(said))
            )
            samples.append(given)
        samples.append(replace(given, targets=ids(len(said)), weights=tuple(float(i % 3) for i in range(len(said)))))
        samples.append(replace(given, targets=None))
    return samples


def expected(learner: Learner, samples: list[Sample], *, reference: bool = False) -> list[Tensor]:
    """log p of every target of each sample, by the model's own forward on it alone, with a graph."""
    model = learner.base.model if reference else learner.model
    rows = []
    with plain_attention(model):
        for sample in samples:
            logits = model(input_ids=torch.tensor([(*sample.prompt_ids, *sample.completion_ids)])).logits[0]
            first = len(sample.prompt_ids) - 1
            targets = torch.tensor(sample.targets or sample.completion_ids)
            rows.append(logits[first:-1].log_softmax(-1).gather(1, targets[:, None])[:, 0])
    return rows


def loss_of(samples: list[Sample], rows: list[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for sample, row in zip(samples, rows, strict=True):
        weights = torch.tensor(sample.weights or (1.0,) * len(row), dtype=torch.float64)
        total = total - (sample.advantage * weights * torch.tensor(sample.mask) * row).sum()
    return total


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
@pytest.mark.parametrize("layout", [SharedPrompts, PrefixTree])
def test_log_probabilities_and_gradients_are_those_of_the_models_own_forward(make_learner, architecture, layout):
    lora = LORA if architecture == "qwen3" else None
    learner, samples = make_learner(architecture, lora=lora), targeted(layout)
    assert all(isinstance(batch.layout, layout) for batch in micro_batches(samples, token_budget=8192))
    rows = expected(learner, samples)
    for found, row in zip(learner.forward(samples), rows, strict=True):
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), row.detach(), rtol=1e-9, atol=1e-9)
    loss = loss_of(samples, rows)
    loss.backward()
    plain = gradients(learner)
    metrics = learner.forward_backward(samples, LOSS)
    assert metrics["loss/policy"] == pytest.approx(loss.item(), rel=1e-9)
    assert_same(gradients(learner), plain)


@pytest.mark.parametrize("layout", [SharedPrompts, PrefixTree])
def test_cut_streamed_side_by_side_and_custom(make_learner, monkeypatch, layout):
    samples = targeted(layout)
    learner: Learner = make_learner()
    loss_of(samples, expected(learner, samples)).backward()
    plain = gradients(learner)

    small = make_learner(micro_tokens=40)
    small.forward_backward(samples, LOSS)
    assert_same(gradients(small), plain)

    stream = learner.begin_step()
    stream.accumulate(samples[:4], LOSS)
    stream.accumulate(samples[4:], LOSS)
    assert_same(gradients(learner), plain)

    learner.forward_backward_custom(
        samples,
        lambda rows: (loss_of(samples, rows), {}),  # its rows are tensors like those of the plain forward
    )
    assert_same(gradients(learner), plain, atol=1e-5)

    monkeypatch.setattr(cutting, "LANE_TOKENS", 1)
    lanes = make_learner(threads=2, micro_tokens=160)
    assert lanes._cut(samples)[0] == 2
    lanes.forward_backward(samples, LOSS)
    assert_same(gradients(lanes), plain)


def test_the_reference_is_of_the_targets(make_learner):
    learner, samples = make_learner(), targeted(SharedPrompts)
    rows = expected(learner, samples, reference=True)
    for found, row in zip(learner.forward(samples, reference=True), rows, strict=True):
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), row.detach(), rtol=1e-9, atol=1e-9)


def test_the_supervised_loss_is_of_the_targets(make_learner):
    learner, samples = make_learner(), [replace(s, advantage=1.0, weights=None) for s in targeted(SharedPrompts)]
    loss = loss_of(samples, expected(learner, samples)) / sum(sum(s.mask) for s in samples)
    found = learner.forward_backward_supervised(samples)["loss/cross_entropy"]
    assert found == pytest.approx(loss.item(), rel=1e-9)


@pytest.mark.parametrize("layout", [SharedPrompts, PrefixTree])
def test_targets_that_are_the_completion_are_no_targets(make_learner, layout):
    """Bit for bit."""
    plain = [replace(s, targets=None) for s in targeted(layout)]
    given = [replace(s, targets=s.completion_ids) for s in plain]
    runs = []
    for samples in (plain, given):
        learner = make_learner(dtype=torch.float32)
        runs.append((learner.forward(samples), learner.forward_backward(samples, LOSS), gradients(learner)))
    assert runs[0][:2] == runs[1][:2]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][2], runs[1][2], strict=True))


def test_equal_tokens_are_packed_once_and_stay_two_rows():
    one = Sample(prompt_ids=(5, 6), completion_ids=(7, 2), mask=(1, 1), targets=(9, 4))
    samples = [one, replace(one, targets=(8, 2))]

    def rows(batch: MicroBatch) -> list[tuple[int, int, int]]:
        before = batch.input_ids_S[batch.source_N].tolist()
        return list(zip(batch.row_N.tolist(), before, batch.target_N.tolist(), strict=True))

    tree, shared = pack_tree(samples, [0, 1], device="cpu"), pack(samples, [[0, 1]], device="cpu")
    assert tree.input_ids_S.tolist() == [5, 6, 7, 2] and shared.input_ids_S.tolist() == [5, 6, 7, 2, 7, 2]
    assert rows(tree) == rows(shared) == [(0, 6, 9), (0, 7, 4), (1, 6, 8), (1, 7, 2)]


def test_as_many_targets_as_tokens():
    with raises(ValueError):
        Sample(prompt_ids=(5,), completion_ids=(7, 2), mask=(1, 1), targets=(9,))
