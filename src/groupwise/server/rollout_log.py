"""GET /v1/rollouts and /v1/rollouts/{id}: completions that were sampled here, and those that jobs were trained on, for
people to read.

    recent   completions that /v1/completions/batch and other requests kept, newest first, each with the reward that the
             newest job was posted for its id
    a job    the job's posted completions, by group, with reward and advantage; ids are {job_id}.{group}.{completion}

Pages go by a cursor, so that a hundred thousand rows are read while they are scrolled to. A search for text reads
prompts and completions, at most SCAN_ROWS rows for a page: such a page may have few rows, and still a next page.
The ledger's file is read through a separate connection that cannot write and that delays no other.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import sqlite3
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool

from groupwise.algo.advantage import advantages, gdpo_advantages
from groupwise.config.job import GrpoJobConfig, parse_job_config
from groupwise.errors import DamagedPayloadError, JobNotFoundError, RequestError
from groupwise.model.chat import decode, stop_ids
from groupwise.model.image_tokens import packed_ids, unpacked_ids
from groupwise.server.generate import sendable
from groupwise.server.images import images_of
from groupwise.server.schema_rollouts import (
    MOST_ROWS,
    PREVIEW,
    RolloutDetail,
    RolloutFacets,
    RolloutGroupDetail,
    RolloutNotFoundError,
    RolloutPage,
    RolloutRow,
    Sort,
    best_first,
    most_first,
)
from groupwise.server.state import given
from groupwise.server.webhooks import utc
from groupwise.server.wire import documented
from groupwise.store.job_payload import EncodedGroup, GrpoPayload, parse_payload
from groupwise.store.ledger import Job, Ledger
from groupwise.tasks.reply import Detokenizer, plain_text, token_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from groupwise.model.load import LoadedModel

MOST_IN_GROUP = 1024
SCAN_ROWS = 20_000  # that one page of a search for text looks at
COUNT_ROWS = 200_000  # that facets are counted in

_COLUMNS = (
    "seq, id, prompt_ids, completion_ids, logprobs, version, temperature, finish_reason, text, reshaped, created_at, "
    "job, reward"
)

router = APIRouter(prefix="/v1/rollouts", tags=["rollouts"])


@dataclass(frozen=True, kw_only=True)
class LogParts:
    """The parts of a server that these routes use."""

    base: LoadedModel
    ledger: Ledger


Log = Annotated[LogParts, given(LogParts)]


# ---- routes ----
JobFilter = Annotated[str | None, Query(description="The completions that this job trained on.")]
Reward = Annotated[float | None, Query(description="Completions without a reward are left out then.")]


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """Filters and order of a search for rollouts; None does not filter. With `like`, a prompt's token ids, only
    completions of this prompt are found."""

    contains: str | None = None
    finish_reason: str | None = None
    version: str | None = None
    rewards: tuple[float | None, float | None] = (None, None)
    like: str | None = None
    sort: Sort = "newest"


@router.get(
    "",
    **documented(
        answer=RolloutPage, errors=[JobNotFoundError, DamagedPayloadError, RolloutNotFoundError, RequestError]
    ),
)
async def list_rollouts(
    parts: Log,
    job: JobFilter = None,
    after: Annotated[int | None, Query(ge=0, le=2**62, description="The `next` of the page before.")] = None,
    since: Annotated[
        int | None, Query(ge=0, le=2**62, description="The `newest` of a page: only what came later.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_ROWS)] = 200,
    contains: Annotated[
        str | None, Query(max_length=500, description="Text of the prompt or the completion; case does not count.")
    ] = None,
    finish_reason: Annotated[
        Literal["stop", "length"] | None, Query(description="length: cut. Refused with `job`, which is not told.")
    ] = None,
    version: Annotated[
        str | None, Query(max_length=100, description="What sampled it. Refused with `job`, which is not told.")
    ] = None,
    reward_min: Reward = None,
    reward_max: Reward = None,
    like: Annotated[
        str | None, Query(max_length=100, description="A rollout's id: only completions of the same prompt.")
    ] = None,
    sort: Annotated[
        Sort | None,
        Query(description="Default: newest first; a job's as posted. best and worst are by reward."),
    ] = None,
) -> RolloutPage:
    """List completions that were sampled here, newest first; or those that a job was posted, by group."""
    by_time = sort if sort in ("newest", "oldest") else None
    if job is not None:
        _check_filters({"version": version, "finish_reason": finish_reason, "since": since, "sort": by_time})
    if since is not None and (sort not in (None, "newest") or after is not None):
        raise RequestError(
            "since goes with newest first, and without after", hint="leave sort and after out", field="since"
        )
    wanted = _Wanted(
        contains=None if contains is None else contains.casefold(),
        finish_reason=finish_reason,
        version=version,
        rewards=(reward_min, reward_max),
        like=like,
        sort=sort or "newest",
    )
    if job is None:
        return await run_in_threadpool(_recent, parts, wanted, after, since, limit)
    return await run_in_threadpool(_of_job, parts, job, wanted, after, limit)


def _check_filters(given: dict[str, Any]) -> None:
    """Raise RequestError for what would not act on a job's completions."""
    for name, value in given.items():
        if value is not None:
            message = f"{name}={value} does not act on what a job was posted, which has no time or sampler of its own"
            raise RequestError(message, hint="leave it out, or leave job out", field=name)


@router.get("/facets", **documented(answer=RolloutFacets))
async def count_rollouts(parts: Log) -> RolloutFacets:
    """Count what is kept by the version that sampled it and by how it ended: what to filter the list by."""
    return await run_in_threadpool(_facets, parts)


@router.get(
    "/{id}",
    **documented(answer=RolloutGroupDetail, errors=[RolloutNotFoundError, JobNotFoundError, DamagedPayloadError]),
)
async def show_rollout(id: str, parts: Log) -> RolloutGroupDetail:
    """Show the group of a rollout: every completion of its prompt, token by token."""
    return await run_in_threadpool(_group, parts, id)


def _group(parts: LogParts, id: str) -> RolloutGroupDetail:
    rollouts, prompt_ids = _group_of_job(parts, id) if "." in id else _group_of_recent(parts, id)
    tokenizer = parts.base.tokenizer
    return RolloutGroupDetail(
        group=rollouts[0].group,
        prompt=plain_text(prompt_ids, tokenizer),
        prompt_token_ids=list(prompt_ids),
        images=images_of(prompt_ids, tokenizer),
        rollouts=best_first(rollouts),
    )


# ---- sampled lately ----
_ORDERS: dict[Sort, str] = {
    "newest": "seq DESC",
    "oldest": "seq",
    "best": "reward DESC NULLS LAST, seq DESC",
    "worst": "reward NULLS LAST, seq DESC",
    "longest": "length(completion_ids) DESC, seq DESC",
    "shortest": "length(completion_ids), seq DESC",
}


def _recent(parts: LogParts, wanted: _Wanted, after: int | None, since: int | None, limit: int) -> RolloutPage:
    """Return a page. The cursor is the last row's number where rows go by time, else how many rows are behind."""
    by_time, forward = wanted.sort in ("newest", "oldest"), wanted.sort == "oldest"
    tests: dict[str, Any] = {"finish_reason = ?": wanted.finish_reason, "version = ?": wanted.version, "seq > ?": since}
    tests |= dict(zip(("reward >= ?", "reward <= ?"), wanted.rewards, strict=True))
    if by_time:
        tests["seq > ?" if forward else "seq < ?"] = after
    tests = {test: value for test, value in tests.items() if value is not None}
    skip = 0 if by_time or after is None else after
    with parts.ledger.reader("reading the rollouts") as db:
        if wanted.like is not None:
            tests["prompt_ids = ?"] = _prompt_of(db, wanted.like)
        where = f"WHERE {' AND '.join(tests)}" if tests else ""
        newest = db.execute("SELECT coalesce(max(seq), 0) FROM rollout").fetchone()[0]
        order = f"ORDER BY {_ORDERS[wanted.sort]}"
        chosen = f"SELECT seq AS place FROM rollout {where} {order} LIMIT ? OFFSET ?"  # numbers alone are sorted fast
        query = f"SELECT {_COLUMNS} FROM ({chosen}) JOIN rollout ON seq = place {order}"
        looked = limit if wanted.contains is None else SCAN_ROWS
        found, last, seen = list[sqlite3.Row](), None, 0
        for row in db.execute(query, (*tests.values(), looked, skip)):
            last, seen = row["seq"], seen + 1
            if wanted.contains is None or _mentions(row, wanted.contains, parts.base.tokenizer):
                found.append(row)
                if len(found) == limit:
                    break
    more = len(found) == limit or seen == looked
    prompts = {
        blob: plain_text(unpacked_ids(blob), parts.base.tokenizer) for blob in {row["prompt_ids"] for row in found}
    }
    rows = [RolloutRow(**_row(row, prompts[row["prompt_ids"]][-PREVIEW:], row["text"][:PREVIEW])) for row in found]
    following = None if not more else last if by_time else skip + seen
    return RolloutPage(rows=rows, next=following, newest=newest if wanted.sort == "newest" and after is None else None)


def _prompt_of(db: sqlite3.Connection, id: str) -> bytes:
    """Return the prompt of a rollout, as the ledger has it. Raises RolloutNotFoundError."""
    one = db.execute("SELECT prompt_ids FROM rollout WHERE id = ?", (id,)).fetchone()
    if one is None:
        raise RolloutNotFoundError(f"there is no rollout {id[:64]!r}", hint="rollouts are kept for 7 days")
    return one["prompt_ids"]


def _mentions(row: sqlite3.Row, wanted: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    return wanted in row["text"].casefold() or wanted in _searched(row["prompt_ids"], tokenizer)


@lru_cache(maxsize=20_000)  # the completions of a group share their prompt, and groups often theirs
def _searched(prompt_ids: bytes, tokenizer: PreTrainedTokenizerBase) -> str:
    return plain_text(unpacked_ids(prompt_ids), tokenizer).casefold()


def _facets(parts: LogParts) -> RolloutFacets:
    """Count versions and endings in the newest rows."""
    newest = "SELECT version, finish_reason FROM rollout ORDER BY seq DESC LIMIT ?"
    query = f"SELECT version, finish_reason, count(*) AS n FROM ({newest}) GROUP BY version, finish_reason"
    with parts.ledger.reader("counting the rollouts") as db:
        rows = db.execute(query, (COUNT_ROWS,)).fetchall()
    return RolloutFacets(
        counted=sum(row["n"] for row in rows),
        versions=most_first((row["version"], row["n"]) for row in rows),
        finish_reasons=most_first((row["finish_reason"], row["n"]) for row in rows),
        steps=[],
        tags={},
    )


def _row(row: sqlite3.Row, prompt: str, text: str) -> dict[str, Any]:
    key = hashlib.sha256(row["prompt_ids"] + repr(row["created_at"]).encode()).hexdigest()[:16]
    kept = {name: row[name] for name in ("id", "version", "finish_reason", "temperature", "reward", "job")}
    return {
        **kept,
        "group": key,
        "prompt": prompt,
        "text": text,
        "reshaped": row["reshaped"].split(),
        "advantage": None,
        "prompt_tokens": len(unpacked_ids(row["prompt_ids"])),
        "completion_tokens": len(row["completion_ids"]) // array("i").itemsize,
        "created_at": str(utc(row["created_at"])),
    }


def _group_of_recent(parts: LogParts, id: str) -> tuple[list[RolloutDetail], Sequence[int]]:
    with parts.ledger.reader("reading the rollouts") as db:
        one = db.execute("SELECT prompt_ids, created_at FROM rollout WHERE id = ?", (id,)).fetchone()
        if one is None:
            raise RolloutNotFoundError(f"there is no rollout {id[:64]!r}", hint="rollouts are kept for 7 days")
        query = f"SELECT {_COLUMNS} FROM rollout WHERE created_at = ? AND prompt_ids = ? ORDER BY seq LIMIT ?"
        rows = db.execute(query, (one["created_at"], one["prompt_ids"], MOST_IN_GROUP)).fetchall()
    prompt_ids, tokenizer = unpacked_ids(one["prompt_ids"]), parts.base.tokenizer
    prompt = plain_text(prompt_ids, tokenizer)
    return [
        RolloutDetail(
            **_row(row, prompt, row["text"]), **_tokens(unpacked_ids(row["completion_ids"]), row["logprobs"], tokenizer)
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
    """Return the text in as many pieces as there are tokens; a character of several stands with the last of them."""
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
    """Holds a job's groups; `places` is (group, completion) of every completion, in order."""

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
            "job": job.id,
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


def _of_job(parts: LogParts, job_id: str, wanted: _Wanted, after: int | None, limit: int) -> RolloutPage:
    """Return a page. The cursor is how many completions, in their order, are behind."""
    posted, tokenizer, rows = _posted(parts.ledger, job_id), parts.base.tokenizer, list[RolloutRow]()
    alike = None if wanted.like is None else posted.groups[_place_in(posted, wanted.like)].prompt_ids
    places, begin = _sorted(parts.ledger, job_id, wanted.sort), after or 0
    least, most = wanted.rewards
    least, most = -math.inf if least is None else least, math.inf if most is None else most
    for number, place in enumerate(itertools.islice(places, begin, None), start=begin + 1):
        group = posted.groups[place[0]]
        if not least <= posted.reward(place) <= most:
            continue
        if alike is not None and group.prompt_ids != alike:
            continue
        prompt_ids, text = packed_ids(group.prompt_ids), posted.text(place, tokenizer)
        mentions = wanted.contains is None or wanted.contains in text.casefold()
        if mentions or (wanted.contains or "") in _searched(prompt_ids, tokenizer):
            prompt = plain_text(group.prompt_ids, tokenizer)[-PREVIEW:]
            rows.append(RolloutRow(**posted.row(place, prompt, text[:PREVIEW])))
        if len(rows) == limit or number - begin == SCAN_ROWS:
            return RolloutPage(rows=rows, next=number if number < len(places) else None)
    return RolloutPage(rows=rows, next=None)


@lru_cache(maxsize=4)
def _sorted(ledger: Ledger, job_id: str, sort: Sort) -> Sequence[tuple[int, int]]:
    """Return a job's completions in order; as they were posted where it is not by reward or length."""
    posted = _posted(ledger, job_id)
    if sort in ("best", "worst"):
        return sorted(posted.places, key=posted.reward, reverse=sort == "best")
    if sort in ("longest", "shortest"):

        def length(place: tuple[int, int]) -> int:
            return len(posted.groups[place[0]].completions[place[1]].ids)

        return sorted(posted.places, key=length, reverse=sort == "longest")
    return posted.places


def _group_of_job(parts: LogParts, id: str) -> tuple[list[RolloutDetail], Sequence[int]]:
    job_id = id.partition(".")[0]
    posted, tokenizer = _posted(parts.ledger, job_id), parts.base.tokenizer
    i = _place_in(posted, id)
    group = posted.groups[i]
    prompt = plain_text(group.prompt_ids, tokenizer)
    return [
        RolloutDetail(
            **posted.row((i, j), prompt, posted.text((i, j), tokenizer)),
            **_tokens(each.ids, each.logprobs, tokenizer),
        )
        for j, each in enumerate(group.completions)
    ], group.prompt_ids


def _place_in(posted: _Posted, id: str) -> int:
    """Return the group that an id names. Raises RolloutNotFoundError."""
    job_id, _, place = id.partition(".")
    number = place.partition(".")[0]
    if not (job_id == posted.job.id and number.isascii() and number.isdigit() and int(number[:9]) < len(posted.groups)):
        message = f"there is no rollout {id[:64]!r}: job {posted.job.id} has {len(posted.groups)} groups, from 0 on"
        raise RolloutNotFoundError(message, hint="ids are {job_id}.{group}.{completion}")
    return int(number[:9])
