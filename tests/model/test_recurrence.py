"""Convolutions and recurrences over packed rows, against each row of tokens by itself from its first token on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forked_samples import forked_samples, lines
from groupwise.engine.kv_cache import Extend, Grid, KeyValueCache, Prefill
from groupwise.model import recurrence as module
from groupwise.model.attention import SharedPrompts
from groupwise.model.flex import Forest
from groupwise.model.load import share_weights
from groupwise.model.prefix_tree import PrefixTree
from groupwise.model.recurrence import PackedSegment, Segments, segments_of_groups, segments_of_tree
from groupwise.model.recurrent_layers import is_recurrent
from wording import raises

few = settings(max_examples=60)
C, W = 3, 4
GROUPS = st.lists(st.tuples(st.integers(0, 6), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=4)


def rule(inputs: Sequence[Tensor], before: Tensor | None) -> tuple[Tensor, Tensor]:
    """state <- decay * state + x, of which the sine is the output; where decay is 1 and x is 0 it stays."""
    x_BTC, decay_BT = inputs
    state, outputs = torch.zeros_like(x_BTC[:, 0]) if before is None else before, []
    for t in range(x_BTC.shape[1]):
        state = decay_BT[:, t, None] * state + x_BTC[:, t]
        outputs.append(state.sin())
    return torch.stack(outputs, 1), state


def naive(x_SC: Tensor, decay_S: Tensor, weight_CW: Tensor, paths: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Both kinds, path by path; a token that stands in several has the same in each."""
    convolved, recurred = {}, {}
    for path in paths:
        x_TC = torch.cat([torch.zeros(W - 1, C, dtype=x_SC.dtype), x_SC[list(path)]])
        state = torch.zeros(C, dtype=x_SC.dtype)
        for t, token in enumerate(path):
            convolved[token] = (x_TC[t : t + W].T * weight_CW).sum(-1)
            state = decay_S[token] * state + x_SC[token]
            recurred[token] = state.sin()
    return tuple(torch.stack([out[token] for token in range(len(x_SC))]) for out in (convolved, recurred))  # type: ignore[return-value]


def paths_of_groups(prompts: list[int], completions: list[int], owners: list[int]) -> list[list[int]]:
    starts = [sum(prompts[:p]) for p in range(len(prompts))]
    paths = [list(range(start, start + n)) for start, n in zip(starts, prompts, strict=True)]
    at = sum(prompts)
    for n, owner in zip(completions, owners, strict=True):
        paths.append([*paths[owner], *range(at, at + n)])
        at += n
    return paths


def assert_right(states, S: int, paths: Sequence[Sequence[int]], seed: int) -> None:
    """Values and gradients of inputs and weights."""
    g = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True) for shape in ((S, C), (C, W)))
    decay = torch.rand(S, generator=g, dtype=torch.float64, requires_grad=True)
    got = states.convolve(0, x, weight), states.recur(0, rule, (x, decay), (0.0, 1.0))
    want = naive(x, decay, weight, paths)
    slopes = [torch.randn(S, C, generator=g, dtype=torch.float64) for _ in range(2)]
    for mine, theirs, slope in zip(got, want, slopes, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
        inputs = [x, weight] if mine is got[0] else [x, decay]
        grads = (torch.autograd.grad((out * slope).sum(), inputs) for out in (mine, theirs))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@few
@given(groups=GROUPS, chunk=st.sampled_from([1, 2, 64]), seed=st.integers(0, 99))
def test_groups(groups, chunk: int, seed: int):
    """Whatever the lengths: empty prompts, empty completions, prompts shorter than a convolution."""
    prompts = [length for length, _ in groups]
    completions = [n for _, own in groups for n in own]
    owners = [p for p, (_, own) in enumerate(groups) for _ in own]
    S, paths = sum(prompts) + sum(completions), paths_of_groups(prompts, completions, owners)
    if not S:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)
        for layout in (SharedPrompts(prompts, completions, owners), Forest.of_groups(prompts, completions, owners)):
            assert_right(layout.states, S, paths, seed)


@few
@given(samples=forked_samples(), chunk=st.sampled_from([1, 64]), seed=st.integers(0, 99))
def test_trees(samples, chunk: int, seed: int):
    paths, own = lines(samples)
    if not sum(own):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)
        for layout in (PrefixTree(paths, own), Forest.of_tree(paths, own)):
            assert_right(layout.states, sum(own), paths, seed)


def test_the_worked_examples():
    a, b = PackedSegment(0, 3, None), PackedSegment(3, 2, None)
    groups = segments_of_groups([3, 2], [2, 1, 2], [0, 0, 1])
    assert groups == [a, b, PackedSegment(5, 2, 0), PackedSegment(7, 1, 0), PackedSegment(8, 2, 1)]
    tree = segments_of_tree([[0, 1, 2, 3], [0, 1, 4, 5]], [4, 2])
    assert tree == [PackedSegment(0, 2, None), PackedSegment(2, 2, 0), PackedSegment(4, 2, 0)]


def test_segments_of_like_lengths_are_one_batch_and_each_level_waits_for_its_parents():
    seen = []

    def watched(inputs, before):
        seen.append((tuple(inputs[0].shape[:2]), before is None))
        return rule(inputs, before)

    states = Segments(lambda: segments_of_groups([10, 100, 12], [5, 90, 7, 64], [0, 0, 1, 2]))
    x = torch.randn(288, C)
    states.recur(0, watched, (x, torch.ones(288)), (0.0, 1.0))
    assert seen == [((2, 12), True), ((1, 100), True), ((3, 64), False), ((1, 90), False)]


def test_decoding_goes_on_from_the_prompts_states():
    """Prompts into slots, rows from them, token by token; rows move as others finish."""
    prompts, g = [5, 1, 3], torch.Generator().manual_seed(0)
    cache = KeyValueCache(8)
    slots, device = cache.add_prompts(prompts), torch.device("cpu")
    weight = torch.randn(C, W, generator=g, dtype=torch.float64)
    said = {p: [torch.randn(C, generator=g, dtype=torch.float64) for _ in range(n)] for p, n in enumerate(prompts)}

    def run(states, new: list[Tensor]) -> tuple[Tensor, Tensor]:
        x = torch.stack(new)
        decay = torch.sigmoid(x[:, 0])
        return states.convolve(1, x, weight), states.recur(1, rule, (x, decay), (0.0, 1.0))

    def check(found: tuple[Tensor, Tensor], histories: list[list[Tensor]]) -> None:
        for b, history in enumerate(histories):
            x = torch.stack(history)
            want = naive(x, torch.sigmoid(x[:, 0]), weight, [range(len(x))])
            for mine, theirs in zip(found, want, strict=True):
                torch.testing.assert_close(mine[b], theirs[-1])

    found = run(Prefill(cache, slots, device).states, [x for own in said.values() for x in own])
    check(tuple(x[[4, 5, 8]] for x in found), list(said.values()))  # type: ignore[arg-type]
    owners = [0, 0, 1, 2, 2]
    rows = [list(said[p]) for p in owners]
    cache.rows.reserve(len(rows), 1)
    cache.begin(slice(0, len(rows)), owners)
    for step in range(6):
        if step == 2:  # the second is finished: the last takes its place
            cache.rows.move(4, 1, 2)
            rows, owners = [rows[0], rows[4], rows[2], rows[3]], [0, 2, 1, 2]
        if step == 3:
            cache.sort(torch.tensor([3, 1, 0, 2]), 3)
            rows, owners = [rows[i] for i in (3, 1, 0, 2)], [2, 2, 0, 1]
        if step == 4:  # another comes, of a prompt that is there still
            cache.rows.reserve(5, 4)
            cache.begin(slice(4, 5), [1])
            rows, owners = [*rows, list(said[1])], [*owners, 1]
        for row in rows:
            row.append(torch.randn(C, generator=g, dtype=torch.float64))
        grid = Grid(owners, [prompts[p] for p in owners], cache.lengths, device)
        layout = Extend(cache, grid, slice(0, len(rows)), np.full(len(rows), step))
        check(run(layout.states, [row[-1] for row in rows]), rows)
    grid = Grid(owners, [prompts[p] for p in owners], cache.lengths, device)
    with raises(NotImplementedError):
        _ = Extend(cache, grid, slice(0, 5), np.full(5, 6), [2] * 5).states


def test_which_models_are_recurrent(make_base):
    assert [is_recurrent(share_weights(make_base(f).model)) for f in ("qwen3", "lfm2", "qwen3_next")] == [0, 1, 1]
    assert not is_recurrent(make_base("lfm2").model)
