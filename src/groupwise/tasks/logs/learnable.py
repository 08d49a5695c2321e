"""Makes rows that a run trains on from the exchanges of a log.

    prompt_rows    for `kind: grpo`    prompt, tools, and columns for rewards: `answer`, `logged`, `score`, `asked`, ..
    example_rows   for `kind: sft`     edited answers, and answers whose mean score is above a half
    pair_rows      for `kind: dpo`     an edited answer against what it corrects, and two answers of one prompt by score
    scored_rows    for `groupwise logs judge`    every answer of which it is known how good it was
    rules          the rewards of `groupwise.rewards` that the log allows, and what they pay for the answers in it

An answer that was cut off is never what is to be learned.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import permutations
from statistics import fmean
from typing import Any, NamedTuple

from groupwise.rewards.format import json_format
from groupwise.rewards.math import number_match
from groupwise.rewards.quantity import only_quantity
from groupwise.rewards.text import exact_match, rouge_l
from groupwise.tasks.logs.cases import GOOD, Answered, Case
from groupwise.tasks.prompts import RESERVED
from groupwise.types import Message

OWN = (*RESERVED, "prompt", "messages", "tools")  # names of columns that a row has already, or rewards get from us
MOST_WORDS = 5  # of an answer that is compared as a whole,
MOST_CHARACTERS = 60  # and of one in a language that writes no blanks
NUMBER_WORDS = 2  # of an answer that is a number, with its unit
NUMBERS, SHORT, LONG = (
    "groupwise.rewards.math:number_match",
    "groupwise.rewards.text:exact_match",
    "groupwise.rewards.text:rouge_l",
)
NEARLY_ALL = 0.9  # of the answers must be of a form for a reward of that form
MOST_PAIRED = 8  # answers of a prompt from either end of their scores that are compared in pairs

Row = dict[str, Any]


def gold(case: Case) -> tuple[str, str] | None:
    """Return what should have been answered, and who says so: `log`, its own column `answer`; `edited`, the last
    correction; `good`, the best answer with a score above a half, if it is a few words, calls no tool and was not cut
    off: of a longer text there are many that are as good."""
    own = case.columns.get("answer")
    if isinstance(own, str | int | float) and not isinstance(own, bool):
        return str(own), "log"
    if edited := [text for each in case.answers.values() for text in each.edited]:
        return edited[-1], "edited"
    best = shown(case)
    whole = not best.cut and not best.message.get("tool_calls")
    if (best.score or 0) > GOOD and whole and best.text.strip() and is_short(best.text):
        return best.text, "good"
    return None


def is_short(text: str) -> bool:
    """Return whether an answer can be compared as a whole."""
    return len(text.split()) <= MOST_WORDS and len(text) <= MOST_CHARACTERS


def is_number(text: str) -> bool:
    """Return whether an answer is one number, perhaps with a unit."""
    return len(text.split()) <= NUMBER_WORDS and only_quantity(text) is not None


def rule_for(answer: str) -> str:
    """Return the ready reward that compares with such an answer."""
    return NUMBERS if is_number(answer) else SHORT if is_short(answer) else LONG


def shown(case: Case) -> Answered:
    """Return the answer to show: the best that is known, or else the one that was given most often."""
    return max(case.answers.values(), key=lambda each: (-1.0 if each.score is None else each.score, each.times))


def prompt_rows(cases: Sequence[Case]) -> Iterator[Row]:
    """Yield a row each prompt."""
    for case in cases:
        scores, said = case.scores, shown(case)
        columns = {name: value for name, value in case.columns.items() if name not in OWN}
        row = _prompt(case) | columns
        row |= {"log_id": case.id, "asked": case.asked, "logged": said.text}
        row["score"] = fmean(scores) if scores else None
        if (known := gold(case)) is not None:
            row["answer"], row["answer_from"] = known
        yield row


def example_rows(cases: Sequence[Case]) -> Iterator[Row]:
    """Yield each example once; prompts for which another stands have theirs, too."""
    for case in _with_near(cases):
        edited = [text for each in case.answers.values() for text in each.edited]
        good = [each.message for each in case.answers.values() if (each.score or 0) > GOOD and not each.cut]
        for text in dict.fromkeys(edited):
            yield _prompt(case) | {"completion": text}
        for message in good:
            yield _prompt(case) | {"completion": [_said(message)]}


def pair_rows(cases: Sequence[Case]) -> Iterator[Row]:
    """Yield each pair once, but for those whose sides are the same; prompts for which another stands have theirs,
    too."""
    for case in _with_near(cases):
        answers = case.answers.values()
        found = [(_text(text), _said(each.message)) for each in answers for text in each.edited]
        for better, worse in permutations(_furthest(answers), 2):
            if (better.score or 0) > (worse.score or 0) and not better.cut:
                found.append((_said(better.message), _said(worse.message)))
        seen = set[str]()
        for chosen, rejected in found:
            key = json.dumps([chosen, rejected], sort_keys=True)
            if chosen != rejected and key not in seen:
                seen.add(key)
                yield _prompt(case) | {"chosen": [chosen], "rejected": [rejected]}


def _furthest(answers: Iterable[Answered]) -> list[Answered]:
    """Return the answers with a score; of many, whose pairs would be millions, the best that were not cut off and the
    worst, MOST_PAIRED of each."""
    scored = [each for each in answers if each.score is not None]
    if len(scored) <= 2 * MOST_PAIRED:
        return scored
    ranked = sorted(range(len(scored)), key=lambda at: (-(scored[at].score or 0), at))
    best = [at for at in ranked if not scored[at].cut][:MOST_PAIRED]
    return [scored[at] for at in sorted({*best, *ranked[-MOST_PAIRED:]})]


def scored_rows(cases: Sequence[Case]) -> Iterator[Row]:
    """Yield each answer with its score, from 0 to 1. An edited answer without a score is bad, and the edited text is a
    good answer of no model. A row has `answer` only if the log itself has it: raters' opinions must not be compared
    with themselves. `by` is a number for the rating user, if there is exactly one; the name is not written."""
    numbers = dict[str, int]()
    for case in _with_near(cases):
        known = gold(case)
        more = {"answer": known[0]} if known is not None and known[1] == "log" else {}
        for each in case.answers.values():
            score = 0.0 if each.score is None and each.edited else each.score
            by = dict[str, int]()
            if len(each.users) == 1:
                (user,) = each.users
                by["by"] = numbers.setdefault(user, len(numbers))
            told = _prompt(case) | more | by
            if score is not None:
                yield told | {"completion": [_said(each.message)], "score": score, "model": each.model}
            for text in dict.fromkeys(each.edited):
                yield told | {"completion": [_text(text)], "score": 1.0, "model": None}


def _with_near(cases: Sequence[Case]) -> Iterator[Case]:
    for case in cases:
        yield case
        yield from case.near


def _prompt(case: Case) -> Row:
    return {"prompt": list(case.messages), **({"tools": list(case.tools)} if case.tools else {})}


def _said(message: Message) -> Message:
    """Return what of an answer is learned: its text and calls, without thoughts."""
    kept = {name: value for name, value in message.items() if name in ("role", "content", "tool_calls")}
    return kept  # pyright: ignore[reportReturnType]


def _text(text: str) -> Message:
    return {"role": "assistant", "content": text}


# ---- rewards that are ready ----
class Rule(NamedTuple):
    """Holds a reward, the number of prompts that it can score, and its mean value for the answers in the log, from 0 to
    1.

    `good` and `bad` are the means over answers with a score above a half, and over the others (an edited answer without
    a score counts as bad); None without any. Answers that call tools are left out, and no answer is compared with
    itself: prompts whose answer is known from a good answer do not count.
    """

    reward: str
    prompts: int
    paid: float | None
    good: float | None
    bad: float | None


def rules(cases: Sequence[Case]) -> list[Rule]:
    """Return the rewards that apply: of a known answer, that which fits its form; of answers that are nearly all JSON,
    its form."""
    known = [(case, *found) for case in cases if (found := gold(case)) is not None]
    compares = {NUMBERS: number_match, SHORT: exact_match, LONG: rouge_l}
    found = [
        _rule(reward, [each for each in known if rule_for(each[1]) == reward], score)
        for reward, score in compares.items()
    ]
    all_ = [(case, "", "log") for case in cases]
    form = _rule("groupwise.rewards.format:json_format", all_, lambda said, _: json_format(said))
    if form is not None and (form.paid or 0) >= NEARLY_ALL:
        found.append(form)
    return [each for each in found if each is not None]


def _rule(
    reward: str,
    known: Sequence[tuple[Case, str, str]],
    score: Callable[[Sequence[str], Sequence[str]], Sequence[float | None]],
) -> Rule | None:
    if not known:
        return None
    cases = [(case, answer) for case, answer, of in known if of != "good"]
    answers = [(each, answer) for case, answer in cases for each in case.answers.values()]
    answers = [(each, answer) for each, answer in answers if not each.message.get("tool_calls")]
    paid = [each or 0.0 for each in score([said.text for said, _ in answers], [answer for _, answer in answers])]
    worth = [0.0 if said.score is None and said.edited else said.score for said, _ in answers]
    scored = [(score > GOOD, pays) for score, pays in zip(worth, paid, strict=True) if score is not None]
    good, bad = ([pays for better, pays in scored if better is side] for side in (True, False))
    return Rule(reward, len(known), _mean(paid), _mean(good), _mean(bad))


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
