from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forked_samples import distinct_tokens, forked_samples
from groupwise.train.shares import shares


@given(samples=forked_samples(most=12), ranks=st.integers(1, 5))
def test_every_row_is_in_exactly_one_share(samples, ranks) -> None:
    found = shares(samples, ranks)
    assert len(found) == ranks
    assert sorted(row for rows in found for row in rows) == list(range(len(samples)))
    assert all(rows == sorted(rows) for rows in found)


def test_groups_stay_whole_and_tokens_are_even(make_samples) -> None:
    samples = make_samples([(10, [5] * 4)] * 8 + [(40, [30] * 4)] * 4)
    found = shares(samples, 3)
    for rows in found:
        assert {row // 4 for row in rows} and len(rows) == 4 * len({row // 4 for row in rows})
    tokens = [distinct_tokens([samples[row] for row in rows]) for rows in found]
    assert max(tokens) <= 4 / 3 * sum(tokens) / 3


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_group_larger_than_a_share_is_cut(make_samples, ranks) -> None:
    samples = make_samples([(5, [50] * 12)])
    assert {len(rows) for rows in shares(samples, ranks)} == {12 // ranks}


def test_fewer_samples_than_ranks_leave_some_idle(make_samples) -> None:
    assert sorted(map(len, shares(make_samples([(5, [3])]), 3))) == [0, 0, 1]
    assert shares([], 2) == [[], []]


def test_both_of_a_pair_are_one_ranks(make_samples) -> None:
    samples = make_samples([(5, [30, 3])] * 5 + [(40, [30, 60])])
    found = shares(samples, 2, pairs=True)
    assert sorted(row for rows in found for row in rows) == list(range(len(samples)))
    assert all(
        [row + 1 for row in rows[0::2]] == rows[1::2] and all(row % 2 == 0 for row in rows[0::2]) for rows in found
    )
    assert all(found)
