"""Which curves the report shows, from one run or several over each other.

A chart without data is left out, and so is one whose values never change: `constants` lists those in words instead. A
metric that no chart here names is drawn as well, under its own name, so that a user's own metrics are there too.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from groupwise.algo.metrics import DEFINITIONS
from groupwise.report.specs import OTHER, SPECS, Spec
from groupwise.run.record import Point, RunRecord

MAX_POINTS = 200  # of a curve; a longer one is drawn as means of as many steps as it takes
_LOG_SPAN = 20.0  # a log axis where the largest value is this many times the smallest


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line: what it is and, of several runs, whose. `points` are (step, value), `band` (step, low, high); `colour`
    and `dash` are indices into the page's palettes; `marked` draws a dot at each point: it is measured there only."""

    label: str
    run: str = ""
    points: tuple[Point, ...]
    band: tuple[tuple[int, float, float], ...] = ()
    colour: int = 0
    dash: int = 0
    marked: bool = False

    @property
    def name(self) -> str:
        return f"{self.run}, {self.label}" if self.run else self.label

    @property
    def finite(self) -> list[tuple[int, float]]:
        return [(step, value) for step, value in self.points if value is not None]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A titled set of curves. `first` and `last` are the steps at the ends of the axis, the same in all charts;
    `per_point` is how many steps a point is the mean of."""

    key: str
    title: str
    note: str
    section: str
    curves: tuple[Curve, ...]
    first: int
    last: int
    per_point: int = 1
    log: bool = False
    wide: bool = False


_OTHER_POINTS = 60
_IN_THE_BAND = ("reward/std", "reward/min", "reward/max")


def charts_of(runs: Sequence[RunRecord], *, max_points: int = MAX_POINTS) -> list[Chart]:
    """Every chart that has something to show, in the order of the page."""
    steps = [line["step"] for run in runs for line in run.lines]
    first, last = min(steps, default=0), max(steps, default=0)
    drawn = (_chart(spec, runs, first=first, last=last, max_points=max_points) for spec in _specs(runs))
    return [chart for chart in drawn if chart is not None]


def constants(run: RunRecord) -> list[tuple[str, float]]:
    """(metric, its value) of what stayed the same over at least two steps, but for rounding."""
    noise = {metric: spec.noise for spec in SPECS for metric, _ in spec.series}
    found = []
    for metric in run.metrics:
        points = run.points(metric)
        if len(points) > 1 and _range(points) <= noise.get(metric, 0.0):
            value = points[-1][1] or 0.0
            found.append((metric, value if abs(value) > noise.get(metric, 0.0) else 0.0))
    return found


def _specs(runs: Sequence[RunRecord]) -> Iterator[Spec]:
    """Ours, and one for each metric that none of them names. Of several runs, what was trained on and what was held
    out are two charts."""
    if len(runs) > 1:
        training, held_out = SPECS[0].series
        yield replace(SPECS[0], series=(training,), note="mean over a step's completions, training prompts")
        held = replace(SPECS[0], key="held_out_mean", title="Held-out reward", note="", series=(held_out,))
        yield replace(held, spread=None, wide=False)
    yield from SPECS[1:] if len(runs) > 1 else SPECS
    named = [metric for spec in SPECS for metric, _ in spec.series]
    for metric in dict.fromkeys(metric for run in runs for metric in run.metrics):
        if metric not in _IN_THE_BAND and not any(_matches(metric, pattern) for pattern in named):
            yield Spec(
                key=metric.replace("/", "_"),
                title=metric,
                note=_definition(metric),
                section=OTHER,
                series=((metric, "value"),),
            )


def _definition(metric: str) -> str:
    """What it is, in the words of `groupwise.algo.metrics`; "" for one of the user's own."""
    patterns = ((re.sub(r"<\w+>", "*", name), text) for name, text in DEFINITIONS.items())
    return next((text for pattern, text in patterns if _matches(metric, pattern)), "")


def _chart(spec: Spec, runs: Sequence[RunRecord], *, first: int, last: int, max_points: int) -> Chart | None:
    found = _found(spec, runs)
    values = [value for _, run, metric, *_ in found for _, value in run.points(metric)]
    if not found or all(value is None for value in values):
        return None
    if len(values) > len(found) and not any(_range(run.points(metric)) > spec.noise for _, run, metric, *_ in found):
        return None
    per_point = max(1, math.ceil((last - first + 1) / (_OTHER_POINTS if spec.section == OTHER else max_points)))
    labels = list(dict.fromkeys(label for *_, label in found))
    curves = []
    for index, run, metric, pattern, label in found:
        several = len(runs) > 1
        points, band = _thinned(run.points(metric), per_point)
        if spec.spread and metric == spec.series[0][0]:
            band = _spread(points, run, spec.spread, per_point)
        curves.append(
            Curve(
                label=label,
                run=run.label if several else "",
                points=points,
                band=() if several else band,
                colour=index if several else labels.index(label),
                dash=labels.index(label) if several else 0,
                marked=pattern in spec.marked,
            )
        )
    return Chart(
        key=spec.key,
        title=spec.title,
        note=spec.note,
        section=spec.section,
        curves=tuple(curves),
        first=first,
        last=last,
        per_point=per_point,
        log=spec.log and _spans(curves),
        wide=spec.wide,
    )


def _found(spec: Spec, runs: Sequence[RunRecord]) -> list[tuple[int, RunRecord, str, str, str]]:
    """(run's index, run, metric, pattern, label) of each curve. Where there are others, those are left out that are 0
    in every run, and in a run those that repeat an earlier one."""
    found = [
        (index, run, metric, pattern, label)
        for index, run in enumerate(runs)
        for metric, pattern, label in _series(spec, run)
    ]
    alive = {metric for _, run, metric, *_ in found for _, value in run.points(metric) if value != 0}
    seen: set[tuple[int, tuple[Point, ...]]] = set()
    distinct = []
    for each in found:
        key = (each[0], tuple(each[1].points(each[2])))
        if each[2] in alive and key not in seen:
            seen.add(key)
            distinct.append(each)
    return distinct or found


def _series(spec: Spec, run: RunRecord) -> Iterator[tuple[str, str, str]]:
    """(metric, pattern, label) of what the run has. The one reward of a run is its mean, drawn already."""
    for pattern, label in spec.series:
        matched = [metric for metric in run.metrics if _matches(metric, pattern)]
        if spec.key == "rewards" and len(matched) < 2:
            continue
        for metric in matched:
            yield metric, pattern, label.replace("*", _matched(metric, pattern))


def _matches(metric: str, pattern: str) -> bool:
    """A star is one part of the name, which has no slash."""
    return metric.count("/") == pattern.count("/") and fnmatch.fnmatchcase(metric, pattern)


def _matched(metric: str, pattern: str) -> str:
    pairs = zip(metric.split("/"), pattern.split("/"), strict=True)
    return ", ".join(part for part, wanted in pairs if "*" in wanted)


def _range(points: Iterable[Point]) -> float:
    """How far the values are apart; inf where some are not finite, which is worth a chart."""
    values = [value for _, value in points]
    finite = [value for value in values if value is not None]
    return math.inf if len(finite) < len(values) else max(finite) - min(finite)


def _spans(curves: Sequence[Curve]) -> bool:
    values = [value for curve in curves for _, value in curve.finite]
    return min(values) > 0 and max(values) > _LOG_SPAN * min(values)


def _thinned(points: Sequence[Point], per_point: int) -> tuple[tuple[Point, ...], tuple[tuple[int, float, float], ...]]:
    """The points, or the mean of every `per_point` steps with a band from their least to their largest."""
    if per_point == 1:
        return tuple(points), ()
    buckets: dict[int, list[Point]] = {}
    for point in points:
        buckets.setdefault(point[0] // per_point, []).append(point)
    means: list[Point] = []
    band = []
    for bucket in buckets.values():
        step, values = bucket[-1][0], [value for _, value in bucket if value is not None]
        means.append((step, sum(values) / len(values) if values else None))
        if values:
            band.append((step, min(values), max(values)))
    return tuple(means), tuple(band)


def _spread(
    points: Sequence[Point], run: RunRecord, spread: str, per_point: int
) -> tuple[tuple[int, float, float], ...]:
    """One standard deviation up and down, not beyond the least and the largest value where they were recorded."""
    deviation, least, largest = (
        {step: value for step, value in _thinned(run.points(metric), per_point)[0] if value is not None}
        for metric in (spread, spread.replace("/std", "/min"), spread.replace("/std", "/max"))
    )
    return tuple(
        (
            step,
            max(value - deviation[step], least.get(step, -math.inf)),
            min(value + deviation[step], largest.get(step, math.inf)),
        )
        for step, value in points
        if value is not None and step in deviation
    )
