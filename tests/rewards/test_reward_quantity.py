import doctest
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.rewards import quantity
from groupwise.rewards.math import number_match
from groupwise.rewards.quantity import last_quantity, only_quantity
from wording import raises


def number(text: str) -> Fraction | None:
    found = last_quantity(text)
    return None if found is None else found.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("it costs $1,250.50.", "1250.5"),
        ("x = -3/4.", "-3/4"),
        ("\u22125", "-5"),
        ("+5", "5"),
        ("-$5 or $-5", "-5"),
        ("10-3=7", "7"),
        ("10-3", "3"),
        (".5 or -.25", "-0.25"),
        ("2e-3", "0.002"),
        ("3 × 10^8", "300000000"),
        (r"3 \times 10^{-2}", "0.03"),
        ("3x10⁸", "300000000"),
        ("1 1/2", "3/2"),
        ("2 3/2", "3/2"),  # no mixed number
        ("-1 1/2", "-3/2"),
        (r"\frac{1}{2}", "1/2"),
        (r"2\dfrac12", "5/2"),
        (r"\frac{-3}{4}", "-3/4"),
        ("1½", "3/2"),
        ("42%", "42"),
        ("7.", "7"),
        ("1, 2, 3", "3"),
        (r"1{,}234", "1234"),
        (r"1\,234", "1234"),
        ("1\u202f234", "1234"),
        ("1_234", "1234"),
        ("1 234", "234"),  # as likely two numbers
        ("5 million", "5000000"),
        ("**42**", "42"),
        ("5 m^2", "5"),
        ("x^2 = 16", "16"),
        ("16 = x^2", "16"),
        ("42 " + "water is H2O, " * 100, "42"),
        ("42 " + "water " * 1000, "42"),
        ("7 " * 1000 + "½", "1/2"),
        ("16 = x^{-2}", "16"),
    ],
)
def test_numbers(text, value):
    assert number(text) == Fraction(value)


DASHES = ["-", "\u2010", "\u2011", "\u2012", "\u2013", "\u2212", "\ufe63", "\uff0d"]


@pytest.mark.parametrize("dash", DASHES)
@pytest.mark.parametrize(
    "text",
    [
        "The answer is ~5.",
        "x = ~ 5",
        "x = ~(5)",
        "x=~\\left( 5 \\right)",
        "= ~ 5",
        r"\boxed{~5}",
        r"x = ~\,5",
        "~ 5",
        "(~ 5)",
    ],
)
def test_a_minus_sign_however_it_is_written(text: str, dash: str):
    assert number(text.replace("~", dash)) == -5


@pytest.mark.parametrize("dash", DASHES)
@pytest.mark.parametrize(
    "text", ["3~5", "3 ~ 5", "from 3 ~ 5", "we have\n~ 3 pears\n~ 5 plums", "x ~ 5", "10~(5)", "Tom ~ 5"]
)
def test_a_dash_that_is_no_sign(text: str, dash: str):
    assert number(text.replace("~", dash)) == 5


@pytest.mark.parametrize("text", ["7:2", "at 11:30", "odds of 7 : 2", "(7, 2)", "so x, y are (7,2)", "[-1; 2]"])
def test_a_number_of_several_is_not_one(text: str):
    assert last_quantity(text) is None


@pytest.mark.parametrize("text", ["Question 7: 42", "Step 1: 42.", "Problem 12: $42", "for day 3: 42 apples", "7: 42"])
def test_the_number_of_a_label_makes_no_ratio_of_the_one_behind_it(text: str):
    assert number(text) == 42 and only_quantity(text) is None
    assert number_match([text], ["42"]) == [1.0]


@pytest.mark.parametrize(
    ("text", "value"),
    [("5", 5), ("$1,250 in all", 1250), ("- 5", -5), ("1 h 30 min", 90), ("x = 5", 5), ("1 1/2", Fraction(3, 2))],
)
def test_the_only_number_of_a_text(text: str, value: int):
    found = only_quantity(text)
    assert found is not None and found.value == value


@pytest.mark.parametrize(
    "text",
    ["3:2", "(1, 2)", "12:30", "3 or 5", "x + 2", "x - 2", "2 + x", "2024-02-05", "2 apples and 3 pears", "none"],
)
def test_a_text_that_holds_no_one_number(text: str):
    assert only_quantity(text) is None


@pytest.mark.parametrize("gold", ["3:2", "(1, 2)", "12:30", "3 or 5", "x + 2", "2024-02-05"])
def test_an_expected_answer_of_several_numbers_is_an_error(gold: str):
    with raises(ValueError):
        number_match([gold], [gold])


def test_the_expected_number_of_a_solution():
    """As GSM8K and MATH have them."""
    golds = ["48 / 2 = 24 and 24 + 48 = 72\n#### 72", r"so 3 + 4 = \boxed{7}", "1 + 1 <answer>2</answer>"]
    assert number_match(["72", "7", "2"], golds) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "text",
    [
        "none",
        "",
        "1/0",
        "9" * 101,
        "1e999999999",
        "2e3 x 10^3",
        "7^2",
        "7²",
        "2**10",
        "1/2/2025",
        "1,2345",
        "v1.2.3",
        "٤٢",
        "４２",
        "٤2",
        "nan",
        "inf",
    ],
)
def test_what_is_not_clearly_one_number_is_none(text):
    assert number(text) is None


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("1e3 m", "1 km"),
        ("5 ft 11 in", "71 inches"),
        ("1 hour and 30 minutes", "90 min"),
        ("-1 h 30 min", "-90 min"),
        ("90 km/h", "25 m/s"),
        ("90 kilometers per hour", "25 m/s"),
        ("2 m²", "20000 cm^2"),
        ("2 square meters", "2 m2"),
        ("1 cubic meter", "1000 litres"),
        (r"5\,\text{km}", "5 km"),
        ("$5$ km", "5 km"),
        ("$5 and 20 cents", "520 cents"),
        ("€3 million", "3000000 EUR"),
        (r"42\%", "42 percent"),
    ],
)
def test_units(text, same):
    one, other = last_quantity(text), last_quantity(same)
    assert one is not None and other is not None
    assert one.dimension == other.dimension is not None
    assert one.amount == other.amount


def test_a_percentage_is_a_number():
    found = last_quantity("42%")
    assert found is not None and (found.value, found.amount, found.dimension) == (42, Fraction(42, 100), ())


@pytest.mark.parametrize("text", ["42 apples", "5 in the morning", "$42$", "4 A4 pages", "42"])
def test_other_words_are_no_unit(text):
    found = last_quantity(text)
    assert found is not None and found.dimension is None


def test_quantities_that_do_not_fall_are_not_one():
    assert number("4 m 5 s") == 5
    assert number("30 min 1 h") == 1
    assert number("1 h -30 min") == -30
    assert number("1 h or 30 min") == 30


@settings(max_examples=60)
@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9))
def test_written_numbers_are_read_back(value):
    assert number(f"the result is {value}") == Fraction(str(value))
    assert number(f"the result is {value:,}.") == Fraction(str(value))


@settings(max_examples=60)
@given(st.fractions(max_denominator=999).filter(lambda value: abs(value) < 10**6))
def test_written_fractions_are_read_back(value):
    assert number(f"= {value.numerator}/{value.denominator} kg.") == value
    whole, rest = divmod(abs(value), 1)
    if rest:
        assert number(f"{whole} {rest}") == abs(value)


@settings(max_examples=300)
@given(st.text("0123456789.,-/eE+ ahkm$%^*{}\\²½", max_size=30))
def test_any_text_has_a_number_or_none(text):
    found = last_quantity(text)
    assert found is None or isinstance(found.value, Fraction)


@pytest.mark.parametrize(
    "text",
    [
        "1,111," * 30_000 + "1111",
        "1/" + "9" * 200_000 + "/",
        "1" * 200_000,
        "1 1/" * 40_000,
        "1 h " * 40_000,
        "-" * 200_000,
        "1^" * 60_000,
        "1 x 10" * 30_000,
        "\\frac{1}{" * 20_000,
        "\\text{" * 30_000,
        " " * 100_000 + "1" + " " * 100_000,
    ],
    ids=lambda text: text[:6],
)
def test_long_texts_take_linear_time(text):
    start = time.process_time()
    last_quantity(text)
    last_quantity(text + "." * 600 + " H2O")  # whose digit is no number: all of it is read
    assert time.process_time() - start < 3  # quadratic: minutes


def test_the_examples_in_the_docstrings():
    assert doctest.testmod(quantity).failed == 0 < doctest.testmod(quantity).attempted
