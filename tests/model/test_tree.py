"""Attention over a packed prefix tree, against one softmax per token over the tokens of its path."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forked_samples import forked_samples, lines
from groupwise.model import prefix_tree
from groupwise.model.attention import Scoring, SharedPrompts
from groupwise.model.packing import pack_tree
from groupwise.model.prefix_tree import PrefixTree

few = settings(max_examples=60)
H, K, D, V = 4, 2, 3, 5  # values are of another size


def naive(query_SHD, key_SKD, value_SKD, paths: list[list[int]], scoring: Scoring):
    """Each token by itself, over what stands before it in its path."""
    seen: dict[int, list[int]] = {}
    for path in paths:
        for at, token in enumerate(path):
            seen[token] = path[max(0, at + 1 - (scoring.window or at + 1)) : at + 1]
    key_SHD, value_SHD = (x.repeat_interleave(H // K, dim=1) for x in (key_SKD, value_SKD))
    out = []
    for token in range(len(query_SHD)):
        scores = torch.einsum("hd,thd->ht", query_SHD[token], key_SHD[seen[token]]) * scoring.scaling
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        if scoring.sinks is None:
            weights = scores.softmax(-1)
        else:
            weights = torch.cat([scores, scoring.sinks[:, None]], -1).softmax(-1)[:, :-1]
        out.append(torch.einsum("ht,thd->hd", weights, value_SHD[seen[token]]))
    return torch.stack(out)


def random_inputs(S: int, *, seed: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(S, *shape, generator=g, dtype=dtype) for shape in ((H, D), (K, D), (K, V))]


@few
@given(
    samples=forked_samples(),
    window=st.sampled_from([None, 1, 3, 50]),
    softcap=st.sampled_from([None, 0.7]),
    sinks=st.booleans(),
    queries=st.sampled_from([1, 3, 128]),
    limits=st.sampled_from([(1 << 20, 1.5, 1 << 13), (1, 1.0, 1), (60, 1.2, 1)]),
    seed=st.integers(0, 99),
)
def test_equals_a_dense_softmax(samples, window, softcap, sinks: bool, queries: int, limits, seed: int):
    """Values and gradients, whatever the tiles and however many are computed together."""
    paths, own = lines(samples)
    if not sum(own):
        return
    inputs = [x.requires_grad_() for x in random_inputs(sum(own), seed=seed)]
    g = torch.Generator().manual_seed(seed)
    sink_H = torch.randn(H, generator=g, dtype=torch.float64, requires_grad=True)
    scoring = Scoring(0.6, window, softcap, sink_H if sinks else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_tree, "QUERIES", queries)
        for name, limit in zip(("BATCHED", "PADDED", "SMALL"), limits, strict=True):
            patch.setattr(prefix_tree, name, limit)
        got = PrefixTree(paths, own).attend(0, *inputs, scoring)
    want = naive(*inputs, paths, scoring)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    slope = torch.randn(sum(own), H, V, generator=g, dtype=torch.float64)
    inputs += [sink_H] * sinks
    grads = (torch.autograd.grad((out * slope).sum(), inputs) for out in (got, want))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def test_tiles_of_like_sizes_are_computed_together():
    """Nine lines of 40 tokens in three tiles each; those that stand alike on their path are one batch."""
    trunk = list(range(40))
    paths = [trunk] + [trunk + list(range(40 * i, 40 * i + 40)) for i in range(1, 9)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_tree, "QUERIES", 16)
        patch.setattr(prefix_tree, "SMALL", 1)
        tiles = PrefixTree(paths, [40] * 9).tiles
    assert sum(len(t.queries_M) for t in tiles) == 360
    assert max(t.keys_BT.shape[0] for t in tiles) >= 8
    needed = sum(stop * n for path in paths for start in (0, 16, 32) for stop, n in [_tile(len(path) - 40, start)])
    computed = sum(t.query_positions_BN.numel() * t.keys_BT.shape[1] for t in tiles)
    assert needed <= computed <= 1.5 * needed


def _tile(begin: int, start: int) -> tuple[int, int]:
    n = min(16, 40 - start)
    return begin + start + n, n


def test_large_scores_do_not_overflow():
    paths, own = [[0, 1, 2, 3], [0, 1, 4, 5]], [4, 2]
    inputs = [300 * x.float() for x in random_inputs(6, seed=0)]
    out = PrefixTree(paths, own).attend(0, *inputs, Scoring(1.0))
    torch.testing.assert_close(out, naive(*inputs, paths, Scoring(1.0)), rtol=1e-4, atol=1e-2)


def test_16_bits_are_close_and_so_are_their_gradients():
    """Scores, softmax and the sums over lines are float32: 24 forks add up without drift."""
    paths, own = [list(range(20))], [20]
    for i in range(24):
        paths.append([*range(20), *range(20 + 9 * i, 29 + 9 * i)])
        own.append(9)
    exact = [x.bfloat16().double().requires_grad_() for x in random_inputs(sum(own), seed=0, dtype=torch.float32)]
    rounded = [x.detach().bfloat16().requires_grad_() for x in exact]
    out = PrefixTree(paths, own).attend(0, *rounded, Scoring(1.0))
    want = naive(*exact, paths, Scoring(1.0))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), want, rtol=0.02, atol=0.02)
    out.sum().backward()
    want.sum().backward()
    for mine, theirs in zip(rounded, exact, strict=True):
        assert mine.grad is not None and mine.grad.dtype == torch.bfloat16 and theirs.grad is not None
        scale = float(theirs.grad.abs().max())
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=0.02, atol=0.01 * max(scale, 1.0))


def test_equal_prompts_as_a_tree_are_shared_prompts():
    """The two layouts on the same two completions of one prompt."""
    query, key, value = random_inputs(11, seed=3)
    shared = SharedPrompts([5], [4, 2], [0, 0]).attend(0, query, key, value, Scoring(0.5, 6))
    tree = PrefixTree([[*range(9)], [0, 1, 2, 3, 4, 9, 10]], [9, 2]).attend(0, query, key, value, Scoring(0.5, 6))
    torch.testing.assert_close(tree, shared, rtol=1e-12, atol=1e-13)


@few
@given(samples=forked_samples())
def test_no_token_is_seen_by_what_does_not_begin_with_it(samples):
    """Changing one packed token's key and value changes only the tokens whose path goes through it."""
    batch = pack_tree(samples, range(len(samples)), device="cpu")
    paths, _ = lines(samples)
    S = len(batch.input_ids_S)
    if S < 2:
        return
    query, key, value = random_inputs(S, seed=0)
    chosen = S // 2
    before = batch.layout.attend(0, query, key, value, Scoring(1.0))
    key[chosen] += 1
    value[chosen] += 1
    changed = (batch.layout.attend(0, query, key, value, Scoring(1.0)) != before).flatten(1).any(1)
    after = {t for path in paths if chosen in path for t in path[path.index(chosen) :]}
    assert set(changed.nonzero().flatten().tolist()) == after
