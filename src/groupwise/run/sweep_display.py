"""Shows the progress of several runs to a person: a table with a row for each on a terminal, else lines with their
names.

`SweepDisplay.of` is a `Display` for each run; the rest of the system knows only that. What is said of one run is said
behind its label, above the table.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from groupwise.run.display import STOPPING, Display, Progress, live_console, live_on, sparkline
from groupwise.tasks.transcript import visible

if TYPE_CHECKING:
    from groupwise.run.health import Event, Finding

STOPPING_ALL = STOPPING.replace("this step", "the step that each run is in")


class SweepDisplay(ABC):
    """Shows the progress of several runs, which make so many `steps` each, by their labels."""

    def __init__(self, steps: Mapping[str, int]):
        self._of = {label: _Shown(label, total, self) for label, total in steps.items()}

    def of(self, label: str) -> Display:
        """Return the display of a run; the same each time."""
        return self._of[label]

    @abstractmethod
    def stepped(self, shown: _Shown) -> None:
        """Show a run's newest step."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Say something once, above what is live."""

    @abstractmethod
    def stopping(self) -> None:
        """See `Display.stopping`: all runs end."""

    @abstractmethod
    def close(self) -> None:
        """Leave the terminal as it was. Safe to call twice."""

    def __enter__(self) -> SweepDisplay:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_sweep_display(steps: Mapping[str, int], *, stream: TextIO | None = None) -> SweepDisplay:
    """Return a table if `stream` (stderr) is a terminal that can move its cursor, else lines."""
    target: TextIO = sys.stderr if stream is None else stream
    console = live_console(target)
    return SweepLines(steps, stream=target) if console is None else SweepTable(steps, console=console)


class SweepLines(SweepDisplay):
    """Prints a line a step of each run, for logs and pipes."""

    def __init__(self, steps: Mapping[str, int], *, stream: TextIO):
        super().__init__(steps)
        self._stream = stream

    def stepped(self, shown: _Shown) -> None:
        shown.note(shown.progress.line())

    def say(self, text: str) -> None:
        print(visible(text), file=self._stream, flush=True)

    def stopping(self) -> None:
        os.write(2, f"\n{STOPPING_ALL}\n".encode())

    def close(self) -> None:
        """Do nothing: nothing was changed."""


class SweepTable(SweepDisplay):
    """Redraws a row for each run in place: how far it is, its newest reward, and what it does now."""

    def __init__(self, steps: Mapping[str, int], *, console: Console):
        super().__init__(steps)
        self._console, self._stopping = console, False
        self._live = live_on(console, self._render)

    def stepped(self, shown: _Shown) -> None:
        """Do nothing: the next frame shows it."""

    def say(self, text: str) -> None:
        self._console.print(Text(visible(text)))

    def stopping(self) -> None:
        self._stopping = True

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for shown in self._of.values():
            progress = shown.progress
            bar = ProgressBar(total=progress.total_steps, completed=progress.done, width=16)
            first = next(iter(progress.shown()), ("", ""))  # the reward, or what is learned in its place
            curve = "" if self._console.options.ascii_only else sparkline(progress.rewards)
            wrong = Text(" ".join(visible(each.label) for each in shown.standing), style="yellow")
            table.add_row(
                Text(visible(shown.label), style="bold"),
                bar,
                f"{progress.done}/{progress.total_steps}",
                Text.assemble((f"{first[0]} ", "dim"), first[1]),
                Text(curve[-16:], style="green"),
                f"eta {progress.eta()}",
                Text.assemble((visible(shown.doing), "dim"), "  " if wrong else "", wrong),
            )
        if not self._stopping:
            return table
        return Group(table, Text(STOPPING_ALL, style="bold yellow"))


class _Shown:
    """The display of one run, which shows it in that of all runs."""

    def __init__(self, label: str, total_steps: int, every: SweepDisplay):
        self.label, self.progress, self._every = label, Progress(total_steps), every
        self.doing = "waiting"
        self.standing: Sequence[Finding] = ()

    def phase(self, name: str) -> None:
        self.doing = name

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.progress.update(step, metrics)
        self._every.stepped(self)

    def note(self, text: str) -> None:
        self._every.say(f"{self.label}  {text}")

    def health(self, events: Iterable[Event], standing: Sequence[Finding]) -> None:
        self.standing = standing
        for event in events:
            self.note(f"step {event.step}: {event.text}")

    def stopping(self) -> None:
        self._every.stopping()

    def close(self) -> None:
        """Do nothing: the display of all is closed with the last run."""

    def __enter__(self) -> _Shown:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
