"""Attention over packed groups, against one dense softmax with a mask written from the definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import masking_utils

from groupwise.model import attention as module
from groupwise.model.attention import ATTENTION, Lines, Scoring, SharedPrompts, Window, attention
from wording import raises

few = settings(max_examples=60)
H, K, D, V = 4, 2, 3, 5  # values are of another size
GROUPS = st.lists(st.tuples(st.integers(0, 6), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=4)


def unpacked(groups: list[tuple[int, list[int]]]) -> tuple[list[int], list[int], list[int]]:
    """Prompt lengths, completion lengths, the prompt of each completion."""
    prompts = [length for length, _ in groups]
    return prompts, [n for _, own in groups for n in own], [p for p, (_, own) in enumerate(groups) for _ in own]


def naive(query_SHD, key_SKD, value_SKD, groups, scoring: Scoring):
    """Each token by itself: the keys that it may see, by group, line and position."""
    prompts, completions, owner = unpacked(groups)
    places = [(p, None, i) for p, n in enumerate(prompts) for i in range(n)]  # (group, line, position)
    places += [
        (p, b, prompts[p] + i) for b, (n, p) in enumerate(zip(completions, owner, strict=True)) for i in range(n)
    ]
    key_SHD, value_SHD = (x.repeat_interleave(H // K, dim=1) for x in (key_SKD, value_SKD))
    out = []
    for s, (group, line, position) in enumerate(places):
        seen = [
            t
            for t, (g, b, i) in enumerate(places)
            if g == group and b in (None, line) and position - (scoring.window or 99) < i <= position
        ]
        scores = torch.einsum("hd,thd->ht", query_SHD[s], key_SHD[seen]) * scoring.scaling
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        if scoring.sinks is None:
            weights = scores.softmax(-1)
        else:
            weights = torch.cat([scores, scoring.sinks[:, None]], -1).softmax(-1)[:, :-1]
        out.append(torch.einsum("ht,thd->hd", weights, value_SHD[seen]))
    return torch.stack(out)


@few
@given(
    groups=GROUPS,
    window=st.sampled_from([None, 1, 3, 50]),
    softcap=st.sampled_from([None, 0.7]),
    sinks=st.booleans(),
    seed=st.integers(0, 99),
    fused_from=st.sampled_from([0, 256]),
)
def test_equals_a_dense_softmax(groups, window, softcap, sinks: bool, seed: int, fused_from: int):
    """Values and gradients, whatever the lengths: empty prompts, empty completions, groups without completions."""
    prompts, completions, owner = unpacked(groups)
    S = sum(prompts) + sum(completions)
    if not S:
        return
    g = torch.Generator().manual_seed(seed)
    shapes = [(S, H, D), (S, K, D), (S, K, V), (H,)]
    *inputs, sink_H = (torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True) for shape in shapes)
    scoring = Scoring(0.6, window, softcap, sink_H if sinks else None)
    before, module.CPU_FUSED_FROM = module.CPU_FUSED_FROM, fused_from
    try:
        got = SharedPrompts(prompts, completions, owner).attend(0, *inputs, scoring)
    finally:
        module.CPU_FUSED_FROM = before
    want = naive(*inputs, groups, scoring)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    slope = torch.randn(S, H, V, generator=g, dtype=torch.float64)
    inputs += [sink_H] * sinks
    for mine, theirs in zip(
        torch.autograd.grad((got * slope).sum(), inputs), torch.autograd.grad((want * slope).sum(), inputs), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@few
@given(groups=GROUPS, seed=st.integers(0, 99))
def test_large_scores_do_not_overflow(groups, seed: int):
    prompts, completions, owner = unpacked(groups)
    S = sum(prompts) + sum(completions)
    if S:
        g = torch.Generator().manual_seed(seed)
        inputs = [300 * torch.randn(S, heads, D, generator=g) for heads in (H, K, K)]
        out = SharedPrompts(prompts, completions, owner).attend(0, *inputs, Scoring(1.0))
        torch.testing.assert_close(out, naive(*inputs, groups, Scoring(1.0)), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("grad", [True, False])
def test_16_bits_are_close(grad: bool):
    """Scores and softmax are float32: the error is that of rounding the inputs and the output."""
    groups = [(20, [30, 9]), (7, [12])]
    prompts, completions, owner = unpacked(groups)
    g = torch.Generator().manual_seed(0)
    exact = [torch.randn(78, heads, D, generator=g, dtype=torch.bfloat16).double() for heads in (H, K, K)]
    with torch.set_grad_enabled(grad):
        out = SharedPrompts(prompts, completions, owner).attend(0, *(x.bfloat16() for x in exact), Scoring(1.0))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), naive(*exact, groups, Scoring(1.0)), rtol=0.02, atol=0.02)


def test_the_worked_example():
    layout = SharedPrompts([3, 2], [2, 1, 2], [0, 0, 1])
    assert (layout.P, layout.G, layout.L, layout.C, layout.split) == (2, 2, 3, 2, 5)
    a, b, c = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).view(5, 1, 1).expand(-1, 2, 1).split([2, 1, 2])
    placed = layout.completions.place(torch.cat([a, b, c]), 1, scale=10.0)
    assert placed[:, 0, :, 0, :, 0].tolist() == [[[10, 20], [30, 10]], [[40, 50], [10, 10]]]  # empty: the first token
    assert layout.completions.collect(placed).equal(10 * torch.cat([a, b, c]))


class Largest(TorchDispatchMode):
    """How many elements the largest tensor had that was made within."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in tree_leaves(made) if isinstance(x, torch.Tensor))])
        return made


def test_a_layout_grows_with_tokens_and_not_with_pairs():
    """Where torch's kernel attends, as it does for all long lines on a GPU, nothing else is made of pairs either."""
    with Largest() as made:
        SharedPrompts([9_000, 30_000], [40_000, 64_000], [0, 1])
    assert made.elements == 2 * 64_000
    for lengths in (([3_000],), ([0], [3_000], [0])):
        with Largest() as made, torch.no_grad():
            SharedPrompts(*lengths).attend(0, *(torch.ones(3_000, heads, D) for heads in (H, K, K)), Scoring(1.0))
        assert made.elements <= 3_000 * H * max(D, 64), lengths  # which the kernel may pad


@pytest.mark.parametrize("lengths", [[2, 1, 0, 3], [2, 2, 2, 2]])
def test_what_is_placed_and_collected_is_the_same(lengths: list[int]):
    lines = Lines(lengths, [(0, 0), (0, 1), (1, 0), (2, 0)], 3, device="cpu")
    x = torch.randn(sum(lengths), H, D, dtype=torch.float64, requires_grad=True)
    placed = lines.place(x, K)
    assert placed.shape == (3, K, 2, H // K, max(lengths), D)
    assert placed[0, 1, 1, :, 0].equal(x[lengths[0]].view(K, -1, D)[1])  # a token's heads, group by group
    assert lines.collect(placed).equal(x)
    weight = torch.randn(placed.shape, dtype=torch.float64)
    (lines.collect(placed * weight) ** 2).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach() * lines.collect(weight) ** 2)


def test_what_the_model_passes_on():
    layer, row = torch.nn.Module(), torch.randn(1, H, 5, D)
    layer.layer_idx = 0
    key = torch.randn(1, K, 5, D)
    layout = SharedPrompts([5])
    out, weights = attention(layer, row, key, key, None, layout=layout)
    assert out.shape == (1, 5, H, D) and weights is None
    same, _ = attention(layer, row, key, key, None, layout=layout, scaling=D**-0.5)
    assert torch.equal(out, same)
    with raises(ValueError):
        attention(layer, row, key, key, None)
    narrow, _ = attention(layer, row, key, key, Window(2), layout=layout, sliding_window=2, position_ids=row)
    assert torch.equal(narrow[:, :2], out[:, :2]) and not torch.allclose(narrow[:, 2:], out[:, 2:])
    unnamed, _ = attention(layer, row, key, key, Window(2), layout=layout)  # Qwen2-MoE names it in its mask alone
    assert torch.equal(unnamed, narrow)


@pytest.mark.parametrize(
    "options",
    [
        {"attention_mask": torch.zeros(1, 1, 5, 5)},
        {"sliding_window": 3},
        {"sliding_window": 3, "attention_mask": Window(2)},
        {"is_causal": False},
        {"dropout": 0.1},
        {"position_bias": torch.zeros(1, H, 5, 5)},
        {"head_mask": torch.zeros(H)},
        {"something_new": 1},
    ],
)
def test_what_a_layout_does_not_compute_is_refused(options: dict):
    layer, key = torch.nn.Module(), torch.randn(1, K, 5, D)
    layer.layer_idx = 0
    given = {"key": key, "value": key, "attention_mask": None, "layout": SharedPrompts([5]), **options}
    with raises(NotImplementedError):
        attention(layer, torch.randn(1, H, 5, D), **given)


class Config:
    """What transformers' functions look at."""

    _attn_implementation, sliding_window, attention_chunk_size, is_causal = ATTENTION, 7, 4, True


def test_masks_as_transformers_asks_for_them():
    """By its own functions, packed positions or not."""
    for positions in (torch.arange(6)[None], torch.tensor([[0, 1, 2, 0, 1, 2]])):
        rest = {"inputs_embeds": torch.zeros(1, 6, 8), "attention_mask": None, "past_key_values": None}
        rest |= {"config": Config(), "position_ids": positions}
        assert masking_utils.create_causal_mask(**rest) is None
        assert masking_utils.create_causal_mask(**rest | {"attention_mask": torch.ones(1, 6)}) is None
        assert masking_utils.create_sliding_window_causal_mask(**rest) == Window(7)
        with raises(NotImplementedError):
            masking_utils.create_chunked_causal_mask(**rest)
        for changed in (
            {"attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]])},
            {"or_mask_function": lambda batch, head, query, key: key < 2},
        ):
            with raises(NotImplementedError):
                masking_utils.create_causal_mask(**rest | changed)
        both_ways = rest | {"config": type("Encoder", (Config,), {"is_causal": False})()}
        with raises(NotImplementedError):
            masking_utils.create_causal_mask(**both_ways)
