"""Runs a sampling request: picks the version, sets the parameters, calls the engine, records the rollouts.

admit             a version that stays loaded until the answer is over, and a `Generation` under it
Admission         what every route that samples needs from there on
sampling_params   what a body asks for -> SamplingParams, checked against the model's context
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from groupwise.errors import (
    AdapterError,
    AdapterNotFoundError,
    ChatError,
    ContextLengthError,
    DeadlineError,
    EngineError,
    GrammarError,
    GroupwiseError,
    ModelError,
    OverloadedError,
    RequestError,
)
from groupwise.sdk.types import CachedTokens, Usage
from groupwise.server.errors import INTERNAL, Paths, ShuttingDownError, envelope, without_paths
from groupwise.server.metrics import RequestRecord
from groupwise.server.schema_openai import Sampling
from groupwise.server.state import Server, server_of
from groupwise.store.ledger import RolloutRecord
from groupwise.tasks.reply import TextStream
from groupwise.types import Completion, Grammar, LiveEngine, PolicyVersion, SamplingParams, SamplingRequest

# ----------------------------------------------------------------------------------------------------------------------
# The bridge between a request and the engine, and back.
#
#     Generation    requests in the engine for one client: tokens as they are sampled, or all completions
#     Said          what was sampled of one completion and has not been sent yet
#     tokens_of     a whole completion as the same tokens
#
# The engine's thread never waits for anybody: it leaves tokens in a `Generation`'s buffer. A client that reads too
# slowly fills its own buffer and loses its own request. Whatever ends a request early (the client left, the deadline, a
# full buffer) cancels its futures, and the engine frees the rows before their next token.
# ----------------------------------------------------------------------------------------------------------------------

MOST_UNREAD = 8192  # tokens and alternatives that may wait for a slow reader,
LEAST_STEPS = 64  # or this many tokens of each completion, where that is more
LEAST_LOGPROB = -9999.0  # JSON has no minus infinity; this is what OpenAI writes for it


class SlowReaderError(GroupwiseError):
    """The client reads more slowly than the model speaks, and its buffer is full."""

    code, status = "client_too_slow", 408


class Token(NamedTuple):
    """One sampled token of completion `choice` of the `prompt`-th request."""

    prompt: int
    choice: int
    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Generation:
    """Requests in the engine for one client. Make it in the event loop; `cancel` it when done with it, always.

    Args:
        timeout_s: how long the requests may take, from `began`.
        stream: keep tokens for `next`; otherwise there are only the `completions`.
        first_token_s: how long a stream may wait for its first token, from `began`.
        began: the event loop's time; None is now.

    Raises:
        ContextLengthError, AdapterNotFoundError, ModelError: as the engine.
    """

    def __init__(
        self,
        engine: LiveEngine,
        requests: Sequence[SamplingRequest],
        *,
        timeout_s: float,
        stream: bool = False,
        first_token_s: float | None = None,
        began: float | None = None,
    ):
        self._loop = asyncio.get_running_loop()
        self._began, self._timeout_s = self._loop.time() if began is None else began, timeout_s
        self._allowed_s = min(timeout_s, first_token_s or timeout_s)  # until there is a first token
        self._unread: deque[Token] = deque()
        weight = 1 + max((request.params.top_logprobs for request in requests), default=0)
        self._most_unread = max(MOST_UNREAD // weight, LEAST_STEPS * sum(request.n for request in requests))
        self._too_slow = self._told = False
        self._changed = asyncio.Event()
        self._futures = []
        try:
            if not stream:
                self._futures = engine.submit(requests)
            for prompt, request in enumerate(requests if stream else ()):
                self._futures += engine.submit([request], on_token=partial(self._hear, prompt))
        except GroupwiseError:
            self.cancel()
            raise
        for future in self._futures:
            future.add_done_callback(lambda _: self._tell())

    def cancel(self) -> None:
        """Let the engine forget what is not finished."""
        for future in self._futures:
            future.cancel()

    async def completions(self) -> list[list[Completion]]:
        """All completions of each request, once they are there.

        Raises:
            DeadlineError: they took too long.
            GroupwiseError: the engine failed or was closed.
        """
        try:
            async with asyncio.timeout_at(self._began + self._timeout_s):
                return await asyncio.gather(*map(asyncio.wrap_future, self._futures))
        except TimeoutError as error:
            raise _overdue(f"the answer was not whole after {self._timeout_s:g} seconds") from error
        finally:
            self.cancel()

    async def next(self, patience_s: float) -> list[Token] | None:
        """The tokens since the last call, as soon as there are any; none when `patience_s` passed; None at the end.

        Raises:
            DeadlineError, GroupwiseError: as `completions`.
            SlowReaderError: too many tokens were waiting to be read.
        """
        until = self._loop.time() + patience_s
        while True:
            over = all(future.done() for future in self._futures)  # asked before the buffer is emptied
            tokens = [self._unread.popleft() for _ in range(len(self._unread))]
            self._check(tokens, over=over)
            if tokens:
                self._allowed_s = self._timeout_s
                return tokens
            if over:
                for future in self._futures:
                    future.result()
                return None
            if self._loop.time() >= until:
                return []
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min(until, self._began + self._allowed_s)):
                    await self._changed.wait()
            self._changed.clear()

    def _check(self, tokens: Sequence[Token], *, over: bool) -> None:
        """Raise what ends this request early."""
        if self._too_slow:
            raise SlowReaderError(
                f"the client left {len(tokens)} tokens unread, and its buffer is full",
                hint="read faster, ask for fewer completions or alternatives at once, or do not stream",
            )
        if not over and self._loop.time() >= self._began + self._allowed_s:
            self.cancel()
            first = self._allowed_s < self._timeout_s and not tokens
            what = "there was no token" if first else "the answer was not whole"
            raise _overdue(f"{what} after {self._allowed_s:g} seconds")

    def _hear(
        self, prompt: int, choice: int, token_id: int, logprob: float, top: tuple[tuple[int, float], ...]
    ) -> None:
        """In the engine's thread: a token was sampled."""
        if len(self._unread) >= self._most_unread:
            self._too_slow = True
            self.cancel()
        else:
            self._unread.append(Token(prompt, choice, token_id, logprob, top))
        self._tell()

    def _tell(self) -> None:
        """Wake `next`, from any thread; many tokens make one call of the loop."""
        if not self._told:
            self._told = True
            with suppress(RuntimeError):  # the loop has been closed: nobody waits
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._told = False
        self._changed.set()


def _overdue(message: str) -> DeadlineError:
    return DeadlineError(message, hint="lower max_tokens or n, or let the server take longer (request_timeout_s)")


class StreamedCompletion:
    """What was sampled of one completion and has not been sent yet: text that is certain, and the tokens behind it."""

    def __init__(self, stream: TextStream):
        self._stream, self._text = stream, ""
        self._tokens: list[Token] = []

    def hear(self, token: Token) -> None:
        self._tokens.append(token)
        self._text += self._stream.push(token.id)

    def take_text(self) -> str:
        text, self._text = self._text, ""
        return text

    def take_tokens(self) -> list[Token]:
        tokens, self._tokens = self._tokens, []
        return tokens

    def finish(self, completion: Completion) -> str:
        """The rest of the text."""
        return self.take_text() + self._stream.finish(completion.text)


def tokens_of(completion: Completion) -> list[Token]:
    """A completion's tokens, as a stream would have brought them."""
    alternatives = completion.top_logprobs or ((),) * len(completion.token_ids)
    rows = zip(completion.token_ids, completion.logprobs, alternatives, strict=True)
    return [Token(0, 0, token_id, logprob, top) for token_id, logprob, top in rows]


def sendable(logprob: float) -> float:
    """A log-probability as JSON can have it."""
    return logprob if logprob >= LEAST_LOGPROB else LEAST_LOGPROB


# ----------------------------------------------------------------------------------------------------------------------
# Answers as server-sent events, and clients that leave.
#
#     while_connected   work that is cancelled when the client goes away
#     EventStream       a response of events: pings, failures as events, and [DONE] at the end
#     following         a response that goes on for as long as there is something to look at, with pings
#
# A stream begins only when its first event is there, so what can be wrong by then still has a status code of its own;
# what fails later is an error event. Every stream ends with [DONE]: clients take one that just ends for a success.
# ----------------------------------------------------------------------------------------------------------------------

PING_S = 15.0  # the longest silence of a stream; proxies cut connections that say nothing for a minute or less
HEARTBEAT_S = 3.0  # the same of a stream that is followed: longer silence means that the server stands still
STALL_S = 60.0  # how long one write may wait for a client that reads nothing at all
CUT_S = 1.0  # the same when the server ends

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
PING, DONE = b": ping\n\n", b"data: [DONE]\n\n"
T = TypeVar("T")

log = logging.getLogger(__name__)


class ClientGone(GroupwiseError):
    """The client closed the connection: nobody reads this."""

    code, status = "client_disconnect", 499


# ---- the client may leave ----
async def until_gone(receive: Receive) -> None:
    """Returns when the client has closed the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(http: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes away or whoever waits here is cancelled.

    Raises:
        ClientGone: the client closed the connection first.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(http.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone("the client closed the connection")
        return task.result()
    finally:
        await _end(task, gone)


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# ---- server-sent events ----
def sse(data: str, *, id: str | int | None = None, event: str | None = None) -> bytes:
    """One event. `data` is JSON on one line; `id` is what a client that comes back sends as Last-Event-ID."""
    named = (("id", id), ("event", event))
    head = "".join(f"{name}: {value}\n" for name, value in named if value is not None)
    return f"{head}data: {data}\n\n".encode()


def failure(error: GroupwiseError) -> bytes:
    """The event that says what went wrong."""
    _, _, body = envelope(error)
    return sse(body.decode())


def following(events: AsyncGenerator[bytes, None]) -> Response:
    """The answer as server-sent events without a last one. An empty event is a look that found nothing: where
    HEARTBEAT_S passed without another, it becomes a ping."""
    return StreamingResponse(_with_pings(events), media_type="text/event-stream", headers=HEADERS)


async def _with_pings(events: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    quiet_since = time.monotonic()
    async with aclosing(events):
        async for event in events:
            if event or time.monotonic() - quiet_since >= HEARTBEAT_S:
                quiet_since = time.monotonic()
                yield event or PING


class EventStream(Response):
    """The answer as server-sent events: those of `events`, which has given its `first` one already, then [DONE].

    A failure becomes the event that `fail` makes of it, in which the paths `without` are hidden; `done` ends the stream
    in the words of its dialect. However it ends, `events` is closed and
    then `resources`, which are told of the failure. Somebody who has read nothing for `stall_s` seconds is given up.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        *,
        resources: AsyncExitStack,
        headers: Mapping[str, str] | None = None,
        without: Paths | None = None,
        stall_s: float = STALL_S,
        fail: Callable[[GroupwiseError], bytes] | None = None,
        done: bytes = DONE,
    ):
        super().__init__(headers={**HEADERS, **(headers or {})})
        del self.headers["content-length"]
        self._first, self._events, self._resources, self._stall_s = first, events, resources, stall_s
        self._without, self._request_id = without or {}, "-"
        self._fail, self._done = fail or failure, done
        self._failed: BaseException | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._request_id = scope.get("state", {}).get("request_id", "-")
        writer = asyncio.ensure_future(self._write(send))
        gone = asyncio.ensure_future(until_gone(receive))
        try:
            await asyncio.wait({writer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
            else:
                self._failed = ClientGone("the client closed the connection")
        except asyncio.CancelledError as error:
            self._failed = error
            await _end(writer)
            await self._cut(send)
            raise
        finally:
            await _end(writer, gone)
            await self._events.aclose()
            failed = self._failed
            await self._resources.__aexit__(failed and type(failed), failed, None)

    async def _write(self, send: Send) -> None:
        async def patient(message: Message) -> None:
            async with asyncio.timeout(self._stall_s):
                await send(message)

        async def body(part: bytes, *, more: bool = True) -> None:
            await patient({"type": "http.response.body", "body": part, "more_body": more})

        try:
            await patient({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await body(self._first)
            async for event in self._told():
                await body(event)
            await body(self._done, more=False)
        except (TimeoutError, OSError) as error:  # it reads nothing, or it has gone
            self._failed = ClientGone(f"the client stopped reading: {error!r}")

    async def _cut(self, send: Send) -> None:
        """The server ends before the stream does."""
        error = ShuttingDownError("the server is shutting down, and this answer is not whole", hint="send it again")
        with suppress(TimeoutError, OSError, RuntimeError):
            async with asyncio.timeout(CUT_S):
                await send({"type": "http.response.body", "body": self._fail(error) + self._done, "more_body": False})

    async def _told(self) -> AsyncIterator[bytes]:
        """The events, and one that says how they failed."""
        try:
            async for event in self._events:
                yield event
        except GroupwiseError as error:
            self._failed = error
            yield self._fail(without_paths(error, self._without))
        except Exception as error:
            self._failed = error
            log.exception("request %s: a stream failed", self._request_id)
            yield self._fail(INTERNAL)


COMPILE_S = 15.0  # for a grammar, with those that wait before it
INTERACTIVE = 8  # a request for this many completions is somebody waiting; for more it is a batch
SAMPLING_ERRORS = (
    RequestError,
    ChatError,
    ContextLengthError,
    GrammarError,
    ModelError,
    AdapterNotFoundError,
    AdapterError,
    OverloadedError,
    DeadlineError,
    EngineError,
)  # what every route that samples may answer


@dataclass(frozen=True, kw_only=True)
class Admission:
    """A request that was admitted: which version answers it, and what the engine does for it."""

    server: Server
    id: str
    created: int
    model: str
    version: PolicyVersion
    requests: tuple[SamplingRequest, ...]
    generation: Generation
    record: RequestRecord
    counts: bool  # in a trial: a person asked, and named no version

    @property
    def headers(self) -> dict[str, str]:
        return {"x-adapter-version": str(self.version)}

    def answer(self, answer: BaseModel) -> Response:
        return Response(answer.model_dump_json(), media_type="application/json", headers=self.headers)

    def said(self) -> StreamedCompletion:
        """For one completion of a stream."""
        params = self.requests[0].params
        return StreamedCompletion(TextStream(self.server.base.tokenizer, params))

    async def next(self) -> list[Token] | None:
        """`Generation.next`, recorded; no tokens where it is time for a ping."""
        tokens = await self.generation.next(PING_S)
        self.server.recorder.tokens(self.record, len(tokens or ()))
        return tokens

    def usage(self, groups: Sequence[Sequence[Completion]]) -> Usage:
        """Each prompt counts once, and every sampled token, also the one that ended a turn."""
        prompt = sum(len(request.prompt_ids) for request in self.requests)
        completion = sum(len(completion.token_ids) for group in groups for completion in group)
        known = [group[0].cached_tokens for group in groups]
        cached = None if None in known else CachedTokens(cached_tokens=sum(each or 0 for each in known))
        return usage(prompt, completion).model_copy(update={"prompt_tokens_details": cached})

    def records(self, groups: Sequence[Sequence[Completion]]) -> list[RolloutRecord]:
        """What is kept of each completion, by prompt, then by completion. The first has the answer's own id, the others
        the id, a hyphen and their index."""
        flat = [(request, each) for request, group in zip(self.requests, groups, strict=True) for each in group]
        return [
            RolloutRecord(
                id=self.id if index == 0 else f"{self.id}-{index}",
                prompt_ids=request.prompt_ids,
                completion_ids=completion.token_ids,
                logprobs=completion.logprobs,
                version=str(completion.version),
                temperature=request.params.temperature,
                finish_reason=completion.finish_reason.value,
                text=completion.text,
                reshaped=request.params.reshaped,
                kept=completion.kept,
                kept_logprobs=completion.kept_logprobs,
                routed_experts=completion.routed_experts,
            )
            for index, (request, completion) in enumerate(flat)
        ]

    def finished(
        self, groups: Sequence[Sequence[Completion]], *, finish_reason: str | None = None, keep: bool = True
    ) -> None:
        """Record that all completions are there. `keep`: remember them under the answer's id, so that feedback can name
        them (`ServeConfig.keep_answers`)."""
        if keep and self.server.config.keep_answers:
            self.server.answers.keep([each for each in self.records(groups) if each.completion_ids])
        if self.server.gate is not None and self.server.gate.shadow is not None:
            self.server.gate.shadow.offer(self, groups)
        first, used = groups[0][0], self.usage(groups)
        self.server.recorder.finished(
            self.record,
            finish_reason=finish_reason or first.finish_reason.value,
            prompt_tokens=used.prompt_tokens,
            completion_tokens=used.completion_tokens,
            cached_tokens=None if used.prompt_tokens_details is None else used.prompt_tokens_details.cached_tokens,
            completion=first.text,
        )

    def failed(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Record how a request ended that did not finish; an exit callback."""
        reasons = {DeadlineError: "timeout", ClientGone: "client_disconnect", SlowReaderError: "client_disconnect"}
        prompt = sum(len(request.prompt_ids) for request in self.requests)
        reason = reasons.get(kind, "error") if kind is not None else "error"
        trial = self.server.policies.trial
        if trial is not None and self.counts and isinstance(error, Exception) and not self._is_the_clients(error):
            trial.failed(self.version)
        self.server.recorder.finished(self.record, finish_reason=reason, prompt_tokens=prompt)

    def _is_the_clients(self, error: Exception) -> bool:
        """Whether the client caused an error: it left, asked for what is refused, or for a grammar that takes long."""
        if isinstance(error, ClientGone | SlowReaderError):
            return True
        slow = isinstance(error, DeadlineError) and any(each.params.grammar is not None for each in self.requests)
        return slow or (isinstance(error, GroupwiseError) and error.status < 500)


def usage(prompt_tokens: int, completion_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )


async def admit(
    http: Request,
    body: Sampling,
    prompts: Sequence[Sequence[int]],
    *,
    resources: AsyncExitStack,
    kind: str,
    preview: str,
    stream: bool = False,
    top_logprobs: int = 0,
    interactive: bool = True,
    cache: bool = False,
    grammars: Sequence[Grammar | None] = (),
) -> Admission:
    """Choose the version, keep it loaded until `resources` are closed, and give the engine everything at once.

    `kind` begins the id, before a hyphen unless it ends with an underscore; `preview` stands for the prompts in the
    list of recent requests; `cache` is the `SamplingRequest`'s. `grammars`
    are those of the prompts, where they have any. With `max_tokens: 0` the engine gets nothing to do.

    Raises:
        GrammarError, NotReadyError: a grammar cannot be compiled, or not now.
        ContextLengthError: a prompt does not fit, together with what is asked for.
        ModelError, AdapterNotFoundError, AdapterError, DeadlineError, OverloadedError, RequestError: as
            `Policies.lease`, which may wait for room within the deadline of the request.
    """
    server, began = server_of(http), asyncio.get_running_loop().time()
    most_tokens, context = server.config.max_tokens_default, server.engine.context_length
    _check_biased(body, server.base.vocabulary)
    prompts = [truncated(body, ids, context=context) for ids in prompts]
    params = [
        sampling_params(body, ids, context=context, most_tokens=most_tokens, index=i, top_logprobs=top_logprobs)
        for i, ids in enumerate(prompts)
    ]
    params = [
        replace(one, grammar=grammar) for one, grammar in zip(params, grammars or [None] * len(params), strict=True)
    ]
    await compiled(server.engine, grammars, sender=http.client.host if http.client else "")
    whole_s, first_s = server.config.request_timeout_s, server.config.first_token_timeout_s
    patience_s = min(whole_s, first_s) if stream else whole_s
    version = await resources.enter_async_context(
        server.policies.lease(
            model=body.model,
            adapter=body.adapter,
            adapters=body.adapters,
            patience_s=patience_s,
            session=_session(http, body) if interactive else None,
        )
    )
    named = body.adapter is not None or body.adapters is not None or body.model not in (None, server.config.served_name)
    counts = interactive and not named
    if counts and server.policies.trial is not None:
        server.policies.trial.answered(version)
    n = body.n or 1
    interactive = interactive and n * len(prompts) <= INTERACTIVE
    requests = tuple(
        SamplingRequest(
            prompt_ids=tuple(ids),
            params=one,
            n=n,
            version=version,
            interactive=interactive,
            cache=cache and n == 1,
        )
        for ids, one in zip(prompts, params, strict=True)
    )
    generation = Generation(
        server.engine,
        () if body.most_tokens == 0 else requests,
        timeout_s=whole_s,
        stream=stream,
        first_token_s=first_s,
        began=began,
    )
    resources.callback(generation.cancel)
    model = body.model or server.config.served_name
    id = f"{kind}{'' if kind.endswith('_') else '-'}{secrets.token_hex(12)}"
    admission = Admission(
        server=server,
        id=id,
        created=int(time.time()),
        model=model,
        version=version,
        counts=counts,
        requests=requests,
        generation=generation,
        record=server.recorder.request_started(
            http.url.path,
            id=id,
            request_id=getattr(http.state, "request_id", ""),
            model=model,
            adapter=str(version),
            prompt=preview,
            streamed=stream,
        ),
    )
    resources.push(admission.failed)
    return admission


def _session(http: Request, body: Sampling) -> str:
    """What has the same answerer while a version is on trial: the header x-session-id, the body's `user`, or else the
    request alone."""
    user = (body.model_extra or {}).get("user")
    return http.headers.get("x-session-id") or (str(user) if user else secrets.token_hex(8))


async def compiled(engine: LiveEngine, grammars: Sequence[Grammar | None], *, sender: str) -> None:
    """Wait until the engine has the grammars. Raises GrammarError, also for one that takes too long, and what
    `LiveEngine.prepare` raises."""
    for grammar in dict.fromkeys(each for each in grammars if each is not None):
        try:
            async with asyncio.timeout(COMPILE_S):
                await asyncio.shield(asyncio.wrap_future(engine.prepare(grammar, sender=sender)))
        except TimeoutError:
            message = f"{grammar.field} was not compiled after {COMPILE_S:g} seconds"
            raise GrammarError(message, hint="make it smaller, or try again", field=grammar.field) from None


def sampling_params(
    body: Sampling, prompt_ids: Sequence[int], *, context: int, most_tokens: int, index: int = 0, top_logprobs: int = 0
) -> SamplingParams:
    """How `body` wants its `index`-th prompt sampled.

    Without `max_tokens` a completion may have `most_tokens`, or as many as fit into the context.

    Raises:
        ContextLengthError: the prompt and what is asked for after it do not fit.
    """
    asked, room = body.most_tokens, context - len(prompt_ids)
    if room < (1 if asked is None else asked):
        prompt, total = len(prompt_ids), len(prompt_ids) + (asked or 1)
        raise ContextLengthError(  # in OpenAI's words: clients know the error by its first ones
            f"This model's maximum context length is {context} tokens. However, you requested {total} tokens "
            f"({prompt} in the prompt, {asked or 1} for the completion)",
            hint=f"lower max_tokens to {room} or less, or shorten the prompt" if room > 0 else "shorten the prompt",
        )
    most = min(most_tokens, room) if asked is None else max(1, asked)
    if body.min_tokens and body.min_tokens > most:
        message = f"min_tokens is {body.min_tokens}, and a completion has at most {most} (max_tokens)"
        raise RequestError(message, hint=f"lower min_tokens to {most} or less, or raise max_tokens", field="min_tokens")
    return SamplingParams(
        max_tokens=most,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        stop=tuple(body.stop or ()),
        stop_ids=tuple(body.stop_token_ids or ()),
        include_stop=bool(body.include_stop_str_in_output),
        seed=None if body.seed is None else prompt_seed(body.seed, index),
        ignore_eos=bool(body.ignore_eos),
        top_logprobs=top_logprobs,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=tuple((int(token), bias) for token, bias in (body.logit_bias or {}).items()),
        min_tokens=body.min_tokens or 0,
    )


def truncated(body: Sampling, prompt_ids: Sequence[int], *, context: int) -> Sequence[int]:
    """The last of the prompt's tokens, as many as the body wants to keep."""
    most = body.truncate_prompt_tokens
    if most == -1:
        most = max(1, context - max(1, body.most_tokens or 1))
    return prompt_ids if most is None else prompt_ids[-most:]


def _check_biased(body: Sampling, vocabulary: int) -> None:
    """Raise RequestError for a token id that the model does not have."""
    for token in body.logit_bias or ():
        if int(token) >= vocabulary:
            message = f"logit_bias has the token id {token}; this model has the ids 0 to {vocabulary - 1}"
            raise RequestError(message, hint="give ids of this model's tokenizer", field=f"logit_bias.{token}")


def prompt_seed(seed: int, index: int) -> int:
    """The seed of a request's `index`-th prompt: its own for the first, so that a batch of one is like a chat."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed},{index}".encode(), digest_size=8).digest(), "little") >> 1
