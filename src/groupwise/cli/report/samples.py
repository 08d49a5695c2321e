"""The completions that the report shows: of a few steps the groups that taught most, each with its best and its worst;
and of the held-out prompts those whose reward changed most, before and after.

A group teaches by the spread of its rewards, so groups are ranked by their standard deviation. Files are read a line at
a time, and those of other steps are not opened, however many there are.
"""

from __future__ import annotations

import heapq
import itertools
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from groupwise.run.record import RunRecord
from groupwise.server.rollout_view import ShownCompletion, columns, completion, find_tokenizer, finite, messages

GROUPS = 3  # shown of a step
PAIRS = 3  # held-out prompts shown that got better, and as many that got worse
MAX_TOKENS = 12_000  # shown on a page, which bounds its size
Group = Mapping[str, Any]  # a line of a run's rollouts
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError)  # what a damaged file raises


@dataclass(frozen=True, kw_only=True)
class ShownGroup:
    """A prompt as (role, text), its other columns, and two of its completions; `worst` is None where all rewards are
    equal. `rewards` are those of the whole group, None for a completion that could not be scored."""

    prompt: tuple[tuple[str, str], ...]
    columns: tuple[tuple[str, str], ...]
    rewards: tuple[float | None, ...]
    best: ShownCompletion
    worst: ShownCompletion | None


@dataclass(frozen=True, kw_only=True)
class ShownStep:
    """Of `sampled` groups in a step, those that are shown."""

    step: int
    sampled: int
    groups: tuple[ShownGroup, ...]


@dataclass(frozen=True, kw_only=True)
class ShownPair:
    """A held-out prompt, answered before and after."""

    prompt: tuple[tuple[str, str], ...]
    columns: tuple[tuple[str, str], ...]
    before: ShownCompletion
    after: ShownCompletion

    @property
    def change(self) -> float:
        return (self.after.reward or 0.0) - (self.before.reward or 0.0)


@dataclass(frozen=True, kw_only=True)
class ShownChange:
    """Of `prompts` held-out prompts, how many got better and worse from the first evaluation to the last in this mode;
    and some of them."""

    mode: str
    first: int
    last: int
    prompts: int
    better: int
    worse: int
    pairs: tuple[ShownPair, ...]


def choose_steps(available: Sequence[int], wanted: Sequence[int] = ()) -> list[int]:
    """The steps to show: those of `wanted` that there are, or the first, the middle and the last."""
    if wanted:
        return sorted(set(wanted) & set(available))
    ordered = sorted(available)
    return sorted({ordered[0], ordered[len(ordered) // 2], ordered[-1]}) if ordered else []


def read_samples(
    run: RunRecord, steps: Sequence[int], *, groups: int = GROUPS, tokens: int = MAX_TOKENS
) -> tuple[list[ShownStep], list[str]]:
    """The steps' groups to show, with at most so many `tokens` in all; and what could not be read."""
    tokenizer = _tokenizer(run)
    budget = tokens // max(1, 2 * groups * len(steps))
    shown, notes = [], []
    for step in steps:
        sampled = itertools.count()
        try:
            ranked = ((_spread(group), -next(sampled), group) for group in _groups(run.rollouts[step]))
            raw = heapq.nlargest(groups, ranked, key=lambda each: each[:2])
            chosen = tuple(_group(group, tokenizer, budget=budget) for *_, group in raw)
        except _DAMAGE as error:
            notes.append(f"{run.rollouts[step].name} is left out: {type(error).__name__}: {error}")
            continue
        if chosen:
            shown.append(ShownStep(step=step, sampled=next(sampled), groups=chosen))
    return shown, notes


def read_change(run: RunRecord, *, last: int | None = None, tokens: int = MAX_TOKENS // 4) -> ShownChange | None:
    """The first and the last evaluation (or that at step `last`) beside each other, greedy if it was evaluated.

    None where there are not two, or where they cannot be read or are not of the same prompts.
    """
    mode = "greedy" if "greedy" in run.evaluations else next(iter(run.evaluations), "")
    files = run.evaluations.get(mode, {})
    if len(files) < 2:
        return None
    ends = min(files), last if last is not None and last in files else max(files)
    try:
        prompts, better, worse = _compare(*(files[step] for step in ends))
        tokenizer, budget = _tokenizer(run), tokens // (4 * PAIRS)
        pairs = tuple(_pair(*both, tokenizer, budget=budget) for both in (*better.largest(), *worse.largest()))
    except _DAMAGE:
        return None
    return ShownChange(
        mode=mode,
        first=ends[0],
        last=ends[1],
        prompts=prompts,
        better=better.count,
        worse=worse.count,
        pairs=pairs,
    )


@dataclass
class _Changes:
    """Prompts whose reward changed in one direction: how many, and the few that changed most."""

    count: int = 0
    kept: list[tuple[float, int, Group, Group]] = field(default_factory=list)

    def add(self, change: float, before: Group, after: Group) -> None:
        self.count += 1
        heapq.heappush(self.kept, (abs(change), -self.count, before, after))
        if len(self.kept) > PAIRS:
            heapq.heappop(self.kept)

    def largest(self) -> list[tuple[Group, Group]]:
        return [(before, after) for _, _, before, after in sorted(self.kept, key=lambda each: each[:2], reverse=True)]


def _compare(first: Path, last: Path) -> tuple[int, _Changes, _Changes]:
    """How many prompts there are, and which of them got better and worse. ValueError if they are not the same."""
    prompts, better, worse = 0, _Changes(), _Changes()
    for before, after in zip(_groups(first), _groups(last), strict=True):
        if before["prompt"]["id"] != after["prompt"]["id"]:
            raise ValueError("not the same prompts")
        prompts += 1
        old, new = (finite(group["rollouts"][0]["reward"]) for group in (before, after))
        if old is not None and new is not None and old != new:
            (better if new > old else worse).add(new - old, before, after)
    return prompts, better, worse


def _tokenizer(run: RunRecord) -> Tokenizer | None:
    model = run.setting("model")
    return find_tokenizer(model) if isinstance(model, str) else None


def _groups(path: Path) -> Iterator[Group]:
    """The groups of a file that have a completion, one after the other. The head of an evaluation's file is none."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            group = json.loads(line)
            if "rollouts" not in group and "success" in group:
                continue
            if group["rollouts"]:
                yield group


def _spread(group: Group) -> float:
    rewards = [value for each in group["rollouts"] if (value := finite(each["reward"])) is not None]
    return statistics.pstdev(rewards) if len(rewards) > 1 else -1.0


def _pair(before: Group, after: Group, tokenizer: Tokenizer | None, *, budget: int) -> ShownPair:
    answers = [
        completion(each["rollouts"][0], each["prompt"]["token_ids"], tokenizer, budget=budget)
        for each in (before, after)
    ]
    prompt = before["prompt"] if before["prompt"]["messages"] is not None else after["prompt"]
    return ShownPair(prompt=tuple(messages(prompt)), columns=columns(prompt), before=answers[0], after=answers[1])


def _group(raw: Group, tokenizer: Tokenizer | None, *, budget: int) -> ShownGroup:
    rewards = tuple(finite(each["reward"]) for each in raw["rollouts"])
    scored = [index for index, value in enumerate(rewards) if value is not None] or [0]
    best = max(scored, key=lambda index: (rewards[index] or 0.0, -index))
    worst = min(scored, key=lambda index: (rewards[index] or 0.0, index))
    prompt_ids = raw["prompt"]["token_ids"]

    def shown(index: int) -> ShownCompletion:
        return completion(raw["rollouts"][index], prompt_ids, tokenizer, budget=budget)

    return ShownGroup(
        prompt=tuple(messages(raw["prompt"])),
        columns=columns(raw["prompt"]),
        rewards=rewards,
        best=shown(best),
        worst=None if rewards[best] == rewards[worst] else shown(worst),
    )
