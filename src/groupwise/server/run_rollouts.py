"""The completions of a run, out of rollouts/step_*.jsonl, in the shape in which a server shows its own.

    page     rows, the newest step first; the cursor is (step, place in it) in one number
    group    the completions of one prompt, token by token; ids are {step}.{group}.{completion}

A step's file is written in one move, so each is whole. A request reads so many bytes at most and then gives a cursor:
a search through thousands of steps is many short requests.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.report.completion import completion, finite, messages
from groupwise.report.tokens import find_tokenizer
from groupwise.server.protocol_rollouts import (
    PREVIEW,
    RolloutDetail,
    RolloutGroup,
    RolloutNotFoundError,
    RolloutPage,
    RolloutRow,
    best_first,
)
from groupwise.server.run_files import RunFiles
from groupwise.store.tracking import ROLLOUTS
from groupwise.types import SamplingParams

if TYPE_CHECKING:
    from tokenizers import Tokenizer

READ_BYTES = 64 << 20  # files that one page opens, at least one
MOST_TOKENS = 20_000  # of a completion that is shown
PLACES = 1 << 32  # completions in a step
_ID = re.compile(r"(\d{1,12})\.(\d{1,12})(?:\.\d{1,12})?", re.ASCII)
_STEP = re.compile(r"step_(\d+)\.jsonl")
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, IndexError)  # what a damaged line raises

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is searched for; None is everything."""

    step: int | None = None
    contains: str | None = None
    finish_reason: str | None = None
    version: str | None = None
    reward_min: float | None = None
    reward_max: float | None = None

    def has(self, row: RolloutRow, text: str) -> bool:
        low, high = self.reward_min, self.reward_max
        if low is not None or high is not None:
            reward = row.reward
            if reward is None or (low is not None and reward < low) or (high is not None and reward > high):
                return False
        return (
            (self.contains is None or self.contains in text)
            and self.finish_reason in (None, row.finish_reason)
            and self.version in (None, row.version)
        )


def page(run: RunFiles, wanted: Wanted, *, after: int | None, limit: int) -> RolloutPage:
    """Up to `limit` rows behind the cursor `after`."""
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
            row, text = found[place]
            if wanted.has(row, text):
                rows.append(row)
                if len(rows) == limit:
                    return RolloutPage(rows=rows, next=step * PLACES + place + 1)
    return RolloutPage(rows=rows, next=None)


def group(run: RunFiles, id: str) -> RolloutGroup:
    """The group of a rollout. Raises RolloutNotFoundError."""
    match = _ID.fullmatch(id)
    step, number = (int(match[1]), int(match[2])) if match else (0, 0)
    lines = dict(_lines(run.directory / ROLLOUTS / f"step_{step:06d}.jsonl")) if match else {}
    if number not in lines:
        message = f"there is no rollout {id[:64]!r} in run {run.id}"
        raise RolloutNotFoundError(message, hint="ids are {step}.{group}.{completion}, as GET .../rollouts gives them")
    try:
        return _group(_Line(run, step, number, lines[number]))
    except _DAMAGE as error:
        message = f"group {number} of step {step} is damaged: {type(error).__name__}: {error}"
        raise RolloutNotFoundError(message, hint="look at the file in the run's rollouts/") from error


# ---- files ----
def _files(run: RunFiles) -> list[tuple[int, Path]]:
    """The newest step first."""
    named = ((_STEP.fullmatch(path.name), path) for path in (run.directory / ROLLOUTS).glob("step_*.jsonl"))
    return sorted(((int(match[1]), path) for match, path in named if match), reverse=True)


def _lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(number, group) of each line that is JSON; none of a file that is gone."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file):
                try:
                    yield number, json.loads(line)
                except ValueError as error:
                    log.warning("%s, line %d is left out: %s", path, number + 1, error)
    except OSError as error:
        log.warning("%s is left out: %s", path, error)


Row = tuple[RolloutRow, str]  # with the whole text


def _rows(run: RunFiles, step: int, path: Path) -> tuple[Sequence[Row], int]:
    """Every completion of a step, and the file's size."""
    try:
        stat = path.stat()
    except OSError:  # a run that goes on from a checkpoint removes what it will write again
        return (), 0
    return _parsed(run, step, path, stat.st_mtime_ns, stat.st_size), stat.st_size


@lru_cache(maxsize=8)  # pages are asked for one after another
def _parsed(run: RunFiles, step: int, path: Path, changed: int, size: int) -> tuple[Row, ...]:
    rows: list[Row] = []
    for number, raw in _lines(path):
        try:
            rows += _Line(run, step, number, raw).rows()
        except _DAMAGE as error:
            log.warning("%s, line %d is left out: %s: %s", path, number + 1, type(error).__name__, error)
    return tuple(rows)


# ---- a line of a file ----
class _Line:
    """A group as it was recorded."""

    def __init__(self, run: RunFiles, step: int, number: int, raw: Mapping[str, Any]):
        config = run.config()[0]
        self.id, self.raw = f"{step}.{number}", raw
        self.prompt_ids: Sequence[int] = raw["prompt"]["token_ids"]
        self.tokenizer = _tokenizer(config.get("model"))
        self.prompt = _prompt(raw["prompt"], self.tokenizer)
        self._params = _params(config.get("rollout"))
        modified = (run.directory / ROLLOUTS / f"step_{step:06d}.jsonl").stat().st_mtime
        self._created = datetime.fromtimestamp(modified, UTC).isoformat(timespec="milliseconds")

    def rows(self) -> list[Row]:
        texts = [self.text(i) for i in range(len(self.raw["rollouts"]))]
        fields = [self.fields(i, self.prompt[-PREVIEW:], text[:PREVIEW]) for i, text in enumerate(texts)]
        return [(RolloutRow(**each), text) for each, text in zip(fields, texts, strict=True)]

    def text(self, i: int) -> str:
        """What the policy said, turn by turn."""
        return "\n".join(turn["text"] for turn in self.raw["rollouts"][i]["turns"])

    def fields(self, i: int, prompt: str, text: str) -> dict[str, Any]:
        """Of a `RolloutRow`."""
        raw = self.raw["rollouts"][i]
        turns = raw["turns"]
        reason = turns[-1]["finish_reason"] if turns else None
        return {
            "id": f"{self.id}.{i}",
            "group": self.id,
            "prompt": prompt,
            "text": text,
            "reward": finite(raw["reward"]),
            "advantage": finite(raw["advantage"]),
            "version": str(turns[-1]["version"]) if turns else None,
            "finish_reason": reason if reason in ("stop", "length") else None,
            "temperature": self._params.temperature,
            "reshaped": list(self._params.reshaped),
            "prompt_tokens": len(self.prompt_ids),
            "completion_tokens": sum(len(turn["token_ids"]) for turn in turns),
            "created_at": self._created,
        }

    def detail(self, i: int) -> RolloutDetail:
        raw = self.raw["rollouts"][i]
        shown = completion(raw, self.prompt_ids, self.tokenizer, budget=MOST_TOKENS)
        return RolloutDetail(
            **self.fields(i, self.prompt, self.text(i)),
            rewards=dict(shown.rewards),
            error=shown.error,
            token_ids=[id for turn in raw["turns"] for id in turn["token_ids"]],
            tokens=[piece.text for piece in shown.pieces],
            logprobs=[piece.logprob for piece in shown.pieces],
        )


def _params(rollout: object) -> SamplingParams:
    """How a run of this configuration samples, as far as it says."""
    given = rollout if isinstance(rollout, Mapping) else {}
    names = ("temperature", "top_p", "top_k", "min_p")
    return SamplingParams(**{name: given[name] for name in names if isinstance(given.get(name), int | float)})


def _group(line: _Line) -> RolloutGroup:
    return RolloutGroup(
        group=line.id,
        prompt=line.prompt,
        prompt_token_ids=list(line.prompt_ids),
        rollouts=best_first(map(line.detail, range(len(line.raw["rollouts"])))),
    )


@lru_cache(maxsize=16)
def _tokenizer(model: str | None) -> Tokenizer | None:
    return find_tokenizer(model)


def _prompt(raw: Mapping[str, Any], tokenizer: Tokenizer | None) -> str:
    """As the model reads it; without its tokenizer, message by message."""
    if tokenizer is not None and raw["token_ids"]:
        return tokenizer.decode(list(raw["token_ids"]), skip_special_tokens=False)
    told: Callable[[tuple[str, str]], str] = ": ".join
    return raw["text"] if raw["messages"] is None else "\n\n".join(map(told, messages(raw)))
