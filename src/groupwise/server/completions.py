"""POST /v1/completions: raw prompts (texts or token ids) and what follows them, whole or streamed.

The prompt is sampled as it is: special tokens in it count. Choices are ordered by prompt, then by `n`. With `echo`
the prompt stands in front of the completion; its log-probabilities and their alternatives come from one forward pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Request, Response

from groupwise.config.serve import ServeConfig
from groupwise.errors import RequestError
from groupwise.model.chat import encode_prompt
from groupwise.model.chat_length import too_long
from groupwise.model.image_tokens import is_of_image, vision_of
from groupwise.sdk.types import Usage
from groupwise.server.bodies import parse_body
from groupwise.server.chat import ChatParts
from groupwise.server.event_stream import PING, EventStream, sse, while_connected
from groupwise.server.generate import Token, sendable, tokens_of
from groupwise.server.sampling import SAMPLING_ERRORS, Admission
from groupwise.server.schema_completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    PromptLogprob,
    Raw,
    TextCompletion,
)
from groupwise.server.state import given
from groupwise.server.wire import documented
from groupwise.tasks.reply import Detokenizer, plain_text, token_text
from groupwise.types import Completion, FinishReason, Prompt

if TYPE_CHECKING:
    from groupwise.model.load import LoadedModel
    from groupwise.server.reader import TextModel

router = APIRouter(tags=["OpenAI"])


@dataclass(frozen=True, kw_only=True)
class CompletionParts(ChatParts):
    """The parts of a server that these routes use."""

    base: LoadedModel


Completions = Annotated[CompletionParts, given(CompletionParts)]


@router.post(
    "/v1/completions",
    **documented(CompletionRequest, TextCompletion, errors=SAMPLING_ERRORS, codes=["batch_too_large"], streams=True),
)
async def completions(http: Request, parts: Completions) -> Response:
    """Write what follows each prompt, by the active policy or the one that `model` or `adapter` names.

    `prompt` is a text, token ids, or a list of either. `max_tokens: 0` with `echo` and `logprobs` only scores.
    """
    body, prompts = await parts.reader.read_json(http, read_completions, context=parts.engine.context_length)
    async with AsyncExitStack() as resources:
        first = body.prompt[0]
        asked = await parts.admissions.admit(
            http,
            body,
            prompts,
            resources=resources,
            kind="cmpl",
            preview=first if isinstance(first, str) else plain_text(first[:256], parts.base.tokenizer),
            stream=bool(body.stream),
            top_logprobs=body.logprobs or 0,
            grammars=[body.answer_grammar] * len(prompts),
        )
        answer = _Answer(asked, body)
        if not body.stream:
            scored, groups = await while_connected(http, answer.sampled())
            asked.finished(groups)
            return await asyncio.to_thread(lambda: asked.answer(answer.whole(scored, groups)))
        events = answer.events()
        first = await while_connected(http, anext(events))
        return EventStream(first, events, resources=resources.pop_all(), headers=asked.headers, without=parts.paths)


def read_completions(
    raw: bytes, base: TextModel, config: ServeConfig, *, context: int
) -> tuple[CompletionRequest, list[tuple[int, ...]]]:
    """Return a body and its prompts. Raises RequestError, ContextLengthError."""
    body = parse_body(raw, CompletionRequest, config)
    is_cut = body.truncate_prompt_tokens is not None
    prompts = encode_raw(body.prompt, base, context=None if is_cut else context)
    shown = "echo" if body.echo else "prompt_logprobs" if body.prompt_logprobs is not None else None
    if shown is not None and any(is_of_image(token) for ids in prompts for token in ids):
        message = f"{shown} is of texts, and the prompt has the token ids of an image"
        raise RequestError(message, hint="leave it out", field=shown)
    return body, prompts


def encode_raw(prompts: Sequence[Raw], base: TextModel, *, context: int | None) -> list[tuple[int, ...]]:
    """Return the token ids of each prompt. Raises RequestError for an id that the model does not have,
    ContextLengthError for a text that is far longer than the context; without `context` any length will do."""
    encoded = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            asked = Prompt(id=f"prompt[{i}]", text=prompt)
            prompt = encode_prompt(asked, base.tokenizer, context=context).token_ids
        elif not base.has(prompt):
            what = f"the prompt has the token id {max(prompt)}; this model has the ids 0 to {base.vocabulary - 1}"
            if vision_of(base.tokenizer) is not None:
                what += ", and those of whole images that were posted here"
            raise RequestError(what, hint="encode the prompt with this model's tokenizer", field="prompt")
        elif context is not None and len(prompt) > context:
            raise too_long(f"{len(prompt)} tokens", context)
        encoded.append(prompt)
    return encoded


@dataclass(frozen=True)
class _Row:
    """A token of the prompt or of the completion, as the log-probabilities list it. The first of all has none."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] | None = None


class _Choice:
    """Builds one choice of an answer: holds the echoed text in front of it, the sampled tokens that are not sent yet,
    and the offset of the next token's text."""

    def __init__(self, index: int, asked: Admission, prompt: int, raw: Raw, body: CompletionRequest):
        tokenizer = asked.tokenizer
        self.index, self.prompt_ids = index, asked.requests[prompt].prompt_ids
        self.said = asked.said()
        decoded = plain_text(self.prompt_ids, tokenizer) if body.echo else ""
        as_given = body.echo and isinstance(raw, str) and body.truncate_prompt_tokens is None
        self.echoed = str(raw) if as_given else decoded
        self._detokenizer = Detokenizer(tokenizer)
        self._at = len(self.echoed) - len(decoded)  # what the tokenizer puts in front by itself is not shown

    def offset(self, token_id: int) -> int:
        """Return where in the choice's text the next token, `token_id`, begins."""
        at = self._at
        self._at += len(self._detokenizer.push(token_id))
        return max(0, at)


class _Answer:
    """Builds the answer to a completions request, whole or as a stream."""

    def __init__(self, asked: Admission, body: CompletionRequest):
        self._asked, self._body, self._n = asked, body, body.n or 1
        self._tokenizer = asked.tokenizer
        self._read: list[list[dict[str, PromptLogprob] | None]] = []  # of each prompt, what is told of its tokens
        self._choices = [
            _Choice(p * self._n + j, asked, p, raw, body) for p, raw in enumerate(body.prompt) for j in range(self._n)
        ]

    async def sampled(self) -> tuple[list[list[_Row]], list[list[Completion]]]:
        """Return for each prompt its own tokens with their log-probabilities, where they are shown, and its
        completions."""
        if self._body.prompt_logprobs is not None:
            self._read = [await self._prompt_logprobs(each.prompt_ids) for each in self._asked.requests]
        return await self._scored(), await self._completions()

    def whole(self, scored: Sequence[Sequence[_Row]], groups: Sequence[Sequence[Completion]]) -> TextCompletion:
        flat = [completion for group in groups for completion in group]
        choices = []
        for choice, completion in zip(self._choices, flat, strict=True):
            tokens = tokens_of(completion)
            rows = [*scored[choice.index // self._n], *_rows(tokens)]
            text = choice.echoed + completion.text
            choices.append(self._choice(choice, text, tokens, rows=rows, opens=True, ends=completion))
        return self._answer(choices, usage=self._asked.usage(groups))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the chunks; the first waits for the first token."""
        scored = await self._scored()
        tokens = await self._asked.next()
        opening = [self._chunk(c, c.echoed, [], rows=scored[c.index // self._n], opens=True) for c in self._choices]
        yield b"".join(opening)
        while tokens is not None:
            for token in tokens:
                self._choices[token.prompt * self._n + token.choice].said.hear(token)
            new = [(choice, text) for choice in self._choices if (text := choice.said.take_text())]
            added = [self._chunk(choice, text, choice.said.take_tokens()) for choice, text in new]
            if event := b"".join(added) if tokens else PING:
                yield event
            tokens = await self._asked.next()
        groups = await self._completions()
        flat = [completion for group in groups for completion in group]
        for choice, completion in zip(self._choices, flat, strict=True):
            rest = choice.said.finish(completion)
            yield self._chunk(choice, rest, choice.said.take_tokens(), ends=completion)
        self._asked.finished(groups)
        if self._body.stream_options and self._body.stream_options.include_usage:
            yield sse(self._answer([], usage=self._asked.usage(groups)).model_dump_json())

    async def _completions(self) -> list[list[Completion]]:
        if self._body.most_tokens != 0:
            return await self._asked.generation.completions()
        empty = Completion(token_ids=(), logprobs=(), text="", finish_reason=FinishReason.LENGTH, cached_tokens=0)
        return [[empty] * self._n for _ in self._asked.requests]

    async def _scored(self) -> list[list[_Row]]:
        """Return the tokens of each prompt, where they are to be shown with their log-probabilities."""
        if not self._body.echo or self._body.logprobs is None:
            return [[] for _ in self._asked.requests]
        engine, version = self._asked.engine, self._asked.version
        scored = []
        for request in self._asked.requests:
            first, *others = request.prompt_ids
            options = {"temperature": request.params.temperature, "top": self._body.logprobs}
            score = partial(engine.score_top, [first], others, version, **options)
            rows = await self._asked.admissions.scoring.run(score)
            scored.append([_Row(first), *(_Row(i, *row) for i, row in zip(others, rows, strict=True))])
        return scored

    async def _prompt_logprobs(self, ids: tuple[int, ...]) -> list[dict[str, PromptLogprob] | None]:
        """Return for each token of a prompt it and the likeliest in its place, by their ids; None for the first."""
        engine, version, top = self._asked.engine, self._asked.version, self._body.prompt_logprobs
        score = partial(engine.score_top, ids[:1], ids[1:], version, top=top or 0)
        rows = await self._asked.admissions.scoring.run(score)

        def told(pairs: Sequence[tuple[int, float]]) -> dict[str, PromptLogprob]:
            texts = {id: token_text(id, self._tokenizer)[0] for id, _ in pairs}
            return {str(id): PromptLogprob(logprob=sendable(x), decoded_token=texts[id]) for id, x in pairs}

        return [None, *(told([(id, own), *likeliest]) for id, (own, likeliest) in zip(ids[1:], rows, strict=True))]

    # ---- the shapes ----
    def _chunk(self, choice: _Choice, text: str, tokens: Sequence[Token], **options: Any) -> bytes:
        rows = [*options.pop("rows", ()), *_rows(tokens)]
        return sse(self._answer([self._choice(choice, text, tokens, rows=rows, **options)]).model_dump_json())

    def _choice(
        self,
        choice: _Choice,
        text: str,
        tokens: Sequence[Token],
        *,
        rows: Sequence[_Row],
        opens: bool = False,
        ends: Completion | None = None,
    ) -> CompletionChoice:
        """`opens` and `ends`: whether it is the first and the last that is said of this choice."""
        ids = self._body.return_token_ids
        return CompletionChoice(
            index=choice.index,
            text=text,
            logprobs=self._logprobs(choice, rows),
            finish_reason=None if ends is None else ends.finish_reason.value,  # pyright: ignore[reportArgumentType]
            token_ids=[token.id for token in tokens] if ids else None,
            prompt_token_ids=list(choice.prompt_ids) if ids and opens else None,
            prompt_logprobs=self._read[choice.index // self._n] if self._read else None,
        )

    def _logprobs(self, choice: _Choice, rows: Sequence[_Row]) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None

        def alternatives(row: _Row) -> dict[str, float] | None:
            if row.top is None:
                return None
            likeliest_last = [(self._text(i), sendable(logprob)) for i, logprob in reversed(row.top)]
            return dict(reversed(dict(likeliest_last).items()))  # of tokens that look alike, the likelier

        return CompletionLogprobs(
            tokens=[self._text(row.id) for row in rows],
            token_logprobs=[None if row.logprob is None else sendable(row.logprob) for row in rows],
            top_logprobs=[alternatives(row) for row in rows] if self._body.logprobs else None,
            text_offset=[choice.offset(row.id) for row in rows],
        )

    def _text(self, token_id: int) -> str:
        return token_text(token_id, self._tokenizer)[0]

    def _answer(self, choices: list[CompletionChoice], *, usage: Usage | None = None) -> TextCompletion:
        return TextCompletion(
            id=self._asked.id,
            created=self._asked.created,
            model=self._asked.model,
            choices=choices,
            system_fingerprint=str(self._asked.version),
            usage=usage,
        )


def _rows(tokens: Sequence[Token]) -> list[_Row]:
    return [_Row(token.id, token.logprob, token.top) for token in tokens]
