"""Samples -> packed micro-batches: the worked examples, the budget, groups together, nothing lost, nothing twice."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from forked_samples import distinct_tokens, forked_samples
from groupwise.model.attention import SharedPrompts
from groupwise.model.packing import (
    MAX_PADDING,
    MicroBatch,
    Padded,
    count_loss_tokens,
    micro_batches,
    pack,
    pack_tree,
    pad,
    padded_batches,
)
from groupwise.model.prefix_tree import PrefixTree
from groupwise.types import Sample

few = settings(max_examples=80)
EXAMPLE = [
    Sample(prompt_ids=(5, 6), completion_ids=(7, 2), mask=(1, 1), advantage=1.0, behaviour_logprobs=(-1.0, -2.0)),
    Sample(prompt_ids=(5, 6), completion_ids=(3,), mask=(1,), advantage=-1.0, behaviour_logprobs=(-3.0,)),
    Sample(
        prompt_ids=(8,),
        completion_ids=(9, 4, 2),
        mask=(1, 0, 1),
        advantage=0.5,
        behaviour_logprobs=(-4.0, -5.0, -6.0),
        weights=(1.0, 9.0, 2.0),
    ),
]


@st.composite
def batches_of_samples(draw) -> list[Sample]:
    samples = []
    for prompt in draw(st.lists(st.integers(0, 9), max_size=6)):
        for n in draw(st.lists(st.integers(0, 7), min_size=1, max_size=5)):
            mask = [draw(st.integers(0, 1)) for _ in range(n)]
            if not prompt and n:
                mask[0] = 0
            samples.append(Sample(prompt_ids=(prompt,) * prompt, completion_ids=tuple(range(n)), mask=tuple(mask)))
    return samples


def test_the_worked_example():
    batch = pack(EXAMPLE, [[0, 1], [2]], device="cpu")
    assert batch.input_ids_S.tolist() == [5, 6, 8, 7, 2, 3, 9, 4, 2]
    assert batch.positions_S.tolist() == [0, 1, 0, 2, 3, 2, 1, 2, 3]
    assert batch.source_N.tolist() == [1, 3, 1, 2, 7]
    assert batch.target_N.tolist() == [7, 2, 3, 9, 2]
    assert batch.row_N.tolist() == [0, 0, 1, 2, 2]
    assert batch.advantages_N.tolist() == [1.0, 1.0, -1.0, 0.5, 1.0]
    assert batch.behaviour_N is not None and batch.behaviour_N.tolist() == [-1.0, -2.0, -3.0, -4.0, -6.0]
    assert count_loss_tokens(EXAMPLE) == 5


def test_behaviour_is_none_unless_all_have_it():
    plain = Sample(prompt_ids=(8,), completion_ids=(9,), mask=(1,))
    assert pack([EXAMPLE[0], plain], [[0], [1]], device="cpu").behaviour_N is None


# ---- padded rows ----


def test_the_worked_example_in_padded_rows():
    batch = pad(EXAMPLE, [0, 1, 2], device="cpu")
    assert batch.layout == Padded(4)
    assert batch.input_ids_S.tolist() == [5, 6, 7, 2, 5, 6, 3, 0, 8, 9, 4, 2]
    assert batch.positions_S.tolist() == [0, 1, 2, 3] * 3
    assert batch.source_N.tolist() == [1, 2, 5, 8, 10]
    assert batch.target_N.tolist() == [7, 2, 3, 9, 2]
    assert batch.row_N.tolist() == [0, 0, 1, 2, 2]


@few
@given(samples=batches_of_samples(), budget=st.integers(1, 60))
def test_padded_batches(samples: list[Sample], budget: int):
    """Every row once, the padding within the budget, and each loss token predicted by the token before it."""
    batches = list(padded_batches(samples, token_budget=budget))
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(samples)))
    for batch in batches:
        assert isinstance(batch.layout, Padded)
        width, ids = batch.layout.width, batch.input_ids_S.tolist()
        assert len(ids) == width * len(batch.rows) and (len(ids) <= budget or len(batch.rows) == 1)
        tokens = iter(zip(batch.source_N.tolist(), batch.target_N.tolist(), batch.row_N.tolist(), strict=True))
        for b, row in enumerate(batch.rows):
            sample = samples[row]
            assert batch.samples[b] is sample
            whole = [*sample.prompt_ids, *sample.completion_ids]
            assert ids[b * width :][: len(whole)] == whole
            for t, trained in enumerate(sample.mask):
                if trained:
                    at = b * width + len(sample.prompt_ids) + t
                    assert next(tokens) == (at - 1, ids[at], b)
        assert next(tokens, None) is None


def test_a_shared_prompt_counts_in_every_padded_row():
    """32 completions of 2 tokens with a prompt of 100: 164 packed tokens, 3,264 padded ones."""
    samples = [Sample(prompt_ids=(5,) * 100, completion_ids=(6, 7), mask=(1, 1)) for _ in range(32)]
    assert len(list(micro_batches(samples, token_budget=300))) == 1
    sizes = [len(batch.input_ids_S) for batch in padded_batches(samples, token_budget=300)]
    assert sizes == [204] * 16


@few
@given(samples=batches_of_samples(), budget=st.integers(1, 60))
def test_micro_batches(samples: list[Sample], budget: int):
    batches = list(micro_batches(samples, token_budget=budget))
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(samples)))
    for batch in batches:
        assert [samples[row] for row in batch.rows] == list(batch.samples)
        layout = batch.layout
        if len(batch.rows) > 1:
            assert len(batch.input_ids_S) <= budget
        if layout.P > 1:
            assert MAX_PADDING * budget >= layout.P * (layout.L + layout.G * layout.C)
        rebuilt = [
            (sample.prompt_ids + sample.completion_ids)[len(sample.prompt_ids) + t]
            for sample in batch.samples
            for t, trained in enumerate(sample.mask)
            if trained
        ]
        assert batch.target_N.tolist() == rebuilt
        assert bool((batch.positions_S[batch.source_N] >= 0).all())
    assert sum(len(batch.target_N) for batch in batches) == count_loss_tokens(samples)


@few
@given(samples=batches_of_samples(), budget=st.integers(20, 60))
def test_groups_that_fit_stay_together(samples: list[Sample], budget: int):
    home = {row: i for i, batch in enumerate(micro_batches(samples, token_budget=budget)) for row in batch.rows}
    start = 0
    for end in range(1, len(samples) + 1):
        if end == len(samples) or samples[end].prompt_ids != samples[start].prompt_ids:
            group = samples[start:end]
            if len(group[0].prompt_ids) + sum(len(s.completion_ids) for s in group) <= budget:
                assert len({home[row] for row in range(start, end)}) == 1
            start = end


@few
@given(samples=batches_of_samples())
def test_the_source_is_the_token_before(samples: list[Sample]):
    """The packed token at `source` is the one that stands before the target in the sample's own row."""
    for batch in micro_batches(samples, token_budget=30):
        before = [
            (*s.prompt_ids, *s.completion_ids)[len(s.prompt_ids) + t - 1]
            for s in batch.samples
            for t, trained in enumerate(s.mask)
            if trained
        ]
        assert batch.input_ids_S[batch.source_N].tolist() == before


def test_a_long_prompt_is_kept_from_short_ones():
    """Attention pads to the longest prompt: one of 200 tokens among twenty of 2 would cost 21 x 200."""
    samples = [Sample(prompt_ids=(i, i), completion_ids=(1,), mask=(1,)) for i in range(20)]
    samples.append(Sample(prompt_ids=(3,) * 200, completion_ids=(1,), mask=(1,)))
    sizes = [batch.layout.P for batch in micro_batches(samples, token_budget=300)]
    assert sizes == [20, 1]


# ---- prefix trees ----


def assert_rows(batch: MicroBatch, samples: list[Sample]) -> None:
    """Every loss token of every row once, in order, each predicted by the token before it, at its place."""
    expected = [
        (
            b,
            s.completion_ids[t],
            (s.prompt_ids + s.completion_ids)[len(s.prompt_ids) + t - 1],
            len(s.prompt_ids) + t - 1,
        )
        for b, s in enumerate(samples[row] for row in batch.rows)
        for t, trained in enumerate(s.mask)
        if trained
    ]
    before, at = batch.input_ids_S[batch.source_N].tolist(), batch.positions_S[batch.source_N].tolist()
    assert list(zip(batch.row_N.tolist(), batch.target_N.tolist(), before, at, strict=True)) == expected


def test_the_worked_example_of_a_tree():
    third = Sample(prompt_ids=(5, 6, 7, 4), completion_ids=(9,), mask=(1,))
    batch = pack_tree([*EXAMPLE[:2], third], [0, 1, 2], device="cpu")
    assert batch.input_ids_S.tolist() == [5, 6, 3, 7, 2, 4, 9]
    assert batch.positions_S.tolist() == [0, 1, 2, 2, 3, 3, 4]
    assert batch.source_N.tolist() == [1, 3, 1, 5]
    assert batch.target_N.tolist() == [7, 2, 3, 9]
    assert batch.row_N.tolist() == [0, 0, 1, 2]


@few
@given(samples=forked_samples())
def test_a_packed_tree_has_each_token_once(samples: list[Sample]):
    batch = pack_tree(samples, range(len(samples)), device="cpu")
    assert len(batch.input_ids_S) == len(batch.positions_S) == distinct_tokens(samples)
    assert batch.samples == tuple(samples)
    assert_rows(batch, samples)


def forks_of(prompt: tuple[int, ...], seed: int, count: int) -> list[Sample]:
    """Each continues a longer part of one history."""
    history = tuple(seed + i for i in range(40 * count))
    cuts = [(*prompt, *history[: 40 * i]) for i in range(count)]
    return [
        Sample(prompt_ids=cut, completion_ids=(seed - 1 - i,) * 30, mask=(1,) * 30, advantage=float(i))
        for i, cut in enumerate(cuts)
    ]


def test_trees_and_groups_beside_one_another():
    """Two groups of forks, one of equal prompts between them: trees are packed as trees, the group as ever."""
    plain = [Sample(prompt_ids=(7,) * 50, completion_ids=(i,) * 20, mask=(1,) * 20) for i in range(4)]
    samples = [*forks_of((1,) * 30, 1000, 4), *plain, *forks_of((2,) * 30, 2000, 4)]
    batches = list(micro_batches(samples, token_budget=1000))
    assert [type(batch.layout) for batch in batches] == [SharedPrompts, PrefixTree]
    assert [batch.rows for batch in batches] == [(4, 5, 6, 7), tuple(batches[1].rows)]
    assert len(batches[1].input_ids_S) == 2 * (30 + 3 * 40 + 4 * 30) == distinct_tokens(list(batches[1].samples))
    for batch in batches:
        assert_rows(batch, samples)
    (alone,) = micro_batches(plain, token_budget=1000)
    for name in ("input_ids_S", "positions_S", "source_N", "target_N", "row_N"):
        assert getattr(alone, name).equal(getattr(batches[0], name))


def test_a_tree_over_the_budget_is_cut():
    samples = [s for i in range(3) for s in forks_of((i,) * 30, 1000 * (i + 1), 4)]
    for budget in (1, 100, 150, 200, 300, 600, 900):
        batches = list(micro_batches(samples, token_budget=budget))
        assert sorted(row for batch in batches for row in batch.rows) == list(range(12))
        for batch in batches:
            assert_rows(batch, samples)
            assert len(batch.input_ids_S) == distinct_tokens(list(batch.samples))
            assert len(batch.input_ids_S) <= budget or len(batch.rows) == 1
    assert len(batches) == 1


@few
@given(samples=batches_of_samples(), budget=st.integers(1, 60))
def test_what_shares_only_prompts_never_leaves_the_fast_layout(samples: list[Sample], budget: int):
    assert all(isinstance(batch.layout, SharedPrompts) for batch in micro_batches(samples, token_budget=budget))
