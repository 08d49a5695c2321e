"""/openapi.json: what the routes say of themselves, completed by what holds for all of them.

Bodies are validated by hand (`bodies.read_body`), so each route brings its body's schema along (`wire.documented`);
limits are those of this server's configuration, and every operation names the errors of the guard.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from groupwise.config.serve import ServeConfig
from groupwise.server.errors import ANTHROPIC, NO_RETRY
from groupwise.server.wire import REF, AnthropicEnvelope, ErrorEnvelope, with_limits

ABOUT = """Sample groups, score them yourself, train a LoRA adapter on how each did in its group, and be answered by it.

Every error is `{"error": {"message", "type", "param", "code", "hint"}}`, under /v1/messages in
Anthropic's envelope; every answer has an `x-request-id`.
Adapter versions are immutable: `name@3`. What names no adapter is answered by the active version."""

EVERYWHERE = {
    400: "`invalid_value`: a parameter or a field is wrong; `param` says which",
    403: "`forbidden`: another host name, or another site's page; `role_too_small`: the key may not do this",
    429: "`overloaded`: too many requests at once; `rate_limited`: too many of one key in a minute; see `retry-after`",
    500: "`internal_error`: a bug; the log has it under the request id",
    503: "`not_ready` or `shutting_down`: see `retry-after`; `ledger_damaged`: an operator has to repair it",
    504: "`deadline_exceeded`",
}

WITH_KEY = {401: "`invalid_api_key`"}

WITH_BODY = {
    400: "`invalid_json`, or `invalid_value` (`param` says where)",
    408: "`body_timeout`: the body did not arrive in time",
    413: "`body_too_large`",
    415: "`unsupported_media_type`: not JSON, or compressed",
}

ALWAYS_OPEN = "/health"

HEADERS = {
    "RequestId": ("x-request-id", "Finds the request in the server's log.", {"type": "string"}),
    "RetryAfter": ("retry-after", "Seconds after which it may succeed.", {"type": "integer", "minimum": 1}),
    "ShouldRetry": ("x-should-retry", "Sending it again as it is will not help.", {"const": "false"}),
}


def describe(app: FastAPI, config: ServeConfig) -> None:
    """Make `app.openapi()`, and so /openapi.json, tell the truth."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, config)
        return app.openapi_schema

    app.openapi = openapi


def _document(app: FastAPI, config: ServeConfig) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=ABOUT, routes=app.routes)
    components = document.setdefault("components", {})
    components["headers"] = {key: {"description": what, "schema": kind} for key, (_, what, kind) in HEADERS.items()}
    schemas = components.setdefault("schemas", {})
    for path, operation in _operations(document):
        for name, schema in operation.pop("x-definitions", {}).items():
            if schemas.setdefault(name, schema) != schema:
                raise ValueError(f"two schemas are called {name!r}; rename one")
        _complete(operation, path, keyed=config.api_key is not None)
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own, which nothing here answers with
        schemas.pop(name, None)
    for model in (ErrorEnvelope, AnthropicEnvelope):
        envelope = model.model_json_schema(mode="serialization", ref_template=REF)
        schemas.update({**envelope.pop("$defs"), model.__name__: envelope})
    if config.api_key is not None:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["components"]["schemas"] = dict(sorted(schemas.items()))
    return with_limits(document, config)


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, operations in document["paths"].items():
        for operation in operations.values():
            yield path, operation


def _complete(operation: dict[str, Any], path: str, *, keyed: bool) -> None:
    """Add the errors of the guard to what the operation says itself, and the key."""
    responses = operation["responses"]
    if "HTTPValidationError" in str(responses.get("422")):
        del responses["422"]
    errors = {403: EVERYWHERE[403]} if path == ALWAYS_OPEN else dict(EVERYWHERE)
    if keyed and path != ALWAYS_OPEN:
        errors |= WITH_KEY
        operation["security"] = [{"key": []}]
    if "requestBody" in operation:
        errors |= WITH_BODY
    envelope = (AnthropicEnvelope if path.startswith(ANTHROPIC) else ErrorEnvelope).__name__
    for status, text in errors.items():
        known = responses.setdefault(str(status), {"description": ""})
        known["description"] = "; ".join(filter(None, (known["description"], text)))
    for status, response in responses.items():
        if int(status) >= 400:
            response["content"] = {"application/json": {"schema": {"$ref": REF.format(model=envelope)}}}
    for status, response in responses.items():
        response["headers"] = dict(_headers(status))
    operation["responses"] = dict(sorted(responses.items()))


def _headers(status: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the headers of an answer with this status."""
    sent = {"RequestId": True, "RetryAfter": status in ("429", "503"), "ShouldRetry": int(status) in NO_RETRY}
    for key, (name, *_) in HEADERS.items():
        if sent[key]:
            yield name, {"$ref": f"#/components/headers/{key}"}
