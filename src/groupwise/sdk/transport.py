"""The client's HTTP calls: described once as generators (flows), run by a blocking and by an asyncio driver.

A flow is a generator that yields what is to be done next and is sent what came of it; it does no input or output
itself, so retries, deadlines, reconnecting and the meaning of answers are here once:

    Send     one whole exchange                              -> Answer
    Open     the same, but an answer below 300 stays open    -> Answer
    NEXT     the next bytes of what is open                  -> bytes, or None at its end
    Sleep    wait
    Emit     hand an item to the caller

    def loss(job_id):  # a flow
        answer = yield Send("GET", f"/v1/train/status/{job_id}", timeout=30)
        return answer.json()["current_loss"]

Retries are only where they cannot do a thing twice. Nothing was done when the server was not reached, or said 429 or
503 with `retry-after`: any call may go again. What is `repeatable` (a GET, or a POST with an Idempotency-Key) may also
go again when its answer was lost. `x-should-retry: false` is obeyed. Every call has a deadline for all its attempts.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import IO, Any, Generic, TypeAlias, TypeVar

import httpx2

from groupwise.errors import RemoteError, RequestError
from groupwise.sdk.types import read

# Defaults of `timeout`; a server gives up sampling after 600 s, and says so
ASK_S, SUBMIT_S, SAMPLE_S, MOVE_S, WAIT_S = 30.0, 120.0, 630.0, 1800.0, 3600.0

RETRIES = 3

CONNECT_S = 5.0

FIRST_DELAY_S, LONGEST_DELAY_S = 0.25, 8.0

LONGEST_RETRY_AFTER_S = 60.0  # a server that asks for more is believed, and the caller told

REFUSED, TRANSIENT = (429, 503), (408, 429, 502, 503, 504)

REFUSED_KEY = 4  # exit codes of errors.py

TEMPORARY = 75

T = TypeVar("T")


# ---- what a flow yields ----
@dataclass(frozen=True, kw_only=True)
class HttpAnswer:
    """A server's answer. `body` is empty while the answer is open."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str

    def json(self) -> Any:
        """Return the body. Raises RemoteError if it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            raise RemoteError(
                f"{self.url} answered {self.status} with something that is not JSON: {self.body[:64]!r}",
                status=self.status,
                code="bad_response",
                hint="is there a Groupwise server at that URL?",
                request_id=self.headers.get("x-request-id"),
            ) from None


@dataclass(frozen=True)
class Form:
    """An upload: fields, and an archive."""

    fields: Mapping[str, str]
    archive: IO[bytes]


@dataclass(frozen=True)
class Send:
    """Describes a request to the server. The whole exchange may take `timeout` seconds; `content` is JSON."""

    method: str
    path: str
    timeout: float
    content: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    form: Form | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of httpx2's `build_request`."""
        seconds = max(self.timeout, 0.001)
        limits = httpx2.Timeout(seconds, connect=min(seconds, CONNECT_S))
        given: dict[str, Any] = {"method": self.method, "url": self.path, "timeout": limits, "headers": self.headers}
        if self.content is not None:
            given |= {"content": self.content, "headers": {**self.headers, "content-type": "application/json"}}
        if self.form is not None:
            archive = ("adapter.tar.gz", self.form.archive, "application/gzip")
            given |= {"data": dict(self.form.fields), "files": {"archive": archive}}
        return given


@dataclass(frozen=True)
class Open(Send):
    """An exchange whose answer is read with NEXT; `timeout` is for its head and for each piece."""


class _Next:
    """The next bytes of what is open."""


NEXT = _Next()


@dataclass(frozen=True)
class Sleep:
    """Wait. `why` is said to who asked for notes."""

    seconds: float
    why: str = ""


@dataclass(frozen=True)
class Emit(Generic[T]):
    """Hand over an item: to a function, or as the next one of the iterator that the caller has."""

    item: T
    to: Callable[[T], object] | None = None


Step: TypeAlias = Send | _Next | Sleep | Emit[T]

Flow: TypeAlias = Generator[Step[Any], Any, T]

Emits: TypeAlias = Generator[Step[T], Any, None]


# ---- calls as flows ----
class Flows:
    """Base of what describes calls: the server and how often to try."""

    def __init__(self, *, url: str, retries: int):
        self._url, self._retries = url, retries

    def exchange(self, step: Send, *, repeatable: bool = False, retries: int | None = None) -> Flow[HttpAnswer]:
        """Send until there is an answer below 300, as often as is safe. Raises RemoteError."""
        return _until_answered(
            step,
            repeatable=repeatable or step.method == "GET",
            retries=self._retries if retries is None else retries,
            url=self._url,
        )

    def ask(self, kind: type[T], path: str, *, timeout: float = ASK_S, retries: int | None = None) -> Flow[T]:
        """GET a `kind`."""
        answer = yield from self.exchange(Send("GET", path, timeout), retries=retries)
        return read(kind, answer.json())

    def tell(
        self, kind: type[T], path: str, body: Mapping[str, Any] | None = None, *, timeout: float, method: str = "POST"
    ) -> Flow[T]:
        """POST, or another method, and read a `kind`."""
        answer = yield from self.exchange(Send(method, path, timeout, None if body is None else encode(body)))
        return read(kind, answer.json())


def _until_answered(step: Send, *, repeatable: bool, retries: int, url: str) -> Flow[HttpAnswer]:
    """Send until there is an answer below 300, as often as is safe. Raises RemoteError."""
    deadline = time.monotonic() + step.timeout
    for attempt in itertools.count():
        answer = None
        try:
            answer = yield replace(step, timeout=deadline - time.monotonic())
            if answer.status < 300:
                return answer
            error = refusal(answer)
        except httpx2.RequestError as broken:
            error = breakdown(broken, step, url=url)
            if not (repeatable or _never_sent(broken)):
                raise error from broken
        delay = _delay(answer, attempt, repeatable=repeatable)
        if attempt >= retries or delay is None or time.monotonic() + delay > deadline:
            raise error
        yield Sleep(delay, f"{error.message}; again in {delay:.1f} s")
    raise AssertionError("unreachable")


def refusal(answer: HttpAnswer) -> RemoteError:
    """Return the error that an answer above 299 says."""
    field = None
    try:
        said = json.loads(answer.body)["error"]
        message, code, hint = str(said["message"]), str(said.get("code") or "error"), said.get("hint")
        field = said.get("param")
    except (ValueError, TypeError, KeyError, AttributeError):
        text = answer.body[:200].decode(errors="replace").strip()
        message = f"{answer.url} answered {answer.status}{': ' if text else ''}{text}"
        code, hint = f"http_{answer.status}", "is there a Groupwise server at that URL?"
        if answer.status < 400:
            message += f" and points to {answer.headers.get('location')!r}"
            hint = "redirects are not followed, since the API key is for this server only; give the final URL"
    request_id = answer.headers.get("x-request-id")
    error = RemoteError(message, status=answer.status, code=code, hint=hint, field=field, request_id=request_id)
    if answer.status in (401, 403):
        error.exit_code = REFUSED_KEY
        error.hint = error.hint or "set GROUPWISE_API_KEY, or give the key with --api-key"
    return error


def breakdown(broken: httpx2.RequestError, step: Send, *, url: str) -> RemoteError:
    """Return the error for an exchange that had no whole answer."""
    asked = f"{step.method} {url}{step.path}"
    hint = None
    if _never_sent(broken):
        message, code = f"no server answers at {url}: {broken or type(broken).__name__}", "unreachable"
        hint = "start one with `groupwise serve`, or name another with --url or GROUPWISE_URL"
    elif isinstance(broken, httpx2.TimeoutException):
        message, code = f"{asked} had no whole answer within {step.timeout:.3g} s", "timeout"
    else:
        message, code = f"the connection broke during {asked}: {broken or type(broken).__name__}", "connection_lost"
    if hint is None and step.method != "GET":
        hint = "the server may have done it nevertheless: look before you send it again"
    error = RemoteError(message, status=0, code=code, hint=hint)
    error.exit_code = TEMPORARY
    return error


def _never_sent(broken: httpx2.RequestError) -> bool:
    return isinstance(broken, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout)


def _delay(answer: HttpAnswer | None, attempt: int, *, repeatable: bool) -> float | None:
    """Return seconds until a call may go again, None if it may not. `answer` is None where there was none."""
    backoff = min(FIRST_DELAY_S * 2**attempt, LONGEST_DELAY_S) * random.uniform(0.75, 1.25)
    if answer is None:
        return backoff
    if answer.headers.get("x-should-retry") == "false":
        return None
    try:
        asked = float(answer.headers["retry-after"])
    except (KeyError, ValueError):
        return backoff if repeatable and answer.status in TRANSIENT else None
    if answer.status not in (TRANSIENT if repeatable else REFUSED) or not 0 <= asked <= LONGEST_RETRY_AFTER_S:
        return None
    return max(asked, backoff)


# ---- bodies ----
def encode(body: Mapping[str, Any]) -> bytes:
    """Return a request's JSON. Raises RequestError for what JSON cannot say, such as a reward that is NaN."""
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError) as error:
        raise RequestError(
            f"the request cannot be written as JSON: {error}",
            hint="rewards and options must be finite numbers, texts valid Unicode; leave out what could not be scored",
        ) from None


class EventReader:
    """Bytes in any pieces -> server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

    def __init__(self) -> None:
        self.last_id: str | None = None
        self._rest = b""
        self._data: list[str] = []

    def push(self, piece: bytes) -> Iterator[str]:
        """Yield the data of each event that `piece` completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            name, _, value = line.rstrip(b"\r").decode(errors="replace").partition(":")
            value = value.removeprefix(" ")
            if name == "data":
                self._data.append(value)
            elif name == "id":
                self.last_id = value
            elif not name and not value and self._data:
                yield "\n".join(self._data)
                self._data.clear()
