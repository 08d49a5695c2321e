"""The same curves as PNG files, drawn with matplotlib where it is installed (the extra `report`)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from groupwise.errors import ConfigError, StorageError
from groupwise.report.charts import Chart
from groupwise.report.specs import OTHER
from groupwise.server.rollout_view import plain

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
