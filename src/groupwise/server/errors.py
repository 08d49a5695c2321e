"""Every error as {"error": {"message", "type", "param", "code", "hint"}}: what OpenAI's clients and ours both read.
Under /v1/messages that is Anthropic's envelope, with the same fields and Anthropic's words for the `type`.

    envelope        a GroupwiseError -> status, headers, body
    respond         the same as a response
    add_handlers    the application's exceptions -> envelopes
    private_paths   where things are on this machine;  hidden   text, or what holds text, without that

`type` is OpenAI's word for the status; `code` is ours, stable, and has an entry in the troubleshooting guide. Where a
retry can help, `retry-after` says when; where it cannot, `x-should-retry: false` keeps clients from doubling the load.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, TypeVar, cast

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import Receive, Scope, Send

from groupwise.errors import (
    GroupwiseError,
    LedgerDamagedError,
    NotReadyError,
    RequestError,
    StorageError,
    TryAgainError,
)
from groupwise.server.wire import ErrorBody, ErrorEnvelope
from groupwise.tasks.dialects.anthropic import error_of

ECHO = 64  # the longest piece of a request that a message repeats, characters
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
ANTHROPIC = "/v1/messages"  # how the routes begin whose errors are in Anthropic's envelope
NO_RETRY = (408, 409, 413, 504, 507)
INTERNAL = GroupwiseError("internal error", hint="see the server's log for this request id")
INTERNAL.code = "internal_error"

log = logging.getLogger(__name__)


# ---- errors that only HTTP has ----
class RouteNotFoundError(GroupwiseError, LookupError):
    """No such path."""

    code, status, exit_code = "route_not_found", 404, 2


class MethodNotAllowedError(GroupwiseError):
    """The path is there, the method is not."""

    code, status, exit_code = "method_not_allowed", 405, 2

    def __init__(self, message: str, *, allowed: Sequence[str], hint: str | None = None):
        super().__init__(message, hint=hint)
        self.allowed = tuple(allowed)


class ForbiddenError(GroupwiseError):
    """The request comes from where none may come from: another web page, or under another host name."""

    code, status, exit_code = "forbidden", 403, 2


class ShuttingDownError(NotReadyError):
    """The server ends; requests in flight are finished, new ones are not taken."""

    code = "shutting_down"


# ---- errors to answers ----
def echo(value: Any) -> str:
    """Return a value of a request as a message may show it: short, printable, and never a whole structure."""
    if isinstance(value, dict | list | tuple):
        kind = "an object with" if isinstance(value, dict) else "a list of"
        return f"{kind} {len(value)} {'entry' if len(value) == 1 else 'entries'}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) >= 10**ECHO:
        return "a number of more than 64 digits"
    text = repr(value) if len(str(value)) <= ECHO else repr(str(value)[: ECHO - 3] + "...")
    return text if isinstance(value, str) else text.strip("'")


def printable(text: str) -> str:
    """Return a name that a request made up: short, and without control characters."""
    text = text if len(text) <= ECHO else text[: ECHO - 3] + "..."
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


Shown = TypeVar("Shown")
Paths = Mapping[str, str]  # an absolute path of this machine -> what stands in its place


def private_paths(state_dir: FilePath, model: str) -> Paths:
    """Return the directories of this machine that errors may name, and that clients have no use for."""
    places = [(state_dir, "<state_dir>"), (FilePath(__file__).parents[1], "<groupwise>"), (FilePath.cwd(), "<cwd>")]
    places += [(FilePath(model), "<model>")] if FilePath(model).is_dir() else []
    places += [(FilePath.home(), "~")]
    found: dict[str, str] = {}
    for path, shown in places:
        for each in (path.absolute(), path.resolve()):
            if len(each.parts) > 1:  # not the root of the file system
                found.setdefault(str(each), shown)
    return dict(sorted(found.items(), key=lambda each: -len(each[0])))


def hidden(value: Shown, paths: Paths) -> Shown:
    """Return `value` with something else in place of each path, in a text and in every text of a list or an object.

    >>> hidden({"said": ["in /srv/state/logs and /srv/stateful"]}, {"/srv/state": "<state_dir>"})
    {'said': ['in <state_dir>/logs and /srv/stateful']}
    """
    if isinstance(value, dict):
        return cast("Shown", {key: hidden(each, paths) for key, each in value.items()})
    if isinstance(value, list):
        return cast("Shown", [hidden(each, paths) for each in value])
    if not isinstance(value, str):
        return value
    text: str = value
    for path, shown in paths.items():
        if path in text:
            text = re.sub(rf"{re.escape(path)}(?![\w.-]*[\w-])", lambda _, shown=shown: shown, text)
    return cast("Shown", text)


def envelope(error: GroupwiseError) -> tuple[int, dict[str, str], bytes]:
    """Return the status, the headers that the status asks for, and the body."""
    status = error.status if 400 <= error.status < 600 else 500
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = ErrorBody(message=error.message, type=kind, param=error.field, code=error.code, hint=error.hint)
    headers = {"content-type": "application/json"}
    if isinstance(error, TryAgainError):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    elif status in NO_RETRY or isinstance(error, LedgerDamagedError):
        headers["x-should-retry"] = "false"
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowedError):
        headers["allow"] = ", ".join(error.allowed)
    return status, headers, ErrorEnvelope(error=body).model_dump_json().encode()


def respond(error: GroupwiseError, *, without: Paths | None = None) -> Response:
    """Return the envelope as a response, in which the paths `without` are hidden."""
    return _ErrorResponse(without_paths(error, without or {}))


class _ErrorResponse(Response):
    """An error, in the envelope of the route's dialect."""

    def __init__(self, error: GroupwiseError):
        status, headers, body = envelope(error)
        super().__init__(body, status_code=status, headers=headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(ANTHROPIC):
            told = error_of(self._error, scope.get("state", {}).get("request_id"))
            self.body = json.dumps(told).encode()
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def without_paths(error: GroupwiseError, paths: Paths) -> GroupwiseError:
    """Return the same error as it may be shown."""
    message, hint = hidden(error.message, paths), error.hint and hidden(error.hint, paths)
    if (message, hint) == (error.message, error.hint):
        return error
    shown = type(error).__new__(type(error))  # what its constructor asks for is in its __dict__ already
    shown.__dict__ |= {**error.__dict__, "message": message, "hint": hint}
    shown.args = (message,)
    return shown


# ---- the application's exceptions ----
def add_handlers(
    app: FastAPI, *, without: Paths | None = None, disk_failed: Callable[[StorageError], None] = lambda error: None
) -> None:
    """Answer every exception of the routes with the envelope, in which the paths `without` are hidden. `disk_failed` is
    told of every StorageError."""

    async def known(request: Request, error: Exception) -> Response:
        assert isinstance(error, GroupwiseError)
        id = getattr(request.state, "request_id", "-")
        if isinstance(error, StorageError | LedgerDamagedError):  # while the disk is full that is every other request
            log.warning("request %s: %s %s: %s", id, request.method, printable(request.url.path), error.message)
            if isinstance(error, StorageError):
                disk_failed(error)
        elif error.status >= 500 and not isinstance(error, TryAgainError):
            log.error("request %s: %s %s: %s", id, request.method, printable(request.url.path), error, exc_info=error)
        return respond(error, without=without)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return respond(_parameter_error(error.errors()))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return respond(_http_error(request, error))

    async def bug(request: Request, error: Exception) -> Response:
        return respond(INTERNAL)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # the client has gone; the status is for the metrics

    app.add_exception_handler(GroupwiseError, known)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, bug)


def _parameter_error(problems: Sequence[Mapping[str, Any]]) -> RequestError:
    """Return the first wrong parameter of the path or the query."""
    where, *names = problems[0]["loc"]
    name = printable(".".join(map(str, names)))
    if problems[0]["type"] == "missing":
        return RequestError(f"the {where} parameter {name!r} is required and missing", field=name)
    wanted = re.sub("^[A-Z][a-z]+ should", "it must", str(problems[0]["msg"])).partition(", unable")[0]
    return RequestError(f"the {where} parameter {name!r} is {echo(problems[0].get('input'))}; {wanted}", field=name)


def _http_error(request: Request, error: HTTPException) -> GroupwiseError:
    path = printable(request.url.path)
    if error.status_code == 404:
        similar = difflib.get_close_matches(request.url.path[:256], request.app.openapi()["paths"], n=1, cutoff=0.7)
        hint = f"did you mean {similar[0]}?" if similar else "GET /openapi.json lists all routes"
        return RouteNotFoundError(f"there is no route {path!r}", hint=hint)
    if error.status_code == 405:
        allowed = _methods(request)
        message = f"{printable(request.method)} is not a method of {path!r}; it has {', '.join(allowed)}"
        return MethodNotAllowedError(message, allowed=allowed)
    other = GroupwiseError(printable(str(error.detail)))
    other.__dict__ |= {"status": error.status_code, "code": "bad_request" if error.status_code < 500 else "error"}
    return other


def _methods(request: Request) -> list[str]:
    """Return every method that some route has for this path."""
    found: set[str] = set()
    for template, operations in request.app.openapi()["paths"].items():
        if compile_path(template)[0].fullmatch(request.url.path):
            found |= {method.upper() for method in operations}
    return sorted(found | {"HEAD"} if "GET" in found else found)
