"""GET /v1/rollouts and /v1/rollouts/{id}: what was sampled here, and what jobs were trained on, to be read by people.

    recent   completions that /v1/completions/batch kept, newest first; nobody knows their rewards
    a job    the completions it was posted, by group, with reward and advantage; ids are {job_id}.{group}.{completion}

Pages go by a cursor, so that a hundred thousand rows are read as they are scrolled to. The ledger's file is read
through a connection that cannot write and that nobody else waits for.
"""

from __future__ import annotations

import hashlib
import sqlite3
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool

from groupwise.algo.advantage import advantages, gdpo_advantages
from groupwise.config.job import GrpoJobConfig, parse_job_config
from groupwise.errors import DamagedPayloadError, JobNotFoundError, RequestError
from groupwise.model.chat import decode, stop_ids
from groupwise.server.reply import Detokenizer, plain_text, token_text
from groupwise.server.sampling import sendable
from groupwise.server.schema import (
    MOST_ROWS,
    PREVIEW,
    RolloutDetail,
    RolloutGroupDetail,
    RolloutNotFoundError,
    RolloutPage,
    RolloutRow,
    best_first,
)
from groupwise.server.state import Server, server_of
from groupwise.server.webhooks import utc
from groupwise.server.wire import documented
from groupwise.store.job_payload import EncodedGroup, GrpoPayload, parse_payload
from groupwise.store.ledger import Job, Ledger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_IN_GROUP = 1024

_COLUMNS = (
    "seq, id, prompt_ids, completion_ids, logprobs, version, temperature, finish_reason, text, reshaped, created_at"
)

router = APIRouter(prefix="/v1/rollouts", tags=["rollouts"])


# ---- routes ----
@router.get("", **documented(answer=RolloutPage, errors=[JobNotFoundError, DamagedPayloadError, RequestError]))
async def list_rollouts(
    request: Request,
    job: Annotated[str | None, Query(description="The completions that this job trained on.")] = None,
    after: Annotated[int | None, Query(ge=0, le=2**62, description="The `next` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_ROWS)] = 200,
    contains: Annotated[str | None, Query(max_length=500, description="Text of the completion.")] = None,
    finish_reason: Annotated[Literal["stop", "length"] | None, Query(description="length: cut.")] = None,
    version: Annotated[str | None, Query(max_length=100)] = None,
    reward_min: Annotated[float | None, Query(description="Of a job's completions.")] = None,
    reward_max: Annotated[float | None, Query(description="Of a job's completions.")] = None,
) -> RolloutPage:
    """Completions that were sampled for training, newest first; or those that a job was posted, by group."""
    server = server_of(request)
    if job is None:
        return await run_in_threadpool(_recent, server, after, limit, contains, finish_reason, version)
    rewards = (float("-inf") if reward_min is None else reward_min, float("inf") if reward_max is None else reward_max)
    return await run_in_threadpool(_of_job, server, job, after, limit, contains, rewards)


@router.get(
    "/{id}",
    **documented(answer=RolloutGroupDetail, errors=[RolloutNotFoundError, JobNotFoundError, DamagedPayloadError]),
)
async def show_rollout(request: Request, id: str) -> RolloutGroupDetail:
    """The group of a rollout: every completion of its prompt, token by token."""
    return await run_in_threadpool(_group, server_of(request), id)


def _group(server: Server, id: str) -> RolloutGroupDetail:
    rollouts, prompt_ids = _group_of_job(server, id) if "." in id else _group_of_recent(server, id)
    tokenizer = server.base.tokenizer
    return RolloutGroupDetail(
        group=rollouts[0].group,
        prompt=plain_text(prompt_ids, tokenizer),
        prompt_token_ids=list(prompt_ids),
        rollouts=best_first(rollouts),
    )


# ---- sampled lately ----
def _recent(
    server: Server, after: int | None, limit: int, contains: str | None, finish_reason: str | None, version: str | None
) -> RolloutPage:
    wanted = {"seq < ?": after, "instr(text, ?) > 0": contains, "finish_reason = ?": finish_reason}
    wanted |= {"version = ?": version}
    given = {test: value for test, value in wanted.items() if value is not None}
    where = f"WHERE {' AND '.join(given)}" if given else ""
    with server.ledger.reader("reading the rollouts") as db:
        query = f"SELECT {_COLUMNS} FROM rollout {where} ORDER BY seq DESC LIMIT ?"
        found = db.execute(query, (*given.values(), limit)).fetchall()
    prompts = {
        blob: plain_text(array("i", blob), server.base.tokenizer) for blob in {row["prompt_ids"] for row in found}
    }
    rows = [RolloutRow(**_row(row, prompts[row["prompt_ids"]][-PREVIEW:], row["text"][:PREVIEW])) for row in found]
    return RolloutPage(rows=rows, next=found[-1]["seq"] if len(found) == limit else None)


def _row(row: sqlite3.Row, prompt: str, text: str) -> dict[str, Any]:
    key = hashlib.sha256(row["prompt_ids"] + repr(row["created_at"]).encode()).hexdigest()[:16]
    kept = {name: row[name] for name in ("id", "version", "finish_reason", "temperature")}
    return {
        **kept,
        "group": key,
        "prompt": prompt,
        "text": text,
        "reshaped": row["reshaped"].split(),
        "reward": None,
        "advantage": None,
        "prompt_tokens": len(row["prompt_ids"]) // array("i").itemsize,
        "completion_tokens": len(row["completion_ids"]) // array("i").itemsize,
        "created_at": str(utc(row["created_at"])),
    }


def _group_of_recent(server: Server, id: str) -> tuple[list[RolloutDetail], Sequence[int]]:
    with server.ledger.reader("reading the rollouts") as db:
        one = db.execute("SELECT prompt_ids, created_at FROM rollout WHERE id = ?", (id,)).fetchone()
        if one is None:
            raise RolloutNotFoundError(f"there is no rollout {id[:64]!r}", hint="rollouts are kept for 7 days")
        query = f"SELECT {_COLUMNS} FROM rollout WHERE created_at = ? AND prompt_ids = ? ORDER BY seq LIMIT ?"
        rows = db.execute(query, (one["created_at"], one["prompt_ids"], MOST_IN_GROUP)).fetchall()
    prompt_ids, tokenizer = array("i", one["prompt_ids"]), server.base.tokenizer
    prompt = plain_text(prompt_ids, tokenizer)
    return [
        RolloutDetail(
            **_row(row, prompt, row["text"]), **_tokens(array("i", row["completion_ids"]), row["logprobs"], tokenizer)
        )
        for row in rows
    ], prompt_ids


def _tokens(ids: Sequence[int], logprobs: bytes | Sequence[float] | None, tokenizer: PreTrainedTokenizerBase) -> dict:
    known = array("d", logprobs) if isinstance(logprobs, bytes) else logprobs
    return {
        "rewards": {},
        "error": None,
        "token_ids": list(ids),
        "tokens": _pieces(ids, tokenizer),
        "logprobs": None if known is None else list(map(sendable, known)),
    }


def _pieces(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text in as many pieces as there are tokens; a character of several stands with the last of them."""
    ends, stream = stop_ids(tokenizer), Detokenizer(tokenizer)
    pieces = [stream.push(id) for id in ids]
    last = len(ids)
    while last and ids[last - 1] in ends:
        last -= 1
        pieces[last] = token_text(ids[last], tokenizer)[0]
    if last:
        given = sum(map(len, pieces[:last]))
        pieces[last - 1] += decode(ids, tokenizer)[given:]
    return pieces


# ---- what a job was posted ----
@dataclass(frozen=True, kw_only=True)
class _Posted:
    """A job's groups; `places` is (group, completion) of every one, in order."""

    job: Job
    groups: Sequence[EncodedGroup]
    temperature: float
    advantages: Sequence[Sequence[float | None]]
    places: Sequence[tuple[int, int]]

    def reward(self, place: tuple[int, int]) -> float:
        return self.groups[place[0]].completions[place[1]].reward

    def text(self, place: tuple[int, int], tokenizer: PreTrainedTokenizerBase) -> str:
        return decode(self.groups[place[0]].completions[place[1]].ids, tokenizer)

    def row(self, place: tuple[int, int], prompt: str, text: str) -> dict[str, Any]:
        (i, j), job = place, self.job
        group = self.groups[i]
        return {
            "id": f"{job.id}.{i}.{j}",
            "group": f"{job.id}.{i}",
            "prompt": prompt,
            "text": text,
            "reward": group.completions[j].reward,
            "advantage": self.advantages[i][j],
            "version": None,
            "finish_reason": None,
            "temperature": self.temperature,
            "reshaped": [],
            "prompt_tokens": len(group.prompt_ids),
            "completion_tokens": len(group.completions[j].ids),
            "created_at": str(utc(job.created_at)),
        }


@lru_cache(maxsize=1)  # its pages are asked for one after another
def _posted(ledger: Ledger, job_id: str) -> _Posted:
    job = ledger.job(job_id)
    config, payload = parse_job_config(job.kind, job.config), parse_payload(job.kind, ledger.payload(job_id))
    if not isinstance(config, GrpoJobConfig) or not isinstance(payload, GrpoPayload):
        hint = "only jobs of /v1/train/grpo have groups of completions"
        raise RequestError(f"job {job_id} is of kind {job.kind}, and has no rollouts", hint=hint, field="job")
    rewards = [[each.reward for each in group.completions] for group in payload.groups]
    if config.aggregation == "normalize_then_sum":
        weighed = gdpo_advantages([[{"reward": reward} for reward in group] for group in rewards], config)
    else:
        weighed = advantages(rewards, config)
    return _Posted(
        job=job,
        groups=payload.groups,
        temperature=payload.temperature,
        advantages=weighed,
        places=[(i, j) for i, group in enumerate(payload.groups) for j in range(len(group.completions))],
    )


def _of_job(
    server: Server, job_id: str, after: int | None, limit: int, contains: str | None, rewards: tuple[float, float]
) -> RolloutPage:
    posted, tokenizer, rows = _posted(server.ledger, job_id), server.base.tokenizer, list[RolloutRow]()
    prompts: dict[int, str] = {}
    for number, place in enumerate(posted.places[after or 0 :], start=(after or 0) + 1):
        if not rewards[0] <= posted.reward(place) <= rewards[1]:
            continue
        text = posted.text(place, tokenizer)
        if contains is not None and contains not in text:
            continue
        if place[0] not in prompts:
            prompts[place[0]] = plain_text(posted.groups[place[0]].prompt_ids, tokenizer)[-PREVIEW:]
        rows.append(RolloutRow(**posted.row(place, prompts[place[0]], text[:PREVIEW])))
        if len(rows) == limit:
            return RolloutPage(rows=rows, next=number if number < len(posted.places) else None)
    return RolloutPage(rows=rows, next=None)


def _group_of_job(server: Server, id: str) -> tuple[list[RolloutDetail], Sequence[int]]:
    job_id, _, place = id.partition(".")
    posted, tokenizer, number = _posted(server.ledger, job_id), server.base.tokenizer, place.partition(".")[0]
    if not (number.isascii() and number.isdigit() and int(number[:9]) < len(posted.groups)):
        message = f"there is no rollout {id[:64]!r}: job {job_id} has {len(posted.groups)} groups, from 0 on"
        raise RolloutNotFoundError(message, hint="ids are {job_id}.{group}.{completion}")
    i = int(number[:9])
    group = posted.groups[i]
    prompt = plain_text(group.prompt_ids, tokenizer)
    return [
        RolloutDetail(
            **posted.row((i, j), prompt, posted.text((i, j), tokenizer)),
            **_tokens(each.ids, each.logprobs, tokenizer),
        )
        for j, each in enumerate(group.completions)
    ], group.prompt_ids
