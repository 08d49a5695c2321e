"""Messages and tools, as OpenAI's clients write them and as the chat templates read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)

from groupwise import types
from groupwise.config.serve import MOST_MESSAGES
from groupwise.config.yaml import NullIsAbsent
from groupwise.server.envelope import echo
from groupwise.server.wire import AtMost, FailFast, JsonObject, Part, Unsupported, fault

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


def _only_text(kind: str) -> str:
    if kind != "text":
        raise fault("unsupported_content", "is not 'text'; this model reads text only")
    return kind


class TextPart(Part):
    """A part of a message's content."""

    type: Annotated[str, AfterValidator(_only_text), WithJsonSchema({"const": "text"})]
    text: str


class CalledFunction(Part):
    """The function of a call and its arguments: JSON as a string, as OpenAI has it, or an object."""

    name: FunctionName
    arguments: str | JsonObject


class ToolCall(NullIsAbsent, Part):
    """A call that the assistant made."""

    id: Annotated[str, Field(max_length=256)] | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


def _shape(content: Any) -> str:
    return "parts" if isinstance(content, list) else "text"


Parts = Annotated[list[TextPart], FailFast(), Field(min_length=1, max_length=4096)]
Content = Annotated[Annotated[str, Tag("text")] | Annotated[Parts, Tag("parts")], Discriminator(_shape)]


_NO_CALLS = {"properties": {"tool_calls": {"type": ["array", "null"], "maxItems": 0}}}
_SAYS_SOMETHING = {
    "if": {"properties": {"role": {"const": "assistant"}}},
    "then": {
        "anyOf": [
            {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
            {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}},
        ]
    },
    "else": {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}, "allOf": [_NO_CALLS]},
}  # what ChatMessage._says_something checks, for the API's document


class ChatMessage(Part):
    """One message of a conversation."""

    model_config = ConfigDict(json_schema_extra=_SAYS_SOMETHING)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    reasoning_content: str | None = None
    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    tool_calls: Annotated[list[ToolCall], FailFast(), Field(max_length=1024)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            what = "content or tool_calls" if self.role == "assistant" else "content"
            message = "a message of role '{role}' needs {what}"
            raise fault("invalid_messages", message, role=self.role, what=what, param="content")
        if self.tool_calls and self.role != "assistant":
            message = "only the assistant makes tool_calls; this is role '{role}'"
            raise fault("invalid_messages", message, role=self.role, param="tool_calls")
        return self

    def as_message(self) -> types.Message:
        """As the chat templates want it; `developer` is what newer clients call `system`."""
        message: dict[str, Any] = self.model_dump(exclude_none=True)
        message["role"] = "system" if self.role == "developer" else self.role
        return message  # pyright: ignore[reportReturnType]


def _no_text(value: Any) -> Any:
    if isinstance(value, str):
        hint = 'write [{"role": "user", "content": "..."}]'
        raise fault("invalid_value", "is {value}; it must be a list of messages", value=echo(value), hint=hint)
    return value


# Pydantic's own bound ends the reading there; `max_messages` is compared when all messages have become objects.
Conversation = Annotated[
    list[ChatMessage],
    FailFast(),
    Field(min_length=1, max_length=MOST_MESSAGES),
    AtMost("max_messages"),
    BeforeValidator(_no_text),
]


def as_messages(messages: Sequence[ChatMessage]) -> tuple[types.Message, ...]:
    """A conversation as `types.Prompt` wants it."""
    return tuple(message.as_message() for message in messages)


class FunctionSchema(Part):
    """What a tool is called, does, and takes (JSON Schema)."""

    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    """Of a conversation that is trained, it says nothing."""


class Tool(Part):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionSchema

    def as_dict(self) -> dict[str, Any]:
        """As the chat templates want it."""
        return {"type": self.type, "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}


Tools = Annotated[list[Tool], FailFast(), AtMost("max_tools")]


# ---- what would have to be guaranteed ----
class OfferedFunction(FunctionSchema):
    """The function of a tool that is offered for a reply."""

    strict: Annotated[
        Any,
        Unsupported(
            False,
            says="is true, and this server cannot guarantee it: decoding is not constrained to a schema",
            hint="leave strict out (OpenAI's agents: strict_mode=False), and check the arguments of the call",
        ),
    ] = None


class OfferedTool(Tool):
    """A tool that is offered for a reply."""

    function: OfferedFunction  # pyright: ignore[reportIncompatibleVariableOverride]


OfferedTools = Annotated[list[OfferedTool], FailFast(), AtMost("max_tools")]


def _not_forced(value: Any) -> Any:
    """A call that is insisted on, of any tool or of a named one, cannot be guaranteed."""
    if value == "required" or (isinstance(value, dict) and "type" in value):
        named = value.get("function") if isinstance(value, dict) else None
        shown = f"names the tool {echo(named.get('name'))}" if isinstance(named, dict) else f"is {echo(value)}"
        raise fault(
            "unsupported_parameter",
            "{shown}, and this server cannot guarantee a call: decoding is not constrained",
            shown=shown,
            hint="use 'auto', offer only the tools that may be called, say in a message that one is to be called, and "
            "look whether the reply has tool_calls",
        )
    return value


ToolChoice = Annotated[Literal["none", "auto"], BeforeValidator(_not_forced)]
