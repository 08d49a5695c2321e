"""Training on a prefix tree: values, losses and gradients are those of each sample alone, for all architectures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from learner_cases import SPECS, assert_same, gradients, on_policy

from forked_samples import forked_samples
from groupwise.algo.loss import resolve_loss
from groupwise.algo.prefixes import groups_of
from groupwise.model.load import share_weights
from groupwise.model.packing import MicroBatch, micro_batches, pack, pack_tree, pad
from groupwise.model.prefix_tree import PrefixTree
from groupwise.train.forward import packed_logprobs, plain_logprobs
from groupwise.train.learner import Learner
from groupwise.types import Sample

ARCHITECTURES = ("qwen3", "llama", "gemma3", "gemma2", "gpt2")
CONTEXT = 256


def run(model, forward, batches: Iterable[MicroBatch]):
    """(logprob, entropy) of all loss tokens in the samples' order, and the gradients of a function of all of them."""
    model.zero_grad()
    values: dict[int, list[torch.Tensor]] = {}
    for batch in batches:
        if len(batch.target_N):
            logprobs_N, entropy_N = forward(model, batch)
            loss = (logprobs_N + 0.3 * entropy_N) * batch.advantages_N * torch.sin(1.0 + batch.target_N)
            loss.sum().backward()
            for row, pair in zip(batch.row_N.tolist(), torch.stack((logprobs_N, entropy_N), -1), strict=True):
                values.setdefault(batch.rows[row], []).append(pair.detach())
    flat = torch.stack([pair for row in sorted(values) for pair in values[row]])
    return flat, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_random_forks_are_as_each_alone(make_base, architecture: str):
    """The packed tree, our own packed row of one sample each, and the model's own forward of one sample each."""
    model = share_weights(make_base(architecture).model).requires_grad_(True)
    own = {"rtol": 1e-5, "atol": 2e-6} if architecture == "gemma2" else {"rtol": 1e-9, "atol": 1e-10}

    @settings(max_examples=8, database=None)
    @given(samples=forked_samples(longest=8, vocab=3))
    def check(samples: list[Sample]) -> None:
        if not any(any(s.mask) for s in samples):
            return
        alone = [pack(samples, [[row]], device="cpu") for row in range(len(samples))]
        values, grads = run(model, packed_logprobs, [pack_tree(samples, range(len(samples)), device="cpu")])
        expected, expected_grads = run(model, packed_logprobs, alone)
        torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-10)
        for name, grad in expected_grads.items():
            bound = 1e-10 * max(1.0, float(grad.abs().max()))
            torch.testing.assert_close(grads[name], grad, rtol=1e-8, atol=bound)
        with torch.no_grad():
            padded = [pad(samples, [row], device="cpu") for row in range(len(samples))]
            plain = [plain_logprobs(model, batch) for batch in padded if len(batch.target_N)]
        torch.testing.assert_close(values, torch.cat([torch.stack(pair, -1) for pair in plain]), **own)

    check()


def episodes(*, prompts: int = 2, episodes: int = 2, turns: int = 3, seed: int = 0) -> list[Sample]:
    """Groups of episodes whose template drops the first half of every answer from the history."""
    g = torch.Generator().manual_seed(seed)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 280, (n,), generator=g).tolist())

    samples = []
    for _ in range(prompts):
        prompt = ids(20)
        for _ in range(episodes):
            history, advantage = prompt, float(torch.randn((), generator=g))
            for _ in range(turns):
                said, world = ids(24), ids(6)
                mask = (*(1,) * 9, 0, 0, *(1,) * 13)
                samples.append(Sample(prompt_ids=history, completion_ids=said, mask=mask, advantage=advantage))
                history = (*history, *said[12:], *world)
        samples.append(replace(samples[-1], advantage=-1.0))  # the same once more, valued differently
        samples.append(replace(samples[-1], completion_ids=said[:15], mask=mask[:15]))  # the beginning of it
        samples.append(replace(samples[-1], completion_ids=(), mask=()))
    return samples


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])
def test_where_the_budget_cuts_changes_nothing(make_base, architecture: str):
    model = share_weights(make_base(architecture, context=CONTEXT).model).requires_grad_(True)
    samples = episodes()
    runs = []
    for budget in (2000, 400, 150, 1):
        batches = list(micro_batches(samples, token_budget=budget))
        assert all(isinstance(batch.layout, PrefixTree) for batch in batches)
        runs.append(run(model, packed_logprobs, batches))
    runs.append(run(model, packed_logprobs, [pack(samples, [[row]], device="cpu") for row in range(len(samples))]))
    for values, grads in runs[1:]:
        torch.testing.assert_close(values, runs[0][0], rtol=1e-9, atol=1e-10)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, runs[0][1][name], rtol=1e-8, atol=1e-9)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch):
    """After `apart()` every sample is a micro-batch of its own: nothing is shared."""

    def alone(samples, *, token_budget, device, layouts):
        return (pack(samples, [[row]], device=device, layouts=layouts) for row in range(len(samples)))

    return lambda: monkeypatch.setattr("groupwise.train.learner.micro_batches", alone)


@pytest.mark.parametrize("spec", ["grpo with k3", "dapo with entropy", "gspo"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_losses_and_gradients_of_the_learner(make_learner, apart, spec: str, checkpointing: bool):
    """One loss per row, whatever the rows share."""
    learner = make_learner(gradient_checkpointing=checkpointing)
    samples = on_policy(learner, episodes())
    assert [type(batch.layout) for batch in micro_batches(samples, token_budget=learner.micro_tokens)] == [PrefixTree]
    shared = learner.forward_backward(samples, SPECS[spec]), gradients(learner)
    apart()
    expected = learner.forward_backward(samples, SPECS[spec])
    assert_same(shared[1], gradients(learner))
    for name, value in expected.items():
        assert shared[0][name] == pytest.approx(value, rel=1e-6, abs=1e-9), name


@pytest.mark.slow
def test_other_losses_and_logprobs(make_learner, apart):
    """Supervised, a function of all log-probabilities, and these themselves, of policy and reference."""
    learner = make_learner()
    samples = [replace(s, weights=tuple(0.1 * t for t in range(len(s.mask)))) for s in episodes()]

    def custom(rows: list[torch.Tensor]):
        return torch.stack([(row * torch.sin(row)).sum() for row in rows]).square().sum(), {}

    def everything():
        losses = []
        for accumulate in (learner.forward_backward_supervised, lambda s: learner.forward_backward_custom(s, custom)):
            losses.append((accumulate(samples), gradients(learner)))
        return losses, [learner.forward(samples, reference=reference) for reference in (False, True)]

    shared = everything()
    apart()
    for (metrics, mine), (expected, theirs) in zip(shared[0], everything()[0], strict=True):
        assert metrics == pytest.approx(expected, rel=1e-9)
        assert_same(mine, theirs, atol=1e-7)
    for mine, theirs in zip(shared[1], everything()[1], strict=True):
        for row, expected in zip(mine, theirs, strict=True):
            assert row == pytest.approx(expected, abs=1e-9)


def test_a_step_in_minibatches_keeps_the_segments_of_a_group_together(make_learner, monkeypatch: pytest.MonkeyPatch):
    learner = make_learner()
    samples = on_policy(learner, episodes(prompts=4))
    assert [len(group) for group in groups_of(samples)] == [9] * 4
    parts: list[list[Sample]] = []
    original = Learner.forward_backward

    def spy(self, part, spec, **options):
        parts.append(part)
        return original(self, part, spec, **options)

    monkeypatch.setattr(Learner, "forward_backward", spy)
    learner.step(samples, resolve_loss("grpo"), learning_rate=0.01, minibatches=4)
    assert [len(part) for part in parts] == [9] * 4
    assert all(len({s.prompt_ids[:20] for s in part}) == 1 for part in parts)
    assert [part[0] for part in parts] != samples[::9]  # and in another order


def test_under_autocast(make_learner, apart):
    """Matrix products in 16 bits over float32 weights: the two differ by what 16 bits round away."""
    learner = make_learner(dtype=torch.float32, autocast=torch.bfloat16)
    samples = on_policy(learner, episodes())

    def gradient():
        learner.forward_backward(samples, resolve_loss("grpo"))
        return torch.cat([grad.flatten() for grad in gradients(learner)])

    shared = gradient()
    apart()
    assert float(torch.cosine_similarity(shared, gradient(), dim=0)) > 0.99
