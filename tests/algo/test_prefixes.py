"""Which samples share what: common prefixes, trees, groups, and where a tree is worth it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from forked_samples import distinct_tokens, forked_samples
from groupwise.algo.prefixes import common_prefix, cut, families, groups_of, tree_of, trees
from groupwise.types import Sample

few = settings(max_examples=80)


def sample(prompt: tuple[int, ...], completion: tuple[int, ...]) -> Sample:
    return Sample(prompt_ids=prompt, completion_ids=completion, mask=(1,) * len(completion))


def said(seed: int, n: int) -> tuple[int, ...]:
    """`n` tokens that begin like nobody else's."""
    return tuple(1000 * seed + i for i in range(n))


def episode(prompt: tuple[int, ...], seed: int, turns: int, *, tail: int = 0) -> list[Sample]:
    """Segments of an episode whose template rewrites each answer: 30 tokens thought, 20 kept, 10 answered by the
    world. The last `tail` tokens of a prompt are not there in the history."""
    samples, history = [], prompt
    for turn in range(turns):
        answer = said(seed + turn, 50)
        samples.append(sample(history, answer))
        kept = history[: len(history) - tail]
        history = (*kept, *answer[30:], *said(seed + turn + 500, 10), *prompt[len(prompt) - tail :])
    return samples


@few
@given(alike=st.integers(0, 300), first=st.integers(0, 80), second=st.integers(0, 80))
def test_a_long_common_prefix(alike: int, first: int, second: int):
    """However far it reaches beyond the stretches in which it is looked for."""
    shared = tuple(range(alike))
    assert common_prefix(shared + (-1,) * first, shared + (-2,) * second) == alike
    assert common_prefix(shared, shared + (-2,) * second) == common_prefix(shared, shared) == alike


@few
@given(samples=forked_samples())
def test_each_family_has_a_tree(samples: list[Sample]):
    every = list(families(samples))
    assert list(trees(samples)) == [tree_of(samples, rows) for rows, _ in every]
    assert all(tree is None or tree == tree_of(samples, rows) for rows, tree in every)


@few
@given(first=st.lists(st.integers(0, 1), max_size=9), second=st.lists(st.integers(0, 1), max_size=9))
def test_common_prefix(first: list[int], second: list[int]):
    expected = 0
    while expected < min(len(first), len(second)) and first[expected] == second[expected]:
        expected += 1
    assert common_prefix(tuple(first), tuple(second)) == expected


def test_the_worked_example():
    samples = [sample((5, 6, 9), ()), sample((5,), (6, 7, 8, 2)), sample((8, 9), ()), sample((5, 6), (7, 8))]
    tree = tree_of(samples, range(4))
    assert [(line.row, line.own) for line in tree] == [(3, 4), (1, 1), (0, 1), (2, 2)]


@few
@given(samples=forked_samples(), budget=st.integers(1, 40))
def test_a_tree_has_the_distinct_tokens(samples: list[Sample], budget: int):
    """Whole, and in each part that a budget cuts it into."""
    tree = tree_of(samples, range(len(samples)))
    assert sum(line.own for line in tree) == distinct_tokens(samples)
    parts = list(cut(tree, budget))
    assert sorted(row for rows, _ in parts for row in rows) == list(range(len(samples)))
    for rows, tokens in parts:
        assert tokens == distinct_tokens([samples[row] for row in rows])
        assert tokens <= budget or len(rows) == 1


@few
@given(samples=forked_samples())
def test_families_and_groups_are_all_rows_in_order(samples: list[Sample]):
    assert [row for rows, _ in families(samples) for row in rows] == list(range(len(samples)))
    assert [s for group in groups_of(samples) for s in group] == samples


def test_forked_histories_are_one_group_and_a_tree():
    """Two groups of three episodes with three segments each; their questions differ in the middle."""
    for tail in (0, 4):
        prompts = [(*said(9, 40), question, *said(8, 15)) for question in (1, 2)]
        samples = [
            s for g, p in enumerate(prompts) for e in range(3) for s in episode(p, 50 * g + 10 * e, 3, tail=tail)
        ]
        assert [len(group) for group in groups_of(samples)] == [9, 9]
        trees = [(rows, tree) for rows, tree in families(samples) if tree is not None]
        assert sorted(row for rows, _ in trees for row in rows) == list(range(18))


def test_prompts_that_only_begin_alike_are_groups_of_their_own():
    """A long system prompt is common to all: minibatches would have nothing left to shuffle if it made one group."""
    samples = [sample((*said(9, 200), q, q, *said(8, 6)), said(q, 30)) for q in range(5) for _ in range(4)]
    assert [len(group) for group in groups_of(samples)] == [4] * 5
    assert [len(rows) for rows, tree in families(samples) if tree] == [20]  # ... and yet computed once


def test_what_is_not_worth_a_tree():
    prompt = said(9, 60)
    little = [sample(prompt, (7, 7, 7, *said(i, 30))) for i in range(8)]  # completions begin alike by chance
    short = [sample(prompt, (3, 4, 5)) for _ in range(8)]  # equal, but hardly anything
    system = [sample((*said(9, 30), *said(i, 8)), said(i, 300)) for i in range(8)]  # a drop in the ocean
    alone = [sample(prompt, said(1, 30))]
    for samples in (little, short, system, alone):
        assert all(tree is None for _, tree in families(samples))
    equal = [sample(prompt, said(1, 100)) for _ in range(8)]  # a policy that always says the same
    ((rows, tree),) = families(equal)
    assert tree is not None and sum(line.own for line in tree) == 160 and len(rows) == 8


def test_short_prompts_with_the_same_first_token_are_not_one_group():
    samples = [sample((1, 5, 6), said(1, 5)), sample((1, *said(2, 30)), said(3, 5))]
    assert [len(group) for group in groups_of(samples)] == [1, 1]


def test_equal_prompts_are_one_group_whatever_they_are():
    samples = [Sample(prompt_ids=(), completion_ids=(1, 2), mask=(0, 1))] * 2 + [sample((4,), (1,)), sample((4,), (2,))]
    assert [len(group) for group in groups_of(samples)] == [2, 2]
    assert [len(rows) for rows, _ in families(samples)] == [2, 2]
