"""What a loss reports: before and after every bound, the same for any split, and every name explained."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from loss_batches import Padded, random_batch

from groupwise.algo.loss import resolve_loss
from groupwise.algo.loss_metrics import averaged, combined, rescaled
from groupwise.algo.metrics import definitions
from groupwise.algo.preference import preference_loss
from groupwise.config.loss import LossSpec
from groupwise.config.preference import PreferenceConfig


def by_ratio(ratios: list[float], advantages: list[float]) -> Padded:
    """One token a row, whose ratio to the sampler's (and the snapshot's) probability is given."""
    logprobs = torch.full((len(ratios), 1), -1.0, dtype=torch.float64)
    behaviour = logprobs - torch.tensor(ratios, dtype=torch.float64)[:, None].log()
    return Padded(
        logprobs, torch.tensor(advantages, dtype=torch.float64), torch.ones(len(ratios), 1), behaviour=behaviour
    )


def of(metrics: dict[str, float], prefix: str) -> list[float]:
    return [metrics[f"{prefix}_{each}"] for each in ("mean", "min", "max")]


def test_the_policy_ratio_before_and_after_its_bounds():
    batch = by_ratio([0.5, 0.9, 1.1, 4.0, 4.0, 4.0], [-1.0, 1.0, -1.0, 1.0, -1.0, 1.0])
    _, grad, metrics = batch.run(resolve_loss("dapo", clip_high=0.3, dual_clip=3.0))
    assert of(metrics, "loss/ratio") == pytest.approx([14.5 / 6, 0.5, 4.0])
    assert of(metrics, "loss/ratio_clipped") == pytest.approx([(0.8 + 0.9 + 1.1 + 3 * 1.3) / 6, 0.8, 1.3])
    shares = {name: metrics[f"loss/clip_frac{name}"] * 6 for name in ("_low", "_high", "_dual", "")}
    assert shares == pytest.approx({"_low": 1, "_high": 2, "_dual": 1, "": 4})
    assert int((grad == 0).sum()) == 4  # exactly the tokens that are counted have lost their gradient


@pytest.mark.parametrize("preset", ["dppo", "dppo_kl"])
def test_the_trust_region_of_dppo_token_by_token(preset: str):
    """An independent implementation of arXiv 2602.04879, equations 11 to 13, in plain floats."""
    batch, bound = random_batch(3, drift=1.5), 0.1
    assert batch.behaviour is not None
    batch = replace(batch, behaviour=batch.behaviour.clamp(max=-0.01), logprobs=batch.logprobs.clamp(max=-0.01))
    _, grad, metrics = batch.run(resolve_loss(preset, clip_low=bound, clip_high=bound, reduction="sum"))
    outside = {"low": 0, "high": 0}
    for row, t in batch.mask.nonzero().tolist():
        p, q = math.exp(batch.logprobs[row, t]), math.exp(batch.behaviour[row, t])
        tv, kl = abs(p - q), q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        beyond = (tv if preset == "dppo" else kl) > bound
        advantage = float(batch.advantages[row])
        side = "high" if p > q else "low"
        cut = beyond and (advantage > 0) == (side == "high") and advantage != 0
        outside[side] += cut
        expected = 0.0 if cut else -min(p / q, 20.0) * advantage
        assert float(grad[row, t]) == pytest.approx(expected, rel=1e-9)
    tokens = float(batch.mask.sum())
    assert min(outside.values()) > 0 and metrics["loss/clip_frac"] == pytest.approx(sum(outside.values()) / tokens)
    assert metrics["loss/clip_frac_low"] == pytest.approx(outside["low"] / tokens)


def test_dppo_with_a_square_on_leaving_the_sampler():
    """DPPO by total variation and kl_tau (log pi - log sampler)^2 over all tokens, as Kimi K2.5 (arXiv 2602.02276) and
    prime-rl have it: the gradient of that sum, by autograd."""
    batch, bound, kl_tau = random_batch(3, drift=1.5), 0.1, 0.05
    assert batch.behaviour is not None
    batch = replace(batch, behaviour=batch.behaviour.clamp(max=-0.01), logprobs=batch.logprobs.clamp(max=-0.01))
    assert batch.behaviour is not None and float((batch.logprobs - batch.behaviour).max()) < math.log(20)
    spec = resolve_loss("dppo", clip_low=bound, clip_high=bound, dro_beta=2 * kl_tau)
    _, grad, _ = batch.run(spec)
    leaf, keep = batch.logprobs.clone().requires_grad_(), batch.mask.bool()
    log_ratio, moved = leaf - batch.behaviour, leaf.detach().exp() - batch.behaviour.exp()
    outside = torch.where(batch.advantages[:, None] > 0, moved > bound, moved < -bound)
    objective = ~outside * batch.advantages[:, None] * log_ratio.exp()
    loss = (kl_tau * log_ratio.square() - objective)[keep].sum() / keep.sum()
    torch.testing.assert_close(grad, torch.autograd.grad(loss, leaf)[0], rtol=1e-9, atol=1e-12)
    without = batch.run(replace(spec, dro_beta=None))[1]
    assert not torch.allclose(grad, without) and resolve_loss("dppo").dro_beta is None


@pytest.mark.parametrize(
    ("correction", "weights", "masked", "clipped"),
    [
        ("mask_token", [0.0, 1.0, 0.0], 2 / 3, None),
        ("tis_token", [1 / 3, 1.0, 3.0], 0.0, 2 / 3),
        ("mask_sequence", [0.0, 1.0, 0.0], 2 / 3, None),
        ("tis_sequence", [1 / 3, 1.0, 3.0], 0.0, 2 / 3),
        ("mask_geometric", [0.0, 1.0, 0.0], 2 / 3, None),
    ],
)
def test_the_correction_before_and_after_its_bounds(
    correction: str, weights: list[float], masked: float, clipped: float | None
):
    """Sampler ratios 0.2, 1, 5 with bounds 1/3 and 3: what is masked is exactly 0, not brought back to the floor."""
    batch = by_ratio([0.2, 1.0, 5.0], [1.0, 1.0, 1.0])
    spec = resolve_loss("reinforce", reduction="sum", correction=correction, correction_floor=1 / 3, correction_cap=3.0)
    _, grad, metrics = batch.run(spec)
    torch.testing.assert_close(-grad[:, 0], torch.tensor(weights, dtype=torch.float64))
    if correction.startswith("mask"):
        assert (-grad[:, 0]).tolist() == weights
    assert of(metrics, "mismatch/ratio") == pytest.approx([6.2 / 3, 0.2, 5.0])
    assert of(metrics, "mismatch/weight") == pytest.approx([sum(weights) / 3, min(weights), max(weights)])
    assert metrics["mismatch/masked_frac"] == pytest.approx(masked)
    assert metrics.get("mismatch/clipped_frac") == (None if clipped is None else pytest.approx(clipped))


def test_opsm_is_counted_by_itself():
    batch = by_ratio([0.2, 0.2, 1.0, 5.0], [1.0, -1.0, -1.0, -1.0])
    spec = resolve_loss("reinforce", opsm_threshold=0.5, correction="mask_token", correction_cap=3.0)
    _, grad, metrics = batch.run(spec)
    assert metrics["mismatch/opsm_frac"] == 0.25  # the second: the only one left far behind that would be pushed down
    assert metrics["mismatch/masked_frac"] == 0.5
    assert grad[:, 0].bool().tolist() == [True, False, True, False]


def test_without_a_correction_the_samplers_ratio_is_still_reported():
    metrics = by_ratio([0.01, 1.0], [1.0, 1.0]).run(resolve_loss("grpo"))[2]
    assert of(metrics, "mismatch/ratio") == pytest.approx([0.505, 0.01, 1.0])
    assert not [key for key in metrics if key.startswith(("mismatch/weight", "mismatch/masked"))]


@pytest.mark.parametrize("correction", ["tis_token", "tis_sequence", "mask_token"])
def test_vespos_weights_are_reported_though_it_uses_them_elsewhere(correction: str):
    bounds = {"correction": correction, "correction_floor": 0.9, "correction_cap": 1.15}
    batch = random_batch(0)
    mine, plain = (batch.run(resolve_loss(name, **bounds))[2] for name in ("vespo", "grpo"))
    for key in ("mismatch/weight_mean", "mismatch/weight_min", "mismatch/weight_max"):
        assert mine[key] == pytest.approx(plain[key])


def test_parts_combine_and_steps_average():
    parts = [{"a_mean": 1.0, "b/max": 3.0, "c_min": 2.0}, {"a_mean": 0.5, "b/max": 4.0}, {"a_mean": 0.25, "c_min": 1.0}]
    assert combined(parts) == {"a_mean": 1.75, "b/max": 4.0, "c_min": 1.0}
    assert averaged(parts) == pytest.approx({"a_mean": 1.75 / 3, "b/max": 4.0, "c_min": 1.0})
    assert combined([]) == averaged([]) == {}


SPECS = {
    "dapo": resolve_loss("dapo", dual_clip=1.5, entropy_coeff=0.01),
    "grpo": resolve_loss("grpo", kl="k3", correction="tis_token", correction_cap=1.02),
    "gspo": resolve_loss("gspo", opsm_threshold=0.01),
    "luspo": resolve_loss("luspo", correction="mask_geometric"),
    "dr_grpo": resolve_loss("dr_grpo", reduction_length=7, kl="k1"),
    "cispo": resolve_loss("cispo", reduction="sum"),
    "vespo": resolve_loss("vespo"),
    "dro": resolve_loss("dro"),
    "reinforce": resolve_loss("reinforce"),
}


@pytest.mark.parametrize("name", SPECS)
def test_sums_can_be_divided_afterwards(name: str):
    """Loss, gradient and every metric of a batch whose size was not known are those of one whose size was."""
    batch, spec = random_batch(3), SPECS[name]
    tokens, rows = float(batch.mask.sum()), 5.0  # the sixth row has no tokens
    loss, grad, metrics = batch.run(spec, total_tokens=tokens, total_rows=rows)
    sums = batch.run(spec, total_tokens=1.0, total_rows=1.0)
    denominator = spec.denominator(tokens=tokens, rows=rows)
    torch.testing.assert_close(sums[0] / denominator, loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(sums[1] / denominator, grad, rtol=0, atol=1e-12)
    assert rescaled(sums[2], tokens=tokens, policy=denominator) == pytest.approx(metrics)


def test_a_loss_with_two_denominators_cannot_be_divided_afterwards():
    """It says so: an entropy bonus beside a reduction over rows."""
    for reduction in ("token_mean", "sequence_mean", "sequence_sum", "sum"):
        spec = resolve_loss("grpo", reduction=reduction, entropy_coeff=0.1)
        assert spec.streams == (reduction == "token_mean")
        assert resolve_loss("grpo", reduction=reduction).streams


def every_spec() -> list[LossSpec]:
    corrections = ("tis_token", "mask_token")
    return [
        *SPECS.values(),
        resolve_loss("dppo"),
        *(resolve_loss("dapo", correction=c, kl="k3", opsm_threshold=0.1) for c in corrections),
    ]


ROUTERS = ("router/aux_loss", "router/mismatch_frac", "router/recorded_frac")
TEACHERS = (*("kl", "gap_max", "agreement", "mass", "tokens", "scored_frac"), "demonstrations", "demonstrated_tokens")


def test_every_metric_is_defined():
    """And nothing else is: the section of metrics.yaml is what comes out, but for what other losses report."""
    defined = {each.metric for each in definitions() if each.section == "loss"}
    reported = {key for spec in every_spec() for key in random_batch(0).run(spec)[2]}
    _, of_pairs = preference_loss(torch.zeros(2), torch.zeros(2), torch.ones(2), PreferenceConfig(), pairs=1)
    elsewhere = {"kl/tokens", "kl/coeff", "loss/cross_entropy", "loss/custom", "loss/soft_kl", *ROUTERS, *of_pairs}
    assert reported | elsewhere | {f"teacher/{name}" for name in TEACHERS} == defined
