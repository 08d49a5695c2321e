"""Shows a run's progress to a person: a live display on a terminal, else one line a step.

Progress goes to stderr, so that stdout stays free for data. Whatever a model wrote is shown as text: rich's markup in
it is not interpreted and control characters are made visible, so that a completion cannot repaint the terminal.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from groupwise.tasks.transcript import visible

if TYPE_CHECKING:
    from groupwise.run.health import Event, Finding
    from groupwise.types import Message, Rollout

# How a metric is called in one word, and how it is written.
_SHOWN = {
    "reward/mean": ("reward", "{:.3f}"),
    "loss/policy": ("loss", "{:.2g}"),
    "loss/cross_entropy": ("cross-entropy", "{:.3f}"),
    "loss/preference": ("loss", "{:.3f}"),
    "preference/accuracy": ("accuracy", "{:.2f}"),
    "preference/margin": ("margin", "{:.3f}"),
    "kl/mean": ("kl", "{:.3g}"),
    "optim/grad_norm": ("grad", "{:.3g}"),
    "mismatch/logprob_diff_mean": ("mismatch", "{:.2g}"),
    "perf/tok_s": ("tok/s", "{:,.0f}"),
    "time/step_s": ("s/step", "{:.2f}"),
}
_BARS = "▁▂▃▄▅▆▇█"
_SPARKLINE_STEPS = 40
_ETA_STEPS = 20
_MESSAGES, _MESSAGE_CHARS = 10, 400  # shown of an episode
STOPPING = "stopping after this step; Ctrl-C once more stops at once"


class Display(Protocol):
    """Progress of a run. `step` is the number of steps finished, from 1 to the total."""

    def phase(self, name: str) -> None:
        """Say what is being done now: sampling, scoring, training, evaluating."""
        ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step. `rollout/count` is that step's own; the display adds them up."""
        ...

    def note(self, text: str) -> None:
        """Say something once, above what is live."""
        ...

    def health(self, events: Iterable[Event], standing: Sequence[Finding]) -> None:
        """Say what changed in the run's health, and show what is wrong now."""
        ...

    def stopping(self) -> None:
        """Say, and go on saying, that the run ends after the step that it is in. Called from a signal handler: it must
        neither print through a buffer nor take a lock."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was. Safe to call twice."""
        ...

    def __enter__(self) -> Display: ...

    def __exit__(self, *exception: object) -> None: ...


def open_display(total_steps: int, *, stream: TextIO | None = None) -> Display:
    """Return the live display if `stream` (stderr) is a terminal that can move its cursor, else lines."""
    target: TextIO = sys.stderr if stream is None else stream
    console = live_console(target)
    return LineDisplay(total_steps, stream=target) if console is None else LiveDisplay(total_steps, console=console)


def live_console(stream: TextIO) -> Console | None:
    """Return a console on a terminal that can move its cursor; None if the stream is not one."""
    console = Console(file=stream, highlight=False)
    # not console.is_terminal: FORCE_COLOR makes that true for a file as well
    return console if stream.isatty() and not console.is_dumb_terminal else None


def live_on(console: Console, render: Callable[[], RenderableType]) -> Live:
    """Start to redraw, in place, what `render` returns."""
    # What a reward function prints should appear above it, but a stdout that is a pipe is not ours to take.
    live = Live(
        console=console,
        get_renderable=render,
        refresh_per_second=8,
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=console.file is sys.stderr,
    )
    live.start()
    return live


class Progress:
    """Counts how far a run is, and how long a step takes: what all displays know."""

    def __init__(self, total_steps: int):
        self.total_steps = total_steps
        self.done = 0
        self.num_rollouts = 0
        self.metrics: Mapping[str, float] = {}
        self.rewards: deque[float] = deque(maxlen=_SPARKLINE_STEPS)
        self._step_s: deque[float] = deque(maxlen=_ETA_STEPS)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        self.done, self.metrics = step, metrics
        self.num_rollouts += int(metrics.get("rollout/count", 0))
        if "reward/mean" in metrics:
            self.rewards.append(metrics["reward/mean"])
        if "time/step_s" in metrics:
            self._step_s.append(metrics["time/step_s"])

    def eta(self) -> str:
        if not self._step_s:
            return "-"
        remaining_s = round(sum(self._step_s) / len(self._step_s) * max(self.total_steps - self.done, 0))
        hours, minutes = divmod(remaining_s // 60, 60)
        return f"{hours}:{minutes:02d}:{remaining_s % 60:02d}" if hours else f"{minutes}:{remaining_s % 60:02d}"

    def line(self) -> str:
        """Return the newest step, in a line."""
        values = [f"{label} {value}" for label, value in self.shown()]
        return "  ".join((f"step {self.done}/{self.total_steps}", *values, f"eta {self.eta()}"))

    def shown(self) -> list[tuple[str, str]]:
        pairs = [(label, key, form) for key, (label, form) in _SHOWN.items() if key in self.metrics]
        return [(label, form.format(self.metrics[key])) for label, key, form in pairs]


class LineDisplay:
    """Prints one line for each step, for logs and pipes. Phases are not shown."""

    def __init__(self, total_steps: int, *, stream: TextIO):
        self._progress = Progress(total_steps)
        self._stream = stream

    def phase(self, name: str) -> None:
        pass

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._progress.update(step, metrics)
        self.note(self._progress.line())

    def note(self, text: str) -> None:
        print(visible(text), file=self._stream, flush=True)

    def health(self, events: Iterable[Event], standing: Sequence[Finding]) -> None:
        for event in events:
            self.note(f"step {event.step}: {event.text}")

    def stopping(self) -> None:
        os.write(2, f"\n{STOPPING}\n".encode())

    def close(self) -> None:
        pass

    def __enter__(self) -> LineDisplay:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class LiveDisplay:
    """A progress bar and the latest numbers, redrawn in place."""

    def __init__(self, total_steps: int, *, console: Console):
        self._progress = Progress(total_steps)
        self._standing: Sequence[Finding] = ()
        self._stopping = False
        self._console = console
        self._spinner = Spinner("dots" if not console.options.ascii_only else "line", text="starting")
        self._live = live_on(console, self._render)

    def phase(self, name: str) -> None:
        self._spinner.update(text=Text(visible(name)))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._progress.update(step, metrics)
        self._live.refresh()

    def note(self, text: str) -> None:
        self._console.print(Text(visible(text)))

    def health(self, events: Iterable[Event], standing: Sequence[Finding]) -> None:
        self._standing = standing
        for event in events:
            self.note(f"step {event.step}: {event.text}")
        self._live.refresh()

    def stopping(self) -> None:
        self._stopping = True  # drawn with the next frame, and with all that follow

    def close(self) -> None:
        self._live.stop()

    def __enter__(self) -> LiveDisplay:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _render(self) -> RenderableType:
        progress = self._progress
        top = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=progress.total_steps, completed=progress.done, width=30)
        counts = f"{progress.done}/{progress.total_steps} steps  {progress.num_rollouts:,} rollouts"
        top.add_row(bar, counts, f"eta {progress.eta()}", self._spinner)
        line = Text("  ").join(
            Text.assemble((f"{label} ", "dim"), (value, "bold" if label == "reward" else ""))
            for label, value in progress.shown()
        )
        if not self._console.options.ascii_only:
            line.append(f"  {sparkline(progress.rewards)}", style="green")
        lines: list[RenderableType] = [top, line]
        if self._standing:
            lines.append(findings_line(self._standing))
        if self._stopping:
            lines.append(Text(STOPPING, style="bold yellow"))
        return Group(*lines)


def sparkline(values: Iterable[float]) -> str:
    """Return one bar a value, from the lowest to the highest; a value that is not finite is a blank.

    >>> sparkline([0, 1, 2, 3]), sparkline([5, 5]), sparkline([])
    ('▁▃▆█', '▁▁', '')
    """
    values = list(values)
    finite = [value for value in values if abs(value) < float("inf")]
    low, span = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)
    scale = (len(_BARS) - 1) / span if span else 0.0
    return "".join(_BARS[round((value - low) * scale)] if abs(value) < float("inf") else " " for value in values)


def findings_line(standing: Iterable[Finding]) -> Text:
    """Return the open findings in a line: each finding's name and its first step, errors in red."""
    line = Text("wrong now  ", style="dim")
    return line + Text("  ").join(
        Text.assemble(
            (visible(finding.label), "bold red" if finding.severity == "error" else "yellow"),
            (f" since step {finding.began}", "dim"),
        )
        for finding in standing
    )


def said(rollout: Rollout) -> str:
    """Return what came of a prompt, as text: the completion, or of an episode what was said, shortened, and how it
    ended."""
    if rollout.stop is None:
        return rollout.completion.text
    lines = [_line(message) for message in rollout.messages]
    if (more := len(lines) - _MESSAGES) > 0:
        half = _MESSAGES // 2
        lines = [*lines[:half], f"... {more} more messages ...", *lines[-half:]]
    reward = "no reward" if rollout.reward is None else f"reward {rollout.reward:.3g}"
    ends = f"[{rollout.stop}, {reward}]" if rollout.error is None else f"[failed: {rollout.error}]"
    return "\n".join([*lines, ends])


def _line(message: Message) -> str:
    """Return a message with who says it; tool calls as `name(arguments)`."""
    content = message.get("content")
    text = (content if isinstance(content, str) else str(content or "")).strip()
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    words = [text, *(f"{call.get('name')}({call.get('arguments')})" for call in calls)]
    shown = "\n".join(filter(None, words))
    shown = shown if len(shown) <= _MESSAGE_CHARS else f"{shown[: _MESSAGE_CHARS - 3]}..."
    return f"{message['role']}: {shown}"


def before_after_table(rows: Iterable[tuple[str, float, float]]) -> Table:
    """Return a table of (metric, before, after) with the change."""
    table = Table("metric", box=None, pad_edge=False)
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right")
    for metric, before, after in rows:
        table.add_row(Text(visible(metric)), f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}")
    return table


def side_by_side(prompt: str, before: str, after: str, answer: str | None = None) -> Panel:
    """Return a prompt with the completions of the untrained and the trained policy side by side."""
    columns = Table("before", "after", expand=True, box=None, pad_edge=False)
    columns.columns[0].ratio = columns.columns[1].ratio = 1
    columns.add_row(Text(visible(before)), Text(visible(after)))
    parts: list[RenderableType] = [Text(visible(prompt), style="bold"), Text(), columns]
    if answer is not None:
        parts += [Text(), Text(f"answer: {visible(answer)}", style="dim")]
    return Panel(Group(*parts))
