r"""Ready rewards on mathematical answers. Options are the keyword-only arguments; set them with `args`.

    number_match    the last number of the completion, with its unit, equals the `answer` column's
    math_match      the last \boxed{} answer is equivalent to the `answer` column, judged by math-verify
                    (https://github.com/huggingface/Math-Verify): fractions, roots, sets, intervals, expressions

    equation_match  the expression has the value of the `answer` column, and uses each of the numbers in `nums` once

All score 1 for right and 0 for wrong, and None for a row without an answer. An expected answer that is not a number, or
that math-verify cannot read, is a mistake in the dataset: it raises, so that completions count as failed, not as wrong.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import signal
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, Literal

from groupwise.rewards.base import text_of
from groupwise.rewards.quantity import Quantity, last_quantity, only_quantity, plain_minus
from groupwise.rewards.text import answer_part, gold_text, tagged

_LONGEST_ANSWER = 2000  # characters

_TIME_LIMIT_S = 5.0  # of CPU time

# What sympy would compute for minutes before it answers: towers of powers, repeated factorials, very large exponents.
_HOSTILE = re.compile(
    r"(\^|\*\*)[\s({]*[0-9]+[\s}]*(\^|\*\*)"  # 9^9^9, 10^{10^{10}}
    r"|![\s)}\]]*!"  # (99!)!
    r"|[0-9]{4,}[\s)}\]]*!"  # 99999!
    r"|(\^|\*\*)[\s({]*[0-9]{5,}"  # 2^{99999}
)

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...}, braces matched; None without one.

    >>> boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    start = None
    for match in _BOX.finditer(text):
        start = match.end()
    depth = 1
    for brace in re.compile(r"[{}]").finditer(text, start) if start is not None else ():
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : brace.start()]
    return None


# ---- numbers ----
_ONE_NUMBER = (
    "give the number alone, or a solution that ends with '#### number'; rewards.text:exact_match compares texts"
)


def final_answer(text: str) -> str | None:
    r"""Return the answer that a completion ends with, as maj@k counts it; None where nothing is said.

    Of what follows the last </think>: the last \boxed{}, else the last <answer>, else what stands behind the last
    ####, else all of it. Runs of blanks are one blank.

    >>> final_answer(r"<think>4?</think> So it is \boxed{5}."), final_answer("2 + 3 = 5 #### 5"), final_answer(" 5 ")
    ('5', '5', '5')
    """
    said = answer_part(text, after="</think>") or ""
    found = boxed(said)
    found = tagged(said, "answer") if found is None else found
    found = said.rpartition("####")[2] if found is None else found
    return " ".join(unicodedata.normalize("NFC", found).split()) or None


def final_number(text: str) -> str | None:
    """Return the last number of `final_answer`, with its unit: 1,000 and 1000.0 are one answer. None where there is
    none.

    >>> final_number("that makes 1,000"), final_number("1 km"), final_number("#### 1000.0 m"), final_number("many")
    ('1000', '1000 length', '1000 length', None)
    """
    said = last_quantity(final_answer(text) or "")
    if said is None:
        return None
    return " ".join(
        [str(said.amount), *(f"{name}{'' if power == 1 else power}" for name, power in said.dimension or ())]
    )


def number_match(
    completions: Sequence[Any],
    answer: Sequence[Any],
    *,
    tolerance: float = 1e-6,
    zero_tolerance: float = 1e-8,
    unit: Literal["if_given", "required", "ignored"] = "if_given",
    tag: str | None = None,
    after: str | None = None,
    box: bool = False,
) -> list[float | None]:
    r"""1 where the last number differs from the expected one by at most `tolerance` of it, else 0.

    Numbers and units are those of `last_quantity`. An expected number without a unit is compared as it stands; one
    with a unit is compared in it: 5000 m is 5 km, 42% is 0.42, 5 m is not 5 km. Then a completion without a unit is
    right if its number is, or wrong if the unit is "required". An expected 0 is met within `zero_tolerance`.

    `tag`, `after` (see `rewards.text.answer_part`) and `box`, the last \boxed{}, choose where to look. The expected
    answer is one number: of a whole solution that behind "####", in \boxed{} or in <answer>.
    Raises ValueError for an answer that holds no number or several (`only_quantity`), and for a negative tolerance.
    """
    if tolerance < 0 or zero_tolerance < 0:
        raise ValueError(f"tolerances must not be negative; they are {tolerance} and {zero_tolerance}")
    scores: list[float | None] = []
    for completion, expected in zip(completions, answer, strict=True):
        gold_words = gold_text(expected)
        if gold_words is None:
            scores.append(None)
            continue
        gold = only_quantity(final_answer(gold_words) or "")
        if gold is None:
            raise ValueError(f"the answer {expected!r} is not one number: {_ONE_NUMBER}")
        text = answer_part(text_of(completion), tag=tag, after=after) or ""
        said = last_quantity((boxed(text) or "") if box else text)
        pairs = [] if said is None else _comparable(said, gold, unit)
        scores.append(float(any(_is_close(a, b, tolerance, zero_tolerance) for a, b in pairs)))
    return scores


def _comparable(said: Quantity, gold: Quantity, unit: str) -> list[tuple[Fraction, Fraction]]:
    """Return pairs of numbers of which one must agree."""
    if unit == "ignored":
        return [(said.value, gold.value)]
    if gold.dimension is not None and said.dimension is not None:
        return [(said.amount, gold.amount)] if gold.dimension == said.dimension else []
    if unit == "required" and gold.dimension is not None:
        return []
    pairs = [(said.value, gold.value)]
    if () in (said.dimension, gold.dimension):  # 0.42 for 42%, and 42% for 0.42
        pairs.append((said.amount, gold.amount))
    return pairs


def _is_close(said: Fraction, gold: Fraction, tolerance: float, zero_tolerance: float) -> bool:
    return abs(said - gold) <= (Fraction(tolerance) * abs(gold) if gold else Fraction(zero_tolerance))


# ---- equations of given numbers ----
_LONGEST_EQUATION = 500  # characters

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def equation_match(
    completions: Sequence[Any],
    answer: Sequence[Any],
    nums: Sequence[Any] | None = None,
    *,
    tag: str | None = "answer",
    after: str | None = None,
) -> list[float | None]:
    """1 where the completion's expression of +, -, *, / and parentheses has the value `answer`, exactly, and uses each
    of the row's whole numbers `nums` once and no other (without `nums`, any); else 0. None for a row without an answer.

    The expression may end with "= answer". `tag` and `after` (see `rewards.text.answer_part`) choose where to look.
    Raises ValueError for an answer that is not a number.
    """
    scores: list[float | None] = []
    for i, (completion, expected) in enumerate(zip(completions, answer, strict=True)):
        gold = gold_text(expected)
        if gold is None:
            scores.append(None)
            continue
        text = (answer_part(text_of(completion), tag=tag, after=after) or "").replace("×", "*").replace("÷", "/")
        text = plain_minus(text)
        left, equals, right = text.strip().partition("=")
        used: list[int] = []
        value = _equation_value(left, used) if not equals or right.strip() == gold.strip() else None
        given = used if nums is None else [int(each) for each in nums[i]]
        scores.append(float(value == Fraction(gold.strip()) and sorted(used) == sorted(given)))
    return scores


def _equation_value(text: str, used: list[int]) -> Fraction | None:
    """Return the value of an expression, whose numbers are added to `used`; None for what is none."""
    if len(text) > _LONGEST_EQUATION or not re.fullmatch(r"[0-9+\-*/()\s]+", text):
        return None
    try:
        return _value_of(ast.parse(text.strip(), mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _value_of(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value_of(node.left, used), _value_of(node.right, used))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value_of(node.operand, used)
    raise ValueError(f"{type(node).__name__} is no part of an equation")


# ---- expressions ----
def math_match(
    completions: Sequence[Any],
    answer: Sequence[Any],
    *,
    require_box: bool = True,
    tag: str | None = None,
    after: str | None = None,
) -> list[float | None]:
    r"""1 where the answer in the last \boxed{} is mathematically equal to the expected one, else 0.

    Without `require_box`, a completion that has no box is searched for its answer. `tag` and `after` choose where to
    look. The expected answer is LaTeX, plain or boxed, or ends with "#### answer". An answer is wrong if it is longer
    than 2000 characters or is built to take for ever (towers of powers).

    An answer that takes more than 5 s of CPU time is neither right nor wrong: its score is nan, a failure. This limit
    works in the main thread; in other threads the caller's deadline is the only limit.
    Raises ValueError for an expected answer that math-verify cannot read.
    """
    scores: list[float | None] = []
    golds: dict[str, Any] = {}
    for completion, expected in zip(completions, answer, strict=True):
        gold = gold_text(expected)
        if gold is None:
            scores.append(None)
            continue
        gold = gold.rpartition("####")[2].strip()
        if gold not in golds:
            golds[gold] = _parse_gold(gold)
        said = _said(answer_part(text_of(completion), tag=tag, after=after) or "", gold, require_box)
        scores.append(0.0 if said is None else _agreement(golds[gold], said))
    return scores


def _parse_gold(gold: str) -> Any:
    inside = boxed(gold)
    wrapped = rf"\boxed{{{gold.strip('$') if inside is None else inside}}}"
    parsed = _math_verify().parse(wrapped, fallback_mode="no_fallback", parsing_timeout=0)
    if not parsed:
        raise ValueError(f"math-verify cannot read the answer {gold!r}")
    return parsed


def _said(text: str, gold: str, require_box: bool) -> str | None:
    """Return what math-verify is to read of a completion; None where it is wrong without being read."""
    inside = boxed(text)
    if inside is None and require_box:
        return None
    said = text[-_LONGEST_ANSWER:] if inside is None else rf"\boxed{{{inside}}}"
    too_long = len(said) > _LONGEST_ANSWER + len(r"\boxed{}")
    return None if too_long or (_HOSTILE.search(said) and not _HOSTILE.search(gold)) else said


def _agreement(gold: Any, said: str) -> float:
    verifier = _math_verify()
    try:
        with _deadline(_TIME_LIMIT_S):
            return float(verifier.verify(gold, verifier.parse(said, parsing_timeout=0), timeout_seconds=0))
    except _TooLate:
        return math.nan


def _math_verify() -> Any:
    """Return the package, without its own time limit: that takes SIGALRM without asking, and fails outside the main
    thread."""
    import math_verify  # sympy takes a third of a second to import
    from math_verify import grader, parser

    grader.TIMEOUT_WARNING_SHOWN = parser.TIMEOUT_WARNING_SHOWN = True  # we know
    return math_verify


class _TooLate(BaseException):
    """Raised when the time is up; a BaseException, since sympy and math-verify catch every Exception."""


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise _TooLate inside the block after `seconds` of this thread's CPU time, if that is possible: in the main
    thread, while no other code uses the process's timer of CPU time."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not (in_main_thread and hasattr(signal, "setitimer")) or any(signal.getitimer(signal.ITIMER_VIRTUAL)):
        yield
        return
    end = time.thread_time() + seconds

    def ring(number: int, frame: Any) -> None:
        left = end - time.thread_time()  # the timer counts other threads' work too
        signal.setitimer(signal.ITIMER_VIRTUAL, left if left > 0 else 0.1)  # a destructor would swallow the exception
        if left <= 0:
            raise _TooLate

    before = signal.signal(signal.SIGVTALRM, ring)
    try:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:  # also if it rang in between
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before or signal.SIG_DFL)
