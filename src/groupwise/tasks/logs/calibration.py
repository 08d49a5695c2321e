"""Tests whether a judge can be believed: compares its grades of answers with what is known of them, good or not.

    calibrate   grades -> a threshold, how often its verdicts are right, whether that is more than chance, its biases
    by_chance   the probability of this many right verdicts if they do not depend on the truth
    strata      answers among which verdicts can be exchanged: those of one user, and one answer of each other user
    bias        how much more often one kind of answers is called good than another that is as good

The threshold is chosen on one half of the prompts, and everything that is said of it is measured on the other, so that
the choice cannot flatter it. A verdict is "good" above the threshold. A judge is believed where it calls good answers
good more often than bad ones, and that is more than chance by Fisher's exact test. It is the same as that the mean of
two shares, of good answers that it calls good and of bad ones that it does not, is above a half: what every constant
verdict has, and every one by chance, whatever the base rate. Intervals of shares are Clopper and Pearson's.

Answers of one user are alike, and so is what that user says of them: a judge that only tells users apart would seem to
know what is good. So verdicts are compared within users (the same exact test, over strata), and of a user whose answers
are all good, all bad or all called the same, which tells nothing by itself, one answer stands beside those of others.

A bias is a risk difference over strata, the good answers and the bad ones (Mantel and Haenszel; its variance: Sato,
Greenland and Robins 1989, in its simple form for independent shares): what is left when the answers are equally good.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import NormalDist, median
from typing import NamedTuple

import numpy as np

from groupwise.algo.evidence import lower_bound
from groupwise.tasks.logs.split import by_lot

ALPHA = 0.05
BIASED = 0.1  # a difference that is said, if it is more than chance
MORE = (1.5, 2, 3, 5, 8, 12, 20, 40)  # times as many answers, of which it is said whether they would do


@dataclass(frozen=True, kw_only=True)
class Graded:
    """Holds an answer that is known to be `good` or not, and the judge's `grade`. `key` is a digest of its prompt;
    `own` says whether the judge's own model wrote it, None if unknown. `places` are its grades when it was in the first
    half of its prompt's answers and when it was in the last; their mean is the `grade`. So an order that depends on the
    truth, such as an answer before its edited text, tells the judge nothing. None if it had one place. `by` is the user
    who said that the answer is good or not, None if unknown."""

    key: str
    good: bool
    grade: float
    length: int
    own: bool | None = None
    places: tuple[float, float] | None = None
    by: str | None = None


class Share(NamedTuple):
    """A share of `of` answers, and its interval."""

    value: float
    low: float
    high: float
    of: int


class Bias(NamedTuple):
    """Holds a judge's bias: how much more often answers of one kind are called good, at the same truth, with its
    interval; `of` is the number of answers."""

    difference: float
    low: float
    high: float
    of: int

    @property
    def found(self) -> bool:
        """Return whether it is large, and more than chance."""
        return abs(self.difference) >= BIASED and not self.low <= 0 <= self.high


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measurements of a judge against known verdicts, and whether it is believed.

    `good_seen` is the share of good answers that it calls good, `bad_seen` of bad ones that it does not; `balanced` is
    their mean, and `p` the chance that a judge who knows nothing does as well. `agrees` is the share of all verdicts
    that are right, and `base_rate` that of the commoner verdict. Biases are None where nothing tells. `needed` is about
    how many answers would be enough: 0 where these are, None where no number would.
    """

    believed: bool
    reason: str
    threshold: float
    chosen_on: int
    good_seen: Share
    bad_seen: Share
    balanced: float
    p: float
    agrees: Share
    base_rate: float
    needed: int | None
    length_bias: Bias | None
    own_bias: Bias | None
    place_bias: Share | None
    turned_verdicts: int


def calibrate(graded: Sequence[Graded]) -> Calibration | None:
    """Return the judge's calibration; None if one of the halves has no good or no bad answers."""
    halves: list[list[Graded]] = [[], []]
    for each in graded:
        halves[by_lot([each.key], share=0.5)].append(each)
    chosen_on, checked = halves
    if any({each.good for each in half} != {True, False} for half in halves):
        return None
    threshold = best_threshold(chosen_on)
    good, bad = ([(each.grade > threshold) is side for each in checked if each.good is side] for side in (True, False))
    balanced = (sum(good) / len(good) + sum(bad) / len(bad)) / 2
    tables = strata(checked, threshold)
    p = by_chance_within(tables)
    believed = p <= ALPHA
    commoner = sum(each.good for each in chosen_on) * 2 >= len(chosen_on)
    needed = len(graded) if believed else _needed(tables, len(graded))
    places = [each.places for each in graded if each.places is not None]
    return Calibration(
        believed=believed,
        reason=_reason(balanced, p, needed, len(graded)),
        threshold=threshold,
        chosen_on=len(chosen_on),
        good_seen=_share(good),
        bad_seen=_share(bad),
        balanced=balanced,
        p=p,
        agrees=_share([*good, *bad]),
        base_rate=sum(each.good is commoner for each in checked) / len(checked),
        needed=0 if believed else needed,
        length_bias=_length_bias(graded, threshold),
        own_bias=bias([each for each in graded if each.own is not None], threshold, lambda each: bool(each.own)),
        place_bias=_place_bias(places),
        turned_verdicts=sum((first > threshold) != (last > threshold) for first, last in places),
    )


def best_threshold(graded: Sequence[Graded]) -> float:
    """Return the grade above which answers are best called good, by the mean of the two shares; between two grades, and
    of several that are as good the one in the middle."""
    grades = sorted({each.grade for each in graded})
    between = [grades[0] - 1, *((a + b) / 2 for a, b in pairwise(grades))]
    good, bad = ([each.grade for each in graded if each.good is side] for side in (True, False))

    def worth(threshold: float) -> float:
        return sum(each > threshold for each in good) / len(good) + sum(each <= threshold for each in bad) / len(bad)

    best = max(map(worth, between))
    equal = [each for each in between if worth(each) >= best - 1e-12]
    return equal[len(equal) // 2]


def bias(graded: Sequence[Graded], threshold: float, kind: Callable[[Graded], bool]) -> Bias | None:
    """Return how much more often answers of a kind are called good than others that are as good; None where good and
    bad answers are all of the kind, or none."""
    weights = total = variance = 0.0
    used = 0
    for side in (True, False):
        ours, others = (
            [each.grade > threshold for each in graded if each.good is side and kind(each) is is_]
            for is_ in (True, False)
        )
        n, m = len(ours), len(others)
        if not n or not m:
            continue
        weight = n * m / (n + m)
        weights, used = weights + weight, used + n + m
        total += weight * (sum(ours) / n - sum(others) / m)
        variance += weight**2 * sum(
            (p := (sum(calls) + 0.5) / (len(calls) + 1)) * (1 - p) / len(calls) for calls in (ours, others)
        )
    if not weights:
        return None
    difference, width = total / weights, NormalDist().inv_cdf(1 - ALPHA / 2) * math.sqrt(variance) / weights
    return Bias(difference, difference - width, difference + width, used)


def _length_bias(graded: Sequence[Graded], threshold: float) -> Bias | None:
    middle = median(each.length for each in graded)
    return bias(graded, threshold, lambda each: each.length > middle)


def _place_bias(places: Sequence[tuple[float, float]]) -> Share | None:
    """Return by how much an answer's grade is higher in the first half of those that are shown together than in the
    last, on average."""
    gains = [first - last for first, last in places]
    if len(gains) < 2:
        return None
    mean = sum(gains) / len(gains)
    deviation = math.sqrt(sum((each - mean) ** 2 for each in gains) / (len(gains) - 1))
    width = NormalDist().inv_cdf(1 - ALPHA / 2) * deviation / math.sqrt(len(gains))
    return Share(mean, mean - width, mean + width, len(gains))


def by_chance(good: int, of_good: int, bad: int, of_bad: int) -> float:
    """Return the chance that as many good answers and more are called good, if the same number of answers is called so
    without regard to the truth (Fisher's exact test, one-sided). `good` and `bad` are verdicts that are right.

    >>> round(by_chance(8, 10, 8, 10), 4), by_chance(10, 10, 0, 10)
    (0.0115, 1.0)
    """
    least, ways = _ways(good, of_good, bad, of_bad)
    return sum(ways[good - least :]) / sum(ways)


def _ways(good: int, of_good: int, bad: int, of_bad: int) -> tuple[int, list[int]]:
    """Return the fewest good answers that can be among those that are called good, and in how many ways they and each
    larger number can be."""
    called = good + of_bad - bad
    least, most = max(0, called - of_bad), min(of_good, called)
    return least, [math.comb(of_good, k) * math.comb(of_bad, called - k) for k in range(least, most + 1)]


def strata(graded: Sequence[Graded], threshold: float) -> list[tuple[int, int, int, int]]:
    """Return the arguments of `by_chance` for each stratum. The first stratum has all answers of unknown users, and one
    answer of each user whose answers are all good, all bad or all called the same; each other user is a stratum."""
    users = dict[str, list[Graded]]()
    others = [each for each in graded if each.by is None]
    for each in graded:
        if each.by is not None:
            users.setdefault(each.by, []).append(each)
    tables = list[tuple[int, int, int, int]]()
    for its in users.values():
        if all(len({said(each) for each in its}) == 2 for said in (lambda e: e.good, lambda e: e.grade > threshold)):
            tables.append(_table(its, threshold))
        else:
            others.append(min(its, key=lambda each: each.key))
    return [_table(others, threshold), *tables]


def _table(graded: Sequence[Graded], threshold: float) -> tuple[int, int, int, int]:
    good, bad = ([(each.grade > threshold) is side for each in graded if each.good is side] for side in (True, False))
    return sum(good), len(good), sum(bad), len(bad)


def by_chance_within(tables: Sequence[tuple[int, int, int, int]]) -> float:
    """Return `by_chance` over strata: the chance that as many good answers of all of them are called good, if in each
    as many answers as were are called so without regard to the truth.

    >>> round(by_chance_within([(8, 10, 8, 10)]), 4), round(by_chance_within([(4, 5, 4, 5), (4, 5, 4, 5)]), 4)
    (0.0115, 0.0138)
    """
    total, chances = 0, np.ones(1)
    for table in tables:
        least, ways = _ways(*table)
        every = sum(ways)
        chances = np.convolve(chances, [each / every for each in ways])
        total += table[0] - least
    return min(1.0, float(chances[total:].sum()))


def _share(right: Sequence[bool]) -> Share:
    count, of = sum(right), len(right)
    return Share(count / of, surely(count, of, ALPHA / 2), 1 - surely(of - count, of, ALPHA / 2), of)


@cache
def surely(right: int, of: int, alpha: float) -> float:
    """Return the lower bound of a share of which `right` of `of` were right, wrong with probability `alpha` at most."""
    return lower_bound([1.0] * right + [0.0] * (of - right), alpha=alpha, worst=0.0)


def _needed(tables: Sequence[tuple[int, int, int, int]], answers: int) -> int | None:
    """Return about how many answers with such verdicts would be enough: more of all, by more users."""
    first, *users = tables
    for times in MORE:
        grown = [tuple(round(each * times) for each in first), *(users * round(times))]
        if by_chance_within(grown) <= ALPHA:
            return math.ceil(answers * times)
    return None


def _reason(balanced: float, p: float, needed: int | None, answers: int) -> str:
    said = f"its verdicts are right for {balanced:.0%} of answers, good and bad ones weighted equally; "
    said += f"chance would be 50% (p = {p:.2g})"
    if p <= ALPHA:
        return said
    if needed is None:
        return f"{said}. No number of answers like these would show more"
    return f"{said}. About {needed} answers like these {answers} would suffice"
