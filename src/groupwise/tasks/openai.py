"""OpenAI's chat completions API as far as agents in training need it: request models, responses, stream events.

What the policy samples with is the run's. `temperature`, `top_p`, `seed` and the penalties of a request change nothing,
nor does `strict` of a tool, which some libraries always send; the answer's header `x-ignored`, the metric
`env/ignored_parameters` and a note say that they were there. Answering as they ask would draw from another distribution
than the one that is trained. What cannot be ignored
without a lie is refused: `n` above 1, a required tool call (its first tokens would not be the policy's), a response
format, content that is no text, and a last message of the assistant's that is to be continued.

`max_tokens`, `max_completion_tokens`, `stop`, `tools`, `tool_choice` auto and none, `parallel_tool_calls`, `logprobs`
and `top_logprobs` act. Every model name is the policy. With `stream` the events are sent when the answer is whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from groupwise.errors import GroupwiseError, RequestError
from groupwise.types import Completion, FinishReason, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL = "policy"
RUN_DECIDES: Mapping[str, Any] = {
    "temperature": 1,
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "seed": None,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "reasoning_effort": None,
}  # parameters that are ignored, and what they are without effect
REPLACEMENT = "\ufffd"  # what decoding puts for a part of a character
LEAST_LOGPROB = -9999.0  # JSON has no minus infinity; this is what OpenAI writes for it


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


class AgentTextPart(_Lenient):
    type: Literal["text"]
    text: str


class Function(_Lenient):
    name: str
    arguments: str | dict[str, Any] = "{}"


class AgentToolCall(_Lenient):
    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class AgentMessage(_Lenient):
    """A message of a request; what it has besides is left out."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[AgentTextPart] | None = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: list[AgentToolCall] | None = None
    tool_call_id: str | None = None

    def as_message(self) -> Message:
        """As chat templates want it: text as one string, `system` for `developer`."""
        message: dict[str, Any] = self.model_dump(exclude_none=True)
        message["role"] = "system" if self.role == "developer" else self.role
        if isinstance(self.content, list):
            message["content"] = "".join(part.text for part in self.content)
        if not self.tool_calls:
            message.pop("tool_calls", None)
        return message  # type: ignore[return-value]


class AgentFunction(_Lenient):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class AgentTool(_Lenient):
    """A tool that the policy may call. It is not shown `strict`, which cannot be kept: arguments may be anything."""

    type: Literal["function"]
    function: AgentFunction

    def as_dict(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class AgentStreamOptions(_Lenient):
    include_usage: bool | None = None


class AgentChatRequest(BaseModel):
    """The body of POST /v1/chat/completions."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    messages: Annotated[list[AgentMessage], Field(min_length=1)]
    tools: list[AgentTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[Annotated[str, Field(min_length=1)]] | None = None
    stream: bool | None = None
    stream_options: AgentStreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    n: int | None = None
    response_format: Any = None
    functions: Any = None

    @property
    def conversation(self) -> tuple[Message, ...]:
        return tuple(message.as_message() for message in self.messages)

    @property
    def offered_tools(self) -> tuple[dict[str, Any], ...]:
        """The tools that the policy is told of: none where it must not call any."""
        return () if self.tool_choice == "none" else tuple(tool.as_dict() for tool in self.tools or ())

    @property
    def most_tokens(self) -> int | None:
        """The longest answer asked for."""
        return min((most for most in (self.max_tokens, self.max_completion_tokens) if most is not None), default=None)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) and self.stop else tuple(self.stop or ())

    @property
    def ignored(self) -> list[str]:
        """The parameters that are there, would change something, and do not."""
        extra = self.model_extra or {}
        strict = ["tools.strict"] if any(tool.function.strict for tool in self.tools or ()) else []
        return [name for name, neutral in RUN_DECIDES.items() if extra.get(name) not in (None, neutral)] + strict


def read_request(body: bytes) -> AgentChatRequest:
    """A body, checked. Raises RequestError."""
    try:
        request = AgentChatRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        raise RequestError(f"{where}: {first['msg']}", field=where) from None
    for refused, param, why in (
        (request.n not in (None, 1), "n", f"n is {request.n}; an episode goes on from one answer. Send n requests"),
        (
            request.tool_choice not in (None, "auto", "none"),
            "tool_choice",
            "tool_choice is neither auto nor none: the policy decides what it calls, as that is what is trained",
        ),
        (
            request.response_format not in (None, {"type": "text"}),
            "response_format",
            "response_format is not supported; describe the format in a message",
        ),
        (bool(request.functions), "functions", "functions are not supported; use tools"),
        (
            request.messages[-1].role == "assistant",
            "messages",
            "the last message is the assistant's; end with one that the policy answers",
        ),
    ):
        if refused:
            raise RequestError(why, field=param)
    for i, message in enumerate(request.messages):
        if message.content is None and not (message.role == "assistant" and message.tool_calls):
            raise RequestError(f"messages.{i} of role {message.role!r} has no content", field=f"messages.{i}.content")
    return request


# ---- answers ----
@dataclass(frozen=True, kw_only=True)
class AgentReply:
    """One answer of the policy. `message` is as the client gets it and sends it back."""

    id: str
    created: int
    message: dict[str, Any]
    completion: Completion
    prompt_tokens: int

    @property
    def finish_reason(self) -> str:
        reason = self.completion.finish_reason
        return "tool_calls" if self.message.get("tool_calls") and reason is FinishReason.STOP else reason.value

    @property
    def usage(self) -> dict[str, int]:
        said = len(self.completion.token_ids)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": said,
            "total_tokens": self.prompt_tokens + said,
        }


def completion_of(reply: AgentReply, request: AgentChatRequest, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The answer to a request that does not stream."""
    return {
        **_head(reply, "chat.completion"),
        "choices": [
            {
                "index": 0,
                "message": {"refusal": None, **reply.message},
                "logprobs": logprobs_of(reply, tokenizer) if request.logprobs else None,
                "finish_reason": reply.finish_reason,
            }
        ],
        "usage": reply.usage,
    }


def events_of(reply: AgentReply, request: AgentChatRequest, tokenizer: PreTrainedTokenizerBase) -> bytes:
    """The same as server-sent events: who speaks, what is said, each call, why it ended, and [DONE]."""
    message, head = reply.message, _head(reply, "chat.completion.chunk")
    calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls") or ())]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{key: message[key]} for key in ("reasoning_content", "content") if message.get(key)]
    deltas += [{"tool_calls": [call]} for call in calls]
    logprobs = logprobs_of(reply, tokenizer) if request.logprobs else None
    choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "logprobs": logprobs, "finish_reason": reply.finish_reason})
    chunks = [{**head, "choices": [choice]} for choice in choices]
    if request.stream_options is not None and request.stream_options.include_usage:
        chunks.append({**head, "choices": [], "usage": reply.usage})
    return b"".join(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks) + b"data: [DONE]\n\n"


def models() -> dict[str, Any]:
    """The answer of GET /v1/models."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "groupwise"}]}


def error_of(error: GroupwiseError) -> dict[str, Any]:
    """The body of an answer that is an error."""
    kinds = {401: "authentication_error", 403: "permission_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    told = {"message": error.message, "type": kind, "param": error.field, "code": error.code}
    return {"error": {**told, "hint": error.hint}}


def logprobs_of(reply: AgentReply, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Each sampled token with its log-probability, the one that ended the turn too."""
    said = reply.completion
    alternatives = said.top_logprobs or ((),) * len(said.token_ids)
    content = [
        {**_token(token_id, logprob, tokenizer), "top_logprobs": [_token(*one, tokenizer) for one in top]}
        for token_id, logprob, top in zip(said.token_ids, said.logprobs, alternatives, strict=True)
    ]
    return {"content": content, "refusal": None}


def _token(token_id: int, logprob: float, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    text = str(tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False))
    spelled = None if REPLACEMENT in text else list(text.encode())  # of a part of a character they are not known
    return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": spelled}


def _head(reply: AgentReply, kind: str) -> dict[str, Any]:
    return {"id": reply.id, "object": kind, "created": reply.created, "model": MODEL}


# ---- what is equal ----
def key_of(messages: Iterable[Message]) -> tuple[Any, ...]:
    """Messages as what counts when a conversation is recognised: who says what, and calls what with what."""
    return tuple(map(_key, messages))


def tools_key(tools: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(list(tools), sort_keys=True)


def _key(message: Message) -> tuple[Any, ...]:
    calls = [(call.get("id"), *_called(call.get("function") or {})) for call in message.get("tool_calls") or ()]
    return message["role"], message.get("content") or "", tuple(calls), message.get("tool_call_id"), message.get("name")


def _called(function: Mapping[str, Any]) -> tuple[Any, str]:
    """A function's name and its arguments in one spelling."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return function.get("name"), arguments
    return function.get("name"), json.dumps(arguments, sort_keys=True)
