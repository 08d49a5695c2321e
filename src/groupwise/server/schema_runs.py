"""The answers of `groupwise ui`, which shows the directories of runs."""

from __future__ import annotations

from typing import Any, Literal

from groupwise.sdk.types import Answer, absent
from groupwise.server.findings import Findings
from groupwise.server.schema_rollouts import RolloutDetail

RunState = Literal["running", "finished", "stopped", "empty"]


class RunSummary(Answer):
    """A run in the list."""

    run: str
    """The run's id here: the directory's name, with more of its path in front if two have the same."""
    directory: str
    name: str
    model: str | None
    state: RunState
    """`running`: a process has its directory locked, or wrote to it within the last minute; `finished`: it made all of
    its steps; `empty`: it made none."""
    step: int
    steps: int | None
    """The number of steps that it should make; null if its configuration cannot be read."""
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
    served: str | None
    """With `groupwise serve RUN`, the version of the run that the server began with, or `base`; its web interface is at
    /ui/ of the same address. null: no model is served here."""


class RunDetail(RunSummary):
    """A run with its configuration."""

    config: dict[str, Any]
    """Every effective value, under its dotted name."""
    changed: list[str]
    """The keys of `config` whose values are not the defaults; empty if it is not a configuration of this version."""
    versions: list[str]
    """Adapter versions in its directory, oldest first."""
    notes: list[str]
    """Parts that could not be read."""


class RunMetrics(Answer):
    """Metrics that a run recorded: {"step", "time", <metric>: <number>, ...} for each line of its metrics.jsonl.
    Training and evaluation each write a line of the same step; of a metric that is in both, the later line counts."""

    run: str
    steps: list[dict[str, Any]]
    next: str
    """The cursor behind the last line: send it as `after` to get only what is new."""
    anew: bool
    """The file was rewritten since `after`, as when a run resumes from a checkpoint: `steps` are all of them."""


class RunHealth(Findings):
    """Problems that a run's metrics show; remedies are overrides of its configuration."""

    run: str


class PairedChange(Answer):
    """A measure of held-out prompts that were answered twice: the mean over prompts of the later value less the earlier
    one."""

    measure: str
    """The measure, as `greedy/reward` or `sampled/pass@8`."""
    prompts: int
    difference: float
    error: float | None
    """The standard error of `difference`, of the prompts' differences; null of fewer than two prompts."""
    p: float
    """The chance of a difference as large in either direction, were both equally good (a sign-flip test)."""


class RunBeside(Answer):
    """The last evaluation of `run` less that of `against`, on the same held-out prompts."""

    run: str
    against: str
    changes: list[PairedChange]


class RunDiff(Answer):
    """The configurations of several runs; `differs` are the keys whose values are not all the same, in order.
    `held_out` is of each run that was evaluated on the same prompts as the first."""

    configs: dict[str, dict[str, Any]]
    differs: list[str]
    held_out: list[RunBeside]


class RolloutPart(Answer):
    """Describes a turn of an episode, or a message between two turns, and how many of the episode's `tokens` it has."""

    role: str
    """`assistant` for the policy; else who said it, as `user` or `tool NAME`."""
    tokens: int
    images: list[str | None] | None = absent()
    """For a message with images, in order, the address of each; null if the image is no longer kept."""
    reward: float | None
    """The turn's own."""
    begins_segment: bool
    """The turn does not continue from the one before, and begins a token sequence of its own."""
    trained: bool


class RunRollout(RolloutDetail):
    """Describes a run's completion."""

    gaps: list[float | None] | None
    """For each of `tokens` the trainer's log-probability minus the sampler's, if the run recorded them."""
    parts: list[RolloutPart]
    """An episode's turns and messages, with the author and number of `tokens` of each; otherwise empty."""
    ended: str | None
    """Why an episode ended."""


class RunRolloutGroup(Answer):
    """The completions of one prompt, highest reward first."""

    group: str
    prompt: str
    prompt_token_ids: list[int]
    images: list[str | None] | None = absent()
    """For a prompt with images, in order, the address of each; null if the image is no longer kept."""
    columns: dict[str, str]
    """The prompt's other columns, as text."""
    rollouts: list[RunRollout]


class RunChange(Answer):
    """A held-out prompt, answered before and after."""

    prompt: str
    images: list[str | None] | None = absent()
    """For a prompt with images, in order, the address of each; null if the image is no longer kept."""
    columns: dict[str, str]
    before: RunRollout
    after: RunRollout


class RunEvaluations(Answer):
    """The change that training made on the held-out prompts, from the evaluation at step `first` to that at step
    `last`, which is the last one, or that of the version which the run keeps.

    `mode` is null where there are not two evaluations of the same prompts.
    """

    run: str
    mode: str | None
    first: int | None
    last: int | None
    prompts: int
    better: int
    worse: int
    paired: list[PairedChange]
    """The change from `first` to `last`, for each mode and measure."""
    changed: list[RunChange]
    """The prompts whose reward changed most: a few that got better, then a few that got worse."""
