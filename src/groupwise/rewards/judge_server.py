"""Asks a judge: one request to OpenAI's chat API, made again where that helps.

    POST <base_url>/chat/completions

After a timeout, a broken connection, 408, 409, 425, 429, 5xx or an answer that cannot be read a request is made again,
later each time and not before Retry-After. The API key is taken from the environment, is sent to `base_url` only, and
appears in no message.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx2

from groupwise.config.addresses import has_certificate, is_local, is_server_url
from groupwise.errors import ConfigError

CONNECT_S = 5.0
FIRST_DELAY_S, LONGEST_DELAY_S = 0.25, 8.0
TRANSIENT = (408, 409, 425, 429)  # and everything from 500 on

_gates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, int], asyncio.Semaphore]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True, kw_only=True)
class JudgeServer:
    """The server of a judge, and the limits within which it is asked."""

    url: str
    headers: Mapping[str, str]
    key: str
    timeout_s: float
    deadline_s: float
    retries: int
    concurrency: int

    @property
    def gate(self) -> asyncio.Semaphore:
        """Return the limiter that lets `concurrency` requests to this server run at once, in this event loop."""
        gates = _gates.setdefault(asyncio.get_running_loop(), {})
        return gates.setdefault((self.url, self.concurrency), asyncio.Semaphore(self.concurrency))


@dataclass(kw_only=True)
class JudgeUsage:
    """Tokens that the exchanges with a judge cost, as far as its server reports them."""

    tokens_in: int = 0
    tokens_out: int = 0
    reported: bool = False

    def add(self, usage: Any) -> None:
        """Count an answer's `usage`."""
        counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")] if isinstance(usage, dict) else []
        match counts:
            case [int(tokens_in), int(tokens_out)]:
                self.tokens_in, self.tokens_out = self.tokens_in + tokens_in, self.tokens_out + tokens_out
                self.reported = True


class JudgeFailure(Exception):
    """A request to the judge gave no verdict. `again_after` is the least number of seconds until a retry, None if a
    retry cannot help; `status` is the HTTP status if the server refused the request."""

    def __init__(self, cause: str, *, again_after: float | None = None, status: int | None = None):
        super().__init__(cause)
        self.again_after = again_after
        self.status = status


# A request's body for its first attempt, its second, ..., and what reads the answer to it (raises JudgeFailure).
_T = TypeVar("_T")
Question = Callable[[int], tuple[bytes, Callable[[str], _T]]]


def configured_server(base_url: str, api_key_env: str | None, *, concurrency: int, **limits: Any) -> JudgeServer:
    """Return the server at `base_url`, with the key that the environment has. Raises ConfigError for wrong options."""
    if not is_server_url(base_url):
        raise ConfigError(f"base_url is {base_url!r}; it must be a URL", hint="as in https://api.openai.com/v1")
    if concurrency < 1:
        raise ConfigError(f"concurrency is {concurrency}; it must be at least 1")
    key = os.environ.get(api_key_env, "").strip() if api_key_env else ""
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(f"the key in {api_key_env} has characters that cannot be sent (it is not shown here)")
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    url = base_url.rstrip("/") + "/chat/completions"
    return JudgeServer(url=url, headers=headers, key=key, concurrency=concurrency, **limits)


def http_client(server: JudgeServer) -> httpx2.AsyncClient:
    """Return a client with the server's headers and time limits, which follows no redirect with the key."""
    return httpx2.AsyncClient(
        headers=server.headers,
        timeout=httpx2.Timeout(server.timeout_s, connect=min(server.timeout_s, CONNECT_S)),
        follow_redirects=False,  # the key is for this server
        trust_env=not is_local(server.url),
        verify=has_certificate(server.url),
    )


async def ask_judge(
    http: httpx2.AsyncClient, question: Question[_T], *, server: JudgeServer, usage: JudgeUsage
) -> _T | JudgeFailure:
    """Return the judge's verdict; or the reason why there is none. The judge is asked again while `retries` and
    `deadline_s` allow."""
    async with server.gate:
        end = time.monotonic() + server.deadline_s
        for attempt in itertools.count():
            body, read = question(attempt)
            try:
                async with asyncio.timeout(min(server.timeout_s, end - time.monotonic())):
                    said = await _exchange(http, body, server=server, usage=usage)
                return read(said)
            except TimeoutError:
                failed = JudgeFailure(f"no answer from {server.url} within {server.timeout_s:g} s", again_after=0.0)
            except httpx2.RequestError as broken:
                cause = str(broken) or type(broken).__name__
                failed = JudgeFailure(f"the exchange with {server.url} broke: {cause}", again_after=0.0)
            except JudgeFailure as failure:
                failed = failure
            if failed.again_after is None or attempt >= server.retries:
                return failed
            backoff = min(FIRST_DELAY_S * 2**attempt, LONGEST_DELAY_S) * random.uniform(0.75, 1.25)
            delay = max(backoff, failed.again_after)
            if time.monotonic() + delay >= end:
                return JudgeFailure(
                    f"{failed}; no further attempt fits into {server.deadline_s:g} s", status=failed.status
                )
            await asyncio.sleep(delay)
    raise AssertionError("unreachable")


async def _exchange(http: httpx2.AsyncClient, body: bytes, *, server: JudgeServer, usage: JudgeUsage) -> str:
    """Return the text of the judge's answer to one request."""
    response = await http.post(server.url, content=body)
    if response.status_code != 200:
        said = without_key(server.key, response.text)[:300].strip()
        again = response.status_code in TRANSIENT or response.status_code >= 500
        again_after = _retry_after(response.headers.get("retry-after")) if again else None
        status = response.status_code
        raise JudgeFailure(f"{server.url} answered {status}: {said}", again_after=again_after, status=status)
    try:
        answer = response.json()
        content = answer["choices"][0]["message"]["content"]
        if not isinstance(content, str | None):
            raise TypeError(content)
    except (ValueError, LookupError, TypeError):
        raise JudgeFailure(f"{server.url} did not answer as a chat completion", again_after=0.0) from None
    usage.add(answer.get("usage"))
    return str(content)


def without_key(key: str, text: str) -> str:
    """Return the text with the key blotted out."""
    return text.replace(key, "***") if key else text


def _retry_after(header: str | None) -> float:
    """Return seconds that the server asks for: a number, or a date."""
    if header is None:
        return 0.0
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0
