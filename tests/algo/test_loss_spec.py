"""Presets and overrides: a name alone is the published loss, and every knob acts or is refused."""

from __future__ import annotations

import re
from dataclasses import fields, replace

import pytest
import torch
from loss_batches import Padded, random_batch

from groupwise.algo.loss import policy_loss
from groupwise.algo.loss_inputs import LossInputs
from groupwise.config.algo import AlgoConfig
from groupwise.config.loss import PRESETS, LossSpec, loss_of, resolve_loss
from groupwise.errors import ConfigError, FieldError
from wording import raises

# knob -> another value that a loss which reads it must notice
OTHER = {
    "clip_low": 0.01,
    "clip_high": 0.01,
    "dual_clip": 1.001,
    "dro_beta": 0.5,
    "sapo_tau_positive": 2.0,
    "sapo_tau_negative": 2.0,
    "correction_cap": 1.02,
    "correction_floor": 0.98,
    "opsm_threshold": -0.5,
    "kl_coeff": 0.5,
    "reduction_length": 100.0,
    "entropy_coeff": 0.5,
}
WHOLE = {"dr_grpo": {"reduction_length": 7.0}}


def specs() -> list[LossSpec]:
    plain = [resolve_loss(name, **WHOLE.get(name, {})) for name in PRESETS]
    kls = [resolve_loss("grpo", kl=kl) for kl in ("k1", "k2", "k3", "k3_unbiased")]
    weights = ("tis_token", "tis_sequence", "mask_token", "mask_sequence", "mask_geometric")
    wide = {"correction_floor": 0.8, "correction_cap": 1.3}
    return [*plain, *kls, *(resolve_loss("dapo", correction=c, **wide) for c in weights)]


@pytest.mark.parametrize("knob", OTHER)
def test_every_knob_acts_or_is_refused(knob: str):
    batches, idle = [random_batch(seed, drift=0.6) for seed in range(3)], list[LossSpec]()
    for spec in specs():
        if not spec.reads(knob):
            with raises(FieldError) as refused:
                replace(spec, **{knob: OTHER[knob]})
            assert (refused.value.field, refused.value.kind) == (knob, "ineffective"), spec
            continue
        other = replace(spec, **{knob: OTHER[knob]})
        if all(torch.equal(batch.run(spec)[0], batch.run(other)[0]) for batch in batches):
            idle.append(spec)
    assert idle == []


@pytest.mark.parametrize(
    ("preset", "overrides", "field"),
    [
        ("reinforce", {"clip_low": 0.1}, "clip_low"),
        ("grpo", {"kl_coeff": 0.1}, "kl_coeff"),
        ("cispo", {"dual_clip": 3.0}, "dual_clip"),
        ("reinforce", {"anchor": "old"}, "anchor"),
        ("reinforce", {"ratio": "sequence"}, "ratio"),
        ("dapo", {"reduction_length": 10}, "reduction_length"),
        ("grpo", {"correction_cap": 2.0}, "correction_cap"),
        ("gspo", {"sapo_tau_positive": 1.0}, "sapo_tau_positive"),
    ],
)
def test_an_override_without_effect_names_the_alternatives(preset: str, overrides: dict, field: str):
    with raises(ConfigError, field=field, kind="ineffective"):
        resolve_loss(preset, **overrides)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: resolve_loss("grop"), "policy_loss"),
        (lambda: resolve_loss("grpo", clip_hgih=0.3), "clip_hgih"),
        (lambda: resolve_loss("grpo", kl="k4"), "kl"),
        (lambda: resolve_loss("grpo", beta=0.1), "beta"),
        (lambda: resolve_loss("grpo", delta=4.0), "delta"),
        (lambda: resolve_loss("grpo", clip_low=-0.1), "clip_low"),
        (lambda: resolve_loss("grpo", clip_high=float("nan")), "clip_high"),
        (lambda: resolve_loss("grpo", clip_high="0.2"), "clip_high"),
        (lambda: resolve_loss("grpo", clip_high=1e308), "clip_high"),
        (lambda: resolve_loss("grpo", dual_clip=0.5), "dual_clip"),
        (lambda: resolve_loss("grpo", kl="k3", kl_coeff=0.0), "kl_coeff"),
        (
            lambda: resolve_loss("grpo", correction="mask_token", correction_cap=1.0, correction_floor=2.0),
            "correction_floor",
        ),
        (lambda: resolve_loss("grpo", correction="mask_token", correction_cap=None), "correction"),
        (lambda: resolve_loss("grpo", correction="tis_token", anchor="behaviour"), "correction"),
        (lambda: resolve_loss("grpo", ratio="none"), "surrogate"),
        (lambda: resolve_loss("grpo", clip_high=None), "clip_high"),
        (lambda: resolve_loss("dppo", ratio="sequence"), "ratio"),
        (lambda: resolve_loss("grpo", surrogate="custom"), "surrogate"),
        (lambda: LossSpec(surrogate="sapo", ratio="token"), "sapo_tau_positive"),
    ],
)
def test_mistakes_are_explained(call, field: str):
    with raises(FieldError, field=field) as mistake:
        call()
    assert mistake.value.field in {
        *(each.name for each in fields(LossSpec)),
        "policy_loss",
        "beta",
        "delta",
        "clip_hgih",
    }


def test_a_mistake_in_a_configuration_has_its_path():
    with raises(FieldError) as mistake:
        loss_of(AlgoConfig(policy_loss="reinforce", clip_low=0.1), max_tokens=8)
    assert (mistake.value.field, mistake.value.kind) == ("algo.clip_low", "ineffective")


def test_a_name_alone_is_the_published_loss():
    assert resolve_loss("dapo") == LossSpec(
        surrogate="clip", ratio="token", clip_low=0.2, clip_high=0.28, reduction="token_mean"
    )
    assert resolve_loss("gspo") == LossSpec(
        surrogate="clip", ratio="sequence", anchor="old", clip_low=3e-4, clip_high=4e-4, reduction="sequence_mean"
    )
    assert resolve_loss("reinforce") == LossSpec(surrogate="reinforce")


def test_a_factor_brings_its_usual_numbers_and_takes_the_old_ones_away():
    assert resolve_loss("grpo", kl="k3").kl_coeff == 0.04
    icepop = resolve_loss("grpo", correction="mask_token")
    assert (icepop.correction_floor, icepop.correction_cap, icepop.anchor) == (0.5, 5.0, "old")
    assert resolve_loss("gspo", surrogate="reinforce", reduction="token_mean") == resolve_loss("reinforce")
    assert resolve_loss("grpo", surrogate="dro").dro_beta == 0.05
    assert resolve_loss("cispo", clip_low=None) == resolve_loss("cispo")


def test_a_sequence_ratio_is_against_the_trainers_own_snapshot():
    """Unless told otherwise; and where samples may be of an older policy, that gap is corrected for."""
    for preset, overrides in (("gspo", {}), ("luspo", {}), ("grpo", {"ratio": "sequence"})):
        assert resolve_loss(preset, **overrides).anchor == "old"
        assert resolve_loss(preset, **overrides, anchor="behaviour").anchor == "behaviour"
        algo = AlgoConfig(policy_loss=preset, **overrides)
        assert loss_of(algo, max_tokens=8) == resolve_loss(preset, **overrides)
        assert loss_of(algo, max_tokens=8, stale=True) == resolve_loss(preset, **overrides, correction="tis_sequence")
        for chosen in ({"anchor": "old"}, {"anchor": "behaviour"}, {"correction": "none"}, {"correction": "tis_token"}):
            given = AlgoConfig(policy_loss=preset, **overrides, **chosen)
            assert loss_of(given, max_tokens=8, stale=True) == resolve_loss(preset, **overrides, **chosen)
    assert loss_of(AlgoConfig(policy_loss="dapo"), max_tokens=8, stale=True) == resolve_loss("dapo")


@pytest.mark.parametrize(
    ("preset", "overrides", "steps", "stale", "said"),
    [
        ("reinforce", {}, 1, False, []),
        ("reinforce", {}, 4, False, ["no ratio.*all but the first of 4 optimizer steps"]),
        ("reinforce", {}, 1, True, ["no ratio.*another policy"]),
        ("reinforce", {}, 2, True, ["first of 2 optimizer steps on a batch and samples that may be"]),
        ("reinforce", {"correction": "tis_token"}, 4, True, []),
        ("importance_sampling", {}, 1, True, []),
        ("importance_sampling", {}, 2, False, ["bounds nothing: in 2 optimizer steps"]),
        ("grpo", {}, 8, True, []),
        ("grpo", {"anchor": "old"}, 8, False, []),
        ("grpo", {"anchor": "old"}, 1, True, ["anchor old.*not corrected; set algo.correction"]),
        ("grpo", {"anchor": "old", "correction": "tis_token"}, 1, True, []),
        ("gspo", {}, 8, False, []),
        ("gspo", {}, 1, True, ["anchor old"]),
        ("importance_sampling", {"anchor": "old"}, 2, True, ["bounds nothing", "anchor old"]),
    ],
)
def test_what_no_loss_accounts_for_is_said(preset: str, overrides: dict, steps: int, stale: bool, said: list[str]):
    warnings = resolve_loss(preset, **overrides).off_policy_warnings(steps, stale=stale)
    assert len(warnings) == len(said)
    assert all(re.search(expected, warning) for expected, warning in zip(said, warnings, strict=True))


def test_what_a_loss_reads():
    def reads(preset: str, **overrides: object) -> str:
        spec = resolve_loss(preset, **overrides)
        names = ("old", "behaviour", "reference", "entropy")
        return " ".join(name for name in names if getattr(spec, f"reads_{name}"))

    assert reads("grpo") == "behaviour"
    assert reads("grpo", anchor="old") == "old"
    assert reads("grpo", correction="tis_token") == "old behaviour"
    assert reads("grpo", correction="mask_geometric") == "behaviour"
    assert reads("grpo", kl="k3", entropy_coeff=0.01) == "behaviour reference entropy"
    assert reads("reinforce") == ""
    assert reads("reinforce", kl="k3") == "reference"
    assert reads("reinforce", kl="k3_unbiased") == "behaviour reference"
    assert reads("reinforce", opsm_threshold=0.5) == "behaviour"
    assert reads("dro") == reads("vespo") == "behaviour"


@pytest.mark.parametrize("preset", PRESETS)
def test_a_loss_needs_only_what_it_says_it_reads(preset: str):
    geometric = {"correction": "mask_geometric", "correction_cap": 1.1, "correction_floor": 0.9}
    others = ({"kl": "k3"}, {"kl": "k3_unbiased"}, {"entropy_coeff": 0.1}, {"opsm_threshold": 0.1})
    for overrides in ({}, *others, geometric):
        spec = resolve_loss(preset, **overrides, **WHOLE.get(preset, {}))
        batch = random_batch(0)
        needed = {name: getattr(batch, name) for name in ("behaviour", "old", "reference", "entropy")}
        lean = {name: value if getattr(spec, f"reads_{name}") else None for name, value in needed.items()}
        loss, grad, _ = batch.run(spec)
        lean_loss, lean_grad, _ = Padded(**vars(batch) | lean).run(spec)
        assert torch.equal(loss, lean_loss) and torch.equal(grad, lean_grad)


def has_gradient_without_advantages(spec: LossSpec, *, moved: bool, stale: bool) -> bool:
    """Of the loss at advantage 0. Moved: a later optimizer step on the batch, so the policy is not what it was before
    the first; stale: nor was that the policy that sampled."""
    policy = random_batch(0).logprobs[random_batch(0).mask.bool()].requires_grad_()
    old = policy.detach() - 0.1 * moved
    inputs = LossInputs(
        row_N=torch.zeros(len(policy), dtype=torch.long),
        num_rows=1,
        advantages_N=torch.zeros_like(policy),
        behaviour_N=old - 0.2 * stale,
        old_N=old if moved else None,
        reference_N=policy.detach() - 0.3,
        total_tokens=float(len(policy)),
        total_rows=1.0,
    )
    loss, _ = policy_loss(policy, inputs, spec, entropy_N=policy.exp())
    return bool(torch.autograd.grad(loss, policy)[0].any())


@pytest.mark.parametrize(
    "term", [{}, {"kl": "k1"}, {"kl": "k2"}, {"kl": "k3"}, {"kl": "k3_unbiased"}, {"entropy_coeff": 0.1}]
)
def test_what_has_a_gradient_without_advantages(term: dict):
    """Groups of equal rewards are left out exactly where they would change nothing."""
    for preset in PRESETS:
        check_gradient_without_advantages(preset, term)


def check_gradient_without_advantages(preset: str, term: dict) -> None:
    anchors = ("behaviour", "old") if resolve_loss(preset, **WHOLE.get(preset, {}), **term).reads_anchor else (None,)
    for anchor in anchors:
        given = {} if anchor is None else {"anchor": anchor}
        spec = resolve_loss(preset, **WHOLE.get(preset, {}), **term, **given)
        for steps, stale in ((1, False), (1, True), (2, False), (2, True)):
            needed = has_gradient_without_advantages(spec, moved=steps > 1, stale=stale)
            assert spec.needs_flat(steps, stale=stale) == needed, (preset, anchor, steps, stale)
