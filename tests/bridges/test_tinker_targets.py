"""Targets over the Tinker wire that are not the next token: one a position or several, against a plain forward."""

import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("google.protobuf")

import torch

from groupwise.bridges.tinker.datums import datums_of
from groupwise.model.load import plain_attention
from groupwise.model.packing import micro_batches
from tinker_wire import Datum, Wire, datum, request, supervised


def targeted(seed: int, *, several: int = 0) -> list[Datum]:
    """Sequences with targets of their own [N], or `several` [N, K], and weights of either sign, some 0."""
    rng = random.Random(seed)
    data = []
    for tokens, _ in supervised(seed):
        shape = (len(tokens), several) if several else (len(tokens),)
        targets = np.array([rng.randrange(280) for _ in range(int(np.prod(shape)))]).reshape(shape)
        weights = np.array([rng.choice((-1.0, 0.0, 0.5, 2.0)) for _ in range(targets.size)]).reshape(shape)
        data.append((tokens, {"target_tokens": targets.tolist(), "weights": weights.tolist()}))
    return data


def plain(wire: Wire, model: str, data: list[Datum]) -> tuple[list[np.ndarray], float, np.ndarray]:
    """Log-probabilities, loss and gradient by transformers' own forward of each sequence."""
    learner = wire.tinker.models.find(model).trainer.learner
    total, rows = torch.zeros(()), []
    with plain_attention(learner.model):
        for tokens, values in data:
            targets, weights = torch.tensor(values["target_tokens"]), torch.tensor(values["weights"])
            logp = learner.model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
            row = logp.gather(1, targets.view(len(tokens), -1)).view(targets.shape)
            total = total - (weights * row).sum()
            rows.append(row.detach().numpy())
    grads = torch.autograd.grad(total, learner.parameters)
    return rows, total.item(), np.concatenate([grad.numpy().ravel() for grad in grads])


def assert_same(found: Any, expected: tuple[list[np.ndarray], float, np.ndarray], gradient: np.ndarray) -> None:
    rows, metrics = found
    for mine, theirs in zip(rows, expected[0], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)
    assert metrics["loss:sum"] == pytest.approx(expected[1], rel=1e-5)
    np.testing.assert_allclose(gradient, expected[2], atol=1e-5 * np.abs(expected[2]).max())


@pytest.mark.parametrize("several", [0, 1, 3])
def test_values_and_gradients_are_those_of_a_plain_forward(wire: Wire, several: int) -> None:
    model = wire.model()
    wire.backward_answer(model, 1, supervised(5))
    wire.answer(wire.step(model, 2))  # the adapter is no longer nothing
    data = targeted(1, several=several)
    expected = plain(wire, model, data)
    only, metrics = wire.backward_answer(model, 3, data, forward_only=True)
    assert [row.shape for row in only] == [row.shape for row in expected[0]]
    assert metrics["loss:sum"] == pytest.approx(expected[1], rel=1e-5)
    assert_same(wire.backward_answer(model, 4, data), expected, wire.gradient(model))


def test_some_have_one_target_and_some_several(wire: Wire) -> None:
    model = wire.model()
    data = [each for pair in zip(targeted(2), targeted(3, several=2), strict=True) for each in pair]
    expected = plain(wire, model, data)
    assert_same(wire.backward_answer(model, 1, data), expected, wire.gradient(model))


def test_several_targets_share_the_forward() -> None:
    tokens = list(range(40))
    wide = (tokens, {"target_tokens": [[t, t + 1, t + 2, t + 3] for t in tokens], "weights": [[1.0] * 4] * 40})
    samples = [each.sample("weights") for each in datums_of(request("m", 1, [wide]))]
    (batch,) = micro_batches(samples, token_budget=1000)
    assert len(batch.target_N) == 160 and len(batch.input_ids_S) == 40 + 4  # which the last target closes


def test_padding_with_no_weight_changes_nothing(wire: Wire) -> None:
    tokens = [9, 8, 7, 6, 5]
    whole = datum(tokens, weights=[0, 0, 1, 0.5])
    padded = (whole[0], {**whole[1], "target_tokens": [0, 0, 6, 5]})
    plain_model, other = wire.model(0), wire.model(1)
    (row,), metrics = wire.backward_answer(plain_model, 1, [whole])
    (also,), found = wire.backward_answer(other, 1, [padded])
    assert np.array_equal(row[2:], also[2:]) and not np.allclose(row[:2], also[:2])
    assert metrics["loss:sum"] == found["loss:sum"]
    assert np.array_equal(wire.gradient(plain_model), wire.gradient(other))


def test_wrong_targets_are_refused_by_name_and_change_nothing(wire: Wire) -> None:
    model = wire.model()
    wrong = {
        "target 280 is not in the vocabulary: ids go from 0 to 279": [280, 7, 6],
        "-100 is not a token id": [8, -100, 6],
        "target_tokens has 2 entries": [8, 7],
    }
    for seq, (message, targets) in enumerate(wrong.items(), start=1):
        data = [([9, 8, 7], {"target_tokens": targets, "weights": [0.0, 1.0, 1.0]})]
        failed = wire.backward_answer(model, seq, data)
        assert failed["category"] == "user" and message in failed["error"], failed
    assert "nothing was accumulated" in wire.answer(wire.step(model, len(wrong) + 1))["error"]
