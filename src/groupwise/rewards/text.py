"""Ready rewards on text against the `answer` column. Options are the keyword-only arguments; set them with `args`.

exact_match   the completion, or its tagged answer, is the answer
contains      the answer occurs in the completion as whole words
rouge_l       the longest common subsequence of words, ROUGE-L's F1 (Lin 2004, https://aclanthology.org/W04-1013)
lcs_ratio     the longest common subsequence of characters, as they are

All give None, "does not apply", for a row whose answer is None or blank: an empty completion is never a right one.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from groupwise.rewards.base import text_of


def tagged(text: str, tag: str) -> str | None:
    """Return the text between the last <tag> and the </tag> after it; None without them.

    >>> tagged("<answer>6</answer> no: <answer> 7 </answer>", "answer")
    ' 7 '
    """
    _, opened, rest = text.rpartition(f"<{tag}>")
    inside, closed, _ = rest.partition(f"</{tag}>")
    return inside if opened and closed else None


def answer_part(text: str, *, tag: str | None = None, after: str | None = None) -> str | None:
    """Return the part of a completion that is compared: by default all; None if `tag` is set and missing.

    With `after` (such as "</think>") it is the text behind its last occurrence, or all where it does not occur; with
    `tag` the text in the last <tag>...</tag> of that.
    """
    if after is not None:
        text = text.rpartition(after)[2]
    return text if tag is None else tagged(text, tag)


def gold_text(answer: Any) -> str | None:
    """Return the expected answer as text; None (the reward does not apply) where there is none."""
    return None if answer is None else str(answer).strip() or None


def words_of(text: str) -> list[str]:
    """Return the words in lower case, without punctuation.

    >>> words_of("Don't panic: it's 42!")
    ["don't", 'panic', "it's", '42']
    """
    return re.findall(r"\w+(?:['\u2019]\w+)*", text.casefold())


def exact_match(
    completions: Sequence[Any],
    answer: Sequence[Any],
    *,
    tag: str | None = None,
    after: str | None = None,
    ignore_case: bool = False,
) -> list[float | None]:
    """1 where the completion without surrounding blanks is the answer, else 0; None for a row without an answer.

    `tag` and `after` choose the part of the completion that is compared; without the tag that is asked for it is 0.
    Two encodings of the same accented letter (Unicode NFC) are equal; nothing else is.
    """
    scores: list[float | None] = []
    for completion, each in zip(completions, answer, strict=True):
        gold = gold_text(each)
        said = answer_part(text_of(completion), tag=tag, after=after) or ""
        scores.append(None if gold is None else float(_same_form(said, ignore_case) == _same_form(gold, ignore_case)))
    return scores


def _same_form(text: str, ignore_case: bool) -> str:
    text = unicodedata.normalize("NFC", text.strip())
    return text.casefold() if ignore_case else text


def contains(
    completions: Sequence[Any],
    answer: Sequence[Any],
    *,
    after: str | None = None,
    ignore_case: bool = True,
    max_words: int | None = None,
) -> list[float | None]:
    """1 where the answer occurs in the completion as whole words, else 0; None for a row without an answer.

    A policy can learn to list every candidate: set `max_words`, above which a completion scores 0, or better use
    `exact_match` with a tag where the format can be asked for.
    """
    flags = re.IGNORECASE if ignore_case else 0
    scores: list[float | None] = []
    for completion, each in zip(completions, answer, strict=True):
        gold = gold_text(each)
        text = answer_part(text_of(completion), after=after) or ""
        found = gold and re.search(rf"(?<!\w){re.escape(gold)}(?!\w)", text, flags)
        brief = max_words is None or len(text.split()) <= max_words
        scores.append(None if gold is None else float(bool(found) and brief))
    return scores


def rouge_l(
    completions: Sequence[Any],
    answer: Sequence[Any],
    prompts: Sequence[Any] | None = None,
    *,
    tag: str | None = None,
    after: str | None = None,
    beyond_prompt: bool = True,
    max_words: int = 2000,
) -> list[float | None]:
    """2 LCS / (words of the completion + words of the answer), in [0, 1]; None for a row without an answer.

    With `beyond_prompt` the score s becomes max(0, s - c) / (1 - c), where c is what copying the whole prompt would
    get: copying it gains nothing, and the answer itself still gets 1. A completion of more than `max_words` scores 0.
    """
    scores: list[float | None] = []
    baselines: dict[tuple[str, str], float] = {}
    for i, (completion, each) in enumerate(zip(completions, answer, strict=True)):
        gold = gold_text(each)
        if gold is None:
            scores.append(None)
            continue
        said = words_of(answer_part(text_of(completion), tag=tag, after=after) or "")
        score = 0.0 if len(said) > max_words else _f1(said, words_of(gold))
        if beyond_prompt and prompts is not None:
            key = (prompt_text(prompts[i]), gold)
            if key not in baselines:
                baselines[key] = _f1(words_of(key[0]), words_of(gold))
            copied = baselines[key]
            score = max(0.0, score - copied) / (1 - copied) if copied < 1 else 0.0
        scores.append(score)
    return scores


def lcs_ratio(
    completions: Sequence[Any],
    answer: Sequence[Any],
    *,
    tag: str | None = None,
    after: str | None = None,
    max_characters: int = 20_000,
) -> list[float | None]:
    """2 LCS / (characters of the completion + characters of the answer), in [0, 1], surrounding blanks aside; None for
    a row without an answer. A completion of more than `max_characters` scores 0.
    """
    scores: list[float | None] = []
    for completion, each in zip(completions, answer, strict=True):
        gold, said = gold_text(each), answer_part(text_of(completion), tag=tag, after=after) or ""
        brief = len(said) <= max_characters
        scores.append(None if gold is None else _f1(list(said.strip()), list(gold)) if brief else 0.0)
    return scores


def prompt_text(prompt: Any) -> str:
    """Return the text of one entry of `prompts`: a string, or what was said before the completion, without roles."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message.get("content") or "") for message in prompt)


def _f1(said: list[str], gold: list[str]) -> float:
    return 2 * _common(said, gold) / (len(said) + len(gold)) if said and gold else 0.0


def _common(said: list[str], gold: list[str]) -> int:
    """Return the length of the longest common subsequence, an element of `said` at a time in bits of `gold` (Hyyrö
    2004)."""
    places: dict[str, int] = {}
    for i, word in enumerate(gold):
        places[word] = places.get(word, 0) | 1 << i
    full = (1 << len(gold)) - 1
    unmatched = full
    for word in said:
        hits = unmatched & places.get(word, 0)
        unmatched = (unmatched + hits | unmatched - hits) & full
    return len(gold) - unmatched.bit_count()
