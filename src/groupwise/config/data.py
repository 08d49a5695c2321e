"""Where a run's prompts come from: files, functions, Hugging Face datasets, the generators of reasoning-gym."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from groupwise.config.section import Section, Text, conflict

FILES = (".jsonl", ".json", ".csv", ".parquet")  # what a `data.source` that is a file ends with
REASONING_GYM = "reasoning-gym"  # the `data.source`, and the reward that its tasks bring
SCORE_ANSWER = "groupwise.bridges.reasoning_gym.reward:score_answer"
GENERATED = ("tasks", "size", "seed")  # keys of generated problems only
RunKind = Literal["grpo", "sft", "dpo"]  # what of its rows a run learns: prompts to answer, their answers, or pairs
READ = ("args", "split", "columns", "prompt_key", "answer_key")  # keys of rows that are read only


def _tasks(value: Any) -> Any:
    """Return a list of names, or a name without parameters, stands for empty parameters."""
    if isinstance(value, str) or not isinstance(value, Mapping | Sequence):
        return value
    if isinstance(value, Mapping):
        return {name: {} if parameters is None else parameters for name, parameters in value.items()}
    return {str(name): {} for name in value}


class DatasetConfig(Section):
    """Where prompts come from."""

    source: Text
    """A `.jsonl`, `.json`, `.csv` or `.parquet` file (relative to the config's folder), `module:function` that returns
    rows, a Hugging Face dataset's name, a directory with a saved dataset, or `reasoning-gym`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, or of `datasets.load_dataset`."""
    split: Text | None = None
    """The split of a Hugging Face dataset; null is `train`."""
    tasks: Annotated[dict[str, dict[str, Any]], BeforeValidator(_tasks)] = Field(default_factory=dict)
    """With source reasoning-gym: its generators by name, each with its parameters, and with `weight`, its share of the
    problems relative to the others' (1)."""
    size: int | None = Field(default=None, ge=1, le=10_000_000)
    """With source reasoning-gym: how many problems are generated; null is 1000."""
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    """With source reasoning-gym: which problems; null is 0 for training and 1 for evaluation, so that they differ."""
    columns: dict[Text, Text] = Field(default_factory=dict)
    """New names for columns, before anything else reads them: `{prompt: question, answer: label}`."""
    prompt_key: Text | None = None
    """The column with the prompt: a string, or a list of chat messages; null is `messages` or `prompt`."""
    answer_key: Text | None = None
    """With `kind: sft`, the column with the answer that is learned: text, or the assistant's messages; null is
    `completion`, `answer`, `response` or `output`, or what the assistant says in a conversation."""
    raw: bool = False
    """A prompt that is a string is a user's message, in the model's chat template where it has one; true samples from
    the text as it is, and gives rewards strings."""
    system: Text | None = None
    """A system message to put before every chat prompt."""
    completion_only: bool = True
    """Of a prompt that ends with the assistant's words, which the policy continues: rewards see what was sampled alone;
    false puts those words in front of it, as TRL does. They are not trained on either way."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first rows; null is all."""

    @property
    def kind(self) -> Literal["file", "function", "dataset", "generated"]:
        """How `source` is read."""
        if self.source == REASONING_GYM:
            return "generated"
        if self.source.endswith(FILES):
            return "file"
        return "function" if re.fullmatch(r"([\w.]+|.+\.py):[\w.]+", self.source) else "dataset"

    @model_validator(mode="after")
    def _acts(self) -> DatasetConfig:
        if self.split is not None and self.kind != "dataset":
            raise conflict(
                "split", f"{self.split!r} acts on Hugging Face datasets only; source is {self.source!r}: leave it out"
            )
        if self.args and self.kind == "file":
            builder = Path(self.source).suffix.removeprefix(".").replace("jsonl", "json")
            instead = f"source {builder} with args.data_files and others reads it as load_dataset does"
            raise conflict("args", f"a file takes no arguments; source is {self.source!r}; {instead}")
        generated = self.kind == "generated"
        for key in READ if generated else GENERATED:
            if getattr(self, key) not in (None, {}):
                other = "does not act with" if generated else f"acts with source {REASONING_GYM} only, not"
                raise conflict(key, f"{other} {self.source!r}; leave it out")
        if generated and not self.tasks:
            raise conflict("tasks", f"required with source {REASONING_GYM}: name its generators, as in chain_sum: {{}}")
        for name, parameters in self.tasks.items():
            weight = parameters.get("weight", 1)
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
                raise conflict("tasks", name, "weight", f"{weight!r} is not valid; it is a number above 0")
        return self


class CurriculumConfig(Section):
    """Which prompts are drawn, by the share of their completions that succeeded so far (rewards scaled to 0..1)."""

    filter: Annotated[tuple[float, float], Field(strict=False)] | None = None
    """[low, high]: prompts whose rate is known and outside are passed over, and looked at again now and then."""
    weight: bool = False
    """Draw prompts in proportion to p (1 - p) of their rate p."""
    min_seen: int = Field(default=1, ge=1)
    """Groups of a prompt after which its rate counts as known."""

    @model_validator(mode="after")
    def _acts(self) -> CurriculumConfig:
        if self.filter is None and not self.weight:
            raise conflict("filter", "neither filter nor weight is set, so the curriculum would do nothing; set one")
        if self.filter is not None and not 0 <= self.filter[0] < self.filter[1] <= 1:
            raise conflict("filter", f"{list(self.filter)} is not valid; write [low, high] with 0 <= low < high <= 1")
        return self


class DifficultyConfig(Section):
    """A parameter of a generator that follows the pass rate: up a level where it is above a band, down where below."""

    parameter: Text
    """The generator's parameter, such as `max_terms` of chain_sum."""
    levels: Annotated[tuple[Any, ...], Field(strict=False, min_length=2)]
    """Its values from easy to hard; a run begins with the first."""
    band: Annotated[tuple[float, float], Field(strict=False)] = (0.2, 0.8)
    """[low, high]: the mean reward (0 to 1) at which the level stays."""
    groups: int = Field(default=32, ge=1)
    """Groups of the present level whose mean decides; they are counted anew after each decision."""

    @model_validator(mode="after")
    def _is_a_band(self) -> DifficultyConfig:
        if not 0 <= self.band[0] < self.band[1] <= 1:
            raise conflict("band", f"{list(self.band)} is not valid; write [low, high] with 0 <= low < high <= 1")
        return self


class DataConfig(DatasetConfig):
    """The prompts to train on."""

    shuffle: bool = True
    """Draw in a new order every epoch, fixed by the run's `seed`; false keeps the order of the rows."""
    curriculum: CurriculumConfig | None = None
    """null draws every prompt once an epoch."""
    difficulty: dict[str, DifficultyConfig] = Field(default_factory=dict)
    """With source reasoning-gym: by task, a parameter that rises and falls with the pass rate, as in
    `chain_sum: {parameter: max_terms, levels: [2, 3, 4]}`; `band` ([0.2, 0.8]) is the mean reward at which it stays,
    `groups` (32) how many groups decide."""

    @model_validator(mode="after")
    def _rises(self) -> DataConfig:
        for task, rule in self.difficulty.items():
            if task not in self.tasks:
                named = ", ".join(self.tasks) or "none"
                raise conflict("difficulty", task, f"is no task of this run; data.tasks has {named}")
            if rule.parameter in self.tasks[task]:
                message = f"{rule.parameter} is given here, and its levels in data.difficulty.{task}; leave one out"
                raise conflict("tasks", task, message)
        if self.difficulty and self.curriculum is not None:
            raise conflict("curriculum", "does not go with difficulty, whose prompts change; leave one of the two out")
        return self
