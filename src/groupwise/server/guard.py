"""Middleware before every route: API key, concurrency, body size, slow bodies, and the error envelope.

    request id      `x-request-id`, the client's where it is one, on every answer, and on its line in the log
    Host, Origin    on loopback only local names (DNS rebinding); no writing from other sites' pages (CSRF)
    API key         on every route but /health and Tinker's links; 401 without one, 403 where its role is too small
                    (`roles`), 429 where it asks too often (`usage`); whose things it is about (`tenants`)
    phase           503 with `retry-after` while the model loads and while the server drains; /health always answers
    places          so many requests at once, so many waiting, then 429, and never all of one sender's, nor more of a
                    key's than it may have (`places`); a body that is still arriving takes none; few uploads and merges
    bodies          counted while they are read, 413; a deadline while they arrive, 408; content encodings refused, 415;
                    so many bytes of long ones at once, so many uploads, and then they wait, and then 429
    deadline        no answer begun in time, 504
    HEAD            answered as GET, without the body: the same status and headers (RFC 9110, section 9.3.2)
    audit           a line for what changes something (`audit`)
    bugs            500 `internal_error` with the request id; the traceback is in the log only

A pure ASGI middleware, outermost but for CORS. Bodies are counted by `groupwise.tasks.arriving`
and read by `read_body` (see `groupwise.server.bodies`).
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import parse_qsl, urlsplit
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from groupwise.config.serve import ServeConfig, is_loopback
from groupwise.errors import (
    AuthenticationError,
    DeadlineError,
    GroupwiseError,
    MediaTypeError,
    NotReadyError,
    StorageError,
)
from groupwise.server.audit import note
from groupwise.server.bodies import check_content_type, parse_body, read_body
from groupwise.server.errors import (
    INTERNAL,
    ForbiddenError,
    ShuttingDownError,
    echo,
    printable,
    respond,
)
from groupwise.server.metrics import Recorder
from groupwise.server.places import Places
from groupwise.server.roles import Caller, Keyring, OwnersError, may
from groupwise.server.usage import KeyUsage
from groupwise.store.audit import AuditLog
from groupwise.store.keys import KeyFile
from groupwise.store.tenants import OWNER
from groupwise.tasks.arriving import BodyGuard, ByteLimit, Take

__all__ = ["Gate", "Guard", "check_content_type", "parse_body", "read_body"]

OPEN = "/health"  # the one route without a key, and the one that answers in every phase
READS = ("GET", "HEAD", "OPTIONS")
WATCHED = ("/v1/train/events/", "/v1/events")
WATCHES = 64  # such streams of one sender: an event is sent to each
POLLED = "/api/v1/retrieve_future"  # many at once, and all they do is wait
QUIET = (OPEN, "/v1/health", "/ready", "/metrics", POLLED)  # asked by the second; a line for each would hide the others
LINKS = "/api/v1/links/"  # whose paths hold their own secret
OPENAI_PREFIX = "/oai/api"  # where Tinker has OpenAI's routes
QUERY_KEYS = {"key", "api_key", "api-key", "apikey", "token", "access_token"}
STALL_S = 65.0  # how long a client may read nothing of its answer
GRACE_S = 5.0  # routes have their own deadlines, with better messages
UPLOADS = 2  # that are received or unpacked at once, merges among them: each keeps a thread that all routes share
UPLOAD, MERGE = "/v1/adapters/upload", "/v1/adapters/merge"
BODY_LIMITS = {
    UPLOAD: "upload_bytes",
    **dict.fromkeys(("/v1/train/grpo", "/v1/train/sft"), "train_body_bytes"),
    **dict.fromkeys(("/api/v1/forward_backward", "/api/v1/forward"), "tinker_body_bytes"),
}  # the settings of the largest bodies; chat_body_bytes for all other routes


Whose = Callable[[Caller, str, Headers], str]  # a caller, a path and headers -> a tenant; raises OwnersError

_REQUEST_ID = re.compile(r"[\w-]{1,64}", re.ASCII)

log = logging.getLogger(__name__)
access = logging.getLogger("groupwise.access")


@dataclass
class Gate:
    """The phase that the server is in. `reason` is for people."""

    phase: Literal["loading", "ready", "draining"] = "loading"
    reason: str = "the model is being loaded"
    draining: asyncio.Event = field(default_factory=asyncio.Event)

    def drain(self) -> None:
        """Take no more requests, and end the streams that only watch."""
        self.phase = "draining"
        self.draining.set()

    def check(self) -> None:
        """Raise NotReadyError unless requests are taken."""
        if self.phase == "loading":
            raise NotReadyError(f"the server is not ready: {self.reason}", hint="poll /ready", retry_after=2)
        if self.phase == "draining":
            raise ShuttingDownError("the server is shutting down", hint="send it to the next one", retry_after=5)


class Guard:
    """The middleware. `gate` may change at any time; `config` does not. `whose` says which tenant a request is about;
    without it what is behind the guard is the owner's."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        config: ServeConfig,
        gate: Gate,
        recorder: Recorder,
        usage: KeyUsage | None = None,
        whose: Whose | None = None,
    ):
        self.app, self._config, self._gate, self._recorder, self._usage = app, config, gate, recorder, usage
        self._keys = KeyFile(config.state_dir.absolute())
        self._keyring, self._audit = Keyring(config.api_key, self._keys), AuditLog(config.state_dir.absolute())
        self._whose = whose or _owners_alone
        self._checks_host = is_loopback(config.host) or bool(config.allowed_hosts)
        waiting = config.first_token_timeout_s
        self._writes = Places(config.max_concurrent, config.max_waiting, patience_s=waiting)
        self._reads = Places(config.max_concurrent, config.max_waiting, patience_s=waiting)
        self._watches = Places(config.max_concurrent, 0, patience_s=waiting, share=WATCHES)
        self._polls = Places(config.tinker_pending, config.max_waiting, patience_s=waiting)
        self._uploads = Places(UPLOADS, config.max_waiting, patience_s=waiting)
        self._long = ByteLimit(config.bodies_bytes, patience_s=waiting)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "there are no websockets here"})
        else:
            await self.app(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, began = Headers(scope=scope), time.monotonic()
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        method: str = scope["method"]
        answer = _ResponseGuard(send, request_id, bodiless=method == "HEAD")
        if answer.bodiless:
            scope = {**scope, "method": "GET"}
        try:
            self._admit(scope, headers)
            async with AsyncExitStack() as held:
                limit = self._limit(scope["path"])
                taking = self._taking(scope, held, size=_declared(headers, most=limit[0]))
                allowed_s = self._config.request_timeout_s + GRACE_S
                body = BodyGuard(receive, limit, taking, seconds=self._config.body_timeout_s, allowed_s=allowed_s)
                if scope["method"] not in ("POST", "PUT") or not _brings_body(headers):
                    await body.take_place()
                run = self._watch if scope["path"].startswith(WATCHED) else self._run
                await run(scope, headers, body, answer)
        except ClientDisconnect:
            answer.status = answer.status or 499
        except GroupwiseError as error:
            await self._refuse(error, scope, receive, answer)
        except asyncio.CancelledError:
            if not self._gate.draining.is_set():
                raise
            if not answer.begun:  # the time for what was under way is over
                error = ShuttingDownError("the server is shutting down, and this is not done", hint="send it again")
                await self._refuse(error, scope, receive, answer)
        except Exception as error:
            log.exception("request %s: %s %s", request_id, method, _shown(scope["path"]))
            if answer.begun and not answer.complete:
                raise  # uvicorn closes the connection, and so the client sees that something is missing
            if not answer.begun:
                await self._refuse(INTERNAL, scope, receive, answer, cause=error)
        finally:
            route = OPEN if scope["path"] == OPEN else getattr(scope.get("route"), "path", "unmatched")
            status, seconds = answer.status or 500, time.monotonic() - began
            self._recorder.http(route, method, status, seconds)
            _log_access(scope, method, status, seconds, request_id)
            note(self._audit, scope, status)

    async def _run(self, scope: Scope, headers: Headers, body: BodyGuard, answer: _ResponseGuard) -> None:
        """Run the application until its answer begins or its time is over."""
        deadline = asyncio.timeout(self._config.request_timeout_s + GRACE_S)
        try:
            async with deadline:
                body.check_length(headers.get("content-length"))
                body.deadline = answer.deadline = deadline
                await self.app(scope, body, answer)
        except TimeoutError as error:
            if not (deadline.expired() and not answer.begun):
                raise
            raise DeadlineError(
                f"there was no answer within {self._config.request_timeout_s:g} s (request_timeout_s)",
                hint="ask for less at once",
            ) from error
        finally:
            answer.deadline = None

    async def _watch(self, scope: Scope, headers: Headers, body: BodyGuard, answer: _ResponseGuard) -> None:
        """Run a stream that lasts as long as a job; it ends, cleanly, when the server drains. Who watches comes
        back."""
        running = asyncio.ensure_future(self._run(scope, headers, body, answer))
        draining = asyncio.ensure_future(self._gate.draining.wait())
        try:
            await asyncio.wait({running, draining}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            cut = not running.done()
            running.cancel()
            draining.cancel()
            await asyncio.gather(running, draining, return_exceptions=True)
        if not cut:
            running.result()
        elif answer.begun and not answer.complete:
            await answer({"type": "http.response.body", "body": b"", "more_body": False})
        elif not answer.begun:
            self._gate.check()

    async def _refuse(
        self,
        error: GroupwiseError,
        scope: Scope,
        receive: Receive,
        answer: _ResponseGuard,
        *,
        cause: Exception | None = None,
    ) -> None:
        if answer.begun:
            raise cause or error
        await respond(error)(scope, receive, answer)

    # --- admission ---

    def _admit(self, scope: Scope, headers: Headers) -> None:
        """Check everything that the head of a request decides. Raises the GroupwiseError to answer with."""
        host, origin = headers.get("host"), headers.get("origin")
        if self._checks_host and host is not None and not self._is_known(host):
            raise ForbiddenError(
                f"the Host header is {echo(printable(host))}; this server answers to localhost only",
                hint="add the name to allowed_hosts if it is meant to reach this server",
            )
        if origin is not None and scope["method"] not in READS and not self._is_same_site(origin, host):
            raise ForbiddenError(
                f"requests from pages of {echo(printable(origin))} may change nothing here",
                hint="add the origin to cors_origins if its pages are to use this server",
            )
        path = scope["path"]
        scope["state"]["caller"] = caller = self._caller(headers, path)
        scope["state"]["trusted"] = caller is not None and may(caller.role, "GET", OPEN)
        scope["state"]["tenant"] = OWNER if caller is None else caller.tenant
        scope["state"]["sender"] = _sender(scope, caller)
        if path == OPEN:
            return
        if not path.startswith(LINKS):
            if caller is None:
                raise self._keyless(scope, headers)
            caller.check(scope["method"], path)
        if caller is not None and caller.key is not None and self._usage is not None:
            self._usage.check_rate(caller.key)
        self._gate.check()
        if caller is not None and not path.startswith(LINKS):
            scope["state"]["tenant"] = self._whose(caller, path, headers)
        if headers.get("content-encoding", "identity").lower() != "identity":
            encoding = echo(printable(headers["content-encoding"]))
            raise MediaTypeError(
                f"the content encoding is {encoding}; bodies are read as they are", hint="do not compress"
            )

    def _caller(self, headers: Headers, path: str) -> Caller | None:
        """Return the caller of a request. If the keys cannot be read, return None for /health, which answers in any
        case; other paths raise StorageError."""
        try:
            return self._keyring.of(headers, path)
        except StorageError:
            if path != OPEN:
                raise
            return None

    def _is_known(self, host: str) -> bool:
        name = re.sub(r":\d*$", "", host.strip()).rstrip(".").lower()
        allowed = {self._config.host.lower(), *(each.lower() for each in self._config.allowed_hosts)}
        return is_loopback(name) or name in allowed

    def _is_same_site(self, origin: str, host: str | None) -> bool:
        if origin in self._config.cors_origins:
            return True
        try:
            return host is not None and urlsplit(origin).netloc == host
        except ValueError:  # not a URL, such as "http://[bad"
            return False

    def _keyless(self, scope: Scope, headers: Headers) -> AuthenticationError:
        given = "authorization" in headers or "x-api-key" in headers
        what = "the API key is wrong" if given else "this route needs an API key"
        hint = "send the header Authorization: Bearer <key>; our clients read GROUPWISE_API_KEY, or --api-key"
        if QUERY_KEYS & {name.lower() for name, _ in parse_qsl(scope["query_string"][:4096].decode("latin-1"))}:
            hint += "; a key in the URL is not read, since URLs end up in logs"
        return AuthenticationError(what, hint=hint)

    def _taking(self, scope: Scope, held: AsyncExitStack, *, size: int) -> Take:
        """Return what takes the request's place, until `held` ends. Writing, reading and watching do not take each
        other's places, nor do uploads; health takes none. `size`: bytes that its body will have, if it is long."""
        kind = self._reads if scope["method"] in READS else self._writes
        places = self._watches if scope["path"].startswith(WATCHED) else kind
        special = {POLLED: self._polls, UPLOAD: self._uploads, MERGE: self._uploads}
        places = special.get(scope["path"], places)

        async def take(*, long: bool) -> None:
            if scope["path"] != OPEN:
                caller = scope["state"]["caller"]
                key = caller.key if places is self._writes and caller is not None else None
                await held.enter_async_context(places.held(scope["state"]["sender"], key))
            if long and scope["path"] != UPLOAD:  # which are as large as they may be, and few
                await held.enter_async_context(self._long.held(size))

        return take

    def _limit(self, path: str) -> tuple[int, str]:
        """Return the largest body of a route, and the setting that says so."""
        name = BODY_LIMITS.get(path, "chat_body_bytes")
        return getattr(self._config, name), name


def _owners_alone(caller: Caller, path: str, headers: Headers) -> str:
    """Raise OwnersError for who is not the owner."""
    if caller.tenant:
        raise OwnersError("this is the owner's alone", hint="use a key without a tenant")
    return OWNER


def _log_access(scope: Scope, method: str, status: int, seconds: float, request_id: str) -> None:
    """Log a line for a request that was answered, with the name of its key where it has one. Queries are left out, as
    there may be a key in one."""
    path, caller = scope["path"], scope["state"].get("caller")
    level = logging.DEBUG if path in QUIET and status < 400 else logging.INFO
    asked = f"{printable(method)} {_shown(path)}"
    whose = "" if caller is None or caller.key is None else f" key {caller.label}"
    access.log(level, "%s %d %.0f ms request %s%s", asked, status, 1000 * seconds, request_id, whose)


def _shown(path: str) -> str:
    """Return a path for the log, without the secret that a link ends with."""
    return f"{LINKS}..." if path.startswith(LINKS) else printable(path)


def _sender(scope: Scope, caller: Caller | None) -> str:
    """Return who sends a request: a tenant, a named key, or else the address of the connection."""
    if caller is not None and caller.key is not None:
        return f"tenant {caller.tenant}" if caller.tenant else f"key {caller.key.name}"
    client = scope.get("client")
    return client[0] if client else ""


def _brings_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0").strip("0") != ""


def _declared(headers: Headers, *, most: int) -> int:
    """Return how many bytes a body will have, as far as its head says."""
    said = headers.get("content-length", "")
    return min(int(said[:20]), most) if said.isdigit() else most


# ---- what is answered ----
class _ResponseGuard:
    """ASGI's send: adds the request id, remembers how far the answer is, ends the deadline where it begins.

    A `bodiless` answer is over where its body would begin; an application that still sends one gets `ClientDisconnect`.
    """

    def __init__(self, send: Send, request_id: str, *, bodiless: bool):
        self._send, self._request_id, self.bodiless = send, request_id.encode(), bodiless
        self.status: int | None = None
        self.begun = self.complete = False
        self.deadline: asyncio.Timeout | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun, self.status = True, message["status"]
            if self.deadline is not None and not self.deadline.expired():
                self.deadline.reschedule(None)
            headers = [*message.get("headers", ()), (b"x-request-id", self._request_id)]
            message = {**message, "headers": [*headers, (b"x-content-type-options", b"nosniff")]}
        elif message["type"] == "http.response.body":
            if self.bodiless and self.complete:
                raise ClientDisconnect
            if self.bodiless:
                message = {**message, "body": b"", "more_body": False}
            self.complete = not message.get("more_body")
        try:
            async with asyncio.timeout(STALL_S):
                await self._send(message)
        except TimeoutError as error:
            raise ClientDisconnect from error
