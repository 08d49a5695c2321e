"""/v1/responses: OpenAI's Responses API, for its clients and agents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Request, Response

from groupwise.sdk.types import Answer
from groupwise.server.bodies import check_content_type, parse_body
from groupwise.server.chat import ChatParts
from groupwise.server.dialects import Dialect, answer, read_form
from groupwise.server.reader import receive_body
from groupwise.server.sampling import SAMPLING_ERRORS
from groupwise.server.state import given
from groupwise.server.wire import documented
from groupwise.tasks.dialects.responses import (
    ResponseNotFoundError,
    ResponsesRequest,
    ResponseStore,
    ResponseWriter,
)

if TYPE_CHECKING:
    from groupwise.config.serve import ServeConfig
    from groupwise.server.chat import ChatPrompt
    from groupwise.server.reader import TextModel
    from groupwise.server.schema_openai import ChatRequest

DIALECT = Dialect(kind="resp_")
CODES = (
    "unsupported_content",
    "invalid_image",
    "unsupported_parameter",
    "limit_exceeded",
    "previous_response_not_found",
)

router = APIRouter(tags=["OpenAI"])


@dataclass(frozen=True, kw_only=True)
class ResponseParts(ChatParts):
    """The parts of a server that these routes use."""

    responses: ResponseStore


Responses = Annotated[ResponseParts, given(ResponseParts)]


class DeletedResponse(Answer):
    """A response that is no longer kept."""

    id: str
    object: str = "response"
    deleted: bool = True


@router.post("/v1/responses", **documented(ResponsesRequest, errors=SAMPLING_ERRORS, codes=CODES, streams=True))
async def responses(http: Request, parts: Responses) -> Response:
    """Write the next turn of a conversation in the form of OpenAI's Responses API, whole or streamed.

    The policy, the prompt and the reply are those of /v1/chat/completions. Answers are kept in memory for
    `previous_response_id`, the newest 1024 of them.
    """
    reader, context = parts.reader, parts.engine.context_length
    async with receive_body(http, reader) as body:
        check_content_type(http)
        asked, read = await reader.read(http, body, read_responses, context=context)
        history = parts.responses.history(asked.previous_response_id)
        if read is None:
            _, read = await reader.read(http, body, read_responses, context=context, history=history)
    assert read is not None
    return await answer(
        http,
        parts,
        DIALECT,
        *read,
        writer=lambda admission: ResponseWriter(id=admission.id, model=admission.model, request=asked),
        keep=lambda told: parts.responses.keep(asked, told, history),
    )


@router.get("/v1/responses/{response_id}", **documented(errors=(ResponseNotFoundError,)))
async def stored_response(response_id: str, parts: Responses) -> Response:
    """Show a response that is kept."""
    answer = parts.responses.find(response_id).answer
    return Response(json.dumps(answer), media_type="application/json")


@router.delete("/v1/responses/{response_id}", **documented(answer=DeletedResponse, errors=(ResponseNotFoundError,)))
async def delete_response(response_id: str, parts: Responses) -> DeletedResponse:
    """Forget a response."""
    parts.responses.delete(response_id)
    return DeletedResponse(id=response_id)


def read_responses(
    raw: bytes,
    base: TextModel,
    config: ServeConfig,
    *,
    context: int,
    history: Sequence[dict[str, Any]] | None = None,
) -> tuple[ResponsesRequest, tuple[ChatRequest, ChatPrompt] | None]:
    """Return a body, and its chat form and prompt; None for these while its `history` is not known. Raises
    RequestError, ChatError, ContextLengthError."""
    asked = parse_body(raw, ResponsesRequest, config)
    if asked.previous_response_id is not None and history is None:
        return asked, None
    return asked, read_form(asked, asked.chat(history or ()), base, config, context=context)
