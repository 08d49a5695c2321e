"""From a body and its prompts to an engine at work: which version answers, how it samples, and what is recorded.

admit             a version that stays loaded until the answer is over, and a `Generation` under it
Admission         what every route that samples needs from there on
sampling_params   what a body asks for -> SamplingParams, checked against the model's context
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from groupwise.errors import (
    AdapterError,
    AdapterNotFoundError,
    ChatError,
    ContextLengthError,
    DeadlineError,
    EngineError,
    ModelError,
    OverloadedError,
    RequestError,
)
from groupwise.server.events import PING_S, ClientGone
from groupwise.server.generate import Generation, Said, SlowReaderError, Token
from groupwise.server.protocol import CachedTokens, Sampling, Usage
from groupwise.server.recorder import RequestRecord
from groupwise.server.state import Server, server_of
from groupwise.server.text import TextStream
from groupwise.types import Completion, PolicyVersion, SamplingParams, SamplingRequest

INTERACTIVE = 8  # a request for this many completions is somebody waiting; for more it is a batch
SAMPLING_ERRORS = (
    RequestError,
    ChatError,
    ContextLengthError,
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

    @property
    def headers(self) -> dict[str, str]:
        return {"x-adapter-version": str(self.version)}

    def answer(self, answer: BaseModel) -> Response:
        return Response(answer.model_dump_json(), media_type="application/json", headers=self.headers)

    def said(self) -> Said:
        """For one completion of a stream."""
        params = self.requests[0].params
        return Said(TextStream(self.server.base.tokenizer, params))

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

    def finished(self, groups: Sequence[Sequence[Completion]], *, finish_reason: str | None = None) -> None:
        """Record that all completions are there."""
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
        self.server.recorder.finished(self.record, finish_reason=reason, prompt_tokens=prompt)


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
) -> Admission:
    """Choose the version, keep it loaded until `resources` are closed, and give the engine everything at once.

    `kind` begins the id; `preview` stands for the prompts in the list of recent requests; `cache` is the
    `SamplingRequest`'s. With `max_tokens: 0` the engine gets nothing to do.

    Raises:
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
    whole_s, first_s = server.config.request_timeout_s, server.config.first_token_timeout_s
    patience_s = min(whole_s, first_s) if stream else whole_s
    version = await resources.enter_async_context(
        server.policies.lease(model=body.model, adapter=body.adapter, adapters=body.adapters, patience_s=patience_s)
    )
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
    model, id = body.model or server.config.served_name, f"{kind}-{secrets.token_hex(12)}"
    admission = Admission(
        server=server,
        id=id,
        created=int(time.time()),
        model=model,
        version=version,
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
        raise RequestError(message, hint=f"lower min_tokens to {most} or less, or raise max_tokens", param="min_tokens")
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
            raise RequestError(message, hint="give ids of this model's tokenizer", param=f"logit_bias.{token}")


def prompt_seed(seed: int, index: int) -> int:
    """The seed of a request's `index`-th prompt: its own for the first, so that a batch of one is like a chat."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed},{index}".encode(), digest_size=8).digest(), "little") >> 1
