"""The bodies of /v1/chat/completions, and what every route that samples has in common with it.

Names and meanings are OpenAI's; `adapter`, `adapters` and what gives token ids back are ours. Ranges and what excludes
what are checked here, before anything is tokenised. An option that this server does not have is refused, unless its
value changes nothing; what says nothing about the answer (`BOOKKEEPING`) and fields that nobody here knows are ignored
on OpenAI's routes and refused on ours. null is a field that is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from groupwise.section import NullIsAbsent
from groupwise.server.protocol_messages import ChatMessage as ChatMessage
from groupwise.server.protocol_messages import Conversation, OfferedTools, Tool, ToolChoice
from groupwise.server.protocol_messages import as_messages as as_messages
from groupwise.server.wire import Answer, AtMost, FailFast, OpenRequest, OwnPart, Part, Unsupported, absent, fault

MAX_COMPOSED = 16
MAX_TOKEN_ID = (1 << 31) - 1

BOOKKEEPING = frozenset(
    (
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    )
)  # OpenAI's fields for who asks, what is kept there and how fast it goes; the same is sampled without them

Selector = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}(@[0-9]{1,12})?$")]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
TokenIds = Annotated[list[TokenId], FailFast()]
Finish = Literal["stop", "length", "tool_calls"]
MaxTokens = Annotated[int, Field(ge=1, le=1 << 20)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]


# ---- which policy, and how it is sampled ----
class AdapterShare(NullIsAbsent, OwnPart):
    """An adapter in a composition, and what its update is multiplied by."""

    name: Selector
    scale: float = Field(default=1.0, ge=-100, le=100)


class PolicyChoice(Part):
    """Which policy answers. Without `adapter` and `adapters`, `model` decides; without any, the active version."""

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """The served model's name (the active version), `base`, or an adapter: `name` or `name@3`."""
    adapter: Selector | None = None
    """`base`, `name` (its active or newest version), or `name@3`."""
    adapters: Annotated[list[AdapterShare], Field(min_length=1, max_length=MAX_COMPOSED)] | None = None
    """A sum of adapters, for this request."""

    @model_validator(mode="after")
    def _one_choice(self) -> Any:
        if self.adapter is not None and self.adapters is not None:
            raise fault("invalid_value", "adapter and adapters exclude each other; give one of them", param="adapters")
        return self


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


_STOP_SCHEMA = {"type": "string", "minLength": 1, "maxLength": 1024}
Stop = Annotated[
    list[StopString],
    FailFast(),
    AtMost("max_stop"),
    BeforeValidator(_listed),
    WithJsonSchema({"anyOf": [_STOP_SCHEMA, {"type": "array", "items": _STOP_SCHEMA, "x-limit": "max_stop"}]}),
]


_FORMAT = "describe the format in the prompt"


class Sampling(PolicyChoice):
    """How completions are drawn."""

    n: Annotated[int, Field(ge=1), AtMost("max_n")] | None = None
    """Completions of each prompt; default 1."""
    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    """0 is greedy; default 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Draw among the likeliest tokens that make up this probability; default 1, off."""
    top_k: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    """Draw among this many likeliest tokens; default 0, off."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Leave out tokens less likely than this fraction of the likeliest; default 0, off."""
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    """The newer name of `max_tokens`; the smaller counts where both are given."""
    stop: Stop | None = None
    """Strings that end a completion; they are cut from its text."""
    stop_token_ids: Annotated[list[TokenId], FailFast(), AtMost("max_stop")] | None = None
    """Token ids that end a completion, besides the model's own."""
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    """The same seed and version draw the same completions."""
    ignore_eos: bool | None = None
    """Go on after the end of the turn."""
    return_token_ids: bool | None = None
    """Give back the ids of prompt and completion: what training needs."""

    presence_penalty: Annotated[Any, Unsupported(0, 0.0)] = None
    frequency_penalty: Annotated[Any, Unsupported(0, 0.0)] = None
    repetition_penalty: Annotated[Any, Unsupported(1, 1.0)] = None
    logit_bias: Annotated[Any, Unsupported({})] = None
    min_tokens: Annotated[Any, Unsupported(0)] = None
    bad_words: Annotated[Any, Unsupported([])] = None
    structured_outputs: Annotated[Any, Unsupported(hint=_FORMAT)] = None
    guided_json: Annotated[Any, Unsupported(hint=_FORMAT)] = None
    guided_regex: Annotated[Any, Unsupported(hint=_FORMAT)] = None
    guided_choice: Annotated[Any, Unsupported(hint=_FORMAT)] = None
    guided_grammar: Annotated[Any, Unsupported(hint=_FORMAT)] = None

    @property
    def most_tokens(self) -> int | None:
        """The longest completion asked for; None is the server's default."""
        return min((m for m in (self.max_tokens, self.max_completion_tokens) if m is not None), default=None)


class TemplateOptions(OwnPart):
    """What a request may tell the chat template."""

    enable_thinking: bool | None = None


def template_kwargs(options: TemplateOptions | None) -> dict[str, Any]:
    """What the template is told besides the messages."""
    return {} if options is None else options.model_dump(exclude_none=True)


class StreamOptions(Part):
    """`include_usage`: a last chunk with the tokens used."""

    include_usage: bool | None = None


# ---- /v1/chat/completions ----
class ChatRequest(Sampling, OpenRequest):
    """The body of POST /v1/chat/completions."""

    bookkeeping: ClassVar = BOOKKEEPING

    messages: Conversation
    tools: OfferedTools | None = None
    tool_choice: ToolChoice | None = None
    """`auto` (the default with tools) or `none`. A call cannot be insisted on."""
    parallel_tool_calls: bool | None = None
    """false keeps the first call only."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    """Report the log-probability of each token, after temperature."""
    top_logprobs: Annotated[int, Field(ge=0), AtMost("max_top_logprobs")] | None = None
    """Report this many likeliest tokens beside each."""
    chat_template_kwargs: TemplateOptions | None = None

    response_format: Annotated[Any, Unsupported({"type": "text"}, hint=_FORMAT)] = None
    functions: Annotated[Any, Unsupported([], hint="use tools")] = None
    function_call: Annotated[Any, Unsupported("none", hint="use tool_choice")] = None
    chat_template: Annotated[Any, Unsupported(hint="the model's own template is used")] = None
    modalities: Annotated[Any, Unsupported(["text"])] = None
    audio: Annotated[Any, Unsupported()] = None
    reasoning_effort: Annotated[Any, Unsupported(hint="use chat_template_kwargs.enable_thinking")] = None
    verbosity: Annotated[Any, Unsupported("medium", hint="ask for it in the prompt")] = None
    web_search_options: Annotated[Any, Unsupported(hint="offer a search tool in tools")] = None
    moderation: Annotated[Any, Unsupported()] = None

    @model_validator(mode="after")
    def _fits_together(self) -> ChatRequest:
        check_stream(self.stream, self.stream_options)
        if self.top_logprobs and not self.logprobs:
            message = "top_logprobs is {count} and needs logprobs: true"
            raise fault("invalid_value", message, count=self.top_logprobs, param="top_logprobs")
        check_tools(self.tools)
        return self


def check_stream(stream: bool | None, options: StreamOptions | None) -> None:
    if options is not None and not stream:
        raise fault("invalid_value", "stream_options needs stream: true", param="stream_options")


def check_tools(tools: Sequence[Tool] | None) -> None:
    names = [tool.function.name for tool in tools or ()]
    if len(set(names)) < len(names):
        raise fault("invalid_value", "two tools have the same name; give each its own", param="tools")


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
    """What the assistant said; its thoughts apart where there are any."""

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


class CachedTokens(Answer):
    cached_tokens: int = 0


class Usage(Answer):
    """Tokens. A prompt counts once, whatever n is; the end-of-turn token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = absent()


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


class ChatDelta(Answer):
    """What a chunk adds."""

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
    """One event of the stream; the last, if asked for, has the usage and no choices."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    usage: Usage | None = absent()
    prompt_token_ids: list[int] | None = absent()
