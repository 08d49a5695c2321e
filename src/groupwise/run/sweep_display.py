"""What a person sees while several runs work: a table with a row for each on a terminal, else lines with their names.

`SweepDisplay.of` is a `Display` for each run; the rest of the system knows only that. What is said of one run is said
behind its label, above the table.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from groupwise.run.display import STOPPING, Display, Progress, sparkline
from groupwise.tasks.transcript import visible

if TYPE_CHECKING:
    from groupwise.run.health import Event, Finding

STOPPING_ALL = STOPPING.replace("this step", "the step that each run is in")


class SweepDisplay(Protocol):
    """Progress of several runs."""

    def of(self, label: str) -> Display:
        """Return the display of a run; the same each time."""
        ...

    def stopping(self) -> None:
        """See `Display.stopping`: all runs end."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was. Safe to call twice."""
        ...

    def __enter__(self) -> SweepDisplay: ...

    def __exit__(self, *exception: object) -> None: ...


def open_sweep_display(steps: Mapping[str, int], *, stream: TextIO | None = None) -> SweepDisplay:
    """Return the display of runs that make so many `steps`, by their labels: a table if `stream` (stderr) is a terminal
    that can move its cursor, else lines."""
    target: TextIO = sys.stderr if stream is None else stream
    console = Console(file=target, highlight=False)
    live = target.isatty() and not console.is_dumb_terminal
    return SweepTable(steps, console=console) if live else SweepLines(steps, stream=target)


class SweepLines:
    """A line a step of each run, for logs and pipes."""

    def __init__(self, steps: Mapping[str, int], *, stream: TextIO):
        self._stream = stream
        self._of = {label: _Shown(label, total, self) for label, total in steps.items()}

    def of(self, label: str) -> Display:
        """See `SweepDisplay.of`."""
        return self._of[label]

    def stepped(self, shown: _Shown) -> None:
        """Print a run's newest step."""
        progress = shown.progress
        values = [f"{label} {value}" for label, value in progress.shown()]
        shown.note("  ".join((f"step {progress.done}/{progress.total_steps}", *values, f"eta {progress.eta()}")))

    def say(self, text: str) -> None:
        """Print a line."""
        print(visible(text), file=self._stream, flush=True)

    def stopping(self) -> None:
        os.write(2, f"\n{STOPPING_ALL}\n".encode())

    def close(self) -> None:
        pass

    def __enter__(self) -> SweepLines:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class SweepTable:
    """A row for each run, redrawn in place: how far it is, its newest reward, and what it does now."""

    def __init__(self, steps: Mapping[str, int], *, console: Console):
        self._console, self._stopping = console, False
        self._of = {label: _Shown(label, total, self) for label, total in steps.items()}
        self._live = Live(
            console=console,
            get_renderable=self._render,
            refresh_per_second=8,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=console.file is sys.stderr,
        )
        self._live.start()

    def of(self, label: str) -> Display:
        """See `SweepDisplay.of`."""
        return self._of[label]

    def stepped(self, shown: _Shown) -> None:
        """Show a run's newest step with the next frame."""

    def say(self, text: str) -> None:
        """Print a line above the table."""
        self._console.print(Text(visible(text)))

    def stopping(self) -> None:
        self._stopping = True

    def close(self) -> None:
        self._live.stop()

    def __enter__(self) -> SweepTable:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

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
    """One run's display: what is known of it, said through that of all."""

    def __init__(self, label: str, total_steps: int, every: SweepLines | SweepTable):
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
        """Does nothing: the display of all is closed with the last run."""

    def __enter__(self) -> _Shown:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
