"""Bounds and tests whose error rates hold: exact where there is a formula, and by simulation where there is none."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.algo.evidence import (
    drop_bound,
    failure_evidence,
    length_needed,
    log_wealth,
    lower_bound,
    p_at_most,
    sample_needed,
    share_of_error,
)

ALPHA = 0.05


def above(share: float, of: int) -> float:
    """Return the number of errors that `of` trials at this rate exceed in one of a thousand cases."""
    return share * of + 3.1 * math.sqrt(share * (1 - share) * of)


# ---- one look ----


@pytest.mark.parametrize(("n", "k", "mean"), [(1, 1, 0.3), (5, 3, 0.2), (30, 29, 0.5), (100, 90, 0.7), (400, 399, 0.9)])
def test_of_two_values_it_is_clopper_and_pearsons_exact_test(n: int, k: int, mean: float) -> None:
    exact = sum(math.comb(n, i) * mean**i * (1 - mean) ** (n - i) for i in range(k, n + 1))
    found = p_at_most([1.0] * k + [0.0] * (n - k), mean, worst=0.0)
    assert math.isclose(found, exact, rel_tol=1e-8)


def test_the_integral_is_what_draws_of_the_weights_give() -> None:
    rng = np.random.default_rng(0)
    for n, mean in ((4, -0.2), (12, 0.0), (60, 0.05)):
        values = rng.normal(0.1, 0.3, size=n).clip(-1, 1)
        drawn = rng.exponential(size=(100_000, n + 1)) @ (np.append(values, -1.0) - mean)
        p = p_at_most(values.tolist(), mean, worst=-1.0)
        assert abs(p - (drawn <= 0).mean()) < 4 * math.sqrt(p * (1 - p) / 100_000) + 1e-4


def test_the_bound_is_where_the_p_value_is_alpha() -> None:
    values = [0.0, 0.25, -0.5, 1.0, 0.0, 0.0, 0.5, -0.25] * 4
    bound = lower_bound(values, alpha=0.01, worst=-1.0)
    assert math.isclose(p_at_most(values, bound, worst=-1.0), 0.01, rel_tol=1e-6)
    assert lower_bound([0.0] * 20, alpha=ALPHA, worst=-1.0) == pytest.approx(-(1 - ALPHA ** (1 / 20)), rel=1e-6)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=20), st.floats(-0.99, 0.99), st.floats(0, 0.5))
def test_a_p_value_rises_with_the_mean_that_is_asked_about(values: list[float], mean: float, more: float) -> None:
    assert 0 <= p_at_most(values, mean, worst=-1.0) <= p_at_most(values, mean + more, worst=-1.0) + 1e-9 <= 1 + 1e-9


def only_losses(rng: np.random.Generator, n: int, mean: float) -> np.ndarray:
    return -(rng.random(n) < -mean).astype(float)


def flips(rng: np.random.Generator, n: int, mean: float) -> np.ndarray:
    return rng.choice([-1.0, 0.0, 1.0], p=[0.15 - mean / 2, 0.7, 0.15 + mean / 2], size=n)


def of_four(rng: np.random.Generator, n: int, mean: float) -> np.ndarray:
    return (rng.binomial(4, 0.5 + mean / 2, n) - rng.binomial(4, 0.5 - mean / 2, n)) / 4


@pytest.mark.parametrize("shape", [only_losses, flips, of_four])
@pytest.mark.parametrize("n", [10, 30, 100])
def test_what_is_worse_by_the_margin_passes_no_more_often_than_is_said(
    shape: Callable[..., np.ndarray], n: int
) -> None:
    rng, trials = np.random.default_rng(n), 300
    passed = sum(p_at_most(shape(rng, n, -0.1).tolist(), -0.1, worst=-1.0) <= ALPHA for _ in range(trials))
    assert passed <= above(ALPHA, trials)


def test_a_sample_of_the_size_that_is_said_to_be_needed_decides() -> None:
    values = [0.0] * 20 + [1.0, -1.0] * 2
    needed = sample_needed(values, -0.1, alpha=ALPHA, worst=-1.0)
    assert needed is not None and 48 < needed < 72
    assert p_at_most(values * 3, -0.1, worst=-1.0) <= ALPHA < p_at_most(values * 2, -0.1, worst=-1.0)
    assert sample_needed([0.0] * 10, -0.02, alpha=ALPHA, worst=-1.0) == 149
    assert sample_needed([-1.0, 0.0], -0.1, alpha=ALPHA, worst=-1.0) is None


def test_the_shares_of_all_looks_add_up_to_the_error() -> None:
    shares = [share_of_error(ALPHA, look) for look in range(1, 200_000)]
    assert shares == sorted(shares, reverse=True) and 0.9 * ALPHA < sum(shares) < ALPHA
    rest = ALPHA / (2.1097428012368919 * math.log(200_000.5))  # the integral of what follows
    assert sum(shares) + rest == pytest.approx(ALPHA, rel=1e-4)


# ---- a look after every value ----


@pytest.mark.parametrize("differ", [0.5, 0.02])
def test_who_looks_after_every_value_errs_no_more_often_than_is_said(differ: float) -> None:
    rng, trials = np.random.default_rng(1), 300
    chances = [differ / 2 + 0.05, 1 - differ - 0.05, differ / 2]  # a mean of -0.05
    paths = [rng.choice([-1.0, 0.0, 1.0], p=chances, size=400).tolist() for _ in range(trials)]
    wrong = sum(log_wealth(path, -0.05, worst=-1.0) >= math.log(1 / ALPHA) for path in paths)
    assert wrong <= above(ALPHA, trials)


def test_wealth_is_that_of_gamblers_and_its_order_does_not_change_the_end() -> None:
    values = [0.3, -0.2, 0.5, 0.0, 0.9]
    bets = np.geomspace(0.01, 0.95, 16)
    by_hand = np.mean([math.prod(1 + bet * (v + 0.1) / 0.9 for v in values) for bet in bets])
    assert log_wealth(values, -0.1, worst=-1.0) == pytest.approx(math.log(by_hand), rel=1e-9)
    assert log_wealth([], 0.0, worst=-1.0) == 0.0 == log_wealth([-0.5], 0.0, worst=-1.0)
    assert log_wealth([*values, -1.0, -1.0], -0.1, worst=-1.0) == pytest.approx(math.log(by_hand)), "the most ever"


def test_a_sequence_of_the_length_that_is_said_to_be_needed_decides_as_often_as_is_said() -> None:
    values, chances, rng = [-1.0, 0.0, 1.0], [0.25, 0.5, 0.25], np.random.default_rng(2)
    needed = length_needed(values, chances, -0.2, alpha=ALPHA, worst=-1.0)
    assert needed is not None and 100 < needed < 300
    paths = [rng.choice(values, p=chances, size=needed).tolist() for _ in range(200)]
    decided = sum(log_wealth(path, -0.2, worst=-1.0) >= math.log(1 / ALPHA) for path in paths)
    assert decided >= 0.8 * 200 - 3.1 * math.sqrt(0.8 * 0.2 * 200)
    assert length_needed(values, chances, 0.0, alpha=ALPHA, worst=-1.0) is None


def test_failures_speak_against_a_version_by_its_share_of_the_requests() -> None:
    assert failure_evidence((0, 5), (10, 90)) == failure_evidence((0, 0), (0, 0)) == 1.0
    assert failure_evidence((5, 1), (10, 90)) > 20 > failure_evidence((5, 45), (10, 90))
    assert failure_evidence((3, 0), (50, 50)) == pytest.approx(2 * 8 * (1 - 1 / 16) / 4, rel=1e-3)
    rng, trials, wrong = np.random.default_rng(3), 200, 0
    for _ in range(trials):
        new, failed = rng.random(1500) < 0.1, rng.random(1500) < 0.05
        counts = np.stack([(new & failed).cumsum(), (~new & failed).cumsum(), new.cumsum(), (~new).cumsum()])[:, 50::25]
        wrong += any(failure_evidence((a, b), (c, d)) >= 1 / ALPHA for a, b, c, d in counts.T)
    assert wrong <= above(ALPHA, trials)


# ---- several means ----


def test_the_best_of_many_equal_means_is_not_a_drop() -> None:
    rng, runs = np.random.default_rng(4), 300
    wrong = 0
    for _ in range(runs):
        means = rng.normal(0.5, 0.03, size=20)
        wrong += any(drop_bound(means[:k].tolist(), [0.03] * k, alpha=ALPHA) > 0 for k in range(2, 21))
    assert wrong <= above(ALPHA, runs)
    assert drop_bound([0.5, 0.9, 0.4], [0.03] * 3, alpha=ALPHA) == pytest.approx(
        0.5 - 2.44 * 0.03 * math.sqrt(2), abs=0.03
    )
    assert drop_bound([0.9], [0.03], alpha=ALPHA) == 0.0 == drop_bound([0.4, 0.9], [0.03] * 2, alpha=ALPHA)
