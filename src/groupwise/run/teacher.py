"""The teacher of a run: a policy that scores sampled completions, with a log-probability for every token.

    model      another model with the same tokenizer, in this process     } an engine that only scores; a prompt is run
    adapter    an adapter of the run's model                              } once for its group
    self       the version that sampled, with more in its prompt          the run's own engine
    base_url   a server                                                   POST /completions with `prompt_logprobs`

A group is scored after it has its rewards and before a step gets it, while other groups are still being sampled.
`algo/distillation.py` uses the log-probabilities. With `loss: sft` nothing is scored: the teacher samples completions
of the prompt, in addition to the policy's or instead of them (`TeacherRollouts`, `Demonstrator`).
"""

from __future__ import annotations

import asyncio
import heapq
import os
import re
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import httpx2
from transformers import PreTrainedTokenizerBase

from groupwise.algo.advantage import differ
from groupwise.algo.samples import segments_of
from groupwise.config.addresses import has_certificate
from groupwise.config.run import RunConfig
from groupwise.config.teacher import BEST_COMPLETION, TeacherConfig
from groupwise.engine.local import LocalEngine
from groupwise.errors import ConfigError, DataError, EngineError, GroupwiseError
from groupwise.model.chat import encode_prompt
from groupwise.run.collect import Score
from groupwise.tasks.rollout_sources import RolloutSource, group_of
from groupwise.types import (
    Completion,
    Message,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    SamplingRequest,
    SequenceScores,
)

LONGEST_PROMPTS = 64  # those with the most characters, which are tokenised to see whether they fit

RETRIES, FIRST_DELAY_S = 3, 0.25

TRANSIENT = (408, 409, 425, 429)  # and everything from 500 on

PROBE = "The answer to 2 + 3 is 5."

ADAPTER = PolicyVersion("teacher", 1)

Ids = tuple[int, ...]


class TeacherBackend(Protocol):
    """Computes a teacher's log-probabilities."""

    @property
    def context_length(self) -> int | None:
        """Tokens that a prompt and its completion may have together; None where that is not known."""
        ...

    @property
    def weights(self) -> int:
        """Bytes of weights that it has in this process besides the run's own."""
        ...

    async def score(
        self, prompt_ids: Ids, completions: Sequence[Ids], sampled_by: PolicyVersion
    ) -> list[SequenceScores]:
        """Return the scores of each completion of a prompt. Raises GroupwiseError."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class EngineTeacher:
    """A version of a local engine, or with None the version that sampled. `owned` engines are closed with this."""

    engine: LocalEngine
    version: PolicyVersion | None
    top: int
    temperature: float
    weights: int = 0
    owned: bool = True

    @property
    def context_length(self) -> int:
        return self.engine.context_length

    async def score(
        self, prompt_ids: Ids, completions: Sequence[Ids], sampled_by: PolicyVersion
    ) -> list[SequenceScores]:
        return await asyncio.to_thread(
            self.engine.score_group,
            prompt_ids,
            completions,
            sampled_by if self.version is None else self.version,
            top=self.top,
            temperature=self.temperature,
        )

    def close(self) -> None:
        if self.owned:
            self.engine.close()


class EndpointTeacher:
    """A model behind POST <base_url>/completions that tells `prompt_logprobs` (vLLM, `groupwise serve`).

    A request is made again, a few times, after a timeout, a broken connection, 408, 409, 425, 429 or 5xx. The API key
    is sent to `base_url` only, and is in no message.
    """

    context_length, weights = None, 0

    def __init__(self, config: TeacherConfig):
        assert config.base_url is not None and config.model is not None
        self._config, self._url = config, config.base_url.rstrip("/") + "/completions"
        self._key = os.environ.get(config.api_key_env, "").strip() if config.api_key_env else ""
        # read once, not for each group: that takes 25 ms, in which no other group goes on
        self._certificates = httpx2.create_ssl_context() if has_certificate(self._url) else False
        self._gates: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def score(
        self, prompt_ids: Ids, completions: Sequence[Ids], sampled_by: PolicyVersion
    ) -> list[SequenceScores]:
        gate, first = self._gate(), len(prompt_ids)
        async with self._client() as http:

            async def one(ids: Ids) -> SequenceScores:
                async with gate:
                    rows = await self._ask(http, (*prompt_ids, *ids))
                return self._scores(ids, rows[first:])

            return list(await asyncio.gather(*map(one, completions)))

    async def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Ask for a short text; raises ConfigError where the server reads its ids as other tokens, or does not tell
        log-probabilities of a prompt."""
        ids = tuple(tokenizer(PROBE, add_special_tokens=False)["input_ids"])  # type: ignore[arg-type]
        try:
            async with self._client() as http:
                rows = await self._ask(http, ids)
            self._scores(ids[1:], rows[1:])
        except GroupwiseError as error:
            raise ConfigError(
                f"the teacher cannot be asked: {error.message}", hint=error.hint, field="teacher.base_url"
            ) from None
        for id, row in zip(ids[1:], rows[1:], strict=True):
            theirs, ours = row[str(id)].get("decoded_token"), str(tokenizer.decode([id]))
            if theirs is not None and theirs.strip() != ours.strip():
                raise ConfigError(
                    f"the teacher {self._config.model!r} has another tokenizer: token {id} is {theirs!r} there and "
                    f"{ours!r} here",
                    hint="a teacher reads the policy's token ids; take one of the same family",
                    field="teacher.base_url",
                )

    def close(self) -> None:
        """Does nothing: connections are closed with each group."""

    def _gate(self) -> asyncio.Semaphore:
        """Return what lets `concurrency` requests through at once, whichever groups they are of; one for each event
        loop."""
        return self._gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._config.concurrency))

    def _client(self) -> httpx2.AsyncClient:
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        return httpx2.AsyncClient(
            headers=headers, timeout=self._config.timeout_s, follow_redirects=False, verify=self._certificates
        )

    async def _ask(self, http: httpx2.AsyncClient, ids: Ids) -> list[Any]:
        """Return an entry for each token. Raises EngineError."""
        body = {"model": self._config.model, "prompt": list(ids), "max_tokens": 1, "temperature": 1.0}
        body["prompt_logprobs"] = max(self._config.top_k, 1)
        failed = ""
        for attempt in range(RETRIES + 1):
            if attempt:
                await asyncio.sleep(FIRST_DELAY_S * 2**attempt)
            try:
                response = await http.post(self._url, json=body)
            except (httpx2.RequestError, TimeoutError) as error:
                failed = f"the exchange with {self._url} broke: {str(error) or type(error).__name__}"
                continue
            if response.status_code == 200:
                return self._rows(response, len(ids))
            said = response.text.replace(self._key, "***") if self._key else response.text
            failed = f"{self._url} answered {response.status_code}: {said[:300].strip()}"
            if response.status_code < 500 and response.status_code not in TRANSIENT:
                break
        raise EngineError(failed, hint="see whether the server is up, and what it allows (vllm serve --max-logprobs)")

    def _rows(self, response: httpx2.Response, tokens: int) -> list[Any]:
        try:
            rows = response.json()["choices"][0]["prompt_logprobs"]
        except (ValueError, LookupError, TypeError):
            rows = None
        if not isinstance(rows, list) or len(rows) != tokens:
            raise EngineError(
                f"{self._url} does not tell the log-probabilities of a prompt (prompt_logprobs)",
                hint="take a server that does: vLLM, or groupwise serve",
            )
        return rows

    def _scores(self, ids: Ids, rows: Sequence[Mapping[str, Any]]) -> SequenceScores:
        try:
            own = tuple(float(row[str(id)]["logprob"]) for id, row in zip(ids, rows, strict=True))
            told = [[(int(id), float(each["logprob"])) for id, each in row.items()] for row in rows]
        except (KeyError, TypeError, ValueError):
            raise EngineError(f"{self._url} did not tell the log-probability of each token of the prompt") from None
        top = tuple(tuple(heapq.nlargest(max(self._config.top_k, 1), row, key=lambda pair: pair[1])) for row in told)
        return SequenceScores(logprobs=own, top=top)


class Teacher:
    """Adds a teacher's log-probabilities to groups. Where it cannot tell those of a rollout the rollout has the cause
    as its error, and is not trained."""

    def __init__(self, config: TeacherConfig, backend: TeacherBackend, tokenizer: PreTrainedTokenizerBase):
        self.config, self.backend, self._tokenizer = config, backend, tokenizer

    @property
    def weights(self) -> int:
        """Bytes of weights that it has in this process besides the run's own."""
        return self.backend.weights

    async def __call__(self, group: RolloutGroup) -> RolloutGroup:
        """Return the group with `Rollout.teacher` of those that have no error and something to be taught by."""
        asked: dict[tuple[Ids, PolicyVersion], list[tuple[int, int, Ids]]] = {}
        found: list[dict[int, SequenceScores]] = [{} for _ in group.rollouts]  # of each rollout, by segment
        errors: dict[int, str] = {}
        for number, rollout in enumerate(group.rollouts):
            if rollout.error is not None or not rollout.turns:
                continue
            sampled_by, _ = rollout.completion.spans[-1]
            for segment, (prompt_ids, ids) in enumerate(self._questions(group, rollout)):
                asked.setdefault((prompt_ids, sampled_by), []).append((number, segment, ids))

        async def ask(prompt_ids: Ids, sampled_by: PolicyVersion, rows: Sequence[tuple[int, int, Ids]]) -> None:
            try:
                scores = await self.backend.score(prompt_ids, [ids for _, _, ids in rows], sampled_by)
            except GroupwiseError as error:
                errors.update({number: f"the teacher could not score it: {error.message}" for number, _, _ in rows})
                return
            for (number, segment, _), each in zip(rows, scores, strict=True):
                found[number][segment] = each

        await asyncio.gather(*(ask(*key, rows) for key, rows in asked.items()))
        rollouts = tuple(
            replace(each, error=errors[number], reward=None)
            if number in errors
            else replace(each, teacher=tuple(scores for _, scores in sorted(found[number].items())))
            for number, each in enumerate(group.rollouts)
        )
        return replace(group, rollouts=rollouts)

    def _questions(self, group: RolloutGroup, rollout: Rollout) -> list[tuple[Ids, Ids]]:
        """Return the prompt and completion of each segment in the teacher's form; empty if it has nothing to teach."""
        segments = segments_of(rollout.turns)
        if self.config.context is None:
            return [(segment.prompt_ids, segment.completion_ids) for segment in segments]
        context = self._context(group, rollout)
        if context is None and self.config.self:
            return []
        prompt_ids = segments[0].prompt_ids if context is None else self.prompt_with(group.prompt, context)
        return [(prompt_ids, segment.completion_ids) for segment in segments]

    def _context(self, group: RolloutGroup, rollout: Rollout) -> str | None:
        if self.config.context != BEST_COMPLETION:
            return context_of(group.prompt, self.config)
        scored = [each for each in group.rollouts if each.reward is not None and each.error is None]
        best = max(scored, key=lambda each: each.reward or 0.0, default=rollout)
        better = rollout.reward is None or (best.reward or 0.0) > rollout.reward
        return best.completion.text if best is not rollout and best.reward is not None and better else None

    def submit(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], *, n: int
    ) -> list[Future[list[Completion]]]:
        """Have the teacher sample `n` completions of each (encoded) prompt, with its context where it has one; all are
        queued together, so that what is computed together does not depend on time."""
        backend = self.backend
        assert isinstance(backend, EngineTeacher) and backend.version is not None
        requests = []
        for prompt, how in zip(prompts, params, strict=True):
            context = None if self.config.context is None else context_of(prompt, self.config)
            ids = prompt.token_ids if context is None else self.prompt_with(prompt, context)
            requests.append(SamplingRequest(prompt_ids=ids, params=how, n=n, version=backend.version))
        return backend.engine.submit(requests)

    def prompt_with(self, prompt: Prompt, context: str) -> Ids:
        """Return the ids of the prompt with the context in its last user message."""
        return encode_prompt(with_context(prompt, context, template=self.config.template), self._tokenizer).token_ids

    def close(self) -> None:
        """Stop an engine that is the teacher's own."""
        self.backend.close()


class TeacherRollouts:
    """The completions of a teacher that samples (`loss: sft`), begun together with those of the policy and handed out
    as the group's demonstrations; where the teacher samples everything (`alone`), instead of them, as its rollouts."""

    def __init__(self, config: RunConfig, teacher: Teacher, policy: RolloutSource):
        assert config.teacher is not None
        self._teacher, self._policy, self.alone = teacher, policy, config.learns_no_rewards
        self._n, self._temperature = config.teacher.completions, config.teacher.temperature

    def prepare(self, prompt: Prompt) -> Prompt:
        """Prepare as the policy's source does."""
        return self._policy.prepare(prompt)

    def begin(
        self, prompts: Sequence[Prompt], *, seeds: Sequence[int], n: int, params: SamplingParams, version: PolicyVersion
    ) -> list[Awaitable[RolloutGroup]]:
        """See `RolloutSource.begin`; the teacher's completions have the seeds of the policy's."""
        how = params if self._temperature is None else replace(params, temperature=self._temperature)
        drawn = [replace(how, seed=seed) for seed in seeds]
        said = self._teacher.submit(prompts, drawn, n=self._n or n)
        if self.alone:
            return [self._group(prompt, each, None) for prompt, each in zip(prompts, said, strict=True)]
        own = self._policy.begin(prompts, seeds=seeds, n=n, params=params, version=version)
        return [self._group(*each) for each in zip(prompts, said, own, strict=True)]

    async def _group(
        self, prompt: Prompt, said: Future[list[Completion]], own: Awaitable[RolloutGroup] | None
    ) -> RolloutGroup:
        if own is None:
            return group_of(prompt, await asyncio.wrap_future(said))
        group = await own
        return replace(group, demonstrations=group_of(prompt, await asyncio.wrap_future(said)).rollouts)

    def close(self) -> None:
        """Do nothing: the opener of the policy's source and of the teacher closes them."""


class Demonstrator:
    """Scores groups, and leaves as their demonstrations what is to be learned: of what `TeacherRollouts` sampled, or of
    the policy's own rollouts; with `least_reward` and `best` only what the run's rewards prefer."""

    def __init__(self, config: RunConfig, score: Score):
        assert config.teacher is not None
        self._score, self._teacher, self._alone = score, config.teacher, config.learns_no_rewards

    async def __call__(self, group: RolloutGroup) -> RolloutGroup:
        """Return the group with its rewards."""
        scored = await self._score(group)
        if self._teacher.chooses:
            return replace(scored, demonstrations=self._kept(scored.rollouts))
        if self._alone:
            own = tuple(replace(each, teacher=_own_scores(each)) for each in scored.rollouts)
            return replace(scored, rollouts=own, demonstrations=self._kept(scored.rollouts))
        shown = group.demonstrations
        if self._teacher.least_reward is not None or self._teacher.best is not None:
            shown = (await self._score(replace(group, rollouts=shown, demonstrations=()))).rollouts
        return replace(scored, demonstrations=self._kept(shown))

    def _kept(self, shown: Sequence[Rollout]) -> tuple[Rollout, ...]:
        least, best = self._teacher.least_reward, self._teacher.best
        kept = [each for each in shown if each.error is None]
        if least is None and best is None:
            return tuple(kept)
        rated = [(each.reward, each) for each in kept if each.reward is not None]
        if least is None and not differ([reward for reward, _ in rated]):
            return ()
        rated = [pair for pair in rated if least is None or pair[0] >= least]
        if best is None:
            return tuple(each for _, each in rated)
        distinct = dict[tuple[Ids, ...], Rollout]()
        for _, each in sorted(rated, key=lambda pair: -pair[0]):
            distinct.setdefault(tuple(turn.completion.token_ids for turn in each.turns), each)
        return tuple(distinct.values())[:best]


def _own_scores(rollout: Rollout) -> tuple[SequenceScores, ...]:
    """Return what a teacher that sampled a completion says of it: that is known."""
    return tuple(SequenceScores(logprobs=turn.completion.logprobs, top=()) for turn in rollout.turns)


def context_of(prompt: Prompt, config: TeacherConfig) -> str | None:
    """Return the column's value for a prompt; None if it is empty."""
    value = prompt.columns.get(config.context or "")
    return None if value is None or value == "" else str(value)


def with_context(prompt: Prompt, context: str, *, template: str) -> Prompt:
    """Return the prompt with its last user message, or its text, put into `template` with the context; not encoded.

    Raises:
        DataError: that message is not text.
    """

    def filled(text: str) -> str:
        places = {"{prompt}": text, "{context}": context}
        return re.sub(r"\{prompt\}|\{context\}", lambda found: places[found[0]], template)

    messages: list[Message] | None = None if prompt.messages is None else list(prompt.messages)
    if messages:
        at = max((i for i, each in enumerate(messages) if each["role"] == "user"), default=len(messages) - 1)
        content = messages[at].get("content")
        if not isinstance(content, str):
            raise DataError(
                f"the last user message of prompt {prompt.id!r} is no text, to which context could be added"
            )
        messages[at] = {**messages[at], "content": filled(content)}
    text = None if prompt.text is None else filled(prompt.text)
    return replace(prompt, messages=None if messages is None else tuple(messages), text=text, token_ids=())


async def _as_it_is(group: RolloutGroup) -> RolloutGroup:
    """Return the group: a dataset's answers and pairs are learned whatever rewards would give them."""
    return group


def taught(score: Score, teacher: Teacher | None, config: RunConfig) -> Score:
    """Return what scores a group by rewards, and then has the teacher score it, or add what it says itself."""
    if config.teacher is not None and config.teacher.loss == "sft":
        return Demonstrator(config, score)
    if teacher is None:
        return _as_it_is if config.supervised else score

    async def both(group: RolloutGroup) -> RolloutGroup:
        return await teacher(await score(group))

    return both
