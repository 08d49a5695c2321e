"""Which curves the report shows, from one run or several over each other.

A chart without data is left out, and so is one whose values never change: `constants` lists those in words instead. A
metric that no chart here names is drawn as well, under its own name, so that a user's own metrics are there too.
"""

from __future__ import annotations

import fnmatch
import importlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from markupsafe import Markup

from groupwise.algo.metrics import DEFINITIONS
from groupwise.errors import ConfigError, StorageError
from groupwise.run.record import Point, RunRecord
from groupwise.server.rollout_view import number, plain

# ----------------------------------------------------------------------------------------------------------------------
# The report's own charts: which metrics stand together, under which words. `groupwise.algo.metrics` defines the
# metrics.
# ----------------------------------------------------------------------------------------------------------------------

OTHER = "Other metrics"  # the section of those that are named nowhere here


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What to draw: metrics, or patterns of them, each with its label; in a pattern's label `*` is what it matched.

    `spread` is the metric of a standard deviation, drawn around the first curve.
    """

    key: str
    title: str
    note: str
    section: str
    series: tuple[tuple[str, str], ...]
    spread: str | None = None
    log: bool = False
    wide: bool = False
    noise: float = 0.0  # values that differ by no more than this are equal but for rounding
    marked: tuple[str, ...] = ()  # the series that are measured now and then


SPECS = (
    Spec(
        key="reward",
        title="Reward",
        note="lines: mean over a step's completions, ± the standard deviation inside a group; dots: held-out prompts",
        section="Learning",
        series=(("reward/mean", "training"), ("eval/*/reward", "held-out, *")),
        spread="reward/std",
        wide=True,
        marked=("eval/*/reward",),
    ),
    Spec(
        key="held_out",
        title="Held-out reward by column",
        note="",
        section="Learning",
        series=(("eval/*/*/reward", "*"),),
        marked=("eval/*/*/reward",),
    ),
    Spec(
        key="passed",
        title="Solved in k tries",
        note="held-out prompts",
        section="Learning",
        series=(("eval/*/pass@*", "*"),),
        marked=("eval/*/pass@*",),
    ),
    Spec(
        key="rewards",
        title="Each reward",
        note="mean over a step's completions",
        section="Learning",
        series=(("reward/*/mean", "*"),),
    ),
    Spec(
        key="loudness",
        title="How loud each reward is",
        note="share of the spread inside a group",
        section="Learning",
        series=(("reward/*/share", "*"),),
    ),
    Spec(
        key="zero_variance",
        title="Groups without signal",
        note="share of groups whose rewards are all equal",
        section="Learning",
        series=(("reward/frac_zero_std", "share"),),
    ),
    Spec(
        key="kl",
        title="KL from the reference",
        note="nats per token",
        section="Policy",
        series=(("kl/mean", "measured"), ("loss/kl", "in the loss")),
    ),
    Spec(
        key="entropy",
        title="Entropy",
        note="nats per token",
        section="Policy",
        series=(("loss/entropy", "entropy"),),
    ),
    Spec(
        key="clip",
        title="Clipped tokens",
        note="share whose gradient the clip cuts",
        section="Policy",
        series=(("loss/clip_frac_low", "below"), ("loss/clip_frac_high", "above"), ("loss/clip_frac_dual", "dual")),
    ),
    Spec(
        key="ratio",
        title="Importance ratio",
        note="over the tokens of a step",
        section="Policy",
        series=(("loss/ratio_mean", "mean"), ("loss/ratio_min", "least"), ("loss/ratio_max", "largest")),
        noise=1e-3,
    ),
    Spec(
        key="loss",
        title="Policy loss",
        note="its gradient teaches; its value says little",
        section="Policy",
        series=(("loss/policy", "loss"),),
        noise=1e-5,
    ),
    Spec(
        key="length",
        title="Completion length",
        note="tokens",
        section="Completions",
        series=(
            ("rollout/len_mean", "mean"),
            ("rollout/len_max", "longest"),
            ("rollout/len_terminated_mean", "mean of those not cut"),
        ),
    ),
    Spec(
        key="cut",
        title="Cut or without a reward",
        note="share of completions",
        section="Completions",
        series=(
            ("rollout/truncated_frac", "cut at the longest"),
            ("rollout/excluded_frac", "no reward"),
            ("rollout/error_frac", "a reward failed"),
        ),
    ),
    Spec(
        key="turns",
        title="Turns and tool calls",
        note="mean of an episode",
        section="Episodes",
        series=(("rollout/turns_mean", "turns"), ("env/tool_calls", "tool calls")),
    ),
    Spec(
        key="stops",
        title="How episodes end",
        note="share of episodes",
        section="Episodes",
        series=(("env/stop/*", "*"),),
    ),
    Spec(
        key="trouble",
        title="What goes wrong in episodes",
        note="share of episodes, and of tool calls",
        section="Episodes",
        series=(
            ("env/failed_frac", "the environment failed"),
            ("env/limit_frac", "ended by a limit"),
            ("env/tool_error_frac", "calls answered with an error"),
        ),
    ),
    Spec(
        key="batch",
        title="Groups in the batch",
        note="",
        section="Completions",
        series=(
            ("rollout/groups_trained", "all"),
            ("replay/groups", "replayed"),
            ("reroll/groups", "tried again"),
        ),
    ),
    Spec(
        key="gap",
        title="Sampler and trainer apart",
        note="difference of their log-probabilities, nats",
        section="Sampler and trainer",
        series=(("mismatch/logprob_diff_mean", "mean"), ("mismatch/logprob_diff_max", "largest")),
        log=True,
    ),
    Spec(
        key="staleness",
        title="Staleness",
        note="steps from sampling to training a group",
        section="Sampler and trainer",
        series=(("rollout/staleness_mean", "mean"), ("rollout/staleness_max", "oldest")),
    ),
    Spec(
        key="weight",
        title="Correction of the gap",
        note="weight of a token",
        section="Sampler and trainer",
        series=(("mismatch/weight_mean", "mean"), ("mismatch/weight_min", "least"), ("mismatch/weight_max", "largest")),
    ),
    Spec(
        key="corrected",
        title="Corrected tokens",
        note="share of tokens",
        section="Sampler and trainer",
        series=(
            ("mismatch/masked_frac", "left out"),
            ("mismatch/clipped_frac", "weight clipped"),
            ("mismatch/opsm_frac", "too far off-policy"),
        ),
    ),
    Spec(
        key="gradient",
        title="Gradient norm",
        note="before clipping",
        section="Optimizer and speed",
        series=(("optim/grad_norm", "norm"),),
    ),
    Spec(
        key="rate",
        title="Learning rate",
        note="",
        section="Optimizer and speed",
        series=(("optim/lr", "rate"),),
    ),
    Spec(
        key="throughput",
        title="Throughput",
        note="completion tokens per second, the whole step",
        section="Optimizer and speed",
        series=(("perf/tok_s", "tokens per second"),),
    ),
    Spec(
        key="time",
        title="Time of a step",
        note="seconds",
        section="Optimizer and speed",
        series=(
            ("time/step_s", "step"),
            ("time/rollout_s", "sampling and scoring"),
            ("time/train_s", "training"),
            ("time/sync_s", "sync"),
        ),
    ),
)

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


# ----------------------------------------------------------------------------------------------------------------------
# A chart as inline SVG that fits any width: positions across are percentages, positions down are pixels.
#
# Lines are drawn in an inner picture that is stretched, their width is not. Colours are classes of the page's style
# sheet, so that light and dark are its business. Over the plot lie columns, one a step; under the pointer a column
# shows
# the step's values above the plot, where the last ones stand otherwise. Nothing of this is script.
# ----------------------------------------------------------------------------------------------------------------------

PALETTE = 6  # colours, after which they come again
DASHES = 4
_STRETCH = 1000  # width of the inner picture
_ROOM = 0.06  # of the axis, above and below


class Scale:
    """Values -> pixels from the top, and the values to label."""

    def __init__(self, values: Sequence[float], *, height: int, log: bool):
        self._map: Callable[[float], float] = math.log10 if log else float
        low, high = self._map(min(values)), self._map(max(values))
        if log:
            decades = range(math.floor(low + 1e-9), math.ceil(high - 1e-9) + 1)
            self.ticks = [10.0**power for power in decades[:: math.ceil(len(decades) / 5)]]
            low, high = float(decades[0]), float(decades[-1])
        else:
            if low > 0 and low < 0.4 * high:
                low = 0.0
            if high == low:
                low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
            self.ticks = nice_ticks(low, high)
        room = 0.0 if log else _ROOM * (high - low)
        self.low, self.high = (low if low == 0 else low - room), high + room
        self.height = height

    def __call__(self, value: float) -> float:
        return round(self.height * (self.high - self._map(value)) / (self.high - self.low), 1)


def nice_ticks(low: float, high: float, *, about: int = 4) -> list[float]:
    """Round values within [low, high], a step of 1, 2 or 5 times a power of ten apart.

    >>> nice_ticks(0, 1), nice_ticks(3, 47)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [10.0, 20.0, 30.0, 40.0])
    """
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.75)
    digits = max(0, 2 - math.floor(math.log10(step)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, digits) for index in range(first, last + 1)]


def step_ticks(first: int, last: int) -> list[int]:
    """Whole steps to label, the ends' neighbours left out where they would touch."""
    if first == last:
        return [first]
    ticks = sorted({round(tick) for tick in nice_ticks(first, last, about=5) if tick == round(tick)})
    return ticks if len(ticks) > 1 else [first, last]


def draw(chart: Chart, *, height: int = 140) -> Markup:
    """The `<svg>` element of the chart."""
    drawn = [value for curve in chart.curves for _, value in curve.finite]
    drawn += [value for curve in chart.curves for _, *ends in curve.band for value in ends]
    scale = Scale(drawn, height=height, log=chart.log)
    parts = [_axes(chart, scale)]
    lines = Markup("").join(_line(curve, chart, scale) for curve in reversed(chart.curves))
    parts.append(
        Markup('<svg viewBox="0 0 {} {}" preserveAspectRatio="none" width="100%" height="{}">{}</svg>').format(
            _STRETCH, height, height, lines
        )
    )
    parts += [_dots(curve, chart, scale) for curve in chart.curves]
    parts.append(_columns(chart, height=height))
    return Markup('<svg class="plot" role="img" aria-label="{}" width="100%" height="{}">{}</svg>').format(
        describe(chart), height, Markup("").join(parts)
    )


def describe(chart: Chart) -> str:
    """The chart in words."""
    texts = []
    for curve in chart.curves:
        values = [value for _, value in curve.finite]
        if values:
            (first, begin), (last, end) = curve.finite[0], curve.finite[-1]
            texts.append(
                f"{plain(curve.name)}: {number(begin)} at step {first}, {number(end)} at step {last}, "
                f"between {number(min(values))} and {number(max(values))}"
            )
    return f"{plain(chart.title)} over steps {chart.first} to {chart.last}. " + ". ".join(texts)


def colour(curve: Curve) -> str:
    """The class of the curve's colour."""
    return f"c{curve.colour % PALETTE}"


def dash(curve: Curve) -> str:
    """The class of the curve's dashes; runs beyond the palette are told apart by them."""
    return f"d{(curve.dash + curve.colour // PALETTE) % DASHES}"


def _across(step: float, chart: Chart) -> float:
    """Per cent of the width."""
    return 50.0 if chart.first == chart.last else 100.0 * (step - chart.first) / (chart.last - chart.first)


def _axes(chart: Chart, scale: Scale) -> Markup:
    grid = Markup("").join(
        Markup('<line x1="0" x2="100%" y1="{0}" y2="{0}"/><text x="-7" y="{1}">{2}</text>').format(
            scale(tick), scale(tick) + 3.5, _tick(tick)
        )
        for tick in scale.ticks
    )
    steps = Markup("").join(
        Markup('<text x="{:.4g}%" y="{}">{:,}</text>').format(_across(tick, chart), scale.height + 16, tick)
        for tick in step_ticks(chart.first, chart.last)
    )
    return Markup('<g class="y" aria-hidden="true">{}</g><g class="x" aria-hidden="true">{}</g>').format(grid, steps)


def _tick(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    mantissa, _, exponent = f"{value:.6g}".partition("e")
    text = f"{mantissa}e{int(exponent)}" if exponent else mantissa
    return text.replace("-", "−")


def _line(curve: Curve, chart: Chart, scale: Scale) -> Markup:
    """The curve and the band around it; a value that is not finite interrupts the line."""
    path, pen_down = [], False
    for step, value in curve.points:
        if value is not None:
            path.append(f"{'L' if pen_down else 'M'}{10 * _across(step, chart):.5g} {scale(value)}")
        pen_down = value is not None
    band = Markup("")
    if len(curve.band) > 1:
        there = [f"{10 * _across(step, chart):.5g} {scale(high)}" for step, _, high in curve.band]
        back = [f"{10 * _across(step, chart):.5g} {scale(low)}" for step, low, _ in reversed(curve.band)]
        band = Markup('<path class="band {}" d="M{}Z"/>').format(colour(curve), "L".join(there + back))
    return band + Markup('<path class="line {} {}" vector-effect="non-scaling-stroke" d="{}"/>').format(
        colour(curve), dash(curve), "".join(path)
    )


def _dots(curve: Curve, chart: Chart, scale: Scale) -> Markup:
    """Dots where the curve is measured now and then, or is one value; a cross where it was not finite."""
    lost = Markup("").join(
        Markup('<text class="lost" x="{:.4g}%" y="{}">×</text>').format(_across(step, chart), scale.height - 2)
        for step, value in curve.points
        if value is None
    )
    if not curve.marked and len(curve.finite) > 1:
        return lost
    return lost + Markup("").join(
        Markup('<circle class="dot {}" cx="{:.4g}%" cy="{}" r="3.5"/>').format(
            colour(curve), _across(step, chart), scale(value)
        )
        for step, value in curve.finite
    )


def _columns(chart: Chart, *, height: int) -> Markup:
    """The values of each step, shown while the pointer is over its column, and the last ones."""
    series = [(c, dict(c.points), {step: (low, high) for step, low, high in c.band}) for c in chart.curves]
    steps = sorted({step for _, points, _ in series for step in points})
    edges = [_across(chart.first, chart)]
    edges += [(_across(a, chart) + _across(b, chart)) / 2 for a, b in pairwise(steps)]
    edges.append(_across(chart.last, chart))
    if chart.first == chart.last:
        edges = [0.0, 100.0]

    def readout(step: int) -> Markup:
        shown = [(curve, _value(points[step], band.get(step))) for curve, points, band in series if step in points]
        return _readout(f"step {step:,}", shown)

    ends = {curve.points[-1][0] for curve in chart.curves}
    last = [(curve, _value(curve.points[-1][1], band.get(curve.points[-1][0]))) for curve, _, band in series]
    now = _readout(f"step {ends.pop():,}" if len(ends) == 1 else "last", last)
    columns = Markup("").join(
        Markup('<g class="at"><rect x="{:.4g}%" width="{:.4g}%" height="{}"/>{}</g>').format(
            left, max(right - left, 0.0), height, readout(step)
        )
        for step, (left, right) in zip(steps, pairwise(edges), strict=True)
    )
    return Markup('<g class="now" aria-hidden="true">{}</g><g class="steps" aria-hidden="true">{}</g>').format(
        now, columns
    )


def _readout(title: str, shown: Sequence[tuple[Curve, str]]) -> Markup:
    """A line of text over the plot's right end, each value in its curve's colour."""
    values = Markup("").join(
        Markup('<tspan class="{}" dx="9">{}</tspan>').format(colour(curve), value) for curve, value in shown
    )
    return Markup('<text x="100%" y="-9"><tspan>{}</tspan>{}</text>').format(title, values)


def _value(value: float | None, band: tuple[float, float] | None) -> str:
    if value is None:
        return "not finite"
    return number(value) if band is None else f"{number(value)} ({number(band[0])} to {number(band[1])})"


# ----------------------------------------------------------------------------------------------------------------------
# The same curves as PNG files, drawn with matplotlib where it is installed (the extra `report`).
# ----------------------------------------------------------------------------------------------------------------------

_COLOURS = ("#2563eb", "#d9480f", "#0c8f63", "#8b3fd1", "#a67c00", "#d6336c")  # those of page.css, light
_DASHES = ("-", "--", ":", "-.")
_DPI = 150


def write_pngs(charts: Sequence[Chart], directory: Path) -> list[Path]:
    """A PNG for each of our charts, named by its key; the other metrics' are on the page only.

    Raises ConfigError without matplotlib, StorageError where a file cannot be written.
    """
    figures = _figures()
    written = []
    for chart in charts:
        if chart.section == OTHER:
            continue
        path = directory / f"{chart.key}.png"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _draw(chart, figures, path)
        except OSError as error:
            raise StorageError.of(error, f"{path} cannot be written: {error}", hint="name another --png") from error
        written.append(path)
    return written


def _figures() -> Any:
    """matplotlib's figures without pyplot: no window, and nothing that stays open."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(
            f"--png needs matplotlib, which cannot be imported: {error}",
            hint="pip install 'groupwise[report]', or leave --png out: the page needs nothing",
        ) from error


def _draw(chart: Chart, figures: Any, path: Path) -> None:
    figure = figures.Figure(figsize=(10, 4) if chart.wide else (6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for curve in chart.curves:
        colour = _COLOURS[curve.colour % len(_COLOURS)]
        dash = _DASHES[(curve.dash + curve.colour // len(_COLOURS)) % len(_DASHES)]
        if curve.band:
            steps, low, high = zip(*curve.band, strict=True)
            axes.fill_between(steps, low, high, color=colour, alpha=0.13, linewidth=0)
        steps, values = zip(*curve.points, strict=True)
        numbers = [float("nan") if value is None else value for value in values]
        marker = "o" if curve.marked or len(curve.finite) == 1 else None
        axes.plot(steps, numbers, dash, color=colour, marker=marker, markersize=4, label=_literal(curve.name))
    axes.set_title(_literal(chart.title), loc="left", fontweight="bold")
    axes.set_xlabel("step")
    axes.set_ylabel(_literal(chart.note) if len(chart.note) <= 45 else "")
    if chart.log:
        axes.set_yscale("log")
    if len(chart.curves) > 1:
        axes.legend(frameon=False, fontsize="small")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=_DPI)


def _literal(text: str) -> str:
    """Text that matplotlib takes as it is: a dollar begins mathematics there, and a label's `_` hides it."""
    shown = plain(text).replace("\\", "\\\\").replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown
