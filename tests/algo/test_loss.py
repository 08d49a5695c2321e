"""What every loss must do, whatever its factors: ignore masked tokens, not depend on the split, survive bad numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batches import Padded, random_batch

from groupwise.algo.loss import PRESETS, policy_loss, resolve_loss
from groupwise.algo.loss_inputs import LossInputs
from groupwise.algo.loss_metrics import combined
from groupwise.config.loss import LossSpec
from groupwise.errors import ConfigError
from wording import raises

few = settings(max_examples=8)


def all_specs() -> dict[str, LossSpec]:
    length = {"dr_grpo": {"reduction_length": 7}}
    specs = {name: resolve_loss(name, **length.get(name, {})) for name in PRESETS}
    for kl in ("k1", "k2", "k3", "k3_unbiased"):
        specs[kl] = resolve_loss("grpo", kl=kl)
    for correction in ("tis_token", "tis_sequence", "mask_token", "mask_sequence", "mask_geometric"):
        bounds = {"correction_floor": 0.9, "correction_cap": 1.15}  # some of the batch on either side
        specs[correction] = resolve_loss("dapo", correction=correction, **bounds)
        specs["vespo " + correction] = resolve_loss("vespo", correction=correction, **bounds)
    specs["opsm"] = resolve_loss("dapo", opsm_threshold=0.01)
    specs["dual"] = resolve_loss("dapo", dual_clip=1.5, anchor="old")
    specs["everything"] = resolve_loss(
        "gspo", correction="tis_token", opsm_threshold=0.1, kl="k3_unbiased", entropy_coeff=0.01, reduction="sum"
    )
    return specs


SPECS = all_specs()


@pytest.mark.parametrize("name", SPECS)
@few
@given(seed=st.integers(0, 1000), assignment=st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_split_invariance(name: str, seed: int, assignment: list[int]):
    """Any division of the rows into micro-batches: the losses, gradients and metrics add up to those of the whole."""
    batch, exact = random_batch(seed), {"rtol": 0.0, "atol": 1e-12}
    totals = {"total_tokens": float(batch.mask.sum()), "total_rows": 6.0}
    loss, grad, metrics = batch.run(SPECS[name], **totals)
    parts = [[row for row in range(6) if assignment[row] == part] for part in range(3)]  # some may be empty
    results = [batch.rows(rows).run(SPECS[name], **totals) for rows in parts]
    torch.testing.assert_close(torch.stack([part[0] for part in results]).sum(), loss, **exact)
    torch.testing.assert_close(
        torch.cat([part[1] for part in results]), grad[[r for rows in parts for r in rows]], **exact
    )
    assert combined([part[2] for part in results]) == pytest.approx(metrics, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", SPECS)
def test_masked_tokens_change_nothing(name: str):
    batch = random_batch(5)
    hole = ~batch.mask.bool()

    def spoiled(value: float) -> Padded:
        per_token = ("logprobs", "behaviour", "old", "reference", "entropy")
        return Padded(**vars(batch) | {k: getattr(batch, k).masked_fill(hole, value) for k in per_token})

    loss, grad, metrics = batch.run(SPECS[name])
    for value in (-50.0, float("nan"), float("inf")):
        other_loss, other_grad, other_metrics = spoiled(value).run(SPECS[name])
        assert torch.equal(other_loss, loss) and torch.equal(other_grad, grad)
        assert other_metrics == metrics
    assert not grad[hole].any() and grad.any()


@pytest.mark.parametrize("preset", PRESETS)
def test_on_policy_every_loss_is_reinforce(preset: str):
    """pi = anchor: the gradient is -A times the reduction's scale, the ratio 1, and nothing is clipped."""
    for anchor in ("behaviour", "old", "old without a snapshot"):
        batch = random_batch(2)
        same = {"behaviour": batch.logprobs, "old": None if "without" in anchor else batch.logprobs}
        batch = Padded(**vars(batch) | same)
        wanted = {"anchor": anchor.split()[0]} if preset != "reinforce" else {}
        _, grad, metrics = batch.run(resolve_loss(preset, **wanted, reduction="sum"))
        torch.testing.assert_close(grad, -batch.advantages[:, None] * batch.mask)
        assert metrics.get("loss/ratio_mean", 1.0) == pytest.approx(1.0), anchor
        assert not any(value for key, value in metrics.items() if "clip_frac" in key), anchor


@pytest.mark.parametrize("name", SPECS)
def test_a_non_finite_behaviour_logprob_drops_its_token(name: str):
    """Its token is as good as masked; only the denominators still count it."""
    for bad in (float("nan"), float("-inf"), float("inf")):
        check_dropped(name, bad)


def check_dropped(name: str, bad: float) -> None:
    batch, spec = random_batch(3), SPECS[name]
    row, column = batch.mask.bool().nonzero()[3].tolist()
    assert batch.behaviour is not None
    behaviour, mask = batch.behaviour.clone(), batch.mask.clone()
    behaviour[row, column], mask[row, column] = bad, False
    totals = {"total_tokens": float(batch.mask.sum()), "total_rows": 6.0}
    loss, grad, metrics = Padded(**vars(batch) | {"behaviour": behaviour}).run(spec, **totals)
    masked_loss, masked_grad, masked_metrics = Padded(**vars(batch) | {"mask": mask}).run(spec, **totals)
    assert metrics.pop("mismatch/dropped_tokens") == 1
    assert masked_metrics.pop("mismatch/dropped_tokens") == 0
    assert loss.isfinite() and grad.isfinite().all() and not grad[row, column]
    if spec.reduction == "sequence_mean":
        before = float(batch.mask[row].sum())
        masked_grad[row] *= (before - 1) / before
        torch.testing.assert_close(grad, masked_grad)
    else:
        torch.testing.assert_close(grad, masked_grad)
        torch.testing.assert_close(loss, masked_loss)
        assert metrics == pytest.approx(masked_metrics)


@pytest.mark.parametrize("name", SPECS)
def test_no_tokens_at_all(name: str):
    """A micro-batch of empty rows has loss 0 and a gradient to call backward on (other ranks may wait for it)."""
    empty = random_batch(0).rows([5])
    loss, grad, metrics = empty.run(SPECS[name])
    assert float(loss) == 0 and not grad.any()
    assert not any(metrics.values())


@pytest.mark.parametrize("name", SPECS)
def test_huge_log_ratios_stay_finite(name: str):
    batch = random_batch(1)
    for gap in (-1000.0, 1000.0):
        far = dict.fromkeys(("behaviour", "old", "reference"), batch.logprobs + gap)
        loss, grad, metrics = Padded(**vars(batch) | far).run(SPECS[name])
        assert loss.isfinite() and grad.isfinite().all(), gap
        assert all(math.isfinite(value) for value in metrics.values()), gap


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        ("tis_token", [[2.0, 0.7], [1.5, 1.6]]),
        ("tis_sequence", [[1.5, 1.5], [2.0, 2.0]]),
        ("mask_token", [[0.0, 0.0], [1.5, 1.6]]),
        ("mask_sequence", [[1.5, 1.5], [0.0, 0.0]]),
        ("mask_geometric", [[1.0, 1.0], [1.0, 1.0]]),
    ],
)
def test_correction_weights_by_hand(correction: str, weights: list[list[float]]):
    """Trainer to engine ratios 3 and 0.5 in one row, 1.5 and 1.6 in the other, with bounds 0.7 and 2."""
    ratios = torch.tensor([[3.0, 0.5], [1.5, 1.6]], dtype=torch.float64)  # products 1.5, 2.4; roots of them 1.22, 1.55
    logprobs = torch.full((2, 2), -1.0, dtype=torch.float64)
    batch = Padded(logprobs, torch.ones(2), torch.ones(2, 2), behaviour=logprobs - ratios.log())
    bounds = {"correction_floor": 0.7, "correction_cap": 2.0}
    _, grad, metrics = batch.run(resolve_loss("reinforce", reduction="sum", correction=correction, **bounds))
    expected = torch.tensor(weights, dtype=torch.float64)
    torch.testing.assert_close(-grad, expected)
    assert metrics["mismatch/weight_mean"] == pytest.approx(float(expected.mean()))
    narrow = resolve_loss("reinforce", reduction="sum", correction="mask_geometric", correction_cap=1.3)
    assert batch.run(narrow)[2]["mismatch/masked_frac"] == 0.5


@pytest.mark.parametrize("kl", ["k1", "k2", "k3", "k3_unbiased"])
def test_kl_pulls_back_the_tokens_that_drifted_most(kl: str):
    """A token the policy likes e^40 times more than the reference: its KL gradient must push it down."""
    batch = random_batch(1)
    batch = Padded(**vars(batch) | {"advantages": torch.zeros(6).double(), "reference": batch.logprobs - 40})
    _, grad, _ = batch.run(resolve_loss("reinforce", kl=kl, kl_coeff=1.0, reduction="sum"))
    assert (grad[batch.mask.bool()] > 0.1).all()


def test_half_precision_is_computed_in_float32():
    batch = random_batch(4)
    keep = batch.mask.bool()
    logprobs_N = batch.logprobs[keep].bfloat16()
    inputs = LossInputs(
        row_N=keep.nonzero()[:, 0],
        num_rows=6,
        advantages_N=batch.advantages[:, None].expand(keep.shape)[keep].bfloat16(),
        behaviour_N=logprobs_N + 1e-2,
        total_tokens=float(keep.sum()),
        total_rows=6.0,
    )
    loss, metrics = policy_loss(logprobs_N, inputs, resolve_loss("dapo"))
    assert loss.dtype == torch.float32 and all(value.dtype == torch.float32 for value in metrics.values())


def test_clip_fractions_count_only_where_the_clip_acts():
    """Ratios 2, 2, 1/2, 1/2 with advantages +, -, +, -: one is clipped above and one below, in four tokens."""
    logprobs = torch.tensor([[-1.0], [-1.0], [-1.0], [-1.0]], dtype=torch.float64)
    log2 = 0.6931471805599453
    behaviour = logprobs - torch.tensor([[log2], [log2], [-log2], [-log2]], dtype=torch.float64)
    batch = Padded(logprobs, torch.tensor([1.0, -1.0, 1.0, -1.0]), torch.ones(4, 1), behaviour=behaviour)
    _, grad, metrics = batch.run(resolve_loss("dapo"))
    assert metrics["loss/clip_frac_high"] == metrics["loss/clip_frac_low"] == 0.25
    assert grad[:, 0].bool().tolist() == [False, True, True, False]
    assert metrics["mismatch/logprob_diff_max"] == pytest.approx(log2)
    assert metrics["mismatch/logprob_diff_mean"] == pytest.approx(log2)


@pytest.mark.parametrize(
    ("overrides", "missing"),
    [
        ({}, "behaviour"),
        ({"kl": "k3"}, "reference"),
        ({"entropy_coeff": 0.1}, "entropy"),
        ({"reduction": "constant"}, "advantages"),
    ],
)
def test_missing_inputs_are_named(overrides: dict, missing: str):
    batch = random_batch(0)
    lacking = batch if missing == "advantages" else Padded(**vars(batch) | {missing: None})
    with raises(ConfigError):
        lacking.run(resolve_loss("grpo", **overrides))


def test_inputs_of_different_lengths_are_refused():
    with raises(ValueError):
        LossInputs(
            row_N=torch.zeros(3, dtype=torch.long),
            num_rows=1,
            advantages_N=torch.zeros(2),
            total_tokens=3.0,
            total_rows=1.0,
        )
