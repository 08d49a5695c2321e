"""What rewards and environments print in their processes is shown, with who said it, and within limits."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from groupwise.config.rewards import RewardConfig
from groupwise.rewards import printed
from groupwise.rewards.base import load_rewards
from groupwise.rewards.pool import RewardPool
from groupwise.rewards.printed import AT_ONCE, HEARD, Prints, show

FUNCTION = """\
import sys
def loud(completions, **columns):
    for number in range({lines}):
        print("line", number)
    print("to \\x1b[31mstderr", file=sys.stderr)
    return [1.0 for _ in completions]
"""


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """No name has printed yet, and the time is the fixture's."""
    now = [0.0]
    monkeypatch.setattr(printed, "_shares", {})
    monkeypatch.setattr(printed.time, "monotonic", lambda: now[0])
    return now


def heard(monkeypatch: pytest.MonkeyPatch) -> Prints:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    return Prints()


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def message(text: str, by: str = "reward f") -> bytes:
    return json.dumps({"printed": text, "by": by, "whole": "scoring.workers=0"}).encode()


def test_what_cannot_be_shown_costs_no_answer(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(printed, "_shares", {})
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    (tmp_path / "quiet_rewards.py").write_text(FUNCTION.format(lines=1))
    specs = [RewardConfig(function="quiet_rewards:loud")]
    functions = load_rewards(specs, folder=tmp_path)
    with RewardPool(specs, folder=tmp_path) as pool:
        answer = asyncio.run(pool.call(functions[0], {"completions": ["a"]}, size=1, prompt_id="p"))
    assert answer.values == [1.0]


@pytest.mark.parametrize("count", [1, 100])
def test_a_reward_in_a_worker_is_heard(tmp_path: Path, monkeypatch: Any, capfd: Any, count: int) -> None:
    monkeypatch.setattr(printed, "_shares", {})
    (tmp_path / "loud_rewards.py").write_text(FUNCTION.format(lines=count))
    specs = [RewardConfig(function="loud_rewards:loud")]
    functions = load_rewards(specs, folder=tmp_path)
    with RewardPool(specs, folder=tmp_path) as pool:
        answer = asyncio.run(pool.call(functions[0], {"completions": ["a"]}, size=1, prompt_id="p"))
    assert answer.values == [1.0]
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("reward loud: ")]
    if count == 1:
        assert said == ["reward loud: line 0", r"reward loud: to \x1b[31mstderr"]
    else:
        assert said[:AT_ONCE] == [f"reward loud: line {number}" for number in range(AT_ONCE)]
        assert len(said) < AT_ONCE + 10 and "scoring.workers=0" in said[AT_ONCE]


def test_each_name_has_lines_of_its_own_and_gets_new_ones_with_time(fresh: list[float], capsys: Any) -> None:
    assert show(message("x\n" * 50)) and len(lines(capsys)) == AT_ONCE + 1
    assert show(message("x\n" * 50)) and not lines(capsys)
    assert show(message("x\n" * 3, "environment E")) and len(lines(capsys)) == 3
    fresh[0] = 2.0
    assert show(message("x\n" * 50)) and len(lines(capsys)) == 2
    fresh[0] = 1000.0
    assert show(message("x\n" * 50)) and len(lines(capsys)) == AT_ONCE


def test_answers_are_not_taken_for_prints(fresh: list[float]) -> None:
    assert not show(b'{"number": 3, "values": ["{\\"printed\\": 1}"]}')


def test_a_stream_is_heard_and_goes_on(monkeypatch: Any) -> None:
    prints = heard(monkeypatch)
    print("a", end="")
    sys.stderr.writelines(["b", "c"])
    assert not sys.stdout.isatty()
    said = prints.message("reward f", whole="scoring.workers=0")
    written: Any = sys.stdout.getvalue(), sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert said is not None and json.loads(said)["printed"] == "abc" and written == ("a", "bc")
    assert prints.message("reward f", whole="scoring.workers=0") is None


def test_between_two_answers_only_so_much_is_kept(monkeypatch: Any) -> None:
    prints = heard(monkeypatch)
    for _ in range(100):
        print("x" * 1000)
    said = prints.message("reward f", whole="scoring.workers=0")
    assert said is not None and HEARD <= len(said) < HEARD + 200
    print("again")
    assert b"again" in (prints.message("reward f", whole="scoring.workers=0") or b"")
