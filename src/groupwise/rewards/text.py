"""Ready rewards on text. Options are the keyword-only arguments; set them with `args` in the configuration.

exact_match         the completion, or its tagged answer, is the `answer` column
contains            the `answer` column occurs in the completion
regex_match         a pattern occurs in the completion
tag_format          <think>...</think><answer>...</answer> and nothing else
soft_overlong       a penalty that grows towards a length limit (DAPO, arXiv 2503.14476, equation 13)
repetition_penalty  a penalty for repeated n-grams
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from groupwise.rewards.base import text_of


def tagged(text: str, tag: str) -> str | None:
    """The text between the last <tag> and the </tag> after it; None without them.

    >>> tagged("<answer>6</answer> no: <answer> 7 </answer>", "answer")
    ' 7 '
    """
    _, opened, rest = text.rpartition(f"<{tag}>")
    inside, closed, _ = rest.partition(f"</{tag}>")
    return inside if opened and closed else None


def _gold(answer: Any) -> str | None:
    """The expected answer as text; None (the reward does not apply) where there is none."""
    return None if answer is None else str(answer).strip() or None


def exact_match(
    completions: Sequence[Any],
    answer: Sequence[Any],
    *,
    tag: str | None = None,
    after: str | None = None,
    ignore_case: bool = False,
) -> list[float | None]:
    """1 where the completion without surrounding blanks is the answer, else 0; None for a row without an answer.

    With `after` (such as "</think>"), what is compared is the text behind its last occurrence, or all of it where it
    does not occur. With `tag` it is the text in the last <tag>...</tag> of that, and a completion without it scores 0.
    """
    scores: list[float | None] = []
    for completion, each in zip(completions, answer, strict=True):
        text, gold = text_of(completion), _gold(each)
        if after is not None:
            text = text.rpartition(after)[2]
        said = (text if tag is None else tagged(text, tag) or "").strip()
        if ignore_case:
            said, gold = said.casefold(), gold.casefold() if gold is not None else None
        scores.append(None if gold is None else float(said == gold))
    return scores


def contains(completions: Sequence[Any], answer: Sequence[Any], *, ignore_case: bool = True) -> list[float | None]:
    """1 where the answer occurs in the completion as whole words, else 0; None for a row without an answer.

    A policy can learn to list every candidate: prefer `exact_match` with a tag where the format can be asked for.
    """
    flags = re.IGNORECASE if ignore_case else 0
    scores: list[float | None] = []
    for completion, each in zip(completions, answer, strict=True):
        gold = _gold(each)
        found = gold and re.search(rf"(?<!\w){re.escape(gold)}(?!\w)", text_of(completion), flags)
        scores.append(None if gold is None else float(bool(found)))
    return scores


def regex_match(completions: Sequence[Any], *, pattern: str, full: bool = False) -> list[float]:
    """1 where the regular expression occurs in the completion, or with `full` is all of it, else 0. A dot is any
    character, line breaks too."""
    compiled = re.compile(pattern, re.DOTALL)
    match = compiled.fullmatch if full else compiled.search
    return [float(match(text_of(completion)) is not None) for completion in completions]


def tag_format(completions: Sequence[Any], *, tags: Sequence[str] = ("think", "answer")) -> list[float]:
    """1 where the completion is <a>...</a><b>...</b> for the `tags` a, b in this order: each exactly once, none empty,
    and only blanks around them; else 0."""
    return [float(_is_tagged(text_of(completion), tags)) for completion in completions]


def _is_tagged(text: str, tags: Sequence[str]) -> bool:
    rest = text.strip()
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1 or not rest.startswith(opening):
            return False
        inside, _, rest = rest.removeprefix(opening).partition(closing)
        if not inside.strip():
            return False
        rest = rest.lstrip()
    return not rest


def soft_overlong(
    completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], *, max_length: int, buffer: int
) -> list[float]:
    """DAPO's length penalty, in tokens: 0 up to max_length - buffer, then falling linearly to -1 at max_length, and -1
    beyond. With max_length 100 and buffer 20: 80 tokens give 0, 90 give -0.5, 101 give -1."""
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer is {buffer}; it must be in [1, max_length = {max_length}]")
    free = max_length - buffer
    return [-min(1.0, max(0, len(ids) - free) / buffer) for ids in completion_ids]


def repetition_penalty(completions: Sequence[Any], *, ngram: int = 3, weight: float = 1.0) -> list[float]:
    """-weight times the share of word n-grams that occurred before; 0 for a completion shorter than one n-gram."""
    if ngram < 1:
        raise ValueError(f"ngram is {ngram}; it must be at least 1")
    scores: list[float] = []
    for completion in completions:
        words = text_of(completion).casefold().split()
        grams = [tuple(words[start : start + ngram]) for start in range(len(words) - ngram + 1)]
        scores.append(-weight * (1 - len(set(grams)) / len(grams)) if grams else 0.0)
    return scores
