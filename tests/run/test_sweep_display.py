"""What is seen of several runs: lines that say whose they are, or a table on a terminal."""

from __future__ import annotations

import io
import re

from rich.console import Console

from groupwise.run.health import Event
from groupwise.run.sweep_display import SweepLines, SweepTable, open_sweep_display

STEPS = {"seed=0": 3, "seed=1": 3}
METRICS = {"reward/mean": 0.25, "time/step_s": 2.0}


def test_lines_say_whose_they_are():
    stream = io.StringIO()
    with open_sweep_display(STEPS, stream=stream) as shown:
        assert isinstance(shown, SweepLines)
        shown.of("seed=1").phase("sampling")
        shown.of("seed=1").step(1, METRICS)
        shown.of("seed=0").note("saved [bold]math@1[/bold]")
        shown.of("seed=0").health([Event(kind="note", step=2, text="it is flat")], ())
        with shown.of("seed=0"):
            pass  # a run that ends leaves the others' display as it is
        shown.of("seed=1").step(2, METRICS)
    assert stream.getvalue().splitlines() == [
        "seed=1  step 1/3  reward 0.250  s/step 2.00  eta 0:04",
        "seed=0  saved [bold]math@1[/bold]",
        "seed=0  step 2: it is flat",
        "seed=1  step 2/3  reward 0.250  s/step 2.00  eta 0:02",
    ]


def test_a_row_for_each_run_on_a_terminal():
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=100, color_system=None)
    with SweepTable(STEPS, console=console) as shown:
        shown.of("seed=0").step(1, METRICS)
        shown.of("seed=0").step(2, METRICS | {"reward/mean": 0.75})
        shown.of("seed=0").phase("training \x1b]0;title\x07")
        shown.of("seed=1").note("evaluated [red]math@1[/red]")
        shown.stopping()
    text = drawn.getvalue()
    assert "\x1b]0;" not in text and "seed=1  evaluated [red]math@1[/red]" in text
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).split("seed=0")[-1]
    first, second = last.splitlines()[:2]
    for words in ("2/3", "reward 0.750", "▁█", "eta 0:02", "training"):
        assert words in first
    assert "seed=1" in second and "0/3" in second and "waiting" in second
    assert "stopping after the step that each run is in" in last
