"""Routers that train: the auxiliary loss of the model, as transformers computes it on rows that are not packed."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import load_balancing_loss_func as of_gpt_oss
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func as of_qwen3_moe

from groupwise.algo.loss import resolve_loss
from groupwise.config.lora import LoraSpec
from groupwise.config.loss import Reduction
from groupwise.model.packing import micro_batches, padded_batches
from groupwise.train.learner import Learner
from groupwise.types import Sample

FAMILIES = {"qwen3_moe": ("gate", of_qwen3_moe), "gpt_oss": ("router", of_gpt_oss)}
PADDED = pytest.mark.filterwarnings("ignore:.*(in packed rows|recurrent layers).*:UserWarning")


def rows(*shapes: tuple[tuple[int, ...], int], advantage: float = 0.0) -> list[Sample]:
    """Samples of (prompt, completion tokens)."""
    return [
        Sample(
            prompt_ids=prompt,
            completion_ids=tuple(20 + (7 * i + j) % 90 for j in range(length)),
            mask=(1,) * length,
            advantage=advantage,
            behaviour_logprobs=(-5.0,) * length,
        )
        for i, (prompt, length) in enumerate(shapes)
    ]


BATCH = rows(((3, 4, 5, 6), 5), ((3, 4, 5, 6), 8), ((3, 4, 5, 6), 2), ((9, 8), 6))


def plain_loss(model, family: str, samples: list[Sample]) -> torch.Tensor:
    """By transformers, of a padded batch, whose mask leaves out the last token of each row: it is a target only."""
    whole = [s.prompt_ids + s.completion_ids for s in samples]
    width = max(map(len, whole))
    ids = torch.tensor([(*row, *[0] * width)[:width] for row in whole])
    mask = torch.tensor([[int(t < len(row) - 1) for t in range(width)] for row in whole])
    logits = model(input_ids=ids, output_router_logits=True).router_logits
    text = model.config
    return FAMILIES[family][1](logits, text.num_local_experts, text.num_experts_per_tok, mask)


@PADDED
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_auxiliary_loss_is_that_of_a_plain_batch(make_base, monkeypatch, family: str, packed: bool):
    """Of prompts that are packed once, too; and its gradient, where the policy has none, is that of transformers'."""
    base = make_base(family, dtype=torch.float32, router_aux_loss_coef=0.5)
    if not packed:
        monkeypatch.setattr("groupwise.train.learner.why_twin_not_packed", lambda base, twin: "this test says so")
    learner = Learner(base, lora=LoraSpec(rank=2, alpha=4.0, targets=[FAMILIES[family][0]]))
    assert learner.packed == packed
    torch.manual_seed(0)
    for parameter in learner.parameters:
        parameter.data.normal_()
    metrics = learner.forward_backward(BATCH, resolve_loss("grpo"))
    mine = [parameter.grad.clone() for parameter in learner.parameters]
    learner.zero_grad()
    with torch.enable_grad():
        model = learner.model
        if learner.packed:
            model.set_attn_implementation("eager")
        expected = plain_loss(model, family, BATCH)
    value = float(expected.detach())
    assert metrics["router/aux_loss"] == pytest.approx(value, rel=1e-5) and value > 2
    for gradient, theirs in zip(mine, torch.autograd.grad(0.5 * expected, learner.parameters), strict=True):
        torch.testing.assert_close(gradient, theirs, atol=1e-6, rtol=1e-4)


def test_micro_batches_and_streams_weigh_it_as_the_policy_loss(make_base):
    """The gradient of a batch that is cut, and of one that arrives in parts, is the mean over its micro-batches."""
    samples = rows(((3, 4, 5, 6), 5), ((9, 8, 7), 5))
    for preset in ("grpo", "dapo"):  # a mean over sequences, and one over tokens
        gradients = []
        for how in ("apart", "cut", "streamed"):
            base = make_base("qwen3_moe", router_aux_loss_coef=0.5)
            learner = Learner(base, lora=LoraSpec(rank=2, targets=["gate"]), micro_tokens=9)
            torch.manual_seed(0)
            for parameter in learner.parameters:
                parameter.data.normal_()
            spec = resolve_loss(preset)
            if how == "apart":
                for sample in samples:
                    learner.forward_backward([sample], spec, totals=(10.0, 2.0))
            elif how == "cut":
                learner.forward_backward(samples, spec)
            else:
                stream = learner.begin_step()
                for sample in samples:
                    stream.accumulate([sample], spec)
                learner.divide_gradients(spec.denominator(tokens=stream.tokens, rows=stream.rows))
            gradients.append([parameter.grad.clone() for parameter in learner.parameters])
        for one, *others in zip(*gradients, strict=True):
            assert one.abs().max() > 0
            for other in others:
                torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-9)


SEVERAL = {  # completions of one prompt; segments of episodes; both
    "a group": rows(*[((3, 4, 5, 6), 3 + i % 4) for i in range(16)]),
    "episodes": [
        replace(sample, continues=i % 4 > 0) for i, sample in enumerate(rows(*[((9, 8, 7), 2 + i) for i in range(16)]))
    ],
    "one masked": [
        replace(sample, mask=(0,) * 5) if i == 1 else sample for i, sample in enumerate(rows(*[((5, 6), 5)] * 4))
    ],
}


@pytest.mark.parametrize("given", SEVERAL)
@pytest.mark.parametrize("reduction", [each for each in get_args(Reduction) if each != "sum"])
def test_the_shares_of_micro_batches_add_up_to_one(make_base, monkeypatch, reduction: str, given: str):
    """However a batch is cut: sequences whose segments, or prompts whose completions, are in several micro-batches."""
    samples = [replace(sample, group=i // 8) for i, sample in enumerate(SEVERAL[given])]
    spec = resolve_loss("grpo", reduction=reduction, **({"reduction_length": 8} if reduction == "constant" else {}))
    learner = Learner(make_base("qwen3_moe", router_aux_loss_coef=0.5), lora=LoraSpec(rank=2, targets=["gate"]))
    for micro_tokens in (9, 40, 4096):
        learner.set_micro_tokens(micro_tokens)
        shares: list[float] = []

        def auxiliary(*_: object, of: torch.Tensor = learner.parameters[0], shares: list[float] = shares):
            loss = of.sum()
            loss.register_hook(lambda gradient: shares.append(float(gradient)))
            return loss

        monkeypatch.setattr("groupwise.train.learner.load_balancing", auxiliary)
        learner.forward_backward(samples, spec)
        assert sum(shares) == pytest.approx(0.5, rel=1e-6)


def test_a_frozen_router_has_no_auxiliary_loss(make_base):
    base = make_base("qwen3_moe")
    for targets in ("all-linear", "experts"):
        learner = Learner(base, lora=LoraSpec(rank=2, targets=targets))
        assert "router/aux_loss" not in learner.forward_backward(BATCH, resolve_loss("grpo"))


def test_training_all_parameters_trains_the_routers(make_base):
    learner = Learner(make_base("qwen3_moe", router_aux_loss_coef=0.5), lora=None)
    metrics = learner.forward_backward(BATCH, resolve_loss("grpo"))
    assert metrics["router/aux_loss"] > 0
    assert learner.model.model.layers[0].mlp.gate.weight.grad.abs().max() > 0


def test_checkpointing_changes_nothing(make_base):
    found = []
    for saves in (False, True):
        base, spec = make_base("qwen3_moe", router_aux_loss_coef=0.5), LoraSpec(rank=2, targets=["gate", "experts"])
        learner = Learner(base, lora=spec, gradient_checkpointing=saves)
        torch.manual_seed(0)
        for parameter in learner.parameters:
            parameter.data.normal_()
        metrics = learner.forward_backward(rows(((3, 4, 5), 6), advantage=1.0), resolve_loss("grpo"))
        found.append((metrics["router/aux_loss"], [parameter.grad.clone() for parameter in learner.parameters]))
    assert found[0][0] == found[1][0]
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-9)


def test_tokens_count_as_in_rows():
    for cut, padding in ((micro_batches, False), (padded_batches, True)):
        (batch,) = cut(BATCH, token_budget=1000)
        assert batch.copies_S.sum() == sum(len(s.prompt_ids) + len(s.completion_ids) - 1 for s in BATCH)
        assert (batch.copies_S.max() == 3) != padding
    shapes = (((1, 2, 3), (4,)), ((1, 2, 3, 4, 5), (6,)))
    tree = [Sample(prompt_ids=prompt, completion_ids=said, mask=(1,)) for prompt, said in shapes]
    assert sum(batch.copies_S.sum() for batch in micro_batches(tree, token_budget=100)) == 8
