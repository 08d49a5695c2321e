"""POST /v1/chat/completions: a conversation and its next turn, whole or streamed, as OpenAI's clients expect it.

    chat_prompt     a body -> token ids, and what of the reply they hold already
    Reply           a reply's text in pieces of any size -> deltas, and the message that they add up to

A reply is split by one parser whether it is streamed or not, so the deltas of a stream join to the message. A tool call
is one delta, sent when it is whole. Log-probabilities and token ids are those of every sampled token, also of the one
that ended the turn: they are as many as `completion_tokens`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Request, Response

from groupwise.config.serve import ServeConfig
from groupwise.model.chat import encode_prompt, opens_thought
from groupwise.model.reply_formats.format import ReplyFormat
from groupwise.model.reply_formats.known import HERMES, format_of
from groupwise.model.reply_formats.parser import ReplyPart
from groupwise.sdk.types import (
    AnsweredCall,
    AnsweredFunction,
    AnsweredMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    TokenLogprob,
    TopLogprob,
)
from groupwise.server.bodies import parse_body
from groupwise.server.encode import template_options
from groupwise.server.event_stream import PING, EventStream, sse, while_connected
from groupwise.server.generate import StreamedCompletion, Token, sendable, tokens_of
from groupwise.server.images import seeing
from groupwise.server.sampling import SAMPLING_ERRORS, Admission, Admissions
from groupwise.server.schema_openai import ChatRequest
from groupwise.server.state import given
from groupwise.server.wire import documented
from groupwise.tasks.dialects.chat_form import ChatMessage, NamedTool, as_messages, said
from groupwise.tasks.reply import token_text
from groupwise.tasks.structured import reply_grammar, thoughts_of, with_thoughts
from groupwise.types import Completion, FinishReason, Grammar, Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from groupwise.sampler import LiveEngine
    from groupwise.server.reader import Reader, TextModel

router = APIRouter(tags=["OpenAI"])


@dataclass(frozen=True, kw_only=True)
class ChatParts:
    """The parts of a server that the routes of conversations use, in each dialect."""

    engine: LiveEngine
    reader: Reader
    admissions: Admissions
    paths: Mapping[str, str]


Chats = Annotated[ChatParts, given(ChatParts)]


@router.post(
    "/v1/chat/completions",
    **documented(
        ChatRequest,
        ChatCompletion,
        errors=SAMPLING_ERRORS,
        codes=["unsupported_content", "invalid_image", "limit_exceeded"],
        streams=True,
    ),
)
async def chat_completions(http: Request, parts: Chats) -> Response:
    """Write the next turn of a conversation, by the active policy or the one that `model` or `adapter` names.

    `stream: true` sends it as server-sent events while it is sampled. `system_fingerprint` and the header
    `x-adapter-version` say which version answered.
    """
    body, prompt = await parts.reader.read_json(http, read_chat, context=parts.engine.context_length)
    async with AsyncExitStack() as resources:
        asked = await parts.admissions.admit(
            http,
            body,
            [prompt.ids],
            resources=resources,
            kind="chatcmpl",
            preview=said_last(body.messages),
            stream=bool(body.stream),
            top_logprobs=body.top_logprobs or 0,
            cache=any(message.role == "assistant" for message in body.messages),
            grammars=[prompt.grammar],
        )
        chat = _Chat(asked, body, prompt)
        if not body.stream:
            groups = await while_connected(http, asked.generation.completions())
            answer = await asyncio.to_thread(chat.whole, groups[0])
            asked.finished(groups, finish_reason=answer.choices[0].finish_reason)
            return asked.answer(answer)
        events = chat.events()
        first = await while_connected(http, anext(events))
        return EventStream(first, events, resources=resources.pop_all(), headers=asked.headers, without=parts.paths)


# ---- the prompt ----
def read_chat(raw: bytes, base: TextModel, config: ServeConfig, *, context: int) -> tuple[ChatRequest, ChatPrompt]:
    """Return a body and its prompt. Raises RequestError, ChatError, ContextLengthError, GrammarError."""
    body = parse_body(raw, ChatRequest, config)
    is_cut = body.truncate_prompt_tokens is not None
    return body, chat_prompt(body, base.tokenizer, config, context=None if is_cut else context)


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as token ids. `said` is what is given back in front of the reply; `thinks` says whether the reply
    continues a thought. The model writes in the format `form`; `grammar` is that of the reply."""

    ids: tuple[int, ...]
    said: str = ""
    thinks: bool = False
    form: ReplyFormat = HERMES
    grammar: Grammar | None = None


def chat_prompt(
    body: ChatRequest, tokenizer: PreTrainedTokenizerBase, config: ServeConfig, *, context: int | None = None
) -> ChatPrompt:
    """Render and tokenise, with the system message and the form of `config` where the body has none.

    Raises:
        ChatError: the template refuses the messages.
        RequestError, StorageError: as `seeing`.
        ContextLengthError: they are far longer than `context` tokens.
        GrammarError: a call that was asked for cannot be guaranteed.
    """
    messages = told = as_messages(body.messages)
    if config.system is not None and messages[0]["role"] != "system":
        messages = (Message(role="system", content=config.system), *messages)
    options = template_options(body.chat_template_kwargs, tokenizer)
    prompt = Prompt(id="messages", messages=messages, tools=tuple(body.offered))
    options = {"template_kwargs": options, "context": context, "continues": body.continues}
    with seeing(told, tokenizer, "messages"):
        ids = encode_prompt(prompt, tokenizer, **options).token_ids
    continued, form = said_last(body.messages) if body.continues else "", format_of(tokenizer)
    begun = form.thought.start in continued and form.thought.end not in continued
    thinks = begun or opens_thought(ids, tokenizer)
    grammar = _grammar(body, form, tokenizer, config)
    if grammar is not None:
        free = "none" if body.continues else thoughts_of(ids, tokenizer)
        grammar = with_thoughts(grammar, tokenizer, "begun" if thinks else free)
    if body.echo:
        return ChatPrompt(ids, said=continued, form=form, grammar=grammar)
    return ChatPrompt(ids, thinks=thinks, form=form, grammar=grammar)


def _grammar(
    body: ChatRequest, form: ReplyFormat, tokenizer: PreTrainedTokenizerBase, config: ServeConfig
) -> Grammar | None:
    """Return the grammar of the reply, but for its thoughts."""
    answer = body.answer_grammar
    if not body.forms and body.response_format is None and config.structured_outputs is not None:
        answer = config.structured_outputs.as_grammar("structured_outputs")
    choice, tools = body.tool_choice, [] if body.tool_choice == "none" else [*(body.tools or ())]
    named = choice.function.name if isinstance(choice, NamedTool) else None
    return reply_grammar(
        form,
        [tool.model_dump(exclude_none=True) for tool in tools],
        tokenizer,
        choice="auto" if choice in (None, "auto", "none") else "required",
        only=named,
        several=body.parallel_tool_calls is not False and named is None,
        answer=answer,
    )


def said_last(messages: Sequence[ChatMessage]) -> str:
    """Return the text of the last message."""
    return said(messages[-1].content)


# ---- the reply ----
class ChoiceStream:
    """Splits one choice's text, piece by piece, into what each piece adds."""

    def __init__(self, body: ChatRequest, prompt: ChatPrompt):
        tools = body.offered
        self._parser = prompt.form.parser(thinks=prompt.thinks, calls=bool(tools), tools=tools)
        self._form = prompt.form
        self._most_calls = 1 if body.parallel_tool_calls is False else None
        self._said: list[ChatDelta] = []
        self._echo = prompt.said
        self.calls: list[AnsweredCall] = []

    def push(self, text: str) -> list[ChatDelta]:
        echo, self._echo = self._echo, ""
        return self._deltas(self._parser.push(echo + text))

    def finish(self) -> list[ChatDelta]:
        return self._deltas(self._parser.finish())

    def message(self) -> AnsweredMessage:
        """Return all deltas so far, together."""
        content = "".join(delta.content or "" for delta in self._said)
        reasoning = [delta.reasoning_content for delta in self._said if delta.reasoning_content]
        calls = [call.model_copy(update={"index": None}) for call in self.calls]
        return AnsweredMessage(
            content=content if content or not calls else None,
            reasoning_content="".join(reasoning) if reasoning else None,
            tool_calls=calls or None,
        )

    def finish_reason(self, completion: Completion) -> Any:
        if self.calls and completion.finish_reason is FinishReason.STOP:
            return "tool_calls"
        return completion.finish_reason.value

    def _deltas(self, parts: Sequence[ReplyPart]) -> list[ChatDelta]:
        deltas = [delta for part in parts if (delta := self._delta(part)) is not None]
        self._said += deltas
        return deltas

    def _delta(self, part: ReplyPart) -> ChatDelta | None:
        if part.kind == "content":
            return ChatDelta(content=part.text)
        if part.kind == "reasoning":
            return ChatDelta(reasoning_content=part.text)
        if len(self.calls) == self._most_calls:
            return None
        function = AnsweredFunction(name=part.name, arguments=part.arguments)
        self.calls.append(AnsweredCall(index=len(self.calls), id=self._form.random_id(), function=function))
        return ChatDelta(tool_calls=[self.calls[-1]])


class _Chat:
    """Builds the answer to a chat request, whole or as a stream."""

    def __init__(self, asked: Admission, body: ChatRequest, prompt: ChatPrompt):
        self._asked, self._body, self._prompt = asked, body, prompt
        self._prompt_ids = list(asked.requests[0].prompt_ids) if body.return_token_ids else None

    def whole(self, completions: Sequence[Completion]) -> ChatCompletion:
        return ChatCompletion(
            id=self._asked.id,
            created=self._asked.created,
            model=self._asked.model,
            choices=[self._whole_choice(i, completion) for i, completion in enumerate(completions)],
            usage=self._asked.usage([completions]),
            system_fingerprint=str(self._asked.version),
            prompt_token_ids=self._prompt_ids,
        )

    def _whole_choice(self, index: int, completion: Completion) -> ChatChoice:
        reply, tokens = ChoiceStream(self._body, self._prompt), tokens_of(completion)
        reply.push(completion.text)
        reply.finish()
        return ChatChoice(
            index=index,
            message=reply.message(),
            logprobs=self._logprobs(tokens),
            finish_reason=reply.finish_reason(completion),
            token_ids=self._ids(tokens),
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the chunks; the first waits for the first token."""
        n = self._body.n or 1
        said, replies = (
            [self._asked.said() for _ in range(n)],
            [ChoiceStream(self._body, self._prompt) for _ in range(n)],
        )
        tokens = await self._asked.next()
        opening = [ChatChunkChoice(index=i, delta=ChatDelta(role="assistant", content="")) for i in range(n)]
        yield self._chunk(opening, prompt_token_ids=self._prompt_ids)
        while tokens is not None:
            for token in tokens:
                said[token.choice].hear(token)
            touched = sorted({token.choice for token in tokens})
            added = [self._added(i, said[i], replies[i].push(said[i].take_text())) for i in touched]
            if event := b"".join(added) if tokens else PING:
                yield event
            tokens = await self._asked.next()
        completions = (await self._asked.generation.completions())[0]
        for i, completion in enumerate(completions):
            deltas = [*replies[i].push(said[i].finish(completion)), *replies[i].finish()]
            last = self._added(i, said[i], deltas)
            yield last + self._added(i, said[i], [ChatDelta()], finish_reason=replies[i].finish_reason(completion))
        self._asked.finished([completions], finish_reason=replies[0].finish_reason(completions[0]))
        if self._body.stream_options and self._body.stream_options.include_usage:
            yield self._chunk([], usage=self._asked.usage([completions]))

    def _added(
        self, index: int, said: StreamedCompletion, deltas: Sequence[ChatDelta], *, finish_reason: Any = None
    ) -> bytes:
        """Return a chunk for each delta; the first has the tokens that came since the last one."""
        chunks = []
        for delta in deltas:
            tokens = said.take_tokens()
            choice = ChatChunkChoice(
                index=index,
                delta=delta,
                logprobs=self._logprobs(tokens) if tokens else None,
                finish_reason=finish_reason,
                token_ids=self._ids(tokens),
            )
            chunks.append(self._chunk([choice]))
        return b"".join(chunks)

    def _chunk(self, choices: list[ChatChunkChoice], **fields: Any) -> bytes:
        chunk = ChatCompletionChunk(
            id=self._asked.id,
            created=self._asked.created,
            model=self._asked.model,
            choices=choices,
            system_fingerprint=str(self._asked.version),
            **fields,
        )
        return sse(chunk.model_dump_json())

    def _ids(self, tokens: Sequence[Token]) -> list[int] | None:
        return [token.id for token in tokens] if self._body.return_token_ids else None

    def _logprobs(self, tokens: Sequence[Token]) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return ChatLogprobs(content=[_logprob(token, self._asked.tokenizer) for token in tokens])


def _logprob(token: Token, tokenizer: PreTrainedTokenizerBase) -> TokenLogprob:
    def fields(token_id: int, logprob: float) -> dict[str, Any]:
        text, spelled = token_text(token_id, tokenizer)
        return {"token": text, "logprob": sendable(logprob), "bytes": list(spelled)}

    top = [TopLogprob(**fields(token_id, logprob)) for token_id, logprob in token.top]
    return TokenLogprob(**fields(token.id, token.logprob), top_logprobs=top)
