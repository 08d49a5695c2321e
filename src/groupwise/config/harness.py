"""The configuration of harness runs: `env.harness`, a program that is started for each episode and asks the policy."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from groupwise.config.section import Section, Text, Texts, conflict


def _inside(path: str) -> str:
    """Return a path within a workspace."""
    pure = PurePosixPath(path)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts:
        raise ValueError(f"{path!r} is not valid; write a path within the workspace, such as tests/test_a.py")
    return path


Path = Annotated[Text, AfterValidator(_inside)]
Command = Annotated[Texts, Field(min_length=1)]


class HarnessScoreConfig(Section):
    """A command that judges what a harness left in its workspace. It runs in the sandbox, on a copy."""

    command: Command
    """Program and arguments, such as [pytest, -q]; `{column}` stands for what the row has there."""
    files: dict[Path, str] = Field(default_factory=dict)
    """Files that are put over the workspace first (the tests), so that what the program did to them does not count."""
    files_column: Text | None = None
    """The same from a column of the row: an object of paths and texts."""
    reward: Literal["exit_status", "stdout"] = "exit_status"
    """`exit_status`: 1 for status 0, otherwise 0. `stdout`: the number in its last line, or a JSON object there of
    `reward`, `turn_rewards` (one for each answer of the policy, in their order) and `metrics`."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that it may take; then the reward is 0."""
    memory_mb: int = Field(default=1024, ge=16)
    """MiB of memory that it may have."""
    isolated: bool = True
    """Refuse to score where the sandbox has no namespaces; false runs it there as this user, with limits only."""


class HarnessConfig(Section):
    """A program that plays an episode as a separate process, and asks the policy over HTTP."""

    command: Command
    """Program and arguments; `{column}` stands for what the row has there (docs/environments.md)."""
    stdin: str | None = None
    """The program's standard input, in which `{column}` stands for the row's column; null is an empty one."""
    template: Text | None = None
    """A directory (relative to the config's folder) that is copied into each workspace; `{column}` names one a row."""
    files: dict[Path, str] = Field(default_factory=dict)
    """Files written into each workspace, by path; `{column}` in their texts."""
    files_column: Text | None = None
    """A column whose objects of paths and texts are written into the workspace, as they are."""
    env: dict[Text, str] = Field(default_factory=dict)
    """Environment variables in addition to those that every program gets; `{column}` in their values."""
    inherit: Texts = ()
    """Variables of this process that are passed on. No others are: keys and tokens stay here."""
    isolated: bool = False
    """Run it in the sandbox: no network but the policy's endpoint, no files but its workspace and programs."""
    show: Texts = ()
    """With `isolated`, further directories that the program sees, read-only, such as its installation."""
    memory_mb: int | None = Field(default=None, ge=16)
    """MiB of address space that each of its processes may have, and with `isolated`, in a control group, all of them
    together; null: with `isolated` 4096 MiB of what it may write, otherwise no limit."""
    disk_mb: int = Field(default=1024, ge=1)
    """MiB of the largest file that it may write."""
    output_characters: int = Field(default=4000, ge=1, le=1_000_000)
    """The number of characters kept of the end of stdout, and of stderr."""
    score: HarnessScoreConfig | None = None
    """The score of a workspace; null leaves scoring to `rewards`, which see the workspace."""
    on_failure: Literal["zero", "score", "error"] = "zero"
    """A program that ends by another status than 0, a signal or the time limit: worth 0, scored all the same, or failed
    (`env.on_error`)."""

    @model_validator(mode="after")
    def _acts(self) -> HarnessConfig:
        if self.show and not self.isolated:
            raise conflict("show", "acts with isolated only, without which the program sees all files; set isolated")
        return self
