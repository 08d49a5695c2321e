"""The completions of a run on disk, in the shape in which a server shows its own.

    page         rows out of rollouts/step_*.jsonl, newest step first; the cursor is (step, place in it) in one number
    sorted_page  the same by reward or length, where the files are no more than one page reads
    facets       steps, versions, ends and tags that the rows can be filtered by
    group        the completions of one prompt, token by token; ids are {step}.{group}.{completion}
    steps_of     the steps whose completions were written
    groups_of    every group of a step, one after the other
    change_of    held-out prompts out of evaluations/, before training and after it

A step's file is written in one move, so each is whole. A request reads so many bytes at most and then gives a cursor:
a search through thousands of steps is many short requests.
"""

from __future__ import annotations

import heapq
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from groupwise.errors import RequestError
from groupwise.pictures import kept_pictures
from groupwise.run.evaluate import evaluation_files
from groupwise.server.kept_images import digests_of
from groupwise.server.rollout_view import Block, columns, completion, finite, messages
from groupwise.server.run_pairs import within
from groupwise.server.schema_rollouts import (
    PREVIEW,
    RolloutFacets,
    RolloutNotFoundError,
    RolloutPage,
    RolloutRow,
    Sort,
    best_first,
    most_first,
)
from groupwise.server.schema_runs import RolloutPart, RunChange, RunEvaluations, RunRollout, RunRolloutGroup
from groupwise.server.token_texts import find_tokenizer, text_of_ids
from groupwise.store.rundir import IMAGES
from groupwise.store.tracking import ROLLOUTS
from groupwise.types import SamplingParams

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from groupwise.server.run_files import RunFiles

READ_BYTES = 64 << 20  # files that one page opens, at least one
MOST_TAGS = 50  # values of a column that is a tag
MOST_TOKENS = 20_000  # of a completion that is shown
PLACES = 1 << 32  # completions in a step
_ID = re.compile(r"(\d{1,12})\.(\d{1,12})(?:\.\d{1,12})?", re.ASCII)
_STEP = re.compile(r"step_(\d+)\.jsonl")
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, IndexError)  # what a damaged line raises

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SampleQuery:
    """Filters of a search for a run's completions; None does not filter."""

    step: int | None = None
    contains: str | None = None
    finish_reason: str | None = None
    version: str | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    tag: tuple[str, str] | None = None
    """A column of the prompt, and its value as text."""
    prompt_id: str | None = None

    def has(self, sampled: FoundRow) -> bool:
        row, wanted = sampled.row, self.contains and self.contains.casefold()
        low, high = self.reward_min, self.reward_max
        if low is not None or high is not None:
            reward = row.reward
            if reward is None or (low is not None and reward < low) or (high is not None and reward > high):
                return False
        return (
            (not wanted or wanted in sampled.text.casefold() or wanted in sampled.prompt.casefold())
            and (self.tag is None or sampled.tags.get(self.tag[0]) == self.tag[1])
            and self.prompt_id in (None, sampled.prompt_id)
            and self.finish_reason in (None, row.finish_reason)
            and self.version in (None, row.version)
        )


def page(run: RunFiles, wanted: SampleQuery, *, after: int | None, limit: int) -> RolloutPage:
    """Return up to `limit` rows after the cursor `after`."""
    begin, skip = (None, 0) if after is None else divmod(after, PLACES)
    rows, read = list[RolloutRow](), 0
    for step, path in _files(run):
        if (begin is not None and step > begin) or wanted.step not in (None, step):
            continue
        if read >= READ_BYTES:
            return RolloutPage(rows=rows, next=step * PLACES)
        found, size = _rows(run, step, path)
        read += size
        for place in range(skip if step == begin else 0, len(found)):
            if wanted.has(found[place]):
                rows.append(found[place].row)
                if len(rows) == limit:
                    return RolloutPage(rows=rows, next=step * PLACES + place + 1)
    return RolloutPage(rows=rows, next=None)


def sorted_page(run: RunFiles, wanted: SampleQuery, sort: Sort, *, after: int | None, limit: int) -> RolloutPage:
    """`page` in another order than newest first; the cursor is how many rows are behind. Raises RequestError where the
    files are more than one page reads."""
    places = tuple((step, path) for step, path in _files(run) if wanted.step in (None, step))
    stats = tuple(_stat(path) for _, path in places)
    size = sum(size for _, size in stats)
    if size > READ_BYTES and len(places) > 1:
        message = f"sort={sort} would read {size >> 20} MiB of completions, and reads at most {READ_BYTES >> 20} MiB"
        raise RequestError(message, hint="give a step, or leave sort out: newest first", field="sort")
    found = _in_order(run, wanted, sort, places, stats)
    begin = after or 0
    following = begin + limit
    return RolloutPage(rows=list(found[begin:following]), next=following if following < len(found) else None)


@lru_cache(maxsize=2)  # pages are asked for one after another
def _in_order(
    run: RunFiles,
    wanted: SampleQuery,
    sort: Sort,
    places: tuple[tuple[int, Path], ...],
    stats: tuple[tuple[int, int], ...],
) -> Sequence[RolloutRow]:
    rows = [each.row for step, path in places for each in _rows(run, step, path)[0] if wanted.has(each)]
    if sort in ("best", "worst"):
        sign = -1 if sort == "best" else 1
        return sorted(rows, key=lambda row: math.inf if row.reward is None else sign * row.reward)
    if sort in ("longest", "shortest"):
        return sorted(rows, key=lambda row: row.completion_tokens, reverse=sort == "longest")
    return sorted(rows, key=lambda row: int(row.id.partition(".")[0]))  # the oldest step first


def facets(run: RunFiles) -> RolloutFacets:
    """Return the values by which completions can be filtered, counted in the newest files, as far as one page reads."""
    versions, reasons, tags = Counter[str](), Counter[str](), dict[str, Counter[str]]()
    counted = read = 0
    places = _files(run)
    for step, path in places:
        if read >= READ_BYTES:
            break
        rows, size = _rows(run, step, path)
        read, counted = read + size, counted + len(rows)
        for each in rows:
            versions[each.row.version or ""] += 1
            reasons[each.row.finish_reason or ""] += 1
            for name, value in each.tags.items():
                tags.setdefault(name, Counter())[value] += 1
    few = {name: values for name, values in sorted(tags.items()) if len(values) <= MOST_TAGS and len(values) < counted}
    return RolloutFacets(
        counted=counted,
        versions=most_first(versions.items()),
        finish_reasons=most_first(reasons.items()),
        steps=[step for step, _ in places],
        tags={name: most_first(values.items()) for name, values in few.items()},
    )


def prompt_id(run: RunFiles, id: str) -> str:
    """Return the id of the prompt of a rollout, the same at every step. Raises RolloutNotFoundError."""
    found = group(run, id)  # which says what is wrong with the id
    step, number = map(int, found.group.split("."))
    return str(dict(_lines(_file(run, step)))[number]["prompt"]["id"])


def group(run: RunFiles, id: str) -> RunRolloutGroup:
    """Return the group of a rollout. Raises RolloutNotFoundError."""
    match = _ID.fullmatch(id)
    step, number = (int(match[1]), int(match[2])) if match else (0, 0)
    path = _file(run, step)
    lines = dict(_lines(path)) if match else {}
    if number not in lines:
        message = f"there is no rollout {id[:64]!r} in run {run.id}"
        raise RolloutNotFoundError(message, hint="ids are {step}.{group}.{completion}, as GET .../rollouts gives them")
    try:
        return _group(_Line(run, f"{step}.{number}", lines[number], path))
    except _DAMAGE as error:
        message = f"group {number} of step {step} is damaged: {type(error).__name__}: {error}"
        raise RolloutNotFoundError(message, hint="look at the file in the run's rollouts/") from error


def steps_of(run: RunFiles) -> list[int]:
    """Return the steps whose completions were written, oldest first."""
    return [step for step, _ in reversed(_files(run))]


def groups_of(
    run: RunFiles, step: int, *, tokens: int = MOST_TOKENS, left_out: Callable[[str], object] = log.warning
) -> Iterator[RunRolloutGroup]:
    """Yield every group of a step as `group` gives it, at most so many tokens of each completion. What is damaged is
    not among them; `left_out` is told of it."""
    path = _file(run, step)
    for number, raw in _lines(path, left_out):
        try:
            yield _group(_Line(run, f"{step}.{number}", raw, path), tokens=tokens)
        except _DAMAGE as error:
            left_out(_damaged(path, number, error))


# ---- files ----
def _file(run: RunFiles, step: int) -> Path:
    return run.directory / ROLLOUTS / f"step_{step:06d}.jsonl"


def _damaged(path: Path, number: int, error: Exception) -> str:
    return f"{path}, line {number + 1} is left out: {type(error).__name__}: {error}"


def _files(run: RunFiles) -> list[tuple[int, Path]]:
    """Return the newest step first."""
    named = ((_STEP.fullmatch(path.name), path) for path in (run.directory / ROLLOUTS).glob("step_*.jsonl"))
    return sorted(((int(match[1]), path) for match, path in named if match), reverse=True)


def _lines(path: Path, left_out: Callable[[str], object] = log.warning) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield (number, group) for each line that is JSON; none for a file that is gone."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file):
                try:
                    yield number, json.loads(line)
                except ValueError as error:
                    left_out(_damaged(path, number, error))
    except OSError as error:
        left_out(f"{path} is left out: {error}")


class FoundRow(NamedTuple):
    """A completion in a list, with what it is searched by."""

    row: RolloutRow
    text: str
    prompt: str
    tags: Mapping[str, str]
    prompt_id: str


def _rows(run: RunFiles, step: int, path: Path) -> tuple[Sequence[FoundRow], int]:
    """Return every completion of a step, and the file's size."""
    changed, size = _stat(path)
    return (_parsed(run, step, path, changed, size), size) if size else ((), 0)


def _stat(path: Path) -> tuple[int, int]:
    """Return when a file was changed, and its size; 0 of one that is gone, as a run that continues from a checkpoint
    removes what it will write again."""
    try:
        stat = path.stat()
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=8)  # pages are asked for one after another
def _parsed(run: RunFiles, step: int, path: Path, changed: int, size: int) -> tuple[FoundRow, ...]:
    rows: list[FoundRow] = []
    for number, raw in _lines(path):
        try:
            rows += _Line(run, f"{step}.{number}", raw, path).rows()
        except _DAMAGE as error:
            log.warning(_damaged(path, number, error))
    return tuple(rows)


# ---- a line of a file ----
class _Line:
    """A group as it was recorded in the file `path`."""

    def __init__(self, run: RunFiles, id: str, raw: Mapping[str, Any], path: Path):
        config = run.config()[0]
        self.id, self.raw, self._run, self._folder = id, raw, run.id, run.directory / IMAGES
        self.prompt_ids: Sequence[int] = raw["prompt"]["token_ids"]
        self.tokenizer = _tokenizer(config.get("model"))
        self.prompt = _prompt(raw["prompt"], self.tokenizer)
        self._params = _params(config.get("rollout"))
        self._created = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="milliseconds")

    def rows(self) -> list[FoundRow]:
        texts = [self.text(i) for i in range(len(self.raw["rollouts"]))]
        fields = [self.fields(i, self.prompt[-PREVIEW:], text[:PREVIEW]) for i, text in enumerate(texts)]
        tags, prompt_id = dict(columns(self.raw["prompt"])), str(self.raw["prompt"]["id"])
        return [
            FoundRow(RolloutRow(**each), text, self.prompt, tags, prompt_id)
            for each, text in zip(fields, texts, strict=True)
        ]

    def text(self, i: int) -> str:
        """Return the policy's text, turn by turn."""
        return "\n".join(turn["text"] for turn in self.raw["rollouts"][i]["turns"])

    def fields(self, i: int, prompt: str, text: str) -> dict[str, Any]:
        """Return the fields of a `RolloutRow`."""
        raw = self.raw["rollouts"][i]
        turns = raw["turns"]
        reason = turns[-1]["finish_reason"] if turns else None
        return {
            "id": f"{self.id}.{i}",
            "group": self.id,
            "prompt": prompt,
            "text": text,
            "reward": finite(raw["reward"]),
            "job": None,
            "advantage": finite(raw["advantage"]),
            "version": str(turns[-1]["version"]) if turns else None,
            "finish_reason": reason if reason in ("stop", "length") else None,
            "temperature": self._params.temperature,
            "reshaped": list(self._params.reshaped),
            "prompt_tokens": len(self.prompt_ids),
            "completion_tokens": sum(len(turn["token_ids"]) for turn in turns),
            "created_at": self._created,
        }

    def detail(self, i: int, *, tokens: int = MOST_TOKENS) -> RunRollout:
        raw = self.raw["rollouts"][i]
        shown = completion(raw, self.prompt_ids, self.tokenizer, budget=tokens)
        gaps = [piece.gap for piece in shown.pieces]
        return RunRollout(
            **self.fields(i, self.prompt, self.text(i)),
            rewards=dict(shown.rewards),
            error=shown.error,
            token_ids=[id for turn in raw["turns"] for id in turn["token_ids"]],
            tokens=[piece.text for piece in shown.pieces],
            logprobs=[piece.logprob for piece in shown.pieces],
            gaps=None if all(gap is None for gap in gaps) else gaps,
            parts=[] if shown.stop is None else [self._part(block) for block in shown.blocks],
            ended=None if shown.stop is None else shown.ended,
        )

    def images(self) -> list[str | None] | None:
        """Return the addresses of the prompt's images; None where it has none."""
        return self._addresses(digests_of(self.prompt_ids, self._folder)) or None

    def _part(self, block: Block) -> RolloutPart:
        kinds = {piece.kind for piece in block.pieces}
        kept = (digest if kept_pictures(self._folder, digest) else None for digest in block.images)
        return RolloutPart(
            role=block.role,
            tokens=len(block.pieces),
            images=self._addresses(kept) or None,
            reward=block.reward,
            begins_segment=block.fork,
            trained=not kinds & {"seen", "given"},
        )

    def _addresses(self, digests: Iterable[str | None]) -> list[str | None]:
        return [None if digest is None else f"/v1/runs/{quote(self._run)}/images/{digest}" for digest in digests]


def _params(rollout: object) -> SamplingParams:
    """Return how a run of this configuration samples, as far as it says."""
    given = rollout if isinstance(rollout, Mapping) else {}
    names = ("temperature", "top_p", "top_k", "min_p")
    return SamplingParams(**{name: given[name] for name in names if isinstance(given.get(name), int | float)})


def _group(line: _Line, *, tokens: int = MOST_TOKENS) -> RunRolloutGroup:
    return RunRolloutGroup(
        group=line.id,
        prompt=line.prompt,
        prompt_token_ids=list(line.prompt_ids),
        images=line.images(),
        columns=dict(columns(line.raw["prompt"])),
        rollouts=best_first(line.detail(i, tokens=tokens) for i in range(len(line.raw["rollouts"]))),
    )


@lru_cache(maxsize=16)
def _tokenizer(model: str | None) -> Tokenizer | None:
    return find_tokenizer(model)


def _prompt(raw: Mapping[str, Any], tokenizer: Tokenizer | None) -> str:
    """Return it as the model reads it; without its tokenizer, message by message; "" of a case that failed before it
    had one."""
    if tokenizer is not None and raw["token_ids"]:
        return text_of_ids(raw["token_ids"], tokenizer)
    told: Callable[[tuple[str, str]], str] = ": ".join
    return raw["text"] or "" if raw["messages"] is None else "\n\n".join(map(told, messages(raw)))


# ---- held-out prompts ----
PAIRS = 3  # shown that got better, and as many that got worse
PAIR_TOKENS = 1000  # of a completion that is shown


def change_of(run: RunFiles) -> RunEvaluations:
    """Return the comparison of the first evaluation with the last, or with that of the version which the run keeps
    (`eval.best`); greedy if the run evaluated greedily.

    The comparison is empty (`mode` is None) if there are not two evaluations, if they cannot be read, or if their
    prompts differ.
    """
    nothing = RunEvaluations(
        run=run.id, mode=None, first=None, last=None, prompts=0, better=0, worse=0, paired=[], changed=[]
    )
    by_mode = evaluation_files(run.directory)
    mode = "greedy" if "greedy" in by_mode else next(iter(by_mode), "")
    files = by_mode.get(mode, {})
    if len(files) < 2:
        return nothing
    kept = run.kept_step()
    first, last = min(files), kept if kept in files else max(files)
    try:
        prompts, better, worse = _compare(files[first], files[last])
        pairs = [
            RunChange(
                prompt=before.prompt,
                images=before.images(),
                columns=dict(columns(before.raw["prompt"])),
                before=before.detail(0, tokens=PAIR_TOKENS),
                after=after.detail(0, tokens=PAIR_TOKENS),
            )
            for old, new in (*better.largest(), *worse.largest())
            for before, after in [
                (_Line(run, f"{first}.{mode}", old, files[first]), _Line(run, f"{last}.{mode}", new, files[last]))
            ]
        ]
    except (*_DAMAGE, OSError) as error:
        log.warning("the evaluations at steps %d and %d are left out: %s: %s", first, last, type(error).__name__, error)
        return nothing
    return RunEvaluations(
        run=run.id,
        mode=mode,
        first=first,
        last=last,
        prompts=prompts,
        better=better.count,
        worse=worse.count,
        paired=within(run, first, last),
        changed=pairs,
    )


@dataclass
class _Changes:
    """Prompts whose reward changed in one direction: how many, and the few that changed most."""

    count: int = 0
    kept: list[tuple[float, int, Mapping[str, Any], Mapping[str, Any]]] = field(default_factory=list)

    def add(self, change: float, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        self.count += 1
        heapq.heappush(self.kept, (abs(change), -self.count, before, after))
        if len(self.kept) > PAIRS:
            heapq.heappop(self.kept)

    def largest(self) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        return [(before, after) for _, _, before, after in sorted(self.kept, key=lambda each: each[:2], reverse=True)]


def _compare(first: Path, last: Path) -> tuple[int, _Changes, _Changes]:
    """Return how many prompts there are, and which of them got better and worse. ValueError if they are not the
    same."""
    prompts, better, worse = 0, _Changes(), _Changes()
    for before, after in zip(_evaluated(first), _evaluated(last), strict=True):
        if before["prompt"]["id"] != after["prompt"]["id"]:
            raise ValueError("not the same prompts")
        prompts += 1
        old, new = (finite(each["rollouts"][0]["reward"]) for each in (before, after))
        if old is not None and new is not None and old != new:
            (better if new > old else worse).add(new - old, before, after)
    return prompts, better, worse


def _evaluated(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the groups of an evaluation that have a completion; the head of its file is none."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            raw = json.loads(line)
            if not ("rollouts" not in raw and "success" in raw) and raw["rollouts"]:
                yield raw
