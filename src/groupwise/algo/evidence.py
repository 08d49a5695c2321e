"""Bounds and tests for decisions that rest on few and noisy numbers, whose error rates hold.

    p_at_most, lower_bound    of the mean of a sample, looked at once: the gate, `promote`, the shadow
    sample_needed             how large a sample like this one would have to be
    share_of_error            how the error of one decision is shared among looks at the same prompts
    log_wealth                of a sequence that is looked at after every value: ratings of a canary
    length_needed             how long such a sequence has to be
    failure_evidence          that one of two versions fails more often, looked at any time
    drop_bound                how far the last of several means is below the best, less what chance explains

**One look.** With x_1 ... x_n the values, x_0 the worst value there can be, and D drawn from the Dirichlet
distribution with n + 1 ones, the evidence against "the mean is at most m" is

    p = P(sum_i D_i x_i <= m),    and the lower bound at confidence 1 - alpha is the m at which p = alpha

(Gaffke 2005, "Three test statistics for a nonparametric one-sided hypothesis on the mean of a nonnegative variable",
Mathematical Methods of Statistics 14; as a bound: Learned-Miller and Thomas 2019, arXiv 1905.06208). It is a Bayesian
bootstrap with one value more, the worst: where nothing was seen to differ it still says what could have been missed.
Of values that are the worst or one other it is Clopper and Pearson's exact bound, it is never wider than Anderson's or
Hoeffding's, and for any other values no distribution is known for which it errs too often: a conjecture, which
`benchmarks/gates.py` and the tests check by simulation. A percentile bootstrap, without that value, errs up to ten
times as often as it says where losses are rare.

With E_i = independent exponentials p = P(sum_i E_i (x_i - m) <= 0), an integral of the moment generating function along
a line through its saddle point, which trapezoids sum up to ten digits and more, far in the tail, too.

**Every look.** If the mean is at most m, no gambler who starts with 1 and bets a share of the largest possible stake on
"above m" has a fair chance of ever having 1 / alpha (Ville 1939): P(wealth >= 1 / alpha at any time) <= alpha. The
wealth here is the mean over BETS of such gamblers, each with another share (Waudby-Smith and Ramdas 2023, arXiv
2010.09686, section 4), so that one may look after every value and stop when one likes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

STEP = 0.05
STEPS = STEP * np.arange(600)  # of the integral
BETS = np.geomspace(0.01, 0.95, 16)  # shares of the largest possible stake
LIKE = 4.0  # BETS to one that does about as well as the best
LOOKS = 2.1097428012368919  # sum over k >= 2 of 1 / (k ln(k)^2)
MOST = 10_000_000  # sizes that are looked for

Floats = NDArray[np.float64]


# ---- one look ----
def p_at_most(values: Sequence[float], mean: float, *, worst: float) -> float:
    """Return the p value of "the mean of what these values were drawn from is at most `mean`", given that no value can
    be below `worst`; between 0 and 1. Small values speak for a higher mean."""
    return _p(*_counted(values, worst), mean)


def lower_bound(values: Sequence[float], *, alpha: float, worst: float) -> float:
    """Return the lower bound of the mean, wrong with probability `alpha` at most, given that no value can be below
    `worst`."""
    at, weights = _counted(values, worst)
    low, high = worst, float(at.max())
    for _ in range(36):
        middle = (low + high) / 2
        low, high = (low, middle) if _p(at, weights, middle) > alpha else (middle, high)
    return low


def sample_needed(values: Sequence[float], mean: float, *, alpha: float, worst: float) -> int | None:
    """Return how many values like these it takes until `p_at_most` is at most `alpha`: as many as there are, or more
    in the same proportions. None if their mean is not above `mean`, so that no number would do."""
    at, weights = _counted(values, worst)
    if not math.fsum(values) / len(values) > mean:
        return None

    def enough(size: int) -> bool:
        grown = weights * (size / len(values))
        grown[at == worst] += 1.0 - size / len(values)  # the worst value itself is there once
        return _p(at, grown, mean) <= alpha

    few, many = 0, len(values)
    while not enough(many):
        few, many = many, 2 * many
        if many > MOST:
            return None
    if few == 0:
        return many
    while many - few > max(1, few // 100):
        middle = (few + many) // 2
        few, many = (few, middle) if enough(middle) else (middle, many)
    return many


def _counted(values: Sequence[float], worst: float) -> tuple[Floats, Floats]:
    """Return the distinct values with `worst` among them, [V], and how often each is there, [V]."""
    at, counts = np.unique(np.append(np.asarray(values, dtype=np.float64), worst), return_counts=True)
    return at, counts.astype(np.float64)


def _p(at: Floats, weights: Floats, mean: float) -> float:
    """P(sum_v G_v (at_v - mean) <= 0), G_v of the gamma distribution with shape `weights`_v, [V].

    With M(s) its moment generating function it is -1/pi times the integral over u > 0 of Re(M(c + iu) / (c + iu)), for
    any c < 0 at which M is finite; the c at which M(c) / |c| is least makes it decay fastest."""
    away = at - mean
    if away.min() >= 0:
        return 0.0
    if away.max() <= 0:
        return 1.0
    low, high = 1.0 / away.min(), 0.0
    for _ in range(60):
        c = (low + high) / 2
        low, high = (low, c) if (weights * away / (1 - c * away)).sum() - 1 / c > 0 else (c, high)
    c = (low + high) / 2
    width = 1 / math.sqrt((weights * (away / (1 - c * away)) ** 2).sum() + 1 / c**2)
    integral = 0.0
    for steps in np.split(STEPS, 10):
        s = c + 1j * width * np.sinh(steps)
        moment = np.exp(-(weights @ np.log(1 - np.outer(away, s))))
        heights = (moment / s).real * width * np.cosh(steps)
        heights[steps == 0.0] /= 2
        integral += float(heights.sum()) * STEP
        if abs(heights[-10:]).max() <= 1e-14 * abs(integral):  # it decays from here on
            break
    return min(1.0, max(0.0, -integral / math.pi))


# ---- many looks at the same prompts ----
def share_of_error(alpha: float, look: int) -> float:
    """Return the part of `alpha` that look number k (the first is 1) may use if the number of looks is not known in
    advance: alpha / (LOOKS (k + 1) ln(k + 1)^2). The sum over infinitely many looks is `alpha`."""
    return alpha / (LOOKS * (look + 1) * math.log(look + 1) ** 2)


# ---- a look after every value ----
def log_wealth(values: Sequence[float], mean: float, *, worst: float) -> float:
    """Return the logarithm of the most that the gamblers against "the mean is at most `mean`" ever had together, in
    the order of `values`, none of which is below `worst` < `mean`. It is log(1 / alpha) or more, ever, with a chance of
    `alpha` at most. 0 without values."""
    if not len(values):
        return 0.0
    gains = (np.asarray(values, dtype=np.float64) - mean) / (mean - worst)
    wealth = np.log1p(np.outer(BETS, gains)).cumsum(axis=1)
    top = wealth.max(axis=0)
    return max(0.0, float((top + np.log(np.exp(wealth - top).mean(axis=0))).max()))


def length_needed(
    values: Sequence[float], chances: Sequence[float], mean: float, *, alpha: float, worst: float, power: float = 0.8
) -> int | None:
    """Return how many values, drawn from `values` with `chances`, it takes until `log_wealth` reaches log(1 / alpha)
    with probability `power`, about; None where their mean is not above `mean`. The bets that do well make up for those
    that do not, which are LIKE times as many: n of them win n g on average with a standard deviation of s sqrt(n), and
    the best of BETS is taken."""
    gains = (np.asarray(values, dtype=np.float64) - mean) / (mean - worst)
    weights, z = np.asarray(chances, dtype=np.float64), NormalDist().inv_cdf(power)
    goal, found = math.log(LIKE / alpha), list[float]()
    for bet in BETS:
        won = np.log1p(bet * gains)
        g = float(weights @ won)
        s = math.sqrt(max(0.0, float(weights @ won**2) - g * g))
        if g > 0:
            found.append(((z * s + math.sqrt(z * z * s * s + 4 * g * goal)) / (2 * g)) ** 2)
    return math.ceil(min(found)) if found and min(found) <= MOST else None


def failure_evidence(errors: tuple[int, int], requests: tuple[int, int]) -> float:
    """Return how much speaks for the first of two versions failing more often than the second: at least 1 / alpha,
    whenever one looks, with a chance of `alpha` at most if it does not.

    Were they equal, each failure would be of the first with probability q, its share of the requests. The evidence is
    the likelihood ratio against q of all larger shares t, each as likely: the mean over q < t < 1 of
    (t / q)^e1 ((1 - t) / (1 - q))^e2. The shares are those that were seen, which should change little over time.
    """
    asked = sum(requests)
    if not errors[0] or not asked or requests[0] == asked:
        return 1.0
    q = requests[0] / asked
    t = q + (1 - q) * (np.arange(1000) + 0.5) / 1000
    return float(np.exp(errors[0] * np.log(t / q) + errors[1] * np.log((1 - t) / (1 - q))).mean())


# ---- several means, the best of which was lucky ----
def drop_bound(means: Sequence[float], errors: Sequence[float], *, alpha: float) -> float:
    """Return how far the last of these means surely lies below one before it; 0 where chance explains it.

    `errors` are their standard errors. The best of k means is the luckiest, and each new mean is another chance to err,
    so that of k comparisons each has a k-th of the share that this look has of `alpha` (Bonferroni): the largest over i
    of  m_i - m_last - z sqrt(e_i^2 + e_last^2). Means on the same prompts differ by less than that, so it errs on the
    side of silence."""
    *before, last = means
    if not before:
        return 0.0
    z = NormalDist().inv_cdf(1 - share_of_error(alpha, len(before)) / len(before))
    bounds = [mean - last - z * math.hypot(error, errors[-1]) for mean, error in zip(before, errors[:-1], strict=True)]
    return max(0.0, *bounds)
