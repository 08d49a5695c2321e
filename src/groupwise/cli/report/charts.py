"""The curves of `groupwise report RUN --png DIRECTORY`, drawn by matplotlib: which there are, of one run or several.

A picture without data is not made, nor is one whose values never change.
"""

from __future__ import annotations

import fnmatch
import importlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from groupwise.errors import ConfigError, StorageError
from groupwise.run.record import Point, RunRecord
from groupwise.server.rollout_view import plain

# ----------------------------------------------------------------------------------------------------------------------
# Which metrics stand together, under which words. `groupwise.algo.metrics` defines the metrics.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What to draw: metrics, or patterns of them, each with its label; in a pattern's label `*` is what it matched.

    `spread` is the metric of a standard deviation, drawn around the first curve.
    """

    key: str
    title: str
    note: str
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
        series=(("reward/mean", "training"), ("eval/*/reward", "held-out, *")),
        spread="reward/std",
        wide=True,
        marked=("eval/*/reward",),
    ),
    Spec(
        key="held_out",
        title="Held-out reward by column",
        note="",
        series=(("eval/*/*/reward", "*"),),
        marked=("eval/*/*/reward",),
    ),
    Spec(
        key="passed",
        title="Solved in k tries",
        note="held-out prompts",
        series=(("eval/*/pass@*", "*"),),
        marked=("eval/*/pass@*",),
    ),
    Spec(
        key="rewards",
        title="Each reward",
        note="mean over a step's completions",
        series=(("reward/*/mean", "*"),),
    ),
    Spec(
        key="loudness",
        title="How loud each reward is",
        note="share of the spread inside a group",
        series=(("reward/*/share", "*"),),
    ),
    Spec(
        key="zero_variance",
        title="Groups without signal",
        note="share of groups whose rewards are all equal",
        series=(("reward/frac_zero_std", "share"),),
    ),
    Spec(
        key="kl",
        title="KL from the reference",
        note="nats per token",
        series=(("kl/mean", "measured"), ("loss/kl", "in the loss")),
    ),
    Spec(
        key="entropy",
        title="Entropy",
        note="nats per token",
        series=(("loss/entropy", "entropy"),),
    ),
    Spec(
        key="clip",
        title="Clipped tokens",
        note="share whose gradient the clip cuts",
        series=(("loss/clip_frac_low", "below"), ("loss/clip_frac_high", "above"), ("loss/clip_frac_dual", "dual")),
    ),
    Spec(
        key="ratio",
        title="Importance ratio",
        note="over the tokens of a step",
        series=(("loss/ratio_mean", "mean"), ("loss/ratio_min", "least"), ("loss/ratio_max", "largest")),
        noise=1e-3,
    ),
    Spec(
        key="loss",
        title="Policy loss",
        note="its gradient teaches; its value says little",
        series=(("loss/policy", "loss"),),
        noise=1e-5,
    ),
    Spec(
        key="length",
        title="Completion length",
        note="tokens",
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
        series=(("rollout/turns_mean", "turns"), ("env/tool_calls", "tool calls")),
    ),
    Spec(
        key="stops",
        title="How episodes end",
        note="share of episodes",
        series=(("env/stop/*", "*"),),
    ),
    Spec(
        key="trouble",
        title="What goes wrong in episodes",
        note="share of episodes, and of tool calls",
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
        series=(("mismatch/logprob_diff_mean", "mean"), ("mismatch/logprob_diff_max", "largest")),
        log=True,
    ),
    Spec(
        key="staleness",
        title="Staleness",
        note="steps from sampling to training a group",
        series=(("rollout/staleness_mean", "mean"), ("rollout/staleness_max", "oldest")),
    ),
    Spec(
        key="weight",
        title="Correction of the gap",
        note="weight of a token",
        series=(("mismatch/weight_mean", "mean"), ("mismatch/weight_min", "least"), ("mismatch/weight_max", "largest")),
    ),
    Spec(
        key="corrected",
        title="Corrected tokens",
        note="share of tokens",
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
        series=(("optim/grad_norm", "norm"),),
    ),
    Spec(
        key="rate",
        title="Learning rate",
        note="",
        series=(("optim/lr", "rate"),),
    ),
    Spec(
        key="throughput",
        title="Throughput",
        note="completion tokens per second, the whole step",
        series=(("perf/tok_s", "tokens per second"),),
    ),
    Spec(
        key="time",
        title="Time of a step",
        note="seconds",
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
    and `dash` are indices into the palettes; `marked` draws a dot at each point: it is measured there only."""

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
    curves: tuple[Curve, ...]
    first: int
    last: int
    per_point: int = 1
    log: bool = False
    wide: bool = False


def charts_of(runs: Sequence[RunRecord], *, max_points: int = MAX_POINTS) -> list[Chart]:
    """Every chart that has something to show."""
    steps = [line["step"] for run in runs for line in run.lines]
    first, last = min(steps, default=0), max(steps, default=0)
    drawn = (_chart(spec, runs, first=first, last=last, max_points=max_points) for spec in _specs(runs))
    return [chart for chart in drawn if chart is not None]


def _specs(runs: Sequence[RunRecord]) -> Iterator[Spec]:
    """Of several runs, what was trained on and what was held out are two charts."""
    if len(runs) > 1:
        training, held_out = SPECS[0].series
        yield replace(SPECS[0], series=(training,), note="mean over a step's completions, training prompts")
        held = replace(SPECS[0], key="held_out_mean", title="Held-out reward", note="", series=(held_out,))
        yield replace(held, spread=None, wide=False)
    yield from SPECS[1:] if len(runs) > 1 else SPECS


def _chart(spec: Spec, runs: Sequence[RunRecord], *, first: int, last: int, max_points: int) -> Chart | None:
    found = _found(spec, runs)
    values = [value for _, run, metric, *_ in found for _, value in run.points(metric)]
    if not found or all(value is None for value in values):
        return None
    if len(values) > len(found) and not any(_range(run.points(metric)) > spec.noise for _, run, metric, *_ in found):
        return None
    per_point = max(1, math.ceil((last - first + 1) / max_points))
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
# The PNG files, drawn with matplotlib where it is installed (the extra `report`).
# ----------------------------------------------------------------------------------------------------------------------

_COLOURS = ("#2563eb", "#d9480f", "#0c8f63", "#8b3fd1", "#a67c00", "#d6336c")
_DASHES = ("-", "--", ":", "-.")
_DPI = 150


def write_pngs(charts: Sequence[Chart], directory: Path) -> list[Path]:
    """A PNG for each chart, named by its key; metrics that none of them names are on the page only.

    Raises ConfigError without matplotlib, StorageError where a file cannot be written.
    """
    figures = _figures()
    written = []
    for chart in charts:
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
        colour, dash = look(curve)
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


def look(curve: Curve) -> tuple[str, str]:
    """The curve's colour and dashes; runs beyond the palette are told apart by their dashes."""
    dash = (curve.dash + curve.colour // len(_COLOURS)) % len(_DASHES)
    return _COLOURS[curve.colour % len(_COLOURS)], _DASHES[dash]


def _literal(text: str) -> str:
    """Text that matplotlib takes as it is: a dollar begins mathematics there, and a label's `_` hides it."""
    shown = plain(text).replace("\\", "\\\\").replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown
