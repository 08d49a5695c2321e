"""Sampling: messages in, `n` completions with their tokens and log-probabilities out, each with a status.

    completions = await sampler.sample_with_tokens(messages, n=8, max_tokens=256)

The chat template and the tokenizer run here; the engine sees and returns token ids, which are never decoded and encoded
again. `n` completions are `n` requests under way at once, as far as `concurrency` lets them, and those of calls that
are gathered are admitted together (`outbox`). One that fails costs itself, and there are always `n` entries:

    ok           it ended by itself
    truncated    it was cut at max_tokens, or where the sequence may not be longer
    overlong     the prompt leaves no room: nothing was sampled
    failed       the request did; `error` says how
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from numbers import Integral
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from groupwise.errors import ConfigError, ContextLengthError, DataError
from groupwise.model.chat import encode_prompt
from groupwise.model.image_tokens import is_of_image
from groupwise.model.load import load_tokenizer
from groupwise.recorded import RoutedExperts, SamplingMask
from groupwise.sdk.concurrency import AdaptiveConcurrency
from groupwise.sdk.datums import Datum, datum_of
from groupwise.sdk.deployment import Deployment
from groupwise.sdk.outbox import Outbox
from groupwise.sdk.sections import require_tokenizer
from groupwise.seeds import seed_of
from groupwise.tasks.row_images import with_images
from groupwise.tasks.structured import answer_grammars
from groupwise.types import (
    Completion,
    FinishReason,
    Grammar,
    Message,
    PolicyVersion,
    Prompt,
    SamplingParams,
    SamplingRequest,
)


class Status(StrEnum):
    """The outcome of one of the `n` completions; the values are explained at the head of this file."""

    OK = "ok"
    TRUNCATED = "truncated"
    OVERLONG = "overlong"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class SampledCompletion:
    """Holds one of the `n` results of a request. If no token was sampled, `full_tokens` is the prompt and there are no
    log-probabilities.

    `inference_logprobs` (nats, at the sampling temperature) has an entry for each of the N `full_tokens`: None for the
    first token, which has no predecessor, and, without `echo`, for all tokens of the prompt. The trainer takes `[1:]`.
    `kept` is the part of the vocabulary from which each token of the completion was sampled, with top_p or top_k; its
    log-probabilities are then under the policy restricted to this part, and the trainer computes the same for
    `datum()`. If the engine does not record the part (vLLM), all entries are None, and a policy loss refuses the
    completion. `routed_experts` are the experts that a mixture's routers chose for the first N - 1 tokens; `datum()`
    copies them, so that the trainer computes with the same experts. None if the engine does not record them.
    """

    status: Status
    full_tokens: tuple[int, ...]
    prompt_len: int
    text: str = ""
    inference_logprobs: tuple[float | None, ...] = ()
    finish_reason: str | None = None
    version: PolicyVersion = field(default_factory=PolicyVersion)
    error: str | None = None
    kept: SamplingMask | None = None
    routed_experts: RoutedExperts | None = None

    @property
    def completion_len(self) -> int:
        return len(self.full_tokens) - self.prompt_len

    @property
    def sampled(self) -> bool:
        """Return whether there is something to score and to train on."""
        return self.completion_len > 0

    def datum(self) -> Datum:
        """Return the prompt and completion as a datum whose `weights` mark the completion. Raises DataError if nothing
        was sampled."""
        if not self.sampled:
            raise DataError(
                f"the entry is {self.status} and has no completion: {self.error}", hint="leave it out: entry.sampled"
            )
        return datum_of(
            self.full_tokens, prompt_len=self.prompt_len, kept=self.kept, routed_experts=self.routed_experts
        )


class DeploymentSampler:
    """Samples from the version that a deployment serves.

    Args:
        tokenizer_model: the model whose tokenizer and chat template encode the prompts.
        tokenizer_revision: the revision of this model.
        max_seq_len: the most tokens of a prompt and its completion together; None: the model's context.
        temperature: the default of calls without their own. The trainer must score at the same temperature.
        timeout_s: the most seconds for one request.
        seed: makes all calls repeatable, in their order; None: a random seed for each call.

    Raises:
        ConfigError: `tokenizer_model` is not set (a ValueError), or is not the tokenizer of the model that samples.
    """

    def __init__(
        self,
        deployment: Deployment,
        *,
        tokenizer_model: str | None,
        tokenizer_revision: str | None = None,
        max_seq_len: int | None = None,
        temperature: float = 1.0,
        timeout_s: float = 600.0,
        seed: int | None = None,
        concurrency: AdaptiveConcurrency | None = None,
    ):
        self.deployment, self.temperature, self.timeout_s = deployment, temperature, timeout_s
        self.tokenizer = _tokenizer(require_tokenizer(tokenizer_model), tokenizer_revision, deployment)
        self.max_seq_len = min(max_seq_len or deployment.context_length, deployment.context_length)
        self.concurrency = concurrency or AdaptiveConcurrency()
        self.seed, self.calls = seed, 0
        self._outbox = Outbox(deployment)

    async def sample_with_tokens(
        self,
        messages: Sequence[Message],
        n: int = 1,
        *,
        tools: Sequence[dict[str, Any]] = (),
        **options: Any,
    ) -> list[SampledCompletion]:
        """Sample `n` replies to a chat; `options` are those of `sample`. A `grammar` constrains the answer, not
        thoughts. An image part holds a path, a data URL, bytes or a PIL image, as in a dataset's row (docs/images.md).
        Raises ChatError as the template does, DataError for an image that cannot be read, or what is no list of
        messages, ConfigError for a grammar that is none."""
        if isinstance(messages, str) or not all(isinstance(message, Mapping) for message in messages):
            raise DataError(
                f"messages is {str(messages)[:64]!r}; it must be a list of messages",
                hint='write [{"role": "user", "content": "..."}]',
            )
        if not isinstance(grammar := options.pop("grammar", None), Grammar | None):
            raise ConfigError(
                f"grammar is a {type(grammar).__name__}; it must be a Grammar", hint="as Grammar.of_json(schema)"
            )
        said, _ = with_images(tuple(messages), {}, folder=Path(), id="messages")
        prompt = encode_prompt(Prompt(id="messages", messages=said, tools=tuple(tools)), self.tokenizer)
        (grammar,) = answer_grammars(grammar, [prompt.token_ids], self.tokenizer)
        return await self.sample(prompt.token_ids, n, grammar=grammar, **options)

    async def sample(
        self,
        prompt_ids: Sequence[int],
        n: int = 1,
        *,
        max_tokens: int = 1024,
        temperature: float | None = None,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: str | Sequence[str] = (),
        grammar: Grammar | None = None,
        seed: int | None = None,
        echo: bool = False,
        version: PolicyVersion | None = None,
    ) -> list[SampledCompletion]:
        """Sample `n` completions of a prompt's tokens, in order, all by one version.

        Args:
            top_p, top_k: draw from a part of the vocabulary, which the local engine records (`kept`); completions
                of other engines have no log-probabilities then, and are not for policy losses.
            grammar: the grammar of each completion, as in `Grammar.of_json(schema)`; the same holds for its tokens.
            seed: the seed of this call; None: derived from the sampler's seed and the number of the call.
            echo: return the log-probabilities of the prompt, too, which costs a forward.
            version: one that is loaded; None: the one that is served now.

        Raises:
            ConfigError: n below 1.
            DataError: a value that is not a token id; `echo` of a prompt with images.
            GrammarError: the grammar cannot be compiled.
            ValueError: a sampling option out of range.
        """
        if type(n) is not int or n < 1:
            raise ConfigError(f"n is {n!r}; it must be at least 1")
        self.calls += 1
        if seed is None and self.seed is not None:
            seed = seed_of(self.seed, self.calls)
        if grammar is not None:
            await asyncio.shield(asyncio.wrap_future(self.deployment.engine.prepare(grammar)))
        ids = _token_ids(prompt_ids)
        if echo and any(map(is_of_image, ids)):
            raise DataError("echo is of texts, and the prompt has an image", hint="leave echo out")
        room = self.max_seq_len - len(ids)
        with self.deployment.holding(version) as held:
            if room < 1:
                error = f"the prompt has {len(ids)} tokens; with a completion at most {self.max_seq_len} may be"
                return [_empty(Status.OVERLONG, ids, held, error)] * n
            params = SamplingParams(
                max_tokens=min(max_tokens, room),
                temperature=self.temperature if temperature is None else temperature,
                top_p=top_p,
                top_k=top_k,
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
                grammar=grammar,
            )
            before = await self._prompt_logprobs(ids, held, params.temperature) if echo else (None,) * len(ids)
            requests = [
                SamplingRequest(
                    prompt_ids=ids,
                    version=held,
                    params=params if seed is None else replace(params, seed=seed_of(seed, i)),
                )
                for i in range(n)
            ]
            return list(await asyncio.gather(*(self._one(request, before) for request in requests)))

    async def _prompt_logprobs(
        self, ids: tuple[int, ...], version: PolicyVersion, temperature: float
    ) -> tuple[float | None, ...]:
        """None for the first token, which nothing predicts."""
        score = self.deployment.engine.score
        return (None, *await asyncio.to_thread(score, ids[:1], ids[1:], version, temperature=temperature))

    async def _one(self, request: SamplingRequest, before: tuple[float | None, ...]) -> SampledCompletion:
        """Return one request and its status; only being cancelled is raised."""
        try:
            async with self.concurrency.slot():
                completion = await asyncio.wait_for(self._outbox.send(request), self.timeout_s)
                self.concurrency.observe(self.deployment.backlog())
        except ContextLengthError as error:
            return _empty(Status.OVERLONG, request.prompt_ids, request.version, error.message)
        except TimeoutError:
            return _empty(Status.FAILED, request.prompt_ids, request.version, f"no answer in {self.timeout_s:g} s")
        except Exception as error:  # costs this entry, whatever it is
            return _empty(Status.FAILED, request.prompt_ids, request.version, f"{type(error).__name__}: {error}")
        return _entry(request, completion, before)


def _token_ids(given: Any) -> tuple[int, ...]:
    """Return a list, tensor or array of token ids."""
    ids = given.tolist() if hasattr(given, "tolist") else given
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise DataError(f"{token!r} is not a token id; ids are whole numbers", hint="encode the text first")
    return tuple(int(token) for token in ids)


def _entry(request: SamplingRequest, completion: Completion, before: tuple[float | None, ...]) -> SampledCompletion:
    prompt_ids = request.prompt_ids
    unrecorded = request.params.unrecorded(completion.kept)
    own = (None,) * len(completion.logprobs) if unrecorded else completion.behaviour_logprobs
    statuses = {FinishReason.STOP: Status.OK, FinishReason.LENGTH: Status.TRUNCATED}
    status = statuses.get(completion.finish_reason, Status.FAILED)
    return SampledCompletion(
        status=status,
        full_tokens=(*prompt_ids, *completion.token_ids),
        prompt_len=len(prompt_ids),
        text=completion.text,
        inference_logprobs=(*before, *own),
        finish_reason=str(completion.finish_reason),
        version=completion.version,
        error="it was cancelled" if status is Status.FAILED else None,
        kept=completion.kept,
        routed_experts=completion.routed_experts,
    )


def _empty(status: Status, prompt_ids: tuple[int, ...], version: PolicyVersion, error: str) -> SampledCompletion:
    return SampledCompletion(
        status=status, full_tokens=prompt_ids, prompt_len=len(prompt_ids), version=version, error=error
    )


def _tokenizer(name: str, revision: str | None, deployment: Deployment) -> PreTrainedTokenizerBase:
    """Return the tokenizer of this name, checked against that of the model that samples."""
    own = deployment.base.tokenizer
    if name == deployment.base.name and revision is None:
        return own
    tokenizer = load_tokenizer(name, revision=revision)
    if tokenizer.get_vocab() != own.get_vocab():
        raise ConfigError(
            f"deployment.tokenizer_model {name!r} has another vocabulary than {deployment.base.name}, which samples",
            hint="use the tokenizer of base_model: other ids mean other words",
        )
    return tokenizer
