"""Rules of a run's health: each is a condition on its metrics, with the cause and the remedies.

A rule holds at a step when, over the last `window` values of its metric,

    aggregate(values) op warn        and every condition in `also` holds        and no rule in `unless` stands

and it is an error where the same is true of `error`. Values that are not finite count for `not_finite` alone. A
metric with `*` stands for all that fit, each judged by itself; `*` in `also` is then the same name, and otherwise
every metric that fits must meet the condition, and at least one must be there.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import Literal

from groupwise.algo.evidence import drop_bound

Aggregate = Literal[
    "mean",
    "median",
    "min",
    "max",
    "last",
    "sum",
    "zeros",
    "gain",
    "growth",
    "decline",
    "rise",
    "drop",
    "fall",
    "lost",
    "trend",
    "not_finite",
]

Op = Literal[">", ">=", "<", "<="]

Severity = Literal["warn", "error"]

COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}

ALPHA = 0.1  # the most that the chance can be that a run is said to have dropped of which nothing is wrong
ENDS = 5  # values at either end of a window whose means are compared


@dataclass(frozen=True)
class KeyNames:
    """Names the keys of a run's configuration in texts: by the keys themselves, or as `name_of` says.

    >>> "towards {key[rollout.max_tokens]}".format(key=KeyNames())
    'towards rollout.max_tokens'
    """

    name_of: Callable[[str], str] = str

    def __getitem__(self, key: str) -> str:
        return self.name_of(key)


RUN_KEYS = KeyNames()


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A condition on a metric: `of` the last `window` values of `metric`, `op` the threshold. It needs `least`
    values (None: a full window). `errors` is the metric with their standard errors: a drop that these explain does
    not count."""

    metric: str
    of: Aggregate = "mean"
    window: int = 10
    least: int | None = None
    op: Op
    threshold: float
    errors: str | None = None

    def measure(self, values: Sequence[float], errors: Sequence[float] = ()) -> float | None:
        """Return the aggregate of a metric's values, oldest first; None where there are too few. `errors` are those of
        the same values; where they are not as many, as in records that have none, the values count as they are."""
        recent = values[-self.window :]
        counted = recent if self.of == "not_finite" else [value for value in recent if math.isfinite(value)]
        if len(counted) < (self.window if self.least is None else self.least):
            return None
        if len(errors) == len(values):
            known = [(value, error) for value, error in zip(values, errors, strict=True) if math.isfinite(value)]
            means, its = zip(*known[-self.window :], strict=True)
            if not all(map(math.isfinite, its)) or drop_bound(means, its, alpha=ALPHA) == 0:
                return 0.0
        return aggregate(counted, self.of)

    def holds(self, values: Sequence[float], errors: Sequence[float] = ()) -> bool:
        measured = self.measure(values, errors)
        return measured is not None and COMPARE[self.op](measured, self.threshold)


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A remedy in words, and as overrides of the run's configuration where that can be said: key -> change.

    A change is the new value, or a `Times`. `{name}` in a value is what the rule's `*` matched. It is only proposed
    where the configuration has the values in `only_if`.

    `text` names a key as `{key[rollout.stop]}`. In a job of the live server, which has no run directory and whose
    completions were sampled before it, it is `job_text` if there is one, and nothing where not `for_jobs`.
    """

    text: str
    job_text: str = ""
    for_jobs: bool = True
    overrides: Mapping[str, object] = field(default_factory=dict)
    only_if: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Times:
    """The present value times `factor`, kept within bounds; a whole number stays one."""

    factor: float
    least: float = 0.0
    most: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Says when a metric shows that a run goes wrong, and what to report then.

    `says` is formatted with the aggregate as `value`, with `window`, and with the text that `*` matched as `name`.
    `says` and `cause` write a configuration key as `{key[rollout.max_tokens]}`; the finding shows the key's name in
    runs or in jobs. A finding ends when the rule has not held `settle` times in a row.
    """

    id: str
    metric: str
    of: Aggregate = "mean"
    window: int = 10
    least: int | None = None
    op: Op
    errors: str | None = None
    warn: float | None = None
    error: float | None = None
    also: tuple[Condition, ...] = ()
    unless: tuple[str, ...] = ()
    settle: int = 3
    says: str
    cause: str
    remedies: tuple[Remedy, ...]

    def condition(self, severity: Severity) -> Condition | None:
        """Return the condition of a finding of this severity; None if the rule has none."""
        threshold = self.warn if severity == "warn" else self.error
        if threshold is None:
            return None
        return Condition(
            metric=self.metric,
            of=self.of,
            window=self.window,
            least=self.least,
            op=self.op,
            threshold=threshold,
            errors=self.errors,
        )


def aggregate(values: Sequence[float], of: Aggregate) -> float:
    """Return one number for values in the order in which they came; there is at least one.

        zeros        share of them that are 0
        gain         mean of the last few minus mean of the first few (five, or a third of them where that is fewer)
        growth       the same as a quotient; 1 where the first few are 0
        decline      the same, and 1 where noise explains it: where the last few are not below the first few by more
                     than four standard errors of that difference
        rise         mean of the last third minus mean of the first, less three standard errors of that difference
        drop         how far the last is below the largest, as a share of the largest magnitude; of values with standard
                     errors 0 where these explain it (`algo.evidence.drop_bound`)
        fall         how far the mean of the last few is below the best mean of as many in a row, less four standard
                     errors of such a mean, as a share of that best; 0 where noise explains it
        lost         how far the largest of the last three is below the largest before them, as a share of that
        trend        Kendall's tau against time: 1 where every value is above all before it, -1 where below
        not_finite   how many are not finite

    >>> aggregate([1, 2, 3, 4], "trend"), aggregate([0.5, 1.0, 0.75], "drop"), aggregate([1.0, 1.0, 3.0], "growth")
    (1.0, 0.25, 3.0)
    """
    few = max(1, min(ENDS, len(values) // 3))
    match of:
        case "mean":
            return fmean(values)
        case "median":
            return median(values)
        case "min":
            return min(values)
        case "max":
            return max(values)
        case "last":
            return values[-1]
        case "sum":
            return math.fsum(values)
        case "zeros":
            return fmean(value == 0 for value in values)
        case "gain":
            return fmean(values[-few:]) - fmean(values[:few])
        case "growth":
            before = fmean(values[:few])
            return fmean(values[-few:]) / before if before else 1.0
        case "decline":
            before, after = fmean(values[:few]), fmean(values[-few:])
            sunk = before - after > 4 * _noise(values) * math.sqrt(2 / few)
            return after / before if before and sunk else 1.0
        case "rise":
            third = max(1, len(values) // 3)
            noise = 3 * _noise(values) * math.sqrt(2 / third)
            return fmean(values[-third:]) - fmean(values[:third]) - noise
        case "fall":
            means = [fmean(values[end - few : end]) for end in range(few, len(values) + 1)]
            lost = max(means) - means[-1] - 4 * _noise(values) / math.sqrt(few)
            return max(0.0, lost) / abs(max(means)) if max(means) else 0.0
        case "drop":
            largest = max(map(abs, values))
            return (max(values) - values[-1]) / largest if largest else 0.0
        case "lost":
            best = max(values[:-3], default=0.0)
            return (best - max(values[-3:])) / best if best > 0 else 0.0
        case "trend":
            return _kendall(values)
        case "not_finite":
            return float(sum(not math.isfinite(value) for value in values))


def _noise(values: Sequence[float]) -> float:
    """Return the standard deviation of values around whatever they slowly follow: from the differences of
    neighbours."""
    steps = [(later - earlier) ** 2 for earlier, later in pairwise(values)]
    return math.sqrt(fmean(steps) / 2) if steps else 0.0


def _kendall(values: Sequence[float]) -> float:
    """Return Kendall's tau of values against their positions: rising pairs minus falling ones, as a share of all
    pairs."""
    score, earlier = 0, list[float]()
    for value in values:
        score += bisect_left(earlier, value) - (len(earlier) - bisect_right(earlier, value))
        insort(earlier, value)
    return score / math.comb(len(values), 2) if len(values) > 1 else 0.0
