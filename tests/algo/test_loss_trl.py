"""Parity with TRL 1.16.0: its real `GRPOTrainer._compute_loss` on a stub model, float64, loss and gradient to 1e-9.

Where the two differ on purpose (docs/losses.md has the list) the test says how one is written as the other.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loss_batches import Padded, random_batch

from groupwise.algo.loss import resolve_loss
from groupwise.config.loss import loss_of
from groupwise.errors import ConfigError
from groupwise.run.config_file import read_run
from trl_peer import MAX_LENGTH, trl_loss
from wording import raises

TRL_FILE = """\
model_name_or_path: starter
dataset_name: prompts.jsonl
reward_funcs: [my_rewards.exact]
num_generations: 4
per_device_train_batch_size: 8
max_steps: 10
"""
GOLDEN = json.loads((Path(__file__).parent / "golden" / "trl_1_16.json").read_text())

# name -> (TRL's settings, our preset and overrides). `eps`: TRL's epsilon and epsilon_high, 0.2 / 0.28 unless said.
DAPO, OLD = {"loss_type": "dapo"}, {"anchor": "old"}
WIDE = {"clip_low": 0.2, "clip_high": 0.28}
CASES = {
    "grpo": ({"loss_type": "grpo"}, "grpo", WIDE | OLD),
    "bnpo": ({"loss_type": "bnpo"}, "bnpo", WIDE | OLD),
    "dr_grpo": ({"loss_type": "dr_grpo"}, "dr_grpo", WIDE | OLD | {"reduction_length": MAX_LENGTH}),
    "dapo": (DAPO, "dapo", OLD),
    "dapo_behaviour_anchor": (DAPO, "dapo", {}),  # our behaviour logprobs in the place of TRL's old ones
    "cispo_5": ({"loss_type": "cispo", "eps": (0.2, 5.0)}, "cispo", OLD),
    "cispo_1.5": ({"loss_type": "cispo", "eps": (0.2, 1.5)}, "cispo", OLD | {"clip_high": 0.5}),
    "sapo": ({"loss_type": "sapo"}, "sapo", OLD),
    "vespo": ({"loss_type": "vespo"}, "vespo", OLD),
    "gspo": ({"loss_type": "grpo", "level": "sequence", "eps": (3e-4, 4e-4)}, "gspo", OLD),
    "grpo_sequence": ({"loss_type": "grpo", "level": "sequence"}, "gspo", WIDE | OLD),
    "dapo_sequence": ({"loss_type": "dapo", "level": "sequence"}, "dapo", OLD | {"ratio": "sequence"}),
    "luspo": ({"loss_type": "luspo", "level": "sequence", "eps": (2e-3, 2.5e-3)}, "luspo", OLD),
    "luspo_sequence": ({"loss_type": "luspo", "level": "sequence"}, "luspo", WIDE | OLD),
    "luspo_token": ({"loss_type": "luspo"}, "luspo", WIDE | OLD | {"ratio": "token"}),
    # TRL's delta, written with dual_clip: clip_high = min(eps_high, delta - 1), dual_clip = max(delta, 1 + eps_high)
    "delta_1.1": ({"loss_type": "grpo", "delta": 1.1}, "grpo", OLD | {"clip_high": 1.1 - 1, "dual_clip": 1.28}),
    "delta_1.5": ({"loss_type": "grpo", "delta": 1.5}, "grpo", WIDE | OLD | {"dual_clip": 1.5}),
    "kl_unbiased": (DAPO | {"beta": 0.04}, "dapo", OLD | {"kl": "k3_unbiased"}),
    "kl_k3": (DAPO | {"beta": 0.04, "bias_kl": False}, "dapo", OLD | {"kl": "k3"}),
    "kl_grpo": (
        {"loss_type": "grpo", "beta": 0.1, "bias_kl": False},
        "grpo",
        WIDE | OLD | {"kl": "k3", "kl_coeff": 0.1},
    ),
    # OPSM reads the sampler's logprobs, so ours is given TRL's (the old ones) as behaviour and anchor
    "opsm_-0.5": (DAPO | {"opsm": -0.5}, "dapo", {"opsm_threshold": -0.5}),
    "opsm_0.05": (DAPO | {"opsm": 0.05}, "dapo", {"opsm_threshold": 0.05}),
    "sequence_mask": (DAPO | {"vllm": "sequence_mask"}, "dapo", {"correction": "mask_sequence"}),
    "sequence_truncate": (
        DAPO | {"vllm": "sequence_truncate", "cap": 1.02},
        "dapo",
        {"correction": "tis_sequence", "correction_cap": 1.02},
    ),
    "token_truncate_tight": (
        DAPO | {"vllm": "token_truncate", "cap": 1.02},
        "dapo",
        {"correction": "tis_token", "correction_cap": 1.02},
    ),
    "token_truncate_floor": (
        DAPO | {"vllm": "token_truncate", "cap": 1.02, "floor": 0.99},
        "dapo",
        {"correction": "tis_token", "correction_cap": 1.02, "correction_floor": 0.99},
    ),
    "token_mask_tight": (
        DAPO | {"vllm": "token_mask", "cap": 1.02},
        "dapo",
        {"correction": "mask_token", "correction_cap": 1.02},
    ),
    "vespo_token_truncate_tight": (
        {"loss_type": "vespo", "vllm": "token_truncate", "cap": 1.02},
        "vespo",
        {"correction": "tis_token", "correction_cap": 1.02},
    ),
    "vespo_sequence_truncate": (
        {"loss_type": "vespo", "vllm": "sequence_truncate", "cap": 1.02},
        "vespo",
        {"correction": "tis_sequence", "correction_cap": 1.02},
    ),
    "entropy": (DAPO | {"ent_coef": 0.01}, "dapo", OLD | {"entropy_coeff": 0.01}),
}


def golden_batch() -> Padded:
    """Four rows of five tokens, some masked."""
    fields = {"new": "logprobs", "samp": "behaviour", "ref": "reference", "adv": "advantages"}
    values = {fields.get(k, k): torch.tensor(v, dtype=torch.float64) for k, v in GOLDEN["inputs"].items()}
    return Padded(**values)


def batches() -> list[Padded]:
    # TRL's clip metrics are NaN for a row without tokens; such rows are tested in test_loss.py
    return [golden_batch(), *(random_batch(seed).rows([0, 1, 2, 3, 4]) for seed in (1, 2, 3))]


def ours(name: str, batch: Padded, **totals: float):
    _, preset, overrides = CASES[name]
    spec = resolve_loss(preset, **overrides)
    if spec.anchor == "behaviour":  # TRL has one off-policy reference here, its old policy
        batch = Padded(**(vars(batch) | {"behaviour": batch.old}))
    return batch.run(spec, **totals)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_trl(name: str):
    for batch in batches():
        loss, grad, _ = ours(name, batch)
        their_loss, their_grad, _ = trl_loss(batch, CASES[name][0])
        torch.testing.assert_close(loss, their_loss, rtol=0, atol=1e-9)
        torch.testing.assert_close(grad, their_grad, rtol=0, atol=1e-9)


@pytest.mark.parametrize("delta", [1.0, 1.05, 1.1, 1.27, 1.28, 1.29, 1.5, 4.0])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_an_imported_delta_is_trls(tmp_path: Path, loss_type: str, delta: float):
    """Also below 1 + epsilon_high, where it bounds what has a positive advantage."""
    file = tmp_path / "trl.yaml"
    file.write_text(f"{TRL_FILE}loss_type: {loss_type}\nepsilon: 0.2\nepsilon_high: 0.28\ndelta: {delta}\n")
    config = read_run(file, ()).runnable()
    spec = replace(loss_of(config.algo, max_tokens=MAX_LENGTH), anchor="old")
    for batch in batches():
        loss, grad, _ = batch.run(spec)
        their_loss, their_grad, _ = trl_loss(batch, {"loss_type": loss_type, "delta": delta})
        torch.testing.assert_close(loss, their_loss, rtol=0, atol=1e-9)
        torch.testing.assert_close(grad, their_grad, rtol=0, atol=1e-9)


def test_a_delta_below_1_is_refused(tmp_path: Path):
    file = tmp_path / "trl.yaml"
    file.write_text(TRL_FILE + "delta: 0.9\n")
    with raises(ConfigError):
        read_run(file, ()).runnable()


@pytest.mark.parametrize("name", ["grpo", "dapo", "kl_k3", "kl_unbiased", "entropy"])
def test_metrics_equal_trl(name: str):
    names = {
        "clip_ratio/low_mean": "loss/clip_frac_low",
        "clip_ratio/high_mean": "loss/clip_frac_high",
        "kl": "loss/kl",
        "entropy": "loss/entropy",
    }
    for batch in batches():
        _, _, metrics = ours(name, batch)
        theirs = trl_loss(batch, CASES[name][0])[2]
        for key in names.keys() & theirs.keys():
            assert metrics[names[key]] == pytest.approx(theirs[key][0], abs=1e-6)  # theirs passes float32


@pytest.mark.parametrize("name", GOLDEN["cases"])
def test_recorded_numbers(name: str):
    """The same against numbers recorded from TRL 1.10.0 to 1.16.0, which all agree: neither side may drift."""
    recorded = GOLDEN["cases"][name]
    loss, grad, _ = ours(name, golden_batch())
    got = [float(loss), float(grad.abs().sum()), float(grad[0, 0]), float(grad[1, 3])]
    assert got == pytest.approx(recorded, abs=1e-9)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_gradient_accumulation_is_in_the_totals(loss_type: str):
    """TRL divides each micro-batch by the accumulation steps; here the totals are those of the whole batch."""
    batch = golden_batch()
    tokens, rows = float(batch.mask.sum()), len(batch.mask)
    case = {"loss_type": loss_type, "ga": 2, "spg": 2, "n_items": 2 * int(tokens)}
    their_loss, their_grad, _ = trl_loss(batch, case)
    loss, grad, _ = ours(loss_type, batch, total_tokens=2 * tokens, total_rows=2 * rows)
    torch.testing.assert_close(loss, their_loss, rtol=0, atol=1e-9)
    torch.testing.assert_close(grad, their_grad, rtol=0, atol=1e-9)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask"])
def test_a_tokens_correction_of_a_sequence_ratio_differs_from_trl(mode: str):
    """The loss is TRL's. Its gradient (and Liger's) spreads a row's corrections over all of its tokens; here, as
    GSPO-token has it, each token has its own. With a correction of the row the two agree."""
    correction = {"token_truncate": "tis_token", "token_mask": "mask_token"}[mode]
    bounds = {"correction_cap": 1.02, "correction_floor": None}
    sequence = {"loss_type": "grpo", "level": "sequence", "eps": (0.2, 0.28), "cap": 1.02}
    differs = 0.0
    for batch in batches():
        loss, grad, _ = batch.run(resolve_loss("gspo", **WIDE, **OLD, correction=correction, **bounds))
        their_loss, their_grad, _ = trl_loss(batch, sequence | {"vllm": mode})
        torch.testing.assert_close(loss, their_loss, rtol=0, atol=1e-9)
        mean = (grad.sum(-1) / batch.mask.sum(-1).clamp(min=1))[:, None] * batch.mask
        torch.testing.assert_close(mean, their_grad, rtol=0, atol=1e-9)
        differs = max(differs, float((grad - their_grad).abs().max()))
        _, grad, _ = batch.run(resolve_loss("gspo", **WIDE, **OLD, correction="tis_sequence", correction_cap=1.02))
        their_grad = trl_loss(batch, sequence | {"vllm": "sequence_truncate"})[1]
        torch.testing.assert_close(grad, their_grad, rtol=0, atol=1e-9)
    assert differs > 1e-3


def test_bnpo_differs_from_trl_when_micro_batches_are_uneven():
    """TRL's bnpo averages over each micro-batch, so it depends on the split; ours is the mean over the whole batch."""
    batch = golden_batch()
    halves = [batch.rows([0, 1]), batch.rows([2, 3])]
    whole, _, _ = ours("bnpo", batch)
    ours_split = sum(ours("bnpo", half, total_tokens=float(batch.mask.sum()))[0] for half in halves)
    theirs_split = sum(trl_loss(half, {"loss_type": "bnpo", "ga": 2})[0] for half in halves)
    torch.testing.assert_close(ours_split, whole, rtol=0, atol=1e-12)
    assert abs(float(theirs_split - whole)) > 1e-3


def test_sequence_ratio_with_the_unbiased_kl_differs_from_trl():
    """TRL weighs the KL by the row's ratio then; the estimate is unbiased only with the token's own."""
    batch, preset = golden_batch(), resolve_loss("gspo", **WIDE, anchor="old", kl="k3_unbiased")
    _, _, metrics = batch.run(preset)
    assert batch.old is not None and batch.reference is not None
    difference = batch.logprobs - batch.reference
    k3 = (-difference).exp() + difference - 1
    expected = ((batch.logprobs - batch.old).exp() * k3)[batch.mask.bool()].mean()
    assert metrics["loss/kl"] == pytest.approx(float(expected))
    theirs = trl_loss(batch, {"loss_type": "grpo", "level": "sequence", "beta": 0.04})[2]["kl"][0]
    assert abs(float(expected) - theirs) > 1e-3
