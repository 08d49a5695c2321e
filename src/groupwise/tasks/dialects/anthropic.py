"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens.

    MessagesRequest   a body -> the chat form: blocks as text, thoughts, tool calls and tool results
    MessageWriter     a reply -> content blocks, whole or as events
    error_of          an error in Anthropic's envelope

A turn that comes back has its thoughts as `thinking` blocks. Their `signature` is a digest that says nothing and is not
checked: clients drop thoughts that have none. `redacted_thinking` holds nothing that can be read here, and is left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Tag, model_validator

from groupwise.errors import GroupwiseError
from groupwise.tasks.dialects.form import (
    MOST_MESSAGES,
    TEXT_OR_PARTS,
    BodyPart,
    CallId,
    DialectRequest,
    Ending,
    FunctionName,
    Refused,
    StopString,
    StreamEvent,
    assistant,
    call,
    fault,
    image_part,
    joined,
    one_system,
    together,
    unknown_kind,
)
from groupwise.tasks.dialects.images import Base64Image, as_data_url, fetched_base64

if TYPE_CHECKING:
    from groupwise.model.reply_formats.parser import ReplyPart

PING = StreamEvent("ping", {"type": "ping"})
ONLY_TEXT = "is a block of type {kind}; here stands text only"
ONLY_SHOWN = "is a block of type {kind}; this server reads text and images"
ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}  # statuses -> `type`; others of 400 to 499 are invalid requests, and from 500 on API errors


# ---- requests ----
class TextBlock(BodyPart):
    """Holds text. The fields `cache_control` and `citations` are ignored."""

    type: Literal["text"]
    text: str


class ImageSource(BodyPart):
    """The bytes of an image. What kind it is they say themselves."""

    type: Literal["base64"]
    media_type: str | None = None
    data: Base64Image


def _brought(value: Any) -> Any:
    if isinstance(value, dict) and (data := fetched_base64(value.get("url"))) is not None:
        return {"type": "base64", "data": data}
    says, hint = "is {kind}; addresses are not fetched, and files not kept", "send its bytes, in base64"
    return unknown_kind(value, ["base64"], says, hint, code="invalid_image")


class ImageBlock(BodyPart):
    """An image, for models that see."""

    type: Literal["image"]
    source: Annotated[ImageSource, BeforeValidator(_brought)]


class ThinkingBlock(BodyPart):
    """A thought of an earlier turn; the chat template decides whether the model sees it again."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(BodyPart):
    """A thought that only its author could read; it is left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(BodyPart):
    """A tool call of an earlier turn, by the name that the policy wrote."""

    type: Literal["tool_use"]
    id: CallId
    name: str
    input: dict[str, Any]


def _text_block(value: Any) -> Any:
    return unknown_kind(value, ["text"], ONLY_TEXT, "send its text")


OnlyText = Annotated[TextBlock, BeforeValidator(_text_block)]
Texts = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[OnlyText], Field(max_length=MOST_MESSAGES), Tag("parts")],
    TEXT_OR_PARTS,
]


SHOWN = ("text", "image")


def _shown_block(value: Any) -> Any:
    return unknown_kind(value, SHOWN, ONLY_SHOWN, "send its text")


Shown = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[
        list[
            Annotated[
                Annotated[TextBlock | ImageBlock, Field(discriminator="type")],
                BeforeValidator(_shown_block),
            ]
        ],
        Field(max_length=MOST_MESSAGES),
        Tag("parts"),
    ],
    TEXT_OR_PARTS,
]


def _text(content: str | Sequence[TextBlock] | None) -> str:
    return content if isinstance(content, str) else joined([block.text for block in content or ()])


def _content(content: str | Sequence[TextBlock | ImageBlock] | None) -> str | list[dict[str, Any]]:
    """Return blocks as content of the chat form."""
    if isinstance(content, str):
        return content
    return together(
        [
            [image_part(as_data_url(block.source.data))] if isinstance(block, ImageBlock) else block.text
            for block in content or ()
        ]
    )


class ToolResultBlock(BodyPart):
    """Result of a tool call. `is_error` is not shown to the model: say it in the content."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: Shown | None = None
    is_error: bool | None = None


KINDS = ("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result")


def _known_block(value: Any) -> Any:
    return unknown_kind(value, KINDS, ONLY_SHOWN, f"the blocks are {', '.join(KINDS)}")


Block = Annotated[
    Annotated[
        TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
        Field(discriminator="type"),
    ],
    BeforeValidator(_known_block),
]
Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Block], Field(max_length=MOST_MESSAGES), Tag("parts")], TEXT_OR_PARTS
]
SPEAKS = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}  # which blocks a message of a role has


class InputMessage(BodyPart):
    """Describes a message of the conversation in Anthropic's form."""

    role: Literal["user", "assistant", "system"]
    content: Content

    @model_validator(mode="after")
    def _blocks_of_its_role(self) -> InputMessage:
        for i, block in enumerate(self.blocks):
            if block.type not in SPEAKS[self.role]:
                raise fault(
                    "invalid_messages",
                    "a message of role '{role}' has no blocks of type '{kind}'; it has {allowed}",
                    role=self.role,
                    kind=block.type,
                    allowed=", ".join(SPEAKS[self.role]),
                    param=f"content[{i}]",
                )
        return self

    @property
    def blocks(self) -> Sequence[Any]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content

    def chat(self) -> list[dict[str, Any]]:
        """Return the messages of the chat form that it is: a tool's result is one of its own."""
        if self.role == "assistant":
            return [_said(self.blocks)]
        messages: list[dict[str, Any]] = []
        shown: list[TextBlock | ImageBlock] = []

        def speak() -> None:
            if shown:
                messages.append({"role": self.role, "content": _content(shown)})
                shown.clear()

        for block in self.blocks:
            if isinstance(block, TextBlock | ImageBlock):
                shown.append(block)
                continue
            speak()
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _content(block.content)})
        speak()
        return messages


def _said(blocks: Sequence[Any]) -> dict[str, Any]:
    """Return a turn of the assistant's, its texts as they were sampled: one behind another."""
    calls = [call(b.id, b.name, json.dumps(b.input, ensure_ascii=False)) for b in blocks if b.type == "tool_use"]
    thoughts = [block.thinking for block in blocks if block.type == "thinking" and block.thinking]
    return assistant("".join(block.text for block in blocks if block.type == "text"), joined(thoughts), calls)


def _own_tool(value: Any) -> Any:
    says = "is {kind}, a tool that runs at its provider; this server offers tools that the client runs"
    return unknown_kind(
        value, ["custom"], says, "describe it with name, description and input_schema", code="unsupported_parameter"
    )


class ToolDefinition(BodyPart):
    """A tool that the model may call."""

    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None

    def chat(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        function = {key: value for key, value in function.items() if value is not None}
        return {"type": "function", "function": function | ({"strict": True} if self.strict else {})}


class AutoChoice(BodyPart):
    """The model decides whether it calls a tool (`auto`), or must not (`none`), or must call some tool (`any`)."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedChoice(BodyPart):
    """The model must call the tool of this name."""

    type: Literal["tool"]
    name: FunctionName
    disable_parallel_tool_use: bool | None = None


class Thinking(BodyPart):
    """Switch for the model's thinking, where its chat template reads one. No budget is kept: `max_tokens` ends all."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None


class JsonFormat(BodyPart):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(BodyPart):
    """The form that the reply is to have. `effort` changes nothing."""

    effort: str | None = None
    format: JsonFormat | None = None


class ContextEdit(BodyPart):
    """Describes an edit of the context. The chat template decides which earlier thoughts stay; all other edits are
    refused."""

    type: str

    @model_validator(mode="after")
    def _of_thoughts(self) -> ContextEdit:
        if not self.type.startswith("clear_thinking"):
            raise fault(
                "unsupported_parameter", "edits the context, and this server does not", hint="shorten the messages"
            )
        return self


class ContextManagement(BodyPart):
    edits: Annotated[list[ContextEdit], Field(max_length=64)] | None = None


class CountRequest(DialectRequest):
    """The body of POST /v1/messages/count_tokens."""

    names: ClassVar = {
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "parameters": "input_schema",
        "chat_template_kwargs": "thinking",
    }
    bookkeeping: ClassVar = frozenset(
        (
            *("betas", "cache_control", "diagnostics", "inference_geo", "metadata", "service_tier", "speed"),
            *("user_profile_id", "workspace_id", "anthropic_version", "anthropic_beta"),
        )
    )
    refused: ClassVar = {
        "container": Refused(hint="tools run at the client"),
        "mcp_servers": Refused(([],), hint="connect to them in the client, and offer their tools in tools"),
        "n": Refused((1,), "send several requests"),
        "fallbacks": Refused(([],)),
    }

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    system: Texts | None = None
    tools: (
        Annotated[list[Annotated[ToolDefinition, BeforeValidator(_own_tool)]], Field(max_length=MOST_MESSAGES)] | None
    ) = None
    tool_choice: Annotated[AutoChoice | NamedChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    """An earlier name of `output_config.format`."""
    context_management: ContextManagement | None = None

    def chat(self) -> dict[str, Any]:
        said = [each for message in self.messages for each in message.chat()]
        messages = one_system(_text(self.system), said)
        body: dict[str, Any] = {**self.passed_on, "model": self.model, "messages": messages}
        if self.tools:
            body["tools"] = [tool.chat() for tool in self.tools]
        if self.tool_choice is not None:
            body |= _chosen(self.tool_choice)
        if self.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.thinking.type != "disabled"}
        wanted = self.output_config.format if self.output_config is not None else None
        if (wanted := wanted or self.output_format) is not None:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "output", "schema": wanted.schema_},
            }
        return {key: value for key, value in body.items() if value is not None}


def _chosen(choice: AutoChoice | NamedChoice) -> dict[str, Any]:
    named = {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedChoice) else None
    words = {"auto": "auto", "any": "required", "none": "none"}
    asked: dict[str, Any] = {"tool_choice": named or words[choice.type]}
    return asked | ({"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {})


class MessagesRequest(CountRequest):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=1 << 20)]
    """The longest reply; it also ends where the context is full (`model_context_window_exceeded`)."""
    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    """0 is greedy; default 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 31)] | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=1024)] | None = None
    """Strings that end the reply; `stop_sequence` of the answer says which did."""
    stream: bool | None = None

    def chat(self) -> dict[str, Any]:
        sampled = {name: getattr(self, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "stream")}
        given = {name: value for name, value in sampled.items() if value is not None}
        return super().chat() | given | ({"stop": list(self.stop_sequences)} if self.stop_sequences else {})


# ---- replies ----
class MessageWriter:
    """A reply as content blocks, in the order in which it was said."""

    def __init__(self, *, id: str, model: str):
        self._head = {"id": id, "type": "message", "role": "assistant", "model": model}
        self._blocks: list[dict[str, Any]] = []
        self._open = False  # whether the last block may continue
        self._ended: dict[str, Any] = {}

    def open(self, prompt_tokens: int) -> list[StreamEvent]:
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [_event("message_start", message=message)]

    def push(self, parts: Sequence[ReplyPart]) -> list[StreamEvent]:
        return [event for part in parts for event in self._added(part)]

    def close(self, ending: Ending) -> list[StreamEvent]:
        cut = "model_context_window_exceeded" if ending.full else "max_tokens"
        reasons = {"length": cut, "tool_calls": "tool_use"}
        reason = reasons.get(ending.finish_reason, "end_turn" if ending.stop is None else "stop_sequence")
        stopped = {"stop_reason": reason, "stop_sequence": ending.stop if reason == "stop_sequence" else None}
        usage = {
            "input_tokens": ending.prompt_tokens - ending.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": ending.cached_tokens,
            "output_tokens": ending.completion_tokens,
            "output_tokens_details": {"thinking_tokens": ending.thought_tokens},
        }
        self._ended = {**stopped, "usage": usage}
        last = _event("message_delta", delta=stopped, usage=usage)
        return [*self._closing(), last, _event("message_stop")]

    def fail(self, error: GroupwiseError) -> list[StreamEvent]:
        return [StreamEvent("error", error_of(error))]

    @property
    def answer(self) -> dict[str, Any]:
        blocks = [_whole(block) for block in self._blocks]
        return {**self._head, "content": blocks, **self._ended}

    def _added(self, part: ReplyPart) -> list[StreamEvent]:
        if part.kind == "tool_call":
            use = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
            events = self._opening(use)
            self._blocks[-1] = {**use, "input": json.loads(part.arguments)}
            delta = {"type": "input_json_delta", "partial_json": part.arguments}
            return [*events, self._delta(delta), *self._closing()]
        kind, key = ("thinking", "thinking") if part.kind == "reasoning" else ("text", "text")
        goes_on = self._open and self._blocks[-1]["type"] == kind
        empty = {"type": kind, key: ""} | ({"signature": ""} if kind == "thinking" else {})
        events = [] if goes_on else self._opening(empty)
        self._blocks[-1][key] += part.text
        return [*events, self._delta({"type": f"{kind}_delta", key: part.text})]

    def _opening(self, block: Mapping[str, Any]) -> list[StreamEvent]:
        events = self._closing()
        self._blocks.append(dict(block))
        self._open = True
        return [*events, _event("content_block_start", index=len(self._blocks) - 1, content_block=dict(block))]

    def _closing(self) -> list[StreamEvent]:
        """Return the end of the block that is open."""
        if not self._open:
            return []
        self._open, block = False, self._blocks[-1]
        signed = {"type": "signature_delta", "signature": _signature(block.get("thinking", ""))}
        events = [self._delta(signed)] if block["type"] == "thinking" else []
        return [*events, _event("content_block_stop", index=len(self._blocks) - 1)]

    def _delta(self, delta: Mapping[str, Any]) -> StreamEvent:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)


def _event(name: str, **fields: Any) -> StreamEvent:
    return StreamEvent(name, {"type": name, **fields})


def _whole(block: Mapping[str, Any]) -> dict[str, Any]:
    signed = {"signature": _signature(block["thinking"])} if block["type"] == "thinking" else {}
    return {**block, **signed}


def _signature(thought: str) -> str:
    return hashlib.sha256(thought.encode("utf-8", "surrogatepass")).hexdigest()


def error_of(error: GroupwiseError, request_id: str | None = None) -> dict[str, Any]:
    """Return an error as Anthropic's clients read it; `code`, `param` and `hint` are ours."""
    kind = ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    told = {"type": kind, "message": error.message, "code": error.code, "param": error.field, "hint": error.hint}
    return {"type": "error", "error": told, "request_id": request_id}
