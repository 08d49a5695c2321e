"""The learner: gradients that do not depend on the cut, masked tokens that do not exist, refusals, exact resumption."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from learner_cases import GROUPS, LORA, SPECS, assert_same, gradients, on_policy, parameters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from groupwise.algo.loss import resolve_loss
from groupwise.config.lora import LoraSpec
from groupwise.config.run import OptimizerConfig
from groupwise.errors import AdapterError, ConfigError, TrainingError
from groupwise.train.learner import Learner
from groupwise.train.reference import Reference
from groupwise.types import Sample
from wording import raises, warns

# ---- forward ----


def test_forward_is_the_models_own(make_base, make_samples, architecture: str):
    base = make_base(architecture)
    samples = make_samples(GROUPS)
    rows = Learner(base, lora=None, micro_tokens=17).forward(samples, temperature=0.5)
    for sample, row in zip(samples, rows, strict=True):
        ids = torch.tensor([(*sample.prompt_ids, *sample.completion_ids)])
        if not sample.completion_ids:
            assert row == ()
            continue
        with torch.no_grad():
            logp = (base.model(input_ids=ids).logits[0] / 0.5).log_softmax(-1)
        own = [float("nan")] if not sample.prompt_ids else []
        start = max(len(sample.prompt_ids), 1)
        own += [float(logp[t - 1, ids[0, t]]) for t in range(start, ids.shape[1])]
        assert row == pytest.approx(own, abs=1e-5 if architecture == "gemma2" else 1e-9, nan_ok=True)


def test_forward_of_nothing(make_learner):
    empty = Sample(prompt_ids=(), completion_ids=(), mask=())
    one = Sample(prompt_ids=(), completion_ids=(4,), mask=(0,))
    assert make_learner().forward([]) == []
    (first, second) = make_learner(micro_tokens=1).forward([empty, one])
    assert first == () and len(second) == 1 and math.isnan(second[0])


def test_reference_is_the_base(make_base, make_learner, make_samples):
    learner, samples = make_learner(), make_samples(GROUPS)
    plain = Learner(make_base(), lora=None)
    expected = plain.forward(samples)
    for row, own in zip(learner.forward(samples, reference=True), expected, strict=True):
        assert row == pytest.approx(own, abs=1e-12, nan_ok=True)
    assert learner.forward(samples)[0] != pytest.approx(expected[0], abs=1e-3)  # and the adapter is on again


# ---- gradients ----


@pytest.mark.parametrize("name", SPECS)
def test_split_invariance(make_learner, make_samples, name: str):
    big, small = (make_learner(micro_tokens=tokens) for tokens in (10_000, 17))
    samples = on_policy(big, make_samples(GROUPS))
    metrics = big.forward_backward(samples, SPECS[name], temperature=0.8)
    expected = gradients(big)
    other_metrics = small.forward_backward(samples, SPECS[name], temperature=0.8)
    assert_same(gradients(small), expected)
    assert other_metrics == pytest.approx(metrics, rel=1e-6, abs=1e-8)


def test_order_and_company_change_nothing(make_learner, make_samples):
    """Rows in another order, so that equal prompts do not stand together and are not shared."""
    learner = make_learner()
    samples = on_policy(learner, make_samples(GROUPS))
    learner.forward_backward(samples, SPECS["grpo with k3"])
    expected = gradients(learner)
    learner.forward_backward(samples[::2] + samples[1::2], SPECS["grpo with k3"])
    assert_same(gradients(learner), expected)


@pytest.mark.parametrize("name", SPECS)
def test_masked_tokens_change_nothing(make_learner, make_samples, name: str):
    learner = make_learner()
    samples = [replace(s, weights=(1.0,) * len(s.mask)) for s in on_policy(learner, make_samples(GROUPS))]
    metrics = learner.forward_backward(samples, SPECS[name])
    expected = gradients(learner)

    def spoiled(sample: Sample) -> Sample:
        hole = [not trained for trained in sample.mask]
        behaviour = tuple(math.nan if h else x for h, x in zip(hole, sample.behaviour_logprobs or (), strict=True))
        return replace(sample, behaviour_logprobs=behaviour, weights=tuple(1e9 if h else 1.0 for h in hole))

    assert any(not all(s.mask) for s in samples)
    other = learner.forward_backward([spoiled(s) for s in samples], SPECS[name])
    assert other == metrics
    assert all(torch.equal(a, b) for a, b in zip(gradients(learner), expected, strict=True))


def test_a_kl_term_has_a_gradient(make_learner, make_samples):
    """Advantages of zero: what is left is the KL's gradient alone. At the base itself it is zero."""
    samples = [replace(s, advantage=0.0) for s in make_samples(GROUPS)]
    for kl in ("k1", "k2", "k3", "k3_unbiased"):
        spec = resolve_loss("grpo", kl=kl, kl_coeff=1.0, anchor="old")
        learner = make_learner()
        metrics = learner.forward_backward(samples, spec)
        assert max(float(grad.abs().max()) for grad in gradients(learner)) > 1e-3
        assert metrics["loss/kl"] != 0.0


def test_reference_is_not_computed_unless_read(make_learner, make_samples, monkeypatch: pytest.MonkeyPatch):
    learner, calls = make_learner(), []
    original = Reference.active
    monkeypatch.setattr(Reference, "active", lambda self: calls.append(1) or original(self))
    learner.forward_backward(make_samples(GROUPS), SPECS["grpo"])
    assert not calls
    learner.forward_backward(make_samples(GROUPS), SPECS["grpo with k3"])
    assert calls


def test_custom_loss_gives_the_builtin_gradient(make_learner, make_samples):
    """REINFORCE written by hand."""
    learner = make_learner(micro_tokens=25)
    samples = make_samples(GROUPS)
    learner.forward_backward(samples, resolve_loss("reinforce"), temperature=0.9)
    expected = gradients(learner)
    tokens = sum(sum(s.mask) for s in samples)

    def loss(logprobs: list[torch.Tensor]):
        terms = [
            lp[i] * s.advantage
            for lp, s in zip(logprobs, samples, strict=True)
            for i, trained in enumerate(s.mask)
            if trained
        ]
        return -torch.stack(terms).sum() / tokens, {"seen": float(len(terms))}

    metrics = learner.forward_backward_custom(samples, loss, temperature=0.9)
    assert metrics["seen"] == tokens and math.isfinite(metrics["loss/custom"])
    assert_same(gradients(learner), expected, atol=1e-7)


def test_custom_loss_that_is_not_finite_is_refused(make_learner, make_samples):
    learner = make_learner()
    before = parameters(learner)
    learner.forward_backward_custom(make_samples(((3, (4,)),)), lambda rows: (rows[0].sum() * math.nan, {}))
    assert not learner.optim_step(learning_rate=0.1).applied
    assert all(map(torch.equal, before, parameters(learner)))


# ---- steps ----


def test_learning_rate_zero_changes_no_bit(make_learner, make_samples):
    learner = make_learner(dtype=torch.float32)
    samples = make_samples(GROUPS)
    before = learner.forward(samples), parameters(learner)
    metrics = learner.step(samples, SPECS["grpo"], learning_rate=0.0)
    assert metrics["optim/grad_norm"] > 0 and learner.steps == 1
    for row, after in zip(before[0], learner.forward(samples), strict=True):
        assert row == pytest.approx(after, abs=0.0, nan_ok=True)
    assert all(map(torch.equal, before[1], parameters(learner)))


def test_a_step_raises_what_was_better(make_learner, make_samples):
    learner = make_learner(dtype=torch.float32)
    samples = [replace(s, advantage=a) for s, a in zip(make_samples(((4, (3, 3)),), holes=False), (1, -1), strict=True)]
    before = [sum(row) for row in learner.forward(samples)]
    for _ in range(5):
        learner.step(on_policy(learner, samples), SPECS["grpo"], learning_rate=0.02)
    after = [sum(row) for row in learner.forward(samples)]
    assert after[0] > before[0] + 0.1 and after[1] < before[1] - 0.1


def test_non_finite_steps_are_refused_then_raise(make_learner, make_samples):
    learner = make_learner()
    samples = [replace(s, advantage=math.inf) for s in make_samples(((4, (3, 3)),))]
    before = parameters(learner)
    for refused in range(1, 5):
        metrics = learner.step(samples, resolve_loss("reinforce"), learning_rate=0.1)
        assert metrics["optim/refused"] == 1.0 and learner.refused_steps == refused and learner.steps == 0
    with raises(TrainingError):
        learner.step(samples, resolve_loss("reinforce"), learning_rate=0.1)
    assert all(map(torch.equal, before, parameters(learner)))


def test_a_good_step_resets_the_count(make_learner, make_samples):
    learner = make_learner()
    good = make_samples(((4, (3, 3)),))
    bad = [replace(s, advantage=math.nan) for s in good]
    for samples in [bad, bad, bad, bad, good] * 2:
        learner.step(samples, resolve_loss("reinforce"), learning_rate=1e-3)
    assert (learner.refused_steps, learner.steps) == (8, 2)


def test_clipping(make_learner, make_samples):
    learner = make_learner(optimizer=OptimizerConfig(max_grad_norm=1e-3))
    learner.forward_backward(make_samples(GROUPS), resolve_loss("reinforce"))
    raw = math.sqrt(sum(float(p.grad.square().sum()) for p in learner.parameters))
    assert learner.optim_step(learning_rate=0.1).grad_norm == pytest.approx(raw) and raw > 1e-3


def test_supervised_loss_decreases(make_learner, make_samples):
    learner = make_learner(dtype=torch.float32, micro_tokens=30)
    samples = [replace(s, behaviour_logprobs=None) for s in make_samples(GROUPS)]
    losses = []
    for _ in range(12):
        losses.append(learner.forward_backward_supervised(samples)["loss/cross_entropy"])
        learner.optim_step(learning_rate=0.02)
    assert losses[-1] < 0.8 * losses[0]
    rows = learner.forward(samples)
    own = [lp for row, s in zip(rows, samples, strict=True) for lp, m in zip(row, s.mask, strict=True) if m]
    assert learner.forward_backward_supervised(samples)["loss/cross_entropy"] == pytest.approx(
        -sum(own) / len(own), rel=1e-5
    )


def test_supervised_weights(make_learner, make_samples):
    """Twice a sample is the same as a weight of 2 on it."""
    learner = make_learner()
    first, second = make_samples(((4, (3,)), (2, (5,))))
    learner.forward_backward_supervised([first, first, second])
    expected = gradients(learner)
    weighted = [replace(first, weights=(2.0,) * 3), replace(second, weights=(1.0,) * 5)]
    learner.forward_backward_supervised(weighted)
    assert_same(gradients(learner), expected)


# ---- variants ----


def test_full_parameters(make_base, make_samples):
    """All parameters train, in the base itself; the reference is the copy that was kept."""
    base = make_base(dtype=torch.float32)
    learner = Learner(base, lora=None)
    learner.keep_reference()
    samples = make_samples(GROUPS)
    start = learner.forward(samples)
    embedding = base.model.get_input_embeddings().weight.detach().clone()
    for _ in range(3):
        learner.step(samples, resolve_loss("reinforce", kl="k3", kl_coeff=0.01), learning_rate=1e-3)
    assert not torch.equal(embedding, base.model.get_input_embeddings().weight)
    assert learner.forward(samples)[0] != pytest.approx(start[0], abs=1e-3)
    for row, before in zip(learner.forward(samples, reference=True), start, strict=True):
        assert row == pytest.approx(before, abs=1e-5, nan_ok=True)


def test_full_parameters_are_saved_as_a_model(make_base, make_samples, tmp_path: Path):
    from groupwise.model.load import load_model

    learner = Learner(make_base(dtype=torch.float32), lora=None)
    learner.step(make_samples(GROUPS), resolve_loss("reinforce"), learning_rate=1e-3)
    learner.save_adapter(tmp_path)
    again = Learner(load_model(str(tmp_path), device="cpu"), lora=None)
    for row, own in zip(again.forward(make_samples(GROUPS)), learner.forward(make_samples(GROUPS)), strict=True):
        assert row == pytest.approx(own, abs=1e-5, nan_ok=True)


def test_full_parameters_in_16_bits_are_refused(make_base):
    with raises(ConfigError):
        Learner(make_base(dtype=torch.bfloat16), lora=None)


def test_gradient_checkpointing(make_learner, make_samples, architecture: str):
    lora = LoraSpec(rank=2, alpha=4.0)
    plain, checkpointed = (make_learner(architecture, lora=lora, gradient_checkpointing=on) for on in (False, True))
    samples = on_policy(plain, make_samples(GROUPS))
    for learner in (plain, checkpointed):
        learner.forward_backward(samples, SPECS["grpo with k3"])
    assert_same(gradients(checkpointed), gradients(plain))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_wrong_packed_forward_falls_back(make_learner, make_samples, monkeypatch, checkpointing: bool):
    """Loudly, and to the same gradients."""
    right = make_learner()
    samples = on_policy(right, make_samples(GROUPS))
    right.forward_backward(samples, SPECS["grpo with k3"])
    expected = gradients(right)
    monkeypatch.setattr("groupwise.model.packed_check._WHY", {})  # the code is another from here on
    monkeypatch.setattr("groupwise.model.attention._hidden", lambda gap, *of: gap < -1)
    with warns():
        fallen = make_learner(gradient_checkpointing=checkpointing)
    fallen.forward_backward(samples, SPECS["grpo with k3"])
    assert not fallen.packed
    assert_same(gradients(fallen), expected, atol=1e-8)


def test_a_model_that_cannot_be_packed_falls_back(make_learner, make_samples, monkeypatch):
    def raises(*args, **options):
        raise NotImplementedError("it is not known how")

    expected = make_learner().forward(make_samples(GROUPS))
    monkeypatch.setattr("groupwise.model.packed_check._WHY", {})  # the code is another from here on
    monkeypatch.setattr("groupwise.model.attention.SharedPrompts.attend", raises)
    with warns():
        fallen = make_learner()
    for row, own in zip(fallen.forward(make_samples(GROUPS)), expected, strict=True):
        assert row == pytest.approx(own, abs=1e-9, nan_ok=True)


class Sizes(TorchDispatchMode):
    """Tokens of each forward that is run within, and rows of the largest tensor with an entry for each token id."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.vocabulary, self.forwards, self.logits = vocabulary, list[int](), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.ndim and x.shape[-1] == self.vocabulary:
                self.logits = max(self.logits, x.numel() // self.vocabulary)
        if func is torch.ops.aten.embedding.default:
            self.forwards.append(args[1].numel())
        return out


@pytest.mark.parametrize("family", ["llama4_text", pytest.param("mamba", marks=pytest.mark.slow)])
def test_padded_rows_keep_to_the_budget_and_all_logits_never_exist(make_base, family: str):
    """32 completions that share a prompt of 100 tokens, whose packed tokens are 164."""
    V = 280
    with warns():
        learner = Learner(make_base(family, context=128), lora=LoraSpec(rank=2), micro_tokens=300)
    sample = Sample(
        prompt_ids=(5,) * 100, completion_ids=(6, 7), mask=(1, 1), advantage=1.0, behaviour_logprobs=(-5.0,) * 2
    )
    samples = [replace(sample, completion_ids=(6, 7 + i), advantage=(-1.0) ** i) for i in range(32)]
    with Sizes(V) as sizes:
        learner.forward_backward(samples, resolve_loss("grpo"))
    assert sizes.forwards == [2 * 101] * 16  # the last token is a target only
    assert sizes.logits == 32  # the head's weight, transposed; logits are of the 4 loss tokens of two rows
    norm = float(sum(p.grad.norm() ** 2 for p in learner.parameters if p.grad is not None) ** 0.5)
    learner.zero_grad()
    learner.set_micro_tokens(100_000)
    learner.forward_backward(samples, resolve_loss("grpo"))
    whole = float(sum(p.grad.norm() ** 2 for p in learner.parameters if p.grad is not None) ** 0.5)
    assert norm == pytest.approx(whole, rel=1e-6) and norm > 0


def test_the_base_is_not_touched(make_base, make_samples):
    base = make_base(dtype=torch.float32)
    ids = torch.arange(10)[None]
    before = base.model(input_ids=ids).logits
    learner = Learner(base)
    learner.step(make_samples(GROUPS), resolve_loss("reinforce"), learning_rate=0.1)
    assert torch.equal(base.model(input_ids=ids).logits, before)
    assert not any("lora" in name for name, _ in base.model.named_parameters())


def test_dropout(make_learner, make_samples):
    """It acts in training, not in `forward`, and repeats with the seed."""
    lora = LORA.model_copy(update={"dropout": 0.5})
    samples, spec = make_samples(GROUPS), resolve_loss("reinforce")
    plain = make_learner()
    plain.forward_backward(samples, spec)
    grads = []
    for seed in (0, 0, 1):
        learner = make_learner(lora=lora, seed=seed)
        for mine, other in zip(learner.parameters, plain.parameters, strict=True):  # the seed also makes the adapter
            mine.data.copy_(other)
        assert learner.forward(samples)[0] == pytest.approx(plain.forward(samples)[0], abs=1e-12)
        torch.rand(3)  # whatever else draws from torch's generator
        learner.forward_backward(samples, spec)
        grads.append(gradients(learner))
    assert all(map(torch.equal, grads[0], grads[1]))
    assert not all(map(torch.equal, grads[0], grads[2]))
    assert not all(torch.allclose(a, b) for a, b in zip(grads[0], gradients(plain), strict=True))


def test_dropout_acts_after_a_forward_that_failed(make_learner, make_samples, monkeypatch):
    learner, samples = make_learner(lora=LORA.model_copy(update={"dropout": 0.5})), make_samples(GROUPS)

    def full(*_, **__) -> None:
        raise torch.OutOfMemoryError("no memory")

    assert learner.model.training
    with monkeypatch.context() as patch:
        patch.setattr(learner.strategy, "logprobs", full)
        with pytest.raises(torch.OutOfMemoryError):
            learner.forward(samples)
    assert learner.model.training


# ---- saving ----


@pytest.mark.parametrize("lora", [LORA.model_copy(update={"dropout": 0.2}), None])
def test_load_resumes_bit_for_bit(make_learner, make_samples, tmp_path: Path, lora: LoraSpec | None):
    spec, samples = resolve_loss("dapo", anchor="old"), make_samples(GROUPS)

    def train(learner: Learner, steps: range) -> None:
        for step in steps:
            learner.step(samples[step % 2 :], spec, learning_rate=0.01, minibatches=2)

    whole, first = (make_learner(dtype=torch.float32, lora=lora) for _ in range(2))
    train(whole, range(5))
    train(first, range(3))
    first.save(tmp_path / "state")
    second = make_learner(dtype=torch.float32, lora=lora, seed=9 if lora is None else 0)
    second.load(tmp_path / "state")
    train(second, range(3, 5))
    assert second.steps == whole.steps == 10
    assert all(map(torch.equal, parameters(whole), parameters(second)))


def test_saved_before_the_first_step(make_learner, make_samples, tmp_path: Path):
    learner, other = (make_learner(dtype=torch.float32) for _ in range(2))
    learner.save(tmp_path)
    other.load(tmp_path)
    for each in (learner, other):
        each.step(make_samples(GROUPS), resolve_loss("reinforce"), learning_rate=0.01)
    assert all(map(torch.equal, parameters(learner), parameters(other)))


def test_load_adapter(make_learner, make_base, make_samples, tmp_path: Path):
    learner = make_learner()
    learner.save_adapter(tmp_path)
    other = Learner(make_base(), lora=LORA, seed=5)
    other.load_adapter(tmp_path)
    assert other.forward(make_samples(GROUPS))[0] == learner.forward(make_samples(GROUPS))[0]
    with pytest.raises(AdapterError):
        Learner(make_base(), lora=LORA.model_copy(update={"rank": 3})).load_adapter(tmp_path)
