"""The shadow: the version on trial answers some of the live requests again, and clients do not see it (`gate.shadow`).

    Shadow.offer    an answer of the active version -> a place in the queue, or dropped
    check_rewards   refuses rewards for the pairs that need a column: a live request has none

A request is offered when its answer is complete, and answered again, one at a time, at the lowest priority: the engine
admits it after everything interactive. While completions wait for a row, or half of the rows are in use, it is dropped
and counted. The shadow's answers are scored and forgotten; only their numbers stay, in `Trial.pairs`, which
`server.gate` judges.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from groupwise.config.learn import ShadowConfig
from groupwise.errors import ConfigError, DeadlineError, OverloadedError, RewardError
from groupwise.rewards.base import refuse_failed
from groupwise.rewards.call import RewardFunction
from groupwise.rewards.scorer import Scorer
from groupwise.run.verdict import gaps_between
from groupwise.server.generate import Generation
from groupwise.server.learn import as_asked
from groupwise.server.policies import Pair, Trial
from groupwise.server.state import Parts
from groupwise.tasks.rollout_sources import group_of
from groupwise.types import Completion, SamplingRequest

if TYPE_CHECKING:
    from groupwise.server.sampling import Admission

log = logging.getLogger(__name__)


def check_rewards(functions: Sequence[RewardFunction]) -> None:
    """Raise ConfigError for a function that cannot score a live request."""
    for function in functions:
        if missing := function.missing(()):
            needed = " and ".join(map(repr, missing))
            raise ConfigError(
                f"gate.shadow: reward {function.name!r} needs {needed} as a column, and a live request has no columns",
                hint="give gate.shadow `rewards` of its own that score a completion without it, such as a judge; or "
                "`rewards: []`, with which failures, length and KL are compared",
            )


@dataclass(frozen=True)
class _Offered:
    """A request that the active version has answered, and for which trial it is answered again."""

    trial: Trial
    id: str
    request: SamplingRequest
    answer: Completion


class Shadow:
    """Answers requests of one server again, in its event loop; `scorer` scores both answers, None compares no rewards.

    Raises ConfigError for rewards that cannot score a live request.
    """

    def __init__(self, parts: Parts, config: ShadowConfig, scorer: Scorer | None):
        check_rewards(scorer.functions if scorer is not None else ())
        self._parts, self._config, self._scorer = parts, config, scorer
        self._waiting = deque[_Offered]()
        self._task: asyncio.Task[None] | None = None

    def offer(self, asked: Admission, groups: Sequence[Sequence[Completion]]) -> None:
        """Offer an answer that is whole. Returns at once."""
        trial, (request, *others), answer = self._parts.policies.trial, asked.requests, groups[0][0]
        if trial is None or trial.stage != "shadow" or asked.version != trial.against:
            return
        if others or request.n > 1 or not request.interactive or not answer.token_ids or not trial.takes(asked.id):
            return
        if len(trial.pairs) >= self._config.requests:
            return
        if len(self._waiting) >= self._config.queue or self._is_busy():
            self._parts.recorder.shadowed("dropped")
            return
        self._waiting.append(_Offered(trial, asked.id, request, answer))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._answer_all())

    def _is_busy(self) -> bool:
        """Return whether completions wait for a row, or half of the rows are in use."""
        stats = self._parts.engine.stats()
        return stats["waiting"] > 0 or stats["running"] >= max(1, self._parts.config.batch_rows // 2)

    async def _answer_all(self) -> None:
        """Answer the queued requests until none waits."""
        while self._waiting:
            asked = self._waiting.popleft()
            if self._parts.policies.trial is asked.trial and len(asked.trial.pairs) < self._config.requests:
                result, tokens = await self._outcome(asked)
                self._parts.recorder.shadowed(result, tokens=tokens)

    async def _outcome(self, asked: _Offered) -> tuple[str, int]:
        """Return what became of one request, and how many tokens were sampled for it; never raises."""
        trial, new = asked.trial, None
        if self._is_busy():
            return "dropped", 0
        try:
            new, gap = await self._answered(asked)
            pair = await self._pair(asked, new, gap)
        except (OverloadedError, DeadlineError):  # not by the version's doing
            return "dropped", 0
        except RewardError as error:
            log.warning("a shadow's answer was not scored: %s", error)
            return "unscored", 0 if new is None else len(new.token_ids)
        except Exception as error:
            log.warning("%s failed as a shadow: %r", trial.version, error)
            trial.answered(trial.version)
            trial.failed(trial.version)
            return "failed", 0
        trial.answered(trial.version)
        trial.pairs.append(pair)
        return "answered", len(new.token_ids)

    async def _answered(self, asked: _Offered) -> tuple[Completion, float | None]:
        """Return the version's own answer to the request, and the sum of its log p_new - log p_old where there is a
        max_kl."""
        parts, params = self._parts, replace(asked.request.params, top_logprobs=0)
        patience_s = parts.config.request_timeout_s
        async with parts.policies.lease(adapter=str(asked.trial.version), patience_s=patience_s) as version:
            request = replace(asked.request, params=params, version=version, interactive=False, cache=False)
            ((new,),) = await Generation(parts.engine, [request], timeout_s=patience_s).completions()
            if self._config.max_kl is None:
                return new, None
            ids = (request.prompt_ids, new.token_ids, version, asked.trial.against)
            temperature = params.temperature or 1.0
            return new, sum(await asyncio.to_thread(gaps_between, parts.engine, *ids, temperature=temperature))

    async def _pair(self, asked: _Offered, new: Completion, gap: float | None) -> Pair:
        """Score both answers as one group. Raises RewardError if not both can be scored."""
        tokens = (len(new.token_ids), len(asked.answer.token_ids))
        if self._scorer is None:
            return Pair(rewards=None, tokens=tokens, gap=gap)
        prompt = as_asked(asked.id, asked.request.prompt_ids, self._parts.base.tokenizer)
        scored = await self._scorer(group_of(prompt, [new, asked.answer]))
        refuse_failed([scored])
        mine, other = (rollout.reward for rollout in scored.rollouts)
        if mine is None or other is None:
            raise RewardError("one of the two answers has no reward")
        return Pair(rewards=(mine, other), tokens=tokens, gap=gap)
