"""The starter's report card: what it can do on held-out problems. `groupwise starter build` writes it.

A row is one skill in one style of answer; `greedy` and `sampled` are shares of right replies by `tasks.is_correct`,
`sampled` at temperature 1 as in training. No torch here: reading a report should not wait for it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from groupwise.errors import ModelError
from groupwise.starter.tasks import SKILLS

STARTER_DIR = Path(__file__).with_name("model")  # the same as in groupwise.model, which imports torch
REPORT = "report.json"


def write_report(directory: Path, measured: dict[str, Any]) -> Path:
    """Put the report beside the model."""
    path = directory / REPORT
    path.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    return path


def read_report(directory: Path) -> dict[str, Any]:
    """The report beside the model. Raises ModelError if it is not there."""
    path = directory / REPORT
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}", hint="measure the model anew with --measure") from error


def describe(measured: dict[str, Any]) -> list[tuple[str, ...]]:
    """The report as the rows of a table, the first its headings."""
    rows = [("skill", "style", "greedy", "sampled", "problems", "what it is")]
    for row in measured["skills"]:
        rates = (f"{row['greedy']:.1%}", f"{row['sampled']:.1%}", str(row["problems"]))
        rows.append((row["skill"], row["style"], *rates, SKILLS[row["skill"]].description))
    return rows
