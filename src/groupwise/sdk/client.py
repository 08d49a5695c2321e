"""The client of a Groupwise server, blocking and asyncio, with typed answers.

    client = groupwise.Client("http://127.0.0.1:8420")
    groups = client.sample(["What is 47 + 138?"], n=8, max_tokens=64)
    job = client.train_grpo([g.scored([float("185" in text) for text in g.texts]) for g in groups])
    job = client.wait(job.job_id)  # from here on the improved adapter answers
    print(job.adapter_version, client.chat("What is 47 + 138?").text)

    async with groupwise.AsyncClient() as client:
        async for delta in client.chat_stream("What is 47 + 138?"):
            print(delta.text, end="")

Each call is described once, as a flow, in `_Calls` and `AdapterCalls`; `Client` and `AsyncClient` carry the same
flows out. What goes wrong is a RemoteError with the server's message, code, hint and request id. Nothing waits for
ever: `timeout` is in seconds, for the whole of a call with its retries. What is sent again and when:
`groupwise.sdk.transport`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal, TypedDict, Unpack
from urllib.parse import quote, urlencode
from uuid import uuid4

import httpx2

from groupwise.errors import DeadlineError, JobFailedError, RemoteError, RequestError
from groupwise.sdk.client_adapters import Adapters, AsyncAdapters
from groupwise.sdk.drivers import Awaiting, Awaits, Blocking, Blocks, ClientMethod, Note, Stream, connection, server_url
from groupwise.sdk.transport import (
    ASK_S,
    NEXT,
    REFUSED,
    RETRIES,
    SAMPLE_S,
    SUBMIT_S,
    TEMPORARY,
    TRANSIENT,
    WAIT_S,
    Emit,
    Emits,
    EventReader,
    Flow,
    Flows,
    HttpAnswer,
    Open,
    Send,
    Sleep,
    breakdown,
    encode,
    refusal,
)
from groupwise.sdk.types import (
    BatchAnswer,
    BatchCompletion,
    CancelAnswer,
    ChatCompletion,
    ChatCompletionChunk,
    ChatPiece,
    FeedbackAnswer,
    FeedbackPage,
    Health,
    JobEvent,
    JobMetrics,
    KeptAnswers,
    LearnAnswer,
    LearnVerb,
    ModelCard,
    ModelList,
    SampledGroup,
    TrainStatus,
    TrainSubmitted,
    read,
)
from groupwise.types import Message

QUIET_S = 30.0  # a stream of events that is silent for this long is reopened; servers send a comment every 15 s

OUTAGE_S = 60.0  # how long a server may be away while one waits for a job

AGAIN_S = 0.5

LAST_TRIES = 3  # how often the last events of a job that has ended are asked for

Conversation = str | Sequence[Message]


class SamplingOptions(TypedDict, total=False):
    """Options of how completions are drawn; what is left out has the server's default."""

    model: str
    adapter: str  # "base", "name" or "name@3"; default: the active version
    adapters: Sequence[Mapping[str, Any]]  # a sum of adapters: [{"name": ..., "scale": ...}]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    seed: int
    ignore_eos: bool
    return_token_ids: bool
    logprobs: bool
    tools: Sequence[Mapping[str, Any]]
    chat_template_kwargs: Mapping[str, Any]


class ChatOptions(SamplingOptions, total=False):
    """Options of a chat besides those of sampling."""

    n: int
    tool_choice: str | Mapping[str, Any]  # auto, none, required, or the tool that is to be called
    parallel_tool_calls: bool
    top_logprobs: int


class _Calls(Flows):
    """The methods that `Client` and `AsyncClient` share."""

    @ClientMethod
    def health(self, *, timeout: float = ASK_S) -> Flow[Health]:
        """Return how the server is; needs no API key."""
        return self.ask(Health, "/health", timeout=timeout)

    @ClientMethod
    def models(self, *, timeout: float = ASK_S) -> Flow[list[ModelCard]]:
        """Return the names that `model` and `adapter` may have."""
        models = yield from self.ask(ModelList, "/v1/models", timeout=timeout)
        return models.data

    # ---- sampling ----

    @ClientMethod
    def chat(
        self, messages: Conversation, *, timeout: float = SAMPLE_S, **options: Unpack[ChatOptions]
    ) -> Flow[ChatCompletion]:
        """Return the reply to a conversation; a string is one message of the user."""
        body = {"messages": _conversation(messages), **_known(options, ChatOptions)}
        return self.tell(ChatCompletion, "/v1/chat/completions", body, timeout=timeout)

    @Stream
    def chat_stream(
        self, messages: Conversation, *, timeout: float = SAMPLE_S, **options: Unpack[ChatOptions]
    ) -> Emits[ChatPiece]:
        """Yield the reply piece by piece, as it is sampled. Closing the iterator ends the sampling.

        Raises:
            RemoteError: before the first piece as `chat`; later if the server fails or the stream ends too early.
        """
        deadline = time.monotonic() + timeout
        body = {"messages": _conversation(messages), **_known(options, ChatOptions), "stream": True}
        step = Open("POST", "/v1/chat/completions", timeout, encode(body))
        answer = yield from self.exchange(step)
        reader = EventReader()
        try:
            while (piece := (yield NEXT)) is not None:
                for data in reader.push(piece):
                    if data == "[DONE]":
                        return
                    for delta in _deltas(data, answer):
                        yield Emit(delta)
                if time.monotonic() > deadline:
                    raise httpx2.ReadTimeout("the reply went on for too long")
        except httpx2.RequestError as broken:
            raise breakdown(broken, step, url=self._url) from broken
        raise breakdown(httpx2.RemoteProtocolError("the stream ended without [DONE]"), step, url=self._url)

    @ClientMethod
    def sample(
        self,
        prompts: Sequence[Conversation],
        *,
        n: int = 8,
        timeout: float = SAMPLE_S,
        **options: Unpack[SamplingOptions],
    ) -> Flow[list[SampledGroup]]:
        """Sample `n` completions of each prompt, as groups in the order of the prompts; strings are messages of the
        user."""
        conversations = [_conversation(prompt) for prompt in ([prompts] if isinstance(prompts, str) else prompts)]
        body = {"prompts": conversations, "n": n, **_known(options, SamplingOptions)}
        answer = yield from self.exchange(Send("POST", "/v1/completions/batch", timeout, encode(body)))
        return _grouped(read(BatchAnswer, answer.json()).completions, conversations, options.get("tools") or ())

    # ---- feedback ----

    @ClientMethod
    def feedback(
        self,
        rollout_id: str,
        *,
        score: float | None = None,
        thumb: Literal["up", "down"] | None = None,
        correction: str | None = None,
        better_than: str | None = None,
        user: str | None = None,
        comment: str | None = None,
        timeout: float = ASK_S,
        idempotency_key: str | None = None,
    ) -> Flow[FeedbackAnswer]:
        """Say how good an answer was: a `score` from 0 to 1 or a `thumb`, the text that should have been said
        (`correction`), or the id of another answer to the same prompt that is worse (`better_than`).

        `rollout_id` is what `sample` called a completion, or the `id` of a chat's answer. The feedback is on the
        server's disk when this returns. It is sent under its own key, so that it counts once however often it had
        to be sent; give `idempotency_key` to make that last over a restart of your program.
        """
        said = {"score": score, "thumb": thumb, "correction": correction, "better_than": better_than}
        given = {**said, "user": user, "comment": comment}
        body = {"rollout_id": rollout_id, **{name: value for name, value in given.items() if value is not None}}
        headers = {"idempotency-key": idempotency_key or uuid4().hex}
        step = Send("POST", "/v1/feedback", timeout, encode(body), headers=headers)
        answer = yield from self.exchange(step, repeatable=True)
        return read(FeedbackAnswer, answer.json())

    @ClientMethod
    def list_feedback(
        self,
        *,
        rollout_id: str | None = None,
        version: str | None = None,
        state: str | None = None,
        before: int | None = None,
        limit: int = 200,
        timeout: float = ASK_S,
    ) -> Flow[FeedbackPage]:
        """Return a page of feedback, newest first; `before` is the `next` of the page before."""
        asked = {"rollout_id": rollout_id, "version": version, "state": state, "before": before, "limit": limit}
        query = urlencode({name: value for name, value in asked.items() if value is not None})
        return self.ask(FeedbackPage, f"/v1/feedback?{query}", timeout=timeout)

    @ClientMethod
    def kept_answers(self, rollout_id: str, *, timeout: float = ASK_S) -> Flow[KeptAnswers]:
        """Return the prompt of an answer that the server keeps, and what else was sampled for it then. Raises
        RemoteError (404) for one that it has forgotten."""
        return self.ask(KeptAnswers, f"/v1/rollouts/{quote(rollout_id, safe='')}", timeout=timeout)

    @ClientMethod
    def learning(self, *, timeout: float = ASK_S) -> Flow[LearnAnswer]:
        """Return the state of automatic training from ratings: what it does or waits for, and its latest
        transitions."""
        return self.ask(LearnAnswer, "/v1/learn", timeout=timeout)

    @ClientMethod
    def steer_learning(self, verb: LearnVerb, *, timeout: float = ASK_S) -> Flow[LearnAnswer]:
        """Pause automatic training or resume it; promote or reject the version that is on trial. Raises RemoteError
        where there is nothing of that to do: no `learn` in the server's configuration, no version on trial."""
        return self.tell(LearnAnswer, f"/v1/learn/{verb}", timeout=timeout)

    @ClientMethod
    def trust_rater(
        self, user: str | None = None, *, key: str | None = None, timeout: float = ASK_S
    ) -> Flow[LearnAnswer]:
        """Let the ratings of a rater count again who is distrusted: of `user` (None: of those that name none), by the
        key of that name (None: by the owner's, or by none). Raises RemoteError where there is no such rater."""
        body = {name: value for name, value in (("user", user), ("key", key)) if value is not None}
        return self.tell(LearnAnswer, "/v1/learn/raters/trust", body, timeout=timeout)

    # ---- training ----

    @ClientMethod
    def train_grpo(
        self,
        groups: Sequence[Mapping[str, Any]],
        *,
        timeout: float = SUBMIT_S,
        idempotency_key: str | None = None,
        **config: Any,
    ) -> Flow[TrainSubmitted]:
        """Submit scored groups (`SampledGroup.scored`, or the wire's own form) with the options of `config`.

        The job is on the server's disk when this returns. It is sent under its own key, so that it is queued once
        however often it had to be sent; give `idempotency_key` to make that last over a restart of your program.
        """
        body = {"groups": list(groups), "config": config}
        return self._submit("/v1/train/grpo", body, key=idempotency_key, timeout=timeout)

    @ClientMethod
    def train_sft(
        self,
        examples: Sequence[Mapping[str, Any]],
        *,
        timeout: float = SUBMIT_S,
        idempotency_key: str | None = None,
        **config: Any,
    ) -> Flow[TrainSubmitted]:
        """Submit conversations, each {"messages": [...], "tools": [...]?}, to be learnt; else as `train_grpo`."""
        body = {"examples": list(examples), "config": config}
        return self._submit("/v1/train/sft", body, key=idempotency_key, timeout=timeout)

    def _submit(self, path: str, body: Mapping[str, Any], *, key: str | None, timeout: float) -> Flow[TrainSubmitted]:
        step = Send("POST", path, timeout, encode(body), headers={"idempotency-key": key or uuid4().hex})
        answer = yield from self.exchange(step, repeatable=True)
        return read(TrainSubmitted, answer.json())

    @ClientMethod
    def status(self, job_id: str, *, timeout: float = ASK_S) -> Flow[TrainStatus]:
        """Return one job."""
        return self.ask(TrainStatus, _job_path("status", job_id), timeout=timeout)

    @ClientMethod
    def jobs(self, *, timeout: float = ASK_S) -> Flow[list[TrainStatus]]:
        """Return all jobs: the running one, then those that wait, in order, then those that ended, newest first."""
        return self.ask(list[TrainStatus], "/v1/train/status", timeout=timeout)

    @ClientMethod
    def metrics(self, job_id: str, *, timeout: float = ASK_S) -> Flow[list[dict[str, Any]]]:
        """Return a job's metrics, step by step."""
        measured = yield from self.ask(JobMetrics, _job_path("metrics", job_id), timeout=timeout)
        return measured.steps

    @ClientMethod
    def cancel(self, job_id: str, *, timeout: float = ASK_S) -> Flow[CancelAnswer]:
        """Cancel a job that waits or runs; a running one stops after its step."""
        return self.tell(CancelAnswer, _job_path("cancel", job_id), timeout=timeout)

    @Stream
    def events(self, job_id: str, *, after: int = 0, timeout: float = WAIT_S) -> Emits[JobEvent]:
        """Yield a job's events after event `after`, and further ones as they come, until the job has ended.

        Raises:
            DeadlineError: it had not ended after `timeout` seconds.
        """
        yield from self._follow(job_id, after=after, timeout=timeout)

    @ClientMethod
    def wait(
        self, job_id: str, *, timeout: float = WAIT_S, on_event: Callable[[JobEvent], object] | None = None
    ) -> Flow[TrainStatus]:
        """Return the job, once it is completed: what it trained is then served. `on_event` is given what happens
        meanwhile.

        The server may restart meanwhile; it continues the job.

        Raises:
            JobFailedError: the job failed or was cancelled.
            DeadlineError: it had not ended after `timeout` seconds; it continues.
        """
        job = yield from self._follow(job_id, after=0, timeout=timeout, to=on_event or _ignore)
        if job.state == "completed":
            return job
        error = job.error
        said = f": {error.message} ({error.code})" if error else ""
        how = "failed" if job.state == "failed" else f"was {job.state}"
        raise JobFailedError(f"job {job.job_id} {how}{said}", hint=error.hint if error else None)

    def _follow(
        self, job_id: str, *, after: int, timeout: float, to: Callable[[JobEvent], object] | None = None
    ) -> Flow[TrainStatus]:
        """Emit a job's events until it has ended, whatever happens to the connection meanwhile."""
        now = time.monotonic()
        place, deadline = _EventCursor(seq=after, heard_at=now), now + timeout
        last_tries, told = 0, ""
        while True:
            whole, why = False, ""
            try:
                with suppress(httpx2.RequestError):  # whether the server is there, the next call tells
                    whole = yield from self._listen(job_id, place, deadline=deadline, to=to)
                seconds = max(1.0, min(ASK_S, deadline - time.monotonic()))
                job = yield from self.ask(TrainStatus, _job_path("status", job_id), timeout=seconds, retries=0)
                place.heard_at = time.monotonic()
                last_tries += job.finished
                if job.finished and (whole or last_tries == LAST_TRIES):
                    return job
            except RemoteError as error:
                why = _bear(error, place)
            if time.monotonic() >= deadline:
                raise _late(job_id, timeout)
            yield Sleep(min(AGAIN_S, max(deadline - time.monotonic(), 0.0)), why if why != told else "")
            told = why

    def _listen(
        self, job_id: str, place: _EventCursor, *, deadline: float, to: Callable[[JobEvent], object] | None
    ) -> Flow[bool]:
        """Emit a job's events from `place` on, until the stream or the time ends; return whether it was the stream."""
        headers = {"last-event-id": str(place.seq)} if place.seq else {}
        seconds = min(QUIET_S, deadline - time.monotonic())
        answer = yield Open("GET", _job_path("events", job_id), seconds, headers=headers)
        if answer.status >= 300:
            raise refusal(answer)
        reader = EventReader()
        while (piece := (yield NEXT)) is not None:
            place.heard_at = time.monotonic()
            for data in reader.push(piece):
                event = read(JobEvent, {"seq": reader.last_id, **read(dict[str, Any], _loads(data, answer))})
                place.seq = event.seq
                yield Emit(event, to)
            if place.heard_at >= deadline:
                return False
        return True


# ---- the clients ----
class Client(Blocks, _Calls):
    """A server, blocking. Threads may share it.

    Args:
        url: default: GROUPWISE_URL, or http://127.0.0.1:8420.
        api_key: default: GROUPWISE_API_KEY; "" for none.
        retries: how often a call may be sent again, if that is safe.
        note: told, in a sentence, when something is waited for.
    """

    def __init__(
        self, url: str | None = None, *, api_key: str | None = None, retries: int = RETRIES, note: Note | None = None
    ):
        super().__init__(url=server_url(url), retries=retries)
        self._drive = Blocking(httpx2.Client(**connection(self._url, api_key)), note=note)
        self.adapters = Adapters(self._drive, url=self._url, retries=retries)

    @property
    def url(self) -> str:
        return self._url

    def close(self) -> None:
        """Close the connections."""
        self._drive.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self._url!r})"


class AsyncClient(Awaits, _Calls):
    """A server, for asyncio; arguments as for `Client`. `on_event` of `wait` may be a coroutine function."""

    def __init__(
        self, url: str | None = None, *, api_key: str | None = None, retries: int = RETRIES, note: Note | None = None
    ):
        super().__init__(url=server_url(url), retries=retries)
        self._drive = Awaiting(httpx2.AsyncClient(**connection(self._url, api_key)), note=note)
        self.adapters = AsyncAdapters(self._drive, url=self._url, retries=retries)

    @property
    def url(self) -> str:
        return self._url

    async def close(self) -> None:
        """Close the connections."""
        await self._drive.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncClient({self._url!r})"


# ---- what is sent, and what came ----
@dataclass
class _EventCursor:
    """The last event of a job that was heard, and when the server was last heard."""

    seq: int
    heard_at: float


def _conversation(messages: Conversation) -> list[Message]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if isinstance(messages, Mapping) or not all(isinstance(message, Mapping) for message in messages):
        raise RequestError(
            f"a conversation is a string or a list of messages, not {str(messages)[:64]!r}",
            hint='write [{"role": "user", "content": "..."}]',
        )
    return list(messages)


def _known(options: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Return the options that are set; a chat route would ignore one that it does not know."""
    names = kind.__annotations__.keys() | SamplingOptions.__annotations__.keys()
    for name in options.keys() - names:
        close = get_close_matches(name, names, n=1)
        raise RequestError(
            f"there is no option {name!r}",
            hint=f"did you mean {close[0]}?" if close else f"there are: {', '.join(sorted(names))}",
        )
    return {name: value for name, value in options.items() if value is not None}


def _deltas(data: str, answer: HttpAnswer) -> Iterator[ChatPiece]:
    """Yield what one event of a streamed chat adds."""
    event = _loads(data, answer)
    if isinstance(event, Mapping) and "error" in event:
        raise refusal(replace(answer, status=500, body=data.encode()))
    chunk = read(ChatCompletionChunk, event)
    for choice in chunk.choices:
        yield ChatPiece(
            index=choice.index,
            text=choice.delta.content or "",
            reasoning=choice.delta.reasoning_content or "",
            tool_calls=choice.delta.tool_calls or [],
            finish_reason=choice.finish_reason,
            logprobs=choice.logprobs,
            version=chunk.system_fingerprint,
        )


def _loads(data: str, answer: HttpAnswer) -> Any:
    return replace(answer, body=data.encode()).json()


def _grouped(
    completions: Sequence[BatchCompletion], conversations: Sequence[list[Message]], tools: Sequence[Any]
) -> list[SampledGroup]:
    """Return completions in any order as one group a conversation."""
    by_prompt: dict[int, list[BatchCompletion]] = {index: [] for index in range(len(conversations))}
    for completion in sorted(completions, key=lambda each: each.completion_index):
        by_prompt.setdefault(completion.prompt_index, []).append(completion)
    if len(by_prompt) > len(conversations):
        message = f"the server answered prompt {max(by_prompt)} of {len(conversations)}"
        raise RemoteError(message, status=200, code="bad_response")
    return [
        SampledGroup(messages=[*map(dict, messages)], completions=by_prompt[index], tools=[*map(dict, tools)])
        for index, messages in enumerate(conversations)
    ]


def _job_path(what: str, job_id: str) -> str:
    return f"/v1/train/{what}/{quote(job_id, safe='')}"


def _bear(error: RemoteError, place: _EventCursor) -> str:
    """Return what to say of a server that is away for now. Raises the error if it is another one, or lasts too long."""
    if error.status in REFUSED:  # it is there, and loading or draining
        place.heard_at = time.monotonic()
    if error.status not in (0, *TRANSIENT) or time.monotonic() - place.heard_at > OUTAGE_S:
        raise error
    return f"{error.message}; waiting for the server"


def _ignore(event: JobEvent) -> None:
    """Do nothing, for those who wait without listening."""


def _late(job_id: str, timeout: float) -> DeadlineError:
    error = DeadlineError(
        f"job {job_id} had not ended after {timeout:g} s", hint="it goes on: wait again, longer, or cancel it"
    )
    error.exit_code = TEMPORARY
    return error
