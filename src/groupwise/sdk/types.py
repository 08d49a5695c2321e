"""The client's return types, as frozen dataclasses, and their conversion from and to a server's JSON.

Attributes have the project's words, the wire its own (`Job.id` is "job_id" there). What a newer server says in addition
is left out; a missing field has its default; a field of the wrong kind is an error that names it.

    groups = client.sample(["What is 2 + 2?"], n=8)
    groups[0].completions[3].text
    scored = groups[0].scored([1.0, 0.0, None, ...])    # None: could not be scored; left out, never counted as 0
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from groupwise.errors import RemoteError, RequestError
from groupwise.types import BASE

T = TypeVar("T")

FINISHED = ("completed", "failed", "cancelled")


@functools.lru_cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def read(kind: type[T], data: Any) -> T:
    """A server's JSON as a `kind`. Raises RemoteError if it is not one."""
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
    """Inverse of `read`: what the server sent, without what this client does not know."""
    if isinstance(value, list):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    return _adapter(type(value)).dump_python(value, mode="json", by_alias=True)


# ---- sampling ----


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class RolloutCompletion:
    """One rollout. `version` sampled it; ids and logprobs are there if they were asked for."""

    rollout_id: str | None = None
    text: str
    finish_reason: str
    version: Annotated[str | None, Field(alias="adapter")] = None
    reasoning: Annotated[str | None, Field(alias="reasoning_content")] = None
    prompt_token_ids: tuple[int, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    usage: Usage = field(default_factory=Usage)
    prompt_index: int
    completion_index: int


@dataclass(frozen=True, kw_only=True)
class SampledGroup:
    """The completions of one prompt."""

    messages: tuple[Mapping[str, Any], ...]
    completions: tuple[RolloutCompletion, ...]
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def texts(self) -> list[str]:
        return [completion.text for completion in self.completions]

    def scored(self, rewards: Sequence[float | None], *, text_only: bool = False) -> dict[str, Any]:
        """The group with its rewards, as `train_grpo` takes it.

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
                named = completion.rollout_id is not None and not text_only
                what = {"rollout_id": completion.rollout_id} if named else {"text": completion.text}
                completions.append(what | {"reward": float(reward)})
        group = {"messages": list(self.messages), "completions": completions}
        return group | ({"tools": list(self.tools)} if self.tools else {})


@dataclass(frozen=True, kw_only=True)
class ChatMessage:
    """What the assistant said."""

    text: Annotated[str | None, Field(alias="content")] = None
    reasoning: Annotated[str | None, Field(alias="reasoning_content")] = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    role: str = "assistant"


@dataclass(frozen=True, kw_only=True)
class ChatChoice:
    """One of `n` replies. `logprobs` is as OpenAI has it."""

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: dict[str, Any] | None = None
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class ChatReply:
    """The answer to a conversation. `version` is the policy that gave it."""

    id: str
    model: str
    choices: tuple[ChatChoice, ...]
    usage: Usage = field(default_factory=Usage)
    version: Annotated[str | None, Field(alias="system_fingerprint")] = None
    prompt_token_ids: tuple[int, ...] | None = None

    @property
    def text(self) -> str:
        """The first reply's text."""
        return self.choices[0].message.text or ""


@dataclass(frozen=True, kw_only=True)
class ChatDelta:
    """What a streamed reply adds. The last one of a choice has its `finish_reason`."""

    index: int = 0
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None
    version: str | None = None


@dataclass(frozen=True, kw_only=True)
class Model:
    """Something that `model` may say."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


# ---- jobs ----


@dataclass(frozen=True, kw_only=True)
class SubmittedJob:
    """A job that the server has taken: it is on the server's disk."""

    id: Annotated[str, Field(alias="job_id")]
    state: str
    message: str = ""
    adapter: Annotated[str | None, Field(alias="adapter_name")] = None
    position: int | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class JobError:
    """Why a job failed."""

    code: str = "error"
    message: str
    hint: str | None = None
    log: str | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job. `state` is queued, running, completed, failed or cancelled; completed means served, unless it was
    not to be (`auto_load`) or is `unhealthy`: then its version is stored, and `warnings` say how to activate it."""

    id: Annotated[str, Field(alias="job_id")]
    kind: str = ""
    state: str
    phase: str = ""
    progress: float = 0.0
    step: int = 0
    steps: int = 0
    loss: Annotated[float | None, Field(alias="current_loss")] = None
    adapter: Annotated[str | None, Field(alias="adapter_name")] = None
    version: Annotated[str | None, Field(alias="adapter_version")] = None
    position: int | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    elapsed_s: Annotated[float, Field(alias="elapsed_secs")] = 0.0
    """From the submission to the end, or to now."""
    duration_s: Annotated[float | None, Field(alias="duration_secs")] = None
    """From the start to the end, or to now; None for a job that never ran."""
    attempt: int = 0
    cancel_requested: bool = False
    error: JobError | None = None
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    unhealthy: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        return self.state in FINISHED


@dataclass(frozen=True, kw_only=True)
class Cancelled:
    """`status` is cancelled, or cancelling: the worker stops after its step."""

    id: Annotated[str, Field(alias="job_id")]
    status: str


@dataclass(frozen=True, kw_only=True)
class JobEvent:
    """Something that happened to a job: `kind` is state, metrics or message. `seq` only grows."""

    seq: int
    kind: str
    at: datetime
    level: str = "info"
    message: str = ""
    data: dict[str, Any] = field(default_factory=dict)


# ---- the server ----


@dataclass(frozen=True, kw_only=True)
class Health:
    """How the server is: `status` is ok, degraded, loading or draining. Without the API key little more is said."""

    status: str
    version: str = ""
    uptime_s: Annotated[float, Field(alias="uptime_seconds")] = 0.0
    model: str | None = None
    backend: str | None = None
    active: Annotated[str | None, Field(alias="active_adapter")] = None
    active_version: str | None = None
    adapters_loaded: int | None = None
    scheduler: dict[str, Any] | None = None
    gpu_memory: dict[str, float] | None = None
    training: dict[str, Any] | None = None
    checks: tuple[dict[str, Any], ...] = ()


# ---- adapters ----


@dataclass(frozen=True, kw_only=True)
class AdapterVersion:
    """One version, and where it came from. `parent` is the version that its training started from. A `surplus` one is
    older than what the server keeps, and goes once nothing needs it; an `unhealthy` one becomes active by hand only."""

    version: str
    number: int
    active: bool = False
    created_at: datetime | None = None
    size_bytes: int = 0
    base_model: str = ""
    parent: str = ""
    step: int = 0
    job_id: str | None = None
    unhealthy: str | None = None
    surplus: bool = False
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter; `files`, size and time are those of its newest version. `history` comes with `adapters.show`."""

    name: str
    has_config: bool = True
    has_weights: bool = True
    size_bytes: int = 0
    modified_at: datetime | None = None
    files: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    active_version: str | None = None
    history: tuple[AdapterVersion, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AdapterList:
    """Every adapter. `active` is a name, None for the base model; `active_version` is "name@number" or "base". Of what
    jobs make, the newest `keep_versions` of each adapter are kept; None keeps all."""

    active: str | None = None
    active_version: str = BASE
    keep_versions: int | None = None
    available: tuple[Adapter, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ActiveVersion:
    """What answers from now on."""

    status: str
    name: str = BASE
    version: str = BASE


@dataclass(frozen=True, kw_only=True)
class DeletedAdapter:
    """What is gone."""

    name: str
    versions: tuple[str, ...] = ()
    status: str = "deleted"


@dataclass(frozen=True, kw_only=True)
class UploadedAdapter:
    """The version that an upload became."""

    name: str
    version: str = ""
    size_bytes: int = 0
    files: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MergedAdapter:
    """The version that a merge became."""

    name: Annotated[str, Field(alias="output_name")]
    version: str = ""
    mode: str = ""
    sources: tuple[dict[str, Any], ...] = ()
    num_tensors: int = 0
    density: float | None = None
    status: str = "merged"
