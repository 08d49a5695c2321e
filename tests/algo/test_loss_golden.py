"""The losses of the Fireworks cookbook and the Tinker service on a toy batch, from their own code, to 5 places.

Where theirs has a bug, the test computes the right value by hand and shows that it is another one.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from loss_batches import Padded

from groupwise.algo.loss import resolve_loss

GOLDEN = json.loads((Path(__file__).parent / "golden" / "toy_batch.json").read_text())
A = 0.7071
DECOUPLED = {"anchor": "old", "correction": "tis_token", "correction_cap": 5.0, "reduction": "sum"}
SUM = {"reduction": "sum"}
CASES = {
    "grpo clip_high": ("grpo", DECOUPLED | {"clip_high": 0.28}),
    "grpo k3": ("grpo", DECOUPLED | {"kl": "k3", "kl_coeff": 0.1}),
    "grpo icepop": (
        "grpo",
        DECOUPLED | {"clip_high": 0.28, "correction": "mask_token", "correction_cap": 2.0, "correction_floor": 0.5},
    ),
    "importance_sampling": ("importance_sampling", DECOUPLED),
    "importance_sampling behaviour": ("importance_sampling", SUM),  # also what Fireworks calls reinforce
    "dapo": ("dapo", DECOUPLED),
    "dapo dual_clip": ("dapo", DECOUPLED | {"dual_clip": 1.1}),
    "dro": ("dro", DECOUPLED),
    "cispo": ("cispo", DECOUPLED | {"clip_low": 0.2, "clip_high": 0.28}),
    "ppo behaviour": ("grpo", SUM),
    "cispo behaviour": ("cispo", SUM | {"clip_low": 0.2, "clip_high": 0.2}),
    "gspo behaviour": ("gspo", SUM | {"anchor": "behaviour", "clip_low": 0.2, "clip_high": 0.2}),
    "gspo behaviour narrow": ("gspo", SUM | {"anchor": "behaviour"}),
}


def toy() -> Padded:
    return Padded(**{name: torch.tensor(value, dtype=torch.float64) for name, value in GOLDEN["inputs"].items()})


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient(name: str):
    preset, overrides = CASES[name]
    loss, grad, _ = toy().run(resolve_loss(preset, **overrides))
    assert float(loss) == pytest.approx(GOLDEN["cases"][name]["loss"], abs=6e-6)
    expected = torch.tensor(GOLDEN["cases"][name]["grad"], dtype=torch.float64)
    torch.testing.assert_close(grad, expected, rtol=0, atol=6e-6)


def test_every_recorded_case_is_used():
    assert CASES.keys() == GOLDEN["cases"].keys()


def test_kl_has_a_gradient():
    """The cookbook's first KL (k1 of detached logprobs) had the value 2.66185 here, and no gradient."""
    spec = resolve_loss("grpo", **DECOUPLED)
    penalised = resolve_loss("grpo", **DECOUPLED, kl="k1", kl_coeff=0.1)
    loss, grad, _ = toy().run(penalised)
    assert float(loss) == pytest.approx(2.66185, abs=6e-6)
    difference = grad - toy().run(spec)[1]
    batch = toy()
    assert batch.reference is not None
    torch.testing.assert_close(difference, 0.1 * (batch.logprobs - batch.reference) * batch.mask)


def test_sequence_ratio_is_over_loss_tokens_only():
    """The cookbook's GSPO averages masked positions too: 0.93551 for the first sample, not e^0.1; 3.21892 in all."""
    spec = resolve_loss("gspo", **DECOUPLED | {"clip_low": 0.2, "clip_high": 0.2})
    loss, _, metrics = toy().run(spec, total_tokens=5.0)
    first, second = math.exp((0.1 + 0.1) / 2), math.exp((0.2 - 0.4 + 0.05) / 3)
    weights = [math.exp(0.1), 1.0], [math.exp(-0.1), 5.0, math.exp(-0.05)]
    expected = -A * first * sum(weights[0]) + A * second * sum(weights[1])
    assert float(loss) == pytest.approx(expected, abs=1e-12)
    assert abs(expected - 3.21892) > 0.05
    assert metrics["loss/ratio_mean"] == pytest.approx((2 * first + 3 * second) / 5)


def test_dro_penalises_loss_tokens_only():
    """Tinker's DRO has its square on every position, prompt and tool tokens included: -1.13782 here."""
    loss, grad, _ = toy().run(resolve_loss("dro", reduction="sum"))
    masked_squares = 0.025 * (0.1**2 + 0.5**2)
    assert float(loss) == pytest.approx(-1.13782 - masked_squares, abs=6e-6)
    expected = torch.tensor([[0, -0.6971, 0, -0.7021], [0.7121, 0.7821, 0.7071, 0]], dtype=torch.float64)
    torch.testing.assert_close(grad, expected, rtol=0, atol=6e-6)


def test_sequence_weight_is_the_product_of_ratios():
    """The cookbook's sequence-level TIS is the geometric mean (2.25039), which corrects no distribution."""
    spec = resolve_loss("grpo", **DECOUPLED | {"clip_high": 0.28, "correction": "tis_sequence"})
    loss, _, _ = toy().run(spec)
    first = math.exp(0.1) * -A * (2 * math.exp(0.1))
    second = 5.0 * A * (math.exp(0.2) + 0.8 + math.exp(0.05))  # exp(1.75) is cut to 5; A < 0 is clipped below only
    assert float(loss) == pytest.approx(first + second, abs=1e-12)
