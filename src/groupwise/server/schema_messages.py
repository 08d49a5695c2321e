"""Lists of messages and tools within a server's limits, tools that rollouts offer, and vLLM's forms of an answer.

The messages and tools themselves are those of `groupwise.tasks.dialects.chat_form`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from groupwise import types
from groupwise.config.section import NullIsAbsent
from groupwise.config.serve import MOST_MESSAGES
from groupwise.server.errors import echo
from groupwise.server.wire import AtMost, Unsupported
from groupwise.tasks.dialects.chat_form import ChatMessage, FunctionSchema, Tool
from groupwise.tasks.dialects.form import BodyPart, FailFast, JsonObject, fault


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


# ---- the form of an answer ----
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], FailFast(), Field(min_length=1, max_length=1024)]

_ONE_SPACE = "JSON has at most a space or a line's indentation between its signs"


class StructuredOutputs(NullIsAbsent, BodyPart):
    """vLLM's `structured_outputs`: exactly one of `json`, `regex`, `choice`, `grammar` and `json_object`."""

    schema_: str | JsonObject | None = Field(default=None, alias="json")
    """A JSON Schema, itself or as a string."""
    regex: Annotated[str, Field(min_length=1)] | None = None
    """A regular expression that the whole text matches, in the syntax of Rust's regular expressions."""
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
