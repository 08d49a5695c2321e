"""Schemas of the server's answers: the server writes them (and documents them in /openapi.json), the client reads them.

Attributes have the names of the JSON's fields. What a newer server says in addition is left out; a field that is
missing, or of the wrong kind, is an error that names it.

    groups = client.sample(["What is 2 + 2?"], n=8)
    groups[0].completions[3].text
    groups[0].scored([1.0, 0.0, None, ...])    # None: could not be scored; left out, never counted as 0

`SampledGroup`, `ChatPiece` and `JobEvent` are made by the client of several answers, or of a stream's events. The
answers of routes that the client does not call are in `groupwise.server`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from groupwise.errors import RemoteError, RequestError

T = TypeVar("T")

State = Literal["queued", "running", "completed", "failed", "cancelled"]
Kind = Literal["grpo", "sft"]
Finish = Literal["stop", "length", "tool_calls"]
LearnVerb = Literal["pause", "resume", "promote", "reject"]
FINISHED = ("completed", "failed", "cancelled")


class Answer(BaseModel):
    """Base of a server's answers. The server makes one strictly by its fields; a client that reads it leaves out what a
    newer server says in addition. Fields made with `absent()` are left out of the JSON where they are None."""

    model_config = ConfigDict(
        frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=(), extra="ignore"
    )


def _is_none(value: Any) -> bool:
    return value is None


def absent() -> Any:
    """Return the default of an answer's field that is left out when it is None."""
    return Field(default=None, exclude_if=_is_none)


@functools.lru_cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def read(kind: type[T], data: Any) -> T:
    """Return a server's JSON as a `kind`. Raises RemoteError if it is not one."""
    try:
        return _adapter(kind).validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the answer"
        raise RemoteError(
            f"the server's answer is not what this client reads: {where}: {first['msg']}",
            status=200,
            code="bad_response",
            hint="are client and server of the same version?",
        ) from None


def as_json(value: Any) -> Any:
    """Return the answer as the server sent it, the inverse of `read`, without fields that this client does not know."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True)
    if isinstance(value, Mapping):
        return {key: as_json(item) for key, item in value.items()}
    return [as_json(item) for item in value] if isinstance(value, list) else value


# ---- sampling ----


class CachedTokens(Answer):
    """The tokens of the prompt that were known from other requests and not computed again."""

    cached_tokens: int = 0


class Usage(Answer):
    """Tokens. A prompt counts once, whatever n is; the end-of-turn token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = absent()
    """Left out where the engine does not say (vLLM)."""


class BatchCompletion(Answer):
    """Holds a rollout. `text` is the whole reply; `reasoning_content` repeats the reply's <think> block, if there is
    one."""

    prompt_index: int
    completion_index: int
    rollout_id: str
    """Names this rollout in /v1/train/grpo, so that exactly the sampled tokens are trained."""
    adapter: str
    """The version that sampled it."""
    text: str
    finish_reason: Literal["stop", "length"]
    usage: Usage
    reasoning_content: str | None = absent()
    token_ids: list[int] | None = absent()
    prompt_token_ids: list[int] | None = absent()
    logprobs: list[float] | None = absent()


class BatchAnswer(Answer):
    """The answer of POST /v1/completions/batch, by prompt, then by completion."""

    id: str
    object: Literal["batch.completion"] = "batch.completion"
    created: int
    model: str
    completions: list[BatchCompletion]
    usage: Usage


class SampledGroup(Answer):
    """The completions of one prompt."""

    messages: list[dict[str, Any]]
    completions: list[BatchCompletion]
    tools: list[dict[str, Any]] = []

    @property
    def texts(self) -> list[str]:
        return [completion.text for completion in self.completions]

    def scored(self, rewards: Sequence[float | None], *, text_only: bool = False) -> dict[str, Any]:
        """Return the group with its rewards, as `train_grpo` takes it.

        Rollouts are named by id, so that exactly what was sampled is trained; with `text_only` their texts are sent
        instead. A reward of None (or NaN) says that a completion could not be scored: it is left out.

        Raises:
            RequestError: there is not one reward for each completion.
        """
        if len(rewards) != len(self.completions):
            raise RequestError(
                f"{len(rewards)} rewards for {len(self.completions)} completions",
                hint="give one for each, in order; None for one that could not be scored",
            )
        completions = []
        for completion, reward in zip(self.completions, rewards, strict=True):
            if reward is not None and not math.isnan(reward):
                what = {"text": completion.text} if text_only else {"rollout_id": completion.rollout_id}
                completions.append(what | {"reward": float(reward)})
        group = {"messages": list(self.messages), "completions": completions}
        return group | ({"tools": list(self.tools)} if self.tools else {})


# ---- feedback ----


class FeedbackAnswer(Answer):
    """Feedback on a rollout, as it is kept."""

    id: str
    rollout_id: str
    version: str
    """The adapter version that sampled the rollout."""
    score: float | None
    """The score from 0 to 1; a thumb is 1 or 0."""
    correction: str | None
    better_than: str | None
    """Another rollout of the same prompt, which is worse."""
    user: str | None
    key: str | None = None
    """The name of the key that it came with; null is the owner's, or none."""
    comment: str | None
    created_at: str
    state: Literal["waiting", "training", "trained", "dropped", "distrusted"]
    """Waiting for a job; in one that has not ended; in one that is completed; nothing could be trained on it; or its
    rater contradicted what is known (`raters` of the server's configuration)."""
    job_id: str | None
    """The job that took it."""


class FeedbackPage(Answer):
    """A page of feedback, newest first. `next` is the cursor of the next page, null at the end."""

    feedback: list[FeedbackAnswer]
    counts: dict[str, int]
    """The number of ratings in each state, for any filter of the request."""
    next: int | None


class KeptAnswer(Answer):
    """An answer that a server keeps, as far as it is read here."""

    id: str
    text: str
    finish_reason: str | None
    """`length` where it was cut off."""


class KeptAnswers(Answer):
    """The answers that were sampled together for one prompt: what GET /v1/rollouts/{id} says of them."""

    prompt: str
    """The prompt as text, with its special tokens."""
    prompt_token_ids: list[int]
    rollouts: list[KeptAnswer]


class LearnTransition(Answer):
    """An event of automatic training, a gate, a shadow or a canary."""

    seq: int
    at: str
    kind: str
    """The kind, for programs; docs/learn.md lists them."""
    message: str
    data: dict[str, Any]


class RaterAnswer(Answer):
    """The record of a rater: how often its ratings agree with known rewards, and whether they count."""

    user: str | None
    """The `user` of the ratings; null is those that name none."""
    key: str | None
    """The name of the key that they came with; null is the owner's, or none."""
    known: int
    """Prompts of `raters` of which they rated an answer."""
    agreed: int
    """The number of these ratings with which the rewards agree."""
    counts: bool
    """Whether their ratings make jobs and decide canaries."""


class LearnHistory(Answer):
    """Past events of automatic training, gates and canaries, in pages."""

    transitions: list[LearnTransition]
    """Newest first."""
    next: int | None
    """The `before` of the next page; null at the end of what is kept."""


class LearnAnswer(Answer):
    """The state of automatic training: what it does, or why it does nothing."""

    enabled: bool
    """Whether `learn` is in the server's configuration."""
    paused: bool
    reason: str
    """What learning does at the moment, or waits for."""
    adapter: str | None
    ratings: int
    """The ratings that wait and can be trained on, at the last look."""
    after: int | None
    """The number of ratings that make a job."""
    counts: dict[str, int]
    """All ratings by state."""
    job_id: str | None
    """The automatic job that waits or runs."""
    jobs_last_hour: int
    max_jobs_per_hour: int | None
    active: str
    """The version that is active."""
    trial: str | None
    """The version on trial."""
    trial_share: float | None
    """The share of the requests that it answers."""
    trial_stage: Literal["shadow", "canary"] | None
    """`canary`: it answers instead of the active version; `shadow`: it answers again after the active version, unseen
    by clients."""
    trial_pairs: int | None
    """The number of pairs of answers that a shadow has compared."""
    trial_ratings: int | None
    """The number of ratings of a canary's answers."""
    trial_most: int | None
    """The number of pairs or ratings at which the trial ends at the latest; the evidence then decides, or
    `undecided`."""
    raters: list[RaterAnswer] = []
    """Raters who were compared with what is known: those who do not count first, then those who agreed least."""
    transitions: list[LearnTransition]
    """The latest transitions, newest first."""


# ---- chat, as OpenAI has it ----


class TopLogprob(Answer):
    """A token that could have been sampled."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A sampled token, and the likeliest ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[TokenLogprob] | None
    refusal: None = None


class AnsweredFunction(Answer):
    name: str
    arguments: str
    """JSON."""


class AnsweredCall(Answer):
    """A tool call that the model made; in a stream with its `index`."""

    index: int | None = absent()
    id: str
    type: Literal["function"] = "function"
    function: AnsweredFunction


class AnsweredMessage(Answer):
    """The assistant's message, with its thoughts apart where there are any."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = absent()
    tool_calls: list[AnsweredCall] | None = absent()


class ChatChoice(Answer):
    index: int
    message: AnsweredMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    token_ids: list[int] | None = absent()


class ChatCompletion(Answer):
    """The answer of POST /v1/chat/completions; `system_fingerprint` is the version that answered."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_token_ids: list[int] | None = absent()

    @property
    def text(self) -> str:
        """Return the first reply's text."""
        return self.choices[0].message.content or ""


class ChatDelta(Answer):
    """The part of a reply that a chunk adds."""

    role: Literal["assistant"] | None = absent()
    content: str | None = absent()
    reasoning_content: str | None = absent()
    tool_calls: list[AnsweredCall] | None = absent()


class ChatChunkChoice(Answer):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None
    token_ids: list[int] | None = absent()


class ChatCompletionChunk(Answer):
    """Holds an event of the stream. If the request asks for the usage, the last event has it, and no choices."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    usage: Usage | None = absent()
    prompt_token_ids: list[int] | None = absent()


class ChatPiece(Answer):
    """A piece of a streamed reply. The last one of a choice has its `finish_reason`."""

    index: int = 0
    text: str = ""
    reasoning: str = ""
    tool_calls: list[AnsweredCall] = []
    finish_reason: Finish | None = None
    logprobs: ChatLogprobs | None = None
    version: str | None = None


class ModelCard(Answer):
    """A name that `model` may have: the base model, an adapter, or one of its versions."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    """The base model, or the version that an adapter's name stands for now."""
    parent: str | None
    """The base model of an adapter."""
    max_model_len: int


class ModelList(Answer):
    """The answer of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


# ---- jobs ----


class Waits(Answer):
    """The reason why a job waits."""

    reason: Literal["adapter", "alone", "turn", "room", "worker"]
    """Why the job waits. adapter: an earlier job trains the same adapter; alone: this job, or the one that is trained,
    must run alone; turn: others come first, which have had less; room: there is no room for another one; worker: the
    worker is being started."""
    message: str
    job_id: str | None
    """The job for whose end it waits, if it is a single one."""
    about_seconds: float | None
    """Seconds until it begins, if all jobs keep their present speed; null if that cannot be estimated."""


class Deadline(Answer):
    """The deadline of a job, and whether the job is likely to meet it or has met it."""

    at: str
    """ISO 8601, UTC."""
    outlook: Literal["in_time", "late", "unknown", "met", "missed"]
    """in_time, late: the outlook if all jobs keep their present speed; unknown: it cannot be estimated yet; met,
    missed: the job has ended in time, or it has not."""
    message: str
    about_seconds: float | None
    """Seconds until the job ends, if all jobs keep their present speed; null if that cannot be estimated, or it has
    ended."""


class TrainSubmitted(Answer):
    """The answer of POST /v1/train/grpo and /v1/train/sft: the job is on the disk."""

    job_id: str
    state: State
    message: str
    adapter_name: str
    position: int | None
    """1 for the next of the waiting jobs; null if it waits no more."""
    waits: Waits | None
    """Why it does not begin at once, and when it begins; null if it waits no more, or begins."""
    deadline: Deadline | None
    """Whether it ends in time; null without a `deadline`."""
    warnings: list[str]
    """Things that are legal and perhaps not meant."""


class JobError(Answer):
    """The error with which a job failed."""

    code: str
    message: str
    hint: str | None
    log: str | None = absent()
    """For a job that killed its workers, the end of the last worker's output."""


class TrainStatus(Answer):
    """Holds the state of a training job. Times are ISO 8601, UTC. A `completed` job's version is served, unless the
    request had `auto_load: false` or the version is `unhealthy`: then the version is stored, and `warnings` say how to
    activate it."""

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
    """The loss of the last step; null before the first."""
    adapter_name: str
    adapter_version: str | None
    """The version that the job published."""
    metrics: dict[str, float]
    """The metrics of the last step."""
    created_at: str
    started_at: str | None
    finished_at: str | None
    elapsed_secs: float
    """Seconds from the submission to the end, or to now."""
    duration_secs: float | None
    """Seconds from the start to the end, or to now, without the time in the queue; null for a job that never ran."""
    position: int | None
    waits: Waits | None
    """Why it waits, and when it begins; null unless it is queued."""
    deadline: Deadline | None
    """Whether it ends in time; null without a `deadline`."""
    attempt: int
    """How often a worker took the job; above 1 after a crash or a restart, or if it made way for others."""
    cancel_requested: bool
    error: JobError | None
    config: dict[str, Any]
    """The configuration in use: with rank, scale and targets of the continued or new adapter if the request names
    none."""
    summary: dict[str, Any]
    """The submission in numbers."""
    changed: list[str] | None
    """The keys of `config` that the request gave something else than the default; null of a job from before they were
    kept."""
    unhealthy: str | None
    """The error of health at the job's end: the version is stored and was not made active."""
    warnings: list[str]

    @property
    def finished(self) -> bool:
        return self.state in FINISHED


class WaitingJob(Answer):
    """A job in the queue."""

    job_id: str
    job_type: Kind
    adapter_name: str
    position: int
    waits: Waits | None


class TrainQueue(Answer):
    """The answer of GET /v1/train/queue."""

    running: TrainStatus | None
    """The first of those that run."""
    beside: list[TrainStatus]
    """The other running jobs."""
    queued: list[WaitingJob]
    completed: list[TrainStatus]
    """All that have ended, however, newest first."""


class CancelAnswer(Answer):
    """The answer to a cancellation: `cancelled`, or `cancelling`: the worker stops after its step."""

    job_id: str
    status: Literal["cancelled", "cancelling"]


class JobMetrics(Answer):
    """The answer of GET /v1/train/metrics/{job_id}: {"step", "time", <metric>: <number>, ...} for each step."""

    job_id: str
    steps: list[dict[str, Any]]


class JobEvent(Answer):
    """An event of a job: `kind` is state, metrics or message. `seq` only grows."""

    seq: int
    kind: str
    at: datetime
    level: str = "info"
    message: str = ""
    data: dict[str, Any] = {}


# ---- the server ----


class Check(Answer):
    """A check of the server's health, and what is wrong where it does not pass."""

    name: str
    passed: bool = Field(validation_alias=AliasChoices("pass", "passed"), serialization_alias="pass")
    detail: str | None = absent()


class Health(Answer):
    """The answer of /health. Without the API key, where there is one, only the first three say something."""

    status: str
    """`ok`, `degraded` (a check fails), `loading` or `draining`."""
    version: str
    uptime_seconds: float
    model: str | None = absent()
    backend: str | None = absent()
    """The device."""
    active_adapter: str | None = None
    active_version: str | None = absent()
    images: bool | None = absent()
    """Whether the model sees: messages may have images."""
    adapters_loaded: int | None = absent()
    """Adapters in the engine: versions that answer without being loaded first."""
    scheduler: dict[str, int] | None = absent()
    """Completions being decoded, and waiting for a row."""
    gpu_memory: dict[str, float] | None = None
    training: dict[str, Any] | None = absent()
    """`active_job` with its progress, and how many are `queued`."""
    checks: list[Check] | None = absent()


# ---- adapters ----


class AdapterVersion(Answer):
    """Describes an adapter version and its origin."""

    version: str
    """`name@number`."""
    number: int
    active: bool
    created_at: str
    size_bytes: int
    base_model: str
    base_hash: str
    """A fingerprint of the base weights over which the version was trained."""
    quantization: str | None
    """How the base weights were quantised, `nf4` or `int8`."""
    parent: str
    """The version from which the training started."""
    step: int
    job_id: str | None
    unhealthy: str | None
    """The error of health at the end of its job. Such a version becomes active, is meant by its adapter's name and is
    continued only by hand: activated, or named with its number."""
    surplus: bool
    """Older than the newest `keep_versions` that jobs made: removed once it is neither active, nor the one active
    before, nor in use, nor what a job that has not ended begins from."""
    note: str | None
    """A user's note on it: PUT /v1/adapters/{name}/notes."""
    held_out: float | None
    """Its own mean reward on the gate's held-out prompts when it was last judged; null if it was not. `metrics` are
    those of its job, whose completions its predecessor sampled."""
    metrics: dict[str, float]


class AdapterSummary(Answer):
    """An adapter. `files`, sizes and times are those of its newest version."""

    name: str
    has_config: bool
    has_weights: bool
    size_bytes: int
    modified_at: str | None
    files: list[str]
    versions: list[str]
    active_version: str | None
    """The version of this adapter that is active, if one is."""
    notes: dict[str, str]
    """Users' notes on its versions, by version; only of versions with a note."""


class AdapterList(Answer):
    """The answer of GET /v1/adapters."""

    active: str | None
    """The active adapter's name; null is the base model."""
    active_version: str
    """The active version: `name@number`, or `base`."""
    keep_versions: int | None
    """The number of versions made by jobs that are kept of each adapter; null keeps all."""
    available: list[AdapterSummary]


class AdapterDetail(AdapterSummary):
    """The answer of GET /v1/adapters/{name}."""

    history: list[AdapterVersion]
    """The adapter's versions, oldest first."""


class AdapterLoaded(Answer):
    status: Literal["loaded", "activated", "rolled_back"]
    name: str
    version: str


class AdapterNoted(Answer):
    version: str
    note: str | None
    """The stored note; null if there is none."""


class AdapterUnloaded(Answer):
    status: Literal["unloaded"] = "unloaded"


class AdapterDeleted(Answer):
    status: Literal["deleted"] = "deleted"
    name: str
    versions: list[str]


class AdapterUploaded(Answer):
    name: str
    version: str
    size_bytes: int
    files: list[str]


class AdapterMerged(Answer):
    status: Literal["merged"] = "merged"
    output_name: str
    version: str
    mode: Literal["weighted_average", "ties", "concat"]
    sources: list[dict[str, Any]]
    num_tensors: int
    density: float | None = absent()
