r"""Numbers as people and models write them, read exactly: the last one of a text, with its unit where it has one.

    -3   1,234.5   .5   2e-3   3.2 x 10^8   3/4   1 1/2   \frac{3}{4}   1{,}234   5 million
    $42   42%   5 km   90 km/h   3 m^2   5 ft 11 in   1 hour and 30 minutes

Digits are ASCII digits. What is not clearly one number is not guessed at: a power (7^2), a date, a denominator of 0,
an exponent of more than three digits, more than 100 characters. Units are few and everyday ones, in the tables below;
any other word after a number is not a unit. Reading takes time linear in the text.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

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

_PARTNER = re.compile(r"[0-9](?::|\s:\s?)\Z")  # of the 2 in 7:2 and 7 : 2, but not of the 42 in Question 7: 42

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
    """Return the last number of a text and its unit; None where there is none, or where it cannot be read with
    certainty.

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
    """Return the number of a text that holds one number, with its unit, and no more; None where it holds none or
    several, or where the number is a term of an expression.

    >>> str(only_quantity("$1,250.50 in all").value), only_quantity("3 or 5"), only_quantity("x + 2")
    ('2501/2', None, None)
    """
    found, before, behind = _last_quantity(text)
    several = any(each in _DIGITS for each in before + behind)
    term = re.search(r"[-+*/^×·=][ \t]*$", before.replace("= ", "")) or re.match(r"\s*[-+*/^×·=][ \t]*\w", behind)
    return None if several or term else found


def _last_quantity(text: str) -> tuple[Quantity | None, str, str]:
    """Return the last quantity of a text, and what stands before and behind it near by."""
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
    """Return the text with a hyphen for every dash that is written as a minus sign, the em dash left alone."""
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
    if "-" in text:  # a sign may stand apart, behind an operator or an opening bracket, or before its own bracket
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
    """Return the quantity that a match begins, and where it ends."""
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
    """Return dimension, power and factor of a named unit; None if it is not a unit."""
    word, name, raised = match.groups()
    known = _UNITS.get(name) or (_UNITS.get(name.casefold()) if len(name) > 1 else None)
    if known is None or (name == "in" and re.match(r"\s+\w", text[match.end() : match.end() + 20])):
        return None  # "5 in the morning"
    raised = (raised or "").translate(_SUPERSCRIPTS).strip("^{}")
    power = sign * (_POWERS[word] if word else int(raised or 1))
    return known[0], known[1] * power, known[2] ** power
