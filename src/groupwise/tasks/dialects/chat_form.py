"""OpenAI's chat form: messages, tools and the form of an answer, modelled once.

The live server, the endpoint of episodes and the other dialects read their requests into it. Only the lists around it
are each one's own: a server limits them by its configuration (`server.schema_messages`), the endpoint by nothing
(`tasks.openai`). What a message or a tool has besides is ignored: they come from many clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from groupwise import types
from groupwise.config.section import NullIsAbsent
from groupwise.tasks.dialects.form import (
    TEXT_OR_PARTS,
    BodyPart,
    CallId,
    FailFast,
    FunctionName,
    JsonObject,
    fault,
    unknown_kind,
)
from groupwise.tasks.dialects.images import ImageUrl


# ---- messages ----
class TextPart(BodyPart):
    """Text of a message's content."""

    type: Literal["text"]
    text: str


class PostedImage(BodyPart):
    """Holds the bytes of an image. The field `detail` is ignored."""

    url: ImageUrl


def _as_object(value: Any) -> Any:
    """Return a URL that stands by itself, as some clients send it, as OpenAI has it."""
    return {"url": value} if isinstance(value, str) else value


class ImagePart(BodyPart):
    """An image in a message's content, for models that see."""

    type: Literal["image_url"]
    image_url: Annotated[PostedImage, BeforeValidator(_as_object)]


PARTS = ("text", "image_url")


def _known_part(value: Any) -> Any:
    return unknown_kind(value, PARTS, "is a part of type {kind}; this server reads text and images", "send its text")


Part = Annotated[
    Annotated[TextPart | ImagePart, Field(discriminator="type")],
    BeforeValidator(_known_part),
]


class CalledFunction(BodyPart):
    """The function of a call, by the name that the policy wrote, and its arguments: JSON as a string, as OpenAI has it,
    or an object."""

    name: str
    arguments: str | JsonObject


class ToolCall(NullIsAbsent, BodyPart):
    """A call that the assistant made."""

    id: CallId | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


Parts = Annotated[list[Part], FailFast(), Field(min_length=1, max_length=4096)]

Content = Annotated[Annotated[str, Tag("text")] | Annotated[Parts, Tag("parts")], TEXT_OR_PARTS]

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


class ChatMessage(BodyPart):
    """Describes a message of a conversation in OpenAI's form."""

    model_config = ConfigDict(json_schema_extra=_SAYS_SOMETHING)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    refusal: str | None = None
    """The text of OpenAI's models in place of content; read as content."""
    reasoning_content: str | None = None
    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    tool_calls: Annotated[list[ToolCall], FailFast(), Field(max_length=1024)] | None = None
    tool_call_id: CallId | None = None

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.refusal is not None)):
            what = "content or tool_calls" if self.role == "assistant" else "content"
            message = "a message of role '{role}' needs {what}"
            raise fault("invalid_messages", message, role=self.role, what=what, param="content")
        if self.role == "assistant" and isinstance(self.content, list):
            for i, part in enumerate(self.content):
                if isinstance(part, ImagePart):
                    message = "a message of the assistant's has no images"
                    raise fault("invalid_messages", message, param=f"content[{i}]")
        if self.tool_calls and self.role != "assistant":
            message = "only the assistant makes tool_calls; this is role '{role}'"
            raise fault("invalid_messages", message, role=self.role, param="tool_calls")
        return self

    def as_message(self) -> types.Message:
        """Return it as the chat templates want it: text as one string, or parts where there are images, `system` for
        `developer`, no empty list of calls."""
        message: dict[str, Any] = self.model_dump(exclude_none=True, exclude={"content"})
        message["role"] = "system" if self.role == "developer" else self.role
        if (refusal := message.pop("refusal", None)) is not None:
            message["content"] = refusal
        if self.content is not None:
            message["content"] = _as_content(self.content)
        if not self.tool_calls:
            message.pop("tool_calls", None)
        return message  # pyright: ignore[reportReturnType]


def _as_content(content: str | Sequence[TextPart | ImagePart]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not any(isinstance(part, ImagePart) for part in content):
        return said(content)
    return [
        {"type": "image", "image": part.image_url.url}
        if isinstance(part, ImagePart)
        else {"type": "text", "text": part.text}
        for part in content
    ]


def said(content: str | Sequence[TextPart | ImagePart] | None) -> str:
    """Return the text of a message's content."""
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content or () if isinstance(part, TextPart))


def as_messages(messages: Sequence[ChatMessage]) -> tuple[types.Message, ...]:
    """Return a conversation as `types.Prompt` wants it."""
    return tuple(message.as_message() for message in messages)


# ---- tools ----
class FunctionSchema(BodyPart):
    """A tool's name, description and parameters (JSON Schema)."""

    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    """Has no effect in a conversation that is trained."""


class Tool(BodyPart):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionSchema

    def as_dict(self) -> dict[str, Any]:
        """Return it as the chat templates want it."""
        return {"type": self.type, "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}


class NamedFunction(BodyPart):
    """The function of a `NamedTool`."""

    name: FunctionName


class NamedTool(BodyPart):
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
class JsonSchemaFormat(NullIsAbsent, BodyPart):
    """A JSON Schema, as OpenAI has it."""

    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    description: str | None = None
    json_schema: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None
    """false leaves to the model what of the schema cannot be guaranteed; otherwise that is an error."""


class ResponseFormat(NullIsAbsent, BodyPart):
    """The form of the answer: text, a JSON object, or JSON that a schema allows."""

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


class StreamOptions(BodyPart):
    """`include_usage`: a last chunk with the tokens used."""

    include_usage: bool | None = None
