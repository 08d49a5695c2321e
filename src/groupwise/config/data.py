"""The configuration's `data` section: the sources of a run's prompts (files, functions, Hugging Face datasets,
reasoning-gym)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from groupwise.config.images import ImagesConfig
from groupwise.config.section import Section, Text, conflict, missing

FILES = (".jsonl", ".json", ".csv", ".parquet")  # what a `data.source` that is a file ends with
REASONING_GYM = "reasoning-gym"  # the `data.source`, and the reward that its tasks bring
SCORE_ANSWER = "groupwise.bridges.reasoning_gym.reward:score_answer"
SLICE = re.compile(r"\w+\[(?P<first>-?\d+%?)?:(?P<last>-?\d+%?)?\]")  # as `datasets` writes a part of a split
BUFFER = 10_000  # rows of a stream that `shuffle` draws from, where `shuffle_buffer` does not say
GENERATED = ("tasks", "size")  # keys of generated problems only
RunKind = Literal["grpo", "sft", "dpo"]  # what of its rows a run learns: prompts to answer, their answers, or pairs
READ = ("args", "split", "columns", "prompt_key", "answer_key")  # keys of rows that are read only
SHARED = ("columns", "filter", "prompt_key", "answer_key", "raw", "system", "completion_only", "images")


def _tasks(value: Any) -> Any:
    """Return a list of names, or a name without parameters, stands for empty parameters."""
    if isinstance(value, str) or not isinstance(value, Mapping | Sequence):
        return value
    if isinstance(value, Mapping):
        return {name: {} if parameters is None else parameters for name, parameters in value.items()}
    return {str(name): {} for name in value}


def _count_or_share(value: float) -> float:
    if not value > 0 or (value >= 1 and not isinstance(value, int)):
        raise ValueError(f"{value:g} is not valid; write a number of rows, or a share of them above 0 and below 1")
    return value


class RowsConfig(Section):
    """Rows, and how each becomes a prompt."""

    source: Text | None = None
    """A `.jsonl`, `.json`, `.csv` or `.parquet` file (relative to the config's folder), `module:function` that returns
    rows, a Hugging Face dataset's name, a directory with a saved dataset, or `reasoning-gym`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, or of `datasets.load_dataset`."""
    split: Text | None = None
    """The split of a Hugging Face dataset; null is `train`. A slice of it, or of a file, is written as there:
    `train[:90%]`, `train[-500:]`."""
    tasks: Annotated[dict[str, dict[str, Any]], BeforeValidator(_tasks)] = Field(default_factory=dict)
    """With source reasoning-gym: its generators by name, each with its parameters, and with `weight`, its share of the
    problems relative to the others' (1)."""
    size: int | None = Field(default=None, ge=1, le=10_000_000)
    """With source reasoning-gym, the number of generated problems; null is 1000."""
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    """With source reasoning-gym, the seed of the problems; null is 0 for training and 1 for evaluation, so that they
    differ. With `sample`, the seed of the drawn rows; null is 0."""
    columns: dict[Text, Text] = Field(default_factory=dict)
    """New names for columns, before anything else reads them: `{prompt: question, answer: label}`. A name that the rows
    have already is refused, unless that column gets a new name too."""
    filter: Text | None = None
    """`module:function` that is given each row (a mapping of its columns, under their new names) and returns whether it
    is kept."""
    prompt_key: Text | None = None
    """The column with the prompt: a string, or a list of chat messages; null is `messages` or `prompt`."""
    answer_key: Text | None = None
    """With `kind: sft`, the column with the answer to learn: text, or the assistant's messages; null is `completion`,
    `answer`, `response` or `output`, or the assistant's messages in a conversation."""
    raw: bool = False
    """A prompt that is a string is a user's message, in the model's chat template where it has one; true samples from
    the text as it is, and gives rewards strings."""
    system: Text | None = None
    """A system message to put before every chat prompt."""
    completion_only: bool = True
    """For a prompt that ends with the assistant's words, which the policy continues: true gives rewards only the
    sampled text; false puts those words in front of it, as TRL does. They are never trained on."""
    images: ImagesConfig = ImagesConfig()
    """The addresses from which images of rows may be fetched (docs/images.md)."""
    sample: Annotated[int | float, AfterValidator(_count_or_share)] | None = None
    """Use so many rows, or a share of them (below 1), drawn at random by `seed` from those that `filter` kept; null is
    all."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first rows that `filter` kept; null is all."""

    @property
    def origin(self) -> str:
        """Return the `source` of a configuration that names one."""
        assert self.source is not None
        return self.source

    @property
    def label(self) -> str:
        """Return the source's name in messages."""
        return self.origin

    @property
    def kind(self) -> Literal["file", "function", "dataset", "generated"]:
        """Return how `source` is read."""
        if self.origin == REASONING_GYM:
            return "generated"
        if self.origin.endswith(FILES):
            return "file"
        return "function" if re.fullmatch(r"([\w.]+|.+\.py):[\w.]+", self.origin) else "dataset"

    @property
    def slice(self) -> tuple[str | None, str | None] | None:
        """Return the slice in `split`, [from, to] as they are written; None if it is not a slice of one split."""
        found = None if self.split is None else SLICE.fullmatch(self.split)
        return None if found is None else (found["first"], found["last"])

    @model_validator(mode="after")
    def _reads(self) -> RowsConfig:
        if self.source is not None:
            self._check_split()
            self._check_generated()
        if self.args and self.source is not None and self.kind == "file":
            builder = Path(self.origin).suffix.removeprefix(".").replace("jsonl", "json")
            instead = f"source {builder} with args.data_files and others reads it as load_dataset does"
            raise conflict("args", f"a file takes no arguments; source is {self.source!r}; {instead}")
        if self.sample is not None and self.limit is not None:
            raise conflict(
                "sample", f"{self.sample} rows drawn at random, or limit's first {self.limit}: leave one out"
            )
        if self.seed is not None and self.sample is None and self.source is not None and self.kind != "generated":
            raise conflict("seed", f"{self.seed} acts with sample, or source {REASONING_GYM}, not {self.source!r}")
        return self

    def _check_split(self) -> None:
        if self.split is None or self.kind == "dataset":
            return
        if self.kind != "file":
            message = f"{self.split!r} acts on files and Hugging Face datasets; source is {self.source!r}: leave it out"
            raise conflict("split", message)
        if self.split.partition("[")[0] != "train":
            named = f"{self.split!r} of {self.source!r}: a file has one split, train"
            raise conflict("split", f"{named}; write a slice of it, as in train[:90%], or name the other file")
        if self.split != "train" and self.slice is None:
            raise conflict("split", f"{self.split!r} is no slice; write train[:90%], train[90%:] or train[100:200]")

    def _check_generated(self) -> None:
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

    def check_streams(self) -> None:
        """Raise ValidationError for what needs all rows at once."""
        if self.sample is not None:
            raise conflict("sample", f"{self.sample} rows are drawn from all, and a stream has never all; set limit")
        if self.kind == "file" and self.origin.endswith(".json"):
            raise conflict(
                "source", f"{self.source!r} is one value, read whole; to be streamed write a row a line (.jsonl)"
            )
        ends = [end for end in self.slice or () if end is not None]
        if self.slice is not None and self.kind == "dataset":
            raise conflict("split", f"{self.split!r} is a slice, which a Hugging Face dataset that streams has not")
        if any(end.startswith("-") or end.endswith("%") for end in ends):
            raise conflict(
                "split", f"{self.split!r} counts from the end, which a stream does not know; write row numbers"
            )


class SourceConfig(RowsConfig):
    """Configures one of several sources of prompts, and its share of the prompts that are drawn."""

    name: Text | None = None
    """The value of the column `data_source` in this source's rows; null is the source itself, for a file its name."""
    weight: float | None = Field(default=None, gt=0)
    """The source's share of the drawn prompts, relative to the others', for any number of rows. null in all sources:
    each row of each is drawn once in an epoch."""

    @property
    def label(self) -> str:
        """Its `name`, or the source itself, of a file its name."""
        return self.name or (Path(self.origin).name if self.kind == "file" else self.origin)

    @model_validator(mode="after")
    def _is_named(self) -> SourceConfig:
        if self.source is None:
            raise missing("source")
        return self


class DatasetConfig(RowsConfig):
    """The source of prompts: one, or several."""

    sources: tuple[SourceConfig, ...] = Field(default=(), strict=False)
    """Several sources in place of `source`. Columns, filter, prompt, answer and chat that are set next to `sources`
    hold for each source that does not set its own."""
    streaming: bool = False
    """Read rows while they are drawn, and hold none but `shuffle_buffer` of them, for sets that do not fit into memory;
    false reads and checks all of them first. Evaluation holds what it evaluates on: with it, set `limit`."""

    @property
    def parts(self) -> tuple[RowsConfig, ...]:
        """The sources, one or several. Generated problems of training and of evaluation differ: they have other
        seeds."""
        seed = 0 if self.drawn else 1
        return tuple(
            each.model_copy(update={"seed": seed}) if each.kind == "generated" and each.seed is None else each
            for each in self.sources or (self,)
        )

    @property
    def weights(self) -> tuple[float, ...] | None:
        """Return the sources' shares of the drawn prompts, in order; None if each row is drawn once in an epoch."""
        given = tuple(each.weight for each in self.sources if each.weight is not None)
        return given or None

    @property
    def label(self) -> str:
        """Return the source, or the names of all sources."""
        return ", ".join(each.label for each in self.parts) if self.sources else self.origin

    @property
    def drawn(self) -> bool:
        """Return whether rows are drawn again and again, and not all gone through once."""
        return False

    @model_validator(mode="before")
    @classmethod
    def _shared(cls, values: Any) -> Any:
        """Give each source the shared keys that are set next to `sources`, unless the source sets its own."""
        if not isinstance(values, Mapping) or not isinstance(values.get("sources"), list | tuple):
            return values
        shared = {key: values[key] for key in SHARED if key in values}
        sources = [{**shared, **each} if isinstance(each, Mapping) else each for each in values["sources"]]
        return {**values, "sources": sources}

    @model_validator(mode="after")
    def _adds_up(self) -> DatasetConfig:
        if self.sources:
            self._check_sources()
        elif self.source is None:
            raise missing("source")
        if self.streaming:
            for index, part in enumerate(self.parts):
                place = ("sources", index) if self.sources else ()
                try:
                    part.check_streams()
                    if not self.drawn and part.limit is None:
                        raise conflict("limit", "required with streaming, where all that is read is held")
                except ValidationError as error:
                    [first] = error.errors()
                    raise conflict(*place, *first["loc"], first["msg"]) from None
            if self.drawn and len(self.sources) > 1 and self.sources[0].weight is None:
                message = (
                    "nobody knows how many rows streams have: give each source a weight, its share of what is drawn"
                )
                raise conflict("sources", message)
        return self

    def _check_sources(self) -> None:
        fields = RowsConfig.model_fields
        for key in (key for key in fields if key not in SHARED and getattr(self, key) not in (None, {})):
            raise conflict(
                key, f"{getattr(self, key)!r} is of one source: say it in those of sources that it is meant for"
            )
        weights = [each.weight for each in self.sources]
        if any(weights) and not all(weights):
            raise conflict("sources", weights.index(None), "weight", "missing, and others have one: weigh all, or none")
        if any(weights) and not self.drawn:
            raise conflict(
                "sources", 0, "weight", f"{weights[0]:g} is a share of what is drawn, and all is read once here"
            )
        seen = set[str]()
        for index, each in enumerate(self.sources):
            if each.label in seen:
                message = f"two sources are called {each.label!r}; give each a name of its own"
                raise conflict("sources", index, "name", message)
            seen.add(each.label)


class CurriculumConfig(Section):
    """Choice of prompts by the share of their completions that succeeded so far (rewards scaled to 0..1)."""

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
    """The parameter's values from easy to hard; a run begins with the first."""
    band: Annotated[tuple[float, float], Field(strict=False)] = (0.2, 0.8)
    """[low, high]: the mean reward (0 to 1) at which the level stays."""
    groups: int = Field(default=32, ge=1)
    """The number of groups of the present level whose mean decides; the count restarts after each decision."""

    @model_validator(mode="after")
    def _is_a_band(self) -> DifficultyConfig:
        if not 0 <= self.band[0] < self.band[1] <= 1:
            raise conflict("band", f"{list(self.band)} is not valid; write [low, high] with 0 <= low < high <= 1")
        return self


class DataConfig(DatasetConfig):
    """The prompts to train on."""

    shuffle: bool = True
    """Draw in a new order every epoch, fixed by the run's `seed`; false keeps the order of the rows. A stream is
    shuffled within its buffer."""
    shuffle_buffer: int | None = Field(default=None, ge=2)
    """With streaming, the number of rows from which the next is drawn at random; null is 10,000."""
    curriculum: CurriculumConfig | None = None
    """null draws every prompt as often as the others; of sources with weights, as the weights say."""
    difficulty: dict[str, DifficultyConfig] = Field(default_factory=dict)
    """With source reasoning-gym, for each task a parameter that rises and falls with the pass rate, as in `chain_sum:
    {parameter: max_terms, levels: [2, 3, 4]}`. The level stays while the mean reward is within `band` ([0.2, 0.8]);
    `groups` (32) is the number of groups that decide."""

    @property
    def drawn(self) -> bool:
        """Return whether rows are drawn again and again: prompts to train on are."""
        return True

    @model_validator(mode="after")
    def _streams(self) -> DataConfig:
        if self.shuffle_buffer is not None and not (self.streaming and self.shuffle):
            raise conflict("shuffle_buffer", f"{self.shuffle_buffer} acts with streaming: true and shuffle: true only")
        if self.streaming and self.curriculum is not None:
            raise conflict(
                "curriculum", "remembers every prompt, and with streaming none is held; leave one of the two out"
            )
        if self.streaming and self.difficulty:
            raise conflict("difficulty", "does not go with streaming; leave one of the two out")
        return self

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
