"""Verified answers: the answers that the model's owner states as right, independent of a log.

    read_truth    a file of prompts with answers -> the usable ones, and the problems of the others
    apart         rows without those that are the same as others, or nearly
    audit         compares the answers in a log with verified answers to the same prompts
    asked_again   ... to more prompts that have a phrase which wrong answers perhaps have in common

People who write into a log can agree on wrong answers, and nothing inside the log shows this: both the training answers
and the judging ones are theirs. So a model counts as better only by answers that they did not give, and only if few of
its training answers are wrong. Even a few wrong answers that have words in common ("as the manager said") are more than
mistakes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from groupwise.config.data import FILES, DatasetConfig
from groupwise.errors import ConfigError, DataError
from groupwise.rewards.math import number_match
from groupwise.rewards.text import exact_match
from groupwise.store.masking import Masking
from groupwise.tasks.logs.calibration import surely
from groupwise.tasks.logs.learnable import NUMBERS, SHORT, Row, is_number, is_short
from groupwise.tasks.logs.near import alike_ones, texts_of
from groupwise.tasks.logs.phrases import ALPHA, confirmed, has, in_common, to_ask_again
from groupwise.tasks.prompts import open_prompts
from groupwise.types import Message

MOST_WRONG = 0.3  # of the answers that a log teaches: a third is what a few users who agree can bring in

COMPARES: Mapping[str, Callable[[Sequence[str], Sequence[str]], Sequence[float | None]]] = {
    NUMBERS: number_match,
    SHORT: exact_match,
}  # the rewards whose `answer` is right or wrong


class Verified(NamedTuple):
    """Holds a prompt with a verified answer: the row for a run, and the parts that are compared with a log's."""

    row: Row
    messages: tuple[Message, ...]
    answer: str


@dataclass(frozen=True, kw_only=True)
class Truth:
    """Verified answers, and how many rows of the file were `unfilled` or said the same `twice`."""

    verified: Sequence[Verified]
    rows: int
    unfilled: int
    twice: int


def read_truth(path: Path, *, masking: Masking, alike: float) -> Truth:
    """Return the rows of a file that have an `answer`, of those that are nearly the same the first.

    Raises ConfigError for a file that is none, DataError for one without rows, without the column, without any answer
    that is filled in, and for a prompt with two answers.
    """
    if path.suffix not in FILES or not path.is_file():
        hint = f"a {', '.join(FILES)} file whose rows have a prompt and its right answer"
        raise ConfigError(f"--truth is {str(path)!r}, and there is no such file", hint=hint, field="--truth")
    prompts = open_prompts(DatasetConfig(source=path.name), folder=path.parent).known
    if not any("answer" in each.columns for each in prompts):
        held = ", ".join(map(repr, dict.fromkeys(name for each in prompts for name in each.columns))) or "none"
        hint = "write the right answer of each prompt into `answer`"
        raise DataError(f"{path}: no row has a column 'answer'; columns: {held}", hint=hint, field="--truth")
    found: dict[str, tuple[str, Verified]] = {}
    unfilled = twice = 0
    for prompt in prompts:
        said = prompt.columns.get("answer")
        if said is None or not str(said).strip():
            unfilled += 1
            continue
        if not isinstance(said, str | int | float) or isinstance(said, bool):
            raise DataError(f"{prompt.id}: 'answer' is {said!r:.80}; it must be text or a number", field="--truth")
        asked = prompt.messages or ({"role": "user", "content": prompt.text or ""},)
        row = {"prompt": list(asked), "answer": str(said).strip()}
        row |= {"tools": list(prompt.tools)} if prompt.tools else {}
        key = json.dumps([row["prompt"], row.get("tools")], sort_keys=True)
        place, before = found.get(key, (prompt.id, None))
        if before is not None and before.answer != row["answer"]:
            raise DataError(
                f"{prompt.id}: the answer is {row['answer']!r}, and {before.answer!r} in {place}, to the same prompt",
                hint="which of the two is right? remove the other",
                field="--truth",
            )
        twice += before is not None
        found.setdefault(key, (prompt.id, Verified(row, masked(asked, masking), row["answer"])))
    if not found:
        hint = "write right answers into `answer`; you need not fill in every row"
        raise DataError(
            f"{path}: none of the {unfilled} rows has its answer filled in", hint=hint, field="--truth", kind="empty"
        )
    verified = [each for _, each in found.values()]
    near, _ = alike_ones([each.messages for each in verified], alike=alike)
    kept = [each for number, each in enumerate(verified) if number not in near]
    return Truth(verified=kept, rows=len(prompts), unfilled=unfilled, twice=twice + len(near))


def masked(messages: Iterable[Message], masking: Masking) -> tuple[Message, ...]:
    """Return messages as an import writes them, so that they can be compared with its own."""
    return tuple(Message(**{**each, "content": masking.value(each.get("content"))}) for each in messages)


def comparing(rows: Sequence[Verified], reward: str | None) -> str:
    """Return the reward that says which answers are right: `reward`, or where that does not compare with an answer the
    one that all of these allow. Raises DataError for an answer that it cannot compare with."""
    if reward is None or reward not in COMPARES:
        reward = NUMBERS if all(is_number(each.answer) for each in rows) else SHORT
    fits, what = (is_number, "one number") if reward == NUMBERS else (is_short, "a few words")
    for each in rows:
        if not fits(each.answer):
            raise DataError(
                f"a verified answer is {each.answer!r:.80}, and {reward.partition(':')[2]} compares with {what}",
                hint=f"write {what} into `answer`, or take the row out",
                field="--truth",
            )
    return reward


def apart(rows: Sequence[Row], others: Iterable[Sequence[Message]], *, alike: float) -> tuple[list[Row], list[Row]]:
    """Return the rows whose prompts are like none of the `others`, and the rest."""
    known = list(others)
    _, together = alike_ones([*known, *(each["prompt"] for each in rows)], alike=alike)
    groups = together.groups()
    touched = {number for group in groups if min(group) < len(known) for number in group}
    sides: tuple[list[Row], list[Row]] = ([], [])
    for number, row in enumerate(rows, start=len(known)):
        sides[number in touched].append(row)
    return sides


# ---- the log's own answers ----
class Checked(NamedTuple):
    """Holds a prompt, and whether the log's answer to it is wrong."""

    text: str
    wrong: bool


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The share of wrong answers among those that a log teaches: `wrong` of `checked`, and `most`, the largest share
    that there may be with confidence 95 %. `alike` is what prompts with wrong answers have in common, of the whole log;
    None is nothing. `perhaps` are phrases that they may have in common, and `texts` the prompts that say so."""

    checked: int
    wrong: int
    most: float
    alike: str | None
    perhaps: tuple[str, ...] = ()
    texts: tuple[Checked, ...] = ()

    @property
    def passed(self) -> bool:
        return self.most < MOST_WRONG and self.alike is None


def audit(verified: Sequence[Verified], taught: Sequence[Row], others: Sequence[Row], *, reward: str) -> Audit:
    """Return what verified answers say of those that a log holds: of its share that teaches (`taught`, drawn by chance)
    how many are wrong, and of that and of the `others` whether the wrong ones have something in common."""
    ours, more = (checked(verified, rows, reward=reward) for rows in (taught, others))
    bad, all_ = sum(each.wrong for each in ours), (*ours, *more)
    found = in_common([each.text for each in all_], [each.wrong for each in all_])
    alike = next((each.phrase for each in found if each.sure), None)
    return Audit(
        checked=len(ours),
        wrong=bad,
        most=1 - surely(len(ours) - bad, len(ours), ALPHA) if ours else 1.0,
        alike=alike,
        perhaps=() if alike is not None else tuple(to_ask_again(found)),
        texts=all_,
    )


def checked(verified: Sequence[Verified], rows: Sequence[Row], *, reward: str) -> list[Checked]:
    """Return the rows of a log that have an answer and a verified answer, with whether the log's is wrong."""
    right = {key_of(each.messages): each.answer for each in verified}
    known = [(key, row, right[key]) for row in rows if row.get("answer") and (key := key_of(row["prompt"])) in right]
    scores = COMPARES[reward]([str(row["answer"]) for _, row, _ in known], [answer for *_, answer in known])
    return [Checked(key, not score) for (key, *_), score in zip(known, scores, strict=True)]


def asked_again(audited: Audit, phrase: str, fresh: Sequence[Checked]) -> bool:
    """Return whether `fresh` prompts that have a phrase of `audited.perhaps` say that it is in common, too."""
    without = [each.wrong for each in audited.texts if not has(each.text, phrase)]
    return confirmed([each.wrong for each in fresh], without, phrases=len(audited.perhaps))


def key_of(messages: Sequence[Message]) -> str:
    """Return the prompt without the system's message."""
    return " ".join(texts_of(messages)[1].split())


def to_verify(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return rows to be filled in: prompts without answers, so that the person who answers is not influenced by those
    of a log or a model."""
    return [{name: row[name] for name in ("prompt", "tools") if name in row} | {"answer": ""} for row in rows]
