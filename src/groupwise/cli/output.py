"""Writes the command line's output: data to stdout, words to stderr, and nothing that a model wrote is interpreted."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from groupwise.tasks.transcript import visible


def stdout() -> Console:
    """Return a console on stdout as it is now; colours only on a terminal, none with NO_COLOR."""
    return Console(highlight=False)


def say(text: str) -> None:
    """Print a line on stderr."""
    print(visible(text), file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print one line of strict JSON on stdout."""
    print(json.dumps(value, allow_nan=False))


@contextmanager
def json_alone(as_json: bool) -> Iterator[None]:
    """Send other output inside the block, such as a reward function's, to stderr; with `--json` only."""
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        yield


def print_line(text: str, *, console: Console | None = None) -> None:
    """Print a line that is not wrapped, so that paths and commands can be copied."""
    (console or stdout()).print(Text(visible(text)), soft_wrap=True)


def print_pairs(rows: Iterable[Sequence[str]], *, console: Console | None = None) -> None:
    """Print rows in aligned columns."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    (console or stdout()).print(table)


def duration(seconds: float) -> str:
    """Return it as people say it.

    >>> duration(40), duration(1300), duration(9000)
    ('40 s', '22 min', '2.5 h')
    """
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )


def finite(value: float | None) -> float | None:
    """Return `value`, or None if JSON has no number for it."""
    return value if value is not None and math.isfinite(value) else None
