"""POST /v1/completions/batch: `n` rollouts of each of many conversations, to be scored and posted to /v1/train/grpo.

All groups enter the engine together. Every completion draws with its own seed, even where prompts are equal. What
was sampled is kept in the ledger under its `rollout_id`, so that a reward for that id trains exactly these tokens, and
its text is the whole reply, the thinking too: a verifier should see what the policy did.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Request, Response

from groupwise.config.serve import ServeConfig
from groupwise.errors import ChatError, ContextLengthError, RequestError, StorageError
from groupwise.model.chat import encode_prompt, opens_thought
from groupwise.model.reply_formats.format import ReplyFormat
from groupwise.model.reply_formats.known import format_of
from groupwise.model.reply_formats.parser import joined
from groupwise.sdk.types import BatchAnswer, BatchCompletion
from groupwise.server.bodies import parse_body
from groupwise.server.chat import said_last
from groupwise.server.encode import template_options
from groupwise.server.event_stream import while_connected
from groupwise.server.generate import sendable
from groupwise.server.images import seeing
from groupwise.server.sampling import SAMPLING_ERRORS, Admission, Admissions, usage
from groupwise.server.schema_completions import BatchRequest
from groupwise.server.schema_messages import Conversation
from groupwise.server.schema_openai import TemplateOptions
from groupwise.server.state import given
from groupwise.server.wire import documented
from groupwise.store.ledger import Ledger, RolloutRecord
from groupwise.tasks.dialects.chat_form import Tool, as_messages
from groupwise.tasks.structured import answer_grammars
from groupwise.types import Completion, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from groupwise.model.load import LoadedModel
    from groupwise.sampler import LiveEngine
    from groupwise.server.reader import Reader, TextModel

_ERRORS, _CODES = (*SAMPLING_ERRORS, StorageError), ("batch_too_large", "unsupported_content", "invalid_image")

router = APIRouter(tags=["rollouts"])


@dataclass(frozen=True, kw_only=True)
class BatchParts:
    """The parts of a server that this route uses."""

    base: LoadedModel
    engine: LiveEngine
    reader: Reader
    admissions: Admissions
    ledger: Ledger


Batches = Annotated[BatchParts, given(BatchParts)]


@router.post("/v1/completions/batch", **documented(BatchRequest, BatchAnswer, errors=_ERRORS, codes=_CODES))
async def batch(http: Request, parts: Batches) -> Response:
    """Sample `n` completions of each conversation, by the active policy or the one that `model` or `adapter` names.

    The answer goes by prompt, then by completion; `prompt_index` and `completion_index` say which each one is.
    """
    body, prompts = await parts.reader.read_json(http, read_batch, context=parts.engine.context_length)
    async with AsyncExitStack() as resources:
        preview = said_last(body.prompts[0])
        asked = await parts.admissions.admit(
            http,
            body,
            prompts,
            resources=resources,
            kind="batchcmpl",
            preview=preview,
            interactive=False,
            grammars=answer_grammars(body.answer_grammar, prompts, parts.base.tokenizer),
        )
        groups = await while_connected(http, asked.generation.completions())
        asked.finished(groups, keep=False)
        records = _records(asked, groups)
        await asyncio.to_thread(parts.ledger.save_rollouts, records)
        return await asyncio.to_thread(lambda: asked.answer(_answer(asked, body, groups, records)))


def read_batch(
    raw: bytes, base: TextModel, config: ServeConfig, *, context: int
) -> tuple[BatchRequest, list[tuple[int, ...]]]:
    """Return a body and its prompts. Raises RequestError."""
    body = parse_body(raw, BatchRequest, config)
    options = {"tools": body.tools, "options": body.chat_template_kwargs, "context": context}
    return body, encode_conversations(body.prompts, base.tokenizer, **options, field="prompts")


def encode_conversations(
    conversations: Sequence[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Sequence[Tool] | None,
    options: TemplateOptions | None,
    context: int,
    field: str,
) -> list[tuple[int, ...]]:
    """Return the token ids of each conversation of a body's `field`. Raises RequestError, with its path, for one that
    the template refuses or that is far longer than the context."""
    offered, said = tuple(tool.as_dict() for tool in tools or ()), template_options(options, tokenizer)
    encoded = []
    for i, messages in enumerate(conversations):
        at = f"{field}[{i}]"
        prompt = Prompt(id=at, messages=(asked := as_messages(messages)), tools=offered)
        try:
            with seeing(asked, tokenizer, at):
                encoded.append(encode_prompt(prompt, tokenizer, template_kwargs=said, context=context).token_ids)
        except (ChatError, ContextLengthError) as error:
            message = f"{at}: {error.message}"
            raise RequestError(message, hint=error.hint, field=at, kind=error.kind, code=error.code) from error
    return encoded


def _records(asked: Admission, groups: Sequence[Sequence[Completion]]) -> list[RolloutRecord]:
    """Return what is kept of each completion, by prompt, then by completion, under their own ids."""
    return [replace(each, id=f"rollout-{secrets.token_hex(12)}") for each in asked.records(groups)]


def _answer(
    asked: Admission,
    body: BatchRequest,
    groups: Sequence[Sequence[Completion]],
    records: Sequence[RolloutRecord],
) -> BatchAnswer:
    places = [(p, j) for p, group in enumerate(groups) for j in range(len(group))]
    tokenizer = asked.tokenizer
    form = format_of(tokenizer)
    thinks = [opens_thought(request.prompt_ids, tokenizer) for request in asked.requests]
    return BatchAnswer(
        id=asked.id,
        created=asked.created,
        model=asked.model,
        completions=[
            BatchCompletion(
                prompt_index=p,
                completion_index=j,
                rollout_id=record.id,
                adapter=record.version,
                text=record.text,
                finish_reason=record.finish_reason,  # pyright: ignore[reportArgumentType]
                usage=usage(len(record.prompt_ids), len(record.completion_ids)),
                reasoning_content=_reasoning(record.text, form, thinks=thinks[p]),
                token_ids=list(record.completion_ids) if body.return_token_ids else None,
                prompt_token_ids=list(record.prompt_ids) if body.return_token_ids else None,
                logprobs=list(map(sendable, record.logprobs)) if body.logprobs else None,
            )
            for (p, j), record in zip(places, records, strict=True)
        ],
        usage=usage(sum(len(r.prompt_ids) for r in records), sum(len(r.completion_ids) for r in records)),
    )


def _reasoning(text: str, form: ReplyFormat, *, thinks: bool) -> str | None:
    """Return the thought in a reply, if there is one."""
    return joined(form.parser(thinks=thinks, calls=False).whole(text), "reasoning") or None
