"""Builds the report's file from run directories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.cli.report.data import data_of
from groupwise.cli.report.page import write_page
from groupwise.errors import ConfigError
from groupwise.run.record import read_runs
from groupwise.server.run_files import open_runs

PAGE = "report.html"


@dataclass(frozen=True, kw_only=True)
class Written:
    """The file of one report, and what is not in it."""

    page: Path
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {"page": str(self.page), "notes": list(self.notes)}


def report(
    run_dir: Path,
    *,
    compare: Sequence[Path] = (),
    out: Path | None = None,
    steps: Sequence[int] = (),
) -> Written:
    """Write the report of `run_dir`, compared with `compare`, to `out` (by default `report.html` in the run's
    directory).

    `steps` are the steps whose completions are in the report; empty: as many steps as fit. Raises ConfigError (no run
    there, a step without rollouts), DataError (damaged metrics), StorageError.
    """
    directories = [run_dir, *compare]
    runs = read_runs(directories)
    available = sorted({step for run in runs for step in run.rollouts})
    if missing := sorted(set(steps) - set(available)):
        held = f"{available[0]} to {available[-1]}" if available else "none"
        raise ConfigError(f"there are no rollouts of step {missing[0]}", hint=f"steps with rollouts: {held}")
    data = data_of(list(open_runs(directories).values()), steps=steps)
    page = write_page(data, out or run_dir / PAGE)
    notes = [f"{run['detail']['run']}: {note}" for run in data["runs"] for note in _notes(run)]
    return Written(page=page, notes=tuple(notes))


def _notes(run: dict[str, Any]) -> list[str]:
    """Return what could not be read, and what is left out for its size."""
    return [*run["detail"]["notes"], *run["left_out"]]
