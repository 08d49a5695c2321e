"""Ready rewards on mathematical answers. Options are the keyword-only arguments; set them with `args`.

    number_match  the last number of the completion equals the last number of the `answer` column
    math_match    the last \\boxed{} answer is equivalent to the `answer` column, judged by math-verify
                  (https://github.com/huggingface/Math-Verify): fractions, roots, sets, intervals, expressions

Both score 1 for right and 0 for wrong, and None for a row without an answer. An expected answer that is no number, or
that math-verify cannot read, is a mistake in the dataset: it raises, so that completions count as failed, not as wrong.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from groupwise.rewards.base import text_of
from groupwise.rewards.text import tagged

_NUMBER = re.compile(
    r"(?<![\w.])-?"  # a minus sign, but not the one in 10-3
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:(?<=[0-9])|(?=\.[0-9]))(?:\.[0-9]+)?"  # 7  1,234.5  .5
    r"(?:[eE][+-]?[0-9]{1,3}(?![0-9]))?"
    r"(?:\s?/\s?[0-9]+(?![0-9]*[./]))?"  # 3/4, but not 1/2/2025
)
_LONGEST_NUMBER = 100  # characters
_LONGEST_ANSWER = 2000  # characters
_TIME_LIMIT_S = 5
# What sympy would compute for minutes before it answers: towers of powers, repeated factorials, very large exponents.
_HOSTILE = re.compile(
    r"(\^|\*\*)[\s({]*[0-9]+[\s}]*(\^|\*\*)"  # 9^9^9, 10^{10^{10}}
    r"|![\s)}\]]*!"  # (99!)!
    r"|(\^|\*\*)[\s({]*[0-9]{5,}"  # 2^{99999}
)


def last_number(text: str) -> Fraction | None:
    """The last number in the text, exactly: -3, 1,234.5, 2e-3, 3/4. A currency or percent sign is left aside.

    >>> last_number("so it costs $1,250.50."), last_number("x = -3/4"), last_number("none")
    (Fraction(2501, 2), Fraction(-3, 4), None)
    """
    found = [match for match in _NUMBER.findall(text.replace("\u2212", "-")) if match]
    if not found or len(found[-1]) > _LONGEST_NUMBER:
        return None
    numerator, _, denominator = found[-1].replace(",", "").partition("/")
    if denominator and not int(denominator):
        return None
    return Fraction(numerator.strip()) / (int(denominator) if denominator else 1)


def boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...}, braces matched; None without one.

    >>> boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    start = max(text.rfind(r"\boxed{"), text.rfind(r"\fbox{"))
    if start < 0:
        return None
    start = text.index("{", start) + 1
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return None


def number_match(
    completions: Sequence[Any], answer: Sequence[Any], *, tolerance: float = 1e-6, tag: str | None = None
) -> list[float | None]:
    """1 where the last number differs from the expected one by at most `tolerance` of it, else 0.

    With `tag`, only the text in the last <tag>...</tag> is looked at. Raises ValueError for an answer without a number.
    """
    scores: list[float | None] = []
    for completion, expected in zip(completions, answer, strict=True):
        if expected is None:
            scores.append(None)
            continue
        gold = last_number(str(expected))
        if gold is None:
            raise ValueError(f"the answer {expected!r} holds no number")
        text = text_of(completion)
        said = last_number(text if tag is None else tagged(text, tag) or "")
        scores.append(float(said is not None and abs(said - gold) <= Fraction(tolerance) * abs(gold)))
    return scores


def math_match(completions: Sequence[Any], answer: Sequence[Any], *, require_box: bool = True) -> list[float | None]:
    r"""1 where the answer in the last \boxed{} is mathematically equal to the expected one, else 0.

    Without `require_box`, a completion that has no box is searched for its answer. The expected answer is LaTeX, plain
    or boxed, or ends with "#### answer". An answer is wrong if it is longer than 2000 characters, needs more than 5
    seconds, or is built to (towers of powers). Raises ValueError for an expected answer that math-verify cannot read,
    and RuntimeError outside the main thread, where math-verify's time limit does not work.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("math-verify's time limit works in the main thread only")
    scores: list[float | None] = []
    golds: dict[str, Any] = {}
    for completion, expected in zip(completions, answer, strict=True):
        if expected is None:
            scores.append(None)
            continue
        gold = str(expected).rpartition("####")[2].strip()
        if gold not in golds:
            golds[gold] = _parse_gold(gold)
        scores.append(float(_is_equal(golds[gold], gold, text_of(completion), require_box)))
    return scores


def _parse_gold(gold: str) -> Any:
    from math_verify import parse  # sympy takes a third of a second to import

    inside = boxed(gold)
    wrapped = rf"\boxed{{{gold.strip('$') if inside is None else inside}}}"
    parsed = parse(wrapped, fallback_mode="no_fallback", parsing_timeout=_TIME_LIMIT_S)
    if not parsed:
        raise ValueError(f"math-verify cannot read the answer {gold!r}")
    return parsed


def _is_equal(parsed_gold: Any, gold: str, text: str, require_box: bool) -> bool:
    from math_verify import parse, verify

    inside = boxed(text)
    if inside is None and require_box:
        return False
    said = text[-_LONGEST_ANSWER:] if inside is None else rf"\boxed{{{inside}}}"
    if len(said) > _LONGEST_ANSWER + len(r"\boxed{}") or (_HOSTILE.search(said) and not _HOSTILE.search(gold)):
        return False
    parsed = parse(said, parsing_timeout=_TIME_LIMIT_S)
    return verify(parsed_gold, parsed, timeout_seconds=_TIME_LIMIT_S)
