"""OpenAI's Responses API: POST /v1/responses, and what is kept of the answers.

    ResponsesRequest   a body -> the chat form: items as messages, thoughts, tool calls and tool results
    ResponseWriter     a reply -> output items, whole or as events
    ResponseStore      answers that were stored, for `previous_response_id`, in memory and bounded

Items of the assistant's that stand in a row (reasoning, message, function_call) are one turn of its.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from groupwise.errors import GroupwiseError, RequestError
from groupwise.tasks.dialects.form import (
    MOST_MESSAGES,
    TEXT_OR_PARTS,
    BodyPart,
    CallId,
    DialectRequest,
    Ending,
    FunctionName,
    Refused,
    StreamEvent,
    assistant,
    call,
    fault,
    image_part,
    joined,
    merged,
    one_system,
    together,
    unknown_kind,
)
from groupwise.tasks.dialects.images import HINT, DataUrl

if TYPE_CHECKING:
    from groupwise.model.reply_formats.parser import ReplyPart

MOST_STORED = 1024  # responses that are kept,
MOST_BYTES = 64 << 20  # and of how much JSON in all; the oldest go first
ONLY_TEXT = "is a part of type {kind}; here stands text only"
ONLY_SHOWN = "is a part of type {kind}; this server reads text and images"
STATUSES = {429: "rate_limit_exceeded"}  # HTTP statuses -> `code` of a response that failed; others are server errors


# ---- items ----
class TextContent(BodyPart):
    """Holds text of a message. The fields `annotations` and `logprobs` are ignored."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class RefusalContent(BodyPart):
    """Text with which the assistant refused to answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


def _text_content(value: Any) -> Any:
    return unknown_kind(value, TEXTS, ONLY_TEXT, "send its text")


AnyText = Annotated[
    Annotated[TextContent | RefusalContent, Field(discriminator="type")], BeforeValidator(_text_content)
]


def _by_bytes(value: Any) -> Any:
    if isinstance(value, Mapping) and value.get("file_id") is not None:
        raise fault("invalid_image", "names a file, and this server keeps none", hint=HINT, param="file_id")
    return value


class ImageContent(BodyPart):
    """Holds an image, for models with vision. The field `detail` is ignored."""

    type: Literal["input_image"]
    image_url: DataUrl


def _shown_content(value: Any) -> Any:
    return _by_bytes(unknown_kind(value, (*TEXTS, "input_image"), ONLY_SHOWN, "send its text"))


Shown = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[
        list[
            Annotated[
                Annotated[TextContent | RefusalContent | ImageContent, Field(discriminator="type")],
                BeforeValidator(_shown_content),
            ]
        ],
        Field(max_length=MOST_MESSAGES),
        Tag("parts"),
    ],
    TEXT_OR_PARTS,
]


class MessageItem(BodyPart):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Shown

    @model_validator(mode="after")
    def _shows_what_it_may(self) -> MessageItem:
        if self.role == "assistant" and not isinstance(self.content, str):
            for i, part in enumerate(self.content):
                if isinstance(part, ImageContent):
                    message = "a message of the assistant's has no images"
                    raise fault("invalid_messages", message, param=f"content[{i}]")
        return self


class FunctionCallItem(BodyPart):
    """A tool call that the assistant made, by the name that the policy wrote."""

    type: Literal["function_call"]
    call_id: CallId
    name: str
    arguments: str


class FunctionOutputItem(BodyPart):
    """Result of a tool call."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Shown


class ReasoningItem(BodyPart):
    """A thought of an earlier turn: its content, or else its summary. What is encrypted is left out."""

    type: Literal["reasoning"]
    content: Annotated[list[AnyText], Field(max_length=MOST_MESSAGES)] | None = None
    summary: Annotated[list[AnyText], Field(max_length=MOST_MESSAGES)] | None = None


ITEMS = ("message", "function_call", "function_call_output", "reasoning")


def _known_item(value: Any) -> Any:
    says = "is an item of type {kind}; this server knows messages, function calls and their outputs, and reasoning"
    return unknown_kind(value, ITEMS, says, f"the items are {', '.join(ITEMS)}; send them whole")


def _kind(value: Any) -> str:
    kind = value.get("type", "message") if isinstance(value, Mapping) else getattr(value, "type", "message")
    return kind if kind in ITEMS else "message"


Item = Annotated[
    Annotated[
        Annotated[MessageItem, Tag("message")]
        | Annotated[FunctionCallItem, Tag("function_call")]
        | Annotated[FunctionOutputItem, Tag("function_call_output")]
        | Annotated[ReasoningItem, Tag("reasoning")],
        Discriminator(_kind),
    ],
    BeforeValidator(_known_item),
]
Input = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Item], Field(max_length=MOST_MESSAGES), Tag("parts")], TEXT_OR_PARTS
]


def messages_of(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Return items as messages of the chat form."""
    return merged([_message(item) for item in items])


def _message(item: Any) -> dict[str, Any]:
    if isinstance(item, FunctionCallItem):
        return assistant("", calls=[call(item.call_id, item.name, item.arguments)])
    if isinstance(item, FunctionOutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
    if isinstance(item, ReasoningItem):
        return assistant("", joined([part.text for part in item.content or item.summary or ()]))
    if item.role == "assistant":
        return assistant(str(_content(item.content, between="")))
    return {"role": item.role, "content": _content(item.content)}


def _content(
    content: str | Sequence[TextContent | RefusalContent | ImageContent], *, between: str = "\n"
) -> str | list[dict[str, Any]]:
    """Return parts as content of the chat form."""
    if isinstance(content, str):
        return content
    parts = [[image_part(part.image_url)] if isinstance(part, ImageContent) else part.text for part in content]
    return together(parts, between=between)


# ---- requests ----
def _own_tool(value: Any) -> Any:
    says = "is {kind}, a tool that runs at its provider; this server offers functions that the client runs"
    hint = "describe it as a function, with name, description and parameters"
    return unknown_kind(value, ["function"], says, hint, code="unsupported_parameter")


class FunctionTool(BodyPart):
    """A tool that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def chat(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        function = {key: value for key, value in function.items() if value is not None}
        return {"type": "function", "function": function | ({"strict": True} if self.strict else {})}


class FunctionChoice(BodyPart):
    """The model must call the tool of this name."""

    type: Literal["function"]
    name: FunctionName


def _own_choice(value: Any) -> Any:
    says, hint = "is {kind}, which this server does not have", "use auto, none, required or a function's name"
    return unknown_kind(value, ["function"], says, hint, code="unsupported_parameter")


def _choice(value: Any) -> str:
    return "word" if isinstance(value, str) else "named"


ToolChoice = Annotated[
    Annotated[
        Annotated[Literal["none", "auto", "required"], Tag("word")] | Annotated[FunctionChoice, Tag("named")],
        Discriminator(_choice),
    ],
    BeforeValidator(_own_choice),
]


class Reasoning(BodyPart):
    """`effort: none` asks the model not to think and any other to think, where its chat template reads that."""

    effort: str | None = None


class TextFormat(BodyPart):
    """`text`, `json_object`, or `json_schema` with its name and schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def chat(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        schema = {"name": self.name, "description": self.description, "schema": self.schema_, "strict": self.strict}
        given = {key: value for key, value in schema.items() if value is not None}
        return {"type": "json_schema", "json_schema": given}


class TextConfig(BodyPart):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(DialectRequest):
    """The body of POST /v1/responses."""

    names: ClassVar = {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "verbosity": "text.verbosity",
        "chat_template_kwargs": "reasoning",
        "reasoning_effort": "reasoning",
    }
    bookkeeping: ClassVar = frozenset(
        (
            *("access_programs", "image", "include", "max_tool_calls", "prompt_cache_key", "prompt_cache_options"),
            *("prompt_cache_retention", "safety_identifier", "service_tier", "stream_options", "user"),
        )
    )
    refused: ClassVar = {
        "background": Refused((False,), "wait for the answer, or stream it"),
        "context_management": Refused(([],), "shorten the input"),
        "conversation": Refused(hint="use previous_response_id"),
        "moderation": Refused(),
        "n": Refused((1,), "send several requests"),
        "prompt": Refused(hint="send its text in instructions and input"),
        "stop": Refused(([],), "/v1/chat/completions has stop strings"),
        "top_logprobs": Refused((0,), "/v1/chat/completions has log-probabilities"),
        "truncation": Refused(("disabled",), "shorten the input"),
    }

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    input: Input
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """A stored response whose conversation this one continues from; its `instructions` are not taken over."""
    store: bool | None = None
    """Keep the answer for `previous_response_id` and GET, in memory; the oldest go first. Default true."""
    tools: (
        Annotated[list[Annotated[FunctionTool, BeforeValidator(_own_tool)]], Field(max_length=MOST_MESSAGES)] | None
    ) = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    """0 is greedy; default 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    metadata: Annotated[dict[str, str], Field(max_length=64)] | None = None
    """Given back with the answer."""
    stream: bool | None = None

    @property
    def items(self) -> Sequence[Any]:
        return [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    def said(self, history: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        """Return the conversation after `history`, without the instructions. Raises RequestError where there is
        nothing."""
        said = merged([*history, *messages_of(self.items)])
        if not said:
            raise RequestError("input is empty, so there is nothing to answer", field="input")
        return said

    def chat(self, history: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        body: dict[str, Any] = {
            **self.passed_on,
            "model": self.model,
            "messages": one_system(self.instructions or "", self.said(history)),
            "max_tokens": self.max_output_tokens,
            "tools": [tool.chat() for tool in self.tools] if self.tools else None,
            "tool_choice": self.tool_choice,
            **{name: getattr(self, name) for name in ("parallel_tool_calls", "temperature", "top_p", "stream")},
        }
        if isinstance(self.tool_choice, FunctionChoice):
            body["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        if body["messages"][-1]["role"] == "assistant":
            body["continue_final_message"] = False
        if self.reasoning is not None and self.reasoning.effort is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.reasoning.effort != "none"}
        if self.text is not None:
            body["response_format"] = self.text.format.chat() if self.text.format else None
            body["verbosity"] = self.text.verbosity
        return {key: value for key, value in body.items() if value is not None}


# ---- replies ----
class ResponseWriter:
    """A reply as output items, in the order in which it was said."""

    def __init__(self, *, id: str, model: str, request: ResponsesRequest):
        self._response = {**_head(request), "id": id, "created_at": int(time.time()), "model": model}
        self._output: list[dict[str, Any]] = []
        self._open = False  # whether the last item may continue
        self._number = -1
        self._suffix = id.partition("_")[2]

    def open(self, prompt_tokens: int) -> list[StreamEvent]:
        return [
            self._event(f"response.{name}", response=self._now("in_progress")) for name in ("created", "in_progress")
        ]

    def push(self, parts: Sequence[ReplyPart]) -> list[StreamEvent]:
        return [event for part in parts for event in self._added(part)]

    def close(self, ending: Ending) -> list[StreamEvent]:
        status = "incomplete" if ending.finish_reason == "length" else "completed"
        events = [] if self._output else self._opening(self._empty("content"))
        events += self._closing(status)
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        self._response |= {"status": status, "incomplete_details": cut, "usage": _usage(ending)}
        self._response |= {"output": self._output, "completed_at": int(time.time())}
        return [*events, self._event(f"response.{status}", response=self._response)]

    def fail(self, error: GroupwiseError) -> list[StreamEvent]:
        told = {"code": STATUSES.get(error.status, "server_error"), "message": error.message}
        return [self._event("response.failed", response=self._now("failed") | {"error": told})]

    @property
    def answer(self) -> dict[str, Any]:
        return self._response

    def _now(self, status: str) -> dict[str, Any]:
        return {**self._response, "status": status, "output": list(self._output)}

    def _added(self, part: ReplyPart) -> list[StreamEvent]:
        if part.kind == "tool_call":
            item = self._item("fc", type="function_call", call_id=part.id, name=part.name, arguments="")
            events = self._opening(item)
            self._output[-1]["arguments"] = part.arguments
            events.append(self._of_item("response.function_call_arguments.delta", delta=part.arguments))
            events.append(self._of_item("response.function_call_arguments.done", arguments=part.arguments))
            return [*events, *self._closing()]
        kind = "message" if part.kind == "content" else "reasoning"
        goes_on = self._open and self._output[-1]["type"] == kind
        events = [] if goes_on else self._opening(self._empty(part.kind))
        self._output[-1]["content"][0]["text"] += part.text
        return [*events, self._of_text("delta", delta=part.text)]

    def _empty(self, kind: str) -> dict[str, Any]:
        """Return a message, or a thought, of which nothing was said yet."""
        if kind == "content":
            return self._item("msg", type="message", role="assistant", content=[])
        return self._item("rs", type="reasoning", summary=[], content=[])

    def _item(self, kind: str, **fields: Any) -> dict[str, Any]:
        number = len(self._output)
        return {"id": f"{kind}_{self._suffix}_{number}", "status": "in_progress", **fields}

    def _opening(self, item: dict[str, Any]) -> list[StreamEvent]:
        events = self._closing()
        self._output.append(item)
        self._open = True
        events.append(self._event("response.output_item.added", output_index=self._last, item=dict(item)))
        if "content" in item:
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            part = {"type": kind, "text": ""} | ({"annotations": [], "logprobs": []} if kind == "output_text" else {})
            events.append(self._of_item("response.content_part.added", content_index=0, part=part))
            item["content"] = [dict(part)]
        return events

    def _closing(self, status: str = "completed") -> list[StreamEvent]:
        """Return the end of the item that is open."""
        if not self._open:
            return []
        self._open, item = False, self._output[-1]
        item["status"], events = status, []
        if "content" in item:
            (part,) = item["content"]
            events.append(self._of_text("done", text=part["text"]))
            events.append(self._of_item("response.content_part.done", content_index=0, part=part))
        return [*events, self._event("response.output_item.done", output_index=self._last, item=item)]

    def _of_text(self, what: str, **fields: Any) -> StreamEvent:
        said = self._output[-1]["type"] == "message"
        extra = {"logprobs": []} if said else {}
        name = f"response.{'output_text' if said else 'reasoning_text'}.{what}"
        return self._of_item(name, content_index=0, **fields, **extra)

    def _of_item(self, name: str, **fields: Any) -> StreamEvent:
        return self._event(name, item_id=self._output[-1]["id"], output_index=self._last, **fields)

    @property
    def _last(self) -> int:
        return len(self._output) - 1

    def _event(self, name: str, **fields: Any) -> StreamEvent:
        self._number += 1
        return StreamEvent(name, json.loads(json.dumps({"type": name, "sequence_number": self._number, **fields})))


def _head(request: ResponsesRequest) -> dict[str, Any]:
    """Return what a response says of its request."""
    choice = request.tool_choice
    text = request.text.format if request.text is not None else None
    return {
        "object": "response",
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
        "store": request.store is not False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": text.model_dump(exclude_none=True, by_alias=True) if text else {"type": "text"}},
        "tool_choice": choice.model_dump() if isinstance(choice, FunctionChoice) else choice or "auto",
        "tools": [{"parameters": None, "strict": None, **tool.model_dump()} for tool in request.tools or ()],
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _usage(ending: Ending) -> dict[str, Any]:
    return {
        "input_tokens": ending.prompt_tokens,
        "input_tokens_details": {"cached_tokens": ending.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": ending.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": ending.thought_tokens},
        "total_tokens": ending.prompt_tokens + ending.completion_tokens,
    }


# ---- what is kept ----
class ResponseNotFoundError(GroupwiseError, LookupError):
    """No such response is kept."""

    code, status, exit_code = "response_not_found", 404, 2


@dataclass(frozen=True)
class Stored:
    """A response, and the conversation after it as messages of the chat form, without instructions."""

    answer: Mapping[str, Any]
    messages: Sequence[dict[str, Any]]
    size: int


class ResponseStore:
    """Responses in memory, by id: the newest `most`, of at most `most_bytes` of JSON."""

    def __init__(self, *, most: int = MOST_STORED, most_bytes: int = MOST_BYTES):
        self._most, self._most_bytes, self._bytes = most, most_bytes, 0
        self._kept: OrderedDict[str, Stored] = OrderedDict()

    def keep(self, request: ResponsesRequest, answer: dict[str, Any], history: Sequence[dict[str, Any]]) -> None:
        """Store an answer as its request asks. `history`: the conversation of the response that it continues from."""
        if request.store is False:
            return
        output = ResponsesRequest.model_validate({"input": answer["output"]}).items
        messages = [*request.said(history), *messages_of(output)]
        stored = Stored(answer, messages, len(json.dumps([answer, messages])))
        self._kept[answer["id"]] = stored
        self._bytes += stored.size
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            self._bytes -= self._kept.popitem(last=False)[1].size

    def find(self, id: str) -> Stored:
        """Raise ResponseNotFoundError."""
        if id not in self._kept:
            raise self._gone(id)
        return self._kept[id]

    def history(self, id: str | None) -> Sequence[dict[str, Any]]:
        """Return the conversation that a request with this `previous_response_id` goes on from. Raises RequestError."""
        try:
            return () if id is None else self.find(id).messages
        except ResponseNotFoundError as error:
            code = "previous_response_not_found"
            raise RequestError(error.message, hint=error.hint, field="previous_response_id", code=code) from None

    def delete(self, id: str) -> None:
        """Raise ResponseNotFoundError."""
        self._bytes -= self.find(id).size
        del self._kept[id]

    def _gone(self, id: str) -> ResponseNotFoundError:
        shown = id if len(id) <= 64 else f"{id[:61]}..."
        return ResponseNotFoundError(
            f"there is no response {shown!r}: it has expired, was deleted, or was not stored. The newest {self._most} "
            f"are kept in memory ({self._most_bytes >> 20} MiB of them), until this process ends",
            hint="send the whole conversation as input",
        )
