"""The losses against numbers that others' code gave on the same batch.

Two samples of 4 and 3 targets with prompts of 2 and 1 tokens; log-probabilities under the policy, its snapshot, the
sampler and the reference. Values and gradients, to five places, are from running the Fireworks cookbook's loss builders
and Tinker's published formulas on it. Where the cookbook counts masked tokens (its gspo), Tinker's are the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from groupwise.config.loss import resolve_loss
from groupwise.errors import ConfigError, DataError
from groupwise.sdk import losses
from groupwise.sdk.datums import Datum
from wording import raises

POLICY = [[-0.1, -0.9, -1.2, -0.4], [-0.7, -2.0, -0.3]]
SNAPSHOT = [[-0.1, -1.0, -0.8, -0.5], [-0.9, -1.6, -0.35]]
SAMPLER = [[0.0, -1.1, -0.7, -0.5], [-0.8, -3.5, -0.30]]
REFERENCE = [[-0.2, -0.8, -1.0, -0.6], [-0.5, -1.9, -0.4]]
ADVANTAGES, MASKS, PROMPTS = [0.7071, -0.7071], [[0, 1, 0, 1], [1, 1, 1]], [2, 1]
TOKENS = [(5, 6, 7, 8, 9), (5, 6, 7, 8)]
DATA = [
    Datum(model_input=ids[:-1], loss_fn_inputs={"target_tokens": ids[1:], "weights": mask})
    for ids, mask in zip(TOKENS, MASKS, strict=True)
]
Gradient = list[list[float]]


def measured(loss: Callable[[list[torch.Tensor]], tuple[torch.Tensor, Any]]) -> tuple[float, Gradient]:
    rows = [torch.tensor(row, requires_grad=True) for row in POLICY]
    value, _ = loss(rows)
    value.backward()
    return float(value.detach()), [[] if row.grad is None else row.grad.tolist() for row in rows]


def same(found: tuple[float, Gradient], value: float, gradient: Gradient) -> None:
    assert found[0] == pytest.approx(value, abs=6e-6)
    assert found[1] == [pytest.approx(row, abs=6e-6) for row in gradient]


@pytest.mark.parametrize(
    ("name", "knobs", "value", "gradient"),
    [
        ("grpo", {"kl_beta": 0.1}, 2.67738, [[0, -0.87417, 0, -0.76334], [0.75933, -0.01052, 0.71662]]),
        ("grpo", {"kl_beta": 0, "eps_clip_high": 0.28}, 2.67185, [[0, -0.86365, 0, -0.78147], [0.78147, 0, 0.7071]]),
        ("importance_sampling", {}, 2.21336, [[0, -0.86365, 0, -0.78147], [0.78147, 2.36992, 0.7071]]),
        ("reinforce", {}, 3.01245, [[0, -0.86365, 0, -0.78147], [0.78147, 3.169, 0.7071]]),
        ("dapo", {}, 2.67185, [[0, -0.86365, 0, -0.78147], [0.78147, 0, 0.7071]]),
        ("dapo", {"eps_clip_c": 1.1}, 2.59417, [[0, -0.86365, 0, -0.78147], [0, 0, 0.7071]]),
        ("dro", {}, -6.72893, [[0, -0.77647, 0, -0.7021], [0.64981, 3.5155, 0.67511]]),
        ("cispo", {}, -5.32608, [[0, -0.86365, 0, -0.78147], [0.78147, 2.8284, 0.7071]]),
    ],
)
def test_the_recipes_losses(name: str, knobs: Mapping[str, float], value: float, gradient: Gradient) -> None:
    make = getattr(losses, f"make_{name}_loss_fn")
    loss_fn = make(ADVANTAGES, REFERENCE, PROMPTS, SAMPLER, SNAPSHOT, **knobs)
    same(measured(lambda rows: loss_fn(DATA, rows)), value, gradient)


def built_in_data(*, mask: bool) -> list[Datum]:
    return [
        datum.having(
            weights=None,
            logprobs=behaviour,
            advantages=[advantage * m for m in marks],
            mask=marks if mask else None,
        )
        for datum, behaviour, advantage, marks in zip(DATA, SAMPLER, ADVANTAGES, MASKS, strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "config", "value", "gradient"),
    [
        ("importance_sampling", {}, 3.01245, [[0, -0.86365, 0, -0.78147], [0.78147, 3.169, 0.7071]]),
        ("ppo", {}, 3.02758, [[0, 0, 0, -0.78147], [0.78147, 3.169, 0.7071]]),
        ("cispo", {}, -5.32608, [[0, -0.86365, 0, -0.78147], [0.78147, 2.8284, 0.7071]]),
        (
            "cispo",
            {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
            -1.37994,
            [[0, -0.84852, 0, -0.78147], [0.78147, 0.84852, 0.7071]],
        ),
        ("dro", {}, -1.13782, [[-0.005, -0.6971, -0.025, -0.7021], [0.7121, 0.7821, 0.7071]]),
        ("gspo", {}, 1.97291, [[0, -0.82153, 0, -0.82153], [1.20533] * 3]),
        (
            "gspo",
            {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
            2.20121,
            [[0, 0, 0, 0], [1.20533] * 3],
        ),
    ],
)
def test_the_built_in_losses(name: str, config: Mapping[str, float], value: float, gradient: Gradient) -> None:
    data = built_in_data(mask=name == "gspo")  # whose ratio is of the masked tokens; the others' data has no mask
    same(measured(lambda rows: losses.datum_loss(data, rows, name, config)), value, gradient)


def test_cross_entropy_takes_its_weights_as_they_are() -> None:
    same(measured(lambda rows: losses.datum_loss(DATA, rows, "cross_entropy")), 4.3, [[0, -1, 0, -1], [-1, -1, -1]])
    signed = [datum.having(weights=[-2.0 * m for m in mask]) for datum, mask in zip(DATA, MASKS, strict=True)]
    assert measured(lambda rows: losses.datum_loss(signed, rows, "cross_entropy"))[0] == pytest.approx(-8.6)


def test_what_is_masked_changes_nothing() -> None:
    data = built_in_data(mask=True)
    moved = [datum.having(logprobs=[x if m else -9.0 for x, m in zip(q, mask, strict=True)])
             for datum, q, mask in zip(data, SAMPLER, MASKS, strict=True)]  # fmt: skip
    for name in losses.BUILT_IN.keys() - {"cross_entropy"}:
        before = measured(lambda rows, name=name: losses.datum_loss(data, rows, name))
        assert measured(lambda rows, name=name: losses.datum_loss(moved, rows, name)) == before


def test_a_kl_has_a_gradient() -> None:
    without, with_kl = (
        measured(lambda rows, beta=beta: losses.make_grpo_loss_fn(
            ADVANTAGES, REFERENCE, PROMPTS, SAMPLER, SNAPSHOT, kl_beta=beta)(DATA, rows))[1]
        for beta in (0.0, 0.1)
    )  # fmt: skip
    assert without != with_kl


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("sapo", {}),
        ("ppo", {"eps": 0.2}),
        ("cross_entropy", {"beta": 1.0}),
        ("ppo", {"clip_low_threshold": 1.5}),
        ("cispo", {"clip_low_threshold": -0.1}),
        ("gspo", {"clip_high_threshold": 0.2}),
        ("ppo", {"clip_high_threshold": float("inf")}),
        ("ppo", {"clip_low_threshold": float("nan")}),
        ("ppo", {"clip_low_threshold": "x"}),
        ("dro", {"beta": 0}),
        ("dro", {"beta": True}),
    ],
)
def test_an_unknown_loss_or_knob_is_refused(name: str, config: dict[str, float]) -> None:
    with raises(ConfigError):
        losses.built_in(name, config)


def test_defaults_are_the_published_ones() -> None:
    """Tinker's pages of each loss, and its tutorial 202; none is published for gspo."""
    assert losses.BUILT_IN == {
        "cross_entropy": {},
        "importance_sampling": {},
        "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        "dro": {"beta": 0.05},
        "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    }
    for name, knobs in losses.BUILT_IN.items():
        assert losses.built_in(name) == losses.built_in(name, knobs)


@pytest.mark.parametrize(
    ("change", "loss"),
    [
        ({"logprobs": None}, "ppo"),
        ({"advantages": None}, "ppo"),
        ({"weights": [1, 1, 1, 1]}, "ppo"),
        ({"old_logprobs": [-1.0] * 4}, "ppo"),
        ({"reference_logprobs": [-1.0] * 4}, "ppo"),
    ],
)
def test_a_loss_reads_all_it_is_given_and_is_given_all_it_reads(change: dict[str, Any], loss: str) -> None:
    data = built_in_data(mask=False)[:1]
    with raises(DataError):
        losses.check_inputs([data[0].having(**change)], losses.built_in(loss), weights="advantages")


def test_a_snapshot_for_some_only_is_refused() -> None:
    first, second = built_in_data(mask=True)
    spec = resolve_loss("grpo", anchor="old")
    with raises(DataError):
        losses.check_inputs([first.having(old_logprobs=SNAPSHOT[0]), second], spec, weights="advantages")


def test_rows_of_another_length_are_refused() -> None:
    rows = [torch.tensor(row[:-1]) for row in POLICY]
    with raises(DataError):
        losses.datum_loss(DATA, rows, "cross_entropy")
    loss_fn = losses.make_grpo_loss_fn(ADVANTAGES, REFERENCE, PROMPTS, SAMPLER, [row[:0] for row in SNAPSHOT])
    with raises(DataError):
        loss_fn(DATA, [torch.tensor(row) for row in POLICY])


def test_a_mean_over_prompts_is_refused() -> None:
    data = [datum.having(weights=None, mask=mask, advantages=mask) for datum, mask in zip(DATA, MASKS, strict=True)]
    spec = resolve_loss("reinforce", reduction="prompt_mean")
    with raises(ConfigError):
        losses.datum_loss(data, [torch.tensor(row) for row in POLICY], spec)


def test_no_datums_are_refused() -> None:
    with raises(DataError):
        losses.datum_loss([], [], "cross_entropy")
