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
from groupwise.config.section import NullIsAbsent
from groupwise.config.serve import MOST_MESSAGES
from groupwise.server.errors import echo
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
            {"required": ["refusal"], "properties": {"refusal": {"type": "string"}}},
        ]
    },
    "else": {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}, "allOf": [_NO_CALLS]},
}  # what ChatMessage._says_something checks, for the API's document


class ChatMessage(Part):
    """One message of a conversation."""

    model_config = ConfigDict(json_schema_extra=_SAYS_SOMETHING)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    refusal: str | None = None
    """What OpenAI's models say in place of content; it is read as that."""
    reasoning_content: str | None = None
    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    tool_calls: Annotated[list[ToolCall], FailFast(), Field(max_length=1024)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.refusal is not None)):
            what = "content or tool_calls" if self.role == "assistant" else "content"
            message = "a message of role '{role}' needs {what}"
            raise fault("invalid_messages", message, role=self.role, what=what, param="content")
        if self.tool_calls and self.role != "assistant":
            message = "only the assistant makes tool_calls; this is role '{role}'"
            raise fault("invalid_messages", message, role=self.role, param="tool_calls")
        return self

    def as_message(self) -> types.Message:
        """Return it as the chat templates want it; `developer` is what newer clients call `system`."""
        message: dict[str, Any] = self.model_dump(exclude_none=True)
        message["role"] = "system" if self.role == "developer" else self.role
        if (refusal := message.pop("refusal", None)) is not None:
            message.setdefault("content", refusal)
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
    """Return a conversation as `types.Prompt` wants it."""
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
        """Return it as the chat templates want it."""
        return {"type": self.type, "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}


Tools = Annotated[list[Tool], FailFast(), AtMost("max_tools")]


# ---- what is not guaranteed in rollouts ----
class OfferedFunction(FunctionSchema):
    """The function of a tool that is offered in rollouts, in which calls are the policy's own."""

    strict: Annotated[
        Any,
        Unsupported(
            False,
            says="is true, and what is sampled here is not kept to a tool's schema: calls are the policy's own",
            hint="leave strict out and check the arguments of the call; /v1/chat/completions has it",
        ),
    ] = None


class OfferedTool(Tool):
    """A tool that is offered in rollouts."""

    function: OfferedFunction  # pyright: ignore[reportIncompatibleVariableOverride]


OfferedTools = Annotated[list[OfferedTool], FailFast(), AtMost("max_tools")]


class NamedFunction(Part):
    """The function of a `NamedTool`."""

    name: FunctionName


class NamedTool(Part):
    """A tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


def _choice_shape(value: Any) -> str:
    return "named" if isinstance(value, dict | NamedTool) else "word"


_ChoiceWord = Literal["none", "auto", "required"]

ToolChoice = Annotated[
    Annotated[_ChoiceWord, Tag("word")] | Annotated[NamedTool, Tag("named")], Discriminator(_choice_shape)
]


# ---- the form of an answer ----
class JsonSchemaFormat(NullIsAbsent, Part):
    """A JSON Schema, as OpenAI has it."""

    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    description: str | None = None
    json_schema: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None
    """false leaves to the model what of the schema cannot be guaranteed; otherwise that is an error."""


class ResponseFormat(NullIsAbsent, Part):
    """What the answer is: text, a JSON object, or JSON that a schema allows."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> ResponseFormat:
        missing = self.json_schema is None or self.json_schema.json_schema is None
        if self.type == "json_schema" and missing:
            hint = 'write {"type": "json_schema", "json_schema": {"name": "...", "schema": {...}}}'
            message = "json_schema.schema is missing, and type is 'json_schema'"
            raise fault("invalid_value", message, hint=hint, param="json_schema")
        return self


Choices = Annotated[list[Annotated[str, Field(min_length=1)]], FailFast(), Field(min_length=1, max_length=1024)]

_ONE_SPACE = "JSON has at most a space or a line's indentation between its signs"


class StructuredOutputs(NullIsAbsent, Part):
    """vLLM's `structured_outputs`: exactly one of `json`, `regex`, `choice`, `grammar` and `json_object`."""

    schema_: str | JsonObject | None = Field(default=None, alias="json")
    """A JSON Schema, itself or as a string."""
    regex: Annotated[str, Field(min_length=1)] | None = None
    """What the whole text matches, in the syntax of Rust's regular expressions."""
    choice: Choices | None = None
    """Texts, one of which it is."""
    grammar: Annotated[str, Field(min_length=1)] | None = None
    """A context-free grammar, in Lark or GBNF."""
    json_object: bool | None = None
    """Any JSON object."""

    structural_tag: Annotated[Any, Unsupported(hint="use tools, or a grammar")] = None
    whitespace_pattern: Annotated[Any, Unsupported(hint=_ONE_SPACE)] = None
    disable_any_whitespace: Annotated[Any, Unsupported(False, hint=_ONE_SPACE)] = None
    disable_additional_properties: Annotated[Any, Unsupported(False, hint="say additionalProperties: false")] = None

    @model_validator(mode="after")
    def _one_of_them(self) -> StructuredOutputs:
        given = list(self._given())
        if len(given) != 1:
            said = " and ".join(given) if given else "none"
            raise fault("invalid_value", "has {said}; give one of json, regex, choice, grammar, json_object", said=said)
        return self

    def _given(self) -> dict[str, Any]:
        given = {} if self.schema_ is None else {"json": self.schema_}  # also {}, which allows everything
        rest = ("regex", "choice", "grammar", "json_object")
        return given | {name: value for name in rest if (value := getattr(self, name))}

    def as_grammar(self, field: str) -> types.Grammar:
        """Return the same as a `Grammar`, which errors call by `field`."""
        ((name, given),) = self._given().items()
        return types.Grammar.of_option(name, given, field=f"{field}.{name}")
