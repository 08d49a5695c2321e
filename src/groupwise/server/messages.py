"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API, for its clients and harnesses."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from fastapi import APIRouter, Request, Response

from groupwise.sdk.types import Answer
from groupwise.server.bodies import parse_body
from groupwise.server.chat import Chats
from groupwise.server.dialects import Dialect, answer, read_form
from groupwise.server.sampling import SAMPLING_ERRORS
from groupwise.server.wire import documented
from groupwise.tasks.dialects.anthropic import PING, CountRequest, MessagesRequest, MessageWriter

if TYPE_CHECKING:
    from groupwise.config.serve import ServeConfig
    from groupwise.server.chat import ChatPrompt
    from groupwise.server.reader import TextModel
    from groupwise.server.schema_openai import ChatRequest

R = TypeVar("R", bound=CountRequest)
DIALECT = Dialect(kind="msg_", ping=PING.bytes)
CODES = ("unsupported_content", "invalid_image", "unsupported_parameter", "limit_exceeded")

router = APIRouter(tags=["Anthropic"])


class InputTokens(Answer):
    """The number of tokens that the policy would be shown for a request."""

    input_tokens: int


@router.post("/v1/messages", **documented(MessagesRequest, errors=SAMPLING_ERRORS, codes=CODES, streams=True))
async def messages(http: Request, parts: Chats) -> Response:
    """Write the next turn of a conversation in the form of Anthropic's Messages API, whole or streamed.

    The policy, the prompt and the reply are those of /v1/chat/completions. Errors are in Anthropic's envelope.
    """
    body, prompt = await parts.reader.read_json(
        http, read_messages, context=parts.engine.context_length, model=MessagesRequest
    )
    return await answer(
        http, parts, DIALECT, body, prompt, writer=lambda asked: MessageWriter(id=asked.id, model=asked.model)
    )


@router.post("/v1/messages/count_tokens", **documented(CountRequest, InputTokens, errors=SAMPLING_ERRORS, codes=CODES))
async def count_tokens(http: Request, parts: Chats) -> InputTokens:
    """Count the tokens of such a request, as the chat template renders it."""
    _, prompt = await parts.reader.read_json(
        http, read_messages, context=parts.engine.context_length, model=CountRequest
    )
    return InputTokens(input_tokens=len(prompt.ids))


def read_messages(
    raw: bytes, base: TextModel, config: ServeConfig, *, context: int, model: type[R]
) -> tuple[ChatRequest, ChatPrompt]:
    """Return a body in the chat form, and its prompt. Raises RequestError, ChatError, ContextLengthError."""
    asked = parse_body(raw, model, config)
    return read_form(asked, asked.chat(), base, config, context=context)
