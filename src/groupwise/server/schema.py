"""The bodies of /v1/train/*.

A completion is known by its text, by the id of its rollout, or by its token ids; with the last two exactly what was
sampled is trained, against the log-probabilities that sampled it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, model_validator

from groupwise.config.job import JOB_OTHER_NAMES, MODELS, GrpoJobConfig, SftJobConfig
from groupwise.config.yaml import Name, NullIsAbsent
from groupwise.errors import GroupwiseError
from groupwise.sdk.types import Answer, absent
from groupwise.server.findings import Findings
from groupwise.server.schema_openai import MAX_COMPOSED, Conversation, Selector, TemplateOptions, TokenIds, Tools
from groupwise.server.wire import FailFast, OwnPart, OwnRequest, fault
from groupwise.store.adapters import MAX_NOTE

RolloutId = Annotated[str, Field(min_length=1, max_length=64)]


def _at_least(count: int) -> Any:
    """The document's `minItems`; `submit` refuses less, in better words."""
    return Field(json_schema_extra={"minItems": count})


SampledIds = Annotated[TokenIds, _at_least(1)]


def _under_config(kind: str) -> dict[str, str]:
    """Where options go that people write beside `config`."""
    return {name: f"config.{ours}" for name, ours in JOB_OTHER_NAMES[kind].items()} | {
        name: f"config.{name}" for name in MODELS[kind].model_fields
    }


# ---- what is asked for ----
class ScoredCompletion(OwnPart):
    """A completion and its reward. Give one of `text`, `rollout_id` and `token_ids`."""

    reward: float
    """How good it is; only differences within its group count."""
    text: str | None = None
    """The whole reply, as it was sampled."""
    rollout_id: RolloutId | None = None
    """What /v1/completions/batch called it: its tokens and their log-probabilities are known here."""
    token_ids: SampledIds | None = None
    """Its tokens, the end of the turn included."""
    logprobs: Annotated[list[float], FailFast()] | None = None
    """The log-probability with which each of `token_ids` was sampled."""
    teacher_logprobs: Annotated[list[float], FailFast()] | None = None
    """The log-probability that a teacher gives each token, of `token_ids` with their `logprobs` or of a `rollout_id`:
    what it is above the sampler's, times `config.teacher_coefficient`, is added to the token's advantage."""
    prompt_token_ids: SampledIds | None = None
    """Beside `token_ids`: the prompt they follow, where the group has no `messages`."""


class ScoredGroup(OwnPart):
    """The completions of one prompt. `messages` may be missing where every completion brings its prompt."""

    messages: Conversation | None = None
    """The conversation up to where the assistant speaks."""
    tools: Tools | None = None
    chat_template_kwargs: TemplateOptions | None = None
    completions: Annotated[list[ScoredCompletion], FailFast(), _at_least(2)]
    """At least two, or there is nothing to compare."""


_ONE_TURN = (
    "reward, what the one turn is worth that a completion is here; an episode's turns have credit of their own in a "
    "run (algo.credit, groupwise run)"
)
_SAMPLED = "rollout_id and reward alone: what was sampled here is known here"


class GrpoRequest(NullIsAbsent, OwnRequest):
    """The body of POST /v1/train/grpo."""

    elsewhere: ClassVar = {
        **_under_config("grpo"),
        **dict.fromkeys(("prompt_index", "completion_index", "finish_reason", "usage", "reasoning_content"), _SAMPLED),
        **dict.fromkeys(("turns", "turn_rewards", "credit", "turn_discount", "turn_baseline"), _ONE_TURN),
        "step_advantage_weight": _ONE_TURN,
        "epochs": "config.iterations: GRPO does not use epochs; iterations are passes over the groups",
        "examples": "groups, or POST /v1/train/sft",
        "messages": "groups[i].messages",
        "completions": "groups[i].completions",
        "prompts": "groups[i].messages",
    }

    groups: Annotated[list[ScoredGroup], FailFast(), _at_least(1)]
    config: GrpoJobConfig = GrpoJobConfig()


class SftExample(OwnPart):
    """A conversation; what the assistant says in it is trained."""

    messages: Conversation
    tools: Tools | None = None
    chat_template_kwargs: TemplateOptions | None = None


class SftRequest(NullIsAbsent, OwnRequest):
    """The body of POST /v1/train/sft."""

    elsewhere: ClassVar = {
        **_under_config("sft"),
        "groups": "examples, or POST /v1/train/grpo",
        "messages": "examples[i].messages",
    }

    examples: Annotated[list[SftExample], FailFast(), _at_least(1)]
    config: SftJobConfig = SftJobConfig()


# ---- what is answered ----
# ----------------------------------------------------------------------------------------------------------------------
# The bodies of /v1/adapters/*.
# ----------------------------------------------------------------------------------------------------------------------


class LoadRequest(OwnRequest):
    """The body of POST /v1/adapters/load: what requests that name no adapter get from now on."""

    elsewhere: ClassVar = {"adapter": "name", "adapter_name": "name", "version": "name, as in 'math@3'"}

    name: Selector


class ActivateRequest(OwnRequest):
    """The body of POST /v1/adapters/{name}/activate."""

    version: Annotated[int, Field(ge=1, le=10**12)] | None = None
    """The version's number; null is the newest."""


class NoteRequest(OwnRequest):
    """The body of PUT /v1/adapters/{name}/notes."""

    elsewhere: ClassVar = dict.fromkeys(("notes", "text"), "note")

    note: Annotated[str, Field(max_length=MAX_NOTE)] | None
    """One line of text; null or an empty one removes what is there."""


class MergeSource(OwnPart):
    name: Selector
    weight: Annotated[float, Field(ge=-100, le=100)]


class MergeRequest(NullIsAbsent, OwnRequest):
    """The body of POST /v1/adapters/merge."""

    elsewhere: ClassVar = {"adapters": "sources, a list of objects with name and weight", "name": "output_name"}

    sources: Annotated[list[MergeSource], Field(min_length=1, max_length=MAX_COMPOSED)]
    output_name: Name
    mode: Literal["weighted_average", "ties", "concat"] = "weighted_average"
    density: Annotated[float, Field(gt=0, le=1)] | None = None
    """The fraction of each source's entries that `ties` keeps; default 0.2."""

    @model_validator(mode="after")
    def _acts(self) -> MergeRequest:
        if self.density is not None and self.mode != "ties":
            message = "density acts with mode 'ties' only; the mode is '{mode}'"
            raise fault("invalid_value", message, mode=self.mode, param="density")
        return self


# ---- answers ----
# ----------------------------------------------------------------------------------------------------------------------
# The answers of the routes that show completions, of a server and of a run on disk alike, so that one page reads both.
#
# RolloutPage     rows, and the cursor of the next page
# RolloutGroupDetail    the completions of one prompt, token by token, each with its reward and the parts of it
# ----------------------------------------------------------------------------------------------------------------------

MOST_ROWS = 2000
PREVIEW = 400  # characters of a prompt or a completion in a row


class RolloutNotFoundError(GroupwiseError, LookupError):
    """No rollout of this id is kept."""

    code, status, exit_code = "rollout_not_found", 404, 2


class RolloutRow(Answer):
    """One completion in a list; long texts are cut."""

    id: str
    group: str
    """The same for the completions of one prompt that were sampled, or posted, together."""
    prompt: str
    text: str
    reward: float | None
    """null: sampled, and not trained on under this id; or it could not be scored."""
    advantage: float | None
    version: str | None
    """What sampled it; null where a job was not told."""
    finish_reason: Literal["stop", "length"] | None
    temperature: float
    reshaped: list[str]
    """The sampling parameters by which it was drawn from another distribution than the policy's at this temperature,
    of which the log-probabilities are. None for an on-policy sample of all of it; a job is not told."""
    prompt_tokens: int
    completion_tokens: int
    created_at: str


class RolloutPage(Answer):
    """A page of completions. `next` is the cursor of the next page, null at the end; a page may have few rows, or none,
    and a next one all the same."""

    rows: list[RolloutRow]
    next: int | None
    newest: int | None = absent()
    """Of what was sampled here, newest first, and not of a job: send it as `since` to get only what came later."""


class FacetCount(Answer):
    """How many completions have a value."""

    value: str
    count: int


class RolloutFacets(Answer):
    """What completions can be filtered by, and how many have it; values with the most completions come first."""

    counted: int
    """Completions that were looked at: the newest ones, as far as one request reads."""
    versions: list[FacetCount]
    finish_reasons: list[FacetCount]
    steps: list[int]
    """Of a run, newest first: every step that has completions."""
    tags: dict[str, list[FacetCount]]
    """Of a run: the prompts' other columns that have few values, by name."""


Sort = Literal["newest", "oldest", "best", "worst", "longest", "shortest"]


class RolloutDetail(RolloutRow):
    """One completion with its tokens; `logprobs` are those of its sampler, null where nobody recorded them."""

    rewards: dict[str, float | None]
    """The parts of the reward by name, of a run's completion; null: that function failed. A job is posted one reward,
    and has none."""
    error: str | None
    """Why a run could not score it."""
    token_ids: list[int]
    tokens: list[str]
    """As text. Of a run's episode with what the policy was told between its turns; and whole turns, where the run's
    tokenizer is not on this machine."""
    logprobs: list[float | None] | None
    """One for each of `tokens`; null for what the policy did not write."""


class RolloutGroupDetail(Answer):
    """The completions of one prompt, highest reward first."""

    group: str
    prompt: str
    prompt_token_ids: list[int]
    rollouts: list[RolloutDetail]


Rollout = TypeVar("Rollout", bound=RolloutDetail)


def best_first(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """By reward; what has none comes last."""
    return sorted(rollouts, key=lambda each: float("inf") if each.reward is None else -each.reward)


# ----------------------------------------------------------------------------------------------------------------------
# The answers of `groupwise ui`, which shows the directories of runs.
# ----------------------------------------------------------------------------------------------------------------------

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
    served: str | None
    """Of `groupwise serve RUN`: the version of the run that the server began with, or `base`; its web interface is at
    /ui/ of the same address. null: no model is served here."""


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


class RolloutPart(Answer):
    """A turn of an episode, or a message between two, which is so many of the episode's `tokens`."""

    role: str
    """`assistant` for the policy; else who said it, as `user` or `tool NAME`."""
    tokens: int
    reward: float | None
    """The turn's own."""
    begins_segment: bool
    """The turn does not go on from the one before, and begins a token sequence of its own."""
    trained: bool


class RunRollout(RolloutDetail):
    """One completion of a run."""

    gaps: list[float | None] | None
    """For each of `tokens` the trainer's log-probability minus the sampler's, where the run recorded them."""
    parts: list[RolloutPart]
    """Of an episode, who said which of `tokens`; empty for what is no episode."""
    ended: str | None
    """Why an episode ended."""


class RunRolloutGroup(Answer):
    """The completions of one prompt, highest reward first."""

    group: str
    prompt: str
    prompt_token_ids: list[int]
    columns: dict[str, str]
    """The prompt's other columns, as text."""
    rollouts: list[RunRollout]


class RunChange(Answer):
    """A held-out prompt, answered before and after."""

    prompt: str
    columns: dict[str, str]
    before: RunRollout
    after: RunRollout


class RunEvaluations(Answer):
    """What training changed on the held-out prompts, from the evaluation at step `first` to that at step `last`, which
    is the last one, or that of the version which the run keeps.

    `mode` is null where there are not two evaluations of the same prompts."""

    run: str
    mode: str | None
    first: int | None
    last: int | None
    prompts: int
    better: int
    worse: int
    changed: list[RunChange]
    """Those whose reward changed most: a few that got better, then a few that got worse."""
