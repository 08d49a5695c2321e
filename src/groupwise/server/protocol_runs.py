"""The answers of `groupwise ui`, which shows the directories of runs."""

from __future__ import annotations

from typing import Any, Literal

from groupwise.server.findings import Findings
from groupwise.server.wire import Answer

RunState = Literal["running", "finished", "stopped", "empty"]


class RunSummary(Answer):
    """A run in the list."""

    run: str
    """Its id here: the directory's name, with more of its path in front where two have the same."""
    directory: str
    name: str
    model: str | None
    state: RunState
    """`running`: a process has its directory locked, or wrote to it within the last minute; `finished`: it made all of
    its steps; `empty`: it made none."""
    step: int
    steps: int | None
    """How many it is to make; null where its configuration cannot be read."""
    reward: float | None
    """The mean reward of its last step."""
    evaluated: dict[str, float]
    """The last held-out reward by mode."""
    seed: int | None
    started: str | None
    updated: str | None


class RunList(Answer):
    """The runs, as they were named on the command line."""

    runs: list[RunSummary]


class RunDetail(RunSummary):
    """A run with its configuration."""

    config: dict[str, Any]
    """Every effective value, under its dotted name."""
    versions: list[str]
    """Adapter versions in its directory, oldest first."""
    notes: list[str]
    """What could not be read."""


class RunMetrics(Answer):
    """What a run recorded: {"step", "time", <metric>: <number>, ...} for each line of its metrics.jsonl. Training and
    evaluation write a line each of the same step; of a metric that stands in two, the later counts."""

    run: str
    steps: list[dict[str, Any]]
    next: str
    """The cursor behind the last line: send it as `after` to get only what is new."""
    anew: bool
    """The file was written anew since `after`, as when a run goes on from a checkpoint: `steps` are all there are."""


class RunHealth(Findings):
    """What a run's metrics say is going wrong; remedies are overrides of its configuration."""

    run: str


class RunDiff(Answer):
    """The configurations of several runs; `differs` are the keys whose values are not all the same, in order."""

    configs: dict[str, dict[str, Any]]
    differs: list[str]
