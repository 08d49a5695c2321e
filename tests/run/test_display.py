"""The display on a real pseudo-terminal, into a pipe, and with text that tries to be more than text."""

import io
import os
import pty
import re
import sys

import pytest
from rich.console import Console

from groupwise.run.display import (
    STOPPING,
    LineDisplay,
    LiveDisplay,
    before_after_table,
    open_display,
    said,
    side_by_side,
    sparkline,
)
from groupwise.run.health import Event, Finding
from groupwise.run.health_rule import Severity
from groupwise.tasks.transcript import visible
from groupwise.types import Completion, FinishReason, Rollout, Turn

METRICS = {
    "reward/mean": 0.53125,
    "loss/policy": -4.35e-08,
    "kl/mean": 0.00123,
    "optim/grad_norm": 0.84,
    "time/step_s": 60.0,
    "perf/tok_s": 1812.4,
    "rollout/count": 32.0,
    "mismatch/logprob_diff_mean": 0.0012,
}


@pytest.fixture
def terminal(monkeypatch):
    """A pseudo-terminal of 100 columns: the stream to write to, and a function that reads what was drawn."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    main, secondary = pty.openpty()
    stream = os.fdopen(secondary, "w", encoding="utf-8")

    def drawn() -> str:
        stream.close()
        chunks = []
        while chunk := read(main):
            chunks.append(chunk)
        os.close(main)
        return b"".join(chunks).decode()

    return stream, drawn


def read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux says EIO when the other side is closed
        return b""


def plain(drawn: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn)


def rendered(renderable, *, width: int = 60) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor")
    console.print(renderable)
    return console.file.getvalue()


def test_lines_when_it_is_not_a_terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as CI services set it; a log still gets lines
    stream = io.StringIO()
    with open_display(200, stream=stream) as display:
        assert isinstance(display, LineDisplay)
        display.phase("sampling")
        display.step(12, METRICS)
        display.step(13, {})
        display.note("saved [bold]math@1[/bold]")
    assert stream.getvalue().splitlines() == [
        "step 12/200  reward 0.531  loss -4.3e-08  kl 0.00123  grad 0.84  mismatch 0.0012  tok/s 1,812  s/step 60.00  "
        "eta 3:08:00",
        "step 13/200  eta 3:07:00",
        "saved [bold]math@1[/bold]",
    ]


def test_the_stream_is_stderr_unless_it_is_given(capsys):
    with open_display(1) as display:
        display.step(1, {"reward/mean": float("nan")})
    out, err = capsys.readouterr()
    assert out == "" and err == "step 1/1  reward nan  eta -\n"


def test_live_on_a_terminal(terminal):
    stream, drawn = terminal
    with open_display(200, stream=stream) as display:
        assert isinstance(display, LiveDisplay)
        display.phase("sampling")
        display.step(1, METRICS)
        display.step(2, METRICS | {"reward/mean": 0.75})
        display.note("evaluated [red]math@1[/red]")
        display.phase("training \x1b]0;title\x07")
    text = drawn()
    assert "\x1b]0;" not in text
    assert text.count("\x1b[?25l") == 1 and text.rindex("\x1b[?25h") > text.index("\x1b[?25l")  # the cursor is back
    text = plain(text)
    for shown in ("2/200 steps", "64 rollouts", "eta 3:18:00", "reward 0.750", "tok/s 1,812", "▁█", "training"):
        assert shown in text
    assert "evaluated [red]math@1[/red]" in text


def standing(id: str, severity: Severity = "warn", *, name: str = "", began: int = 3) -> Finding:
    return Finding(
        id=id,
        metric="m",
        name=name,
        severity=severity,
        says="it is high",
        cause="because",
        of="mean",
        window=2,
        value=1.0,
        op=">",
        threshold=0.5,
        began=began,
    )


def test_health_in_lines_is_said_when_it_changes():
    stream = io.StringIO()
    entropy = standing("entropy.collapse")
    with open_display(5, stream=stream) as display:
        display.health([Event(kind="began", step=3, text="warn: entropy", finding=entropy)], [entropy])
        display.health([], [entropy])
        display.health([Event(kind="ended", step=5, text="entropy is over", finding=entropy)], [])
    assert stream.getvalue().splitlines() == ["step 3: warn: entropy", "step 5: entropy is over"]


def test_health_live_is_a_line_of_what_is_wrong_now(terminal):
    stream, drawn = terminal
    findings = [standing("grad.nan", "error"), standing("reward.silent", name="[red]fmt\x1b[2J", began=12)]
    with open_display(5, stream=stream) as display:
        display.step(3, METRICS)
        display.health([Event(kind="began", step=3, text="error: grad.nan")], findings)
    text = drawn()
    assert "\x1b[2J" not in text  # a reward's name is text
    text = plain(text)
    assert "step 3: error: grad.nan" in text
    assert "wrong now  grad.nan since step 3  reward.silent ([red]fmt␛[2J) since step 12" in text


def test_the_line_goes_when_nothing_is_wrong_any_more(terminal):
    stream, drawn = terminal
    with open_display(5, stream=stream) as display:
        display.health([], [standing("grad.nan")])
        stream.write("-- well again --")
        display.health([], [])
        display.step(4, METRICS)
    before, after = plain(drawn()).split("-- well again --")
    assert "grad.nan" in before and "grad.nan" not in after and "4/5 steps" in after


def test_no_color_is_respected(terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    stream, drawn = terminal
    with open_display(2, stream=stream) as display:
        display.step(1, METRICS)
    colours = re.findall(r"\x1b\[[0-9;]*(?:3[0-7]|38;[0-9;]*|9[0-7])m", drawn())
    assert colours == []


def test_a_dumb_terminal_gets_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream, drawn = terminal
    with open_display(2, stream=stream) as display:
        display.step(1, {})
    assert drawn() == "step 1/2  eta -\r\n"


def test_an_exception_leaves_the_terminal_as_it_was(terminal):
    stream, drawn = terminal
    stdout, stderr = sys.stdout, sys.stderr
    display = open_display(2, stream=stream)
    with pytest.raises(ZeroDivisionError), display:
        display.step(1 // 0, METRICS)
    display.close()  # again: harmless
    assert (sys.stdout, sys.stderr) == (stdout, stderr)
    text = drawn()
    assert text.rindex("\x1b[?25h") > text.index("\x1b[?25l")


def test_sparkline_has_one_bar_a_value_and_blanks_what_is_not_finite():
    assert sparkline([0, 7, float("nan"), float("inf"), 3.5]) == "▁█  ▅"
    assert sparkline([float("nan")]) == " "


def test_before_and_after():
    text = plain(rendered(before_after_table([("[red]exact[/red]", 0.25, 0.75), ("len", 10.0, 8.0)])))
    lines = [line.split() for line in text.splitlines()]
    assert lines == [
        ["metric", "before", "after", "change"],
        ["[red]exact[/red]", "0.250", "0.750", "+0.500"],
        ["len", "10.000", "8.000", "-2.000"],
    ]


def test_model_text_stays_text():
    hostile = "[bold red]x[/bold red] [link=file:///]y[/link] \x1b[2J\x9b31m\x1b]8;;http://evil\x07z \u202eabc :smile:"
    drawn = rendered(side_by_side(hostile, hostile, hostile, answer=hostile), width=200)
    for control in ("\x1b[2J", "\x1b]8", "\x9b", "\x07", "\u202e"):
        assert control not in drawn
    text = plain(drawn)
    assert text.count("[bold red]x[/bold red] [link=file:///]y[/link] ␛[2J") == 4
    assert ":smile:" in text


def test_visible_keeps_lines_and_tabs():
    assert visible("a\n\tb\r\x00é中") == "a\n\tb␍␀é中"


def test_an_episode_is_shown_by_what_was_said_and_how_it_ended():
    messages = (
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "x" * 1000},
        {"role": "assistant", "content": "It is 4.\n"},
    )
    lines = said(Rollout(turns=(), messages=messages, stop="done", reward=0.5)).splitlines()
    assert lines[0] == "assistant: look({'a': 1})" and lines[2:] == ["assistant: It is 4.", "[done, reward 0.5]"]
    assert lines[1].startswith("tool: xxx") and lines[1].endswith("...") and len(lines[1]) == len("tool: ") + 400
    many = said(Rollout(turns=(), messages=messages[2:] * 30, stop="max_turns")).splitlines()
    assert len(many) == 12 and many[5] == "... 20 more messages ..." and many[-1] == "[max_turns, no reward]"
    failed = Rollout(turns=(), stop="error", error="Env.reset raised KeyError: 'city'")
    assert said(failed) == "[failed: Env.reset raised KeyError: 'city']"


def test_a_completion_is_shown_as_it_is():
    completion = Completion(token_ids=(1,), logprobs=(0.0,), text="4\n", finish_reason=FinishReason.STOP)
    assert said(Rollout(turns=(Turn((1,), completion),))) == "4\n"


def test_that_the_run_stops_stays_on_the_screen(terminal):
    """Ctrl-C's message is part of every later frame: what a signal handler wrote itself would be drawn over."""
    stream, drawn = terminal
    with open_display(5, stream=stream) as display:
        display.stopping()
        display.step(1, METRICS)
        display.step(2, METRICS)
    last_frame = drawn().rpartition("2/5 steps")[2]
    assert STOPPING in last_frame
