"""Runs of the starter that a test looks at afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from groupwise.config.run import parse_config
from groupwise.run.loop import RunResult, run_loop


def starter_run(folder: Path, *, name: str, **settings: Any) -> RunResult:
    """Train in `folder`, where the code and the rows are."""
    where = {"folder": str(folder), "run_dir": str(folder / "run")}
    return run_loop(
        parse_config({"name": name, "model": "starter", "device": "cpu", "dtype": "float32", **where, **settings})
    )
