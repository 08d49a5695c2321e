"""Ready rewards on length and repetition. Options are the keyword-only arguments; set them with `args`.

soft_overlong       a penalty that grows towards a length limit (DAPO, arXiv 2503.14476, equation 13)
length_window       1 between two lengths
ideal_length        1 at a length, falling to 0 on both sides
cosine_length       right answers better the shorter they are, wrong ones worse (arXiv 2502.03373)
repetition_penalty  a penalty for repeated n-grams (arXiv 2502.03373 and others)
distinct            the share of distinct n-grams, distinct-n (Li et al. 2016, arXiv 1510.03055)

Lengths are in tokens (of the policy's tokenizer), in words, or in characters of which a run of blanks counts one. A
policy learns to pad an answer to any length that is rewarded: put `length_window` and `ideal_length` behind a reward
for being right, with `rewards.ensemble:gated`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from groupwise.errors import RewardError
from groupwise.rewards.base import text_of
from groupwise.rewards.member import Reference, load_members, values_of

Unit = Literal["tokens", "words", "characters"]
_PIECE = re.compile(r"[^\W_]{1,24}|[^\w\s]|_")  # a word, or 24 letters of a longer one, or one other character


def soft_overlong(
    completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], *, max_length: int, buffer: int
) -> list[float]:
    """DAPO's length penalty, in tokens: 0 up to max_length - buffer, then falling linearly to -1 at max_length, and -1
    beyond. With max_length 100 and buffer 20: 80 tokens give 0, 90 give -0.5, 101 give -1."""
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer is {buffer}; it must be in [1, max_length = {max_length}]")
    free = max_length - buffer
    return [0.0 - min(1.0, max(0, len(ids) - free) / buffer) for ids in completion_ids]


def length_window(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]] | None = None,
    *,
    longest: int,
    shortest: int = 0,
    margin: int = 0,
    unit: Unit = "tokens",
) -> list[float]:
    """1 from `shortest` to `longest`, both included, and falling linearly to 0 over `margin` on either side."""
    if not 0 <= shortest <= longest or margin < 0:
        raise ValueError(f"shortest {shortest}, longest {longest} and margin {margin} are no window of lengths")
    scores: list[float] = []
    for length in _lengths(completions, completion_ids, unit):
        off = max(shortest - length, length - longest, 0)
        scores.append(max(0.0, 1 - off / (margin + 1)))
    return scores


def ideal_length(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]] | None = None,
    *,
    ideal: int,
    width: int | None = None,
    unit: Unit = "tokens",
) -> list[float]:
    """max(0, 1 - |length - ideal| / width); `width` is `ideal` by default."""
    width = ideal if width is None else width
    if ideal < 1 or width < 1:
        raise ValueError(f"ideal is {ideal} and width {width}; both must be at least 1")
    return [max(0.0, 1 - abs(length - ideal) / width) for length in _lengths(completions, completion_ids, unit)]


def _lengths(completions: Sequence[Any], ids: Sequence[Sequence[int]] | None, unit: str) -> list[int]:
    if unit == "tokens":
        if ids is None:
            raise ValueError("lengths in tokens need `completion_ids`; set `unit` to words or characters")
        return [len(each) for each in ids]
    words = [text_of(completion).split() for completion in completions]
    if unit == "words":
        return [len(each) for each in words]
    if unit == "characters":
        return [len(" ".join(each)) for each in words]
    raise ValueError(f"unit is {unit!r}; it must be tokens, words or characters")


async def cosine_length(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]] | None = None,
    *,
    max_length: int,
    right: tuple[float, float] = (1.0, 0.5),
    wrong: tuple[float, float] = (-1.0, -0.5),
    correct: Reference = "groupwise.rewards.math:math_match",
    threshold: float = 1.0,
    unit: Unit = "tokens",
    folder: str | None = None,
    **columns: Any,
) -> list[float | None]:
    """b + (a - b) (1 + cos(pi length / max_length)) / 2, where (a, b) is `right` or `wrong`: a at length 0, b from
    max_length on. The reward `correct` says which; right is what gives at least `threshold`.

    None where `correct` does not apply, nan, a failure, where it failed. Raises RewardError where all of them failed.
    """
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}; it must be at least 1")
    lengths = _lengths(completions, completion_ids, unit)
    (member,) = load_members([correct], folder=folder)
    given = {"completions": completions, "completion_ids": completion_ids, **columns}
    verdict = await values_of(member, given, size=len(completions))
    scores: list[float | None] = []
    for length, value in zip(lengths, verdict.values, strict=True):
        if value is None or math.isnan(value):
            scores.append(value)
            continue
        at_none, at_most = right if value >= threshold else wrong
        share = min(1.0, length / max_length)
        scores.append(at_most + (at_none - at_most) * (1 + math.cos(math.pi * share)) / 2)
    if scores and all(value is not None and math.isnan(value) for value in scores):
        raise RewardError(f"no completion could be judged right or wrong: {verdict.cause}")
    return scores


# ---- repetition ----

_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda share: share,
    "cosine": lambda share: (1 - math.cos(math.pi * share)) / 2,  # mild on a little, close to the whole on much
    "step": lambda share: float(share > 1e-9),
}


def repetition_penalty(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]] | None = None,
    *,
    ngram: int = 3,
    max_penalty: float = 1.0,
    allowed: float = 0.0,
    shape: Literal["linear", "cosine", "step"] = "linear",
    unit: Unit = "words",
) -> list[float]:
    """-max_penalty times f(s), s being the share of n-grams that occurred before, less `allowed`, scaled to [0, 1].

    A completion shorter than one n-gram repeats nothing: 0. Punctuation marks are words, and a word is cut after 24
    letters, so that a text without blanks does not escape.
    """
    if not 0 <= allowed < 1 or max_penalty < 0 or shape not in _SHAPES:
        rules = f"allowed must be in [0, 1), max_penalty at least 0, shape one of {', '.join(_SHAPES)}"
        raise ValueError(f"{rules}; they are {allowed}, {max_penalty} and {shape!r}")
    repeated = [1 - share for share in _distinct_shares(completions, completion_ids, ngram, unit)]
    return [0.0 - max_penalty * _SHAPES[shape](max(0.0, share - allowed) / (1 - allowed)) for share in repeated]


def distinct(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]] | None = None,
    *,
    ngram: int = 2,
    unit: Unit = "words",
) -> list[float]:
    """Distinct n-grams over all n-grams, in (0, 1]; 0 for an empty completion, 1 for one shorter than an n-gram.

    It is highest for the shortest completions: combine it with a reward that these do not get.
    """
    shares = _distinct_shares(completions, completion_ids, ngram, unit)
    return [share if text_of(each).strip() else 0.0 for share, each in zip(shares, completions, strict=True)]


def _distinct_shares(
    completions: Sequence[Any], ids: Sequence[Sequence[int]] | None, ngram: int, unit: str
) -> list[float]:
    if ngram < 1:
        raise ValueError(f"ngram is {ngram}; it must be at least 1")
    if unit == "tokens" and ids is None:
        raise ValueError("n-grams of tokens need `completion_ids`; set `unit` to words or characters")
    texts = [text_of(completion).casefold() for completion in completions]
    pieces: Sequence[Sequence[Any]]
    if unit == "tokens":
        pieces = ids or ()
    elif unit == "words":
        pieces = [_PIECE.findall(text) for text in texts]
    elif unit == "characters":
        pieces = [" ".join(text.split()) for text in texts]
    else:
        raise ValueError(f"unit is {unit!r}; it must be tokens, words or characters")
    return [_share(each, ngram) for each in pieces]


def _share(pieces: Sequence[Any], ngram: int) -> float:
    grams = [tuple(pieces[start : start + ngram]) for start in range(len(pieces) - ngram + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
