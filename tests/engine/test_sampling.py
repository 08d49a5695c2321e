"""The sampling step: every token as often as its probability says, truncation as written in plain Python, seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.engine.sampling import (
    RowParams,
    completion_seed,
    mask_entries,
    reshape,
    sample_tokens,
    truncate,
    uniforms,
)
from groupwise.recorded import BITMAP, DROPPED, KEPT, SamplingMask
from groupwise.types import SamplingParams
from wording import raises

few = settings(max_examples=60)


def params(B: int, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> RowParams:
    floats = (torch.full((B,), float(value), dtype=torch.float64) for value in (temperature, top_p, min_p))
    temperature_B, top_p_B, min_p_B = floats
    truncated = top_k > 0 or top_p < 1 or min_p > 0
    return RowParams(temperature_B, torch.full((B,), top_k), top_p_B, min_p_B, truncated)


def grid(n: int) -> torch.Tensor:
    """n uniforms, one in the middle of each n-th of [0, 1)."""
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


def naive_truncation(probs: list[float], *, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """Token -> probability of what top-k, then top-p, then min-p leave."""
    order = sorted(range(len(probs)), key=lambda v: -probs[v])
    kept = order[:top_k] if top_k else order
    if top_p < 1:
        total, before, nucleus = sum(probs[v] for v in kept), 0.0, []
        for v in kept:
            if nucleus and before >= top_p * total:
                break
            nucleus.append(v)
            before += probs[v]
        kept = nucleus
    kept = [v for v in kept if probs[v] >= min_p * probs[order[0]]]
    total = sum(probs[v] for v in kept)
    return {v: probs[v] / total for v in kept}


@few
@given(
    logits=st.lists(st.floats(-6, 6), min_size=2, max_size=12, unique_by=lambda x: round(x, 3)),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.integers(0, 6),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.1]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_frequencies_are_the_probabilities(logits, temperature, top_k, top_p, min_p):
    """Over a grid of uniforms each token comes as often as its probability in the truncated distribution."""
    n = 2000
    row = torch.tensor(logits, dtype=torch.float64)
    how = params(n, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    token_B, logprob_B, _ = sample_tokens(row.expand(n, -1), how, grid(n))
    probs = (row / temperature).softmax(-1)
    expected = naive_truncation(probs.tolist(), top_k=top_k, top_p=top_p, min_p=min_p)
    counts = torch.bincount(token_B, minlength=len(logits)).tolist()
    for token, count in enumerate(counts):
        assert abs(count - n * expected.get(token, 0.0)) <= 1.0 + 1e-6
        assert count == 0 or token in expected
    torch.testing.assert_close(logprob_B, probs.log()[token_B], rtol=1e-12, atol=1e-12)  # before truncation


@few
@given(
    logits=st.lists(st.floats(-6, 6), min_size=1, max_size=12, unique_by=lambda x: round(x, 3)),
    top_k=st.integers(0, 14),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_truncation(logits, top_k, top_p, min_p):
    probs = torch.tensor([logits], dtype=torch.float64).softmax(-1)
    kept = truncate(probs, params(1, top_k=top_k, top_p=top_p, min_p=min_p))[0]
    expected = naive_truncation(probs[0].tolist(), top_k=top_k, top_p=top_p, min_p=min_p)
    assert set(kept.nonzero()[:, 0].tolist()) == set(expected)
    assert torch.equal(kept[kept > 0], probs[0][kept > 0])  # in place, not renormalised


def test_rows_have_their_own_parameters():
    """A row is sampled the same whatever its neighbours ask for, also if they alone make the batch a truncated one."""
    n, V = 40, 9
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(n, V, generator=g)
    mixed = RowParams(
        torch.tensor([0.0, 0.5, 1.0, 2.0] * 10, dtype=torch.float64),
        torch.tensor([0, 3, 0, 0, 2] * 8),
        torch.tensor([1.0, 0.6] * 20, dtype=torch.float64),
        torch.tensor([0.0] * 30 + [0.3] * 10, dtype=torch.float64),
        True,
    )
    token_B, logprob_B, _ = sample_tokens(logits, mixed, grid(n))
    for b in range(n):
        one = slice(b, b + 1)
        temperature_B, top_k_B, top_p_B, min_p_B = (
            x[one] for x in (mixed.temperature_B, mixed.top_k_B, mixed.top_p_B, mixed.min_p_B)
        )
        truncated = bool((top_k_B > 0) | (top_p_B < 1) | (min_p_B > 0))
        alone = RowParams(temperature_B, top_k_B, top_p_B, min_p_B, truncated)
        token, logprob, _ = sample_tokens(logits[one], alone, grid(n)[one])
        assert (int(token), float(logprob)) == (int(token_B[b]), float(logprob_B[b]))


def test_greedy_takes_the_likeliest_and_reports_the_untempered_logprob():
    logits = torch.randn(20, 7, generator=torch.Generator().manual_seed(0))
    token_B, logprob_B, _ = sample_tokens(logits, params(20, temperature=0.0), grid(20))
    assert torch.equal(token_B, logits.argmax(-1))
    torch.testing.assert_close(logprob_B, logits.log_softmax(-1).amax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniforms_at_the_edges(dtype: torch.dtype):
    """u = 0 and the largest u below 1 give a token that has a probability; the impossible ones never come."""
    logits = torch.tensor([[-math.inf, 1.0, -math.inf, 2.0, -math.inf]], dtype=dtype).expand(2, -1)
    token_B, _, _ = sample_tokens(logits, params(2), torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert token_B.tolist() == [1, 3]
    g = torch.Generator().manual_seed(1)
    wide = 5 * torch.randn(500, 1000, generator=g, dtype=dtype)
    largest = torch.full((500,), 1 - 2**-53, dtype=torch.float64)
    for how in (params(500), params(500, top_k=3)):
        token_B, logprob_B, _ = sample_tokens(wide, how, largest)
        assert bool((token_B < 1000).all()) and bool(logprob_B.isfinite().all())
    assert bool((wide.argsort(-1, descending=True)[:, :3] == token_B[:, None]).any(-1).all())


def test_extreme_temperatures():
    logits = torch.tensor([[30.0, 29.0, -30.0]]).expand(3, -1)
    token_B, logprob_B, _ = sample_tokens(logits, params(3, temperature=1e-300), grid(3))
    assert token_B.tolist() == [0, 0, 0] and logprob_B.tolist() == [0.0, 0.0, 0.0]
    token_B, _, _ = sample_tokens(logits, params(3, temperature=1e6), grid(3))
    assert token_B.tolist() == [0, 1, 2]


def test_nan_logits_stay_in_range():
    """A broken model is reported by a logprob that is not finite, not by an index out of range."""
    token_B, logprob_B, _ = sample_tokens(torch.full((2, 4), math.nan), params(2), grid(2))
    assert bool((token_B < 4).all()) and not bool(logprob_B.isfinite().any())


def test_uniforms_are_a_function_of_seed_and_counter():
    seeds, counters = np.array([1, 1, 2, 2**63 + 5]), np.array([0, 1, 0, 7])
    together = uniforms(seeds, counters)
    assert together.tolist() == [float(uniforms(seeds[i : i + 1], counters[i : i + 1])[0]) for i in range(4)]
    assert len(set(together.tolist())) == 4


@pytest.mark.parametrize("vary", ["seed", "counter", "completion"])
def test_uniforms_are_uniform_and_uncorrelated(vary: str):
    """Chi-square over 64 cells, and of successive pairs over 8 x 8, for consecutive seeds, counters and completions."""
    n = 1 << 14
    fixed, moving = np.full(n, 12345), np.arange(n)
    if vary == "completion":
        seeds = np.array([completion_seed(7, j) for j in range(n)], dtype=np.uint64)
        values = uniforms(seeds, np.zeros(n, dtype=np.int64))
    else:
        values = uniforms(moving, fixed) if vary == "seed" else uniforms(fixed, moving)
    assert values.min() >= 0 and values.max() < 1
    cells = np.bincount((values * 64).astype(int), minlength=64)
    pairs = np.bincount((values[:-1] * 8).astype(int) * 8 + (values[1:] * 8).astype(int), minlength=64)
    for counts in (cells, pairs):
        expected = counts.sum() / 64
        assert ((counts - expected) ** 2 / expected).sum() < 63 + 5 * math.sqrt(2 * 63)


def test_completion_seeds_differ():
    seeds = {completion_seed(seed, j) for seed in (-1, 0, 1, 2**63, 2**64 - 2) for j in range(100)}
    assert len(seeds) == 500


# ---- changed logits ----


def naive_reshape(logits: list[float], params: SamplingParams, prompt: list[int], said: list[int], ends: list[int]):
    """Token by token, as the definitions of OpenAI, CTRL and vLLM read."""
    shaped = list(logits)
    for token in range(len(shaped)):
        if token in ends and len(said) < params.min_tokens:
            shaped[token] = -math.inf
        shaped[token] += dict(params.logit_bias).get(token, 0.0)
        if token in prompt or token in said:
            r = params.repetition_penalty
            shaped[token] = shaped[token] / r if shaped[token] > 0 else shaped[token] * r
        shaped[token] -= params.frequency_penalty * said.count(token) + params.presence_penalty * (token in said)
    return shaped


@few
@given(
    logits=st.lists(st.floats(-6, 6), min_size=6, max_size=6),
    prompt=st.lists(st.integers(0, 5), max_size=4),
    said=st.lists(st.integers(0, 5), max_size=8),
    repetition=st.sampled_from([1.0, 1.3, 0.7]),
    frequency=st.sampled_from([0.0, 0.5, -1.0]),
    presence=st.sampled_from([0.0, 1.5, -2.0]),
    bias=st.sampled_from([(), ((2, 100.0),), ((0, -1.5), (5, 2.0))]),
    min_tokens=st.integers(0, 4),
)
def test_logits_are_changed_as_the_definitions_say(
    logits, prompt, said, repetition, frequency, presence, bias, min_tokens
):
    given_params = SamplingParams(
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        logit_bias=bias,
        min_tokens=min_tokens,
    )
    row, ends = torch.tensor(logits, dtype=torch.float64), [1, 4]
    ids = {"prompt_P": torch.tensor(prompt, dtype=torch.long), "said_T": torch.tensor(said, dtype=torch.long)}
    shaped = reshape(row, given_params, **ids, ends=ends)
    assert shaped.tolist() == pytest.approx(naive_reshape(logits, given_params, prompt, said, ends), abs=1e-12)
    assert row.tolist() == logits


def test_tokens_are_drawn_from_the_changed_logits_and_have_the_policys_logprobs():
    n = 4000
    logits, drawn = torch.tensor([2.0, 1.0, -1.0]).double(), torch.tensor([-3.0, 1.0, 2.0]).double()
    token_B, logprob_B, _ = sample_tokens(logits.expand(n, -1), params(n), grid(n), drawn_BV=drawn.expand(n, -1))
    counts = torch.bincount(token_B, minlength=3).double() / n
    torch.testing.assert_close(counts, drawn.softmax(-1), atol=1e-3, rtol=0)
    torch.testing.assert_close(logprob_B, logits.log_softmax(-1)[token_B])
    greedy, _, _ = sample_tokens(logits[None], params(1, temperature=0.0), grid(1), drawn_BV=drawn[None])
    assert greedy.tolist() == [2]


# ---- what was kept ----


def test_what_was_kept_is_reported():
    """Each row's part of the vocabulary as top-k, top-p, min-p and logits of -inf leave it, and the log-probability
    under the policy restricted to that; rows that are not narrowed keep everything, also what underflows."""
    logits = torch.tensor([[5.0, 4.0, 1.0, 0.0, -300.0]]).expand(6, -1)
    drawn = logits.clone()
    drawn[4, [0, 2]] = -math.inf
    drawn[5, 0] += 1.0  # as a bias or a penalty would
    how = RowParams(
        temperature_B=torch.tensor([1.0, 0.5, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64),
        top_k_B=torch.tensor([2, 0, 0, 0, 0, 0]),
        top_p_B=torch.tensor([1.0, 0.999, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64),
        min_p_B=torch.tensor([0.0, 0.0, 0.3, 0.0, 0.0, 0.0], dtype=torch.float64),
        truncated=True,
    )
    token_B, logprob_B, kept = sample_tokens(logits, how, grid(6), drawn_BV=drawn)
    assert kept is not None
    expected = [[0, 1], [0, 1], [0, 1], [0, 1, 2, 3, 4], [1, 3, 4], [0, 1, 2, 3, 4]]
    assert [row.nonzero()[:, 0].tolist() for row in kept.kept_BV] == expected
    for row, (token, ids) in enumerate(zip(token_B.tolist(), expected, strict=True)):
        z = logits[row] / how.temperature_B[row]
        assert float(kept.logprob_B[row]) == pytest.approx(float(z[token] - z[ids].logsumexp(-1)), abs=1e-6)
        assert float(logprob_B[row]) == pytest.approx(float(z.log_softmax(-1)[token]), abs=1e-6)


def test_nothing_is_recorded_where_everything_is_kept():
    assert sample_tokens(torch.randn(3, 9), params(3), grid(3))[2] is None


@few
@given(st.integers(1, 200), st.integers(0, 2**32 - 1))
def test_masks_come_back(vocabulary: int, seed: int):
    rng = np.random.default_rng(seed)
    kept = rng.random((6, vocabulary)) < rng.random((6, 1)) ** 4
    kept[np.arange(6), rng.integers(vocabulary, size=6)] = True
    kept[0] = True
    mask = SamplingMask.of_entries(vocabulary, mask_entries(torch.from_numpy(kept)))
    assert mask == SamplingMask.of(kept) and (mask.array() == kept).all()
    assert SamplingMask.from_bytes(mask.to_bytes()) == mask
    assert SamplingMask.join([mask.cut(0, 2), mask.cut(2, 3), mask.cut(3)]) == mask
    ids = rng.integers(vocabulary, size=6)
    assert mask.has(ids.tolist()) == kept[np.arange(6), ids].tolist()
    assert len(mask.words) // 4 <= 6 * -(-vocabulary // 32)


@pytest.mark.parametrize(
    "entries",
    [
        [(KEPT, [])],
        [(KEPT, [3, 2])],
        [(DROPPED, [9])],
        [(KEPT, [-1])],
        [(DROPPED, range(9))],
        [(BITMAP, [0])],
        [(3, [1])],
    ],
)
def test_masks_that_are_none_are_refused(entries):
    mask = SamplingMask.of_entries(9, [(kind, np.array(words, "<i4")) for kind, words in entries])
    with raises(ValueError):
        SamplingMask.from_bytes(mask.to_bytes())


@pytest.mark.parametrize("data", [b"", b"kept", b"none" * 9, SamplingMask.whole(9, 2).to_bytes()[:-1]])
def test_bytes_that_are_no_mask_are_refused(data: bytes):
    with raises(ValueError):
        SamplingMask.from_bytes(data)
