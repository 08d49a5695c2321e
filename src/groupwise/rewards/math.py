r"""Ready rewards on mathematical answers. Options are the keyword-only arguments; set them with `args`.

    number_match    the last number of the completion, with its unit, equals the `answer` column's
    math_match      the last \boxed{} answer is equivalent to the `answer` column, judged by math-verify
                    (https://github.com/huggingface/Math-Verify): fractions, roots, sets, intervals, expressions

    equation_match  the expression has the value of the `answer` column, and uses each of the numbers in `nums` once

All score 1 for right and 0 for wrong, and None for a row without an answer. An expected answer that is no number, or
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
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from groupwise.rewards.base import text_of
from groupwise.rewards.text import answer_part, gold_text, tagged

# ----------------------------------------------------------------------------------------------------------------------
# Numbers as people and models write them, read exactly: the last one of a text, with its unit where it has one.
#
#     -3   1,234.5   .5   2e-3   3.2 x 10^8   3/4   1 1/2   \frac{3}{4}   1{,}234   5 million
#     $42   42%   5 km   90 km/h   3 m^2   5 ft 11 in   1 hour and 30 minutes
#
# Digits are ASCII digits. What is not clearly one number is not guessed at: a power (7^2), a date, a denominator of 0,
# an exponent of more than three digits, more than 100 characters. Units are few and everyday ones, in the tables below;
# any other word behind a number is no unit. Reading takes time linear in the text.
# ----------------------------------------------------------------------------------------------------------------------

_LONGEST_NUMBER = 100  # characters
_NEAR = 500  # characters in which a quantity has its place
_DIGITS = "0123456789¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_SUPERSCRIPT = "[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]"

_NUMBER = re.compile(
    rf"""
    (?<![\w.^])(?<!\^[-+{{(])(?<!\^[{{(][-+])                      # not an exponent, not the minus sign in 10-3
    (?P<sign>[+-]?)(?P<money>[$€£¥]?)(?P<minus>-?)
    (?:(?P<whole>[0-9]++)\ (?=[0-9]++/[0-9]))?                      # the 1 of 1 1/2
    (?P<digits>
        (?:[0-9]{{1,3}}(?:,[0-9]{{3}})++(?P<torn>[0-9]*+)|[0-9]++)?   # 1,234 or 1234, or
        (?:(?<=[0-9])|(?=\.[0-9]))(?:\.[0-9]++)?                    # .5
    )
    (?:[eE](?P<exponent>[+-]?[0-9]++))?
    (?:\s?(?:[x×*·]|\\times|\\cdot)\s?10(?:\s?\^\s?[{{(]?(?P<ten>[+-]?[0-9]++)[)}}]?|(?P<tens>{_SUPERSCRIPT}++)))?
    (?:\s?/\s?(?P<denominator>[0-9]++(?:\.[0-9]++)?)(?P<chain>\s?/\s?[0-9])?)?  # 3/4, but not 1/2/2025
    (?P<power>\s?\^\s?[{{(]?\s?[+-]?\w|\*\*[({{]?[+-]?[0-9]|{_SUPERSCRIPT})?
    """,
    re.VERBOSE,
)
_MULTIPLES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_MULTIPLE = re.compile(rf"[\s-]?({'|'.join(_MULTIPLES)})s?\b", re.IGNORECASE)
_MINUS = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe58\ufe63\uff0d"), "-")
_PARTNER = re.compile(r"[0-9]\s?:\s?\Z")  # of the 2 in 7:2
_PAIR = re.compile(r"[(\[]\s*[-+]?[0-9.]+\s*[,;]\s*[-+]?[0-9.]+\s*[)\]]\Z")
_BETWEEN = re.compile(r"(?:\s|,|and)*")  # the parts of 1 hour and 30 minutes

# ---- units ----

Dimension = tuple[tuple[str, int], ...]  # (("length", 1), ("time", -1)); () is a mere number, as a percentage is

_UNITS: dict[str, tuple[str, int, Fraction]] = {}  # name -> dimension, its power, factor


def _define(dimension: str, factors: dict[str, str | int], *, power: int = 1) -> None:
    for names, factor in factors.items():
        _UNITS.update({name: (dimension, power, Fraction(factor)) for name in names.split()})


_define(
    "length",
    {
        "m meter meters metre metres": 1,
        "km kilometer kilometers kilometre kilometres": 1000,
        "cm centimeter centimeters centimetre centimetres": "1/100",
        "mm millimeter millimeters millimetre millimetres": "1/1000",
        "µm um micrometer micrometers": "1e-6",
        "nm nanometer nanometers": "1e-9",
        "mi mile miles": "1609.344",
        "yd yard yards": "0.9144",
        "ft foot feet": "0.3048",
        "in inch inches": "0.0254",
    },
)
_define("length", {"l L liter liters litre litres": "1e-3", "ml mL milliliter milliliters": "1e-6"}, power=3)
_define(
    "time",
    {
        "s sec secs second seconds": 1,
        "ms millisecond milliseconds": "1/1000",
        "min mins minute minutes": 60,
        "h hr hrs hour hours": 3600,
        "day days": 86400,
        "week weeks": 604800,
    },
)
_define("month", {"month months": 1, "year years yr yrs": 12})
_define(
    "mass",
    {
        "g gram grams": 1,
        "kg kilogram kilograms kilo kilos": 1000,
        "mg milligram milligrams": "1/1000",
        "t tonne tonnes": 10**6,
        "lb lbs pound pounds": "453.59237",
        "oz ounce ounces": "28.349523125",
    },
)
_define("dollar", {"$ usd dollar dollars": 1, "¢ cent cents": "1/100"})
_define("euro", {"€ eur euro euros": 1})
_define("sterling", {"£ gbp": 1})
_define("yen", {"¥ jpy yen": 1})
_define("", {"% percent pct": "1/100"})
_define("angle", {"° deg degree degrees": 1})
_define("celsius", {"°C": 1})
_define("fahrenheit", {"°F": 1})
_define("energy", {"J joule joules": 1, "kJ": 1000, "Wh": 3600, "kWh": 3600000})
_define("energy rate", {"W watt watts": 1, "kW": 1000})
_define("force", {"N newton newtons": 1})
_define("pressure", {"Pa": 1, "kPa": 1000})
_define("voltage", {"V volt volts": 1})
_define("frequency", {"Hz": 1, "kHz": 1000, "MHz": 10**6, "GHz": 10**9})

_NAMED = r"(?:(square|sq\.?|cubic)\s)?(°[CF]?|[A-Za-zµΩ]+|[%€£¥¢])(\^?\{?[23]\}?(?![0-9])|[²³])?"
_FIRST_UNIT = re.compile(rf"\s{{0,2}}\$?[\s-]?{_NAMED}")
_NEXT_UNIT = re.compile(rf"\s?(?:/|per\s)\s?{_NAMED}")
_POWERS = {"square": 2, "sq": 2, "sq.": 2, "cubic": 3}


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A number as it is written, and its unit: `value` of it are `value * factor` in the dimension's base unit.

    `dimension` is None where no known unit was named. 42% has the value 42, the factor 1/100 and the dimension ().
    """

    value: Fraction
    factor: Fraction = Fraction(1)
    dimension: Dimension | None = None

    @property
    def amount(self) -> Fraction:
        return self.value * self.factor


def last_quantity(text: str) -> Quantity | None:
    """The last number of a text and its unit; None where there is none, or where it cannot be read with certainty.

    Parts that follow each other in falling units are one quantity, in the unit of the last.

    The sign is part of a number however it is written: a hyphen, a minus or an en dash, before the number or before the
    bracket around it. The last number of a ratio, a time of day or a pair is not one number.

    >>> str(last_quantity("so it costs $1,250.50.").value), str(last_quantity("1 h 30 min").value)
    ('2501/2', '90')
    >>> str(last_quantity("x = \u2013(5)").value), last_quantity("at odds of 7:2")
    ('-5', None)
    """
    return _last_quantity(text)[0]


def only_quantity(text: str) -> Quantity | None:
    """The number of a text that holds one number, with its unit, and no more; None where it holds none or several, or
    where the number is a term of an expression.

    >>> str(only_quantity("$1,250.50 in all").value), only_quantity("3 or 5"), only_quantity("x + 2")
    ('2501/2', None, None)
    """
    found, before, behind = _last_quantity(text)
    several = any(each in _DIGITS for each in before + behind)
    term = re.search(r"[-+*/^×·=][ \t]*$", before.replace("= ", "")) or re.match(r"\s*[-+*/^×·=][ \t]*\w", behind)
    return None if several or term else found


def _last_quantity(text: str) -> tuple[Quantity | None, str, str]:
    """The last quantity of a text, and what stands before and behind it near by."""
    end = max(map(text.rfind, _DIGITS))
    for start in (max(0, end - _NEAR), 0):  # near the last digit, mostly; it may also be the 2 of H2O
        plain = _plain(text[start : end + _NEAR], begins=not start)
        if found := [match for match in _NUMBER.finditer(plain) if match["digits"]]:
            break
    else:
        return None, "", ""
    last, stop = _read(plain, found[-1])
    first = found[-1].start()
    if _PARTNER.search(plain, max(0, first - _NEAR), first) or _PAIR.search(plain[max(0, first - _NEAR) : stop + 1]):
        last = None
    if last is None or not last.dimension:
        return last, text[: max(0, start)] + plain[:first], plain[stop:]
    total, before = last, last
    for match, following in zip(reversed(found[:-1]), reversed(found), strict=False):
        part, end = _read(plain, match)
        gap = _BETWEEN.match(plain, end, following.start())
        if part is None or part.dimension != before.dimension or gap is None or gap.end() != following.start():
            break
        if part.factor <= before.factor or following["sign"] or following["minus"]:
            break
        first = match.start()
        amount = abs(part.amount) + total.amount
        total = Quantity(
            value=(-amount if part.value < 0 else amount) / last.factor, factor=last.factor, dimension=last.dimension
        )
        before = part
    return total, text[: max(0, start)] + plain[:first], plain[stop:]


def plain_minus(text: str) -> str:
    """The text with a hyphen for every dash that is written as a minus sign, the em dash left alone."""
    return text.translate(_MINUS)


def _plain(text: str, *, begins: bool) -> str:
    """Without the LaTeX and the typography that only changes how a number looks; `begins` where nothing stands before
    it."""
    text = plain_minus(text).replace("\u03bc", "µ")
    if "\\" in text or "{,}" in text:
        text = re.sub(r"(?<=[0-9])(?:\{,\}|\\[,!])(?=[0-9]{3})", ",", text)
        text = re.sub(r"\\([$%])", r"\1", text)
        text = re.sub(r"\\(?:text|mathrm|textrm|mbox)\s?\{([^{}]{0,100})\}", r" \1", text)
        text = re.sub(
            r"([0-9])?\\[dtc]?frac\s?(?:\{(-?[0-9.]{1,50})\}\{([0-9.]{1,50})\}|([0-9])([0-9]))", _fraction, text
        )
        text = re.sub(r"\\[ ,;:!]|\\q?quad(?![a-zA-Z])", " ", text).replace("^\\circ", "°").replace("^{\\circ}", "°")
    if not text.isascii():
        text = re.sub(r"(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3})", ",", text)
        text = re.sub("[¼-¾⅐-⅞]", lambda m: " " + unicodedata.normalize("NFKC", m[0]).replace("\u2044", "/"), text)
    if "-" in text:  # a sign may stand apart, behind an operator or an opening bracket, or before a bracket of its own
        text = re.sub(
            r"(?<![\w)\]}.])-[ \t]*(?:\\left)?[({\[$][ \t]*([0-9][0-9.,/]{0,50})[ \t]*(?:\\right)?[)}\]$]", r"-\1", text
        )
        text = re.sub(r"(?<=[=(\[{<>≈~:,+*/×·$])([ \t]*)-[ \t]+(?=[$€£¥]?\.?[0-9])", r"\1-", text)
        text = re.sub(r"\A\s*-[ \t]+(?=[$€£¥]?\.?[0-9])", "-", text) if begins else text
    return re.sub(r"(?<=[0-9])_(?=[0-9]{3})", ",", text)


def _fraction(match: re.Match[str]) -> str:
    numerator, denominator = match[2] or match[4], match[3] or match[5]
    return f"{match[1]} {numerator}/{denominator}" if match[1] else f"{numerator}/{denominator}"


def _read(text: str, match: re.Match[str]) -> tuple[Quantity | None, int]:
    """The quantity that a match begins, and where it ends."""
    value = _value(match)
    end = match.end()
    if value is None:
        return None, end
    if multiple := _MULTIPLE.match(text, end):
        value, end = value * _MULTIPLES[multiple[1].lower()], multiple.end()
    money = match["money"]
    if money and not (money == "$" and text[end : end + 2].lstrip().startswith("$")):  # $42$ is LaTeX
        dimension, _, factor = _UNITS[money]
        return Quantity(value=value, factor=factor, dimension=((dimension, 1),)), end
    return _with_unit(value, text, end)


def _value(match: re.Match[str]) -> Fraction | None:
    digits, exponent = match["digits"], match["exponent"] or match["ten"] or (match["tens"] or "")
    exponent = exponent.translate(_SUPERSCRIPTS)
    twice = match["exponent"] and (match["ten"] or match["tens"])
    too_long = len(match[0]) > _LONGEST_NUMBER or len(exponent.lstrip("+-")) > 3
    if match["power"] or match["torn"] or match["chain"] or twice or too_long:
        return None
    value = Fraction(digits.replace(",", ""))
    if exponent:
        value *= Fraction(10) ** int(exponent)
    if match["denominator"]:
        denominator = Fraction(match["denominator"])
        if not denominator:
            return None
        value /= denominator
        if match["whole"] and value < 1:
            value += int(match["whole"])
    return -value if "-" in match["sign"] + match["minus"] else value


def _with_unit(value: Fraction, text: str, end: int) -> tuple[Quantity, int]:
    found = _FIRST_UNIT.match(text, end)
    first = found and _unit(found, 1, text)
    if not found or not first:
        return Quantity(value=value), end
    powers, factor, end = {first[0]: first[1]}, first[2], found.end()
    while (found := _NEXT_UNIT.match(text, end)) and (further := _unit(found, -1, text)):
        powers[further[0]] = powers.get(further[0], 0) + further[1]
        factor, end = factor * further[2], found.end()
    dimension = tuple(sorted((name, power) for name, power in powers.items() if name and power))
    return Quantity(value=value, factor=factor, dimension=dimension), end


def _unit(match: re.Match[str], sign: int, text: str) -> tuple[str, int, Fraction] | None:
    """Dimension, power and factor of one named unit; None if it is none."""
    word, name, raised = match.groups()
    known = _UNITS.get(name) or (_UNITS.get(name.casefold()) if len(name) > 1 else None)
    if known is None or (name == "in" and re.match(r"\s+\w", text[match.end() : match.end() + 20])):
        return None  # "5 in the morning"
    raised = (raised or "").translate(_SUPERSCRIPTS).strip("^{}")
    power = sign * (_POWERS[word] if word else int(raised or 1))
    return known[0], known[1] * power, known[2] ** power


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
    r"""What stands in the last \boxed{...}, braces matched; None without one.

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
    r"""The answer that a completion ends with, as maj@k counts it; None where nothing is said.

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
    """The last number of `final_answer`, with its unit: 1,000 and 1000.0 are one answer. None where there is none.

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
    """Pairs of numbers of which one must agree."""
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
    Raises ValueError for an answer that is no number.
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
    """The value of an expression, whose numbers are added to `used`; None for what is none."""
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

    One that takes more than 5 s of CPU time is neither: its score is nan, a failure. This limit works in the main
    thread; elsewhere the deadline of whoever calls this function is the only one.
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
    """What math-verify is to read of a completion; None where it is wrong without being read."""
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
    """The package, without its own time limit: that takes SIGALRM without asking, and fails outside the main thread."""
    import math_verify  # sympy takes a third of a second to import
    from math_verify import grader, parser

    grader.TIMEOUT_WARNING_SHOWN = parser.TIMEOUT_WARNING_SHOWN = True  # we know
    return math_verify


class _TooLate(BaseException):
    """Not an Exception: sympy and math-verify catch those."""


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise _TooLate inside the block after `seconds` of this thread's CPU time, where that is possible: in the main
    thread, while nobody else uses the process's timer of CPU time."""
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
