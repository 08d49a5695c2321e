"""A chart as inline SVG that fits any width: positions across are percentages, positions down are pixels.

Lines are drawn in an inner picture that is stretched, their width is not. Colours are classes of the page's style
sheet, so that light and dark are its business. Over the plot lie columns, one a step; under the pointer a column shows
the step's values above the plot, where the last ones stand otherwise. Nothing of this is script.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from markupsafe import Markup

from groupwise.report.charts import Chart, Curve
from groupwise.server.rollout_view import number, plain

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
