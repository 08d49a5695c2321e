"""The HTTP endpoint that a run's agents and harnesses talk to: on 127.0.0.1, a free port, one API key an episode.

    POST /v1/chat/completions     OpenAI's; `protocol` says what of it, and of the others
    POST /v1/messages             Anthropic's, and /v1/messages/count_tokens; the base URL has no /v1 there
    POST /v1/responses            OpenAI's Responses, and GET and DELETE of one that was stored
    GET  /v1/models

The key is a bearer, or `x-api-key`. What is streamed is sent as it is sampled, where the engine streams.

A body is limited as the live server's are (`groupwise.tasks.arriving`): one that is longer than a prompt's may be
is a 413, and one that does not arrive is a 408.

It has a thread and its own event loop, so that agents that are not async, and other processes, can use it too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from groupwise.config.serve import ServeConfig
from groupwise.errors import AuthenticationError, GrammarError, GroupwiseError, RequestError, TryAgainError
from groupwise.tasks import openai as protocol
from groupwise.tasks.agent_session import AgentSession
from groupwise.tasks.arriving import BodyGuard, ByteLimit
from groupwise.tasks.conversations import Conversations
from groupwise.tasks.dialects import anthropic, responses
from groupwise.tasks.dialects.form import bytes_of, read, renamed
from groupwise.tasks.openai import MODEL

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI
    from transformers import PreTrainedTokenizerBase

    from groupwise.model.reply_formats.parser import ReplyPart
    from groupwise.tasks.dialects.form import Writer
    from groupwise.tasks.openai import AgentChatRequest

BACKLOG = 2048
KEEP_ALIVE_S = 3600  # agents think between two requests; a connection that was closed meanwhile costs them a retry
START_S = 30.0
_LIMITS: dict[str, Any] = {"max_connections": None, "max_keepalive_connections": 0}  # an event loop may end any time
NEVER_AGAIN = {"x-should-retry": "false"}  # OpenAI's clients would otherwise repeat what cannot succeed

T = TypeVar("T")
Keep = Callable[[dict[str, Any]], None]
log = logging.getLogger(__name__)


class NoRouteError(GroupwiseError, LookupError):
    """No such path."""

    code, status, exit_code = "route_not_found", 404, 2


class Endpoint:
    """Answers the requests of open sessions. `base_url` is for OpenAI clients."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._sessions: dict[str, AgentSession] = {}
        self._socket = _listen()
        self.base_url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        self._server = uvicorn.Server(
            uvicorn.Config(
                _Bodies(self._app()),
                lifespan="off",
                ws="none",
                loop="asyncio",
                log_config=None,
                log_level=logging.ERROR,
                access_log=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="agents", daemon=True)
        self._thread.start()
        if not self._started.wait(START_S) or self._loop is None:
            raise GroupwiseError(f"the endpoint for agents did not start within {START_S:g} s")

    @asynccontextmanager
    async def open(self, session: AgentSession) -> AsyncIterator[str]:
        """Yield the API key for `session` during the block. Usable from any event loop."""
        key = f"episode-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        try:
            yield key
        finally:
            del self._sessions[key]
            if not session.over:
                self._submit(session.end())

    async def end(self, session: AgentSession) -> Conversations:
        """End a session; all that was said in it. For any event loop."""
        return await asyncio.wrap_future(self._submit(session.end()))

    def client(self, key: str) -> OpenAI:
        """Return a blocking OpenAI client with this key. All clients share one transport, so that closing one is
        harmless."""
        import openai

        transport, http = self._transport, _http()

        class SharedTransport(http.BaseTransport):
            """Lets all clients share one transport; closing a client does not close it."""

            def handle_request(self, request: Any) -> Any:
                return transport.handle_request(request)

        asking = http.Client(transport=SharedTransport(), trust_env=False, follow_redirects=True)
        return openai.OpenAI(base_url=self.base_url, api_key=key, http_client=asking)

    def async_client(self, key: str) -> AsyncOpenAI:
        """Return the same for agents that are async."""
        import openai

        transport, http = self._async_transport, _http()

        class SharedAsyncTransport(http.AsyncBaseTransport):
            """Lets all clients share one transport; closing a client does not close it."""

            async def handle_async_request(self, request: Any) -> Any:
                return await transport.handle_async_request(request)

        asking = http.AsyncClient(transport=SharedAsyncTransport(), trust_env=False, follow_redirects=True)
        return openai.AsyncOpenAI(base_url=self.base_url, api_key=key, http_client=asking)

    @cached_property
    def _transport(self) -> Any:
        return _http().HTTPTransport(verify=False, trust_env=False, limits=_http().Limits(**_LIMITS))

    @cached_property
    def _async_transport(self) -> Any:
        return _http().AsyncHTTPTransport(verify=False, trust_env=False, limits=_http().Limits(**_LIMITS))

    def stop(self) -> None:
        """Stop answering soon. Requests under way fail."""
        self._server.should_exit = True

    def close(self) -> None:
        """Stop answering."""
        self.stop()
        self._thread.join(timeout=START_S)

    # ---- the thread ----
    def _run(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self._started.set()
            await self._server.serve(sockets=[self._socket])

        asyncio.run(serve())

    def _submit(self, work: Coroutine[Any, Any, T]) -> Any:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # ---- routes ----
    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/messages", self._messages, methods=["POST"]),
                Route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"]),
                Route("/v1/responses", self._responses, methods=["POST"]),
                Route("/v1/responses/{id}", self._response, methods=["GET", "DELETE"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/models/{name:path}", self._model, methods=["GET"]),
                Route("/{path:path}", self._nowhere, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
            ],
            exception_handlers={GroupwiseError: _refuse, ClientDisconnect: _gone, Exception: _bug},  # type: ignore[dict-item]
        )

    async def _chat(self, http: Request) -> Response:
        session = self._session(http)
        request = protocol.read_request(await http.body())
        id = session.new_id("chatcmpl-")
        writer = protocol.ChatWriter(id=id, request=request, tokenizer=self._tokenizer)
        return await _answer(http, session, request, writer, id=id, done=b"data: [DONE]\n\n")

    async def _messages(self, http: Request) -> Response:
        session = self._session(http)
        request, asked = protocol.read_other(await http.body(), anthropic.MessagesRequest)
        id = session.new_id("msg_")
        writer = anthropic.MessageWriter(id=id, model=MODEL)
        return await _answer(http, session, request, writer, id=id, names=asked.names)

    async def _responses(self, http: Request) -> Response:
        session = self._session(http)
        asked = read(await http.body(), responses.ResponsesRequest)
        history = session.responses.history(asked.previous_response_id)
        request = protocol.translated(asked, asked.chat(history))
        id = session.new_id("resp_")
        writer = responses.ResponseWriter(id=id, model=MODEL, request=asked)
        keep = partial(session.responses.keep, asked, history=history)
        return await _answer(http, session, request, writer, id=id, names=asked.names, keep=keep)

    async def _response(self, http: Request) -> Response:
        """Return one that was stored."""
        stored, id = self._session(http).responses, http.path_params["id"]
        if http.method == "GET":
            return _json(stored.find(id).answer)
        stored.delete(id)
        return JSONResponse({"id": id, "object": "response", "deleted": True})

    async def _count_tokens(self, http: Request) -> Response:
        session = self._session(http)
        request, _ = protocol.read_other(await http.body(), anthropic.CountRequest)
        return JSONResponse({"input_tokens": session.count(request)})

    async def _models(self, http: Request) -> Response:
        self._session(http)
        return JSONResponse(protocol.models())

    async def _model(self, http: Request) -> Response:
        self._session(http)
        return JSONResponse(protocol.models()["data"][0])

    async def _nowhere(self, http: Request) -> Response:
        raise NoRouteError(
            f"there is no {http.method} {http.url.path}",
            hint="agents in training have /v1/chat/completions, /v1/messages, /v1/responses and /v1/models",
        )

    def _session(self, http: Request) -> AgentSession:
        kind, _, key = http.headers.get("authorization", "").partition(" ")
        if not key:
            kind, key = "bearer", http.headers.get("x-api-key", "")
        session = self._sessions.get(key.strip()) if kind.lower() == "bearer" else None
        if session is None:
            raise AuthenticationError(
                "the API key is that of no episode under way",
                hint="use the api_key that the agent was called with, and not after it has returned",
            )
        return session


class _Bodies:
    """Middleware that gives the application no body beyond the live server's own limits for prompts. What is refused is
    raised where the application reads the body, behind the check of the key."""

    def __init__(self, app: ASGIApp):
        self._app, config = app, ServeConfig()
        self._most, self._seconds = config.chat_body_bytes, config.body_timeout_s
        self._long = ByteLimit(config.bodies_bytes, patience_s=config.first_token_timeout_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"").decode("latin-1")
        async with AsyncExitStack() as held:

            async def take(*, long: bool) -> None:
                if long:
                    size = min(int(declared[:20]), self._most) if declared.isdigit() else self._most
                    await held.enter_async_context(self._long.held(size))

            body = BodyGuard(receive, (self._most, "chat_body_bytes"), take, seconds=self._seconds)

            async def receive_counted() -> Message:
                body.check_length(declared)
                return await body()

            await self._app(scope, receive_counted, send)


# ---- answers ----
async def _answer(
    http: Request,
    session: AgentSession,
    request: AgentChatRequest,
    writer: Writer,
    *,
    id: str,
    names: Mapping[str, str] | None = None,
    keep: Keep = lambda answer: None,
    done: bytes = b"",
) -> Response:
    """Return the policy's answer through the dialect's writer, whole or streamed, under this id. `names` are the
    dialect's for fields of the chat form; `keep` is told the whole answer before its end is sent; `done` ends a
    stream."""
    ignored = [(names or {}).get(name, name) for name in request.ignored(recorded=session.recorded)]
    headers = {"x-ignored": ", ".join(ignored)} if ignored else {}
    if not request.stream:
        with _in_words_of(names):
            reply = await _while_connected(http, session.answer(request, id=id, ignored=ignored))
        writer.open(reply.ending.prompt_tokens)
        writer.push(reply.parts)
        writer.close(reply.ending)
        keep(writer.answer)
        return _json(writer.answer, headers)
    stream = _Stream(session, request, writer, keep, done, id=id, ignored=ignored)
    try:
        with _in_words_of(names):
            first = await _while_connected(http, stream.next())
    except BaseException:
        stream.cancel()
        raise
    headers |= {"cache-control": "no-cache"}
    return StreamingResponse(stream.events(first), media_type="text/event-stream", headers=headers)


@contextmanager
def _in_words_of(names: Mapping[str, str] | None) -> Iterator[None]:
    """Context manager in which errors about the chat form speak in the words of a dialect, whose `names` its fields
    have."""
    try:
        yield
    except (RequestError, GrammarError) as error:
        raise (error if names is None else renamed(error, names)) from None


class _Stream:
    """Streams an answer of the policy. The stream begins with the first part, so that an error before it has its own
    HTTP status."""

    def __init__(
        self,
        session: AgentSession,
        request: AgentChatRequest,
        writer: Writer,
        keep: Keep,
        done: bytes,
        *,
        id: str,
        ignored: Sequence[str],
    ):
        self._writer, self._keep, self._done = writer, keep, done
        self._prompt_tokens = session.count(request)
        self._parts: asyncio.Queue[Sequence[ReplyPart] | None] = asyncio.Queue()
        heard = self._parts.put_nowait
        self._answer = asyncio.ensure_future(session.answer(request, id=id, ignored=ignored, hear=heard))
        self._answer.add_done_callback(lambda _: self._parts.put_nowait(None))

    def cancel(self) -> None:
        """Cancel the answer, because its client has gone. The answer is not a turn, unless it was complete already."""
        self._answer.cancel()

    async def next(self) -> Sequence[ReplyPart] | None:
        """Return the next parts; None behind the last. Raises what the session raises, if that comes first."""
        parts = await self._parts.get()
        if parts is None:
            self._answer.result()
        return parts

    async def events(self, parts: Sequence[ReplyPart] | None) -> AsyncIterator[bytes]:
        """Yield the stream, whose first parts are `parts`."""
        try:
            yield bytes_of(self._writer.open(self._prompt_tokens))
            while parts is not None:
                if added := self._writer.push(parts):
                    yield bytes_of(added)
                parts = await self.next()
            last = self._writer.close(self._answer.result().ending)
            self._keep(self._writer.answer)
            yield bytes_of(last) + self._done
        except GroupwiseError as error:
            yield bytes_of(self._writer.fail(error)) + self._done
        finally:
            self.cancel()


def _json(answer: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """Return it in ASCII: the policy may write half of a character in the arguments of a call."""
    return Response(json.dumps(answer), media_type="application/json", headers=dict(headers or {}))


async def _while_connected(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled when the client goes away."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _until_gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _refuse(http: Request, error: GroupwiseError) -> Response:
    again = {"retry-after": f"{error.retry_after:.0f}"} if isinstance(error, TryAgainError) else NEVER_AGAIN
    return JSONResponse(_error_of(http, error), status_code=error.status, headers=again)


def _error_of(http: Request, error: GroupwiseError) -> dict[str, Any]:
    """Return an error in the envelope of the route's dialect."""
    told = anthropic.error_of if http.url.path.startswith("/v1/messages") else protocol.error_of
    return told(error)


async def _gone(http: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=499)  # the client has gone


async def _bug(http: Request, error: Exception) -> Response:
    log.error("an agent's request failed", exc_info=error)
    told = GroupwiseError(f"internal error: {type(error).__name__}: {error}")
    return JSONResponse(_error_of(http, told), status_code=500, headers=NEVER_AGAIN)


def _http() -> Any:
    """Return the HTTP library of the installed openai package: httpx2, or httpx before 3.0."""
    import openai

    return sys.modules[openai.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0]]


def _listen() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener
