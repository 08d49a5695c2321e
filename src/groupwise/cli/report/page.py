"""Renders the report as one HTML file without scripts or external requests.

`page.html.jinja` is the page and `page.css` its looks; both are read from beside this module. Jinja escapes every value
that is not markup of ours, and the page's Content-Security-Policy allows the style sheet by its hash and nothing else,
so that even an escape that is missing could neither run nor load anything.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from groupwise.cli.report import charts as svg
from groupwise.cli.report.charts import OTHER, Chart, charts_of, constants
from groupwise.cli.report.facts import (
    config_differences,
    headlines,
    held_out_table,
    kept_step,
    number_table,
    what_it_was,
)
from groupwise.cli.report.samples import MAX_TOKENS, ShownStep, choose_steps, read_change, read_samples
from groupwise.errors import StorageError
from groupwise.run.health import Finding, Report
from groupwise.run.record import RunRecord
from groupwise.server.rollout_view import Piece, ShownCompletion, change, duration, number, plain, reward

_HERE = Path(__file__).parent
_WIDE, _SMALL = 230, 140  # heights of charts, pixels
# Upper ends of the colour classes: probabilities of a token, nats between sampler and trainer, sizes of an advantage.
_PROBABILITIES = (0.01, 0.05, 0.2, 0.5, 0.9)
_GAPS = (1e-4, 1e-3, 1e-2, 0.1)
_ADVANTAGES = (0.25, 0.75, 1.5)


def write_page(runs: Sequence[RunRecord], path: Path, *, steps: Sequence[int] = ()) -> Path:
    """Write the report of the first run, beside the others where there are several, to `path`, whole or not at all.

    `steps` are those whose completions are shown; none means the first, the middle and the last (of several runs: the
    last of each). Raises StorageError.
    """
    page = render(runs, steps=steps)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise StorageError.of(
            error, f"{path} cannot be written: {error}", hint="name another file with --out"
        ) from error
    return path


def render(runs: Sequence[RunRecord], *, steps: Sequence[int] = ()) -> str:
    """The page as text."""
    css = (_HERE / "page.css").read_text(encoding="utf-8")
    charts = charts_of(runs)
    tokens = MAX_TOKENS // len(runs)
    shown, notes = [], [(run, note) for run in runs for note in run.notes]
    for run in runs:
        chosen = choose_steps(list(run.rollouts), steps)
        read, more = read_samples(run, chosen[-1:] if len(runs) > 1 and not steps else chosen, tokens=tokens)
        shown.append((run, read))
        notes += [(run, note) for note in more]
    changes = [(run, read_change(run, last=kept_step(run), tokens=tokens // 4)) for run in runs]
    return (
        _environment()
        .get_template("page.html.jinja")
        .render(
            runs=runs,
            run=runs[0],
            several=len(runs) > 1,
            css=Markup(css),
            css_hash=Markup(base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()),
            headlines=[headlines(run) for run in runs],
            facts=what_it_was(runs[0]),
            held_out=held_out_table(runs),
            sections=_sections(charts),
            other=[chart for chart in charts if chart.section == OTHER],
            constants=constants(runs[0]) if len(runs) == 1 else [],
            samples=shown,
            changes=[(run, change) for run, change in changes if change is not None and change.prompts],
            has_gaps=_has_gaps(step for _, read in shown for step in read),
            differences=config_differences(runs),
            numbers=[number_table(run) for run in runs],
            notes=notes,
            written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        )
    )


def _has_gaps(steps: Iterable[ShownStep]) -> bool:
    """Whether the trainer's log-probabilities were recorded with any of the completions."""
    shown = [each for step in steps for group in step.groups for each in (group.best, group.worst) if each is not None]
    return any(piece.gap is not None for each in shown for piece in each.pieces)


def _sections(charts: Sequence[Chart]) -> Mapping[str, list[Chart]]:
    sections: dict[str, list[Chart]] = {}
    for chart in charts:
        if chart.section != OTHER:
            sections.setdefault(chart.section, []).append(chart)
    return sections


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.filters |= {
        "number": number,
        "reward": reward,
        "change": change,
        "duration": duration,
        "draw": lambda chart: svg.draw(chart, height=_WIDE if chart.wide else _SMALL),
        "classes": _classes,
        "level": _level,
        "hint": _hint,
    }
    environment.globals |= {"colour": svg.colour, "dash": svg.dash, "ordered": _ordered}
    return environment


def _finalize(value: Any) -> Any:
    """What every `{{ ... }}` of the template goes through before it is escaped."""
    return value if isinstance(value, Markup) else plain(str(value))


def _ordered(health: Report) -> list[Finding]:
    """What stands, the worst first, and then what is over."""
    return sorted(health.findings, key=lambda found: (found.ended is not None, found.severity != "error", found.began))


def _classes(piece: Piece) -> str:
    """The classes that colour a token: l0 .. l5, from sure to unlikely, and g0 .. g4, from equal to far apart."""
    classes = []
    if (probability := piece.probability) is not None:
        classes.append(f"l{sum(probability <= end for end in _PROBABILITIES)}")
    if piece.gap is not None:
        classes.append(f"g{sum(abs(piece.gap) > end for end in _GAPS)}")
    if piece.text.isspace() and "\n" in piece.text:
        classes.append("newline")
    if piece.kind == "end":
        classes.append("end")
    return " ".join(classes)


def _level(completion: ShownCompletion) -> str:
    """The class that colours a completion by its advantage: up1 .. up4, down1 .. down4, or even."""
    advantage = completion.advantage
    if not advantage:
        return "even"
    return f"{'up' if advantage > 0 else 'down'}{1 + sum(abs(advantage) > end for end in _ADVANTAGES)}"


def _hint(piece: Piece) -> str:
    """What is said of a token under the pointer."""
    parts = []
    if (probability := piece.probability) is not None:
        parts.append(f"{probability:.1%}" if probability >= 1e-3 else f"{probability:.1e}")
    if piece.gap is not None:
        parts.append(f"gap {piece.gap:+.1e}")
    return ", ".join(parts)
