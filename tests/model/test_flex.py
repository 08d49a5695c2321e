"""FlexAttention over packed rows, against the layouts that it stands in for: the mask, the tiles, values, gradients.

There are no kernels on a CPU: the uncompiled function computes with the same rule, densely. It refuses gradients there,
though what it calls has them; `dense` lets it pass.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention as torch_flex

from forked_samples import forked_samples, lines
from groupwise.model import flex
from groupwise.model.attention import Scoring, SharedPrompts
from groupwise.model.flex import BLOCK, LEAST, Forest
from groupwise.model.layouts import FLEX
from groupwise.model.packing import micro_batches, pack, pack_tree
from groupwise.model.prefix_tree import PrefixTree
from groupwise.types import Sample

few = settings(max_examples=60)
slow = settings(few, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
H, K, D, V = 4, 2, 3, 5  # values are of another size
RAGGED = ([5, 0, 9, 3], [4, 1, 6, 5, 3, 2, 0, 7], [0, 0, 0, 1, 1, 2, 2, 3])  # an empty prompt, an empty completion
LONG = ([130, 60, 0, 20], [90, 100, 7, 0, 70, 13], [0, 0, 1, 1, 2, 3])  # four tiles a side
GROUPS = st.lists(st.tuples(st.integers(0, 6), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=4)
WINDOWS = st.sampled_from([None, 1, 3, 50])
SCORINGS = {
    "plain": Scoring(0.6),
    "window": Scoring(0.6, 4),
    "softcap": Scoring(0.6, None, 0.7),
    "both": Scoring(0.6, 50, 2.0),
    "sinks": Scoring(0.6, 4, None, torch.tensor([0.3, -1.0, 2.0, 0.0])),
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # dynamo looks at it
]


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *inputs: None)


def seen_in_groups(prompts, completions, owners, window: int | None) -> torch.Tensor:
    """[S, S], who may look at whom by group, line and position."""
    places = [(p, None, i) for p, n in enumerate(prompts) for i in range(n)]  # (group, line, position)
    for b, (n, p) in enumerate(zip(completions, owners, strict=True)):
        places += [(p, b, prompts[p] + i) for i in range(n)]
    seen = torch.zeros(len(places), len(places), dtype=torch.bool)
    for s, (group, line, at) in enumerate(places):
        for t, (g, b, i) in enumerate(places):
            seen[s, t] = g == group and b in (None, line) and at - (window or at + 1) < i <= at
    return seen


def seen_in_tree(paths: list[list[int]], window: int | None) -> torch.Tensor:
    """[S, S], what stands before each token in its path."""
    S = 1 + max((token for path in paths for token in path), default=-1)
    seen = torch.zeros(S, S, dtype=torch.bool)
    for path in paths:
        for at, token in enumerate(path):
            seen[token, path[max(0, at + 1 - (window or at + 1)) : at + 1]] = True
    return seen


def rule_of(forest: Forest, window: int | None) -> torch.Tensor:
    """[T, T], by the rule that the kernels are given."""
    at = torch.arange(forest.T)
    return forest.blocks(window).mask_mod(torch.tensor(0), torch.tensor(0), at[:, None], at)


def inputs_of(S: int, *, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(S)
    shapes = ((H, D), (K, D), (K, V))
    return [torch.randn(S, *shape, generator=g, dtype=dtype, requires_grad=True) for shape in shapes]


def assert_alike(forest: Forest, other: SharedPrompts | PrefixTree, scoring: Scoring, *, dtype=torch.float64) -> None:
    """Outputs, and the gradients of queries, keys and values."""
    inputs = inputs_of(forest.S, dtype=dtype)
    exact = dtype == torch.float64
    slope = torch.randn(forest.S, H, V, generator=torch.Generator().manual_seed(0), dtype=dtype)
    got, want = (layout.attend(0, *inputs, scoring) for layout in (forest, other))
    torch.testing.assert_close(got, want, rtol=1e-10 if exact else 1e-5, atol=1e-12 if exact else 1e-5)
    grads = (torch.autograd.grad(out, inputs, slope) for out in (got, want))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9 if exact else 1e-4, atol=1e-11 if exact else 1e-5)


# ---- who may look at whom ----


def test_the_worked_example():
    groups = Forest.of_groups([3, 2], [2, 1, 2], [0, 0, 1])
    assert groups._enter_T[:10].tolist() == [0, 1, 2, 6, 7, 3, 4, 5, 8, 9]
    assert groups._leave_T[:10].tolist() == [6, 6, 6, 10, 10, 5, 5, 6, 10, 10]
    assert groups._position_T[:10].tolist() == [0, 1, 2, 0, 1, 3, 4, 3, 2, 3]
    tree = Forest.of_tree([[0, 1, 2, 3], [0, 1, 4, 5]], [4, 2])
    assert (tree._enter_T[:6].tolist(), tree._leave_T[:6].tolist()) == ([*range(6)], [6, 6, 4, 4, 6, 6])
    assert tree._position_T[:6].tolist() == [0, 1, 2, 3, 2, 3]


@few
@given(groups=GROUPS, window=WINDOWS)
def test_the_rule_of_groups(groups, window: int | None):
    """Whatever the lengths: empty prompts, empty completions, groups without completions; padding sees itself."""
    prompts = [length for length, _ in groups]
    completions = [n for _, own in groups for n in own]
    owners = [p for p, (_, own) in enumerate(groups) for _ in own]
    forest = Forest.of_groups(prompts, completions, owners)
    seen = rule_of(forest, window)
    assert seen[: forest.S, : forest.S].equal(seen_in_groups(prompts, completions, owners, window))
    assert seen[forest.S :, forest.S :].equal(torch.eye(forest.T - forest.S, dtype=torch.bool))
    assert not seen[: forest.S, forest.S :].any() and not seen[forest.S :, : forest.S].any()


@few
@given(samples=forked_samples(), window=WINDOWS)
def test_the_rule_of_trees(samples: list[Sample], window: int | None):
    paths, own = lines(samples)
    forest = Forest.of_tree(paths, own)
    assert rule_of(forest, window)[: forest.S, : forest.S].equal(seen_in_tree(paths, window))


@pytest.mark.parametrize("window", [None, 4, 200])
def test_tiles_are_those_that_the_rule_makes(window: int | None):
    """Those with a visible pair are computed, those that are visible whole not masked; as torch finds out itself."""
    forest = Forest.of_groups(*LONG)
    mask = forest.blocks(window)
    assert mask is forest.blocks(window) and mask.shape == (1, 1, forest.T, forest.T)
    counts = rule_of(forest, window).view(forest.T // BLOCK, BLOCK, -1, BLOCK).sum((1, 3))
    assert mask.to_dense()[0, 0].bool().equal(counts > 0)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_num_blocks[0, 0].tolist() == (counts == BLOCK**2).sum(1).tolist()
    assert bool((counts == BLOCK**2).any()) is (window is None) and not (counts > 0).all()
    whole = torch_flex.create_block_mask(mask.mask_mod, 1, 1, forest.T, forest.T, device="cpu", BLOCK_SIZE=BLOCK)
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks", "kv_indices"):
        assert getattr(mask, name).equal(getattr(whole, name)), name


def test_rows_are_padded_to_whole_tiles():
    assert [Forest.of_groups([n]).T for n in (0, 1, LEAST, LEAST + 1)] == [LEAST, LEAST, LEAST, LEAST + BLOCK]


# ---- the same attention ----


@pytest.mark.usefixtures("dense")
@pytest.mark.parametrize(("lengths", "kind"), [*((RAGGED, kind) for kind in SCORINGS), (LONG, "plain"), (LONG, "both")])
def test_groups_are_as_shared_prompts_have_them(lengths, kind: str):
    assert_alike(Forest.of_groups(*lengths), SharedPrompts(*lengths), SCORINGS[kind])


@pytest.mark.usefixtures("dense")
@slow
@given(samples=forked_samples(longest=40), kind=st.sampled_from(list(SCORINGS)))
def test_trees_are_as_prefix_trees_have_them(samples: list[Sample], kind: str):
    paths, own = lines(samples)
    if sum(own):
        assert_alike(Forest.of_tree(paths, own), PrefixTree(paths, own), SCORINGS[kind])


@pytest.mark.usefixtures("dense")
def test_a_tree_of_depth_three():
    """Lines that fork off lines that fork off a line, over several tiles."""
    trunk = list(range(200))
    paths = [
        trunk,
        [*trunk[:150], *range(200, 260)],
        [*trunk[:150], *range(200, 240), *range(260, 300)],
        [*trunk[:30], *range(300, 345)],
    ]
    own = [200, 60, 40, 45]
    assert_alike(Forest.of_tree(paths, own), PrefixTree(paths, own), SCORINGS["plain"])
    assert_alike(Forest.of_tree(paths, own), PrefixTree(paths, own), SCORINGS["both"])


@pytest.mark.usefixtures("dense")
def test_in_float32():
    assert_alike(Forest.of_groups(*LONG), SharedPrompts(*LONG), SCORINGS["plain"], dtype=torch.float32)
    assert_alike(Forest.of_groups(*RAGGED), SharedPrompts(*RAGGED), SCORINGS["both"], dtype=torch.float32)


def test_queries_and_keys_in_another_type():
    """Autocast rotates in float32 and projects in 16 bits."""
    query, key, value = (x.detach() for x in inputs_of(25, dtype=torch.float32))
    lengths = ([5, 8], [4, 8], [0, 1])
    got, want = (
        make(*lengths).attend(0, query, key, value.bfloat16(), Scoring(0.6))
        for make in (Forest.of_groups, SharedPrompts)
    )
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want.float(), rtol=0.02, atol=0.02)


@pytest.mark.slow
@pytest.mark.usefixtures("dense")
def test_kernels_for_rows_of_any_length_are_compiled_twice(monkeypatch: pytest.MonkeyPatch):
    """Once for the first length and once for the others, whatever is in the rows, whatever the window; once more
    without gradients, and for another softcap. torch gives up at the eighth."""
    counter = CompileCounter()  # a backend that compiles nothing
    compiled = torch.compile(torch_flex.flex_attention, backend=counter)
    monkeypatch.setattr(flex, "_kernel", lambda device: compiled)

    def run(n: int, window: int | None, *, softcap: float | None = None, grad: bool = True) -> int:
        forest = Forest.of_groups([n, n // 2], [n // 3, n // 4, n], [0, 0, 1])
        with torch.set_grad_enabled(grad):
            out = forest.attend(0, *inputs_of(forest.S), Scoring(0.6, window, softcap))
        if grad:
            out.sum().backward()
        return counter.frame_count

    torch._dynamo.reset()
    assert run(90, None) == 1
    assert [run(200, None), run(250, 7), run(150, 9), run(400, None), run(90, 4), run(310, 4)] == [2] * 6
    assert [run(n, None, grad=False) for n in (120, 300, 90)] == [3] * 3
    assert [run(120, 5, softcap=2.0), run(300, 5, softcap=2.0), run(90, None, softcap=0.7)] == [4] * 3


# ---- micro-batches ----


def test_micro_batches_are_the_same_but_for_their_layouts(make_samples):
    forked = [
        Sample(prompt_ids=(*range(60), *range(at)), completion_ids=(7, at), mask=(1, 1), advantage=1.0)
        for at in (0, 20, 40)
    ]
    samples = [*make_samples([(5, (4, 1, 6)), (0, (5, 3)), (9, (2,))]), *forked]
    merged, others = (list(micro_batches(samples, token_budget=1000, **more)) for more in ({}, {"layouts": FLEX}))
    assert [type(batch.layout) for batch in merged] == [SharedPrompts, PrefixTree]
    assert [type(batch.layout) for batch in others] == [Forest, Forest]
    for one, other in zip(merged, others, strict=True):
        assert one.rows == other.rows
        assert one.input_ids_S.equal(other.input_ids_S) and one.source_N.equal(other.source_N)
        assert isinstance(other.layout, Forest)
        assert other.layout._position_T[: other.layout.S].tolist() == other.positions_S.tolist()
    for batch in (
        pack(samples, [[0, 1]], device="cpu", layouts=FLEX),
        pack_tree(forked, [0], device="cpu", layouts=FLEX),
    ):
        assert isinstance(batch.layout, Forest)
