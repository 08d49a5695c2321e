"""Answers a request that came in another dialect than chat completions: the same prompt, sampling and reply.

read_form     a body -> the chat form, checked and rendered as /v1/chat/completions does it
Spoken        an admitted request's answer, whole or as events, through the dialect's writer
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response

from groupwise.errors import GrammarError, GroupwiseError, RequestError
from groupwise.model.chat import template_reads
from groupwise.model.reply_formats.parser import ReplyPart
from groupwise.sdk.types import ChatDelta
from groupwise.server.bodies import parse_body
from groupwise.server.chat import ChatParts, ChatPrompt, ChoiceStream, chat_prompt, said_last
from groupwise.server.event_stream import PING as COMMENT
from groupwise.server.event_stream import EventStream, while_connected
from groupwise.server.sampling import Admission
from groupwise.server.schema_openai import ChatRequest
from groupwise.tasks.dialects.form import DialectRequest, StreamEvent, Writer, bytes_of, ending_of, grammar_of, renamed

if TYPE_CHECKING:
    from collections.abc import Callable

    from groupwise.config.serve import ServeConfig
    from groupwise.server.reader import TextModel
    from groupwise.types import Completion


def read_form(
    asked: DialectRequest, form: dict[str, Any], base: TextModel, config: ServeConfig, *, context: int
) -> tuple[ChatRequest, ChatPrompt]:
    """Return the chat `form` of the body `asked` as a checked request, and its prompt. Raises RequestError in the
    dialect's words, ChatError, ContextLengthError."""
    thinks = form.get("chat_template_kwargs", {}).get("enable_thinking")
    if thinks and not template_reads("enable_thinking", base.tokenizer):
        del form["chat_template_kwargs"]  # it thinks if it does, whoever asks
    try:
        body = parse_body(json.dumps(form).encode(), ChatRequest, config)
        prompt = chat_prompt(body, base.tokenizer, config, context=context)
        if prompt.grammar is not None:
            prompt = replace(prompt, grammar=grammar_of(prompt.grammar, asked.names))
        return body, prompt
    except (RequestError, GrammarError) as error:
        if error.kind == "image":  # a dialect's messages are not the chat form's, one by one
            error.field = "messages"
        raise renamed(error, asked.names) from None


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """Constants of one dialect's routes: `kind` begins the ids of its answers; `ping` is sent while a stream is
    silent."""

    kind: str
    ping: bytes = COMMENT


async def answer(
    http: Request,
    parts: ChatParts,
    dialect: Dialect,
    body: ChatRequest,
    prompt: ChatPrompt,
    *,
    writer: Callable[[Admission], Writer],
    keep: Callable[[dict[str, Any]], None] = lambda answer: None,
) -> Response:
    """Sample, and answer as the body asks: whole or streamed. `keep` is told a whole answer before it is sent."""
    most, room = body.most_tokens, parts.engine.context_length - len(prompt.ids)
    if most is not None and most > room > 0:  # clients of these dialects ask for more than there is room for
        body = body.model_copy(update={"max_tokens": room})
    async with AsyncExitStack() as resources:
        asked = await parts.admissions.admit(
            http,
            body,
            [prompt.ids],
            resources=resources,
            kind=dialect.kind,
            preview=said_last(body.messages),
            stream=bool(body.stream),
            top_logprobs=body.top_logprobs or 0,
            grammars=[prompt.grammar],
            cache=any(message.role == "assistant" for message in body.messages),
        )
        spoken = Spoken(asked, body, prompt, writer(asked), dialect, most=most)
        headers = {**asked.headers, "request-id": http.state.request_id}
        if not body.stream:
            groups = await while_connected(http, asked.generation.completions())
            told = await asyncio.to_thread(spoken.whole, groups[0][0])
            asked.finished(groups, finish_reason=spoken.finish_reason)
            keep(told)
            return Response(json.dumps(told), media_type="application/json", headers=headers)
        events = spoken.events(keep)
        first = await while_connected(http, anext(events))
        return EventStream(
            first,
            events,
            resources=resources.pop_all(),
            headers=headers,
            without=parts.paths,
            fail=spoken.fail,
            done=b"",
        )


class Spoken:
    """Builds the answer to a request in the dialect of its `writer`, whole or as a stream."""

    def __init__(
        self,
        asked: Admission,
        body: ChatRequest,
        prompt: ChatPrompt,
        writer: Writer,
        dialect: Dialect,
        *,
        most: int | None,
    ):
        self._asked, self._body, self._prompt, self._most = asked, body, prompt, most
        self._writer, self._dialect = writer, dialect
        self._reply = ChoiceStream(body, prompt)
        self.finish_reason = ""

    def whole(self, completion: Completion) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        self._open()
        self._writer.push(parts_of([*self._reply.push(completion.text), *self._reply.finish()]))
        self._close(completion)
        return self._writer.answer

    async def events(self, keep: Callable[[dict[str, Any]], None]) -> AsyncGenerator[bytes, None]:
        """Yield the stream; its first event waits for the first token."""
        said, tokens = self._asked.said(), await self._asked.next()
        yield bytes_of(self._open())
        while tokens is not None:
            for token in tokens:
                said.hear(token)
            said.take_tokens()
            added = bytes_of(self._writer.push(parts_of(self._reply.push(said.take_text()))))
            if event := added if tokens else self._dialect.ping:
                yield event
            tokens = await self._asked.next()
        completion = (await self._asked.generation.completions())[0][0]
        rest = [*self._reply.push(said.finish(completion)), *self._reply.finish()]
        events = self._writer.push(parts_of(rest)) + self._close(completion)
        self._asked.finished([[completion]], finish_reason=self.finish_reason)
        keep(self._writer.answer)
        yield bytes_of(events)

    def fail(self, error: GroupwiseError) -> bytes:
        """End the stream before the reply does."""
        return bytes_of(self._writer.fail(error))

    def _open(self) -> list[StreamEvent]:
        return self._writer.open(len(self._asked.requests[0].prompt_ids))

    def _close(self, completion: Completion) -> list[StreamEvent]:
        ending = ending_of(
            completion,
            called=bool(self._reply.calls),
            stop=self._body.stop or (),
            prompt_tokens=len(self._asked.requests[0].prompt_ids),
            context=self._asked.engine.context_length,
            most=self._most,
            thinks=self._prompt.thinks,
            tokenizer=self._asked.tokenizer,
        )
        self.finish_reason = self._reply.finish_reason(completion)
        return self._writer.close(ending)


def parts_of(deltas: Sequence[ChatDelta]) -> list[ReplyPart]:
    """Return what the chat route would send, as parts of a reply."""
    parts = []
    for delta in deltas:
        if delta.reasoning_content:
            parts.append(ReplyPart("reasoning", delta.reasoning_content))
        if delta.content:
            parts.append(ReplyPart("content", delta.content))
        for call in delta.tool_calls or ():
            function: Mapping[str, Any] = call.function.model_dump()
            parts.append(ReplyPart("tool_call", id=call.id or "", **function))
    return parts
