"""The bodies of /v1/completions, /v1/completions/batch and /v1/models."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator, model_validator
from pydantic_core import core_schema

from groupwise.sdk.types import Answer, Usage, absent
from groupwise.server.schema_messages import Conversation, OfferedTools
from groupwise.server.schema_openai import (
    BOOKKEEPING,
    MAX_PROMPT_ID,
    OTHERS,
    Sampling,
    ShapedSampling,
    TemplateOptions,
    check_stream,
    check_tools,
)
from groupwise.server.wire import AtMost, OpenRequest, OwnRequest, Unsupported, limits_of
from groupwise.tasks.dialects.chat_form import StreamOptions
from groupwise.tasks.dialects.form import FailFast, fault

# ---- /v1/completions ----
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": MAX_PROMPT_ID}}
_TEXT = {"type": "string", "minLength": 1}
_PROMPT = {"anyOf": [_TEXT, _IDS, {"type": "array", "minItems": 1, "items": {"anyOf": [_TEXT, _IDS]}}]}
Raw = str | tuple[int, ...]


def _prompts(value: Any) -> tuple[Raw, ...]:
    """Return a prompt in any of OpenAI's four forms as a tuple of texts and ids."""
    several = isinstance(value, list) and bool(value) and not any(type(item) is int for item in value[:1])
    return tuple(_prompt(item) for item in (value if several else [value]))


def _prompt(value: Any) -> Raw:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(item) is int and 0 <= item <= MAX_PROMPT_ID for item in value):
        return tuple(value)
    raise fault("invalid_value", "must be a text, a list of token ids, or a list of those, and none of them empty")


Prompts = Annotated[tuple[Raw, ...], BeforeValidator(_prompts), WithJsonSchema(_PROMPT)]


class CompletionRequest(ShapedSampling, OpenRequest):
    """The body of POST /v1/completions: the prompt is sampled as it is, without a chat template."""

    bookkeeping: ClassVar = BOOKKEEPING
    others: ClassVar = OTHERS

    prompt: Prompts
    """A text, token ids, or a list of either. Special tokens count as such."""
    max_tokens: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    """0 only scores the prompt, and needs echo: true."""
    echo: bool | None = None
    """Give the prompt back in front of the completion, with its log-probabilities if those are asked for."""
    logprobs: Annotated[int, Field(ge=0), AtMost("max_top_logprobs")] | None = None
    """Report the log-probability of each token and this many likeliest ones."""
    prompt_logprobs: Annotated[int, Field(ge=0), AtMost("max_top_logprobs")] | None = None
    """Report the log-probability of each of the prompt's tokens, at temperature 1, and this many likeliest ones by
    their ids, as vLLM does. Not with stream."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    suffix: Annotated[Any, Unsupported("")] = None
    add_special_tokens: Annotated[Any, Unsupported(True, hint="give token ids")] = None

    @model_validator(mode="after")
    def _fits_together(self) -> CompletionRequest:
        check_stream(self.stream, self.stream_options)
        if self.prompt_logprobs is not None and self.stream:
            message = "prompt_logprobs are of a whole answer, and stream is true; leave one of the two out"
            raise fault("invalid_value", message, param="prompt_logprobs")
        if self.max_tokens == 0 and not self.echo:
            message = "max_tokens is 0 and needs echo: true; otherwise there is nothing to answer"
            raise fault("invalid_value", message, param="max_tokens")
        return self

    @field_validator("prompt", mode="after")
    @classmethod
    def _not_too_many(cls, prompts: tuple[Raw, ...], info: core_schema.ValidationInfo) -> tuple[Raw, ...]:
        most = limits_of(info).max_batch_completions
        if len(prompts) > most:
            raise _too_many(f"{len(prompts)} prompts", most)
        return prompts


def _too_many(what: str, most: int) -> Exception:
    message = "{what} are more than the {most} that this server takes in one request (max_batch_completions)"
    return fault("batch_too_large", message, what=what, most=most, hint="send several requests", param="n")


class CompletionLogprobs(Answer):
    """Holds an entry for each token. The first token of an echoed prompt has no log-probability and no alternatives."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(Answer):
    """A token that could stand in a place of the prompt."""

    logprob: float
    decoded_token: str


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | None = absent()
    prompt_token_ids: list[int] | None = absent()
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = absent()


class TextCompletion(Answer):
    """The answer of POST /v1/completions, and each event of its stream; choices are ordered by prompt, then by n."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    usage: Usage | None = absent()


# ---- /v1/completions/batch ----
class BatchRequest(Sampling, OwnRequest):
    """The body of POST /v1/completions/batch: `n` rollouts of each prompt."""

    elsewhere: ClassVar = {
        "messages": "prompts, a list of conversations",
        "prompt": "prompts, a list of conversations",
        "num_generations": "n",
        "stream": "nothing: a batch is answered whole",
        "top_logprobs": "nothing: a batch reports the sampled tokens' log-probabilities, with logprobs: true",
    }

    prompts: Annotated[list[Conversation], FailFast(), Field(min_length=1)]
    """Conversations, each up to where the assistant speaks."""
    tools: OfferedTools | None = None
    logprobs: bool | None = None
    """Give back the behaviour log-probability of each token."""
    chat_template_kwargs: TemplateOptions | None = None

    @model_validator(mode="after")
    def _not_too_many(self, info: core_schema.ValidationInfo) -> BatchRequest:
        n, most = self.n or 1, limits_of(info).max_batch_completions
        if len(self.prompts) * n > most:
            raise _too_many(f"{len(self.prompts)} prompts x {n} = {len(self.prompts) * n} completions", most)
        check_tools(self.tools)
        return self


# ---- /v1/models ----
