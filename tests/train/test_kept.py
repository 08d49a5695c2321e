"""Training under the distribution that was sampled: with top_p, top_k, min_p and whatever else leaves tokens out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch

from groupwise.algo.loss import resolve_loss
from groupwise.algo.samples import samples_of
from groupwise.config.lora import LoraSpec
from groupwise.engine.local import LocalEngine
from groupwise.model.load import plain_attention
from groupwise.model.packing import micro_batches, padded_batches
from groupwise.recorded import SamplingMask
from groupwise.train.forward import plain_logprobs
from groupwise.train.learner import Learner
from groupwise.types import (
    Completion,
    Grammar,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutGroup,
    Sample,
    SamplingParams,
    SamplingRequest,
    Turn,
)

LORA = LoraSpec(rank=4)
BASE, OTHER = PolicyVersion.base(), PolicyVersion("other", 1)
NARROWED = {
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "all": {"top_p": 0.9, "top_k": 40, "min_p": 0.02},
    "min_tokens": {"min_tokens": 6, "ignore_eos": False},
    "grammar": {"grammar": Grammar.regex("[a-z0-9 =]{4,30}"), "ignore_eos": False},
}
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4}


@pytest.fixture
def sampler(make_base) -> Iterator[LocalEngine]:
    with closing(LocalEngine(make_base("qwen3"), lanes=1)) as engine:
        yield engine


def asked(prompt: tuple[int, ...], *, n: int = 4, version: PolicyVersion = BASE, **params) -> SamplingRequest:
    params = {"max_tokens": 12, "seed": 3, "ignore_eos": True, **params}
    return SamplingRequest(prompt_ids=prompt, n=n, version=version, params=SamplingParams(**params))


def group_of(*rollouts: tuple[Turn, ...]) -> RolloutGroup:
    played = tuple(Rollout(turns=turns, reward=0.0, advantage=(-1.0) ** i) for i, turns in enumerate(rollouts))
    return RolloutGroup(prompt=Prompt(id="p", text="p"), rollouts=played)


def of_single_turns(request: SamplingRequest, completions: list[Completion]) -> list[Sample]:
    return samples_of([group_of(*((Turn(request.prompt_ids, each),) for each in completions))])


def assert_on_policy(samples: list[Sample], learner: Learner, *, temperature: float) -> None:
    """The ratio of trainer to sampler is 1 at every trained token."""
    for sample, row in zip(samples, learner.forward(samples, temperature=temperature), strict=True):
        assert sample.behaviour_logprobs is not None
        for trained, ours, theirs in zip(sample.mask, row, sample.behaviour_logprobs, strict=True):
            assert not trained or math.exp(ours - theirs) == pytest.approx(1, abs=1e-9)


def saved_adapter(learner: Learner, directory: Path) -> Path:
    directory.mkdir()
    learner.save_adapter(directory)
    return directory


# ---- on policy ----


@pytest.mark.parametrize("temperature", [0.7, pytest.param(1.3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("setting", NARROWED)
def test_the_ratio_is_one_on_policy(sampler: LocalEngine, make_base, setting: str, temperature: float):
    requests = [asked(ids, temperature=temperature, **NARROWED[setting]) for ids in ((1, 2, 3), (9, 8))]
    learner = Learner(make_base("qwen3"), lora=LORA)
    groups = sampler.generate(requests)
    samples = [s for request, group in zip(requests, groups, strict=True) for s in of_single_turns(request, group)]
    assert all(sample.kept is not None and not sample.kept.is_whole for sample in samples)
    assert_on_policy(samples, learner, temperature=temperature)
    metrics = learner.forward_backward(samples, resolve_loss("dapo"), temperature=temperature)
    assert metrics["mismatch/ratio_min"] == pytest.approx(1, abs=1e-9) == metrics["mismatch/ratio_max"]
    whole = learner.forward([replace(sample, kept=None) for sample in samples], temperature=temperature)
    reported = [each.logprobs for each in chain(*groups)]
    assert [*chain(*whole)] == pytest.approx([*chain(*reported)], abs=1e-9)  # what clients are told is of everything


def test_several_settings_versions_and_penalties_in_one_batch(sampler: LocalEngine, make_learner, tmp_path: Path):
    learner = make_learner()
    sampler.load(OTHER, saved_adapter(learner, tmp_path / "adapter"))
    kinds = [*NARROWED.values(), {}, {"top_p": 0.8, **PENALTIES}, PENALTIES]
    requests = [asked((5, 6, 7), version=OTHER, n=2, **kind) for kind in kinds]
    requests += [asked((5, 6, 7), n=2, **kind) for kind in kinds]
    groups = sampler.generate(requests)
    recorded = [group[0].kept is not None for group in groups]
    assert recorded == [*[True] * len(NARROWED), False, True, False] * 2
    samples = [s for request, group in zip(requests, groups, strict=True) for s in of_single_turns(request, group)]
    half = len(samples) // 2
    assert_on_policy(samples[:half], learner, temperature=1.0)
    assert_on_policy(samples[half:], Learner(learner.base, lora=LORA), temperature=1.0)
    alone = [sampler.generate([request])[0] for request in requests]
    assert [[each.kept for each in group] for group in alone] == [[each.kept for each in group] for group in groups]


def test_several_turns(sampler: LocalEngine, make_base):
    """A turn that goes on from the one before is trained in one segment with it; what was told in between is whole."""
    first = asked((1, 2, 3), n=2, top_p=0.7)
    episodes = []
    for said in sampler.generate([first])[0]:
        further = asked((*first.prompt_ids, *said.token_ids, 11, 12), n=1, top_k=3)
        plain = asked((*further.prompt_ids, 4), n=1)
        ((second,), (third,)) = sampler.generate([further, plain])
        episodes.append((Turn(first.prompt_ids, said), Turn(further.prompt_ids, second)))
        episodes.append((Turn(first.prompt_ids, said), Turn(plain.prompt_ids, third)))
    samples = samples_of([group_of(*episodes)])
    assert len(samples) == 4 and all(s.kept is not None and len(s.kept) == len(s.mask) for s in samples)
    between = [t for t, trained in enumerate(samples[0].mask) if not trained]
    assert between == [12, 13] and samples[0].kept.array()[between].all()
    assert_on_policy(samples, Learner(make_base("qwen3"), lora=LORA), temperature=1.0)


def test_greedy_rows_have_no_record(sampler: LocalEngine):
    greedy, drawn = sampler.generate([asked((1, 2), n=1, temperature=0.0, top_p=0.5), asked((1, 2), n=1, top_p=0.5)])
    assert greedy[0].kept is None and drawn[0].kept is not None


# ---- every way to compute it ----


def test_packed_trees_and_padded_rows_agree(sampler: LocalEngine, make_base):
    """In micro-batches of any size, in prefix trees and in padded rows: the same values."""
    request = asked((1, 2, 3), n=3, top_p=0.8)
    samples = of_single_turns(request, sampler.generate([request])[0])
    fork = samples[0]  # a segment that forks off the first, with another history
    further = Sample(
        prompt_ids=(*fork.prompt_ids, *fork.completion_ids[:5], 7),
        completion_ids=samples[1].completion_ids,
        mask=(1,) * 12,
        advantage=1.0,
        kept=samples[1].kept,
    )
    samples = [*samples, further, replace(samples[2], kept=None)]
    learner = Learner(make_base("qwen3"), lora=LORA, micro_tokens=4096)
    expected = learner.forward(samples)
    learner.set_micro_tokens(20)
    for row, wanted in zip(learner.forward(samples), expected, strict=True):
        assert row == pytest.approx(wanted, abs=1e-9)
    got: dict[int, list[float]] = {}
    for batch in padded_batches(samples, token_budget=80):
        with torch.no_grad():
            logprobs_N, _ = plain_logprobs(learner.model, batch)
        for row, value in zip(batch.row_N.tolist(), logprobs_N.tolist(), strict=True):
            got.setdefault(batch.rows[row], []).append(value)
    for row, wanted in enumerate(expected):
        assert got[row] == pytest.approx(wanted, abs=1e-9)
    assert any(batch.kept() is None for batch in micro_batches([samples[-1]], token_budget=99))


def test_the_plain_decoder_records_the_same(sampler: LocalEngine, make_base, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("groupwise.engine.local.why_twin_not_packed", lambda base, twin: "this test says so")
    requests = [asked((1, 2, 3), n=2, top_p=0.8), asked((4, 5, 6), n=2), asked((1, 2), n=1, min_p=0.1)]
    with pytest.warns(UserWarning, match="this test says so"), closing(LocalEngine(make_base("qwen3"))) as plain:
        found = plain.generate(requests)
    for mine, theirs in zip(chain(*found), chain(*sampler.generate(requests)), strict=True):
        assert (mine.token_ids, mine.kept) == (theirs.token_ids, theirs.kept)
        assert mine.kept_logprobs == pytest.approx(theirs.kept_logprobs, abs=1e-9)


def test_of_an_older_policy_what_it_kept_counts(sampler: LocalEngine, make_learner, tmp_path: Path):
    """The ratio compares both policies on what the one that sampled could say."""
    learner = make_learner()
    request = asked((1, 2, 3), n=2, top_p=0.6)
    samples = of_single_turns(request, sampler.generate([request])[0])  # of the base, which the learner has left
    for sample, row in zip(samples, learner.forward(samples), strict=True):
        with plain_attention(learner.model), torch.no_grad():
            ids = torch.tensor([(*sample.prompt_ids, *sample.completion_ids)])
            logits = learner.model(input_ids=ids).logits[0, 2:-1]
        logits = logits.masked_fill(~torch.from_numpy(sample.kept.array()), -math.inf)
        said = torch.tensor(sample.completion_ids)[:, None]
        assert row == pytest.approx(logits.log_softmax(-1).gather(1, said)[:, 0].tolist(), abs=1e-9)
        assert max(abs(a - b) for a, b in zip(row, sample.behaviour_logprobs, strict=True)) > 0.01


def test_cross_entropy_is_of_everything(sampler: LocalEngine, make_learner):
    """What is imitated is the text, whatever drew it."""
    learner, request = make_learner(), asked((1, 2, 3), n=2, top_p=0.6)
    samples = of_single_turns(request, sampler.generate([request])[0])
    loss = learner.forward_backward_supervised(samples)["loss/cross_entropy"]
    rows = learner.forward([replace(sample, kept=None) for sample in samples])
    assert loss == pytest.approx(-sum(chain(*rows)) / 24, abs=1e-9)


def test_the_reference_is_restricted_alike(sampler: LocalEngine, make_learner):
    """A KL compares like with like: of a policy that is the reference it is 0."""
    request = asked((1, 2, 3), top_p=0.7)
    samples = of_single_turns(request, sampler.generate([request])[0])
    learner = make_learner()  # whose adapter differs from the base, which sampled
    rows = learner.forward(samples, reference=True)
    assert [*chain(*rows)] == pytest.approx([x for s in samples for x in s.behaviour_logprobs], abs=1e-9)


# ---- the gradient ----


def arms(sampler: LocalEngine, prompt: tuple[int, ...]) -> SamplingMask:
    """What top_p leaves of the next token."""
    ((said,),) = sampler.generate([asked(prompt, n=1, version=OTHER, max_tokens=1, top_p=0.7)])
    assert said.kept is not None
    return said.kept


def ids_of(mask: SamplingMask) -> list[int]:
    return mask.array()[0].nonzero()[0].tolist()


def probabilities(learner: Learner, prompt: tuple[int, ...], kept: list[int]) -> torch.Tensor:
    with plain_attention(learner.model):
        return learner.model(input_ids=torch.tensor([prompt])).logits[0, -1, kept].softmax(-1)


def gradient(learner: Learner) -> torch.Tensor:
    return torch.cat([x.grad.flatten().clone() for x in learner.parameters])


def test_the_gradient_is_that_of_the_distribution_that_was_sampled(sampler: LocalEngine, make_learner, tmp_path: Path):
    """A bandit of two pulls whose arms are what top_p 0.7 leaves. Every completion is a sample, its advantage (reward -
    mean) weighed by its probability: the expected update. Under what was sampled it is the gradient of the expected
    reward, enumerated, to 1e-9. Under the whole distribution, which is how top_p is trained elsewhere, it is another:
    its direction has a cosine of 0.994 with that."""
    learner, prompt = make_learner(), (1, 2, 3)
    sampler.load(OTHER, saved_adapter(learner, tmp_path / "adapter"))
    first = arms(sampler, prompt)
    second = {a: arms(sampler, (*prompt, a)) for a in ids_of(first)}
    pairs = [(a, b) for a in second for b in ids_of(second[a])]
    assert 50 < len(pairs) < 5000
    rewards = {(a, b): float(a % 3 == 0) + 0.3 * math.sin(b) for a, b in pairs}

    learner.zero_grad()
    p = probabilities(learner, prompt, [*second])
    after = {a: probabilities(learner, (*prompt, a), ids_of(second[a])) for a in second}
    chances = torch.cat([p[i] * after[a] for i, a in enumerate(second)])
    expected_reward = (chances * torch.tensor([rewards[pair] for pair in pairs], dtype=chances.dtype)).sum()
    (-expected_reward).backward()
    exact = gradient(learner)

    def update(*, restricted: bool) -> torch.Tensor:
        samples = [
            Sample(
                prompt_ids=prompt,
                completion_ids=pair,
                mask=(1, 1),
                advantage=chance * (rewards[pair] - float(expected_reward.detach())),
                kept=SamplingMask.join([first, second[pair[0]]]) if restricted else None,
            )
            for pair, chance in zip(pairs, chances.tolist(), strict=True)
        ]
        rows = learner.forward(samples)
        samples = [replace(s, behaviour_logprobs=row) for s, row in zip(samples, rows, strict=True)]
        learner.zero_grad()
        learner.forward_backward(samples, resolve_loss("dr_grpo", reduction="sum"))
        return gradient(learner)

    torch.testing.assert_close(update(restricted=True), exact, rtol=1e-9, atol=1e-9)
    cosine = float(torch.cosine_similarity(update(restricted=False), exact, dim=0))
    assert 0.98 < cosine < 0.997
