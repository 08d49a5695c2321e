"""Several optimizer steps on one rollout batch: what moves, what stays, and TRL's loss on the later ones."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from learner_cases import GROUPS, LORA, SPECS, assert_same, gradients, on_policy, parameters

from groupwise.algo.loss import resolve_loss
from groupwise.engine.local import LocalEngine
from groupwise.errors import ConfigError
from groupwise.model.load import LoadedModel
from groupwise.train.learner import Learner
from groupwise.train.reference import Reference
from groupwise.types import Sample, SamplingParams, SamplingRequest
from slow_cases import slow_but
from trl_peer import MAX_LENGTH, trl_loss
from wording import raises


def test_minibatches(make_learner, make_samples, monkeypatch: pytest.MonkeyPatch):
    """As many steps as asked for, on every sample once, in groups; the anchor is the policy before the first."""
    learner = make_learner()
    samples, spec = make_samples(GROUPS), resolve_loss("grpo", anchor="old")
    start = learner.forward(samples)
    seen: list[tuple[Sample, tuple[float, ...]]] = []
    original = Learner.forward_backward

    def spy(self, samples, spec, **options):
        seen.extend(zip(samples, options["old_logprobs"], strict=True))
        return original(self, samples, spec, **options)

    monkeypatch.setattr(Learner, "forward_backward", spy)
    metrics = learner.step(samples, spec, learning_rate=0.05, minibatches=4)
    assert learner.steps == 4 and len(seen) == len(samples)
    place = {id(sample): i for i, sample in enumerate(samples)}
    for sample, old in seen:
        assert old == pytest.approx(start[place[id(sample)]], abs=1e-12, nan_ok=True)
    assert metrics["loss/ratio_mean"] != pytest.approx(1.0, abs=1e-6)  # the later steps are off-policy
    assert make_learner().step(samples[:3], spec, learning_rate=0.0, minibatches=8)["optim/refused"] == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("preset", slow_but({"gspo"}, of=("gspo", "luspo")))
def test_rounding_clips_nothing_on_policy(make_base, preset: str, dtype: torch.dtype):
    """What the engine samples from the very policy that is trained. Its 16-bit log-probabilities are off by more than
    these losses bound the ratio by: against them a fifth of the tokens and more would be clipped."""
    base = make_base(dtype=dtype)
    samples = sampled_by_the_engine(base)
    learner = Learner(base, lora=LORA, micro_tokens=200)  # several micro-batches
    for options in ({}, {"minibatches": 2}, {"passes": 2}, {"minibatches": 4, "passes": 3}):
        metrics = learner.step(samples, resolve_loss(preset), learning_rate=0.0, **options)
        assert metrics["loss/clip_frac"] == 0.0, options
        assert metrics["loss/ratio_min"] == pytest.approx(1.0, abs=1e-5) == metrics["loss/ratio_max"]
    against_the_sampler = learner.step(samples, resolve_loss(preset, anchor="behaviour"), learning_rate=0.0)
    assert (against_the_sampler["loss/clip_frac"] > 0.2) == (dtype == torch.bfloat16)


def sampled_by_the_engine(base: LoadedModel) -> list[Sample]:
    """Eight groups of four completions of different lengths, one of two with advantage 1, the other with -1."""
    requests = [
        SamplingRequest(prompt_ids=(5, 6, 7 + i, 9), params=SamplingParams(max_tokens=8 + 4 * i, seed=i), n=4)
        for i in range(8)
    ]
    samples = []
    with closing(LocalEngine(base)) as engine:
        for request, future in zip(requests, engine.submit(requests), strict=True):
            for i, said in enumerate(future.result()):
                sample = Sample(
                    prompt_ids=request.prompt_ids,
                    completion_ids=said.token_ids,
                    mask=(1,) * len(said.token_ids),
                    advantage=(1.0, -1.0)[i % 2],
                    behaviour_logprobs=said.logprobs,
                )
                samples.append(sample)
    return samples


EPISODES = [  # (prompt, completion, mask, continues): a forked episode, a plain one, one forked twice, a cut one
    ((1, 2), (3, 4, 5), (1, 1, 1), False),
    ((1, 2, 9, 6), (7,), (1,), True),
    ((1, 2), (8, 2), (1, 1), False),
    ((5, 6), (3, 4), (1, 1), False),
    ((5, 6, 9), (7, 8, 3, 1), (0, 1, 1, 1), True),
    ((5, 9), (4,), (1,), True),
    ((5, 6), (4, 4), (0, 0), False),
    ((5, 9, 9), (7, 7), (0, 0), True),
]
LENGTHS = [4, 4, 2, 6, 6, 6, 0, 0]  # trained tokens of the whole episode
PROMPTS = [0, 0, 1, 1, 1, 1, 2, 2]  # the prompt that each is of, whatever it begins with
PROMPT_LENGTHS = [4, 4, 8, 8, 8, 8, 0, 0]  # trained tokens of all episodes of the prompt


def forked_episodes() -> list[Sample]:
    advantages = iter([1.0, -0.5, 0.25, 2.0])
    samples: list[Sample] = []
    for group, (prompt, completion, mask, continues) in zip(PROMPTS, EPISODES, strict=True):
        advantage = samples[-1].advantage if continues else next(advantages)
        samples.append(
            Sample(
                prompt_ids=prompt,
                completion_ids=completion,
                mask=mask,
                advantage=advantage,
                continues=continues,
                group=group,
            )
        )
    return samples


@pytest.mark.parametrize(
    ("reduction", "weight"),
    [
        ("sequence_mean", lambda length: 1 / (length * 3)),
        ("sequence_sum", lambda length: 1 / 3),
        ("constant", lambda length: 1 / (3 * 8.0)),
        ("token_mean", lambda length: 1 / 12),
        ("prompt_mean", lambda length: 1 / (length * 2)),
    ],
)
@pytest.mark.parametrize("micro_tokens", [1, 8192])
def test_an_episode_counts_once_however_often_it_was_forked(make_learner, reduction, weight, micro_tokens):
    """Three episodes with trained tokens, in six segments, which may be in different micro-batches."""
    samples, lengths = forked_episodes(), PROMPT_LENGTHS if reduction == "prompt_mean" else LENGTHS
    length = {"reduction_length": 8.0} if reduction == "constant" else {}
    spec = resolve_loss("reinforce", reduction=reduction, **length)

    def by_hand(rows: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        losses = [
            -weight(length) * sample.advantage * (row * torch.tensor(sample.mask)).sum()
            for sample, row, length in zip(samples, rows, lengths, strict=True)
            if length
        ]
        return torch.stack(losses).sum(), {}

    learner = make_learner(micro_tokens=micro_tokens)
    metrics = learner.forward_backward(samples, spec)
    ours = gradients(learner)
    expected = learner.forward_backward_custom(samples, by_hand)
    assert metrics["loss/policy"] == pytest.approx(expected["loss/custom"], rel=1e-6)
    assert_same(ours, gradients(learner), atol=1e-7)
    if reduction != "token_mean":
        stream = learner.begin_step()
        for part in (samples[:2], samples[2:]):
            stream.accumulate(part, spec)
        learner.divide_gradients(spec.denominator(tokens=stream.tokens, rows=stream.rows))
        assert_same(ours, gradients(learner), atol=1e-7)


def test_samples_that_do_not_say_their_prompt_have_no_mean_of_prompts(make_learner):
    lost = [replace(sample, group=None) for sample in forked_episodes()]
    with raises(ConfigError, field="reduction"):
        make_learner().forward_backward(lost, resolve_loss("reinforce", reduction="prompt_mean"))


def test_no_episode_is_cut_in_two_by_minibatches(make_learner, monkeypatch):
    learner, samples = make_learner(), forked_episodes()
    parts: list[list[Sample]] = []
    original = Learner.forward_backward

    def spy(self, part, spec, **options):
        parts.append(part)
        return original(self, part, spec, **options)

    monkeypatch.setattr(Learner, "forward_backward", spy)
    for minibatches in (2, 3, 4, 8):
        parts.clear()
        learner.step(samples, resolve_loss("reinforce"), learning_rate=0.0, minibatches=minibatches)
        assert len(parts) == min(minibatches, 4) and all(parts)
        assert not any(part[0].continues for part in parts)
        rows = [samples.index(sample) for part in parts for sample in part]
        assert sorted(rows) == list(range(8)) and all(
            rows[i] == rows[i - 1] + 1 for i in range(8) if rows[i] in (1, 4, 5, 7)
        )


def test_a_minibatch_without_loss_tokens(make_learner):
    masked = Sample(prompt_ids=(1, 2), completion_ids=(3, 4), mask=(0, 0), advantage=1.0)
    trained = Sample(prompt_ids=(5,), completion_ids=(3, 4), mask=(1, 1), advantage=1.0)
    for samples in ([masked, trained], [trained, masked]):
        metrics = make_learner().step(samples, resolve_loss("reinforce"), learning_rate=0.1, minibatches=2)
        assert metrics["loss/policy"] != 0.0


def test_passes_go_over_everything_against_the_same_policy(make_learner, make_samples, monkeypatch):
    """Each pass sees every sample once, in an order of its own; the anchor and the reference are those of the start."""
    learner = make_learner()
    samples = [replace(s, advantage=float(i)) for i, s in enumerate(make_samples(GROUPS))]  # told apart by it
    spec = resolve_loss("grpo", anchor="old", kl="k3")
    start, reference = learner.forward(samples), learner.forward(samples, reference=True)
    calls: list[list[int]] = []
    original = Learner.forward_backward

    def spy(self, part, spec, **options):
        rows = [int(sample.advantage) for sample in part]
        calls.append(rows)
        for row, old, ref in zip(rows, options["old_logprobs"], options["reference_logprobs"], strict=True):
            assert old == pytest.approx(start[row], abs=1e-12, nan_ok=True)
            assert ref == pytest.approx(reference[row], abs=1e-12, nan_ok=True)
        return original(self, part, spec, **options)

    monkeypatch.setattr(Learner, "forward_backward", spy)
    metrics = learner.step(samples, spec, learning_rate=0.05, minibatches=2, passes=3)
    assert learner.steps == 6 and metrics["optim/refused"] == 0.0
    passes = [calls[i] + calls[i + 1] for i in (0, 2, 4)]
    assert all(sorted(rows) == list(range(len(samples))) for rows in passes)
    assert len({tuple(rows) for rows in passes}) > 1


def test_the_reference_is_computed_once(make_learner, make_samples, monkeypatch):
    learner, samples, calls = make_learner(), make_samples(GROUPS), []
    original = Reference.active
    monkeypatch.setattr(Reference, "active", lambda self: calls.append(1) or original(self))
    learner.step(samples, SPECS["grpo with k3"], learning_rate=0.01, passes=3)
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["grpo", "dapo with entropy", "grpo with k3"])
def test_passes_are_steps_one_after_another(make_learner, make_samples, name: str):
    """By hand: the gradient against the snapshot of the start, an optimizer step, again."""
    spec = replace(SPECS[name], anchor="old")
    mine, other = make_learner(), make_learner()
    samples = make_samples(GROUPS)
    mine.step(samples, spec, learning_rate=0.02, passes=3)
    old = other.forward(samples)
    for _ in range(3):
        other.forward_backward(samples, spec, old_logprobs=old)
        other.optim_step(learning_rate=0.02)
    assert_same(parameters(mine), parameters(other))
    assert mine.steps == other.steps == 3


def padded(rows: list[tuple[float, ...]], width: int) -> torch.Tensor:
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float64).nan_to_num()


@pytest.mark.parametrize(
    ("case", "preset", "overrides"),
    [
        ({"loss_type": "grpo"}, "grpo", {"clip_high": 0.28}),
        ({"loss_type": "dapo"}, "dapo", {}),
        ({"loss_type": "dr_grpo"}, "dr_grpo", {"clip_high": 0.28, "reduction_length": MAX_LENGTH}),
        (
            {"loss_type": "grpo", "level": "sequence", "eps": (0.05, 0.06)},
            "gspo",
            {"clip_low": 0.05, "clip_high": 0.06},
        ),
        ({"loss_type": "cispo", "eps": (0.2, 1.5)}, "cispo", {"clip_high": 0.5}),
    ],
    ids=["grpo", "dapo", "dr_grpo", "gspo", "cispo"],
)
def test_the_second_pass_is_trls(make_learner, make_samples, case: dict, preset: str, overrides: dict):
    """After one pass the policy has moved: the gradient of the next is TRL's with its old log-probabilities fixed."""
    learner = make_learner()
    samples = [s for s in make_samples(GROUPS) if any(s.mask)]
    spec, old = resolve_loss(preset, anchor="old", **overrides), learner.forward(samples)
    learner.forward_backward(samples, spec, old_logprobs=old)
    learner.optim_step(learning_rate=0.01)
    current, width = learner.forward(samples), max(len(s.mask) for s in samples)
    batch = SimpleNamespace(
        logprobs=padded(current, width),
        old=padded(old, width),
        mask=padded([tuple(map(float, s.mask)) for s in samples], width),
        advantages=torch.tensor([s.advantage for s in samples], dtype=torch.float64),
        entropy=torch.zeros(len(samples), width),
        reference=None,
        behaviour=None,
    )
    theirs, slope_BT, _ = trl_loss(batch, case)
    assert float((batch.logprobs - batch.old).abs().max()) > 0.05
    metrics = learner.forward_backward(samples, spec, old_logprobs=old)
    mine = gradients(learner)
    assert metrics["loss/policy"] == pytest.approx(float(theirs), abs=1e-6)

    def linear(rows: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        terms = [(row * slope_BT[i, : len(row)]).nansum() for i, row in enumerate(rows)]
        return torch.stack(terms).sum(), {}

    learner.forward_backward_custom(samples, linear)
    for a, b in zip(mine, gradients(learner), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_samples_that_are_masked_whole_are_not_in_the_batch(make_learner, make_samples):
    """Completions that were cut and are left out of the loss: no gradient, no metric and no divisor knows of them."""
    learner = make_learner()
    kept = on_policy(learner, [s for s in make_samples(GROUPS) if any(s.mask)])
    cut = [replace(s, mask=(0,) * len(s.mask), advantage=5.0) for s in kept[::2]]
    for name, spec in SPECS.items():
        metrics = learner.forward_backward(kept, spec)
        expected = gradients(learner)
        with_cut = learner.forward_backward([*cut[:2], *kept, *cut[2:]], spec)
        assert_same(gradients(learner), expected)
        assert with_cut == pytest.approx(metrics, rel=1e-9, abs=1e-12), name
    assert math.isfinite(metrics["loss/policy"])
