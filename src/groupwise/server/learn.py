"""Automatic jobs from feedback (`learn` of the configuration): ratings -> groups -> a GRPO job, again and again.

    rated_groups     ratings -> the groups that can be trained on: pure, no sampling
    FeedbackTrainer  while `run` runs: waits for `after` ratings, completes and scores their groups, queues a job
    /v1/learn        what it does and why it does not; pause and resume

A group is the completions of one prompt. Rated answers keep the score of their rating. If several rated answers of a
prompt differ, they are a group by themselves. Otherwise the server samples further completions from the version that
answered, and the configuration's rewards score them. A correction is not trained on as a completion: the policy did not
sample it, so GRPO has no probability for it. The group is compared with the correction instead: it is the column
`answer` of the rewards, or, without rewards, the reference of ROUGE-L.

`after` counts ratings whose groups have something to learn, which is known after they are completed and scored.
Completed groups are kept in memory until there are enough, as long as the version that a job would continue stays the
same. A group whose scores are all equal waits for a later version, which completes it again, up to MAX_FAILURES times;
a group in which every answer is right (1) is used up at once.

The newest ratings are trained first. Ratings of an answer are dropped once `max_behind` versions went live after its
own. If ratings come faster than jobs can take them, taking the oldest first would train every job on answers that the
policy no longer gives, ever older ones.

A job is queued and takes its ratings in one transaction: a kill between rating and job loses neither, and no rating is
trained twice. A job that fails or is cancelled gives them back.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Query

from groupwise.algo.advantage import differ
from groupwise.config.learn import LearnConfig
from groupwise.config.rewards import RewardConfig, ScoringConfig
from groupwise.errors import AdapterNotFoundError, GroupwiseError, RequestError, RewardError
from groupwise.model.chat import decode
from groupwise.rewards.base import load_rewards, refuse_failed
from groupwise.rewards.pool import RewardPool
from groupwise.rewards.scorer import Scorer
from groupwise.sdk.types import LearnAnswer, LearnHistory, LearnTransition
from groupwise.server.generate import Generation
from groupwise.server.reader import TextModel
from groupwise.server.schema_train import GrpoRequest
from groupwise.server.shares import within_shares
from groupwise.server.state import Parts, given
from groupwise.server.submit import prepare_grpo
from groupwise.server.train import submit
from groupwise.server.webhooks import utc
from groupwise.server.wire import documented
from groupwise.store.feedback import Feedback, FeedbackLog, Rater, Transition, opinions
from groupwise.store.ledger import Job, Ledger, RolloutRecord
from groupwise.store.raters import RaterLog
from groupwise.tasks.reply import plain_text
from groupwise.tasks.rollout_sources import group_of
from groupwise.types import (
    Completion,
    FinishReason,
    Message,
    PolicyVersion,
    Prompt,
    SamplingParams,
    SamplingRequest,
    unrecorded,
)

POLL_S = 2.0
AGAIN_S = 60.0  # after a failure
HOUR_S = 3600.0
NEWEST = 256  # jobs that are looked at
SHOWN = 50  # transitions, and raters, in one answer
MOST_SHOWN = 1000  # transitions of /v1/learn/transitions
PAUSED = "learn.paused"  # the setting
SIMILARITY = RewardConfig(function="groupwise.rewards.text:rouge_l", args={"beyond_prompt": False})

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from groupwise.config.serve import ServeConfig
    from groupwise.server.gate import Gatekeeper
    from groupwise.server.policies import Policies
    from groupwise.server.raters import Raters

log = logging.getLogger(__name__)
router = APIRouter(prefix="/v1/learn", tags=["feedback"])


# ---- from ratings to groups ----
@dataclass(frozen=True, kw_only=True)
class RatedGroup:
    """The rated answers of one prompt. `scores` has None for an answer that was only corrected; `seqs` are the ratings
    that are about it. `complete`: the scores differ, and nothing needs to be sampled. `failures`: how often nothing
    came of it."""

    records: tuple[RolloutRecord, ...]
    scores: tuple[float | None, ...]
    correction: str | None
    seqs: tuple[int, ...]
    complete: bool
    failures: int = 0

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.records[0].prompt_ids

    @property
    def version(self) -> str:
        """Return the version that samples further completions: that of the newest rated answer."""
        return self.records[-1].version


def rated_groups(
    ratings: Sequence[Feedback], records: Mapping[str, RolloutRecord], *, scored: bool
) -> tuple[list[RatedGroup], list[int]]:
    """Return the groups that can be trained on, newest rating first, and the ratings whose answers are not kept any
    more. `scored`: there are rewards for further completions."""
    lost = [each.seq for each in ratings if not {each.rollout, each.worse or each.rollout} <= records.keys()]
    known = [each for each in ratings if each.seq not in set(lost)]
    said, failures = opinions(known), {each.seq: each.failures for each in known}
    members: dict[tuple[int, ...], dict[str, list[int]]] = {}  # prompt -> rollout -> the ratings about it
    for each in known:
        for id in filter(None, (each.rollout, each.worse)):
            members.setdefault(records[id].prompt_ids, {}).setdefault(id, []).append(each.seq)
    groups = []
    for rollouts in members.values():
        judged = [id for id in rollouts if id in said]
        corrections = [text for id in judged for text in said[id].corrections]
        scores = tuple(said[id].score for id in judged)
        given = [score for score in scores if score is not None]
        complete = not corrections and len(given) > 1 and differ(given)
        if complete or (judged and (corrections or scored)):
            group = RatedGroup(
                records=tuple(records[id] for id in judged),
                scores=scores,
                correction=corrections[-1] if corrections else None,
                seqs=tuple(sorted({seq for seqs in rollouts.values() for seq in seqs})),
                complete=complete,
                failures=max(failures[seq] for seqs in rollouts.values() for seq in seqs),
            )
            groups.append(group)
    return sorted(groups, key=lambda group: group.seqs[-1], reverse=True), lost


@dataclass(frozen=True)
class Completed:
    """A group with all its completions and their scores. `pairs` are empty if nothing could be compared in it."""

    pairs: tuple[tuple[RolloutRecord, float], ...]

    @property
    def useful(self) -> bool:
        """Return whether there is something to learn from it."""
        return len(self.pairs) > 1 and differ([score for _, score in self.pairs])

    @property
    def right(self) -> bool:
        """Return whether nothing is ever to be learned from it: everything is as good as can be."""
        return bool(self.pairs) and all(score == 1.0 for _, score in self.pairs)

    def body(self, temperature: float) -> dict[str, Any]:
        """Return it as /v1/train/grpo takes it."""
        return {"completions": [scored_completion(each, score, temperature=temperature) for each, score in self.pairs]}


def ratings_in(groups: Iterable[RatedGroup]) -> list[int]:
    """Return the ratings of these groups, each once: a comparison may be in several."""
    return sorted({seq for group in groups for seq in group.seqs})


def temperature_of(groups: Sequence[RatedGroup]) -> float:
    """Return the temperature of a job of these groups: the temperature of most rated answers; 1 where all are
    greedy."""
    sampled = Counter(record.temperature for group in groups for record in group.records if record.temperature > 0)
    return sampled.most_common(1)[0][0] if sampled else 1.0


def scored_completion(record: RolloutRecord, reward: float, *, temperature: float) -> dict[str, Any]:
    """Return a completion as /v1/train/grpo takes it. One that was drawn from another distribution than is trained goes
    by its tokens: the version that the job begins from counts as its sampler."""
    if record.temperature == temperature and not unrecorded(record.reshaped, record.kept):
        return {"rollout_id": record.id, "reward": reward}
    tokens = {"token_ids": list(record.completion_ids), "prompt_token_ids": list(record.prompt_ids)}
    return {**tokens, "reward": reward}


def automatic_jobs(ledger: Ledger) -> list[Job]:
    """Return those among the newest jobs, and those that have not ended, that the server made by itself."""
    found = {job.id: job for job in (*ledger.jobs(limit=NEWEST), *ledger.unfinished())}
    return [job for job in found.values() if job.summary.get("automatic")]


def open_scorer(rewards: Sequence[RewardConfig], scoring: ScoringConfig, *, folder: Path) -> Scorer:
    """Return the rewards, in their own processes if there are to be any. Raises ConfigError, LoadError."""
    functions = load_rewards(rewards, folder=folder)
    if not scoring.workers:
        return Scorer(functions)
    pool = RewardPool(rewards, folder=folder, workers=scoring.workers, timeout_s=scoring.timeout_s)
    return Scorer(functions, pool=pool)


# ---- the jobs ----
class FeedbackTrainer:
    """Makes jobs of feedback while `run` runs. `reason` says what it does, or why nothing. `held_out`: prompts in token
    ids that no job is made of, as versions are judged by them.

    Raises ConfigError or LoadError for rewards that cannot be loaded.
    """

    def __init__(self, parts: Parts, config: LearnConfig, *, held_out: Collection[tuple[int, ...]] = ()):
        self._parts, self._config, self._held_out = parts, config, held_out
        self.reason, self.trainable = "not begun", 0
        self._done: dict[tuple[int, ...], Completed] = {}  # the ratings of a group -> what came of it
        self._done_for: PolicyVersion | None = None  # under this version
        rewards = config.rewards or (SIMILARITY,)
        self._scorer = open_scorer(rewards, config.scoring, folder=parts.config.folder)
        self._again_at, self._bounded = 0.0, ""  # what is said of groups that were left out
        self._alike, self._noted = 0, False  # ratings whose groups had nothing to learn since the last job
        self._seen: object = None  # the revision of the feedback, and the version, that were last looked at
        self._text_model = TextModel.of(parts.base)

    @property
    def paused(self) -> bool:
        return bool(self._parts.feedback.setting(PAUSED, False))

    async def run(self, *, poll_s: float = POLL_S) -> None:
        """Look again and again; whatever fails is logged, and tried again a minute later."""
        while True:
            if time.monotonic() >= self._again_at:
                await self.attempt()
            await asyncio.sleep(poll_s)

    async def attempt(self) -> str | None:
        """Run `step`; no failure of it ends the server."""
        try:
            return await self.step()
        except GroupwiseError as error:
            self.reason = f"the last attempt failed, and is made again in {AGAIN_S:g} s: {error.message}"
            log.warning("automatic training: %s", error)
        except Exception:
            self.reason = f"the last attempt failed, and is made again in {AGAIN_S:g} s: internal error"
            log.exception("automatic training")
        self._again_at = time.monotonic() + AGAIN_S
        return None

    async def step(self) -> str | None:
        """Make a job if it is time for one, and return its id. Groups with nothing to learn make way for others that
        wait, until there are too few."""
        book = self._parts.feedback
        if returned := await asyncio.to_thread(book.give_back):
            transition = f"{returned} ratings wait again: the job that took them failed or was cancelled"
            await asyncio.to_thread(book.note, "feedback_returned", transition, data={"ratings": returned})
        version = await asyncio.to_thread(self._continued)
        if version != self._done_for:
            self._done, self._done_for = {}, version
        while True:
            seen = (await asyncio.to_thread(book.revision), version)
            groups = list[RatedGroup]()
            if seen != self._seen or self.trainable >= self._config.after:
                groups = self._promising(await asyncio.to_thread(self._groups))
                self._seen, self.trainable = seen, len(ratings_in(groups))
            if why_not := await asyncio.to_thread(self._why_not):
                self.reason = why_not
                return None
            if self.trainable < self._config.after:
                self.reason = await self._too_few()
                return None
            if job_id := await self._make_job(groups[: self._config.max_groups], version):
                return job_id

    async def _too_few(self) -> str:
        """Return how many ratings there are; notes, once a job, that those with nothing to learn keep it from being
        made."""
        there, after = self.trainable, self._config.after
        if not self._alike:
            return f"{there} of {after} ratings that can be trained on are there{self._bounded}"
        message = f"{there} of {after} ratings have something to learn"
        message += f"; in the groups of {self._alike} others all completions score the same"
        if not self._noted:
            self._noted, data = True, {"ratings": self._alike}
            await asyncio.to_thread(self._parts.feedback.note, "nothing_to_learn", message, data=data)
        return message

    def _continued(self) -> PolicyVersion:
        """Return what a job would continue. In a thread."""
        active = self._parts.policies.active
        if self._config.base == "active":
            return active
        try:
            return self._parts.store.newest(self._config.adapter) or active
        except AdapterNotFoundError:
            return active

    def _promising(self, groups: Sequence[RatedGroup]) -> list[RatedGroup]:
        """Return the groups that have something to learn or were not completed yet; forgets what came of others."""
        self._done = {group.seqs: self._done[group.seqs] for group in groups if group.seqs in self._done}
        return [group for group in groups if group.seqs not in self._done or self._done[group.seqs].useful]

    def _groups(self) -> list[RatedGroup]:
        """Return what waits and can be trained on, as groups; drops ratings of which nothing can come. In a thread."""
        book, ratings = self._parts.feedback, self._drop_outdated(self._parts.feedback.waiting())
        ids = dict.fromkeys(id for each in ratings for id in (each.rollout, each.worse) if id is not None)
        groups, lost = rated_groups(ratings, book.rollouts(list(ids)), scored=bool(self._config.rewards))
        if lost:
            book.failed(lost, for_good=True)
        if seqs := ratings_in(group for group in groups if group.prompt_ids in self._held_out):
            message = f"{len(seqs)} ratings are dropped: they are of prompts that the gate judges versions by"
            book.failed(seqs, for_good=True)
            book.note("held_out_rated", message, data={"ratings": len(seqs)})
            groups = [group for group in groups if group.prompt_ids not in self._held_out]
        return self._shared(groups, {each.seq: each.rater for each in ratings})

    def _shared(self, groups: list[RatedGroup], raters: Mapping[int, Rater]) -> list[RatedGroup]:
        """Return what a job may take of the groups that no rater and no phrase has too much of (`max_share`)."""
        self._bounded = ""
        if self._config.max_share is None:
            return groups
        asked, most = self._parts.feedback.asked(), self._config.max_groups
        names: Mapping[int, Rater | None] = raters
        if self._config.proven is not None:
            proven = RaterLog(self._parts.feedback).proven(self._config.proven)
            names = {seq: rater if rater in proven else None for seq, rater in raters.items()}
        found = within_shares(groups, names, asked, share=self._config.max_share, most=most)
        if left := min(len(groups), most) - len(found):
            self._bounded = (
                f"; {left} groups wait, as others of their rater, or with their phrases, are enough (max_share)"
            )
        return found

    def _drop_outdated(self, ratings: Sequence[Feedback]) -> list[Feedback]:
        """Return those of the ratings that are not about answers of versions long replaced; drops the others."""
        book, most = self._parts.feedback, self._config.max_behind
        if most is None:
            return list(ratings)
        live_since = self._parts.store.live_since
        outdated = {v for v in {each.version for each in ratings} if live_since(PolicyVersion.parse(v)) > most}
        if seqs := [each.seq for each in ratings if each.version in outdated]:
            message = f"{len(seqs)} ratings are dropped: after the versions that answered more than {most} went live"
            book.failed(seqs, for_good=True)
            book.note("ratings_outdated", message, data={"ratings": len(seqs), "versions": sorted(outdated)})
        return [each for each in ratings if each.version not in outdated]

    def _why_not(self) -> str | None:
        """Return what keeps it from making a job, however many ratings there are."""
        if self.paused:
            return "paused"
        if (trial := self._parts.policies.trial) is not None:
            return f"{trial.version} is on trial"
        jobs = automatic_jobs(self._parts.ledger)
        if running := next((job for job in jobs if not job.state.is_final), None):
            return f"job {running.id} is {running.state}"
        lately = sum(job.created_at > time.time() - HOUR_S for job in jobs)
        if lately >= self._config.max_jobs_per_hour:
            return f"{lately} jobs were made within the hour (max_jobs_per_hour)"
        return None

    async def _make_job(self, rated: Sequence[RatedGroup], version: PolicyVersion) -> str | None:
        """Complete the groups that are not, and queue a job of those with something to learn if they are enough."""
        book, temperature = self._parts.feedback, temperature_of(rated)
        todo = [group for group in rated if group.seqs not in self._done]
        self.reason = f"sampling and scoring {len(todo)} groups"
        made = await asyncio.gather(*(self._completed(group, temperature, version) for group in todo))
        failed = [error for error in made if isinstance(error, RewardError)]
        new = [(g, done) for g, done in zip(todo, made, strict=True) if not isinstance(done, RewardError)]
        self._done |= {group.seqs: done for group, done in new}
        self._alike += await self._put_off([(group, done) for group, done in new if not done.useful])
        useful = [group for group in rated if group.seqs in self._done and self._done[group.seqs].useful]
        seqs = ratings_in(useful)
        self._seen = None  # the waiting ratings are counted again
        if len(seqs) < self._config.after and len(useful) < self._config.max_groups:
            if failed:
                raise failed[0]
            return None
        bodies = [self._done[group.seqs].body(temperature) for group in useful]
        try:
            job_id, warnings = await asyncio.to_thread(self._submit, bodies, seqs, temperature)
        except RequestError:  # the job cannot be as it is
            await asyncio.to_thread(book.failed, seqs)
            raise
        finally:
            for group in useful:
                del self._done[group.seqs]
        message = f"job {job_id} trains {self._config.adapter} on {len(seqs)} ratings in {len(bodies)} groups"
        alike, self._alike, self._noted = self._alike, 0, False
        data = {"job_id": job_id, "ratings": len(seqs), "groups": len(bodies), "alike": alike, "warnings": warnings}
        await asyncio.to_thread(book.note, "job_queued", message, data=data)
        self.reason = message
        return job_id

    async def _put_off(self, alike: Sequence[tuple[RatedGroup, Completed]]) -> int:
        """These groups had nothing to learn: those that are right are spent, the others wait for a later version.
        Returns how many ratings they are."""
        book = self._parts.feedback
        spent = ratings_in(group for group, done in alike if done.right)
        again = sorted(set(ratings_in(group for group, _ in alike)).difference(spent))
        if spent:
            await asyncio.to_thread(lambda: book.failed(spent, for_good=True))
        if again:
            await asyncio.to_thread(book.failed, again)
        return len(spent) + len(again)

    async def _completed(
        self, group: RatedGroup, temperature: float, version: PolicyVersion
    ) -> Completed | RewardError:
        """Return the group with the completions that it lacks, and scored. They are sampled from the version that
        answered, and from `version` where nothing came of these, or it is gone."""
        records, scores = list(group.records), list(group.scores)
        if not group.complete:
            try:
                more = await self._siblings(group, temperature, str(version) if group.failures else group.version)
            except AdapterNotFoundError:
                more = await self._siblings(group, temperature, str(version))
            records, scores = [*records, *more], [*scores, *(None for _ in more)]
            try:
                rewards = await self._scored(group, records)
            except RewardError as error:
                return error
            scores = [reward if score is None else score for score, reward in zip(scores, rewards, strict=True)]
        return Completed(tuple((r, float(s)) for r, s in zip(records, scores, strict=True) if s is not None))

    async def _siblings(self, group: RatedGroup, temperature: float, adapter: str) -> list[RolloutRecord]:
        """Sample further completions of the prompt, and keep them as rollouts. Raises AdapterNotFoundError if the
        version is gone."""
        parts, n = self._parts, self._config.group_size - len(group.records)
        room = parts.engine.context_length - len(group.prompt_ids)
        if n < 1 or room < 1:
            return []
        params = SamplingParams(temperature=temperature, max_tokens=min(self._config.max_tokens, room))
        async with parts.policies.lease(adapter=adapter, patience_s=parts.config.request_timeout_s) as version:
            request = SamplingRequest(prompt_ids=group.prompt_ids, params=params, n=n, version=version)
            generation = Generation(parts.engine, [request], timeout_s=parts.config.request_timeout_s)
            (completions,) = await generation.completions()
        records = [_record(group.prompt_ids, each, params) for each in completions]
        await asyncio.to_thread(parts.ledger.save_rollouts, records)
        return records

    async def _scored(self, group: RatedGroup, records: Sequence[RolloutRecord]) -> list[float | None]:
        """Return the rewards of completions. Raises RewardError if none could be scored."""
        tokenizer = self._parts.base.tokenizer
        columns = {} if group.correction is None else {"answer": group.correction}
        prompt = as_asked(records[0].id, group.prompt_ids, tokenizer, columns=columns)
        completions = [completion_of(record, decode(record.completion_ids, tokenizer)) for record in records]
        scored = await self._scorer(group_of(prompt, completions))
        refuse_failed([scored])
        return [rollout.reward for rollout in scored.rollouts]

    def _submit(
        self, groups: Sequence[Mapping[str, Any]], seqs: Sequence[int], temperature: float
    ) -> tuple[str, list[str]]:
        """Queue the job, which takes the ratings. Raises what a posted job is refused with."""
        parts, wanted = self._parts, self._config
        config = {**wanted.config, "output_name": wanted.adapter, "temperature": temperature}
        if wanted.base == "active":
            config["base_adapter"] = str(parts.policies.active) if not parts.policies.active.is_base else "base"
        request = GrpoRequest.model_validate_json(
            json.dumps({"groups": list(groups), "config": config}, allow_nan=False)
        )
        submission = prepare_grpo(
            request,
            base=self._text_model,
            store=parts.store,
            rollouts=parts.ledger.rollouts,
            pending=parts.ledger.pending(),
        )
        summary = {**submission.summary, "automatic": True, "ratings": len(seqs)}
        book = parts.feedback
        submission = replace(submission, summary=summary)
        answer = submit(parts.config, parts.ledger, submission, claim=lambda db, job: book.claim(db, seqs, job))
        return answer.job_id, answer.warnings

    def close(self) -> None:
        """End the reward processes."""
        self._scorer.close()


def as_asked(
    id: str, prompt_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, *, columns: Mapping[str, Any] | None = None
) -> Prompt:
    """Return a request's prompt as rewards get it: one user message with the conversation as text."""
    said: Message = {"role": "user", "content": plain_text(prompt_ids, tokenizer)}
    return Prompt(id=id, messages=(said,), columns=columns or {}, token_ids=tuple(prompt_ids))


def _record(prompt_ids: Sequence[int], completion: Completion, params: SamplingParams) -> RolloutRecord:
    return RolloutRecord(
        id=f"rollout-{secrets.token_hex(12)}",
        prompt_ids=tuple(prompt_ids),
        completion_ids=completion.token_ids,
        logprobs=completion.logprobs,
        version=str(completion.version),
        temperature=params.temperature,
        finish_reason=completion.finish_reason.value,
        text=completion.text,
        reshaped=params.reshaped,
        kept=completion.kept,
        kept_logprobs=completion.kept_logprobs,
        routed_experts=completion.routed_experts,
    )


def completion_of(record: RolloutRecord, text: str) -> Completion:
    """Return a kept answer as rewards get it."""
    return Completion(
        token_ids=record.completion_ids,
        logprobs=record.logprobs,
        text=text,
        finish_reason=FinishReason(record.finish_reason),
    )


# ---- over HTTP ----
@dataclass(frozen=True, kw_only=True)
class LearnParts:
    """The parts of a server that these routes use."""

    config: ServeConfig
    ledger: Ledger
    policies: Policies
    feedback: FeedbackLog
    trainer: FeedbackTrainer | None
    gate: Gatekeeper | None
    raters: Raters | None


Learning = Annotated[LearnParts, given(LearnParts)]


@router.get("", **documented(answer=LearnAnswer))
async def learning(parts: Learning) -> LearnAnswer:
    """Say what automatic training does, or why it does nothing; and what it did lately, newest first."""
    return await asyncio.to_thread(shown, parts)


@router.get("/transitions", **documented(answer=LearnHistory))
async def learn_history(
    parts: Learning,
    before: Annotated[int | None, Query(ge=0, le=2**62, description="The `next` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_SHOWN)] = SHOWN,
) -> LearnHistory:
    """List what automatic training, gates and canaries did, newest first, as far as it is kept."""
    found = await asyncio.to_thread(parts.feedback.transitions, before=before, limit=limit + 1)
    following = found[limit - 1].seq if len(found) > limit else None
    return LearnHistory(transitions=[transition_shown(each) for each in found[:limit]], next=following)


@router.post("/pause", **documented(answer=LearnAnswer, errors=[RequestError]))
async def pause(parts: Learning) -> LearnAnswer:
    """Make no more jobs by itself, also after a restart. A job that is queued continues; cancel it to stop it."""
    return await asyncio.to_thread(_set_paused, parts, True)


@router.post("/resume", **documented(answer=LearnAnswer, errors=[RequestError]))
async def resume(parts: Learning) -> LearnAnswer:
    """Make jobs again."""
    return await asyncio.to_thread(_set_paused, parts, False)


@router.post("/promote", **documented(answer=LearnAnswer, errors=[RequestError]))
async def promote(parts: Learning) -> LearnAnswer:
    """Make the version that is on trial the active one, without waiting for more ratings."""
    await _on_trial(parts).promote("by hand", by_hand=True)
    return await asyncio.to_thread(shown, parts)


@router.post("/reject", **documented(answer=LearnAnswer, errors=[RequestError]))
async def reject(parts: Learning) -> LearnAnswer:
    """End the trial: the version stays in the store and answers no more requests."""
    await _on_trial(parts).reject("by hand")
    return await asyncio.to_thread(shown, parts)


def _on_trial(parts: LearnParts) -> Gatekeeper:
    if parts.gate is None or parts.gate.trial is None:
        raise RequestError("no version is on trial", hint="GET /v1/learn says what is")
    return parts.gate


def _set_paused(parts: LearnParts, paused: bool) -> LearnAnswer:
    if parts.trainer is None:
        raise RequestError("this server makes no jobs by itself", hint="start it with `learn` in its configuration")
    if parts.trainer.paused != paused:
        kind, message = ("paused", "paused by hand") if paused else ("resumed", "resumed by hand")
        parts.feedback.note(kind, message, settings={PAUSED: paused})
    return shown(parts)


def shown(parts: LearnParts) -> LearnAnswer:
    """Return the state of automatic training, as the route answers it. Reads the disk."""
    config, trainer = parts.config.learn, parts.trainer
    lately = automatic_jobs(parts.ledger)
    running = next((job for job in lately if not job.state.is_final), None)
    return LearnAnswer(
        enabled=config is not None,
        paused=trainer is not None and trainer.paused,
        reason="`learn` is not in the server's configuration" if trainer is None else trainer.reason,
        adapter=None if config is None else config.adapter,
        ratings=0 if trainer is None else trainer.trainable,
        after=None if config is None else config.after,
        counts=parts.feedback.counts(),
        job_id=None if running is None else running.id,
        jobs_last_hour=sum(job.created_at > time.time() - HOUR_S for job in lately),
        max_jobs_per_hour=None if config is None else config.max_jobs_per_hour,
        active=str(parts.policies.active),
        trial=None if (trial := parts.policies.trial) is None else str(trial.version),
        trial_share=None if trial is None else trial.share,
        trial_stage=None if trial is None else trial.stage,
        trial_pairs=None if trial is None or trial.stage != "shadow" else len(trial.pairs),
        trial_ratings=None if parts.gate is None else parts.gate.heard(),
        trial_most=None if parts.gate is None else parts.gate.most,
        raters=[] if parts.raters is None else parts.raters.shown(limit=SHOWN),
        transitions=[transition_shown(each) for each in parts.feedback.transitions(limit=SHOWN)],
    )


def transition_shown(transition: Transition) -> LearnTransition:
    """Return a transition as it is answered."""
    return LearnTransition(
        seq=transition.seq,
        at=str(utc(transition.at)),
        kind=transition.kind,
        message=transition.message,
        data=dict(transition.data),
    )
