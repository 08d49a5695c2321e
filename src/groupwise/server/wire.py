"""Shared by all request bodies: strict parsing, configured limits, error envelope, OpenAPI details.

    OpenRequest   a body of a route that OpenAI's clients call: unknown fields are ignored, but not misspelt ones
    OwnRequest    a body of our own routes: unknown fields are refused
    Answer        what is sent back
    AtMost        Annotated[int, AtMost("max_n")]: a bound that ServeConfig sets, enforced and documented
    documented    what a route says of itself in /openapi.json

Bodies are read from bytes (`bodies.read_body`), never from parsed JSON: numbers are not read from strings, true is not
a number, and NaN, infinities and lone surrogates do not get in. The models' base is `tasks.dialects.form.Strict`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from groupwise.config.serve import ServeConfig
from groupwise.errors import GroupwiseError, InUseError, StorageDeniedError, StorageError, StorageFullError
from groupwise.sdk.types import Answer
from groupwise.tasks.dialects.form import Strict, check_spelling, fault

REF = "#/components/schemas/{model}"
_NOT_SUPPORTED = "Not supported; these values change nothing."
_DEFAULTS = ServeConfig()


class Request(Strict):
    """A body. `elsewhere` says of names that people write here what to write instead, `nowhere` why nothing."""

    elsewhere: ClassVar[Mapping[str, str]] = {}
    nowhere: ClassVar[Mapping[str, str]] = {}


class OpenRequest(Request):
    """Clients send what other servers have, so unknown fields are ignored; one that is nearly ours is a slip."""

    model_config = ConfigDict(extra="allow")

    bookkeeping: ClassVar[frozenset[str]] = frozenset()
    """Fields of OpenAI's that are ignored on purpose: none of them says what is to be sampled."""
    others: ClassVar[Mapping[str, Unsupported]] = {}
    """Fields of other servers that would change the answer: refused like a field of ours that is not supported."""

    @model_validator(mode="after")
    def _not_misspelt(self) -> Self:
        given = self.model_extra or {}
        for name, option in self.others.items():
            if not option.is_neutral(given.get(name)):
                raise fault("unsupported_parameter", f"{{name}} {option.says}", name=name, param=name, hint=option.hint)
        check_spelling(self, [name for name in given if name not in self.others], known=self.bookkeeping)
        return self


class OwnRequest(Request):
    model_config = ConfigDict(extra="forbid")


class OwnPart(Strict):
    """A piece of a body on our own routes."""

    model_config = ConfigDict(extra="forbid")


# ---- limits ----
def limits_of(info: core_schema.ValidationInfo) -> ServeConfig:
    """Return the configuration with the limits for a body; the default configuration if the context has none."""
    return info.context or _DEFAULTS


@dataclass(frozen=True)
class AtMost:
    """A number, or a length, is at most what `ServeConfig` says under `limit`."""

    limit: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "x-limit": self.limit}

    def _check(self, value: Any, info: core_schema.ValidationInfo) -> Any:
        most: int = getattr(limits_of(info), self.limit)
        count = value if isinstance(value, int) else len(value)
        if count > most:
            what = "is {count}" if isinstance(value, int) else "has {count} entries"
            template = f"{what}; this server takes at most {{most}} ({{limit}})"
            raise fault("limit_exceeded", template, count=count, most=most, limit=self.limit)
        return value


def with_limits(schema: Any, config: ServeConfig) -> Any:
    """Return a JSON schema in which `x-limit` has become the configured maximum."""
    if isinstance(schema, list):
        return [with_limits(item, config) for item in schema]
    if not isinstance(schema, dict):
        return schema
    bounds = {"array": "maxItems", "string": "maxLength"}
    schema = {key: with_limits(value, config) for key, value in schema.items()}
    if isinstance(limit := schema.pop("x-limit", None), str):
        schema[bounds.get(str(schema.get("type")), "maximum")] = getattr(config, limit)
    return schema


# ---- options that this server does not have ----
class Unsupported:
    """Annotated[Any, Unsupported(0, 0.0)]: an option that is known and not offered; these values change nothing."""

    def __init__(self, *neutral: Any, hint: str = "leave it out", says: str = "is not supported by this server"):
        self.neutral, self.hint, self.says = (None, *neutral), hint, says

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": list(self.neutral), "description": _NOT_SUPPORTED, "x-unsupported": True}

    def is_neutral(self, value: Any) -> bool:
        """Return whether it changes nothing."""
        return any(type(value) is type(same) and value == same for same in self.neutral)

    def _check(self, value: Any) -> Any:
        if self.is_neutral(value):
            return value
        raise fault("unsupported_parameter", self.says, hint=self.hint)


# ---- errors ----
class ErrorBody(Answer):
    """Describes an error. `code` is stable and for programs; `hint` says what to do."""

    message: str
    """What happened, the offending value, and the valid values."""
    type: str
    """The kind of error, in OpenAI's words: invalid_request_error, authentication_error, rate_limit_error, ..."""
    param: str | None
    """The JSON path of the wrong field, as in `groups[0].completions[1].reward`."""
    code: str
    hint: str | None


class ErrorEnvelope(Answer):
    """The body of every answer with a status of 400 or more."""

    error: ErrorBody


class AnthropicError(ErrorBody):
    """Describes an error under /v1/messages; its `type` is one of Anthropic's error types."""


class AnthropicEnvelope(Answer):
    """Wraps an error for Anthropic's clients."""

    type: Literal["error"] = "error"
    error: AnthropicError
    request_id: str | None


# ---- what a route says of itself ----
STORAGE_ERRORS = (StorageFullError, StorageDeniedError, StorageError, InUseError)


def documented(
    body: type[BaseModel] | None = None,
    answer: Any = None,
    *,
    errors: Sequence[type[GroupwiseError]] = (),
    codes: Sequence[str] = (),
    streams: bool = False,
    optional_body: bool = False,
) -> dict[str, Any]:
    """Return arguments of `@router.post(path, **documented(ChatRequest, ChatCompletion, errors=[ContextLengthError]))`.

    The handler reads its body with `bodies.read_body` and may return an `answer` or a response. Errors that every route
    can have (authentication, limits, malformed bodies) are added by the app. `codes` are those of the route's 400s that
    no class stands for. `streams`: 200 may be server-sent events.
    """
    schema = {} if body is None else body.model_json_schema(mode="validation", ref_template=REF)
    kinds = [kind for error in errors for kind in (STORAGE_ERRORS if error is StorageError else (error,))]
    told = [(error.status, error.code) for error in kinds] + [(400, code) for code in (*codes, *_codes_of(schema))]
    responses: dict[int | str, dict[str, Any]] = {}
    for status, code in dict.fromkeys(told):
        known = responses.setdefault(status, {"model": ErrorEnvelope, "description": ""})
        known["description"] = ", ".join(filter(None, (known["description"], f"`{code}`")))
    if streams:
        responses[200] = {
            "description": "The answer, or a stream of server-sent events.",
            "content": {"text/event-stream": {}},  # OpenAPI 3.1 has no words for what the events hold
        }
    arguments: dict[str, Any] = {"response_model": answer, "responses": responses}
    if body is not None:
        definitions = {**schema.pop("$defs", {}), body.__name__: schema}
        content = {"application/json": {"schema": {"$ref": REF.format(model=body.__name__)}}}
        arguments["openapi_extra"] = {
            "requestBody": {"required": not optional_body, "content": content},
            "x-definitions": definitions,
        }
    return arguments


def _codes_of(schema: Mapping[str, Any]) -> list[str]:
    """Return the codes of what can be wrong with a body, as its schema shows it."""
    text = json.dumps(schema)
    signs = {"limit_exceeded": '"x-limit"', "unsupported_parameter": '"x-unsupported"'}
    return [code for code, sign in signs.items() if sign in text]
