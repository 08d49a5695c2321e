"""Decides which raters count: one whose ratings contradict the known rewards is ignored (`raters` in the
configuration).

    Raters          while `watch` runs: compares ratings of answers to known prompts with the answers' rewards
    POST /v1/learn/raters/trust     lets a rater count again

Any user can rate, and a careless or hostile rater teaches the model as much as an honest one. Prompts whose answers can
be scored by rewards reveal such a rater: a rater's first rating for each of these prompts is compared with the reward
of the rated answer. 1/2 or more is good on both scales, and of two answers the better one is the one with the higher
reward. A rating of 1/2, or of two answers with equal rewards, is not counted.

A rater is distrusted once it is sure, with `confidence` and at every look, that it agrees less often than `honest`
(`algo.evidence.log_wealth`). Its ratings, earlier and later ones, then make no jobs and decide no canary, until a
person trusts the rater again. docs/gates.md says how often this errs.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field

from groupwise.algo.evidence import log_wealth
from groupwise.config.learn import RatersConfig
from groupwise.errors import GroupwiseError, RequestError
from groupwise.model.chat import decode, encode_prompt
from groupwise.sdk.types import LearnAnswer, RaterAnswer
from groupwise.server.bodies import read_body
from groupwise.server.learn import Learning, completion_of, open_scorer, shown
from groupwise.server.state import Parts
from groupwise.server.wire import OwnRequest, documented
from groupwise.store.feedback import Feedback, Rater
from groupwise.store.ledger import RolloutRecord
from groupwise.store.raters import KnownVote, RaterLog
from groupwise.tasks.prompts import open_prompts
from groupwise.tasks.rollout_sources import group_of

WATCH_S = 2.0
AGAIN_S = 60.0  # after a failure
GOOD = 0.5  # from here on a score or a reward says that an answer is good
HEARD = "raters.heard"  # the setting, with the prompts' digest behind it: the last rating that was compared

log = logging.getLogger(__name__)
router = APIRouter(prefix="/v1/learn/raters", tags=["feedback"])


def dishonest(agreed: Sequence[bool], *, honest: float, confidence: float) -> bool:
    """Return whether it was ever sure that a rater who agreed so, one prompt after the other, agrees less often than
    `honest`. Of raters who agree as often or more, a share of 1 - `confidence` is found dishonest, ever."""
    if not agreed:
        return False
    return log_wealth([-float(each) for each in agreed], -honest, worst=-1.0) >= math.log(1 / (1 - confidence))


def named(rater: Rater) -> str:
    """Return a rater's name for people."""
    sender, user = rater
    who = "those without a user" if user is None else f"user {user!r}"
    return f"{who} of the key {sender!r}" if sender else who


class Raters:
    """Judges the raters of one server. Reads the prompts and loads the rewards when it is made.

    Raises ConfigError, DataError, LoadError, ChatError or ContextLengthError for what cannot be used.
    """

    def __init__(self, parts: Parts, config: RatersConfig):
        self._parts, self._config = parts, config
        self._log = RaterLog(parts.feedback)
        folder, tokenizer, context = parts.config.folder, parts.base.tokenizer, parts.engine.context_length
        prompts = open_prompts(config.prompts, folder=folder).known
        encoded = (encode_prompt(each, tokenizer, context=context) for each in prompts)
        self._known = {prompt.token_ids: prompt for prompt in encoded if prompt.token_ids is not None}
        digest = hashlib.sha256(repr(sorted(self._known)).encode()).hexdigest()[:16]
        self._place = f"{HEARD}.{digest}"  # with other prompts all ratings are heard once more
        self._scorer = open_scorer(config.rewards, config.scoring, folder=folder)
        self._newest = -1  # the newest rating when it was last looked

    async def watch(self) -> None:
        """Look again and again; a failure is logged, and tried again a minute later."""
        while True:
            pause_s = WATCH_S
            try:
                await self.look()
            except GroupwiseError as error:
                log.warning("raters were not judged: %s", error)
                pause_s = AGAIN_S
            except Exception:
                log.exception("raters were not judged")
                pause_s = AGAIN_S
            await asyncio.sleep(pause_s)

    async def look(self) -> list[Rater]:
        """Hear the ratings that are new, and return those who are distrusted from now on. Raises RewardError."""
        book = self._parts.feedback
        newest, _ = await asyncio.to_thread(book.newest)
        if newest == self._newest:
            return []
        after = await asyncio.to_thread(book.setting, self._place, 0)
        while True:
            ratings, last = await asyncio.to_thread(self._log.unheard, self._known.keys(), after=after)
            if last == after:
                break
            votes = await self._compared(ratings)
            await asyncio.to_thread(self._log.keep, votes, place=self._place, seq=last)
            after = last
        self._newest = newest
        return await asyncio.to_thread(self._distrust)

    async def _compared(self, ratings: Sequence[Feedback]) -> list[KnownVote]:
        """Return what these ratings say of their raters."""
        ids = dict.fromkeys(id for each in ratings for id in (each.rollout, each.worse) if id is not None)
        records = await asyncio.to_thread(self._parts.feedback.rollouts, list(ids))
        rewards = await self._rewards(list(records.values()))
        votes = list[KnownVote]()
        for rating in ratings:
            good, bad = (None if id is None else rewards.get(id) for id in (rating.rollout, rating.worse))
            if good is not None and (agreed := _agrees(rating, good, bad)) is not None:
                prompt_ids = records[rating.rollout].prompt_ids
                votes.append(KnownVote(rating.rater, prompt_ids, rating.seq, agreed))
        return votes

    async def _rewards(self, records: Sequence[RolloutRecord]) -> dict[str, float]:
        """Return the rewards of answers that could be scored, by the answers' ids."""
        groups, tokenizer = dict[tuple[int, ...], list[RolloutRecord]](), self._parts.base.tokenizer
        for record in records:
            groups.setdefault(record.prompt_ids, []).append(record)
        found = dict[str, float]()
        for prompt_ids, its in groups.items():
            completions = [completion_of(each, decode(each.completion_ids, tokenizer)) for each in its]
            scored = await self._scorer(group_of(self._known[prompt_ids], completions))
            pairs = zip(its, scored.rollouts, strict=True)
            found |= {each.id: rollout.reward for each, rollout in pairs if rollout.reward is not None}
        return found

    def _distrust(self) -> list[Rater]:
        """Distrust those of whom it is sure now, and return them. In a thread."""
        config, already = self._config, self._log.distrusted()
        told = {"honest": config.honest, "confidence": config.confidence}
        new = list[Rater]()
        for rater, agreed in self._log.agreed(self._known.keys()).items():
            if rater not in already and dishonest(agreed, honest=config.honest, confidence=config.confidence):
                self._log.distrust(rater)
                message = f"{named(rater)} agreed with what is known of {sum(agreed)} of {len(agreed)} prompts: "
                message += "such ratings count nowhere from now on (`groupwise learn trust` lets them)"
                data = {"key": rater[0] or None, "user": rater[1], "known": len(agreed), "agreed": sum(agreed), **told}
                self._parts.feedback.note("rater_distrusted", message, data=data)
                log.warning("%s", message)
                new.append(rater)
        return new

    def shown(self, *, limit: int) -> list[RaterAnswer]:
        """Return the raters' records: those who are distrusted first, then those who agreed least often. Reads the
        disk."""
        distrusted = self._log.distrusted()
        agreed = {rater: list[bool]() for rater in distrusted} | self._log.agreed(self._known.keys())
        rows = [
            RaterAnswer(
                key=rater[0] or None,
                user=rater[1],
                known=len(its),
                agreed=sum(its),
                counts=rater not in distrusted,
            )
            for rater, its in agreed.items()
        ]
        return sorted(rows, key=lambda row: (row.counts, row.agreed / max(1, row.known), -row.known))[:limit]

    def trust(self, rater: Rater) -> None:
        """Let a rater count again. Raises RequestError for one who does."""
        if not self._log.trust(rater):
            raise RequestError(f"{named(rater)} is not distrusted", hint="GET /v1/learn lists who is, under raters")
        message = f"{named(rater)} is trusted again, by hand"
        self._parts.feedback.note("rater_trusted", message, data={"key": rater[0] or None, "user": rater[1]})

    def close(self) -> None:
        """End the reward processes."""
        self._scorer.close()


def _agrees(rating: Feedback, reward: float, reward_of_worse: float | None) -> bool | None:
    """Return whether a rating says what the rewards say; None where either says nothing."""
    if rating.worse is not None and reward_of_worse is not None and reward != reward_of_worse:
        return reward > reward_of_worse
    score = 0.0 if rating.score is None and rating.correction is not None else rating.score
    return None if score is None or score == GOOD else (score > GOOD) == (reward >= GOOD)


# ---- over HTTP ----
class TrustRequest(OwnRequest):
    """The body of POST /v1/learn/raters/trust: who counts again."""

    user: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """The `user` of the ratings; null is those that name none."""
    key: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """The name of the key that they came with; null is the owner's, or none."""


@router.post("/trust", **documented(TrustRequest, LearnAnswer, errors=[RequestError]))
async def trust(request: Request, parts: Learning) -> LearnAnswer:
    """Let the ratings of a distrusted rater count again, and restart the comparison of them with rewards."""
    body = await read_body(request, TrustRequest)
    if parts.raters is None:
        hint = "name prompts and rewards under `raters` in its configuration"
        raise RequestError("this server does not judge raters", hint=hint)
    await asyncio.to_thread(parts.raters.trust, (body.key or "", body.user))
    return await asyncio.to_thread(shown, parts)
