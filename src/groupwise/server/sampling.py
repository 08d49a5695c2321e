"""Runs a sampling request: picks the version, sets the parameters, calls the engine, records the rollouts.

Admissions.admit  a version that stays loaded until the answer is over, and a `Generation` under it
Admission         what every route that samples needs from there on
ScoreThreads      wait for the scores of prompts
sampling_params   what a body asks for -> SamplingParams, checked against the model's context
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

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
    GrammarError,
    GroupwiseError,
    ModelError,
    OverloadedError,
    RequestError,
)
from groupwise.model.image_tokens import is_of_image
from groupwise.sampler import LiveEngine
from groupwise.sdk.types import CachedTokens, Usage
from groupwise.server.event_stream import PING_S, ClientGone
from groupwise.server.generate import Generation, SlowReaderError, StreamedCompletion, Token
from groupwise.server.metrics import Recorder, RequestRecord
from groupwise.server.places import give_back
from groupwise.server.policies import Policies
from groupwise.server.schema_openai import Sampling
from groupwise.server.usage import KeyUsage, QuotaError
from groupwise.store.ledger import RolloutRecord
from groupwise.tasks.reply import TextStream
from groupwise.types import Completion, Grammar, PolicyVersion, SamplingParams, SamplingRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from groupwise.config.serve import ServeConfig
    from groupwise.model.load import LoadedModel
    from groupwise.server.feedback import AnswerLog
    from groupwise.server.gate import Gatekeeper
    from groupwise.store.keys import Key

COMPILE_S = 15.0  # for a grammar, with those that wait before it

INTERACTIVE = 8  # a request for at most so many completions has a person waiting; one for more is a batch
SCORE_THREADS = 16
IN_PERSON = 8  # requests of one address at once that are; what it sends besides gives way to others, as a batch does

T = TypeVar("T")

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
    QuotaError,
)  # what every route that samples may answer


@dataclass(frozen=True, kw_only=True)
class Admission:
    """A request that was admitted: which version answers it, and what the engine does for it."""

    admissions: Admissions
    id: str
    created: int
    model: str
    version: PolicyVersion
    requests: tuple[SamplingRequest, ...]
    generation: Generation
    record: RequestRecord
    counts: bool  # in a trial: a person asked, and named no version
    key: Key | None  # that the request has, where it is a named one

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.admissions.base.tokenizer

    @property
    def engine(self) -> LiveEngine:
        return self.admissions.engine

    @property
    def headers(self) -> dict[str, str]:
        return {"x-adapter-version": str(self.version)}

    def answer(self, answer: BaseModel) -> Response:
        return Response(answer.model_dump_json(), media_type="application/json", headers=self.headers)

    def said(self) -> StreamedCompletion:
        """Return what is said for one completion of a stream."""
        params = self.requests[0].params
        return StreamedCompletion(TextStream(self.tokenizer, params))

    async def next(self) -> list[Token] | None:
        """`Generation.next`, recorded; no tokens where it is time for a ping."""
        tokens = await self.generation.next(PING_S)
        self.admissions.recorder.tokens(self.record, len(tokens or ()))
        return tokens

    def usage(self, groups: Sequence[Sequence[Completion]]) -> Usage:
        """Return the token counts: each prompt counts once, and every sampled token, also the one that ended a turn."""
        prompt = sum(len(request.prompt_ids) for request in self.requests)
        completion = sum(len(completion.token_ids) for group in groups for completion in group)
        known = [group[0].cached_tokens for group in groups]
        cached = None if None in known else CachedTokens(cached_tokens=sum(each or 0 for each in known))
        return usage(prompt, completion).model_copy(update={"prompt_tokens_details": cached})

    def records(self, groups: Sequence[Sequence[Completion]]) -> list[RolloutRecord]:
        """Return what is kept of each completion, by prompt, then by completion. The first has the answer's own id, the
        others the id, a hyphen and their index."""
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
        if keep and self.admissions.config.keep_answers:
            self.admissions.answers.keep([each for each in self.records(groups) if each.completion_ids])
        if self.admissions.gate is not None and self.admissions.gate.shadow is not None:
            self.admissions.gate.shadow.offer(self, groups)
        first, used = groups[0][0], self.usage(groups)
        self.admissions.recorder.finished(
            self.record,
            finish_reason=finish_reason or first.finish_reason.value,
            prompt_tokens=used.prompt_tokens,
            completion_tokens=used.completion_tokens,
            cached_tokens=None if used.prompt_tokens_details is None else used.prompt_tokens_details.cached_tokens,
            completion=first.text,
        )
        self._used(used.prompt_tokens, used.completion_tokens)

    def _used(self, prompt_tokens: int, completion_tokens: int) -> None:
        if self.key is not None:
            self.admissions.usage.sampled(self.key, prompt_tokens, completion_tokens)

    def failed(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Record how a request ended that did not finish; an exit callback."""
        reasons = {DeadlineError: "timeout", ClientGone: "client_disconnect", SlowReaderError: "client_disconnect"}
        prompt = sum(len(request.prompt_ids) for request in self.requests)
        reason = reasons.get(kind, "error") if kind is not None else "error"
        trial = self.admissions.policies.trial
        if trial is not None and self.counts and isinstance(error, Exception) and not self._is_the_clients(error):
            trial.failed(self.version)
        if not self.record.over:
            self._used(prompt, self.generation.sampled)
        self.admissions.recorder.finished(
            self.record, finish_reason=reason, prompt_tokens=prompt, completion_tokens=self.generation.sampled
        )

    def _is_the_clients(self, error: Exception) -> bool:
        """Return whether the client caused an error: it left, asked for what is refused, or for a grammar that takes
        long."""
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


class ScoreThreads:
    """Waits in its own threads while the engine scores prompts, `SCORE_THREADS` at a time: the threads that all routes
    share are few, and must not wait for an engine."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(SCORE_THREADS, "groupwise-score")

    async def run(self, score: Callable[[], T]) -> T:
        """Return the result of `score`, which asks the engine; earlier calls come first."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, score)

    def close(self) -> None:
        """Give up the calls that have not begun, and end the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, kw_only=True)
class Admissions:
    """Admits the requests that sample, of one server.

    Args:
        usage: counts what named keys use, and bounds it.
        gate: offers answers to a version that is on trial as a shadow; None without a gate.
        under_way: the number of requests for completions of each address. For the event loop.
        scoring: the threads that wait while prompts are scored.
    """

    config: ServeConfig
    base: LoadedModel
    engine: LiveEngine
    policies: Policies
    recorder: Recorder
    answers: AnswerLog
    usage: KeyUsage
    gate: Gatekeeper | None
    under_way: Counter[str] = field(default_factory=Counter)
    scoring: ScoreThreads = field(default_factory=ScoreThreads, repr=False)

    async def admit(
        self,
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
            QuotaError: the request's key has used up its tokens of the day.
            ModelError, AdapterNotFoundError, AdapterError, DeadlineError, OverloadedError, RequestError: as
                `Policies.lease`, which may wait for room within the deadline of the request.
        """
        began = asyncio.get_running_loop().time()
        prompts, params = self._asked_of(body, prompts, grammars or [None] * len(prompts), top_logprobs=top_logprobs)
        sender = http.state.sender
        if (key := http.state.caller and http.state.caller.key) is not None:
            self.usage.check_tokens(key)
        held = await compiled(self.engine, grammars, sender=sender)  # until the engine has them
        whole_s, first_s = self.config.request_timeout_s, self.config.first_token_timeout_s
        patience_s = min(whole_s, first_s) if stream else whole_s
        version = await resources.enter_async_context(
            self.policies.lease(
                model=body.model,
                adapter=body.adapter,
                adapters=body.adapters,
                patience_s=patience_s,
                session=_session(http) if interactive else None,
            )
        )
        named = (
            body.adapter is not None or body.adapters is not None or body.model not in (None, self.config.served_name)
        )
        counts = interactive and not named
        if counts and self.policies.trial is not None:
            self.policies.trial.answered(version)
        n = body.n or 1
        interactive = interactive and n * len(prompts) <= INTERACTIVE and self.under_way[sender] < IN_PERSON
        resources.enter_context(_one_more(self.under_way, sender))
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
            self.engine,
            () if body.most_tokens == 0 else requests,
            timeout_s=whole_s,
            stream=stream,
            counted=key is not None and key.tokens_per_day is not None,
            first_token_s=first_s,
            began=began,
        )
        held.clear()
        resources.callback(generation.cancel)
        model = body.model or self.config.served_name
        id = f"{kind}{'' if kind.endswith('_') else '-'}{secrets.token_hex(12)}"
        admission = Admission(
            admissions=self,
            id=id,
            created=int(time.time()),
            model=model,
            version=version,
            counts=counts,
            key=key,
            requests=requests,
            generation=generation,
            record=self.recorder.request_started(
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

    def _asked_of(
        self,
        body: Sampling,
        prompts: Sequence[Sequence[int]],
        grammars: Sequence[Grammar | None],
        *,
        top_logprobs: int,
    ) -> tuple[list[Sequence[int]], list[SamplingParams]]:
        """Return the prompts, cut as `body` wants them, and how each is sampled. Raises RequestError,
        ContextLengthError."""
        _check_biased(body, self.base.vocabulary)
        most_tokens, context = self.config.max_tokens_default, self.engine.context_length
        cut = [truncated(body, ids, context=context) for ids in prompts]
        options = {"context": context, "most_tokens": most_tokens, "top_logprobs": top_logprobs}
        params = [sampling_params(body, ids, index=i, **options) for i, ids in enumerate(cut)]
        return cut, [replace(one, grammar=grammar) for one, grammar in zip(params, grammars, strict=True)]


@contextmanager
def _one_more(under_way: Counter[str], sender: str) -> Iterator[None]:
    """Context manager: the sender has one request more."""
    under_way[sender] += 1
    try:
        yield
    finally:
        give_back(under_way, sender)


def _session(http: Request) -> str:
    """Return what has the same answerer while a version is on trial: the header x-session-id, or else the request
    alone. Not the body's `user`: were all that a person asks answered by one version, a canary would compare the habits
    of the few persons who met the new one with those of all others."""
    return http.headers.get("x-session-id") or secrets.token_hex(8)


async def compiled(engine: LiveEngine, grammars: Sequence[Grammar | None], *, sender: str) -> list[Future[Any]]:
    """Wait until the engine has the grammars; it has them as long as what is returned is held, and submitting a request
    then waits for none. Raises GrammarError, also for one that takes too long, and what `LiveEngine.prepare` raises."""
    held: list[Future[Any]] = []
    for grammar in dict.fromkeys(each for each in grammars if each is not None):
        try:
            async with asyncio.timeout(COMPILE_S):
                held.append(engine.prepare(grammar, sender=sender))
                await asyncio.shield(asyncio.wrap_future(held[-1]))
        except TimeoutError:
            message = f"{grammar.field} was not compiled after {COMPILE_S:g} seconds"
            raise GrammarError(message, hint="make it smaller, or try again", field=grammar.field) from None
    return held


def sampling_params(
    body: Sampling, prompt_ids: Sequence[int], *, context: int, most_tokens: int, index: int = 0, top_logprobs: int = 0
) -> SamplingParams:
    """Return how `body` wants its `index`-th prompt sampled.

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
    """Return the last of the prompt's tokens, as many as the body wants to keep. Raises RequestError for a prompt with
    images, through which the cut could go."""
    most = body.truncate_prompt_tokens
    if most is not None and any(map(is_of_image, prompt_ids)):
        message = "truncate_prompt_tokens cuts texts, and the prompt has an image"
        raise RequestError(message, hint="leave it out", field="truncate_prompt_tokens")
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
    """Return the seed of a request's `index`-th prompt: its own for the first, so that a batch of one is like a
    chat."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed},{index}".encode(), digest_size=8).digest(), "little") >> 1
