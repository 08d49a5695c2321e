"""The example runs as it stands, on fewer questions a step: it learns, and goes on with the same numbers."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "loop_by_hand.py"
STEP = re.compile(r"step +(\d+)  mean reward (\d\.\d{3})")


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("loop_by_hand", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_it_learns_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load()
    monkeypatch.setattr(module, "PROMPTS", 8)

    def loop(*flags: str) -> list[tuple[int, float]]:
        """The steps that were shown and their mean rewards."""
        monkeypatch.setattr(sys, "argv", ["loop_by_hand.py", "--log-path", str(tmp_path / "run"), *flags])
        asyncio.run(module.main())
        return [(int(number), float(reward)) for number, reward in STEP.findall(capsys.readouterr().out)]

    first = loop("--steps", "11")  # saves a state after 10
    assert [number for number, _ in first] == list(range(1, 12))
    rewards = [reward for _, reward in first]
    before, after = sum(rewards[:2]) / 2, sum(rewards[-4:]) / 4
    assert before < 0.5 and after > before + 0.2, rewards
    assert loop("--steps", "11") == first[10:]  # the lost steps again, to the last digit shown


def test_it_fits_on_a_page() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 100
