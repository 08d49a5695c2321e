"""Reference policies: each is the policy it says it is, costs no second model, and is resumed exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from learner_cases import GROUPS, LORA, assert_same, gradients, parameters

from groupwise.algo.loss import resolve_loss
from groupwise.errors import ConfigError, TrainingError
from groupwise.train.learner import Learner
from groupwise.train.reference import ReferenceSpec
from wording import raises

KINDS = ("base", "start", "ema", "refresh")
K3 = resolve_loss("reinforce", kl="k3", kl_coeff=0.1)


def rows_equal(first: list[tuple[float, ...]], second: list[tuple[float, ...]], *, tolerance: float = 1e-12) -> bool:
    return all(a == pytest.approx(b, abs=tolerance, nan_ok=True) for a, b in zip(first, second, strict=True))


def kept(make_learner, kind: str, **options) -> Learner:
    spec = ReferenceSpec(kind=kind, **{key: options.pop(key) for key in ("decay", "every") if key in options})
    learner = make_learner(reference=spec, **options)
    learner.keep_reference()
    return learner


@pytest.mark.parametrize("lora", [LORA, None])
def test_start_stays_where_training_began(make_learner, make_samples, lora):
    learner, samples = kept(make_learner, "start", lora=lora), make_samples(GROUPS)
    start = learner.forward(samples)
    for _ in range(3):
        learner.step(samples, K3, learning_rate=0.01)
    assert rows_equal(learner.forward(samples, reference=True), start)
    assert not rows_equal(learner.forward(samples), start, tolerance=1e-3)


def test_base_and_start_differ_where_an_adapter_is_continued(make_learner, make_samples, tmp_path: Path):
    first, samples = make_learner(), make_samples(GROUPS)
    first.save_adapter(tmp_path)
    base, start = (Learner(first.base, lora=LORA, reference=ReferenceSpec(kind=kind)) for kind in ("base", "start"))
    for learner in (base, start):
        learner.load_adapter(tmp_path)
        learner.keep_reference()
    assert rows_equal(start.forward(samples, reference=True), first.forward(samples))
    assert rows_equal(base.forward(samples, reference=True), first.forward(samples, reference=True))
    assert not rows_equal(first.forward(samples), first.forward(samples, reference=True), tolerance=1e-3)


@pytest.mark.parametrize("lora", [LORA, None])
def test_ema_is_the_average_of_the_policies(make_learner, make_samples, lora):
    """By hand: ref <- 0.8 ref + 0.2 policy, after each step."""
    learner, samples = kept(make_learner, "ema", decay=0.8, lora=lora), make_samples(GROUPS)
    average = parameters(learner)
    for _ in range(4):
        learner.step(samples, K3, learning_rate=0.01)
        average = [0.8 * mean + 0.2 * policy for mean, policy in zip(average, parameters(learner), strict=True)]
    expected = make_learner(lora=lora)
    with torch.no_grad():
        for parameter, mean in zip(expected.parameters, average, strict=True):
            parameter.copy_(mean)
    assert rows_equal(learner.forward(samples, reference=True), expected.forward(samples), tolerance=1e-9)
    assert not rows_equal(learner.forward(samples, reference=True), learner.forward(samples), tolerance=1e-3)


@pytest.mark.parametrize("lora", [LORA, None])
def test_refresh_copies_the_policy_every_so_many_steps(make_learner, make_samples, lora):
    """Steps are rollout batches: several optimizer steps on one do not count."""
    learner, samples = kept(make_learner, "refresh", every=2, lora=lora), make_samples(GROUPS)
    copies = [learner.forward(samples)]
    for step in range(1, 6):
        learner.step(samples, K3, learning_rate=0.01, minibatches=2)
        if step % 2 == 0:
            copies.append(learner.forward(samples))
        assert rows_equal(learner.forward(samples, reference=True), copies[-1])
    assert len(copies) == 3 and not rows_equal(copies[0], copies[1], tolerance=1e-3)


def test_streamed_steps_count_too(make_learner, make_samples):
    learner, samples = kept(make_learner, "refresh", every=1), make_samples(GROUPS)
    stream = learner.begin_step()
    stream.accumulate(samples, K3)
    stream.finish(learning_rate=0.01)
    assert rows_equal(learner.forward(samples, reference=True), learner.forward(samples))


def test_the_reference_stands_still_within_a_batch(make_learner, make_samples, monkeypatch):
    learner, samples, seen = kept(make_learner, "ema", decay=0.0), make_samples(GROUPS), []
    original = Learner.optim_step

    def spy(self, **options):
        result = original(self, **options)
        seen.append(self.forward(samples, reference=True))
        return result

    monkeypatch.setattr(Learner, "optim_step", spy)
    before = learner.forward(samples)
    learner.step(samples, K3, learning_rate=0.01, minibatches=2, passes=2)
    assert len(seen) == 4 and all(rows_equal(rows, before) for rows in seen)
    assert rows_equal(learner.forward(samples, reference=True), learner.forward(samples))


@pytest.mark.parametrize("kind", KINDS)
def test_a_reference_forward_leaves_the_policy_bit_for_bit(make_learner, make_samples, kind: str):
    """Tensors that are swapped come back, also after an error, and gradients are those of the policy."""
    learner, samples = kept(make_learner, kind), make_samples(GROUPS)
    learner.step(samples, K3, learning_rate=0.05)  # the two differ now
    before, places = parameters(learner), [p.data_ptr() for p in learner.parameters]
    learner.forward(samples, reference=True)
    with raises(RuntimeError), learner.reference.active():
        raise RuntimeError("stop")
    assert all(map(torch.equal, before, parameters(learner)))
    assert [p.data_ptr() for p in learner.parameters] == places
    rows = learner.forward(samples, reference=True)
    learner.forward_backward(samples, K3)
    computed = gradients(learner)
    learner.forward_backward(samples, K3, reference_logprobs=rows)
    assert_same(gradients(learner), computed, atol=1e-7)


def test_dropout_is_off_in_the_reference(make_learner, make_samples, monkeypatch):
    """Also within a training step, where the policy has it."""
    learner, samples = kept(make_learner, "start", lora=LORA.model_copy(update={"dropout": 0.5})), make_samples(GROUPS)
    seen, original = [], Learner._frozen

    def spy(self, batches, temperature, **options):
        pairs = original(self, batches, temperature, **options)
        seen.extend((batch.rows, values) for batch, values in pairs)
        return pairs

    monkeypatch.setattr(Learner, "_frozen", spy)
    learner.forward_backward(samples, K3)
    assert learner.model.training and seen
    monkeypatch.setattr(Learner, "_frozen", original)
    expected = learner.forward(samples, reference=True)
    for rows, values in seen:
        flat = [x for row in rows for x, m in zip(expected[row], samples[row].mask, strict=True) if m]
        assert values.tolist() == pytest.approx(flat, abs=1e-12)


@pytest.mark.parametrize(
    ("kind", "lora"), [*((kind, LORA) for kind in KINDS), pytest.param("ema", None, marks=pytest.mark.slow)]
)
def test_resumed_bit_for_bit(make_learner, make_samples, tmp_path: Path, kind: str, lora):
    samples = make_samples(GROUPS)
    whole, first, second = (
        kept(make_learner, kind, decay=0.7, every=3, dtype=torch.float32, lora=lora) for _ in range(3)
    )

    def train(learner: Learner, steps: range) -> None:
        for step in steps:
            learner.step(samples[step % 2 :], K3, learning_rate=0.01)

    train(whole, range(5))
    train(first, range(2))
    first.save(tmp_path)
    second.load(tmp_path)
    train(second, range(2, 5))
    assert all(map(torch.equal, parameters(whole), parameters(second)))
    assert whole.forward(samples, reference=True)[0] == second.forward(samples, reference=True)[0]


def test_another_kind_of_checkpoint_is_refused(make_learner, tmp_path: Path):
    kept(make_learner, "base").save(tmp_path / "base")
    kept(make_learner, "ema").save(tmp_path / "ema")
    with raises(TrainingError):
        kept(make_learner, "start").load(tmp_path / "base")
    with raises(TrainingError):
        make_learner(reference=ReferenceSpec(kind="ema")).load(tmp_path / "ema")


@pytest.mark.parametrize(("kind", "lora"), [("start", LORA), ("ema", LORA), ("base", None)])
def test_a_reference_that_was_not_kept_is_an_error(make_learner, make_samples, kind: str, lora):
    learner = make_learner(reference=ReferenceSpec(kind=kind), lora=lora)
    with raises(TrainingError):
        learner.forward(make_samples(GROUPS), reference=True)
    learner.step(make_samples(GROUPS), resolve_loss("reinforce"), learning_rate=0.01)  # and is not needed otherwise


@pytest.mark.parametrize(
    "options",
    [{"kind": "old"}, {"decay": 1.0}, {"every": 0}],
)
def test_mistakes(options: dict):
    with raises(ConfigError):
        ReferenceSpec(**options)


# ---- measured without a term ----


@pytest.mark.parametrize("kind", ["base", "start"])
def test_the_kl_is_measured_without_a_term(make_learner, make_samples, kind: str):
    """The k3 estimate of the loss, on rows of one group; another one after each step."""
    learner = kept(make_learner, kind)
    learner.step(make_samples(GROUPS), K3, learning_rate=0.05)
    samples = make_samples(GROUPS)
    now = [tuple(0.0 if x != x else x for x in row) for row in learner.forward(samples, temperature=0.7)]
    samples = [replace(s, behaviour_logprobs=row) for s, row in zip(samples, now, strict=True)]
    everything = learner.forward_backward(samples[5:6], resolve_loss("grpo", kl="k1"), temperature=0.7)
    learner.zero_grad()
    learner.reference.steps = 2  # whose turn is the third group, of one row
    measured = learner.measure_kl(samples, temperature=0.7)
    assert measured["kl/tokens"] == sum(samples[5].mask)
    for key in ("kl/mean", "kl/max"):
        assert measured[key] == pytest.approx(everything[key], rel=1e-6) and measured[key] > 1e-3
    learner.reference.steps = 0
    assert learner.measure_kl(samples, temperature=0.7, max_tokens=100)["kl/tokens"] == sum(
        sum(s.mask) for s in samples[:3]
    )


def test_nothing_is_measured_without_a_reference_or_behaviour_logprobs(make_learner, make_samples):
    samples = make_samples(GROUPS)
    assert make_learner(lora=None).measure_kl(samples) == {}
    assert make_learner(reference=ReferenceSpec(kind="ema")).measure_kl(samples) == {}
    learner = make_learner()
    assert learner.measure_kl([replace(s, behaviour_logprobs=None) for s in samples]) == {}
    assert learner.measure_kl([]) == {}
    assert learner.measure_kl(samples)["kl/tokens"] > 0
