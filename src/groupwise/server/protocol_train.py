"""The bodies of /v1/train/*.

A completion is known by its text, by the id of its rollout, or by its token ids; with the last two exactly what was
sampled is trained, against the log-probabilities that sampled it.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from groupwise.config.job import JOB_OTHER_NAMES, MODELS, GrpoJobConfig, SftJobConfig
from groupwise.config.yaml import NullIsAbsent
from groupwise.server.protocol import Conversation, TemplateOptions, TokenIds
from groupwise.server.protocol_messages import Tools
from groupwise.server.wire import Answer, FailFast, OwnPart, OwnRequest, absent

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


_SAMPLED = "rollout_id and reward alone: what was sampled here is known here"


class GrpoRequest(NullIsAbsent, OwnRequest):
    """The body of POST /v1/train/grpo."""

    elsewhere: ClassVar = {
        **_under_config("grpo"),
        **dict.fromkeys(("prompt_index", "completion_index", "finish_reason", "usage", "reasoning_content"), _SAMPLED),
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
State = Literal["queued", "running", "completed", "failed", "cancelled"]
Kind = Literal["grpo", "sft"]


class TrainSubmitted(Answer):
    """The answer of POST /v1/train/grpo and /v1/train/sft: the job is on the disk."""

    job_id: str
    state: State
    message: str
    adapter_name: str
    position: int | None
    """1 for the next of the waiting jobs; null if it waits no more."""
    warnings: list[str]
    """What is legal and perhaps not meant."""


class JobError(Answer):
    """Why a job failed."""

    code: str
    message: str
    hint: str | None
    log: str | None = absent()
    """Of a job that killed its workers: the end of what the last of them said."""


class TrainStatus(Answer):
    """One job. Times are ISO 8601, UTC."""

    job_id: str
    kind: Kind
    state: State
    phase: str
    """waiting, loading, training, publishing, swapping or done; a failed job keeps the one it failed in."""
    progress: float
    """0 to 1."""
    step: int
    steps: int
    current_loss: float | None
    """Of the last step; null before the first."""
    adapter_name: str
    adapter_version: str | None
    """What it published."""
    metrics: dict[str, float]
    """Of the last step."""
    created_at: str
    started_at: str | None
    finished_at: str | None
    elapsed_secs: float
    """From the submission to the end, or to now."""
    position: int | None
    attempt: int
    """How often a worker took it; above 1 after a crash or a restart."""
    cancel_requested: bool
    error: JobError | None
    config: dict[str, Any]
    """As it acts: rank, scale and targets of the adapter that is continued or begun, where the request names none."""
    summary: dict[str, Any]
    """What was submitted, in numbers."""
    unhealthy: str | None
    """What was wrong at its end, where that is an error of health: the version is stored and was not made active."""
    warnings: list[str]


class WaitingJob(Answer):
    """A job in the queue."""

    job_id: str
    job_type: Kind
    adapter_name: str
    position: int


class TrainQueue(Answer):
    """The answer of GET /v1/train/queue."""

    running: TrainStatus | None
    queued: list[WaitingJob]
    completed: list[TrainStatus]
    """All that have ended, however, newest first."""


class CancelAnswer(Answer):
    """`cancelled`, or `cancelling`: the worker stops after its step."""

    job_id: str
    status: Literal["cancelled", "cancelling"]


class JobMetrics(Answer):
    """The answer of GET /v1/train/metrics/{job_id}: {"step", "time", <metric>: <number>, ...} for each step."""

    job_id: str
    steps: list[dict[str, Any]]
