"""OpenAI's chat completions API as far as agents in training need it: request models, responses, stream events.

`top_p`, `top_k`, `min_p`, `response_format`, a required or named `tool_choice` and `strict` tools leave a part of the
vocabulary in each place. They act where the engine records which (the local one), since training is then under what was
left. With another engine the first three change nothing, and nor does `strict`; the others are refused.

What changes the distribution otherwise is the run's: `temperature`, `seed`, the penalties and `logit_bias` of a request
change nothing. The answer's header `x-ignored`, the metric `env/ignored_parameters` and a note say of what changes
nothing that it was there. What cannot be ignored without a lie is refused: `n` above 1, content that is neither text
nor an image, and a last message of the assistant's that is to be continued.

`max_tokens`, `max_completion_tokens`, `stop`, `tools`, `parallel_tool_calls`, `logprobs` and `top_logprobs` act. Every
model name is the policy. A stream's log-probabilities come with its last choice. The other dialects (`tasks.dialects`)
are read into the same request, and so all of this holds for them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from groupwise.errors import GroupwiseError, RequestError
from groupwise.model.reply_formats.known import format_of
from groupwise.tasks.dialects.chat_form import ChatMessage, NamedTool, ResponseFormat, StreamOptions, Tool, ToolChoice
from groupwise.tasks.dialects.form import DialectRequest, Ending, StreamEvent, read, renamed
from groupwise.tasks.structured import format_grammar, of_reply, reply_grammar, thoughts_of, with_thoughts
from groupwise.types import NARROWING, Completion, Grammar, Message, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from groupwise.model.reply_formats.format import ReplyFormat
    from groupwise.model.reply_formats.parser import ReplyPart

MODEL = "policy"
RUN_DECIDES: Mapping[str, Any] = {
    "temperature": 1,
    "seed": None,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "reasoning_effort": None,
    "chat_template_kwargs": {},
}  # parameters that are ignored, and what they are without effect
REPLACEMENT = "\ufffd"  # what decoding puts for a part of a character
LEAST_LOGPROB = -9999.0  # JSON has no minus infinity; this is what OpenAI writes for it


class AgentChatRequest(BaseModel):
    """The body of POST /v1/chat/completions of an episode: OpenAI's chat form, without what a live server adds.

    The endpoint is lenient where a live server is not, for its one client is the user's own program, written for
    another model:

        any other field is taken: what the run decides (`RUN_DECIDES`) is named as ignored, and the rest is not read
        numbers may come as text, and true as 1: programs in many languages send them so
        the lists of messages, tools and stop strings have no limit: an episode is as long as its environment lets it
        be. What stands inside a message or a tool is read as a server reads it, with its limits
    """

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[Annotated[str, Field(min_length=1)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: int | None = None
    response_format: ResponseFormat | None = None
    functions: Any = None

    @property
    def conversation(self) -> tuple[Message, ...]:
        return tuple(message.as_message() for message in self.messages)

    @property
    def offered_tools(self) -> tuple[dict[str, Any], ...]:
        """Return the tools that the policy may call; empty if it must not call any."""
        return () if self.tool_choice == "none" else tuple(tool.as_dict() for tool in self.tools or ())

    @property
    def most_tokens(self) -> int | None:
        """Return the requested limit of the answer."""
        return min((most for most in (self.max_tokens, self.max_completion_tokens) if most is not None), default=None)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) and self.stop else tuple(self.stop or ())

    @property
    def narrowing(self) -> dict[str, Any]:
        """Return those of `top_p`, `top_k` and `min_p` that are given."""
        given = {name: value for name in NARROWING if (value := getattr(self, name)) is not None}
        return given | ({"top_k": max(0, given["top_k"])} if "top_k" in given else {})  # -1 is off too

    @property
    def must_call(self) -> bool:
        return self.tool_choice not in (None, "auto", "none")

    @property
    def forces(self) -> str | None:
        """The field by which an answer is not the policy's own choice."""
        if self.must_call:
            return "tool_choice"
        return "response_format" if self.response_format and self.response_format.type != "text" else None

    def narrowed(
        self,
        run: SamplingParams,
        prompt_ids: Sequence[int],
        tokenizer: PreTrainedTokenizerBase,
        *,
        recorded: bool,
    ) -> SamplingParams:
        """Return the run's parameters with what this request leaves to be drawn from in the reply to `prompt_ids`.

        Raises:
            RequestError: it forces what an engine that does not record that (`recorded`) cannot train.
            GrammarError: what a tool takes cannot be guaranteed.
        """
        if not recorded:
            if (field := self.forces) is not None:
                message = f"{field} is not supported by this engine, which does not record what it leaves to be drawn"
                hint = "describe it in a message, or train with engine: local"
                raise RequestError(message, hint=hint, field=field)
            return run if run.thinking_budget is None else of_reply(run, prompt_ids, tokenizer)
        grammar = self._grammar(format_of(tokenizer), tokenizer, run.grammar)
        if grammar is None:
            return of_reply(replace(run, **self.narrowing, grammar=None), prompt_ids, tokenizer)
        thoughts = thoughts_of(prompt_ids, tokenizer)
        grammar = with_thoughts(grammar, tokenizer, thoughts, tokens=run.thinking_budget)
        return replace(run, **self.narrowing, grammar=grammar)

    def _grammar(self, form: ReplyFormat, tokenizer: PreTrainedTokenizerBase, own: Grammar | None) -> Grammar | None:
        """Return what the reply must be, but for its thoughts; `own` is what the run wants of an answer, unless this
        request says that."""
        choice, asked = self.tool_choice, self.response_format
        named = choice.function.name if isinstance(choice, NamedTool) else None
        tools = [] if choice == "none" else [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        given = None if asked is None else asked.json_schema
        schema, strict = (None, None) if given is None else (given.json_schema, given.strict)
        return reply_grammar(
            form,
            tools,
            tokenizer,
            choice="required" if self.must_call else "auto",
            only=named,
            several=self.parallel_tool_calls is not False and named is None,
            answer=own if asked is None else format_grammar(asked.type, schema, strict=strict),
        )

    def ignored(self, *, recorded: bool) -> list[str]:
        """Return the parameters that are there, would change something, and do not; `recorded` says whether the engine
        records which tokens were left to draw from."""
        extra = self.model_extra or {}
        names = [name for name, neutral in RUN_DECIDES.items() if extra.get(name) not in (None, neutral)]
        if recorded:
            return names
        narrowed = [name for name, value in self.narrowing.items() if value != NARROWING[name]]
        return names + narrowed + ["tools.strict"] * any(tool.function.strict for tool in self.tools or ())


def read_request(body: bytes) -> AgentChatRequest:
    """Return a body of chat completions, checked. Raises RequestError."""
    return checked(read(body, AgentChatRequest))


def read_other(body: bytes, model: type[DialectRequest]) -> tuple[AgentChatRequest, DialectRequest]:
    """Return a body of another dialect as a chat request, and as what it is. Raises RequestError in the dialect's
    words."""
    asked = read(body, model)
    return translated(asked, asked.chat()), asked


def translated(asked: DialectRequest, form: dict[str, Any]) -> AgentChatRequest:
    """Return the chat request that `asked` is, as its chat form says. Raises RequestError in the dialect's words."""
    try:
        return checked(read(json.dumps(form).encode(), AgentChatRequest))
    except RequestError as error:
        raise renamed(error, asked.names) from None


def checked(request: AgentChatRequest) -> AgentChatRequest:
    """Return `request`, if the policy can answer it. Raises RequestError."""
    offered = [tool.function.name for tool in request.tools or ()]
    for refused, param, why in (
        (request.n not in (None, 1), "n", f"n is {request.n}; an episode goes on from one answer. Send n requests"),
        (
            request.must_call and not request.tools,
            "tool_choice",
            "tool_choice asks for a call, and there are no tools",
        ),
        (
            isinstance(request.tool_choice, NamedTool) and request.tool_choice.function.name not in offered,
            "tool_choice",
            f"tool_choice names a tool that is not offered; there are {', '.join(offered) or 'none'}",
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
    return request


# ---- answers ----
@dataclass(frozen=True, kw_only=True)
class AgentReply:
    """Holds an answer of the policy: its `message` as the client gets it and sends it back, and the message's parts."""

    message: dict[str, Any]
    parts: tuple[ReplyPart, ...]
    ending: Ending


class ChatWriter:
    """A reply as a chat completion: a `dialects.form.Writer`."""

    def __init__(self, *, id: str, request: AgentChatRequest, tokenizer: PreTrainedTokenizerBase):
        self._request, self._tokenizer = request, tokenizer
        self._head = {"id": id, "object": "chat.completion.chunk", "created": int(time.time()), "model": MODEL}
        self._said: dict[str, str] = {}
        self._calls: list[dict[str, Any]] = []
        self._ending: Ending | None = None

    def open(self, prompt_tokens: int) -> list[StreamEvent]:
        return [self._chunk({"role": "assistant", "content": ""})]

    def push(self, parts: Sequence[ReplyPart]) -> list[StreamEvent]:
        return [self._chunk(self._delta(part)) for part in parts]

    def close(self, ending: Ending) -> list[StreamEvent]:
        self._ending = ending
        events = [self._chunk({}, logprobs=self._logprobs(), finish_reason=ending.finish_reason)]
        if self._request.stream_options is not None and self._request.stream_options.include_usage:
            events.append(StreamEvent(None, {**self._head, "choices": [], "usage": self._usage()}))
        return events

    def fail(self, error: GroupwiseError) -> list[StreamEvent]:
        return [StreamEvent(None, error_of(error))]

    @property
    def answer(self) -> dict[str, Any]:
        assert self._ending is not None
        content = self._said.get("content") or (None if self._calls else "")
        message = {"refusal": None, "role": "assistant", "content": content}
        if "reasoning_content" in self._said:
            message["reasoning_content"] = self._said["reasoning_content"]
        if self._calls:
            message["tool_calls"] = self._calls
        choice = {"index": 0, "message": message, "logprobs": self._logprobs()}
        choice["finish_reason"] = self._ending.finish_reason
        return {**self._head, "object": "chat.completion", "choices": [choice], "usage": self._usage()}

    def _delta(self, part: ReplyPart) -> dict[str, Any]:
        if part.kind == "tool_call":
            called = {"name": part.name, "arguments": part.arguments}
            self._calls.append({"id": part.id, "type": "function", "function": called})
            return {"tool_calls": [{"index": len(self._calls) - 1, **self._calls[-1]}]}
        key = "content" if part.kind == "content" else "reasoning_content"
        self._said[key] = self._said.get(key, "") + part.text
        return {key: part.text}

    def _chunk(self, delta: dict[str, Any], *, logprobs: Any = None, finish_reason: str | None = None) -> StreamEvent:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return StreamEvent(None, {**self._head, "choices": [choice]})

    def _logprobs(self) -> dict[str, Any] | None:
        if not self._request.logprobs or self._ending is None:
            return None
        return logprobs_of(self._ending.completion, self._tokenizer)

    def _usage(self) -> dict[str, int]:
        assert self._ending is not None
        prompt, said = self._ending.prompt_tokens, self._ending.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}


def models() -> dict[str, Any]:
    """Return the answer of GET /v1/models."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "groupwise"}]}


def error_of(error: GroupwiseError) -> dict[str, Any]:
    """Return the body of an answer that is an error."""
    kinds = {401: "authentication_error", 403: "permission_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    told = {"message": error.message, "type": kind, "param": error.field, "code": error.code}
    return {"error": {**told, "hint": error.hint}}


def logprobs_of(said: Completion, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return each sampled token with its log-probability, the one that ended the turn too."""
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


# ---- what is equal ----
def key_of(messages: Iterable[Message]) -> tuple[Any, ...]:
    """Return messages as what counts when a conversation is recognised: who says what, and calls what with what."""
    return tuple(map(_key, messages))


def tools_key(tools: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(list(tools), sort_keys=True)


def _key(message: Message) -> tuple[Any, ...]:
    calls = [(call.get("id"), *_called(call.get("function") or {})) for call in message.get("tool_calls") or ()]
    tool = message.get("tool_call_id"), message.get("name")
    return message["role"], _said(message.get("content")), tuple(calls), *tool


def _said(content: Any) -> Any:
    """Return a content as what it is compared by: a text, or texts and pictures."""
    if not isinstance(content, list):
        return content or ""
    return tuple(part.get("text") or part.get("image") for part in content)


def _called(function: Mapping[str, Any]) -> tuple[Any, str]:
    """Return a function's name and its arguments in one spelling."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return function.get("name"), arguments
    return function.get("name"), json.dumps(arguments, sort_keys=True)
